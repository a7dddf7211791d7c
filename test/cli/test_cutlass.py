"""`inductor-ext cutlass`: which kernels are built ahead, and the report on stored ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton")

from inductor_ext import exc
from inductor_ext.cli import cutlass, main
from inductor_ext.lowerings.graph import match_cutlass, matmul_nodes
from inductor_ext.storage.artifact_store import ArtifactStore
from inductor_ext.storage.paths import kernel_folder
from inductor_ext.templates.cutlass import nvcc_build
from inductor_ext.templates.cutlass.source import Source
from test.support.gemm_graphs import lowered_graph, tensor

SIZES = [(512, 384, 256)]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ArtifactStore:
    """An empty store, which the command uses."""
    monkeypatch.setenv("INDUCTOR_EXT_ARTIFACT_CACHE_DIR", str(tmp_path))
    return ArtifactStore(kernel_folder(str(tmp_path)), 1 << 30)


def fill(store: ArtifactStore, source: Source, size: int = 1000) -> None:
    with store.publish(nvcc_build.key(source)) as folder:
        (folder / nvcc_build.FILES["library"]).write_bytes(bytes(size))
        details = {
            "name": source.name,
            "architecture": source.architecture,
            "nvcc": "13.0.88",
            "cutlass": "4.2.0",
            "seconds": 31.5,
        }
        (folder / nvcc_build.DETAILS).write_text(json.dumps(details))


def listed(output: str) -> list[tuple[str, str, str]]:
    """State, name and purpose of each kernel of a dry run."""
    rows = [line.split("  ", 2) for line in output.splitlines()[:-1]]
    return [(state, name, purpose.strip("()")) for state, name, purpose in rows]


class TestBuild:
    @pytest.mark.skipif(torch.cuda.is_available(), reason="traced on a stand-in for a GPU")
    @pytest.mark.parametrize(
        ("epilogue", "function"),
        [
            ("none", lambda x, w, b, r: functional.linear(x, w)),
            ("bias", lambda x, w, b, r: functional.linear(x, w, b)),
            ("bias+gelu", lambda x, w, b, r: functional.gelu(functional.linear(x, w, b))),
            ("silu", lambda x, w, b, r: functional.silu(functional.linear(x, w))),
            ("bias+residual", lambda x, w, b, r: functional.linear(x, w, b) + r),
        ],
    )
    def test_kernels_match_those_of_a_compile(
        self, epilogue: str, function: Callable[..., Any]
    ) -> None:
        graph = lowered_graph(
            function, tensor(512, 256), tensor(384, 256), tensor(384), tensor(512, 384)
        )
        (node,) = filter(matmul_nodes.is_matmul, graph.nodes)
        problem = matmul_nodes.problem_of(node)
        assert problem is not None
        kernel_problem = next(match_cutlass.find_cutlass_matches(node, problem)).kernel_problem(
            problem
        )
        assert list(cutlass.trace_problems("bf16", "rc", epilogue, SIZES)) == [kernel_problem]

    def test_options_are_combined(
        self, store: ArtifactStore, capsys: pytest.CaptureFixture[str]
    ) -> None:
        classes = ["--dtype", "bf16,fp8", "--epilogue", "none,bias+relu", "--kernels", "1"]
        sizes = ["--gemm", "4096x4096x4096,8192x8192x4096"]
        assert (
            main.main(["cutlass", "build", "--arch", "sm_90a", *classes, *sizes, "--dry-run"]) == 0
        )
        output = capsys.readouterr().out
        rows = listed(output)
        purposes = {"bf16 rc none", "bf16 rc bias+relu", "fp8 rc none", "fp8 rc bias+relu"}
        assert {purpose for _, _, purpose in rows} == purposes
        assert all("sm90" in name for _, name, _ in rows)
        assert {state for state, _, _ in rows} == {"to do"}
        assert output.splitlines()[-1].startswith(f"{len(rows)} kernels of {len(rows)}")
        assert str(store.folder) in output
        assert not store.folder.exists()

    @pytest.mark.parametrize(
        ("arch", "part"), [("sm_80", "bf16_s16816gemm"), ("86", "bf16_s16816gemm")]
    )
    def test_older_architectures_have_other_kernels(
        self, arch: str, part: str, store: ArtifactStore
    ) -> None:
        parser = cutlass.argparse.ArgumentParser()
        cutlass.add_arguments(parser)
        arguments = parser.parse_args(["build", "--arch", arch, "--gemm", "4096x4096x4096"])
        kernels = cutlass.rank_kernels(arguments)
        assert {item.architecture for item in kernels} == {arch.removeprefix("sm_")}
        assert all(part in entry.name for entry in kernels)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "Invalid --arch=None: expected an architecture such as sm_90a, or a --device."),
            (["--arch", "75"], "Invalid --arch='sm_75': expected one of sm_80, "),
            (
                ["--device", "Voodoo"],
                "Invalid --device='Voodoo': expected part of one of NVIDIA A100-",
            ),
            (
                ["--arch", "90", "--layout", "xy"],
                "Invalid --layout='xy': expected some of rc, rr, ",
            ),
            (
                ["--arch", "80", "--device", "H100"],
                "Invalid --device='H100': expected part of one of",
            ),
            (
                ["--arch", "90", "--dtype", "bf17"],
                "Invalid --dtype='bf17': expected some of bf16, ",
            ),
            (["--arch", "90", "--epilogue", "bias+glu"], "='bias+glu': expected none, or bias, "),
            (
                ["--arch", "90", "--gemm", "2x3"],
                "Invalid --gemm='2x3': expected sizes MxNxK, such as",
            ),
        ],
    )
    def test_invalid_choices_list_the_valid_ones(
        self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main.main(["cutlass", "build", *arguments, "--dry-run"]) == 2
        error = capsys.readouterr().err
        assert message in error
        # Devices of other architectures are not suggested.
        assert "H100" not in error.partition("Give")[2] or "--arch" not in arguments

    @pytest.mark.parametrize("option", ["--kernels", "--jobs"])
    def test_counts_must_be_positive(self, option: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit, match="2"):
            main.main(["cutlass", "build", "--arch", "90", option, "0", "--dry-run"])
        assert f"argument {option}: '0' is not an integer of at least 1" in capsys.readouterr().err

    def test_stored_kernels_are_not_rebuilt_and_need_no_nvcc(
        self,
        store: ArtifactStore,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        first, second = (Source(f"kernel_{i}", f"text {i}", "90a") for i in range(2))
        monkeypatch.setattr(
            cutlass, "rank_kernels", lambda _: {first: "a purpose", second: "another"}
        )
        fill(store, first)
        builds: list[Source] = []

        def built(source: Source, *_: Any, **__: Any) -> None:
            builds.append(source)
            raise exc.KernelBuildError(kernel=source.name, why="it is a test")

        toolchain = nvcc_build.Toolchain(
            "nvcc", "13.0.88", cutlass_headers(), "c++", Path("libcudart_static.a")
        )
        monkeypatch.setattr(nvcc_build, "build", built)
        monkeypatch.setattr(nvcc_build.Toolchain, "find", lambda: toolchain)
        assert main.main(["cutlass", "build", "--arch", "90a"]) == 1
        output = capsys.readouterr().out
        assert builds == [second]
        assert "1 kernel to build, 1 built before" in output
        assert "[1/1]" in output
        assert "  kernel_1  FAILED: " in output
        fill(store, second)
        monkeypatch.setattr(nvcc_build.Toolchain, "find", lambda: pytest.fail("it looks for nvcc"))
        assert main.main(["cutlass", "build", "--arch", "90a"]) == 0
        assert "0 kernels to build, 2 built before" in capsys.readouterr().out


def cutlass_headers() -> Any:
    from inductor_ext.templates.cutlass.find_headers import Headers

    return Headers(Path("cutlass"), (4, 2, 0))


def test_kernels_are_listed_and_removed(
    store: ArtifactStore, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = [Source(f"kernel_{i}", "", "90a") for i in range(3)]
    for source in sources:
        fill(store, source, 100_000)
    assert main.main(["cutlass", "show"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines[:3]] == ["kernel_0", "kernel_1", "kernel_2"]
    assert "sm_90a" in lines[0]
    assert "31.5 s" in lines[0]
    assert lines[3].startswith("3 kernels")
    assert main.main(["cutlass", "show", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [item["name"] for item in report["kernels"]] == ["kernel_0", "kernel_1", "kernel_2"]
    # Entries in use are not removed.
    with store.get(nvcc_build.key(sources[0])):
        assert main.main(["cutlass", "clear"]) == 0
    assert store.entry_keys() == [nvcc_build.key(sources[0])]
    assert "removed 0.2 MiB" in capsys.readouterr().out
    assert main.main(["cutlass", "clear", "--max-bytes", "1 MiB"]) == 0
    assert len(store.entry_keys()) == 1
    assert main.main(["cutlass", "clear", "--max-bytes", "much"]) == 2
