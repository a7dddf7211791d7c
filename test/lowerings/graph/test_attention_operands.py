"""Masks and layouts of attention for which torch has no fused kernel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import inductor_ext
from inductor_ext import events, settings
from inductor_ext.lowerings.graph import attention_operands
from inductor_ext.lowerings.records import AttentionRecord


def _range(x: Tensor, dim: int) -> Tensor:
    return torch.arange(x.shape[dim], device=x.device) + 0


def expand_true(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = (_range(q, 2)[:, None] >= 0).expand(q.shape[0], 1, -1, k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def add_zeros(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, q.new_zeros(q.shape[2], k.shape[2]), scale=0.2)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, _range(k, 2) <= _range(q, 2)[:, None])


def causal_bias(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    bias = q.new_zeros(1, 1, *hidden.shape).masked_fill(hidden, torch.finfo(q.dtype).min)
    return F.scaled_dot_product_attention(q, k, v, bias)


def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    distance = _range(k, 2) - _range(q, 2)[:, None]
    return F.scaled_dot_product_attention(q, k, v, distance.abs() < 4)


def small_bias(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A bias that is no mask."""
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    return F.scaled_dot_product_attention(
        q, k, v, q.new_zeros(hidden.shape).masked_fill(hidden, -2)
    )


def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    mask[:, 3:] = False
    return F.scaled_dot_product_attention(q, k, v, mask)


def transposed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As results of a convolution, [batch, heads, size, position]."""
    return F.scaled_dot_product_attention(q.mT, k.mT, v.mT)


REMOVED = "a constant mask that masks nothing is removed"
CAUSAL = "a constant causal mask is replaced by is_causal"
PROGRAMS: dict[Callable[..., Tensor], tuple[str, ...]] = {
    expand_true: (REMOVED,),
    add_zeros: (REMOVED,),
    causal: (CAUSAL,),
    causal_bias: (CAUSAL,),
    local: (),
    small_bias: (),
    written: (),
    transposed: tuple(
        f"{name} is copied, because its last dimension is not dense"
        for name in ("query", "key", "value")
    ),
}


def _inputs(length: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(length)
    q, k, v = torch.randn(3, 2, 3, length, 16)
    return q, k, v


def _compare(compiled: Callable[..., Tensor], program: Callable[..., Tensor], length: int) -> None:
    inputs = _inputs(length)
    expected = program(*(x.double() for x in inputs))
    torch.testing.assert_close(compiled(*inputs).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_compiled_programs(program: Callable[..., Tensor]) -> None:
    with events.capture(AttentionRecord) as records:
        compiled = torch.compile(program, backend="inductor_ext", dynamic=False)
        _compare(compiled, program, 16)
    assert [change for record in records for change in record.changes] == [*PROGRAMS[program]]


@pytest.mark.parametrize("program", [expand_true, causal, transposed])
def test_dynamic_sizes(program: Callable[..., Tensor]) -> None:
    compiled = torch.compile(program, backend="inductor_ext", dynamic=True)
    for length in (16, 21):
        _compare(compiled, program, length)


def test_masks_of_cross_attention() -> None:
    """`is_causal` has another meaning for some kernels if there are more keys than queries."""

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal(q[:, :, :9], k, v) + expand_true(q[:, :, :9], k, v)

    with events.capture(AttentionRecord) as records:
        _compare(torch.compile(program, backend="inductor_ext"), program, 16)
    assert [record.changes for record in records] == [(REMOVED,)]


def test_gradients() -> None:
    compiled = torch.compile(causal, backend="inductor_ext")
    inputs = [x.requires_grad_() for x in _inputs()]
    references = [x.detach().double().requires_grad_() for x in inputs]
    compiled(*inputs).square().sum().backward()
    causal(*references).square().sum().backward()
    for x, reference in zip(inputs, references, strict=True):
        torch.testing.assert_close(x.grad.double(), reference.grad, rtol=1e-4, atol=1e-5)


def test_results_that_are_overwritten() -> None:
    """The gradient of a fused kernel reads the result: autograd refuses it."""

    def program(x: Tensor) -> Tensor:
        result = F.scaled_dot_product_attention(x, x, x)
        saved = result.clone()
        result[0, 1:].fill_(2)
        return saved + result

    x = torch.randn(2, 3, 33, 9).to(memory_format=torch.channels_last).requires_grad_()
    reference = x.detach().double().requires_grad_()
    (gradient,) = torch.autograd.grad(torch.compile(program, backend="inductor_ext")(x).sum(), x)
    (expected,) = torch.autograd.grad(program(reference).sum(), reference)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-5)


def test_a_package(tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return expand_true(q, k, v) + causal(q, k, v)

    program = torch.export.export(Model(), _inputs())
    with events.capture(AttentionRecord) as records:
        path = inductor_ext.aoti_compile_and_package(program, package_path=str(tmp_path / "m.pt2"))
    assert sorted(record.changes for record in records) == [(CAUSAL,), (REMOVED,)]
    _compare(inductor_ext.load(path), Model(), 16)
    # The program of the caller is unchanged.
    assert "is_causal" not in str(program.graph)


def test_subgraphs() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cond(q.sum() > 0, causal, expand_true, (q * 1, k * 1, v * 1))

    with events.capture(AttentionRecord) as records:
        compiled = torch.compile(program, backend="inductor_ext")
        for length in (16, 17, 18):
            _compare(compiled, program, length)
    assert {change for record in records for change in record.changes} >= {REMOVED, CAUSAL}


@pytest.mark.parametrize("options", [{"deterministic": True}, {"fuse_attention": False}])
def test_options_keep_operands(options: dict[str, Any]) -> None:
    with events.capture(AttentionRecord) as records:
        compiled = torch.compile(expand_true, backend="inductor_ext", options=options)
        _compare(compiled, expand_true, 16)
    assert not records


def _call_on_cuda(
    dtype: torch.dtype, strides: tuple[int, ...], mask_dtype: torch.dtype = torch.bool
) -> fx.GraphModule:
    """Return the graph of one call, with fake tensors on a GPU, after the pass."""
    graph = fx.Graph()
    operands = {}
    with FakeTensorMode():
        for name in ("query", "key", "value"):
            operands[name] = graph.placeholder(name)
            value = torch.empty(2, 4, 32, 64, dtype=dtype, device="cuda")
            operands[name].meta["example_value"] = value
        mask = graph.placeholder("mask")
        value = torch.empty_strided((2, 1, 32, 32), strides, dtype=mask_dtype, device="cuda")
        mask.meta["example_value"] = value
    call = graph.call_function(F.scaled_dot_product_attention, (*operands.values(), mask))
    graph.output(call)
    gm = fx.GraphModule({}, graph)
    attention_operands.replace_operands(gm, settings.Settings())
    return gm


def test_expanded_masks_on_a_gpu_are_copied() -> None:
    gm = _call_on_cuda(torch.float16, (0, 32, 1, 0))
    (call,) = gm.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
    copy: Any = call.kwargs["attn_mask"]
    value = copy.meta["example_value"]
    # The expanded batch stays one.
    assert tuple(value.shape) == (1, 1, 32, 32)
    assert value.is_contiguous()
    mask = torch.rand(1, 1, 32, 1) > 0.1
    inputs = [*torch.randn(3, 2, 4, 32, 64), mask.expand(2, 1, 32, 32)]
    torch.testing.assert_close(gm(*inputs), F.scaled_dot_product_attention(*inputs))


@pytest.mark.parametrize(
    ("dtype", "strides"),
    [
        (torch.float16, (0, 1024, 32, 1)),
        (torch.float16, (1024, 1024, 0, 1)),
        (torch.float32, (0, 32, 1, 0)),
    ],
    ids=["dense", "expanded queries", "float32"],
)
def test_other_masks_on_a_gpu_are_kept(dtype: torch.dtype, strides: tuple[int, ...]) -> None:
    mask_dtype = dtype if dtype == torch.float32 else torch.bool
    gm = _call_on_cuda(dtype, strides, mask_dtype)
    assert not gm.graph.find_nodes(op="call_function", target=torch.ops.aten.contiguous.default)
