"""Random GEMM problems, configurations and devices for hypothesis, and how many of them to draw."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from inductor_ext.autotune.reference import ACTIVATIONS
from inductor_ext.templates.device import KNOWN, Device
from inductor_ext.templates.fused_ops import Dequant, Epilogue, NormKind, Prologue, RowNorm
from inductor_ext.templates.problem import GemmProblem, KernelDetails
from inductor_ext.templates.tensors import EpilogueInput, Operand
from inductor_ext.templates.triton.config import GemmConfig
from inductor_ext.templates.triton.templates import TEMPLATES

__all__ = ["configs", "device", "devices", "examples", "problems"]

_DTYPES = {
    "mm": ("bfloat16", "float16", "float32"),
    "addmm": ("bfloat16", "float16", "float32"),
    "bmm": ("bfloat16", "float32"),
    "baddbmm": ("float16",),
    "int_mm": ("int8",),
    "mixed": ("bfloat16", "float16"),
    "scaled": ("float8_e4m3fn", "float8_e5m2"),
    "grouped": ("bfloat16", "float8_e4m3fn"),
}


def examples(count: int) -> settings:
    """The same `count` examples in each run."""
    return settings(
        max_examples=count,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def device(name: str) -> Device:
    """A device with a cost model."""
    (bug,) = (entry for entry in KNOWN if entry.name == name)
    return bug


def devices() -> st.SearchStrategy[Device]:
    return st.sampled_from(KNOWN)


def sizes(most: int) -> st.SearchStrategy[int]:
    """Sizes of all magnitudes, many of them round."""
    powers = st.integers(0, most.bit_length() - 1).map(lambda exponent: 1 << exponent)
    return st.one_of(powers, st.integers(1, most), st.integers(1, 100))


@st.composite
def operands(
    draw: st.DrawFn, dtype: str, rows: int, columns: int, batch: int, plain: bool
) -> Operand:
    """A matrix or a batch of them, in any layout; `plain` for contiguous ones."""
    pad = 0 if plain else draw(st.sampled_from((0, 0, 1, 8)))
    strides = draw(st.sampled_from(((columns + pad, 1), (1, rows + pad))))
    if not plain and draw(st.integers(0, 9)) == 0:
        strides = (strides[0] * 2, strides[1] * 2)
    return Operand.of(
        dtype,
        (rows, columns),
        strides,
        batch=batch,
        batch_stride=draw(st.sampled_from((0, max(rows, columns) * max(strides)))),
        offset=0 if plain else draw(st.sampled_from((0, 0, 8, 3))),
    )


@st.composite
def problems(
    draw: st.DrawFn, *, most: int = 20_000, plain: bool = False, operations: Any = None
) -> GemmProblem:
    """Problems of all operations, layouts and fusions; `plain`: contiguous, with nothing fused."""
    operation = draw(st.sampled_from(operations or tuple(_DTYPES)))
    dtype = draw(st.sampled_from(_DTYPES[operation]))
    m, n, k = (draw(sizes(most)) for _ in "mnk")
    batch = draw(st.integers(1, 40)) if operation in ("bmm", "baddbmm", "grouped") else 1
    b_dtype, prologue = dtype, None
    if operation == "mixed":
        b_dtype = draw(st.sampled_from(("int8", "uint8", "int4", "uint4")))
        # Two of 4 bits share a byte.
        k += k % 2 if b_dtype.endswith("int4") else 0
        group = draw(st.sampled_from((0, 32, 128)))
        scales = "group" if group else "column"
        vectors = 0 if plain else draw(st.integers(0, 2))
        norm = RowNorm("rms", vectors // 2) if vectors > 1 else None
        prologue = Prologue(norm, Dequant(scales, group))
    elif not plain and draw(st.integers(0, 4)) == 0:
        kind: NormKind = draw(st.sampled_from(("rms", "layer")))
        most = 2 if kind == "layer" else 1
        prologue = Prologue(RowNorm(kind, draw(st.integers(0, most))))
    parts: tuple[int, ...] = ()
    gated = False
    if not plain and n % 2 == 0 and draw(st.integers(0, 4)) == 0:
        parts, gated = (n // 2, n // 2), draw(st.booleans())
    inputs = st.builds(
        EpilogueInput,
        st.sampled_from(("float32", "bfloat16")),
        st.sampled_from(("matrix", "row", "column", "scalar")),
    )
    epilogue = Epilogue(gated=gated)
    if not plain:
        epilogue = Epilogue(
            tuple(draw(st.lists(inputs, max_size=2))),
            draw(st.integers(0, 20)),
            draw(st.sampled_from((None, "bfloat16", "float8_e4m3fn"))),
            draw(st.integers(0, 1)),
            gated,
        )
    details = KernelDetails()
    if gated:
        details = KernelDetails(
            draw(st.sampled_from(sorted(ACTIVATIONS))),
            draw(st.sampled_from((None, "gate", "up"))),
        )
    a_batch = 1 if operation == "grouped" else batch
    return GemmProblem(
        operation,
        m,
        n,
        k,
        draw(operands(dtype, m, k, a_batch, plain)),
        draw(operands(b_dtype, k, n, batch, plain)),
        "int32" if operation == "int_mm" else "bfloat16" if operation == "scaled" else dtype,
        batch,
        "int32" if operation == "int_mm" else "float32",
        epilogue,
        prologue,
        parts,
        draw(st.booleans()),
        draw(st.booleans()),
        details=details,
    )


def configs() -> st.SearchStrategy[GemmConfig]:
    """Configurations of all templates, most of them illegal."""
    powers = st.sampled_from((8, 16, 32, 64, 128, 256, 512))
    return st.builds(
        GemmConfig,
        st.sampled_from(tuple(TEMPLATES)),
        powers,
        powers,
        powers,
        st.integers(1, 8),
        st.sampled_from((1, 2, 3, 4, 8, 16)),
        st.integers(1, 16),
        st.integers(1, 8),
        *(st.booleans() for _ in range(6)),
    )
