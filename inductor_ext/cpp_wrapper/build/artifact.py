"""Build a compiled model from generated C++; replaces torch's AotCodeCompiler.

`compile_artifact` takes Inductor's generated code for a graph and returns what Inductor's compiler
returns: the files for a package, or the path of a shared object. The weights are written once, from
the model's own memory to a separate file that the compiled model maps. The model's translation
units are compiled in parallel or, with `aot_inductor.package_cpp_only`, merged into one source file
for a later build (see `cmake_project`). The result is reported to `collecting`, for the manifest.

The settings `aot_unit_size`, `aot_weights_file` and `aot_debug_info` apply.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from inductor_ext import events, settings
from inductor_ext.cpp_wrapper.build import cmake_project, compiler, fatbin
from inductor_ext.cpp_wrapper.codegen import cpp_wrapper, extern_nodes, split_units, weights_layout
from inductor_ext.cpp_wrapper.signature.signature import Signature
from inductor_ext.hooks import context
from inductor_ext.storage.atomic import atomic_write
from inductor_ext.storage.digest import hash_buffer
from inductor_ext.templates.cutlass import aot_link as cutlass_objects
from inductor_ext.templates.cutlass import runtime as cutlass_runtime
from inductor_ext.templates.cutlass.source import Source

if TYPE_CHECKING:
    import torch

__all__ = ["Artifact", "collecting", "compile_artifact", "digests"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Artifact:
    """The build outputs for one graph, from which its manifest entry is written."""

    shared_object: str | None
    """Path; None if there are only sources."""
    files: tuple[Any, ...]
    """Paths, and `torch.export.pt2_archive._package_weights.Weights` if the user asks for them."""
    weights_path: str | None
    """Path of the weights file among `files`; the caller of `collecting` must create it."""
    plan: weights_layout.Plan
    """Offsets of the constants in the weights file."""
    signature: Signature
    kernels: tuple[str, ...]
    """Names of the generated kernels."""
    constants: dict[str, torch.Tensor]
    """Constants with a value, by their name in the generated code."""
    fqns: dict[str, str]
    """Fully qualified names (FQNs) in the exported model, by name in the generated code."""
    device_type: str
    features: tuple[str, ...]
    """CPU features that the code needs."""
    metadata: dict[str, str]
    cuda_architectures: tuple[str, ...] = ()
    """Architectures that its GPU kernels were compiled for: "sm_90a", "compute_90a"."""


@contextlib.contextmanager
def collecting() -> Iterator[list[Artifact]]:
    """Collect models compiled within, in this thread; their weights are not written to files."""
    artifacts: list[Artifact] = []
    with context.enter(artifacts=artifacts):
        yield artifacts


def compile_artifact(
    graph: Any,
    wrapper_code: str,
    kernel_code: str,
    serialized_extern_kernel_nodes: str | None,
    *,
    device_type: str,
    additional_files: list[str],
    values: settings.Settings,
) -> list[Any] | str:
    """Compile a graph's generated code.

    Args:
        graph: Inductor's GraphLowering, whose wrapper code is a `cpp_wrapper.AotWrapper`.
        wrapper_code: the generated C++ wrapper.
        kernel_code: the generated CPU kernels.
        serialized_extern_kernel_nodes: JSON for the proxy executor, or None.
        device_type: the device type that the graph runs on.
        additional_files: files from code generation, such as cubins.
        values: the settings of the compile.

    Returns:
        The files for a package if `aot_inductor.package` is set, else the shared object's path.

    Raises:
        torch._inductor.exc.CppCompileError: the C++ compiler rejects the code.
    """
    from torch._inductor import codecache, config

    tools = compiler.Compiler(device_type, values)
    folder, name = codecache.split_aot_inductor_output_path(config.aot_inductor.output_path)
    collected: list[Artifact] | None = context.current().artifacts
    constants = cpp_wrapper.constants_with_values(graph)
    plan: weights_layout.Plan = graph.wrapper_code.weights_plan
    only_sources = bool(config.aot_inductor.package_cpp_only)
    if only_sources:
        wrapper_code, kernel_code = _in_one(wrapper_code, kernel_code), ""
        # The library looks for them in its own directory.
        for path in additional_files:
            wrapper_code = wrapper_code.replace(f'"{path}"', f'"{os.path.basename(path)}"')
    # File names include a hash of the content: another model may be compiled, in this process or
    # another, before these files are packaged. Small constants are in the kernel code only.
    content = [repr(tools.link_command([], "")), tools.identity("kernel"), kernel_code]
    if collected is None:
        content += digests(constants, plan)
    write = _Writer(folder, "\0".join([wrapper_code, *content]))
    wrapper_path = write(wrapper_code, "wrapper.cpp")
    written = {"wrapper": (wrapper_path, wrapper_code)}
    if not only_sources:
        written["kernel"] = (write(kernel_code, "kernel.cpp"), kernel_code)
    stem = wrapper_path.removesuffix(".cpp")
    _show(written)

    files: list[Any] = [*additional_files, *(path for path, _ in written.values())]
    if serialized_extern_kernel_nodes:
        nodes = extern_nodes.for_executor(serialized_extern_kernel_nodes)
        files.append(_write_text(f"{stem}.json", nodes))
    # Inductor's own metadata is one dictionary shared by all compiles of the process.
    metadata = {
        **config.aot_inductor.metadata,
        "AOTI_DEVICE_KEY": device_type,
        **codecache.get_device_information(device_type),
    }
    for path, _ in written.values():
        path = f"{path.removesuffix('.cpp')}_metadata.json"
        files.append(_write_text(path, json.dumps(metadata)))
    files += _custom_objects(graph, os.path.dirname(wrapper_path))

    included = cpp_wrapper.weights_included() and plan.bytes > 0
    packaged = config.aot_inductor.package
    weights_path = None
    if included and packaged:
        weights_path = f"{stem}_serialized_weights.bin" if only_sources else f"{stem}.weights"
    shared_object = None
    if only_sources:
        outside = collected is not None and values.aot_weights_file is not None
        files += _project(tools, graph, stem, None if outside else weights_path)
    else:
        shared_object = config.aot_inductor.output_path if name else f"{stem}.so"
        appended = constants if included and not packaged else None
        _build(tools, graph, shared_object, *written["wrapper"], *written["kernel"], appended)
        files.append(shared_object)
    if weights_path is not None:
        files.append(weights_path)
        if collected is None:
            with codecache_file(weights_path) as file:
                weights_layout.write(file, constants, plan)
                if only_sources:
                    file.write(weights_layout.footer(plan))
    if config.aot_inductor.package_constants_on_disk_format == "pickle_weights":
        files.append(_pickled_weights(graph))
    files += _provenance(os.path.dirname(stem))
    if collected is not None:
        collected.append(
            Artifact(
                shared_object=shared_object,
                files=tuple(files),
                weights_path=weights_path,
                plan=plan,
                signature=graph.wrapper_code.model_signature,
                kernels=tuple(sorted(_kernels(graph))),
                constants=constants,
                fqns={name: cpp_wrapper.original_name(graph, name) for name in constants},
                device_type=device_type,
                features=tools.target.features,
                metadata=metadata,
                cuda_architectures=_cuda_architectures(graph, device_type, metadata),
            )
        )
    return files if shared_object is None or packaged else shared_object


def _build(
    tools: compiler.Compiler,
    graph: Any,
    shared_object: str,
    wrapper_path: str,
    wrapper_code: str,
    kernel_path: str,
    kernel_code: str,
    appended: dict[str, torch.Tensor] | None,
) -> None:
    """Compile and link a model's translation units.

    Args:
        tools: the compiler.
        graph: as in `compile_artifact`.
        shared_object: path of the output.
        wrapper_path, wrapper_code, kernel_path, kernel_code: path and text of the units.
        appended: constants to append to the shared object, or None.
    """
    folder = os.path.dirname(wrapper_path)
    with tempfile.TemporaryDirectory(prefix="inductor_ext-", dir=folder) as place:
        temporary = pathlib.Path(place)
        whole = compiler.Unit(wrapper_path, str(temporary / "wrapper.o"), "wrapper")
        parts = _split(graph.wrapper_code.program, whole, tools.settings.aot_unit_size)
        kernel = compiler.Unit(kernel_path, str(temporary / "kernel.o"), "kernel")
        others = [kernel] if _has_code(kernel_code) else []
        with tools.fixed() as fixed:
            units = _compile(tools, fixed, whole, parts, others)
            made = str(temporary / os.path.basename(shared_object))
            objects = [unit.object for unit in units]
            objects += _gpu_objects(graph, tools.device_type, place)
            objects += _cutlass_objects(graph, tools.settings, place)
            objects += fixed.objects
            tools.link(objects, made)
        if appended is not None:
            weights_layout.append(made, appended, graph.wrapper_code.weights_plan)
        os.replace(made, shared_object)
        if os.path.exists(f"{made}.debug"):
            os.replace(f"{made}.debug", f"{shared_object}.debug")


def _in_one(wrapper_code: str, kernel_code: str) -> str:
    """Return the source of a whole model: its translation units and the runtime."""
    texts = {path.name: path.read_text() for path in sorted(compiler.RUNTIME.iterdir())}
    headers = {name: text for name, text in texts.items() if name.endswith(".h")}
    runtime = [text for name, text in texts.items() if name.endswith(".cpp")]
    kernels = [kernel_code] if _has_code(kernel_code) else []
    return cmake_project.amalgamation([wrapper_code, *kernels, *runtime], headers)


def _project(
    tools: compiler.Compiler, graph: Any, stem: str, weights_path: str | None
) -> list[str]:
    """Write the build files for a model's source, for CMake and for torch's own loader.

    Args:
        tools: the compiler whose flags apply.
        graph: as in `compile_artifact`.
        stem: path of the source, without its suffix.
        weights_path: file that the library is to find beside itself, or None.

    Returns:
        The files that belong to the source.
    """
    from torch._inductor import config

    # Some file names are the same for all models.
    folder = f"{stem}.project"
    os.makedirs(folder, exist_ok=True)
    exports = compiler.RUNTIME / "exports.map"
    files = [_write_text(os.path.join(folder, exports.name), exports.read_text())]
    name = config.aot_inductor.model_name_for_generated_files or "aoti_model"
    project = tools.project(
        name,
        f"{os.path.basename(stem)}.cpp",
        None if weights_path is None else os.path.basename(weights_path),
    )
    if tools.device_type == "cuda" and _compiles_kernels_later():
        kernels = []
        for kernel, parameters in _gpu_kernels(graph):
            files.append(parameters["asm"])
            kernels.append(cmake_project.Kernel(kernel, os.path.basename(parameters["asm"])))
        assembly = os.path.join(folder, "kernels.S")
        files.append(_write_text(assembly, cmake_project.kernels_assembly(kernels)))
        project = dataclasses.replace(
            project,
            kernels=kernels,
            assembly=os.path.basename(assembly),
            gencode_options=_gencode_options(graph),
        )
    objects = _gpu_objects(graph, tools.device_type, folder)
    objects += _cutlass_objects(graph, tools.settings, folder)
    files += objects
    project = dataclasses.replace(project, objects=[os.path.basename(path) for path in objects])
    files.append(_write_text(os.path.join(folder, "CMakeLists.txt"), cmake_project.cmake(project)))
    for purpose, options in tools.loader_options().items():
        files.append(_write_text(f"{stem}_{purpose}_flags.json", json.dumps(options)))
    return files


def digests(constants: Mapping[str, torch.Tensor], plan: weights_layout.Plan) -> list[str]:
    """Return the digest of each stored constant's storage."""
    return [
        hash_buffer(weights_layout.storage_bytes(tensor, plan.sizes[name]).view)
        for name, tensor in constants.items()
        if plan.sizes[name]
    ]


def _split(program: split_units.Program, whole: compiler.Unit, size: int) -> list[compiler.Unit]:
    """Return a wrapper's translation units: `whole`, or its parts, placed beside its object."""
    texts = program.units(size, path=whole.source)
    if not texts:
        return [whole]
    folder = pathlib.Path(whole.object).parent
    units = []
    for number, text in enumerate(texts):
        source = folder / f"wrapper{number}.cpp"
        source.write_text(text)
        units.append(dataclasses.replace(whole, source=str(source), object=f"{source}.o"))
    return units


def _compile(
    tools: compiler.Compiler,
    fixed: compiler.Fixed,
    whole: compiler.Unit,
    parts: list[compiler.Unit],
    others: list[compiler.Unit],
) -> list[compiler.Unit]:
    """Compile and return a model's translation units, with the wrapper in parts if possible."""
    from torch._inductor.exc import CppCompileError

    try:
        tools.compile([*others, *parts], fixed)
    except CppCompileError as error:
        if parts == [whole]:
            raise
        # torch's codegen may change in a way that the splitter does not know. If the whole wrapper
        # does not compile either, its error message is about code that the user can see.
        events.warn_once(
            "aot-split",
            f"the C++ code split from {whole.source} does not compile; it is compiled unsplit "
            f"instead, which takes longer (aot_unit_size=0 disables splitting): {error}",
        )
        tools.compile([*others, whole], fixed)
        return [whole, *others]
    return [*parts, *others]


class _Writer:
    """Writer of source files to Inductor's cache directory, or to one that the user requested."""

    def __init__(self, folder: str, content: str) -> None:
        """`folder` is the user's, or empty; the written files depend on `content` only."""
        self.folder, self.content = folder, content

    def __call__(self, code: str, extension: str) -> str:
        from torch._inductor import codecache, config

        name = config.aot_inductor.model_name_for_generated_files
        if name is None:
            _, path = codecache.write(
                code, extension, extra=self.content, specified_dir=self.folder
            )
            return str(path)
        # For models with the same name, Inductor's own writer would keep the first one's files.
        key = codecache.code_hash(self.content)
        _, folder, _ = codecache.get_path(key, extension, self.folder)
        if not os.path.isabs(self.folder):
            folder = os.path.join(folder, key)
        os.makedirs(folder, exist_ok=True)
        return _write_text(os.path.join(folder, f"{name}.{extension}"), code)


@contextlib.contextmanager
def codecache_file(path: str) -> Iterator[Any]:
    """Open a file for writing; it appears at `path` only once it is complete."""
    with atomic_write(path) as temporary, open(temporary, "wb") as file:
        yield file


def _write_text(path: str, text: str) -> str:
    with codecache_file(path) as file:
        file.write(text.encode())
    return path


def _has_code(kernel_code: str) -> bool:
    lines = (line.strip() for line in kernel_code.splitlines())
    return any(line and not line.startswith(("//", "#include")) for line in lines)


def _show(written: Mapping[str, tuple[str, str]]) -> None:
    """Log the sources to Inductor's debugging tools, as Inductor does for its own AOT compiles.

    Args:
        written: path and text by kind: "wrapper", "kernel".
    """
    from torch._inductor import codecache
    from torch._inductor.virtualized import V
    from torch._logging import trace_structured

    V.debug.output_code(written["wrapper"][0], extension="cpp")
    for what, (path, code) in written.items():
        codecache.output_code_log.info("%s code written to: %s", what.capitalize(), path)
        description = {"name": f"inductor_aot_{what}_code", "type": "cpp", "filename": path}
        trace_structured("graph_dump", description.copy, payload_fn=functools.partial(str, code))


def _custom_objects(graph: Any, folder: str) -> list[str]:
    """Write the TorchBind objects that the graph uses, for the proxy executor."""
    import torch
    from torch._library.fake_class_registry import FakeScriptObject
    from torch.export.pt2_archive.constants import CUSTOM_OBJ_FILENAME_PREFIX

    paths: list[str] = []
    places: dict[str, str] = {}
    for index, (name, value) in enumerate(graph.torchbind_constants.items()):
        real = value.real_obj if isinstance(value, FakeScriptObject) else value
        places[name] = f"{CUSTOM_OBJ_FILENAME_PREFIX}{index}"
        paths.append(os.path.join(folder, places[name]))
        with codecache_file(paths[-1]) as file:
            file.write(torch._C._pickle_save(real))
    if places:
        path = os.path.join(folder, "custom_objs_config.json")
        paths.append(_write_text(path, json.dumps(places)))
    return paths


def _pickled_weights(graph: Any) -> Any:
    """Return the weights as tensors, which torch's packaging pickles once for several models."""
    from torch.export.pt2_archive._package_weights import TensorProperties, Weights

    return Weights(
        {
            graph.allocated_constant_name[name]: (value, TensorProperties(graph.constants[name]))
            for name, value in cpp_wrapper.constants_with_values(graph).items()
        }
    )


def _provenance(folder: str) -> list[str]:
    import torch._inductor.debug
    from torch._inductor import config

    if config.trace.provenance_tracking_level == 0:
        return []
    path = os.path.join(folder, "kernel_information.json")
    information = torch._inductor.debug.create_kernel_information_json()
    return [_write_text(path, json.dumps(information, indent=4))]


def _compiles_kernels_later() -> bool:
    """Whether CMake compiles the GPU kernels from PTX."""
    from torch._inductor import config

    aot = config.aot_inductor
    return bool(aot.package_cpp_only and aot.emit_multi_arch_kernel and aot.embed_kernel_binary)


def _gencode_options(graph: Any) -> list[str]:
    """Return nvcc's -gencode options for the fat binaries of a graph's Triton kernels."""
    noted = {parameters.get("cuda_arch") for _, parameters in _gpu_kernels(graph)}
    (architecture,) = noted if len(noted) == 1 else {None}
    return fatbin.gencode_options(architecture)


def _cuda_architectures(
    graph: Any, device_type: str, metadata: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the architectures that all GPU kernels of a graph were compiled for."""
    from torch._inductor import config

    if device_type != "cuda":
        return ()
    # CUTLASS kernels are compiled only for the GPU of this machine.
    if config.aot_inductor.emit_multi_arch_kernel and not _cutlass_kernels(graph):
        return fatbin.architectures(_gencode_options(graph))
    digits = re.sub(r"\D", "", metadata.get("AOTI_COMPUTE_CAPABILITY", ""))
    return (f"sm_{digits}",) if digits else ()


def _gpu_kernels(graph: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the graph's Triton kernels with the parameters that Inductor has recorded."""
    from torch._inductor import codecache

    # The cache is per process: it also contains kernels of other graphs.
    names = getattr(graph.wrapper_code, "_kernel_name_to_body", {})
    cache_ = codecache.CudaKernelParamCache.cache
    return [(name, cache_[name]) for name in cache_ if name in names]


def _cutlass_kernels(graph: Any) -> list[Source]:
    """Return the CUTLASS kernels that the graph or its constant-folding graph calls."""
    found = dict(cutlass_objects.kernels_of(graph.wrapper_code))
    if graph.const_module is not None:
        found |= cutlass_objects.kernels_of(graph.const_module.wrapper_code)
    return list(found)


def _cutlass_objects(graph: Any, values: settings.Settings, folder: str) -> list[str]:
    """Create one object file per CUTLASS kernel that a graph calls, and return their paths."""
    made = []
    for source in _cutlass_kernels(graph):
        made.append(os.path.join(folder, f"{cutlass_objects.symbol(source)}.o"))
        cutlass_objects.link(source, cutlass_runtime.store(values), made[-1])
    return made


def _kernels(graph: Any) -> set[str]:
    """Return the names of the kernels generated for a graph."""
    generated = {str(name) for name in graph.wrapper_code.src_to_kernel.values()}
    return generated | {kernel.name for kernel in _cutlass_kernels(graph)}


def _gpu_objects(graph: Any, device_type: str, folder: str) -> list[str]:
    """Return objects with GPU code: Inductor's CUTLASS kernels, and cubins if to be embedded."""
    from torch._inductor import codecache, config
    from torch._inductor.cpp_builder import convert_cubin_to_obj, get_ld_and_objcopy

    if device_type != "cuda":
        return []
    kernels = codecache.CUDACodeCache()
    objects = [str(path) for path in kernels.aot_kernels_o]
    kernels.aot_kernels_o.clear()
    if _compiles_kernels_later():
        return objects
    for name, parameters in _gpu_kernels(graph):
        cubin = parameters[codecache.get_cpp_wrapper_cubin_path_name()]
        if config.aot_inductor.emit_multi_arch_kernel:
            fatbin.build(parameters, cubin)
        if config.aot_inductor.embed_kernel_binary:
            own = shutil.copy(cubin, folder)
            objects.append(str(convert_cubin_to_obj(own, name, *get_ld_and_objcopy(False))))
    return objects
