"""Seconds from the first call of a compiled GEMM to its running kernel, with CUTLASS on a GPU.

Every case runs in its own process with empty caches: it compiles and calls a linear layer, then one
of the same class with another size. The output has the seconds of both calls, the seconds of
another call compiled without CUTLASS (the part that Inductor takes in any case), the kernels that
were built, and the build time of every kernel. `--inductor` measures Inductor (default) with its
own CUTLASS backend.

    python -m benchmarks.gemm.cutlass_cold --out cold.jsonl
    python -m benchmarks.gemm.cutlass_cold --inductor --cases linear --out cold.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.gemm import models as gemm_models
from benchmarks.harness import results
from inductor_ext.storage.artifact_store import ArtifactStore
from inductor_ext.storage.paths import kernel_folder
from inductor_ext.templates.cutlass import nvcc_build

__all__ = ["CASES", "main"]

CASES: dict[str, Callable[..., torch.Tensor]] = {
    "linear": lambda x, w, b, q: functional.linear(x, w),
    "bias_gelu": lambda x, w, b, q: functional.gelu(functional.linear(x, w, b)),
    "int8": lambda x, w, b, q: gemm_models.int8_linear(x, q, b),
}
"""Functions of x [M, K], w [N, K] and b [N] in bfloat16, and q [N, K] in int8. In the last case
CUTLASS kernels win [measured on an H200]; in the others cuBLAS may be selected."""

SIZES = ((8192, 4096, 4096), (4096, 8192, 4096))
"""M, N and K of both calls."""

OTHER_SIZES = ((1024, 6144, 4096), (2048, 2048, 4096))
"""M, N and K of two calls without CUTLASS: the first one starts CUDA and imports Inductor, which is
not measured; the second one is timed. The non-GEMM kernels that they compile cannot be reused for
`SIZES`."""

_CUTLASS = {
    "max_autotune": True,
    "max_autotune_gemm_backends": "ATEN,CUTLASS",
    "cutlass.cutlass_epilogue_fusion_enabled": True,
}
_WITHOUT = {"max_autotune": True, "max_autotune_gemm_backends": "ATEN"}


def _time_first_call(function: Callable[..., Any], backend: str, options: Any, sizes: Any) -> float:
    """Return the seconds of the first call of a compiled function."""
    m, n, k = sizes
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, options=options)
    tensors = [
        torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((m, k), (n, k), (n,))
    ]
    tensors.append(torch.randint(-127, 128, (n, k), device="cuda", dtype=torch.int8))
    torch.cuda.synchronize()
    start = time.perf_counter()
    compiled(*tensors)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _list_kernels() -> list[dict[str, Any]]:
    """Return the details of the kernels in the store."""
    store = ArtifactStore(kernel_folder(), 4 << 30)
    details = []
    for key in store.entry_keys():
        with store.get(key) as folder:
            file = None if folder is None else folder / nvcc_build.DETAILS
            if file is not None and file.exists():
                details.append(json.loads(file.read_text(encoding="utf-8")))
    return details


def _run_case(case: str, backend: str) -> None:
    function = CASES[case]
    without = [_time_first_call(function, backend, _WITHOUT, sizes) for sizes in OTHER_SIZES]
    first = _time_first_call(function, backend, _CUTLASS, SIZES[0])
    built = _list_kernels()
    second = _time_first_call(function, backend, _CUTLASS, SIZES[1])
    line = {
        "case": case,
        "backend": backend,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cores": len(os.sched_getaffinity(0)),
        "first": first,
        "second": second,
        "without": without[1],
        "kernels": built,
        "built_later": len(_list_kernels()) - len(built),
    }
    print(json.dumps(line), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument(
        "--inductor", action="store_true", help="measure Inductor (default) instead"
    )
    parser.add_argument("--out", type=Path, help="file to which a line of JSON per case is added")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    backend = "inductor" if options.inductor else "inductor_ext"
    if options.child:
        _run_case(options.child, backend)
        return 0
    for case in options.cases:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "benchmarks.gemm.cutlass_cold", "--child", case]
            done = subprocess.run(
                command + ["--inductor"] * options.inductor,
                env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
        results.print_line(done.stdout.strip().splitlines()[-1], options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
