"""Fix for the C++ templates of matmuls in a process that gets fewer threads than it asks for.

Each thread of a generated matmul computes the tiles of its own number. OpenMP may give it fewer
threads than the kernel asks for (`OMP_THREAD_LIMIT`, a call from another parallel region), and the
tiles of the missing threads are then not written. Here a thread also computes those.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from inductor_ext.hooks import context, registry
from inductor_ext.hooks.registry import Hook
from inductor_ext.hooks.upstream_fixes.parallel_errors import dispatch_kernels, find_block

_OWNER = "hooks.upstream_fixes.cpu_matmuls"
_TEMPLATE = "torch._inductor.codegen.cpp_gemm_template.CppGemmTemplate"

HOOKS = (
    Hook(
        "missing_threads",
        "replaced",
        ("torch._inductor.codegen.cpp.CppScheduling.define_kernel",),
        _OWNER,
        "The C++ of a matmul leaves a part of the result unwritten if OpenMP gives it fewer "
        "threads than it asks for.",
        parameters=("src_code",),
        upstream="168965",
        until="2.13",
    ),
    Hook(
        "slices_of_k",
        "replaced",
        (f"{_TEMPLATE}._thread_blocking",),
        _OWNER,
        "With `cpp.gemm_max_k_slices`, threads of a matmul wait for each other, which needs all of "
        "them. K is not sliced.",
        until="2.13",
    ),
    Hook(
        "slices_of_k_in_calls",
        "replaced",
        (f"{_TEMPLATE}.codegen_blocks",),
        _OWNER,
        "As `slices_of_k`; with dynamic M the C++ decides.",
        until="2.13",
    ),
)

_REGION = re.compile(r"\s*#\s*pragma omp parallel num_threads\((\d+)\)\s*$")
_NUMBER = "const int tid = omp_get_thread_num();"


def install_hooks() -> None:
    """Install the dispatchers, once per process."""
    dispatchers = {
        "missing_threads": dispatch_kernels(compute_all_tiles),
        "slices_of_k": _dispatch_blocks,
        "slices_of_k_in_calls": _dispatch_blocks,
    }
    registry.install(HOOKS, dispatchers)


def _dispatch_blocks(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def blocks(*args: Any, **kwargs: Any) -> Any:
        if context.settings() is None:
            return stock(*args, **kwargs)
        from torch._inductor import config

        with config.patch({"cpp.gemm_max_k_slices": 1}):
            return stock(*args, **kwargs)

    return blocks


def compute_all_tiles(source: str) -> str:
    """Return the C++ of a matmul in which threads also compute the tiles of missing threads.

    Args:
        source: a kernel. Other kernels are returned as they are.
    """
    if "omp_get_thread_num" not in source:
        return source
    lines = source.split("\n")
    for number, line in enumerate(lines):
        region = _REGION.match(line)
        block = find_block(lines, number + 1) if region else None
        if region is None or block is None:
            continue
        first = next(n for n in range(block.begin + 1, block.end + 1) if lines[n].strip())
        if lines[first].strip() != _NUMBER:
            continue
        lines[first] = (
            f"for (int tid = omp_get_thread_num(); tid < {region[1]}; "
            "tid += omp_get_num_threads()) {"
        )
        lines[block.end] = "}\n" + lines[block.end]
    return "\n".join(lines)
