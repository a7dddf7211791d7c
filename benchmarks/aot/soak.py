"""Many calls of one loaded model from many threads, while its weights and its package change.

    python -m benchmarks.aot.soak --requests 100000 --threads 32 --swaps 1000

Every request is a batch of a random size within the model's range, or just outside of it. The
model computes `x @ weight + bias`, where all elements of the weight and of the bias are the same
number: a result tells which number that was, and whether the two came from different versions. Half
of the swaps replace the weights (`update_constants` and `swap_constants`), the other half the
package (`reload`). The growth of resident memory is that of the second half of the requests.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

import inductor_ext
from benchmarks.harness import measure, results
from inductor_ext import exc
from inductor_ext.cpp_wrapper.load.model import LoadedModel

_LIMIT = 64
"""The largest batch."""
_WIDTH = 256


class Affine(torch.nn.Module):
    """`x @ weight + bias` with constant weight and bias."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((_WIDTH, _WIDTH), value))
        self.bias = torch.nn.Parameter(torch.full((_WIDTH,), value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


def compile_version(value: float, folder: Path) -> str:
    """Compile the model whose weights are `value`; return the path of its package."""
    rows = torch.export.Dim("rows", min=1, max=_LIMIT)
    example = (torch.ones(4, _WIDTH),)
    program = torch.export.export(Affine(value).eval(), example, dynamic_shapes=({0: rows},))
    path = str(folder / f"version{value:.0f}.pt2")
    inductor_ext.aoti_compile_and_package(program, package_path=path)
    return path


class Soak:
    """Threads that call one model, and what they found."""

    def __init__(self, model: LoadedModel, requests: int, values: range) -> None:
        self.model = model
        self.left = requests
        self.values = frozenset(map(float, values))
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self._lock = threading.Lock()

    def _take(self) -> bool:
        with self._lock:
            self.left -= 1
            return self.left >= 0

    def call(self, seed: int) -> None:
        """Make requests until all are made."""
        generator = random.Random(seed)
        counts: Counter[str] = Counter()
        torch.set_num_threads(1)
        while self._take():
            rows = generator.choice((1, _LIMIT, generator.randint(1, _LIMIT), _LIMIT + 1))
            x = torch.full((rows, _WIDTH), float(generator.randint(0, 3)))
            try:
                outcome = self._check(x, self.model(x))
            except exc.InputMismatchError:
                outcome = "refused" if rows > _LIMIT else "dropped"
            except Exception as error:
                self.errors.append(f"{type(error).__name__}: {error}")
                outcome = "dropped"
            counts[outcome] += 1
        with self._lock:
            self.counts += counts

    def _check(self, x: torch.Tensor, y: torch.Tensor) -> str:
        scale = float(x[0, 0]) * _WIDTH + 1
        value = float(y[0, 0]) / scale
        is_right = y.shape == x.shape and value in self.values and bool((y == y[0, 0]).all())
        return "right" if is_right and len(x) <= _LIMIT else "wrong"

    def swap(self, number: int, paths: Sequence[str]) -> None:
        """Replace the package or the weights."""
        if number % 2:
            self.model.reload(paths[number // 2 % len(paths)])
            return
        value = float(1 + number % len(self.values))
        module = Affine(value)
        self.model.update_constants(dict(module.state_dict()), inactive=True, partial=False)
        self.model.swap_constants()


def run(requests: int, threads: int, swaps: int, runners: int = 4) -> dict[str, float]:
    """Make the requests; return what was counted, and the growth of memory in MiB."""
    with tempfile.TemporaryDirectory() as name:
        paths = [compile_version(float(value), Path(name)) for value in (1, 2)]
        soak = Soak(inductor_ext.load(paths[0], num_runners=runners), requests, range(1, 9))
        pool = [threading.Thread(target=soak.call, args=(seed,)) for seed in range(threads)]
        begin = time.perf_counter()
        for thread in pool:
            thread.start()
        half, done = None, 0
        while soak.left > 0 or done < swaps:
            # Spread over the requests; the rest, if any, after them.
            if done < swaps and done * requests <= swaps * (requests - max(soak.left, 0)):
                soak.swap(done, paths)
                done += 1
            else:
                time.sleep(0.001)
            if half is None and soak.left <= requests // 2:
                half = measure.read_private_mib()
        for thread in pool:
            thread.join()
        seconds = time.perf_counter() - begin
        growth = measure.read_private_mib() - (half or measure.read_private_mib())
    for text, count in Counter(soak.errors).most_common(5):
        print(f"{count} x {text}")
    return {
        **{name: soak.counts[name] for name in ("right", "refused", "wrong", "dropped")},
        "swaps": done,
        "growth": growth,
        "seconds": seconds,
    }


def make_rows(case: str, found: Mapping[str, float]) -> list[results.Row]:
    """Return the rows of what `run` has counted."""
    names = {"growth": "growth of memory in the second half", "seconds": "time"}
    units = {"growth": "MiB", "seconds": "s", "swaps": "swaps"}
    return [
        results.make_row(
            case,
            names.get(name, name),
            units.get(name, "requests"),
            better="higher" if name in ("right", "swaps", "samples") else "lower",
            ours=value,
        )
        for name, value in found.items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; return 1 if a request was answered wrongly or dropped."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.aot.soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--threads", type=int, default=32)
    parser.add_argument("--swaps", type=int, default=1000)
    parser.add_argument("--json-out", type=Path, help="folder of results")
    options = parser.parse_args(arguments)
    header = results.collect_header("aot-soak", results.format_command())
    found = run(options.requests, options.threads, options.swaps)
    print(found)
    rows = make_rows(f"{options.threads} threads", found)
    if options.json_out is not None:
        document: results.Document = {**header, "rows": rows}
        print(f"written: {results.write(options.json_out, document)}")
    return int(found["wrong"] + found["dropped"] > 0)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
