"""Functions that accept a configuration of either kernel family, Triton or CUTLASS.

A CUTLASS kernel computes the epilogue in `Epilogue.tree` of its problem, which may be only a part
of the problem's epilogue. `of_kernel` returns the problem as such a kernel sees it; the CUTLASS
constraints and cost model apply to that problem.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, cast

from inductor_ext.templates.cutlass import constraints as cutlass_constraints
from inductor_ext.templates.cutlass import cost_model as cutlass_ranking
from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.cutlass.epilogue import Epilogue, NotExpressible
from inductor_ext.templates.cutlass.source import Source, source
from inductor_ext.templates.device import Device
from inductor_ext.templates.problem import GemmProblem, read
from inductor_ext.templates.triton import constraints, cost_model
from inductor_ext.templates.triton.config import GemmConfig

Config = GemmConfig | CutlassConfig
"""Configuration of any extension kernel."""


def config_from_json(value: object) -> Config:
    """Return the configuration that `to_json` of either class wrote.

    Raises:
        exc.BadGemmError: see `GemmConfig.from_json` and `CutlassConfig.from_json`.
    """
    config: Config = read(cast(Any, Config), value, "configuration")
    return config


def tree_of(problem: GemmProblem) -> Epilogue:
    """Return the epilogue that a CUTLASS kernel computes for a problem.

    Raises:
        NotExpressible: the problem excludes CUTLASS kernels.
    """
    if problem.epilogue.tree is None:
        raise NotExpressible("the problem excludes CUTLASS kernels")
    return problem.epilogue.tree


@functools.lru_cache(maxsize=4096)
def of_kernel(problem: GemmProblem) -> GemmProblem:
    """Return the problem with only the part of the epilogue that a CUTLASS kernel computes.

    Raises:
        NotExpressible: see `tree_of`.
    """
    tree = tree_of(problem)
    out = tree.outputs[0][0]
    epilogue = dataclasses.replace(
        problem.epilogue,
        inputs=tuple(filter(None, (inp.epilogue_input for inp in tree.inputs))),
        pointwise=tree.operations,
        out=out if out != problem.out else None,
    )
    return dataclasses.replace(problem, epilogue=epilogue)


def source_of(problem: GemmProblem, config: CutlassConfig) -> Source:
    """Return the source of a problem's CUTLASS kernel.

    Raises:
        NotExpressible: the kernel does not support the epilogue.
    """
    return source(config, tree_of(problem))


def renderable(problem: GemmProblem, config: CutlassConfig) -> CutlassConfig | None:
    """Return a CUTLASS configuration that supports a problem's epilogue, or None if there is none.

    This is `config` itself, or, where it reads a matrix by TMA that is not aligned for TMA, the
    same configuration without that TMA load.
    """
    for candidate in dict.fromkeys((config, dataclasses.replace(config, c="void"))):
        try:
            source_of(problem, candidate)
        except NotExpressible:
            continue
        return candidate
    return None


def legal(problem: GemmProblem, config: Config, device: Device) -> bool:
    """Whether a kernel can run a problem on a device."""
    if isinstance(config, GemmConfig):
        return constraints.legal(problem, config, device)
    try:
        kernel_problem = of_kernel(problem)
    except NotExpressible:
        return False
    return renderable(problem, config) == config and cutlass_constraints.legal(
        kernel_problem, config, device
    )


def predict(problem: GemmProblem, config: Config, device: Device) -> float:
    """Return a kernel's predicted time in microseconds with operands in DRAM; infinite if CUTLASS
    cannot express the epilogue.
    """
    if isinstance(config, GemmConfig):
        return cost_model.predict(problem, config, device).total
    try:
        return cutlass_ranking.predict(of_kernel(problem), config, device)
    except NotExpressible:
        return math.inf
