"""Matmuls of whole graphs on a CUDA device: results of extension kernels, however they are run."""

from __future__ import annotations

import contextlib
import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor
import torch._inductor.config as inductor_config
from torch._inductor.utils import fresh_cache

import inductor_ext
from inductor_ext import events
from inductor_ext.autotune import decide
from inductor_ext.hooks.records import CompileRecord
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.records import MatmulRecord
from inductor_ext.templates.triton import search_space
from inductor_ext.templates.triton.config import GemmConfig
from test.support import gpu_util
from test.support.gpu_util import device

pytestmark = pytest.mark.gpu

F = torch.nn.functional

ERROR = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Relative error of the whole result against float64."""


@pytest.fixture(autouse=True)
def uncached() -> Iterator[None]:
    torch.manual_seed(0)
    with gpu_util.compiling():
        yield


def first(*templates: str) -> decide.Rule:
    """A rule that takes the first candidate of one of these templates, or of any."""

    def rule(problem: GemmProblem) -> GemmConfig | None:
        results = search_space.candidates(problem, device())
        return next((item for item in results if not templates or item.template in templates), None)

    return rule


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float() if x.dtype != torch.float64 else x
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


class Layer(torch.nn.Module):
    """A transformer layer, with an elementwise product instead of attention."""

    def __init__(self, width: int = 256, hidden: int = 512) -> None:
        super().__init__()
        sizes = {"q": width, "k": width // 2, "v": width // 2, "o": width}
        for name, columns in {**sizes, "gate": hidden, "up": hidden}.items():
            setattr(self, name, torch.nn.Linear(width, columns, bias=name == "o"))
        self.down = torch.nn.Linear(hidden, width)
        self.weight = torch.nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = norm(x, self.weight)
        x = x + self.o(self.q(h) * torch.cat([self.k(h), self.v(h)], -1))
        h = norm(x, self.weight)
        out: torch.Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return out


class PreNorm(torch.nn.Module):
    """A layer of a vision or diffusion model, whose every linear layer has a bias."""

    def __init__(self, width: int = 256, hidden: int = 512) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(width) for _ in "ab"])
        self.qkv = torch.nn.ModuleList([torch.nn.Linear(width, width) for _ in "qkv"])
        self.proj = torch.nn.Linear(width, 2 * hidden)
        self.down = torch.nn.Linear(hidden, width)
        for norm in self.norms:
            torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
            torch.nn.init.normal_(norm.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norms[0](x)
        q, k, v = (item(h) for item in self.qkv)
        x = x + torch.sigmoid(q - k) + v
        hidden, gate = self.proj(self.norms[1](x)).chunk(2, dim=-1)
        out: torch.Tensor = x + self.down(hidden * F.gelu(gate))
        return out


def exact(module: torch.nn.Module) -> torch.nn.Module:
    return copy.deepcopy(module).double()


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    difference = torch.linalg.vector_norm(value.double() - reference.double())
    return (difference / torch.linalg.vector_norm(reference.double())).item()


def chosen(records: list[events.Record]) -> list[GemmConfig | None]:
    return [record.chosen for record in records if isinstance(record, MatmulRecord)]


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("rows", [1, 8, 33, 300])
def test_a_layer_equals_float64(dtype: torch.dtype, rows: int) -> None:
    module = Layer().cuda().to(dtype)
    x = torch.randn(rows, 256, device="cuda", dtype=dtype)
    with torch.no_grad(), decide.force_config(first()), events.capture() as records:
        out = torch.compile(module, backend="inductor_ext", dynamic=False)(x)
        reference = exact(module)(x.double())
    assert relative_error(out, reference) < ERROR[dtype]
    configs = chosen(records)
    # Four kernels, of which two have fused norms; float32 sums of squares are accurate enough.
    assert 4 <= len(configs) <= 7
    assert None not in configs


@pytest.mark.parametrize("rows", [8, 300])
@pytest.mark.parametrize("packaged", [False, True])
def test_frozen_weights_of_one_input_are_joined(rows: int, packaged: bool, tmp_path: Path) -> None:
    module = Layer().cuda().to(torch.bfloat16)
    x = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad(), decide.force_config(first()), events.capture() as records:
        if packaged:
            program = torch.export.export(module, (x,))
            path = str(tmp_path / "layer.pt2")
            activation = inductor_ext.activate(artifact_cache=False)
            with activation, inductor_config.patch(freezing=True):
                inductor_ext.aoti_compile_and_package(program, package_path=path)
            out = torch._inductor.aoti_load_package(path)(x)
        else:
            with inductor_config.patch(freezing=True):
                out = torch.compile(module, backend="inductor_ext", dynamic=False)(x)
        reference = exact(module)(x.double())
    assert relative_error(out, reference) < ERROR[torch.bfloat16]
    matmuls = [record for record in records if isinstance(record, MatmulRecord)]
    # Q, K and V; the output projection; gate and up projection; and the last matmul.
    assert len(matmuls) == 4
    assert None not in chosen(records)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 8, 33, 300])
def test_layer_norms_and_biased_gates_equal_float64(dtype: torch.dtype, rows: int) -> None:
    module = PreNorm().cuda().to(dtype)
    x = torch.randn(2, rows, 256, device="cuda", dtype=dtype)
    with torch.no_grad(), decide.force_config(first()), events.capture() as records:
        out = torch.compile(module, backend="inductor_ext", dynamic=False)(x)
        reference = exact(module)(x.double())
    assert relative_error(out, reference) < ERROR[dtype]
    # The norm with Q, K and V; the norm with gate and up projection; the last matmul.
    configs = chosen(records)
    assert len(configs) == 3
    assert None not in configs


def test_three_dimensions_and_a_batch() -> None:
    module = Layer().cuda().bfloat16()
    x = torch.randn(3, 5, 256, device="cuda", dtype=torch.bfloat16)
    a = torch.randn(6, 70, 40, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(6, 40, 33, device="cuda", dtype=torch.bfloat16)

    def function(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
        return module(x), torch.relu(a @ b)

    with torch.no_grad(), decide.force_config(first()), events.capture() as records:
        layer, matmul = torch.compile(function, backend="inductor_ext", dynamic=False)(x, a, b)
        assert relative_error(layer, exact(module)(x.double())) < ERROR[torch.bfloat16]
    assert relative_error(matmul, torch.relu(a.double() @ b.double())) < ERROR[torch.bfloat16]
    assert None not in chosen(records)


def test_unknown_rows_take_their_branches() -> None:
    module = Layer().cuda().bfloat16()

    def by_size(problem: GemmProblem) -> GemmConfig | None:
        return None if problem.m == 256 else first()(problem)

    compiled = torch.compile(module, backend="inductor_ext", dynamic=True)
    wide = exact(module)
    with torch.no_grad(), decide.force_config(by_size), events.capture(CompileRecord) as records:
        for rows in (7, 16, 17, 64, 65, 256, 257, 2048, 3000):
            x = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16)
            assert relative_error(compiled(x), wide(x.double())) < ERROR[torch.bfloat16], rows
    assert len(records) == 1


class TestUnknownSizes:
    """All sizes of a matmul are dynamic."""

    @pytest.mark.parametrize(
        "template", ["gemv", "splitk", "cp_async", "persistent_tma", "bmm_persistent"]
    )
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_matmuls(self, template: str, dtype: torch.dtype) -> None:
        def mlp(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, b: torch.Tensor) -> Any:
            # K of the first is always a multiple of 8, so that TMA can load it.
            hidden = torch.relu(x.flatten(1) @ w.flatten(1).t())
            return torch.addmm(b, hidden, v), torch.bmm(w.transpose(1, 2), w)

        def inputs(m: int, n: int, k: int) -> tuple[torch.Tensor, ...]:
            sizes = (m, k, 8), (n, k, 8), (n, k), (k,)
            results = [torch.randn(*size, device="cuda", dtype=dtype) / 4 for size in sizes]
            for item in results:
                torch._dynamo.mark_dynamic(item, list(range(min(2, item.dim()))))
            return tuple(results)

        compiled = torch.compile(mlp, backend="inductor_ext")
        with (
            decide.force_config(first(template)),
            events.capture(CompileRecord) as compiles,
            events.capture() as records,
        ):
            for sizes in ((6, 48, 40), (7, 33, 5), (300, 129, 64), (2050, 1000, 31), (2, 2, 2)):
                values = inputs(*sizes)
                exact = mlp(*(item.double() for item in values))
                for results, expected in zip(compiled(*values), exact, strict=True):
                    assert relative_error(results, expected) < ERROR[dtype], sizes
        assert len(compiles) == 1
        if device().capability >= (9, 0):
            assert {item.template for item in chosen(records) if item} == {template}

    def test_attention(self) -> None:
        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return torch.softmax(torch.bmm(q, k.mT) / 8, -1).bmm(v)

        def by_size(problem: GemmProblem) -> GemmConfig | None:
            return None if problem.m == 64 else first()(problem)

        compiled = torch.compile(attention, backend="inductor_ext")
        with decide.force_config(by_size), events.capture(CompileRecord) as records:
            for size in (128, 9, 64, 65, 300, 1000, 2100):
                inputs = torch.randn(3, 8, size, 64, device="cuda", dtype=torch.bfloat16).unbind()
                for item in inputs:
                    torch._dynamo.mark_dynamic(item, 1)
                exact = attention(*(item.double() for item in inputs))
                result = compiled(*inputs)
                assert relative_error(result, exact) < ERROR[torch.bfloat16], size
        assert len(records) == 1


@pytest.mark.parametrize("options", [{"cpp_wrapper": True}, {"triton.cudagraphs": True}], ids=str)
def test_other_ways_to_compile_equal_float64(options: dict[str, Any]) -> None:
    module = Layer().cuda().bfloat16()
    compiled = torch.compile(module, backend="inductor_ext", options=options, dynamic=False)
    wide = exact(module)
    with torch.no_grad(), decide.force_config(first()), events.capture() as records:
        for _ in range(4):
            x = torch.randn(8, 256, device="cuda", dtype=torch.bfloat16)
            assert relative_error(compiled(x).clone(), wide(x.double())) < ERROR[torch.bfloat16]
    assert chosen(records)
    assert None not in chosen(records)


@pytest.mark.parametrize(
    "options", [{}, {"cpp_wrapper": True}, {"triton.cudagraphs": True}], ids=str
)
def test_splits_are_added_up_in_one_launch(options: dict[str, Any]) -> None:
    config = GemmConfig("splitk", 16, 32, 64, 3, 2, split_k=8, fused_split_k=True)
    layers = torch.nn.Linear(4096, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 512)
    module = torch.nn.Sequential(*layers).cuda().bfloat16()
    compiled = torch.compile(module, backend="inductor_ext", options=options, dynamic=False)
    wide = exact(module)
    with torch.no_grad(), decide.force_config(lambda _: config), events.capture() as records:
        x = torch.randn(8, 4096, device="cuda", dtype=torch.bfloat16)
        first_result = compiled(x).clone()
        for _ in range(20):
            assert torch.equal(compiled(x), first_result)
        assert relative_error(first_result, wide(x.double())) < ERROR[torch.bfloat16]
    assert chosen(records) == [config, config]


_LOAD = """
import sys
sys.modules["triton"] = None
import torch
package, given, out = sys.argv[1:]
x = torch.load(given).cuda()
run = torch._inductor.aoti_load_package(package)
torch.save(run(x).cpu(), out)
"""


@pytest.mark.parametrize("unknown", [False, True], ids=["static", "dynamic"])
def test_a_package_runs_without_triton(unknown: bool, tmp_path: Path) -> None:
    module = Layer().cuda().bfloat16()
    x = torch.randn(8, 256, device="cuda", dtype=torch.bfloat16)
    shapes = ({0: torch.export.Dim("rows", min=2, max=4096)},) if unknown else None
    program = torch.export.export(module, (x,), dynamic_shapes=shapes)

    def by_size(problem: GemmProblem) -> GemmConfig | None:
        return None if problem.m == 256 else first()(problem)

    with inductor_ext.activate(artifact_cache=False), decide.force_config(by_size):
        package = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "layer.pt2")
        )
    wide = exact(module)
    run = inductor_ext.load(package)
    with torch.no_grad():
        for rows in (8, 100, 3000) if unknown else (8,):
            x = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16)
            assert relative_error(run(x), wide(x.double())) < ERROR[torch.bfloat16]
        torch.save(x.cpu(), tmp_path / "x.pt")
        command = [sys.executable, "-c", _LOAD, package, tmp_path / "x.pt", tmp_path / "out.pt"]
        subprocess.run(command, check=True)
        out = torch.load(tmp_path / "out.pt").cuda()
        assert relative_error(out, wide(x.double())) < ERROR[torch.bfloat16]


class TestGroups:
    """torch._grouped_mm and its backward: groups along M, and along K or N."""

    ENDS = (8, 16, 200, 512)

    @staticmethod
    def exact(a: torch.Tensor, b: torch.Tensor, ends: tuple[int, ...]) -> torch.Tensor:
        spans = [slice(begin, end) for begin, end in zip((0, *ends), ends, strict=False)]
        if a.dim() == 2 and b.dim() == 3:
            return torch.cat([a[span] @ b[g] for g, span in enumerate(spans)])
        if a.dim() == 3:
            return torch.cat([a[g] @ b[:, span] for g, span in enumerate(spans)], 1)
        return torch.stack([a[:, span] @ b[span] for span in spans])

    @pytest.mark.parametrize("transposed", [False, True])
    @pytest.mark.parametrize(
        ("divided", "dynamic"), [("m", False), ("m", True), ("n", False), ("k", False)]
    )
    def test_training(self, divided: str, transposed: bool, dynamic: bool) -> None:
        if device().capability < (9, 0):
            pytest.skip("torch._grouped_mm needs compute capability 9.0")

        def function(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            b = b.transpose(-1, -2) if transposed else b
            return torch._grouped_mm(a, b, offs=ends) * 2

        def inputs(tokens: int) -> list[torch.Tensor]:
            shapes = {
                "m": ((tokens, 256), (4, 256, 384)),
                "n": ((4, 256, 384), (384, tokens)),
                "k": ((256, tokens), (tokens, 384)),
            }[divided]
            results = []
            for index, shape in enumerate(shapes):
                size = (*shape[:-2], shape[-1], shape[-2]) if index and transposed else shape
                each = torch.randn(*size, device="cuda", dtype=torch.bfloat16) / 8
                if dynamic and tokens in size:
                    torch._dynamo.mark_dynamic(each, size.index(tokens))
                results.append(each.requires_grad_())
            return results

        compiled = torch.compile(function, backend="inductor_ext", dynamic=None)
        with (
            decide.force_config(first("grouped")),
            # In this thread, to which the rule applies, instead of autograd's device thread.
            functorch_config.patch(force_non_lazy_backward_lowering=True),
            events.capture() as records,
        ):
            for tokens in (512, 1024) if dynamic else (512,):
                ends = tuple(end * tokens // 512 for end in self.ENDS)
                values = inputs(tokens)
                out = compiled(*values, torch.tensor(ends, dtype=torch.int32, device="cuda"))
                gradient = torch.randn_like(out)
                out.backward(gradient)
                wide = [tensor.detach().double().requires_grad_() for tensor in values]
                a, b = wide[0], wide[1].transpose(-1, -2) if transposed else wide[1]
                expected = self.exact(a, b, ends) * 2
                expected.backward(gradient.double())
                assert relative_error(out, expected) < ERROR[torch.bfloat16]
                for extension, theirs in zip(values, wide, strict=True):
                    assert relative_error(extension.grad, theirs.grad) < 2 * ERROR[torch.bfloat16]
        configs = [config for config in chosen(records) if config is not None]
        # The matmul, and one for each gradient; with dynamic rows one for each M bucket.
        assert len(configs) == 3 or (dynamic and len(configs) > 3)
        assert {config.template for config in configs} == {"grouped"}


class Products(torch.nn.Module):
    def forward(self, x: torch.Tensor, w: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
        return torch.relu(x @ w.t()), a @ b


def product_inputs(rows: int) -> tuple[torch.Tensor, ...]:
    # More tiles than multiprocessors, and a batch.
    sizes = (rows, 512), (2048, 512), (16, 384, 256), (16, 256, 320)
    return tuple(torch.randn(*size, device="cuda", dtype=torch.bfloat16) for size in sizes)


@contextlib.contextmanager
def by_tma() -> Iterator[None]:
    """Inside, both matmuls get kernels that use TMA."""
    templates = {"persistent_tma", "bmm_persistent"}
    with decide.force_config(first(*templates)), events.capture() as records:
        yield
    assert {config.template for config in chosen(records) if config} == templates


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An artifact of `Products`, loaded."""
    program = torch.export.export(Products(), product_inputs(2000))
    path = tmp_path_factory.mktemp("products") / "m.pt2"
    with inductor_ext.activate(artifact_cache=False), gpu_util.compiling(), by_tma():
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    return inductor_ext.load(path)


@pytest.mark.xdist_group("test/lowerings/test_cuda_models.py::package")
class TestDescriptorsFromCpp:
    """Each CTA of a launch writes its TMA descriptors to a place of its own."""

    @pytest.fixture(params=["jit", "package"])
    def run(self, request: pytest.FixtureRequest) -> Any:
        if device().capability < (9, 0):
            pytest.skip("TMA needs compute capability 9.0")
        if request.param == "package":
            return request.getfixturevalue("package")
        options = {"cpp_wrapper": True}
        compiled = torch.compile(Products(), backend="inductor_ext", options=options, dynamic=False)
        with by_tma():
            compiled(*product_inputs(2000))
        return compiled

    @staticmethod
    def check(results: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        exact = Products()(*(inp.double() for inp in inputs))
        for extension, theirs in zip(results, exact, strict=True):
            assert relative_error(extension, theirs) < ERROR[torch.bfloat16]

    def test_results_equal_float64(self, run: Callable[..., Any]) -> None:
        for _ in range(3):
            inputs = product_inputs(2000)
            self.check(run(*inputs), inputs)

    def test_several_streams(self, run: Callable[..., Any]) -> None:
        values = [product_inputs(2000) for _ in range(4)]
        streams = [torch.cuda.Stream() for _ in values]
        torch.cuda.synchronize()
        results: list[Any] = [None] * len(values)
        for _ in range(5):
            for index, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    results[index] = run(*values[index])
        torch.cuda.synchronize()
        for outputs, inputs in zip(results, values, strict=True):
            self.check(outputs, inputs)

    def test_a_recorded_graph(self, run: Callable[..., Any]) -> None:
        static = product_inputs(2000)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run(*static)
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = run(*static)
        for _ in range(3):
            fresh = product_inputs(2000)
            for place, value in zip(static, fresh, strict=True):
                place.copy_(value)
            # Later allocations must not overlap the graph's scratch memory.
            noise = [torch.full((1 << 20,), 255, device="cuda", dtype=torch.uint8)]
            graph.replay()
            self.check(result, fresh)
            del noise


class TestTuning:
    @pytest.fixture
    def tuned(self, tmp_path: Path) -> Callable[..., Any]:
        options = {
            "max_autotune": True,
            "autotune_num_choices_displayed": 0,
            "tuning_cache_dir": str(tmp_path),
        }
        return lambda module: torch.compile(
            module, backend="inductor_ext", options=options, dynamic=False
        )

    def test_training_with_measured_kernels_equals_float64(self, tuned: Callable[..., Any]) -> None:
        module = Layer().cuda().bfloat16()
        x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        wide, wide_x = exact(module), x.detach().double().requires_grad_()
        out, expected = tuned(module)(x), wide(wide_x)
        out.square().mean().backward()
        expected.square().mean().backward()
        assert relative_error(out, expected) < ERROR[torch.bfloat16]
        assert relative_error(x.grad, wide_x.grad) < 2 * ERROR[torch.bfloat16]
        for extension, theirs in zip(module.parameters(), wide.parameters(), strict=True):
            assert relative_error(extension.grad, theirs.grad) < 2 * ERROR[torch.bfloat16]

    def test_nothing_is_measured_twice(self, tuned: Callable[..., Any]) -> None:
        module = Layer().cuda().bfloat16()
        x = torch.randn(16, 256, device="cuda", dtype=torch.bfloat16)
        origins = []
        for _ in range(2):
            torch._dynamo.reset()
            with torch.no_grad(), events.capture(MatmulRecord) as records:
                tuned(module)(x)
            origins.append({record.origin for record in records})
        assert "measured" in origins[0]
        assert origins[1] <= {"cache", "unknown"}

    def test_the_fx_graph_cache_serves_what_was_tuned(
        self, tuned: Callable[..., Any], tmp_path: Path
    ) -> None:
        module = Layer().cuda().bfloat16()
        x = torch.randn(16, 256, device="cuda", dtype=torch.bfloat16)
        states = []
        with (
            inductor_config.patch(fx_graph_cache=True),
            fresh_cache(),
        ):
            for _ in range(2):
                torch._dynamo.reset()
                with torch.no_grad(), events.capture(CompileRecord) as records:
                    out = tuned(module)(x)
                states += [record.cache for record in records]
        assert states == ["miss", "hit"]
        assert relative_error(out, exact(module)(x.double())) < ERROR[torch.bfloat16]


def copying(problem: GemmProblem) -> GemmConfig | None:
    results = search_space.candidates(problem, device())
    return next((item for item in results if item.align_operands), None)


UNALIGNED: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]] = {
    "linear": (F.linear, ((199, 203), (301, 203), (301,))),
    "transposed": (lambda x, y: torch.relu(x.t() @ y), ((203, 199), (203, 301))),
    "batches": (torch.bmm, ((5, 67, 99), (5, 99, 101))),
    "offset": (lambda x, y: x[1:, 1:] @ y[:, 1:], ((130, 129), (128, 97))),
}


@pytest.mark.parametrize("dtype", ERROR, ids=str)
@pytest.mark.parametrize("name", UNALIGNED)
def test_aligned_copies_match_float64(name: str, dtype: torch.dtype) -> None:
    function, shapes = UNALIGNED[name]
    inputs = [torch.randn(shape, device="cuda", dtype=dtype) / 4 for shape in shapes]
    expected = function(*(inp.double() for inp in inputs))
    with decide.force_config(copying), events.capture() as records:
        result = torch.compile(function, backend="inductor_ext")(*inputs)
    (config,) = chosen(records)
    assert config is not None
    assert config.align_operands == "copy"
    assert relative_error(result, expected) < ERROR[dtype]


def test_gradients_through_copies_equal_float64() -> None:
    layer = torch.nn.Linear(203, 301, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(199, 203, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    exact(layer)(wide).square().mean().backward()
    with decide.force_config(copying):
        torch.compile(layer, backend="inductor_ext")(x).float().square().mean().backward()
    assert x.grad is not None
    assert wide.grad is not None
    assert relative_error(x.grad, wide.grad) < 2 * ERROR[torch.bfloat16]


@pytest.mark.parametrize("options", [{}, {"cpp_wrapper": True}], ids=["python", "cpp"])
@pytest.mark.parametrize("function", [torch.erf, torch.tanh])
def test_inline_ptx_is_as_near_as_cuda_s_own(
    function: Callable[[torch.Tensor], torch.Tensor], options: dict[str, Any]
) -> None:
    x = torch.cat((torch.linspace(-12, 12, 1_000_001), torch.logspace(-37, 1, 100_001))).cuda()
    result = torch.compile(function, backend="inductor_ext", options=options)(x)
    exact = function(x.double())
    size = exact.abs().float()
    unit = torch.nextafter(size, size.new_tensor(2)) - size
    # Two ulp of the formulas, and the errors of MUFU.EX2 and MUFU.RCP.
    assert ((result.double() - exact).abs() / unit.double()).max() < 2.5
    ends = torch.tensor([0.0, -0.0, 12.0, -1e30, float("inf"), float("-inf")], device="cuda")
    result = torch.compile(function, backend="inductor_ext", options=options)(ends)
    torch.testing.assert_close(result, function(ends), rtol=0, atol=0)
    nan = torch.full((3,), float("nan"), device="cuda")
    assert torch.compile(function, backend="inductor_ext", options=options)(nan).isnan().all()
