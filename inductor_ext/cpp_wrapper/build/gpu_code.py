"""The GPU code of a graph: its kernels, their architectures, and their object files.

Triton kernels are those that Inductor recorded while generating the graph's code. The objects of
other kernels are those that lowerings attached to the wrapper codegen (`hooks.wrapper_codegen`). An
object file contains a kernel's machine code if the package has no separate file for it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from typing import Any

from inductor_ext import settings
from inductor_ext.cpp_wrapper.build import fatbin
from inductor_ext.hooks import context
from inductor_ext.hooks.wrapper_codegen import LinkedObject, linked_objects


def are_compiled_later() -> bool:
    """Whether CMake compiles the GPU kernels from PTX."""
    from torch._inductor import config

    aot = config.aot_inductor
    return bool(aot.package_cpp_only and aot.emit_multi_arch_kernel and aot.embed_kernel_binary)


def gencode_options(graph: Any) -> list[str]:
    """Return nvcc's -gencode options for the fat binaries of a graph's Triton kernels."""
    targets = {parameters.get("cuda_arch") for _, parameters in triton_kernels(graph)}
    (architecture,) = targets if len(targets) == 1 else {None}
    return fatbin.gencode_options(architecture)


def cuda_architectures(
    graph: Any, device_type: str, metadata: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the architectures that all GPU kernels of a graph were compiled for."""
    from torch._inductor import config

    if device_type != "cuda":
        return ()
    gpu = context.current().target_gpu
    if gpu is not None:
        # From compute capability 9.0 on, Triton compiles for one architecture ("sm_90a").
        kind = "compute" if gpu.emits_ptx else "sm"
        return (f"{kind}_{gpu.architecture}{'a' if gpu.major >= 9 else ''}",)
    # Attached objects are compiled only for the GPU of this machine.
    if config.aot_inductor.emit_multi_arch_kernel and not _attached_objects(graph):
        return fatbin.architectures(gencode_options(graph))
    digits = re.sub(r"\D", "", metadata.get("AOTI_COMPUTE_CAPABILITY", ""))
    return (f"sm_{digits}",) if digits else ()


def triton_kernels(graph: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the graph's Triton kernels with the parameters that Inductor has recorded."""
    from torch._inductor import codecache

    # The cache is per process: it also contains kernels of other graphs.
    names = kernel_sources(graph)
    cache = codecache.CudaKernelParamCache.cache
    return [(name, cache[name]) for name in cache if name in names]


def kernel_sources(graph: Any) -> Mapping[str, str]:
    """Return the source of each of the graph's Triton kernels by name."""
    sources: Mapping[str, str] = getattr(graph.wrapper_code, "_kernel_name_to_body", {})
    return sources


def _attached_objects(graph: Any) -> list[LinkedObject]:
    """Return the objects that the graph or its constant-folding graph is linked with."""
    objects = dict(linked_objects(graph.wrapper_code))
    if graph.const_module is not None:
        objects |= linked_objects(graph.const_module.wrapper_code)
    return list(objects.values())


def write_objects(
    graph: Any, device_type: str, values: settings.Settings, folder: str
) -> list[str]:
    """Write the object files with a graph's GPU code, and return their paths.

    Args:
        graph: Inductor's GraphLowering, after code generation.
        device_type: the device type that the graph runs on.
        values: the settings of the compile.
        folder: where the files are written; Inductor has written those of its CUTLASS kernels.
    """
    attached = [kernel.write(folder, values) for kernel in _attached_objects(graph)]
    return [*_triton_objects(graph, device_type, folder), *attached]


def kernel_names(graph: Any) -> set[str]:
    """Return the names of the kernels generated for a graph."""
    generated = {str(name) for name in graph.wrapper_code.src_to_kernel.values()}
    return generated | {kernel.name for kernel in _attached_objects(graph)}


def _triton_objects(graph: Any, device_type: str, folder: str) -> list[str]:
    """Return objects with GPU code: Inductor's CUTLASS kernels, and cubins if to be embedded."""
    from torch._inductor import codecache, config
    from torch._inductor.cpp_builder import convert_cubin_to_obj, get_ld_and_objcopy

    if device_type != "cuda":
        return []
    kernels = codecache.CUDACodeCache()
    objects = [str(path) for path in kernels.aot_kernels_o]
    kernels.aot_kernels_o.clear()
    if are_compiled_later():
        return objects
    for name, parameters in triton_kernels(graph):
        cubin = parameters[codecache.get_cpp_wrapper_cubin_path_name()]
        if config.aot_inductor.emit_multi_arch_kernel:
            fatbin.build(parameters, cubin)
        if config.aot_inductor.embed_kernel_binary:
            copy = shutil.copy(cubin, folder)
            objects.append(str(convert_cubin_to_obj(copy, name, *get_ld_and_objcopy(False))))
    return objects
