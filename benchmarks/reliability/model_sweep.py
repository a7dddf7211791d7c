"""Models that the extension was not developed with, in each way to use it: right, wrong or failed.

    python -m benchmarks.reliability.model_sweep --processes 2 --json-out DIR
    python -m benchmarks.reliability.model_sweep --suite model-sweep-targets \\
        --ways "package for sm_90" --json-out DIR

A case is a model of `sweep_models`. Every way has a process of its own with empty caches, because
what a process has traced or compiled before can hide a fault:

- inference: the output of `torch.compile`;
- training: the gradients of `torch.compile`, without dropout;
- package: exported with a dynamic batch where torch.export can, and called with three batch sizes;
- package for sm_90: only built; this needs a CUDA build of torch, but no GPU.

The result is the largest error relative to the model in float64, beside that of eager mode; of a
package that is only built, and of a way that fails, the number of failures. If a way fails or its
error is large, Inductor (default) runs in the same way, to tell whose fault it is.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gemm.measurement import compute_error
from benchmarks.harness import gpu_lock, results, resumable, variants
from benchmarks.memory import step_models
from benchmarks.reliability import sweep_models

__all__ = ["WAYS", "is_right", "judge", "main", "measure", "run_way"]

_BATCHES = (4, 2, 7)
"""Batch sizes of a package's calls; the first is the one of the export."""

_MULTIPLE = 10
"""A result is wrong if its error is larger than this multiple of the error of eager mode."""

_LEAST_ERROR, _LARGEST_ERROR = 1e-6, 1e-3
"""The error of eager mode counts as at least the first, as some models round nothing. If it is
larger than the second, the model's results overflow or underflow, and say nothing."""


_FAILURES = ", failures"
"""End of the metrics that count failures."""


class _Model(nn.Module):
    """A model with positional inputs and one output, which torch.export takes as they are."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, inputs = sweep_models.MODELS[name](step_models.SMALL)
        self.names = list(inputs)
        self.eval()

    def forward(self, *inputs: Tensor) -> Tensor:
        named = dict(zip(self.names, inputs, strict=True))
        return step_models.extract_output(self.model(**named))


def _draw_inputs(name: str, batch: int) -> tuple[Tensor, ...]:
    """Return inputs of a model, of up to twice the batch of `step_models.SMALL`."""
    torch.manual_seed(0)
    _, inputs = sweep_models.MODELS[name](step_models.SMALL)
    return tuple(torch.cat([value, value])[:batch].contiguous() for value in inputs.values())


def _widen(inputs: Sequence[Tensor]) -> list[Tensor]:
    return [value.double() if value.is_floating_point() else value for value in inputs]


def _make_exact(model: _Model) -> _Model:
    """Return the model in float64, which grouped matmuls of experts lack."""
    wrapped: Any = model.model
    if getattr(wrapped.config, "_experts_implementation", None) == "grouped_mm":
        wrapped.set_experts_implementation("batched_mm")
    return model.double()


@torch.no_grad()
def _infer(model: Callable[..., Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (model(*inputs),)


def _differentiate(model: nn.Module, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the gradients as one tensor: some are zero but for rounding, or not used."""
    parameters = [value for value in model.parameters() if value.requires_grad]
    loss = model(*inputs).float().square().mean()
    gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
    return (torch.cat([value.flatten() for value in gradients]),)


def _run_compiled(
    name: str, backend: str, *, call: Callable[[Any, Sequence[Tensor]], tuple[Tensor, ...]]
) -> tuple[float, float]:
    model, inputs = _Model(name), _draw_inputs(name, _BATCHES[0])
    found = call(torch.compile(model, backend=backend), inputs)
    eager = call(model, inputs)
    exact = call(_make_exact(model), _widen(inputs))
    return compute_error(found, exact), compute_error(eager, exact)


def _export(model: _Model, inputs: Sequence[Tensor]) -> tuple[Any, bool]:
    """Return a program, and whether its batch size is dynamic."""
    batch = torch.export.Dim("batch", min=2, max=64)
    shapes = (tuple({0: batch} for _ in inputs),)
    with torch.no_grad():
        try:
            return torch.export.export(model, tuple(inputs), dynamic_shapes=shapes), True
        except Exception:
            # Not every model can be exported with a dynamic batch.
            return torch.export.export(model, tuple(inputs)), False


def _package(program: Any, backend: str, folder: str, **arguments: Any) -> str:
    import torch._inductor

    import inductor_ext

    path = str(Path(folder) / "model.pt2")
    options = {"aot_inductor.compile_wrapper_opt_level": "O0"}
    module = inductor_ext if backend == "inductor_ext" else torch._inductor
    module.aoti_compile_and_package(
        program, package_path=path, inductor_configs=options, **arguments
    )
    return path


def _run_package(name: str, backend: str) -> tuple[float, float]:
    import torch._inductor

    import inductor_ext

    model = _Model(name)
    program, is_dynamic = _export(model, _draw_inputs(name, _BATCHES[0]))
    with tempfile.TemporaryDirectory() as folder:
        path = _package(program, backend, folder)
        load = inductor_ext.load if backend == "inductor_ext" else torch._inductor.aoti_load_package
        package: Any = load(path)
        calls = [_draw_inputs(name, batch) for batch in _BATCHES[: None if is_dynamic else 1]]
        found = [_infer(package, inputs) for inputs in calls]
    eager = [_infer(model, inputs) for inputs in calls]
    _make_exact(model)
    exact = [_infer(model, _widen(inputs)) for inputs in calls]
    return max(map(compute_error, found, exact)), max(map(compute_error, eager, exact))


def _build_for_gpu(name: str, backend: str) -> None:
    """Build a package for a GPU. Inductor has none for a GPU that is missing: it only exports."""
    model = _Model(name).bfloat16()
    inputs = [
        value.bfloat16() if value.is_floating_point() else value
        for value in _draw_inputs(name, _BATCHES[0])
    ]
    program, _ = _export(model, inputs)
    if backend == "inductor_ext":
        with tempfile.TemporaryDirectory() as folder:
            _package(program, backend, folder, targets=["sm_90"])


WAYS: Mapping[str, Callable[[str, str], tuple[float, float] | None]] = {
    "inference": functools.partial(_run_compiled, call=_infer),
    "training": functools.partial(_run_compiled, call=_differentiate),
    "package": _run_package,
    "package for sm_90": _build_for_gpu,
}
"""Each is given a model and a backend; if the model runs, it returns its error and eager mode's."""


def run_way(model: str, way: str, backend: str) -> dict[str, Any]:
    """Run one way in this process; return its errors, or the failure as text."""
    try:
        errors = WAYS[way](model, backend)
    except Exception as failure:
        text = " ".join(str(failure).split())[:300]
        return {"failure": f"{type(failure).__name__}: {text}"}
    if errors is None:
        return {}
    error, eager = errors
    if not math.isfinite(error) or not eager <= _LARGEST_ERROR:
        return {"failure": f"cannot be compared: error {error}, eager {eager}"}
    return {"error": error, "eager": eager}


def is_right(found: Mapping[str, Any]) -> bool:
    """Whether a result of `run_way` is about as accurate as eager mode."""
    if "error" not in found:
        return "failure" not in found
    return bool(found["error"] <= _MULTIPLE * max(found["eager"], _LEAST_ERROR))


def _run_in_process(model: str, way: str, backend: str) -> dict[str, Any]:
    """Run one way in a new process with empty caches."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "inductor"),
            "INDUCTOR_EXT_ARTIFACT_CACHE_DIR": str(Path(folder) / "packages"),
        }
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", __spec__.name, "--child", model, way, backend],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    with contextlib.suppress(ValueError, IndexError):
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer
    return {"failure": f"exit code {done.returncode}: {done.stderr.strip()[-200:]}"}


def measure(
    model: str,
    ways: Sequence[str],
    run: Callable[[str, str, str], dict[str, Any]] = _run_in_process,
) -> resumable.CaseResult:
    """Run a model in several ways; failed if one is wrong, or fails where Inductor does not.

    Args:
        model: name of the model.
        ways: names of the ways.
        run: runs one way; a function with the arguments of `run_way`.
    """
    rows, lines, failed = [], [model], False
    for way in ways:
        found = {"ours": run(model, way, "inductor_ext")}
        if not is_right(found["ours"]):
            found["inductor"] = run(model, way, "inductor")
            failed |= "error" in found["ours"] or is_right(found["inductor"])
        rows.append(_make_row(model, way, found))
        lines.append(f"  {way}: {_format(found)}")
    return resumable.CaseResult(rows, "\n".join(lines), failed)


def _make_row(model: str, way: str, found: Mapping[str, Mapping[str, Any]]) -> results.Row:
    """Return a way's errors, or if the extension's is not known, the number of failures.

    Args:
        model: name of the model.
        way: name of the way.
        found: what `run_way` returned, by variant.
    """
    if "error" in found["ours"]:
        metric = way
        values = {name: item.get("error") for name, item in found.items()}
        values["eager"] = found["ours"]["eager"]
    else:
        metric = way + _FAILURES
        values = {name: float("failure" in item) for name, item in found.items()}
    note = _list_failures(found) or None
    return variants.make_row(model, metric, "1", values, "inductor", note=note)


def judge(row: results.Row) -> tuple[str, str]:
    """Return the way of a row and its outcome: right, wrong, fails or both fail."""
    way = row["metric"].removesuffix(_FAILURES)
    if way == row["metric"]:
        found = {"error": row["ours"], "eager": row["eager"]}
        return way, "right" if is_right(found) else "wrong"
    if row["ours"] == 0:
        return way, "right"
    return way, "both fail" if row["stock"] else "fails"


def _list_failures(found: Mapping[str, Mapping[str, Any]]) -> str:
    names = {"ours": "the extension", "inductor": "Inductor"}
    failures = {names[name]: item["failure"] for name, item in found.items() if "failure" in item}
    return "; ".join(f"{name}: {failure}" for name, failure in failures.items())


def _format(found: Mapping[str, Mapping[str, Any]]) -> str:
    failures = _list_failures(found)
    if failures or "error" not in found["ours"]:
        return failures or "built"
    return "error {error:.1e}, eager {eager:.1e}".format(**found["ours"])


def _make_bench(ways: Sequence[str], *, seconds: bool) -> Callable[[str], resumable.CaseResult]:
    """Return `measure` for these ways; it measures no compile times, whatever `seconds` is."""
    return functools.partial(measure, ways=ways)


def _list_ways() -> list[str]:
    """Return the ways that this torch can be used in."""
    return [way for way in WAYS if way != "package for sm_90" or torch.version.cuda is not None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 1 if a model is wrong or fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    names = list(sweep_models.MODELS)
    parser.add_argument("--models", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=_list_ways())
    parser.add_argument("--suite", default="model-sweep", help="name of the results")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    resumable.add_arguments(parser)
    options = parser.parse_args(arguments)
    if options.child:
        print(json.dumps(run_way(*options.child)))
        return 0
    header = results.collect_header(
        options.suite, results.format_command(), results.name_hardware("cpu"), commit=options.commit
    )
    ledger = resumable.Ledger(header, options.json_out, options.resume)
    todo = [name for name in options.models if name not in ledger.cases]
    make = functools.partial(_make_bench, options.ways)
    _, failed = ledger.add_all(gpu_lock.run(todo, make, options.processes, options.budget_seconds))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
