"""Reading weights with several threads: checking them, and copying them to a GPU.

The GPU is that of test/support/fake_cuda_runtime.h.
"""

from __future__ import annotations

import ctypes
import pathlib
import random
import shutil
import subprocess
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest

from inductor_ext import settings
from inductor_ext.cpp_wrapper.build import checksum_library, compiler
from inductor_ext.cpp_wrapper.package import checksums
from inductor_ext.cpp_wrapper.package.checksums import BLOCK
from test import support

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

ENTRY = r"""
#include "read_weights.h"
#include "error.h"
#include <cuda_runtime.h>
using namespace inductor_ext;

extern "C" int open_handles() { return fake::open; }
extern "C" void fail_after(int copies) { fake::copies_until_failure = copies; }
extern "C" void pin(int can) { fake::can_pin = can; }

extern "C" int transfer(
    const char* path, uint64_t offset, uint64_t bytes, const uint64_t* sums, size_t num_sums,
    const uint64_t* parts, size_t num_parts, uint8_t* to, char* text) {
  try {
    WeightsRequest request;
    request.path = path;
    request.offset = offset;
    request.bytes = bytes;
    const WeightsFile file(request, bytes);
    const std::vector<uint64_t> checksums(sums, sums + num_sums);
    if (to == nullptr) {
      check_weights(file, checksums);
      return 0;
    }
    std::vector<Upload> uploads;
    for (size_t i = 0; i < num_parts; ++i) {
      uploads.push_back({parts[2 * i], parts[2 * i + 1], to + parts[2 * i]});
    }
    upload_weights(file, uploads, checksums);
    return 0;
  } catch (const Error& error) {
    std::strncpy(text, error.what(), 999);
    return static_cast<int>(error.code);
  }
}
"""

WEIGHTS, DAMAGED = 4, 7
"""Values of ErrorCode in error.h."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("read_weights")
    fake = pathlib.Path(support.__file__).parent / "fake_cuda_runtime.h"
    shutil.copy(fake, folder / "cuda_runtime.h")
    (folder / "entry.cpp").write_text(ENTRY)
    sources = [compiler.RUNTIME / f"{name}.cpp" for name in ("read_weights", "weights", "checksum")]
    options = ["-std=c++17", "-g", "-O1", "-fPIC", "-shared", "-pthread", "-DUSE_CUDA"]
    target = folder / "library.so"
    includes = [f"-I{folder}", f"-I{compiler.RUNTIME}"]
    files = [str(folder / "entry.cpp"), *map(str, sources)]
    subprocess.run(["g++", *options, *includes, *files, "-o", str(target), "-ldl"], check=True)
    return ctypes.CDLL(str(target))


class Weights(NamedTuple):
    path: pathlib.Path
    offset: int
    content: bytes
    checksums: Sequence[int]


def compute(content: bytes) -> Sequence[int]:
    with checksum_library.native_function(settings.Settings()) as function:
        parsed = checksums.parse(checksums.compute([content], function), len(content))
    assert parsed is not None
    return parsed


@pytest.fixture(params=[1, BLOCK, 21 * BLOCK + 12345], ids=["one byte", "one block", "many blocks"])
def weights(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Weights:
    content = random.Random(1).randbytes(request.param)
    path = tmp_path / "weights"
    path.write_bytes(b"before" + content + b"after")
    return Weights(path, 6, content, compute(content))


Transfer = Callable[..., tuple[int, str, bytes]]


@pytest.fixture
def transfer(library: ctypes.CDLL) -> Transfer:
    """Returns the error code, the error's text, and the memory of the GPU."""

    def run(
        weights: Weights,
        parts: Sequence[tuple[int, int]] | None,
        sums: Sequence[int] | None = None,
    ) -> tuple[int, str, bytes]:
        sums = weights.checksums if sums is None else sums
        flat = [number for part in parts or () for number in part]
        memory = ctypes.create_string_buffer(b"\xee" * len(weights.content), len(weights.content))
        text = ctypes.create_string_buffer(1000)
        code = library.transfer(
            str(weights.path).encode(),
            ctypes.c_uint64(weights.offset),
            ctypes.c_uint64(len(weights.content)),
            (ctypes.c_uint64 * len(sums))(*sums),
            ctypes.c_size_t(len(sums)),
            (ctypes.c_uint64 * len(flat))(*flat),
            ctypes.c_size_t(len(flat) // 2),
            None if parts is None else memory,
            text,
        )
        assert library.open_handles() == 0
        return code, text.value.decode(), memory.raw

    return run


def test_all_weights_reach_the_gpu(weights: Weights, transfer: Transfer) -> None:
    assert transfer(weights, [(0, len(weights.content))]) == (0, "", weights.content)


def test_memory_need_not_be_pinned(
    weights: Weights, transfer: Transfer, library: ctypes.CDLL
) -> None:
    library.pin(0)
    try:
        assert transfer(weights, [(0, len(weights.content))]) == (0, "", weights.content)
    finally:
        library.pin(1)


def test_parts_of_the_weights(weights: Weights, transfer: Transfer) -> None:
    size = len(weights.content)
    generator = random.Random(2)
    starts = sorted({0, *(generator.randrange(size) for _ in range(9))})
    parts = [
        (start, generator.randint(0, end - start))
        for start, end in zip(starts, [*starts[1:], size], strict=True)
    ]
    expected = bytearray(b"\xee" * size)
    for start, count in parts:
        expected[start : start + count] = weights.content[start : start + count]
    assert transfer(weights, parts, sums=()) == (0, "", bytes(expected))


def test_intact_weights_are_accepted(weights: Weights, transfer: Transfer) -> None:
    assert transfer(weights, None)[:2] == (0, "")


@pytest.mark.parametrize("uploads", [True, False])
def test_damage_is_reported(weights: Weights, transfer: Transfer, uploads: bool) -> None:
    size = len(weights.content)
    position = random.Random(3).randrange(size)
    damaged = bytearray(weights.path.read_bytes())
    damaged[weights.offset + position] ^= 4
    weights.path.write_bytes(damaged)
    code, text, _ = transfer(weights, [(0, size)] if uploads else None)
    assert code == DAMAGED
    start = position // BLOCK * BLOCK
    assert f"bytes {start} to {min(start + BLOCK, size)} do not match their checksum" in text


def test_a_file_that_is_truncated(
    weights: Weights, transfer: Transfer, library: ctypes.CDLL
) -> None:
    weights.path.write_bytes(weights.path.read_bytes()[: -len("after") - 1])
    code, text, _ = transfer(weights, [(0, len(weights.content))])
    assert code == WEIGHTS
    assert "are needed" in text


def test_as_many_checksums_as_blocks_are_needed(weights: Weights, transfer: Transfer) -> None:
    code, text, _ = transfer(weights, None, sums=[*weights.checksums, 0])
    count = len(weights.checksums)
    assert (code, f"there are {count + 1} checksums for {count} blocks" in text) == (WEIGHTS, True)


def test_an_error_of_the_gpu_is_reported_and_nothing_is_left(
    weights: Weights, transfer: Transfer, library: ctypes.CDLL
) -> None:
    library.fail_after(len(weights.checksums) // 2)
    try:
        code, text, _ = transfer(weights, [(0, len(weights.content))])
    finally:
        library.fail_after(-1)
    assert code == WEIGHTS
    assert text == (
        "The weights cannot be copied to the GPU: an illegal memory access was encountered."
    )
