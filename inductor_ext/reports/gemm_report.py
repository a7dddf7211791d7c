"""`inductor_ext.explain`: the kernel of every GEMM of a model, and why, and calls of attention.

Compiles and calls a function once, with all caches of compiled code disabled, so
that every graph goes through all decisions again. Existing tuning results are used. For every GEMM
the report shows the selected kernel, its time next to Inductor's and the roofline, the operators
fused into the kernel, and the operators not fused, with the reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from inductor_ext import _compat, events
from inductor_ext.lowerings import node_info
from inductor_ext.lowerings.graph.explain_records import operator_names
from inductor_ext.lowerings.records import AttentionRecord
from inductor_ext.reports.text import align_columns, qualified_name
from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.format import config_words, problem_words
from inductor_ext.templates.records import MatmulRecord


@dataclasses.dataclass(frozen=True)
class Gemm:
    """One GEMM of a model, or several GEMMs that differ only in the module that calls them."""

    record: MatmulRecord
    """The record of the first of them."""
    modules: tuple[str, ...]
    """The module path of every GEMM; an empty string where it is not known."""
    fused: tuple[str, ...] = ()
    """Operators fused into the kernel, beyond those that are part of the problem description."""
    separate: tuple[str, ...] = ()
    """Operators that use the result in a separate kernel, with the reason."""

    @property
    def ours(self) -> bool:
        """Whether the selected kernel is an extension kernel."""
        return self.record.chosen is not None

    @property
    def share(self) -> float | None:
        """Roofline time divided by kernel time: 1.0 is optimal. None if not measured."""
        time, bound = self.record.microseconds, self.record.roofline
        return bound / time if time and bound is not None else None

    @property
    def label(self) -> str:
        """The operation, the sizes and the dtypes."""
        record = self.record
        if record.problem is None:
            return f"{record.operator} {' x '.join(record.operands[:2])}"
        return problem_words(record.problem)


@dataclasses.dataclass(frozen=True)
class KernelFusion:
    """A kernel without a GEMM that computes several operators, or that could have."""

    operators: tuple[str, ...]
    separate: tuple[str, ...]
    """Operators that use the result in a separate kernel, with the reason."""


@dataclasses.dataclass(frozen=True)
class GemmReport:
    """The GEMMs of a model. `str()` is the table."""

    title: str
    gemms: tuple[Gemm, ...]
    """In the order in which they were compiled; identical GEMMs are merged."""
    attention: tuple[AttentionRecord, ...] = ()
    """Calls of attention that get a kernel of the extension, or other operands."""

    @property
    def count(self) -> int:
        """The number of GEMMs, counting merged ones separately."""
        return sum(len(gemm.modules) for gemm in self.gemms)

    def table(self, *, candidates: bool = False) -> str:
        """Format the report as text.

        Args:
            candidates: whether to list the candidates that were measured for every GEMM.
        """
        num_ours = sum(len(gemm.modules) for gemm in self.gemms if gemm.ours)
        lines = [
            f"GEMMs of {self.title}: {self.count}, of which {num_ours} use an extension kernel"
        ]
        if not self.gemms:
            return "\n".join([*lines, *_format_attention(self.attention)])
        if not num_ours:
            lines.append("Their times differ from those with Inductor (default) by noise only.")
        rows: list[Sequence[str]] = [
            ("", "times", "GEMM", "kernel", "us", "Inductor us", "roofline us", "of roofline")
        ]
        rows += [_format_row(number, gemm) for number, gemm in enumerate(self.gemms, 1)]
        # Words are left-aligned, numbers right-aligned.
        head, *table = align_columns(rows, right=(0, 1, 4, 5, 6, 7))
        lines += ["", head]
        for gemm, line in zip(self.gemms, table, strict=True):
            lines.append(line)
            lines += [f"      {line}" for line in _format_details(gemm, candidates)]
        return "\n".join([*lines, *_format_attention(self.attention)])

    def __str__(self) -> str:
        return self.table()

    def to_json(self) -> str:
        """Return the report as one JSON object."""
        return json.dumps(self.as_json(), indent=1)

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON-serializable values."""
        gemms = [
            {
                **gemm.record.as_json(),
                "modules": gemm.modules,
                "fused": gemm.fused,
                "separate": gemm.separate,
            }
            for gemm in self.gemms
        ]
        attention = [record.as_json() for record in self.attention]
        return {"title": self.title, "gemms": gemms, "attention": attention}


def _format_attention(records: Sequence[AttentionRecord]) -> Iterator[str]:
    """Yield the lines about attention; calls that differ only in the module share one."""
    if not records:
        return
    calls: dict[str, list[str]] = {}
    for record in records:
        for change in record.changes:
            calls.setdefault(change, []).append(record.module)
    yield from ("", f"Attention: {len(records)} calls changed", "")
    for change, modules in calls.items():
        yield f"{len(modules):>5}  {change}"
        yield from (f"       {line}" for line in _format_modules(modules))


def _format_modules(modules: Sequence[str]) -> Iterator[str]:
    known = [module for module in modules if module]
    if known:
        more = f" and {len(known) - 2} more" if len(known) > 2 else ""
        yield f"in {', '.join(known[:2])}{more}"


def _format_row(number: int, gemm: Gemm) -> Sequence[str]:
    record = gemm.record
    numbers = (record.microseconds, record.stock_microseconds, record.roofline)
    share = "" if gemm.share is None else f"{gemm.share:.0%}"
    cells = ("" if value is None else f"{value:.1f}" for value in numbers)
    return (
        f"{number}.",
        str(len(gemm.modules)),
        gemm.label,
        config_words(record.chosen),
        *cells,
        share,
    )


def _format_details(gemm: Gemm, candidates: bool) -> Iterator[str]:
    record = gemm.record
    yield from _format_modules(gemm.modules)
    yield f"{record.origin}: {record.reason}"
    for fusion in record.declined:
        yield f"not fused as {fusion}"
    if gemm.fused:
        yield f"fused: {', '.join(gemm.fused)}"
    for operator in gemm.separate:
        yield f"not fused: {operator}"
    if candidates:
        for candidate in record.candidates:
            time = "dropped" if candidate.measured is None else f"{candidate.measured:.1f} us"
            prediction = (
                "" if candidate.predicted is None else f", predicted {candidate.predicted:.1f}"
            )
            failure = f": {candidate.failure}" if candidate.failure else ""
            yield f"- {config_words(candidate.config)}: {time}{prediction}{failure}"


def explain(
    fn: Callable[..., Any],
    *args: Any,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    **kwargs: Any,
) -> GemmReport:
    """Recompile a function, call it once, and report which kernels its GEMMs got.

    Backward graphs are reported if the function calls backward. Nothing that was compiled before is
    used or changed.

    Args:
        fn: a function or module. If it was returned by torch.compile, the original function or
            module is compiled.
        *args: arguments for `fn`.
        **kwargs: keyword arguments for `fn`.
        mode: mode of torch.compile, see `inductor_ext.list_mode_options`.
        options: options of Inductor and of the extension by name; `{"max_autotune": True}`
            benchmarks GEMMs that have no tuning results.
        dynamic: as for torch.compile.

    Raises:
        exc.UnknownModeError, exc.UnknownOptionError, exc.BadOptionError: raised before compiling.
        Exception: raised by compiling or calling `fn`.
    """
    target, compiled = compile_separately(fn, mode, options, dynamic)
    with listen() as compiled_gemms, events.capture(AttentionRecord) as attention:
        compiled(*args, **kwargs)
    return GemmReport(qualified_name(target), compiled_gemms(), tuple(attention))


def compile_separately(
    fn: Callable[..., Any],
    mode: str | None,
    options: Mapping[str, Any] | None,
    dynamic: bool | None,
) -> tuple[Any, Callable[..., Any]]:
    """Return the original function of `fn`, and a compiled one that shares no code with others.

    Args and errors as `explain`. It is compiled when it is called.
    """
    from torch._dynamo.backends.registry import lookup_backend

    from inductor_ext.options import split_options

    split_options(mode, options)
    target: Any = getattr(fn, "_orig_mod", None) or getattr(fn, "_torchdynamo_orig_callable", fn)
    compile_graph: Any = lookup_backend("inductor_ext")

    # A new callable, because dynamo reuses code that it compiled with an equal backend.
    def backend(gm: Any, inputs: Any) -> Any:
        return compile_graph(gm, inputs, mode=mode, options=options)

    return target, _compat.compile_apart(target, backend=backend, dynamic=dynamic)


# --- listening to a compile ---------------------------------------------------------------------


@contextlib.contextmanager
def listen(
    other_kernels: list[KernelFusion] | None = None,
) -> Iterator[Callable[[], tuple[Gemm, ...]]]:
    """Disable caches of compiled code; yield a function that returns the GEMMs compiled so far.

    Args:
        other_kernels: a list to which fusions of the kernels without GEMMs are appended.
    """
    from torch._functorch import config as aot_config
    from torch._inductor import config as inductor_config

    fusions = _Fusions(
        inductor_config._pre_fusion_custom_pass,
        inductor_config._post_fusion_custom_pass,
        other_kernels=other_kernels,
    )
    # Not force_disable_caches: it also disables the tuning results.
    off = {"fx_graph_cache": False, "fx_graph_remote_cache": False}
    aot_off = {"enable_autograd_cache": False, "enable_remote_autograd_cache": False}
    with (
        events.capture(MatmulRecord) as records,
        inductor_config.patch({**off, **fusions.hooks()}),
        aot_config.patch(aot_off),
        _capture_fusion_log(fusions.hear),
    ):
        yield lambda: _merge_records(records, fusions)


def _merge_records(records: Sequence[MatmulRecord], fusions: _Fusions) -> tuple[Gemm, ...]:
    gemms: dict[Any, Gemm] = {}
    for record in records:
        fused, separate = fusions.of(record)
        key = (dataclasses.replace(record, module=""), fused, separate)
        earlier = gemms.get(key)
        modules = (*(earlier.modules if earlier else ()), record.module)
        first = earlier.record if earlier else record
        gemms[key] = Gemm(first, modules, fused, separate)
    return tuple(gemms.values())


class _Fusions:
    """Records which operators Inductor's scheduler fused with a GEMM, and which it did not.

    Inductor calls it with the nodes of every graph before and after fusion, and with its log
    messages about pairs that it did not fuse.
    """

    def __init__(
        self,
        *others: Callable[[list[Any]], list[Any]] | None,
        other_kernels: list[KernelFusion] | None = None,
    ) -> None:
        """
        Args:
            others: the passes already installed before and after fusion; they are called first.
            other_kernels: see `listen`.
        """
        self._others = others
        self._other_kernels = other_kernels
        self._found: dict[int, tuple[tuple[str, ...], tuple[str, ...]]] = {}
        self._reasons: dict[tuple[str, str], str] = {}

    def of(self, record: MatmulRecord) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return (fused operators, operators not fused)."""
        return self._found.get(id(record), ((), ()))

    def hooks(self) -> dict[str, Any]:
        """Return the Inductor options that install the callbacks."""
        return {"_pre_fusion_custom_pass": self._begin, "_post_fusion_custom_pass": self._note}

    def hear(self, message: Any) -> None:
        """Handle one message of Inductor's fusion log."""
        first, second = getattr(message, "name1", None), getattr(message, "name2", None)
        if first is not None and second is not None:
            why = message.reason % message.args
            for pair in ((a, b) for a in first.split("_") for b in second.split("_")):
                self._reasons[pair] = why

    def _begin(self, nodes: list[Any]) -> list[Any]:
        # The names in the messages are unique only within one graph.
        self._reasons.clear()
        return nodes if self._others[0] is None else self._others[0](nodes)

    def _note(self, nodes: list[Any]) -> list[Any]:
        """Record the operators in the kernel of every GEMM; return the nodes."""
        if self._others[1] is not None:
            nodes = self._others[1](nodes)
        kernel_of = {node.get_name(): kernel for kernel in nodes for node in kernel.get_nodes()}
        for member in (node for kernel in nodes for node in kernel.get_nodes()):
            for product in _find_gemms(member):
                around = self._around(product, member, kernel_of)
                self._found[id(node_info.get(product).record)] = around
        if self._other_kernels is not None:
            self._other_kernels += self._find_other_fusions(nodes, kernel_of)
        return nodes

    def _find_other_fusions(
        self, nodes: list[Any], kernel_of: Mapping[str, Any]
    ) -> Iterator[KernelFusion]:
        """Yield the kernels without GEMMs that are fused, or whose results others use."""
        for kernel in nodes:
            members = list(kernel.get_nodes())
            if any(_is_apart(member) for member in members):
                continue
            operators = dict.fromkeys(name for node in members for name in _list_operators(node))
            separate: dict[str, None] = {}
            for member in members:
                for user in (use.node for out in member.get_outputs() for use in out.users):
                    other = kernel_of.get(user.get_name())
                    if other is None or other is kernel or _is_apart(user):
                        continue
                    names = ", ".join(_list_operators(user)) or user.get_name()
                    separate[f"{names} ({self._reason(member, user)})"] = None
            if len(operators) > 1 or separate:
                yield KernelFusion(tuple(operators), tuple(separate))

    def _around(
        self, product: Any, member: Any, kernel_of: Mapping[str, Any]
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the operators in a GEMM's kernel, and those that use its result in other kernels.

        Args:
            product: the FX node of the GEMM.
            member: the scheduler node that computes it.
            kernel_of: maps names of scheduler nodes to the kernels of the graph that contain them.
        """
        record: Any = node_info.get(product).record
        after = _find_descendants(product)
        kernels = [kernel_of[member.get_name()]]
        separate: dict[str, None] = {}
        for user in (user.node for buffer in member.get_outputs() for user in buffer.users):
            kernel = kernel_of.get(user.get_name())
            # Another GEMM is never part of this one's kernel.
            if kernel is None or kernel is kernels[0] or next(_find_gemms(user), None) is not None:
                continue
            if product in (getattr(user.node, "origins", None) or ()):
                # The second step of split-K belongs to this GEMM; the one of a row amax is a
                # separate kernel.
                if not record.problem.epilogue.reductions:
                    kernels.append(kernel)
                continue
            names = ", ".join(_list_operators(user, after)) or user.get_name()
            why = self._reason(member, user)
            if isinstance(record.chosen, CutlassConfig):
                why = "cutlass_epilogue_fusion_enabled is off, or the kernel cannot express it"
            separate[f"{names} ({why})"] = None
        fused: dict[str, None] = dict.fromkeys(node_info.get(product).fused)
        for other in (node for kernel in kernels for node in kernel.get_nodes()):
            if other is not member:
                # Inductor may also have fused the producers of the inputs into the prologue.
                before = () if product in other.node.origins else _list_operators(other)
                fused.update(dict.fromkeys(_list_operators(other, after) or before))
        return tuple(fused), tuple(separate)

    def _reason(self, member: Any, user: Any) -> str:
        names = member.get_name(), user.get_name()
        why = self._reasons.get(names) or self._reasons.get(names[::-1])
        if why is None and member.is_extern():
            return "library kernels cannot be fused"
        return why or "Inductor did not consider it"


def _find_gemms(node: Any) -> Iterator[Any]:
    """Yield the FX nodes of the recorded GEMMs that a scheduler node computes."""
    if node.is_template() or node.is_extern():
        for origin in getattr(node.node, "origins", None) or ():
            if node_info.get(origin).record is not None:
                yield origin


def _is_apart(node: Any) -> bool:
    """Whether a scheduler node computes a GEMM, or is one of the results of a library kernel."""
    from torch._inductor import ir

    return isinstance(node.node, ir.MultiOutput) or next(_find_gemms(node), None) is not None


def _find_descendants(node: Any) -> set[Any]:
    """Return all direct and indirect users of an FX node."""
    descendants: set[Any] = set()
    pending = list(node.users)
    while pending:
        user = pending.pop()
        if user not in descendants:
            descendants.add(user)
            pending.extend(user.users)
    return descendants


def _list_operators(node: Any, among: Collection[Any] | None = None) -> list[str]:
    """Return the non-GEMM operators that a scheduler node computes, by their names in the model.

    Args:
        node: scheduler node.
        among: the FX nodes to include, since the origins of a scheduler node start with the nodes
            that it reads; None for all.
    """
    origins = [
        origin
        for origin in getattr(node.node, "origins", None) or ()
        if origin.op == "call_function"
        and node_info.get(origin).record is None
        and (among is None or origin in among)
    ]
    order = {node: index for index, node in enumerate(origins[0].graph.nodes)} if origins else {}
    origins.sort(key=lambda origin: order.get(origin, 0))
    return list(operator_names(origins))


@contextlib.contextmanager
def _capture_fusion_log(callback: Callable[[Any], None]) -> Iterator[None]:
    """Pass Inductor's messages about failed fusions to `callback`, without printing them."""
    from torch._inductor import scheduler

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            callback(record.msg)

    log = scheduler.fusion_log
    level, propagate, handler = log.level, log.propagate, Listener()
    log.addHandler(handler)
    if not log.isEnabledFor(logging.DEBUG):
        log.setLevel(logging.DEBUG)
        log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate
