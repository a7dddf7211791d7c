"""Packages compiled with one release of torch and loaded with another.

    python -m benchmarks.aot.across_torch .venv/bin/python .venv-2.14/bin/python

Each argument is a Python with a torch of its own. Every model is compiled with each of them, and
loaded with each of them. A model that can run with other releases must give the results of eager
mode, also after its weights are updated. One that depends on a format of its torch must be refused
by name with every other minor release. The exit code is 1 if a model does neither.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import results

_MODULE = "benchmarks.aot.across_torch"


class Vision(torch.nn.Module):
    """Convolution, attention, sorting, and a buffer that calls change."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3)
        self.linear = torch.nn.Linear(8, 16)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.add_(1)
        y = self.linear(self.conv(x).relu().mean((2, 3)))
        y, order = torch.sort(torch.cumsum(torch.softmax(y, -1), -1), -1)
        y = y[None, None]
        return torch.nn.functional.scaled_dot_product_attention(y, y, y) + self.calls, order


class Shapes(torch.nn.Module):
    """Sizes that depend on values, and control flow."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t.cos() * 2, (self.linear(x),))
        return y, x.nonzero()


class Inverse(torch.nn.Module):
    """An operator without a C function, which the compiled model calls by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        inverse: torch.Tensor = torch.linalg.inv(y + 8 * torch.eye(4))
        return inverse


class Convolution(torch.nn.Sequential):
    """A convolution, to be compiled with frozen weights."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, and how it is compiled and called."""

    module: Callable[[], torch.nn.Module]
    shape: tuple[int, ...]
    """Of its float32 input, whose first dimension is dynamic unless `is_static`."""
    parameter: str = "linear.bias"
    """The constant to update; empty if none can be."""
    is_static: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    refusal: str = ""
    """What the refusal by another minor release says; empty if the model runs there."""


_FROZEN = (("freezing", True),)
_TUNED = (("max_autotune", True), ("max_autotune_gemm_backends", "CPP,ATEN"))
_BY_NAME = "it calls operators by name"

CASES = {
    "convolution, attention and sort": Case(Vision, (4, 3, 16, 16)),
    "sizes from values, control flow": Case(Shapes, (5, 6), is_static=True),
    "tuned matmul": Case(Shapes, (64, 6), is_static=True, options=_TUNED),
    "operator by name": Case(Inverse, (3, 4, 4), refusal=_BY_NAME),
    "frozen convolution": Case(Convolution, (4, 3, 16, 16), "", is_static=True, options=_FROZEN),
}


def _make_model(case: Case) -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return case.module().eval(), torch.randn(case.shape)


def build(folder: Path) -> None:
    """Compile all cases with this torch."""
    import inductor_ext

    for number, case in enumerate(CASES.values()):
        module, x = _make_model(case)
        sizes = {} if case.is_static else {0: torch.export.Dim("batch", min=2, max=64)}
        program = torch.export.export(module, (x,), dynamic_shapes=(sizes,), strict=False)
        inductor_ext.aoti_compile_and_package(
            program,
            package_path=str(folder / f"{number}.pt2"),
            inductor_configs=dict(case.options),
        )


def _outcome(case: Case, path: Path) -> str:
    """Return "runs", "refused: " and the reason, or what is wrong."""
    import inductor_ext

    module, x = _make_model(case)
    try:
        compiled = inductor_ext.load(path)
    except inductor_ext.exc.IncompatibleArtifactError as error:
        return f"refused: {error.fields['why']}"
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(x), module(x))
        if case.parameter:
            value = torch.full_like(module.state_dict()[case.parameter], 0.5)
            compiled.update_constants({case.parameter: value}, inactive=True)
            compiled.swap_constants()
            module.load_state_dict({case.parameter: value}, strict=False)
            torch.testing.assert_close(compiled(x), module(x))
    try:
        compiled(x.double())
    except inductor_ext.exc.InputMismatchError:
        return "runs"
    return "accepts an input of another dtype"


def run(folder: Path) -> dict[str, str]:
    """Load and call all packages of a folder with this torch; return the outcome by case."""
    outcomes = {}
    for number, (name, case) in enumerate(CASES.items()):
        try:
            outcomes[name] = _outcome(case, folder / f"{number}.pt2")
        except Exception as error:  # reported as the outcome
            outcomes[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return outcomes


def is_expected(case: Case, outcome: str, is_same_release: bool) -> bool:
    """Whether the outcome of loading a package is the right one."""
    if is_same_release or not case.refusal:
        return outcome == "runs"
    return outcome.startswith("refused: ") and case.refusal in outcome


def _call(python: str, action: str, folder: Path) -> dict[str, Any]:
    """Run `action` in a Python of its own; return what it prints."""
    command = [python, "-m", _MODULE, f"--{action}", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(results.CHECKOUT)}
    process = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    printed: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return printed


def measure(pythons: Sequence[str], folder: Path) -> tuple[list[results.Row], bool]:
    """Build with each Python and run with each; return the rows, and whether all is as expected."""
    rows, is_right = [], True
    versions, folders = [], []
    for number, python in enumerate(pythons):
        folders.append(folder / str(number))
        folders[-1].mkdir()
        versions.append(str(_call(python, "build", folders[-1])["torch"]))
    for built, packages in zip(versions, folders, strict=True):
        for loading, python in zip(versions, pythons, strict=True):
            outcomes = _call(python, "run", packages)["outcomes"]
            is_same = built.split(".")[:2] == loading.split(".")[:2]
            right = {
                name: is_expected(case, outcomes[name], is_same) for name, case in CASES.items()
            }
            for name, outcome in outcomes.items():
                print(f"{built} -> {loading}, {name}: {outcome}", flush=True)
            count = sum(outcome == "runs" for outcome in outcomes.values())
            pair = f"compiled with {built}, loaded with {loading}"
            rows.append(results.make_row(pair, "run", "models", better="higher", ours=count))
            refused = sum(outcome.startswith("refused") for outcome in outcomes.values())
            rows.append(results.make_row(pair, "refused by name", "models", ours=refused))
            wrong = ", ".join(name for name, fits in right.items() if not fits)
            rows.append(
                results.make_row(
                    pair,
                    "wrong",
                    "models",
                    ours=len(right) - sum(right.values()),
                    note=wrong or None,
                )
            )
            is_right = is_right and all(right.values())
    return rows, is_right


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(prog=f"python -m {_MODULE}", description=__doc__)
    parser.add_argument("pythons", nargs="*", help="Pythons with torch, numpy and the tools")
    parser.add_argument("--json-out", type=Path, default=results.RESULTS, help="folder of results")
    parser.add_argument("--build", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.build:
        build(options.build)
        print(json.dumps({"torch": torch.__version__}))
        return 0
    if options.run:
        print(json.dumps({"outcomes": run(options.run)}))
        return 0
    if len(options.pythons) < 2:
        parser.error("give at least two Pythons, each with another torch")
    header = results.collect_header("across-torch", results.format_command())
    with tempfile.TemporaryDirectory() as folder:
        rows, is_right = measure(options.pythons, Path(folder))
    document: results.Document = {**header, "rows": rows}
    print(f"written: {results.write(options.json_out, document)}")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
