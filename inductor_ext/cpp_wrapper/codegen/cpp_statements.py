"""Parse a generated C++ function body into statements, and classify what each of them declares.

`read_statements` splits a function body into its top-level statements and determines what each
declares, if anything (`Kind`). It recognizes what torch's C++ wrapper codegen writes. Other
statements are classified as unknown (`Kind.OTHER`); text that cannot be parsed reliably raises
`NotUnderstoodError`, which the caller handles: no user sees it. Pure: imports only the standard
library.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

__all__ = [
    "OPENING",
    "WORD",
    "Kind",
    "NotUnderstoodError",
    "Statement",
    "Token",
    "likely_name",
    "read_statements",
    "tokenize",
]


class NotUnderstoodError(Exception):
    """The text cannot be parsed reliably."""


class Token(NamedTuple):
    """An identifier, a number, an operator or a quoted literal, with its position in the text."""

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

OPENING = {"(": ")", "[": "]", "{": "}"}


def tokenize(text: str, start: int, end: int) -> list[Token]:
    """Tokenize `text[start:end]`, dropping whitespace and comments.

    Raises:
        NotUnderstoodError: a quote is not terminated.
    """
    found: list[Token] = []
    position = start
    for match in _TOKEN.finditer(text[:end], start):
        if match.start() != position:
            break
        position = match.end()
        if match[1]:
            found.append(Token(match[1], match.start(1), position))
    if position != end:
        # An unterminated quote.
        raise NotUnderstoodError
    return found


def _pairs(tokens: Sequence[Token]) -> dict[int, int]:
    """Map the index of each opening bracket to the index of the matching closing one."""
    pairs: dict[int, int] = {}
    open_: list[int] = []
    for index, token in enumerate(tokens):
        if token.text in OPENING:
            open_.append(index)
        elif token.text in OPENING.values():
            if not open_ or OPENING[tokens[open_[-1]].text] != token.text:
                raise NotUnderstoodError
            pairs[open_.pop()] = index
    if open_:
        raise NotUnderstoodError
    return pairs


class _Reader:
    """Finder of statement boundaries."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self.tokens, self.pairs = tokens, _pairs(tokens)

    def statement(self, index: int) -> int:
        """Return the index past the statement that begins at `index`."""
        match self.text(index):
            case "{":
                return self.pairs[index] + 1
            case "if":
                index = self.statement(self.condition(index + (self.text(index + 1) != "(") + 1))
                return self.statement(index + 1) if self.text(index, "") == "else" else index
            case "while" | "for" | "switch":
                return self.statement(self.condition(index + 1))
            case "do" | "try" | "else" | "case" | "default":
                raise NotUnderstoodError
        while self.text(index) != ";":
            index = self.pairs.get(index, index) + 1
        return index + 1

    def condition(self, index: int) -> int:
        """Return the index past the parenthesized condition that opens at `index`."""
        if self.text(index) != "(":
            raise NotUnderstoodError
        return self.pairs[index] + 1

    def text(self, index: int, default: str | None = None) -> str:
        """Return the token at `index`."""
        if index < len(self.tokens):
            return self.tokens[index].text
        if default is None:
            raise NotUnderstoodError
        return default


class Kind(enum.Enum):
    """What a statement declares, if anything, and how the declared object may be handled."""

    PLAIN = enum.auto()
    """No declaration."""
    TENSOR = enum.auto()
    """An owning tensor handle."""
    VALUE = enum.auto()
    """A number or a handle, or an array of them, which may be copied."""
    LOCAL = enum.auto()
    """An object without a destructor that cannot be moved out of its function."""
    REPEATED = enum.auto()
    """A declaration that may be repeated wherever it is needed."""
    OTHER = enum.auto()
    """Unknown: it may declare anything, and must stay in its function."""


@dataclasses.dataclass
class Statement:
    """A top-level statement of `run_impl`."""

    start: int
    """Where its text begins, including preceding comments."""
    first: int
    """Where the statement itself begins."""
    end: int
    kind: Kind
    words: frozenset[str]
    """Its identifiers."""
    weight: int
    """Number of statements that it consists of."""
    name: str = ""
    type: str = ""
    """C++ type of a VALUE, without const."""
    count: int | None = None
    """Number of elements, if it declares an array."""
    value: str | None = None
    """Initializer of a TENSOR or a VALUE, if any."""
    constant: bool = False
    """Whether it is declared const."""
    stays: bool = False
    """Whether it stays in `run_impl`."""


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
WORD = re.compile(r"[A-Za-z_]\w*")


class _Classifier:
    """Classifier of successive statements, which uses the declarations seen so far."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.declared: dict[str, Statement] = {}
        self.stolen: set[str] = set()
        """Vectors of owning tensor handles."""

    def __call__(self, tokens: Sequence[Token], start: int) -> Statement:
        """Return the statement of these tokens, whose text begins at `start`."""
        line = " ".join(token.text for token in tokens)
        statement = Statement(
            start=start,
            first=tokens[0].start,
            end=tokens[-1].end,
            kind=Kind.OTHER,
            words=frozenset(word for word in (t.text for t in tokens) if WORD.match(word)),
            weight=max(1, sum(token.text == ";" for token in tokens)),
        )
        self._classify(statement, tokens, line)
        if statement.kind is Kind.OTHER or not _LEAVING.isdisjoint(statement.words):
            statement.stays = True
        if statement.name:
            if statement.name in self.declared:
                raise NotUnderstoodError
            self.declared[statement.name] = statement
        return statement

    def _classify(self, statement: Statement, tokens: Sequence[Token], line: str) -> None:
        first = tokens[0].text
        if first in _COMPOUND or first == ";" or line.startswith("throw "):
            statement.kind = Kind.PLAIN
        elif name := _repeated_name(line):
            statement.kind, statement.weight, statement.name = Kind.REPEATED, 0, name
        elif self._owner(statement, tokens, line) or self._value(statement, tokens, line):
            pass
        elif (match := _POINTER.match(line)) and not _several(tokens):
            statement.kind, statement.name = Kind.LOCAL, match[1]
        elif _declares_nothing(line):
            statement.kind = Kind.PLAIN
        else:
            statement.name = likely_name(tokens)
            if "= steal_from_raw_handles_to_raii_handles (" in line:
                self.stolen.add(statement.name)

    def _owner(self, statement: Statement, tokens: Sequence[Token], line: str) -> bool:
        """Whether it declares an owning tensor handle; fills in the statement if so."""
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
                if not (self._is(moved[1], Kind.TENSOR) or moved[2] in self.stolen):
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
        statement.kind, statement.value, statement.name = Kind.TENSOR, value, match[1]
        return True

    def _value(self, statement: Statement, tokens: Sequence[Token], line: str) -> bool:
        """Whether it declares a copyable value; fills in the statement if so."""
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
            if self._is(match[2], Kind.VALUE) and self.declared[match[2]].count is None:
                statement.type = self.declared[match[2]].type
            elif (member := _MEMBER.fullmatch(match[2])) and self._is(member[1], Kind.TENSOR):
                statement.type = "int64_t*" if member[2] in ("sizes", "strides") else "int64_t"
            else:
                statement.value = None
                return False
        else:
            return False
        statement.kind = Kind.VALUE
        statement.name = match[3] if match.re in (_ARRAY, _VALUE) else match[1]
        return True

    def _is(self, name: str | None, kind: Kind) -> bool:
        return name in self.declared and self.declared[name].kind is kind


def _repeated_name(line: str) -> str | None:
    """Return the name that a repeatable declaration declares; None for any other statement."""
    matches = (pattern.fullmatch(line) for pattern in _REPEATED)
    return next((match[1] for match in matches if match), None)


def _declares_nothing(line: str) -> bool:
    """Whether it is a call or an assignment."""
    match = _CALL.match(line)
    if match is None:
        match = _ASSIGNMENT.match(line)
        return match is not None and not _KEYWORD.fullmatch(match[1])
    # Unknown macros may expand to declarations.
    known = match[1] in _CHECKS or not match[1].isupper()
    return known and not _KEYWORD.fullmatch(match[1])


def _is_call(tokens: Sequence[Token], index: int) -> bool:
    """Whether the tokens from `index` on are exactly a name, its arguments and a semicolon."""
    if tokens[index + 1].text != "(":
        return False
    depth = 0
    for position in range(index + 1, len(tokens)):
        depth += (tokens[position].text in OPENING) - (tokens[position].text in OPENING.values())
        if depth == 0:
            return position == len(tokens) - 2
    return False


def _several(tokens: Sequence[Token]) -> bool:
    """Whether there are commas outside all brackets, as between several declarators."""
    depth = 0
    for token in tokens:
        depth += (token.text in OPENING) - (token.text in OPENING.values())
        if depth == 0 and token.text == ",":
            return True
    return False


def _elements(tokens: Sequence[Token]) -> int:
    """Return the number of elements of an initializer list."""
    if not tokens:
        return 0
    depth, commas = 0, 0
    for token in tokens:
        depth += (token.text in OPENING) - (token.text in OPENING.values())
        commas += depth == 0 and token.text == ","
    return commas + (tokens[-1].text != ",")


def likely_name(tokens: Sequence[Token]) -> str:
    """Return the name that a declaration of unknown kind declares: the one before its value."""
    for before, token in itertools.pairwise(tokens):
        if token.text in ("=", "(", "{", "[", ";") and WORD.match(before.text):
            if _KEYWORD.fullmatch(before.text):
                break
            return before.text
    raise NotUnderstoodError


def read_statements(text: str, start: int, end: int) -> list[Statement]:
    """Return the statements of a function body, `text[start:end]`.

    Raises:
        NotUnderstoodError: see the module docstring.
    """
    tokens = tokenize(text, start, end)
    _check_types(tokens)
    reader, classify = _Reader(tokens), _Classifier(text)
    found: list[Statement] = []
    index = 0
    while index < len(tokens):
        behind = reader.statement(index)
        found.append(classify(tokens[index:behind], found[-1].end if found else start))
        index = behind
    return found


def _check_types(tokens: Sequence[Token]) -> None:
    """Reject directives, and code that can distinguish a reference from its referent."""
    for index, token in enumerate(tokens):
        if token.text == "#":
            raise NotUnderstoodError
        if token.text == "decltype":
            before = [tokens[place].text for place in range(max(0, index - 4), index)]
            if before != ["std", "::", "decay_t", "<"]:
                raise NotUnderstoodError
