"""Split the lines of a generated C++ function into statements, and find what each one declares.

torch's C++ wrapper codegen passes every line as text. A block begins with a line that ends with "{"
and ends with a line that begins with "}"; declarations are matched by their form. A statement of
another form gets `Kind.OTHER`. Pure: imports only the standard library.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Iterable, Mapping


class UnknownCodeError(Exception):
    """The code has a form that torch's codegen does not write; the caller handles it."""


class Kind(enum.Enum):
    """What a statement declares."""

    NOTHING = enum.auto()
    """It is a call, an assignment or a block."""
    TENSOR = enum.auto()
    """An owning tensor handle."""
    VALUE = enum.auto()
    """A number, a pointer or a handle."""
    ARRAY = enum.auto()
    """An array of numbers or handles, which is only read."""
    REPEATED = enum.auto()
    """A name for something that outlives the call; the statement may be repeated."""
    OTHER = enum.auto()
    """Unknown."""


@dataclasses.dataclass
class Statement:
    """A statement of the function itself, not of a block in it."""

    line: int
    """Number of its first line in the file, or that of the comments before it."""
    comments: str
    """The lines before it that are only comments."""
    code: str
    kind: Kind = Kind.OTHER
    type: str = ""
    """C++ type of the variable that it declares; of an element for an ARRAY."""
    name: str = ""
    value: str | None = None
    """C++ initializer of the variable."""
    rest: str = ""
    """What follows the declaration in `code`: calls of `reset`, and a comment."""
    stays: bool = False
    """Whether it cannot be moved into another function."""

    def __post_init__(self) -> None:
        self.words = frozenset(re.findall(r"[A-Za-z_]\w*", self.code))

    @property
    def weight(self) -> int:
        """The number of statements in it, including itself."""
        return 0 if self.kind is Kind.REPEATED else max(1, self.code.count(";"))


_NUMBER = r"(?:(?:std::)?(?:u?int(?:8|16|32|64)_t|size_t)|double|float|bool|int|long|char)"
_TYPE = rf"(?:const )?(?:{_NUMBER}|AtenTensorHandle|void)"
_NAME = r"(?P<name>\w+)"
# A comma separates declarators if the next one has a value.
_VALUE = r"(?P<value>(?:(?! = )[^;])*)"
_OWNER = r"RAIIAtenTensorHandle"
_KERNELS = r"static_cast<\w+&>\(\*this->kernels_\.get\(\)\)"

_DECLARATIONS = [
    (kind, type_, re.compile(rf"\s*{form};(?P<rest>(?: \w+\.reset\(\);)*(?:\s*//.*)?)"))
    for kind, type_, form in (
        (Kind.REPEATED, "", rf"(?:\[\[maybe_unused\]\] )?auto& {_NAME} = constants_->at\(\d+\)"),
        (Kind.REPEATED, "", rf"(?:\[\[maybe_unused\]\] )?auto& {_NAME} = {_KERNELS}"),
        (Kind.REPEATED, "", rf"static const(?:expr)? {_NUMBER} {_NAME}\[\] = \{{[^;]*\}}"),
        (Kind.REPEATED, "", rf"(?:static )?const(?:expr)? {_NUMBER} \*{_NAME}=nullptr"),
        (Kind.TENSOR, _OWNER, rf"{_OWNER} {_NAME}(?: = {_VALUE})?"),
        (Kind.TENSOR, _OWNER, rf"{_OWNER} {_NAME}\((?P<value>[^;]*)\)"),
        (Kind.TENSOR, _OWNER, rf"auto {_NAME} = (?P<value>std::move\(\w+(?:\[\d+\])?\))"),
        (Kind.TENSOR, _OWNER, rf"auto {_NAME} = (?P<value>{_OWNER}\([^;.]*\))"),
        (Kind.TENSOR, _OWNER, rf"auto {_NAME} = (?=wrap_with_raii_handle_if_needed\(){_VALUE}"),
        (Kind.VALUE, "", rf"(?P<type>{_TYPE}(?: ?\*)*) ?\b{_NAME}(?: = {_VALUE})?"),
        (Kind.VALUE, "int64_t", rf"auto {_NAME} = (?P<value>\w+\.(?:size|stride)\(\d+\))"),
        (Kind.VALUE, "int64_t*", rf"auto {_NAME} = (?P<value>\w+\.(?:sizes|strides)\(\))"),
        (Kind.VALUE, "void*", rf"auto\* {_NAME} = (?P<value>get_data_ptr_wrapper\(\w+\))"),
        (Kind.VALUE, "", rf"auto {_NAME} = (?P<value>\w+)"),
        (Kind.ARRAY, "", rf"(?P<type>{_TYPE}) {_NAME}\[\] = \{{(?P<value>[^;]*)\}}"),
    )
]

# Unknown macros may expand to declarations.
_MACRO = "AOTI_TORCH_(?:ERROR_CODE_)?CHECK|INDUCTOR_EXT_CALL_OPERATOR"
_CALL = rf"(?:{_MACRO}|\w*[a-z]\w*)(?:(?:::|\.|->)\w+)*(?:<[^;()]*>)?\("
_NOTHING = re.compile(
    rf"\s*(?:\{{|(?:if|while|for) \(|(?!alignas\b|decltype\b){_CALL}"
    r"|\w+(?:\[\d+\]|\.\w+)* [-+*/]?= )"
)
_LEAVING = frozenset({"return", "goto", "asm"})
_DECLARED = re.compile(r"\s*(?:alignas\(\w+\) )?[^=({\[;]*?(\w+) ?[=({\[;]")
_KEYWORD = re.compile(
    "alignas|auto|case|class|const|decltype|default|do|else|enum|namespace|new|operator|static|"
    "struct|switch|template|throw|try|typedef|union|using"
)
# Directives, and code that distinguishes a variable from a reference to it.
_UNMOVABLE = re.compile(r"^\s*#|(?<!std::decay_t<)\bdecltype\b", re.MULTILINE)
_COMMENT = re.compile(r"//[^\"\n]*$", re.MULTILINE)


def read_statements(lines: Iterable[str], first: int) -> list[Statement]:
    """Return the statements of a function.

    Args:
        lines: its lines in order; one with a literal may be several lines of the file.
        first: the number of its first line in the file.

    Raises:
        UnknownCodeError: the lines cannot be split, or a declaration has no known name.
    """
    variables: dict[str, Statement] = {}
    statements: list[Statement] = []
    comments, code = "", ""
    number, depth = first, 0
    for line in lines:
        stripped = _COMMENT.sub("", line).strip()
        if not stripped and not code:
            comments += f"{line}\n"
            continue
        code += f"\n{line}" if code else line
        depth += stripped.endswith("{") - stripped.startswith("}")
        if depth == 0 and stripped.endswith((";", "}")):
            statement = Statement(number, comments, code)
            _classify(statement, variables)
            variables[statement.name] = statement
            statements.append(statement)
            number += f"{comments}{code}".count("\n") + 1
            comments, code = "", ""
    if code:
        raise UnknownCodeError
    return statements


def _classify(statement: Statement, variables: Mapping[str, Statement]) -> None:
    """Fill in what a statement declares; `variables` are the statements before it by name."""
    if _UNMOVABLE.search(statement.code):
        raise UnknownCodeError
    for kind, type_, form in _DECLARATIONS:
        match = form.fullmatch(statement.code)
        if match is None:
            continue
        parts = {"type": type_, **match.groupdict()}
        if kind is Kind.VALUE and not parts["type"]:
            original = variables.get(parts["value"])
            if original is None or original.kind is not Kind.VALUE:
                continue
            parts["type"] = original.type
        statement.kind = kind
        for field, part in parts.items():
            setattr(statement, field, part)
        return
    if _NOTHING.match(statement.code):
        statement.kind = Kind.NOTHING
        statement.stays = not statement.words.isdisjoint(_LEAVING)
        return
    declared = _DECLARED.match(statement.code)
    if declared is None or _KEYWORD.fullmatch(declared[1]):
        raise UnknownCodeError
    statement.name, statement.stays = declared[1], True
