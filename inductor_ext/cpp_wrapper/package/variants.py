"""The choice between the targets that a model was compiled for.

A package contains a model once per target (`manifest.Variant`), with one copy of its constants.
`choose` selects the one for a machine: on CPUs that with the most features of those for its
architecture whose features the CPU has, on GPUs machine code for the device, else for an earlier
one of the same generation, else PTX, which the driver compiles. It runs nothing and reads no file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from inductor_ext import exc
from inductor_ext.cpp_wrapper.package.machine import Machine, rank_architectures
from inductor_ext.cpp_wrapper.package.manifest import Manifest, Model

_Rank = tuple[int, ...]


def candidates(model: Model) -> list[Model]:
    """Return the model as compiled for each of its targets."""
    return [model, *(model.for_target(variant) for variant in model.variants)]


def choose(content: Manifest, name: str, machine: Machine, path: str) -> Manifest:
    """Return the manifest with a model as compiled for the target that fits a machine best.

    A model for one target is not changed. What the choice does not depend on is left to
    `machine.check_machine`: the platform, torch, and whether there is a GPU.

    Args:
        content: the manifest of the package.
        name: a model of the package.
        machine: where it is to run.
        path: path of the package, for the error message.

    Raises:
        exc.IncompatibleArtifactError: no target fits; the message names all of them.
    """
    model = content.models[name]
    package_machine = content.platform.get("machine", machine.machine)
    if not model.variants:
        return content
    if model.device == "cuda" and machine.capability is None:
        return content
    models = [
        candidate
        for candidate in candidates(model)
        if (candidate.machine or package_machine) == machine.machine
    ]
    if not models:
        return content  # no target is for this architecture
    ranks = [_rank(candidate, machine) for candidate in models]
    best = max((rank for rank in ranks if rank is not None), default=None)
    if best is None:
        raise _make_error(candidates(model), models, machine, path)
    chosen = models[ranks.index(best)]
    return dataclasses.replace(
        content,
        models={**content.models, name: chosen},
        platform={**content.platform, "machine": machine.machine},
    )


def _rank(model: Model, machine: Machine) -> _Rank | None:
    """Return how well a model fits a machine, greater if better; None if it does not run there."""
    if model.device == "cuda" and machine.capability is not None:
        return rank_architectures(model.cuda_architectures, machine.capability)
    needed = set(model.cpu_features)
    if machine.cpu_features is None:
        return (-len(needed),)  # unknown: the least demanding one
    return (len(needed),) if needed <= machine.cpu_features else None


def _make_error(
    candidates: Sequence[Model], models: Sequence[Model], machine: Machine, path: str
) -> Exception:
    """Return the error for a machine that fits none of `models`, which are for its architecture."""
    targets = ", ".join(str(model.target) for model in candidates)
    if models[0].device == "cuda":
        here = "the device is sm_{}{}".format(*(machine.capability or ()))
    else:
        available = machine.cpu_features or frozenset()
        lacking = min((sorted({*model.cpu_features} - available) for model in models), key=len)
        here = f"this CPU lacks {', '.join(lacking)}"
    return exc.IncompatibleArtifactError(
        path=path,
        why=f"it was compiled for the targets {targets}, and {here}",
        fix="Compile it again with a target for this machine",
    )
