"""Judges operators: eager mode, Inductor (default) and inductor_ext on PyTorch's samples.

A case is one entry of `op_db` with one dtype: its first few sample inputs, called in one compiled
function. The sweep checks that inductor_ext agrees with eager mode wherever Inductor (default)
does. `disagreement` and `layouts` define what is compared, `judge` how a case is judged.

Determinism: every run starts from one seed, and Inductor draws random numbers from eager mode's
generators (`fallback_random`), so that random operators are compared by value too. Memory that an
operator leaves uninitialized cannot be compared: of those operators (`UNINITIALIZED`) only shapes,
dtypes and layouts are compared. FX graph cache and AOTAutograd cache are off, so that each verdict
comes from code generated in this run; compiled C++ is shared between both backends through
Inductor's C++ cache, which is keyed by source text.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import itertools
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree

from inductor_ext.hooks.records import CompileRecord
from test.fuzz import op_sweep_data as data

DEFAULT_DTYPES = ("float32", "int64", "bool")

OTHER_DTYPES = ("float16", "bfloat16", "float64", "complex64", "int32", "uint8")

SAMPLES = 3

BATCH = 8
"""Cases compiled together: a C++ compile costs about the same for eight small loops as for one."""

SEED = 1729

UNINITIALIZED = frozenset(
    {
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "resize_as_",
    }
)
"""Operators whose result is partly or wholly uninitialized memory."""

TOLERANCES = {
    # Inductor's and eager mode's elementary functions differ by a few units in the last place, and
    # their sums add in different orders.
    torch.float64: (1e-7, 1e-7),
    torch.float32: (1e-5, 1e-5),
    torch.complex64: (1e-5, 1e-5),
    # Inductor computes fused operators in float32 and rounds once; eager rounds after each one.
    torch.float16: (2e-3, 1e-3),
    torch.bfloat16: (1.6e-2, 1e-2),
}
"""(relative, absolute) by dtype. Any other dtype must agree exactly."""


class Status(str, enum.Enum):
    """The outcome of one case under one backend."""

    AGREES = "agrees"
    DISAGREES = "disagrees"
    FAILS = "fails"
    NOT_CAPTURED = "not_captured"


class Verdict(str, enum.Enum):
    """The verdict of a case on inductor_ext."""

    AGREE = "agree"
    OURS_DISAGREES = "ours_disagrees"
    OURS_FAILS = "ours_fails"
    STOCK_DISAGREES = "stock_disagrees"
    STOCK_FAILS = "stock_fails"
    EAGER_FAILS = "eager_fails"
    NOT_CAPTURED = "not_captured"
    """Dynamo passed no graph to any backend: the operator ran in eager mode."""


@dataclasses.dataclass(frozen=True, order=True)
class Case:
    """One `op_db` entry ("name" or "name.variant") with one dtype."""

    operator: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.operator}[{self.dtype}]"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A backend's status, with the reason where it does not agree."""

    status: Status
    why: str = ""
    other_layout: frozenset[int] = frozenset()
    """Indices into `layouts` of the results whose strides or aliasing are not eager mode's."""


@dataclasses.dataclass(frozen=True)
class Result:
    """One judged case. `stock` and `ours` are None where the verdict was reached without them."""

    case: Case
    verdict: Verdict
    why: str = ""
    stock: Status | None = None
    ours: Status | None = None

    def to_json(self) -> dict[str, Any]:
        """The result as a JSON object; `from_json` reads it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Result:
        """Raises KeyError or ValueError where `fields` is not what `to_json` writes."""
        stock, ours = fields["stock"], fields["ours"]
        return cls(
            case=Case(**fields["case"]),
            verdict=Verdict(fields["verdict"]),
            why=fields["why"],
            stock=None if stock is None else Status(stock),
            ours=None if ours is None else Status(ours),
        )


def operators() -> dict[str, Any]:
    """The installed torch's OpInfo entries by full name, sorted."""
    from torch.testing._internal.common_methods_invocations import op_db

    entries = {".".join(filter(None, (op.name, op.variant_test_name))): op for op in op_db}
    return dict(sorted(entries.items()))


def supported(cases: Sequence[Case]) -> list[Case]:
    """The `cases` that the installed torch supports, in their order."""
    names = operators()
    return [
        case
        for case in cases
        if case.operator in names
        and getattr(torch, case.dtype) in names[case.operator].supported_dtypes("cpu")
    ]


def sample_cases() -> list[Case]:
    """The fixed sample, whatever torch is installed."""
    return [Case(name, dtype) for name, dtypes in data.SAMPLE.items() for dtype in dtypes.split()]


def batches(cases: Sequence[Case], size: int = BATCH) -> list[list[Case]]:
    """Groups of cases that are compiled together, each of one dtype, operators in order.

    Known failures of Inductor are groups of one case: otherwise their group would be judged twice.
    """
    stock_failures = {(failure.operator, failure.dtype) for failure in data.STOCK_FAILURES}
    alone = [case for case in cases if (case.operator, case.dtype) in stock_failures]
    groups = [[case] for case in alone]
    grouped: dict[str, list[Case]] = collections.defaultdict(list)
    for case in cases:
        if case not in alone:
            grouped[case.dtype].append(case)
    for same_dtype in grouped.values():
        groups += [same_dtype[i : i + size] for i in range(0, len(same_dtype), size)]
    return groups


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of an operator on one of its samples."""

    operator: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclasses.dataclass
class Run:
    """The results of a list of calls, and the arguments as the calls left them."""

    arguments: list[Any]
    results: list[Any]

    def leaves(self) -> list[Any]:
        """Everything observable: results first, then the arguments, which may be mutated."""
        return pytree.tree_leaves((self.results, self.arguments))


@dataclasses.dataclass
class Prepared:
    """A case with the calls that eager mode accepts, and their results in eager mode."""

    case: Case
    calls: list[Call]
    uses_random_numbers: bool
    expected: Run


def clone_arguments(arguments: Any) -> Any:
    """A copy of nested arguments that keeps strides, offsets and which tensors share memory."""
    storages: dict[int, torch.UntypedStorage] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()
        if not plain or tensor.is_nested or tensor.is_quantized:
            return tensor.clone()
        storage = tensor.untyped_storage()
        copied = storages.setdefault(storage.data_ptr() or id(tensor), storage.clone())
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            copied, tensor.storage_offset(), tensor.shape, tensor.stride()
        )

    return pytree.tree_map_only(torch.Tensor, copy, arguments)


def _run(program: Callable[[list[Any]], list[Any]], calls: Sequence[Call]) -> Run:
    arguments = clone_arguments([(call.args, call.kwargs) for call in calls])
    torch.manual_seed(SEED)
    return Run(arguments, program(arguments))


def _program(calls: Sequence[Call]) -> Callable[[list[Any]], list[Any]]:
    targets = [call.operator for call in calls]

    def program(arguments: list[Any]) -> list[Any]:
        results = []
        for target, (args, kwargs) in zip(targets, arguments, strict=True):
            results.append(target(*args, **kwargs))
        return results

    return program


def prepare(case: Case, operator: Any, samples: int = SAMPLES) -> Prepared | Result:
    """Run the case in eager mode, leaving out the samples that eager mode refuses."""
    torch.manual_seed(SEED)
    calls = []
    why = "no samples"
    try:
        inputs = operator.sample_inputs("cpu", getattr(torch, case.dtype))
        for sample in itertools.islice(inputs, samples):
            call = Call(operator.op, (sample.input, *sample.args), dict(sample.kwargs))
            try:
                _run(_program([call]), [call])
            except Exception as error:
                why = reason(error)
            else:
                calls.append(call)
    except Exception as error:
        why = reason(error)
    if not calls:
        return Result(case, Verdict.EAGER_FAILS, why)
    torch.manual_seed(SEED)
    seeded = torch.get_rng_state()
    expected = _run(_program(calls), calls)
    return Prepared(case, calls, not torch.equal(seeded, torch.get_rng_state()), expected)


def _call(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return operator(*args, **kwargs)


@contextlib.contextmanager
def _settings() -> Iterator[None]:
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
        inductor_ext.config.patch(enabled=True, fallback_to_eager=False),
    ):
        # An operator's warnings are unrelated to its compilation.
        warnings.simplefilter("ignore")
        yield


def _compiled_outcome(backend: str, prepared: Sequence[Prepared], *, whole: bool) -> Outcome:
    """Compile the calls of all cases in one function by `backend` and compare with eager mode.

    Args:
        backend: "inductor" or "inductor_ext".
        prepared: the cases.
        whole: reject graph breaks, so that all calls are compiled.
    """
    from torch._dynamo.utils import counters

    from inductor_ext import events

    calls = [call for case in prepared for call in case.calls]
    expected = Run(
        [argument for case in prepared for argument in case.expected.arguments],
        [result for case in prepared for result in case.expected.results],
    )
    values = not any(case.case.operator in UNINITIALIZED for case in prepared)
    torch._dynamo.reset()
    counters.clear()
    try:
        compiled = torch.compile(_program(calls), backend=backend, fullgraph=whole, dynamic=False)
        with events.capture() as records:
            # Run twice and compare both afterwards: a second call must not write into memory of the
            # first call's results.
            runs = [_run(compiled, calls), _run(compiled, calls)]
    except Exception as error:
        return Outcome(Status.FAILS, reason(error))
    graphs = counters["stats"]["unique_graphs"]
    ours = sum(isinstance(record, CompileRecord) for record in records)
    if ours != (graphs if backend == "inductor_ext" else 0):
        return Outcome(Status.FAILS, f"inductor_ext compiled {ours} graphs of {graphs}")
    for run in runs:
        why = disagreement(expected, run, values=values)
        if why:
            return Outcome(Status.DISAGREES, why)
    other_layout = frozenset(
        index
        for run in runs
        for index, (left, right) in enumerate(zip(layouts(expected), layouts(run), strict=True))
        if left != right
    )
    return Outcome(Status.AGREES if graphs else Status.NOT_CAPTURED, other_layout=other_layout)


def run_cases(cases: Sequence[Case], backend: str = "inductor_ext") -> int:
    """Compile and run cases without judging them; return how many ran.

    If they do not compile together, each is compiled alone.
    """
    entries = operators()
    with _settings():
        prepared = [prepare(case, entries[case.operator]) for case in cases]
        groups = [[case for case in prepared if isinstance(case, Prepared)]]
        ran = 0
        while groups:
            group = groups.pop()
            outcome = _compiled_outcome(backend, group, whole=False) if group else None
            if outcome is None or outcome.status is not Status.FAILS:
                ran += len(group)
            elif len(group) > 1:
                groups += [[case] for case in group]
    return ran


def disagreement(expected: Run, actual: Run, *, values: bool = True) -> str:
    """How two runs differ in what a user can observe; empty where they agree.

    Compared are the structure of the results, the type of every leaf (a tensor is no scalar), and
    of tensors dtype, device, layout (strided, sparse), shape and, within `TOLERANCES`, values, NaN
    being equal to NaN. Arguments are compared after the calls as results are, for mutations.

    Args:
        values: whether tensors' values are compared.
    """
    if pytree.tree_structure(expected.results) != pytree.tree_structure(actual.results):
        return "the results are nested differently"
    for left, right in zip(expected.leaves(), actual.leaves(), strict=True):
        if type(left) is not type(right):
            return f"{type(right).__name__} instead of {type(left).__name__}"
        try:
            if isinstance(left, torch.Tensor):
                _assert_tensors_agree(left, right, values=values)
            elif isinstance(left, (int, float, complex)):
                torch.testing.assert_close(right, left, equal_nan=True)
            elif isinstance(left, (str, tuple, torch.dtype)):
                assert right == left, f"{right} instead of {left}"
        except AssertionError as error:
            return reason(error)
    return ""


def _assert_tensors_agree(left: torch.Tensor, right: torch.Tensor, *, values: bool) -> None:
    if not values:
        left, right = torch.zeros_like(left), torch.zeros_like(right)
    rtol, atol = TOLERANCES.get(left.dtype, (0.0, 0.0))
    torch.testing.assert_close(right, left, rtol=rtol, atol=atol, equal_nan=True)


def layouts(run: Run) -> list[tuple[tuple[int, ...], int | None]]:
    """For each strided tensor in the results its strides and the argument whose memory it shares.

    Inductor does not promise eager mode's strides, so inductor_ext must have them only where
    Inductor (default) does. Empty tensors are left out, and the stride of a dimension of size one,
    which has no meaning, is 0. Without shared memory the argument's index is None.
    """
    owners: dict[int, int] = {}
    for index, leaf in enumerate(pytree.tree_leaves(run.arguments)):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.numel():
            owners.setdefault(leaf.untyped_storage().data_ptr(), index)
    failures = []
    for leaf in pytree.tree_leaves(run.results):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.numel():
            strides = (s if n > 1 else 0 for s, n in zip(leaf.stride(), leaf.shape, strict=True))
            failures.append((tuple(strides), owners.get(leaf.untyped_storage().data_ptr())))
    return failures


_PATH = re.compile(r"(?:/[\w.+@=-]+){2,}")

_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")


def reason(error: BaseException) -> str:
    """An exception as one line of a committed file: without paths and addresses."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # torch.testing's message has three lines, and dynamo's begins by naming the backend.
    begins = bool(lines) and lines[0].endswith(":")
    minimum = 3 if isinstance(error, AssertionError) else 1 + begins
    text = " ".join(lines[:minimum])
    text = _PATH.sub(lambda match: os.path.basename(match.group()), text)
    return _ADDRESS.sub("0x...", f"{type(error).__name__}: {text}")[:240]


Announce = Callable[[str], None]


def judge(
    cases: Sequence[Case], *, samples: int = SAMPLES, announce: Announce = lambda stage: None
) -> list[Result]:
    """Judge a batch of cases.

    The cases are compiled together, without graph breaks. Where both backends agree with eager
    mode, that is every case's verdict. Else each half is judged by itself, down to single cases,
    which may have graph breaks. Cases that draw random numbers are always judged alone, since
    other operators' draws would shift theirs.

    Args:
        cases: of this torch, see `supported`.
        samples: the number of samples of each operator, from its first.
        announce: called with the stage about to start, for the attribution of a crash: "eager",
            "stock" (Inductor) and, if that agrees, "ours" (the extension).
    """
    names = operators()
    announce("eager")
    results, together = [], []
    with _settings():
        for case in cases:
            ready = prepare(case, names[case.operator], samples)
            if isinstance(ready, Result):
                results.append(ready)
            elif ready.uses_random_numbers or case.operator in UNINITIALIZED:
                results.append(_judge_alone(ready, announce))
                announce("eager")
            else:
                together.append(ready)
        results += _judge_together(together, announce)
    return sorted(results, key=lambda result: cases.index(result.case))


def _judge_together(prepared: list[Prepared], announce: Announce) -> list[Result]:
    if len(prepared) <= 1:
        return [_judge_alone(case, announce) for case in prepared]
    announce("stock")
    stock = _compiled_outcome("inductor", prepared, whole=True)
    if stock.status is Status.AGREES:
        announce("ours")
        ours = _compiled_outcome("inductor_ext", prepared, whole=True)
        verdict, _ = verdict_of(stock, ours)
        if verdict is Verdict.AGREE:
            return [Result(p.case, verdict, "", stock.status, ours.status) for p in prepared]
    middle = len(prepared) // 2
    return [
        *_judge_together(prepared[:middle], announce),
        *_judge_together(prepared[middle:], announce),
    ]


def _judge_alone(prepared: Prepared, announce: Announce) -> Result:
    announce("stock")
    stock = _compiled_outcome("inductor", [prepared], whole=False)
    if stock.status in (Status.AGREES, Status.NOT_CAPTURED):
        announce("ours")
    ours = _compiled_outcome("inductor_ext", [prepared], whole=False)
    verdict, why = verdict_of(stock, ours)
    return Result(prepared.case, verdict, why, stock.status, ours.status)


def verdict_of(stock: Outcome, ours: Outcome) -> tuple[Verdict, str]:
    """The verdict that follows from the two backends' outcomes, and its reason."""
    if stock.status is Status.FAILS:
        return Verdict.STOCK_FAILS, stock.why
    if stock.status is Status.DISAGREES:
        return Verdict.STOCK_DISAGREES, stock.why
    if ours.status is Status.FAILS:
        return Verdict.OURS_FAILS, ours.why
    if ours.status is Status.DISAGREES:
        return Verdict.OURS_DISAGREES, ours.why
    if not ours.other_layout <= stock.other_layout:
        return Verdict.OURS_DISAGREES, "strides or aliasing differ from eager mode and stock"
    if ours.status is not stock.status:
        return Verdict.OURS_FAILS, f"stock: {stock.status.value}, ours: {ours.status.value}"
    if ours.status is Status.NOT_CAPTURED:
        return Verdict.NOT_CAPTURED, "Dynamo captured no graph"
    return Verdict.AGREE, ""
