"""The functions that compiled libraries export beyond torch's C interface, called with ctypes.

`NativeLibrary` wraps one loaded library. Libraries written before `inductor_ext_last_error_code`
existed report `ErrorCode.UNKNOWN`, or INPUT if the text of the error says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import enum
import os
import re
from collections.abc import Sequence
from typing import Any


class ErrorCode(enum.IntEnum):
    """The kind of a library's last error: `enum class ErrorCode` of runtime/error.h."""

    UNKNOWN = -1
    """The library does not tell. Not in error.h."""
    NONE = 0
    FAILURE = 1
    INPUT = 2
    CONSTANT = 3
    WEIGHTS = 4
    CPU = 5
    BUDGET = 6
    DAMAGED = 7


@dataclasses.dataclass(frozen=True)
class WeightsRequest:
    """How the next container gets its weights: `WeightsRequest` of runtime/weights.h."""

    location: tuple[str, int, int] | None = None
    """(file path, offset, size), offset and size in bytes; None if there are none."""
    checksums: Sequence[int] = ()
    """Of all blocks of the weights (`package.checksums`); empty if the library is not to check."""
    external: Sequence[str] = ()
    """Names in the generated code of constants that the caller provides."""


class NativeLibrary:
    """A compiled model's shared library.

    Raises:
        OSError: the library cannot be loaded.
        AttributeError: the extension did not compile it.
    """

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
        self._last_error = self._function("inductor_ext_last_error", ctypes.c_char_p)
        self._last_error_code = self._last_error_details = None
        with contextlib.suppress(AttributeError):
            self._last_error_code = self._function("inductor_ext_last_error_code", ctypes.c_int32)
        with contextlib.suppress(AttributeError):
            self._last_error_details = self._function(
                "inductor_ext_last_error_details", ctypes.c_char_p
            )

    def _function(self, name: str, result: Any, *arguments: Any) -> Any:
        function = getattr(self._library, name)
        function.restype = result
        function.argtypes = arguments
        return function

    def close(self) -> None:
        """Release this handle. The library stays loaded while a runner holds a handle."""
        import _ctypes

        _ctypes.dlclose(self._library._handle)

    def last_error(self) -> str:
        """Return the text of this thread's last error without a full stop; empty if none."""
        return str(self._last_error().decode(errors="replace")).rstrip(".\n")

    def last_error_details(self) -> str:
        """Return where this thread's last error happened in the code; may be empty."""
        if self._last_error_details is None:
            return ""
        return str(self._last_error_details().decode(errors="replace")).rstrip("\n")

    def last_error_code(self) -> ErrorCode:
        """Return the kind of this thread's last error; FAILURE for a code of a later version."""
        if self._last_error_code is None:
            is_input = re.match(r"(?i)input '|the artifact (takes|was called)", self.last_error())
            return ErrorCode.INPUT if is_input else ErrorCode.UNKNOWN
        code = self._last_error_code()
        return ErrorCode(code) if code in ErrorCode._value2member_map_ else ErrorCode.FAILURE

    def missing_cpu_features(self) -> str:
        """Return the required CPU features that this CPU lacks, separated by commas."""
        function = self._function("inductor_ext_missing_cpu_features", ctypes.c_char_p)
        return str(function().decode())

    def prepare(self, request: WeightsRequest, single_threaded: bool) -> None:
        """Configure the library. Call this before creating a container in the same thread.

        Args:
            request: what the container does about its weights.
            single_threaded: whether to run without synchronization between threads.

        Raises:
            AttributeError: the library, of an earlier version, cannot do what is requested.
        """
        self._function("inductor_ext_quiet", None, ctypes.c_int)(1)
        self._request_weights(request)
        if single_threaded:
            self._function("inductor_ext_set_single_threaded", None, ctypes.c_int)(1)
        with contextlib.suppress(AttributeError):
            # torch's runners hold the GIL while a model runs, which would block other threads.
            release = self._function(
                "inductor_ext_release_gil", None, ctypes.c_void_p, ctypes.c_void_p
            )
            api = ctypes.pythonapi
            functions = (api.PyEval_SaveThread, api.PyEval_RestoreThread)
            release(*(ctypes.cast(function, ctypes.c_void_p) for function in functions))

    def _request_weights(self, request: WeightsRequest) -> None:
        path, offset, size = request.location or ("", 0, 0)
        set_weights = self._function(
            "inductor_ext_set_weights", None, ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64
        )
        set_weights(os.fsencode(path), offset, size)
        if request.checksums:
            count = len(request.checksums)
            set_checksums = self._function(
                "inductor_ext_set_checksums", None, ctypes.c_void_p, ctypes.c_size_t
            )
            set_checksums((ctypes.c_uint64 * count)(*request.checksums), count)
        if request.external:
            count = len(request.external)
            set_external = self._function(
                "inductor_ext_set_external_constants", None, ctypes.c_void_p, ctypes.c_size_t
            )
            names = (ctypes.c_char_p * count)(*map(str.encode, request.external))
            set_external(names, count)

    def last_container(self) -> int:
        """Return the address of the container that this thread created last; 0 if none."""
        return int(self._function("inductor_ext_last_container", ctypes.c_void_p)() or 0)

    def fold(self, container: int, inactive: bool) -> bool:
        """Run constant folding of a container, and return whether it succeeded."""
        function = self._function(
            "AOTInductorModelContainerRunConstantFolding",
            ctypes.c_int32,
            ctypes.c_void_p,
            ctypes.c_bool,
            ctypes.c_void_p,
            ctypes.c_void_p,
        )
        return int(function(container, inactive, None, None)) == 0
