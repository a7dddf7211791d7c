"""The C++ of an artifact's host program: torch's generator, with a model that checks its inputs.

`generator` gives a subclass of torch's C++ wrapper generators for ahead-of-time compiles. Calls
of kernels, fallbacks, control flow and memory come from upstream. What differs is the frame around
them: instead of torch's interface and model classes, which it pastes into every model, a model's
unit includes `runtime/model.h` and describes itself by constant data (`ModelInfo`); and before
anything else a call checks its inputs against the signature.

`supported` says which compiles it takes; the others are stock's, unchanged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from inductor_ext import _compat, events, exc
from inductor_ext.cpp_wrapper.build import cpu_target
from inductor_ext.cpp_wrapper.codegen import extern_nodes, input_checks, weights_layout
from inductor_ext.cpp_wrapper.signature import from_export, from_graph
from inductor_ext.cpp_wrapper.signature.signature import Signature
from inductor_ext.hooks import context
from inductor_ext.settings import Settings

if TYPE_CHECKING:
    import torch

__all__ = [
    "AotWrapper",
    "GridScratch",
    "LoopOutputs",
    "constants_with_values",
    "generator",
    "original_name",
    "signature_given",
    "supported",
    "weights_included",
]


@contextlib.contextmanager
def signature_given(signature: Signature | None) -> Iterator[None]:
    """Inside, artifacts check their inputs against `signature`; None: against the graph alone."""
    with context.enter(signature=signature):
        yield


def supported() -> bool:
    """Whether the compile at hand gets our frame; asked while Inductor's graph is current."""
    import torch
    from torch._inductor import config
    from torch._inductor.virtualized import V

    aot = config.aot_inductor
    return bool(
        V.graph.aot_mode
        and V.graph.cpp_wrapper
        and sys.platform == "linux"
        and V.graph.device_type in ("cpu", "cuda")
        and torch.version.hip is None
        # Each of these asks for another shape of the generated code or of what is made from it.
        and aot.dynamic_linkage
        and (aot.package or not aot.package_cpp_only)
        and not aot.allow_stack_allocation
        and not aot.use_minimal_arrayref_interface
        and aot.cross_target_platform is None
        and not getattr(aot, "enable_lto", False)
        and not _is_dual()
    )


def _is_dual() -> bool:
    """Whether Inductor writes the host program twice, and runs one of them to tune kernels.

    From torch 2.14 on, with `triton.autotune_at_compile_time` off and a device of Triton's. The
    graph says so already in torch 2.13, where the buffers are single and what runs is Python.
    """
    from torch._inductor import utils
    from torch._inductor.virtualized import V

    if not getattr(V.graph, "is_dual_wrapper_mode", False):
        return False
    make_buffer = getattr(utils, "make_codegen_buffer", None)
    return make_buffer is not None and hasattr(make_buffer(), "aot")


def generator(stock: Any, settings: Settings) -> Any:
    """A class that generates C++ for the graph at hand.

    Torch's own generators are returned with fixes, and with the frame of this module where
    `supported`; any other generator is returned unchanged.
    """
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
    from torch._inductor.codegen.cpp_wrapper_gpu import CppWrapperGpu

    # A subclass of somebody else's may generate another frame.
    if stock not in (CppWrapperCpu, CppWrapperGpu):
        return stock
    if _is_dual():
        events.warn_once(
            "aot-dual-wrapper",
            "triton.autotune_at_compile_time=False: Inductor (default) compiles the package, which "
            "has no input checks, no manifest and no mapped weights then. Leave the option out to "
            "get them",
        )
    mixed: tuple[type[Any], ...] = (AotWrapper,) if supported() else ()
    if stock is CppWrapperGpu and not _compat.scratch_covers_grid():
        mixed = (*mixed, GridScratch)
    return _Constructor(_wrapper_class(stock, (*mixed, LoopOutputs)), settings)


@functools.cache
def _wrapper_class(stock: type[Any], mixed: tuple[type[Any], ...]) -> type[Any]:
    return type(f"{mixed[0].__name__}{stock.__name__}", (*mixed, stock), {})


@dataclasses.dataclass(frozen=True)
class _Constructor:
    """In the place of the class whose `create` Inductor calls."""

    cls: type[Any]
    settings: Settings

    @property
    def supports_caching(self) -> bool:
        """Whether its code may be cached."""
        return bool(self.cls.supports_caching)

    def create(self, *_: object) -> Any:
        """A generator; subgraphs are written into their graph's code, by the same class."""
        from torch._inductor.virtualized import V

        wrapper = self.cls()
        wrapper.settings = self.settings
        if V.graph.const_module is not None:
            # Both graphs' code calls operators by their numbers in one file. From torch 2.15 on
            # both graphs share the list.
            nodes = V.extern_kernel_nodes
            listed = {id(node) for node in nodes}
            nodes.extend(node for node in _operators_of_folding(V.graph) if id(node) not in listed)
        return wrapper


def constants_with_values(graph: Any) -> dict[str, torch.Tensor]:
    """The constants whose values go into the artifact: all that are not folded at run time."""
    return {
        name: graph.get_original_value_of_constant(name)
        for name in graph.constants
        if name not in graph.folded_constants
    }


def c_string(text: str) -> str:
    """A C++ string literal."""
    return '"' + "".join(map(_octal, text.encode())) + '"'


def _octal(byte: int) -> str:
    # Octal escapes end after three digits; hexadecimal ones go on as long as digits follow.
    plain = 32 <= byte < 127 and chr(byte) not in '"\\?'
    return chr(byte) if plain else f"\\{byte:03o}"


class AotWrapper:
    """Mixed in before one of torch's C++ wrapper generators."""

    settings: Settings
    weights_plan: weights_layout.Plan
    """Where the constants lie in the file of weights."""
    written_back: list[str]
    """Inputs whose changes have to reach the caller also where they were copied."""
    model_signature: Signature
    """What the artifact checks its inputs against, unless the settings say not to."""
    links_kernels = True
    """Whether `build` links the CUTLASS kernels that the code calls."""
    operators: tuple[Any, ...] = ()
    """Of a folding graph's code, the operators that it calls through torch's executor."""

    # --- the top of the file ----------------------------------------------------------------------

    @staticmethod
    def get_device_include_path_aot(device: str) -> str:
        """The includes for a device: our model's, and the C shims of its operators."""
        internal = "torch/csrc/inductor/cpp_wrapper/device_internal"
        return f"#include <{internal}/{device}.h>"

    @staticmethod
    def get_device_include_path(device: str) -> str:
        """torch 2.11's name of the same."""
        return AotWrapper.get_device_include_path_aot(device)

    def write_header(self: Any) -> None:
        """Begin the file with our includes instead of torch's interface."""
        from torch._inductor import config
        from torch._inductor.virtualized import V

        if V.graph.is_const_graph:
            super().write_header()  # type: ignore[misc]
            return
        self.header.writeline('#include "model.h"')
        if config.cpp.enable_kernel_profile:
            # Profiled kernels tell their arguments in one.
            self.header.writeline("#include <unordered_map>")
        super().write_header()  # type: ignore[misc]
        _remove_interface(self.header)

    def _write_aoti_interface_header(self) -> None:
        """torch 2.13's place for its interface; that of torch 2.11 is taken out afterwards."""

    def generate(self: Any, is_inference: bool) -> Any:
        """Generate the code; of a folding graph, keep the operators that stock forgets."""
        from torch._inductor.virtualized import V

        code = super().generate(is_inference)  # type: ignore[misc]
        if V.graph.is_const_graph:
            self.operators = tuple(V.extern_kernel_nodes)
        return code

    # --- checks -----------------------------------------------------------------------------------

    def generate_input_output_runtime_checks(self: Any) -> None:
        """Leave out torch's checks, which an environment variable would turn on: ours are more.

        The runtime makes them, by ModelInfo::check.
        """
        self.prefix.splice(
            """
            static inline void __check_inputs_outputs(AtenTensorHandle*, AtenTensorHandle*) {}
            [[maybe_unused]] static constexpr bool _check_aoti_runtime_check_inputs_env() {
                return false;
            }
            """
        )

    # --- inputs that are changed ------------------------------------------------------------------

    def codegen_inputs(self: Any) -> None:
        """Keep hold of inputs that are changed and may be copied because they are misaligned.

        On a GPU torch's generator goes on with an aligned copy, and the caller would not see the
        changes; `generate_return` writes them back.
        """
        from torch._inductor.virtualized import V

        graph = V.graph
        names = [graph.graph_input_names[index] for index in graph.inputs_to_check or ()]
        self.written_back = [name for name in names if name in graph.mutated_inputs]
        if graph.is_const_graph or self.device != "cuda":
            self.written_back = []
        for name in self.written_back:
            self._keep(f"{name}_caller", name)
        super().codegen_inputs()  # type: ignore[misc]
        for name in self.written_back:
            self._keep(f"{name}_aligned_kept", name)

    def _keep(self: Any, holder: str, name: str) -> None:
        self.prefix.splice(
            f"""
            AtenTensorHandle {holder}_handle;
            AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle({name}, &{holder}_handle));
            RAIIAtenTensorHandle {holder}({holder}_handle);
            """
        )

    def generate_return(self: Any, output_refs: list[str]) -> None:
        """Write back what was changed in copies, and return."""
        for name in self.written_back:
            self.wrapper_call.splice(
                f"""
                if ({name}_caller.data_ptr() != {name}_aligned_kept.data_ptr()) {{
                    AOTI_TORCH_ERROR_CODE_CHECK(
                        aoti_torch_copy_({name}_caller, {name}_aligned_kept, 0));
                }}
                """
            )
        super().generate_return(output_refs)  # type: ignore[misc]

    # --- launches of Triton kernels ---------------------------------------------------------------

    def finalize_prefix(self: Any) -> None:
        """Put the launchers before the code that calls them, with parameters that hold floats."""
        # Generators for the CPU have none.
        launchers = getattr(self, "_triton_call_wrappers", {})
        launchers.update({name: _Launcher(stock) for name, stock in launchers.items()})
        super().finalize_prefix()  # type: ignore[misc]

    # --- the model's description ------------------------------------------------------------------

    def codegen_model_constructor(self: Any) -> None:
        """Describe the model by data, where torch's generator has it describe itself by code."""
        import torch
        from torch._inductor import config
        from torch._inductor.virtualized import V

        graph = V.graph
        aot = config.aot_inductor
        values = constants_with_values(graph)
        self.weights_plan = weights_layout.plan(values)
        numbers = _Array("int64_t", "kNumbers")
        opaque = _Array("uint8_t", "kOpaque")
        rows = [self._constant_row(name, numbers, opaque) for name in graph.constants]
        folded = _folded_constants(graph)
        inputs, outputs = list(graph.graph_inputs), len(graph.graph_outputs)
        self.prefix.writeline("namespace {")
        for array in (numbers, opaque):
            self.prefix.writeline(array.declaration())
        _write_table(self.prefix, "const char* const", "kInputNames", map(c_string, inputs))
        names = (c_string(f"output{index}") for index in range(outputs))
        _write_table(self.prefix, "const char* const", "kOutputNames", names)
        _write_table(self.prefix, "const size_t", "kFolded", map(str, folded))
        _write_table(self.prefix, "const inductor_ext::Constant", "kConstants", rows)
        self.prefix.splice(
            """
            std::unique_ptr<AOTInductorModelKernelsBase> make_kernels() {
                return std::make_unique<AOTInductorModelKernels>();
            }
            }  // namespace
            }  // namespace torch::aot_inductor
            """
        )
        self.model_signature = _signature_at_hand()
        if self.settings.aot_check_inputs:
            self.prefix.writeline('#include "checks.h"')
            self.prefix.splice(input_checks.render(self.model_signature))
        self.prefix.splice(
            """
            namespace inductor_ext {
            using namespace torch::aot_inductor;
            """
        )
        fields = (
            "kInputNames",
            len(inputs),
            "kOutputNames",
            outputs,
            "kConstants",
            len(rows),
            "kFolded",
            len(folded),
            self.weights_plan.bytes,
            "true" if weights_included() else "false",
            "true" if aot.use_runtime_constant_folding else "false",
            "true" if _operators_of_folding(graph) else "false",
            "true" if _has_enumerations(graph) else "false",
            "true" if extern_nodes.takes_export_numbers() else "false",
            c_string(torch.__version__),
            c_string(aot.serialized_in_spec),
            c_string(aot.serialized_out_spec),
            c_string(",".join(cpu_target.current().features)),
            "make_kernels",
            "check_inputs" if self.settings.aot_check_inputs else "nullptr",
        )
        self.prefix.writeline("extern const ModelInfo model_info = {")
        for field in fields:
            self.prefix.writeline(f"    {field},")
        self.prefix.splice(
            """
            };
            }  // namespace inductor_ext
            namespace torch::aot_inductor {
            """
        )

    def _constant_row(self: Any, name: str, numbers: _Array, opaque: _Array) -> str:
        import torch
        from torch._inductor.virtualized import V

        graph = V.graph
        tensor = graph.get_original_value_of_constant(name)
        if tensor.device.type not in (self.device, "cpu"):
            raise exc.ForeignConstantError(
                name=original_name(graph, name), found=tensor.device, device=self.device
            )
        folded = name in graph.folded_constants
        metadata: list[int] = []
        if tensor.is_mkldnn:
            metadata = torch.ops.mkldnn._get_mkldnn_serialized_md(tensor).tolist()
        layout = str(tensor.layout).removeprefix("torch.")
        fields = (
            c_string(name),
            c_string(original_name(graph, name)),
            f"aoti_torch_dtype_{str(tensor.dtype).removeprefix('torch.')}",
            f"aoti_torch_device_type_{tensor.device.type}",
            f"aoti_torch_layout_{layout}",
            numbers.add(tensor.size()),
            # A tensor of an opaque layout has no strides.
            numbers.add(() if tensor.is_mkldnn else tensor.stride()),
            tensor.dim(),
            0 if tensor.is_mkldnn else tensor.storage_offset(),
            0 if folded else self.weights_plan.sizes[name],
            0 if folded else self.weights_plan.offsets[name],
            opaque.add(metadata) if metadata else "nullptr",
            len(metadata),
            f"torch::aot_inductor::ConstantType::{_kind(graph, name)}",
            "true" if folded else "false",
        )
        return f"{{{', '.join(map(str, fields))}}}"

    def codegen_const_run_driver(self: Any) -> None:
        """The runtime drives the folding graph, by ModelInfo::folded."""


class GridScratch:
    """Mixed in before torch's generator for GPUs: scratch memory for every CTA of a launch.

    A kernel that makes TMA descriptors writes them to memory that its launcher allocates, each CTA
    to a place of its own. torch 2.11 allocates what one CTA needs, and the others write beyond.
    """

    def generate_args_decl(
        self,
        code: Any,
        call_args: Any,
        arg_types: Any,
        arg_signatures: Any,
        is_triton_kernel: bool = True,
        scratch_spaces: Mapping[str, int] | None = None,
    ) -> str:
        """Declare a launch's arguments, scratch among them, which the launcher's grid multiplies.

        It comes from torch's allocator for the stream at hand, as other buffers do, aligned to more
        than Triton asks for, and goes back when the kernel is in the stream.
        """
        spaces = {name: _OfGrid(size) for name, size in (scratch_spaces or {}).items()}
        arguments: str = super().generate_args_decl(  # type: ignore[misc]
            code, call_args, arg_types, arg_signatures, is_triton_kernel, spaces
        )
        return arguments


class LoopOutputs:
    """Mixed in before torch's generators: the outputs of a while_loop are tensors of their own.

    Torch's C++ starts the outputs as aliases of the carried inputs. Where no iteration runs they
    stay so, and a later change of the input, or memory of it that is reused, changes the output.
    Torch's Python clones them then (torch 2.11 to 2.14).
    """

    def codegen_while_loop(self: Any, while_loop: Any, stack_output: bool = False) -> None:
        """Write the loop, and clone what it has left as it was."""
        super().codegen_while_loop(while_loop, stack_output)  # type: ignore[misc]
        for carried, name in _carried_outputs(self, while_loop):
            # Zero bytes have no address, and need no clone.
            before = f"get_data_ptr_wrapper({carried.codegen_reference()})"
            self.writeline(f"if ({name}.data_ptr() == {before}) {{")
            self.writeline(f"    AtenTensorHandle {name}_own_handle;")
            self.writeline(
                "    AOTI_TORCH_ERROR_CODE_CHECK("
                f"aoti_torch_clone_preserve_strides({name}, &{name}_own_handle));"
            )
            self.writeline(f"    {name} = RAIIAtenTensorHandle({name}_own_handle);")
            self.writeline("}")


def _carried_outputs(wrapper: Any, while_loop: Any) -> list[tuple[Any, str]]:
    """A loop's carried inputs with the variables of their outputs, but those changed in place."""
    find = getattr(wrapper, "_get_while_loop_carried_output_names", None)
    if find is None:  # torch 2.11, 2.12
        names = [output.get_name() for output in while_loop.outputs]
    else:
        names = find(while_loop)
    changed = {output.get_name() for output in while_loop.mutation_outputs}
    pairs = zip(while_loop.carried_inputs, names, strict=False)
    return [(carried, name) for carried, name in pairs if name not in changed]


class _OfGrid(int):
    """Bytes that each CTA needs; written into the code, the bytes that all of a launch need."""

    def __str__(self) -> str:
        return f"int64_t({int(self)}) * grid_0 * grid_1 * grid_2"


@dataclasses.dataclass(frozen=True)
class _Launcher:
    """In the place of what generates the C++ function that launches a Triton kernel.

    Torch declares the function's parameters for numbers by their class in Python: int64_t for
    whatever is an expression, which cuts the fraction off a float of the graph, and float for a
    float, of which a kernel may want all 53 bits. What the kernel wants, its signature says.
    """

    stock: Any

    def generate(self, wrapper: Any) -> None:
        """Append the function to the generator's prefix."""
        from torch._inductor.codecache import CudaKernelParamCache

        # torch 2.13 may write two files at once.
        buffers = [wrapper.prefix, *filter(None, [getattr(wrapper.prefix, "aot", None)])]
        starts = [len(buffer._lines) for buffer in buffers]
        self.stock.generate(wrapper)
        kernel = CudaKernelParamCache.get(self.stock.kernel_name) or {}
        declared = {
            f"{declaration} {name},": f"double {name},"
            for name, kind in kernel["triton_meta"]["signature"].items()
            if kind in ("fp16", "bf16", "fp32", "fp64")
            for declaration in ("int64_t", "float")
        }
        for buffer, start in zip(buffers, starts, strict=True):
            buffer._lines[start:] = [
                declared.get(str(line).strip(), line) for line in buffer._lines[start:]
            ]


def _signature_at_hand() -> Signature:
    """The exported program's signature, or what can be told from the graph alone.

    Without an exported program (`torch._inductor.aot_compile` inside an activation) inputs have the
    graph's names, and export's guards are not known.
    """
    from torch._inductor.virtualized import V

    given: Signature | None = context.current().signature
    if given is not None and _fits(given, V.graph):
        # By now all code is generated, and what it has assumed of sizes is known.
        return from_export.with_guards(given, V.graph.sizevars.shape_env)
    return from_graph.signature(V.graph)


def _fits(signature: Signature, graph: Any) -> bool:
    """Whether the graph takes the signature's tensors: it may be another graph's by mistake."""
    return len(signature.tensors) == len(graph.graph_inputs)


class _Array:
    """Numbers of many small arrays in one, which costs the compiler next to nothing."""

    def __init__(self, element: str, name: str) -> None:
        self.element, self.name = element, name
        self.values: list[int] = []

    def add(self, values: Iterable[int]) -> str:
        """The expression for the address of `values`."""
        start = len(self.values)
        self.values.extend(map(int, values))
        return f"{self.name} + {start}"

    def declaration(self) -> str:
        """The array; never empty, which C++ does not allow."""
        values = ", ".join(map(str, self.values or [0]))
        return f"[[maybe_unused]] constexpr {self.element} {self.name}[] = {{{values}}};"


def _write_table(buffer: Any, element: str, name: str, rows: Iterable[str]) -> None:
    rows = list(rows)
    if not rows:
        # The address of nothing; not const itself, it would be read when the library is loaded.
        buffer.writeline(f"{element}* const {name} = nullptr;")
        return
    buffer.writeline(f"{element} {name}[] = {{")
    for row in rows:
        buffer.writeline(f"    {row},")
    buffer.writeline("};")


def weights_included() -> bool:
    """Whether the artifact carries its weights, in whatever file."""
    from torch._inductor import config

    aot = config.aot_inductor
    return bool(
        aot.package_constants_in_so or aot.package_constants_on_disk_format == "binary_blob"
    )


def _operators_of_folding(graph: Any) -> tuple[Any, ...]:
    wrapper = getattr(graph.const_module, "wrapper_code", None)
    return wrapper.operators if isinstance(wrapper, AotWrapper) else ()


def _has_enumerations(graph: Any) -> bool:
    """Whether operators called by name take arguments whose numbers depend on torch's version."""
    from torch._inductor.virtualized import V

    nodes = V.extern_kernel_nodes
    return bool(nodes) and extern_nodes.has_enumerations(graph.extern_node_serializer(nodes))


def _folded_constants(graph: Any) -> list[int]:
    """For each result of the folding graph, the index of the constant that it is."""
    places = {name: index for index, name in enumerate(graph.constants)}
    results = [0] * len(graph.const_output_index)
    for name, output in graph.const_output_index.items():
        results[output] = places[name]
    return results


def original_name(graph: Any, name: str) -> str:
    """The constant's qualified name in the model."""
    known: Mapping[str, str] = graph.dynamo_flat_name_to_original_fqn
    return known.get(name) or str(graph.allocated_constant_name[name])


def _kind(graph: Any, name: str) -> str:
    """Which torch::aot_inductor::ConstantType the constant is of."""
    from torch._inductor.utils import normalize_name

    if name in graph.folded_constants:
        return "FoldedConstant"
    if name.startswith("_tensor_constant"):
        return "TensorConstant"
    if any(name == normalize_name(parameter) for parameter in graph.named_parameters):
        return "Parameter"
    if any(name == normalize_name(buffer) for buffer in graph.named_buffers):
        return "Buffer"
    return "Unknown"


_STOCK_MODEL = "#include <torch/csrc/inductor/aoti_include/common.h>"
"""What torch 2.13 includes for a graph that computes on no device; it has torch's model classes."""


def _remove_interface(header: Any) -> None:
    """Take out torch's classes, and the interface that torch 2.11 pastes into every model."""
    from torch._inductor.codegen import cpp_wrapper_cpu

    header._lines[:] = [line for line in header._lines if str(line).strip() != _STOCK_MODEL]

    path = pathlib.Path(cpp_wrapper_cpu.__file__).parent / "aoti_runtime" / "interface.cpp"
    pasted = [line.strip() for line in path.read_text().splitlines()]
    pasted = [line for line in pasted if line]
    present = [(index, str(line).strip()) for index, line in enumerate(header._lines)]
    present = [(index, line) for index, line in present if line]
    for start in range(len(present) - len(pasted) + 1):
        window = present[start : start + len(pasted)]
        if all(line == wanted for (_, line), wanted in zip(window, pasted, strict=True)):
            del header._lines[window[0][0] : window[-1][0] + 1]
            return
