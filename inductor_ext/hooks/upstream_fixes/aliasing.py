"""Which operands of an FX graph need a copy before its operators write in place. Pure analysis.

The graph is functional, except for `copy_` nodes that write the new values of inputs back. Inductor
then lets an operator write into its operand instead of a copy of it. `find_copies` returns the
operands for which that changes results or makes results share memory; nothing here changes a graph
or decides what is written in place.

Each rule is about one root: the storage of a graph input, or of an intermediate.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch.fx import Graph, Node

Path = tuple[Any, ...]
"""Position of an operand: "args" or "kwargs", then indices or keys into nested containers."""


@dataclass(frozen=True)
class Write:
    """An operand that a node would overwrite if Inductor lets it work in place."""

    node: Node
    path: Path
    """Position of the operand; empty for the destination of a `copy_`."""
    operand: Node
    region: tuple[Any, ...]
    """Fake tensors of the memory that is overwritten."""
    results: tuple[Node, ...]
    """Nodes whose value is the operand after the write."""
    reads: tuple[tuple[Path, Node], ...] = ()
    """The operands that the node reads, other than at the positions that it writes."""
    is_unchecked: bool = False
    """Whether Inductor writes in place without looking at other uses of the operand."""
    is_fused: bool = False
    """Whether the kernel that writes also computes the operands that the node reads, so that
    copying them has no effect."""


class Memory(Protocol):
    """What is known about the memory behind nodes."""

    def storage(self, node: Node) -> int | None:
        """Return the identity of a node's storage; None if it is no tensor."""

    def overlaps(self, tensor: Any, other: Any) -> bool:
        """Whether two fake tensors that share a storage may have an element in common."""

    def is_same_view(self, node: Node, other: Node) -> bool:
        """Whether two nodes have equal sizes, strides and offsets."""

    def is_view(self, node: Node) -> bool:
        """Whether a node is a view of its first argument."""

    def reads_data(self, node: Node) -> bool:
        """Whether a node reads elements, and not only the size or strides of a tensor."""


@dataclass
class Values:
    """The storages of a graph: which nodes share them, and which are inputs."""

    graph: Graph
    memory: Memory
    copy_op: Any
    """The target of nodes that write an input back."""
    order: dict[Node, int] = field(init=False)
    nodes: dict[int, list[Node]] = field(init=False)
    inputs: dict[int, Node] = field(init=False)
    copies: dict[int, Node] = field(init=False)
    """The first node that writes an input back, by the storage of the input."""

    def __post_init__(self) -> None:
        self.order = {node: index for index, node in enumerate(self.graph.nodes)}
        self.nodes, self.inputs, self.copies = defaultdict(list), {}, {}
        for node in self.graph.nodes:
            storage = self.memory.storage(node)
            if storage is None:
                continue
            self.nodes[storage].append(node)
            if node.op in ("placeholder", "get_attr"):
                self.inputs.setdefault(storage, node)
            elif node.target is self.copy_op and node.args[0].op in ("placeholder", "get_attr"):
                self.copies.setdefault(storage, node)

    def storage(self, node: Node) -> int | None:
        """Return the identity of a node's storage; None if it is no tensor."""
        return self.memory.storage(node)

    def uses(self, nodes: Collection[Node], after: Node) -> Iterator[tuple[Node, Node]]:
        """Yield the reads of nodes behind a node of the graph, as (user, what it reads)."""
        start = self.order[after]
        for node in nodes:
            for user in node.users:
                if (
                    self.order[user] > start
                    and user.op != "output"
                    and not (user.target is self.copy_op and user.args[0] is node)
                    and not self.memory.is_view(user)
                    and self.memory.reads_data(user)
                ):
                    yield user, node


def find_operands(node: Node) -> Iterator[tuple[Path, Node]]:
    """Yield the nodes among the arguments of a node, with their positions."""

    def search(value: Any, path: Path) -> Iterator[tuple[Path, Node]]:
        if isinstance(value, Node):
            yield path, value
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                yield from search(item, (*path, index))
        elif isinstance(value, dict):
            for key, item in value.items():
                yield from search(item, (*path, key))

    yield from search(node.args, ("args",))
    yield from search(node.kwargs, ("kwargs",))


def find_late_reads(values: Values) -> list[tuple[Node, Node]]:
    """Return reads of an input behind the node that writes it back, as (user, what it reads).

    In a functional graph they mean the value before the write.
    """
    return list(
        itertools.chain.from_iterable(
            values.uses(values.nodes[storage], copy) for storage, copy in values.copies.items()
        )
    )


def find_aliased_reads(write: Write, values: Values) -> list[Path]:
    """Return the operands of a node that share memory with what the node overwrites."""
    storage = values.storage(write.operand)
    return [
        path
        for path, read in write.reads
        if storage is not None
        and values.storage(read) == storage
        and any(values.memory.overlaps(region, read.meta["val"]) for region in write.region)
    ]


def needs_copy(write: Write, writes: Sequence[Write], values: Values, owned: set[Node]) -> bool:
    """Whether writing in place into an operand changes the results of the graph.

    Args:
        writes: all writes of the graph.
        owned: nodes that the graph returns, and that must not share memory with an input.
    """
    storage = values.storage(write.operand)
    if storage is None or not write.path:
        return False
    copy = values.copies.get(storage)
    if storage not in values.inputs:
        return write.is_unchecked and _is_used_later(write, storage, values, owned)
    if copy is None or values.order[copy] < values.order[write.node]:
        # Without a copy back Inductor does not write into an input, unless it does not check.
        return write.is_unchecked
    reached = find_reached(write, writes, values)
    if any(values.storage(node) in reached for node in owned):
        return True
    source = copy.args[1]
    assert isinstance(source, Node)
    if values.storage(source) in reached and not values.memory.is_same_view(source, copy):
        return True
    # If the input gets another value, what was written in place is lost then.
    others = itertools.chain.from_iterable(
        values.nodes[item] for item in reached if item != values.storage(source)
    )
    return any(True for _ in values.uses(list(others), copy)) or (
        write.is_unchecked and _is_used_later(write, storage, values, owned)
    )


def find_reached(write: Write, writes: Sequence[Write], values: Values) -> set[int]:
    """Return the storages that become one with a written operand if all writes are in place."""
    reached: set[int] = set()
    pending = [write]
    while pending:
        storages = {values.storage(node) for node in pending.pop().results}
        new = {storage for storage in storages if storage is not None} - reached
        reached |= new
        pending += [other for other in writes if values.storage(other.operand) in new]
    return reached


def _is_used_later(write: Write, storage: int, values: Values, owned: set[Node]) -> bool:
    nodes = values.nodes[storage]
    return any(node in owned for node in nodes if node.target is not values.copy_op) or any(
        True for _ in values.uses([n for n in nodes if n.target is not values.copy_op], write.node)
    )


def find_results(node: Node, index: Any) -> tuple[Node, ...]:
    """Return the nodes that read one result of a node with several results."""
    return tuple(
        user for user in node.users if user.target is operator.getitem and user.args[1] == index
    )


def get_operand(node: Node, path: Path) -> Any:
    """Return the value at a position."""
    return get_item(getattr(node, path[0]), path[1:])


def get_item(container: Any, keys: Path) -> Any:
    """Return the value at a position in nested sequences and mappings."""
    for key in keys:
        container = container[key]
    return container


def replace_operand(node: Node, path: Path, value: Node) -> None:
    """Replace the value at a position."""
    setattr(node, path[0], replace_item(getattr(node, path[0]), path[1:], value))


def replace_item(container: Any, keys: Path, value: Any) -> Any:
    """Return a copy of nested sequences and mappings with another value at a position."""
    if not keys:
        return value
    item = replace_item(container[keys[0]], keys[1:], value)
    if isinstance(container, dict):
        return {**container, keys[0]: item}
    items = list(container)
    items[keys[0]] = item
    return type(container)(items)
