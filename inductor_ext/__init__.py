"""inductor_ext: an out-of-tree extension of PyTorch's Inductor.

`torch.compile(model, backend="inductor_ext")` needs no import of this package. Importing it changes
nothing in torch and is cheap: every public name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inductor_ext import config, events, exc
    from inductor_ext.aot import aoti_compile_and_package
    from inductor_ext.cpp_wrapper.load.load import load
    from inductor_ext.hooks.activate import activate, install, uninstall
    from inductor_ext.options import list_mode_options, list_options
    from inductor_ext.report.gemm_report import explain
    from inductor_ext.report.memory_report import memory_report

__version__ = "0.1.0"

_HOMES = {
    "activate": "hooks.activate",
    "aoti_compile_and_package": "aot",
    "explain": "report.gemm_report",
    "install": "hooks.activate",
    "list_mode_options": "options",
    "list_options": "options",
    "load": "cpp_wrapper.load.load",
    "memory_report": "report.memory_report",
    "uninstall": "hooks.activate",
}
"""Public functions, each with the module that defines it."""

_MODULES = ("config", "events", "exc")

_RUNTIMES = {
    "arena_runtime": "memory.arena_runtime",
    "counters_runtime": "templates.triton.semaphores",
    "cutlass_runtime": "templates.cutlass.runtime",
}
"""Modules under the names by which code that earlier versions generated imports them."""

__all__ = [
    "__version__",
    "activate",
    "aoti_compile_and_package",
    "config",
    "events",
    "exc",
    "explain",
    "install",
    "list_mode_options",
    "list_options",
    "load",
    "memory_report",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _RUNTIMES:
        return importlib.import_module(f"{__name__}.{_RUNTIMES[name]}")
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
