"""Fixes of torch's C++ wrapper codegen."""

from __future__ import annotations

import itertools
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


def test_arrays_are_declared_where_they_are_used() -> None:
    """Torch takes a new buffer for one that is gone if they, or their methods, have the same id."""
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
    from torch._inductor.utils import IndentedBuffer

    class Wrapper(upstream_fixes.SizeArrays, CppWrapperCpu):
        def __init__(self) -> None:
            self.codegen_int_array_var_cache: dict[Any, str] = {}
            self.declared_int_array_vars: set[str] = set()
            self.int_array_id = itertools.count()

    wrapper = Wrapper()
    for _ in range(5):
        code = IndentedBuffer()
        name = wrapper.codegen_int_array_var("{1L}", code.writeline)
        assert f"{name}[] = {{1L}};" in code.getvalue()
        assert wrapper.codegen_int_array_var("{1L}", code.writeline) == name
        assert len(code._lines) == 1
