"""Packages whose file is replaced while they are loaded or used, from the command line or a test.

A case loads a package, and meanwhile or afterwards something happens to its file: another package
is renamed onto it or written into it, it is deleted, cut off, or partly overwritten. Then the model
is called, and loaded again by `reload`. The allowed outcomes are

- an error of `inductor_ext.exc` from `load` or `reload`, after which calls go on as before, or
- the results of one of the two packages;

never another error, other results, or the end of the process. A file that is mapped must be
replaced by renaming; with `map_weights=False` its content may change, too.

    python -m test.fuzz.replaced_packages [--targets] [--cases N] [--seed S] [--jobs N]

What happens in a case depends on seed and number, but not when it does.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import torch

import inductor_ext
from inductor_ext import exc
from test.fuzz import aot_packages

__all__ = ["is_good", "make_packages", "run_cases"]

_RENAMED = ("rename", "delete")
_WRITTEN = ("write", "cut off", "overwrite", "empty")
"""What changes the content of the file: not allowed while it is mapped."""

_LOAD_SECONDS = 0.02
"""About the time that a load takes."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A load, and what happens to the file."""

    event: str
    during_load: bool
    delay: float
    """Seconds from the beginning of the load to the event."""
    maps_weights: bool
    verifies: bool
    place: float
    """Where the file is cut off or overwritten, as a part of its size."""

    @classmethod
    def make(cls, seed: int, number: int) -> Case:
        """Return the case of a number."""
        generator = random.Random(seed * 1_000_003 + number)
        maps_weights = generator.random() < 0.5
        event = generator.choice(_RENAMED if maps_weights else (*_RENAMED, *_WRITTEN))
        return cls(
            event=event,
            during_load=generator.random() < 0.6,
            delay=generator.random() * _LOAD_SECONDS,
            maps_weights=maps_weights,
            # Without verification, changed content is not noticed.
            verifies=event in _WRITTEN or generator.random() < 0.8,
            place=generator.random(),
        )

    def apply(self, path: pathlib.Path, other: bytes) -> None:
        """Let the event happen to the file; `other` is the other package."""
        if self.event == "rename":
            new = path.with_suffix(".new")
            new.write_bytes(other)
            os.replace(new, path)
        elif self.event == "delete":
            path.unlink()
        elif self.event == "write":
            path.write_bytes(other)
        else:
            with open(path, "r+b") as file:
                start = int(self.place * os.path.getsize(path))
                if self.event == "overwrite":
                    file.seek(start)
                    file.write(other[start : start + 4096])
                else:
                    file.truncate(start if self.event == "cut off" else 0)


def make_packages(folder: pathlib.Path, targets: Sequence[str] | None = None) -> None:
    """Compile the model of `aot_packages` twice, with other weights, as 0.pt2 and 1.pt2."""
    for number in range(2):
        torch.manual_seed(number)
        program = torch.export.export(aot_packages.Net().eval(), aot_packages.inputs())
        inductor_ext.aoti_compile_and_package(
            program, package_path=folder / f"{number}.pt2", cpu_targets=targets
        )


def attempt(
    case: Case,
    path: pathlib.Path,
    packages: Sequence[bytes],
    references: Sequence[Sequence[torch.Tensor]],
) -> str:
    """Return the outcome of a case: "refused", "right", or what is wrong.

    Args:
        case: what happens.
        path: where the package is put.
        packages: the first one is loaded, the second one replaces it.
        references: the results of both.
    """
    path.write_bytes(packages[0])

    def wait() -> None:
        time.sleep(case.delay)
        case.apply(path, packages[1])

    thread = threading.Thread(target=wait)
    if case.during_load:
        thread.start()
    try:
        model = inductor_ext.load(path, verify=case.verifies, map_weights=case.maps_weights)
    except exc.InductorExtError as error:
        return f"refused: {type(error).__name__}"
    except FileNotFoundError:
        return "refused: FileNotFoundError" if case.event == "delete" else "the file is not found"
    finally:
        if case.during_load:
            thread.join()
    if not case.during_load:
        case.apply(path, packages[1])

    def find() -> int | None:
        results = aot_packages.flat(model(*aot_packages.inputs()))
        for number, reference in enumerate(references):
            if all(map(torch.equal, results, reference)):
                return number
        return None

    before = find()
    if before is None or (before == 1 and not case.during_load):
        return "wrong numbers"
    if not case.verifies:
        return "right"
    try:
        model.reload(path)
    except (exc.InductorExtError, FileNotFoundError):
        return "right" if find() == before else "wrong numbers after a failed reload"
    return "right" if find() is not None else "wrong numbers after reload"


def _child(folder: str, seed: int) -> None:
    """Run the cases whose numbers are read from standard input; print a line of JSON for each."""
    torch.set_num_threads(1)
    paths = [pathlib.Path(folder, f"{number}.pt2") for number in range(2)]
    packages = [path.read_bytes() for path in paths]
    references = [aot_packages.expected(path) for path in paths]
    with tempfile.TemporaryDirectory() as temporary:
        for line in sys.stdin:
            case = Case.make(seed, int(line))
            try:
                outcome = attempt(case, pathlib.Path(temporary, "m.pt2"), packages, references)
            except Exception as error:
                outcome = f"unexpected {type(error).__name__}: {error}"
            print(json.dumps([int(line), case.event, outcome]), flush=True)


def run_cases(
    folder: pathlib.Path, seed: int, numbers: Sequence[int]
) -> Iterator[tuple[int, str, str]]:
    """Run cases in other processes, one at a time; one that dies is reported and replaced.

    Yields:
        Number, event and outcome of each case.
    """
    left = list(numbers)
    while left:
        run = subprocess.run(
            [sys.executable, "-m", "test.fuzz.replaced_packages", "--child", folder, str(seed)],
            input="\n".join(map(str, left)) + "\n",
            capture_output=True,
            text=True,
            check=False,
            cwd=pathlib.Path(__file__).parents[2],
        )
        done = [json.loads(line) for line in run.stdout.splitlines()]
        yield from ((number, event, outcome) for number, event, outcome in done)
        left = left[len(done) :]
        if left:
            last = run.stderr.strip().splitlines()[-1:] or [""]
            yield left.pop(0), "", f"the process ended with {run.returncode}: {last[0]}"


def is_good(outcome: str) -> bool:
    """Whether an outcome is allowed."""
    return outcome == "right" or outcome.startswith("refused: ")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 1 if a case fails."""
    parser = argparse.ArgumentParser(
        prog="python -m test.fuzz.replaced_packages", description=__doc__
    )
    parser.add_argument("--targets", action="store_true", help="compile for several CPU targets")
    parser.add_argument("--cases", type=int, default=1000, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        make_packages(folder, aot_packages.TARGETS if options.targets else None)
        numbers = range(options.cases)
        batches = [numbers[at :: options.jobs] for at in range(options.jobs)]
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            results = pool.map(lambda batch: list(run_cases(folder, options.seed, batch)), batches)
            outcomes = [result for batch in results for result in batch]
    counts = Counter((event, outcome) for _, event, outcome in outcomes if is_good(outcome))
    for (event, outcome), count in sorted(counts.items()):
        print(f"{count:6}  {event:9} {outcome}")
    bad = [result for result in outcomes if not is_good(result[2])]
    for number, event, outcome in bad:
        print(f"case {number} ({event}): {outcome}")
    print(f"{len(outcomes)} replaced packages with seed {options.seed}: {len(bad)} failures")
    return 1 if bad else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _child(sys.argv[2], int(sys.argv[3]))
    else:
        sys.exit(main())
