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
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from inductor_ext import events, settings
from inductor_ext.cpp_wrapper.build import cmake_project, compiler, gpu_code, torch_functions
from inductor_ext.cpp_wrapper.codegen import (
    extern_nodes,
    index_inputs,
    input_names,
    model_info,
    split_units,
    weights_layout,
)
from inductor_ext.cpp_wrapper.signature.signature import Signature
from inductor_ext.hooks import context
from inductor_ext.storage.atomic import atomic_write, name_in_errors
from inductor_ext.storage.digest import hash_buffer

if TYPE_CHECKING:
    import torch


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
    index_inputs: Mapping[str, Mapping[str, str]]
    """The results of `index_inputs`."""
    constants: dict[str, torch.Tensor]
    """Constants with a value, by their name in the generated code."""
    fqns: dict[str, str]
    """Fully qualified names (FQNs) in the exported model, by name in the generated code."""
    frozen: tuple[str, ...]
    """FQNs of constants that others, or the code, were computed from (`freezing`)."""
    mutated_buffers: tuple[str, ...]
    """FQNs of constants that a call changes."""
    mutates_inputs: bool
    device_type: str
    features: tuple[str, ...]
    """CPU features that the code needs."""
    machine: str
    """Processor architecture that the code is for, such as "x86_64"."""
    torch_functions: Mapping[str, str] | None = None
    """The result of `torch_functions.find`; None without a shared object."""
    cuda_architectures: tuple[str, ...] = ()
    """Architectures that its GPU kernels were compiled for: "sm_90a", "compute_90a"."""
    constant_devices: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Device types of the constants that are not on the device of their value in `constants`."""


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
    builder = ArtifactBuilder(graph, device_type, values)
    builder.files += additional_files
    builder.write_sources(wrapper_code, kernel_code)
    if serialized_extern_kernel_nodes:
        builder.write_extern_nodes(serialized_extern_kernel_nodes)
    builder.write_metadata()
    builder.write_custom_objects()
    if builder.only_sources:
        builder.write_project()
    else:
        builder.write_library()
    builder.write_weights()
    builder.write_provenance()
    return builder.result()


class ArtifactBuilder:
    """Builder of one graph's files, with a method for each kind; their order is that of `files`."""

    def __init__(self, graph: Any, device_type: str, values: settings.Settings) -> None:
        """Prepare to build; the arguments are those of `compile_artifact`."""
        from torch._inductor import codecache, config

        self.graph, self.device_type, self.settings = graph, device_type, values
        self.tools = compiler.Compiler(device_type, values)
        self.folder, self.name = codecache.split_aot_inductor_output_path(
            config.aot_inductor.output_path
        )
        self.collected: list[Artifact] | None = context.current().artifacts
        self.constants = model_info.constants_with_values(graph)
        self.plan: weights_layout.Plan = graph.wrapper_code.weights_plan
        self.has_weights = model_info.weights_included() and self.plan.bytes > 0
        self.only_sources = bool(config.aot_inductor.package_cpp_only)
        self.files: list[Any] = []
        self.sources: dict[str, tuple[str, str]] = {}
        """Path and text by kind: "wrapper", "kernel"."""
        self.stem = ""
        """The path of the wrapper's source without ".cpp", from which other names are derived."""
        self.metadata: dict[str, str] = {}
        self.shared_object: str | None = None
        self.torch_functions: dict[str, str] | None = None

    def write_sources(self, wrapper_code: str, kernel_code: str) -> None:
        """Write the C++ sources; one that contains the runtime too if there is no library."""
        if self.only_sources:
            wrapper_code, kernel_code = _in_one(wrapper_code, kernel_code), ""
            # The library looks for them in its own directory.
            for path in self.files:
                wrapper_code = wrapper_code.replace(f'"{path}"', f'"{os.path.basename(path)}"')
        # File names include a hash of the content: another model may be compiled, in this process
        # or another, before these files are packaged. Small constants are in the kernel code only.
        content = [wrapper_code, self.tools.library_identity(), kernel_code]
        if self.collected is None:
            content += digests(self.constants, self.plan)
        write = functools.partial(_write_source, self.folder, "\0".join(content))
        wrapper_path = write("wrapper.cpp", wrapper_code)
        self.sources["wrapper"] = (wrapper_path, wrapper_code)
        if not self.only_sources:
            self.sources["kernel"] = (write("kernel.cpp", kernel_code), kernel_code)
        self.stem = wrapper_path.removesuffix(".cpp")
        _log_sources(self.sources)
        self.files += [path for path, _ in self.sources.values()]

    def write_extern_nodes(self, serialized: str) -> None:
        """Write the operators that the proxy executor calls; `serialized` is Inductor's JSON."""
        self.files.append(_write_text(f"{self.stem}.json", extern_nodes.for_executor(serialized)))

    def write_metadata(self) -> None:
        """Write Inductor's metadata, one file per source."""
        from torch._inductor import codecache, config

        # Inductor's own metadata is one dictionary shared by all compiles of the process.
        self.metadata = {
            **config.aot_inductor.metadata,
            "AOTI_DEVICE_KEY": self.device_type,
            **codecache.get_device_information(self.device_type),
            "AOTI_MACHINE": self.tools.machine,
        }
        for source, _ in self.sources.values():
            path = f"{source.removesuffix('.cpp')}_metadata.json"
            self.files.append(_write_text(path, json.dumps(self.metadata)))

    def write_custom_objects(self) -> None:
        """Write the TorchBind objects that the graph uses, for the proxy executor."""
        import torch
        from torch._library.fake_class_registry import FakeScriptObject
        from torch.export.pt2_archive.constants import CUSTOM_OBJ_FILENAME_PREFIX

        folder = os.path.dirname(self.stem)
        file_names: dict[str, str] = {}
        for index, (name, value) in enumerate(self.graph.torchbind_constants.items()):
            real = value.real_obj if isinstance(value, FakeScriptObject) else value
            file_names[name] = f"{CUSTOM_OBJ_FILENAME_PREFIX}{index}"
            path = os.path.join(folder, file_names[name])
            with _open_atomically(path) as file:
                file.write(torch._C._pickle_save(real))
            self.files.append(path)
        if file_names:
            path = os.path.join(folder, "custom_objs_config.json")
            self.files.append(_write_text(path, json.dumps(file_names)))

    def write_project(self) -> None:
        """Write the build files for the source, for CMake and for torch's own loader."""
        from torch._inductor import config

        # Some file names are the same for all models.
        folder = f"{self.stem}.project"
        os.makedirs(folder, exist_ok=True)
        exports = compiler.RUNTIME / "exports.map"
        self.files.append(_write_text(os.path.join(folder, exports.name), exports.read_text()))
        # The file that the library is to find beside itself.
        separate = self.collected is not None and self.settings.aot_weights_file is not None
        weights_path = None if separate else self._weights_path()
        project = self.tools.project(
            config.aot_inductor.model_name_for_generated_files or "aoti_model",
            f"{os.path.basename(self.stem)}.cpp",
            None if weights_path is None else os.path.basename(weights_path),
        )
        if self.device_type == "cuda" and gpu_code.are_compiled_later():
            project = self._add_kernels(project, folder)
        objects = gpu_code.write_objects(self.graph, self.device_type, self.settings, folder)
        self.files += objects
        project = dataclasses.replace(project, objects=[os.path.basename(path) for path in objects])
        path = os.path.join(folder, "CMakeLists.txt")
        self.files.append(_write_text(path, cmake_project.cmake(project)))
        for purpose, options in self.tools.loader_options().items():
            path = f"{self.stem}_{purpose}_flags.json"
            self.files.append(_write_text(path, json.dumps(options)))

    def _add_kernels(self, project: cmake_project.Project, folder: str) -> cmake_project.Project:
        """Add the PTX of the Triton kernels, which CMake compiles, to a project."""
        kernels = []
        for name, parameters in gpu_code.triton_kernels(self.graph):
            self.files.append(parameters["asm"])
            kernels.append(cmake_project.Kernel(name, os.path.basename(parameters["asm"])))
        assembly = os.path.join(folder, "kernels.S")
        self.files.append(_write_text(assembly, cmake_project.kernels_assembly(kernels)))
        return dataclasses.replace(
            project,
            kernels=kernels,
            assembly=os.path.basename(assembly),
            gencode_options=gpu_code.gencode_options(self.graph),
        )

    def write_library(self) -> None:
        """Compile and link the translation units, with the weights if there is no package."""
        from torch._inductor import config

        output_path = config.aot_inductor.output_path
        self.shared_object = shared_object = output_path if self.name else f"{self.stem}.so"
        wrapper_path, _ = self.sources["wrapper"]
        kernel_path, kernel_code = self.sources["kernel"]
        tools, folder = self.tools, os.path.dirname(wrapper_path)
        with (
            tempfile.TemporaryDirectory(prefix="inductor_ext-", dir=folder) as temporary,
            tools.prebuilt_runtime() as runtime,
        ):
            library = os.path.join(temporary, os.path.basename(shared_object))
            whole = compiler.Unit(wrapper_path, os.path.join(temporary, "wrapper.o"), "wrapper")
            kernel = compiler.Unit(kernel_path, os.path.join(temporary, "kernel.o"), "kernel")
            others = [kernel] if _has_code(kernel_code) else []
            objects = gpu_code.write_objects(self.graph, self.device_type, self.settings, temporary)

            def build(units: list[compiler.Unit]) -> None:
                tools.compile([*others, *units], runtime)
                compiled = [unit.object for unit in (*units, *others)]
                tools.link([*compiled, *objects, *runtime.objects], library)

            program = self.graph.wrapper_code.program
            build_split(build, whole, _split(program, whole, self.settings.aot_unit_size))
            if self.has_weights and not config.aot_inductor.package:
                weights_layout.append(library, self.constants, self.plan)
            if self.collected is not None:
                self.torch_functions = torch_functions.find(library, tools.program, tools.headers)
            os.replace(library, shared_object)
            if os.path.exists(f"{library}.debug"):
                os.replace(f"{library}.debug", f"{shared_object}.debug")
        self.files.append(shared_object)

    def _weights_path(self) -> str | None:
        """The path of the weights file; None if the package has none."""
        from torch._inductor import config

        if not self.has_weights or not config.aot_inductor.package:
            return None
        suffix = "_serialized_weights.bin" if self.only_sources else ".weights"
        return f"{self.stem}{suffix}"

    def write_weights(self) -> None:
        """Write the weights file unless the caller of `collecting` does, and list it."""
        from torch._inductor import config

        path = self._weights_path()
        if path is not None:
            self.files.append(path)
            if self.collected is None:
                with _open_atomically(path) as file:
                    weights_layout.write(file, self.constants, self.plan)
                    if self.only_sources:
                        file.write(weights_layout.footer(self.plan))
        if config.aot_inductor.package_constants_on_disk_format == "pickle_weights":
            self.files.append(_pickled_weights(self.graph))

    def write_provenance(self) -> None:
        """Write Inductor's map from kernels to operators, if its tracing is on."""
        import torch._inductor.debug
        from torch._inductor import config

        if config.trace.provenance_tracking_level == 0:
            return
        path = os.path.join(os.path.dirname(self.stem), "kernel_information.json")
        information = torch._inductor.debug.create_kernel_information_json()
        self.files.append(_write_text(path, json.dumps(information, indent=4)))

    def _find_index_inputs(self) -> Mapping[str, Mapping[str, str]]:
        if "kernel" not in self.sources:
            return {}
        names = input_names.find_names(self.graph, self.graph.wrapper_code.model_signature)
        kernel_code, wrapper_code = (self.sources[kind][1] for kind in ("kernel", "wrapper"))
        triton = gpu_code.kernel_sources(self.graph)
        return {
            **index_inputs.find_index_inputs(kernel_code, wrapper_code, names),
            **index_inputs.find_index_inputs_of_triton(triton, wrapper_code, names),
        }

    def result(self) -> list[Any] | str:
        """Report the artifact to `collecting`, and return what `compile_artifact` returns."""
        from torch._inductor import config

        graph = self.graph
        if self.collected is not None:
            names = {name: model_info.original_name(graph, name) for name in self.constants}
            self.collected.append(
                Artifact(
                    shared_object=self.shared_object,
                    files=tuple(self.files),
                    weights_path=self._weights_path(),
                    plan=self.plan,
                    signature=graph.wrapper_code.model_signature,
                    kernels=tuple(sorted(gpu_code.kernel_names(graph))),
                    index_inputs=self._find_index_inputs(),
                    constants=self.constants,
                    fqns=names,
                    frozen=tuple(dict(model_info.frozen_uses(graph))),
                    mutated_buffers=tuple(
                        fqn for name, fqn in names.items() if name in graph.mutated_buffers
                    ),
                    mutates_inputs=bool(graph.mutated_inputs),
                    device_type=self.device_type,
                    features=self.tools.target.features,
                    machine=self.tools.machine,
                    torch_functions=self.torch_functions,
                    cuda_architectures=gpu_code.cuda_architectures(
                        graph, self.device_type, self.metadata
                    ),
                    constant_devices=model_info.moved_constants(graph, self.constants),
                )
            )
        if self.shared_object is None or config.aot_inductor.package:
            return self.files
        return self.shared_object


def _in_one(wrapper_code: str, kernel_code: str) -> str:
    """Return the source of a whole model: its translation units and the runtime."""
    texts = {path.name: path.read_text() for path in sorted(compiler.RUNTIME.iterdir())}
    headers = {name: text for name, text in texts.items() if name.endswith(".h")}
    runtime = [text for name, text in texts.items() if name.endswith(".cpp")]
    kernels = [kernel_code] if _has_code(kernel_code) else []
    return cmake_project.amalgamation([wrapper_code, *kernels, *runtime], headers)


def digests(constants: Mapping[str, torch.Tensor], plan: weights_layout.Plan) -> list[str]:
    """Return the digest of each stored constant's storage."""
    return [
        hash_buffer(weights_layout.storage_bytes(tensor, plan.sizes[name]))
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
        unit = compiler.Unit(str(source), f"{source}.o", whole.purpose, whole=whole.source)
        units.append(unit)
    return units


def build_split(
    build: Callable[[list[compiler.Unit]], None],
    whole: compiler.Unit,
    parts: list[compiler.Unit],
) -> None:
    """Call `build` with the parts of a wrapper; if they do not compile, with the whole wrapper."""
    from torch._inductor.exc import CppCompileError

    try:
        build(parts)
    except CppCompileError as error:
        if parts == [whole]:
            raise
        # torch's codegen may change in a way that the splitter does not know. If the whole wrapper
        # does not compile either, its error message is about code that the user can see.
        events.warn_once(
            "aot-split",
            f"the C++ of {whole.source} was split in a way that does not compile; it is compiled "
            f"whole, which takes longer (aot_unit_size=0 never splits): {error}",
        )
        build([whole])


def _write_source(folder: str, content: str, extension: str, code: str) -> str:
    """Write a source file, whose path depends on `content`, and return the path.

    `folder` is the one that the user requested, or empty for Inductor's cache folder.
    """
    from torch._inductor import codecache, config

    name = config.aot_inductor.model_name_for_generated_files
    if name is None:
        with name_in_errors(folder or codecache.cache_dir()):
            _, path = codecache.write(code, extension, extra=content, specified_dir=folder)
        return str(path)
    # For models with the same name, Inductor's own writer would keep the first one's files.
    key = codecache.code_hash(content)
    _, parent, _ = codecache.get_path(key, extension, folder)
    if not os.path.isabs(folder):
        parent = os.path.join(parent, key)
    os.makedirs(parent, exist_ok=True)
    return _write_text(os.path.join(parent, f"{name}.{extension}"), code)


@contextlib.contextmanager
def _open_atomically(path: str) -> Iterator[Any]:
    """Open a file for writing; it appears at `path` only once it is complete."""
    with atomic_write(path) as temporary, open(temporary, "wb") as file:
        yield file


def _write_text(path: str, text: str) -> str:
    with _open_atomically(path) as file:
        file.write(text.encode())
    return path


def _has_code(kernel_code: str) -> bool:
    lines = (line.strip() for line in kernel_code.splitlines())
    return any(line and not line.startswith(("//", "#include")) for line in lines)


def _log_sources(sources: Mapping[str, tuple[str, str]]) -> None:
    """Log the sources to Inductor's debugging tools, as Inductor does for its own AOT compiles."""
    from torch._inductor import codecache
    from torch._inductor.virtualized import V
    from torch._logging import trace_structured

    V.debug.output_code(sources["wrapper"][0], extension="cpp")
    for name, (path, code) in sources.items():
        codecache.output_code_log.info("%s code written to: %s", name.capitalize(), path)
        description = {"name": f"inductor_aot_{name}_code", "type": "cpp", "filename": path}
        trace_structured("graph_dump", description.copy, payload_fn=functools.partial(str, code))


def _pickled_weights(graph: Any) -> Any:
    """Return the weights as tensors, which torch's packaging pickles once for several models."""
    from torch.export.pt2_archive._package_weights import TensorProperties, Weights

    return Weights(
        {
            graph.allocated_constant_name[name]: (value, TensorProperties(graph.constants[name]))
            for name, value in model_info.constants_with_values(graph).items()
        }
    )
