"""Fat binaries of Triton kernels: machine code for several GPUs, and PTX for later ones.

With `aot_inductor.emit_multi_arch_kernel` a package contains one file per kernel, which also runs
on GPUs other than the one it was compiled on. The architectures depend on the torch version: from
torch 2.14 on, the one that torch compiles for (`cuda.arch`, or the current GPU) and those of
TORCH_CUDA_ARCH_LIST that its PTX can be compiled for; before, only the current GPU. PTX is always
included.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any


def gencode_options(architecture: str | None = None) -> list[str]:
    """Return nvcc's -gencode values for the images of a fat binary: "arch=compute_80,code=sm_80".

    Args:
        architecture: architecture that the PTX was generated for, "90a"; None for the one that
            torch compiles for.
    """
    from torch._inductor.codegen.cuda import compile_utils

    architecture = architecture or _target()
    from_environment = getattr(compile_utils, "_cuda_multi_arch_gencode_options", None)
    if from_environment is not None:
        return [str(option) for option in from_environment(architecture)]
    return [f"arch=compute_{architecture},code={kind}_{architecture}" for kind in ("compute", "sm")]


def architectures(options: Sequence[str]) -> tuple[str, ...]:
    """Return the images that `gencode_options` requests: ("sm_80", "compute_80")."""
    images = (re.findall(r"(?:sm|compute)_\w+", option.partition("code=")[2]) for option in options)
    return tuple(itertools.chain.from_iterable(images))


def build(kernel: Mapping[str, Any], output: str) -> None:
    """Build the fat binary of a kernel.

    Args:
        kernel: the parameters that Inductor recorded for it (`CudaKernelParamCache`).
        output: path of the fat binary.

    Raises:
        torch._inductor.exc.CUDACompileError: the build failed; contains the compiler's output.
    """
    from torch._inductor.exc import CUDACompileError

    command = build_command(kernel, output)
    process = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if process.returncode != 0:
        raise CUDACompileError(command, process.stdout + process.stderr)


def build_command(kernel: Mapping[str, Any], output: str) -> list[str]:
    """Return the command that writes a kernel's fat binary: fatbinary or nvcc."""
    from torch._inductor.codegen.cuda import compile_utils

    ptx, architecture = kernel["asm"], kernel.get("cuda_arch") or _target()
    # torch 2.11 keeps the machine code only under the path of the fat binary.
    machine_code = kernel.get("runtime_bin_path")
    options = gencode_options(architecture)
    nvcc = str(compile_utils._cuda_compiler())
    fatbinary = _fatbinary(nvcc)
    images = architectures(options)
    if (
        fatbinary is not None
        and machine_code is not None
        and machine_code != output
        and os.path.exists(machine_code)
        and set(images) == {f"sm_{architecture}", f"compute_{architecture}"}
    ):
        # Triton ships its own ptxas; the CUDA toolkit's may not support its PTX version.
        return [
            fatbinary,
            f"--create={output}",
            "-64",
            f"--image3=kind=elf,sm={architecture},file={machine_code}",
            f"--image3=kind=ptx,sm={architecture},file={ptx}",
        ]
    codes = [f"-gencode={option}" for option in options]
    return [*shlex.split(nvcc), "-fatbin", ptx, "-o", output, *codes]


def _fatbinary(nvcc: str) -> str | None:
    """Return the toolkit's `fatbinary` program, which combines images into a fat binary."""
    beside = os.path.join(os.path.dirname(nvcc), "fatbinary")
    return beside if os.path.dirname(nvcc) and os.path.exists(beside) else shutil.which("fatbinary")


def _target() -> str:
    """Return the architecture that torch compiles kernels for: "80", "90a"."""
    from torch._inductor.codegen.cuda import compile_utils

    target = getattr(compile_utils, "_aoti_cuda_target_arch", None)
    return str(target() if target is not None else compile_utils._nvcc_arch_as_compile_option())
