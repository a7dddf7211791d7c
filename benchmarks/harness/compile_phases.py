"""Where the wall time of a compile goes, by sampling the stack of the compiling thread.

A `PhaseSampler` looks at the thread every few milliseconds. The time since its last look belongs to
the phase that the stack shows (`find_phase`). No code is changed, so the compile that is measured
is the one that users run, and every second belongs to exactly one phase.
"""

from __future__ import annotations

import collections
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from types import FrameType, TracebackType

__all__ = ["PHASES", "PhaseSampler", "find_phase"]

PHASES: Mapping[str, str] = {
    "import": r"importlib\._bootstrap>:_find_and_load$",
    "tuning, wait for kernels": r"autotune/inductor_benchmark\.py:(load_code|wait_pool_ready)$",
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

_PATTERNS = {phase: re.compile(pattern) for phase, pattern in PHASES.items()}


def find_phase(frames: list[str]) -> str:
    """Return the phase of a stack.

    Args:
        frames: "file:function" of each frame.
    """
    for phase, pattern in _PATTERNS.items():
        if any(map(pattern.search, frames)):
            return phase
    return FIRST_CALL


def _walk(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        yield f"{frame.f_code.co_filename}:{frame.f_code.co_name}"
        frame = frame.f_back


class PhaseSampler:
    """Samples the thread that enters this context manager.

    Args:
        interval: seconds between two samples.
    """

    def __init__(self, interval: float = 0.005) -> None:
        self._interval = interval
        self._seconds: dict[str, float] = collections.defaultdict(float)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, args=(threading.get_ident(),))
        self._last = 0.0

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each phase, the longest first; complete after the context."""
        return dict(sorted(self._seconds.items(), key=lambda item: -item[1]))

    def __enter__(self) -> PhaseSampler:
        self._last = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self, ident: int) -> None:
        is_last = False
        while not is_last:
            is_last = self._stop.wait(self._interval)
            frames = list(_walk(sys._current_frames().get(ident)))
            now = time.perf_counter()
            self._seconds[find_phase(frames)] += now - self._last
            self._last = now
