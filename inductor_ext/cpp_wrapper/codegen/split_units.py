"""Split a large model's `run_impl` into several functions and translation units.

Compile time is superlinear in the length of a function: at every call that may throw, the compiler
emits the destruction of all live objects. `Program.units` moves ranges of statements out of
`run_impl` into functions (`AOTInductorModel::run_part`, declared in runtime/model.h). The functions
go into translation units of bounded size, which are compiled in parallel. Statements keep their
order. The variables that a range declares are members of a frame, a struct in `run_impl` that the
range's functions share, so objects are destroyed at the same time and in the same order as in the
whole code, including when an exception is thrown.

The wrapper codegen inserts a `Mark` where each section of the code begins. Only statements of known
forms are moved (see `cpp_statements`); any other one, and all that use what it declares, stay in
`run_impl`. The setting `aot_unit_size` sets the size of a unit. Pure: imports only the standard
library.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence

from inductor_ext.cpp_wrapper.codegen.cpp_statements import (
    Kind,
    Statement,
    UnknownCodeError,
    read_statements,
)

FUNCTION = 60
"""Approximate statements per function; measured compile time is linear up to this length."""

_VARIABLES = (Kind.TENSOR, Kind.VALUE, Kind.ARRAY)


class Section(enum.Enum):
    """Which units contain a section of the generated code."""

    SHARED = enum.auto()
    """Every unit."""
    LAUNCHER = enum.auto()
    """The first unit, and those that call the section's function."""
    FIRST = enum.auto()
    """The first unit, which contains `run_impl`."""
    WHOLE = enum.auto()
    """None: only the whole code contains it."""
    HEAD = enum.auto()
    """`run_impl` up to the statements that may be moved."""
    BODY = enum.auto()
    """The statements that may be moved."""


@dataclasses.dataclass(frozen=True)
class Mark:
    """Where a section begins, between two lines of a buffer of Inductor."""

    section: Section
    function: str = ""
    """The function that a LAUNCHER section defines."""


class Program:
    """The generated C++ of a model, up to the end of the statements of `run_impl`."""

    def __init__(self, lines: Iterable[Mark | str]) -> None:
        """Split lines at the marks; the first section is SHARED, the last two HEAD and BODY."""
        self.sections: list[tuple[Mark, list[str]]] = [(Mark(Section.SHARED), [])]
        for line in lines:
            if isinstance(line, Mark):
                self.sections.append((line, []))
            else:
                self.sections[-1][1].append(line)

    def text(self, *sections: Section, functions: Collection[str] = ()) -> str:
        """Return the text of the sections of these kinds, and of the launchers of `functions`."""
        return "".join(
            f"{line}\n"
            for mark, lines in self.sections
            for line in lines
            if mark.section in sections or mark.function in functions
        )

    def units(self, size: int, *, function: int = FUNCTION, path: str = "") -> list[str]:
        """Return the translation units, the first of which contains `run_impl`.

        Args:
            size: approximate statements per unit; code with less than 1.5 times as many becomes one
                unit. 0 disables splitting.
            function: approximate statements per function.
            path: file with the whole code, for debuggers and compiler messages; "" if none.

        Returns:
            The units; empty if the code is too short or has an unknown form.
        """
        *top, (_, head), (_, body) = self.sections
        opening = next((i for i, line in enumerate(head, 1) if line.endswith(") {")), 0)
        number = 1 + sum(_line_count(lines) for _, lines in top)
        first, last = number + _line_count(head[:opening]), number + _line_count(head)
        try:
            statements = read_statements([*head[opening:], *body], first)
        except UnknownCodeError:
            return []
        unknown: set[str] = set()
        for statement in statements:
            statement.stays |= statement.line < last or not unknown.isdisjoint(statement.words)
            if statement.kind is Kind.OTHER:
                unknown.add(statement.name)
        if not size or _weight(statements) < 2 * min(function, size):
            return []
        run = _Run(statements, min(function, size), path)
        return run.units(self, size, number, head[:opening]) if run.functions else []


def _line_count(lines: Iterable[str]) -> int:
    return sum(line.count("\n") + 1 for line in lines)


def _weight(statements: Iterable[Statement]) -> int:
    return sum(statement.weight for statement in statements)


def _functions(statements: list[Statement], size: int) -> list[list[Statement]]:
    """Split a range of statements into functions of similar weight."""
    total = _weight(statements)
    aim = total / max(1, round(total / size))
    functions: list[list[Statement]] = [[]]
    for statement in statements:
        # Slightly below the aim counts as full, so that rounding leaves no small remainder.
        if _weight(functions[-1]) >= aim - 0.5:
            functions.append([])
        functions[-1].append(statement)
    if len(functions) > 1 and _weight(functions[-1]) < aim / 2:
        functions[-2:] = [functions[-2] + functions[-1]]
    return functions


class _Frame:
    """The struct that the functions of a moved range share: the variables that they use."""

    def __init__(
        self, number: int, functions: list[list[Statement]], outer: Iterable[Statement]
    ) -> None:
        self.name, self.variable = f"InductorExtFrame{number}", f"inductor_ext_frame_{number}"
        self.functions = functions
        variables = [s for statements in functions for s in statements if s.kind in _VARIABLES]
        self.outer = list(outer)
        self.values = [statement for statement in variables if statement.kind is not Kind.TENSOR]
        tensors = [statement for statement in variables if statement.kind is Kind.TENSOR]
        # An array, which the compiler destroys in a loop.
        self.places = {s.name: f"tensors[{index}]" for index, s in enumerate(tensors)}

    def bind(self, statement: Statement, frame: str) -> str:
        """Return the statement that makes a variable of `frame` known by its name."""
        if statement.kind is Kind.REPEATED:
            return f"{statement.code.removesuffix(statement.rest)}\n"
        name = statement.name
        return f"    auto& {name} = {frame}.{self.places.get(name, name)};\n"

    def definition(self) -> str:
        """Return the struct's definition."""
        members = [_reference(statement) for statement in self.outer]
        if self.places:
            members.append(f"RAIIAtenTensorHandle tensors[{len(self.places)}]")
        members += map(_variable, self.values)
        return f"struct {self.name} {{\n" + "".join(f"    {m};\n" for m in members) + "};\n"

    def creation(self) -> str:
        """Return the statement of `run_impl` that creates the frame."""
        names = ", ".join(statement.name for statement in self.outer)
        return f"    {self.name} {self.variable}{{{names}}};\n"


def _reference(statement: Statement) -> str:
    """Return the declaration of a reference to what a statement declares."""
    return f"{statement.type}{'*' if statement.kind is Kind.ARRAY else '&'} {statement.name}"


def _variable(statement: Statement) -> str:
    """Return the declaration of a variable to which a function assigns a statement's value."""
    # A pointer to constants is not constant itself.
    type_ = statement.type if "*" in statement.type else statement.type.removeprefix("const ")
    # Its initializer has at most as many elements.
    count = f"[{(statement.value or '').count(',') + 1}]" if statement.kind is Kind.ARRAY else ""
    return f"{type_} {statement.name}{count}"


def _moved(statement: Statement) -> str:
    """Return a statement's code with its variable in a frame."""
    name, value = statement.name, statement.value
    if statement.kind not in _VARIABLES:
        return statement.code
    if value is None:
        code = ""
    elif statement.kind is Kind.TENSOR:
        # Replaces an empty handle, which owns nothing that would have to be destroyed.
        code = f"new (&{name}) RAIIAtenTensorHandle({value});"
    elif statement.kind is Kind.ARRAY:
        code = f"{{ {statement.type} values_[] = {{{value}}}; "
        code += f"std::copy(std::begin(values_), std::end(values_), {name}); }}"
    else:
        code = f"{name} = {value};"
    return f"    {code}{statement.rest}"


class _Run:
    """`run_impl`, split into ranges that stay and ranges that are moved into functions."""

    def __init__(self, statements: Sequence[Statement], function: int, path: str) -> None:
        self.path = path.replace("\\", "\\\\").replace('"', '\\"')
        self.declared = {statement.name: statement for statement in statements if statement.name}
        self.ranges: list[list[Statement] | _Frame] = []
        self.functions: list[tuple[_Frame, list[Statement]]] = []
        number = 1
        for stays, group in itertools.groupby(statements, lambda statement: statement.stays):
            members = list(group)
            if stays or _weight(members) < max(1, function):
                self.ranges.append(members)
                continue
            outer = [
                variable
                for variable in self._used(members)
                if variable.kind in _VARIABLES and variable.line < members[0].line
            ]
            frame = _Frame(number, _functions(members, function), outer)
            self.ranges.append(frame)
            self.functions += [(frame, part) for part in frame.functions]
            number += 1

    def _used(self, statements: Sequence[Statement]) -> list[Statement]:
        """Return, in order, the declarations of variables that `statements` use."""
        words = set().union(*(statement.words for statement in statements))
        declarations = [self.declared[word] for word in words & self.declared.keys()]
        declarations.sort(key=lambda statement: statement.line)
        return [statement for statement in declarations if statement.line <= statements[-1].line]

    def units(self, program: Program, size: int, line: int, head: Sequence[str]) -> list[str]:
        """Return the units, as `Program.units`.

        Args:
            program: the code.
            size: approximate statements per unit.
            line: number of the first line of `head`.
            head: the lines of the signature of `run_impl`.
        """
        weights = [_weight(statements) for _, statements in self.functions]
        count = max(1, round(sum(weights) / size))
        frames = "".join(r.definition() for r in self.ranges if isinstance(r, _Frame))
        main = "".join(
            [
                program.text(Section.SHARED, Section.LAUNCHER, Section.FIRST),
                frames,
                *(f"{self._signature(number)};\n" for number in range(len(weights))),
                self._line(line),
                *(f"{text}\n" for text in head),
                *self._body(),
            ]
        )
        if count == 1:
            # At this size, splitting `run_impl` into functions saves enough.
            return [main + "".join(map(self._function, range(len(weights)))) + "}\n"]
        groups: list[list[int]] = [[] for _ in range(count)]
        assigned_weight = 0
        for number, weight in enumerate(weights):
            groups[min(count - 1, assigned_weight * count // sum(weights))].append(number)
            assigned_weight += weight
        units = [f"{main}}}\n"]
        for numbers in filter(None, groups):
            functions = "".join(map(self._function, numbers))
            function_names = {
                word for n in numbers for s in self.functions[n][1] for word in s.words
            }
            units.append(
                f"{program.text(Section.SHARED, functions=function_names)}{frames}{functions}}}\n"
            )
        return units

    def _line(self, number: int) -> str:
        """Return a #line directive for a line of the whole code."""
        return f'#line {number} "{self.path}"\n' if self.path else ""

    def _signature(self, number: int) -> str:
        return (
            f"template <>\nvoid AOTInductorModel::run_part<{number}>(\n"
            f"    {self.functions[number][0].name}& inductor_ext_frame,\n"
            "    AtenTensorHandle* input_handles,\n"
            "    AtenTensorHandle* output_handles,\n"
            "    DeviceStreamType stream,\n"
            "    AOTIProxyExecutorHandle proxy_executor)"
        )

    def _function(self, number: int) -> str:
        frame, statements = self.functions[number]
        first = statements[0].line
        return "".join(
            [
                f"{self._signature(number)} {{\n",
                *(
                    frame.bind(variable, "inductor_ext_frame")
                    for variable in self._used(statements)
                    if variable.kind is not Kind.REPEATED or variable.line < first
                ),
                self._line(first),
                *(f"{statement.comments}{_moved(statement)}\n" for statement in statements),
                "}\n\n",
            ]
        )

    def _body(self) -> Iterator[str]:
        """Yield the statements of `run_impl`, with calls of the functions."""
        used: set[str] = set()
        for part in self.ranges:
            if isinstance(part, _Frame):
                used.update(statement.name for statement in part.outer)
            else:
                used.update(*(s.words for s in part if s.kind is not Kind.REPEATED))
        for part in self.ranges:
            if isinstance(part, _Frame):
                yield part.creation()
                for number, (frame, _) in enumerate(self.functions):
                    if frame is part:
                        arguments = "input_handles, output_handles, stream, proxy_executor"
                        yield f"    run_part<{number}>({frame.variable}, {arguments});\n"
                for statement in itertools.chain.from_iterable(part.functions):
                    if statement.name in used:
                        yield part.bind(statement, part.variable)
                continue
            yield self._line(part[0].line)
            for statement in part:
                unused = statement.kind is Kind.REPEATED and statement.name not in used
                yield "\n" if unused else f"{statement.comments}{statement.code}\n"
        yield "}\n"
