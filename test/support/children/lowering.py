"""A user's choices handler and a registered lowering, which a compile subprocess imports."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch._inductor.choices import InductorChoices
from torch._inductor.virtualized import V

from inductor_ext import lowerings
from inductor_ext.hooks import context

OPERATOR = torch.ops.aten.asinh.default


class Choices(InductorChoices):
    """Carries the path of a file into whatever process the lowering runs in."""

    def __init__(self, path: str = "") -> None:
        self.path = path


def asinh(stock: Callable[..., Any], x: Any) -> Any:
    """Note the process and the settings, and call Inductor's lowering."""
    path = getattr(V.choices, "path", "")
    if path:
        with open(path, "a") as file:
            file.write(f"{os.getpid()} {context.settings().non_default()}\n")
    return stock(x)


if OPERATOR not in lowerings.registered():
    lowerings.register_lowering(OPERATOR)(asinh)
