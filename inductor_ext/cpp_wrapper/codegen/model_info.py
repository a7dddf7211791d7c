"""Describe a model by constant data: the `ModelInfo` of runtime/model.h.

The data is written into the C++ of the model, where torch's codegen emits the code of a
constructor, with the checks of the inputs. The compiler needs almost no time for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from inductor_ext import exc
from inductor_ext.cpp_wrapper import program_on_gpu
from inductor_ext.cpp_wrapper.build import cpu_target
from inductor_ext.cpp_wrapper.codegen import (
    constant_names,
    extern_nodes,
    frozen_constants,
    input_checks,
    weights_layout,
)
from inductor_ext.cpp_wrapper.codegen.input_checks import c_bool, c_string
from inductor_ext.cpp_wrapper.signature.signature import Signature
from inductor_ext.hooks import context

if TYPE_CHECKING:
    import torch


def constants_with_values(graph: Any) -> dict[str, torch.Tensor]:
    """Return the constants stored with the model: all that are not folded at run time."""
    return {
        name: _value(graph, name) for name in graph.constants if name not in graph.folded_constants
    }


def _value(graph: Any, name: str) -> torch.Tensor:
    values = context.current().constant_values
    tensor: torch.Tensor = graph.get_original_value_of_constant(name)
    if values is None:
        return tensor
    value = values.get(original_name(graph, name))
    if value is None:
        # AOTAutograd names constants that are no parameters or buffers itself.
        value = program_on_gpu.find_value(tensor)
    return tensor if value is None else value


def moved_constants(graph: Any, values: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the device types, by name, of constants that are not on the device of their value."""
    devices = {name: graph.constants[name].device.type for name in values}
    return {name: device for name, device in devices.items() if device != values[name].device.type}


def weights_included() -> bool:
    """Whether the model is packaged with its weights, in whatever file."""
    from torch._inductor import config

    aot = config.aot_inductor
    return bool(
        aot.package_constants_in_so or aot.package_constants_on_disk_format == "binary_blob"
    )


class ModelInfo:
    """Writer of a model's description."""

    def __init__(self, graph: Any, device_type: str, folding_needs_executor: bool) -> None:
        """Read the graph's constants; they must be complete.

        Args:
            graph: Inductor's GraphLowering.
            device_type: the device type that it runs on.
            folding_needs_executor: whether its constant-folding graph calls operators by name.
        """
        self.graph, self.device_type = graph, device_type
        self.folding_needs_executor = folding_needs_executor
        self.weights_plan = weights_layout.plan(constants_with_values(graph))

    def write(self, buffer: Any, signature: Signature | None) -> None:
        """Append the description to a buffer, which is in the namespace torch::aot_inductor.

        Args:
            buffer: an IndentedBuffer.
            signature: what the model checks its inputs against; None for no checks.
        """
        buffer.writeline("namespace {")
        self._write_tables(buffer)
        buffer.splice(
            """
            std::unique_ptr<AOTInductorModelKernelsBase> make_kernels() {
                return std::make_unique<AOTInductorModelKernels>();
            }
            }  // namespace
            }  // namespace torch::aot_inductor
            """
        )
        if signature is not None:
            buffer.writeline('#include "checks.h"')
            buffer.splice(input_checks.render(signature))
        buffer.splice(
            """
            namespace inductor_ext {
            using namespace torch::aot_inductor;
            """
        )
        buffer.writeline("extern const ModelInfo model_info = {")
        for field in self._fields("nullptr" if signature is None else "check_inputs"):
            buffer.writeline(f"    {field},")
        buffer.splice(
            """
            };
            }  // namespace inductor_ext
            namespace torch::aot_inductor {
            """
        )

    def _write_tables(self, buffer: Any) -> None:
        graph = self.graph
        numbers, opaque = _Array("int64_t", "kNumbers"), _Array("uint8_t", "kOpaque")
        rows = [self._constant_row(name, numbers, opaque) for name in graph.constants]
        for array in (numbers, opaque):
            buffer.writeline(array.declaration())
        inputs = map(c_string, graph.graph_inputs)
        outputs = (c_string(f"output{index}") for index in range(len(graph.graph_outputs)))
        _write_table(buffer, "const char* const", "kInputNames", inputs)
        _write_table(buffer, "const char* const", "kOutputNames", outputs)
        _write_table(buffer, "const size_t", "kFolded", map(str, _folded_constants(graph)))
        _write_table(buffer, "const inductor_ext::Constant", "kConstants", rows)
        indices = {"": -1, **{name: index for index, name in enumerate(graph.constants)}}
        _write_table(
            buffer,
            "const inductor_ext::FrozenUse",
            "kFrozen",
            (f"{{{c_string(fqn)}, {indices[name]}}}" for fqn, name in frozen_uses(graph)),
        )

    def _fields(self, check: str) -> tuple[object, ...]:
        """Return the C++ initializers of the members of ModelInfo, in order."""
        import torch
        from torch._inductor import config

        graph, aot = self.graph, config.aot_inductor
        return (
            "kInputNames",
            len(graph.graph_inputs),
            "kOutputNames",
            len(graph.graph_outputs),
            "kConstants",
            len(graph.constants),
            "kFolded",
            len(_folded_constants(graph)),
            "kFrozen",
            len(frozen_uses(graph)),
            self.weights_plan.bytes,
            c_bool(weights_included()),
            c_bool(aot.use_runtime_constant_folding),
            c_bool(self.folding_needs_executor),
            c_bool(_has_enumerations(graph)),
            c_bool(extern_nodes.takes_export_numbers()),
            c_string(torch.__version__),
            c_string(aot.serialized_in_spec),
            c_string(aot.serialized_out_spec),
            c_string(",".join(cpu_target.current().features)),
            "make_kernels",
            check,
        )

    def _constant_row(self, name: str, numbers: _Array, opaque: _Array) -> str:
        import torch

        graph = self.graph
        tensor = graph.get_original_value_of_constant(name)
        if tensor.device.type not in (self.device_type, "cpu"):
            raise exc.ForeignConstantError(
                name=original_name(graph, name), actual=tensor.device, device=self.device_type
            )
        folded = name in graph.folded_constants
        metadata: list[int] = []
        if tensor.is_mkldnn:
            metadata = torch.ops.mkldnn._get_mkldnn_serialized_md(tensor).tolist()
        layout = str(tensor.layout).removeprefix("torch.")
        fields = (
            c_string(constant_names.public_name(name)),
            c_string(original_name(graph, name)),
            f"aoti_torch_dtype_{str(tensor.dtype).removeprefix('torch.')}",
            f"aoti_torch_device_type_{tensor.device.type}",
            f"aoti_torch_layout_{layout}",
            numbers.add(tensor.size()),
            # A tensor with an opaque layout has no strides.
            numbers.add(() if tensor.is_mkldnn else tensor.stride()),
            tensor.dim(),
            0 if tensor.is_mkldnn else tensor.storage_offset(),
            0 if folded else self.weights_plan.sizes[name],
            0 if folded else self.weights_plan.offsets[name],
            opaque.add(metadata) if metadata else "nullptr",
            len(metadata),
            f"torch::aot_inductor::ConstantType::{_kind(graph, name)}",
            c_bool(folded),
        )
        return f"{{{', '.join(map(str, fields))}}}"


class _Array:
    """Many small integer arrays in one C++ array, which costs the compiler almost nothing."""

    def __init__(self, element: str, name: str) -> None:
        self.element, self.name = element, name
        self.values: list[int] = []

    def add(self, values: Iterable[int]) -> str:
        """Append `values` and return the C++ expression for their address."""
        start = len(self.values)
        self.values.extend(map(int, values))
        return f"{self.name} + {start}"

    def declaration(self) -> str:
        """Return the array's declaration, with a dummy element if empty, as C++ requires."""
        values = ", ".join(map(str, self.values or [0]))
        return f"[[maybe_unused]] constexpr {self.element} {self.name}[] = {{{values}}};"


def _write_table(buffer: Any, c_type: str, name: str, rows: Iterable[str]) -> None:
    rows = list(rows)
    if not rows:
        # A null pointer; if it were not const itself, it would be read at library load time.
        buffer.writeline(f"{c_type}* const {name} = nullptr;")
        return
    buffer.writeline(f"{c_type} {name}[] = {{")
    for row in rows:
        buffer.writeline(f"    {row},")
    buffer.writeline("};")


def _has_enumerations(graph: Any) -> bool:
    """Whether operators called by name take enum values that depend on the torch version."""
    from torch._inductor.virtualized import V

    nodes = V.extern_kernel_nodes
    return bool(nodes) and extern_nodes.has_enumerations(graph.extern_node_serializer(nodes))


def _folded_constants(graph: Any) -> list[int]:
    """Return the index of the constant that each output of the constant-folding graph computes."""
    indices = {name: index for index, name in enumerate(graph.constants)}
    results = [0] * len(graph.const_output_index)
    for name, output in graph.const_output_index.items():
        results[output] = indices[name]
    return results


def original_name(graph: Any, name: str) -> str:
    """Return the constant's fully qualified name (FQN) in the exported model."""
    fqns: Mapping[str, str] = graph.dynamo_flat_name_to_original_fqn
    return fqns.get(name) or str(graph.allocated_constant_name[name])


def frozen_uses(graph: Any) -> list[tuple[str, str]]:
    """Return `frozen_constants.frozen_uses` of a graph."""
    fqns = {name: original_name(graph, name) for name in graph.constants}
    return frozen_constants.frozen_uses(fqns, constants_with_values(graph).values())


def _kind(graph: Any, name: str) -> str:
    """Return the name of the constant's torch::aot_inductor::ConstantType."""
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
