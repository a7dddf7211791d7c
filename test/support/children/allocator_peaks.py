"""Run with a setting of the CUDA caching allocator: peaks and errors of a model, by backend.

    PYTORCH_CUDA_ALLOC_CONF=... python -m test.support.children.allocator_peaks

Prints one line of JSON: for each backend the largest relative error against eager mode in float64,
the peak of requested bytes above the level before the calls, the peak of reserved bytes, and the
numbers of arenas and of buffers in them. The calls are of three lengths, with dynamic shapes; the
runs of graphs record and replay one of them.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import torch

from test.support.cuda_memory import large_model_and_input, planning, requested_peak, reset

RUNS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "inductor": ("inductor", {}, {}),
    "auto": ("inductor_ext", {}, {}),
    "always": ("inductor_ext", {}, {"memory_arenas": "always", "memory_debug": True}),
    "graphs of inductor": ("inductor", {"triton.cudagraphs": True}, {}),
    "graphs": ("inductor_ext", {"triton.cudagraphs": True}, {"memory_arenas": "always"}),
}
"""By name: the backend, Inductor's settings and those of the extension."""


@torch.no_grad()
def measure_run(name: str) -> dict[str, float]:
    """Return what the program prints of one run."""
    backend, inductor, extension = RUNS[name]
    reset()
    model, x = large_model_and_input()
    exact = copy.deepcopy(model).double()
    graphs = "triton.cudagraphs" in inductor
    inputs = [x] * 4 if graphs else [x[:, :length].contiguous() for length in (511, 64, 255)]
    errors = []
    with planning(inductor, **extension) as records:
        run = torch.compile(model, backend=backend, dynamic=not graphs)
        for value in inputs:
            torch.compiler.cudagraph_mark_step_begin()
            output = run(value).clone()
            expected = exact(value.double())
            difference = torch.linalg.vector_norm(output.double() - expected)
            errors.append((difference / torch.linalg.vector_norm(expected)).item())
        del output, expected, difference
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

        def call_all() -> None:
            for value in inputs:
                torch.compiler.cudagraph_mark_step_begin()
                run(value)

        requested = requested_peak(call_all)
    return {
        "error": max(errors),
        "requested": requested,
        "reserved": torch.cuda.max_memory_reserved(),
        "arenas": sum(len(record.arenas) for record in records),
        "members": sum(s.arena is not None for record in records for s in record.storages),
    }


if __name__ == "__main__":
    # The workspaces of libraries are allocated before anything is measured.
    torch.ones(512, 512, device="cuda") @ torch.ones(512, 512, device="cuda")
    print(json.dumps({name: measure_run(name) for name in RUNS}))
