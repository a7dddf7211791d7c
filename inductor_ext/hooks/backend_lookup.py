"""Lets several threads look up the backend at the same time.

When torch first sees the name, in `torch.compile(backend="inductor_ext")`, it loads the entry point
and then registers the function. If a second thread does the same meanwhile, torch rejects the later
registration: "duplicate name". Inductor is registered when torch is imported, and has no such gap.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from inductor_ext.hooks import registry
from inductor_ext.hooks.registry import Hook

HOOKS = (
    Hook(
        "registered_backends",
        "replaced",
        ("torch._dynamo.backends.registry._COMPILER_FNS",),
        "hooks.backend_lookup",
        "A backend that is registered is rejected. Two threads that look up the extension at the "
        "same time register it twice. The functions cannot be replaced: a thread that waits for "
        "the entry point is inside of them. Replaced when torch loads the entry point.",
        relies_on=("torch._dynamo.backends.registry.register_backend",),
    ),
)

_NAME = "inductor_ext"


class _Backends(dict[str, Any]):
    """torch's registered backends by name. That of the extension may be registered again, and is
    found while another thread registers it.
    """

    def __init__(self, backend: Callable[..., Any], registered: Mapping[str, Any]) -> None:
        super().__init__(registered)
        self._backend = backend

    def __contains__(self, name: object) -> bool:
        """Whether a name is registered for good. torch registers the others."""
        return name != _NAME and super().__contains__(name)

    def __missing__(self, name: str) -> Any:
        if name == _NAME:
            return self._backend
        raise KeyError(name)


def install_hooks(backend: Callable[..., Any]) -> None:
    """Replace torch's dictionary, once per process.

    Args:
        backend: the function that torch registers as "inductor_ext".
    """
    registry.install(HOOKS, {"registered_backends": functools.partial(_Backends, backend)})
