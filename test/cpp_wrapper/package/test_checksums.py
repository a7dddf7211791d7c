"""Checksums of weights: the native function against its definition, and their text in manifests."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from inductor_ext import settings
from inductor_ext.cpp_wrapper.build import checksum_library
from inductor_ext.cpp_wrapper.package import checksums
from inductor_ext.cpp_wrapper.package.checksums import BLOCK

pytest.importorskip("torch._inductor")

MASK = (1 << 64) - 1


def keys(count: int) -> list[int]:
    """The odd outputs of splitmix64 for the seed 0."""
    state, outputs = 0, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        outputs.append((z ^ (z >> 31)) | 1)
    return outputs


KEYS = keys(512 + 4 * 512)


def expected_checksum(block: bytes) -> int:
    """The checksum as checksum.h defines it."""
    words = memoryview(block + bytes(-len(block) % 4096)).cast("Q")
    halves = []
    for start in range(0, len(words), 512):
        row = words[start : start + 512]
        keyed = [word ^ key for word, key in zip(row, KEYS, strict=False)]
        mixed = sum((value & 0xFFFFFFFF) * (value >> 32) for value in keyed) & MASK
        for total in (sum(row) & MASK, mixed):
            halves += [total & 0xFFFFFFFF, total >> 32]
    return sum(half * key for half, key in zip(halves, KEYS[512:], strict=False)) & MASK


@pytest.fixture(scope="module")
def function() -> Iterator[checksums.Function]:
    with checksum_library.native_function(settings.Settings()) as native:
        yield native


@pytest.fixture(scope="module")
def content() -> bytes:
    return random.Random(0).randbytes(2 * BLOCK + 4099)


@pytest.mark.parametrize("size", [0, 1, 3, 4095, 4096, 4097, 100_000, BLOCK])
def test_a_block(size: int, content: bytes, function: checksums.Function) -> None:
    texts = checksums.compute([content[:size]], function)
    expected = [expected_checksum(content[:size])] if size else []
    assert checksums.parse(texts, size) == expected


@pytest.mark.parametrize("pieces", [[1 << 30], [5], [BLOCK - 1, 2], [BLOCK, BLOCK], [BLOCK + 7, 9]])
def test_the_pieces_do_not_matter(
    pieces: Sequence[int], content: bytes, function: checksums.Function
) -> None:
    parts, position = [], 0
    for size in pieces:
        parts.append(memoryview(content)[position : position + size])
        position += size
    parts.append(memoryview(content)[position:])
    expected = [
        expected_checksum(content[start : start + BLOCK]) for start in range(0, len(content), BLOCK)
    ]
    assert checksums.parse(checksums.compute(parts, function), len(content)) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {0: 1},
        {BLOCK - 1: 128},
        {4095: 128, 8191: 128},  # the highest bits of two words
        {7: 128, 15: 128},
        {3: 128, 7: 128},
        {0: 255, 1: 255, 2: 255, 3: 255},
    ],
)
def test_damage_is_found(
    changes: dict[int, int], content: bytes, function: checksums.Function
) -> None:
    damaged = bytearray(content[:BLOCK])
    for position, bits in changes.items():
        damaged[position] ^= bits
    assert checksums.compute([bytes(damaged)], function) != checksums.compute(
        [content[:BLOCK]], function
    )


def test_exchanged_rows_and_words_are_found(content: bytes, function: checksums.Function) -> None:
    block = content[:BLOCK]
    rows = block[4096:8192] + block[:4096] + block[8192:]
    words = block[8:16] + block[:8] + block[16:]
    assert len({checksums.compute([part], function) for part in (block, rows, words)}) == 3


@pytest.mark.parametrize("text", ["", "0" * 15, "0" * 17, "g" * 16, "0" * 32])
def test_malformed_text(text: str) -> None:
    assert checksums.parse(text, BLOCK) is None
