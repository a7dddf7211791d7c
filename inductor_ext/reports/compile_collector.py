"""Collects the facts about a compile while it runs: decisions, plans, phases, kernels, caches.

`observe` listens to the compiles of this process, with all caches of compiled code off, so that
every graph goes through all decisions again. Existing tuning results are used. The phases are those
of the thread that enters it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import platform
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from inductor_ext import events
from inductor_ext.hooks.records import CompileRecord
from inductor_ext.lowerings.records import AttentionRecord
from inductor_ext.memory.planner import peak_report
from inductor_ext.memory.records import MemoryPlanRecord
from inductor_ext.reports import kernel_times
from inductor_ext.reports.compile_facts import CompileFacts, Phase
from inductor_ext.reports.compile_phases import FIRST_CALL, sample_phases
from inductor_ext.reports.gemm_report import GemmReport, KernelFusion, compile_separately, listen
from inductor_ext.reports.text import qualified_name
from inductor_ext.templates.records import TuningRecord


@contextlib.contextmanager
def observe() -> Iterator[Callable[[str], CompileFacts]]:
    """Yield a function from a title to the facts about what has been compiled in the context.

    Call it after the context has ended: the phases are complete only then.
    """
    other_kernels: list[KernelFusion] = []
    with (
        listen(other_kernels) as compiled_gemms,
        events.capture(CompileRecord) as graphs,
        events.capture(MemoryPlanRecord) as plans,
        events.capture(AttentionRecord) as attention,
        events.capture(TuningRecord) as tuned,
        sample_phases(only_compiles=True) as seconds,
    ):

        def collect(title: str) -> CompileFacts:
            phases = [Phase(name, time) for name, time in seconds.items() if name != FIRST_CALL]
            return CompileFacts(
                title=title,
                environment=(),
                gemms=GemmReport(title, compiled_gemms(), tuple(attention)),
                other_kernels=tuple(other_kernels),
                plans=tuple(plans),
                graphs=tuple(graphs),
                phases=tuple(sorted(phases, key=lambda phase: -phase.seconds)),
                tuned=len(tuned),
            )

        yield collect


def describe_environment(
    facts: CompileFacts, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> tuple[tuple[str, str], ...]:
    """Return the versions, devices and settings under which the facts were collected."""
    import torch

    from inductor_ext import __version__

    pairs = [
        ("device", ", ".join(_name_devices(facts)) or "none"),
        ("torch", str(torch.__version__)),
        ("inductor_ext", __version__),
        ("Python", platform.python_version()),
    ]
    if mode is not None:
        pairs.append(("mode", mode))
    if options:
        pairs.append(("options", ", ".join(f"{key}={value!r}" for key, value in options.items())))
    settings = facts.graphs[0].settings if facts.graphs else {}
    if settings:
        changed = ", ".join(f"{key}={value!r}" for key, value in settings.items())
        pairs.append(("settings", changed))
    return tuple(pairs)


def _name_devices(facts: CompileFacts) -> list[str]:
    import torch

    kinds = {device for plan in facts.plans for device in peak_report.devices(plan)}
    names = []
    for kind in sorted(kinds):
        if kind.startswith("cuda") and torch.cuda.is_available():
            names.append(f"{torch.cuda.get_device_name(kind)} ({kind})")
        elif kind == "cpu":
            names.append(f"CPU ({torch.backends.cpu.get_cpu_capability()})")
        else:
            names.append(kind)
    return names


def collect_facts(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    mode: str | None,
    options: Mapping[str, Any] | None,
    dynamic: bool | None,
    recompile: bool,
) -> CompileFacts:
    """Compile a function, call it several times, and return the facts. See `compile_report`."""
    from torch._inductor import config as inductor_config

    target, compiled = compile_separately(fn, mode, options, dynamic)

    def call() -> None:
        compiled(*args, **kwargs)

    # So that the profiler sees every C++ kernel. It changes the generated code.
    with inductor_config.patch({"cpp.enable_kernel_profile": True}), observe() as collect:
        call()
    facts = collect(qualified_name(target))
    call()
    facts = dataclasses.replace(
        facts,
        environment=describe_environment(facts, mode, options),
        kernels=kernel_times.profile_kernels(call),
    )
    if not recompile:
        return facts
    _, compiled = compile_separately(fn, mode, options, dynamic)
    with events.capture(CompileRecord) as graphs:
        call()
    call()
    microseconds = kernel_times.time_call(call)
    return dataclasses.replace(facts, recompiled=tuple(graphs), call_microseconds=microseconds)
