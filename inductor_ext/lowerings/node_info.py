"""Records that the extension stores on FX nodes: one `NodeInfo` under one metadata key.

The planner stores plans and what `explain` shows; lowerings and the report read them. Records are
immutable, because FX copies metadata by reference: `update` gives a node a record of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inductor_ext.lowerings.operands import FusedOperands, KernelConstants
from inductor_ext.templates.triton.config import GemmConfig

if TYPE_CHECKING:
    from torch import fx

    from inductor_ext.autotune.decision import Decision
    from inductor_ext.templates.cutlass.epilogue import Epilogue
    from inductor_ext.templates.device import Device
    from inductor_ext.templates.problem import GemmProblem
    from inductor_ext.templates.records import MatmulRecord

_KEY = "inductor_ext"


@dataclass(frozen=True)
class FusedCall:
    """How to read the arguments of a call of a fused Triton kernel."""

    operands: FusedOperands[int]
    """The position of every operand among the arguments."""
    constants: KernelConstants
    chain: fx.Graph | None = None
    """With a row amax, the epilogue: see `match_row_amax.RowAmaxFusion`."""

    @classmethod
    def of(
        cls,
        operands: FusedOperands[fx.Node],
        constants: KernelConstants,
        chain: fx.Graph | None = None,
    ) -> FusedCall:
        """Return the description of a call with `operands.flatten()` as arguments."""
        return cls(operands.unflatten(range(len(operands.flatten()))), constants, chain)


@dataclass(frozen=True)
class CutlassArguments:
    """How to read the arguments of a call of a CUTLASS kernel.

    The arguments are A, B, the group end offsets of a grouped matmul, the tensors that the epilogue
    reads, and those of its scalars that are known only at run time.
    """

    epilogue: Epilogue
    inputs: int
    """The number of tensors that the epilogue reads."""
    is_grouped: bool
    scalars: tuple[float | None, ...]
    """The scalars of the epilogue; None for those that are arguments."""

    def split(self, arguments: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return the tensors among the arguments, and all scalars of the epilogue."""
        count = 2 + self.is_grouped + self.inputs
        dynamic = iter(arguments[count:])
        scalars = [next(dynamic) if scalar is None else scalar for scalar in self.scalars]
        return list(arguments[:count]), scalars


@dataclass(frozen=True)
class Plan:
    """The kernel selected for one matmul, or for several that one kernel computes."""

    problem: GemmProblem
    decision: Decision
    device: Device
    call: FusedCall | CutlassArguments | None = None
    """How to read the arguments of a call that replaced several nodes; None for an ATen op."""

    @property
    def constexprs(self) -> dict[str, Any]:
        """The constants of a fused kernel that its problem does not imply."""
        return self.call.constants.constexprs() if isinstance(self.call, FusedCall) else {}

    @property
    def applies_epilogue(self) -> bool:
        """Whether the kernel itself applies scales and biases.

        It cannot with split-K and stream-K, where several CTAs hold partial sums of a tile.
        """
        config = self.decision.config
        alone = isinstance(config, GemmConfig) and config.split_k == 1 and not config.stream_k
        return alone and self.problem.operation in ("addmm", "scaled", "int_mm")


@dataclass(frozen=True)
class NodeInfo:
    """The record of one FX node."""

    plan: Plan | None = None
    """The kernel of a matmul, or of the call that replaced it."""
    fused: tuple[str, ...] = ()
    """Names of the operators that the node's kernel computes and that Inductor does not see."""
    rejected: tuple[str, ...] = ()
    """Texts about the fusions that the node could have been part of."""
    record: MatmulRecord | None = None
    """The record that `explain` shows."""
    strides: Sequence[Any] | None = None
    """On the output node: the strides of the results before the joint passes."""


_EMPTY = NodeInfo()


def get(node: Any) -> NodeInfo:
    """Return the record of a node, empty if it has none; `node` may be None."""
    info: NodeInfo = getattr(node, "meta", {}).get(_KEY, _EMPTY)
    return info


def update(node: Any, **changes: Any) -> None:
    """Set fields of a node's record."""
    node.meta[_KEY] = dataclasses.replace(get(node), **changes)


def plan_of(node: Any) -> Plan | None:
    """Return the plan of a node, or None; `node` may be None."""
    return get(node).plan
