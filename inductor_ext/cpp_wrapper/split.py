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
import enum
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

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
    except _NotUnderstoodError:
        return [text]


class _NotUnderstoodError(Exception):
    """The text is not one that can be split for certain."""


# --- reading -------------------------------------------------------------------------------------


class _Token(NamedTuple):
    text: str
    start: int
    end: int


_TOKEN = re.compile(
    r"""
    (?: \s+ | //[^\n]* | /\*.*?\*/ )*
    (
        R"(?P<mark>[^()\\\s]{0,16})\(.*?\)(?P=mark)"
        | "(?:[^"\\\n]|\\.)*"
        | '(?:[^'\\\n]|\\.)+'
        | [A-Za-z_]\w*
        | \.?\d(?:[eEpP][+-]|[\w.'])*
        | :: | -> | [^\s"']
        | \Z
    )
    """,
    re.VERBOSE | re.DOTALL,
)

_OPENING = {"(": ")", "[": "]", "{": "}"}


def _tokens(text: str, start: int, end: int) -> list[_Token]:
    """The text's tokens without spaces and comments."""
    found: list[_Token] = []
    position = start
    for match in _TOKEN.finditer(text[:end], start):
        if match.start() != position:
            break
        position = match.end()
        if match[1]:
            found.append(_Token(match[1], match.start(1), position))
    if position != end:
        # A quote without its end.
        raise _NotUnderstoodError
    return found


def _pairs(tokens: Sequence[_Token]) -> dict[int, int]:
    """Index of each opening bracket -> index of the one that closes it."""
    pairs: dict[int, int] = {}
    open_: list[int] = []
    for index, token in enumerate(tokens):
        if token.text in _OPENING:
            open_.append(index)
        elif token.text in _OPENING.values():
            if not open_ or _OPENING[tokens[open_[-1]].text] != token.text:
                raise _NotUnderstoodError
            pairs[open_.pop()] = index
    if open_:
        raise _NotUnderstoodError
    return pairs


class _Reader:
    """Finds where statements end."""

    def __init__(self, tokens: Sequence[_Token]) -> None:
        self.tokens, self.pairs = tokens, _pairs(tokens)

    def statement(self, index: int) -> int:
        """The index behind the statement that begins at `index`."""
        match self.text(index):
            case "{":
                return self.pairs[index] + 1
            case "if":
                index = self.statement(self.condition(index + (self.text(index + 1) != "(") + 1))
                return self.statement(index + 1) if self.text(index, "") == "else" else index
            case "while" | "for" | "switch":
                return self.statement(self.condition(index + 1))
            case "do" | "try" | "else" | "case" | "default":
                raise _NotUnderstoodError
        while self.text(index) != ";":
            index = self.pairs.get(index, index) + 1
        return index + 1

    def condition(self, index: int) -> int:
        """The index behind the parenthesis that opens at `index`."""
        if self.text(index) != "(":
            raise _NotUnderstoodError
        return self.pairs[index] + 1

    def text(self, index: int, default: str | None = None) -> str:
        """The token at `index`."""
        if index < len(self.tokens):
            return self.tokens[index].text
        if default is None:
            raise _NotUnderstoodError
        return default


class _Kind(enum.Enum):
    PLAIN = enum.auto()
    """It declares nothing."""
    TENSOR = enum.auto()
    """It declares a tensor's owner."""
    VALUE = enum.auto()
    """It declares a number or a handle, or an array of them, which may be copied."""
    LOCAL = enum.auto()
    """It declares something that is not destroyed, but has to stay where it is."""
    REPEATED = enum.auto()
    """It declares what may be declared again wherever it is needed."""
    OTHER = enum.auto()
    """It may declare anything, and has to stay in the function it is in."""


@dataclasses.dataclass
class _Statement:
    """A statement of `run_impl` that is in no other."""

    start: int
    """Where its text begins, with the comments before it."""
    first: int
    """Where its own text begins."""
    end: int
    kind: _Kind
    words: frozenset[str]
    """Its identifiers."""
    weight: int
    """How many statements it consists of."""
    name: str = ""
    type: str = ""
    """Of a VALUE, without const."""
    count: int | None = None
    """Of the elements, if it is an array."""
    value: str | None = None
    """What a TENSOR or a VALUE is initialised with, if anything."""
    constant: bool = False
    """Declared const."""
    stays: bool = False
    """It is left in `run_impl`."""


_NUMBER = (
    r"(?:(?:std :: )?u?int(?:8|16|32|64)_t|(?:std :: )?size_t|double|float|bool|int|long|char)"
)
_UNUSED = r"(?:\[ \[ maybe_unused \] \] )?"
_LITERALS = r"(?:[-+{},] |\.?\d[\w.+-]* |true |false )*"

_TABLE = r"(?:static constexpr|static const|constexpr|const)"

_REPEATED = [
    re.compile(pattern)
    for pattern in (
        rf"{_UNUSED}auto & (\w+) = constants_ -> at \( \d+ \) ;",
        rf"{_UNUSED}auto & (\w+) = static_cast < \w+ & > \( \* this -> kernels_ \. get \( \) \) ;",
        rf"{_TABLE} {_NUMBER} (\w+) \[ (?:\d+ )?\] = \{{ {_LITERALS}\}} ;",
        rf"{_TABLE} {_NUMBER} \* (\w+) = nullptr ;",
    )
]

_OWNER = re.compile(r"RAIIAtenTensorHandle (\w+) (;|=|\()")
_DEDUCED = re.compile(r"auto (\w+) = (.*) ;")
_VALUE = re.compile(rf"(const )?({_NUMBER}|AtenTensorHandle) (\w+) (;|=)")
_ARRAY = re.compile(rf"(const )?({_NUMBER}|AtenTensorHandle) (\w+) \[ (?:\d+ )?\] = \{{")
_POINTER = re.compile(
    rf"(?:const )?(?:{_NUMBER}|AtenTensorHandle|void|auto) (?:const )?(?:\* (?:const )?)+(\w+) "
    r"(?:\[ (?:\d+ )?\] )?[;=]"
)
_DATA = re.compile(r"auto \* (\w+) = (get_data_ptr_wrapper \( \w+ \)) ;")
_MOVED = re.compile(r"std :: move \( (?:(\w+)|(\w+) \[ \d+ \]) \)")
_MEMBER = re.compile(r"(\w+) \. (size|stride|storage_offset|sizes|strides) \( (?:\w+ )?\)")

_CALL = re.compile(r"(\w+)(?: :: \w+)* \(")
_ASSIGNMENT = re.compile(r"(\w+) (?:[-+*/]?=|\[|\.|->)")
_CHECKS = frozenset({"AOTI_TORCH_ERROR_CODE_CHECK", "AOTI_TORCH_CHECK"})
_COMPOUND = frozenset({"{", "if", "while", "for", "switch"})
_LEAVING = frozenset({"return", "goto", "co_return", "co_await", "co_yield", "asm"})
_KEYWORD = re.compile(
    "alignas|auto|class|const|constexpr|decltype|delete|enum|extern|friend|namespace|new|operator|"
    "register|sizeof|static|struct|template|thread_local|throw|typedef|typename|union|using|"
    "volatile|RAIIAtenTensorHandle|AtenTensorHandle"
)
_WORD = re.compile(r"[A-Za-z_]\w*")


class _Classifier:
    """Tells of statement after statement what kind it is of, knowing what was declared before."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.declared: dict[str, _Statement] = {}
        self.stolen: set[str] = set()
        """Vectors of tensors' owners."""

    def __call__(self, tokens: Sequence[_Token], start: int) -> _Statement:
        """The statement of these tokens, of which the text begins at `start`."""
        line = " ".join(token.text for token in tokens)
        statement = _Statement(
            start=start,
            first=tokens[0].start,
            end=tokens[-1].end,
            kind=_Kind.OTHER,
            words=frozenset(word for word in (t.text for t in tokens) if _WORD.match(word)),
            weight=max(1, sum(token.text == ";" for token in tokens)),
        )
        self._classify(statement, tokens, line)
        if statement.kind is _Kind.OTHER or not _LEAVING.isdisjoint(statement.words):
            statement.stays = True
        if statement.name:
            if statement.name in self.declared:
                raise _NotUnderstoodError
            self.declared[statement.name] = statement
        return statement

    def _classify(self, statement: _Statement, tokens: Sequence[_Token], line: str) -> None:
        first = tokens[0].text
        if first in _COMPOUND or first == ";" or line.startswith("throw "):
            statement.kind = _Kind.PLAIN
        elif name := _repeated_name(line):
            statement.kind, statement.weight, statement.name = _Kind.REPEATED, 0, name
        elif self._owner(statement, tokens, line) or self._value(statement, tokens, line):
            pass
        elif (match := _POINTER.match(line)) and not _several(tokens):
            statement.kind, statement.name = _Kind.LOCAL, match[1]
        elif _declares_nothing(line):
            statement.kind = _Kind.PLAIN
        else:
            statement.name = _likely_name(tokens)
            if "= steal_from_raw_handles_to_raii_handles (" in line:
                self.stolen.add(statement.name)

    def _owner(self, statement: _Statement, tokens: Sequence[_Token], line: str) -> bool:
        """Whether it declares a tensor's owner."""
        value: str | None
        if match := _OWNER.match(line):
            value = None
            if match[2] == "(":
                if not _is_call(tokens, 1):
                    return False
                value = self.text[tokens[2].end : tokens[-2].start]
            elif match[2] == "=":
                if _several(tokens):
                    return False
                value = self.text[tokens[2].end : tokens[-1].start].strip()
        elif match := _DEDUCED.fullmatch(line):
            value = self.text[tokens[2].end : tokens[-1].start].strip()
            if moved := _MOVED.fullmatch(match[2]):
                if not (self._is(moved[1], _Kind.TENSOR) or moved[2] in self.stolen):
                    return False
            elif tokens[3].text == "RAIIAtenTensorHandle":
                if not _is_call(tokens, 3):
                    return False
            elif not (
                tokens[3].text == "wrap_with_raii_handle_if_needed"
                and _is_call(tokens, 3)
                and tokens[5].text == "reinterpret_tensor_wrapper"
                and _is_call([*tokens[:-2], tokens[-1]], 5)
            ):
                return False
        else:
            return False
        statement.kind, statement.value, statement.name = _Kind.TENSOR, value, match[1]
        return True

    def _value(self, statement: _Statement, tokens: Sequence[_Token], line: str) -> bool:
        """Whether it declares something that may be copied."""
        if _several(tokens):
            return False
        if match := _ARRAY.match(line):
            opening = next(index for index, token in enumerate(tokens) if token.text == "{")
            statement.count = _elements(tokens[opening + 1 : -2])
            if tokens[-2].text != "}" or not statement.count:
                statement.count = None
                return False
            statement.type, statement.constant = match[2], bool(match[1])
        elif match := _VALUE.match(line):
            statement.type, statement.constant = match[2], bool(match[1])
            if match[4] == "=":
                equals = next(token for token in tokens if token.text == "=")
                statement.value = self.text[equals.end : tokens[-1].start].strip()
        elif match := _DATA.fullmatch(line):
            statement.type, statement.value = "void*", match[2]
        elif match := _DEDUCED.fullmatch(line):
            statement.value = self.text[tokens[2].end : tokens[-1].start].strip()
            if self._is(match[2], _Kind.VALUE) and self.declared[match[2]].count is None:
                statement.type = self.declared[match[2]].type
            elif (member := _MEMBER.fullmatch(match[2])) and self._is(member[1], _Kind.TENSOR):
                statement.type = "int64_t*" if member[2] in ("sizes", "strides") else "int64_t"
            else:
                statement.value = None
                return False
        else:
            return False
        statement.kind = _Kind.VALUE
        statement.name = match[3] if match.re in (_ARRAY, _VALUE) else match[1]
        return True

    def _is(self, name: str | None, kind: _Kind) -> bool:
        return name in self.declared and self.declared[name].kind is kind


def _repeated_name(line: str) -> str | None:
    """What a statement declares that may be repeated, if it is one."""
    matches = (pattern.fullmatch(line) for pattern in _REPEATED)
    return next((match[1] for match in matches if match), None)


def _declares_nothing(line: str) -> bool:
    """Whether it is a call or an assignment."""
    match = _CALL.match(line)
    if match is None:
        match = _ASSIGNMENT.match(line)
        return match is not None and not _KEYWORD.fullmatch(match[1])
    # Other macros may expand to declarations.
    known = match[1] in _CHECKS or not match[1].isupper()
    return known and not _KEYWORD.fullmatch(match[1])


def _is_call(tokens: Sequence[_Token], index: int) -> bool:
    """Whether the tokens from `index` to the last are a name, arguments and a semicolon."""
    if tokens[index + 1].text != "(":
        return False
    depth = 0
    for position in range(index + 1, len(tokens)):
        depth += (tokens[position].text in _OPENING) - (tokens[position].text in _OPENING.values())
        if depth == 0:
            return position == len(tokens) - 2
    return False


def _several(tokens: Sequence[_Token]) -> bool:
    """Whether there are commas outside all brackets, as between several declarations."""
    depth = 0
    for token in tokens:
        depth += (token.text in _OPENING) - (token.text in _OPENING.values())
        if depth == 0 and token.text == ",":
            return True
    return False


def _elements(tokens: Sequence[_Token]) -> int:
    """How many elements an initialiser has."""
    if not tokens:
        return 0
    depth, commas = 0, 0
    for token in tokens:
        depth += (token.text in _OPENING) - (token.text in _OPENING.values())
        commas += depth == 0 and token.text == ","
    return commas + (tokens[-1].text != ",")


def _likely_name(tokens: Sequence[_Token]) -> str:
    """What a declaration of an unknown kind declares: the name before the first of its value."""
    for before, token in itertools.pairwise(tokens):
        if token.text in ("=", "(", "{", "[", ";") and _WORD.match(before.text):
            if _KEYWORD.fullmatch(before.text):
                break
            return before.text
    raise _NotUnderstoodError


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
    statements: list[_Statement]
    kernels: _Item | None
    """The class of the kernels, where it may be taken out of its unnamed namespace."""

    @classmethod
    def read(cls, text: str) -> _Program:
        if text.count(_RUN) != 1 or text.count(_END) != 1 or _FRAME in text:
            raise _NotUnderstoodError
        if "ArrayRefTensor" in text:
            # The same names have other types there.
            raise _NotUnderstoodError
        head = text.index(_RUN)
        body = text.index(") {", head) + 3
        end = text.index(_END)
        items, namespaces = _items(text, head)
        if namespaces != (_NAMESPACE,):
            raise _NotUnderstoodError
        statements = _statements(text, body, end)
        kernels = _kernels_item(text, items)
        private = _private_names(items, kernels)
        _keep(statements, private)
        items = [
            dataclasses.replace(item, shared=item.shared and private.isdisjoint(item.words))
            for item in items
        ]
        return cls(text, items, body, end, statements, kernels)


def _statements(text: str, start: int, end: int) -> list[_Statement]:
    tokens = _tokens(text, start, end)
    _check_types(tokens)
    reader, classify = _Reader(tokens), _Classifier(text)
    found: list[_Statement] = []
    index = 0
    while index < len(tokens):
        behind = reader.statement(index)
        found.append(classify(tokens[index:behind], found[-1].end if found else start))
        index = behind
    return found


def _check_types(tokens: Sequence[_Token]) -> None:
    """Refuse directives, and code that can tell a reference from what it refers to."""
    for index, token in enumerate(tokens):
        if token.text == "#":
            raise _NotUnderstoodError
        if token.text == "decltype":
            before = [tokens[place].text for place in range(max(0, index - 4), index)]
            if before != ["std", "::", "decay_t", "<"]:
                raise _NotUnderstoodError


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
        tokens = _tokens(text, position, stop)
        _read_items(text, tokens, namespaces, items)
        if directive is not None:
            if not _DIRECTIVE.match(directive.group()):
                # Conditions and macros could change what the text around them means.
                raise _NotUnderstoodError
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
    text: str, tokens: Sequence[_Token], namespaces: list[str], items: list[_Item]
) -> None:
    index = 0
    while index < len(tokens):
        if tokens[index].text == "}":
            if not namespaces:
                raise _NotUnderstoodError
            namespaces.pop()
            index += 1
            continue
        if tokens[index].text == ";":
            index += 1
            continue
        if tokens[index].text == "namespace":
            opening = next((i for i in range(index, len(tokens)) if tokens[i].text == "{"), None)
            if opening is None:
                raise _NotUnderstoodError
            namespaces.append("".join(token.text for token in tokens[index + 1 : opening]))
            index = opening + 1
            continue
        behind = _item_end(tokens, index)
        items.append(_item(text, tokens[index:behind], tuple(namespaces)))
        index = behind


def _item_end(tokens: Sequence[_Token], index: int) -> int:
    """The index behind the declaration or definition that begins at `index`."""
    depth = 0
    value = tokens[index].text in ("class", "struct", "enum", "union")
    for position in range(index, len(tokens)):
        word = tokens[position].text
        if word in _OPENING:
            depth += 1
        elif word in _OPENING.values():
            depth -= 1
            if depth < 0:
                raise _NotUnderstoodError
            if depth == 0 and word == "}" and not value:
                return position + 1
        elif depth == 0 and word == "=":
            value = True
        elif depth == 0 and word == ";":
            return position + 1
    raise _NotUnderstoodError


def _item(text: str, tokens: Sequence[_Token], namespaces: tuple[str, ...]) -> _Item:
    line = " ".join(token.text for token in tokens)
    words = [token.text for token in tokens if _WORD.match(token.text)]
    shared = namespaces in ((), (_NAMESPACE,))
    if tokens[0].text == "using":
        names = frozenset[str]()
    elif match := _MACRO.fullmatch(line):
        # Names end with what the macro is given: cached_torch_dtype_float32.
        names = frozenset({match[1]})
    elif tokens[0].text == "extern" and tokens[-1].text == ";" and "=" not in line:
        names = frozenset({_likely_name(tokens)})
    elif line.startswith('extern "C" {'):
        names = frozenset(
            before.text
            for before, token in itertools.pairwise(tokens)
            if token.text in ("[", "(") and _WORD.match(before.text)
        )
    elif tokens[0].text in ("class", "struct"):
        names, shared = frozenset({tokens[1].text}), False
    else:
        names = frozenset({_likely_name(_behind_template(tokens))})
        # A variable inside would be one for each unit.
        inside = re.sub(r"static constexpr|\bstatic_cast\b", "", line.removeprefix("static "))
        inside = re.sub(r"^\[ \[ maybe_unused \] \] static ", "", inside)
        inside = re.sub(r"^(template < .* > )static ", r"\1", inside)
        function = _FUNCTION.match(line) and tokens[-1].text == "}"
        shared = shared and bool(function) and not re.search(r"\bstatic\b", inside)
    start, end = tokens[0].start, tokens[-1].end
    return _Item(text[start:end], namespaces, start, end, names, shared, frozenset(words))


def _behind_template(tokens: Sequence[_Token]) -> Sequence[_Token]:
    """The tokens without a template's parameters."""
    if tokens[0].text != "template":
        return tokens
    depth = 0
    for index, token in enumerate(tokens):
        depth += (token.text == "<") - (token.text == ">")
        if index and not depth:
            return tokens[index + 1 :]
    raise _NotUnderstoodError


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


def _keep(statements: Iterable[_Statement], names: set[str]) -> None:
    """Leave in `run_impl` what uses `names`, or what such statements declare in their turn."""
    for statement in statements:
        if not names.isdisjoint(statement.words):
            statement.stays = True
            if statement.kind is _Kind.REPEATED:
                statement.kind = _Kind.OTHER
        if statement.stays and statement.kind in (_Kind.OTHER, _Kind.LOCAL) and statement.name:
            names.add(statement.name)


# --- planning ------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class _Stretch:
    """Statements that are taken out of `run_impl`: from `first` until before `end`."""

    first: int
    end: int
    parts: list[range]
    """The statements of its functions."""


def _plan(statements: list[_Statement], function: int) -> list[_Stretch]:
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
        locals_ = {s.name: home.get(i) for i, s in enumerate(statements) if s.kind is _Kind.LOCAL}
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


def _stretches(statements: Sequence[_Statement], function: int) -> Iterator[_Stretch]:
    first = 0
    for end in range(len(statements) + 1):
        if end < len(statements) and not statements[end].stays:
            continue
        if sum(statement.weight for statement in statements[first:end]) >= function:
            yield _Stretch(first, end, [])
        first = end + 1


def _parts(
    statements: Sequence[_Statement], stretch: _Stretch, last: dict[str, int], function: int
) -> list[range]:
    total = sum(statement.weight for statement in statements[stretch.first : stretch.end])
    aim = total / max(1, round(total / function))
    parts: list[range] = []
    first, weight, held = stretch.first, 0.0, -1
    for index in range(stretch.first, stretch.end):
        statement = statements[index]
        weight += statement.weight
        if statement.kind is _Kind.LOCAL:
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
            if statement.kind is _Kind.REPEATED:
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

    def _own_text(self, statement: _Statement) -> str:
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
                if statement.kind is not _Kind.REPEATED or statement.name in used:
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
                if statement.kind is _Kind.REPEATED and statement.name in used:
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
            if statement.kind is not _Kind.REPEATED and not any(index in part for part in taken):
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
            if statements[index].kind is not _Kind.REPEATED
        ]
        ends = [part.stop for part in stretch.parts]
        self.kept = {
            index
            for index in indices
            if statements[index].kind is _Kind.TENSOR
            or (
                statements[index].kind is _Kind.VALUE
                # Beyond the end of the function that declares it.
                and self.last[statements[index].name] >= ends[bisect.bisect_right(ends, index)]
            )
        }
        tensors = [i for i in sorted(self.kept) if statements[i].kind is _Kind.TENSOR]
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
        if statement.kind is _Kind.TENSOR and statement.value is not None:
            # In the place of an empty one, which owns nothing that would have to be destroyed.
            owner = f"*new (&{self.place(index)}) RAIIAtenTensorHandle({statement.value});"
            return f"{comments}{declared}{owner}"
        declared += f"{self.place(index)};"
        if statement.value is not None:
            declared += f" {statement.name} = {statement.value};"
        return comments + declared


def _reference(statement: _Statement) -> str:
    """The declaration of a reference to what the statement declares."""
    if statement.kind is _Kind.TENSOR:
        return f"RAIIAtenTensorHandle& {statement.name}"
    type_ = f"{'const ' if statement.constant else ''}{statement.type}"
    if statement.count is not None:
        return f"{type_} (&{statement.name})[{statement.count}]"
    return f"{type_}& {statement.name}"


def _last_uses(statements: Sequence[_Statement]) -> dict[str, int]:
    """Index of the last statement that has the name, by name."""
    return {word: index for index, statement in enumerate(statements) for word in statement.words}


def _namespace(text: str) -> str:
    return f"namespace {_NAMESPACE} {{\n{text}}}\n"
