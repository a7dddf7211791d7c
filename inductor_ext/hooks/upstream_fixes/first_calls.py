"""Fix for the first call of a compiled function, which computes some operators differently.

AOTAutograd checks custom operators in the first call, by a dispatch mode. Operators that run under
a mode ignore the conjugate and negated views that they create: `torch.linalg.pinv` of a complex
matrix is wrong, and so are custom operators. Here they run as they do without the mode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from inductor_ext.hooks import context, registry
from inductor_ext.hooks.registry import Hook

_WRAPPERS = "torch._functorch._aot_autograd.runtime_wrappers"

HOOKS = (
    Hook(
        "first_calls",
        "replaced",
        (f"{_WRAPPERS}._FirstInvocationContext.__init__",),
        "hooks.upstream_fixes.first_calls",
        "The dispatch mode of the first call disables the dispatch keys of conjugate and negated "
        "views inside of operators.",
        relies_on=(
            f"{_WRAPPERS}._FirstInvocationContext.__call__",
            f"{_WRAPPERS}._AnalyzeCustomOpInputOutputMode.__torch_dispatch__",
        ),
    ),
)


def install_hooks() -> None:
    """Install the dispatcher, once per process."""
    registry.install(HOOKS, {"first_calls": _dispatch_init})


def _dispatch_init(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        if context.settings() is not None:
            self.__class__ = _first_call_class()

    return __init__


@functools.cache
def _first_call_class() -> type:
    """The class of contexts that belong to functions compiled by the extension."""
    import torch
    from torch._functorch._aot_autograd import runtime_wrappers

    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.Conjugate)
    keys = keys | torch._C.DispatchKeySet(torch._C.DispatchKey.Negative)

    class Mode(runtime_wrappers._AnalyzeCustomOpInputOutputMode):
        def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
            included = torch._C._dispatch_tls_local_include_set()
            excluded = torch._C._dispatch_tls_local_exclude_set()
            with torch._C._ForceDispatchKeyGuard(included, excluded - keys):
                return super().__torch_dispatch__(*args, **kwargs)

    class FirstCall(runtime_wrappers._FirstInvocationContext):
        def __call__(self) -> Any:
            mode = super().__call__()
            is_check = isinstance(mode, runtime_wrappers._AnalyzeCustomOpInputOutputMode)
            return Mode() if is_check else mode

    return FirstCall
