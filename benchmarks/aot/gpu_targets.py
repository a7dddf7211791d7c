"""A package for several GPU architectures, built on a machine without a GPU.

    python -m benchmarks.aot.gpu_targets --build model.pt2     # without a GPU
    python -m benchmarks.aot.gpu_targets --run model.pt2       # on a GPU, also with another torch

The first command needs a CUDA build of torch, and compiles a float16 model for sm_80, sm_90, sm_100
and PTX. The second loads the package, reports which target and which kernels run, and compares the
results with the model in float64. It does the same for every other target that this GPU can run.
The exit code is 1 if a result is wrong, if kernels of another target run, or if the package has
more than one copy of the weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import inductor_ext
from benchmarks.harness import results
from inductor_ext.cpp_wrapper.package import machine, manifest, variants, zip_reader

_MODULE = "benchmarks.aot.gpu_targets"
TARGETS = ("sm_80", "sm_90", "sm_100", "ptx")
_ROWS, _WIDTH, _HIDDEN = 8, 1024, 2816
_CALLS = 200
_TEMPLATE, _TEMPLATE_FUNCTION = "triton_tem_", "triton_gemm_"
"""A template kernel in the manifest, and its function in the GPU code."""


class Block(torch.nn.Module):
    """A gated MLP with a norm and a residual, with few rows; a scalar buffer, tied weights."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(_WIDTH)
        self.gate = torch.nn.Linear(_WIDTH, _HIDDEN, bias=False)
        self.up = torch.nn.Linear(_WIDTH, _HIDDEN, bias=False)
        self.down = torch.nn.Linear(_HIDDEN, _WIDTH, bias=False)
        self.again = torch.nn.Linear(_HIDDEN, _WIDTH, bias=False)
        self.again.weight = self.down.weight
        self.head = torch.nn.Linear(_WIDTH, 256)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.norm(x)
        hidden = torch.nn.functional.silu(self.gate(y)) * self.up(y)
        x = x + self.down(hidden) * self.scale + self.again(hidden * self.scale)
        return x, torch.softmax(self.head(x), -1)


def make_model() -> tuple[torch.nn.Module, torch.Tensor]:
    """Return the model and an input, in float16 on the CPU, equal each time."""
    torch.manual_seed(0)
    return Block().eval().half(), torch.randn(_ROWS, _WIDTH).half()


def build(path: Path, targets: Sequence[str] = TARGETS) -> float:
    """Compile the model for all targets; return the seconds that it takes."""
    model, x = make_model()
    program = torch.export.export(model, (x,))
    start = time.perf_counter()
    inductor_ext.aoti_compile_and_package(program, package_path=path, targets=targets)
    return time.perf_counter() - start


def read(path: Path) -> manifest.Manifest:
    """Return the manifest of a package."""
    with zip_reader.open_package(path) as package:
        found = manifest.read(package)
    assert found is not None
    return found[0]


def find_extra_bytes(path: Path) -> int:
    """Return the bytes of a package beyond one copy of the weights and the other files.

    Weights begin at a multiple of 64 KiB, and each file has a header.
    """
    content = read(path)
    return os.path.getsize(path) - sum(file.bytes for file in content.files.values())


def choose(target: str) -> Callable[..., manifest.Manifest]:
    """Return a replacement for `variants.choose` that always selects one target."""

    def chosen(content: manifest.Manifest, name: str, *_: Any) -> manifest.Manifest:
        models = variants.candidates(content.models[name])
        (model,) = (model for model in models if model.target == target)
        return dataclasses.replace(content, models={**content.models, name: model})

    return chosen


def find_runnable(content: manifest.Manifest, capability: tuple[int, int]) -> Iterator[str]:
    """Yield the targets whose kernels run on a GPU."""
    for model in variants.candidates(content.models["model"]):
        if machine.rank_architectures(model.cuda_architectures, capability) is not None:
            yield str(model.target)


def are_kernels_of(launched: Sequence[str], own: Sequence[str]) -> bool:
    """Whether the launched Triton kernels are those of a manifest, of which some are launched."""
    templates = [name for name in own if name.startswith(_TEMPLATE)]
    functions = [name for name in launched if name.startswith(_TEMPLATE_FUNCTION)]
    others = set(launched) - set(functions)
    return bool(launched) and others <= set(own) and bool(functions) == bool(templates)


def _find_kernels(run: Callable[[], Any]) -> list[str]:
    """Return the names of the kernels that a call launches."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    events = profiler.events() or ()
    names = [event.name for event in events if event.device_type == DeviceType.CUDA]
    return [name for name in names if not name.startswith(("Memcpy", "Memset"))]


def _measure(path: Path, target: str, is_chosen: bool) -> tuple[list[results.Row], bool]:
    """Load the package, check and time it; return the rows, and whether all is right."""
    model, x = make_model()
    expected = [tensor.float() for tensor in model.double()(x.double())]
    eager = model.half().cuda()(x.cuda())
    replaced = (
        mock.patch.object(variants, "choose", choose(target)) if not is_chosen else mock.MagicMock()
    )
    with replaced:
        compiled = inductor_ext.load(path)
    assert compiled.manifest is not None
    loaded = compiled.manifest.models["model"]
    x = x.cuda()

    def error(actual: Sequence[torch.Tensor]) -> float:
        pairs = zip(actual, expected, strict=True)
        return max(
            float((one.cpu().float() - two).abs().max() / two.abs().max()) for one, two in pairs
        )

    with torch.no_grad():
        found, reference = error(compiled(x)), error(eager)
        kernels = _find_kernels(lambda: compiled(x))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(_CALLS):
            compiled(x)
        end.record()
        torch.cuda.synchronize()
    own = [kernel.name for kernel in loaded.kernels]
    generated = [name for name in kernels if name.startswith("triton_")]
    print(f"target {loaded.target}: kernels {', '.join(kernels)}", flush=True)
    is_right = loaded.target == target and found <= 2 * reference + 1e-3
    is_right = is_right and are_kernels_of(generated, own)
    case = f"{target}, chosen" if is_chosen else target
    note = ", ".join(dict.fromkeys(generated)) or None
    time_us = 1e3 * start.elapsed_time(end) / _CALLS
    return [
        results.make_row(case, "relative error", "1", ours=found, eager=reference, note=note),
        results.make_row(case, "time per call", "us", ours=time_us),
        results.make_row(case, "wrong", "packages", ours=int(not is_right)),
    ], is_right


def run(path: Path) -> tuple[list[results.Row], bool]:
    """Run all targets that this GPU can run, first the one that is chosen for it."""
    content = read(path)
    here = machine.Machine.current(torch.__version__, "cuda")
    chosen = variants.choose(content, "model", here, str(path)).models["model"].target
    assert chosen is not None
    assert here.capability is not None
    extra = find_extra_bytes(path)
    rows = [results.make_row("package", "beyond its files", "bytes", ours=extra)]
    is_right = extra < 1 << 18
    others = [name for name in find_runnable(content, here.capability) if name != chosen]
    for target in (chosen, *others):
        new, fits = _measure(path, target, target == chosen)
        rows, is_right = [*rows, *new], is_right and fits
    return rows, is_right


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(prog=f"python -m {_MODULE}", description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--build", type=Path, metavar="PACKAGE", help="compile the package")
    action.add_argument("--run", type=Path, metavar="PACKAGE", help="run it on this GPU")
    parser.add_argument("--commit", help="commit of the code, if there is no repository")
    parser.add_argument("--json-out", type=Path, default=results.RESULTS, help="folder of results")
    options = parser.parse_args(arguments)
    if options.build:
        seconds = build(options.build)
        print(f"{options.build}: {os.path.getsize(options.build)} bytes, {seconds:.1f} s")
        return 0
    header = results.collect_header("gpu-targets", results.format_command(), commit=options.commit)
    rows, is_right = run(options.run)
    document: results.Document = {**header, "rows": rows}
    print(f"written: {results.write(options.json_out, document)}")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
