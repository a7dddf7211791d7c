"""Render epilogues of CUTLASS kernels as epilogue visitor trees (EVT).

The tree has one compute node per output: CUTLASS's nodes load, broadcast and store, and one
generated functor evaluates the whole expression, with common subexpressions computed once. So a
long epilogue takes no longer to compile than a short one.
"""

from __future__ import annotations

import abc
import math
import struct
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.cutlass.epilogue import (
    OPERATIONS,
    Epilogue,
    Node,
    NotExpressible,
    Tensor,
    identity,
    walk,
)
from inductor_ext.templates.tensors import DTYPE_BITS

CPP_TYPES: Mapping[str, str] = types.MappingProxyType(
    {
        "float32": "float",
        "float16": "cutlass::half_t",
        "bfloat16": "cutlass::bfloat16_t",
        "float8_e4m3fn": "cutlass::float_e4m3_t",
        "float8_e5m2": "cutlass::float_e5m2_t",
        "int8": "int8_t",
        "uint8": "uint8_t",
        "int32": "int32_t",
        "void": "void",
    }
)
"""C++ element types of dtypes."""


@dataclass(frozen=True)
class Rendered:
    """An epilogue as C++ text."""

    definitions: str
    """Functors and types; the last is `Fusion`, the visitor tree."""
    arguments: str
    """Expression of `Fusion`'s arguments, in terms of `call`."""
    source: int | None = None
    """Index of the input that the kernel reads as matrix C."""
    access: int = 1
    """Vector width, in elements, of a thread's epilogue accesses; for sm_80."""


def render(epilogue: Epilogue, config: CutlassConfig) -> Rendered:
    """Render the visitor tree of an epilogue for a kernel.

    The text uses the type `Tile` and, for sm_80, `ThreadMap`, which must be defined before it. The
    tensors of a call are a, b, the first output, the inputs, and the other outputs.

    Raises:
        NotExpressible: the kernel does not support the epilogue.
    """
    reason = why_unsupported(epilogue, config.accumulator, config.grouped)
    if reason is None and epilogue.outputs[0][0] != config.d:
        reason = f"the kernel stores {config.d}, but the epilogue needs {epilogue.outputs[0][0]}"
    if reason is not None:
        raise NotExpressible(reason)
    family: Callable[[Epilogue, CutlassConfig], _Family] = (
        _Specialized if config.arch == 90 else _Multistage
    )
    return _Renderer(epilogue, config, family(epilogue, config)).render()


def why_unsupported(
    epilogue: Epilogue, accumulator: str = "float32", grouped: bool = False
) -> str | None:
    """Return the reason why no kernel supports an epilogue; None if kernels do.

    Args:
        epilogue: to check.
        accumulator: dtype of the accumulator.
        grouped: whether it is the epilogue of a grouped GEMM.
    """
    for dtype, _ in epilogue.outputs:
        if dtype not in CPP_TYPES or dtype == "uint8":
            return f"CUTLASS kernels do not store {dtype}"
    for index, tensor in enumerate(epilogue.inputs):
        if tensor.dtype not in CPP_TYPES:
            return f"CUTLASS kernels do not read {tensor.dtype} (input {index} of the epilogue)"
    if sum(inp.broadcast == "group" for inp in epilogue.inputs) > (epilogue.packed is not None):
        return "only one tensor of group scales is supported, and only for a 4-bit weight"
    for node in epilogue.nodes():
        if node.operation == "read" and node.index >= len(epilogue.inputs):
            return f"the epilogue reads input {node.index}, but has {len(epilogue.inputs)} inputs"
    if grouped and (epilogue.inputs or len(epilogue.outputs) > 1):
        return "the epilogue of a grouped matmul may not read tensors or have several outputs"
    integers = [dtype for dtype, _ in epilogue.outputs if dtype.startswith(("int", "uint"))]
    if integers and (epilogue.outputs, accumulator) != (identity("int32").outputs, "int32"):
        return f"{integers[0]} outputs need int32 accumulators and no epilogue"
    return None


class _Family(abc.ABC):
    """The EVT node types of one kernel family (sm_90 or sm_80)."""

    namespace: str
    compute: str
    tree: str
    topology: str
    loads_c = False

    def __init__(self, epilogue: Epilogue, config: CutlassConfig) -> None:
        self.epilogue = epilogue
        self.config = config

    def broadcast(self, tensor: Tensor) -> str:
        """Return a tensor's broadcast in the kernel's axes, which `swap_ab` exchanges."""
        if self.config.swap_ab and tensor.broadcast in ("row", "column"):
            return "row" if tensor.broadcast == "column" else "column"
        return tensor.broadcast

    def strides(self, tensor: Tensor) -> str:
        """Return the CuTe stride type along M, N and the batch."""
        if tensor.broadcast == "matrix":
            inner = "_1, int64_t" if self.config.swap_ab else "int64_t, _1"
            return f"Stride<{inner}, int64_t>"
        kind = self.broadcast(tensor)
        return {"row": "Stride<_0, _1, int64_t>", "column": "Stride<_1, _0, int64_t>"}[kind]

    def stride_values(self, tensor: Tensor, operand: str) -> str:
        if tensor.broadcast == "matrix":
            inner = (
                f"_1{{}}, {operand}.stride" if self.config.swap_ab else f"{operand}.stride, _1{{}}"
            )
            return f"{{{inner}, {operand}.batch}}"
        kind = self.broadcast(tensor)
        inner = {"row": "_0{}, _1{}", "column": "_1{}, _0{}"}[kind]
        return f"{{{inner}, {operand}.batch}}"

    @abc.abstractmethod
    def load(self, tensor: Tensor) -> str:
        """Return the type of the node that loads a tensor."""

    @abc.abstractmethod
    def store(self, dtype: str) -> str:
        """Return the type of the node that stores an output."""


class _Specialized(_Family):
    namespace = "cutlass::epilogue::fusion::"
    compute = "Sm90Compute"
    tree = "Sm90EVT"
    topology = "Sm90TopologicalVisitor"
    loads_c = True

    def load(self, tensor: Tensor) -> str:
        element = CPP_TYPES[tensor.dtype]
        kind = self.broadcast(tensor)
        if kind == "scalar":
            return f"Sm90ScalarBroadcast<{element}>"
        strides = self.strides(tensor)
        if kind == "matrix":
            bits = DTYPE_BITS[tensor.dtype]
            alignment = math.gcd(tensor.alignment, 128 // bits)
            return f"Sm90AuxLoad<0, void, {element}, {strides}, void, void, {alignment}>"
        name = {"row": "Sm90RowBroadcast", "column": "Sm90ColBroadcast"}[kind]
        return f"{name}<0, Tile, {element}, float, {strides}>"

    def store(self, dtype: str) -> str:
        alignment = math.gcd(self.epilogue.alignment, 128 // DTYPE_BITS[dtype])
        element, strides = CPP_TYPES[dtype], self.strides(Tensor(dtype))
        return f"Sm90AuxStore<0, void, {element}, Round, {strides}, void, void, {alignment}>"


class _Multistage(_Family):
    namespace = "cutlass::epilogue::threadblock::"
    compute = "VisitorCompute"
    tree = "Sm80EVT"
    topology = "TopologicalVisitor2x"

    def load(self, tensor: Tensor) -> str:
        element = CPP_TYPES[tensor.dtype]
        kind = self.broadcast(tensor)
        if kind == "scalar":
            return f"VisitorScalarBroadcast<{element}>"
        name = {
            "matrix": "VisitorAuxLoad",
            "row": "VisitorRowBroadcast",
            "column": "VisitorColBroadcast",
        }[kind]
        return f"{name}<ThreadMap, {element}, {self.strides(tensor)}>"

    def store(self, dtype: str) -> str:
        strides = self.strides(Tensor(dtype))
        return f"VisitorAuxStore<ThreadMap, {CPP_TYPES[dtype]}, Round, {strides}>"


class _Renderer:
    """Renders the C++ text of one epilogue."""

    def __init__(self, epilogue: Epilogue, config: CutlassConfig, family: _Family) -> None:
        self.epilogue = epilogue
        self.config = config
        self.family = family
        self.lines: list[str] = []
        self.leaves: dict[Node, tuple[str, str]] = {}
        self.source = self._source()

    def _source(self) -> int | None:
        """Return the index of the input that the kernel loads as C; None if it has no C."""
        if not self.family.loads_c or self.config.c == "void":
            return None
        vector = 128 // DTYPE_BITS[self.config.c]
        for index, tensor in enumerate(self.epilogue.inputs):
            divisible = tensor.alignment % vector == 0
            if (tensor.broadcast, tensor.dtype) == ("matrix", self.config.c) and divisible:
                return index
        raise NotExpressible(
            f"the epilogue reads no {self.config.c} matrix that is aligned to 16 bytes"
        )

    def render(self) -> Rendered:
        prefix = self.family.namespace
        integers = self.epilogue.outputs[0][0] == "int32"
        element = "int32_t" if integers else "float"
        for node in self.epilogue.nodes():
            if node.operation in ("accumulator", "read", "parameter") and node not in self.leaves:
                self._leaf(node)
        leaves = [name for name, _ in self.leaves.values()]
        values = [argument for _, argument in self.leaves.values()]

        outputs = []
        for index, (dtype, value) in enumerate(self.epilogue.outputs):
            self._function(index, value, element)
            output_type = CPP_TYPES[dtype] if index == 0 else element
            name = f"Output{index}"
            self.lines.append(
                f"using {name} = {prefix}{self.family.compute}<Compute{index}, {output_type},"
                f" {element}, Round>;"
            )
            outputs.append(name)
        auxiliary = len(outputs) - 1
        stores = [
            (f"Store{index}", dtype)
            for index, (dtype, _) in enumerate(self.epilogue.outputs)
            if index > 0 or not self.family.loads_c
        ]
        for name, dtype in stores:
            self.lines.append(f"using {name} = {prefix}{self.family.store(dtype)};")
        if not auxiliary:
            fusion = f"{prefix}{self.family.tree}<Output0, {', '.join(leaves)}>"
            arguments = f"{{{', '.join([*values, '{}'])}}}"
            if stores:
                fusion = f"{prefix}{self.family.tree}<Store0, {fusion}>"
                arguments = f"{{{arguments}, {self._stored(0)}}}"
        else:
            fusion, arguments = self._topology(prefix, element, leaves, values, stores)
        self.lines.append(f"using Fusion = {fusion};")
        return Rendered("\n".join(self.lines), arguments, self.source, self._access())

    def _access(self) -> int:
        """Return the vector width in elements, at most 16 bytes, common to all tensors."""
        inputs = [inp for inp in self.epilogue.inputs if inp.broadcast in ("matrix", "row")]
        alignments = [(inp.dtype, inp.alignment) for inp in inputs]
        alignments += [(dtype, self.epilogue.alignment) for dtype, _ in self.epilogue.outputs[1:]]
        access = self.config.alignments[2]
        for dtype, alignment in alignments:
            # A wider dtype takes several 16-byte accesses per vector.
            if alignment % min(access, 128 // DTYPE_BITS[dtype]):
                access = math.gcd(access, alignment)
        return access

    def _topology(
        self,
        prefix: str,
        element: str,
        leaves: list[str],
        values: list[str],
        stores: list[tuple[str, str]],
    ) -> tuple[str, str]:
        """Return the type and arguments of a DAG: leaves, auxiliary outputs, the first output."""
        leaf_edges = f"seq<{', '.join(map(str, range(len(leaves))))}>"
        nodes, edges, arguments = list(leaves), ["seq<>"] * len(leaves), list(values)
        store_names = {int(name.removeprefix("Store")): name for name, _ in stores}
        for index in [*range(1, len(self.epilogue.outputs)), 0]:
            edges.append(leaf_edges)
            nodes.append(f"Output{index}")
            arguments.append("{}")
            if index in store_names:
                edges.append(f"seq<{len(nodes) - 1}>")
                nodes.append(store_names[index])
                arguments.append(self._stored(index))
        graph = f"cute::tuple<{', '.join(edges)}>"
        visitors = ", ".join(nodes)
        return (
            f"{prefix}{self.family.topology}<{element}, {graph}, {visitors}>",
            f"{{{', '.join(arguments)}}}",
        )

    def _stored(self, index: int) -> str:
        dtype = self.epilogue.outputs[index][0]
        operand = "call.tensors[2]"
        if index:
            operand = f"call.tensors[{2 + len(self.epilogue.inputs) + index}]"
        strides = self.family.stride_values(Tensor(dtype), operand)
        return (
            f"typename Store{index}::Arguments{{static_cast<{CPP_TYPES[dtype]}*>({operand}.data), "
            f"{strides}}}"
        )

    def _leaf(self, node: Node) -> None:
        """Define the type and the arguments of a leaf: accumulator, scalar or loaded tensor."""
        prefix = self.family.namespace
        name = f"Leaf{len(self.leaves)}"
        arguments = "{}"
        specialized = self.family.loads_c
        if node.operation == "accumulator":
            kind = "Sm90AccFetch" if specialized else "VisitorAccFetch"
        elif node.operation == "parameter":
            kind = f"{'Sm90' if specialized else 'Visitor'}ScalarBroadcast<float>"
            arguments = f"typename {name}::Arguments{{{{call.scalars[{node.index}]}}}}"
        elif node.index == self.source:
            kind = f"Sm90SrcFetch<{CPP_TYPES[self.config.c]}>"
        else:
            tensor = self.epilogue.inputs[node.index]
            kind = self.family.load(tensor)
            operand = f"call.tensors[{3 + node.index}]"
            element = CPP_TYPES[tensor.dtype]
            pointer = f"static_cast<{element} const*>({operand}.data)"
            if tensor.broadcast == "scalar":
                arguments = f"{{{element}(0)}}, {{{pointer}}}"
            else:
                if not specialized and tensor.broadcast == "matrix":
                    pointer = f"static_cast<{element}*>({operand}.data)"
                strides = self.family.stride_values(tensor, operand)
                arguments = f"{pointer}, {element}(0), {strides}"
            arguments = f"typename {name}::Arguments{{{arguments}}}"
        self.lines.append(f"using {name} = {prefix}{kind};")
        self.leaves[node] = (name, arguments)

    def _function(self, index: int, value: Node, element: str) -> None:
        """Define the functor that computes an output from all leaves."""
        names = {node: f"x{number}" for number, node in enumerate(self.leaves)}
        parameters = ", ".join(f"Fragment const& {name}" for name in names.values())
        body = []
        variables: dict[Node, str] = {}
        for node in walk(value, set()):
            if node in names:
                expression = f"{names[node]}[i]"
            elif node.operation == "constant":
                variables[node] = _literal(node.value)
                continue
            elif node.operation == "cast":
                expression = f"float({CPP_TYPES[node.dtype]}({variables[node.arguments[0]]}))"
            else:
                operands = (variables[argument] for argument in node.arguments)
                expression = OPERATIONS[node.operation].format(*operands)
            variables[node] = f"v{len(variables)}"
            body.append(f"      {element} const {variables[node]} = {expression};")
        body.append(f"      y[i] = {variables[value]};")
        self.lines += [
            "template <class Fragment>",
            f"struct Compute{index} {{",
            f"  CUTLASS_DEVICE Fragment operator()({parameters}) const {{",
            "    Fragment y;",
            "    CUTLASS_PRAGMA_UNROLL",
            "    for (int i = 0; i < Fragment::kElements; ++i) {",
            *body,
            "    }",
            "    return y;",
            "  }",
            "};",
        ]


def _literal(value: float) -> str:
    """Return the C++ literal of a number, exact in float32."""
    try:
        (rounded,) = struct.unpack("f", struct.pack("f", value))
    except OverflowError:
        rounded = math.copysign(math.inf, value)
    if math.isnan(rounded):
        return "NAN"
    if math.isinf(rounded):
        return "INFINITY" if rounded > 0 else "(-INFINITY)"
    text = f"{rounded:.9g}"
    if not set(text) & set(".e"):
        text += ".0"
    return f"{text}f" if rounded >= 0 and text[0] != "-" else f"({text}f)"
