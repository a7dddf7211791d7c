"""`inductor-ext bench FILE.py:NAME`: compares eager mode, Inductor (default) and the extension.

NAME is a function without arguments (or the value itself) in a Python file, and gives a tuple
`(module, args)` or `(module, args, kwargs)`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from inductor_ext import exc
from inductor_ext.cli import model_source
from inductor_ext.cli.argument_types import add_options, parse_positive
from inductor_ext.reports.text import check_writable, write_file

if TYPE_CHECKING:
    from inductor_ext.reports.compile_facts import CompileFacts

EXAMPLE = "inductor-ext bench model.py:make --mode max-autotune"
EXIT_CODES = {
    0: "all ways have run",
    1: "a way failed",
    2: "there is no such model, or the page cannot be written",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="FILE.py:NAME, where NAME is a function that returns (module, args) or (module, args, "
        f"kwargs); default NAME: {model_source.DEFAULT_NAME}",
    )
    parser.add_argument("--mode", help="the mode of torch.compile")
    parser.add_argument(
        "--dynamic", action="store_true", help="compile with dynamic shapes (dynamic=True)"
    )
    add_options(parser, "an option of Inductor, for both compilers (not together with --mode)")
    parser.add_argument(
        "--seconds",
        type=parse_positive,
        default=5,
        metavar="N",
        help="time for the timed calls (default: 5)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--html",
        metavar="FILE",
        help="also write one HTML page: the comparison, and the report on the extension's compile",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison.

    Raises:
        exc.BadModelSourceError: there is no such model.
        exc.BadReportFileError: the page cannot be written. This is checked before the model runs.
    """
    from inductor_ext.reports import comparison_page
    from inductor_ext.reports.comparison import compare

    if arguments.html is not None:
        check_writable(arguments.html)
    path, name = model_source.split(arguments.source)
    model_source.check_file(path)
    module, args, kwargs = _read(path, model_source.run_file(path, name), name)
    options: dict[str, Any] = {}
    if arguments.mode is not None:
        options["mode"] = arguments.mode
    if arguments.dynamic:
        options["dynamic"] = True
    if arguments.set:
        options["options"] = dict(arguments.set)
    comparison = compare(
        module, args, kwargs, compile_options=options, seconds=float(arguments.seconds)
    )
    print(comparison.to_json() if arguments.json else comparison)
    if arguments.html is not None:
        has_failed = any(o.failure for o in comparison.outcomes if o.way == "inductor_ext")
        facts = None if has_failed else _collect_facts(module, args, kwargs, options)
        write_file(arguments.html, comparison_page.render_page(comparison, facts))
    return 1 if any(outcome.failure for outcome in comparison.outcomes) else 0


def _collect_facts(
    module: Any, args: Sequence[Any], kwargs: Mapping[str, Any], options: Mapping[str, Any]
) -> CompileFacts:
    import torch

    from inductor_ext.reports.compile_collector import collect_facts

    choices = {name: options.get(name) for name in ("mode", "options", "dynamic")}
    with torch.no_grad():
        return collect_facts(module, tuple(args), kwargs, recompile=False, **choices)


def _read(path: str, value: Any, name: str) -> tuple[Any, Sequence[Any], Mapping[str, Any]]:
    """Return the module, its arguments and keyword arguments."""
    import torch

    if isinstance(value, tuple) and len(value) in (2, 3) and isinstance(value[0], torch.nn.Module):
        module, args, kwargs = (*value, {})[:3]
        if isinstance(args, tuple) and isinstance(kwargs, Mapping):
            return module, args, kwargs
    expected = "tuple (module, args) or (module, args, kwargs)"
    why = f"{name!r} gives no {expected}, but a value of type {type(value).__name__}"
    raise exc.BadModelSourceError(source=path, why=why)
