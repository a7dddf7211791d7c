"""Stores of a tile by TMA in generated kernels."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from inductor_ext import config
from inductor_ext.autotune import decide, tuner
from inductor_ext.autotune.decision import Decision, Timing
from inductor_ext.hooks import scope
from inductor_ext.templates.triton import template_kernel
from inductor_ext.templates.triton.config import GemmConfig

pytest.importorskip("triton")

from test.support import fake_cuda, kernel_compiler
from test.support.matmul_lowering import Given, lower, matrix

F = torch.nn.functional


@pytest.mark.parametrize(
    ("follows", "stores"),
    [
        (lambda y: (torch.relu(y), torch.relu(y) <= 0), 0),
        (lambda y: (torch.relu(y).sum(), y <= 0), 0),
        (lambda y: torch.where(y > 1, y, -y), 1),
        (torch.relu, 1),
    ],
    ids=["kept", "alone", "read within", "none"],
)
def test_bools_are_not_stored_by_tma(follows: Callable[..., Any], stores: int) -> None:
    """Triton has no descriptors of bools, which a ReLU saves for its backward."""
    config = GemmConfig("persistent_tma", 128, 64, 64, 3, 4, tma=True, tma_store=True)
    lowered, _ = lower(
        lambda _: config, lambda x, w: follows(x @ w), matrix(256, 256), matrix(256, 64)
    )
    assert kernel_compiler.compiled_module(lowered, config).spills == 0
    assert sum(text.count("descriptor(out_ptr") for text in lowered.kernels().values()) == stores


STORED_BY_TMA = GemmConfig("persistent_tma", 128, 64, 64, 3, 4, tma=True, tma_store=True)


def stores_by_tma(
    tmp_path: Path,
    *inputs: Given,
    chosen: GemmConfig = STORED_BY_TMA,
    rule: bool = False,
    function: Callable[..., Any] = torch.mm,
) -> tuple[int, str]:
    """The number of stores by TMA with a given decision, and the code."""
    decision = Decision(chosen, "measured", (Timing(None, 9.0), Timing(chosen, 5.0)))
    with (
        scope.compile_scope(config.snapshot({"tuning_cache_dir": str(tmp_path)})),
        decide.force_config(lambda _: chosen) if rule else contextlib.nullcontext(),
        mock.patch.object(tuner, "tune", lambda result, *_, **__: dict.fromkeys(result, decision)),
    ):
        lowered = fake_cuda.lower(function, *inputs, max_autotune=True)
    stores = sum(text.count("descriptor(out_ptr") for text in lowered.kernels().values())
    return stores, lowered.code


class TestStoreByTma:
    """`template_kernel` replaces a store that Inductor has generated."""

    WARNING = "unexpected code"

    @pytest.mark.parametrize(
        ("function", "inputs", "template"),
        [
            (torch.mm, [matrix(256, 256), matrix(256, 64)], "persistent_tma"),
            (torch.bmm, [matrix(3, 256, 256), matrix(3, 256, 64)], "bmm_persistent"),
            (
                lambda x, w: torch.relu(x @ w) * 2,
                [matrix(256, 256), matrix(256, 64)],
                "persistent_tma",
            ),
        ],
        ids=["mm", "bmm", "epilogue"],
    )
    def test_the_installed_torch_has_the_store_to_replace(
        self, function: Any, inputs: list[Given], template: str, tmp_path: Path, caplog: Any
    ) -> None:
        chosen = dataclasses.replace(STORED_BY_TMA, template=template)
        stores, _ = stores_by_tma(tmp_path, *inputs, chosen=chosen, function=function)
        assert stores == 1
        assert self.WARNING not in caplog.text

    @pytest.mark.usefixtures("repeated_warnings")
    def test_another_store_is_kept_and_reported(
        self, tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(template_kernel, "WHOLE_TILE", re.compile("another text"))
        stores, code = stores_by_tma(tmp_path, matrix(256, 256), matrix(256, 64))
        assert (stores, code.count("tl.dot(")) == (0, 1)
        assert caplog.text.count(self.WARNING) == 1

    def test_it_is_not_measured_as_a_store_by_tma(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(template_kernel, "WHOLE_TILE", re.compile("another text"))
        _, code = stores_by_tma(tmp_path, matrix(256, 256), matrix(256, 64), rule=True)
        assert "extern_kernels.mm(" in code
        assert "tl.dot(" not in code

    def test_rows_of_unknown_length_are_stored_otherwise(self, tmp_path: Path, caplog: Any) -> None:
        stores, code = stores_by_tma(
            tmp_path, matrix(256, 256), matrix("n", 256), function=F.linear
        )
        assert (stores, code.count("tl.dot(")) == (0, 1)
        assert self.WARNING not in caplog.text
