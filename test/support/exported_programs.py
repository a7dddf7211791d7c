"""Exported programs of plain functions."""

from __future__ import annotations

import io
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


def reload(program: ExportedProgram) -> ExportedProgram:
    """The program after it was saved."""
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)
