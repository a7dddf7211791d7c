"""The guards of a shape environment that a compiled model relies on.

Inductor also queries sizes to choose the faster of two correct variants. The guards of such queries
would reject inputs that the program was exported for. `list_guards` leaves them out, and
`ignore_performance_guards` keeps a compile from recording them. They are recognized by the stack
frame of the query. Modifies the shape environment only within `ignore_performance_guards`.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import sympy  # type: ignore[import-untyped]
import torch

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx.experimental.symbolic_shapes import ShapeEnv


def find_shape_environment(values: Iterable[Any]) -> ShapeEnv | None:
    """Return the shape environment of the first symbolic or fake value, or None."""
    for value in values:
        owner = value.node if isinstance(value, torch.SymInt) else getattr(value, "fake_mode", None)
        environment: ShapeEnv | None = getattr(owner, "shape_env", None)
        if environment is not None:
            return environment
    return None


_PERFORMANCE_QUERIES = re.compile(
    r"torch/(_subclasses/|_prims_common/|_inductor/("
    r"choices|codegen/cpp|decomposition|fx_passes/|kernel/(conv|mm)|pattern_matcher|scheduler"
    r"|select_algorithm|template_heuristics|utils\.py:(cmp|evaluate)))"
)
"""Where torch asks about sizes only to choose the faster variant or the strides of eager mode.

For instance, whether a reduction is long enough to split, or whether a batch is large enough for
another convolution. The generated code is correct for the other answer too, and enforcing the
guard would reject sizes that the program was exported for. This holds for inequalities only: code
may rely on an equality.
"""

_INTERMEDIATE = re.compile(r"torch/(__init__\.py|fx/|_inductor/sizevars\.py|utils/)|<string>")
"""Intermediate frames between a query about sizes and the code that makes it."""


def list_guards(environment: ShapeEnv) -> list[sympy.Basic]:
    """Return the guards of a shape environment, except inequalities of performance queries."""
    guards: list[sympy.Basic] = []
    for guard in environment.guards:
        frame: Any = getattr(getattr(guard, "sloc", None), "framework_loc", None)
        place = frame if isinstance(frame, str) else ""
        if hasattr(frame, "filename"):
            place = f"{frame.filename}:{frame.name}"
        if isinstance(guard.expr, sympy.Eq) or not _PERFORMANCE_QUERIES.search(place):
            # The guard may use a symbol that has since been replaced by another's expression.
            guards.append(environment.replace(guard.expr))
    return guards


@contextlib.contextmanager
def ignore_performance_guards(program: ExportedProgram | torch.fx.GraphModule) -> Iterator[None]:
    """Keep a compile from narrowing size ranges by performance queries.

    If the answer is that a size is below 16, its range ends there, and later decisions may rely on
    that without a guard of their own, so the guard could no longer be dropped. Such queries are
    still answered from the example's sizes, but no guard is recorded.

    Args:
        program: the exported program that is compiled, or its module.
    """
    environment: Any = find_shape_environment(
        node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")
    )
    if environment is None or "evaluate_expr" in vars(environment):
        # No shape environment, or already patched.
        yield
        return
    original = environment.evaluate_expr

    @functools.wraps(original)
    def evaluate_expr(query: sympy.Basic, *args: Any, **kwargs: Any) -> Any:
        if not _PERFORMANCE_QUERIES.search(_name_caller()):
            return original(query, *args, **kwargs)
        with environment.suppress_guards():
            answer = original(query, *args, **kwargs)
        if isinstance(query, (sympy.Eq, sympy.Ne)) and bool(answer) == isinstance(query, sympy.Eq):
            # The code may rely on the equality.
            return original(query, *args, **kwargs)
        return answer

    # Patch only this instance, so that compiles of other programs are unaffected.
    environment.evaluate_expr = evaluate_expr
    try:
        yield
    finally:
        del environment.evaluate_expr


def _name_caller() -> str:
    """Return the file and function of the code that queries a size."""
    frame: Any = sys._getframe(2)
    while frame is not None and _INTERMEDIATE.search(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_code.co_name}" if frame is not None else ""
