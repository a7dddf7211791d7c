"""How AOT artifacts are compiled, packaged and run: repeatedly, in threads, under contexts."""

from __future__ import annotations

import concurrent.futures
import json
import pathlib
import shutil
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, ExportedProgram

import inductor_ext
from test.support import aot_util
from test.support.aot_util import Artifact
from test.support.built_models import uncached_packages


class Layers(nn.Module):
    """A library matmul and a fused kernel, with a width that distinguishes models."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(4, width)
        self.register_buffer("scale", torch.rand(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu() * self.scale


def layers(device: str, width: int = 8) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(width)
    return Layers(width).to(device), torch.randn(3, 4, device=device)


@pytest.fixture(scope="module")
def artifact(device: str) -> Artifact:
    model, x = layers(device)
    return aot_util.compile_model(model, (x,), None, ({0: Dim("rows", min=2, max=64)},))


def test_a_model_changed_after_export(device: str) -> None:
    """An artifact keeps the weights that it was compiled with; the next one has the new ones."""
    model, x = layers(device)
    first = aot_util.compile_model(model, (x,))
    with torch.no_grad():
        model.linear.weight.mul_(2)
        model.scale.add_(1)
    first.check(x)
    second = aot_util.compile_model(model, (x,))
    second.check(x)
    first.check(x)
    assert not torch.allclose(first(x), second(x))


def test_a_program_compiled_twice(device: str) -> None:
    """A compile leaves the exported program as it was."""
    model, x = layers(device)
    program = aot_util.export(model, (x,))
    before = program.graph_module.print_readable(print_output=False)
    paths = [aot_util.compile_program(program) for _ in range(2)]
    assert program.graph_module.print_readable(print_output=False) == before
    with torch.no_grad():
        for path in paths:
            torch.testing.assert_close(aot_util.load(path)(x), model(x))
        torch.testing.assert_close(program.module()(x), model(x))


def described(artifact: Artifact) -> dict[str, Any]:
    return {
        "metadata": artifact.loaded.get_metadata(),
        "names": sorted(artifact.names()),
        "sources": artifact.sources(),
    }


def test_compiles_in_two_threads(device: str) -> None:
    """Each compile gives the same artifact as alone."""
    models = [layers(device, width) for width in (5, 11)]
    metadata = [{"who": "first", "one": "1"}, {"who": "second"}]

    def compiled(i: int, program: ExportedProgram) -> Artifact:
        path = aot_util.compile_program(program, aot_inductor__metadata=metadata[i])
        return Artifact(models[i][0], program, path)

    def programs() -> list[ExportedProgram]:
        # One after the other: export patches torch for the whole process.
        return [aot_util.export(model, (x,)) for model, x in models]

    alone = [described(compiled(i, program)) for i, program in enumerate(programs())]
    barrier = threading.Barrier(2)

    def together(i: int, program: ExportedProgram) -> Artifact:
        barrier.wait()
        return compiled(i, program)

    with concurrent.futures.ThreadPoolExecutor(2) as pool, uncached_packages():
        artifacts = list(pool.map(together, range(2), programs()))
    for i in range(2):
        for what, found in described(artifacts[i]).items():
            assert found == alone[i][what], what
        artifacts[i].check(models[i][1])


def test_grad_mode(device: str) -> None:
    """Compiled and called with grad mode on: the outputs have no autograd graph."""
    model, x = layers(device)
    program = torch.export.export(model, (x,))
    with torch.enable_grad():
        loaded = aot_util.load(aot_util.compile_program(program))
        result = loaded(x.clone().requires_grad_())
    assert not result.requires_grad
    with torch.no_grad():
        torch.testing.assert_close(result, model(x))


def test_inference_mode(artifact: Artifact, device: str) -> None:
    x = torch.randn(5, 4, device=device)
    with torch.inference_mode():
        result = artifact(x.clone())
    with torch.no_grad():
        torch.testing.assert_close(result, artifact.eager(x))


def test_autocast(device: str) -> None:
    """A region of the model; and all of it, by a context around export and compile."""

    class Region(Layers):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            with torch.autocast(x.device.type, torch.bfloat16):
                inner = self.linear(x)
            return inner.float() @ inner.float().t(), self.linear(x)

    torch.manual_seed(0)
    model, x = Region().to(device), torch.randn(3, 4, device=device)
    region = aot_util.compile_model(model, (x,), tolerance=4e-2)
    assert [out.dtype for out in region.check(x)] == [torch.float32, torch.float32]
    with torch.autocast(device, torch.bfloat16):
        whole = aot_util.compile_model(model, (x,), tolerance=4e-2)
        assert [out.dtype for out in whole.check(x)] == [torch.bfloat16, torch.bfloat16]


def test_profiler_ranges(device: str) -> None:
    """With Inductor's option, each kernel of the model is a profiler range."""
    model, x = layers(device)
    artifact = aot_util.compile_model(model, (x,), cpp__enable_kernel_profile=True)
    artifact.check(x)
    with torch.profiler.profile() as profile:
        artifact(x)
    names = {event.name for event in profile.events()}
    assert any("fused" in name for name in names), names
    assert any("mm" in name for name in names), names


def test_several_models_in_one_package(device: str, tmp_path: pathlib.Path) -> None:
    models = {f"width_{width}": layers(device, width) for width in (6, 7)}
    files = {}
    with inductor_ext.activate():
        for name, (model, x) in models.items():
            files[name] = torch._inductor.aot_compile(
                aot_util.export(model, (x,)).module(), (x,), options={"aot_inductor.package": True}
            )
        path = torch._inductor.package.package_aoti(str(tmp_path / "models.pt2"), files)
    for name, (model, x) in models.items():
        with torch.no_grad():
            torch.testing.assert_close(aot_util.load(path, name)(x), model(x))
    with pytest.raises(Exception, match="width_9"):
        aot_util.load(path, "width_9")


def test_output_path_of_a_library(device: str, tmp_path: pathlib.Path) -> None:
    """`aot_compile` writes the `.so` to the requested path, with the weights."""
    model, x = layers(device)
    target = tmp_path / "net" / "model.so"
    with inductor_ext.activate():
        path = torch._inductor.aot_compile(
            aot_util.export(model, (x,)).module(),
            (x,),
            options={"aot_inductor.output_path": str(target)},
        )
    assert pathlib.Path(path) == target
    assert target.exists()
    if device == "cuda":
        runner = torch._C._aoti.AOTIModelContainerRunnerCuda(path, 1, "cuda", str(target.parent))
    else:
        runner = torch._C._aoti.AOTIModelContainerRunnerCpu(path, 1)
    with torch.no_grad():
        torch.testing.assert_close(runner.run([x])[0], model(x))


@pytest.mark.parametrize("runners", [1, 3])
def test_threads_through_one_loaded_model(artifact: Artifact, device: str, runners: int) -> None:
    """Results are correct for all threads and any number of runners, without deadlock."""
    loaded = aot_util.load(artifact.path, num_runners=runners)
    threads, calls = 8, 50
    inputs = [torch.randn(2 + i, 4, device=device) for i in range(threads)]
    with torch.no_grad():
        expected = [artifact.eager(x) for x in inputs]
    start = threading.Barrier(threads)

    def work(i: int) -> int:
        start.wait()
        for _ in range(calls):
            torch.testing.assert_close(loaded(inputs[i]), expected[i])
        return calls

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        assert list(pool.map(work, range(threads))) == [calls] * threads


SINGLE_OP = """
import json, sys
import torch
import inductor_ext
from inductor_ext import events
from inductor_ext.hooks.records import CompileRecord

(device,) = sys.argv[1:]
x, y = torch.arange(6.0, device=device).view(2, 3), torch.ones(2, 3, device=device)
expected = torch.add(x, y)
with inductor_ext.activate(), torch.library._scoped_library(
    "aten", "IMPL"
) as library, events.capture() as records:
    library._impl_with_aoti_compile("add.Tensor", device.upper())
    results = [torch.add(x, y), torch.add(x.clone(), y)]
for result in results:
    assert torch.equal(result, expected), result
kinds = [record.kind for record in records if isinstance(record, CompileRecord)]
print(json.dumps(kinds))
"""


def test_single_operators_with_a_cache_that_stays(device: str) -> None:
    """torch's `aoti_eager`: the first process compiles the operator, the next one loads it."""
    from torch._inductor.aoti_eager import aoti_eager_cache_dir

    folder = aoti_eager_cache_dir("aten", device)
    shutil.rmtree(folder, ignore_errors=True)

    def kinds() -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", SINGLE_OP, device], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    assert "aot" in kinds()
    (listing,) = folder.rglob("add.Tensor.json")
    (entry, *_) = json.loads(listing.read_text())
    assert (listing.parent / entry["kernel_path"]).exists()
    assert kinds() == []
