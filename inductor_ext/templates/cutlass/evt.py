"""Epilogues of CUTLASS kernels: an expression graph, rendered as an epilogue visitor tree (EVT).

An epilogue is a graph of pointwise operations on the accumulator, broadcast tensors, constants, and
scalars that are known only at launch (alpha, a division by a size), with one or more outputs. It is
rendered as a CUTLASS EVT with one compute node per output: CUTLASS's nodes load, broadcast and
store, and one generated functor evaluates the whole expression, with common subexpressions computed
once. So a long epilogue takes no longer to compile than a short one.

Operations have the names of Inductor's `ops`, so that an ops handler needs no mapping. They are
computed in float32, and comparisons treat NaN as torch does. `NotExpressible` is raised, with the
reason, for what CUTLASS or this module does not support.
"""

from __future__ import annotations

import abc
import functools
import json
import math
import operator
import struct
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.problem import DTYPE_BITS, EpilogueInput

__all__ = [
    "ACCUMULATOR",
    "CPP_TYPES",
    "OPERATIONS",
    "Epilogue",
    "Node",
    "NotExpressible",
    "Packed",
    "Rendered",
    "Tensor",
    "apply",
    "cast",
    "clamp",
    "constant",
    "gelu",
    "identity",
    "obstacle",
    "parameter",
    "read",
    "relu6",
    "render",
    "silu",
]

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

OPERATIONS: Mapping[str, str] = types.MappingProxyType(
    {
        "add": "{0} + {1}",
        "sub": "{0} - {1}",
        "mul": "{0} * {1}",
        "truediv": "{0} / {1}",
        "neg": "-{0}",
        "abs": "fabsf({0})",
        "reciprocal": "1.0f / {0}",
        "square": "{0} * {0}",
        "sqrt": "sqrtf({0})",
        "rsqrt": "rsqrtf({0})",
        "exp": "expf({0})",
        "log": "logf({0})",
        "erf": "erff({0})",
        "tanh": "tanhf({0})",
        "sigmoid": "1.0f / (1.0f + expf(-{0}))",
        # fmaxf and fminf ignore NaN; torch propagates it.
        "relu": "{0} < 0.0f ? 0.0f : {0}",
        "maximum": "{0} > {1} || isnan({0}) ? {0} : {1}",
        "minimum": "{0} < {1} || isnan({0}) ? {0} : {1}",
        "lt": "{0} < {1} ? 1.0f : 0.0f",
        "le": "{0} <= {1} ? 1.0f : 0.0f",
        "gt": "{0} > {1} ? 1.0f : 0.0f",
        "ge": "{0} >= {1} ? 1.0f : 0.0f",
        "where": "{0} != 0.0f ? {1} : {2}",
    }
)
"""C++ expressions of the operations, for float32 operands. Comparisons return 1 or 0."""


class NotExpressible(Exception):
    """An epilogue that CUTLASS's visitors or this module cannot express, with the reason."""


@dataclass(frozen=True)
class Tensor:
    """A tensor that an epilogue reads or writes, in the axes of the problem."""

    dtype: str
    broadcast: Literal["matrix", "row", "column", "scalar", "group"] = "matrix"
    """`matrix`: [M, N], row-major; `row`: [N], broadcast along M; `column`: [M, 1], broadcast along
    N; `scalar`. All but a scalar may have a batch dimension.
    `group`: scales of groups of b along K, [N, groups], with a column's scales contiguous. These
    are read by the mainloop, not by the expression."""
    alignment: int = 1
    """Alignment of each row's address, in elements."""

    @property
    def behind(self) -> EpilogueInput | None:
        """The tensor as an input of a problem's epilogue; None for group scales, which are not."""
        return None if self.broadcast == "group" else EpilogueInput(self.dtype, self.broadcast)


@dataclass(frozen=True)
class Node:
    """A value: `ACCUMULATOR`, or created by `read`, `constant`, `parameter`, `apply` or `cast`."""

    operation: str
    arguments: tuple[Node, ...] = ()
    index: int = 0
    """Index of the tensor or parameter, if the node is one."""
    value: float = 0.0
    """Value of the constant, if the node is one."""
    dtype: str = ""
    """Dtype that the node rounds to, if it is a cast."""

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        """Cached, so that a value with many uses is not traversed once per use."""
        return hash((self.operation, self.arguments, self.index, self.value, self.dtype))


ACCUMULATOR = Node("accumulator")
"""The accumulator, converted to float32."""


def read(index: int) -> Node:
    """Return an element of the tensor `Epilogue.inputs[index]`."""
    return Node("read", index=index)


def constant(value: float) -> Node:
    """Return a constant that is compiled into the kernel, and so must not depend on sizes."""
    return Node("constant", value=float(value))


def parameter(index: int) -> Node:
    """Return a scalar that is a launch argument: alpha, or one that depends on a size."""
    return Node("parameter", index=index)


def apply(operation: str, *arguments: Node) -> Node:
    """Return the result of an operation of `OPERATIONS`.

    Raises:
        NotExpressible: there is no such operation, or it has a different number of operands.
    """
    template = OPERATIONS.get(operation)
    if template is None:
        raise NotExpressible(f"{operation} is none of the operations of an epilogue")
    operands = 1 + max(int(item) for item in "012" if f"{{{item}}}" in template)
    if len(arguments) != operands:
        raise NotExpressible(f"{operation} takes {operands} operands, not {len(arguments)}")
    return Node(operation, arguments)


def cast(value: Node, dtype: str) -> Node:
    """Return a value rounded to a dtype; further operations on it are in float32.

    Raises:
        NotExpressible: rounding to this dtype would not match torch.
    """
    if dtype == "float32":
        return value
    if dtype not in ("float16", "bfloat16"):
        raise NotExpressible(f"values within an epilogue are not rounded to {dtype}")
    return Node("cast", (value,), dtype=dtype)


def clamp(value: Node, least: float | None, most: float | None) -> Node:
    """Return torch.clamp of a value, which propagates NaN."""
    if least is not None:
        value = apply("maximum", value, constant(least))
    return value if most is None else apply("minimum", value, constant(most))


def relu6(value: Node) -> Node:
    """Return torch.nn.functional.relu6 of a value."""
    return clamp(value, 0.0, 6.0)


def silu(value: Node) -> Node:
    """Return torch.nn.functional.silu of a value."""
    return apply("mul", value, apply("sigmoid", value))


def gelu(value: Node, approximate: Literal["none", "tanh"] = "none") -> Node:
    """Return torch.nn.functional.gelu of a value."""
    half = apply("mul", value, constant(0.5))
    if approximate == "none":
        inner = apply("erf", apply("mul", value, constant(math.sqrt(0.5))))
    else:
        cube = apply("mul", apply("mul", apply("square", value), value), constant(0.044715))
        scaled = apply("mul", apply("add", value, cube), constant(math.sqrt(2 / math.pi)))
        inner = apply("tanh", scaled)
    return apply("mul", half, apply("add", inner, constant(1.0)))


@dataclass(frozen=True)
class Packed:
    """Encoding of a 4-bit b, in which two elements adjacent along K share a byte."""

    high_first: bool = False
    """Whether the first element of a byte is in its high nibble."""
    zero: int = 0
    """Zero point that is subtracted from all elements."""


@dataclass(frozen=True)
class Epilogue:
    """The outputs of a kernel and the expressions that compute them."""

    outputs: tuple[tuple[str, Node], ...]
    """Dtype and value of each output; the first is the GEMM's D, the others are auxiliary."""
    inputs: tuple[Tensor, ...] = ()
    alignment: int = 8
    """Alignment of each row's address in the auxiliary outputs, in elements."""
    packed: Packed | None = None
    """Encoding of b, if it is 4-bit."""

    @property
    def scales(self) -> int | None:
        """Index of the input with the group scales; None without such."""
        kinds = (inp.broadcast == "group" for inp in self.inputs)
        return next((index for index, found in enumerate(kinds) if found), None)

    @property
    def parameters(self) -> int:
        """Number of scalars that are launch arguments."""
        indices = (node.index for node in self.nodes() if node.operation == "parameter")
        return max(indices, default=-1) + 1

    @property
    def operations(self) -> int:
        """Number of operations per element, without casts, with common subexpressions counted
        once.
        """
        return sum(bool(node.arguments) and node.operation != "cast" for node in self.nodes())

    def nodes(self) -> Iterator[Node]:
        """Yield all values once, in topological order (operands first)."""
        seen: set[Node] = set()
        for _, value in self.outputs:
            yield from _walk(value, seen)

    @functools.cached_property
    def text(self) -> str:
        """Canonical one-line JSON text, equal for equal epilogues only; `parse` reads it."""
        places = {node: place for place, node in enumerate(self.nodes())}
        told: dict[str, Any] = {
            "alignment": self.alignment,
            "inputs": [[inp.dtype, inp.broadcast, inp.alignment] for inp in self.inputs],
            "outputs": [[dtype, places[value]] for dtype, value in self.outputs],
            "values": [_step(node, places) for node in places],
        }
        if self.packed is not None:
            told["packed"] = [self.packed.high_first, self.packed.zero]
        return json.dumps(told, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> Epilogue:
        """Return the epilogue of a `text`.

        Raises:
            NotExpressible: the text is not a valid epilogue.
        """
        try:
            told = json.loads(text)
            values: list[Node] = []
            for operation, *rest in told["values"]:
                values.append(_value(operation, rest, values))
            outputs = tuple((str(dtype), values[place]) for dtype, place in told["outputs"])
            inputs = tuple(Tensor(*item) for item in told["inputs"])
            packed = Packed(*told["packed"]) if "packed" in told else None
            return cls(outputs, inputs, int(told["alignment"]), packed)
        except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
            raise NotExpressible(f"{text[:80]!r} is no epilogue: {error}") from None

    def evaluate(
        self,
        accumulator: Any,
        inputs: Sequence[Any],
        parameters: Sequence[float] = (),
        *,
        known: Mapping[Node, Any] | None = None,
        exact: bool = False,
    ) -> list[Any]:
        """Compute the outputs with torch ops.

        If the result is traced to a graph, the matcher recognizes it as the same epilogue again.

        Args:
            accumulator: a tensor [M, N] or [batch, M, N].
            inputs: tensors that broadcast to it.
            parameters: the launch scalars.
            known: precomputed values, as tensors of any dtype.
            exact: compute in float64 without rounding; otherwise in float32 until the output cast.
        """
        import torch

        wide = torch.float64 if exact else torch.float32

        def value(node: Node) -> Any:
            if node not in found:
                found[node] = given[node].to(wide) if node in given else computed(node)
            return found[node]

        def computed(node: Node) -> Any:
            if node.operation == "read":
                return inputs[node.index].to(wide)
            if node.operation in ("constant", "parameter"):
                constant = node.operation == "constant"
                return node.value if constant else parameters[node.index]
            name = node.operation
            if name in ("add", "sub") and _is_scaled_input(node.arguments[1]):
                # A separate multiplication of an input would not be matched as part of the
                # epilogue, so it goes into `alpha`.
                first, (second, by) = node.arguments[0], node.arguments[1].arguments
                return getattr(torch, name)(value(first), value(second), alpha=value(by))
            operands = [value(argument) for argument in node.arguments]
            if name == "cast":
                return operands[0] if exact else operands[0].to(getattr(torch, node.dtype)).to(wide)
            if name == "where":
                condition, *rest = operands
                return torch.where(condition if _is_bool(condition) else condition != 0, *rest)
            operands = [operand.to(wide) if _is_bool(operand) else operand for operand in operands]
            if name in ("maximum", "minimum") and isinstance(operands[1], float):
                name = {"maximum": "clamp_min", "minimum": "clamp_max"}[name]
            function: Any = getattr(operator, name, None) or getattr(torch, name)
            return function(*operands)

        found: dict[Node, Any] = {}
        given = {ACCUMULATOR: accumulator, **(known or {})}
        stored = []
        for dtype, node in self.outputs:
            # Store given values without a detour through float32: rounds once, keeps large ints.
            result = given[node] if node in given else value(node)
            stored.append(result.to(wide if exact else getattr(torch, dtype)))
        return stored


def _is_scaled_input(node: Node) -> bool:
    if node.operation != "mul":
        return False
    first, second = (argument.operation for argument in node.arguments)
    return first == "read" and second in ("constant", "parameter")


def _is_bool(value: Any) -> bool:
    return str(getattr(value, "dtype", "")) == "torch.bool"


def _step(node: Node, places: Mapping[Node, int]) -> list[Any]:
    """Return a value in JSON form: its operation and arguments."""
    if node.arguments:
        rest: list[Any] = [places[argument] for argument in node.arguments]
        return [node.operation, *rest, *([node.dtype] if node.operation == "cast" else [])]
    if node.operation == "constant":
        return [node.operation, repr(node.value)]
    return [node.operation] if node == ACCUMULATOR else [node.operation, node.index]


def _value(operation: str, rest: list[Any], before: list[Node]) -> Node:
    """Return the value of a JSON form; the inverse of `_step`."""
    if operation == "accumulator":
        return ACCUMULATOR
    if operation == "constant":
        return constant(float(rest[0]))
    if operation in ("read", "parameter"):
        return Node(operation, index=int(rest[0]))
    if operation == "cast":
        return cast(before[rest[0]], rest[1])
    return apply(operation, *(before[place] for place in rest))


def identity(dtype: str) -> Epilogue:
    """Return the epilogue that stores the accumulator in a dtype."""
    return Epilogue(((dtype, ACCUMULATOR),))


def _walk(node: Node, seen: set[Node]) -> Iterator[Node]:
    """Yield a value and all that it depends on once, operands first."""
    if node in seen:
        return
    seen.add(node)
    for argument in node.arguments:
        yield from _walk(argument, seen)
    yield node


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
    reason = obstacle(epilogue, config.accumulator, config.grouped)
    if reason is None and epilogue.outputs[0][0] != config.d:
        reason = f"the kernel stores {config.d}, and the epilogue {epilogue.outputs[0][0]}"
    if reason is not None:
        raise NotExpressible(reason)
    family: Callable[[Epilogue, CutlassConfig], _Family] = (
        _Specialized if config.arch == 90 else _Multistage
    )
    return _Renderer(epilogue, config, family(epilogue, config)).render()


def obstacle(epilogue: Epilogue, accumulator: str = "float32", grouped: bool = False) -> str | None:
    """Return the reason why no kernel supports an epilogue; None if kernels do.

    Args:
        epilogue: to check.
        accumulator: dtype of the accumulator.
        grouped: whether it is the epilogue of a grouped GEMM.
    """
    for dtype, _ in epilogue.outputs:
        if dtype not in CPP_TYPES or dtype == "uint8":
            return f"{dtype} is not stored"
    for index, tensor in enumerate(epilogue.inputs):
        if tensor.dtype not in CPP_TYPES:
            return f"input {index} is {tensor.dtype}, which CUTLASS does not have"
    if sum(inp.broadcast == "group" for inp in epilogue.inputs) > (epilogue.packed is not None):
        return "groups of scales are of a factor of 4 bits, and one scales it"
    for node in epilogue.nodes():
        if node.operation == "read" and node.index >= len(epilogue.inputs):
            return f"input {node.index} is read, and there are {len(epilogue.inputs)}"
    if grouped and (epilogue.inputs or len(epilogue.outputs) > 1):
        return "the epilogue of a grouped product reads no tensors, and has one output"
    integers = [dtype for dtype, _ in epilogue.outputs if dtype.startswith(("int", "uint"))]
    if integers and (epilogue.outputs, accumulator) != (identity("int32").outputs, "int32"):
        return f"{integers[0]} is stored of int32 accumulators only, and with nothing done to them"
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
        """Return a tensor's broadcast in the kernel's axes, which `swap` exchanges."""
        if self.config.swap and tensor.broadcast in ("row", "column"):
            return "row" if tensor.broadcast == "column" else "column"
        return tensor.broadcast

    def strides(self, tensor: Tensor) -> str:
        """Return the CuTe stride type along M, N and the batch."""
        if tensor.broadcast == "matrix":
            inner = "_1, int64_t" if self.config.swap else "int64_t, _1"
            return f"Stride<{inner}, int64_t>"
        kind = self.broadcast(tensor)
        return {"row": "Stride<_0, _1, int64_t>", "column": "Stride<_1, _0, int64_t>"}[kind]

    def stride_values(self, tensor: Tensor, operand: str) -> str:
        if tensor.broadcast == "matrix":
            inner = f"_1{{}}, {operand}.stride" if self.config.swap else f"{operand}.stride, _1{{}}"
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
            whole = tensor.alignment % vector == 0
            if (tensor.broadcast, tensor.dtype) == ("matrix", self.config.c) and whole:
                return index
        raise NotExpressible(f"no matrix of {self.config.c} that is read is aligned to 16 bytes")

    def render(self) -> Rendered:
        prefix = self.family.namespace
        integers = self.epilogue.outputs[0][0] == "int32"
        element = "int32_t" if integers else "float"
        for node in self.epilogue.nodes():
            if node.operation in ("accumulator", "read", "parameter") and node not in self.leaves:
                self._leaf(node)
        leaves = [name for name, _ in self.leaves.values()]
        values = [argument for _, argument in self.leaves.values()]

        computed = []
        for index, (dtype, value) in enumerate(self.epilogue.outputs):
            self._function(index, value, element)
            stored = CPP_TYPES[dtype] if index == 0 else element
            name = f"Output{index}"
            self.lines.append(
                f"using {name} = {prefix}{self.family.compute}<Compute{index}, {stored}, {element},"
                " Round>;"
            )
            computed.append(name)
        others = len(computed) - 1
        stores = [
            (f"Store{index}", dtype)
            for index, (dtype, _) in enumerate(self.epilogue.outputs)
            if index > 0 or not self.family.loads_c
        ]
        for name, dtype in stores:
            self.lines.append(f"using {name} = {prefix}{self.family.store(dtype)};")
        if not others:
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
        alike = [(inp.dtype, inp.alignment) for inp in inputs]
        alike += [(dtype, self.epilogue.alignment) for dtype, _ in self.epilogue.outputs[1:]]
        access = self.config.alignments[2]
        for dtype, alignment in alike:
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
        whole = f"seq<{', '.join(map(str, range(len(leaves))))}>"
        nodes, edges, arguments = list(leaves), ["seq<>"] * len(leaves), list(values)
        named = {int(name.removeprefix("Store")): name for name, _ in stores}
        for index in [*range(1, len(self.epilogue.outputs)), 0]:
            edges.append(whole)
            nodes.append(f"Output{index}")
            arguments.append("{}")
            if index in named:
                edges.append(f"seq<{len(nodes) - 1}>")
                nodes.append(named[index])
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
        names = {node: f"x{place}" for place, node in enumerate(self.leaves)}
        parameters = ", ".join(f"Fragment const& {name}" for name in names.values())
        body = []
        known: dict[Node, str] = {}
        for node in _walk(value, set()):
            if node in names:
                expression = f"{names[node]}[i]"
            elif node.operation == "constant":
                known[node] = _literal(node.value)
                continue
            elif node.operation == "cast":
                expression = f"float({CPP_TYPES[node.dtype]}({known[node.arguments[0]]}))"
            else:
                operands = (known[argument] for argument in node.arguments)
                expression = OPERATIONS[node.operation].format(*operands)
            known[node] = f"v{len(known)}"
            body.append(f"      {element} const {known[node]} = {expression};")
        body.append(f"      y[i] = {known[value]};")
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
