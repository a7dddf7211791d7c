"""What the measurements of reliability run in processes of their own.

    python -m benchmarks.reliability.child TASK ...

A task prints one JSON object as its last line.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import gc
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.harness import measure

__all__ = ["COMPILERS", "WAYS", "run_task"]

WAYS = ("compile", "package")
"""By torch.compile; as an AOT package."""

COMPILERS = ("inductor", "inductor_ext")


def run_task(*arguments: str) -> Any:
    """Run a task of this module in a process with empty caches; return its JSON object.

    Raises:
        RuntimeError: the process failed.
    """
    with tempfile.TemporaryDirectory() as caches:
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": caches,
            "INDUCTOR_EXT_ARTIFACT_CACHE_DIR": caches,
        }
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.reliability.child", *arguments],
            env=environment,
            capture_output=True,
            text=True,
        )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(arguments)}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


class Net(nn.Module):
    """A small model with a matmul, a reduction and pointwise operators."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(self.up(x)).softmax(-1)
        return x + torch.sin(self.down(hidden)) * hidden.amax(-1, keepdim=True)


def _make(width: int) -> tuple[nn.Module, torch.Tensor]:
    # All threads share the state of torch's own generator.
    generator = torch.Generator().manual_seed(width)
    model = Net(width).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / width**0.5)
    return model, torch.randn(4, width, generator=generator)


def _is_right(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(actual, expected, rtol=1e-4, atol=1e-5)


def compile_and_check(compiler: str, way: str, width: int) -> str:
    """Compile a model and call it; return "right" or "wrong"."""
    model, x = _make(width)
    with torch.no_grad():
        expected = model(x)
        if way == "compile":
            actual = torch.compile(model, backend=compiler)(x)
        elif compiler == "inductor_ext":
            import inductor_ext

            program = torch.export.export(model, (x,))
            actual = inductor_ext.load(inductor_ext.aoti_compile_and_package(program))(x)
        else:
            program = torch.export.export(model, (x,))
            path = torch._inductor.aoti_compile_and_package(program)
            actual = torch._inductor.aoti_load_package(path)(x)
    return "right" if _is_right(actual, expected) else "wrong"


def run_once(compiler: str, way: str, width: int) -> dict[str, Any]:
    """Compile under a fault; return the outcome, and the error if there was one."""
    try:
        return {"outcome": compile_and_check(compiler, way, width)}
    except Exception as error:
        inner = getattr(error, "inner_exception", error)
        return {
            "outcome": "error",
            "error": f"{type(inner).__name__}: {inner}",
            "traceback": "".join(traceback.format_exception(error))[-4000:],
        }


def grow(compiler: str, count: int) -> dict[str, Any]:
    """Compile `count` graphs, each another one; return the resident MiB after each."""
    resident = []
    for index in range(count):
        torch._dynamo.reset()
        width = 8 + index
        if compile_and_check(compiler, "compile", width) != "right":
            raise AssertionError(f"wrong result at width {width}")
        gc.collect()
        resident.append(measure.read_private_mib())
    return {"resident": resident}


def _digest(compiler: str, width: int) -> str:
    """Compile a model; return a digest of its results' bits, "wrong", or an error."""
    model, first = _make(width)
    try:
        with torch.no_grad():
            compiled = torch.compile(model, backend=compiler, dynamic=False, fullgraph=True)
            digest = hashlib.sha256()
            for x in (first, -first, first.flip(0)):
                actual = compiled(x)
                if not _is_right(actual, model(x)):
                    return "wrong"
                digest.update(actual.numpy().tobytes())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"sha256:{digest.hexdigest()}"


def compile_in_threads(threads: int, rounds: int, only: str | None) -> dict[str, str]:
    """Compile models by turns with each compiler; return "compiler/width" to a digest.

    Args:
        only: the compiler whose models one thread compiles; None compiles all, in `threads`.
    """
    # All models have the same code; each is compiled.
    limits = dict.fromkeys(("recompile_limit", "accumulated_recompile_limit"), 2 * threads * rounds)

    def run(thread: int) -> dict[str, str]:
        found = {}
        # From torch 2.13 on, a thread has its own configuration.
        with torch._dynamo.config.patch(limits):
            for index in range(rounds):
                compiler = COMPILERS[(thread + index) % len(COMPILERS)]
                width = 8 + thread * rounds + index
                if only in (None, compiler):
                    found[f"{compiler}/{width}"] = _digest(compiler, width)
        return found

    workers = threads if only is None else 1
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return {name: d for found in pool.map(run, range(threads)) for name, d in found.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a task."""
    parser = argparse.ArgumentParser(description=__doc__)
    tasks = parser.add_subparsers(dest="task", required=True)
    once = tasks.add_parser("once")
    once.add_argument("compiler", choices=COMPILERS)
    once.add_argument("way", choices=WAYS)
    once.add_argument("--width", type=int, default=8)
    growth = tasks.add_parser("grow")
    growth.add_argument("compiler", choices=COMPILERS)
    growth.add_argument("--count", type=int, default=200)
    mixed = tasks.add_parser("threads")
    mixed.add_argument("threads", type=int)
    mixed.add_argument("rounds", type=int)
    mixed.add_argument("--only", choices=COMPILERS)
    options = parser.parse_args(arguments)
    result: Any
    if options.task == "once":
        result = run_once(options.compiler, options.way, options.width)
    elif options.task == "threads":
        result = compile_in_threads(options.threads, options.rounds, options.only)
    else:
        result = grow(options.compiler, options.count)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
