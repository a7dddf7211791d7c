"""What the features share about Inductor's wrapper codegens: the outermost one, and linked objects.

A lowering that generates a call of a kernel attaches the kernel's object to the wrapper codegen of
the graph. The build of an AOT package writes the attached objects and links them. This module knows
no feature.
"""

from __future__ import annotations

from typing import Any, Protocol

from inductor_ext.settings import Settings


def root_wrapper(wrapper: Any) -> Any:
    """Return the wrapper of the outermost function."""
    while (parent := getattr(wrapper, "parent_wrapper", None)) is not None:
        wrapper = parent
    return wrapper


class LinkedObject(Protocol):
    """An object file that is written when a model is built."""

    @property
    def name(self) -> str:
        """Name of the kernel in the object, as profilers show it."""

    def write(self, folder: str, settings: Settings) -> str:
        """Write the object into a folder and return its path.

        Raises:
            exc.MissingToolchainError, exc.KernelBuildError: the kernel cannot be built.
        """


def linked_objects(wrapper: Any) -> dict[Any, LinkedObject]:
    """Return the mutable mapping of a wrapper codegen's objects, by what identifies a kernel."""
    objects: dict[Any, LinkedObject] = vars(wrapper).setdefault("inductor_ext_objects", {})
    return objects


def call_decorators(wrapper: Any) -> list[str]:
    """Return the mutable list of functions that decorate `call` of a C++ graph of torch.compile.

    Each is "module:function"; the first is innermost. `cpp_wrapper` writes the calls.
    """
    decorators: list[str] = vars(wrapper).setdefault("inductor_ext_call_decorators", [])
    return decorators


def budget_exception(wrapper: Any) -> str:
    """Return the C++ class, made from a text, to throw if a call exceeds `memory_budget`."""
    return getattr(wrapper, "budget_exception", "std::runtime_error")
