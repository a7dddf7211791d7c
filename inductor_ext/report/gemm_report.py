"""`inductor_ext.explain`, `inductor-ext explain`: which kernel each GEMM of a model got, and why.

A function is compiled and called once, or a script is run, with every cache of compiled code off,
so that each graph goes through all decisions again; what tuning has measured before is used. For
each product the table tells the kernel, what it took beside stock's path and the roofline, what the
compiler made one kernel with it, and what it did not, with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import runpy
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from inductor_ext import _compat, config, events, exc
from inductor_ext.events import ProductRecord
from inductor_ext.hooks.activate import activate
from inductor_ext.lowerings.graph.explain_records import FUSED, RECORD, operators
from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.format import config_words, problem_words

__all__ = ["Gemm", "GemmReport", "add_arguments", "explain", "run"]


@dataclasses.dataclass(frozen=True)
class Gemm:
    """One product of a model, or several that are alike in everything but their place."""

    record: ProductRecord
    """Of the first of them."""
    modules: tuple[str, ...]
    """Paths of the model's modules that call them, one for each; empty where it is not known."""
    fused: tuple[str, ...] = ()
    """Operators that are one kernel with it, beyond what is in its problem."""
    separate: tuple[str, ...] = ()
    """Operators that use its result in a kernel of their own, with the reason."""

    @property
    def ours(self) -> bool:
        """Whether it is a kernel of ours."""
        return self.record.chosen is not None

    @property
    def share(self) -> float | None:
        """Roofline over time, 1.0 for a kernel that could not be faster; None if not measured."""
        taken, bound = self.record.microseconds, self.record.roofline
        return bound / taken if taken and bound is not None else None


@dataclasses.dataclass(frozen=True)
class GemmReport:
    """The products of a model. `str()` is the table."""

    title: str
    gemms: tuple[Gemm, ...]
    """In the order in which they were compiled; alike ones once."""

    @property
    def count(self) -> int:
        """Products, alike ones counted each."""
        return sum(len(gemm.modules) for gemm in self.gemms)

    def table(self, *, candidates: bool = False) -> str:
        """The report as text.

        Args:
            candidates: whether to list what was measured for each.
        """
        ours = sum(len(gemm.modules) for gemm in self.gemms if gemm.ours)
        lines = [f"GEMMs of {self.title}: {self.count}, of which {ours} get a kernel of ours"]
        if not self.gemms:
            return lines[0]
        rows: list[Sequence[str]] = [
            ("", "times", "GEMM", "kernel", "us", "stock us", "roofline us", "reached")
        ]
        rows += [_row(number, gemm) for number, gemm in enumerate(self.gemms, 1)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += ["", _aligned(rows[0], widths)]
        for gemm, row in zip(self.gemms, rows[1:], strict=True):
            lines.append(_aligned(row, widths))
            lines += [f"      {line}" for line in _details(gemm, candidates)]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()

    def to_json(self) -> str:
        """The report as one JSON object."""
        gemms = [
            {
                **gemm.record.as_json(),
                "modules": gemm.modules,
                "fused": gemm.fused,
                "separate": gemm.separate,
            }
            for gemm in self.gemms
        ]
        return json.dumps({"title": self.title, "gemms": gemms}, indent=1)


def _row(number: int, gemm: Gemm) -> Sequence[str]:
    record = gemm.record
    what = (
        f"{record.operator} {' x '.join(record.operands[:2])}"
        if record.problem is None
        else problem_words(record.problem)
    )
    numbers = (record.microseconds, record.stock_microseconds, record.roofline)
    reached = "" if gemm.share is None else f"{gemm.share:.0%}"
    shown = ("" if value is None else f"{value:.1f}" for value in numbers)
    return (
        f"{number}.",
        str(len(gemm.modules)),
        what,
        config_words(record.chosen),
        *shown,
        reached,
    )


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    # Words to the left; numbers to the right, so that magnitudes line up.
    padded = (
        cell.ljust(width) if index in (2, 3) else cell.rjust(width)
        for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join(padded).rstrip()


def _details(gemm: Gemm, candidates: bool) -> Iterator[str]:
    record = gemm.record
    named = [module for module in gemm.modules if module]
    if named:
        more = f" and {len(named) - 2} more" if len(named) > 2 else ""
        yield f"in {', '.join(named[:2])}{more}"
    yield f"{record.origin}: {record.reason}"
    for each in record.declined:
        yield f"not as {each}"
    if gemm.fused:
        yield f"one kernel with: {', '.join(gemm.fused)}"
    for each in gemm.separate:
        yield f"not with: {each}"
    if candidates:
        for candidate in record.candidates:
            taken = "dropped" if candidate.measured is None else f"{candidate.measured:.1f} us"
            predicted = (
                "" if candidate.predicted is None else f", predicted {candidate.predicted:.1f}"
            )
            failure = f": {candidate.failure}" if candidate.failure else ""
            yield f"- {config_words(candidate.config)}: {taken}{predicted}{failure}"


def explain(
    fn: Callable[..., Any],
    *args: Any,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    **kwargs: Any,
) -> GemmReport:
    """Compile a function anew, call it once, and report which kernels its GEMMs got.

    Backward graphs are reported if the function calls backward. Nothing that was compiled before
    is used or changed.

    Args:
        fn: a function or module; of what torch.compile returned, what that was given.
        args, kwargs: for `fn`.
        mode: of torch.compile, see `inductor_ext.list_mode_options`.
        options: Inductor's options and ours by name; `{"max_autotune": True}` measures what has
            not been measured before.
        dynamic: of torch.compile.

    Raises:
        exc.UnknownModeError, exc.UnknownOptionError, exc.BadOptionError: before anything else.
        Exception: what compiling or calling `fn` raises.
    """
    from torch._dynamo.backends.registry import lookup_backend

    from inductor_ext import options as option_names

    option_names.split(mode, options)
    target: Any = getattr(fn, "_orig_mod", None) or getattr(fn, "_torchdynamo_orig_callable", fn)
    ours: Any = lookup_backend("inductor_ext")

    # A callable of its own: dynamo reuses what it has compiled by an equal one.
    def backend(gm: Any, inputs: Any) -> Any:
        return ours(gm, inputs, mode=mode, options=options)

    with listen() as found:
        _compat.compile_apart(target, backend=backend, dynamic=dynamic)(*args, **kwargs)
    return GemmReport(_name(target), found())


def _name(target: Any) -> str:
    name = getattr(target, "__qualname__", None)
    return name if isinstance(name, str) else type(target).__qualname__


# --- listening to a compile ---------------------------------------------------------------------


@contextlib.contextmanager
def listen() -> Iterator[Callable[[], tuple[Gemm, ...]]]:
    """Inside, caches of compiled code are off; yields what tells the products compiled so far."""
    from torch._functorch import config as aot_config
    from torch._inductor import config as inductor_config

    fusions = _Fusions(
        inductor_config._pre_fusion_custom_pass, inductor_config._post_fusion_custom_pass
    )
    # Not force_disable_caches: it hides what tuning has measured, too.
    off = {"fx_graph_cache": False, "fx_graph_remote_cache": False}
    aot_off = {"enable_autograd_cache": False, "enable_remote_autograd_cache": False}
    with (
        events.capture(ProductRecord) as records,
        inductor_config.patch({**off, **fusions.hooks()}),
        aot_config.patch(aot_off),
        _debugging(fusions.hear),
    ):
        yield lambda: _merged(records, fusions)


def _merged(records: Sequence[ProductRecord], fusions: _Fusions) -> tuple[Gemm, ...]:
    found: dict[Any, Gemm] = {}
    for record in records:
        fused, separate = fusions.of(record)
        likeness = (dataclasses.replace(record, module=""), fused, separate)
        known = found.get(likeness)
        modules = (*(known.modules if known else ()), record.module)
        first = known.record if known else record
        found[likeness] = Gemm(first, modules, fused, separate)
    return tuple(found.values())


class _Fusions:
    """What Inductor's scheduler made one kernel with a product, and what not.

    Called by Inductor with the nodes of each graph before and after fusion, and with its messages
    about pairs that it could not fuse.
    """

    def __init__(self, *others: Callable[[list[Any]], list[Any]] | None) -> None:
        """
        Args:
            others: what was to be called before and after fusion so far.
        """
        self._others = others
        self._found: dict[int, tuple[tuple[str, ...], tuple[str, ...]]] = {}
        self._reasons: dict[tuple[str, str], str] = {}

    def of(self, record: ProductRecord) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(what is fused, what is not)."""
        return self._found.get(id(record), ((), ()))

    def hooks(self) -> dict[str, Any]:
        """The options by which Inductor calls."""
        return {"_pre_fusion_custom_pass": self._begin, "_post_fusion_custom_pass": self._note}

    def hear(self, message: Any) -> None:
        """Take one message of Inductor's log of fusions."""
        first, second = getattr(message, "name1", None), getattr(message, "name2", None)
        if first is not None and second is not None:
            why = message.reason % message.args
            for pair in ((a, b) for a in first.split("_") for b in second.split("_")):
                self._reasons[pair] = why

    def _begin(self, nodes: list[Any]) -> list[Any]:
        # Names are those of one graph.
        self._reasons.clear()
        return nodes if self._others[0] is None else self._others[0](nodes)

    def _note(self, nodes: list[Any]) -> list[Any]:
        """Note what is in one kernel with which product; returns the nodes."""
        if self._others[1] is not None:
            nodes = self._others[1](nodes)
        kernel_of = {each.get_name(): kernel for kernel in nodes for each in kernel.get_nodes()}
        for member in (each for kernel in nodes for each in kernel.get_nodes()):
            for product in _products(member):
                around = self._around(product, member, kernel_of)
                self._found[id(product.meta[RECORD])] = around
        return nodes

    def _around(
        self, product: Any, member: Any, kernel_of: Mapping[str, Any]
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What is computed in one kernel with a product, and what with its result elsewhere.

        Args:
            product: the FX node.
            member: the scheduler's node for it.
            kernel_of: the kernels of the graph, by the names of the scheduler's nodes in them.
        """
        after = _descendants(product)
        kernels = [kernel_of[member.get_name()]]
        separate: dict[str, None] = {}
        for user in (each.node for buffer in member.get_outputs() for each in buffer.users):
            kernel = kernel_of.get(user.get_name())
            # Another product is never part of this one's kernel.
            if kernel is None or kernel is kernels[0] or next(_products(user), None) is not None:
                continue
            if product in (getattr(user.node, "origins", None) or ()):
                # The second step of a split K; that of maxima of rows is a kernel of its own.
                if not product.meta[RECORD].problem.epilogue.reductions:
                    kernels.append(kernel)
                continue
            names = ", ".join(_operators(user, after)) or user.get_name()
            why = self._reason(member, user)
            if isinstance(product.meta[RECORD].chosen, CutlassConfig):
                why = "cutlass_epilogue_fusion_enabled is off, or the kernel cannot express it"
            separate[f"{names} ({why})"] = None
        fused: dict[str, None] = dict.fromkeys(product.meta.get(FUSED, ()))
        for each in (each for kernel in kernels for each in kernel.get_nodes()):
            if each is not member:
                # What the product reads is in its kernel, too, if Inductor has made it a prologue.
                before = () if product in each.node.origins else _operators(each)
                fused.update(dict.fromkeys(_operators(each, after) or before))
        return tuple(fused), tuple(separate)

    def _reason(self, member: Any, user: Any) -> str:
        names = member.get_name(), user.get_name()
        why = self._reasons.get(names) or self._reasons.get(names[::-1])
        if why is None and member.is_extern():
            return "a library's kernel takes nothing in"
        return why or "Inductor did not try"


def _products(node: Any) -> Iterator[Any]:
    """The FX nodes of products with a record that a scheduler's node computes."""
    if node.is_template() or node.is_extern():
        for origin in getattr(node.node, "origins", None) or ():
            if RECORD in origin.meta:
                yield origin


def _descendants(node: Any) -> set[Any]:
    """The FX nodes that are computed from one."""
    found: set[Any] = set()
    pending = list(node.users)
    while pending:
        each = pending.pop()
        if each not in found:
            found.add(each)
            pending.extend(each.users)
    return found


def _operators(node: Any, among: Collection[Any] | None = None) -> list[str]:
    """The operators that a scheduler's node computes beside products, as the model calls them.

    Args:
        node: of the scheduler.
        among: the FX nodes that count, since those of a scheduler's node begin with what it reads;
            None for all.
    """
    origins = [
        origin
        for origin in getattr(node.node, "origins", None) or ()
        if origin.op == "call_function"
        and RECORD not in origin.meta
        and (among is None or origin in among)
    ]
    order = {each: index for index, each in enumerate(origins[0].graph.nodes)} if origins else {}
    origins.sort(key=lambda each: order.get(each, 0))
    return list(operators(origins))


@contextlib.contextmanager
def _debugging(hear: Callable[[Any], None]) -> Iterator[None]:
    """Have Inductor's messages about what it could not fuse, without printing them."""
    from torch._inductor import scheduler

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            hear(record.msg)

    log = scheduler.fusion_log
    level, propagate, handler = log.level, log.propagate, Listener()
    log.addHandler(handler)
    if not log.isEnabledFor(logging.DEBUG):
        log.setLevel(logging.DEBUG)
        log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate


# --- the command line ---------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("script", metavar="SCRIPT", help="a Python program that compiles a model")
    rest = parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="of the program"
    )
    # Python 3.11's argparse says of none that it is missing, if the script is.
    rest.required = False
    parser.add_argument(
        "--max-autotune",
        action="store_true",
        help="measure what has not been measured, whatever the program asks for",
    )
    parser.add_argument(
        "--candidates", action="store_true", help="list what was measured for each GEMM"
    )
    parser.add_argument("--json", metavar="OUT", help="also write the report as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the program with the extension at work, and print the report after it has ended, be it
    with an error.

    Returns:
        The program's exit code.

    Raises:
        exc.BadReportFileError: there is no such program, or the file for JSON cannot be written,
            which is found out before the program runs.
        BaseException: what the program raises.
    """
    if not os.path.isfile(arguments.script):
        raise exc.BadReportFileError(
            file=arguments.script,
            where="",
            why="there is no such file",
            mend="Give the path of a Python program.",
        )
    # The program may go to another folder.
    out = None if arguments.json is None else os.path.abspath(arguments.json)
    if out is not None:
        _write(out, "", "a")
    with listen() as found, events.capture(events.CompileRecord) as compiles:
        try:
            return _run_program(arguments.script, arguments.arguments, arguments.max_autotune)
        finally:
            report = GemmReport(arguments.script, found())
            print(report.table(candidates=arguments.candidates))
            if not compiles:
                print(_why_nothing())
            if out is not None:
                _write(out, report.to_json(), "w")


def _why_nothing() -> str:
    if not config.snapshot().enabled:
        return "The extension was not asked: the setting enabled is False."
    return (
        "Inductor has compiled nothing in the program's process, and others that it started are "
        "not looked into."
    )


def _write(path: str, text: str, mode: str) -> None:
    try:
        with open(path, mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise exc.BadReportFileError(
            file=path,
            where="",
            why=f"cannot be written: {error.strerror}",
            mend="Give a path in an existing writable folder.",
        ) from None


def _run_program(script: str, arguments: Sequence[str], max_autotune: bool) -> int:
    from torch._inductor import config as inductor_config

    before = sys.argv, sys.path[0]
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    patch = inductor_config.patch(max_autotune=True) if max_autotune else contextlib.nullcontext()
    try:
        with activate(), patch:
            runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        # As Python ends with anything else.
        print(ended.code, file=sys.stderr)
        return 1
    finally:
        sys.argv, sys.path[0] = before
    return 0
