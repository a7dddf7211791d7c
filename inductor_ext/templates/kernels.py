"""Configurations of both families of kernels, Triton's and CUTLASS's: what is asked of either.

A CUTLASS kernel does what `Epilogue.tree` of its problem says, which may be less than the problem's
whole epilogue: `of_kernel` is the problem that such a kernel sees, and that its rules are for.
"""

from __future__ import annotations

import dataclasses
import functools
import math

from inductor_ext.templates.cutlass import constraints as cutlass_constraints
from inductor_ext.templates.cutlass import cost_model as cutlass_ranking
from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.cutlass.evt import Epilogue, NotExpressible
from inductor_ext.templates.cutlass.source import Source, source
from inductor_ext.templates.device import Device
from inductor_ext.templates.problem import GemmProblem, typed
from inductor_ext.templates.triton import constraints, cost_model
from inductor_ext.templates.triton.config import GemmConfig

__all__ = [
    "Config",
    "config_from_json",
    "legal",
    "of_kernel",
    "predict",
    "renderable",
    "source_of",
    "tree_of",
]

Config = GemmConfig | CutlassConfig
"""Of any kernel of ours."""


def config_from_json(value: object) -> Config:
    """What `to_json` of either has written.

    Raises:
        exc.BadGemmError: as of both.
    """
    found: Config = typed(Config, value, "configuration")
    return found


@functools.lru_cache(maxsize=4096)
def tree_of(problem: GemmProblem) -> Epilogue:
    """What a CUTLASS kernel stores of a problem.

    Raises:
        NotExpressible: there is to be none, or it is not told right.
    """
    if problem.epilogue.tree is None:
        raise NotExpressible("no CUTLASS kernel is asked for")
    return Epilogue.parse(problem.epilogue.tree)


@functools.lru_cache(maxsize=4096)
def of_kernel(problem: GemmProblem) -> GemmProblem:
    """A problem with that much of the epilogue as a CUTLASS kernel does.

    Raises:
        NotExpressible: as of `tree_of`.
    """
    tree = tree_of(problem)
    out = tree.outputs[0][0]
    epilogue = dataclasses.replace(
        problem.epilogue,
        inputs=tuple(filter(None, (each.behind for each in tree.inputs))),
        pointwise=tree.operations,
        out=out if out != problem.out else None,
    )
    return dataclasses.replace(problem, epilogue=epilogue)


def source_of(problem: GemmProblem, config: CutlassConfig) -> Source:
    """The source of a problem's CUTLASS kernel.

    Raises:
        NotExpressible: the kernel cannot have that epilogue.
    """
    return source(config, tree_of(problem))


def renderable(problem: GemmProblem, config: CutlassConfig) -> CutlassConfig | None:
    """A CUTLASS configuration that can have a problem's epilogue: this one, or, where it reads a
    matrix by TMA that is not aligned for it, one that does not; None if there is none.
    """
    for each in dict.fromkeys((config, dataclasses.replace(config, c="void"))):
        try:
            source_of(problem, each)
        except NotExpressible:
            continue
        return each
    return None


def legal(problem: GemmProblem, config: Config, device: Device) -> bool:
    """Whether a kernel can run a problem on a device."""
    if isinstance(config, GemmConfig):
        return constraints.legal(problem, config, device)
    try:
        own = of_kernel(problem)
    except NotExpressible:
        return False
    return renderable(problem, config) == config and cutlass_constraints.legal(own, config, device)


def predict(problem: GemmProblem, config: Config, device: Device) -> float:
    """The microseconds of a kernel by the model, with operands in DRAM; infinite where there is
    none.
    """
    if isinstance(config, GemmConfig):
        return cost_model.predict(problem, config, device).total
    try:
        return cutlass_ranking.predict(of_kernel(problem), config, device)
    except NotExpressible:
        return math.inf
