"""A big generated program as several C++ functions in several units.

Compilers take more than linear time for one long function: at every call that may throw, all that
lives there has to be destroyed. `split` takes stretches of statements out of a model's `run_impl`
and makes each a function (`AOTInductorModel::run_part`, declared in runtime/model.h); the functions
stand in units of bounded size, which are compiled at the same time. Statements keep their text and
their order. What a stretch declares lives in a frame of `run_impl` that its functions share, so
everything is destroyed when, and in the order in which, the whole program would have done so, on an
exception too.

Only what is known is taken out: tensors, handles, numbers, tables of sizes, and statements that
declare nothing. A statement of another kind (a guard, a lambda, a return) stays in `run_impl`, with
all that use what it declares. Where the text cannot be read for certain it stays whole, so that a
program is never wrong and never refused on account of its size. Pure: the standard library alone.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

from inductor_ext.cpp_wrapper.codegen.cpp_statements import (
    OPENING,
    WORD,
    Kind,
    NotUnderstoodError,
    Statement,
    Token,
    likely_name,
    read_statements,
    tokenize,
)

__all__ = ["FUNCTION", "split"]

FUNCTION = 60
"""Statements a function, about; a compile's time is linear up to there, by measurement."""

_FRAME = "inductor_ext_frame"
_RUN = "void AOTInductorModel::run_impl("
_END = "} // AOTInductorModel::run_impl"
_NAMESPACE = "torch::aot_inductor"


def split(text: str, unit: int, *, function: int = FUNCTION, path: str = "") -> list[str]:
    """Split a generated program.

    Args:
        text: the program, as the AOT generator writes it.
        unit: statements a unit, about; a program of less than one and a half times as many is one
            unit. 0: the program stays whole.
        function: statements a function, about.
        path: where `text` stands, for debuggers and the compiler's messages; "" for nowhere.

    Returns:
        The units, first the one with all that is no function's; `[text]` if it stays whole.
    """
    if not unit or text.count(";") < 2 * min(function, unit):
        return [text]
    try:
        program = _Program.read(text)
        plan = _plan(program.statements, min(function, unit))
        if not plan:
            return [text]
        return _Writer(program, plan, path).units(unit)
    except NotUnderstoodError:
        return [text]


# --- the program ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Item:
    """Something at namespace level before `run_impl`."""

    text: str
    namespaces: tuple[str, ...]
    """From the outermost; "" for one without a name."""
    start: int
    end: int
    names: frozenset[str]
    """What it declares; empty: nothing that is used by name."""
    shared: bool
    """It may stand in several units."""
    words: frozenset[str]


@dataclasses.dataclass
class _Program:
    """A program that has been read."""

    text: str
    items: list[_Item]
    body: int
    """Where the body of `run_impl` begins, behind the brace."""
    end: int
    """Where the brace that closes it stands."""
    statements: list[Statement]
    kernels: _Item | None
    """The class of the kernels, where it may be taken out of its unnamed namespace."""

    @classmethod
    def read(cls, text: str) -> _Program:
        if text.count(_RUN) != 1 or text.count(_END) != 1 or _FRAME in text:
            raise NotUnderstoodError
        if "ArrayRefTensor" in text:
            # The same names have other types there.
            raise NotUnderstoodError
        head = text.index(_RUN)
        body, end = text.find(") {", head) + 3, text.index(_END)
        if not head < body < end:
            raise NotUnderstoodError
        items, namespaces = _items(text, head)
        if namespaces != (_NAMESPACE,):
            raise NotUnderstoodError
        statements = read_statements(text, body, end)
        kernels = _kernels_item(text, items)
        private = _private_names(items, kernels)
        _keep(statements, private)
        items = [
            dataclasses.replace(item, shared=item.shared and private.isdisjoint(item.words))
            for item in items
        ]
        return cls(text, items, body, end, statements, kernels)


_DIRECTIVE = re.compile(r"\s*#\s*(?:include\b|define [A-Z_]+\()")
_MACRO = re.compile(r"CACHE_TORCH_[A-Z_]+ \( (\w+) \) ;")
_FUNCTION = re.compile(
    r"(?:\[ \[ maybe_unused \] \] )?(?:template < .* > )?(?:static|inline|constexpr) [^{}=;]*\("
)


def _items(text: str, end: int) -> tuple[list[_Item], tuple[str, ...]]:
    """What stands before `run_impl`, and the namespaces that it is in."""
    items: list[_Item] = []
    namespaces: list[str] = []
    position = 0
    for directive in [*re.finditer(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", text[:end], re.M), None]:
        stop = directive.start() if directive else end
        tokens = tokenize(text, position, stop)
        _read_items(text, tokens, namespaces, items)
        if directive is not None:
            if not _DIRECTIVE.match(directive.group()):
                # Conditions and macros could change what the text around them means.
                raise NotUnderstoodError
            items.append(
                _Item(
                    directive.group(),
                    (),
                    directive.start(),
                    directive.end(),
                    frozenset(),
                    True,
                    frozenset(),
                )
            )
            position = directive.end()
    return items, tuple(namespaces)


def _read_items(
    text: str, tokens: Sequence[Token], namespaces: list[str], items: list[_Item]
) -> None:
    index = 0
    while index < len(tokens):
        if tokens[index].text == "}":
            if not namespaces:
                raise NotUnderstoodError
            namespaces.pop()
            index += 1
            continue
        if tokens[index].text == ";":
            index += 1
            continue
        if tokens[index].text == "namespace":
            opening = next((i for i in range(index, len(tokens)) if tokens[i].text == "{"), None)
            if opening is None:
                raise NotUnderstoodError
            namespaces.append("".join(token.text for token in tokens[index + 1 : opening]))
            index = opening + 1
            continue
        behind = _item_end(tokens, index)
        items.append(_item(text, tokens[index:behind], tuple(namespaces)))
        index = behind


def _item_end(tokens: Sequence[Token], index: int) -> int:
    """The index behind the declaration or definition that begins at `index`."""
    depth = 0
    value = tokens[index].text in ("class", "struct", "enum", "union")
    for position in range(index, len(tokens)):
        word = tokens[position].text
        if word in OPENING:
            depth += 1
        elif word in OPENING.values():
            depth -= 1
            if depth < 0:
                raise NotUnderstoodError
            if depth == 0 and word == "}" and not value:
                return position + 1
        elif depth == 0 and word == "=":
            value = True
        elif depth == 0 and word == ";":
            return position + 1
    raise NotUnderstoodError


def _item(text: str, tokens: Sequence[Token], namespaces: tuple[str, ...]) -> _Item:
    line = " ".join(token.text for token in tokens)
    words = [token.text for token in tokens if WORD.match(token.text)]
    shared = namespaces in ((), (_NAMESPACE,))
    if tokens[0].text == "using":
        names = frozenset[str]()
    elif match := _MACRO.fullmatch(line):
        # Names end with what the macro is given: cached_torch_dtype_float32.
        names = frozenset({match[1]})
    elif tokens[0].text == "extern" and tokens[-1].text == ";" and "=" not in line:
        names = frozenset({likely_name(tokens)})
    elif line.startswith('extern "C" {'):
        names = frozenset(
            before.text
            for before, token in itertools.pairwise(tokens)
            if token.text in ("[", "(") and WORD.match(before.text)
        )
    elif tokens[0].text in ("class", "struct"):
        names, shared = frozenset({tokens[1].text}), False
    else:
        names = frozenset({likely_name(_behind_template(tokens))})
        # A variable inside would be one for each unit.
        inside = re.sub(r"static constexpr|\bstatic_cast\b", "", line.removeprefix("static "))
        inside = re.sub(r"^\[ \[ maybe_unused \] \] static ", "", inside)
        inside = re.sub(r"^(template < .* > )static ", r"\1", inside)
        function = _FUNCTION.match(line) and tokens[-1].text == "}"
        shared = shared and bool(function) and not re.search(r"\bstatic\b", inside)
    start, end = tokens[0].start, tokens[-1].end
    return _Item(text[start:end], namespaces, start, end, names, shared, frozenset(words))


def _behind_template(tokens: Sequence[Token]) -> Sequence[Token]:
    """The tokens without a template's parameters."""
    if tokens[0].text != "template":
        return tokens
    depth = 0
    for index, token in enumerate(tokens):
        depth += (token.text == "<") - (token.text == ">")
        if index and not depth:
            return tokens[index + 1 :]
    raise NotUnderstoodError


def _kernels_item(text: str, items: Sequence[_Item]) -> _Item | None:
    """The class of the kernels, if nothing else is in its namespace without a name."""
    for item in items:
        if item.text.startswith("class AOTInductorModelKernels ") and item.namespaces == (
            _NAMESPACE,
            "",
        ):
            before = text[: item.start].rstrip()
            if before.endswith("namespace {") and re.match(r"\s*\}", text[item.end :]):
                return item
    return None


def _private_names(items: Iterable[_Item], kernels: _Item | None) -> set[str]:
    """Names from before `run_impl` that mean something in its own unit alone."""
    private: set[str] = set()
    waiting = [item for item in items if item is not kernels]
    while True:
        found = [item for item in waiting if not item.shared or item.words & private]
        if not found:
            return private
        waiting = [item for item in waiting if item not in found]
        for item in found:
            # From elsewhere it is reached through its namespace.
            outside = item.namespaces[:1] not in ((), (_NAMESPACE,), ("",))
            private |= set(item.namespaces[:1]) if outside else item.names


def _keep(statements: Iterable[Statement], names: set[str]) -> None:
    """Leave in `run_impl` what uses `names`, or what such statements declare in their turn."""
    for statement in statements:
        if not names.isdisjoint(statement.words):
            statement.stays = True
            if statement.kind is Kind.REPEATED:
                statement.kind = Kind.OTHER
        if statement.stays and statement.kind in (Kind.OTHER, Kind.LOCAL) and statement.name:
            names.add(statement.name)


# --- planning ------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class _Stretch:
    """Statements that are taken out of `run_impl`: from `first` until before `end`."""

    first: int
    end: int
    parts: list[range]
    """The statements of its functions."""


def _plan(statements: list[Statement], function: int) -> list[_Stretch]:
    """What to take out; nothing if it is not worth it."""
    if sum(statement.weight for statement in statements) < 2 * function:
        return []
    last = _last_uses(statements)
    while True:
        stretches = list(_stretches(statements, function))
        home = {
            index: stretch for stretch in stretches for index in range(stretch.first, stretch.end)
        }
        users: dict[str, set[_Stretch | None]] = {}
        locals_ = {s.name: home.get(i) for i, s in enumerate(statements) if s.kind is Kind.LOCAL}
        for index, statement in enumerate(statements):
            for name in statement.words & locals_.keys():
                users.setdefault(name, set()).add(home.get(index))
        # What has to stay where it is must be used in the stretch that declares it, if any does.
        homeless = {name for name, own in locals_.items() if users[name] != {own}}
        if not homeless:
            break
        _keep(statements, homeless)
    for stretch in stretches:
        stretch.parts = _parts(statements, stretch, last, function)
    return stretches


def _stretches(statements: Sequence[Statement], function: int) -> Iterator[_Stretch]:
    first = 0
    for end in range(len(statements) + 1):
        if end < len(statements) and not statements[end].stays:
            continue
        if sum(statement.weight for statement in statements[first:end]) >= function:
            yield _Stretch(first, end, [])
        first = end + 1


def _parts(
    statements: Sequence[Statement], stretch: _Stretch, last: dict[str, int], function: int
) -> list[range]:
    total = sum(statement.weight for statement in statements[stretch.first : stretch.end])
    aim = total / max(1, round(total / function))
    parts: list[range] = []
    first, weight, held = stretch.first, 0.0, -1
    for index in range(stretch.first, stretch.end):
        statement = statements[index]
        weight += statement.weight
        if statement.kind is Kind.LOCAL:
            held = max(held, last[statement.name])
        # A little short counts as full, so that rounding leaves no small rest.
        if weight >= aim - 0.5 and held <= index:
            parts.append(range(first, index + 1))
            first, weight = index + 1, 0
    if first < stretch.end:
        if parts and weight < aim / 2:
            first = parts.pop().start
        parts.append(range(first, stretch.end))
    return parts


# --- writing -------------------------------------------------------------------------------------


class _Writer:
    """Writes the units of a program by a plan."""

    def __init__(self, program: _Program, plan: Sequence[_Stretch], path: str) -> None:
        self.program, self.plan, self.path = program, plan, path
        self.statements = program.statements
        self.last = _last_uses(self.statements)
        self.declared = {s.name: i for i, s in enumerate(self.statements) if s.name}
        self.frames = [_Frame(number, self, stretch) for number, stretch in enumerate(plan, 1)]
        self.parts = [(frame, indices) for frame in self.frames for indices in frame.stretch.parts]

    def units(self, size: int) -> list[str]:
        """The units, of about `size` statements each, the first with `run_impl`."""
        weights = [sum(self.statements[i].weight for i in indices) for _, indices in self.parts]
        total = sum(weights)
        count = max(1, round(total / size))
        if count == 1:
            # With the rest in one unit: there, the functions alone save enough.
            count = 0
        groups: list[list[int]] = [[] for _ in range(max(1, count))]
        done = 0
        for number, weight in enumerate(weights):
            groups[min(len(groups) - 1, done * len(groups) // total)].append(number)
            done += weight
        declarations = "".join(frame.definition() for frame in self.frames)
        functions = [self._function(number) for number in range(len(self.parts))]
        main = self._main(declarations)
        if not count:
            return [main + _namespace("".join(functions))]
        return [
            main,
            *(
                self._unit(declarations, [functions[number] for number in group], group)
                for group in groups
                if group
            ),
        ]

    # --- functions ---

    def signature(self, number: int) -> str:
        """The head of function `number`."""
        frame = self.parts[number][0]
        return (
            f"template <>\nvoid AOTInductorModel::run_part<{number}>(\n"
            f"    {frame.name}& {_FRAME},\n"
            "    AtenTensorHandle* input_handles,\n"
            "    AtenTensorHandle* output_handles,\n"
            "    DeviceStreamType stream,\n"
            "    AOTIProxyExecutorHandle proxy_executor)"
        )

    def _function(self, number: int) -> str:
        frame, indices = self.parts[number]
        lines = [f"{self.signature(number)} {{\n"]
        for index in self._needed(indices):
            statement = self.statements[index]
            if statement.kind is Kind.REPEATED:
                lines.append(f"    {self._own_text(statement)}\n")
            else:
                lines.append(f"    auto& {statement.name} = {frame.place(index)};\n")
        first = self.statements[indices.start].start
        lines.append(self._line(first))
        lines.extend(frame.rewritten(index) for index in indices)
        return "".join(lines) + "\n}\n\n"

    def _needed(self, indices: range) -> list[int]:
        """Which statements before `indices` declare what is used there."""
        words = frozenset().union(*(self.statements[index].words for index in indices))
        found = (self.declared[word] for word in words if word in self.declared)
        return sorted(index for index in found if index < indices.start)

    def _own_text(self, statement: Statement) -> str:
        return self.program.text[statement.first : statement.end]

    def _line(self, position: int) -> str:
        """A directive that says where the text at `position` comes from."""
        if not self.path:
            return ""
        number = self.program.text.count("\n", 0, position) + 1
        path = self.path.replace("\\", "\\\\").replace('"', '\\"')
        return f'#line {number} "{path}"\n'

    # --- units ---

    def _unit(self, declarations: str, functions: Iterable[str], numbers: Iterable[int]) -> str:
        """A unit with functions alone, and of the program's top what they use."""
        words: set[str] = set()
        for number in numbers:
            _, indices = self.parts[number]
            for index in [*indices, *self._needed(indices)]:
                words |= self.statements[index].words
        kernels = self.program.kernels
        if kernels is not None and not kernels.names.isdisjoint(words):
            words |= kernels.words
        used = self._used_items(words)
        inside = [item.text for item in used if item.namespaces]
        if kernels is not None and not kernels.names.isdisjoint(words):
            inside.append(kernels.text)
        top = "".join(f"{item.text}\n" for item in used if not item.namespaces)
        body = "".join(f"{text}\n" for text in inside) + declarations
        heads = "".join(f"{self.signature(number)};\n" for number in numbers)
        return f"{top}{_namespace(body + heads + ''.join(functions))}"

    def _used_items(self, words: set[str]) -> list[_Item]:
        """The shared items that `words` name, and those that they use in their turn."""
        # The names of dtypes may have underscores themselves.
        known = words | {
            "_".join(parts[start:])
            for word in words
            if word.startswith("cached_torch_")
            for parts in [word.split("_")]
            for start in range(2, len(parts))
        }
        shared = [item for item in self.program.items if item.shared]
        taken: set[int] = {index for index, item in enumerate(shared) if not item.names}
        while True:
            more = {
                index
                for index, item in enumerate(shared)
                if index not in taken and not item.names.isdisjoint(known)
            }
            if not more:
                return [item for index, item in enumerate(shared) if index in taken]
            taken |= more
            for index in more:
                known |= shared[index].words

    def _main(self, declarations: str) -> str:
        """The unit with `run_impl`."""
        program, text = self.program, self.program.text
        head = text.index(_RUN)
        top = text[:head]
        if program.kernels is not None:
            start, end = program.kernels.start, program.kernels.end
            before = text[:start].rstrip().removesuffix("namespace {")
            top = before + program.kernels.text + text[end:head].replace("}", "", 1)
        heads = "".join(f"{self.signature(number)};\n" for number in range(len(self.parts)))
        pieces = [top, declarations, heads, self._line(head), text[head : program.body], "\n"]
        used = self._used_in_run()
        index = 0
        for frame in [*self.frames, None]:
            stop = frame.stretch.first if frame else len(self.statements)
            for place in range(index, stop):
                statement = self.statements[place]
                if statement.kind is not Kind.REPEATED or statement.name in used:
                    pieces.append(text[statement.start : statement.end])
            if frame is None:
                break
            pieces.append("\n")
            pieces.append(frame.creation())
            for number, (owner, _) in enumerate(self.parts):
                if owner is frame:
                    pieces.append(
                        f"    run_part<{number}>({frame.variable}, input_handles, output_handles, "
                        "stream, proxy_executor);\n"
                    )
            for place in range(frame.stretch.first, frame.stretch.end):
                statement = self.statements[place]
                if statement.kind is Kind.REPEATED and statement.name in used:
                    pieces.append(f"    {self._own_text(statement)}\n")
                elif place in frame.kept and frame.kept_later(place):
                    pieces.append(
                        f"    auto& {statement.name} = {frame.place(place, frame.variable)};\n"
                    )
            index = frame.stretch.end
            if index < len(self.statements):
                pieces.append(self._line(self.statements[index].start))
        last = self.statements[-1].end
        return "".join(pieces) + text[last:]

    def _used_in_run(self) -> set[str]:
        """The names that statements use which stay in `run_impl`."""
        taken = [range(frame.stretch.first, frame.stretch.end) for frame in self.frames]
        words: set[str] = set()
        for index, statement in enumerate(self.statements):
            if statement.kind is not Kind.REPEATED and not any(index in part for part in taken):
                words |= statement.words
        return words


class _Frame:
    """What the functions of a stretch share: all that outlives the one that declares it."""

    def __init__(self, number: int, writer: _Writer, stretch: _Stretch) -> None:
        self.writer, self.stretch = writer, stretch
        self.name = f"InductorExtFrame{number}"
        self.variable = f"{_FRAME}_{number}"
        statements = writer.statements
        self.last = writer.last
        indices = range(stretch.first, stretch.end)
        self.outer = [
            index
            for index in writer._needed(indices)
            if statements[index].kind is not Kind.REPEATED
        ]
        ends = [part.stop for part in stretch.parts]
        self.kept = {
            index
            for index in indices
            if statements[index].kind is Kind.TENSOR
            or (
                statements[index].kind is Kind.VALUE
                # Beyond the end of the function that declares it.
                and self.last[statements[index].name] >= ends[bisect.bisect_right(ends, index)]
            )
        }
        tensors = [i for i in sorted(self.kept) if statements[i].kind is Kind.TENSOR]
        self.tensors = {index: place for place, index in enumerate(tensors)}

    def kept_later(self, index: int) -> bool:
        """Whether something is used after the stretch."""
        return self.last[self.writer.statements[index].name] >= self.stretch.end

    def place(self, index: int, frame: str = _FRAME) -> str:
        """The expression for what statement `index` declares."""
        if index in self.tensors:
            return f"{frame}.tensors[{self.tensors[index]}]"
        return f"{frame}.{self.writer.statements[index].name}"

    def definition(self) -> str:
        """The frame's type."""
        lines = [f"struct {self.name} {{\n"]
        for index in self.outer:
            lines.append(f"    {_reference(self.writer.statements[index])};\n")
        if self.tensors:
            lines.append(f"    RAIIAtenTensorHandle tensors[{len(self.tensors)}];\n")
        for index in sorted(self.kept - self.tensors.keys()):
            statement = self.writer.statements[index]
            size = "" if statement.count is None else f"[{statement.count}]"
            lines.append(f"    {statement.type} {statement.name}{size};\n")
        return "".join(lines) + "};\n"

    def creation(self) -> str:
        """The statement of `run_impl` that makes it."""
        names = ", ".join(self.writer.statements[index].name for index in self.outer)
        return f"    {self.name} {self.variable}{{{names}}};\n"

    def rewritten(self, index: int) -> str:
        """The text of a statement, on as many lines, with what it declares in the frame."""
        statement, text = self.writer.statements[index], self.writer.program.text
        whole = text[statement.start : statement.end]
        if index not in self.kept:
            return whole
        comments = text[statement.start : statement.first]
        if statement.count is not None:
            place = self.place(index)
            name = statement.name
            return f"{whole} std::copy({name}, {name} + {statement.count}, {place});"
        declared = f"auto& {statement.name} = "
        if statement.kind is Kind.TENSOR and statement.value is not None:
            # In the place of an empty one, which owns nothing that would have to be destroyed.
            owner = f"*new (&{self.place(index)}) RAIIAtenTensorHandle({statement.value});"
            return f"{comments}{declared}{owner}"
        declared += f"{self.place(index)};"
        if statement.value is not None:
            declared += f" {statement.name} = {statement.value};"
        return comments + declared


def _reference(statement: Statement) -> str:
    """The declaration of a reference to what the statement declares."""
    if statement.kind is Kind.TENSOR:
        return f"RAIIAtenTensorHandle& {statement.name}"
    type_ = f"{'const ' if statement.constant else ''}{statement.type}"
    if statement.count is not None:
        return f"{type_} (&{statement.name})[{statement.count}]"
    return f"{type_}& {statement.name}"


def _last_uses(statements: Sequence[Statement]) -> dict[str, int]:
    """Index of the last statement that has the name, by name."""
    return {word: index for index, statement in enumerate(statements) for word in statement.words}


def _namespace(text: str) -> str:
    return f"namespace {_NAMESPACE} {{\n{text}}}\n"
