"""The accuracy check against float64: its bound, and what is wrong."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from inductor_ext.autotune import accuracy, reference
from inductor_ext.templates.format import problem_words
from inductor_ext.templates.fused_ops import Epilogue
from inductor_ext.templates.problem import GemmProblem
from test.support.tuning_problems import LINEAR, SCALES, contiguous, inputs_of

INT_BIAS = inputs_of("row", dtype="int32")

INTEGERS = [
    contiguous("mm", 24, 48, 64, epilogue=Epilogue((), 6, "int8")),
    contiguous("mm", 24, 48, 64, epilogue=Epilogue((), 2, "int64")),
    contiguous("mm", 24, 48, 64, epilogue=Epilogue((), 1, "uint8")),
    contiguous("mm", 24, 48, 64, epilogue=Epilogue((), 0, "bool")),
    contiguous("mm", 24, 48, 64, epilogue=Epilogue(inputs_of("scalar", dtype="bool"), 1)),
    contiguous("mm", 24, 48, 64, epilogue=Epilogue(inputs_of("column", dtype="int32"), 1)),
    contiguous("mm", 24, 48, 64, "float32", epilogue=Epilogue(inputs_of("row", dtype="uint8"), 1)),
    contiguous("int_mm", 24, 48, 64, "int8", epilogue=Epilogue(INT_BIAS, 1)),
    contiguous("int_mm", 24, 48, 64, "int8", epilogue=Epilogue((*INT_BIAS, *SCALES), 3, "float16")),
    contiguous("int_mm", 24, 48, 64, "int8", epilogue=Epilogue(SCALES, 5, "int8")),
    contiguous("int_mm", 24, 48, 64, "int8", epilogue=Epilogue((), 5, "int8")),
    contiguous("int_mm", 24, 48, 64, "int8", epilogue=Epilogue(SCALES[1:], 2)),
    contiguous("int_mm", 24, 48, 4096, "int8", epilogue=Epilogue((), 1, "float16")),
]
"""Problems with integer or bool outputs or epilogue inputs."""


class TestVerification:
    def verifier(self, problem: GemmProblem) -> tuple[accuracy.Verifier, list[torch.Tensor]]:
        program = reference.program(problem)
        inputs = program.make_inputs("cpu")
        result = accuracy.Verifier(program, inputs)
        assert result.set_stock(program.function(*inputs)) is None
        return result, inputs

    def test_the_bound_grows_with_k_and_with_coarser_dtypes(self) -> None:
        fine, long, coarse = (
            accuracy.bound(contiguous("mm", 16, 16, k, dtype))
            for k, dtype in ((64, "float32"), (4096, "float32"), (64, "bfloat16"))
        )
        assert fine < 1e-5 < 4e-5 > long > 4 * fine
        assert 2**-8 < coarse < 2**-7
        assert accuracy.bound(contiguous("int_mm", 16, 16, 64, "int8")) == 0

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
    def test_a_kernel_that_skips_one_step_of_k_is_wrong(self, dtype: str) -> None:
        verifier, (a, b) = self.verifier(contiguous("mm", 40, 48, 1025, dtype))
        reason = verifier.check(lambda: [a[:, :-1] @ b[:-1]])
        assert reason is not None
        assert reason.startswith("wrong: error")
        assert verifier.check(lambda: [(a.double() @ b.double()).to(a.dtype)]) is None

    def test_tf32_is_right_where_it_is_allowed(self) -> None:
        for tf32 in (False, True):
            verifier, (a, b) = self.verifier(contiguous("mm", 40, 48, 512, "float32", tf32=tf32))
            # Truncated to 10 mantissa bits.
            cut = [(x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (a, b)]
            assert (verifier.check(lambda cut=cut: [cut[0] @ cut[1]]) is None) == tf32

    def test_infinity_nan_and_unwritten_elements_are_wrong(self) -> None:
        verifier, (a, b) = self.verifier(contiguous("mm", 40, 48, 64, "float16"))
        for value in (float("nan"), float("inf")):
            out = a @ b
            out[3, 4] = value
            assert verifier.check(lambda out=out: [out]) == "wrong: NaN, infinity or another shape"
        assert verifier.check(lambda: [(a @ b)[:-1]]) == "wrong: NaN, infinity or another shape"
        assert "2 results" in str(verifier.check(lambda: [a @ b, a @ b]))

    def test_unsampled_rows_are_compared_with_the_fallback(self) -> None:
        problem = contiguous("mm", 3 * accuracy.ROWS, 16, 16, "float32")
        rows = accuracy.sampled_rows(problem)
        assert len(rows) == accuracy.ROWS
        assert (rows[0], rows[-1]) == (0, problem.m - 1)
        verifier, (a, b) = self.verifier(problem)
        out = a @ b
        out[min(set(range(problem.m)) - set(rows)), 3] += 0.01
        assert "against Inductor" in str(verifier.check(lambda: [out]))

    def test_integers_are_exact(self) -> None:
        verifier, (a, b) = self.verifier(contiguous("int_mm", 40, 48, 64, "int8"))
        out = torch._int_mm(a, b)
        assert verifier.check(lambda: [out]) is None
        out[0, 0] += 1
        assert verifier.check(lambda: [out]) is not None

    @pytest.mark.parametrize("problem", INTEGERS, ids=problem_words)
    def test_integer_results_do_not_hide_a_matmul(self, problem: GemmProblem) -> None:
        verifier, (a, *others) = self.verifier(problem)
        function = reference.program(problem).function
        assert verifier.check(lambda: function(a, *others)) is None
        reason = verifier.check(lambda: function(torch.zeros_like(a), *others))
        assert str(reason).startswith("wrong: error")

    def test_unsampled_bools_are_compared_with_the_fallback(self) -> None:
        problem = contiguous("mm", 3 * accuracy.ROWS, 16, 16, epilogue=Epilogue((), 0, "bool"))
        verifier, (a, b) = self.verifier(problem)
        out = (a @ b) > 0
        assert verifier.check(lambda: [out]) is None
        row = min(set(range(problem.m)) - set(accuracy.sampled_rows(problem)))
        out[row] ^= True
        assert "against Inductor" in str(verifier.check(lambda: [out]))

    def test_chains_of_integer_operations_are_exact(self) -> None:
        problem = contiguous("int_mm", 24, 48, 64, "int8", epilogue=Epilogue((), 24))
        program = reference.program(problem)
        (out,) = program.function(*program.make_inputs("cpu"))
        assert out.dtype == torch.int32

    def test_deterministic_results_need_equal_bits(self) -> None:
        for deterministic in (False, True):
            problem = dataclasses.replace(LINEAR, deterministic=deterministic)
            verifier, (a, b) = self.verifier(problem)
            outputs = [a @ b, torch.nextafter(a @ b, torch.tensor(9.0))]
            reason = verifier.check(lambda outputs=outputs: [outputs.pop()])
            assert (reason is not None) == deterministic
