"""Inductor's compile workers: they start early, get kernels while they start, and are warmed up."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any
from unittest import mock

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor.async_compile import AsyncCompile

from inductor_ext.autotune import compile_workers
from inductor_ext.toolchain import requirements

pytest.importorskip("triton")


class Pool:
    write_pipe: IO[bytes] | None = None

    def __init__(self) -> None:
        self.submitted: list[tuple[Any, ...]] = []

    def submit(self, *task: Any) -> None:
        self.submitted.append(task)


def test_kernels_are_sent_to_workers_that_are_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those of the thread that asks for it, and only if workers are allowed."""
    ready: Future[str] = Future()
    monkeypatch.setattr(AsyncCompile, "_ready_future", ready)
    with inductor_config.patch(compile_threads=6), ThreadPoolExecutor() as other_thread:
        with compile_workers.sending_early():
            assert AsyncCompile.use_process_pool()
            assert not other_thread.submit(AsyncCompile.use_process_pool).result()
            with inductor_config.patch({"triton.proton_profiling": True}):
                assert not AsyncCompile.use_process_pool()
        assert not AsyncCompile.use_process_pool()
        ready.set_result("ready")
        assert AsyncCompile.use_process_pool()


@pytest.mark.parametrize(("error", "expected"), [(None, True), (TimeoutError(), False)])
def test_waiting_for_workers(
    error: Exception | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready: Future[str] = Future()
    if error is None:
        ready.set_result("ready")
    else:
        ready.set_exception(error)
    monkeypatch.setattr(AsyncCompile, "_ready_future", ready)
    with inductor_config.patch(compile_threads=6):
        assert compile_workers.wait_until_ready() is expected


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_backend_starts_workers_for_gpus_only(device: str) -> None:
    with (
        mock.patch.object(requirements, "device_types", return_value={device}),
        mock.patch.object(requirements, "find_missing", return_value=None),
        mock.patch.object(requirements, "warn_about_gemm_backends"),
        mock.patch.object(compile_workers, "start") as start,
    ):
        torch.compile(torch.sin, backend="inductor_ext")(torch.ones(3))
    assert start.called == (device == "cuda")


def test_each_worker_has_one_task() -> None:
    pool = Pool()
    with (
        inductor_config.patch(compile_threads=6),
        mock.patch.object(AsyncCompile, "process_pool", return_value=pool),
    ):
        compile_workers.warm_up((9, 0))
        compile_workers.warm_up((9, 0))
    assert pool.submitted == [(compile_workers.compile_nothing, 90)] * 6


def test_many_kernels_fit_into_the_pipe_to_the_workers() -> None:
    """Without a reader, a write of more than the buffer would not return."""
    reader, writer = os.pipe()
    pool = Pool()
    with os.fdopen(reader, "rb"), os.fdopen(writer, "wb") as pool.write_pipe:
        compile_workers._enlarge_pipe(pool)
        os.set_blocking(writer, False)
        assert os.write(writer, bytes(1 << 20)) == 1 << 20
    compile_workers._enlarge_pipe(Pool())


def test_daemon_processes_start_no_workers() -> None:
    with (
        inductor_config.patch(compile_threads=6),
        mock.patch.object(AsyncCompile, "process_pool", side_effect=RuntimeError) as process_pool,
    ):
        compile_workers.warm_up((9, 0))
    assert process_pool.called


def test_compiles_in_this_process_start_no_workers() -> None:
    with (
        inductor_config.patch(compile_threads=1),
        mock.patch.object(AsyncCompile, "process_pool", side_effect=AssertionError),
    ):
        compile_workers.warm_up((9, 0))


def test_an_empty_kernel_is_compiled_and_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton

    compiled = []
    compile_ = triton.compile

    def kept(*args: Any, **kwargs: Any) -> Any:
        compiled.append(compile_(*args, **kwargs))
        assert Path(triton.knobs.cache.dir).exists()
        return compiled[-1]

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with mock.patch.object(triton, "compile", kept):
        compile_workers.compile_nothing(90)
    assert ".target sm_90" in compiled[0].asm["ptx"]
    assert compiled[0].asm["cubin"][:4] == b"\x7fELF"
    assert triton.knobs.cache.dir == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_compile_errors_are_ignored() -> None:
    with mock.patch("triton.compile", side_effect=RuntimeError("no ptxas")) as compile_kernel:
        compile_workers.compile_nothing(90)
    assert compile_kernel.called
