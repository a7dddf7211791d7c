"""Times candidate kernels of GEMMs on a GPU, and evaluates the cost model that ranks them.

`measure` compiles, checks and times the candidates of some problems, all of them or a given number,
on Inductor's compile workers. It writes its results after every problem, and continues with an
existing file. `fit` fits the cost model's constants to such files, and prints the constants that
changed and how close the best candidate that ranking would have measured comes to the best of all.

    python -m benchmarks.gemm.search_spaces measure --set quantized --most 40 --budget-seconds 80 \
        --out quantized.json
    python -m benchmarks.gemm.search_spaces fit quantized.json --only convert

The set `regret` has twelve problems for which it is worth measuring all candidates once; the
command `regret` turns the file (or any other) into the results that are committed. The set
`prologues` has problems with M of some hundred, with and without a prologue fused into the operand
loads, whose kernels tuning leaves out if they are predicted to lose. The cost model has no
measurements of split-K, stream-K and TMA stores; `measure --set tails --pairs` measures them.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gemm import fit_cost_model
from benchmarks.gemm.cases import CASES
from benchmarks.harness import results, resumable
from inductor_ext import config
from inductor_ext.autotune import candidate_run, tuner
from inductor_ext.autotune.candidate_run import BenchmarkBackend, Job
from inductor_ext.hooks import activate, compile_fx, scope
from inductor_ext.storage import json_codec
from inductor_ext.templates.device import Device
from inductor_ext.templates.format import config_words, problem_words
from inductor_ext.templates.fused_ops import Dequant, Epilogue, Prologue, RowNorm
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import Operand
from inductor_ext.templates.triton import cost_model, ranking, search_space
from inductor_ext.templates.triton.config import GemmConfig
from inductor_ext.templates.triton.constraints import legal
from inductor_ext.templates.triton.cost_model import DEFAULT, Constants

__all__ = [
    "SETS",
    "Space",
    "compute_speed_share",
    "find_best_ranked_time",
    "fit",
    "main",
    "make_rows",
    "measure_space",
    "read",
    "report",
    "select_candidates",
    "select_pairs",
]


def _yield_quantized() -> Iterator[GemmProblem]:
    """Yield dequantization at small and large M: next to loads, and next to the matmul itself."""
    for name in (
        "int8 weight 16x14336x4096",
        "int8 weight 2048x14336x4096",
        "int4 weight 16x14336x4096",
        "int8 SwiGLU 16x14336x4096",
        "int4 weight 2048x14336x4096",
        "int4 QKV 1x6144x4096",
    ):
        yield CASES[name].problem
    yield GemmProblem.contiguous(
        "mixed",
        1,
        28672,
        4096,
        b_dtype="int8",
        parts=(14336, 14336),
        prologue=Prologue(RowNorm("rms", 1), Dequant("column")),
        epilogue=Epilogue(gated=True),
    )


def _yield_regret() -> Iterator[GemmProblem]:
    """Yield one or two problems per kind: decode and prefill, wave tails, odd sizes."""
    for name in (
        "llama-8b o 1x4096x4096",
        "llama-8b gate 16x14336x4096",
        "llama-8b down 64x4096x14336",
        "llama-8b o 2048x4096x4096",
        "cube 1024x1024x1024",
        "wave tail 2176x4096x4096",
        "unaligned 16x4096x4095",
        "large K 256x256x65536",
        "values 64x512x64x512",
        "int8 weight 16x14336x4096",
        "SwiGLU 16x14336x4096",
        "QKV 1x6144x4096",
    ):
        yield CASES[name].problem


def _yield_tails() -> Iterator[GemmProblem]:
    """Yield problems with long tails: few tiles and large K, nearly empty waves, output-bound."""
    for name in (
        "wave tail 2176x4096x4096",
        "large K 256x256x65536",
        "scores 64x512x512x64",
        "rectangle 2040x3584x3584",
        "values 32x2048x128x2048",
        "llama-8b down 64x4096x14336",
        "unaligned 64x4097x4095",
        "unaligned 16x4096x4095",
    ):
        yield CASES[name].problem


def _yield_prologues() -> Iterator[GemmProblem]:
    """Yield norms and dequantization for which the cost model predicts no clear winner.

    Each comes with the problem that remains if the prologue is a separate pass.
    """
    norms = [
        CASES[name].problem
        for name in (
            "RMSNorm + linear 16x4096x4096",
            "LayerNorm + linear 16x4096x4096",
            "LayerNorm + QKV 16x3072x1024",
        )
    ]
    for width in (6144, 14336):
        weights = Operand.of("bfloat16", (4096, width), (1, 4096))
        norms.append(dataclasses.replace(norms[0], n=width, b=weights))
    quantized = [
        CASES[name].problem
        for name in (
            "int8 weight 16x14336x4096",
            "int4 weight 16x14336x4096",
            "int8 SwiGLU 16x14336x4096",
            "int4 QKV 16x6144x4096",
        )
    ]
    unique: dict[GemmProblem, None] = {}
    for m, problems in ((64, norms), (128, norms), (256, norms), (1024, quantized)):
        for problem in problems:
            fused = dataclasses.replace(problem, m=m)
            separate = [problem for problem, _ in ranking.without_prologue(fused)]
            unique |= dict.fromkeys((fused, *separate))
    yield from unique


SETS: Mapping[str, Callable[[], Iterator[GemmProblem]]] = {
    "tails": _yield_tails,
    "quantized": _yield_quantized,
    "regret": _yield_regret,
    "prologues": _yield_prologues,
}
"""Problem sets; the most valuable problems of a set come first."""


@dataclass(frozen=True)
class Space:
    """Measurements of one problem."""

    problem: GemmProblem
    device: Device
    candidates: int
    """Number of candidates in the whole search space."""
    inductor: float | None
    """Microseconds of Inductor's kernel; None if it failed."""
    microseconds: Mapping[GemmConfig, float]
    failures: Mapping[GemmConfig, str]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serializable value that `read` can read."""
        return {
            "problem": self.problem.to_json(),
            "device": json_codec.encode(self.device),
            "candidates": self.candidates,
            "stock": self.inductor,
            "rows": [[time, key.to_json()] for key, time in self.microseconds.items()],
            "failed": [[reason, key.to_json()] for key, reason in self.failures.items()],
        }

    def list_measurements(self) -> list[fit_cost_model.Measurement]:
        """Return the measurements in the format of the cost model."""
        return [
            fit_cost_model.Measurement(self.problem, key, self.device, microseconds)
            for key, microseconds in self.microseconds.items()
        ]


def read(path: Path) -> list[Space]:
    """Read the spaces from a file written by `measure`.

    Raises:
        exc.BadGemmError: the file has another version.
    """
    spaces = []
    for entry in json.loads(path.read_text())["spaces"]:
        device = dict(entry["device"])
        device["capability"] = tuple(device["capability"])
        rows, failed = (
            [(value, GemmConfig.from_json(config)) for value, config in entry[name]]
            for name in ("rows", "failed")
        )
        spaces.append(
            Space(
                GemmProblem.from_json(entry["problem"]),
                Device(**device),
                entry["candidates"],
                entry["stock"],
                {config: value for value, config in rows},
                {config: value for value, config in failed},
            )
        )
    return spaces


def select_candidates(
    problem: GemmProblem, device: Device, most: int | None
) -> tuple[list[GemmConfig], int]:
    """Return the candidates to measure, and the number of all candidates.

    The candidates that tuning would measure are always included. Two thirds of the remaining slots
    go to the best candidates by prediction, and one third to an even sample of the rest.

    Args:
        problem: a problem covered by a template.
        device: the GPU.
        most: maximum number of candidates; None for all.
    """
    everything = list(search_space.candidates(problem, device))
    everything.sort(key=lambda x: cost_model.predict(problem, x, device).total)
    if most is None or len(everything) <= most:
        return everything, len(everything)
    ranked = [item for item, _ in ranking.rank(problem, device, tuner.CANDIDATES)][:most]
    others = [item for item in everything if item not in ranked]
    head = (most - len(ranked)) * 2 // 3
    rest, count = others[head:], most - len(ranked) - head
    spread = [rest[index * len(rest) // count] for index in range(count)]
    return [*ranked, *others[:head], *spread], len(everything)


def select_pairs(
    problem: GemmProblem, device: Device, most: int | None
) -> tuple[list[GemmConfig], int]:
    """Return candidates that show the benefit of fused split-K, stream-K and TMA stores.

    Every such candidate is paired with its counterpart without these options.

    Args:
        problem: a problem covered by a template.
        device: the GPU.
        most: maximum number of candidates; None for all. They are spread evenly over combinations
            of options and block_k.

    Returns:
        The candidates, and the number of all candidates.
    """
    everything = list(search_space.candidates(problem, device))
    everything.sort(key=lambda x: cost_model.predict(problem, x, device).total)
    kinds: dict[object, list[GemmConfig]] = {}
    for item in everything:
        # With Triton 3.6, warp-specialized kernels without TMA store omit stores.
        if item.tma_store or not item.warp_specialize:
            options = (item.fused_split_k, item.stream_k, item.tma_store, item.warp_specialize)
            kinds.setdefault((*options, item.block_k), []).append(item)
    selection: dict[GemmConfig, None] = {}
    for item in itertools.chain.from_iterable(itertools.zip_longest(*kinds.values())):
        if most is not None and len(selection) >= most:
            break
        if item is not None:
            selection[item] = None
            plain = dataclasses.replace(item, fused_split_k=False, stream_k=False, tma_store=False)
            if not plain.warp_specialize and legal(problem, plain, device):
                selection[plain] = None
    return list(selection), len(everything)


def measure_space(
    problem: GemmProblem,
    device: Device,
    bench: BenchmarkBackend,
    most: int | None,
    budget: float,
    select: Callable[
        [GemmProblem, Device, int | None], tuple[list[GemmConfig], int]
    ] = select_candidates,
) -> Space:
    """Compile, check and time candidates.

    Args:
        problem: a problem covered by a template.
        device: the device of the bench.
        bench: for example the result of `autotune.inductor_benchmark.cuda_bench`.
        most: see `select_candidates`.
        budget: milliseconds of timing.
        select: `select_candidates` or `select_pairs`.
    """
    configs, count = select(problem, device, most)
    (result,) = candidate_run.run([Job(problem, tuple(configs))], bench, budget, lambda *_: None)
    times = {timing.config: timing.microseconds for timing in result.timings}
    return Space(
        problem,
        device,
        count,
        times.pop(None),
        {
            key: value
            for key, value in times.items()
            if isinstance(key, GemmConfig) and value is not None
        },
        {
            timing.config: timing.failure
            for timing in result.timings
            if isinstance(timing.config, GemmConfig) and timing.failure
        },
    )


def fit(
    spaces: Sequence[Space], names: Sequence[str] | None = None
) -> tuple[Constants, float, float]:
    """Fit constants to the measurements; return them and the error before and after.

    Args:
        spaces: spaces of any devices.
        names: names of the constants to fit; None for all.

    Returns:
        The constants, and the root mean square of log(predicted / measured), weighted as described
            at `fit_cost_model.compute_error`, for the shipped constants and for these.
    """
    measurements = [item for space in spaces for item in space.list_measurements()]
    constants = fit_cost_model.fit(measurements, names=names)
    before, after = (
        math.sqrt(fit_cost_model.compute_error(measurements, item)) for item in (DEFAULT, constants)
    )
    return constants, before, after


def find_best_ranked_time(space: Space, constants: Constants = DEFAULT) -> float:
    """Return the best time (us) of candidates that tuning would measure; infinite if none."""
    ranked = ranking.rank(space.problem, space.device, tuner.CANDIDATES, constants=constants)
    return min((space.microseconds.get(item, math.inf) for item, _ in ranked), default=math.inf)


def compute_speed_share(space: Space, constants: Constants = DEFAULT) -> float:
    """Return the speed of the best candidate that tuning would measure over the best of all.

    0 if none of the candidates that tuning would measure was measured.
    """
    return min(space.microseconds.values()) / find_best_ranked_time(space, constants)


def report(spaces: Sequence[Space], constants: Constants) -> Iterator[str]:
    """Yield a table: the measurements of every problem, and its speed share before and after."""
    head = f"{'measured':>12}  {'best us':>8}  {'Inductor us':>11}"
    yield f"{head}  {'share':>6}  {'fitted':>6}  problem"
    shares = []
    for space in spaces:
        shipped, fitted = compute_speed_share(space), compute_speed_share(space, constants)
        shares.append((shipped, fitted))
        count = f"{len(space.microseconds)} of {space.candidates}"
        inductor = "-" if space.inductor is None else f"{space.inductor:.1f}"
        best = min(space.microseconds, key=space.microseconds.__getitem__)
        yield (
            f"{count:>12}  {space.microseconds[best]:8.1f}  {inductor:>11}  {shipped:6.3f}  "
            f"{fitted:6.3f}  {problem_words(space.problem)}: {config_words(best)}"
        )
    for title, column in zip(("shipped", "fitted"), zip(*shares, strict=True), strict=True):
        near = sum(value >= 0.97 for value in column)
        yield f"{title}: worst {min(column):.3f}, 0.97 or more in {near} of {len(column)}"


def _measure(options: argparse.Namespace) -> int:
    import torch

    from inductor_ext.autotune import inductor_benchmark

    start = time.monotonic()
    device = Device.from_torch(torch.cuda.get_device_properties(0))
    before = read(options.out) if options.out.exists() else []
    done = {space.problem for space in before if space.device == device}
    problems = dict.fromkeys(itertools.chain.from_iterable(SETS[name]() for name in options.set))
    todo = [problem for problem in problems if problem not in done]
    header = results.collect_header("gemm-space", results.format_command(), commit=options.commit)
    spaces = [space.to_json() for space in before]
    select = select_pairs if options.pairs else select_candidates
    settings = config.snapshot({})
    compile_fx.install_hooks(activate.requested)
    with scope.compile_scope(settings):
        bench = inductor_benchmark.cuda_bench(0)
        left = options.budget_seconds and options.budget_seconds - (time.monotonic() - start)
        for problem in resumable.take_within(todo, left):
            begin = time.monotonic()
            space = measure_space(
                problem, device, bench, options.most, options.milliseconds, select
            )
            spaces.append(space.to_json())
            options.out.write_text(json.dumps({**header, "spaces": spaces}))
            seconds = time.monotonic() - begin
            print(
                f"{problem_words(problem)}: {len(space.microseconds)} of {space.candidates} "
                f"measured, {len(space.failures)} failed, {seconds:.1f} s",
                flush=True,
            )
            for reason in dict.fromkeys(space.failures.values()):
                print(f"  {reason}", flush=True)
    print(f"{len(spaces) - len(before)} of {len(todo)} in {time.monotonic() - start:.0f} s")
    return 0


def _fit(options: argparse.Namespace) -> int:
    spaces = _read_measured(options.files)
    constants, before, after = fit(spaces, options.only)
    print(f"Error {before:.3f}, fitted {after:.3f}")
    for field in dataclasses.fields(constants):
        old, new = (getattr(item, field.name) for item in (DEFAULT, constants))
        if abs(new / old - 1) > 1e-3:
            print(f"  {field.name}: {old:.4g} -> {new:.4g}")
    print("\n".join(report(spaces, constants)))
    return 0


def _read_measured(paths: Iterable[Path]) -> list[Space]:
    """Read the spaces with measurements from several files."""
    return [space for path in paths for space in read(path) if space.microseconds]


def make_rows(spaces: Iterable[Space]) -> list[results.Row]:
    """Return per problem the best candidate that tuning would measure, and Inductor's time.

    The lower bound is the best of all measured candidates.
    """
    return [
        results.make_row(
            problem_words(space.problem),
            "best of the six ranked first",
            "us",
            ours=find_best_ranked_time(space),
            stock=space.inductor,
            floor=min(space.microseconds.values()),
            note=f"{len(space.microseconds)} of {space.candidates} candidates measured",
        )
        for space in spaces
    ]


def _store_regret(options: argparse.Namespace) -> int:
    spaces = _read_measured(options.files)
    stored = json.loads(options.files[0].read_text())
    header = {
        **{name: stored[name] for name in results.Header.__annotations__},
        "suite": options.suite,
    }
    document: Any = {**header, "rows": make_rows(spaces)}
    print(results.render_table(document), end="")
    results.write(options.json_out, document)
    return 0


REGRET = "gemm-regret"
"""Default name of the suite."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    commands = parser.add_subparsers(required=True)
    measure = commands.add_parser("measure", help="time candidates on a GPU")
    measure.add_argument("--set", nargs="+", choices=SETS, default=list(SETS))
    measure.add_argument("--most", type=int, help="candidates per problem; by default all")
    measure.add_argument(
        "--pairs",
        action="store_true",
        help="options of the kernel's end, beside the same kernel without",
    )
    measure.add_argument(
        "--out", type=Path, required=True, help="file of the results, continued if it exists"
    )
    measure.add_argument("--budget-seconds", type=float, help="start no problem that would not fit")
    measure.add_argument(
        "--milliseconds", type=float, default=400.0, help="time for timing a problem"
    )
    measure.add_argument("--commit", help="commit of the source tree if it is not a git checkout")
    measure.set_defaults(run=_measure)
    fit = commands.add_parser("fit", help="fit the cost model and evaluate it")
    fit.add_argument("files", nargs="+", type=Path)
    names = [field.name for field in dataclasses.fields(Constants)]
    fit.add_argument("--only", nargs="+", choices=names, metavar="NAME", help="constants to fit")
    fit.set_defaults(run=_fit)
    regret = commands.add_parser("regret", help="write what ranking misses as results")
    regret.add_argument("files", nargs="+", type=Path)
    regret.add_argument("--json-out", type=Path, required=True, help="folder of the results")
    regret.add_argument("--suite", default=REGRET, help="name of the results")
    regret.set_defaults(run=_store_regret)
    options = parser.parse_args(arguments)
    code: int = options.run(options)
    return code


if __name__ == "__main__":
    sys.exit(main())
