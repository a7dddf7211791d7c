"""`inductor-ext cache [show|clear]`: shows or clears the cache of compiled artifacts.

The cache is selected by the settings `artifact_cache_dir` and `artifact_cache_size`, read from the
environment. The command does not import torch, and `show` creates no folder.
"""

from __future__ import annotations

import argparse
import json

from inductor_ext import settings
from inductor_ext.reports.text import format_count
from inductor_ext.storage.artifact_store import ArtifactStore, Usage
from inductor_ext.storage.paths import artifact_folder

EXAMPLE = "inductor-ext cache show"
EXIT_CODES = {0: "done, also for an empty cache", 2: "a setting in the environment is invalid"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        nargs="?",
        choices=("show", "clear"),
        default="show",
        help="show: show the folder and the size of the cache (default); clear: remove all entries "
        "that no process is reading",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        exc.BadEnvironmentError: a setting cannot be read.
    """
    values = settings.Settings(**settings.from_environment())
    limit = settings.parse_bytes(values.artifact_cache_size)
    store = ArtifactStore(artifact_folder(values.artifact_cache_dir), limit)
    report = {
        "path": str(store.folder),
        "enabled": values.artifact_cache,
        "max_bytes": limit,
    }
    if arguments.action == "clear":
        removed = store.clear()
        report |= {"removed_entries": removed.entries, "removed_bytes": removed.bytes}
    usage = store.usage()
    report |= {"entries": usage.entries, "bytes": usage.bytes}
    if arguments.json:
        print(json.dumps(report))
        return 0
    if arguments.action == "clear":
        print(f"removed      {_format_usage(removed)}")
    print(f"folder       {store.folder}")
    print(f"contents     {_format_usage(usage)}, of at most {_format_mib(limit)}")
    if not values.artifact_cache:
        print(f"disabled by  {settings.environment_variable('artifact_cache')}")
    return 0


def _format_usage(usage: Usage) -> str:
    return f"{format_count(usage.entries, 'artifact')}, {_format_mib(usage.bytes)}"


def _format_mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
