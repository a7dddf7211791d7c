"""AOT artifacts that call eager mode's kernels, custom operators among them, and that assert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from test.support import aot_util
from test.support.aot_util import Artifact, Bundle, Case, Cases

ATEN = Cases()
CUSTOM = Cases()


def ids() -> torch.Tensor:
    return torch.tensor([[0, 2, 1, 0], [2, 1, 0, 2], [1, 1, 2, 0]])


@ATEN
def scatter() -> Case:
    def function(x: torch.Tensor, ids: torch.Tensor, source: torch.Tensor) -> Any:
        return (
            x.scatter(0, ids, source),
            x.scatter(0, ids, 2.5),
            x.scatter_add(0, ids, source),
            x.clone().scatter_(0, ids, source, reduce="multiply"),
        )

    # One row of ids: with several, the order of writes to equal ids is undefined.
    args = torch.randn(3, 4), torch.tensor([[0, 2, 1, 0]]), torch.randn(3, 4)
    return Case(function, args)


@ATEN
def scatter_reduce() -> Case:
    def function(x: torch.Tensor, ids: torch.Tensor, source: torch.Tensor) -> Any:
        return [
            x.scatter_reduce(0, ids, source, reduce=reduce, include_self=include)
            for reduce in ("sum", "prod", "mean", "amax", "amin")
            for include in (True, False)
        ]

    return Case(function, (torch.randn(3, 4), ids(), torch.randn(3, 4)))


@ATEN
def scatter_of_complex_numbers() -> Case:
    source = torch.randn(3, 4, dtype=torch.complex64)
    return Case(
        lambda x, ids, s: x.scatter_add(0, ids, s),
        (torch.randn(3, 4, dtype=torch.complex64), ids(), source),
    )


@ATEN
def index_put() -> Case:
    def function(x: torch.Tensor, i: torch.Tensor, values: torch.Tensor) -> Any:
        return (
            torch.index_put(x, (i, i), values[:, None]),
            torch.index_put(x, (i,), values[:, None, None], accumulate=True),
            torch.ops.aten.index_put.default(x, [None, i], values[None, :, None]),
            torch.ops.aten.index_put.default(x, [None, None, i], values, True),
            torch.ops.aten.index_put.default(x, [i, None, i], values[:, None]),
            x[:, i, :1],
            torch.ops.aten.index.Tensor(x, [None, None, i]),
        )

    return Case(function, (torch.randn(4, 4, 4), torch.tensor([2, 0, 3]), torch.randn(3)))


@ATEN
def index_put_of_a_mask() -> Case:
    def function(x: torch.Tensor, mask: torch.Tensor) -> Any:
        x[mask] = 7.0
        return x + 1

    return Case(function, (torch.randn(3, 4), torch.rand(3, 4) > 0.5))


@ATEN
def index_put_of_views() -> Case:
    """The operand of the fallback is a temporary object, which is the result as well."""

    def function(x: torch.Tensor, i: torch.Tensor, values: torch.Tensor) -> Any:
        x.view(torch.int64).index_put_((i,), values, accumulate=True)
        y = x + 1
        y.view(torch.int64)[1:].index_put_((i,), values, accumulate=True)
        return x * 2, y

    args = (torch.randn(5, dtype=torch.float64), torch.tensor([0, 3, 0]), torch.tensor([5, 7, 9]))
    return Case(function, args)


@ATEN
def index_add_and_copy_and_fill() -> Case:
    return Case(
        lambda x, i, s: (x.index_add(0, i, s), x.index_copy(0, i, s), x.index_fill(1, i, 3.0)),
        (torch.randn(4, 3), torch.tensor([2, 0, 1]), torch.randn(3, 3)),
    )


@ATEN
def embedding_bag() -> Case:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = nn.ModuleList(
                nn.EmbeddingBag(10, 4, mode=mode) for mode in ("sum", "mean", "max")
            )

        def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> list[torch.Tensor]:
            return [bag(ids, offsets) for bag in self.bags]

    return Case(Bags(), (torch.tensor([1, 2, 9, 0, 4, 4]), torch.tensor([0, 2, 5])))


@ATEN
def fft() -> Case:
    return Case(
        lambda x: (
            torch.fft.fft(x),
            torch.fft.rfft2(x).abs(),
            torch.fft.irfft(torch.fft.rfft(x)),
            torch.view_as_real(torch.fft.fftshift(torch.fft.fft(x))),
        ),
        (torch.randn(4, 8),),
    )


@ATEN
def sorting() -> Case:
    return Case(
        lambda x: (
            tuple(torch.sort(x, dim=0, descending=True)),
            x.argsort(stable=True),
            tuple(x.topk(3)),
            x.kthvalue(2).values,
            x.median(1).values,
            tuple(x.cummax(1)),
            x.unique(),
        ),
        (torch.randperm(20).float().view(4, 5),),
    )


@ATEN
def linear_algebra() -> Case:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        spd = x @ x.mT + 4 * torch.eye(3, device=x.device)
        return (
            torch.linalg.solve(spd, y),
            torch.linalg.cholesky(spd),
            torch.linalg.inv(spd),
            tuple(torch.linalg.slogdet(spd)),
            torch.linalg.svdvals(spd),
        )

    return Case(function, (torch.randn(2, 3, 3), torch.randn(2, 3, 2)), tolerance=1e-4)


@ATEN
def other_kernels() -> Case:
    def function(x: torch.Tensor, grid: torch.Tensor) -> Any:
        return (
            nn.functional.grid_sample(x, grid, align_corners=False),
            x.cumprod(-1),
            torch.bucketize(x, torch.linspace(-1, 1, 5, device=x.device)),
            nn.functional.max_pool2d(x, 2, return_indices=True),
            torch.cdist(x[0], x[0]),
            x.logcumsumexp(-1),
            torch.searchsorted(x[0, 0, 0].sort().values, x[0, 0, 1]),
        )

    return Case(function, (torch.randn(1, 2, 4, 4), torch.rand(1, 3, 3, 2)), tolerance=1e-4)


@ATEN
def fallbacks_of_dynamic_sizes() -> Case:
    return Case(
        lambda x: (torch.fft.fft(x), x.sort(0).values, x.topk(2, 0).indices, x.cummin(0).values),
        (torch.randn(5, 4),),
        dynamic=({0: Dim("fallback_rows", min=2)},),
        calls=((torch.randn(9, 4),), (torch.randn(2, 4),)),
    )


@pytest.fixture(scope="module")
def aten(device: str) -> Bundle:
    return ATEN.compile(device)


def test_fallbacks_compile_together(aten: Bundle) -> None:
    aten.check_whole()


@pytest.mark.parametrize("name", ATEN)
def test_fallback(aten: Bundle, name: str) -> None:
    aten.check(name)


def custom(schema: str) -> Callable[[Callable[..., Any]], Any]:
    """Define an operator of this test with one function for both meta and real tensors."""

    def define(function: Callable[..., Any]) -> Any:
        name = f"test_aot_fallbacks::{function.__name__}"
        torch.library.define(name, schema)
        torch.library.impl(name, "CompositeExplicitAutograd", function)
        torch.library.register_fake(name, function)
        return getattr(torch.ops.test_aot_fallbacks, function.__name__).default

    return define


@custom("(Tensor x, Tensor? y=None, float? scale=None, int[]? shift=None) -> Tensor")
def optionals(
    x: torch.Tensor,
    y: torch.Tensor | None = None,
    scale: float | None = None,
    shift: list[int] | None = None,
) -> torch.Tensor:
    result = x + 1 if y is None else x + y
    return result * (1.0 if scale is None else scale) + (0 if shift is None else sum(shift))


@custom("(Tensor[] xs, Tensor?[] ys, int[] factors) -> Tensor")
def lists(
    xs: list[torch.Tensor], ys: list[torch.Tensor | None], factors: list[int]
) -> torch.Tensor:
    total = sum(x * factor for x, factor in zip(xs, factors, strict=True))
    return total + sum((y for y in ys if y is not None), torch.zeros_like(xs[0]))


@custom("(Tensor x, int n) -> (Tensor, Tensor, Tensor)")
def several(x: torch.Tensor, n: int) -> tuple[torch.Tensor, ...]:
    return x + n, x.sum(0), x.new_full((n,), 2.0)


@custom("(Tensor x, int n) -> Tensor[]")
def many(x: torch.Tensor, n: int) -> list[torch.Tensor]:
    return [x * (i + 1) for i in range(n)]


@custom("(Tensor x, Tensor? y) -> (Tensor, Tensor[], Tensor)")
def mixed(x: torch.Tensor, y: torch.Tensor | None) -> Any:
    return x + 1, [x * 2, x * 3], x.clone() if y is None else y.clone()


@custom(
    "(Tensor x, str mode, ScalarType dtype, Scalar s, bool b, float f, Device device) -> Tensor"
)
def attributes(
    x: torch.Tensor,
    mode: str,
    dtype: torch.dtype,
    s: complex,
    b: bool,
    f: float,
    device: torch.device,
) -> torch.Tensor:
    assert x.device.type == torch.device(device).type
    return ((x + s if mode == "add" else x * s) * (f if b else 1)).to(dtype)


@custom("(Tensor x, SymInt[] sizes, SymInt n) -> Tensor")
def sizes(x: torch.Tensor, sizes: list[int], n: int) -> torch.Tensor:
    return x.new_ones(sizes) * n + x.sum()


@custom("(Tensor(a!) x, Tensor y) -> ()")
def changed(x: torch.Tensor, y: torch.Tensor) -> None:
    x.add_(y)


@CUSTOM
def custom_with_optional_arguments() -> Case:
    return Case(
        lambda x, y: (
            optionals(x),
            optionals(x, y),
            optionals(x, None, 2.5),
            optionals(x, y, None, [1, 2]),
        ),
        (torch.randn(3, 2), torch.randn(3, 2)),
    )


@CUSTOM
def custom_with_lists() -> Case:
    return Case(
        lambda x, y: lists([x, y * 2, x.t().contiguous().t()], [None, y, None, x], [1, 2, 3]),
        (torch.randn(3, 2), torch.randn(3, 2)),
    )


@CUSTOM
def custom_with_several_returns() -> Case:
    return Case(lambda x: several(x * 2, 3), (torch.randn(3, 2),))


@CUSTOM
def custom_of_which_one_return_is_used() -> Case:
    return Case(lambda x: several(x, 2)[1] + 1, (torch.randn(3, 2),))


@CUSTOM
def custom_that_returns_a_list() -> Case:
    return Case(lambda x: [y + 1 for y in many(x, 3)], (torch.randn(3, 2),))


@CUSTOM
def custom_that_returns_tensors_and_lists() -> Case:
    return Case(lambda x, y: (mixed(x, None), mixed(x, y)), (torch.randn(3, 2), torch.randn(3, 2)))


@CUSTOM
def custom_with_attributes() -> Case:
    return Case(
        lambda x: (
            attributes(x, "add", torch.float64, 2, True, 0.5, x.device),
            attributes(x, "multiply", torch.float16, 1.5, False, 0.5, x.device),
        ),
        (torch.randn(3, 2),),
    )


@CUSTOM
def custom_with_dynamic_sizes() -> Case:
    return Case(
        lambda x: sizes(x, [x.shape[0], 2, x.shape[0] * 3], x.shape[0] + 1),
        (torch.randn(3, 2),),
        dynamic=({0: Dim("custom_rows", min=2)},),
        calls=((torch.randn(5, 2),),),
    )


@CUSTOM
def custom_that_changes_its_argument() -> Case:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        inner = y * 2
        changed(inner, x)
        changed(x, y)
        return inner + x

    return Case(function, (torch.randn(3, 2), torch.randn(3, 2)))


@pytest.fixture(scope="module")
def customs(device: str) -> Bundle:
    return CUSTOM.compile(device)


def test_custom_operators_compile_together(customs: Bundle) -> None:
    customs.check_whole()


@pytest.mark.parametrize("name", CUSTOM)
def test_custom_operator(customs: Bundle, name: str) -> None:
    customs.check(name)


@pytest.fixture(scope="module")
def asserting(device: str) -> Artifact:
    """Asserts about an item, about an unbacked size and about values."""

    def function(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        size = n.item()
        torch._check(size >= 2)
        torch._check(size <= 6)
        count = x.nonzero().shape[0]
        torch._check(count != 3)
        torch._assert_async((x < 10).all(), "a value of ten or more")
        return x.sum() + torch.ones(size, device=x.device)

    args = torch.ones(4, device=device), torch.tensor(3, device=device)
    return aot_util.compile_model(function, args)


RIGHT = [0.0, 1.0, 2.0, 0.0]


@pytest.mark.parametrize("size", [2, 6])
def test_asserts_that_hold(asserting: Artifact, device: str, size: int) -> None:
    asserting.check(torch.tensor(RIGHT, device=device), torch.tensor(size, device=device))


@pytest.mark.parametrize(
    ("values", "size", "message"),
    [
        (RIGHT, 1, ">= 2|2 <="),
        (RIGHT, 7, "<= 6|6 >="),
        ([1.0, 2.0, 0.0, 3.0], 3, "Ne(.*, 3)|!= 3"),
        pytest.param([10.0, 0.0, 0.0, 0.0], 3, "a value of ten or more", id="async"),
    ],
)
def test_asserts_that_do_not_hold(
    asserting: Artifact, device: str, values: list[float], size: int, message: str
) -> None:
    """The error has the assert's message, and later calls succeed."""
    if device == "cuda" and message.startswith("a value"):
        pytest.skip("a failed assert on the device makes the process's CUDA context unusable")
    x = torch.tensor(values, device=device)
    with pytest.raises(Exception, match=message):
        asserting(x, torch.tensor(size, device=device))
    asserting.check(torch.tensor(RIGHT, device=device), torch.tensor(3, device=device))
