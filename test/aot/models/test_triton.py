"""AOT artifacts on CUDA: user-defined Triton kernels, cubins, devices, grids and streams."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from test.support import aot_util
from test.support.aot_util import Artifact

pytestmark = pytest.mark.gpu

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.fixture
def kernels() -> Any:
    """The kernels; importing them needs triton."""
    from test.support import triton_kernels

    return triton_kernels


def compiled(
    function: Callable[..., Any], args: tuple[Any, ...], dynamic: Any = None, **configs: Any
) -> Artifact:
    """Exported by dynamo, which traces launches of user-defined kernels."""
    program = aot_util.export(function, args, None, dynamic, strict=True)
    path = aot_util.compile_program(program, **configs)
    return Artifact(aot_util.as_module(function), program, path)


def tensors(count: int, *shape: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(*shape, device="cuda") for _ in range(count))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", ["tuple", "lambda", "named"])
def test_grids(kernels: Any, kind: str, dynamic: bool) -> None:
    """A grid as a tuple, as a lambda and as a function, of static and of dynamic size."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        n = x.numel()
        if kind == "tuple":
            kernels.add_kernel[((n + 63) // 64,)](x, y, out, n, BLOCK=64)
        elif kind == "lambda":
            kernels.add_kernel[lambda meta: ((n + meta["BLOCK"] - 1) // meta["BLOCK"],)](
                x, y, out, n, BLOCK=64
            )
        else:

            def grid(meta: dict[str, int]) -> tuple[int]:
                return (-(-n // meta["BLOCK"]),)

            kernels.add_kernel[grid](x, y, out, n, BLOCK=64)
        return out * 2

    shapes = ({0: Dim("rows", min=2)},) * 2 if dynamic else None
    artifact = compiled(function, tensors(2, 7, 33), shapes)
    artifact.check(*tensors(2, 7, 33))
    if dynamic:
        for rows in (2, 100):
            artifact.check(*tensors(2, rows, 33))


@pytest.mark.parametrize("dynamic", [False, True])
def test_autotuned(kernels: Any, dynamic: bool) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total, scaled = torch.empty_like(x), torch.empty_like(x)
        rows, columns = x.shape
        n = rows * columns
        kernels.autotuned_add_kernel[lambda meta: (-(-n // meta["BLOCK"]),)](x, y, total, n)
        kernels.autotuned_scale_2d_kernel[
            lambda meta: (-(-rows // meta["ROWS"]), -(-columns // meta["COLUMNS"]))
        ](total, scaled, rows, columns, 0.5)
        return total, scaled + 1

    shapes = ({0: Dim("rows", min=2, max=512)},) * 2 if dynamic else None
    artifact = compiled(function, tensors(2, 40, 50), shapes)
    for rows in (2, 3, 512) if dynamic else (40,):
        artifact.check(*tensors(2, rows, 50))


def test_several_results_and_a_mutation(kernels: Any) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total, difference = torch.empty_like(x), torch.empty_like(x)
        n = x.numel()
        kernels.sum_and_difference_kernel[(-(-n // 32),)](x, y, total, difference, n, BLOCK=32)
        kernels.double_in_place_kernel[(-(-n // 32),)](total, n, BLOCK=32)
        kernels.double_in_place_kernel[(-(-n // 32),)](y, n, BLOCK=32)
        return total, difference.relu()

    artifact = compiled(function, tensors(2, 100))
    artifact.check(*tensors(2, 100))


@pytest.mark.parametrize("scale", [1, 1.0, 2, 0.25])
def test_scalar_and_missing_arguments(kernels: Any, scale: float) -> None:
    """Arguments equal to 1 become part of the kernel; so does a pointer that is None."""

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kernel, n = kernels.optional_scaled_add_kernel, y.numel()
        both, every, second = torch.empty_like(y), torch.empty_like(y), torch.empty_like(y)
        kernel[(-(-n // 32),)](x, y, both, n, 1, scale, HAS_Y=True, BLOCK=32)
        kernel[(-(-n // 32),)](x, None, every, n, 1, scale, HAS_Y=False, BLOCK=32)
        kernel[(-(-n // 32),)](x, None, second, n, 2, scale, HAS_Y=False, BLOCK=32)
        return both, every, second

    args = torch.randn(200, device="cuda"), torch.randn(100, device="cuda")
    compiled(function, args).check(*args)


def test_size_expressions_as_arguments_and_grid(kernels: Any) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([x, y, x])
        n = joined.shape[0] // 2 + x.shape[0] % 5 + 1
        out = joined.new_zeros(joined.shape)
        kernels.add_kernel[lambda meta: ((n + meta["BLOCK"] - 1) // meta["BLOCK"],)](
            joined, joined, out, n, BLOCK=16
        )
        return out

    def args(a: int, b: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(a, device="cuda"), torch.randn(b, device="cuda")

    shapes = {0: Dim("a", min=4)}, {0: Dim("b", min=4)}
    artifact = compiled(function, args(20, 30), shapes)
    for sizes in ((20, 30), (4, 4), (33, 101)):
        artifact.check(*args(*sizes))


def test_a_kernel_after_inputs_of_other_layouts(kernels: Any) -> None:
    """Views and constants as arguments: the kernel gets the same pointer as in eager mode."""
    constant = torch.randn(4, 8, device="cuda")

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.empty(4, 8, device="cuda")
        kernels.add_kernel[(1,)](x[1:].contiguous(), constant, out, 32, BLOCK=32)
        row = torch.empty(8, device="cuda")
        kernels.add_kernel[(1,)](x[2], x[3], row, 8, BLOCK=8)
        return out, row

    args = tensors(1, 5, 8)
    compiled(function, args).check(*args)


def test_a_kernel_in_a_cond(kernels: Any) -> None:
    """As an operator; the next test launches the kernel directly."""

    @torch.library.triton_op("test_aot_triton::double", mutates_args={})
    def double(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        n = x.numel()
        torch.library.wrap_triton(kernels.add_kernel)[(-(-n // 32),)](x, x, out, n, BLOCK=32)
        return out

    def function(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(p, lambda x: double(x), lambda x: x - 1, (x,))

    (x,) = tensors(1, 100)
    yes, no = (torch.tensor(value, device="cuda") for value in (True, False))
    artifact = aot_util.compile_model(function, (yes, x))
    artifact.check(yes, x)
    artifact.check(no, x)


def test_a_kernel_that_export_drops_warns(kernels: Any, caplog: pytest.LogCaptureFixture) -> None:
    """torch.export returns a branch that returns the result of `empty_like`."""

    def function(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        def launched(x: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(x)
            kernels.add_kernel[(-(-x.numel() // 32),)](x, x, out, x.numel(), BLOCK=32)
            return out

        return torch.cond(p, launched, lambda x: x - 1, (x,))

    (x,) = tensors(1, 100)
    yes, no = (torch.tensor(value, device="cuda") for value in (True, False))
    program = aot_util.export(function, (yes, x), strict=True)
    assert "triton_kernel_wrapper" not in program.graph_module.print_readable(print_output=False)
    with caplog.at_level("WARNING", "inductor_ext"):
        path = aot_util.compile_program(program)
    assert "true_graph_0 returns empty_like uninitialized" in caplog.text
    Artifact(aot_util.as_module(function), program, path).check(no, x)


def test_triton_operator(kernels: Any) -> None:
    """A kernel inside an operator of `torch.library.triton_op`."""

    @torch.library.triton_op("test_aot_triton::add", mutates_args={})
    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        n = x.numel()
        torch.library.wrap_triton(kernels.add_kernel)[(-(-n // 64),)](x, y, out, n, BLOCK=64)
        return out

    args = tensors(2, 50)
    aot_util.compile_model(lambda x, y: add(x, y) + 1, args).check(*args)


def test_shared_memory_above_the_default_limit(kernels: Any) -> None:
    """A launch has to request more than 48 KiB explicitly."""

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = torch.empty(128, 128, device="cuda")
        kernels.matmul_kernel[(1,)](a, b, out, 512, N=128, BLOCK=128, K=64, num_stages=3)
        return out

    args = torch.randn(128, 512, device="cuda").half(), torch.randn(512, 128, device="cuda").half()
    artifact = compiled(function, args)
    artifact.tolerance = 5e-2
    artifact.check(*args)


def test_grids_above_the_limit_of_the_second_dimension() -> None:
    """A transposed copy has a two-dimensional grid with at most 65535 blocks in the second."""
    shapes = ({0: Dim("rows", min=2, max=2**24)},)
    artifact = aot_util.compile_model(
        lambda x: x.t().contiguous() + 1, (torch.randn(300, 3, device="cuda"),), None, shapes
    )
    for rows in (300, 5_000_000):
        artifact.check(torch.randn(rows, 3, device="cuda"))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu().softmax(-1)


def layers(device: str = "cuda") -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Layers().to(device), torch.randn(4, 16, device=device)


@pytest.mark.parametrize("embedded", [False, True])
@pytest.mark.parametrize("multi_arch", [False, True])
def test_kernel_binaries(embedded: bool, multi_arch: bool) -> None:
    """In separate files or inside the library, for one architecture or for several."""
    model, x = layers()
    artifact = aot_util.compile_model(
        model,
        (x,),
        aot_inductor__embed_kernel_binary=embedded,
        aot_inductor__emit_multi_arch_kernel=multi_arch,
    )
    artifact.check(x)
    suffixes = {pathlib.Path(name).suffix for name in artifact.names()}
    assert (".cubin" in suffixes) == (not embedded and not multi_arch)
    assert (".fatbin" in suffixes) == (not embedded and multi_arch)


def test_a_kernel_binary_that_is_missing(tmp_path: pathlib.Path) -> None:
    """The runtime raises an error; the process neither crashes nor returns a result."""
    model, x = layers()
    artifact = aot_util.compile_model(model, (x,), aot_inductor__embed_kernel_binary=False)
    library = artifact.unpack(tmp_path)
    binaries = list(tmp_path.rglob("*.cubin"))
    assert binaries
    for binary in binaries:
        binary.unlink()
    with pytest.raises(RuntimeError):
        torch._C._aoti.AOTIModelContainerRunnerCuda(
            str(library), 1, "cuda", str(library.parent)
        ).run([x])
    artifact.check(x)


def test_tuned_kernels_are_packaged() -> None:
    """Tuning compiles many kernels; the artifact contains only those that it launches."""
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten())
    model.append(nn.Linear(8 * 14 * 14, 32)).cuda().half()
    x = torch.randn(2, 4, 16, 16, device="cuda", dtype=torch.half)
    artifact = aot_util.compile_model(model, (x,), tolerance=2e-2, max_autotune=True)
    artifact.check(x)


def test_cpu_and_gpu_in_one_model() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        there = (x + 1).cpu() + 2
        return there.to("cuda") * x, there + y, (y * 3).cuda()

    artifact = aot_util.compile_model(function, (*tensors(1, 8, 4), torch.randn(8, 4)))
    artifact.check(*tensors(1, 8, 4), torch.randn(8, 4))


@two_gpus
def test_a_device_other_than_the_default() -> None:
    """Compiled on the second device and called while the first one is current."""
    model, x = layers("cuda:1")
    with torch.cuda.device(1):
        artifact = aot_util.compile_model(model, (x,))
    loaded = aot_util.load(artifact.path, device_index=1)
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), model(x))
    assert torch.cuda.current_device() == 0


@two_gpus
def test_loaded_on_another_device_than_compiled_for() -> None:
    model, x = layers()
    artifact = aot_util.compile_model(model, (x,))
    loaded = aot_util.load(artifact.path, device_index=1)
    with torch.no_grad():
        expected = model(x)
    result = loaded(x.to("cuda:1"))
    assert result.device == torch.device("cuda:1")
    torch.testing.assert_close(result.to("cuda:0"), expected)
    artifact.check(x)


@two_gpus
def test_two_gpus_in_one_model() -> None:
    """Inductor's C++ runs on one device; the error is raised before anything is written."""

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x + 1).to("cuda:1") * y, (y - 1).to("cuda:0") * x

    args = torch.randn(8, device="cuda:0"), torch.randn(8, device="cuda:1")
    with pytest.raises(Exception, match="one CUDA device"):
        aot_util.compile_model(function, args)


def test_streams() -> None:
    """An artifact works on the current stream: what was queued there before it has happened."""
    model, x = layers()
    artifact = aot_util.compile_model(model, (x,))
    artifact.check(x)
    with torch.no_grad():
        expected = model(x)
    side = torch.cuda.Stream()
    for _ in range(3):
        late = torch.zeros_like(x)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            late.copy_(x)
            result = artifact(late)
            doubled = result * 2
        side.synchronize()
        torch.testing.assert_close(doubled, expected * 2)


def test_cuda_graph_around_an_artifact() -> None:
    """Nothing in a call synchronises or touches another stream, so it can be recorded."""
    model, x = layers()
    artifact = aot_util.compile_model(model, (x,))
    static = x.clone()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            artifact(static)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = artifact(static)
    fresh = torch.randn_like(x)
    static.copy_(fresh)
    graph.replay()
    with torch.no_grad():
        torch.testing.assert_close(result, model(fresh))
