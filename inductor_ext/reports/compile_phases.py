"""Where the wall time of a compile goes, by sampling the stack of the compiling thread.

`sample_phases` looks at the thread every few milliseconds. The time since its last look belongs to
the phase that the stack shows (`find_phase`). No code is changed, so the compile that is measured
is the one that users run, and every second belongs to exactly one phase.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType

__all__ = ["PHASES", "find_phase", "sample_phases"]

PHASES: Mapping[str, str] = {
    "import": r"importlib\._bootstrap>:_find_and_load$",
    "tuning, wait for workers": r"autotune/compile_workers\.py:wait_until_ready$",
    "tuning, wait for kernels": r"autotune/inductor_benchmark\.py:load_code$",
    "tuning, verify": r"autotune/candidate_run\.py:_verify_candidates$",
    "tuning, time": r"autotune/timing\.py:",
    "tuning, generate code": r"autotune/inductor_benchmark\.py:_generate_codes$",
    "tuning, rest": r"autotune/(tuner|background_tuning)\.py:",
    "tuning results": r"autotune/(results_db|results_folder|tuning_queue)\.py:",
    "Inductor's tuning, compile": r"_inductor/select_algorithm\.py:.*(precompile|wait_on_futures)",
    "Inductor's tuning, time": (
        r"_inductor/(select_algorithm\.py:.*(benchmark|autotun)|autotune_process\.py:)"
    ),
    "Inductor's tuning, other kernels": (
        r"_inductor/runtime/triton_heuristics\.py:.*(benchmark|autotune_to_one|coordinate_descent)"
    ),
    "wait for kernels": (
        r"_inductor/(async_compile\.py:(wait|_wait_futures|wait_pool_ready|result)$"
        r"|runtime/triton_heuristics\.py:(precompile|_make_launchers|make_launcher)$)"
    ),
    "CUDA graphs": r"_inductor/cudagraph_trees\.py:",
    "plan of the matmuls": r"lowerings/graph/post_grad_pass\.py:",
    "graph passes": r"_inductor/(compile_fx\.py:_recursive_\w+_passes$|fx_passes/)",
    "code generation": r"_inductor/graph\.py:(codegen|_update_scheduler)",
    "load the module": r"_inductor/(graph\.py:compile_to_module|codecache\.py:load_by_key_path)$",
    "lowering": r"_inductor/graph\.py:run$",
    "AOTAutograd": r"_functorch/",
    "dynamo": r"_dynamo/(convert_frame|symbolic_convert|guards|output_graph)\.py:",
}
"""Patterns of the phases. A frame is "file:function". A sample belongs to the first phase with a
pattern that any of its frames matches; if there is none, to the first call of what was compiled."""

FIRST_CALL = "first call"

_COMPILE = re.compile(r"/_dynamo/convert_frame\.py:|/_inductor/compile_fx\.py:")
"""Frames of every compile: Dynamo's, and Inductor's for a backward graph."""

_PATTERNS = [re.compile(pattern) for pattern in PHASES.values()]


def find_phase(frames: Iterable[str]) -> str:
    """Return the phase of a stack.

    Args:
        frames: "file:function" of each frame.
    """
    return [*PHASES, FIRST_CALL][min(map(_find_first, frames), default=len(PHASES))]


@functools.cache
def _find_first(frame: str) -> int:
    """Return the position of the first phase that a frame belongs to; the number of all if none."""
    matches = (position for position, regex in enumerate(_PATTERNS) if regex.search(frame))
    return next(matches, len(_PATTERNS))


def _walk(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        yield f"{frame.f_code.co_filename}:{frame.f_code.co_name}"
        frame = frame.f_back


@contextlib.contextmanager
def sample_phases(
    interval: float = 0.005, *, only_compiles: bool = False
) -> Iterator[dict[str, float]]:
    """Sample the thread that enters this context; yield the seconds of each phase.

    Args:
        interval: seconds between two samples.
        only_compiles: whether everything outside of compiles counts as `FIRST_CALL`, such as the
            imports of a program.

    Yields:
        A dictionary that is complete after the context.
    """
    seconds: dict[str, float] = collections.defaultdict(float)
    stop, ident = threading.Event(), threading.get_ident()

    def sample(last: float) -> None:
        is_last = False
        while not is_last:
            is_last = stop.wait(interval)
            frames = list(_walk(sys._current_frames().get(ident)))
            counts = not only_compiles or any(map(_COMPILE.search, frames))
            phase = find_phase(frames) if counts else FIRST_CALL
            now = time.perf_counter()
            seconds[phase] += now - last
            last = now

    thread = threading.Thread(target=sample, args=(time.perf_counter(),))
    thread.start()
    try:
        yield seconds
    finally:
        stop.set()
        thread.join()
