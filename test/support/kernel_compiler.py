"""Kernels of modules that Inductor generates, compiled for a GPU by Triton and ptxas."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from inductor_ext.templates.triton.config import GemmConfig
from test.support import fake_cuda
from test.support.kernel_cases import Case, render
from test.support.kernel_interpreter import load


@dataclass(frozen=True)
class Compiled:
    """A kernel compiled for a GPU."""

    ptx: str
    shared: int
    """Bytes of shared memory per CTA."""
    spills: int
    """Bytes of spilled registers."""
    registers: int
    """Of a thread."""
    scratch: int
    """Bytes of global memory that each CTA writes its descriptors to."""


def compiled(case: Case, capability: tuple[int, int] = (9, 0)) -> Compiled:
    """The kernel of a case, compiled for a GPU by Triton and ptxas."""
    return compiled_module(render(case, capability), case.config, capability)


def compiled_module(
    lowered: fake_cuda.Lowered, config: GemmConfig, capability: tuple[int, int] = (9, 0)
) -> Compiled:
    """The only template kernel of a module, compiled by Triton."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    ((name, source),) = (
        item for item in lowered.kernels().items() if item[0].startswith("triton_tem")
    )
    arguments = lowered.code[lowered.code.index("@triton_heuristics.template") :]
    signature = dict(re.findall(r"'(\w+)': '(\*\w+|i32|i64)'", arguments.split("\n@triton.jit")[0]))
    with tempfile.TemporaryDirectory() as folder:
        kernel = load(name, source, Path(folder))
        declared = {name: signature[name] for name in kernel.arg_names}
        attributes = {
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(kernel.arg_names)
            if declared[name].startswith("*")
        }
        target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        if config.pdl:
            options["launch_pdl"] = True
        with mock.patch.dict(os.environ, {"TRITON_CACHE_DIR": folder}):
            binary = triton.compile(
                ASTSource(kernel, declared, {}, attributes), target=target, options=options
            )
        registers, spills = _resources(binary.asm["cubin"])
    return Compiled(
        binary.asm["ptx"],
        binary.metadata.shared,
        spills,
        registers,
        binary.metadata.global_scratch_size,
    )


def cuobjdump(cubin: bytes, option: str) -> str:
    """The output of CUDA's cuobjdump for a kernel."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [knobs.nvidia.cuobjdump.path, option, file.name],
            check=True,
            capture_output=True,
            text=True,
        ).stdout


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers per thread, and bytes of spilled ones."""
    listing = cuobjdump(cubin, "--dump-resource-usage")
    (usage,) = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", listing)
    registers, stack, local = (int(item) for item in usage)
    return registers, stack + local
