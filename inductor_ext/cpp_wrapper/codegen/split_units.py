"""Split the generated C++ of a large model into several functions and translation units.

Compile time is superlinear in the length of a function: at every call that may throw, the compiler
emits the destruction of all live objects. `split` moves ranges of statements out of a model's
`run_impl` into functions (`AOTInductorModel::run_part`, declared in runtime/model.h). The functions
go into translation units of bounded size, which are compiled in parallel. Statements keep their
text and their order. What such a range declares is stored in a frame, a struct in `run_impl` that
the range's functions share, so objects are destroyed at the same time and in the same order as in
the unsplit code, including when an exception is thrown.

Only statements of known kinds are moved: declarations of tensors, handles, numbers and tables of
sizes, and statements that declare nothing. A statement of another kind (a guard, a lambda, a
return) stays in `run_impl`, as do all statements that use what it declares. If the text cannot be
parsed reliably, it is not split: splitting never makes code wrong or fails a compile. The setting
`aot_unit_size` sets the size of a unit. Pure: imports only the standard library.
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
"""Approximate statements per function; measured compile time is linear up to this length."""

_FRAME = "inductor_ext_frame"
_RUN = "void AOTInductorModel::run_impl("
_END = "} // AOTInductorModel::run_impl"
_NAMESPACE = "torch::aot_inductor"


def split(text: str, unit: int, *, function: int = FUNCTION, path: str = "") -> list[str]:
    """Split the generated C++ of a model.

    Args:
        text: the code, as the AOT wrapper codegen writes it.
        unit: approximate statements per translation unit; code with less than 1.5 times as many
            becomes one unit. 0 disables splitting.
        function: approximate statements per function.
        path: file that contains `text`, for debuggers and compiler messages; "" if there is none.

    Returns:
        The translation units, the first with all code outside the functions; `[text]` if the code
        is not split.
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


# --- parsing -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Item:
    """A declaration, definition or directive at namespace scope before `run_impl`."""

    text: str
    namespaces: tuple[str, ...]
    """Enclosing namespaces from the outermost; "" for an unnamed one."""
    start: int
    end: int
    names: frozenset[str]
    """The names it declares; empty if nothing is used by name."""
    shared: bool
    """Whether it may be repeated in several units."""
    words: frozenset[str]


@dataclasses.dataclass
class _Program:
    """Parsed C++ code of a model."""

    text: str
    items: list[_Item]
    body: int
    """Where the body of `run_impl` begins, after the opening brace."""
    end: int
    """Where the closing brace is."""
    statements: list[Statement]
    kernels: _Item | None
    """The class of the kernels, if it can be moved out of its unnamed namespace."""

    @classmethod
    def read(cls, text: str) -> _Program:
        if text.count(_RUN) != 1 or text.count(_END) != 1 or _FRAME in text:
            raise NotUnderstoodError
        if "ArrayRefTensor" in text:
            # With ArrayRefTensor, the same names have other types.
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
    """Return the items before `run_impl`, and the namespaces that enclose it."""
    items: list[_Item] = []
    namespaces: list[str] = []
    position = 0
    for directive in [*re.finditer(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", text[:end], re.M), None]:
        stop = directive.start() if directive else end
        tokens = tokenize(text, position, stop)
        _read_items(text, tokens, namespaces, items)
        if directive is not None:
            if not _DIRECTIVE.match(directive.group()):
                # Conditionals and macros could change the meaning of the surrounding code.
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
    """Return the index past the declaration or definition that begins at `index`."""
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
        # Names end with the macro's argument: cached_torch_dtype_float32.
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
        # A static variable inside would be duplicated in each unit.
        inside = re.sub(r"static constexpr|\bstatic_cast\b", "", line.removeprefix("static "))
        inside = re.sub(r"^\[ \[ maybe_unused \] \] static ", "", inside)
        inside = re.sub(r"^(template < .* > )static ", r"\1", inside)
        function = _FUNCTION.match(line) and tokens[-1].text == "}"
        shared = shared and bool(function) and not re.search(r"\bstatic\b", inside)
    start, end = tokens[0].start, tokens[-1].end
    return _Item(text[start:end], namespaces, start, end, names, shared, frozenset(words))


def _behind_template(tokens: Sequence[Token]) -> Sequence[Token]:
    """Return the tokens after a template's parameter list."""
    if tokens[0].text != "template":
        return tokens
    depth = 0
    for index, token in enumerate(tokens):
        depth += (token.text == "<") - (token.text == ">")
        if index and not depth:
            return tokens[index + 1 :]
    raise NotUnderstoodError


def _kernels_item(text: str, items: Sequence[_Item]) -> _Item | None:
    """Return the class of the kernels, if nothing else is in its unnamed namespace."""
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
    """Return names declared before `run_impl` that are usable in its own unit only."""
    private: set[str] = set()
    waiting = [item for item in items if item is not kernels]
    while True:
        found = [item for item in waiting if not item.shared or item.words & private]
        if not found:
            return private
        waiting = [item for item in waiting if item not in found]
        for item in found:
            # Other code refers to it through its namespace.
            outside = item.namespaces[:1] not in ((), (_NAMESPACE,), ("",))
            private |= set(item.namespaces[:1]) if outside else item.names


def _keep(statements: Iterable[Statement], names: set[str]) -> None:
    """Keep statements that use `names`, and users of what these declare, in `run_impl`."""
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
    """A range of statements that is moved out of `run_impl`: `first` up to, excluding, `end`."""

    first: int
    end: int
    parts: list[range]
    """The statements of each of its functions."""


def _plan(statements: list[Statement], function: int) -> list[_Stretch]:
    """Return the ranges to move; empty if the code is too short for that."""
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
        # An immovable object may be used only in the range that declares it, if one does.
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
        # Slightly below the target counts as full, so that rounding leaves no small remainder.
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
    """Writer of a model's translation units by a plan."""

    def __init__(self, program: _Program, plan: Sequence[_Stretch], path: str) -> None:
        self.program, self.plan, self.path = program, plan, path
        self.statements = program.statements
        self.last = _last_uses(self.statements)
        self.declared = {s.name: i for i, s in enumerate(self.statements) if s.name}
        self.frames = [_Frame(number, self, stretch) for number, stretch in enumerate(plan, 1)]
        self.parts = [(frame, indices) for frame in self.frames for indices in frame.stretch.parts]

    def units(self, size: int) -> list[str]:
        """Return the units, of about `size` statements each; the first contains `run_impl`."""
        weights = [sum(self.statements[i].weight for i in indices) for _, indices in self.parts]
        total = sum(weights)
        count = max(1, round(total / size))
        if count == 1:
            # Keep the functions in the unit of `run_impl`: at this size they alone save enough.
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
        """Return the signature of function `number`."""
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
        """Return the statements before `indices` that declare names used there."""
        words = frozenset().union(*(self.statements[index].words for index in indices))
        found = (self.declared[word] for word in words if word in self.declared)
        return sorted(index for index in found if index < indices.start)

    def _own_text(self, statement: Statement) -> str:
        return self.program.text[statement.first : statement.end]

    def _line(self, position: int) -> str:
        """Return a #line directive for the text at `position`."""
        if not self.path:
            return ""
        number = self.program.text.count("\n", 0, position) + 1
        path = self.path.replace("\\", "\\\\").replace('"', '\\"')
        return f'#line {number} "{path}"\n'

    # --- units ---

    def _unit(self, declarations: str, functions: Iterable[str], numbers: Iterable[int]) -> str:
        """Return a unit with only functions, and the namespace-scope items that they use."""
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
        """Return the shared items that `words` name, and all items that these use in turn."""
        # Dtype names may contain underscores.
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
        """Return the unit with `run_impl`."""
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
        """Return the names used by statements that stay in `run_impl`."""
        taken = [range(frame.stretch.first, frame.stretch.end) for frame in self.frames]
        words: set[str] = set()
        for index, statement in enumerate(self.statements):
            if statement.kind is not Kind.REPEATED and not any(index in part for part in taken):
                words |= statement.words
        return words


class _Frame:
    """The struct that a range's functions share: all that outlives the declaring function."""

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
                # Used past the end of the function that declares it.
                and self.last[statements[index].name] >= ends[bisect.bisect_right(ends, index)]
            )
        }
        tensors = [i for i in sorted(self.kept) if statements[i].kind is Kind.TENSOR]
        self.tensors = {index: place for place, index in enumerate(tensors)}

    def kept_later(self, index: int) -> bool:
        """Whether what statement `index` declares is used after the range."""
        return self.last[self.writer.statements[index].name] >= self.stretch.end

    def place(self, index: int, frame: str = _FRAME) -> str:
        """Return the C++ expression for what statement `index` declares."""
        if index in self.tensors:
            return f"{frame}.tensors[{self.tensors[index]}]"
        return f"{frame}.{self.writer.statements[index].name}"

    def definition(self) -> str:
        """Return the struct's definition."""
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
        """Return the statement of `run_impl` that creates the frame."""
        names = ", ".join(self.writer.statements[index].name for index in self.outer)
        return f"    {self.name} {self.variable}{{{names}}};\n"

    def rewritten(self, index: int) -> str:
        """Return a statement's text with the declared object in the frame; line count is kept."""
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
            # Replaces an empty handle, which owns nothing that would have to be destroyed.
            owner = f"*new (&{self.place(index)}) RAIIAtenTensorHandle({statement.value});"
            return f"{comments}{declared}{owner}"
        declared += f"{self.place(index)};"
        if statement.value is not None:
            declared += f" {statement.name} = {statement.value};"
        return comments + declared


def _reference(statement: Statement) -> str:
    """Return the declaration of a reference to what the statement declares."""
    if statement.kind is Kind.TENSOR:
        return f"RAIIAtenTensorHandle& {statement.name}"
    type_ = f"{'const ' if statement.constant else ''}{statement.type}"
    if statement.count is not None:
        return f"{type_} (&{statement.name})[{statement.count}]"
    return f"{type_}& {statement.name}"


def _last_uses(statements: Sequence[Statement]) -> dict[str, int]:
    """Map each name to the index of the last statement that contains it."""
    return {word: index for index, statement in enumerate(statements) for word in statement.words}


def _namespace(text: str) -> str:
    return f"namespace {_NAMESPACE} {{\n{text}}}\n"
