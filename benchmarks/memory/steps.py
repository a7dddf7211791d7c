"""Peak memory of whole calls and training steps: eager mode, Inductor and the extension.

The models are those of `memory.step_models`. A step of training is forward, loss, backward and
AdamW, then the gradients are freed. Other kinds of step add one thing each: two micro-batches whose
gradients accumulate, autocast to bfloat16, checkpoints of activations. Peaks are counted above the
level before the step, that is above weights, inputs and optimizer state: on a CPU by the events of
torch's allocator, with sizes rounded up to 64 bytes, on a GPU by the caching allocator's own
maximum. Allocator calls are all of the step, those of kernels and of the optimizer included. Times
are wall time, with the variants in alternation; `--rounds 0` leaves them out. The error of the
planned peak compares each graph's plan with what its call allocates.

    python -m benchmarks.memory.steps [--models NAME ...] [--kinds KIND ...] [--device cuda]
        [--scale large] [--json-out DIR]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import inductor_ext
from benchmarks.harness import measure, results, resumable, variants
from benchmarks.memory import step_models
from benchmarks.memory.peak import MIB, record_allocations

__all__ = ["KINDS", "VARIANTS", "Footprint", "find_plan_error", "main", "make_rows", "measure_step"]

VARIANTS: Mapping[str, str | None] = {"eager": None, "stock": "inductor", "ours": "inductor_ext"}
"""Backends by column of the results; None for eager mode."""

SCALES = {"small": step_models.SMALL, "large": step_models.LARGE}


@dataclass(frozen=True)
class Kind:
    """A kind of step."""

    training: bool = True
    micro_batches: int = 1
    autocast: bool = False
    checkpoints: bool = False


KINDS: Mapping[str, Kind] = {
    "inference": Kind(training=False),
    "training": Kind(),
    "accumulation": Kind(micro_batches=2),
    "autocast": Kind(autocast=True),
    "checkpoints": Kind(checkpoints=True),
}


@dataclass(frozen=True)
class Footprint:
    """The memory of a step, above the level before it."""

    peak: int
    """Bytes."""
    calls: int
    """Allocations."""


class _Step:
    """A step of one model by one backend.

    Args:
        build: builds the model.
        scale: sizes of the model.
        kind: of the step.
        backend: of torch.compile; None for eager mode.
        device: "cpu" or "cuda".
    """

    def __init__(
        self,
        build: step_models.Build,
        scale: step_models.Scale,
        kind: Kind,
        backend: str | None,
        device: str,
    ) -> None:
        torch.manual_seed(0)
        torch._dynamo.reset()
        module, inputs = build(scale)
        self.module = module.to(device).train(kind.training)
        self.inputs = {name: value.to(device) for name, value in inputs.items()}
        self.kind = kind
        self.device = device
        if kind.checkpoints:
            # A method of transformers' models.
            enable: Any = self.module.gradient_checkpointing_enable
            enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.optimizer = torch.optim.AdamW(self.module.parameters()) if kind.training else None
        forward = self._forward
        self.forward = forward if backend is None else torch.compile(forward, backend=backend)

    def _forward(self, inputs: step_models.Inputs) -> torch.Tensor:
        """Return the loss, or the output in inference."""
        with torch.autocast(self.device, torch.bfloat16, enabled=self.kind.autocast):
            output = step_models.extract_output(self.module(**inputs))
        return output.float().square().mean() if self.kind.training else output

    def __call__(self) -> None:
        """Run the step; its results are freed."""
        if self.optimizer is None:
            with torch.no_grad():
                self.forward(self.inputs)
            return
        for _ in range(self.kind.micro_batches):
            self.forward(self.inputs).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure_step(step: Callable[[], object], device: str) -> Footprint:
    """Return the memory of a step that has run before."""
    if device == "cpu":
        changes = record_allocations(step)
        return Footprint(measure.find_peak(changes), sum(change > 0 for change in changes))
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    peak = measure.measure_gpu_peak(step)
    return Footprint(peak, torch.cuda.memory_stats()["allocation.all.allocated"] - before)


def find_plan_error(step: _Step) -> float:
    """Return the largest difference between a graph's measured and planned peak.

    Percent of the highest measured peak of the step's graphs.

    Args:
        step: has run before, compiled by the extension.
    """
    graphs = inductor_ext.memory_report(step.forward).measure(step).measured
    differences = [abs(graph.measured - graph.predicted) for graph in graphs]
    return 100 * max(differences) / max(graph.measured for graph in graphs)


def make_rows(
    case: str,
    footprints: Mapping[str, Footprint],
    seconds: Mapping[str, Sequence[float]],
    plan_error: Mapping[str, float] | None = None,
) -> list[results.Row]:
    """Return result rows.

    Args:
        case: model and kind of step.
        footprints: by variant.
        seconds: times of a step, by variant.
        plan_error: `find_plan_error`, by variant.
    """
    times = {name: measure.summarize(values) for name, values in seconds.items()}
    table: tuple[tuple[str, str, Mapping[str, float]], ...] = (
        ("peak", "MiB", {name: found.peak / MIB for name, found in footprints.items()}),
        ("allocator calls", "calls", {name: found.calls for name, found in footprints.items()}),
        ("time", "ms", {name: sample.median * 1e3 for name, sample in times.items()}),
        ("error of planned peak", "%", plan_error or {}),
    )
    spread = max((sample.spread for sample in times.values()), default=None)
    return [
        variants.make_row(
            case, metric, unit, values, "stock", spread=spread if metric == "time" else None
        )
        for metric, unit, values in table
        if values
    ]


class _Bench:
    """Measures cases, each with all variants."""

    def __init__(self, scale: step_models.Scale, device: str, rounds: int) -> None:
        self.scale = scale
        self.device = device
        self.rounds = rounds

    def __call__(self, model: str, kind: str) -> resumable.CaseResult:
        """Measure a model with a kind of step. A variant that fails is left out."""
        steps: dict[str, _Step] = {}
        footprints: dict[str, Footprint] = {}
        plan_error: dict[str, float] = {}
        failures = []
        for name, backend in VARIANTS.items():
            try:
                step = _Step(
                    step_models.MODELS[model], self.scale, KINDS[kind], backend, self.device
                )
                # The first call compiles and makes the optimizer's state.
                step()
                step()
                footprints[name] = measure_step(step, self.device)
                steps[name] = step
                if name == "ours":
                    plan_error[name] = find_plan_error(step)
            except Exception as error:
                failures.append(f"  {name}: {type(error).__name__}: {str(error)[:300]}")
        timers = {name: variants.make_timer(step) for name, step in steps.items()}
        seconds = measure.alternate(timers, self.rounds) if self.rounds else {}
        rows = make_rows(f"{model}, {kind}", footprints, seconds, plan_error)
        return resumable.CaseResult(rows, _format(rows, failures), bool(failures))


def _format(rows: Sequence[results.Row], failures: Sequence[str]) -> str:
    """Return the lines that are printed for a case."""
    lines = [rows[0]["case"]] if rows else []
    for row in rows:
        columns = {"eager": row["eager"], "stock": row["stock"], "ours": row["ours"]}
        values = " ".join(f"{name} {value or 0:9.2f}" for name, value in columns.items())
        lines.append(f"  {row['metric']:16} {values}  {row['unit']}")
    return "\n".join([*lines, *failures])


def _list_cases(
    models: Sequence[str], kinds: Sequence[str], done: frozenset[str]
) -> list[tuple[str, str]]:
    return [(m, kind) for m in models for kind in kinds if f"{m}, {kind}" not in done]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 1 if a variant failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    names = list(step_models.MODELS)
    parser.add_argument("--models", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument(
        "--kinds", nargs="+", choices=list(KINDS), default=["inference", "training"]
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--scale", choices=list(SCALES), default="small")
    parser.add_argument("--rounds", type=int, default=12, help="measurements of a time")
    resumable.add_arguments(parser)
    options = parser.parse_args(arguments)
    hardware = results.name_hardware(options.device)
    header = results.collect_header(
        "memory-steps", results.format_command(), hardware, commit=options.commit
    )
    ledger = resumable.Ledger(header, options.json_out, options.resume)
    bench = _Bench(SCALES[options.scale], options.device, options.rounds)

    def run() -> Iterator[resumable.CaseResult]:
        cases = _list_cases(options.models, options.kinds, ledger.cases)
        for case in resumable.take_within(cases, options.budget_seconds):
            yield bench(*case)

    _, failed = ledger.add_all(run())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
