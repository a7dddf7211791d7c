"""Lets several threads look up the backend at the same time.

When torch first sees the name, in `torch.compile(backend="inductor_ext")`, it loads the entry point
and then registers the function. If a second thread does the same meanwhile, torch rejects the later
registration: "duplicate name". Inductor is registered when torch is imported, and has no such gap.
"""

from __future__ import annotations

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
    """torch's registered backends by name. That of the extension may be registered again."""

    def __contains__(self, name: object) -> bool:
        """Whether a name is registered for good. torch registers the others."""
        return name != _NAME and super().__contains__(name)


def install_hooks() -> None:
    """Replace torch's dictionary, once per process."""
    registry.install(HOOKS, {"registered_backends": _Backends})
