"""Attention of a few queries per sequence to a long cache: its problems, and how the kernel runs.

Pure values. `kernels.decode_attention` has the kernels, `lowerings.graph.decode_attention` finds
the operators. The rule of `choose` is that of an H100.
"""

from __future__ import annotations

import dataclasses

from inductor_ext.templates.tensors import ceiling, next_power_of_two

MAX_ROWS = 64
"""Queries that one CTA computes at most. With more of them, the tensor cores of other kernels are
busy enough."""

MAX_SIZE = 256
"""Elements of a head, at most."""


@dataclasses.dataclass(frozen=True)
class DecodeAttention:
    """Attention of `rows` queries to each head of keys and values.

    A row is a query of a query head; `group` query heads read the same head of keys and values.
    """

    batch: int
    heads: int
    """Heads of keys and values."""
    group: int
    queries: int
    """Queries of a sequence."""
    length: int
    """Keys of a sequence; for a dynamic length the size of the example."""
    size: int
    """Elements of a head of queries and keys."""
    value_size: int
    """Elements of a head of values."""

    @property
    def rows(self) -> int:
        """Queries that read the same head of keys and values."""
        return self.group * self.queries


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """How the kernel runs."""

    splits: int
    """CTAs that share a head's keys; 1 needs no second kernel."""
    block_n: int
    """Keys of a step; a power of two."""
    warps: int
    stages: int


def choose(problem: DecodeAttention, processors: int) -> DecodeConfig:
    """Return the configuration for a GPU with this many multiprocessors.

    There are about four CTAs per multiprocessor, or two for large heads, unless a CTA would have
    less than a step.
    """
    large = round_up(max(problem.size, problem.value_size)) > 128
    block_n = 32 if large else 64
    wanted = processors * (2 if large else 4)
    pairs = problem.batch * problem.heads
    splits = max(1, min(wanted // pairs, ceiling(problem.length, block_n)))
    few = pairs * splits <= 2 * processors
    return DecodeConfig(splits, block_n, warps=4 if large or few else 2, stages=3 if few else 2)


def round_up(size: int) -> int:
    """Return the next power of two, at least 16, which a matrix instruction needs."""
    return max(16, next_power_of_two(size))


def share(length: int, config: DecodeConfig) -> int:
    """Return how many keys a CTA reads at most: whole steps."""
    return ceiling(ceiling(length, config.splits), config.block_n) * config.block_n
