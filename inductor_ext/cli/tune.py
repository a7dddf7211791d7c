"""`inductor-ext tune show|status|export|import|clear`: lists, exports, imports and clears tuning
results, and shows what is tuned in the background.

The folder is selected by the setting `tuning_cache_dir`, read from the environment. Torch is
imported only for `--device this`, and `show` creates no folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from inductor_ext import exc, settings
from inductor_ext.autotune import results_db as stores
from inductor_ext.autotune import results_folder
from inductor_ext.autotune.results import TuningResult, merge_results, read_table, write_table
from inductor_ext.autotune.tuning_queue import TuningQueue
from inductor_ext.cli.argument_types import parse_input
from inductor_ext.reports.text import align_columns, format_count
from inductor_ext.storage.paths import tuning_folder
from inductor_ext.templates.format import config_words, problem_words

EXAMPLE = "inductor-ext tune export results.json --device H100"
EXIT_CODES = {
    0: "done, also if there are no results",
    2: "not everything was read, written, imported or removed as requested",
}

_MOST_SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = actions.add_parser(
        "show", help="list tuning results", description="List tuning results."
    )
    _add_filters(show, stores.SOURCES)
    show.add_argument("--json", action="store_true", help="print one JSON object")
    status = actions.add_parser(
        "status",
        help="show what is tuned in the background",
        description="Show the processes that tune in the background, and the GEMMs that wait.",
    )
    status.add_argument("--json", action="store_true", help="print one JSON object")
    export = actions.add_parser(
        "export",
        help="write tuning results to a table",
        description="Write the results measured on this machine and the imported ones to a JSON "
        "table. For every GEMM, device and set of versions the newest result is written.",
    )
    export.add_argument("file", metavar="FILE", help="the table; replaced if it exists")
    _add_filters(export, stores.STORED_SOURCES)
    export.add_argument("--json", action="store_true", help="print one JSON object")
    import_ = actions.add_parser(
        "import",
        help="add tables to the tuning results",
        description="Add tables to the tuning results. If a table is invalid, nothing is added.",
    )
    import_.add_argument(
        "files",
        nargs="+",
        type=parse_input,
        metavar="FILE",
        help="a table written by export; - for the standard input",
    )
    import_.add_argument("--json", action="store_true", help="print one JSON object")
    clear = actions.add_parser(
        "clear",
        help="remove tuning results",
        description="Remove the results measured on this machine, the imported ones, or both, and "
        "the GEMMs that wait to be tuned in the background.",
    )
    clear.add_argument(
        "--source", choices=stores.STORED_SOURCES, help="remove only these (default: both)"
    )
    clear.add_argument("--json", action="store_true", help="print one JSON object")


def _add_filters(parser: argparse.ArgumentParser, sources: Iterable[stores.Source]) -> None:
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="only devices with NAME in their name; `this`: only the GPU of this machine",
    )
    parser.add_argument("--source", choices=tuple(sources), help="only results from this source")
    parser.add_argument(
        "--match", metavar="TEXT", help="only GEMMs whose description in `show` contains TEXT"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        exc.BadEnvironmentError: a setting cannot be read.
        exc.BadTuningFileError: a file cannot be read or written.
        exc.MissingToolchainError: `--device this` without a GPU.
    """
    values = settings.Settings(**settings.from_environment())
    store = stores.TuningDatabase(
        tuning_folder(values.tuning_cache_dir), max_entries=values.tuning_cache_entries
    )
    if arguments.action == "show":
        _show(store, arguments)
    elif arguments.action == "status":
        _show_status(store, arguments.json)
    elif arguments.action == "export":
        entries = [entry for _, entry in _select(store, stores.STORED_SOURCES, arguments)]
        count = write_table(arguments.file, entries)
        text = f"{arguments.file}: {format_count(count, 'measurement')}"
        _print({"file": arguments.file, "measurements": count}, text, arguments.json)
    elif arguments.action == "import":
        _import(store, arguments.files, arguments.json)
    else:
        sources = [arguments.source] if arguments.source else stores.STORED_SOURCES
        _clear(store, sources, arguments.json)
    if not values.tuning_cache:
        # On stderr, to keep the note out of output that a program may parse.
        note = f"The folder is not used: {settings.environment_variable('tuning_cache')} is 0."
        print(note, file=sys.stderr)
    return 0


def _print(report: dict[str, Any], text: str, as_json: bool) -> None:
    print(json.dumps(report, indent=2) if as_json else text)


def _show_status(store: stores.TuningDatabase, as_json: bool) -> None:
    assert store.folder is not None
    queue = TuningQueue(store.folder)
    statuses, requests = queue.statuses(), queue.read()
    if as_json:
        waiting = [
            {
                "gemm": problem_words(request.problem),
                "device": request.device,
                "attempts": request.attempts,
            }
            for request in requests
        ]
        workers = [dataclasses.asdict(status) for status in statuses]
        print(json.dumps({"folder": str(queue.path), "workers": workers, "waiting": waiting}))
        return
    for status in statuses:
        state = status.state if status.running else f"was killed; last state: {status.state}"
        print(
            f"{status.device}, process {status.pid}: {state}; {status.tuned} tuned, "
            f"{status.failed} given up"
        )
    if not any(status.running for status in statuses):
        print("No process tunes in the background. The next compile starts one if it has to.")
    print(f"{format_count(len(requests), 'GEMM')} to tune, folder {queue.path}")
    for request in requests[:_MOST_SHOWN]:
        print(f"  {problem_words(request.problem)} on {request.device}")
    if len(requests) > _MOST_SHOWN:
        print(f"  and {len(requests) - _MOST_SHOWN} more")


def _import(store: stores.TuningDatabase, files: Iterable[str], as_json: bool) -> None:
    entries = merge_results(entry for file in files for entry in read_table(file))
    counts = store.add(entries)
    added = counts.total()
    summary = (
        f"{format_count(added, 'measurement')}: {counts['new']} new, {counts['updated']} updated, "
        f"{counts['ignored']} ignored (the existing result is as new or newer)"
    )
    if added < len(entries):
        missing = format_count(len(entries) - added, "measurement")
        raise exc.BadTuningFileError(
            file=store.folder,
            where="",
            why=f"the folder cannot be written: {missing} were not added. Added: {summary}",
            fix="Free disk space or set tuning_cache_dir to another folder, and import again",
        )
    report = {name: counts[name] for name in ("new", "updated", "ignored")}
    _print({"folder": str(store.folder), **report}, summary, as_json)


def _clear(
    store: stores.TuningDatabase, sources: Iterable[results_folder.Source], as_json: bool
) -> None:
    assert store.folder is not None
    if "measured" in sources:
        TuningQueue(store.folder).clear()
    counts = store.clear(sources)
    removed, left = (format_count(counts[name], "GEMM") for name in ("removed", "left"))
    summary = f"removed the results of {removed}"
    if counts["left"]:
        raise exc.BadTuningFileError(
            file=store.folder,
            where="",
            why=f"the folder cannot be cleared: {summary}; the results of {left} remain",
            fix="Remove the folder",
        )
    report = {"folder": str(store.folder), "removed_gemms": counts["removed"]}
    _print(report, f"{summary} from {store.folder}", as_json)


def _select(
    store: stores.TuningDatabase, sources: Iterable[stores.Source], arguments: argparse.Namespace
) -> Iterator[tuple[stores.Source, TuningResult]]:
    """Yield the entries that pass the filters, in the order of the sources."""
    device = arguments.device
    exactly = _find_this_device() if device == "this" else None
    for source in sources:
        if arguments.source not in (None, source):
            continue
        for entry in store.entries(source):
            name = entry.environment.device
            if exactly is not None and name != exactly:
                continue
            if exactly is None and device is not None and device.lower() not in name.lower():
                continue
            match = arguments.match
            if match is None or match.lower() in problem_words(entry.problem).lower():
                yield source, entry


def _find_this_device() -> str:
    import torch

    if not torch.cuda.is_available():
        raise exc.MissingToolchainError(
            part="A GPU",
            why="torch finds no CUDA device on this machine",
            install="pass the name of a device, as listed by `inductor-ext tune show`",
        )
    return torch.cuda.get_device_name()


def _show(store: stores.TuningDatabase, arguments: argparse.Namespace) -> None:
    results = list(_select(store, stores.SOURCES, arguments))
    if arguments.json:
        rows = [_make_row(source, entry) for source, entry in results]
        print(json.dumps({"folder": str(store.folder), "entries": rows}, indent=2))
        return
    groups: dict[str, list[tuple[stores.Source, TuningResult]]] = {}
    for source, entry in results:
        groups.setdefault(_format_environment(entry), []).append((source, entry))
    for title in sorted(groups):
        print(title)
        _print_table(groups[title])
        print()
    print(f"{format_count(len(results), 'measurement')}, folder {store.folder}")


def _format_environment(entry: TuningResult) -> str:
    there = entry.environment
    major, minor = there.capability
    return (
        f"{there.device} (sm_{major}{minor}, {there.sms} SMs), Triton {there.triton}, "
        f"CUDA {there.cuda}, templates {there.templates}"
    )


def _print_table(rows: Iterable[tuple[stores.Source, TuningResult]]) -> None:
    lines = [("GEMM", "chosen", "us", "Inductor us", "speedup", "source", "date")]
    for source, entry in rows:
        row = _make_row(source, entry)
        numbers = (row["microseconds"], row["stock_microseconds"], row["ratio"])
        lines.append(
            (
                row["words"],
                row["chosen_words"],
                *(
                    "-" if number is None else f"{number:.{digits}f}"
                    for number, digits in zip(numbers, (1, 1, 3), strict=True)
                ),
                source,
                row["measured"][:10],
            )
        )
    for line in align_columns(lines, right=(2, 3, 4)):
        print(f"  {line}")


def _make_row(source: stores.Source, entry: TuningResult) -> dict[str, Any]:
    decision = entry.decision("table")
    chosen, stock = decision.microseconds(entry.config), decision.microseconds(None)
    when = datetime.datetime.fromtimestamp(entry.measured, datetime.timezone.utc)
    return {
        "words": problem_words(entry.problem),
        "chosen_words": config_words(entry.config),
        "microseconds": chosen,
        "stock_microseconds": stock,
        "ratio": stock / chosen if stock and chosen else None,
        "source": source,
        "measured": when.isoformat(),
        "entry": entry.to_json(),
    }
