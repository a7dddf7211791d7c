"""Builds programs with the C++ client, and runs the driver of its tests.

The driver (`test/cpp_wrapper/client/driver.cpp`) executes commands in one process. It is built with
the address sanitizer where g++ has one, so that every test is also one of memory errors.
"""

from __future__ import annotations

import contextlib
import enum
import os
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import inductor_ext

TESTS = pathlib.Path(__file__).parents[1] / "cpp_wrapper" / "client"
DOCS = pathlib.Path(__file__).parents[2] / "docs" / "user" / "aot_packages.md"

SANITIZERS = {
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
    "thread": ("-fsanitize=thread",),
}

_REPORTS = {
    "ASAN_OPTIONS": "exitcode=66:detect_leaks=1:strict_string_checks=1",
    "UBSAN_OPTIONS": "exitcode=66:print_stacktrace=1",
    "TSAN_OPTIONS": "exitcode=66",
}
"""Every report is printed to stderr and gives the exit code 66. Nothing is suppressed."""


class Kind(enum.IntEnum):
    """`inductor_ext::ErrorKind`, whose values are fixed. 0 is an exception of another class."""

    OTHER = 0
    NOT_FOUND = 1
    BAD_PACKAGE = 2
    INCOMPATIBLE = 3
    MODEL_NOT_FOUND = 4
    LOAD = 5
    INPUT = 6
    CONSTANT = 7
    RUN = 8
    BUDGET = 9
    SELF_TEST = 10
    UNSUPPORTED = 11
    OPTION = 12


@dataclass(frozen=True)
class Reply:
    """The answer to a command: a text, or an error with its kind."""

    kind: Kind | None
    text: str
    details: str = ""

    def value(self) -> str:
        """The text of a command that succeeded."""
        assert self.kind is None, (self.kind, self.text)
        return self.text


def include_folder() -> pathlib.Path:
    return pathlib.Path(inductor_ext.cmake_prefix_path()).parent / "include"


def build(source: pathlib.Path, target: pathlib.Path, *flags: str) -> pathlib.Path:
    """Compile and link a program with plain g++. Warnings of the client are errors."""
    from torch.utils import cpp_extension

    libraries = cpp_extension.library_paths()
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-Wall", "-Wextra", "-Werror", *flags]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    command += [f"-I{include_folder()}"]
    command += [part for path in cpp_extension.include_paths() for part in ("-isystem", path)]
    command += [str(source), "-o", str(target)]
    command += [flag for path in libraries for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    command += ["-ltorch", "-ltorch_cpu", "-lc10", "-ldl", "-pthread"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return target


def has_sanitizer(name: str) -> bool:
    """Whether the installed g++ has the library of a sanitizer."""
    library = {"address": "libasan.so", "thread": "libtsan.so"}[name]
    found = subprocess.run(
        ["g++", f"-print-file-name={library}"], capture_output=True, text=True, check=True
    )
    return os.path.isabs(found.stdout.strip())


def documented_code() -> str:
    """The C++ of docs/user/aot_packages.md: statements, without the include."""
    (block,) = re.findall(r"```cpp\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)
    include, _, code = str(block).partition("\n")
    assert include == "#include <inductor_ext.hpp>"
    return code


def build_driver(folder: pathlib.Path, sanitizer: str | None) -> pathlib.Path:
    """Build the driver, with the documented code in it, and return its path.

    Args:
        folder: where to.
        sanitizer: a key of `SANITIZERS`, or None.
    """
    (folder / "documented.inc").write_text(documented_code())
    flags = SANITIZERS[sanitizer] if sanitizer else ()
    target = folder / f"driver-{sanitizer}"
    return build(TESTS / "driver.cpp", target, "-O0", "-g1", f"-I{folder}", *flags)


class Driver:
    """A process of the driver, which executes commands until `close`."""

    def __init__(self, path: pathlib.Path, **variables: str) -> None:
        """
        Args:
            path: the program.
            variables: of the environment.
        """
        self.path = path
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **_REPORTS, **variables},
        )

    def run(self, *commands: Sequence[object]) -> list[Reply]:
        """Execute commands, which are a name and arguments; a mapping has the options of `load`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        replies = []
        for command in commands:
            self._process.stdin.write("\t".join(_flatten(command)) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
            assert line, f"the driver ended: {self.errors()}"
            replies.append(_parse(line.removesuffix("\n")))
        return replies

    def call(
        self, package: object, inputs: Sequence[torch.Tensor], folder: pathlib.Path, **options: Any
    ) -> Any:
        """Load a package, run its model, and return the results, or the reply with the error."""
        source, target = folder / "inputs.pt", folder / "results.pt"
        torch.save(list(inputs), source)
        loaded, ran = self.run(("load", package, options), ("run", source, target))
        assert loaded.kind is None, loaded
        return torch.load(target) if ran.kind is None else ran

    def errors(self) -> str:
        """What the process has written to stderr, such as reports of a sanitizer."""
        self._errors.seek(0)
        return self._errors.read()[:8000]

    def wait(self) -> int:
        """End the process and return its exit code."""
        with contextlib.suppress(BrokenPipeError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        return self._process.wait(timeout=600)

    def close(self) -> None:
        """End the process, and assert that there is no report, also of leaks."""
        assert self.wait() == 0, self.errors()
        assert "Sanitizer" not in self.errors(), self.errors()


def _flatten(command: Sequence[object]) -> list[str]:
    *parts, last = command
    if isinstance(last, dict):
        return [*map(str, parts), *(f"{name}={value}" for name, value in last.items())]
    return list(map(str, command))


def _parse(line: str) -> Reply:
    kind, *fields = line.split("\t")
    texts = [text.replace("\\n", "\n").replace("\\t", "\t") for text in fields]
    if kind == "ok":
        return Reply(None, texts[0])
    return Reply(Kind(int(texts[0])), texts[1], texts[2])
