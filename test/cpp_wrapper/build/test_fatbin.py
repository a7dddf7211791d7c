"""Fat binaries: their architectures, and the output of nvcc."""

from __future__ import annotations

import pathlib
import shutil
import struct
from typing import Any

import pytest
from torch._inductor import config as inductor_config
from torch._inductor.codegen.cuda import compile_utils
from torch._inductor.exc import CUDACompileError

from inductor_ext.cpp_wrapper.build import fatbin

LISTS_ARCHITECTURES = hasattr(compile_utils, "_cuda_multi_arch_gencode_options")
"""Whether torch reads TORCH_CUDA_ARCH_LIST, as from 2.14 on."""

PTX = """.version 7.0
.target sm_80
.address_size 64
.visible .entry nothing() { ret; }
"""


def images(path: pathlib.Path) -> set[tuple[str, int]]:
    """Kind and architecture of each image in a fat binary."""
    data = path.read_bytes()
    magic, _, header, size = struct.unpack_from("<IHHQ", data)
    assert magic == 0xBA55ED50
    kinds, at = set(), header
    while at < header + size:
        kind, _, entry_header, entry_size = struct.unpack_from("<HHIQ", data, at)
        (architecture,) = struct.unpack_from("<I", data, at + 28)
        kinds.add(({1: "compute", 2: "sm"}[kind], architecture))
        at += entry_header + entry_size
    return kinds


@pytest.fixture(autouse=True)
def target() -> Any:
    """Torch compiles for an A100."""
    with inductor_config.patch({"cuda.arch": "80"}):
        yield


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        (None, {"sm_80", "compute_80"}),
        ("8.0;8.6;9.0", {"sm_80", "sm_86", "sm_90", "compute_80"}),
        # PTX does not run on older architectures.
        ("7.5 8.6+PTX", {"sm_80", "sm_86", "compute_80"}),
        ("native", {"sm_80", "compute_80"}),
    ],
)
def test_torch_cuda_arch_list_adds_machine_code(
    listed: str | None, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    if listed is not None:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    if not LISTS_ARCHITECTURES:
        expected = {"sm_80", "compute_80"}
    assert set(fatbin.architectures(fatbin.gencode_options())) == expected


def test_the_architecture_that_a_kernel_was_generated_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    options = fatbin.gencode_options("90a")
    assert set(fatbin.architectures(options)) == {"sm_90a", "compute_90a"}
    assert all(option.startswith("arch=compute_90a,code=") for option in options)


def test_architectures_of_a_list() -> None:
    options = ["arch=compute_80,code=[sm_80,compute_80]", "arch=compute_90a,code=sm_90a"]
    assert fatbin.architectures(options) == ("sm_80", "compute_80", "sm_90a")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
@pytest.mark.parametrize("listed", [None, "8.0;9.0"])
def test_nvcc_builds_an_image_for_each(
    listed: str | None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    if listed is not None:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    (tmp_path / "kernel.ptx").write_text(PTX)
    path = tmp_path / "kernel.fatbin"
    fatbin.build({"asm": str(tmp_path / "kernel.ptx"), "cuda_arch": "80"}, str(path))
    more = {("sm", 90)} if listed and LISTS_ARCHITECTURES else set()
    assert images(path) == {("sm", 80), ("compute", 80)} | more


@pytest.mark.skipif(shutil.which("fatbinary") is None, reason="no fatbinary")
def test_machine_code_of_triton_is_not_compiled_again(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no other architecture is requested: the toolkit's ptxas may not support Triton's PTX."""
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    kernel = {"asm": str(tmp_path / "kernel.ptx"), "cuda_arch": "80"}
    (tmp_path / "kernel.ptx").write_text(PTX)
    (tmp_path / "kernel.cubin").write_bytes(b"machine code")
    kernel["runtime_bin_path"] = str(tmp_path / "kernel.cubin")
    command = fatbin.build_command(kernel, str(tmp_path / "kernel.fatbin"))
    assert command[0].endswith("fatbinary")
    assert f"--image3=kind=elf,sm=80,file={tmp_path}/kernel.cubin" in command
    assert f"--image3=kind=ptx,sm=80,file={tmp_path}/kernel.ptx" in command
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0")
    command = fatbin.build_command(kernel, str(tmp_path / "kernel.fatbin"))
    assert command[0].endswith("nvcc") is LISTS_ARCHITECTURES


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_output_of_nvcc_is_in_the_error(tmp_path: pathlib.Path) -> None:
    (tmp_path / "kernel.ptx").write_text("no PTX")
    with pytest.raises(CUDACompileError, match=r"kernel\.ptx"):
        fatbin.build({"asm": str(tmp_path / "kernel.ptx")}, str(tmp_path / "kernel.fatbin"))
