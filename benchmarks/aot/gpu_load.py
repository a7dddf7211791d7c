"""Time to load gigabytes of weights onto a GPU, and of the first call after it.

    python -m benchmarks.aot.gpu_load --gigabytes 5

Each way of loading runs in fresh processes, which take turns; the files are in the page cache, and
the CUDA context exists. Times are medians, in seconds. A way that takes more than 30 s runs once.
The model has linear layers of random float16 weights.

- `load`: the package of the extension, by `inductor_ext.load`, with its import and with
  verification. `no checks` is without verification, `warm up` with `warm_up=True`. The bytecode of
  the extension is cached, as after its installation.
- `inductor`: the package of Inductor (default), by `torch._inductor.aoti_load_package`, with
  AOTI_COPY_USE_PINNED_ASYNC unset and set (`inductor async`). Its library is linked with
  -Bsymbolic, without which it crashes where torch and the compiler have different C++ libraries.
- `safetensors`: the same tensors, by `safetensors.torch.load_file(device="cuda")`.
- `pageable`: the same bytes, by `torch.from_file(...).cuda()`.
- `pinned`: the same bytes, by eight Python threads that read the file into pinned tensors and copy
  these asynchronously, each on a stream of its own: the fastest way that was found with torch.
- `bus`: as many bytes that are in pinned memory already.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import results

_WIDTH = 8192
_ROWS = 4
_PIECE = 8 << 20
_THREADS = 8
_SLOW = 30.0
_TIMEOUT = 170.0

WAYS = (
    "load",
    "no checks",
    "warm up",
    "inductor",
    "inductor async",
    "safetensors",
    "pageable",
    "pinned",
    "bus",
)
"""The ways of loading, in the order of a round."""


def build(gigabytes: float, folder: Path) -> int:
    """Write the packages, the tensors and the bytes; return the size of the weights in bytes."""
    import inductor_ext
    from inductor_ext.cpp_wrapper.codegen.weights_layout import storage_bytes

    torch.manual_seed(0)
    count = max(1, round(gigabytes * 1e9 / (_WIDTH * _WIDTH * 2)))
    options: dict[str, Any] = {"bias": False, "dtype": torch.half, "device": "cuda"}
    model = torch.nn.Sequential(
        *(torch.nn.Linear(_WIDTH, _WIDTH, **options) for _ in range(count))
    ).eval()
    x = make_input()
    with torch.no_grad():
        program = torch.export.export(model, (x,))
        inductor_ext.aoti_compile_and_package(
            program,
            package_path=str(folder / "ext.pt2"),
            inductor_configs={"artifact_cache": False},
        )
        build_inductor(program, folder)
        torch.save(model(x), folder / "expected.pt")
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    try:
        from safetensors.torch import save_file
    except ImportError:
        pass
    else:
        save_file(state, folder / "weights.safetensors")
    with open(folder / "weights.bin", "wb") as file:
        for tensor in state.values():
            file.write(storage_bytes(tensor, tensor.nbytes))
    return sum(tensor.nbytes for tensor in state.values())


def build_inductor(program: torch.export.ExportedProgram, folder: Path) -> None:
    """Write the package of Inductor (default), if that is possible."""
    import torch._inductor.config

    compiler = folder / "g++"
    compiler.write_text(
        '#!/bin/sh\ncase " $* " in *" -shared "*) exec g++ "$@" -Wl,-Bsymbolic;; esac\n'
        'exec g++ "$@"\n'
    )
    compiler.chmod(0o755)
    try:
        with torch._inductor.config.patch({"cpp.cxx": (None, str(compiler))}):
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(folder / "inductor.pt2")
            )
    except Exception as error:
        print(f"no package of Inductor: {str(error)[-500:]}", flush=True)


def make_input() -> torch.Tensor:
    """Return the input of the model."""
    return torch.ones(_ROWS, _WIDTH, dtype=torch.half, device="cuda")


def copy_pinned(path: Path, view: Callable[[torch.Tensor, int], memoryview]) -> torch.Tensor:
    """Return the bytes of a file on the GPU; `view` is `weights_layout.storage_bytes`."""
    size = path.stat().st_size
    target = torch.empty(size, dtype=torch.uint8, device="cuda")
    buffers = torch.empty(_THREADS * 2 * _PIECE, dtype=torch.uint8, pin_memory=True)
    memory = view(buffers, buffers.nbytes)
    starts = iter(range(0, size, _PIECE))
    lock = threading.Lock()
    descriptor = os.open(path, os.O_RDONLY)

    def work(thread: int) -> None:
        events: list[torch.cuda.Event | None] = [None, None]
        with torch.cuda.stream(torch.cuda.Stream()):
            half = 0
            while True:
                with lock:
                    start = next(starts, None)
                if start is None:
                    return
                half = 1 - half
                waiting = events[half]
                if waiting is not None:
                    waiting.synchronize()
                count = min(_PIECE, size - start)
                begin = (2 * thread + half) * _PIECE
                os.preadv(descriptor, [memory[begin : begin + count]], start)
                buffer = buffers[begin : begin + count]
                target[start : start + count].copy_(buffer, non_blocking=True)
                event = torch.cuda.Event()
                event.record()
                events[half] = event

    threads = [threading.Thread(target=work, args=(index,)) for index in range(_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(descriptor)
    return target


def load(way: str, folder: Path) -> Callable[[], Any]:
    """Return a function that loads, after what is not measured."""
    path = folder / "weights.bin"
    if way in ("load", "no checks", "warm up"):
        package = str(folder / "ext.pt2")

        def load_package() -> Any:
            import inductor_ext

            return inductor_ext.load(package, verify=way != "no checks", warm_up=way == "warm up")

        return load_package
    if way in ("inductor", "inductor async"):

        def load_inductor() -> Any:
            import torch._inductor

            return torch._inductor.aoti_load_package(str(folder / "inductor.pt2"))

        return load_inductor
    if way == "safetensors":
        from safetensors.torch import load_file

        return lambda: load_file(folder / "weights.safetensors", device="cuda")
    if way == "pageable":
        size = path.stat().st_size
        return lambda: torch.from_file(str(path), size=size, dtype=torch.uint8).cuda()
    if way == "pinned":
        from inductor_ext.cpp_wrapper.codegen.weights_layout import storage_bytes

        return lambda: copy_pinned(path, storage_bytes)
    source = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device="cuda")
    count, rest = divmod(path.stat().st_size, 1 << 30)

    def copy() -> None:
        for _ in range(count):
            target.copy_(source, non_blocking=True)
        target[:rest].copy_(source[:rest], non_blocking=True)

    return copy


def measure_here(way: str, folder: Path) -> dict[str, Any]:
    """Load in this process; return the times in seconds and whether the result is right."""
    x = make_input()
    torch.mm(x, x.t())
    function = load(way, folder)
    torch.cuda.synchronize()
    start = time.perf_counter()
    loaded = function()
    torch.cuda.synchronize()
    measured: dict[str, Any] = {"load": time.perf_counter() - start}
    if callable(loaded):
        calls = []
        for _ in range(10):
            start = time.perf_counter()
            y = loaded(x)
            torch.cuda.synchronize()
            calls.append(time.perf_counter() - start)
        measured["first"], measured["tenth"] = calls[0], statistics.median(calls[5:])
        expected = torch.load(folder / "expected.pt")
        measured["right"] = torch.allclose(y, expected, rtol=1e-2, atol=1e-3)
    return measured


def measure(way: str, folder: Path) -> dict[str, Any] | None:
    """Load in a fresh process; return None if that fails."""
    command = [sys.executable, "-m", "benchmarks.aot.gpu_load", "--folder", str(folder)]
    environment = dict(os.environ)
    environment.pop("AOTI_COPY_USE_PINNED_ASYNC", None)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if way == "inductor async":
        environment["AOTI_COPY_USE_PINNED_ASYNC"] = "1"
    try:
        process = subprocess.run(
            [*command, "--way", way],
            capture_output=True,
            text=True,
            env=environment,
            timeout=_TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        print(f"{way}: no result after {_TIMEOUT:.0f} s", flush=True)
        return None
    lines = [line for line in process.stdout.splitlines() if line.startswith("{")]
    if process.returncode != 0 or not lines:
        print(f"{way}: exit status {process.returncode}: {process.stderr[-300:]}", flush=True)
        return None
    measured: dict[str, Any] = json.loads(lines[-1])
    return measured


def run(folder: Path, ways: Sequence[str], rounds: int, seconds: float) -> dict[str, list[Any]]:
    """Measure all ways in turn, until the rounds or the time have passed."""
    begin = time.monotonic()
    measured: dict[str, list[Any]] = {way: [] for way in ways}
    measure("no checks", folder)  # writes the bytecode
    for number in range(rounds):
        if time.monotonic() - begin > seconds:
            print(f"stopped after {number} rounds", flush=True)
            break
        for way in ways:
            if number > len(measured[way]):
                continue  # it has failed
            if any(found["load"] > _SLOW for found in measured[way]):
                continue
            found = measure(way, folder)
            if found is not None:
                measured[way].append(found)
                print(way, json.dumps(found), flush=True)
    return measured


def make_rows(measured: dict[str, list[Any]], size: int) -> list[results.Row]:
    """Return the medians, and the ratios that the targets are about."""
    case = f"{size / 1e9:.1f} GB"

    def median(way: str, key: str) -> float | None:
        values = [found[key] for found in measured.get(way, []) if key in found]
        return statistics.median(values) if values else None

    rows = []
    for way in measured:
        for key, unit in (("load", "s"), ("first", "s"), ("tenth", "s")):
            value = median(way, key)
            if value is not None:
                rows.append(results.make_row(case, f"{way}: {key}", unit, ours=value))
        wrong = sum(not found.get("right", True) for found in measured[way])
        rows.append(results.make_row(case, f"{way}: wrong results", "processes", ours=wrong))
    ours = median("load", "load")
    for other in ("pinned", "safetensors", "pageable", "bus", "inductor", "inductor async"):
        value = median(other, "load")
        if ours is not None and value is not None:
            rows.append(results.make_row(case, f"load over {other}", "ratio", ours=ours / value))
    for way in ("load", "warm up", "inductor"):
        first, tenth = median(way, "first"), median(way, "tenth")
        if first is not None and tenth is not None:
            metric = f"{way}: first call over tenth"
            rows.append(results.make_row(case, metric, "ratio", ours=first / tenth))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.aot.gpu_load")
    parser.add_argument("--gigabytes", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget-seconds", type=float, default=3600.0)
    parser.add_argument("--folder", help="folder for the packages")
    parser.add_argument("--commit", help="commit of the code, if there is no repository")
    parser.add_argument("--json-out", type=Path, help="folder of results")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, metavar="WAY")
    parser.add_argument("--way", choices=WAYS, help="measure in this process")
    options = parser.parse_args(arguments)
    if options.way is not None:
        print(json.dumps(measure_here(options.way, Path(options.folder))), flush=True)
        return 0
    header = results.collect_header("aot-gpu-load", results.format_command(), commit=options.commit)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        begin = time.monotonic()
        size = build(options.gigabytes, folder)
        options.budget_seconds -= time.monotonic() - begin
        print(f"built in {time.monotonic() - begin:.0f} s", flush=True)
        rows = make_rows(
            run(folder, options.ways, options.rounds, options.budget_seconds),
            size,
        )
    results.report(header, rows, options.json_out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
