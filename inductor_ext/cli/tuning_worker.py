"""The process that tunes in the background, see `autotune.background_tuning`.

    python -m inductor_ext.cli.tuning_worker FOLDER INDEX

tunes what the queue in a folder of tuning results contains for the GPU of this index, and ends when
the queue is empty.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence

from inductor_ext import config
from inductor_ext.autotune import gpu_load
from inductor_ext.autotune.background_tuning import Worker, worker_name
from inductor_ext.autotune.decision import Decision
from inductor_ext.autotune.results_db import TuningDatabase
from inductor_ext.autotune.tuning_queue import Request, TuningQueue
from inductor_ext.hooks import scope
from inductor_ext.templates.device import Device
from inductor_ext.templates.problem import GemmProblem

_NICE = 19


class _Gpu:
    """The load of a GPU, and the time."""

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"

    def is_idle(self) -> bool:
        return gpu_load.is_idle(self._uuid)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def main(folder: str, index: int) -> None:
    """Run the worker of a GPU."""
    os.nice(_NICE)
    import torch

    from inductor_ext.autotune import inductor_benchmark, tuner

    device = Device.from_torch(torch.cuda.get_device_properties(index))

    def tune(requests: Sequence[Request]) -> Mapping[GemmProblem, Decision]:
        first = requests[0]
        settings = config.snapshot(
            {"tuning": "compile", "tuning_cache_dir": folder, "tuning_budget": first.budget}
        )
        with scope.compile_scope(settings):
            return tuner.tune(
                [request.problem for request in requests],
                device,
                inductor_benchmark.cuda_bench,
                settings,
                index=index,
                dependent=first.dependent,
            )

    name = worker_name(index)
    Worker(name, TuningQueue(folder), TuningDatabase(folder), device, tune).run(_Gpu(name))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
