"""Reference programs: correct results, and graphs that match their problem."""

from __future__ import annotations

import dataclasses
from typing import Literal

import pytest
import torch
from hypothesis import given
from torch._subclasses.fake_tensor import FakeTensorMode

from inductor_ext.autotune import accuracy, reference
from inductor_ext.templates.format import problem_words
from inductor_ext.templates.fused_ops import Epilogue, Prologue, RowNorm
from inductor_ext.templates.problem import GemmProblem, KernelDetails
from inductor_ext.templates.tensors import Operand
from test.support import fake_cuda
from test.support.gemm_strategies import examples, problems
from test.support.tuning_problems import SCALES, contiguous, inputs_of

COVERED = [
    contiguous("mm", 16, 512, 256),
    contiguous("mm", 16, 513, 255, "float16", layouts="cr"),
    contiguous("mm", 16, 512, 256, "float32", tf32=True),
    contiguous("addmm", 16, 512, 256, epilogue=Epilogue(inputs_of("row"), 1)),
    contiguous("bmm", 16, 512, 256, batch=4),
    contiguous("baddbmm", 16, 512, 256, batch=4, epilogue=Epilogue(inputs_of("matrix"), 1)),
    contiguous("int_mm", 32, 512, 256, "int8"),
    contiguous("scaled", 32, 512, 256, "float8_e4m3fn", epilogue=Epilogue(SCALES, 2)),
    contiguous(
        "scaled",
        32,
        512,
        256,
        "float8_e4m3fn",
        fast_accumulation=True,
        epilogue=Epilogue((*SCALES, *inputs_of("row")), 3),
    ),
    contiguous("grouped", 64, 512, 256, batch=4),
    contiguous("grouped", 64, 512, 256, "float8_e4m3fn", batch=4, epilogue=Epilogue(SCALES, 2)),
]
"""Problems of single operators."""


class TestPrograms:
    @examples(60)
    @given(problems(most=60))
    def test_results_and_input_layouts_match_the_problem(self, problem: GemmProblem) -> None:
        floats = ("bfloat16", "float16", "float32")
        if problem.norm and problem.a.dtype not in floats:
            return
        program = reference.program(problem)
        inputs = program.make_inputs("cpu")
        a, b = inputs[:2]
        assert a.shape[-2:] == (problem.m, problem.k)
        assert str(a.dtype) == f"torch.{problem.a.dtype}"
        assert (a.stride()[-2:]) == problem.a.strides
        lengths = (problem.m, problem.k)
        result = Operand.of(problem.a.dtype, lengths, problem.a.strides, offset=a.storage_offset())
        assert result.alignment >= problem.a.alignment or problem.a.batch_stride
        if not problem.b.dtype.endswith("int4") and not problem.parts:
            assert b.stride()[-2:] == problem.b.strides
        assert sum(x.untyped_storage().nbytes() for x in inputs) == program.bytes
        if problem.operation == "grouped" or (
            problem.operation == "int_mm" and problem.epilogue != Epilogue()
        ):
            return  # The CPU lacks some kernels, and Inductor does not round to int32.
        with reference.precision(problem):
            outputs = program.function(*inputs)
        if not all(output.any() for output in outputs):
            return  # Errors are relative to the size of the results.
        verifier = accuracy.Verifier(program, inputs)
        refused = verifier.set_stock(outputs)
        # Each step of a chain is rounded here, unlike in a kernel: errors may exceed the bound.
        assert refused is None or problem.epilogue != Epilogue()
        assert verifier.check(lambda: outputs) is None

    @pytest.mark.skipif(torch.cuda.is_available(), reason="it stands in for a GPU")
    @pytest.mark.parametrize("problem", COVERED, ids=problem_words)
    def test_programs_of_operators_match_their_problem(self, problem: GemmProblem) -> None:
        pytest.importorskip("triton")
        from torch._inductor.decomposition import select_decomp_table
        from torch.fx.experimental.proxy_tensor import make_fx

        from inductor_ext.lowerings.graph.matmul_nodes import problem_of

        program = reference.program(problem)
        with fake_cuda.device(), FakeTensorMode(), reference.precision(problem):
            inputs = program.empty_inputs("cuda")
            table = select_decomp_table()
            graph = make_fx(program.function, decomposition_table=table)(*inputs).graph
            calls = [node for node in graph.nodes if node.op == "call_function"]
            assert [result for node in calls if (result := problem_of(node))] == [problem]

    def test_an_input_that_is_not_aligned_has_an_offset(self) -> None:
        aligned = contiguous("mm", 16, 512, 256)
        skewed = dataclasses.replace(aligned, b=dataclasses.replace(aligned.b, alignment=2))
        offsets = [
            reference.program(item).make_inputs("cpu")[1].storage_offset()
            for item in (aligned, skewed)
        ]
        assert offsets == [0, 2]

    def test_fused_weights_are_matmuls_of_one_input(self) -> None:
        problem = contiguous("mm", 8, 48, 32, "float32", parts=(32, 8, 8))
        a, *weights = reference.program(problem).make_inputs("cpu")
        outputs = reference.program(problem).function(a, *weights)
        assert [output.shape[1] for output in outputs] == [32, 8, 8]
        assert all(torch.equal(a @ w, out) for w, out in zip(weights, outputs, strict=True))

    def test_gates_norms_and_reductions(self) -> None:
        problem = contiguous(
            "mm",
            8,
            48,
            32,
            "float32",
            parts=(24, 24),
            prologue=Prologue(RowNorm("rms", 1, "float32")),
            epilogue=Epilogue(gated=True, reductions=1),
        )
        a, gate, up, weight = reference.program(problem).make_inputs("cpu")
        out, largest = reference.program(problem).function(a, gate, up, weight)
        normalized = torch.nn.functional.rms_norm(a, (32,), weight, 1e-5)
        expected = torch.nn.functional.silu(normalized @ gate) * (normalized @ up)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(largest, expected.abs().amax(1))

    @pytest.mark.parametrize("first", ["gate", "up"])
    def test_gates_by_halves_of_one_weight(self, first: Literal["gate", "up"]) -> None:
        bias = inputs_of("row", dtype="float32")
        epilogue, details = Epilogue(bias, 1, gated=True), KernelDetails("gelu", first)
        problem = contiguous(
            "addmm", 8, 48, 32, "float32", parts=(24, 24), epilogue=epilogue, details=details
        )
        a, weight, added = reference.program(problem).make_inputs("cpu")
        (out,) = reference.program(problem).function(a, weight, added)
        parts = torch.addmm(added, a, weight).split(24, 1)
        gate, up = parts if first == "gate" else reversed(parts)
        torch.testing.assert_close(out, torch.nn.functional.gelu(gate) * up)

    def test_layer_norm_equals_torch(self) -> None:
        prologue = Prologue(RowNorm("layer", 2, "float32"))
        problem = contiguous("mm", 8, 24, 32, "float32", prologue=prologue)
        a, b, weight, bias = reference.program(problem).make_inputs("cpu")
        (out,) = reference.program(problem).function(a, b, weight, bias)
        expected = torch.nn.functional.layer_norm(a, (32,), weight, bias, 1e-5) @ b
        torch.testing.assert_close(out, expected)

    def test_packed_integers_are_unpacked_along_k(self) -> None:
        packed = torch.tensor([[0x12, 0xF8]], dtype=torch.uint8)
        assert reference.unpack_int4(packed, signed=False).tolist() == [[1, 2, 15, 8]]
        assert reference.unpack_int4(packed, signed=True).tolist() == [[1, 2, -1, -8]]

    @pytest.mark.parametrize("divided", ["n", "k"])
    def test_groups_of_columns_and_along_k(self, divided: str) -> None:
        problem = contiguous("grouped", 16, 32, 64, layouts="rr", batch=4, divided=divided)
        program = reference.program(problem)
        a, b, ends = program.make_inputs("cpu")
        assert ends.tolist() == [
            problem.n // 4 * (g + 1) if divided == "n" else 16 * (g + 1) for g in range(4)
        ]
        verifier = accuracy.Verifier(program, [a, b, ends])
        if divided == "n":
            result = torch.cat([a[g] @ b[:, 8 * g : 8 * g + 8] for g in range(4)], 1)
        else:
            result = torch.stack([a[:, s : s + 16] @ b[s : s + 16] for s in range(0, 64, 16)])
        assert verifier.check(lambda: [result]) is None

    @pytest.mark.parametrize("divided", ["m", "n", "k"])
    def test_groups_have_scales_of_their_own(self, divided: str) -> None:
        problem = contiguous(
            "grouped", 16, 32, 64, "float8_e4m3fn", batch=4, layouts="rc", divided=divided
        )
        program = reference.program(problem)
        a, b, ends, scale_a, scale_b = program.make_inputs("cpu")
        spans = [slice(end - end // (g + 1), end) for g, end in enumerate(ends.tolist())]
        wide_a, wide_b = a.double(), b.double()
        if divided == "m":
            wide_a, wide_b = wide_a * scale_a[:, None], wide_b * scale_b[:, None]
            expected = torch.cat([wide_a[span] @ wide_b[g] for g, span in enumerate(spans)])
        elif divided == "n":
            wide_a, wide_b = wide_a * scale_a[:, :, None], wide_b * scale_b
            expected = torch.cat([wide_a[g] @ wide_b[:, span] for g, span in enumerate(spans)], 1)
        else:
            sums = torch.stack([wide_a[:, span] @ wide_b[span] for span in spans])
            expected = sums * scale_a.view(4, 16, 1) * scale_b.view(4, 1, 32)
        rows = torch.tensor([1, 6, 15])
        (some,) = program.reference([a, b, ends, scale_a, scale_b], rows)
        torch.testing.assert_close(some, expected.index_select(-2, rows))
