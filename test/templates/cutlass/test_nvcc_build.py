"""Building CUTLASS kernels: once for all processes, and correct after failed or killed builds."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gemm.cutlass_launch import Kernel, call
from inductor_ext import exc
from inductor_ext.storage.artifact_store import ArtifactStore
from inductor_ext.templates.cutlass import nvcc_build
from inductor_ext.templates.cutlass.evt import render
from inductor_ext.templates.cutlass.nvcc_build import Toolchain, build_all, built, is_built, key
from inductor_ext.templates.cutlass.source import Source, source
from inductor_ext.templates.cutlass.source.sm90 import collectives, includes
from test.support.cutlass_sources import BASE, CLASSES
from test.support.gemm_strategies import device
from test.support.scripted_nvcc import BAD, GOOD, KILLED, Machine, Scripted, real_store, script

H200 = device("NVIDIA H200")


class TestBuild:
    def test_builds_once(self, machine: Machine) -> None:
        assert not is_built(GOOD, machine.store, machine.toolchain)
        assert machine.built(GOOD) == machine.built(GOOD) == b"good\n"
        assert is_built(GOOD, machine.store, machine.toolchain)
        assert machine.runs == 1

    def test_concurrent_builds_of_one_kernel_wait(self, machine: Machine) -> None:
        slow = script('sleep 0.3; echo good >"$out"')
        results: list[bytes] = []
        threads = [
            threading.Thread(target=lambda: results.append(machine.built(slow))) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [b"good\n"] * 4
        assert machine.runs == 1

    def test_another_source_architecture_or_kind_is_another_entry(self) -> None:
        results = {
            key(GOOD),
            key(GOOD, "cubin"),
            key(BAD),
            key(Source("kernel_1", GOOD.text, "80")),
            key(Source("kernel_2", GOOD.text, "90a")),
        }
        assert len(results) == 5

    def test_stored_kernels_need_no_toolchain(
        self, machine: Machine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        machine.built(GOOD)
        machine.toolchain = Scripted.at(machine.folder, "12.9.1", (4, 3, 0))
        assert machine.built(GOOD) == b"good\n"
        monkeypatch.setattr(Toolchain, "find", lambda: pytest.fail("it looks for nvcc"))
        with built(GOOD, machine.store) as file:
            assert file.read_bytes() == b"good\n"
        assert build_all([GOOD], machine.store) == {}
        assert machine.runs == 1

    def test_an_entry_describes_itself(self, machine: Machine) -> None:
        with built(GOOD, machine.store, machine.toolchain) as file:
            details = json.loads((file.parent / nvcc_build.DETAILS).read_text())
            assert (file.parent / "kernel.cu").read_text() == GOOD.text
        assert details.pop("seconds") >= 0
        assert details == {
            "name": "kernel_1",
            "architecture": "90a",
            "nvcc": "13.0.88",
            "cutlass": "4.2.0",
        }

    def test_the_flags_are_for_one_architecture_and_half(self) -> None:
        device, host = nvcc_build.nvcc_flags(GOOD, "device"), nvcc_build.nvcc_flags(GOOD, "host")
        for flags in (device, host):
            assert "-gencode=arch=compute_90a,code=sm_90a" in flags
            assert not any("EXTENDED_MMA_SHAPES" in flag for flag in flags)
        assert {"-cubin", "-DINDUCTOR_EXT_DEVICE"} <= set(device) - set(host)

    def test_a_half_that_fails_ends_the_other(self, machine: Machine) -> None:
        program = machine.folder / "nvcc"
        program.write_text(program.read_text().replace("exec touch", "exec sleep 600"))
        with pytest.raises(exc.KernelBuildError, match="no such thing"):
            machine.built(BAD)

    def test_nvccs_error_is_raised_by_name_and_kept(self, machine: Machine) -> None:
        for _ in range(2):
            with pytest.raises(exc.KernelBuildError) as caught:
                machine.built(BAD)
            assert caught.value.fields["kernel"] == "kernel_1"
            # The temporary folder is not in the message.
            assert caught.value.fields["why"] == "kernel.cu(3): error: no such thing"
        assert machine.runs == 1
        assert is_built(BAD, machine.store, machine.toolchain)
        assert not is_built(BAD, machine.store)
        # Another nvcc may succeed.
        machine.toolchain = Scripted.at(machine.folder, "13.1.0")
        with pytest.raises(exc.KernelBuildError):
            machine.built(BAD)
        assert machine.runs == 2

    def test_builds_are_retried_after_a_killed_nvcc(self, machine: Machine) -> None:
        with pytest.raises(exc.KernelBuildError, match="nvcc failed with exit code -9"):
            machine.built(KILLED)
        assert not is_built(KILLED, machine.store, machine.toolchain)
        (machine.folder / "fixed").touch()
        assert machine.built(KILLED) == b"good\n"

    def test_interrupts_end_nvcc(self, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        forever = script("echo $$ >/dev/null; exec sleep 600")

        wait = subprocess.Popen.wait

        def interrupted(self: Any) -> int:
            while not machine.runs:
                time.sleep(0.01)
            monkeypatch.setattr(subprocess.Popen, "wait", wait)
            raise KeyboardInterrupt

        monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            machine.built(forever)
        started = int(machine.log.read_text().split()[1])
        with pytest.raises(ProcessLookupError):
            os.kill(started, 0)
        assert not is_built(forever, machine.store, machine.toolchain)

    def test_a_process_that_is_killed_leaves_nothing_behind(self, machine: Machine) -> None:
        code = f"""
            from inductor_ext.storage.artifact_store import ArtifactStore
            from inductor_ext.storage.paths import kernel_folder
            from inductor_ext.templates.cutlass.nvcc_build import Toolchain, build
            from inductor_ext.templates.cutlass.find_headers import Headers
            from inductor_ext.templates.cutlass.source import Source
            import pathlib
            folder = pathlib.Path({str(machine.folder)!r})
            headers = Headers(folder, (4, 2, 0))
            toolchain = Toolchain(str(folder / "nvcc"), "13.0.88", headers, "c++", folder)
            text = 'nvcc: echo half >"$out"; sleep 600'
            store = ArtifactStore(folder / "store", 1 << 30)
            build(Source("kernel_2", text, "90a"), store, toolchain)
        """
        process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
        while not machine.runs:
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
        process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(machine.log.read_text().split()[1]), signal.SIGKILL)
        # Its lock and its slot are free, and its partial output is no entry.
        again = Source("kernel_2", 'nvcc: echo half >"$out"; sleep 600', "90a")
        assert not is_built(again, machine.store, machine.toolchain)
        assert machine.built(GOOD, limit=1) == b"good\n"
        machine.store.collect()
        assert list((machine.folder / "store" / "building").iterdir()) == []

    def test_builds_work_without_a_writable_store(self, tmp_path: Path) -> None:
        machine = Machine(tmp_path)
        said: list[str] = []
        (tmp_path / "file").touch()
        machine.store = ArtifactStore(
            tmp_path / "file", 1 << 30, lambda key, text: said.append(text)
        )
        assert machine.built(GOOD) == b"good\n"
        assert said

    def test_the_store_keeps_to_its_size(self, machine: Machine) -> None:
        machine.store.max_bytes = 30_000
        large = [script(f'head -c 20000 /dev/zero >"$out"; : {i}', f"k{i}") for i in range(2)]
        for item in large:
            machine.built(item)
        assert [is_built(item, machine.store, machine.toolchain) for item in large] == [False, True]


def really(result: Source) -> bytes:
    """The cubin that nvcc builds from a source."""
    with built(result, real_store(), kind="cubin") as file:
        return file.read_bytes()


@pytest.mark.slow
def test_nvcc_builds_one_for_capability_9_0() -> None:
    result = source(*CLASSES["mm"])
    content = really(result)
    assert content[:4] == b"\x7fELF"
    assert result.name.encode() in content
    assert BASE.name in result.name


@pytest.mark.slow
def test_nvcc_builds_one_for_4_bit_weights() -> None:
    result = source(*CLASSES["mixed_uint4"])
    content = really(result)
    assert result.name.encode() in content
    assert f"{result.name}_scales".encode() in content


@pytest.mark.slow
def test_nvcc_builds_an_older_one_as_a_library() -> None:
    config, epilogue = CLASSES["old_addmm_row"]
    result = source(config, epilogue)
    with built(result, real_store()) as file:
        kernel = Kernel(ctypes.CDLL(str(file)), result.name)
        content = file.read_bytes()
        symbols = subprocess.run(
            ["nm", "--extern-only", "--defined-only", file.with_name(nvcc_build.OBJECT)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    assert result.name.encode() in content
    # Renamed, several can be linked together.
    results = {line.split()[2] for line in symbols.splitlines()}
    assert results == {"inductor_ext_run", "inductor_ext_workspace_size"}
    # This needs no device.
    for k, expected in ((64, 0), (60, None)):
        a, b, out = (torch.zeros(64, item, dtype=torch.bfloat16) for item in (k, k, 64))
        arguments = call(config, a, b.t(), out, [out[:1]], scalars=(1, 1), sms=1)
        assert kernel.workspace_size(arguments) == expected


@pytest.mark.slow
def test_pipelines_are_as_deep_as_predicted() -> None:
    """CUTLASS fits as many stages into shared memory as the constraints and the ranking assume."""
    names = (
        "mm_float32_out",
        "mm_cooperative",
        "addmm_matrix",
        "mm_swapped",
        "scaled",
        "mixed_uint4",
    )
    text = [includes(BASE)]
    size = "sizeof(typename CollectiveEpilogue::SharedStorage)"
    for name in names:
        config, epilogue = CLASSES[name]
        types = collectives(config, render(epilogue, config), "Shape<int, int, int, int>")
        stages = config.pipeline(H200.shared_memory)
        text += [
            f"namespace {name} {{",
            "using namespace cute;",
            "constexpr auto Round = cutlass::FloatRoundStyle::round_to_nearest;",
            types.split("struct Kernel")[0],
            f"static_assert(CollectiveMainloop::DispatchPolicy::Stages == {stages});",
            f"static_assert({size} - {config.epilogue_bytes} <= 2048);",
            "}",
        ]
    assert really(Source("pipelines", "\n".join(text), "90a"))
