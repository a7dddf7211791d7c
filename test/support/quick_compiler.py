"""Compiles the C++ of small graphs in little time.

Most of the time of a small kernel's compile is spent on headers: instantiating their templates
takes .8 of 1.3 s even if they are precompiled, and a graph may have dozens of kernels.

- `kernels_together` compiles kernels of the Python wrapper in one unit, at the first call of one of
  them, with the usual command. conftest.py uses it for tests without a GPU.
- `quick_compiles` also compiles with `-O1`, and C++ wrappers with a precompiled header. The judges
  of fuzzers use it.

In both, kernels have the same text as otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

from torch._inductor import async_compile, codecache, cpu_vec_isa
from torch._inductor import config as inductor_config

_HEADERS = {
    "wrapper": (
        "torch/csrc/inductor/cpp_wrapper/cpu.h",
        "ATen/core/dispatch/Dispatcher.h",
        "torch/csrc/inductor/cpp_prefix.h",
    ),
    "kernel": ("torch/csrc/inductor/cpp_prefix.h",),
}

_SCRIPT = """#!/bin/sh
# Compile the only source with a precompiled header for its flags; pass on what is not a compile.
compiler='{compiler}'
source= flags= skip=
for argument do
    case $skip$argument in
    *.cpp) source=$argument ;;
    -include | -E | -x | -dump* | *.o) exec $compiler "$@" ;;
    -o) skip=skipped: ;;
    -shared | -c | -l* | -L* | -Wl* | -fopenmp-*) ;;
    skipped:*) skip= ;;
    *) flags="$flags $argument" ;;
    esac
done
case $source in *.wrapper.cpp | *.kernel.cpp) exec $compiler "$@" ;; esac
if grep -q inductor/cpp_wrapper/cpu.h "$source" 2>/dev/null; then kind=wrapper
elif grep -q inductor/cpp_prefix.h "$source" 2>/dev/null; then kind=kernel
else exec $compiler "$@"
fi
header='{folder}'/$kind-$(echo "$flags" | cksum | cut -d' ' -f1).h
if [ ! -e "$header.gch" ]; then
    cp '{folder}'/$kind.h "$header.$$.h"
    $compiler $flags -O1 -x c++-header "$header.$$.h" -o "$header.$$" || exec $compiler "$@"
    cp '{folder}'/$kind.h "$header"
    mv "$header.$$" "$header.gch"
    rm -f "$header.$$.h"
fi
exec $compiler -include "$header" "$@" -O1
"""


@functools.cache
def _write_compiler(folder: Path) -> str | None:
    """Write a g++ that precompiles headers; return its path, None without a g++."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    for kind, headers in _HEADERS.items():
        (folder / f"{kind}.h").write_text("".join(f"#include <{name}>\n" for name in headers))
    path = folder / "g++"
    temporary = folder / f"g++.{os.getpid()}"
    temporary.write_text(_SCRIPT.format(compiler=compiler, folder=folder))
    temporary.chmod(0o755)
    temporary.replace(path)
    return str(path)


class _Kernel:
    """A kernel that is compiled with others when it is called for the first time."""

    def __init__(self, pending: list[_Kernel], argtypes: Sequence[str], source: str) -> None:
        self._pending = pending
        self.argtypes = argtypes
        self.source = source
        self.function: Callable[..., Any] | None = None
        pending.append(self)

    def __call__(self, *arguments: Any) -> Any:
        if self.function is None:
            kernels, self._pending[:] = [*self._pending], []
            _compile_together(kernels)
        assert self.function is not None
        return self.function(*arguments)


def _compile_together(kernels: Sequence[_Kernel]) -> None:
    load = codecache.CppPythonBindingsCodeCache.load_pybinding
    try:
        entry = _Together.load_pybinding(["long", "long"], _join(kernels))
    except Exception:
        # Their definitions conflict, or one does not compile.
        for kernel in kernels:
            kernel.function = load(kernel.argtypes, kernel.source)
        return
    for index, kernel in enumerate(kernels):
        kernel.function = functools.partial(_call, entry, index)


def _call(entry: Callable[[int, tuple[Any, ...]], Any], index: int, *arguments: Any) -> Any:
    return entry(index, arguments)


class _Together(codecache.CppPythonBindingsCodeCache):
    """Bindings of several kernels, which are called by index."""

    cache: ClassVar[dict[str, Any]] = {}
    call_entry_function = (
        "call(PyLong_AsLong(PyTuple_GET_ITEM(args, 0)), PyTuple_GET_ITEM(args, 1)); Py_RETURN_NONE;"
    )
    extra_parse_arg = "CALL_KERNELS"


def _join(kernels: Sequence[_Kernel]) -> str:
    """The sources, with a macro that defines their calls after the bindings' functions."""
    parts = ["#include <torch/csrc/inductor/cpp_prefix.h>"]
    cases = []
    for index, kernel in enumerate(kernels):
        name = f"kernel_{index}"
        parts += [f"#define kernel {name}", kernel.source, "#undef kernel"]
        values = (
            f"parse_arg<{argtype.replace('const ', '')}>(args, {n})"
            for n, argtype in enumerate(kernel.argtypes)
        )
        cases.append(f"case {index}: {name}({', '.join(values)}); break;")
    body = " ".join(cases)
    parts.append(
        "#define CALL_KERNELS static void call(long index, PyObject* args) "
        f"{{ switch (index) {{ {body} }} }}\n"
    )
    return "\n".join(parts)


@contextlib.contextmanager
def kernels_together() -> Iterator[None]:
    """Compile the kernels of graphs for the CPU in one unit, when one of them is called."""
    pending: list[_Kernel] = []

    def bind(self: Any, argtypes: list[str], source_code: str) -> Any:
        return _Kernel(pending, argtypes, source_code)

    with mock.patch.object(async_compile.AsyncCompile, "cpp_pybinding", bind):
        yield


@contextlib.contextmanager
def quick_compiles() -> Iterator[None]:
    """Compile the C++ of graphs for the CPU in little time."""
    # Found by compiles with the usual compiler, which are in the cache.
    cpu_vec_isa.pick_vec_isa()
    path = _write_compiler(Path(codecache.cache_dir()) / "quick_compiler")
    settings = {} if path is None else {"cpp.cxx": (path,), "cpp_cache_precompile_headers": False}
    with kernels_together(), inductor_config.patch(settings):
        yield
