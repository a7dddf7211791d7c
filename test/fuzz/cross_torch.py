"""Packages compiled with one torch and loaded with another: correct, or rejected by name.

    python -m test.fuzz.cross_torch PYTHON PYTHON [PYTHON ...]

Every interpreter, each with another torch, compiles a package of each model below, and loads those
of all others by `inductor_ext.load` and by torch's own loader. The results are compared with eager
mode under the compiling torch. The table has a row for each pair of versions and loader; the
program exits with 1 if a result is wrong, a process dies, or `inductor_ext.load` rejects a package
without naming the package and both versions.

Run by hand, since one environment has one torch. On a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

MODELS = frozenset(filter(None, os.environ.get("CROSS_TORCH_MODELS", "").split(",")))
"""Interpreters to try; all if empty."""

LOADERS = ("inductor_ext.load", "torch.aoti_load_package")


def models() -> dict[str, Callable[[], tuple[Any, tuple[Any, ...], Any, dict[str, Any]]]]:
    """By name: functions that create a model, its inputs, its dynamic shapes and its options."""
    import torch
    from torch import nn
    from torch.export import Dim

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(24, 16)
            self.register_buffer("calls", torch.zeros(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            return self.linear(x) * self.calls

    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(24, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ (self.weight.exp() + 1)

    class Fallbacks(nn.Module):
        """Operators called by their C shims and, with dtypes among their arguments, by name."""

        def forward(self, x: torch.Tensor) -> Any:
            values, places = torch.sort(x, dim=-1)
            total = torch.cumsum(x, 1, dtype=torch.float64)
            ranks = torch.searchsorted(values, x)
            return values, places, total, ranks, torch.linalg.inv(x @ x.t() + 24 * torch.eye(3))

    class Named(nn.Module):
        """An operator called by name, with a dtype, which torch 2.11 numbers differently."""

        def forward(self, x: torch.Tensor) -> Any:
            return torch.ops.cross_torch.convert(x + 1, torch.float64) * 2

    def mlp() -> nn.Module:
        return nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 16), nn.Softmax(-1))

    def convolution() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())

    rows, image = torch.randn(3, 24), torch.randn(2, 3, 8, 8)
    folding = {"aot_inductor.use_runtime_constant_folding": True}
    return {
        "mlp": lambda: (mlp(), (rows,), None, {}),
        "dynamic": lambda: (mlp(), (rows,), ({0: Dim("rows", min=1, max=64)},), {}),
        "buffer": lambda: (Counting(), (rows,), None, {}),
        "folded": lambda: (Folded(), (rows,), None, folding),
        "fallbacks": lambda: (Fallbacks(), (rows,), None, {}),
        "named": lambda: (Named(), (rows,), None, {}),
        "convolution": lambda: (convolution(), (image,), None, {}),
    }


def register() -> Any:
    """Register the operator that "named" calls, as long as the returned object is alive."""
    import torch

    def convert(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return x.to(dtype).sin()

    library = torch.library.Library("cross_torch", "DEF")
    library.define("convert(Tensor x, ScalarType dtype) -> Tensor")
    library.impl("convert", convert, "CPU")
    torch.library.register_fake("cross_torch::convert", convert, lib=library)
    return library


def make(folder: pathlib.Path) -> None:
    """Write a package of each model and its expected results to the folder."""
    import torch

    import inductor_ext

    library = register()
    for name, model in models().items():
        if MODELS and name not in MODELS:
            continue
        torch.manual_seed(0)
        module, inputs, shapes, options = model()
        module = module.eval()
        with torch.no_grad():
            program = torch.export.export(module, inputs, dynamic_shapes=shapes)
            inductor_ext.aoti_compile_and_package(
                program, package_path=str(folder / f"{name}.pt2"), inductor_configs=options
            )
            if shapes is not None:
                inputs = tuple(torch.cat([tensor, tensor]) for tensor in inputs)
            torch.save((inputs, module(*inputs)), folder / f"{name}.pt")
    del library


def load(folder: pathlib.Path) -> Iterator[dict[str, str]]:
    """Load and run the folder's packages; return the outcomes."""
    import torch

    import inductor_ext
    from inductor_ext import exc

    library = register()
    for loader in LOADERS:
        for path in sorted(folder.glob("*.pt2")):
            inputs, expected = torch.load(path.with_suffix(".pt"))
            yield {"loader": loader, "model": path.stem, "what": "died"}
            try:
                if loader == LOADERS[0]:
                    actual = inductor_ext.load(str(path))(*inputs)
                else:
                    actual = torch._inductor.aoti_load_package(str(path))(*inputs)
                torch.testing.assert_close(actual, expected)
                what = "right"
            except exc.IncompatibleArtifactError as error:
                what = f"refused: {error}"
            except AssertionError as error:
                what = f"WRONG: {error}"
            except Exception as error:
                what = f"failed: {type(error).__name__}: {error}"
            yield {"loader": loader, "model": path.stem, "what": what}
    del library


def child(python: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [python, "-m", "test.fuzz.cross_torch", *arguments]
    root = str(pathlib.Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root}
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root)


def version(python: str) -> str:
    code = "import torch; print(torch.__version__)"
    return subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def is_good(what: str, loader: str, versions: tuple[str, str], package: str) -> bool:
    """Whether an outcome is allowed for a package of another torch."""
    if what == "right":
        return True
    if loader == LOADERS[0]:
        named = all(text in what for text in (*versions, package))
        return what.startswith("refused") and named
    return what.startswith("failed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("pythons", nargs="*", help="interpreters, each with another torch")
    parser.add_argument("--make", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--load", type=pathlib.Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.make is not None:
        make(arguments.make)
        return 0
    if arguments.load is not None:
        for record in load(arguments.load):
            print(json.dumps(record), flush=True)
        return 0
    good = True
    with tempfile.TemporaryDirectory() as place:
        versions = {python: version(python) for python in arguments.pythons}
        folders = {}
        for number, python in enumerate(arguments.pythons):
            folders[python] = pathlib.Path(place, str(number))
            folders[python].mkdir()
            process = child(python, "--make", str(folders[python]))
            if process.returncode != 0:
                print(f"{versions[python]} makes no packages:\n{process.stderr}")
                return 1
        for maker, folder in folders.items():
            for python in arguments.pythons:
                done = child(python, "--load", str(folder))
                records = map(json.loads, filter(None, done.stdout.splitlines()))
                # The last outcome of each; "died" remains if none followed.
                last = {(record["loader"], record["model"]): record["what"] for record in records}
                pair = versions[maker], versions[python]
                for loader in LOADERS:
                    whats = {model: what for (by, model), what in last.items() if by == loader}
                    complete = len(whats) == len(models_of(folder))
                    good &= complete and all(
                        is_good(what, loader, pair, f"{model}.pt2") for model, what in whats.items()
                    )
                    kinds = Counter(what.partition(":")[0] for what in whats.values())
                    row = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
                    print(f"{pair[0]:>14} -> {pair[1]:14} {loader:24} {row}", flush=True)
                    for model, what in whats.items():
                        if what != "right":
                            print(f"    {model}: {what.splitlines()[0]}")
                if not last:
                    print(done.stderr)
    return 0 if good else 1


def models_of(folder: pathlib.Path) -> list[str]:
    return [path.stem for path in folder.glob("*.pt2")]


if __name__ == "__main__":
    sys.exit(main())
