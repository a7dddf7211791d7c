"""The epilogue of a CUTLASS kernel, as an expression graph that does not depend on CUTLASS.

An epilogue is a graph of pointwise operations on the accumulator, broadcast tensors, constants, and
scalars that are known only at launch (alpha, a division by a size), with one or more outputs. `evt`
renders it as C++; `Epilogue.evaluate` computes it with torch.

Operations have the names of Inductor's `ops`, so that an ops handler needs no mapping. They are
computed in float32, and comparisons treat NaN as torch does. `NotExpressible` is raised, with the
reason, for what CUTLASS or this module does not support.
"""

from __future__ import annotations

import functools
import json
import math
import operator
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from inductor_ext import exc
from inductor_ext.templates.tensors import EpilogueInput

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
    def epilogue_input(self) -> EpilogueInput | None:
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
        raise NotExpressible(f"CUTLASS epilogues do not support the operation {operation}")
    operands = 1 + max(int(digit) for digit in "012" if f"{{{digit}}}" in template)
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
        raise NotExpressible(f"CUTLASS epilogues do not round intermediate values to {dtype}")
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

    JSON_FORM: ClassVar[type] = str

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
        return next((index for index, kind in enumerate(kinds) if kind), None)

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

    def __eq__(self, other: object) -> bool:
        # Comparing expressions value by value takes exponential time where values have several
        # uses, and an epilogue that was read from JSON shares no values with another.
        return self.text == other.text if isinstance(other, Epilogue) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.text)

    def nodes(self) -> Iterator[Node]:
        """Yield all values once, in topological order (operands first)."""
        seen: set[Node] = set()
        for _, value in self.outputs:
            yield from walk(value, seen)

    @functools.cached_property
    def text(self) -> str:
        """Canonical one-line JSON text, equal for equal epilogues only; `parse` reads it."""
        indices = {node: index for index, node in enumerate(self.nodes())}
        fields: dict[str, Any] = {
            "alignment": self.alignment,
            "inputs": [[inp.dtype, inp.broadcast, inp.alignment] for inp in self.inputs],
            "outputs": [[dtype, indices[value]] for dtype, value in self.outputs],
            "values": [_step(node, indices) for node in indices],
        }
        if self.packed is not None:
            fields["packed"] = [self.packed.high_first, self.packed.zero]
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> Epilogue:
        """Return the epilogue of a `text`.

        Raises:
            NotExpressible: the text is not a valid epilogue.
        """
        try:
            fields = json.loads(text)
            values: list[Node] = []
            for operation, *arguments in fields["values"]:
                values.append(_value(operation, arguments, values))
            outputs = tuple((str(dtype), values[index]) for dtype, index in fields["outputs"])
            inputs = tuple(Tensor(*tensor) for tensor in fields["inputs"])
            packed = Packed(*fields["packed"]) if "packed" in fields else None
            return cls(outputs, inputs, int(fields["alignment"]), packed)
        except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
            raise NotExpressible(f"{text[:80]!r} is not a serialized epilogue: {error}") from None

    def to_json_form(self) -> str:
        """Return `text`, with which problems are stored."""
        return self.text

    @classmethod
    def from_json_form(cls, text: str) -> Epilogue:
        """Return the epilogue of a `text`.

        Raises:
            exc.BadGemmError: the text is not a valid epilogue.
        """
        try:
            return cls.parse(text)
        except NotExpressible as error:
            raise exc.BadGemmError(
                record="JSON", field="tree", value=text, allowed=f"an epilogue: {error}"
            ) from None

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

        precomputed = {ACCUMULATOR: accumulator, **(known or {})}
        evaluator = _Evaluator(precomputed, inputs, parameters, exact)
        outputs = []
        for dtype, node in self.outputs:
            # Store precomputed values without a detour through float32, which would round twice
            # and lose large integers.
            result = precomputed[node] if node in precomputed else evaluator.value(node)
            outputs.append(result.to(evaluator.wide if exact else getattr(torch, dtype)))
        return outputs


class _Evaluator:
    """Computes the values of an epilogue with torch ops, each once."""

    def __init__(
        self,
        precomputed: Mapping[Node, Any],
        inputs: Sequence[Any],
        parameters: Sequence[float],
        exact: bool,
    ) -> None:
        import torch

        self.wide = torch.float64 if exact else torch.float32
        self._precomputed = precomputed
        self._inputs = inputs
        self._parameters = parameters
        self._exact = exact
        self._values: dict[Node, Any] = {}

    def value(self, node: Node) -> Any:
        """Return the value of a node: a tensor, or a float for a constant or a parameter."""
        if node not in self._values:
            if node in self._precomputed:
                self._values[node] = self._precomputed[node].to(self.wide)
            else:
                self._values[node] = self._compute(node)
        return self._values[node]

    def _compute(self, node: Node) -> Any:
        import torch

        if node.operation == "read":
            return self._inputs[node.index].to(self.wide)
        if node.operation in ("constant", "parameter"):
            is_constant = node.operation == "constant"
            return node.value if is_constant else self._parameters[node.index]
        name = node.operation
        if name in ("add", "sub") and _is_scaled_input(node.arguments[1]):
            # A separate multiplication of an input would not be matched as part of the epilogue,
            # so it goes into `alpha`.
            left, (right, alpha) = node.arguments[0], node.arguments[1].arguments
            return getattr(torch, name)(
                self.value(left), self.value(right), alpha=self.value(alpha)
            )
        operands = [self.value(argument) for argument in node.arguments]
        if name == "cast":
            operand = operands[0]
            return operand if self._exact else operand.to(getattr(torch, node.dtype)).to(self.wide)
        if name == "where":
            condition, *branches = operands
            return torch.where(condition if _is_bool(condition) else condition != 0, *branches)
        operands = [operand.to(self.wide) if _is_bool(operand) else operand for operand in operands]
        if name in ("maximum", "minimum") and isinstance(operands[1], float):
            name = {"maximum": "clamp_min", "minimum": "clamp_max"}[name]
        function: Any = getattr(operator, name, None) or getattr(torch, name)
        return function(*operands)


def _is_scaled_input(node: Node) -> bool:
    if node.operation != "mul":
        return False
    left, right = (argument.operation for argument in node.arguments)
    return left == "read" and right in ("constant", "parameter")


def _is_bool(value: Any) -> bool:
    return str(getattr(value, "dtype", "")) == "torch.bool"


def _step(node: Node, indices: Mapping[Node, int]) -> list[Any]:
    """Return a value in JSON form: its operation and arguments."""
    if node.arguments:
        arguments: list[Any] = [indices[argument] for argument in node.arguments]
        return [node.operation, *arguments, *([node.dtype] if node.operation == "cast" else [])]
    if node.operation == "constant":
        return [node.operation, repr(node.value)]
    return [node.operation] if node == ACCUMULATOR else [node.operation, node.index]


def _value(operation: str, arguments: list[Any], nodes: list[Node]) -> Node:
    """Return the value of a JSON form; the inverse of `_step`."""
    if operation == "accumulator":
        return ACCUMULATOR
    if operation == "constant":
        return constant(float(arguments[0]))
    if operation in ("read", "parameter"):
        return Node(operation, index=int(arguments[0]))
    if operation == "cast":
        return cast(nodes[arguments[0]], arguments[1])
    return apply(operation, *(nodes[index] for index in arguments))


def identity(dtype: str) -> Epilogue:
    """Return the epilogue that stores the accumulator in a dtype."""
    return Epilogue(((dtype, ACCUMULATOR),))


def walk(node: Node, seen: set[Node]) -> Iterator[Node]:
    """Yield a value and all that it depends on once, operands first."""
    if node in seen:
        return
    seen.add(node)
    for argument in node.arguments:
        yield from walk(argument, seen)
    yield node
