"""The named targets of a package: CPU levels and GPU architectures that it is compiled for.

`parse` turns the arguments `targets=` and `cpu_targets=` of `inductor_ext.aoti_compile_and_package`
into `Target`s, `check` finds out whether programs can be compiled for them, and `Target.scope` is
the context of the compile for one of them. The machine that compiles needs none of the targets'
features. `package.variants` chooses between them when the package is loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import platform
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from inductor_ext import exc
from inductor_ext.cpp_wrapper.build import cpu_target
from inductor_ext.hooks import context

_CROSS_COMPILERS = {"aarch64": "aarch64-linux-gnu-g++"}
"""Architectures other than x86-64, and the compiler that is needed to compile for them."""

_SINGLE_TARGET_OPTIONS = ("aot_inductor.package_cpp_only", "aot_inductor.output_path")
"""Options that give the files of a model a place where those of only one target fit."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A target that a model is compiled for."""

    name: str
    """Name in the manifest, such as "x86-64-v3"."""
    level: str
    """CPU level of the code, of `cpu_target.SIMD_LENGTHS`."""

    @property
    def device_type(self) -> str:
        """The device type of the models that can be compiled for the target."""
        return "cpu"

    def settings(self) -> dict[str, Any]:
        """Return the settings of the extension for the compile."""
        return {"aot_isa": self.level}

    def options(self) -> dict[str, Any]:
        """Return the options of Inductor for the compile."""
        return cpu_target.target_options(self.level)

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Let Inductor compile for the target, in this thread."""
        with context.enter(cpu_level=self.level):
            yield


def parse(cpu_targets: Sequence[str] | None) -> tuple[Target, ...]:
    """Return the targets by these names, without duplicates, the least demanding one first.

    Raises:
        exc.UnknownTargetError: there is no target of that name.
        exc.UnsupportedTargetError: this machine cannot compile for a target.
        exc.BadArgumentError: an argument is not a list of names.
    """
    if cpu_targets is None:
        return ()
    names = _check_names("cpu_targets", cpu_targets)
    levels = list(cpu_target.SIMD_LENGTHS)
    for name in names:
        if name in _CROSS_COMPILERS:
            raise _cross_compile_error(name)
        if name not in levels:
            raise exc.UnknownTargetError(name=name, known=", ".join((*levels, *_CROSS_COMPILERS)))
    machine = platform.machine()
    if machine != "x86_64":
        why = f"it is a level of x86-64, and this machine has the architecture {machine}"
        fix = "Compile on an x86-64 machine, or omit cpu_targets."
        raise exc.UnsupportedTargetError(target=names[0], why=why, fix=fix)
    return tuple(Target(name, name) for name in levels if name in names)


def _check_names(argument: str, names: Any) -> list[str]:
    if (
        isinstance(names, str)
        or not isinstance(names, Collection)
        or not names
        or not all(isinstance(name, str) for name in names)
    ):
        allowed = "a list of one or more names of targets"
        raise exc.BadArgumentError(name=argument, actual=repr(names), allowed=allowed)
    return list(names)


def _cross_compile_error(name: str) -> exc.UnsupportedTargetError:
    compiler = _CROSS_COMPILERS[name]
    if platform.machine() == name:
        why, fix = "packages for this architecture have one CPU target", "Omit cpu_targets."
    elif shutil.which(compiler) is None:
        why = f"the cross compiler {compiler} is not installed"
        fix = f"Compile on a machine of the architecture {name}."
    else:
        why = f"there is no libtorch for {name} to link with {compiler}"
        fix = f"Compile on a machine of the architecture {name}."
    return exc.UnsupportedTargetError(target=name, why=why, fix=fix)


def check(
    targets: Sequence[Target], devices: Collection[str], options: Mapping[str, Any], enabled: bool
) -> None:
    """Check that models can be compiled for the targets. Do nothing without targets.

    Args:
        targets: the result of `parse`.
        devices: device types of the programs' tensors.
        options: Inductor's options for the compile.
        enabled: the setting `enabled`.

    Raises:
        exc.UnsupportedTargetError: they cannot; nothing was compiled.
    """
    if not targets:
        return
    target, others = targets[0], sorted({*devices} - {targets[0].device_type})
    if not enabled:
        why, fix = "the extension is disabled", "Set the setting enabled to True."
    elif others:
        why = f"a program has tensors on {', '.join(others)}"
        fix = f"Export the model on {target.device_type}."
    elif used := [name for name in _SINGLE_TARGET_OPTIONS if options.get(name)]:
        why = f"the option {used[0]} does not support named targets"
        fix = "Unset the option."
    else:
        return
    raise exc.UnsupportedTargetError(target=target.name, why=why, fix=fix)
