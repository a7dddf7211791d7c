"""Host time that the extension adds around compiled code: imports, activations, calls, compiles.

All figures are measured in child processes of this checkout and of another one (`--baseline`, a
folder with an earlier version), as `harness.checkouts` describes:

- importing `inductor_ext`, and the modules that a first compile needs (torch is imported before);
- entering and leaving `inductor_ext.activate()` after the hooks into torch are installed;
- a call of a small compiled function, with `backend="inductor_ext"` and with `backend="inductor"`;
- compiling that function with Inductor's caches disabled.

For activations and calls, the number of functions entered is counted as well, which does not depend
on the machine's load.

    python -m benchmarks.overhead --baseline FOLDER [--rounds N] [--json-out DIR]
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["main", "measure"]

METRICS = {
    "import of the package": "ms",
    "import for a first compile": "ms",
    "activation": "us",
    "call, Inductor (default)": "us",
    "call, inductor_ext": "us",
    "compile, inductor_ext": "s",
    "functions entered, activation": "calls",
    "functions entered, call, inductor_ext": "calls",
}
"""Metrics with their units."""


def _time_calls(call: Callable[[], object], number: int) -> float:
    """Return the median time of a call over 9 batches of `number` calls."""
    batches = []
    for _ in range(9):
        start = time.perf_counter()
        for _ in range(number):
            call()
        batches.append((time.perf_counter() - start) / number * 1e6)
    return statistics.median(batches)


def _count_functions(call: Callable[[], object]) -> float:
    """Return how many Python and C functions one call enters."""
    count = 0

    def profile(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    for _ in range(10):
        call()
    sys.setprofile(None)
    return count / 10


def measure() -> dict[str, float]:
    """Return the figures of the `inductor_ext` that is first on this process's import path."""
    import torch

    start = time.perf_counter()
    import inductor_ext

    figures = {"import of the package": (time.perf_counter() - start) * 1e3}
    import torch._inductor.compile_fx

    start = time.perf_counter()
    import inductor_ext.backend
    import inductor_ext.memory_planning

    figures["import for a first compile"] = (time.perf_counter() - start) * 1e3

    def activate() -> None:
        with inductor_ext.activate():
            pass

    activate()
    figures["activation"] = _time_calls(activate, 200)
    figures["functions entered, activation"] = _count_functions(activate)

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x, -1) + 1

    x = torch.randn(8, 8)
    torch.set_num_threads(1)
    with torch.no_grad():
        for backend, name in (
            ("inductor", "call, Inductor (default)"),
            ("inductor_ext", "call, inductor_ext"),
        ):
            torch.compiler.reset()
            compiled = torch.compile(function, backend=backend)
            start = time.perf_counter()
            compiled(x)
            seconds = time.perf_counter() - start
            figures[name] = _time_calls(lambda: compiled(x), 2000)  # noqa: B023 - called here
        figures["functions entered, call, inductor_ext"] = _count_functions(lambda: compiled(x))
    figures["compile, inductor_ext"] = seconds
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and store the results; the exit code is 0."""
    argv = sys.argv[1:] if argv is None else argv
    if argv == ["--child"]:
        print(json.dumps(measure()))
        return 0
    from benchmarks.harness import checkouts

    comparison = checkouts.Comparison("overhead", "softmax(x @ x) + 1 of 8 x 8", METRICS, 7)
    return checkouts.main(comparison, Path(__file__), __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
