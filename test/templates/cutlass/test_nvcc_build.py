"""Building CUTLASS kernels: once, side by side, and with nothing broken by what goes wrong."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
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
from inductor_ext.cpp_wrapper.build.compiler import RUNTIME
from inductor_ext.storage.artifact_store import ArtifactStore
from inductor_ext.storage.paths import kernel_folder
from inductor_ext.templates.cutlass import (
    aot_link,
    background_build,
    build_slots,
    nvcc_build,
)
from inductor_ext.templates.cutlass.background_build import build_later
from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.cutlass.evt import render
from inductor_ext.templates.cutlass.find_headers import Headers
from inductor_ext.templates.cutlass.launch import CUDA_ERRORS
from inductor_ext.templates.cutlass.nvcc_build import (
    Toolchain,
    build_all,
    built,
    is_built,
    key,
)
from inductor_ext.templates.cutlass.source import Source, source
from inductor_ext.templates.cutlass.source.common import CALL
from inductor_ext.templates.cutlass.source.sm90 import collectives, includes
from inductor_ext.toolchain import components
from test.support.gemm_strategies import device
from test.templates.cutlass.test_source import BASE, CLASSES

H200 = device("NVIDIA H200")

NVCC = """#!/bin/bash
# Of the device's half it does what the source says, after writing down that it has begun.
while [ "$1" != -o ]; do [ "$1" = -DINDUCTOR_EXT_DEVICE ] && device=1; shift; done
[ -z "$device" ] && exec touch "$2"
echo "begin $$ $(basename "$2")" >>"{log}"
out=$2 file=$3
eval "$(sed -n 's/^nvcc: //p' "$file")"
echo "end $$" >>"{log}"
"""


class Scripted(Toolchain):
    """An nvcc that is a script. What is linked is the device's half."""

    def link(self, source: Source, folder: Path, scratch: Path) -> None:
        shutil.copy(scratch / "kernel.cubin", folder / "kernel.so")

    @classmethod
    def at(
        cls, folder: Path, version: str = "13.0.88", release: tuple[int, int, int] = (4, 2, 0)
    ) -> Scripted:
        """One whose program is in that folder."""
        return cls(str(folder / "nvcc"), version, Headers(folder, release), "c++", folder)


class Machine:
    """A folder with an nvcc that is a script, and a store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.log.touch()
        program = folder / "nvcc"
        program.write_text(NVCC.format(log=self.log))
        program.chmod(0o755)
        self.toolchain = Scripted.at(folder)
        self.store = ArtifactStore(folder / "store", 1 << 30)

    def built(self, what: Source, **options: Any) -> bytes:
        with built(what, self.store, self.toolchain, **options) as file:
            return file.read_bytes()

    @property
    def runs(self) -> int:
        """How often nvcc has been started."""
        return self.sequence.count("begin")

    @property
    def sequence(self) -> list[str]:
        """When nvcc began and ended."""
        return [line.split()[0] for line in self.log.read_text().splitlines()]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def script(text: str, name: str = "kernel_1") -> Source:
    """A source that tells the script what to do."""
    return Source(name, f"nvcc: {text}\n", "90a")


GOOD = script('echo good >"$out"')
BAD = script('echo "$file(3): error: no such thing"; echo "warning: none"; exit 2')
KILLED = script('test -e "$(dirname "$0")/fixed" && echo good >"$out" && exit; kill -9 $$')


class TestBuild:
    def test_builds_once(self, machine: Machine) -> None:
        assert not is_built(GOOD, machine.store, machine.toolchain)
        assert machine.built(GOOD) == machine.built(GOOD) == b"good\n"
        assert is_built(GOOD, machine.store, machine.toolchain)
        assert machine.runs == 1

    def test_who_wants_the_same_waits_for_it(self, machine: Machine) -> None:
        slow = script('sleep 0.3; echo good >"$out"')
        found: list[bytes] = []
        threads = [
            threading.Thread(target=lambda: found.append(machine.built(slow))) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [b"good\n"] * 4
        assert machine.runs == 1

    def test_another_source_architecture_or_kind_is_another_entry(self) -> None:
        found = {
            key(GOOD),
            key(GOOD, "cubin"),
            key(BAD),
            key(Source("kernel_1", GOOD.text, "80")),
            key(Source("kernel_2", GOOD.text, "90a")),
        }
        assert len(found) == 5

    def test_kernels_of_other_toolchains_are_used_without_any(
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
            told = json.loads((file.parent / nvcc_build.DETAILS).read_text())
            assert (file.parent / "kernel.cu").read_text() == GOOD.text
        assert told.pop("seconds") >= 0
        assert told == {
            "name": "kernel_1",
            "architecture": "90a",
            "nvcc": "13.0.88",
            "cutlass": "4.2.0",
        }

    def test_the_flags_are_for_one_architecture_and_half(self) -> None:
        device, host = nvcc_build._flags(GOOD, "device"), nvcc_build._flags(GOOD, "host")
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
            # Nobody knows the folder that it was built in.
            assert caught.value.fields["why"] == "kernel.cu(3): error: no such thing"
        assert machine.runs == 1
        assert is_built(BAD, machine.store, machine.toolchain)
        assert not is_built(BAD, machine.store)
        # Another nvcc may do better.
        machine.toolchain = Scripted.at(machine.folder, "13.1.0")
        with pytest.raises(exc.KernelBuildError):
            machine.built(BAD)
        assert machine.runs == 2

    def test_a_killed_nvcc_is_no_reason_not_to_try_again(self, machine: Machine) -> None:
        with pytest.raises(exc.KernelBuildError, match="nvcc failed with exit code -9"):
            machine.built(KILLED)
        assert not is_built(KILLED, machine.store, machine.toolchain)
        (machine.folder / "fixed").touch()
        assert machine.built(KILLED) == b"good\n"

    def test_being_interrupted_ends_nvcc(
        self, machine: Machine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
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
        # Neither its lock nor its place to build are taken, and what it wrote is no entry.
        again = Source("kernel_2", 'nvcc: echo half >"$out"; sleep 600', "90a")
        assert not is_built(again, machine.store, machine.toolchain)
        assert machine.built(GOOD, limit=1) == b"good\n"
        machine.store.collect()
        assert list((machine.folder / "store" / "building").iterdir()) == []

    def test_a_store_that_cannot_be_written_to_builds_all_the_same(self, tmp_path: Path) -> None:
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


class TestLater:
    @pytest.fixture
    def toolchain(self, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Toolchain:
        """Whose linker writes what it is not worth waiting for."""
        programs = {
            "c++": 'while [ "$1" != -o ]; do shift; done; echo linked >"$2"',
            "objcopy": 'cp "${@: -2:1}" "${@: -1}"',
        }
        for name, text in programs.items():
            (machine.folder / name).write_text(f"#!/bin/bash\n{text}\n")
            (machine.folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{machine.folder}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setattr(background_build, "_started", [])
        known = machine.toolchain
        runtime = machine.folder / "libcudart_static.a"
        return Toolchain(
            known.nvcc, known.version, known.headers, str(machine.folder / "c++"), runtime
        )

    def test_a_process_of_its_own_builds(self, machine: Machine, toolchain: Toolchain) -> None:
        assert build_later([GOOD, BAD], machine.store, toolchain) == [GOOD, BAD]
        (process,) = background_build._started
        assert process.wait() == 0
        assert is_built(GOOD, machine.store)
        with built(GOOD, machine.store) as file:
            assert file.read_bytes() == b"linked\n"
        # An error is known as well, and nothing is left to do.
        assert build_later([GOOD, BAD], machine.store, toolchain) == []
        assert machine.runs == 2
        assert background_build._started == [process]

    def test_a_running_build_is_left_alone_and_a_kill_ends_it(
        self, machine: Machine, toolchain: Toolchain
    ) -> None:
        forever = script("echo $$ >/dev/null; exec sleep 600", "kernel_2")
        assert build_later([forever], machine.store, toolchain) == [forever]
        while not machine.runs:
            time.sleep(0.01)
        assert build_later([forever], machine.store, toolchain) == [forever]
        (process,) = background_build._started
        process.terminate()
        assert process.wait() == 1
        compiler = int(machine.log.read_text().split()[1])
        with contextlib.suppress(FileNotFoundError):
            # Whoever inherits it may not look after it.
            while Path(f"/proc/{compiler}/stat").read_text().split()[2] != "Z":
                time.sleep(0.01)
        assert not is_built(forever, machine.store, toolchain)
        # Somebody else can have it built now.
        assert not background_build._is_claimed(forever, machine.store)
        machine.store.collect()
        assert list((machine.folder / "store" / "building").iterdir()) == []


class TestJobs:
    def test_are_those_that_cores_and_memory_allow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
        for gigabytes, limit, expected in (
            (128, None, 16),
            (23, None, 4),
            (1, None, 1),
            (128, 3, 3),
            (128, 40, 16),
        ):
            monkeypatch.setattr(build_slots, "total_bytes", lambda g=gigabytes: g << 30)
            assert build_slots.jobs(limit) == expected

    def test_the_memory_is_this_machines(self) -> None:
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        assert 0 < build_slots.available_bytes() <= physical
        assert 0 < build_slots.total_bytes() <= physical

    def test_one_runs_where_there_is_no_memory(
        self, machine: Machine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(build_slots, "available_bytes", lambda: 0)
        sources = [script(f'sleep 0.05; echo {i} >"$out"', f"kernel_{i}") for i in range(2)]
        assert build_all(sources, machine.store, machine.toolchain) == {}
        assert machine.sequence == ["begin", "end"] * 2

    def test_no_more_run_at_a_time(self, machine: Machine) -> None:
        sources = [script(f'sleep 0.1; echo {i} >"$out"', f"kernel_{i}") for i in range(3)]
        assert build_all(sources, machine.store, machine.toolchain, limit=1) == {}
        assert machine.sequence == ["begin", "end"] * 3

    def test_an_error_is_one_kernels_own(self, machine: Machine) -> None:
        other = script('echo fine >"$out"', "kernel_2")
        errors = build_all([BAD, other], machine.store, machine.toolchain)
        assert errors.keys() == {"kernel_1"}
        assert machine.built(other) == b"fine\n"


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    """A library with the two functions, which sums up what it is called with."""
    compiler = components.probe("cxx")
    if not compiler.available:
        pytest.skip(f"no C++ compiler: {compiler.why}")
    folder = tmp_path_factory.mktemp("echo")
    text = f"""
    #include <cstdint>
    {CALL}
    extern "C" int64_t inductor_ext_workspace_size(Call const* c) {{
      Operand const* t = c->tensors;
      return c->m == 0 ? -1 : c->m + 100 * c->n + 10000 * c->k + 1000000 * c->batch
             + (t[0].stride + 1000 * t[1].stride + t[2].stride * 1000000ll) * 100000000ll;
    }}
    extern "C" int32_t inductor_ext_run(Call const* c, void* workspace, void* stream) {{
      float const x = static_cast<float*>(c->tensors[3].data)[1] * c->scalars[1];
      return 1000 * c->swizzle + 100 * c->raster + 10 * c->splits + c->sms + int(x)
             + 10000 * (workspace == stream) + 100000 * int(c->tensors[0].batch);
    }}
    """
    (folder / "echo.cpp").write_text(text)
    library = folder / "echo.so"
    flags = ["-std=c++17", "-shared", "-fPIC", "-o", library, folder / "echo.cpp"]
    subprocess.run([str(compiler.path), *flags], check=True)
    return Kernel(ctypes.CDLL(str(library)), "echo")


class TestLaunch:
    CONFIG = CutlassConfig(
        90,
        "warpspecialized_cooperative",
        (128, 128, 64),
        *("float32",) * 3,
        split_k=2,
        swizzle=4,
        raster="along_n",
    )

    @pytest.mark.parametrize("swap", [False, True])
    def test_a_kernel_is_handed_sizes_and_strides(self, echo: Kernel, swap: bool) -> None:
        a, b, out = torch.zeros(3, 8)[:, :5], torch.zeros(7, 9).t()[:5], torch.zeros(3, 7)
        layouts = "tnn" if swap else "tnt"
        config = CutlassConfig(**{**vars(self.CONFIG), "swap_ab": swap, "layouts": layouts})
        m, n, k = (7, 3, 5) if swap else (3, 7, 5)
        first, second = (9, 8) if swap else (8, 9)
        expected = m + 100 * n + 10000 * k + 1000000
        expected += (first + 1000 * second + 7 * 1000000) * 100000000
        assert echo.workspace_size(call(config, a, b, out)) == expected

    def test_a_launch_is_handed_what_it_decides(self, echo: Kernel) -> None:
        bias = torch.tensor([1.0, 3.0])
        a, b, out = torch.zeros(2, 3, 4), torch.zeros(2, 4, 2), torch.zeros(2, 3, 2)
        arguments = call(self.CONFIG, a, b, out, [bias], scalars=(0.5, 2.0), sms=1)
        assert echo.run(arguments, 0, 0) == 4000 + 200 + 20 + 1 + 6 + 10000 + 100000 * 12
        shared = call(self.CONFIG, a[:1].expand(2, 3, 4), b, out, [bias], scalars=(0.5, 2.0))
        assert echo.run(shared, 1, 2) == 4000 + 200 + 20 + 6

    def test_one_row_has_a_stride_that_tma_takes(self, echo: Kernel) -> None:
        a = torch.zeros(5)[None].as_strided((1, 5), (1, 1))
        b = torch.zeros(5, 1).as_strided((5, 1), (1, 1))
        found = echo.workspace_size(call(self.CONFIG, a, b, torch.zeros(1, 1)))
        assert found is not None
        assert found // 100000000 == 16 + 1000 * 16 + 1000000

    def test_what_cannot_run_has_no_workspace(self, echo: Kernel) -> None:
        empty = torch.zeros(0, 4)
        found = echo.workspace_size(call(self.CONFIG, empty, torch.zeros(4, 2), torch.zeros(0, 2)))
        assert found is None


def real_store() -> ArtifactStore:
    """For what nvcc really builds: where the caller keeps Inductor's cache, if he does."""
    for part in (components.probe("nvcc"), components.probe("cutlass")):
        if not part.available:
            pytest.skip(f"no {part.title}: {part.why}")
    return ArtifactStore(kernel_folder(), 1 << 30)


def really(made: Source) -> bytes:
    """What nvcc builds of a source, for the device."""
    with built(made, real_store(), kind="cubin") as file:
        return file.read_bytes()


@pytest.mark.slow
def test_nvcc_builds_one_for_capability_9_0() -> None:
    made = source(*CLASSES["mm"])
    content = really(made)
    assert content[:4] == b"\x7fELF"
    assert made.name.encode() in content
    assert BASE.name in made.name


@pytest.mark.slow
def test_nvcc_builds_one_for_4_bit_weights() -> None:
    made = source(*CLASSES["mixed_uint4"])
    content = really(made)
    assert made.name.encode() in content
    assert f"{made.name}_scales".encode() in content


@pytest.mark.slow
def test_nvcc_builds_an_older_one_as_a_library() -> None:
    config, epilogue = CLASSES["old_addmm_row"]
    made = source(config, epilogue)
    with built(made, real_store()) as file:
        kernel = Kernel(ctypes.CDLL(str(file)), made.name)
        content = file.read_bytes()
        symbols = subprocess.run(
            ["nm", "--extern-only", "--defined-only", file.with_name(nvcc_build.OBJECT)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    assert made.name.encode() in content
    # Several can be linked together under other names.
    found = {line.split()[2] for line in symbols.splitlines()}
    assert found == {"inductor_ext_run", "inductor_ext_workspace_size"}
    # This much needs no device.
    for k, expected in ((64, 0), (60, None)):
        a, b, out = (torch.zeros(64, item, dtype=torch.bfloat16) for item in (k, k, 64))
        arguments = call(config, a, b.t(), out, [out[:1]], scalars=(1, 1), sms=1)
        assert kernel.workspace_size(arguments) == expected


_MODEL = """
#include <cstdint>
extern "C" int64_t @_workspace_size(void const*);
extern "C" int32_t @_run(void const*, void*, void*);
extern "C" int64_t inductor_ext_workspace_size(void const* call) { return @_workspace_size(call); }
extern "C" int32_t inductor_ext_run(void const* call, void* workspace, void* stream) {
  return @_run(call, workspace, stream);
}
"""


@pytest.mark.slow
def test_a_model_is_linked_with_a_real_one(tmp_path: Path) -> None:
    """And needs nothing of CUDA's to be loaded."""
    config, epilogue = CLASSES["old_addmm_row"]
    made = source(config, epilogue)
    code, kernel, model = (tmp_path / name for name in ("model.cpp", "kernel.o", "model.so"))
    aot_link.link(made, real_store(), str(kernel))
    code.write_text(_MODEL.replace("@", aot_link.symbol(made)))
    exports = f"-Wl,--version-script={RUNTIME / 'exports.map'}"
    command = ["g++", "-shared", "-fPIC", exports, "-o", *map(str, (model, code, kernel))]
    subprocess.run(command, check=True)
    needed = subprocess.run(["ldd", model], capture_output=True, text=True, check=True).stdout
    assert "cuda" not in needed
    found = Kernel(ctypes.CDLL(str(model)), made.name)
    a, b, out = (torch.zeros(64, 64, dtype=torch.bfloat16) for _ in range(3))
    arguments = call(config, a, b.t(), out, [out[:1]], scalars=(1, 1), sms=1)
    assert found.workspace_size(arguments) == 0
    if not torch.cuda.is_available():
        # As far as the first call of CUDA's.
        assert found.run(arguments, 0, 0) > CUDA_ERRORS


@pytest.mark.slow
def test_pipelines_are_as_deep_as_predicted() -> None:
    """Stages that CUTLASS fits into shared memory are those that legality and ranking count on."""
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
