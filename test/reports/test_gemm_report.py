"""The report on a model's GEMMs: its content, its compiles, and that it has no side effects."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config

import inductor_ext
from inductor_ext import events, exc
from inductor_ext.autotune import decide
from inductor_ext.autotune.decision import Decision, Timing
from inductor_ext.cli import main
from inductor_ext.hooks import activate, scope
from inductor_ext.hooks.records import CompileRecord
from inductor_ext.lowerings.graph import explain_records
from inductor_ext.reports import gemm_report
from inductor_ext.settings import Settings
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.records import MatmulCandidate, MatmulRecord
from inductor_ext.templates.triton.config import GemmConfig
from test.support import fake_cuda
from test.support.gemm_strategies import device

BF16 = torch.bfloat16
CONFIG = GemmConfig("cp_async", 64, 64, 64, 3, 4)
SPLIT = GemmConfig("splitk", 64, 64, 64, 3, 4, split_k=2)


# As for a GPU


def program(
    x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    h = torch.relu(x @ w1)
    return (h @ w2) * residual, (h @ w1.t()).sum(0)


@contextlib.contextmanager
def at_work() -> Iterator[None]:
    """The extension's compile scope, which `fake_cuda.lower` does not enter."""
    scope.install_hooks()
    with activate.activate(), scope.compile_scope(inductor_ext.config.snapshot()):
        yield


@pytest.fixture(scope="module")
def lowered() -> Mapping[int, gemm_report.Gemm]:
    """The matmuls of `program` by N; extension kernels are forced for the first two."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("it stands in for a GPU")

    def rule(problem: GemmProblem) -> GemmConfig | None:
        return {512: CONFIG, 384: SPLIT}.get(problem.n)

    sizes = ((64, 256), (256, 512), (512, 384), (64, 384))
    with gemm_report.listen() as collect, at_work(), decide.force_config(rule):
        fake_cuda.lower(program, *((size, BF16) for size in sizes))
        return {item.record.problem.n: item for item in collect() if item.record.problem}


def test_every_matmul_is_reported_with_its_decision(
    lowered: Mapping[int, gemm_report.Gemm],
) -> None:
    assert set(lowered) == {512, 384, 256}
    first = lowered[512].record
    assert (first.operator, first.origin, first.chosen) == ("aten.mm", "forced", CONFIG)
    assert first.operands == ("bfloat16[64, 256]", "bfloat16[256, 512]")
    assert first.device == "NVIDIA H200"
    assert first.problem is not None
    assert first.roofline == pytest.approx(first.problem.roofline(device("NVIDIA H200")), rel=0.01)
    assert lowered[384].ours
    assert not lowered[256].ours


def test_which_ops_are_fused_with_a_matmul(
    lowered: Mapping[int, gemm_report.Gemm],
) -> None:
    assert lowered[512].fused == ("relu",)
    assert not lowered[512].separate
    # Of a split K, in its second step. The input of the matmul, computed by relu, is not named.
    assert lowered[384].record.chosen == SPLIT
    assert lowered[384].fused == ("mul",)
    assert not lowered[384].separate
    # A library call is a separate kernel.
    assert not lowered[256].fused
    (separate,) = lowered[256].separate
    assert separate == "sum (library kernels cannot be fused)"


def quantised(
    x: torch.Tensor, w1: torch.Tensor, s1: torch.Tensor, w2: torch.Tensor, s2: torch.Tensor
) -> torch.Tensor:
    gate, up = ((x @ w.t().to(x.dtype)) * s for w, s in ((w1, s1), (w2, s2)))
    return torch.nn.functional.silu(gate) * up


def test_a_quantized_layer_counts_the_bytes_it_reads() -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("it stands in for a GPU")
    config = GemmConfig("mixed", 16, 64, 64, 3, 4)

    def rule(problem: GemmProblem) -> GemmConfig | None:
        return config if problem.epilogue.gated else None

    weight, scales = ((512, 256), torch.int8), ((512,), BF16)
    with gemm_report.listen() as collect, at_work(), decide.force_config(rule):
        fake_cuda.lower(quantised, ((16, 256), BF16), *(weight, scales) * 2)
    (one,) = collect()
    h200 = device("NVIDIA H200")
    # Weights of one byte; the input; scales; one output.
    moved = 2 * 512 * 256 + 2 * 16 * 256 + 2 * 2 * 512 + 2 * 16 * 512
    assert one.record.roofline == pytest.approx(moved / h200.bandwidth * 1e6)
    assert one.record.chosen == config
    timings = (MatmulCandidate(None, None, 90.0, None), MatmulCandidate(config, None, 2.0, None))
    measured = dataclasses.replace(one, record=dataclasses.replace(one.record, candidates=timings))
    line = gemm_report.GemmReport("layer", (measured,)).table().splitlines()[3]
    assert "mixed 16x1024x256 bf16*int8 rc, b dequantized by column, gated  " in line
    floor = moved / h200.bandwidth * 1e6
    assert line.split()[-4:] == ["2.0", "90.0", f"{floor:.1f}", f"{floor / 2:.0%}"]


def gate(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w1) * (x @ w2)


def test_a_rejected_kernel_has_a_reason() -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("it stands in for a GPU")
    sizes = ((64, 256), (256, 512), (256, 512))
    with gemm_report.listen() as collect, at_work():
        fake_cuda.lower(gate, *((size, BF16) for size in sizes))
    (declined,) = {item.record.declined for item in collect()}
    assert any("gated" in item and "enable max_autotune" in item for item in declined)
    assert sum(len(item.modules) for item in collect()) == 2


# Descriptions of a decision

H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"


def decided(config: GemmConfig | None, origin: Any = "measured", **times: Any) -> Decision:
    timings = [Timing(None, times["stock"])] if "stock" in times else []
    if "ours" in times:
        failure = "wrong" if times["ours"] is None else None
        timings.append(Timing(CONFIG, times["ours"], failure))
    return Decision(config, origin, tuple(timings))


@pytest.mark.parametrize(
    ("decision", "words"),
    [
        (decided(CONFIG, stock=9.0, ours=6.04), "6.0 us, Inductor (default) 9.0 us"),
        (decided(None, stock=9.0, ours=9.5), "Inductor (default) was the fastest"),
        (
            decided(None, stock=9.0, ours=8.9),
            "the best candidate saves 0.1 us over Inductor (default), within noise",
        ),
        (decided(None, stock=9.0, ours=None), "all 1 candidates failed"),
        (decided(None, stock=9.0), "there are no candidates"),
        (decided(CONFIG, "forced"), "forced by the caller"),
        (
            decided(None, "predicted"),
            "the fused operations are predicted to be faster as separate kernels",
        ),
    ],
)
def test_reasons(decision: Decision, words: str) -> None:
    problem = GemmProblem.contiguous("mm", 16, 1024, 4096)
    reason = explain_records.decision_reason(decision, problem, device(H100), Settings())
    assert reason == words


@pytest.mark.parametrize(
    ("sizes", "dtype", "on", "why"),
    [
        ((512, 2048, 2048), "bfloat16", H100, "Inductor's kernel is about as fast, or the cost"),
        ((8, 2048, 2048), "float32", H100, "no GEMMs of this kind were measured"),
        ((1, 2048, 2048), "bfloat16", H100, "M is dynamic"),
        ((1, 2048, 2048), "bfloat16", A100, "kernels are taken without a measurement on compute"),
    ],
)
def test_matmuls_that_were_not_tuned_have_a_reason(
    sizes: tuple[int, int, int], dtype: str, on: str, why: str
) -> None:
    problem = GemmProblem.contiguous("mm", *sizes, dtype)

    def explain(settings: Settings) -> str:
        decision = decided(None, "unknown")
        return explain_records.decision_reason(decision, problem, device(on), settings)

    assert explain(Settings()).startswith(f"not tuned (enable max_autotune), and {why}")
    words = explain(Settings(gemm_predict=False))
    assert words == "not tuned (enable max_autotune), and gemm_predict is off"
    with inductor_config.patch(max_autotune=True, max_autotune_gemm_backends="aten"):
        words = explain(Settings())
    assert words == "max_autotune_gemm_backends names neither TRITON nor CUTLASS"


def record(**changes: Any) -> MatmulRecord:
    fields: dict[str, Any] = {
        "operator": "aten.mm",
        "operands": ("bfloat16[16, 4096]", "bfloat16[4096, 1024]"),
        "module": "layers.0.key",
        "problem": GemmProblem.contiguous("mm", 16, 1024, 4096),
        "device": "NVIDIA H200",
        "roofline": 2.5,
        "chosen": CONFIG,
        "origin": "measured",
        "reason": "5.0 us, Inductor (default) 8.0 us",
        "candidates": (
            MatmulCandidate(None, None, 8.0, None),
            MatmulCandidate(CONFIG, 4.0, 5.0, None),
            MatmulCandidate(GemmConfig("cp_async", 32, 64, 64, 3, 4), 4.5, None, "wrong numbers"),
        ),
    }
    return MatmulRecord(**{**fields, **changes})


TABLE = """\
GEMMs of model: 3, of which 2 use an extension kernel

    times  GEMM                                kernel                                 us  \
Inductor us  roofline us  of roofline
1.      2  mm 16x1024x4096 bf16 rc             cp_async 64x64x64, 3 stages, 4 warps  5.0  \
        8.0          2.5          50%
      in layers.0.key, layers.1.key
      measured: 5.0 us, Inductor (default) 8.0 us
      fused: relu
      - Inductor: 8.0 us
      - cp_async 64x64x64, 3 stages, 4 warps: 5.0 us, predicted 4.0
      - cp_async 32x64x64, 3 stages, 4 warps: dropped, predicted 4.5: wrong numbers
2.      1  aten.mm float32[2, 3] x float32[3]  Inductor
      uncovered: it runs on cpu
      not fused: softmax (it is a reduction)"""


def test_table() -> None:
    other = record(
        operands=("float32[2, 3]", "float32[3]"),
        module="",
        problem=None,
        roofline=None,
        chosen=None,
        origin="uncovered",
        reason="it runs on cpu",
        candidates=(),
    )
    gemms = (
        gemm_report.Gemm(record(), ("layers.0.key", "layers.1.key"), ("relu",)),
        gemm_report.Gemm(other, ("",), (), ("softmax (it is a reduction)",)),
    )
    report = gemm_report.GemmReport("model", gemms)
    assert report.table(candidates=True) == TABLE
    assert "predicted" not in str(report)
    assert report.count == 3
    assert gemms[0].share == 0.5
    assert gemms[1].share is None
    loaded = json.loads(report.to_json())
    assert [item["reason"] for item in loaded["gemms"]] == [gemms[0].record.reason, other.reason]
    assert (
        str(gemm_report.GemmReport("empty", ()))
        == "GEMMs of empty: 0, of which 0 use an extension kernel"
    )
    same = str(gemm_report.GemmReport("model", gemms[1:])).splitlines()[1]
    assert same == "Their times differ from those with Inductor (default) by noise only."


def test_record_in_one_line_and_as_json() -> None:
    assert record().describe() == (
        "matmul: aten.mm of bfloat16[16, 4096] and bfloat16[4096, 1024] in layers.0.key: cp_async "
        "(measured: 5.0 us, Inductor (default) 8.0 us)"
    )
    loaded = json.loads(json.dumps(record().as_json()))
    assert GemmProblem.from_json(loaded["problem"]) == record().problem
    assert GemmConfig.from_json(loaded["chosen"]) == CONFIG
    assert loaded["chosen"]["stages"] == CONFIG.num_stages
    assert loaded["candidates"][2]["failure"] == "wrong numbers"


# Real compiles, on the CPU


class Layers(nn.Module):
    """Only matmuls: no C++ compiler is needed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(8, 8, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_matmuls_on_a_cpu_use_inductor() -> None:
    module = Layers()
    compiled = torch.compile(module, backend="inductor_ext")
    x = torch.randn(4, 8)
    with torch.no_grad():
        expected = compiled(x)
        # It is compiled already, and its graph is in the cache.
        for target in (module, module.forward, compiled):
            with events.capture(CompileRecord) as compiles:
                report = inductor_ext.explain(target, x)
            assert [compile_.cache for compile_ in compiles] == ["off"]
            (gemm,) = report.gemms
            assert gemm.modules == ("first", "second")
            assert gemm.record.origin == "uncovered"
            assert gemm.record.reason == "it runs on cpu"
            assert gemm.record.operands[0] == "float32[4, 8]"
        with events.capture(CompileRecord) as compiles:
            torch.testing.assert_close(compiled(x), expected)
        assert not compiles


def test_the_report_does_not_count_for_the_recompile_limit() -> None:
    def sequential(size: int) -> nn.Module:
        return nn.Sequential(nn.Linear(8, size, bias=False), nn.Sequential(nn.Linear(size, 8)))

    x = torch.randn(4, 8)
    with torch.no_grad():
        # All of them are called by the same code object of dynamo.
        for size in range(1, 13):
            report = inductor_ext.explain(sequential(size), x)
            assert [gemm.modules for gemm in report.gemms] == [("0",), ("1.0",)]
        graphs = []

        def backend(gm: Any, inputs: Any) -> Any:
            graphs.append(gm)
            return gm.forward

        torch.compile(sequential(13), backend=backend)(x)
    assert len(graphs) == 1


def test_invalid_options_are_rejected_before_the_compile() -> None:
    with events.capture(CompileRecord) as compiles:
        with pytest.raises(exc.UnknownOptionError, match="max_autotune"):
            inductor_ext.explain(Layers(), torch.randn(4, 8), options={"max_autotun": True})
        with pytest.raises(exc.UnknownModeError):
            inductor_ext.explain(Layers(), torch.randn(4, 8), mode="fast")
    assert not compiles


SCRIPT = """\
import sys
import torch

@torch.compile
def product(a, b):
    return a @ b

print(product(torch.ones(2, 3), torch.ones(3, 4)).sum().item(), *sys.argv[1:], __name__)
sys.exit(3)
"""


def test_command_runs_a_program_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, out = tmp_path / "script.py", tmp_path / "report.json"
    script.write_text(SCRIPT)
    assert main.main(["explain", "--output", str(out), str(script), "--flag", "1"]) == 3
    program, report = capsys.readouterr().out.split("\n", 1)
    assert program == "24.0 --flag 1 __main__"
    assert f"GEMMs of {script}: 1, of which 0 use an extension kernel" in report
    assert "aten.mm float32[2, 3] x float32[3, 4]" in report
    assert len(json.loads(out.read_text())["gemms"]) == 1
    assert main.main(["explain", str(tmp_path / "absent.py")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_command_prints_only_json_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert main.main(["explain", "--json", str(script)]) == 3
    printed = capsys.readouterr()
    assert len(json.loads(printed.out)["gemms"]) == 1
    assert "24.0 __main__" in printed.err


PRODUCT = "import torch; torch.compile(lambda a: a @ a)(torch.ones(3, 3))\n"


def test_an_unwritable_file_is_rejected_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, absent = tmp_path / "script.py", tmp_path / "absent" / "report.json"
    script.write_text("print('it runs')\n")
    for out in (absent, tmp_path):
        assert main.main(["explain", "--output", str(out), str(script)]) == 2
        output = capsys.readouterr()
        assert output.out == ""
        assert f"{out}: cannot be written: " in output.err


def test_the_exit_code_of_the_program_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(PRODUCT + "import sys; sys.exit('an input is missing')\n")
    assert main.main(["explain", str(script)]) == 1
    output = capsys.readouterr()
    assert output.err == "an input is missing\n"
    assert f"GEMMs of {script}: 1," in output.out


def test_an_empty_report_has_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    assert main.main(["explain", str(script)]) == 0
    assert "Inductor compiled nothing" in capsys.readouterr().out
    script.write_text(PRODUCT)
    with inductor_ext.config.patch(enabled=False):
        assert main.main(["explain", str(script)]) == 0
    assert "the setting enabled is False" in capsys.readouterr().out
    assert main.main(["explain", str(script)]) == 0
    assert "compiled nothing" not in capsys.readouterr().out


def test_a_program_needs_no_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main.main(["explain"])
    assert capsys.readouterr().err.endswith("arguments are required: SCRIPT\n")


def test_a_failing_program_is_reported_up_to_the_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(PRODUCT + "import os; os.chdir('/'); raise KeyError('of the program')\n")
    with pytest.raises(KeyError, match="of the program"):
        main.main(["explain", "--output", "report.json", str(script)])
    assert f"GEMMs of {script}: 1," in capsys.readouterr().out
    assert len(json.loads((tmp_path / "report.json").read_text())["gemms"]) == 1


def test_attention_is_reported() -> None:
    def model(q: torch.Tensor) -> torch.Tensor:
        mask = (torch.arange(q.shape[-2])[:, None] >= 0).expand(-1, q.shape[-2])
        for _ in range(3):
            q = torch.nn.functional.scaled_dot_product_attention(q, q, q, mask)
        return q

    report = inductor_ext.explain(model, torch.randn(2, 16, 8))
    change = "a constant mask that masks nothing is removed"
    assert [record.changes for record in report.attention] == [(change,)] * 3
    assert str(report).splitlines()[-3:] == ["Attention: 3 calls changed", "", f"    3  {change}"]
    assert [record["changes"] for record in json.loads(report.to_json())["attention"]]
