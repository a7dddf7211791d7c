"""Training steps and inference within a `memory_budget` below what they need by default.

For each model of `memory.step_models`, forward, loss and backward are compiled by default, and
again with a budget of a share of the default's planned peak. Peaks are measured on the CPU by
allocator events. The gradients of both must be equal up to rounding; dropout is off. Times are
those of the step, in alternation. With `--inference`, the forward in eval mode is measured instead,
and the outputs are compared.

    python -m benchmarks.memory.budget [--inference] [--models NAME ...] [--share 0.7]
        [--json-out DIR]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.harness import measure, results, resumable, variants
from benchmarks.memory import step_models, steps
from benchmarks.memory.peak import MIB
from inductor_ext import events
from inductor_ext.memory.budget_search import MemoryBudgetRecord
from inductor_ext.memory.records import MemoryPlanRecord

__all__ = ["main", "measure_model"]

MODELS = (
    "bert",
    "deberta",
    "gpt2",
    "llama",
    "gemma2",
    "t5",
    "vit",
    "swin",
    "convnext",
    "resnet",
)

MAX_DIFFERENCE = 1e-3
"""Maximum difference of a gradient, or of the output, to the one without a budget, relative to the
largest gradient of the model, or to the largest element of the output."""


class _Step:
    """Forward, loss and backward of a model, in new code."""

    def __init__(self, build: step_models.Build, budget: int | None) -> None:
        torch.manual_seed(0)
        torch._dynamo.reset()
        self.module, self.inputs = build(step_models.SMALL)
        for part in self.module.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        options: dict[str, Any] = {} if budget is None else {"memory_budget": budget}
        self.loss = torch.compile(self._compute_loss, backend="inductor_ext", options=options)
        with events.capture() as self.records:
            self()
        self.gradients = [
            parameter.grad.clone()
            for parameter in self.module.parameters()
            if parameter.grad is not None
        ]

    def _compute_loss(self, inputs: step_models.Inputs) -> torch.Tensor:
        return step_models.extract_output(self.module.train()(**inputs)).float().square().mean()

    def __call__(self) -> None:
        """Run the step with new gradients."""
        self.module.zero_grad()
        self.loss(self.inputs).backward()

    def list_results(self) -> list[torch.Tensor]:
        """Return what is compared: the gradients of the first step."""
        return self.gradients

    def measure_peak(self) -> int:
        """Return the bytes above the level between steps."""
        self.module.zero_grad()
        return steps.measure_step(self, "cpu").peak

    def find(self, record: type[Any]) -> list[Any]:
        """Return the records of the compile of one type."""
        return [found for found in self.records if isinstance(found, record)]


class _Inference(_Step):
    """The forward of a model in eval mode, in new code."""

    def _compute_loss(self, inputs: step_models.Inputs) -> torch.Tensor:
        return step_models.extract_output(self.module.eval()(**inputs))

    @torch.no_grad()
    def __call__(self) -> None:
        """Run the model."""
        self.output = self.loss(self.inputs)

    def list_results(self) -> list[torch.Tensor]:
        """Return what is compared: the output."""
        return [self.output.float()]

    def measure_peak(self) -> int:
        """Return the bytes above the level between calls, with the output."""
        del self.output
        peak = steps.measure_step(self, "cpu").peak
        self()
        return peak


_DIFFERENCES = {_Step: "difference of gradients", _Inference: "difference of outputs"}
"""The name of the metric, by what is measured."""


def measure_model(name: str, share: float, rounds: int, make: type[_Step]) -> resumable.CaseResult:
    """Measure a model with and without a budget.

    Args:
        name: of the model.
        make: what is measured.
        share: the budget, as a share of the planned peak without one.
        rounds: measurements of a time; 0 for none.
    """
    build = step_models.MODELS[name]
    default = make(build, None)
    planned = max(record.peak for record in default.find(MemoryPlanRecord))
    budget = int(share * planned)
    rows = [_row(name, "peak, no budget", "MiB", default.measure_peak() / MIB)]
    try:
        limited = make(build, budget)
    except Exception as error:
        why = f"does not fit: {type(error).__name__}"
        rows.append(_row(name, "peak", "MiB", None, floor=budget / MIB, note=why))
        return resumable.CaseResult(rows, _format(rows), True)
    expected = default.list_results()
    largest = max(float(result.abs().max()) for result in expected)
    pairs = zip(limited.list_results(), expected, strict=True)
    difference = max(float((a - b).abs().max()) for a, b in pairs) / largest
    if difference > MAX_DIFFERENCE:
        raise AssertionError(f"{name}: results differ by {difference}")
    found = limited.find(MemoryBudgetRecord)
    note = found[-1].describe() if found else None
    peak = limited.measure_peak() / MIB
    rows += [
        _row(name, "peak", "MiB", peak, floor=budget / MIB, note=note),
        _row(name, _DIFFERENCES[make], "relative", difference),
    ]
    if rounds:
        timers = {"time": limited, "time, no budget": default}
        seconds = measure.alternate(
            {metric: variants.make_timer(step) for metric, step in timers.items()}, rounds
        )
        for metric, values in seconds.items():
            sample = measure.summarize(values)
            rows.append(_row(name, metric, "ms", sample.median * 1e3, spread=sample.spread))
    return resumable.CaseResult(rows, _format(rows), False)


def _row(case: str, metric: str, unit: str, ours: float | None, **fields: Any) -> results.Row:
    return results.make_row(case, metric, unit, ours=ours, **fields)


def _format(rows: Sequence[results.Row]) -> str:
    """Return the lines that are printed for a model."""
    lines = [f"  {row['metric']:24} {row['ours']}  {row['note'] or ''}" for row in rows]
    return "\n".join([rows[0]["case"], *lines])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 1 if a model does not fit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    names = list(step_models.MODELS)
    parser.add_argument("--models", nargs="+", choices=names, default=MODELS, metavar="NAME")
    parser.add_argument("--share", type=float, default=0.7, help="of the default's planned peak")
    parser.add_argument("--inference", action="store_true", help="measure no training steps")
    parser.add_argument("--rounds", type=int, default=12, help="measurements of a time")
    resumable.add_arguments(parser)
    options = parser.parse_args(arguments)
    header = results.collect_header(
        "memory-budget-inference" if options.inference else "memory-budget",
        results.format_command(),
        results.name_hardware("cpu"),
        commit=options.commit,
    )
    ledger = resumable.Ledger(header, options.json_out, options.resume)

    def run() -> Iterator[resumable.CaseResult]:
        pending = [name for name in options.models if name not in ledger.cases]
        for name in resumable.take_within(pending, options.budget_seconds):
            make = _Inference if options.inference else _Step
            yield measure_model(name, options.share, options.rounds, make)

    _, failed = ledger.add_all(run())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
