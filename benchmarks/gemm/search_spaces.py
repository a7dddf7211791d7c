"""Times candidate kernels of GEMMs on a GPU, and evaluates the cost model that ranks them.

`measure` compiles, checks and times the candidates of some problems, all of them or a given number,
on Inductor's compile workers. It writes its results after every problem, and continues with an
existing file. `fit` fits the cost model's constants to such files, and prints the constants that
changed and how close the best candidate that ranking would have measured comes to the best of all.

    python -m benchmarks.gemm.search_spaces measure --set quantised --most 40 --budget-seconds 80 \
        --out quantised.json
    python -m benchmarks.gemm.search_spaces fit quantised.json --only convert

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

__all__ = [
    "SETS",
    "Space",
    "chosen",
    "fitted",
    "found_by_rank",
    "main",
    "measured",
    "pairs",
    "read",
    "report",
    "rows",
    "share",
]


def _quantised() -> Iterator[GemmProblem]:
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


def _regret_set() -> Iterator[GemmProblem]:
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


def _tails() -> Iterator[GemmProblem]:
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


def _prologues() -> Iterator[GemmProblem]:
    """Yield norms and dequantization for which the cost model finds no clear winner.

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
    quantised = [
        CASES[name].problem
        for name in (
            "int8 weight 16x14336x4096",
            "int4 weight 16x14336x4096",
            "int8 SwiGLU 16x14336x4096",
            "int4 QKV 16x6144x4096",
        )
    ]
    found: dict[GemmProblem, None] = {}
    for m, problems in ((64, norms), (128, norms), (256, norms), (1024, quantised)):
        for problem in problems:
            fused = dataclasses.replace(problem, m=m)
            found |= dict.fromkeys((fused, *(left for left, _ in ranking.without_prologue(fused))))
    yield from found


SETS: Mapping[str, Callable[[], Iterator[GemmProblem]]] = {
    "tails": _tails,
    "quantised": _quantised,
    "regret": _regret_set,
    "prologues": _prologues,
}
"""Problem sets; the most valuable problems of a set come first."""


@dataclass(frozen=True)
class Space:
    """Measurements of one problem."""

    problem: GemmProblem
    device: Device
    candidates: int
    """Number of candidates in the whole search space."""
    stock: float | None
    """Microseconds; None if it failed."""
    microseconds: Mapping[GemmConfig, float]
    failed: Mapping[GemmConfig, str]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serializable value that `read` can read."""
        return {
            "problem": self.problem.to_json(),
            "device": json_codec.encode(self.device),
            "candidates": self.candidates,
            "stock": self.stock,
            "rows": [[taken, key.to_json()] for key, taken in self.microseconds.items()],
            "failed": [[reason, key.to_json()] for key, reason in self.failed.items()],
        }

    def measurements(self) -> list[fit_cost_model.Measurement]:
        """Return the measurements in the format of the cost model."""
        return [
            fit_cost_model.Measurement(self.problem, key, self.device, taken)
            for key, taken in self.microseconds.items()
        ]


def read(path: Path) -> list[Space]:
    """Read the spaces from a file written by `measure`.

    Raises:
        exc.BadGemmError: the file has another version.
    """
    found = []
    for load in json.loads(path.read_text())["spaces"]:
        device = dict(load["device"])
        device["capability"] = tuple(device["capability"])
        rows, failed = (
            [(value, GemmConfig.from_json(config)) for value, config in load[name]]
            for name in ("rows", "failed")
        )
        found.append(
            Space(
                GemmProblem.from_json(load["problem"]),
                Device(**device),
                load["candidates"],
                load["stock"],
                {config: value for value, config in rows},
                {config: value for value, config in failed},
            )
        )
    return found


def chosen(problem: GemmProblem, device: Device, most: int | None) -> tuple[list[GemmConfig], int]:
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
    found = [item for item, _ in ranking.rank(problem, device, tuner.CANDIDATES)][:most]
    others = [item for item in everything if item not in found]
    head = (most - len(found)) * 2 // 3
    rest, count = others[head:], most - len(found) - head
    spread = [rest[index * len(rest) // count] for index in range(count)]
    return [*found, *others[:head], *spread], len(everything)


def pairs(problem: GemmProblem, device: Device, most: int | None) -> tuple[list[GemmConfig], int]:
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
    found: dict[GemmConfig, None] = {}
    for item in itertools.chain.from_iterable(itertools.zip_longest(*kinds.values())):
        if most is not None and len(found) >= most:
            break
        if item is not None:
            found[item] = None
            twin = dataclasses.replace(item, fused_split_k=False, stream_k=False, tma_store=False)
            if not twin.warp_specialize and legal(problem, twin, device):
                found[twin] = None
    return list(found), len(everything)


def measured(
    problem: GemmProblem,
    device: Device,
    bench: BenchmarkBackend,
    most: int | None,
    budget: float,
    choose: Callable[[GemmProblem, Device, int | None], tuple[list[GemmConfig], int]] = chosen,
) -> Space:
    """Compile, check and time candidates.

    Args:
        problem: a problem covered by a template.
        device: the device of the bench.
        bench: for example the result of `autotune.inductor_benchmark.cuda_bench`.
        most: see `chosen`.
        budget: milliseconds of timing.
        choose: selects the candidates: `chosen` or `pairs`.
    """
    configs, count = choose(problem, device, most)
    (found,) = candidate_run.run([Job(problem, tuple(configs))], bench, budget, lambda *_: None)
    taken = {timing.config: timing.microseconds for timing in found.timings}
    return Space(
        problem,
        device,
        count,
        taken.pop(None),
        {
            key: value
            for key, value in taken.items()
            if isinstance(key, GemmConfig) and value is not None
        },
        {
            timing.config: timing.failure
            for timing in found.timings
            if isinstance(timing.config, GemmConfig) and timing.failure
        },
    )


def fitted(
    spaces: Sequence[Space], names: Sequence[str] | None = None
) -> tuple[cost_model.Constants, float, float]:
    """Fit constants to the measurements; return them and the error before and after.

    Args:
        spaces: spaces of any devices.
        names: names of the constants to fit; None for all.

    Returns:
        The constants, and the root mean square of log(predicted / measured), weighted as described
            at `fit_cost_model.error`, for the shipped constants and for these.
    """
    known = [measurement for one in spaces for measurement in one.measurements()]
    found = fit_cost_model.fit(known, names=names)
    before, after = (
        math.sqrt(fit_cost_model.error(known, item)) for item in (cost_model.DEFAULT, found)
    )
    return found, before, after


def found_by_rank(one: Space, constants: cost_model.Constants = cost_model.DEFAULT) -> float:
    """Return the best time (us) of candidates that tuning would measure; infinite if none."""
    ranked = ranking.rank(one.problem, one.device, tuner.CANDIDATES, constants=constants)
    return min((one.microseconds.get(item, math.inf) for item, _ in ranked), default=math.inf)


def share(one: Space, constants: cost_model.Constants = cost_model.DEFAULT) -> float:
    """Return the speed of the best candidate that tuning would measure over the best of all.

    0 if none of the candidates that tuning would measure was measured.
    """
    return min(one.microseconds.values()) / found_by_rank(one, constants)


def report(spaces: Sequence[Space], found: cost_model.Constants) -> Iterator[str]:
    """Yield a table: the measurements of every problem, and its `share` before and after."""
    yield f"{'measured':>12}  {'best us':>8}  {'stock us':>8}  {'share':>6}  {'fitted':>6}  problem"
    shares = []
    for one in spaces:
        both = (share(one), share(one, found))
        shares.append(both)
        count = f"{len(one.microseconds)} of {one.candidates}"
        stock = "-" if one.stock is None else f"{one.stock:.1f}"
        best = min(one.microseconds, key=one.microseconds.__getitem__)
        yield (
            f"{count:>12}  {one.microseconds[best]:8.1f}  {stock:>8}  {both[0]:6.3f}  "
            f"{both[1]:6.3f}  {problem_words(one.problem)}: {config_words(best)}"
        )
    for title, item in zip(("shipped", "fitted"), zip(*shares, strict=True), strict=True):
        near = sum(value >= 0.97 for value in item)
        yield f"{title}: worst {min(item):.3f}, 0.97 or more in {near} of {len(item)}"


def _measure(options: argparse.Namespace) -> int:
    import torch

    from inductor_ext.autotune import inductor_benchmark

    start = time.monotonic()
    device = Device.from_torch(torch.cuda.get_device_properties(0))
    before = read(options.out) if options.out.exists() else []
    done = {one.problem for one in before if one.device == device}
    wanted = dict.fromkeys(itertools.chain.from_iterable(SETS[name]() for name in options.set))
    todo = [problem for problem in wanted if problem not in done]
    header = results.collect_header("gemm-space", results.command_line(), commit=options.commit)
    found = [one.to_json() for one in before]
    settings = config.snapshot({})
    compile_fx.install_hooks(activate.requested)
    with scope.compile_scope(settings):
        bench = inductor_benchmark.cuda_bench(0)
        left = options.budget_seconds and options.budget_seconds - (time.monotonic() - start)
        for problem in resumable.within(todo, left):
            begin = time.monotonic()
            choose = pairs if options.pairs else chosen
            one = measured(problem, device, bench, options.most, options.milliseconds, choose)
            found.append(one.to_json())
            options.out.write_text(json.dumps({**header, "spaces": found}))
            seconds = time.monotonic() - begin
            print(
                f"{problem_words(problem)}: {len(one.microseconds)} of {one.candidates} measured, "
                f"{len(one.failed)} failed, {seconds:.1f} s",
                flush=True,
            )
            for reason in dict.fromkeys(one.failed.values()):
                print(f"  {reason}", flush=True)
    print(f"{len(found) - len(before)} of {len(todo)} in {time.monotonic() - start:.0f} s")
    return 0


def _fit(options: argparse.Namespace) -> int:
    spaces = [one for path in options.files for one in read(path) if one.microseconds]
    found, before, after = fitted(spaces, options.only)
    print(f"Error {before:.3f}, fitted {after:.3f}")
    for field in dataclasses.fields(found):
        old, new = (getattr(item, field.name) for item in (cost_model.DEFAULT, found))
        if abs(new / old - 1) > 1e-3:
            print(f"  {field.name}: {old:.4g} -> {new:.4g}")
    print("\n".join(report(spaces, found)))
    return 0


def rows(spaces: Iterable[Space]) -> list[results.Row]:
    """Return per problem the best candidate that tuning would measure, and Inductor's time.

    The floor is the best of all measured candidates.
    """
    return [
        {
            "case": problem_words(one.problem),
            "metric": "best of the six ranked first",
            "unit": "us",
            "better": "lower",
            "ours": found_by_rank(one),
            "stock": one.stock,
            "eager": None,
            "floor": min(one.microseconds.values()),
            "spread": None,
            "note": f"{len(one.microseconds)} of {one.candidates} candidates measured",
        }
        for one in spaces
    ]


def _regret(options: argparse.Namespace) -> int:
    spaces = [one for path in options.files for one in read(path) if one.microseconds]
    known = json.loads(options.files[0].read_text())
    header = {
        **{name: known[name] for name in results.Header.__annotations__},
        "suite": options.suite,
    }
    document: Any = {**header, "rows": rows(spaces)}
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
    measure.add_argument("--most", type=int, help="of each problem; by default all")
    measure.add_argument(
        "--pairs", action="store_true", help="ways to end, each beside the candidate without"
    )
    measure.add_argument("--out", type=Path, required=True, help="written, and gone on with")
    measure.add_argument("--budget-seconds", type=float, help="begin nothing that would go beyond")
    measure.add_argument(
        "--milliseconds", type=float, default=400.0, help="of timing for each problem"
    )
    measure.add_argument("--commit", help="of the checkout, where there is no git to ask")
    measure.set_defaults(run=_measure)
    fit = commands.add_parser("fit", help="fit the model, and say what it is worth")
    fit.add_argument("files", nargs="+", type=Path)
    names = [field.name for field in dataclasses.fields(cost_model.Constants)]
    fit.add_argument("--only", nargs="+", choices=names, metavar="NAME", help="constants to fit")
    fit.set_defaults(run=_fit)
    regret = commands.add_parser("regret", help="what ranking misses, as results")
    regret.add_argument("files", nargs="+", type=Path)
    regret.add_argument("--json-out", type=Path, required=True, help="a folder")
    regret.add_argument("--suite", default=REGRET, help="the results' name")
    regret.set_defaults(run=_regret)
    options = parser.parse_args(arguments)
    code: int = options.run(options)
    return code


if __name__ == "__main__":
    sys.exit(main())
