"""The functions of torch that a compiled model calls, and whether another torch has the same ones.

Compiled models call torch by its C interface, whose functions (`aoti_torch_*`) keep their
declarations when torch changes: a function with other parameters gets another name. Code generated
for CPUs also calls the vector math library that torch contains (`Sleef_*`). `find` lists these
functions with the declarations that the model was compiled with, and `find_differences` compares
them with the headers of another torch. Torch's wheels include the headers. Imports torch only in
`find`.
"""

from __future__ import annotations

import ctypes
import pathlib
import re
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence

from inductor_ext import _compat

_HEADERS = ("torch/csrc/inductor/aoti_torch", "torch/csrc/stable/c", "sleef.h")
"""Headers, and folders of headers, that declare C functions, below torch's `include`."""

_SYSTEM_LIBRARIES = ("libstdc++.so.6", "libgomp.so.1")
"""Libraries that compiled models use besides torch; they depend on the C library."""

_CUDA = re.compile(r"cu(da)?[A-Z]")
"""Beginning of the names of CUDA's functions, which are the same in all releases of one major
version. torch loads them, too."""

_DROPPED = re.compile(
    r'//[^\n]*|/\*.*?\*/|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*|\bextern\s+"C"', re.MULTILINE | re.DOTALL
)
"""Comments, preprocessor directives and linkage."""
_FUNCTION = re.compile(r"([\w\s*]+?)\b(\w+)\s*\(([^()]*)\)\s*")
_MACRO = re.compile(r"\b[A-Z][A-Z0-9_]{3,}\b")
"""A macro in front of a declaration, such as AOTI_TORCH_EXPORT."""


def find(
    library: str, compiler: Sequence[str], include: pathlib.Path | None = None
) -> dict[str, str] | None:
    """Return the functions of torch that a shared library calls, with their declarations, by name.

    A declaration is empty if the C headers of this torch do not have it. That is a function of
    torch's C++ interface, whose declarations change.

    Args:
        library: path of the shared library.
        compiler: command of the C++ compiler, which knows the tool that lists symbols.
        include: folder of the headers that the library was compiled with. Default: None, those of
            the installed torch.

    Returns:
        The declarations by name; None if the symbols cannot be listed.
    """
    import torch

    names = _list_imports(library, compiler)
    if names is None:
        return None
    torch_libraries = ctypes.CDLL(torch._C.__file__)
    system = [handle for name in _SYSTEM_LIBRARIES if (handle := _open(name)) is not None]
    others = sorted(
        name
        for name in names
        if not _CUDA.match(name) and not any(hasattr(handle, name) for handle in system)
    )
    declared = read_declarations(include or _compat.torch_folder() / "include", others)
    return {
        name: declared.get(name, "")
        for name in others
        if name in declared or hasattr(torch_libraries, name)
    }


def _open(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def _list_imports(library: str, compiler: Sequence[str]) -> set[str] | None:
    """Return the symbols that a library needs from others; None if unknown.

    Weak ones are left out: the code that uses them checks whether they exist.
    """
    try:
        program = _run([*compiler, "-print-prog-name=nm"]).strip()
        lines = _run([program, "-D", "--undefined-only", library]).splitlines()
    except (OSError, subprocess.CalledProcessError):
        return None
    # "                 U aoti_torch_clone", "                 w __gmon_start__@GLIBC_2.2.5"
    symbols = (line.split() for line in lines)
    return {name.partition("@")[0] for kind, name in symbols if kind == "U"}


def _run(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def read_declarations(include: pathlib.Path, names: Collection[str]) -> dict[str, str]:
    """Return the declarations of C functions, by name. Names without a declaration are left out.

    Args:
        include: torch's `include` folder.
        names: names of functions.
    """
    found: dict[str, str] = {}
    for header in _list_headers(include):
        for name, declaration in _parse(header.read_text(errors="replace")):
            if name not in names:
                continue
            if found.setdefault(name, declaration) != declaration:
                found[name] = ""  # which one applies depends on macros
    return found


def _list_headers(include: pathlib.Path) -> Iterator[pathlib.Path]:
    for path in (include / name for name in _HEADERS):
        yield from [path] if path.is_file() else sorted(path.rglob("*.h"))


def _parse(text: str) -> Iterator[tuple[str, str]]:
    """Yield (name, declaration) of each function that a header declares."""
    for statement in re.split(r"[;{}]", _DROPPED.sub("", text)):
        match = _FUNCTION.fullmatch(statement.strip())
        if match is None:
            continue
        result = " ".join(_MACRO.sub("", match[1]).split())
        if result and result.split()[0] not in ("return", "else"):
            parameters = " ".join(match[3].split())
            yield match[2], f"{result} {match[2]}({parameters})"


def find_differences(
    required: Mapping[str, str], include: pathlib.Path
) -> tuple[list[str], list[str]]:
    """Compare the declarations that a model was compiled with to those of another torch.

    Args:
        required: the result of `find`.
        include: the other torch's `include` folder.

    Returns:
        The names of the functions that the other torch lacks, and of those that it declares
        differently or whose declaration is unknown.
    """
    declared = read_declarations(include, required)
    missing = [name for name in required if name not in declared]
    other = [
        name
        for name, declaration in required.items()
        if name in declared and not _are_compatible(declaration, declared[name])
    ]
    return missing, other


def _are_compatible(one: str, other: str) -> bool:
    """Whether two declarations of a function have equal types, and no parameter changed places."""
    first, second = _split(one), _split(other)
    if first is None or second is None or len(first) != len(second):
        return False
    if [kind for kind, _ in first] != [kind for kind, _ in second]:
        return False
    # A parameter may get another name: `grad` became `grad_output`.
    places = {name: place for place, (_, name) in enumerate(first) if name}
    return all(places.get(name, place) == place for place, (_, name) in enumerate(second) if name)


def _split(declaration: str) -> list[tuple[str, str]] | None:
    """Return (type, name) of the result and of each parameter; None without a declaration.

    The name is empty for the result and for a parameter without a name.
    """
    match = _FUNCTION.fullmatch(declaration)
    if match is None:
        return None
    parts = [(match[1].strip(), "")]
    for parameter in match[3].split(",") if match[3].strip() else ():
        named = re.fullmatch(r"(.*[\s*])(\w+)", parameter.strip())
        kind, name = named.groups() if named else (parameter.strip(), "")
        parts.append((kind.replace(" *", "*").strip(), name))
    return parts
