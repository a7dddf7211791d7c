"""Warm-up of Inductor's compile workers: each compiles an empty kernel, which is removed."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch._inductor import config as inductor_config
from torch._inductor.async_compile import AsyncCompile

from inductor_ext.autotune import compile_workers

pytest.importorskip("triton")


class Pool:
    def __init__(self) -> None:
        self.submitted: list[tuple[Any, ...]] = []

    def submit(self, *task: Any) -> None:
        self.submitted.append(task)


def test_each_worker_has_one_task() -> None:
    pool = Pool()
    with (
        inductor_config.patch(compile_threads=6),
        mock.patch.object(AsyncCompile, "process_pool", return_value=pool),
    ):
        compile_workers.warm_up((9, 0))
        compile_workers.warm_up((9, 0))
    assert pool.submitted == [(compile_workers.compile_nothing, 90)] * 6


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
