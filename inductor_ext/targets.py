"""The named targets of a package: CPU levels and GPU architectures that it is compiled for.

`parse` turns the arguments `targets=` and `cpu_targets=` of `inductor_ext.aoti_compile_and_package`
into `Target`s, `check` finds out whether programs can be compiled for them, and `Target.scope` is
the context of the compile for one of them. The machine that compiles needs none of the targets'
features, and no GPU: kernels are compiled, and neither run nor timed. The module `variants` of
`cpp_wrapper.package` chooses between the targets when the package is loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import pathlib
import platform
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from inductor_ext import exc
from inductor_ext.cpp_wrapper.build import cpu_target, cross_compile
from inductor_ext.hooks import context, offline_gpu
from inductor_ext.hooks.offline_gpu import GpuProperties
from inductor_ext.settings import Settings
from inductor_ext.templates.device import KNOWN, Device

_UNSUPPORTED_OPTIONS = (
    # They give the files of a model a place where those of only one target fit.
    "aot_inductor.package_cpp_only",
    "aot_inductor.output_path",
)
_UNSUPPORTED_GPU_OPTIONS = (
    # They compute constants, whose values are not on the GPU.
    "freezing",
    "aot_inductor.use_runtime_constant_folding",
    # The targets are the architectures.
    "aot_inductor.emit_multi_arch_kernel",
    "cuda.arch",
)

_UNSUPPORTED_CROSS_OPTIONS = (
    # It packs weights by the libraries of this machine's torch.
    "freezing",
)

_GPUS = {
    "A100": ("NVIDIA A100-SXM4-80GB", 80),
    "L4": ("NVIDIA L4", 24),
    "RTX4090": ("NVIDIA GeForce RTX 4090", 24),
    "H100": ("NVIDIA H100 80GB HBM3", 80),
    "H200": ("NVIDIA H200", 141),
    "B200": ("NVIDIA B200", 180),
}
"""Targets named after a GPU: its name in `templates.device.KNOWN`, and its memory in GB."""

_ARCHITECTURES = {"sm_80": "A100", "sm_89": "L4", "sm_90": "H100", "sm_100": "B200"}
"""Targets named after an architecture, and the GPU for which choices are made."""

PTX = "ptx"
"""The target for all other GPUs: PTX, which the driver compiles."""

_PTX_CAPABILITY = (8, 0)
_PTX_SHARED = 99 << 10
"""Bytes of shared memory per block that all GPUs since compute capability 8.0 have."""

_HOST_LEVEL = "x86-64-v3"
"""CPU level of the host code of packages for GPUs."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A target that a model is compiled for."""

    name: str
    """Name in the manifest, such as "x86-64-v3" or "sm_90"."""
    level: str
    """CPU level of the code, of `cpu_target.SIMD_LENGTHS`."""
    gpu: GpuProperties | None = None
    """The GPU; None for a CPU target."""

    @property
    def machine(self) -> str:
        """The processor architecture of the code, as in `platform.machine()`."""
        return cpu_target.machine_of(self.level)

    @property
    def is_cross(self) -> bool:
        """Whether the code is for another processor architecture than this machine's."""
        return cross_compile.is_needed(self.machine)

    @property
    def device_type(self) -> str:
        """The device type that the models run on."""
        return "cpu" if self.gpu is None else "cuda"

    def settings(self) -> dict[str, Any]:
        """Return the settings of the extension for the compile."""
        tuning = {} if self.gpu is None else {"tuning": "compile"}
        return tuning if self.is_cross else {"aot_isa": self.level, **tuning}

    def options(self, patches: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of Inductor for the compile.

        Args:
            patches: the options that the user has passed.
        """
        from torch._inductor import config as inductor_config

        options = cpu_target.target_options(self.level)
        if self.is_cross:
            options["cpp.cxx"] = (None, cross_compile.COMPILERS[self.machine])
        if self.gpu is None:
            return options
        # Nothing is benchmarked; stored tuning results and the cost model apply without
        # max_autotune.
        return {
            **options,
            "max_autotune": False,
            "max_autotune_gemm": False,
            "max_autotune_gemm_backends": "ATEN,TRITON",
            "coordinate_descent_tuning": False,
            "benchmark_epilogue_fusion": False,
            # Otherwise matmuls of sizes that are not aligned are timed with and without padding.
            "shape_padding": patches.get("force_shape_pad", inductor_config.force_shape_pad),
            "triton.autotune_at_compile_time": True,
            # The values of constants are not in the graph.
            "always_keep_tensor_constants": True,
            "joint_graph_constant_folding": False,
        }

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Let Inductor compile for the target, in this thread."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(context.enter(cpu_level=self.level))
            if self.gpu is not None:
                stack.enter_context(offline_gpu.report(self.gpu))
            yield


def parse(targets: Sequence[str] | None, cpu_targets: Sequence[str] | None) -> tuple[Target, ...]:
    """Return the targets by these names, without duplicates, the least demanding one first.

    Raises:
        exc.UnknownTargetError: there is no target of that name.
        exc.UnsupportedTargetError: this machine cannot compile for a target.
        exc.BadArgumentError: an argument is not a list of names.
    """
    levels = _parse_levels(_check_names("cpu_targets", cpu_targets))
    gpus = _parse_gpus(_check_names("targets", targets))
    if not gpus:
        return tuple(Target(level, level) for level in levels)
    if len(levels) > 1:
        why = "a package for GPUs has host code for one CPU level"
        fix = "Pass one name as cpu_targets."
        raise exc.UnsupportedTargetError(target=levels[1], why=why, fix=fix)
    host = levels[0] if levels else _HOST_LEVEL
    if cross_compile.is_needed(cpu_target.machine_of(host)):
        why = f"a package for GPUs has host code for {platform.machine()}"
        fix = "Pass a level of it as cpu_targets, or omit cpu_targets."
        raise exc.UnsupportedTargetError(target=host, why=why, fix=fix)
    return tuple(Target(name, host, gpu) for name, gpu in gpus.items())


def _check_names(argument: str, names: Any) -> list[str]:
    if names is None:
        return []
    if (
        isinstance(names, str)
        or not isinstance(names, Collection)
        or not names
        or not all(isinstance(name, str) for name in names)
    ):
        allowed = "a list of one or more names of targets"
        raise exc.BadArgumentError(name=argument, actual=repr(names), allowed=allowed)
    return list(names)


def is_cpu_target(name: str) -> bool:
    """Whether a name belongs to `cpu_targets` rather than to `targets`."""
    return name in cpu_target.SIMD_LENGTHS


def _parse_levels(names: Sequence[str]) -> list[str]:
    levels = list(cpu_target.SIMD_LENGTHS)
    for name in names:
        if name not in levels:
            raise exc.UnknownTargetError(name=name, known=", ".join(levels))
    here = platform.machine()
    for name in names:
        if here != "x86_64":
            why = f"this machine has the architecture {here}"
            fix = "Compile on an x86-64 machine, or omit cpu_targets."
            raise exc.UnsupportedTargetError(target=name, why=why, fix=fix)
        machine = cpu_target.machine_of(name)
        if cross_compile.is_needed(machine):
            missing = cross_compile.find_missing_compiler(machine)
            if missing is not None:
                raise exc.UnsupportedTargetError(target=name, why=missing[0], fix=missing[1])
    return [level for level in levels if level in names]


def _parse_gpus(names: Sequence[str]) -> dict[str, GpuProperties]:
    """Return the GPUs by target: PTX first, which runs on most, then by compute capability."""
    known = {**{name: name for name in _GPUS}, **_ARCHITECTURES}
    found: dict[str, GpuProperties] = {}
    for name in names:
        if name == PTX:
            continue
        if name not in known:
            listed = ", ".join((*_ARCHITECTURES, *_GPUS, PTX))
            raise exc.UnknownTargetError(name=name, known=listed)
        found[name] = gpu_properties(known[name])
    capabilities = {gpu.capability for gpu in found.values()}
    if len(capabilities) < len(found):
        why = "another target has the same architecture, so that the loader could not choose"
        fix = "Name each architecture once."
        raise exc.UnsupportedTargetError(target=", ".join(found), why=why, fix=fix)
    ordered = dict(sorted(found.items(), key=lambda item: item[1].capability))
    return {**({PTX: _ptx_properties()} if PTX in names else {}), **ordered}


def gpu_properties(name: str) -> GpuProperties:
    """Return what the driver reports of a GPU, by its short name, such as "H100"."""
    full_name, memory = _GPUS[name]
    (device,) = (device for device in KNOWN if device.name == full_name)
    return GpuProperties.of(device, memory << 30)


def _ptx_properties() -> GpuProperties:
    """Return a GPU that has no more than every GPU since compute capability 8.0 has."""
    (a100,) = (device for device in KNOWN if device.name == _GPUS["A100"][0])
    device: Device = dataclasses.replace(
        a100, name="PTX", capability=_PTX_CAPABILITY, shared_memory=_PTX_SHARED
    )
    return dataclasses.replace(
        GpuProperties.of(device, _GPUS["L4"][1] << 30),
        max_threads_per_multi_processor=1536,
        emits_ptx=True,
    )


def check(
    targets: Sequence[Target],
    devices: Collection[str],
    options: Mapping[str, Any],
    settings: Settings,
) -> None:
    """Check that models can be compiled for the targets. Do nothing without targets.

    Args:
        targets: the result of `parse`.
        devices: device types of the programs' tensors.
        options: Inductor's options for the compile.
        settings: the settings of the compile.

    Raises:
        exc.UnsupportedTargetError: they cannot; nothing was compiled.
    """
    if not targets:
        return
    # All GPUs have the same requirements.
    for target in targets if targets[0].gpu is None else targets[:1]:
        _check(target, devices, options, settings)


def _check(
    target: Target, devices: Collection[str], options: Mapping[str, Any], settings: Settings
) -> None:
    is_gpu = target.gpu is not None
    allowed = {"cpu", "cuda"} if is_gpu else {"cpu"}
    unsupported = (
        *_UNSUPPORTED_OPTIONS,
        *(_UNSUPPORTED_GPU_OPTIONS if is_gpu else ()),
        *(_UNSUPPORTED_CROSS_OPTIONS if target.is_cross else ()),
    )
    if not settings.enabled:
        why, fix = "the extension is disabled", "Set the setting enabled to True."
    elif others := sorted({*devices} - allowed):
        why = f"a program has tensors on {', '.join(others)}"
        fix = f"Export the model on {' or '.join(sorted(allowed))}."
    elif used := [name for name in unsupported if options.get(name)]:
        why, fix = f"the option {used[0]} does not support named targets", "Unset the option."
    elif is_gpu and settings.aot_self_test:
        why = "a self test is recorded on the device of the program (setting aot_self_test)"
        fix = "Unset the setting."
    elif (missing := _find_missing(target, settings)) is not None:
        why, fix = missing
    else:
        return
    raise exc.UnsupportedTargetError(target=target.name, why=why, fix=fix)


def _find_missing(target: Target, settings: Settings) -> tuple[str, str] | None:
    """Return what a compile for a target lacks on this machine, and the remedy; None if nothing."""
    import torch

    if target.gpu is not None:
        return _find_missing_gpu_tool()
    if target.is_cross:
        folder = settings.aot_cross_torch
        return cross_compile.find_missing_torch(target.machine, folder, torch.__version__)
    return None


def _find_missing_gpu_tool() -> tuple[str, str] | None:
    import torch

    from inductor_ext.toolchain.probes import cuda

    if torch.version.cuda is None:
        why = f"torch {torch.__version__} is built without CUDA"
        return why, "Install a CUDA build of torch; it needs no GPU."
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed", "Install the triton package."
    if platform.machine() != "x86_64":
        why = f"this machine has the architecture {platform.machine()}"
        return why, "Compile on an x86-64 machine."
    from triton import knobs

    try:
        _ = knobs.nvidia.ptxas
    except RuntimeError:
        return "Triton has no ptxas", "Install a triton package that contains ptxas."
    if cuda.find_home() is None:
        return "CUDA's C headers are not installed", "Install the CUDA toolkit."
    return None


def cache_key(targets: Sequence[Target], settings: Settings) -> tuple[str, ...]:
    """Return plain values that change if compiles for the targets may give other code."""
    from inductor_ext.autotune import results_db

    names = [f"{target.name}:{target.level}" for target in targets]
    if settings.aot_cross_torch is not None:
        names.append(str(cross_compile.read_version(pathlib.Path(settings.aot_cross_torch))))
    if targets[0].gpu is not None:
        names.append(results_db.open_database(settings).generation(tuning=False))
    return tuple(names)
