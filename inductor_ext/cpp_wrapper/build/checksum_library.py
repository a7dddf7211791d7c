"""The function that computes checksums of weights (`package.checksums`), as native code.

It is `inductor_ext_block_checksum` of runtime/checksum.h, which every compiled model contains. For
the build of a package it is compiled into a small library for this machine, which is kept in the
artifact cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import shlex
from collections.abc import Iterator

from inductor_ext import settings
from inductor_ext.cpp_wrapper.build import commands, compiler
from inductor_ext.cpp_wrapper.cache import cache
from inductor_ext.cpp_wrapper.package import checksums


@contextlib.contextmanager
def native_function(values: settings.Settings) -> Iterator[checksums.Function]:
    """Yield the function that computes a checksum.

    Args:
        values: the settings of the compile, of which those of the artifact cache apply.

    Raises:
        torch._inductor.exc.CppCompileError: the C++ compiler fails.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler

    command = [*shlex.split(get_cpp_compiler()), "-std=c++17", "-O3", "-fPIC", "-shared"]
    source = compiler.RUNTIME / "checksum.cpp"
    with compiler.build_cached(
        ("checksums", *command, source.read_text()),
        lambda folder: commands.run([*command, str(source), "-o", str(folder / "checksum.so")]),
        cache.open_store(values) if values.artifact_cache else None,
    ) as folder:
        function = ctypes.CDLL(str(folder / "checksum.so")).inductor_ext_block_checksum
        function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_size_t), ctypes.c_uint64
        yield function
