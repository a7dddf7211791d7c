"""Names of targets, and packages for GPUs that are built without one."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import platform
import re
from typing import Any

import pytest
import torch

import inductor_ext
from inductor_ext import exc, settings, targets
from inductor_ext.cpp_wrapper.package import manifest, variants, zip_reader
from inductor_ext.cpp_wrapper.package.machine import Machine
from inductor_ext.toolchain.probes import cuda

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="host code is for x86-64")

needs_cuda_build = pytest.mark.skipif(
    torch.version.cuda is None or cuda.find_home() is None,
    reason="needs a CUDA build of torch and CUDA's headers, but no GPU",
)


def names(*gpus: str) -> list[str]:
    return [target.name for target in targets.parse(gpus, None)]


def test_the_least_demanding_target_is_the_first() -> None:
    assert names("sm_100", "ptx", "H200", "sm_80", "ptx") == ["ptx", "sm_80", "H200", "sm_100"]
    levels = targets.parse(None, ["x86-64-v4", "x86-64-v2"])
    assert [target.name for target in levels] == ["x86-64-v2", "x86-64-v4"]
    assert targets.parse(None, None) == ()


def test_a_target_is_described_as_its_gpu() -> None:
    (target,) = targets.parse(["H200"], ["x86-64-v2"])
    assert target.gpu is not None
    assert target.gpu.name == "NVIDIA H200"
    assert target.gpu.capability == (9, 0)
    assert target.gpu.total_memory == 141 << 30
    assert target.level == "x86-64-v2"
    assert target.device_type == "cuda"


def test_ptx_needs_no_more_than_the_smallest_gpu() -> None:
    (ptx,) = targets.parse(["ptx"], None)
    for name in targets._GPUS:
        gpu = targets.gpu_properties(name)
        assert ptx.gpu is not None
        for field in (
            "architecture",
            "shared_memory_per_block_optin",
            "max_threads_per_multi_processor",
        ):
            assert getattr(ptx.gpu, field) <= getattr(gpu, field), (name, field)


@pytest.mark.parametrize(
    ("gpus", "levels", "error", "why"),
    [
        (["sm_91"], None, exc.UnknownTargetError, "sm_80, sm_89, sm_90, sm_100, A100, L4"),
        (["x86-64-v3"], None, exc.UnknownTargetError, "x86-64-v3"),
        (None, ["sm_90"], exc.UnknownTargetError, "x86-64-v2"),
        (["H100", "sm_90"], None, exc.UnsupportedTargetError, "Name each architecture once"),
        (["sm_90"], ["x86-64-v2", "x86-64-v3"], exc.UnsupportedTargetError, "one CPU level"),
        ("sm_90", None, exc.BadArgumentError, "a list of one or more names"),
        ([], None, exc.BadArgumentError, "a list of one or more names"),
        (["sm_90"], ["x86-64-v9"], exc.UnknownTargetError, "x86-64-v4, aarch64"),
    ],
)
def test_bad_names(gpus: Any, levels: Any, error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=re.escape(why)):
        targets.parse(gpus, levels)


@pytest.mark.parametrize(
    ("options", "changes", "why"),
    [
        ({"freezing": True}, {}, "the option freezing does not support"),
        ({"aot_inductor.emit_multi_arch_kernel": True}, {}, "emit_multi_arch_kernel"),
        ({}, {"aot_self_test": True}, "aot_self_test"),
        ({}, {"enabled": False}, "the extension is disabled"),
    ],
)
def test_options_that_do_not_fit(
    options: dict[str, Any], changes: dict[str, Any], why: str
) -> None:
    values = dataclasses.replace(settings.Settings(), **changes)
    with pytest.raises(exc.UnsupportedTargetError, match=why):
        targets.check(targets.parse(["sm_90"], None), {"cpu"}, options, values)


def test_a_program_on_another_device() -> None:
    values = settings.Settings()
    with pytest.raises(exc.UnsupportedTargetError, match="tensors on cuda"):
        targets.check(targets.parse(None, ["x86-64-v2"]), {"cpu", "cuda"}, {}, values)
    with pytest.raises(exc.UnsupportedTargetError, match="tensors on xpu"):
        targets.check(targets.parse(["sm_80"], None), {"cpu", "xpu"}, {}, values)


class Net(torch.nn.Module):
    """Two matmuls with few rows and a reduction; tied weights, a scalar, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(256, 1024), torch.nn.Linear(1024, 256)
        self.again = torch.nn.Linear(1024, 256)
        self.again.weight = self.down.weight
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        y = torch.nn.functional.gelu(self.up(x))
        return torch.softmax(self.down(y) * self.scale + self.again(y), -1) + self.calls.sum()


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval().half()


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built with CUDA")
def test_a_torch_without_cuda_is_refused(net: Net, tmp_path: pathlib.Path) -> None:
    program = torch.export.export(net, (torch.randn(4, 256).half(),))
    with pytest.raises(exc.UnsupportedTargetError, match="is built without CUDA"):
        inductor_ext.aoti_compile_and_package(
            program, package_path=tmp_path / "m.pt2", targets=["sm_90"]
        )
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def path(net: Net, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A package for three architectures and PTX."""
    target = str(tmp_path_factory.mktemp("targets") / "net.pt2")
    program = torch.export.export(
        net, (torch.randn(4, 256).half(),), dynamic_shapes=({0: torch.export.Dim("n", max=64)},)
    )
    inductor_ext.aoti_compile_and_package(
        program, package_path=target, targets=["sm_90", "sm_100", "sm_80", "ptx"]
    )
    return target


def read(path: str) -> tuple[manifest.Model, dict[str, bytes]]:
    with zip_reader.open_package(path) as package:
        content, _ = manifest.verify(package)  # type: ignore[misc]
        return content.models["model"], {name: package.read(name) for name in content.files}


def read_constant(constant: manifest.Constant, files: dict[str, bytes]) -> bytes:
    (weights,) = (data for name, data in files.items() if name.endswith(".weights"))
    assert constant.offset is not None
    return weights[constant.offset : constant.offset + constant.bytes]


@needs_cuda_build
def test_each_target_has_kernels_for_its_architecture(path: str) -> None:
    model, files = read(path)
    found = {item.target: item for item in variants.candidates(model)}
    assert list(found) == ["ptx", "sm_80", "sm_90", "sm_100"]
    architectures = [item.cuda_architectures for item in found.values()]
    assert architectures == [("compute_80",), ("sm_80",), ("sm_90a",), ("sm_100a",)]
    for target, item in found.items():
        folder = str(item.library).rpartition("/")[0]
        cubins = [data for name, data in files.items() if re.match(rf"{folder}/\w+\.cubin$", name)]
        assert 0 < len(cubins) <= len(item.kernels)
        assert item.cpu_features
        if target == "ptx":
            assert all(re.search(rb"^\.target sm_80$", data, re.MULTILINE) for data in cubins)
        else:
            # The flags of the ELF header contain the architecture.
            flags = {_architecture(data) for data in cubins}
            assert flags == {int(str(target).removeprefix("sm_"))}
    assert model.device == "cuda"
    assert {constant.device for constant in model.constants} == {"cuda"}


def _architecture(cubin: bytes) -> int:
    assert cubin[:4] == b"\x7fELF"
    flags = int.from_bytes(cubin[48:52], "little")
    # CUDA 13 moved the architecture to the second byte.
    return flags & 0xFF if cubin[8] < 8 else flags >> 8 & 0xFF


def test_padding_is_not_measured() -> None:
    (target,) = targets.parse(["sm_90"], None)
    assert target.options({})["shape_padding"] is False
    assert target.options({"force_shape_pad": True})["shape_padding"] is True


@needs_cuda_build
def test_sizes_that_are_not_aligned(tmp_path: pathlib.Path) -> None:
    net = torch.nn.Linear(1025, 1027).half()
    program = torch.export.export(net, (torch.randn(1023, 1025).half(),))
    target = str(tmp_path / "net.pt2")
    inductor_ext.aoti_compile_and_package(program, package_path=target, targets=["sm_90"])
    model, _ = read(target)
    assert [item.target for item in variants.candidates(model)] == ["sm_90"]


class Threshold(torch.nn.Module):
    """A tensor that is made by the code is a constant without a name of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, torch.tensor(0.625, dtype=x.dtype), x)


@needs_cuda_build
def test_a_constant_of_the_code(tmp_path: pathlib.Path) -> None:
    program = torch.export.export(Threshold(), (torch.randn(8, 64).half(),))
    target = str(tmp_path / "threshold.pt2")
    inductor_ext.aoti_compile_and_package(program, package_path=target, targets=["sm_90"])
    model, files = read(target)
    (constant,) = model.constants
    stored = bytearray(read_constant(constant, files))
    assert torch.frombuffer(stored, dtype=torch.float16) == 0.625


@needs_cuda_build
def test_there_is_one_copy_of_the_weights(path: str, net: Net) -> None:
    model, files = read(path)
    for constant in model.constants:
        value = net.state_dict()[constant.fqn]
        assert read_constant(constant, files) == value.contiguous().numpy().tobytes()
    assert {constant.fqn for constant in model.constants} == set(net.state_dict()) - {
        "again.weight"
    } or {constant.fqn for constant in model.constants} == set(net.state_dict()) - {"down.weight"}
    assert os.path.getsize(path) < sum(map(len, files.values())) + (1 << 17)


@needs_cuda_build
@pytest.mark.parametrize(
    ("capability", "target"),
    [((8, 6), "sm_80"), ((9, 0), "sm_90"), ((10, 0), "sm_100"), ((12, 0), "ptx"), ((7, 5), None)],
)
def test_the_target_for_a_gpu(path: str, capability: tuple[int, int], target: str | None) -> None:
    with zip_reader.open_package(path) as package:
        content, _ = manifest.read(package)  # type: ignore[misc]
    here = dataclasses.replace(Machine.current(torch.__version__, "cuda"), capability=capability)
    if target is None:
        with pytest.raises(exc.IncompatibleArtifactError, match="ptx, sm_80, sm_90, sm_100"):
            variants.choose(content, "model", here, path)
        return
    chosen = variants.choose(content, "model", here, path).models["model"]
    assert chosen.target == target


@needs_cuda_build
def test_torch_reports_this_machine_s_gpus_after_the_compile(path: str) -> None:
    from torch._inductor.runtime.hints import DeviceProperties

    assert DeviceProperties.create.cache_info().currsize <= torch.cuda.device_count()  # type: ignore[attr-defined]
    assert torch.cuda.is_available() == bool(torch.cuda.device_count())
