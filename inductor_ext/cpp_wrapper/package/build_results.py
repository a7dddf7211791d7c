"""The compiled models of a package for one target, and whether two targets can share constants."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from inductor_ext import exc
from inductor_ext.cpp_wrapper.codegen import weights_layout
from inductor_ext.storage.digest import hash_buffer

if TYPE_CHECKING:
    from inductor_ext.cpp_wrapper.build.artifact import Artifact


@dataclasses.dataclass(frozen=True, kw_only=True)
class Build:
    """The compiled models of a package for one target."""

    target: str | None
    """Name of the target; None if none was named."""
    artifacts: Mapping[str, Artifact]
    """By model name."""
    options: Mapping[str, Any]
    """Non-default options of Inductor and settings of the extension."""
    memory: Mapping[str, Mapping[str, Any]]
    """Summaries of memory plans by model name, where known, as plain values."""


def check_shared(base: Build, other: Build) -> None:
    """Check that the models of two builds have the same constants, in one layout, and signatures.

    Raises:
        exc.TargetMismatchError: they have not.
    """
    for name, artifact in base.artifacts.items():
        why = _find_difference(artifact, other.artifacts[name])
        if why is not None:
            raise exc.TargetMismatchError(
                name=name, target=base.target, other=other.target, why=why
            )


def _find_difference(one: Artifact, other: Artifact) -> str | None:
    if one.signature.to_json() != other.signature.to_json():
        return "it takes or returns something else"
    if one.fqns != other.fqns or one.frozen != other.frozen:
        return "it has other constants"
    for name, tensor in one.constants.items():
        shown = one.fqns[name] or name
        another = other.constants[name]
        if (tensor.dtype, tensor.shape) != (another.dtype, another.shape):
            return f"its constant {shown} has another shape or dtype"
        size = one.plan.sizes[name]
        places = {(build.plan.offsets[name], build.plan.sizes[name]) for build in (one, other)}
        if len(places) > 1 or tensor.is_mkldnn != another.is_mkldnn:
            return f"its constant {shown} has another layout"
        if not tensor.is_mkldnn and tensor.stride() != another.stride():
            return f"its constant {shown} has other strides"
        if size and not _is_same_storage(tensor, another):
            digests = {
                hash_buffer(weights_layout.storage_bytes(item, size)) for item in (tensor, another)
            }
            if len(digests) > 1:
                return f"its constant {shown} has another value"
    return None


def _is_same_storage(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if one.is_mkldnn or other.is_mkldnn:
        return False
    return bool(one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr())
