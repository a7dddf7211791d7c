"""Exported programs of plain functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.export import ExportedProgram

from test.support.aot_util import Function


def export(
    function: Callable[..., Any], *args: Any, shapes: Any = None, **kwargs: Any
) -> ExportedProgram:
    """The program of a function; `shapes` as torch.export takes them."""
    return torch.export.export(Function(function), args, kwargs, dynamic_shapes=shapes)
