"""The Triton kernels of a graph, compiled for a GPU that this machine need not have."""

from __future__ import annotations

import sys

from torch._inductor.codecache import PyCodeCache

from inductor_ext.cpp_wrapper.codegen import offline_kernels

SOURCE = """
class Kernel:
    configs = ["a", "b"]

triton_poi_fused_add_0 = Kernel()
"""


def test_a_kernel_that_was_compiled_for_this_machine_is_not_used() -> None:
    used = PyCodeCache.load(SOURCE).triton_poi_fused_add_0
    used.configs = None  # as after a compile
    modules = set(sys.modules)
    kernel = offline_kernels._load("triton_poi_fused_add_0", SOURCE)
    assert kernel is not used
    assert kernel.configs == ["a", "b"]
    assert PyCodeCache.load(SOURCE).triton_poi_fused_add_0 is used
    assert set(sys.modules) == modules


def test_the_kernels_of_a_block_of_definitions() -> None:
    block = """
async_compile = AsyncCompile()
first = async_compile.triton('first', '''source of "first"''', device_str='cuda')
second = async_compile.triton("second", "source")
other = async_compile.cpp("third", "source")
"""
    found = list(offline_kernels._find_kernels(block))
    assert found == [("first", 'source of "first"'), ("second", "source")]
