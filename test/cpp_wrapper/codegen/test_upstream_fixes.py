"""Fixes of torch's C++ wrapper codegen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from inductor_ext.cpp_wrapper.codegen import upstream_fixes


def test_triton_launchers_take_floats_as_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch declares a float of the graph as int64_t: 0.5 would be 0."""
    from torch._inductor.codecache import CudaKernelParamCache
    from torch._inductor.utils import IndentedBuffer

    class Stock:
        kernel_name = "triton_add"

        def generate(self, wrapper: Any) -> None:
            with wrapper.prefix.indent():
                wrapper.prefix.writelines(["int64_t n,", "int64_t zuf0,", "float scale,"])

    signature = {"x": "*fp32", "n": "i64", "zuf0": "fp64", "scale": "fp32"}
    kernels = {"triton_add": {"triton_meta": {"signature": signature}}}
    monkeypatch.setattr(CudaKernelParamCache, "cache", kernels)
    wrapper = SimpleNamespace(prefix=IndentedBuffer())
    wrapper.prefix.writeline("float scale,")
    upstream_fixes.generate_launcher(Stock(), wrapper)
    lines = [line.strip() for line in wrapper.prefix._lines]
    assert lines == ["float scale,", "int64_t n,", "double zuf0,", "double scale,"]
