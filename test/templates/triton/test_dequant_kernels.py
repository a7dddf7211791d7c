"""Matmuls with a quantized operand: interpreted and compiled kernels, and their bit operations."""

from __future__ import annotations

import dataclasses
import re
import struct
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from inductor_ext import _compat
from inductor_ext.templates.fused_ops import Dequant, Epilogue, Prologue, RowNorm
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.triton.config import GemmConfig
from inductor_ext.templates.triton.constraints import legal
from inductor_ext.templates.triton.ranking import rank
from inductor_ext.templates.triton.search_space import candidates
from test.support import kernel_cases, kernel_compiler, kernel_interpreter
from test.support.gemm_strategies import device
from test.support.kernel_cases import Case

pytest.importorskip("triton")


def case(
    b_dtype: str,
    prologue: Prologue,
    config: GemmConfig,
    sizes: tuple[int, int, int] = (19, 50, 192),
    dtype: str = "float16",
    parts: tuple[int, ...] = (),
    gated: bool = False,
    **options: Any,
) -> Case:
    """A matmul, with `parts` if given; with a gate, `sizes` has the N of one of the two parts."""
    m, n, k = sizes
    if gated:
        parts, options = (n, n), {"ACTIVATION": "'silu'", **options}
    if prologue.norm:
        options = {"EPSILON": 1e-3, **options}
    problem = GemmProblem.contiguous(
        "mixed",
        m,
        sum(parts) or n,
        k,
        dtype,
        b_dtype=b_dtype,
        prologue=prologue,
        parts=parts,
        epilogue=Epilogue(gated=gated),
    )
    return Case(problem, config, options)


def grouped(group: int, dtype: str = "float16", **rest: Any) -> Prologue:
    return Prologue(dequant=Dequant("group", group, scale_dtype=dtype, **rest))


def normalized(prologue: Prologue) -> Prologue:
    """The same with normalized and weighted rows of a."""
    return dataclasses.replace(prologue, norm=RowNorm("rms", 1))


COLUMN = Prologue(dequant=Dequant("column", scale_dtype="float16"))
TENSOR = Prologue(dequant=Dequant("tensor", scale_dtype="float16"))
NONE = Prologue(dequant=Dequant())
SMALL = GemmConfig("mixed", 16, 32, 64, 2, 2)
GEMV = GemmConfig("gemv", 4, 8, 64, 1, 2)
DIRECT = GemmConfig("direct", 8, 16, 256, 1, 2)
STATIONARY = GemmConfig("stationary", 8, 48, 256, 1, 2, split_k=2, fused_split_k=True)
PARTS = (50, 32, 24)

INTERPRETED = {
    "int8": case("int8", COLUMN, SMALL),
    "int8 exchanged": case("int8", NONE, dataclasses.replace(SMALL, swap_ab=True)),
    "bytes with a zero": case("uint8", grouped(32), SMALL, ZERO=8),
    "pairs of large groups": case("uint4", grouped(96), dataclasses.replace(SMALL, block_k=32)),
    "pairs of small groups": case("uint4", grouped(16), SMALL, ZERO=8, HIGH_FIRST=True),
    "zero points": case("uint4", grouped(32, zero_points=True), SMALL),
    "words": case(
        "uint4",
        grouped(64, zero_points=True),
        dataclasses.replace(SMALL, split_k=2),
        (19, 50, 512),
        SCALE_WORDS=2,
        ZERO_WORDS=4,
    ),
    "a tail of K": case("uint4", grouped(32), SMALL, (3, 40, 96), ZERO=8),
    "in float32": case("int4", grouped(32, dtype="float32"), SMALL, WIDE=True),
    "parts": case("int8", COLUMN, SMALL, parts=PARTS),
    "parts, normalised and exchanged": case(
        "int8",
        normalized(COLUMN),
        dataclasses.replace(SMALL, block_n=64, swap_ab=True),
        parts=PARTS,
    ),
    "parts with a scale each": case("int8", TENSOR, SMALL, parts=PARTS),
    "parts of pairs, split": case(
        "uint4",
        grouped(32, zero_points=True),
        dataclasses.replace(SMALL, split_k=2),
        (19, 0, 256),
        parts=PARTS,
    ),
    "gated, normalised, a tail of K": case(
        "int8", normalized(COLUMN), SMALL, (19, 50, 200), gated=True
    ),
    "gated and exchanged": case(
        "int8", COLUMN, dataclasses.replace(SMALL, block_n=64, swap_ab=True), gated=True
    ),
    "gated pairs with zero points": case("uint4", grouped(32, zero_points=True), SMALL, gated=True),
    "gated pairs in words, normalised": case(
        "uint4", normalized(grouped(64)), SMALL, (19, 50, 256), gated=True, ZERO=8, SCALE_WORDS=2
    ),
    "pairs, normalised, a tail of K": case(
        "uint4", normalized(grouped(32)), SMALL, (5, 50, 96), ZERO=8, HIGH_FIRST=True
    ),
    "gemv, parts": case("int8", COLUMN, GEMV, (3, 0, 192), parts=PARTS),
    "gemv, gated and normalised": case("int8", normalized(COLUMN), GEMV, (3, 50, 192), gated=True),
    "gemv, gated with a scale each": case("int8", TENSOR, GEMV, (3, 50, 192), gated=True),
    "direct": case("int8", COLUMN, DIRECT, (3, 50, 512)),
    "direct, all rows": case("int8", NONE, dataclasses.replace(DIRECT, block_n=32), (8, 96, 256)),
    "direct, a zero, split": case(
        "uint8", TENSOR, dataclasses.replace(DIRECT, block_k=128, split_k=2), (1, 40, 512), ZERO=3
    ),
    "direct, bytes in groups": case("int8", grouped(128), DIRECT, (5, 50, 512)),
    "direct, split in one launch, relu": dataclasses.replace(
        case(
            "int8",
            COLUMN,
            dataclasses.replace(DIRECT, block_k=128, split_k=4, fused_split_k=True),
            (3, 50, 512),
        ),
        after=torch.relu,
    ),
    "direct, pairs": case("uint4", grouped(128), DIRECT, (5, 80, 512), ZERO=8),
    "direct, pairs of large groups, upper half first": case(
        "int4",
        grouped(256),
        dataclasses.replace(DIRECT, block_k=512),
        (7, 50, 1024),
        HIGH_FIRST=True,
    ),
    "direct, pairs without scales": case("int4", NONE, DIRECT, (2, 32, 256)),
    "direct, in float32": case("int4", grouped(128, dtype="float32"), DIRECT, (3, 50, 256)),
    "direct, parts": case("int8", COLUMN, DIRECT, (3, 0, 256), parts=PARTS),
    "direct, parts of pairs, split": case(
        "uint4", grouped(128), dataclasses.replace(DIRECT, split_k=2), (3, 0, 512), parts=PARTS
    ),
    "direct, gated": case(
        "int8", COLUMN, dataclasses.replace(DIRECT, block_n=32), (3, 50, 256), gated=True
    ),
    "direct, gated pairs": case(
        "uint4",
        grouped(128),
        dataclasses.replace(DIRECT, block_n=64, num_warps=4, block_k=512),
        (8, 50, 512),
        gated=True,
        ZERO=8,
    ),
    "stationary": case("int8", COLUMN, STATIONARY, (3, 96, 512)),
    "stationary, 16 rows, a tail of N, relu": dataclasses.replace(
        case(
            "int8", COLUMN, dataclasses.replace(STATIONARY, block_m=16, num_warps=4), (13, 70, 512)
        ),
        after=torch.relu,
    ),
    "stationary, a zero, three parts of K": case(
        "uint8",
        TENSOR,
        dataclasses.replace(STATIONARY, block_n=16, block_k=128, split_k=3),
        (1, 40, 384),
        ZERO=3,
    ),
    "stationary, bytes in groups": case("int8", grouped(128), STATIONARY, (5, 50, 512)),
    "stationary, pairs": case(
        "uint4",
        grouped(128),
        dataclasses.replace(STATIONARY, block_m=16, block_k=512),
        (16, 80, 1024),
        ZERO=8,
    ),
    "stationary, pairs of large groups, upper half first": case(
        "int4",
        grouped(256),
        dataclasses.replace(STATIONARY, num_warps=1),
        (7, 50, 512),
        HIGH_FIRST=True,
    ),
    "stationary, pairs without scales": case("int4", NONE, STATIONARY, (2, 40, 512)),
    "stationary, parts": case("int8", COLUMN, STATIONARY, (3, 0, 512), parts=PARTS),
    "stationary, gated": case(
        "int8", COLUMN, dataclasses.replace(STATIONARY, block_n=64), (3, 50, 512), gated=True
    ),
    "stationary, gated pairs": case(
        "uint4",
        grouped(128),
        dataclasses.replace(STATIONARY, block_m=16, block_n=96),
        (13, 70, 512),
        gated=True,
        ZERO=8,
    ),
    "stationary, gated with a scale each": case(
        "int8",
        TENSOR,
        dataclasses.replace(STATIONARY, block_n=32, block_k=128),
        (3, 50, 256),
        gated=True,
    ),
    "stationary, parts of pairs": case("uint4", grouped(128), STATIONARY, (3, 0, 512), parts=PARTS),
}


@pytest.fixture(scope="module")
def results() -> dict[str, torch.Tensor]:
    plain = {
        name: dataclasses.replace(item, options={**item.options, "BITS": False})
        for name, item in INTERPRETED.items()
    }
    return kernel_interpreter.interpret(plain)


class TestNumerics:
    @pytest.mark.parametrize("name", INTERPRETED)
    def test_as_in_float64(self, name: str, results: dict[str, torch.Tensor]) -> None:
        each = INTERPRETED[name]
        assert legal(kernel_cases.as_bfloat16(each.problem), each.config, device("NVIDIA H200"))
        expected = kernel_cases.reference(each, kernel_cases.inputs(each))
        unit = expected.abs().max()
        assert (results[name].double() - expected).abs().max() < 2e-3 * unit


class Machine:
    """Runs the few PTX instructions that conversions are made of, on one thread's registers."""

    def __init__(self, text: str, inputs: dict[str, int]) -> None:
        self.registers = dict(inputs)
        # Braces delimit blocks, and pairs that form a word.
        for line in re.sub(r"\{ (\$\d), (\$\d) \}", r"\1|\2", text).split(";"):
            operation, _, operands = line.strip("{} ").partition(" ")
            if operation and operation != ".reg":
                self.run(operation, [part.strip() for part in operands.split(",")])

    def run(self, operation: str, operands: list[str]) -> None:
        target, *rest = operands
        values = [int(item, 0) if item[0].isdigit() else self.registers[item] for item in rest]
        name, *kind = operation.split(".")
        result = getattr(self, name)(kind, *values)
        if "|" in target:
            low, high = target.split("|")
            self.registers |= {low: result & 0xFFFF, high: result >> 16}
        else:
            self.registers[target] = result

    def mov(self, kind: list[str], x: int) -> int:
        return x

    def xor(self, kind: list[str], x: int, y: int) -> int:
        return x ^ y

    def shr(self, kind: list[str], x: int, by: int) -> int:
        return x >> by

    def prmt(self, kind: list[str], x: int, y: int, selector: int) -> int:
        both = struct.pack("<II", x, y)
        chosen = bytes(both[selector >> 4 * i & 7] for i in range(4))
        return int.from_bytes(chosen, "little")

    def fma(self, kind: list[str], x: int, y: int, z: int) -> int:
        values = [
            a * b + c for a, b, c in zip(*(halves(item, "bf16") for item in (x, y, z)), strict=True)
        ]
        return joined([max(item, 0.0) for item in values] if "relu" in kind else values, "bf16")

    def add(self, kind: list[str], x: int, y: int) -> int:
        return joined(
            [a + b for a, b in zip(halves(x, "f16"), halves(y, "f16"), strict=True)], "f16"
        )


setattr(Machine, "and", lambda self, kind, x, y: x & y)


def halves(word: int, kind: str) -> list[float]:
    """The two floats of a word, the lower one first."""
    if kind == "f16":
        return list(struct.unpack("<ee", word.to_bytes(4, "little")))
    parts = (word << 16 & 0xFFFFFFFF, word & 0xFFFF0000)
    return [struct.unpack("<f", part.to_bytes(4, "little"))[0] for part in parts]


def joined(values: list[float], kind: str) -> int:
    """A word of two floats, which must be exact."""
    if kind == "f16":
        word = struct.pack("<ee", *values)
    else:
        low, high = (struct.pack("<f", value) for value in values)
        assert low[:2] == high[:2] == b"\0\0", values
        word = low[2:] + high[2:]
    assert halves(int.from_bytes(word, "little"), kind) == values
    return int.from_bytes(word, "little")


def assembly(item: Case) -> str:
    """The inline assembly of a kernel, which may occur several times."""
    (source,) = kernel_cases.render(item).kernels().values()
    (result,) = set(re.findall(r"inline_asm_elementwise\(((?:\s*\"[^\"]*\")+),", source))
    return "".join(re.findall(r"\"(.*)\"", result))


def words() -> Iterator[int]:
    """All bytes, four to a word."""
    for first in range(0, 256, 4):
        yield int.from_bytes(bytes(range(first, first + 4)), "little")


class TestBits:
    """Every byte is converted exactly."""

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    @pytest.mark.parametrize("b_dtype", ["int8", "uint8"])
    def test_bytes(self, b_dtype: str, dtype: str) -> None:
        text = assembly(case(b_dtype, NONE, SMALL, dtype=dtype))
        kind = {"bfloat16": "bf16", "float16": "f16"}[dtype]
        for word in words():
            registers = Machine(text, {"$2": word}).registers
            result = halves(registers["$0"], kind) + halves(registers["$1"], kind)
            assert result == list(
                struct.unpack("4b" if b_dtype == "int8" else "4B", word.to_bytes(4, "little"))
            )

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    @pytest.mark.parametrize(("b_dtype", "zero"), [("int4", 0), ("uint4", 0), ("uint4", 8)])
    def test_pairs(self, b_dtype: str, zero: int, dtype: str) -> None:
        text = assembly(case(b_dtype, NONE, SMALL, dtype=dtype, ZERO=zero))
        kind = {"bfloat16": "bf16", "float16": "f16"}[dtype]
        for word in words():
            registers = Machine(text, {"$4": word}).registers
            low, high = (
                [number for i in pair for number in halves(registers[f"${i}"], kind)]
                for pair in ((0, 1), (2, 3))
            )
            for byte, *values in zip(word.to_bytes(4, "little"), low, high, strict=True):
                expected = [byte & 15, byte >> 4]
                if b_dtype == "int4":
                    expected = [(item ^ 8) - 8 for item in expected]
                assert values == [item - zero for item in expected]

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    @pytest.mark.parametrize(
        ("b_dtype", "options"),
        [
            ("int8", {}),
            ("uint8", {}),
            ("int4", {}),
            ("uint4", {"ZERO": 8}),
            ("uint4", {"HIGH_FIRST": True}),
        ],
    )
    def test_words(self, b_dtype: str, options: dict[str, Any], dtype: str) -> None:
        text = assembly(case(b_dtype, NONE, DIRECT, (1, 32, 256), dtype=dtype, **options))
        kind = {"bfloat16": "bf16", "float16": "f16"}[dtype]
        packed = b_dtype.endswith("4")
        for word in words():
            registers = Machine(text, {"$8" if packed else "$4": word}).registers
            values = [halves(registers[f"${i}"], kind)[0] for i in range(8 if packed else 4)]
            inputs = word.to_bytes(4, "little")
            if not packed:
                assert values == list(struct.unpack("4b" if b_dtype == "int8" else "4B", inputs))
                continue
            # The lower halves of all bytes come first, for either order along K.
            numbers = [item & 15 for item in inputs] + [item >> 4 for item in inputs]
            if b_dtype == "int4":
                numbers = [(number ^ 8) - 8 for number in numbers]
            assert values == [number - options.get("ZERO", 0) for number in numbers]


STREAM = GemmConfig("mixed", 16, 64, 128, 4, 2)
STREAMED = GemmConfig("stationary", 8, 112, 2048, 1, 8, split_k=2, fused_split_k=True)


def loop_of(result: kernel_compiler.Compiled) -> str:
    """The PTX of the loop along K."""
    start = re.search(r"^\$L__BB0_\d+:.*?mma\.sync.*?bra", result.ptx, re.MULTILINE | re.DOTALL)
    assert start is not None
    return start[0]


class TestDirect:
    @pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
    @pytest.mark.parametrize(
        "item",
        [
            case(
                "int8",
                Prologue(dequant=Dequant("column")),
                GemmConfig("direct", 8, 16, 512, 1, 4),
                (1, 4096, 4096),
                "bfloat16",
            ),
            case(
                "uint4",
                grouped(128, "bfloat16"),
                GemmConfig("direct", 8, 32, 1024, 1, 4),
                (8, 4096, 4096),
                "bfloat16",
                ZERO=8,
            ),
            case(
                "int8",
                NONE,
                GemmConfig("direct", 8, 32, 512, 1, 4),
                (8, 4096, 4096),
                "float16",
                gated=True,
            ),
            case(
                "uint4",
                grouped(128, "bfloat16"),
                GemmConfig("direct", 8, 16, 1024, 1, 4),
                (1, 0, 4096),
                "bfloat16",
                parts=(4096, 1024, 1024),
            ),
        ],
        ids=["bytes", "pairs", "gated", "parts"],
    )
    def test_no_element_changes_its_thread(self, item: Case, capability: tuple[int, int]) -> None:
        result = kernel_compiler.compiled(item, capability)
        assert result.spills == 0
        # Only the final reduction uses shared memory.
        assert result.shared == item.config.shared_memory(item.problem)
        loop = loop_of(result)
        assert "shared" not in loop
        assert "bar.sync" not in loop
        assert "cvt.rn.bf16" not in loop
        if _compat.triton_version() == (3, 8) and "shfl" in loop:
            pytest.skip("Triton 3.8 exchanges converted elements between lanes by shuffles")
        # Lanes along K have one scale, of which two shuffles make sure for each column of a lane.
        gates = 2 if item.problem.epilogue.gated else 1
        columns = item.config.block_n // gates // 8
        groups = item.problem.dequant is not None and item.problem.dequant.scales == "group"
        chunks = item.config.chunks(item.problem)
        assert loop.count("shfl") <= 2 * columns * chunks * groups
        loads = re.findall(r"ld\.global\S*\.v4\.b32", loop)
        assert len(loads) == chunks * (gates * columns + (4 if groups else 2))

    def test_few_rows_of_integers_rank_direct_first(self) -> None:
        for b_dtype, scales, group in (("int8", "column", 0), ("uint4", "group", 128)):
            problem = GemmProblem.contiguous(
                "mixed",
                1,
                14336,
                4096,
                b_dtype=b_dtype,
                prologue=Prologue(dequant=Dequant(scales, group)),  # type: ignore[arg-type]
            )
            ranked = rank(problem, device("NVIDIA H200"))
            assert ranked[0][0].template == "direct"
            assert {config.template for config, _ in ranked} > {"direct"}


class TestStationary:
    @pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
    @pytest.mark.parametrize(
        "item",
        [
            case(
                "int8",
                Prologue(dequant=Dequant("column")),
                STREAMED,
                (1, 14336, 4096),
                "bfloat16",
            ),
            case(
                "uint4",
                grouped(128, "bfloat16"),
                dataclasses.replace(STREAMED, num_warps=4, block_k=1024, split_k=4),
                (8, 0, 4096),
                "bfloat16",
                parts=(4096, 1024, 1024),
                ZERO=8,
            ),
            case(
                "int8",
                NONE,
                dataclasses.replace(STREAMED, block_m=16, num_warps=4, block_k=1024, split_k=4),
                (16, 14336, 4096),
                "float16",
            ),
            case(
                "int8",
                Prologue(dequant=Dequant("column")),
                dataclasses.replace(STREAMED, block_n=224),
                (1, 14336, 4096),
                "bfloat16",
                gated=True,
            ),
        ],
        ids=["bytes", "pairs", "16 rows", "gated"],
    )
    def test_rows_stay_in_registers(self, item: Case, capability: tuple[int, int]) -> None:
        result = kernel_compiler.compiled(item, capability)
        assert result.spills == 0
        # For 8 rows an SM has two CTAs of 8 warps, or four of 4.
        assert result.registers <= 128 or item.config.block_m > 8
        # Only the partial sums of the warps use shared memory.
        assert result.shared == item.config.shared_memory(item.problem)
        loop = loop_of(result)
        assert "cvt.rn.bf16" not in loop
        # Two columns of b per lane, and nothing of a.
        chunks = item.config.chunks(item.problem)
        assert len(re.findall(r"ld\.global\S*\.v4\.b32", loop)) == 2 * chunks

    @pytest.mark.parametrize("m", [1, 16])
    def test_a_long_k_of_few_rows_has_stationary_candidates(self, m: int) -> None:
        for b_dtype, scales, group in (("int8", "column", 0), ("uint4", "group", 128)):
            problem = GemmProblem.contiguous(
                "mixed",
                m,
                4096,
                14336,
                b_dtype=b_dtype,
                prologue=Prologue(dequant=Dequant(scales, group)),  # type: ignore[arg-type]
            )
            tried = [config for config, _ in rank(problem, device("NVIDIA H200"))]
            values = [item for item in tried if item.template == "stationary"]
            assert values
            assert len(values) < len(tried)
            # About as many CTAs as the SMs hold at once.
            assert all(item.units(problem) >= 240 for item in values)

    def test_many_columns_have_more_ctas_than_the_sms_hold(self) -> None:
        problem = GemmProblem.contiguous(
            "mixed", 16, 128_256, 4096, b_dtype="int8", prologue=Prologue(dequant=Dequant("column"))
        )
        tried = candidates(problem, device("NVIDIA H200"))
        values = [item for item in tried if item.template == "stationary"]
        assert {(item.threads, item.block_n) for item in values} == {(128, 256), (256, 512)}


class TestCompiled:
    @pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
    @pytest.mark.parametrize(
        ("b_dtype", "prologue", "options"),
        [
            ("int8", NONE, {}),
            ("uint4", grouped(128, "bfloat16"), {"ZERO": 8, "SCALE_WORDS": 2}),
        ],
        ids=["bytes", "pairs"],
    )
    def test_loads_go_straight_to_the_tensor_cores(
        self, b_dtype: str, prologue: Prologue, options: Any, capability: tuple[int, int]
    ) -> None:
        each = case(b_dtype, prologue, STREAM, (16, 4096, 4096), "bfloat16", **options)
        self.check(each, capability)

    @pytest.mark.parametrize(
        ("b_dtype", "prologue", "options"),
        [
            ("int8", Prologue(dequant=Dequant("column")), {}),
            ("uint4", grouped(128, "bfloat16"), {"ZERO": 8, "SCALE_WORDS": 2}),
        ],
        ids=["bytes", "pairs"],
    )
    def test_gates_of_two_weights(self, b_dtype: str, prologue: Prologue, options: Any) -> None:
        each = case(b_dtype, prologue, STREAM, (16, 4096, 4096), "bfloat16", gated=True, **options)
        self.check(each, (9, 0))

    def check(self, item: Case, capability: tuple[int, int]) -> None:
        result = kernel_compiler.compiled(item, capability)
        assert result.spills <= 16
        assert result.shared <= STREAM.shared_memory(item.problem)
        loop = loop_of(result)
        assert "cvt.rn" not in loop
        # All of it comes by asynchronous copies, and none of b goes through shared memory again.
        assert "ld.global" not in loop
        if _compat.triton_version() == (3, 8) and item.problem.epilogue.gated:
            pytest.skip("Triton 3.8 moves the operands of a gate through shared memory")
        assert loop.count("st.shared") == 0
