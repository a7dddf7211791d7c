"""`inductor-ext memory FILE`: shows the memory plans in a file as text, JSON or an HTML page.

FILE is an event log, a report written with --json, or an exported program, which is planned.
"""

from __future__ import annotations

import argparse
import dataclasses

from inductor_ext import exc
from inductor_ext.cli.argument_types import parse_input, parse_natural, parse_positive
from inductor_ext.reports.memory_report import MemoryReport, read
from inductor_ext.reports.text import check_writable

EXAMPLE = "inductor-ext memory events.jsonl --html memory.html"
EXIT_CODES = {
    0: "the report was printed",
    2: "the file cannot be read, or the memory at a requested size is not known",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        metavar="FILE",
        type=parse_input,
        help="an event log (setting event_log), a report written with --json (or - for one of "
        "these on the standard input), or an exported program (torch.export.save), which is "
        "planned",
    )
    parser.add_argument(
        "--top", type=parse_natural, default=10, metavar="N", help="rows per table (default: 10)"
    )
    parser.add_argument(
        "--graph",
        metavar="GRAPH",
        help="only the plans with this number, name of the generated function, or kind",
    )
    parser.add_argument(
        "--batch",
        type=parse_positive,
        nargs="+",
        default=[],
        metavar="N",
        help="also show the peak at these sizes of the batch, the first dimension of the inputs, "
        "which has to be dynamic",
    )
    parser.add_argument(
        "--size",
        type=_parse_size,
        action="append",
        default=[],
        metavar="SYMBOL=N",
        help="the value of another dynamic size in --batch; without --batch, report the plans at "
        "this size",
    )
    parser.add_argument("--html", metavar="OUT", help="also write an HTML page with charts")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _parse_size(text: str) -> tuple[str, int]:
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form SYMBOL=N, such as s77=128")
    return name, parse_natural(value)


def run(arguments: argparse.Namespace) -> int:
    """Print the report, and write the HTML page if requested."""
    if arguments.html is not None:
        check_writable(arguments.html)
    report = _select_graphs(read(arguments.file), arguments.file, arguments.graph)
    sizes = dict(arguments.size)
    if arguments.batch:
        report = report.compare_batches(*arguments.batch, sizes=sizes)
    elif sizes:
        report = report.at(sizes=sizes)
    if arguments.html is not None:
        report.write_html(arguments.html, arguments.top)
    print(report.to_json() if arguments.json else report.table(arguments.top))
    return 0


def _select_graphs(report: MemoryReport, path: str, selector: str | None) -> MemoryReport:
    """Return the report on the plans that `--graph` selects by number, function name or kind."""
    if selector is None:
        return report
    selected = [
        record
        for number, record in enumerate(report.records, 1)
        if selector in (str(number), record.graph, record.kind)
    ]
    if not selected:
        names = ", ".join(
            f"{number}. {record.graph} ({record.kind})"
            for number, record in enumerate(report.records, 1)
        )
        raise exc.BadReportFileError(
            file=path,
            where="",
            why=f"it has no graph {selector!r}",
            fix=f"Its graphs are: {names or 'none'}.",
        )
    keys = {record.cache_key for record in selected}
    measured = tuple(run for run in report.measured if run.cache_key in keys)
    # A step refers to graphs by their numbers in the whole report.
    return dataclasses.replace(
        report, records=tuple(selected), measured=measured, steps=(), batches=()
    )
