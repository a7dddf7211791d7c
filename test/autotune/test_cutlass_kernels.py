"""The generation of built CUTLASS kernels, which is part of the cache key."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")


from inductor_ext import config
from inductor_ext.autotune import cutlass_kernels
from inductor_ext.templates.cutlass import runtime

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="lowered on a stand-in for a GPU")


def test_built_kernels_change_the_generation(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutlass_kernels, "find_missing_tools", lambda: None)
    settings = config.snapshot({"cutlass_background": True, "artifact_cache_dir": str(tmp_path)})
    empty = cutlass_kernels.generation(settings)
    with runtime.store(settings).publish("0" * 64) as folder:
        (folder / "kernel.so").touch()
    assert cutlass_kernels.generation(settings) != empty
    # Compiles that wait for builds always get the same kernels, unless they cannot build.
    waiting = config.snapshot({"artifact_cache_dir": str(tmp_path)})
    assert cutlass_kernels.generation(waiting) == "all"
    monkeypatch.setattr(cutlass_kernels, "find_missing_tools", lambda: "there is no nvcc")
    results = {cutlass_kernels.generation(item) for item in (waiting, settings)}
    assert len(results) == 1
    assert not results & {"all", empty}
