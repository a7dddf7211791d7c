"""A comparison of eager mode, Inductor (default) and the extension on one model.

Every way is compiled with new caches, checked against the model in float64, and timed in turns with
the others, so that a change of the clock affects all of them. Nothing is trained: calls run under
`torch.no_grad`.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from inductor_ext.reports import memory_measure
from inductor_ext.reports.text import align_columns, qualified_name

WAYS = ("eager", "inductor", "inductor_ext")
"""The ways to run a model: in eager mode, or compiled by a backend."""

_FEWEST_ROUNDS = 5
_WARM_UP_CALLS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was measured of one way. All but the name are None if it failed."""

    way: str
    """One of `WAYS`."""
    compile_seconds: float | None = None
    """Time of the first call, with new caches; None for eager mode."""
    milliseconds: float | None = None
    """Median time of a call."""
    memory_bytes: Mapping[str, int] | None = None
    """By device: the most memory that a call has allocated, above what was allocated before."""
    error: float | None = None
    """Largest difference to the reference, divided by the largest value of that result."""
    failure: str | None = None
    """The error, if there was one."""

    @property
    def total_bytes(self) -> int | None:
        """The memory on all devices; None if it was not measured."""
        return None if self.memory_bytes is None else sum(self.memory_bytes.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of `compare`. `str()` is the table."""

    title: str
    reference: str
    """What results were compared with: "float64" or "eager"."""
    calls: int
    """Number of timed calls of each way."""
    outcomes: tuple[Outcome, ...]

    @property
    def inductor_milliseconds(self) -> float | None:
        """Median time of a call of Inductor (default); None if it failed."""
        return next((o.milliseconds for o in self.outcomes if o.way == "inductor"), None)

    def __str__(self) -> str:
        """Format the comparison as text."""
        rows: list[Sequence[str]] = [
            ("", "ms per call", "of Inductor", "compile s", "memory MiB", "error")
        ]
        rows += [format_row(outcome, self.inductor_milliseconds) for outcome in self.outcomes]
        title = f"{self.title}: medians of {self.calls} calls, error against {self.reference}"
        failed = [f"{o.way} failed: {o.failure}" for o in self.outcomes if o.failure]
        return "\n".join([title, "", *align_columns(rows, right=range(1, 6)), *failed])

    def to_json(self) -> str:
        """Return the comparison as one JSON object."""
        return json.dumps(dataclasses.asdict(self), indent=2)


def format_row(outcome: Outcome, base: float | None) -> tuple[str, str, str, str, str, str]:
    """Return the cells of a way: name, ms, ratio, compile s, memory MiB, error.

    Args:
        outcome: of the way.
        base: milliseconds of Inductor (default), for the ratio.
    """

    def show(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    time_ms = outcome.milliseconds
    memory = None if outcome.total_bytes is None else outcome.total_bytes / 2**20
    return (
        outcome.way,
        show(time_ms, ".3f"),
        show(time_ms / base if time_ms is not None and base else None, ".2f"),
        show(outcome.compile_seconds, ".1f"),
        show(memory, ".1f"),
        show(outcome.error, ".1e"),
    )


def compare(
    module: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    compile_options: Mapping[str, Any] | None = None,
    seconds: float = 5.0,
) -> Comparison:
    """Run a model in every way, and compare results, times and memory.

    Args:
        module: the model, on the device where it is to run.
        args: its positional arguments.
        kwargs: its keyword arguments. Default: None, there are none.
        compile_options: arguments of `torch.compile`, such as `mode` and `dynamic`.
        seconds: time for the timed calls of all ways together. Each way gets at least five.

    Returns:
        The comparison. A way that fails has the error in `failure`.
    """

    def call(function: Callable[..., Any]) -> Any:
        with torch.no_grad():
            result = function(*args, **(kwargs or {}))
        _synchronize()
        return result

    reference, kind = _find_reference(module, args, kwargs or {})
    functions: dict[str, Callable[..., Any]] = {}
    outcomes: dict[str, Outcome] = {}
    for way in WAYS:
        try:
            functions[way], outcomes[way] = _prepare(
                way, module, call, reference, compile_options or {}
            )
        except Exception as error:
            text = str(error).strip().splitlines() or [type(error).__name__]
            outcomes[way] = Outcome(way=way, failure=text[0])
    times = _time(functions, call, seconds)
    return Comparison(
        title=qualified_name(module),
        reference=kind,
        calls=min(map(len, times.values()), default=0),
        outcomes=tuple(
            dataclasses.replace(outcome, milliseconds=1e3 * statistics.median(times[way]))
            if way in times
            else outcome
            for way, outcome in outcomes.items()
        ),
    )


def _prepare(
    way: str,
    module: torch.nn.Module,
    call: Callable[[Callable[..., Any]], Any],
    reference: Any,
    compile_options: Mapping[str, Any],
) -> tuple[Callable[..., Any], Outcome]:
    """Compile a model, check its results, and measure its memory."""
    from torch._inductor.utils import fresh_cache

    function: Callable[..., Any] = module
    seconds = None
    if way != "eager":
        function = torch.compile(module, backend=way, **compile_options)
        with fresh_cache():
            start = time.perf_counter()
            call(function)
            seconds = time.perf_counter() - start
    error = _find_error(call(function), reference)
    for _ in range(_WARM_UP_CALLS):
        call(function)
    profile = memory_measure.profile_call(lambda: call(function), repeat=True)
    devices = dict.fromkeys(allocation.device for allocation in profile.allocations)
    memory = {
        device: memory_measure.growth(a for a in profile.allocations if a.device == device)[0]
        for device in devices
    }
    return function, Outcome(way=way, compile_seconds=seconds, memory_bytes=memory, error=error)


def _time(
    functions: Mapping[str, Callable[..., Any]],
    call: Callable[[Callable[..., Any]], Any],
    seconds: float,
) -> dict[str, list[float]]:
    """Return the seconds of calls, in which the functions take turns."""
    times: dict[str, list[float]] = {way: [] for way in functions}
    begin = time.perf_counter()
    rounds = 0
    while functions and (rounds < _FEWEST_ROUNDS or time.perf_counter() - begin < seconds):
        for way, function in functions.items():
            start = time.perf_counter()
            call(function)
            times[way].append(time.perf_counter() - start)
        rounds += 1
    return times


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _find_reference(
    module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, str]:
    """Return the results in float64, or in eager mode if the model does not run in float64."""

    def widen(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.double() if is_float else value

    with torch.no_grad():
        try:
            wide = copy.deepcopy(module).double()
            wide_args, wide_kwargs = pytree.tree_map(widen, (tuple(args), dict(kwargs)))
            return wide(*wide_args, **wide_kwargs), "float64"
        except Exception:
            return module(*args, **kwargs), "eager"


def _find_error(actual: Any, expected: Any) -> float:
    """Return the largest difference of a result, relative to its largest finite value.

    It is infinite if a result is NaN or infinite where the expected one is not.
    """
    errors = [0.0]
    for one, two in zip(pytree.tree_leaves(actual), pytree.tree_leaves(expected), strict=True):
        if isinstance(one, torch.Tensor) and one.numel():
            dtype = torch.complex128 if two.is_complex() else torch.float64
            one, two = one.to(dtype), two.to(dtype)
            # Equal infinities and NaNs of both are no error; any other NaN is.
            same = (one == two) | (one.isnan() & two.isnan())
            difference = (one - two).abs().masked_fill(same, 0.0).nan_to_num(math.inf, math.inf)
            largest = two.abs().masked_fill(~two.isfinite(), 0.0).max().clamp_min(1e-30)
            errors.append(float(difference.max() / largest))
    return max(errors)
