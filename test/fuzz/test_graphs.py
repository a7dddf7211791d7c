"""Random programs agree with eager mode, and the graph fuzzer finds those that do not.

The programs of `SEEDS` are compiled in batches. The other tests show what a comparison
distinguishes, how a crash is attributed, and how a program is reduced.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.async_compile import AsyncCompile

from benchmarks.harness import results as results_format
from test.fuzz import (
    graph_compare,
    graph_generator,
    graph_judge,
    graph_shrink,
    graphs,
    memory_programs,
    workers,
)
from test.fuzz.graph_generator import BATCH, MODES, generate, is_reproducible, mode_of
from test.fuzz.graph_judge import Build, Outcome, Result, Task, Verdict
from test.fuzz.graph_programs import Input, Observer, Program, Run, run_eager
from test.support import quick_compiler

SEEDS: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("cpp_wrapper", (16, 17, 19, 20, 22, 35, 36, 48, 51, 65)),
    ("package", (66, 68, 70, 71, 80, 81, 83, 84, 87, 96, 99, 100, 116, 117, 118, 119)),
    ("compile", (40, 43, 45, 89)),
    ("cpp_wrapper", (92, 93, 120, 121, 174)),
    ("cpp_wrapper", (30, 31, 56, 59, 61, 62, 104, 106, 107, 110, 111, 137, 138, 141, 142)),
)
"""Ways, and seeds of short programs of one mode: inference, dynamic sizes or training."""


@pytest.mark.parametrize(
    ("way", "seeds"),
    [pytest.param(*case, marks=pytest.mark.xdist_group(f"graphs-{case[1][0]}")) for case in SEEDS],
    ids=[f"{way}-{seeds[0]}..{seeds[-1]}" for way, seeds in SEEDS],
)
def test_programs_agree_with_eager_mode(way: str, seeds: tuple[int, ...]) -> None:
    results = graph_judge.judge_task(Task(seeds, ((way, "default"),)), lambda stage: None)
    # Another torch draws other programs, of which Inductor (default) may be unable to compile some.
    allowed = {Verdict.RIGHT, Verdict.REFUSED, Verdict.STOCK_ERROR_TOO, Verdict.SKIPPED}
    assert [result for result in results if result.verdict not in allowed] == []
    assert sum(result.verdict is Verdict.RIGHT for result in results) >= len(seeds) - 3


class TestGenerator:
    def test_a_seed_always_draws_the_same_program(self) -> None:
        assert generate(3) == generate(3)
        assert generate(3).lines != generate(4).lines

    def test_a_batch_has_one_mode(self) -> None:
        assert {mode_of(seed) for seed in range(BATCH * len(MODES))} == set(MODES)
        for start in range(0, 80, BATCH):
            assert len({mode_of(seed) for seed in range(start, start + BATCH)}) == 1

    @pytest.mark.parametrize("seed", [0, BATCH, 3 * BATCH, 9 * BATCH])
    def test_programs_have_the_mode_of_their_seed(self, seed: int) -> None:
        program = generate(seed)
        assert program.training == ("training" in mode_of(seed))
        assert program.dynamic == ("dynamic" in mode_of(seed))

    def test_writes_of_custom_operators_are_not_differentiated(self) -> None:
        """They have no gradient, and eager mode returns that of the values before the write."""
        training = [seed for seed in range(0, 800, BATCH) if "training" in mode_of(seed)]
        drawing = graph_generator._Drawing(training[0], 0, "cpu")
        assert drawing.base.inputs[0].grad
        assert not drawing._add("fuzz.flip_into(x0.detach(), x0)")
        assert drawing._add("t1 = x0.detach() + 1")
        assert drawing._add("fuzz.flip_into(t1.clone(), t1)")


FLOAT = Input("x0", ("n", "m"))
PROGRAM = Program(
    0,
    (FLOAT,),
    ("t1 = x0 * 2", "t2 = x0[1:]", "self.b0.add_(1)", "x0[0] = 1"),
    ("t1", "t2"),
    ((("n", 4), ("m", 3)),),
    buffers=(Input("b0", ("2",)),),
)


def _run_variant(*lines: str, program: Program = PROGRAM) -> Run:
    """Eager mode's run of a program with other lines, as if it were compiled code's."""
    return run_eager(dataclasses.replace(program, lines=lines))


class TestComparison:
    def test_equal_runs_agree(self) -> None:
        assert graph_compare.find_difference(PROGRAM, run_eager(PROGRAM)) == ""

    @pytest.mark.parametrize(
        ("lines", "why"),
        [
            (("t1 = x0 * 2.01", *PROGRAM.lines[1:]), "call 0: result 0 at once: 12 of 12"),
            (("t1 = x0.double()", *PROGRAM.lines[1:]), "torch.float64[4, 3] instead of"),
            (("t1 = x0[1:]", *PROGRAM.lines[1:]), "torch.float32[3, 3] instead of"),
            ((*PROGRAM.lines[:3], "x0[1] = 1"), "result 1 at once"),
            ((*PROGRAM.lines[:2], "x0[0] = 1"), "buffer b0"),
            (("t1 = x0 * 2", "t2 = x0[1:]", "self.b0.add_(1)"), "input x0"),
        ],
    )
    def test_differences_are_named(self, lines: tuple[str, ...], why: str) -> None:
        assert why in graph_compare.find_difference(PROGRAM, _run_variant(*lines))

    def test_a_result_must_not_become_an_input(self) -> None:
        program = dataclasses.replace(PROGRAM, lines=("t1 = x0.clone()", "t2 = x0 + 1"))
        run = _run_variant("t1 = x0", "t2 = x0 + 1", program=program)
        why = graph_compare.find_difference(program, run)
        assert why == "call 0: input x0 and result 0 share memory"

    def test_a_later_call_must_not_change_a_result(self) -> None:
        observer = Observer(PROGRAM, None)
        kept = torch.zeros(2)
        observer.add(0, PROGRAM.arguments(0), [kept, kept + 1])
        kept.add_(1)
        values = observer.finish().values
        assert not torch.equal(
            values["call 0: result 0"],  # type: ignore[arg-type]
            values["call 0: result 0 at once"],  # type: ignore[arg-type]
        )

    def test_a_package_may_return_copies_of_its_buffers(self) -> None:
        """A later call changes the buffer, and in eager mode the result too."""
        lines = ("t1 = x0 * 2", "self.b0.add_(1)", "t2 = self.b0")
        program = dataclasses.replace(PROGRAM, lines=lines)
        run = _run_variant(*lines[:2], "t2 = self.b0.clone()", program=program)
        assert "result 1" in graph_compare.find_difference(program, run)
        run.has_module = False
        assert graph_compare.find_difference(program, run) == ""

    def test_gradients_are_compared(self) -> None:
        grad = dataclasses.replace(FLOAT, grad=True)
        program = dataclasses.replace(PROGRAM, inputs=(grad,), lines=("t1 = x0 * 2", "t2 = x0"))
        run = _run_variant("t1 = x0 * 2", "t2 = x0 * 1 + 0 * x0.detach()", program=program)
        assert graph_compare.find_difference(program, run) == ""
        run = _run_variant("t1 = x0 * 2", "t2 = x0.detach() + 0 * x0", program=program)
        assert "gradient x0" in graph_compare.find_difference(program, run)

    def test_no_gradient_agrees_with_zeros(self) -> None:
        grad = dataclasses.replace(FLOAT, grad=True)
        lines = ("t1 = x0.detach() * 2", "t2 = t1 * 2")
        program = dataclasses.replace(PROGRAM, inputs=(grad,), lines=lines)
        run, name = run_eager(program), "call 0: gradient x0"
        assert run.values[name] is None
        run.values[name] = torch.zeros(4)
        assert graph_compare.find_difference(program, run) == ""
        run.values[name] = torch.ones(4)
        assert name in graph_compare.find_difference(program, run)

    def test_rounding_errors_agree_and_integers_must_be_equal(self) -> None:
        run = _run_variant("t1 = x0 * 2 * (1 + 1e-6)", *PROGRAM.lines[1:])
        assert graph_compare.find_difference(PROGRAM, run) == ""
        counting = dataclasses.replace(PROGRAM, lines=("t1 = (x0 > 0).sum()", "t2 = x0"))
        run = _run_variant("t1 = (x0 > 0).sum() + 1", "t2 = x0", program=counting)
        assert "1 of 1 elements" in graph_compare.find_difference(counting, run)

    def test_half_precision_may_be_rounded_more_or_less_often(self) -> None:
        """A float32 gradient to which a rounded one contributes, in the order of a fused kernel."""
        lines = ("t1 = x0 * (1 + 3e-4)", *PROGRAM.lines[1:])
        assert graph_compare.find_difference(PROGRAM, _run_variant(*lines))
        for dtype, agrees in (("f16", True), ("bf16", True), ("f64", False)):
            program = dataclasses.replace(
                PROGRAM, lines=(f"t1 = x0 + x0.to({dtype}).float()", *PROGRAM.lines[1:])
            )
            run = run_eager(program)
            value = run.values["call 0: result 0"]
            assert value is not None
            value.mul_(1 + 3e-4)
            assert (graph_compare.find_difference(program, run) == "") is agrees

    def test_what_is_left_of_cancelled_half_precision_values_is_a_rounding_error(self) -> None:
        """Two equal values of which a compiled run rounds only one."""
        lines = ("a = x0.abs().sqrt()", "b = x0.abs().sqrt()", "t1 = a - b", *PROGRAM.lines[1:])
        for dtype, error, agrees in (
            ("float16", 2.0**-12, True),
            ("float16", 2.0**-6, False),
            ("float32", 2.0**-12, False),
        ):
            half = dataclasses.replace(FLOAT, dtype=dtype)
            program = dataclasses.replace(PROGRAM, inputs=(half,), lines=lines)
            run = run_eager(program)
            value = run.values["call 0: result 0"]
            assert value is not None
            assert not value.any()
            value.add_(error)
            assert (graph_compare.find_difference(program, run) == "") is agrees

    def test_unstable_programs_are_not_reproducible(self) -> None:
        assert is_reproducible(PROGRAM)
        unstable = dataclasses.replace(PROGRAM, lines=("t1 = (x0 * 1e7).long()", "t2 = x0"))
        assert not is_reproducible(unstable)


PLACE = "call 0: result 1"
WRONG, CRASH, ERROR = (
    Outcome(v, f"{PLACE}: 3 of 8 elements are wrong")
    for v in (Verdict.WRONG, Verdict.CRASH, Verdict.ERROR)
)
RIGHT = Outcome(Verdict.RIGHT)


@pytest.mark.parametrize(
    ("ours", "stock", "verdict"),
    [
        (WRONG, RIGHT, Verdict.WRONG),
        (WRONG, Outcome(Verdict.ERROR), Verdict.WRONG),
        (WRONG, Outcome(Verdict.WRONG, f"{PLACE}: 1 of 8 elements"), Verdict.STOCK_WRONG_TOO),
        (WRONG, Outcome(Verdict.WRONG, "call 0: result 2: 3 of 8 elements"), Verdict.WRONG),
        (WRONG, Outcome(Verdict.WRONG, f"{PLACE} and result 2 share memory"), Verdict.WRONG),
        (CRASH, Outcome(Verdict.WRONG), Verdict.CRASH),
        (CRASH, Outcome(Verdict.CRASH), Verdict.STOCK_CRASH_TOO),
        (ERROR, RIGHT, Verdict.ERROR),
        (ERROR, Outcome(Verdict.ERROR), Verdict.STOCK_ERROR_TOO),
        (RIGHT, Outcome(Verdict.WRONG), Verdict.RIGHT),
        (Outcome(Verdict.REFUSED), RIGHT, Verdict.REFUSED),
    ],
)
def test_verdict(ours: Outcome, stock: Outcome, verdict: Verdict) -> None:
    assert graph_judge.verdict_of(ours, stock)[0] is verdict


def test_what_torch_export_changes_is_not_a_case() -> None:
    """An assigned buffer that is then written in place: the exported program ignores the write."""
    program = dataclasses.replace(
        PROGRAM, lines=("t1 = self.b0 * 2", "self.b0 = t1 + 1", "self.b0.add_(1)", "t2 = x0 + 1")
    )
    assert "result 0" in graph_judge.find_export_difference(program)
    assert graph_judge.find_export_difference(PROGRAM) == ""


def test_what_dynamo_changes_is_not_a_case() -> None:
    """Dynamo keeps the shape that a tensor had before `transpose_`."""
    program = dataclasses.replace(
        PROGRAM,
        lines=("t1 = x0 * 2", "t1.transpose_(0, 1)", "t2 = torch.ones(t1.shape)"),
        outputs=("t2",),
    )
    assert "result 0" in graph_judge.find_dynamo_difference(program)
    assert graph_judge.find_dynamo_difference(PROGRAM) == ""
    outcome = graph_judge.run_alone(program, ("compile", "default"), "inductor")
    assert outcome.verdict is Verdict.SKIPPED
    assert outcome.why.startswith("Dynamo: ")


def test_kernels_are_compiled_together(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = []

    def load(argtypes: Any, source: str) -> Any:
        sources.append(source)
        return lambda index, arguments: (index, arguments)

    monkeypatch.setattr(quick_compiler._Together, "load_pybinding", load)
    with quick_compiler.quick_compiles():
        compiler = AsyncCompile()
        kernels = [compiler.cpp_pybinding(["float*", "int64_t"], text) for text in ("A", "B")]
        assert kernels[1](1, 2) == (1, (1, 2))
        assert kernels[0](3, 4) == (0, (3, 4))
    (source,) = sources
    assert "#define kernel kernel_1\nB\n#undef kernel" in source
    assert "case 1: kernel_1(parse_arg<float*>(args, 0), parse_arg<int64_t>(args, 1))" in source


class TestCrashes:
    @pytest.mark.parametrize(
        ("text", "code"),
        [("CUDA error: misaligned address", graph_judge.DEVICE_IS_LOST), ("no kernel", None)],
    )
    def test_a_lost_device_ends_the_process(
        self, monkeypatch: pytest.MonkeyPatch, text: str, code: int | None
    ) -> None:
        def fail(*_: Any) -> Any:
            raise RuntimeError(text)

        codes = []
        monkeypatch.setattr(graph_judge, "run_build", fail)
        monkeypatch.setattr(graph_judge.os, "_exit", codes.append)
        graph_judge.Judge([PROGRAM], lambda _: None).judge(("stock", "default"))
        assert codes == ([] if code is None else [code])

    BUILDS: tuple[Build, ...] = (("compile", "default"), ("package", "default"))

    def _stages(self, judge: Any) -> list[str]:
        stages: list[str] = []
        judge(graph_judge.Judge([], stages.append))
        return stages

    def test_a_batch_is_repeated_program_by_program(self) -> None:
        task = Task((1, 2), self.BUILDS)
        results, repeated = graphs.attribute_crash(task, workers.FIRST_STAGE, "died")
        assert not results
        assert [t.seeds for t in repeated] == [(1,), (2,)]

    def test_after_a_crash_inductor_is_run_and_then_the_other_builds(self) -> None:
        (stage,) = self._stages(lambda j: j.announce(self.BUILDS[0], "inductor_ext"))
        results, (first, second) = graphs.attribute_crash(Task((1,), self.BUILDS), stage, "died")
        assert not results
        assert (first.builds, first.ours) == (self.BUILDS[:1], Outcome(Verdict.CRASH, "died"))
        assert (second.builds, second.ours) == (self.BUILDS[1:], None)

    @pytest.mark.parametrize(
        ("ours", "verdict"), [(CRASH, Verdict.STOCK_CRASH_TOO), (WRONG, Verdict.WRONG)]
    )
    def test_a_crash_of_inductor_is_its_outcome(self, ours: Outcome, verdict: Verdict) -> None:
        (stage,) = self._stages(lambda j: j.announce(self.BUILDS[0], "inductor", ours))
        ((result,), _) = graphs.attribute_crash(Task((1,), self.BUILDS[:1]), stage, "died")
        assert result.verdict is verdict

    @pytest.mark.slow  # Starts two processes that import torch.
    def test_the_fuzzer_survives_the_death_of_a_worker(self, tmp_path: Path) -> None:
        worker: workers.Worker[str, str] = workers.Worker(_die, None, os.fspath(tmp_path / "log"))
        try:
            assert worker.judge("live", 300) == ("alive", None)
            assert worker.judge("die", 300) == ("ours", "the process ended with exit code -6")
        finally:
            worker.close()


def _die(batch: str, announce: workers.Announce) -> str:
    announce("ours")
    if batch == "die":
        os.abort()
    return "alive"


class TestShrinking:
    PROGRAM = dataclasses.replace(
        PROGRAM,
        inputs=(dataclasses.replace(FLOAT, layout="transposed"), Input("x1", ("n",))),
        lines=("t1 = x0 * 2", "t2 = x0 + 1\nt3 = x1.cos()", "t4 = t1 + t2", "t5 = t3.sin()"),
        outputs=("t4", "t5", "t1"),
    )

    def _run(self, program: Program) -> Outcome:
        return WRONG if "cos" in program.source() else RIGHT

    def test_only_what_is_needed_remains(self) -> None:
        small = graph_shrink.shrink(self.PROGRAM, self._run, WRONG)
        assert small.lines == ("t3 = x1.cos()",)
        assert [i.name for i in small.inputs] == ["x1"]
        assert not small.buffers

    def test_the_script_is_standalone(self, capsys: pytest.CaptureFixture[str]) -> None:
        program = dataclasses.replace(
            self.PROGRAM, lines=(*self.PROGRAM.lines, "fuzz.flip_into(x0, x0.clone())")
        )
        script = graph_shrink.render_script(program, ("compile", "default"))
        assert 'custom_op("inductor_ext_fuzz::flip_into", mutates_args={"out"})' in script
        script = script.replace("inductor_ext_fuzz", "inductor_ext_fuzz_script")
        script = script.replace('backend="inductor_ext', 'backend="eager')
        # The script changes settings of Dynamo, which the fixture `isolated` restores.
        exec(compile(script, "<script>", "exec"), {})
        assert capsys.readouterr().out.count("compiled") == memory_programs.CALLS


RESULTS = [
    Result(0, "compile", "default", Verdict.RIGHT),
    Result(1, "compile", "default", Verdict.WRONG, "values"),
    Result(0, "stock", "default", Verdict.WRONG, "values"),
]


class TestResults:
    def test_rows_count_verdicts_and_name_disagreements(self) -> None:
        table = {(row["case"], row["metric"]): row for row in graphs.rows(RESULTS)}
        assert table["compile, default", "right"]["ours"] == 1
        assert table["compile, default", "wrong"]["ours"] == 1
        assert table["stock, default", "wrong"]["stock"] == 1
        assert table["seed 1", "compile, default"]["note"] == "wrong: values"
        assert ("seed 0", "stock, default") not in table

    def test_rows_follow_the_schema(self) -> None:
        header = results_format.collect_header("graphs", "python -m test.fuzz.graphs")
        results_format.validate({**header, "rows": graphs.rows(RESULTS)})

    def test_a_journal_continues_a_run(self, tmp_path: Path) -> None:
        path = tmp_path / "journal"
        journal = workers.Journal(path, ["torch"], restart=False)
        journal.write(result.to_json() for result in RESULTS)
        earlier = workers.Journal(path, ["torch"], restart=False).earlier
        assert [Result.from_json(item) for item in earlier] == RESULTS
        assert workers.Journal(path, ["another torch"], restart=False).earlier == []

    def test_known_programs_are_left_out(self) -> None:
        tasks = graphs.make_tasks(range(16), ["compile"], ["default"], "cpu", share=False)
        known = {(seed, ("compile", "default")) for seed in range(9)}
        assert [t.seeds for t in graphs.remaining_tasks(tasks, known)] == [tuple(range(9, 16))]

    def test_every_mode_reaches_every_way(self) -> None:
        tasks = graphs.make_tasks(range(8000), graph_judge.WAYS, ["default"], "cpu")
        assert [seed for t in tasks for seed in t.seeds] == [*range(8000)]
        pairs = {(way, mode_of(t.seeds[0])) for t in tasks for way, _ in t.builds}
        assert pairs == {(way, mode) for way in graph_judge.WAYS for mode in MODES}
