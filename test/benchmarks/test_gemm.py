"""The GEMM and end-to-end benchmarks' arithmetic, and that a run that is stopped loses nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import queue
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config

from benchmarks.gemm import cases as gemm_suite
from benchmarks.gemm import e2e, reductions
from benchmarks.gemm import models as gemm_models
from benchmarks.gemm import run as gemm
from benchmarks.harness import gpu_lock, gpu_timing, results, resumable, variants
from benchmarks.harness.variants import Compiled, Contender
from inductor_ext import _compat
from inductor_ext.autotune import timing, tuner
from inductor_ext.autotune.decision import Decision, Timing
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.triton.config import GemmConfig

HEADER: results.Header = {
    "suite": "gemm",
    "hardware": "nvidia-h200",
    "versions": {"python": "3.12.3", "torch": "2.11.0", "inductor_ext": "0.1.0"},
    "commit": None,
    "date": "2026-01-31T12:00:00Z",
    "command": "python -m benchmarks.gemm.run",
}


def found_rows(rows: list[results.Row]) -> dict[str, results.Row]:
    return {row["metric"]: row for row in rows}


# Measuring a case


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of compiling: stock's settings give wrong numbers or fail, ours is right."""

    def compile_and_call(
        way: Contender, function: Any, inputs: Any, options: Any = None
    ) -> Compiled:
        if way.name == "stock-max-tma":
            raise ValueError("no choices")
        if way.name == "stock-max":
            return Compiled(lambda: function(*inputs) + 1, 4.0)
        return Compiled(lambda: function(*inputs), 0.0 if way.name == "eager" else 1.0)

    monkeypatch.setattr(variants, "compile_and_call", compile_and_call)


@pytest.mark.usefixtures("compiled")
def test_wrong_and_failed_contenders_have_no_time_and_say_why() -> None:
    case = gemm_suite.Case("int8", "toy", "int8", 5, 24, 32)
    ways = list(variants.CONTENDERS.values())
    found = gemm.measure_case(case, ways, gpu_timing.Timer("cpu"), rounds=3, warm=True)
    assert list(found) == [*variants.CONTENDERS, "bf16"]
    assert "wrong: error" in str(found["stock-max"].failure)
    assert found["stock-max-tma"].failure == "ValueError: no choices"
    for name in ("stock-max", "stock-max-tma"):
        assert not found[name].times
    for name in ("eager", "stock", "ours", "ours-cutlass", "bf16"):
        assert found[name].failure is None
        assert len(found[name].times["call"]) == 3
    assert found["eager"].compile is None
    assert found["ours"].compile == found["ours"].again == 1.0
    rows = gemm.rows(case.name, found, 3.0)
    results.validate({**HEADER, "rows": rows})
    table = found_rows(rows)
    assert table["call, stock max-autotune"]["stock"] is None
    assert "stock-max: wrong" in str(table["call, stock max-autotune"]["note"])
    assert table["call, bf16 weights"]["ours"] is not None
    assert table["compile, stock max-autotune"] == {
        **table["compile, stock max-autotune"],
        "ours": 1.0,
        "stock": 4.0,
        "eager": None,
    }


def test_rows_hold_medians_and_the_largest_spread() -> None:
    def measured(*values: float, seconds: float | None = None) -> gemm.Measured:
        return gemm.Measured({"graph": list(values)}, seconds, None, 0.001)

    found = {
        "eager": measured(8, 8, 8),
        "stock-max": measured(4, 6, 8, seconds=5.0),
        "ours": measured(3, 3, 3, seconds=1.0),
    }
    (row,) = [row for row in gemm.rows("c", found, 2.0) if row["metric"].startswith("graph")]
    assert row == {
        "case": "c",
        "metric": "graph, stock max-autotune",
        "unit": "us",
        "better": "lower",
        "ours": 3,
        "stock": 6,
        "eager": 8,
        "floor": 2.0,
        # Quartiles of 4, 6, 8 are 5 and 7.
        "spread": pytest.approx(1 / 3),
        "note": None,
    }


def test_rounds_follow_the_budget() -> None:
    timer = gpu_timing.Timer("cpu")
    assert len(timer.measure({"a": lambda: None}, "call")["a"]) == gpu_timing.MOST
    slow = torch.randn(700, 700)
    values = timer.measure({"a": lambda: slow @ slow, "b": lambda: None}, "call", rounds=4)
    assert len(values["a"]) == len(values["b"]) == 4
    assert min(values["a"]) > min(values["b"])


def test_each_compile_has_a_code_object_of_its_own() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    first, second = _compat.with_own_code(double), _compat.with_own_code(double)
    assert first.__code__ is not second.__code__
    assert first(torch.ones(2)).tolist() == second(torch.ones(2)).tolist() == [2, 2]


def test_what_is_compiled_for_graphs_is_left_to_be_captured() -> None:
    from torch._inductor import compile_fx

    recording = compile_fx.cudagraphify
    with variants.unrecorded():
        assert compile_fx.cudagraphify(len, static_input_idxs=(), device_index=0) is len  # type: ignore[call-arg]
    assert compile_fx.cudagraphify is recording


def test_gemms_that_are_tuned_together_share_the_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = [GemmProblem.contiguous("mm", m, 64, 64) for m in (1, 16, 32)]
    config = GemmConfig("cp_async", 64, 64, 64, 2, 4)

    def tune(problems: Sequence[GemmProblem]) -> dict[GemmProblem, Decision]:
        time.sleep(0.02)
        one, two, three = problems
        timings = Timing(None, 9.0), Timing(config, 7.25)
        return {
            one: Decision(config, "measured", timings),
            two: Decision(None, "measured", timings),
            three: Decision(None, "unknown"),
        }

    monkeypatch.setattr(tuner, "tune", tune)
    with variants.tuning() as found:
        assert list(tuner.tune(problems)) == problems  # type: ignore[call-arg]
    assert [item.choice for item in found] == [
        "mm 1x64x64 bf16 rc: cp_async 64x64x64, 2 stages, 4 warps, 7.2 us, stock 9.0",
        "mm 16x64x64 bf16 rc: Inductor, 9.0 us",
    ]
    assert found[0].seconds == found[1].seconds >= 0.01
    assert tuner.tune is tune


def test_only_inductors_settings_share_caches() -> None:
    families = variants.families(variants.chosen(list(variants.CONTENDERS)))
    names = [[way.name for way in family] for family in families]
    assert names == [["eager"], ["stock", "stock-max", "stock-max-tma"], ["ours", "ours-cutlass"]]


# Going on


def row(case: str) -> results.Row:
    return variants.row(case, "graph, stock max-autotune", "us", {"ours": 1.0, "s": 2.0}, "s")


def test_results_are_kept_after_every_case_and_gone_on_with(tmp_path: Path) -> None:
    ledger = resumable.Ledger(HEADER, tmp_path)
    ledger.add([row("a")])
    (path,) = tmp_path.glob("*/*.json")
    again = resumable.Ledger({**HEADER, "date": "2026-02-01T12:00:00Z"}, tmp_path, path)
    assert again.done == {"a"}
    again.add([row("b")])
    document = results.read(path)
    assert [row["case"] for row in document["rows"]] == ["a", "b"]
    assert document["date"] == HEADER["date"]
    assert resumable.Ledger(HEADER, tmp_path).done == frozenset()
    assert resumable.Ledger(HEADER, tmp_path, tmp_path / "absent.json").done == frozenset()


@pytest.mark.parametrize("change", [{"commit": "a" * 40}, {"hardware": "nvidia-h100"}])
def test_results_of_another_run_are_not_mixed(tmp_path: Path, change: Mapping[str, Any]) -> None:
    resumable.Ledger(HEADER, tmp_path).add([row("a")])
    other: Any = {**HEADER, **change}
    (path,) = tmp_path.glob("*/*.json")
    with pytest.raises(resumable.OtherRunError, match=next(iter(change))):
        resumable.Ledger(other, tmp_path, path)


def test_no_case_is_begun_that_would_not_fit() -> None:
    now = [0.0]

    def clock() -> float:
        return now[0]

    taken = []
    for seconds in resumable.within([3.0, 5.0, 1.0, 1.0, 1.0], 13.5, clock):
        taken.append(seconds)
        now[0] += seconds
    # After 8 seconds another 5 fit, and after 9 they do not.
    assert taken == [3.0, 5.0, 1.0]
    assert list(resumable.within([1, 2], None)) == [1, 2]


@pytest.mark.usefixtures("compiled")
def test_command_line_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    toys = [gemm_suite.Case("llama", label, "mm", 4, 8, 16, quick=label == "a") for label in "abc"]
    monkeypatch.setattr(gemm_suite, "CASES", {case.name: case for case in toys})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(
        results, "collect_header", lambda suite, command, commit: {**HEADER, "suite": suite}
    )
    common = ["--contenders", "stock", "ours", "--rounds", "2", "--json-out", str(tmp_path)]
    assert gemm.main([*common, "--quick"]) == 0
    (path,) = tmp_path.glob("*/*.json")
    assert gemm.main([*common, "--resume", str(path), "--budget-seconds", "0"]) == 0
    assert "0 of 2 measured" in capsys.readouterr().out
    assert gemm.main([*common, "--resume", str(path)]) == 0
    assert "2 of 2 measured" in capsys.readouterr().out
    assert {row["case"] for row in results.read(path)["rows"]} == set(gemm_suite.CASES)
    assert gemm.main(["--list", "--quick"]) == 0
    assert capsys.readouterr().out == "a 4x8x16\n"
    assert gemm.main(["--list", "--rows", "5"]) == 0
    assert capsys.readouterr().out == "\n"


def test_processes_share_the_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    toys = [gemm_suite.Case("llama", label, "mm", 4, 8, 16) for label in "abc"]
    monkeypatch.setattr(gemm_suite, "CASES", {case.name: case for case in toys})
    monkeypatch.setattr(
        results, "collect_header", lambda suite, command, commit: {**HEADER, "suite": suite}
    )
    common = ["--processes", "2", "--contenders", "eager", "--rounds", "2"]
    assert gemm.main(common) == 0
    printed = capsys.readouterr().out
    assert "3 of 3 measured" in printed
    assert all(f"{case.name}: eager" in printed for case in toys)


def test_a_process_measures_under_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime.benchmarking import benchmarker

    held: list[int] = []

    class Lock:
        def __enter__(self) -> None:
            held.append(1)

        def __exit__(self, *error: object) -> None:
            held.pop()

    class Stopwatch:
        def __init__(self, fails: bool) -> None:
            assert held == [1]
            if fails:
                raise ValueError("the first call fails")

        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None:
            assert held == [1]

    monkeypatch.setattr(timing, "CudaStopwatch", Stopwatch)
    monkeypatch.setattr(gpu_lock, "_lock", None)
    monkeypatch.setattr(gpu_lock, "_work", None, raising=False)
    monkeypatch.setattr(type(benchmarker), "benchmark_gpu", lambda self: held.copy())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    places: queue.SimpleQueue[int] = queue.SimpleQueue()
    places.put(1)
    monkeypatch.setattr(inductor_config, "compile_threads", 16)
    locks = [contextlib.nullcontext(), Lock()]
    gpu_lock._start(places, ["5", "7"], locks, 4, lambda: lambda x: x + 1)  # type: ignore[arg-type]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"
    assert inductor_config.compile_threads == 4
    _, result = gpu_lock._timed(2)
    assert result == 3
    assert benchmarker.benchmark_gpu() == [1]
    with timing.CudaStopwatch(False):
        assert held == [1]
    assert not held
    with pytest.raises(ValueError, match="first call"):
        timing.CudaStopwatch(True)
    assert not held


# Models


def small(**changes: Any) -> gemm_models.Llama:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {"width": 32, "hidden": 48, "heads": 4, "groups": 2, "depth": 2, **changes}
        return gemm_models.Llama(**sizes).eval()


def test_decoding_with_a_cache_is_the_last_row_of_prefill() -> None:
    length, batch = 6, 2
    prefill, decode = small(), small(past=length, batch=batch)
    decode.load_state_dict(prefill.state_dict(), strict=False)
    x = torch.randn(batch, length, 32)
    with torch.no_grad():
        expected = prefill(x)
        y = x
        half = torch.arange(4) / 4
        angles = torch.arange(length)[:, None] * 500000.0**-half
        for before, layer in zip(prefill.layers, decode.layers, strict=True):
            normal = before.norm1(y)
            keys = before._heads(before.key(normal), 2)
            layer.keys.copy_(gemm_models.rotate(keys, angles.cos(), angles.sin()))
            layer.values.copy_(before._heads(before.value(normal), 2))
            # What the call has to write is not there yet.
            layer.keys[:, :, -1] = math.nan
            y = before(y, angles.cos(), angles.sin())
        found = decode(x[:, -1:])
    torch.testing.assert_close(found, expected[:, -1:], atol=1e-5, rtol=1e-5)


def test_int8_llama_is_near_the_unquantised_one() -> None:
    module = small()
    x = torch.randn(1, 5, 32)
    with torch.no_grad():
        expected = module(x)
        found = gemm_models.quantize_int8(module)(x)
    assert 1e-5 < gemm.error(found, (expected.double(),)) < 0.02
    assert not any(isinstance(child, nn.Linear) for child in module.modules())


def test_model_has_the_same_weights_in_every_dtype() -> None:
    toy = gemm_models.Model("toy", lambda: (small(), (torch.randn(1, 5, 32),)), 0, int8=True)
    module, (x,) = toy.make("cpu", torch.bfloat16)
    wide, (wide_x,) = toy.make("cpu", torch.float32)
    torch.testing.assert_close(x.float(), wide_x, atol=0, rtol=0)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value.float(), wide.state_dict()[name].float(), atol=0, rtol=0)
    assert module.layers[0].query.weight.dtype == torch.int8


def test_what_decoding_reads() -> None:
    with torch.device("meta"):
        module = gemm_models.Llama(*gemm_models.LLAMA, past=gemm_models.PAST, batch=16)
    matrices = sum(p.numel() for p in module.parameters() if p.ndim == 2)
    cached = sum(buffer.numel() for buffer in module.buffers())
    models = gemm_models.MODELS
    assert models["llama decode 16x1"].bytes_read == 2 * (matrices + cached)
    assert models["llama int8 decode 16x1"].bytes_read == matrices + 2 * cached


@pytest.mark.parametrize("name", gemm_models.MODELS)
def test_models_take_their_inputs(name: str) -> None:
    module, inputs = gemm_models.MODELS[name].make("meta", torch.bfloat16)
    with torch.no_grad():
        result = module(*inputs)
    assert result.dtype == torch.bfloat16
    assert len(result) == len(inputs[0])


@pytest.mark.usefixtures("compiled")
def test_models_are_measured_against_float32() -> None:
    toy = gemm_models.Model("toy", lambda: (small(), (torch.randn(1, 5, 32),)), 0)
    ways = variants.chosen(["eager", "stock", "stock-max-tma", "ours"])
    with torch.no_grad():
        found = e2e.measure_model(toy, ways, "cpu", rounds=2)
    assert found["stock-max-tma"].failure == "no graphs: ValueError: no choices"
    assert found["ours"].error == found["eager"].error
    assert 1e-4 < found["ours"].error < 0.05
    rows = e2e.rows("toy", found)
    results.validate({**HEADER, "rows": rows})
    table = found_rows(rows)
    assert set(table) == {
        "no graphs, stock default",
        "compile, stock default",
        "error, stock default",
        "no graphs, stock max-autotune, TMA",
    }
    assert table["compile, stock default"]["ours"] == 1.0


def test_measured_settings_have_rows_of_their_own() -> None:
    def measured(plain: float, graphs: float) -> e2e.Measured:
        return e2e.Measured({"no graphs": [plain], "graphs": [graphs]}, 1.0, 0.01)

    found = {"eager": measured(0.004, 0.003), "stock-max": measured(0.002, 0.001)}
    found["ours"] = dataclasses.replace(found["stock-max"], times={"graphs": [0.0005]})
    table = found_rows(e2e.rows("m", found, 0.4))
    graphs = table["graphs, stock max-autotune"]
    assert (graphs["ours"], graphs["stock"], graphs["eager"]) == (0.5, 1, 3)
    assert graphs["floor"] == 0.4
    assert table["no graphs, stock max-autotune"]["ours"] is None


# On a GPU


@pytest.mark.gpu
def test_a_case_on_a_gpu() -> None:
    case = gemm_suite.Case("int8", "toy", "int8", 16, 256, 512)
    ways = variants.chosen(["eager", "stock", "ours"])
    found = gemm.measure_case(case, ways, gpu_timing.Timer("cuda"), rounds=5)
    assert set(found) == {"eager", "stock", "ours", "bf16"}
    for value in found.values():
        assert value.failure is None
        assert set(value.times) == {"graph", "call"}
        assert all(len(times) == 5 and min(times) > 0.5 for times in value.times.values())
    bound = gemm.floor(case, "cuda")
    assert bound is not None
    assert 0 < bound < min(found["ours"].times["graph"])


@pytest.mark.gpu
def test_a_model_on_a_gpu() -> None:
    toy = gemm_models.Model(
        "toy",
        lambda: (small(width=256, hidden=512, past=64, batch=2), (torch.randn(2, 1, 256),)),
        bytes_read=1 << 20,
    )
    with torch.no_grad():
        found = e2e.measure_model(toy, variants.chosen(["eager", "stock", "ours"]), "cuda", 3)
    for value in found.values():
        assert value.failure is None
        assert set(value.times) == {"graphs", "no graphs"}
    assert e2e.floor(toy, "cuda") is not None


def test_readers_read_everything() -> None:
    pytest.importorskip("triton")
    code = """
import torch
from benchmarks.gemm import speed_of_light
from test.support import triton_interpreter
triton_interpreter.accept_numpy()
print(len(dict(speed_of_light.readers(torch.randint(2**31 - 1, (20000,)).int(), 2))))
"""
    # It is for a GPU unless the interpreter is asked for before triton is imported.
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["63"]


def test_other_processes_have_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gemm.main(["--no-table", "--processes", "2"])
    assert "--no-table needs --processes 1" in capsys.readouterr().err


@pytest.mark.usefixtures("compiled")
def test_norms_are_measured_and_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = ("LayerNorm", "RMSNorm", "softmax")
    toys = [reductions.Case(kind, 4, 40) for kind in kinds]
    monkeypatch.setattr(reductions, "CASES", {case.name: case for case in toys})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(
        results, "collect_header", lambda suite, command, commit: {**HEADER, "suite": suite}
    )
    common = ["--rounds", "2", "--json-out", str(tmp_path)]
    # One of stock's settings is wrong here, and is reported.
    assert reductions.main(["--case", toys[0].name, *common]) == 1
    (path,) = tmp_path.glob("*/*.json")
    assert reductions.main(["--case", *reductions.CASES, *common, "--resume", str(path)]) == 1
    assert "2 of 2 measured" in capsys.readouterr().out
    document = results.read(path)
    assert {row["case"] for row in document["rows"]} == set(reductions.CASES)
    assert all(row["ours"] for row in document["rows"])


def test_a_norm_s_floor_is_what_it_moves() -> None:
    # Two matrices of 2 bytes an element are read and two written, and one row is read.
    bound = reductions.Case("residual + RMSNorm", 100, 10).bound(1e6)
    assert bound == pytest.approx((4 * 1000 + 10) * 2)
