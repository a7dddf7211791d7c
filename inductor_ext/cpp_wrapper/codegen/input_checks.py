"""Generate the C++ tables with which a model checks its inputs, from its signature.

The text goes into the model's own translation unit, after `runtime/checks.h`. It is constant data
and one function, `inductor_ext::check_inputs`, so that it costs the compiler milliseconds; the code
that reads the tables is in runtime/checks.cpp, compiled once for all models.

Symbols get their values as in the generated code: scalars first, then the sizes and strides of one
tensor after the other; a size or stride that is an expression with one unknown symbol is solved for
it. Everything else is compared with its expected value, strides only along dimensions with more
than one element. A bad call is therefore detected before the generated code relies on its inputs.

Pure. A signature that leaves a symbol undetermined raises `exc.UncheckableInputError`. The setting
`aot_check_inputs` leaves the checks out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from inductor_ext import exc
from inductor_ext.cpp_wrapper.signature import expression
from inductor_ext.cpp_wrapper.signature.expression import Apply, Node
from inductor_ext.cpp_wrapper.signature.signature import (
    Extent,
    Range,
    Signature,
    SymbolInput,
    TensorInput,
)

DTYPES = (
    *("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex32"),
    *("complex64", "complex128", "bool", "qint8", "quint8", "qint32", "bfloat16", "quint4x2"),
    *("quint2x4", "bits1x8", "bits2x4", "bits4x2", "bits8", "bits16", "float8_e5m2"),
    *("float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz", "uint16", "uint32", "uint64"),
    *("uint1", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7"),
    *("int1", "int2", "int3", "int4", "int5", "int6", "int7"),
    *("float8_e8m0fnu", "float4_e2m1fn_x2"),
)
"""Indexed by c10::ScalarType, whose values are part of the C interface."""

DEVICE_TYPES = {"cpu": 0, "cuda": 1, "xpu": 12, "mps": 13, "meta": 14, "privateuse1": 20}
"""The c10::DeviceType of each torch.device type."""

_NUMBERS = {
    "int": ("integer", "int64"),
    "float": ("floating", "float64"),
    "bool": ("boolean", "bool"),
}
"""For each scalar type: its name in checks.h, and the dtype of the tensor that holds it."""

_NO_CHECKS = "compile without input checks (aot_check_inputs=False)"

_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1


def render(signature: Signature) -> str:
    """Return the tables and `static void check_inputs(AtenTensorHandle const* inputs, ...)`.

    Its other parameters are the number of inputs, to be checked if the caller has one, and the
    index of the device that the model runs on.

    Raises:
        exc.UncheckableInputError: a symbol has no value after all inputs have been read, or an
            input has an unknown dtype or device.
        exc.BadExpressionError: an expression cannot be parsed.
    """
    return _Tables(signature).text()


@dataclass(frozen=True)
class _Symbol:
    """A symbol with a value, and the size, stride or scalar that determines it."""

    name: str
    text: str
    input: int
    dimension: int
    stride: bool
    plain: bool
    """Whether it is that size, stride or scalar itself, not solved for."""


@dataclass
class _Tables:
    signature: Signature
    symbols: dict[str, _Symbol] = field(default_factory=dict)
    words: list[int] = field(default_factory=list)
    programs: dict[str, int] = field(default_factory=dict)
    solves: list[tuple[int, int]] = field(default_factory=list)

    @property
    def numbers(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.symbols)}

    @property
    def names(self) -> dict[str, str]:
        return {symbol.name: symbol.text for symbol in self.symbols.values()}

    def program(self, node: Node) -> int:
        """Return the offset of a node's program in the words; its symbols must be known."""
        text = expression.show(node)
        if text not in self.programs:
            self.programs[text] = len(self.words)
            self.words += expression.program(node, self.numbers)
        return self.programs[text]

    def text(self) -> str:
        """Return the tables and the function."""
        rows, specs = self.input_rows()
        constraints = [self.constraint(constraint) for constraint in self.signature.constraints]
        tables = {
            "int64_t programs": _rows(self.words),
            "Solve solves": [f"{{{scale}, {shift}}}" for scale, shift in self.solves],
            "Extent extents": rows,
            "Input inputs": specs,
            "Symbol symbols": [self.symbol(symbol) for symbol in self.symbols.values()],
            "Constraint constraints": constraints,
        }
        lines = ["namespace inductor_ext {", "namespace checks_of_model {"]
        for name, table in tables.items():
            if table:
                lines += [f"static constexpr {name}[] = {{", *(f"  {row}," for row in table), "};"]
        used = {
            name.split()[1]: name.split()[1] if table else "nullptr"
            for name, table in tables.items()
        }
        lines += [
            "static constexpr Checks checks = {",
            f"  {used['inputs']}, {len(specs)}, {used['symbols']}, {len(self.symbols)},",
            f"  {used['constraints']}, {len(constraints)}, {used['solves']}, {used['programs']}}};",
            "}  // namespace checks_of_model",
            "",
            "[[maybe_unused]] static void check_inputs(",
            "    AtenTensorHandle const* inputs,",
            f"    int64_t count = {len(specs)},",
            "    int32_t device_index = -1) {",
            f"  int64_t values[{max(1, len(self.symbols))}];",
            "  check_tensors(checks_of_model::checks, inputs, count, device_index, values);",
            "}",
            "}  // namespace inductor_ext",
        ]
        return "\n".join(lines) + "\n"

    def input_rows(self) -> tuple[list[str], list[str]]:
        """Return the rows of the tables of extents and of inputs, and determine the symbols."""
        inputs = self.signature.tensors
        # Two passes: an earlier input's expression may need a symbol that a later input defines.
        rules: dict[tuple[int, bool], list[tuple[str, int, int] | Node]] = {}
        for numbers in (True, False):
            for index, input_ in enumerate(inputs):
                if isinstance(input_, SymbolInput) != numbers:
                    continue
                for stride, extents in _extents(input_):
                    rules[index, stride] = [
                        self.rule(input_, index, stride, dimension, extent)
                        for dimension, extent in enumerate(extents)
                    ]
        rows: list[str] = []
        specs: list[str] = []
        indexed = _several_indices(inputs)
        for index, input_ in enumerate(inputs):
            starts: list[str] = []
            late = False
            for stride, extents in _extents(input_):
                starts.append(f"extents + {len(rows)}" if extents else "nullptr")
                for rule, extent in zip(rules[index, stride], extents, strict=True):
                    late |= not isinstance(rule, tuple)
                    rows.append(self.extent(input_, rule, extent))
            specs.append(_spec(input_, starts, late, indexed, self.shape_text(input_)))
        return rows, specs

    def rule(
        self,
        input_: TensorInput | SymbolInput,
        index: int,
        stride: bool,
        dimension: int,
        extent: Extent,
    ) -> tuple[str, int, int] | Node:
        """Return how an extent is determined: rule, index and value of checks.h. An expression
        that must wait for later inputs is returned unchanged."""
        node = expression.parse(extent) if isinstance(extent, str) else extent
        if isinstance(node, int):
            return ("fixed", 0, node)
        if isinstance(node, str) and node in self.symbols:
            return ("same", self.numbers[node], 0)
        open_symbols = [name for name in expression.symbols(node) if name not in self.symbols]
        if len(open_symbols) != 1:
            return node
        (name,) = open_symbols
        place = _place(input_, stride, dimension)
        if isinstance(node, str):
            self.symbols[name] = _Symbol(name, place, index, dimension, stride, True)
            return ("define", self.numbers[name], 0)
        terms = _linear(node, name)
        if terms is None:
            return node
        scale, shift = terms
        self.solves.append((self.program(scale), self.program(shift)))
        text = expression.show(_divided(_minus(place, shift), scale), self.names)
        self.symbols[name] = _Symbol(name, text, index, dimension, stride, False)
        return ("solve", self.numbers[name], len(self.solves) - 1)

    def extent(
        self, input_: TensorInput | SymbolInput, rule: tuple[str, int, int] | Node, extent: Extent
    ) -> str:
        if isinstance(rule, tuple):
            kind, index, value = rule
            text = "nullptr"
            if kind == "solve":
                # The symbol that is solved for is no size of the model, so it has no other name.
                solved = list(self.symbols)[index]
                names = {name: text for name, text in self.names.items() if name != solved}
                formula = expression.show(expression.parse(str(extent)), names)
                text = c_string(f"{formula} for a whole number {solved}")
            return f"{{Rule::{kind}, {index}, {value}, {text}}}"
        self.require(input_.name, str(extent), rule)
        text = c_string(expression.show(rule, self.names))
        return f"{{Rule::derived, {self.program(rule)}, 0, {text}}}"

    def require(self, name: str, text: str, node: Node) -> None:
        unknown = [symbol for symbol in expression.symbols(node) if symbol not in self.symbols]
        if unknown:
            raise exc.UncheckableInputError(
                name=name,
                why=f"{text} depends on {unknown[0]}, which cannot be derived from an input",
                fix="Export the model so that each symbol is the size of a dimension or an "
                f"argument, or {_NO_CHECKS}.",
            )

    def symbol(self, symbol: _Symbol) -> str:
        limits = self.signature.symbols.get(symbol.name, Range())
        low = _LOWEST if limits.min is None else max(limits.min, _LOWEST)
        high = _HIGHEST if limits.max is None else min(limits.max, _HIGHEST)
        return (
            f"{{{c_string(symbol.text)}, {_number(low)}, {_number(high)}, {symbol.input}, "
            f"{symbol.dimension}, {c_bool(symbol.stride)}, {c_bool(symbol.plain)}}}"
        )

    def constraint(self, text: str) -> str:
        node = expression.parse(text)
        self.require("the constraint", text, node)
        symbol, multiple = -1, 0
        match node:
            case Apply("==", (Apply("%", (str(name), int(divisor))), 0)) if (
                self.symbols[name].plain and divisor > 0
            ):
                symbol, multiple = self.numbers[name], divisor
        formula = c_string(expression.show(node, self.names))
        return f"{{{formula}, {self.program(node)}, {symbol}, {multiple}}}"

    def shape_text(self, input_: TensorInput | SymbolInput) -> str:
        if isinstance(input_, SymbolInput):
            return "()"
        names = {name: symbol.text for name, symbol in self.symbols.items() if symbol.plain}
        parts = [_size_text(size, self.signature.symbols, names) for size in input_.shape]
        return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"


def _extents(input_: TensorInput | SymbolInput) -> list[tuple[bool, Sequence[Extent]]]:
    """Return the sizes, then the strides; an integer counts as its tensor's only size."""
    if isinstance(input_, TensorInput):
        return [(False, input_.shape), (True, input_.stride)]
    return [(False, (input_.symbol,) if input_.type == "int" else ()), (True, ())]


def _place(input_: TensorInput | SymbolInput, stride: bool, dimension: int) -> str:
    if isinstance(input_, SymbolInput):
        return input_.name
    return f"{input_.name}.{'stride' if stride else 'size'}({dimension})"


def _several_indices(inputs: Sequence[TensorInput | SymbolInput]) -> bool:
    """Whether tensors are on several devices of one type, so that the device index matters."""
    devices = {input_.device for input_ in inputs if isinstance(input_, TensorInput)}
    types = [device.partition(":")[0] for device in devices if ":" in device]
    return len(types) != len(set(types))


def _spec(
    input_: TensorInput | SymbolInput, starts: Sequence[str], late: bool, indexed: bool, shape: str
) -> str:
    """Return a row of the table of inputs."""
    index = -1
    if isinstance(input_, SymbolInput):
        number, dtype = _NUMBERS[input_.type]
        device, rank = "cpu", 0
    else:
        number, dtype, rank = "none", input_.dtype, len(input_.shape)
        device, _, text = input_.device.partition(":")
        index = int(text) if indexed and text else -1
    for kind, value, supported in (("dtype", dtype, DTYPES), ("device", device, DEVICE_TYPES)):
        if value not in supported:
            why = f"its {kind}, {value}, is not supported"
            fix = f"Export the model with another {kind} of the input, or {_NO_CHECKS}."
            raise exc.UncheckableInputError(name=input_.name, why=why, fix=fix)
    return (
        f"{{{c_string(input_.name)}, {c_string(shape)}, {starts[0]}, {starts[1]}, {rank}, "
        f"{DTYPES.index(dtype)}, {DEVICE_TYPES[device]}, {index}, Number::{number}, "
        f"{c_bool(late)}}}"
    )


def _size_text(size: Extent, ranges: Mapping[str, Range], names: Mapping[str, str]) -> str:
    node = expression.parse(size) if isinstance(size, str) else size
    if not isinstance(node, str):
        return expression.show(node, names)
    limits = ranges.get(node, Range())
    low = "0" if limits.min is None else str(limits.min)
    return f"{low} or more" if limits.max is None else f"{low} to {limits.max}"


def _linear(node: Node, name: str) -> tuple[Node, Node] | None:
    """Return `(scale, shift)` if an expression is `scale * name + shift`, else None."""
    if node == name:
        return 1, 0
    if name not in expression.symbols(node):
        return 0, node
    assert isinstance(node, Apply)
    if node.operator not in ("+", "-", "*", "neg"):
        return None
    terms = [_linear(part, name) for part in node.arguments]
    if None in terms:
        return None
    (scale, shift), *rest = (term for term in terms if term is not None)
    if node.operator == "neg":
        return _minus(0, scale), _minus(0, shift)
    ((other_scale, other_shift),) = rest
    if node.operator == "*":
        if scale != 0 and other_scale != 0:
            return None
        if scale == 0:
            return _times(shift, other_scale), _times(shift, other_shift)
        return _times(scale, other_shift), _times(shift, other_shift)
    if node.operator == "-":
        return _minus(scale, other_scale), _minus(shift, other_shift)
    return _plus(scale, other_scale), _plus(shift, other_shift)


def _plus(left: Node, right: Node) -> Node:
    if isinstance(left, int) and isinstance(right, int):
        return left + right
    return right if left == 0 else left if right == 0 else Apply("+", (left, right))


def _minus(left: Node, right: Node) -> Node:
    if isinstance(left, int) and isinstance(right, int):
        return left - right
    if isinstance(right, int) and right < 0:
        return Apply("+", (left, -right))
    return left if right == 0 else Apply("-", (left, right))


def _times(left: Node, right: Node) -> Node:
    if isinstance(left, int) and isinstance(right, int):
        return left * right
    if left == 0 or right == 0:
        return 0
    return right if left == 1 else left if right == 1 else Apply("*", (left, right))


def _divided(left: Node, right: Node) -> Node:
    return left if right == 1 else Apply("//", (left, right))


def _rows(words: Sequence[int]) -> list[str]:
    return [", ".join(map(_number, words[i : i + 20])) for i in range(0, len(words), 20)]


def c_bool(value: object) -> str:
    """Return a C++ boolean literal."""
    return "true" if value else "false"


def _number(value: int) -> str:
    return {_LOWEST: "INT64_MIN", _HIGHEST: "INT64_MAX"}.get(value, str(value))


def c_string(text: str) -> str:
    """Return a C++ string literal; bytes that are not printable ASCII are escaped."""
    plain = {ord(" "), *range(0x21, 0x7F)} - {ord('"'), ord("\\"), ord("?")}
    return '"' + "".join(chr(b) if b in plain else f"\\{b:03o}" for b in text.encode()) + '"'
