"""Compiles cases of the operator sweep by one way and compares their runs with eager mode.

Inductor draws random numbers from eager mode's generators (`fallback_random`), so that random
operators are compared by value too. Memory that an operator leaves uninitialized cannot be
compared: of those operators only shapes, dtypes and layouts are compared. FX graph cache and
AOTAutograd cache are off, so that each verdict comes from code generated in this run; compiled C++
is shared between both backends through Inductor's C++ cache, which is keyed by source text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import itertools
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree

from inductor_ext.hooks.records import CompileRecord
from test.fuzz import op_sweep_data as data
from test.fuzz.op_sweep_cases import Prepared, Program, make_program, run
from test.fuzz.op_sweep_compare import Run, disagreement, layouts, reason


class Status(str, enum.Enum):
    """The outcome of one case under one backend."""

    AGREES = "agrees"
    DISAGREES = "disagrees"
    FAILS = "fails"
    NOT_CAPTURED = "not_captured"
    """No graph was passed to the backend: the operator ran in eager mode, or is not exported."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A backend's status, with the reason where it does not agree."""

    status: Status
    why: str = ""
    other_layout: frozenset[int] = frozenset()
    """Indices into `layouts` of the results whose strides or aliasing are not eager mode's."""

    @property
    def is_eager(self) -> bool:
        """Whether nothing differs from eager mode."""
        return self.status is Status.AGREES and not self.other_layout


def _call(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return operator(*args, **kwargs)


@contextlib.contextmanager
def settings() -> Iterator[None]:
    """Settings of torch and of the extension for all runs, those in eager mode included."""
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config
    from torch.testing._internal import common_methods_invocations

    import inductor_ext

    with (
        warnings.catch_warnings(),
        # op_db wraps random operators in a function that seeds them, which breaks Dynamo's graph.
        mock.patch.object(common_methods_invocations, "wrapper_set_seed", _call),
        # Without these, operators whose result's shape or value depends on data stay in eager mode.
        torch._dynamo.config.patch(
            capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True
        ),
        torch._inductor.config.patch(fx_graph_cache=False, fallback_random=True, compile_threads=1),
        torch._functorch.config.patch(enable_autograd_cache=False),
        inductor_ext.config.patch(
            enabled=True, fallback_to_eager=False, fallback_to_inductor=False
        ),
    ):
        # An operator's warnings are unrelated to its compilation.
        warnings.simplefilter("ignore")
        yield


def compiled_outcomes(backend: str, group: Sequence[Prepared], *, whole: bool) -> list[Outcome]:
    """Compile the calls of all cases in one program and compare each case with eager mode.

    Args:
        backend: "inductor" or "inductor_ext".
        group: cases of one way and direction.
        whole: reject graph breaks, so that all calls are compiled.

    Raises:
        Exception: the compile or the run fails.
    """
    torch._dynamo.reset()
    if group[0].case.way == "package":
        with tempfile.TemporaryDirectory() as folder:
            return _compare(_package(backend, group, folder), group)
    return _compiled_by_dynamo(backend, group, whole=whole)


def _compiled_by_dynamo(backend: str, group: Sequence[Prepared], *, whole: bool) -> list[Outcome]:
    from torch._dynamo.utils import counters

    from inductor_ext import events

    case = group[0].case
    options = {"cpp_wrapper": True} if case.way == "cpp_wrapper" else None
    calls = [call for prepared in group for call in prepared.calls]
    counters.clear()
    compiled = torch.compile(
        make_program(calls), backend=backend, fullgraph=whole, dynamic=False, options=options
    )
    with events.capture() as records:
        outcomes = _compare(compiled, group)
    graphs = counters["stats"]["unique_graphs"]
    ours = sum(isinstance(record, CompileRecord) for record in records)
    most = 0 if backend == "inductor" else (1 + case.backward) * graphs
    if not min(graphs, most) <= ours <= most:
        why = f"inductor_ext compiled {ours} graphs of {graphs}"
        return [Outcome(Status.FAILS, why)] * len(group)
    if not graphs:
        agrees = all(outcome.status is Status.AGREES for outcome in outcomes)
        return [Outcome(Status.NOT_CAPTURED)] * len(group) if agrees else outcomes
    return outcomes


def _compare(program: Program, group: Sequence[Prepared]) -> list[Outcome]:
    calls = [call for prepared in group for call in prepared.calls]
    backward = group[0].case.backward
    # Run twice and compare both afterwards: a second call must not write into memory of the first
    # call's results.
    runs = [run(program, calls, backward=backward) for _ in range(2)]
    firsts = itertools.accumulate((len(prepared.calls) for prepared in group), initial=0)
    return [
        _compare_case(prepared, [run.part(first, len(prepared.calls)) for run in runs])
        for prepared, first in zip(group, firsts, strict=False)
    ]


def _compare_case(prepared: Prepared, runs: Sequence[Run]) -> Outcome:
    values = prepared.case.operator not in data.UNINITIALIZED
    for actual in runs:
        why = disagreement(
            prepared.expected, actual, values=values, run_exactly=lambda: prepared.exact
        )
        if why:
            return Outcome(Status.DISAGREES, why)
    expected = layouts(prepared.expected)
    other_layout = frozenset(
        index
        for actual in runs
        for index, (left, right) in enumerate(zip(expected, layouts(actual), strict=True))
        if left != right
    )
    return Outcome(Status.AGREES, other_layout=other_layout)


# --- packages -----------------------------------------------------------------------------------


class _Module(torch.nn.Module):
    """All calls of a group: tensors in, tensors out; everything else is constant."""

    def __init__(self, group: Sequence[Prepared]) -> None:
        super().__init__()
        calls = [call for prepared in group for call in prepared.calls]
        self.program = make_program(calls)
        self.arguments = [(call.args, call.kwargs) for call in calls]

    def forward(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return take_tensors(self.program(put_tensors(self.arguments, tensors)))


def take_tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors of nested arguments or results, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def put_tensors(tree: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """A copy of nested arguments or results with other tensors, in order."""
    left = iter(tensors)
    return pytree.tree_map_only(torch.Tensor, lambda _: next(left), tree)


def _export(group: Sequence[Prepared]) -> torch.export.ExportedProgram:
    module = _Module(group)
    return torch.export.export(module, (take_tensors(module.arguments),), strict=False)


def _package(backend: str, group: Sequence[Prepared], folder: str) -> Program:
    import torch._inductor

    import inductor_ext

    expected = [result for prepared in group for result in prepared.expected.results]
    path = os.path.join(folder, "package.pt2")
    if backend == "inductor_ext":
        inductor_ext.aoti_compile_and_package(_export(group), package_path=path)
        model: Any = inductor_ext.load(path)
    else:
        torch._inductor.aoti_compile_and_package(_export(group), package_path=path)
        model = torch._inductor.aoti_load_package(path)

    def program(arguments: list[Any]) -> list[Any]:
        results = model(take_tensors(arguments))
        assert len(results) == len(take_tensors(expected)), "the number of results differs"
        return put_tensors(expected, results)  # type: ignore[no-any-return]

    return program


def export_failure(prepared: Prepared) -> str:
    """Why a case cannot be a package; empty if it can."""
    if not take_tensors(prepared.expected.results):
        return "no tensor among the results"
    try:
        _export([prepared])
    except Exception as error:
        return f"torch.export: {reason(error)}"
    return ""
