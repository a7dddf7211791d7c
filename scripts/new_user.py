#!/usr/bin/env python3
"""Runs the commands of the README as a new user does, in a new environment, and times each task.

    python scripts/new_user.py [--torch torch==2.13.0] [--json-out DIR]

The checkout is copied, without what is not committed, and a new virtual environment gets torch. A
task is a section of the README with commands: install, speed up a model, make a package, serve it.
Blocks whose first line is a comment with a file's name are written to that file. A task may have at
most five commands. Packages come from where pip finds them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.harness import results

ROOT = Path(__file__).resolve().parents[1]

MOST_COMMANDS = 5

_BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Task:
    """What a user wants to do."""

    name: str
    files: Mapping[str, str]
    """Content of the files to write first, by name."""
    commands: Sequence[str]


def read_tasks(page: str) -> list[Task]:
    """Return the tasks of the README's sections, in their order."""
    tasks = []
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        files: dict[str, str] = {}
        commands: list[str] = []
        for language, body in _BLOCK.findall(text):
            if language == "python":
                files[body.partition("\n")[0].removeprefix("# ")] = body
            else:
                commands += [line for line in body.splitlines() if line]
        names = title.split(", and ")
        if len(names) == 2 and commands:  # "Make a package, and serve it"
            at = next(i for i, line in enumerate(commands) if line.startswith("pip "))
            tasks.append(Task(names[0], files, commands[:at]))
            tasks.append(Task(names[1].capitalize(), {}, commands[at:]))
        elif commands:
            tasks.append(Task(title, files, commands))
    return tasks


def run_task(task: Task, folder: Path, environment: Mapping[str, str]) -> float:
    """Run the commands of a task in one shell; return the seconds.

    Raises:
        RuntimeError: a command failed; has the output.
    """
    for name, text in task.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            ["bash", "-ec", "\n".join(task.commands)],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code = process.wait()
        seconds = time.perf_counter() - start
        # Servers that the commands have started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        output.seek(0)
        text = output.read()
    print(text[-1500:])
    if code != 0:
        raise RuntimeError(f"{task.name}: exit code {code}")
    return seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all tasks; return 1 if one has too many commands."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    pinned = (ROOT / "requirements" / "torch.txt").read_text().strip()
    parser.add_argument("--torch", default=pinned, help=f"what pip installs (default: {pinned})")
    parser.add_argument("--json-out", type=Path, help="folder of results")
    options = parser.parse_args(arguments)
    header = results.collect_header("new-user", results.format_command())
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "checkout"
        subprocess.run(["git", "clone", "-q", ROOT, folder], check=True)
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "venv", f"{name}/venv"], check=True)
        pip = [f"{name}/venv/bin/python", "-m", "pip", "install", "-q", options.torch]
        subprocess.run(pip, check=True)
        seconds = time.perf_counter() - start
        rows.append(results.make_row("before", "environment with torch", "s", ours=seconds))
        environment = {
            **{key: os.environ[key] for key in os.environ if not key.startswith("PYTHON")},
            "PATH": os.pathsep.join([f"{name}/venv/bin", os.environ["PATH"]]),
            "VIRTUAL_ENV": f"{name}/venv",
            "TORCHINDUCTOR_CACHE_DIR": f"{name}/caches",
            "INDUCTOR_EXT_ARTIFACT_CACHE_DIR": f"{name}/packages",
        }
        tasks = read_tasks((ROOT / "README.md").read_text(encoding="utf-8"))
        for task in tasks:
            print(f"--- {task.name}", *task.commands, sep="\n")
            seconds = run_task(task, folder, environment)
            rows.append(results.make_row(task.name, "time", "s", ours=seconds))
            count = len(task.commands)
            rows.append(results.make_row(task.name, "commands", "commands", ours=count))
    results.report(header, rows, options.json_out)
    return int(any(len(task.commands) > MOST_COMMANDS for task in tasks))


if __name__ == "__main__":
    sys.exit(main())
