"""Attention of few queries in lowered graphs: which operators are replaced, and by which calls."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch._higher_order_ops import triton_kernel_wrap

pytest.importorskip("triton")

from inductor_ext import config
from inductor_ext.hooks import scope
from inductor_ext.templates.triton import decode_attention as rules
from inductor_ext.templates.triton.decode_attention import DecodeAttention
from test.support import fake_cuda

HALF = torch.bfloat16
aten = torch.ops.aten


def _repeat(x: torch.Tensor, group: int) -> torch.Tensor:
    batch, heads, *rest = x.shape
    expanded = x.unsqueeze(2).expand(batch, heads, group, *rest)
    return expanded.reshape(batch, heads * group, *rest)


def _attend(q: Any, k: Any, v: Any, bias: Any = None, **options: Any) -> torch.Tensor:
    operator = aten._scaled_dot_product_efficient_attention.default
    result: torch.Tensor = operator(q, k, v, bias, False, **options)[0]
    return result


def _grouped(q: Any, k: Any, v: Any) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    return _attend(q, _repeat(k, group), _repeat(v, group))


def _masked(q: Any, k: Any, v: Any, bias: Any) -> torch.Tensor:
    return _attend(q * 2, k, v, bias.expand(*q.shape[:3], k.shape[2])) + 1


def _lower(function: Callable[..., Any], *shapes: tuple[int, ...], **options: Any) -> str:
    with scope.compile_scope(config.snapshot({"decode_attention": True, **options})):
        return fake_cuda.lower(function, *((shape, HALF) for shape in shapes)).code


def _count(code: str) -> tuple[int, int, int]:
    """Calls of torch's operator, of `attend` and of `combine`."""
    patterns = (
        r"= torch\.ops\.aten\._scaled_dot_product",
        r"attend_\d+\.run\(",
        r"combine_\d+\.run\(",
    )
    return tuple(len(re.findall(pattern, code)) for pattern in patterns)  # type: ignore[return-value]


Q, KV = (2, 8, 1, 64), (2, 2, 1024, 64)
WHOLE = (2, 8, 1024, 64)


def test_grouped_keys_and_values_are_not_repeated() -> None:
    code = _lower(_grouped, Q, KV, KV)
    assert _count(code) == (0, 1, 1)
    assert "triton_poi" not in code
    # The kernel reads the inputs.
    assert re.search(r"attend_\d+\.run\(arg0_1, arg1_1, arg2_1, ", code)


def test_what_kernels_access_is_analyzed_once() -> None:
    """Not for every layer, and not for other sizes."""

    def layers(q: Any, k: Any, v: Any, longer: Any) -> torch.Tensor:
        return _grouped(_grouped(_grouped(q, k, v), k, v), longer, longer)

    stock = triton_kernel_wrap.generate_ttir
    with mock.patch.object(triton_kernel_wrap, "generate_ttir", side_effect=stock) as analyze:
        code = _lower(layers, Q, KV, KV, (2, 2, 2048, 64))
    assert _count(code) == (0, 3, 3)
    assert analyze.call_count <= 2


def test_a_bias_is_read_before_it_is_expanded() -> None:
    code = _lower(_masked, Q, WHOLE, WHOLE, (2, 1, 1, 1024))
    assert _count(code) == (0, 1, 1)
    assert re.search(r"attend_\d+\.run\(buf\d+, arg1_1, arg2_1, arg3_1, ", code)


def test_many_heads_need_no_second_kernel() -> None:
    code = _lower(_masked, (64, 32, 1, 64), *[(64, 32, 128, 64)] * 2, (1, 1, 1, 128))
    assert _count(code) == (0, 1, 0)


def test_the_result_has_the_strides_of_the_operator() -> None:
    """Queries are rows of a tensor [batch, queries, heads, size]."""

    def function(q: Any, k: Any, v: Any) -> torch.Tensor:
        result = _grouped(q.transpose(1, 2), k, v).transpose(1, 2)
        return result.view(*result.shape[:2], -1)

    code = _lower(function, (2, 3, 8, 64), KV, KV)
    assert _count(code) == (0, 1, 1)


def _return_statistics(q: Any, k: Any, v: Any) -> Any:
    k, v = _repeat(k, 4), _repeat(v, 4)
    return aten._scaled_dot_product_efficient_attention.default(q, k, v, None, True)[:2]


def _overwrite_keys(q: Any, k: Any, v: Any) -> Any:
    keys = _repeat(k, 4)
    k.add_(1)
    return _attend(q, keys, _repeat(v, 4))


UNCHANGED: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "neither bias nor groups": (_attend, (Q, WHOLE, WHOLE)),
    "many queries": (_grouped, ((2, 8, 64, 64), KV, KV)),
    "few keys": (_grouped, (Q, (2, 2, 32, 64), (2, 2, 32, 64))),
    "large heads": (_grouped, ((2, 8, 1, 512), (2, 2, 1024, 512), (2, 2, 1024, 512))),
    "causal": (lambda q, k, v: _attend(q, k, v, is_causal=True), (Q, WHOLE, WHOLE)),
    "statistics are used": (_return_statistics, (Q, KV, KV)),
    "keys with gaps": (
        lambda q, k, v: _attend(q, _repeat(k.mT, 4), _repeat(v, 4)),
        (Q, (2, 2, 64, 1024), KV),
    ),
    "keys are overwritten": (_overwrite_keys, (Q, KV, KV)),
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_other_calls_keep_the_operator(name: str) -> None:
    function, shapes = UNCHANGED[name]
    assert _count(_lower(function, *shapes)) == (1, 0, 0)


def test_other_repetitions_are_kept() -> None:
    """Heads in the order of `repeat`: query heads that read the same keys are not adjacent."""
    code = _lower(lambda q, k, v: _attend(q, k.repeat(1, 4, 1, 1), v.repeat(1, 4, 1, 1)), Q, KV, KV)
    assert _count(code) == (1, 0, 0)


def test_the_setting_turns_it_off() -> None:
    assert _count(_lower(_grouped, Q, KV, KV, decode_attention=False)) == (1, 0, 0)


def test_results_equal_float64_in_the_interpreter() -> None:
    pytest.importorskip("numpy")
    subprocess.run(
        [sys.executable, "-m", "test.support.attention_cases"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        check=True,
    )


@pytest.mark.parametrize("batch", [1, 7, 32, 1000])
@pytest.mark.parametrize("length", [64, 1025, 32768])
@pytest.mark.parametrize("size", [16, 96, 256])
def test_shares_cover_all_keys(batch: int, length: int, size: int) -> None:
    problem = DecodeAttention(batch, 8, 4, 1, length, size, size)
    configuration = rules.choose(problem, 132)
    share = rules.share(length, configuration)
    assert configuration.splits * share >= length
    assert share % configuration.block_n == 0
    # No CTA is without keys but by rounding, and the GPU is used as far as there are keys.
    assert configuration.splits == 1 or (configuration.splits - 1) * configuration.block_n < length
    assert 8 * batch * configuration.splits >= min(132, 8 * batch * (length // 128))
