"""Out variants that write into the wrapper's buffers: same values, no more memory, arenas.

`CALLS` has calls of every operator in `OUT_VARIANTS`, over strides, dimensions and element types.
Eager mode shows what the out variants do with memory; graphs of all calls, compiled at once, show
which of them are generated and that the values and strides are eager mode's.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

import inductor_ext
from benchmarks.harness import measure
from inductor_ext import events
from inductor_ext.memory.out_variants import OUT_VARIANTS, SCRATCHLESS, find_out_variant
from inductor_ext.memory.records import MemoryPlanRecord
from test.support import compile_util

aten = torch.ops.aten

Call = tuple[tuple[Any, ...], dict[str, Any]]


def operator(name: str) -> torch._ops.OpOverload:
    packet, overload = name.split(".")
    result: torch._ops.OpOverload = getattr(getattr(aten, packet), overload)
    return result


def normal(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def _calls() -> dict[str, list[Call]]:
    results: dict[str, list[Call]] = {}

    def call(name: str, *args: Any, **kwargs: Any) -> None:
        results.setdefault(name, []).append((args, kwargs))

    plain, turned, deep = normal(24, 30), normal(30, 24).t(), normal(4, 6, 10)
    whole = (plain > 0).long() * 7 + 1

    for x in (plain, turned, deep, deep[:, ::2], whole):
        for dim in (-1, 0):
            call("sort.stable", x, stable=True, dim=dim)
            call("sort.stable", x, stable=False, dim=dim, descending=True)
            call("topk.default", x, 3, dim)
            call("topk.default", x, 2, dim, False, True)
            call("kthvalue.default", x, 2, dim)
            call("mode.default", x, dim, True)
            call("median.dim", x, dim)
            call("nanmedian.dim", x, dim, True)
            for name in ("cummax", "cummin", "cumsum", "cumprod"):
                call(f"{name}.default", x, dim)
    for dim in (-1, 0):
        call("logcumsumexp.default", turned, dim)
        call("cumsum.default", whole.int(), dim, dtype=torch.float64)
    call("sort.stable", plain.half(), stable=True, dim=1)
    call("topk.default", plain.bfloat16(), 4)
    rows = torch.arange(12)
    call("index_reduce.default", plain, 0, rows, normal(12, 30), "prod")
    call("index_reduce.default", turned, 0, rows, normal(12, 30), "amax", include_self=False)

    call("addbmm.default", normal(6, 5), normal(3, 6, 4), normal(3, 4, 5), beta=0.5)
    call("addbmm.default", normal(5), normal(3, 6, 4), normal(3, 4, 5))
    call("_addmm_activation.default", normal(6), normal(5, 4), normal(4, 6))
    call("_addmm_activation.default", normal(6), normal(5, 4), normal(4, 6), use_gelu=True)

    call("gcd.default", whole * 3, whole[:, :1] + 5)

    square, right = normal(3, 8, 8), normal(3, 8, 2)
    definite = square @ square.mT + 8 * torch.eye(8)
    for matrix, column in ((square, right), (square[0], right[0])):
        call("_linalg_det.default", matrix)
        call("_linalg_slogdet.default", matrix)
        call("_linalg_solve_ex.default", matrix, column)
        call("_linalg_svd.default", matrix, False, True)
        call("linalg_inv_ex.default", matrix)
        call("linalg_lu.default", matrix)
        call("linalg_lu_factor_ex.default", matrix)
        call("geqrf.default", matrix)
        call("linalg_solve_triangular.default", matrix.triu(), column, upper=True)
        call("linalg_solve_triangular.default", matrix.mT.triu(), column.mT, upper=True, left=False)
        call("triangular_solve.default", column, matrix.triu())
        weights, pivots = torch.linalg.lu_factor(matrix)
        call("linalg_lu_solve.default", weights, pivots, column)
        call("lu_unpack.default", weights, pivots)
        call("linalg_householder_product.default", *torch.geqrf(matrix))
        call("ormqr.default", *torch.geqrf(matrix), column)
    for matrix, column in ((definite, right), (definite[0], right[0])):
        call("_linalg_eigh.default", matrix)
        call("linalg_cholesky_ex.default", matrix)
        call("cholesky_inverse.default", torch.linalg.cholesky(matrix))
        call("linalg_ldl_factor_ex.default", matrix)
        call("linalg_ldl_solve.default", *torch.linalg.ldl_factor(matrix), column)

    image, volume = normal(2, 3, 12, 12), normal(2, 3, 8, 8, 8)
    for x, last in (
        (image, torch.channels_last),
        (volume, torch.channels_last_3d),
    ):
        for value in (x, x.contiguous(memory_format=last)):
            n = x.dim() - 2
            two = [2] * n
            if n == 2:
                pooled, where = F.adaptive_max_pool2d(value, 5, return_indices=True)
                call("adaptive_max_pool2d_backward.default", normal(*pooled.shape), value, where)
                call(
                    "upsample_bicubic2d_backward.default",
                    *(normal(2, 3, 20, 20), [20, 20], [2, 3, 12, 12], False, None, None),
                )
                continue
            pooled, where = F.max_pool3d(value, 2, return_indices=True)
            call(
                "max_pool3d_with_indices_backward.default",
                *(torch.randn_like(pooled), value, two, two, [0] * n, [1] * n, False, where),
            )
            call("adaptive_max_pool3d.default", value, [3, 3, 3])
            pooled, where = aten.adaptive_max_pool3d(value, [3, 3, 3])
            call("adaptive_max_pool3d_backward.default", normal(*pooled.shape), value, where)
            call(
                "upsample_trilinear3d_backward.default",
                *(normal(2, 3, 16, 16, 16), [16] * 3, [2, 3, 8, 8, 8], False, None, None, None),
            )
    call("upsample_linear1d_backward.default", normal(2, 3, 16), [16], [2, 3, 8], False, None)
    for n, x in ((2, image), (3, volume)):
        chance = torch.full((2, 3, n), 0.3)
        pool = getattr(aten, f"fractional_max_pool{n}d").default
        pooled, where = pool(x, [2] * n, [3] * n, chance)
        name = f"fractional_max_pool{n}d_backward.default"
        call(name, normal(*pooled.shape), x, [2] * n, [3] * n, where)
    call("replication_pad1d_backward.default", normal(2, 3, 12), normal(2, 3, 8), [2, 2])
    call(
        "replication_pad2d_backward.default", normal(2, 3, 9, 12), normal(2, 3, 8, 8), [2, 2, 1, 0]
    )
    return results


CALLS = _calls()


def tensors(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, tuple | list) else [result]


def test_every_operator_has_calls_and_an_out_variant() -> None:
    assert set(CALLS) == set(OUT_VARIANTS)
    assert all(find_out_variant(operator(name)) is not None for name in OUT_VARIANTS)
    assert set(SCRATCHLESS.items()) <= set(OUT_VARIANTS.items())


def _room(value: Any) -> int:
    """Bytes of a tensor, rounded up to the alignment of an arena."""
    extent = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True)) + 1
    return (extent * value.dtype.itemsize + 63) // 64 * 64 if value.numel() else 0


def _placed(value: Any, arena: Tensor, start: int) -> Tensor:
    """A tensor of the same sizes, strides and element type, at byte `start` of `arena`."""
    place = arena[start : start + _room(value)].view(value.dtype)
    return place.as_strided(value.shape, value.stride(), place.storage_offset())


@pytest.mark.parametrize("name", OUT_VARIANTS)
@torch.no_grad()
def test_out_variants_write_into_their_outputs(name: str) -> None:
    result = find_out_variant(operator(name))
    assert result is not None
    variant, names = result
    for args, kwargs in CALLS[name]:
        expected = tensors(operator(name)(*args, **kwargs))
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args]
            declared = tensors(operator(name)(*fake, **kwargs))
        # In an arena inputs and outputs are views of one storage at different offsets.
        inputs = [a for a in args if isinstance(a, Tensor) and 0 not in a.stride()]
        sizes = [_room(value) for value in (*inputs, *declared)]
        arena = torch.ones(sum(sizes), dtype=torch.uint8)
        starts = itertools.accumulate(sizes, initial=0)
        inside = {id(a): _placed(a, arena, next(starts)).copy_(a) for a in inputs}
        args = tuple(inside.get(id(a), a) for a in args)
        outs = [_placed(value, arena, next(starts)) for value in declared]
        for out in outs:
            out.zero_().add_(1)  # no kernel may count on zeros
        places = [(out.data_ptr(), out.shape, out.stride()) for out in outs]
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # resizing warns
            warnings.filterwarnings("ignore", message=".*triangular_solve is deprecated")
            variant(*args, **kwargs, **dict(zip(names, outs, strict=True)))
        compile_util.assert_same(outs, expected)
        assert places == [(out.data_ptr(), out.shape, out.stride()) for out in outs]


@pytest.mark.parametrize("name", OUT_VARIANTS)
@torch.no_grad()
def test_out_variant_takes_no_more_memory(name: str) -> None:
    result = find_out_variant(operator(name))
    assert result is not None
    variant, names = result
    args, kwargs = CALLS[name][0]
    outs = tensors(operator(name)(*args, **kwargs))
    own = sum(out.untyped_storage().nbytes() for out in outs)
    writes = dict(zip(names, outs, strict=True))
    taken = measure.measure_peak_allocated(lambda: variant(*args, **kwargs, **writes))
    assert taken + own <= measure.measure_peak_allocated(lambda: operator(name)(*args, **kwargs))
    if name in SCRATCHLESS:
        assert taken == 0


@torch.no_grad()
def test_a_generated_out_variant_is_worse_and_not_used() -> None:
    args = (normal(8, 16, 32, 32), normal(32, 16, 3, 3), None, [1, 1], [1, 1], [1, 1])
    rest = (False, [0, 0], 1)
    convolution = aten.convolution.default
    assert torch.Tag.generated in aten.convolution.out.tags
    out = convolution(*args, *rest)
    taken = measure.measure_peak_allocated(lambda: aten.convolution.out(*args, *rest, out=out))
    assert taken >= measure.measure_peak_allocated(lambda: convolution(*args, *rest))
    assert find_out_variant(convolution) is None


@pytest.mark.parametrize(
    "other",
    [aten.sin.default, aten.sort.default, torch.ops.prims.sin.default, aten.sort, "sort.stable"],
    ids=str,
)
def test_other_operators_have_no_out_variant(other: object) -> None:
    assert find_out_variant(other) is None


@contextlib.contextmanager
def uncached(**patches: Any) -> Iterator[None]:
    torch._dynamo.reset()
    with inductor_config.patch({"fx_graph_cache": False, **patches}):
        yield


def code_of(
    function: Callable[..., Any], *inputs: Any, backend: str = "inductor_ext", **options: Any
) -> tuple[Any, str]:
    """Outputs and code of a function, compiled uncached under `options` of torch.compile."""
    with uncached(), torch.no_grad():
        outputs, (code,) = run_and_get_code(
            torch.compile(function, backend=backend, fullgraph=True, **options), *inputs
        )
    return outputs, code


def called(code: str) -> set[str]:
    """The operators that the code calls, without namespace."""
    return set(re.findall(r"torch\.ops\.aten\.(\w+\.\w+)\(", code))


def _split(calls: list[tuple[str, Call]]) -> tuple[list[Tensor], Callable[..., Any]]:
    """Calls as a function of their tensors."""
    inputs = [value for _, (args, _) in calls for value in args if isinstance(value, Tensor)]

    def function(*values: Tensor) -> list[Any]:
        left = iter(values)
        results = []
        for name, (args, kwargs) in calls:
            own = [next(left) if isinstance(value, Tensor) else value for value in args]
            results.append(operator(name)(*own, **kwargs))
        return results

    return inputs, function


def _groups() -> dict[str, list[tuple[str, Call]]]:
    """Every third call of each operator, to compile in one graph."""
    groups: dict[str, list[tuple[str, Call]]] = {}
    for name, calls in CALLS.items():
        if "linalg" in name or name.split(".")[0] in (
            *("geqrf", "ormqr", "lu_unpack", "cholesky_inverse", "triangular_solve"),
        ):
            group = "linalg"
        elif "backward" in name or "pool" in name:
            group = "images"
        else:
            group = "others"
        groups.setdefault(group, []).extend((name, call) for call in calls[::3])
    return groups


@pytest.mark.parametrize("group", ["linalg", "images", "others"])
def test_compiled_calls_agree_and_write_into_buffers(group: str) -> None:
    calls = _groups()[group]
    names = {name for name, _ in calls}
    inputs, function = _split([(name, CALLS[name][0]) for name in sorted(names)])
    _, by_stock = code_of(function, *inputs, backend="inductor")
    assert called(by_stock) >= names, "stock has code of its own for the others"
    inputs, function = _split(calls)
    outputs, code = code_of(function, *inputs)
    with torch.no_grad():
        compile_util.assert_same(outputs, function(*inputs))
    variants = {f"{name.split('.')[0]}.{OUT_VARIANTS[name]}" for name in names}
    assert called(code) >= variants
    assert not called(code) & (names - variants)
    assert "[0]" not in code, "no tuple of outputs is taken apart"


def _special_sizes(x: Tensor) -> list[Any]:
    return [
        aten.sort.stable(x, stable=True),
        aten.topk.default(x, 0 if x.numel() == 0 else 1),
        aten.cummax.default(x, 0),
        aten.logcumsumexp.default(x, 0),
        aten.cumsum.default(x, 0),
    ]


@pytest.mark.parametrize("sizes", [(), (1,), (0,), (0, 3), (3, 0), (1, 1, 4)], ids=str)
def test_empty_scalar_and_single_element(sizes: tuple[int, ...]) -> None:
    x = normal(*sizes)
    outputs, _ = code_of(_special_sizes, x)
    compile_util.assert_same(outputs, _special_sizes(x))


def _selection(x: Tensor) -> list[Any]:
    return [
        torch.sort(x, dim=0, descending=True),
        torch.topk(x, 2, dim=1),
        torch.kthvalue(x, 2, dim=1),
        torch.cummin(x, dim=1),
        torch.cumsum(x, dim=0),
        torch.median(x, dim=1),
        torch.linalg.solve_triangular(x @ x.mT, x, upper=True),
    ]


def test_dynamic_sizes() -> None:
    with uncached(), torch.no_grad():
        run = torch.compile(_selection, backend="inductor_ext", dynamic=True)
        _, (code,) = run_and_get_code(run, normal(5, 7))
        assert called(code) == {
            *("sort.values_stable", "topk.values", "kthvalue.values", "cummin.out", "cumsum.out"),
            *("median.dim_values", "linalg_solve_triangular.out"),
        }
        with torch._dynamo.config.patch(error_on_recompile=True):
            for sizes in ((5, 7), (8, 3), (64, 33)):
                x = normal(*sizes)
                compile_util.assert_same(run(x), _selection(x), tolerance=1e-3)


def test_unaligned_and_overlapping_inputs() -> None:
    for x in (normal(5 * 7 + 1)[1:].view(5, 7), normal(1, 7).expand(5, 7)):
        outputs, code = code_of(_selection, x)
        assert "sort.values_stable" in called(code)
        compile_util.assert_same(outputs, _selection(x), tolerance=1e-3)


def test_training() -> None:
    def loss(x: Tensor, volume: Tensor) -> Tensor:
        values, order = torch.sort(x @ x, dim=1)
        best, _ = torch.topk(values @ x, 3)
        running, _ = torch.cummax(best @ best.mT, dim=0)
        pooled = F.max_pool3d(F.pad(volume, (1, 2, 1, 1, 0, 0), mode="replicate"), 2)
        return running.sum() + (order * values).sum() + pooled.sum()

    def gradients(function: Callable[..., Tensor]) -> list[Tensor]:
        inputs = [normal(16, 16).requires_grad_(), normal(2, 3, 6, 6, 6).requires_grad_()]
        value = function(*inputs)
        return [value, *torch.autograd.grad(value, inputs)]

    with uncached():
        run = torch.compile(loss, backend="inductor_ext", fullgraph=True)
        actual, codes = run_and_get_code(gradients, run)
    compile_util.assert_same(actual, gradients(loss), tolerance=1e-4)
    results = set().union(*map(called, codes))
    assert {"sort.values_stable", "topk.values", "cummax.out"} <= results
    assert "max_pool3d_with_indices_backward.grad_input" in results


def test_an_output_that_nobody_reads_is_freed_after_the_call() -> None:
    def values_only(x: Tensor, y: Tensor) -> Tensor:
        return torch.sort(x @ y)[0] @ y

    inputs = normal(64, 64), normal(64, 64, seed=1)
    outputs, code = code_of(values_only, *inputs)
    compile_util.assert_same(outputs, values_only(*inputs), tolerance=1e-4)
    (call,) = re.findall(r"(.*)torch\.ops\.aten\.sort\.values_stable\((.*)\)\n(.*)", code)
    indices = re.search(r"indices=(\w+)", call[1])
    assert indices is not None
    assert call[0].strip() == ""
    assert f"del {indices[1]}" in call[2]


def _sorted_product(x: Tensor, y: Tensor) -> Tensor:
    values, order = torch.sort(x @ y, dim=1)
    best, where = torch.topk(values @ y, 32, dim=1)
    return (best @ y[:32]).gather(1, order) @ y[:, where[0]]


PRODUCT = normal(128, 128) / 11, normal(128, 128, seed=1) / 11


def test_outputs_of_a_sort_are_in_an_arena() -> None:
    with events.capture(MemoryPlanRecord) as records:
        outputs, code = code_of(_sorted_product, *PRODUCT, options={"memory_arenas": "always"})
    compile_util.assert_same(outputs, _sorted_product(*PRODUCT), tolerance=1e-4)
    (record,) = records
    assert not [storage for storage in record.storages if storage.kind == "extern"]
    placed = {row.name for row in record.storages if row.arena is not None}
    (call,) = re.findall(r"sort\.values_stable\(.*, values=(\w+), indices=(\w+)\)", code)
    assert placed >= set(call)
    assert [row.bytes for row in record.storages if row.name in call] == [4 * 128**2, 8 * 128**2]


def test_measured_peak_is_at_most_inductors() -> None:
    peaks = {}
    for backend in compile_util.BACKENDS:
        with uncached(), torch.no_grad():
            run = torch.compile(_sorted_product, backend=backend)
            run(*PRODUCT)
            peaks[backend] = measure.measure_peak_allocated(lambda run=run: run(*PRODUCT))
    assert peaks["inductor_ext"] <= peaks["inductor"]


def test_run_time_sizes_are_left_to_inductor() -> None:
    def positives(x: Tensor) -> Tensor:
        return torch.sort(x[x > 0])[0]

    x = normal(50)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        outputs, code = code_of(positives, x)
    compile_util.assert_same(outputs, positives(x))
    assert "sort.stable" in called(code)


def test_partitions_are_left_to_inductor() -> None:
    patches = {"custom_should_partition_ops": ["aten::sort"], "graph_partition": True}
    with inductor_config.patch(patches):
        outputs, code = code_of(_sorted_product, *PRODUCT)
    compile_util.assert_same(outputs, _sorted_product(*PRODUCT), tolerance=1e-4)
    assert {"sort.stable", "topk.default"} <= called(code)


def test_cpp_wrapper_is_left_to_inductor() -> None:
    with inductor_config.patch(cpp_wrapper=True):
        outputs, code = code_of(_sorted_product, *PRODUCT)
    compile_util.assert_same(outputs, _sorted_product(*PRODUCT), tolerance=1e-4)
    assert "aoti_torch_cpu_sort_stable" in code
    assert "values_stable" not in code


def test_inductor_backends_code_is_unchanged() -> None:
    with inductor_ext.config.patch(enabled=False):
        _, expected = code_of(_sorted_product, *PRODUCT)
    code_of(_sorted_product, *PRODUCT)
    _, actual = code_of(_sorted_product, *PRODUCT, backend="inductor")
    number = re.compile(r"AOT ID: .*")  # counts the process's compiles
    assert number.sub("", actual) == number.sub("", expected)
    assert "sort.stable" in called(actual)
