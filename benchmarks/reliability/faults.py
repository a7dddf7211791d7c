"""Compiles while the machine fails, and again when it works: right results or a clear error.

    python -m benchmarks.reliability.faults --seeds 5 --json-out DIR

A case is a fault, a way to compile (`torch.compile`, an AOT package) and a seed. A process compiles
a model and checks its result under the fault; then another one does, without the fault and with the
caches that the first one has left. Good outcomes are

- under the fault: the right result, or an error that says what failed;
- afterwards: the right result.

Bad are a wrong result, the end of a process by a signal that the fault did not send, an error of
another kind, and caches that do not heal. If the extension has a bad outcome, Inductor (default) is
run in the same case, to tell whose it is.

The faults: a full disk (a small tmpfs), caches that cannot be written (for a process without the
rights of root), a compiler that is killed, a process that is killed, damaged files in the caches,
and a clock that jumps.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import results
from benchmarks.reliability.child import COMPILERS, WAYS

__all__ = ["FAULTS", "Case", "can_mount", "is_good", "run_case"]

_CLEAR = (
    "No space left on device",
    "Read-only file system",
    "Permission denied",
    "C++ compile error",
    "cannot be written",
    "is damaged",
)
"""Texts of errors that say what failed; besides, errors of `inductor_ext.exc`."""

_SIZES = ("16k", "128k", "400k", "1m", "2m", "4m")
"""Sizes of the full disk. The caches of one compile take about 1 MiB."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One compile under a fault."""

    fault: str
    way: str
    seed: int


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a process has done."""

    kind: str
    """"right", "wrong", "error", "killed" by the fault, or "died" otherwise."""
    error: str = ""
    details: str = ""

    @property
    def is_clear(self) -> bool:
        """Whether an error says what failed."""
        from inductor_ext import exc

        name, _, text = self.error.partition(": ")
        return name in exc.__all__ or any(words in text for words in _CLEAR)


def is_good(under: Outcome, after: Outcome) -> bool:
    """Whether the outcomes under a fault and after it are allowed."""
    allowed = under.kind in ("right", "killed") or (under.kind == "error" and under.is_clear)
    return allowed and after.kind == "right"


def _command(compiler: str, way: str) -> list[str]:
    module = ["-W", "ignore", "-m", "benchmarks.reliability.child"]
    return [sys.executable, *module, "once", compiler, way]


def _environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "INDUCTOR_EXT_ARTIFACT_CACHE_DIR": str(folder / "packages"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "OMP_NUM_THREADS": "1",
    }


def _read(code: int, output: str, errors: str, killed: bool = False) -> Outcome:
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if code == 0 and lines:
        answer: dict[str, Any] = json.loads(lines[-1])
        return Outcome(answer["outcome"], answer.get("error", ""), answer.get("traceback", ""))
    if killed:
        return Outcome("killed")
    return Outcome("died", f"exit code {code}", errors[-2000:])


def _run(command: Sequence[str], folder: Path, **variables: str) -> Outcome:
    """Run a process until it ends, with more environment variables."""
    environment = {**_environment(folder), **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return _read(done.returncode, done.stdout, done.stderr)


_Pair = tuple[Outcome, Outcome]


def _full_disk(compiler: str, way: str, folder: Path, generator: random.Random) -> _Pair:
    """Both processes run in one mount namespace; between them, the disk becomes larger."""
    size, mounted = generator.choice(_SIZES), shlex.quote(str(folder))
    child = shlex.join(_command(compiler, way))
    script = (
        f"mount -t tmpfs -o size={size} tmpfs {mounted} && {{ {child}; echo; echo === $?; "
        f"mount -o remount,size=512m {mounted}; {child}; }}"
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script],
        env=_environment(folder),
        capture_output=True,
        text=True,
    )
    first, _, second = done.stdout.partition("=== ")
    code, _, second = second.partition("\n")
    under = _read(int(code or 1), first, done.stderr)
    return under, _read(done.returncode, second, done.stderr)


def _read_only(compiler: str, way: str, folder: Path, generator: random.Random) -> _Pair:
    """Without the capability to ignore permissions, root is an owner like any other user."""
    for name in ("inductor", "packages"):
        (folder / name).mkdir()
    if generator.random() < 0.5:
        _run(_command(compiler, way), folder)
    with _changed_modes(folder):
        drop = ["setpriv", "--inh-caps=-all", "--bounding-set=-dac_override,-dac_read_search"]
        under = _run([*drop, *_command(compiler, way)], folder)
    return under, _run(_command(compiler, way), folder)


@contextlib.contextmanager
def _changed_modes(folder: Path) -> Iterator[None]:
    """Take the right to write from all folders below."""
    folders = [Path(root) for root, _, _ in os.walk(folder)]
    for path in folders:
        path.chmod(0o555)
    try:
        yield
    finally:
        for path in folders:
            path.chmod(0o755)


_CALLS = {"compile": range(4, 13), "package": range(4, 21)}
"""Calls of the compiler that compile something; the last of these is the first kernel."""

_COMPILER = """#!/bin/sh
# Run g++; once, after {first} calls, kill it and its children after {delay} s.
state={folder}
echo >>"$state/calls"
if [ "$(wc -l <"$state/calls")" -gt {first} ] && [ ! -e "$state/killed" ]; then
  timeout --signal=KILL {delay} g++ "$@"
  code=$?
  [ "$code" -ne 137 ] || touch "$state/killed"
  exit "$code"
fi
exec g++ "$@"
"""


def _killed_compiler(compiler: str, way: str, folder: Path, generator: random.Random) -> _Pair:
    """Kill a compiler or linker while it works. Both processes have the same command as compiler.

    Raises:
        RuntimeError: each call of the compiler ended too early.
    """
    state = folder / "compiler"
    state.mkdir()
    script = state / "g++"
    first, delay = generator.choice(_CALLS[way]), round(generator.uniform(0.02, 0.3), 3)
    script.write_text(_COMPILER.format(folder=shlex.quote(str(state)), first=first, delay=delay))
    script.chmod(0o755)
    # Inductor keeps precompiled headers in the folder of temporary files.
    variables = {"CXX": str(script), "TMPDIR": str(state)}
    under = _run(_command(compiler, way), folder, **variables)
    if not (state / "killed").exists():
        raise RuntimeError("no compiler was killed")
    return under, _run(_command(compiler, way), folder, **variables)


def _killed_process(compiler: str, way: str, folder: Path, generator: random.Random) -> _Pair:
    """Kill the process and all its children at any time of the compile."""
    process = _start(_command(compiler, way), folder)
    seconds = generator.uniform(2.0, 16.0)
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
    under = _read(process.returncode, output, errors, killed=process.returncode < 0)
    return under, _run(_command(compiler, way), folder)


def _start(command: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=_environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _damaged_caches(compiler: str, way: str, folder: Path, generator: random.Random) -> _Pair:
    """Change the extension's own entries, and all entries of which Inductor keeps a digest.

    Inductor loads the libraries of `torch.compile` without a check; they stay.
    """
    _run(_command(compiler, way), folder)
    for path in sorted(folder.rglob("*")):
        own = path.is_relative_to(folder / "packages") or "fxgraph" in path.parts
        if not path.is_file() or not own:
            continue
        data = bytearray(path.read_bytes())
        action = generator.choice(("flip", "cut off", "empty", "keep"))
        if action == "flip" and data:
            data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        elif action == "cut off":
            del data[generator.randrange(len(data) + 1) :]
        elif action == "empty":
            data.clear()
        mode = path.stat().st_mode
        path.chmod(0o644)
        path.write_bytes(data)
        path.chmod(mode)
    under = _run(_command(compiler, way), folder)
    return under, _run(_command(compiler, way), folder)


def _clock_jumps(compiler: str, way: str, folder: Path, generator: random.Random) -> _Pair:
    """The clock was wrong when the caches were written: their times are of the past or future."""
    _run(_command(compiler, way), folder)
    for path in folder.rglob("*"):
        moment = generator.choice((86_400, 4_102_444_800))  # 1970 and 2100
        with contextlib.suppress(FileNotFoundError):
            os.utime(path, (moment, moment))
    under = _run(_command(compiler, way), folder)
    return under, _run(_command(compiler, way), folder)


FAULTS: dict[str, Callable[[str, str, Path, random.Random], _Pair]] = {
    "full disk": _full_disk,
    "read-only caches": _read_only,
    "killed compiler": _killed_compiler,
    "killed process": _killed_process,
    "damaged caches": _damaged_caches,
    "clock jumps": _clock_jumps,
}


def can_mount() -> bool:
    """Whether this process may mount a file system in a namespace of its own."""
    if shutil.which("unshare") is None or shutil.which("setpriv") is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        mount = f"mount -t tmpfs tmpfs {shlex.quote(folder)}"
        return (
            subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode
            == 0
        )


def run_case(case: Case, compiler: str = "inductor_ext") -> _Pair:
    """Run a case; return the outcomes under the fault and after it."""
    generator = random.Random(f"{case.fault}/{case.way}/{case.seed}")
    with tempfile.TemporaryDirectory(prefix="faults") as name:
        return FAULTS[case.fault](compiler, case.way, Path(name), generator)


def _describe(outcomes: _Pair) -> str:
    under, after = outcomes
    texts = [f"{o.kind}{f' ({o.error[:200]})' if o.error else ''}" for o in (under, after)]
    return " -> ".join(texts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases; return 1 if an outcome is bad."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5, help="cases of each fault and way")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--json-out", type=Path, help="folder of results")
    options = parser.parse_args(arguments)
    header = results.collect_header("faults", results.format_command())
    counts: dict[str, Counter[str]] = {}
    for fault in options.faults:
        for way in WAYS:
            for seed in range(options.seeds):
                case = Case(fault, way, seed)
                found = run_case(case)
                kind = f"{found[0].kind}, then {found[1].kind}"
                good = is_good(*found)
                counts.setdefault(fault, Counter())[kind if good else "bad"] += 1
                print(f"{'good' if good else 'BAD '} {case}: {_describe(found)}", flush=True)
                if not good:
                    print(found[0].details, found[1].details, sep="\n")
                    print(f"     {COMPILERS[0]}: {_describe(run_case(case, COMPILERS[0]))}")
    rows = [
        results.make_row(
            fault, kind, "cases", better="lower" if kind == "bad" else "higher", ours=count
        )
        for fault, found_counts in counts.items()
        for kind, count in sorted({"bad": 0, **found_counts}.items())
    ]
    results.report(header, rows, options.json_out)
    return int(any(found_counts["bad"] for found_counts in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
