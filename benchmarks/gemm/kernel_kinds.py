"""What the GPU time of a model's call goes to: matmuls, attention, norms, copies and the rest.

Each of the held-out models is compiled by Inductor and by the extension, in default mode or with
`--max-autotune`, without CUDA graphs, and called under torch's profiler. The times of its kernels
are summed by kind; a kernel's name tells its kind. The note of a row names the kernels of both that
take longest, with their microseconds per call.

    python -m benchmarks.gemm.kernel_kinds --processes 8 --budget-seconds 520 --json-out DIR
"""

from __future__ import annotations

import argparse
import collections
import functools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks.gemm.e2e import make_finish, use_tf32
from benchmarks.gemm.held_out import HELD_OUT
from benchmarks.harness import gpu_lock, results, resumable, variants

__all__ = ["KINDS", "find_kind", "main", "sum_by_kind"]

SUFFIX = ", max-autotune"
"""Added to the names of models that are compiled with `max_autotune`."""

CALLS = 5
"""Calls under the profiler."""

KINDS: Mapping[str, str] = {
    # First, because the names of Inductor's kernels list operators, such as convolution.
    "Triton, reduction": r"^triton_(red|per)_",
    "Triton, pointwise": r"^triton_(poi|for)_",
    # The last two are the extension's decode attention.
    "attention": r"fmha|flash|attention|sdpa|^(attend|combine)(_|$)",
    "convolution": r"conv|fprop|wgrad|dgrad",
    "matmul": r"gemm|gemv|nvjet|cutlass|splitk|xmma|cublas|_mm_|^triton_tem_",
    "copy or fill": r"memcpy|memset",
}
"""Patterns of kernel names by kind, the first that matches counts; other kernels are "other"."""


def find_kind(kernel: str) -> str:
    """Return the kind of a kernel, a key of `KINDS` or "other"."""
    for kind, pattern in KINDS.items():
        if re.search(pattern, kernel, re.IGNORECASE):
            return kind
    return "other"


def sum_by_kind(kernels: Mapping[str, float]) -> dict[str, float]:
    """Sum the microseconds of kernels, by kind."""
    sums: dict[str, float] = collections.defaultdict(float)
    for name, microseconds in kernels.items():
        sums[find_kind(name)] += microseconds
    return dict(sums)


def profile(call: Callable[[], Any], calls: int = CALLS) -> dict[str, float]:
    """Return the microseconds that each kernel takes in a call."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    times: dict[str, float] = collections.defaultdict(float)
    for event in profiled.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name] += event.device_time / calls
    return dict(times)


def make_rows(model: str, times: Mapping[str, Mapping[str, float]]) -> list[results.Row]:
    """Return result rows.

    Args:
        model: name of the model.
        times: microseconds by kernel, by variant ("stock", "ours").
    """
    sums = {name: sum_by_kind(kernels) for name, kernels in times.items()}
    rows = []
    for kind in (*KINDS, "other"):
        values: dict[str, float | None] = {name: found.get(kind) for name, found in sums.items()}
        if any(values.values()):
            names = {name: _name_longest(kernels, kind) for name, kernels in times.items()}
            note = f"Inductor: {names['stock']}. The extension: {names['ours']}"
            rows.append(variants.make_row(model, kind, "us", values, "stock", note=note))
    totals: dict[str, float | None] = {name: sum(found.values()) for name, found in sums.items()}
    rows.append(variants.make_row(model, "all kernels", "us", totals, "stock"))
    return rows


def _name_longest(kernels: Mapping[str, float], kind: str, count: int = 3) -> str:
    found = [(time, name) for name, time in kernels.items() if find_kind(name) == kind]
    longest = sorted(found, reverse=True)[:count]
    return "; ".join(f"{_shorten(name)} {time:.1f}" for time, name in longest) or "none"


def _shorten(kernel: str) -> str:
    # The arguments of C++ templates are long, and the same for many kernels.
    return re.sub(r"[<(].*", "", kernel.removeprefix("void "))[:90]


class _Profiler:
    """Profiles one model after the other.

    Args:
        max_autotune: whether to compile with `max_autotune`.
        seconds: unused; the times of compiles are not measured.
    """

    def __init__(self, max_autotune: bool, seconds: bool = False) -> None:
        names = ("stock-max", "ours") if max_autotune else ("stock", "ours-default")
        self.variants = {
            title: variants.VARIANTS[name]
            for title, name in zip(("stock", "ours"), names, strict=True)
        }
        self.suffix = SUFFIX * max_autotune
        variants.start_workers([*self.variants.values()], "cuda")

    def __call__(self, name: str) -> resumable.CaseResult:
        """Compile and profile a model."""
        model = HELD_OUT[name]
        times: dict[str, dict[str, float]] = {}
        tf32 = model.dtype == torch.float32
        with torch.set_grad_enabled(model.training), use_tf32(tf32):
            with gpu_lock.hold_gpu():
                module, inputs = model.make("cuda", model.dtype)
            finish = make_finish(model, module)

            def function(*inputs: torch.Tensor) -> Any:
                return module(*inputs)

            for title, variant in self.variants.items():
                with variants.use_fresh_caches():
                    call = variants.compile_and_call(variant, function, inputs, finish=finish).call
                with gpu_lock.hold_gpu():
                    times[title] = profile(call)
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        rows = make_rows(name + self.suffix, times)
        lines = "\n".join([name + self.suffix, *map(_format_row, rows)])
        return resumable.CaseResult(rows, lines, not all(times.values()))


def _format_row(row: results.Row) -> str:
    values = " ".join(f"{row[name] or 0:9.1f}" for name in ("stock", "ours"))
    return f"  {row['metric']:18} {values}  {row['note'] or ''}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. The exit code is 1 if a model ran no kernel."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--models", nargs="+", choices=list(HELD_OUT), metavar="NAME", help="by default all"
    )
    parser.add_argument("--max-autotune", action="store_true", help="compile with max_autotune")
    resumable.add_arguments(parser)
    options = parser.parse_args(arguments)
    header = results.collect_header("kernel-kinds", results.format_command(), commit=options.commit)
    ledger = resumable.Ledger(header, options.json_out, options.resume)
    suffix = SUFFIX * options.max_autotune
    todo = [name for name in options.models or HELD_OUT if name + suffix not in ledger.cases]
    make = functools.partial(_Profiler, options.max_autotune)
    _, failed = ledger.add_all(gpu_lock.run(todo, make, options.processes, options.budget_seconds))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
