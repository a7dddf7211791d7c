"""What the probes share: their result, and how they look for programs and packages."""

from __future__ import annotations

import dataclasses
import importlib.util
import operator
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

TIMEOUT = 30.0
"""Seconds. A compiler that takes longer to print its version is considered broken."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of a probe. The fields mean the same as in `components.Component`."""

    version: str | None = None
    path: str | None = None
    detail: str | None = None
    why: str | None = None
    install: str | None = None


@dataclasses.dataclass(frozen=True)
class Probe:
    """How to check one component."""

    title: str
    """Name of the component in messages."""
    inputs: Callable[[], tuple[Any, ...]]
    """Returns everything that the answer depends on and that may change within a process. Cheap;
    the result is hashable."""
    examine: Callable[..., Finding]
    """Called with the `Component` of every requirement, then with the inputs."""
    requires: tuple[str, ...] = ()
    """Names of the components that `examine` needs to know about."""


def first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def run_program(command: list[str], text: str = "") -> tuple[int, str]:
    """Return the exit code and merged output of a program, in English.

    Raises:
        OSError: the program cannot be started.
    """
    try:
        process = subprocess.run(
            command,
            input=text,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LC_ALL": "C"},
            timeout=TIMEOUT,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 1, f"no output within {TIMEOUT:.0f} s"
    return process.returncode, process.stdout


def find_program(program: str, setter: str | None) -> tuple[str | None, str]:
    """Return the absolute path of a program and its --version output, or None and the reason.

    Args:
        program: one program name or path. Inductor and Triton start it without a shell, so a value
            with arguments ("ccache g++") is a program name that does not exist.
        setter: the environment variable or setting that names the program, for the message.
    """
    label = f"{setter} names {program!r}, which" if setter else program
    path = shutil.which(program)
    if path is None:
        try:
            words = shlex.split(program)
        except ValueError:
            words = []
        if len(words) > 1 and shutil.which(words[0]):
            return None, f"{label} is taken as the name of one program, arguments and all"
        return None, f"{label} is not found" + ("" if os.path.dirname(program) else " on PATH")
    try:
        code, output = run_program([path, "--version"])
    except OSError as error:
        return None, f"{label} cannot be started ({error.strerror})"
    if code:
        return None, f"{label} --version exits with {code}: {first_line(output)}"
    return os.path.abspath(path), output


def package_folder(module: str) -> str | None:
    """Return the folder of a package, without importing it."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        return None
    return os.path.abspath(next(iter(spec.submodule_search_locations)))


def package_version(*distributions: str) -> str | None:
    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def loaded_attribute(module: str, attribute: str) -> Any:
    """Return an attribute of a module, or None unless the module is completely imported."""
    try:
        return operator.attrgetter(attribute)(sys.modules[module])
    except (KeyError, AttributeError):
        return None


def read_environment(*names: str) -> tuple[str | None, ...]:
    return tuple(map(os.environ.get, names))


def import_path() -> tuple[tuple[str, ...]]:
    return (tuple(sys.path),)
