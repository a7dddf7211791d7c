"""`inductor-ext cutlass build|show|clear`: builds CUTLASS kernels ahead, lists, removes them.

`build` fills the kernel store for a machine without nvcc, for a container image, or before a first
compile. It selects kernels in one of two ways: from a list of GEMMs (sizes, dtypes, layouts and the
epilogue given by `--epilogue`), for which the cost model ranks kernels as in a compile; or from the
decisions in the store of tuning results. A kernel is not specialized to sizes, so a kernel ranked
first for one GEMM may already have been built for another.

The store is selected by the settings `artifact_cache_dir` and `artifact_cache_size`, read from the
environment.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from inductor_ext import exc, settings
from inductor_ext.cli.argument_types import parse_positive
from inductor_ext.reports.text import format_count
from inductor_ext.storage.artifact_store import ArtifactStore
from inductor_ext.storage.paths import kernel_folder
from inductor_ext.templates.cutlass import build_slots, nvcc_build
from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.cutlass.source import Source
from inductor_ext.templates.device import KNOWN, Device
from inductor_ext.templates.problem import GemmProblem

EXAMPLE = "inductor-ext cutlass build --arch sm_90a --gemm 2048x4096x4096 --epilogue gelu"
EXIT_CODES = {0: "all kernels were built", 1: "a kernel cannot be built", 2: "a tool is missing"}

_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "tf32": "float32",
    "fp8": "float8_e4m3fn",
    "int8": "int8",
}

_LAYOUTS = ("rc", "rr", "cr", "cc")

_GEMMS = "64x4096x4096,2048x4096x4096,8192x8192x8192"

_STEPS = ("bias", "residual", "relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh")
"""The steps that `--epilogue` may combine."""


def _step_functions() -> dict[str, Callable[..., Any]]:
    """Return every step as a function of the GEMM's result, a bias and a residual."""
    import torch
    from torch.nn import functional

    return {
        "bias": lambda y, bias, _: y + bias,
        "residual": lambda y, _, residual: y + residual,
        "relu": lambda y, *_: torch.relu(y),
        "gelu": lambda y, *_: functional.gelu(y),
        "gelu_tanh": lambda y, *_: functional.gelu(y, approximate="tanh"),
        "silu": lambda y, *_: functional.silu(y),
        "sigmoid": lambda y, *_: torch.sigmoid(y),
        "tanh": lambda y, *_: torch.tanh(y),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    build = actions.add_parser(
        "build",
        help="build kernels into the store",
        description="Build kernels into the store, for use without nvcc or in a container image. "
        "Lists are comma-separated.",
    )
    _add_build_arguments(build)
    show = actions.add_parser(
        "show", help="list the kernels in the store", description="List the kernels in the store."
    )
    show.add_argument("--json", action="store_true", help="print one JSON object")
    clear = actions.add_parser(
        "clear",
        help="remove kernels from the store",
        description="Remove the least recently used kernels, except those that a process is "
        "reading.",
    )
    clear.add_argument(
        "--max-bytes",
        default="0",
        metavar="SIZE",
        help='size that may remain, such as "512MiB" (default: 0)',
    )
    clear.add_argument("--json", action="store_true", help="print one JSON object")


def _add_build_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arch",
        metavar="ARCH",
        type=_parse_capability,
        help="architecture such as sm_90a (default: that of --device)",
    )
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="GPU to rank kernels for, part of a known name (default: the first of --arch)",
    )
    parser.add_argument(
        "--dtype", default="bf16", help=f"operand dtypes: {', '.join(_DTYPES)} (default: bf16)"
    )
    parser.add_argument(
        "--layout",
        default="rc",
        help="layouts of A and B, r for row-major and c for column-major: "
        f"{', '.join(_LAYOUTS)} (default: rc, that of linear layers)",
    )
    parser.add_argument(
        "--epilogue",
        default="none",
        help=f"`none`, or steps joined by +, such as bias+gelu: {', '.join(_STEPS)}",
    )
    parser.add_argument(
        "--gemm",
        metavar="MxNxK",
        default=_GEMMS,
        help=f"sizes for which kernels are ranked (default: {_GEMMS})",
    )
    parser.add_argument(
        "--kernels", type=parse_positive, default=2, help="maximum number per GEMM (default: 2)"
    )
    parser.add_argument(
        "--tuned",
        action="store_true",
        help="build the kernels selected in the tuning results instead",
    )
    parser.add_argument("--jobs", type=parse_positive, help="maximum number of concurrent builds")
    parser.add_argument("--dry-run", action="store_true", help="only list the kernels")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object at the end, and the progress on stderr",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        exc.BadEnvironmentError: a setting cannot be read.
        exc.BadArgumentError: an argument has an invalid value.
        exc.MissingToolchainError: kernels have to be built, but a part of the toolchain is missing.
    """
    values = settings.Settings(**settings.from_environment())
    store = ArtifactStore(
        kernel_folder(values.artifact_cache_dir),
        settings.parse_bytes(values.artifact_cache_size),
    )
    if arguments.action == "show":
        return _show(store, arguments.json)
    if arguments.action == "clear":
        return _clear(store, arguments.max_bytes, arguments.json)
    sources = (
        _read_tuned_kernels(values, arguments.arch) if arguments.tuned else rank_kernels(arguments)
    )
    return _build(sources, store, arguments)


# --- which kernels ------------------------------------------------------------------------------


def _argument_error(name: str, value: str, allowed: str) -> exc.BadArgumentError:
    return exc.BadArgumentError(name=f"--{name}", actual=repr(value), allowed=allowed)


def _parse_capability(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(?:sm_?)?(\d+)(\d)[af]?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text} is not an architecture such as sm_90a")
    return int(match[1]), int(match[2])


def _select_device(arguments: argparse.Namespace) -> Device:
    name, capability = arguments.device, arguments.arch
    matches = [
        entry
        for entry in KNOWN
        if (name is None or name.lower() in entry.name.lower())
        and capability in (None, entry.capability)
    ]
    if name is None and capability is None:
        raise exc.BadArgumentError(
            name="--arch", actual=None, allowed="an architecture such as sm_90a, or a --device"
        )
    relatives = [device for device in KNOWN if device.capability[:1] == (capability or ())[:1]]
    if not matches and name is None and relatives:
        # What fits into the smallest shared memory of a generation fits into that of every device
        # in it.
        nearest = min(relatives, key=lambda relative: relative.shared_memory)
        fp8 = nearest.fp8 if capability >= (8, 9) else 0.0
        return dataclasses.replace(nearest, capability=capability, fp8=fp8)
    if not matches and name is None:
        capabilities = sorted({device.capability for device in KNOWN})
        allowed = ", ".join(f"sm_{major}{minor}" for major, minor in capabilities)
        raise _argument_error("arch", "sm_{}{}".format(*capability), f"one of {allowed}")
    if not matches:
        names = [entry.name for entry in KNOWN if capability in (None, entry.capability)]
        raise _argument_error("device", name, f"part of one of {', '.join(names)}")
    return matches[0]


def _split_list(name: str, text: str, allowed: Mapping[str, Any] | tuple[str, ...]) -> list[str]:
    words = [part.strip() for part in text.split(",")]
    for word in words:
        if word not in allowed:
            raise _argument_error(name, word, f"some of {', '.join(allowed)}")
    return words


def _parse_sizes(text: str) -> list[tuple[int, int, int]]:
    result = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)x(\d+)x(\d+)\s*", part)
        sizes = tuple(map(int, match.groups())) if match else ()
        if not sizes or min(sizes) < 1:
            raise _argument_error("gemm", part, "sizes MxNxK, such as 4096x4096x1024")
        result.append((sizes[0], sizes[1], sizes[2]))
    return result


def rank_kernels(arguments: argparse.Namespace) -> dict[Source, str]:
    """Return the kernels that rank first, mapped to a description of the GEMM they are for."""
    from inductor_ext.autotune.cutlass_options import Options
    from inductor_ext.templates import kernels as families

    device = _select_device(arguments)
    options = Options(limit=arguments.kernels)
    dtypes = _split_list("dtype", arguments.dtype, _DTYPES)
    layouts = _split_list("layout", arguments.layout, _LAYOUTS)
    sizes = _parse_sizes(arguments.gemm)
    epilogues = [part.strip() for part in arguments.epilogue.split(",")]
    for epilogue in epilogues:
        if epilogue != "none" and not set(epilogue.split("+")) <= set(_STEPS):
            raise _argument_error("epilogue", epilogue, f"none, or {', '.join(_STEPS)} joined by +")
    sources: dict[Source, str] = {}
    for dtype in dtypes:
        for layout in layouts:
            for epilogue in epilogues:
                for problem in trace_problems(dtype, layout, epilogue, sizes):
                    for config, _ in options.rank(problem, device):
                        source = families.source_of(problem, config)
                        sources.setdefault(source, f"{dtype} {layout} {epilogue}")
    return sources


def trace_problems(
    dtype: str, layout: str, epilogue: str, sizes: list[tuple[int, int, int]]
) -> Iterator[GemmProblem]:
    """Yield GEMM problems traced as in a model's graph, so that epilogues match compiles."""
    import torch
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    from inductor_ext.lowerings.graph import match_cutlass, matmul_nodes

    kind = getattr(torch, _DTYPES[dtype])
    stored = torch.int32 if dtype == "int8" else torch.bfloat16 if dtype == "fp8" else kind
    steps = [] if epilogue == "none" else epilogue.split("+")
    functions = _step_functions()

    def function(a: Any, b: Any, bias: Any, residual: Any, rows: Any, columns: Any) -> Any:
        left = list(steps)
        if dtype == "int8":
            product = torch._int_mm(a, b)
        elif dtype == "fp8":
            product = torch._scaled_mm(a, b, rows, columns, out_dtype=stored)
        elif left[:1] == ["bias"]:
            product = torch.addmm(bias, a, b)
            left.pop(0)
        else:
            product = torch.mm(a, b)
        for step in left:
            product = functions[step](product, bias, residual)
        return product

    for m, n, k in sizes:
        # Fake tensors need neither a GPU nor memory.
        with FakeTensorMode(), _allow_tf32(dtype == "tf32"):
            tensors = [
                _make_tensor((m, k), kind, layout[0]),
                _make_tensor((k, n), kind, layout[1]),
                _make_tensor((n,), stored),
                _make_tensor((m, n), stored),
                _make_tensor((m, 1), torch.float32),
                _make_tensor((1, n), torch.float32),
            ]
            graph = make_fx(function, select_decomp_table())(*tensors).graph
            graph.eliminate_dead_code()
            (node,) = filter(matmul_nodes.is_matmul, graph.nodes)
            problem = matmul_nodes.problem_of(node)
            if problem is None:
                continue
            for match in itertools.islice(match_cutlass.find_cutlass_matches(node, problem), 1):
                yield match.kernel_problem(problem)


def _make_tensor(shape: tuple[int, ...], dtype: Any, layout: str = "r") -> Any:
    import torch

    strides = (1, shape[0]) if layout == "c" else (*shape[1:], 1)
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


@contextlib.contextmanager
def _allow_tf32(allowed: bool) -> Iterator[None]:
    import torch

    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _read_tuned_kernels(
    values: settings.Settings, capability: tuple[int, int] | None
) -> dict[Source, str]:
    """Return the kernels that stored decisions name; for one compute capability if given."""
    from inductor_ext.autotune import results_db as stores
    from inductor_ext.storage.paths import tuning_folder
    from inductor_ext.templates import kernels as families
    from inductor_ext.templates.format import problem_words

    results = stores.TuningDatabase(
        tuning_folder(values.tuning_cache_dir), max_entries=values.tuning_cache_entries
    )
    sources: dict[Source, str] = {}
    for origin in stores.SOURCES:
        for entry in results.entries(origin):
            if capability not in (None, entry.environment.capability):
                continue
            if isinstance(entry.config, CutlassConfig):
                source = families.source_of(entry.problem, entry.config)
                sources.setdefault(source, problem_words(entry.problem))
    return sources


# --- building, listing, removing ----------------------------------------------------------------


def _build(
    sources: Mapping[Source, str],
    store: ArtifactStore,
    arguments: argparse.Namespace,
) -> int:
    there = {source: nvcc_build.is_built(source, store) for source in sources}
    missing = [key for key, built in there.items() if not built]
    progress = sys.stderr if arguments.json else sys.stdout
    with contextlib.redirect_stdout(progress):
        failed = {} if arguments.dry_run else _build_missing(sources, missing, store, arguments)
        if arguments.dry_run:
            for key, built in there.items():
                print(f"{'built' if built else 'to do'}  {key.name}  ({sources[key]})")
            count = format_count(len(missing), "kernel")
            print(f"{count} of {len(there)} to be built, into {store.folder}")
    if arguments.json:
        kernels = [
            {
                "name": key.name,
                "reason": sources[key],
                "built": built or (not arguments.dry_run and key not in failed),
                "error": failed.get(key),
            }
            for key, built in there.items()
        ]
        print(json.dumps({"folder": str(store.folder), "kernels": kernels}, indent=2))
    return 1 if failed else 0


def _build_missing(
    sources: Mapping[Source, str],
    missing: Sequence[Source],
    store: ArtifactStore,
    arguments: argparse.Namespace,
) -> dict[Source, str]:
    """Build kernels, and return the errors of those that cannot be built."""
    built = len(sources) - len(missing)
    print(f"{format_count(len(missing), 'kernel')} to build, {built} built before")
    failed: dict[Source, str] = {}
    if missing:
        toolchain = nvcc_build.Toolchain.find()
        jobs = min(len(missing), build_slots.jobs(arguments.jobs))
        print(
            f"nvcc {toolchain.version}, CUTLASS {toolchain.headers.release}, {jobs} at a time; "
            "half a minute to a minute per kernel"
        )
        begun = time.monotonic()

        def build_one(source: Source) -> tuple[Source, str | None]:
            try:
                nvcc_build.build(source, store, toolchain, limit=arguments.jobs)
            except exc.KernelBuildError as error:
                return source, str(error)
            return source, None

        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            waiting = [pool.submit(build_one, source) for source in missing]
            for done, future in enumerate(concurrent.futures.as_completed(waiting), 1):
                source, why = future.result()
                if why is not None:
                    failed[source] = why
                seconds = time.monotonic() - begun
                outcome = f"({sources[source]})" if why is None else f"FAILED: {why}"
                place = f"[{done}/{len(missing)}] {seconds:6.1f} s"
                print(f"{place}  {source.name}  {outcome}", flush=True)
    print(f"folder  {store.folder}")
    return failed


def _show(store: ArtifactStore, as_json: bool) -> int:
    rows = []
    for key in store.entry_keys():
        with store.get(key) as folder:
            file = None if folder is None else folder / nvcc_build.DETAILS
            if file is None or not file.is_file():
                continue
            size = sum(path.stat().st_size for path in file.parent.iterdir())
            rows.append({**json.loads(file.read_text(encoding="utf-8")), "bytes": size})
    rows.sort(key=lambda row: str(row["name"]))
    if as_json:
        print(json.dumps({"folder": str(store.folder), "kernels": rows}, indent=2))
        return 0
    for row in rows:
        print(
            f"sm_{row['architecture']:<4} {row['bytes'] / 2**20:5.1f} MiB {row['seconds']:6.1f} s  "
            f"nvcc {row['nvcc']}, CUTLASS {row['cutlass']}  {row['name']}"
        )
    used, limit = (size / 2**20 for size in (store.usage().bytes, store.max_bytes))
    count = format_count(len(rows), "kernel")
    print(f"{count}, {used:,.1f} of at most {limit:,.1f} MiB, folder {store.folder}")
    return 0


def _clear(store: ArtifactStore, text: str, as_json: bool) -> int:
    try:
        limit = 0 if text == "0" else settings.parse_bytes(text)
    except ValueError as error:
        raise _argument_error("max-bytes", text, str(error)) from None
    removed = store.collect(limit)
    usage = store.usage()
    if as_json:
        report = {"removed_bytes": removed.bytes, "bytes": usage.bytes}
        print(json.dumps({"folder": str(store.folder), **report}, indent=2))
        return 0
    print(
        f"removed {removed.bytes / 2**20:,.1f} MiB, left {usage.bytes / 2**20:,.1f} MiB in "
        f"{store.folder}"
    )
    return 0
