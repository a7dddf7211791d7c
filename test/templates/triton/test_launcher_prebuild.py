"""Launchers that Triton has built in C: which kernels need one, and that workers build those."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.runtime import cache_dir_utils

from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.triton import launcher_prebuild
from inductor_ext.templates.triton.config import GemmConfig
from test.autotune.test_compile_workers import Pool
from test.support import gpu_util, kernel_cases

pytest.importorskip("triton")

BY_TMA = GemmConfig("persistent_tma", 64, 64, 32, 4, 4, tma=True, flatten=True)
PLAIN = GemmConfig("cp_async", 64, 64, 32, 3, 4)
SPLIT = GemmConfig(
    "splitk", 16, 64, 64, 3, 4, swap_ab=True, split_k=4, fused_split_k=True, pdl=True
)

KERNEL = {
    "signature": {"A": "*bf16", "N": "i32", "WIDE": "constexpr"},
    "constants": {"WIDE": 1},
    "device": SimpleNamespace(index=0),
}


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pool:
    """Compile workers that never begin, of a Triton that builds launchers."""
    result = Pool()
    monkeypatch.setattr(launcher_prebuild, "are_launchers_built", lambda: True)
    monkeypatch.setattr(launcher_prebuild, "requested_launchers", set())
    monkeypatch.setattr(AsyncCompile, "use_process_pool", lambda: True)
    monkeypatch.setattr(AsyncCompile, "process_pool", lambda: result)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return result


def with_fields(kernel: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    return {**kernel, **fields}


def test_each_is_requested_once(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher_prebuild.prepare(KERNEL)
    launcher_prebuild.prepare(
        with_fields(KERNEL, signature={"B": "*bf16", "M": "i32", "WIDE": "constexpr"})
    )
    signature, constants = KERNEL["signature"], KERNEL["constants"]
    problems = [(launcher_prebuild.build, signature, constants, str(tmp_path))]
    assert pool.submitted == problems
    wider = {"A": "*bf16", "N": "i64", "WIDE": "constexpr"}
    launcher_prebuild.prepare(with_fields(KERNEL, signature=wider))
    launcher_prebuild.prepare(with_fields(KERNEL, constants={"WIDE": 2}))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "other"))
    launcher_prebuild.prepare(KERNEL)
    problems += [
        (launcher_prebuild.build, wider, constants, str(tmp_path)),
        (launcher_prebuild.build, signature, {"WIDE": 2}, str(tmp_path)),
        (launcher_prebuild.build, signature, constants, str(tmp_path / "other")),
    ]
    assert pool.submitted == problems


@pytest.mark.parametrize("lacking", ["workers", "launchers"])
def test_no_pool_is_used(lacking: str, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    if lacking == "workers":
        monkeypatch.setattr(AsyncCompile, "use_process_pool", lambda: False)
    else:
        monkeypatch.setattr(launcher_prebuild, "are_launchers_built", lambda: False)
    launcher_prebuild.prepare(KERNEL)
    assert pool.submitted == []


def test_a_lost_pool_is_requested_again(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    with mock.patch.object(AsyncCompile, "process_pool", side_effect=RuntimeError("shut down")):
        launcher_prebuild.prepare(KERNEL)
    assert pool.submitted == []
    launcher_prebuild.prepare(KERNEL)
    assert len(pool.submitted) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_triton_builds_it_in_the_folder(fails: bool, tmp_path: Path) -> None:
    import triton
    from triton.backends.nvidia import driver

    before, built = triton.knobs.cache.dir, []

    def launcher(source: Any, metadata: Any) -> None:
        built.append((source.signature, source.constants, triton.knobs.cache.dir))
        assert source.fn.arg_names == ["A", "N", "WIDE"]
        assert getattr(metadata, "tensordesc_meta", "absent") is None
        if fails:
            raise RuntimeError("no gcc")

    with mock.patch.object(driver, "CudaLauncher", launcher):
        launcher_prebuild.build(KERNEL["signature"], KERNEL["constants"], str(tmp_path))
    assert built == [(KERNEL["signature"], KERNEL["constants"], str(tmp_path))]
    assert triton.knobs.cache.dir == before


@pytest.mark.parametrize(
    ("config", "needed"),
    [
        (PLAIN, False),
        (dataclasses.replace(SPLIT, pdl=False), False),
        (SPLIT, True),
        (BY_TMA, True),
    ],
    ids=("plain", "split", "dependent", "tma"),
)
def test_kernels_that_need_one(config: GemmConfig, needed: bool) -> None:
    m = 16 if config.swap_ab else 256
    case = kernel_cases.Case(GemmProblem.contiguous("mm", m, 256, 1024), config)
    with mock.patch.object(launcher_prebuild, "prepare") as prepare:
        kernel_cases.render(case)
    assert prepare.call_count == needed
    if needed:
        (kernel,) = prepare.call_args.args
        pointers = [value for value in kernel["signature"].values() if value.startswith("*")]
        # Partial sums and counters are arguments as well.
        assert len(pointers) == (5 if config.fused_split_k else 3)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [SPLIT, BY_TMA], ids=("dependent", "tma"))
def test_prebuilt_launchers_are_those_of_triton(config: GemmConfig) -> None:
    from torch._inductor.utils import fresh_cache
    from triton.backends.nvidia import driver
    from triton.runtime import build

    if not launcher_prebuild.are_launchers_built():
        pytest.skip("this Triton builds no launchers")
    m = 16 if config.swap_ab else 256
    case = kernel_cases.Case(GemmProblem.contiguous("mm", m, 256, 1024), config)
    with (
        inductor_config.patch(compile_threads=1),
        fresh_cache(),
        kernel_cases.lowering_of(case) as function,
        gpu_util.compiling(),
        mock.patch.object(launcher_prebuild, "prepare") as prepare,
    ):
        torch.compile(function, fullgraph=True)(*kernel_cases.inputs(case, "cuda"))
        (kernel,) = prepare.call_args.args
        folder = cache_dir_utils.triton_cache_dir(0)
        built = mock.patch.object(build, "_build", side_effect=AssertionError)
        compile_ = driver.compile_module_from_src
        looked = mock.patch.object(driver, "compile_module_from_src", wraps=compile_)
        with built as built_again, looked as looked_for:
            launcher_prebuild.build(kernel["signature"], kernel["constants"], folder)
        assert looked_for.called
        assert not built_again.called
