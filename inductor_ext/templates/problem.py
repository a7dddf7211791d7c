"""GEMM problems: the properties of a matmul on which the choice of a kernel depends.

A problem holds sizes, dtypes, layouts and alignment, the fused prologue and epilogue, and the
numerical requirements of the user. FLOP, the minimum bytes to move and the roofline are derived
from these.

Problems are frozen, hashable and round-trip through JSON, so that they can be cache keys. The
constructor rejects an invalid problem (`exc.BadGemmError`).

Axes are out[M, N] = a[M, K] @ b[K, N].
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from inductor_ext import exc
from inductor_ext.storage import json_codec
from inductor_ext.storage.json_codec import OPTIONAL, UNSTORED
from inductor_ext.templates.device import Device

__all__ = [
    "DTYPE_BITS",
    "Epilogue",
    "EpilogueInput",
    "GemmProblem",
    "Operand",
    "Operation",
    "Prologue",
]

DTYPE_BITS: Mapping[str, int] = types.MappingProxyType(
    {
        "float64": 64,
        "int64": 64,
        "float32": 32,
        "int32": 32,
        "float16": 16,
        "bfloat16": 16,
        "int16": 16,
        "float8_e4m3fn": 8,
        "float8_e5m2": 8,
        "int8": 8,
        "uint8": 8,
        "bool": 8,
        "int4": 4,
        "uint4": 4,
    }
)
"""Bits per element. 4-bit dtypes are packed two to a byte; they count as one element per value."""

FP8 = frozenset({"float8_e4m3fn", "float8_e5m2"})
HALF = frozenset({"float16", "bfloat16"})
INT4 = frozenset({"int4", "uint4"})
QUANTIZED = FP8 | {"int8"}
"""Dtypes to which an epilogue quantizes rows by their row amax."""

Operation = Literal["mm", "addmm", "bmm", "baddbmm", "int_mm", "mixed", "scaled", "grouped"]
"""`mixed`: b is dequantized to a's dtype. `scaled`: fp8 with scales, which are epilogue inputs.
`grouped`: grouped GEMM; the groups divide one dimension (`GemmProblem.divided`)."""

BATCHED = frozenset({"bmm", "baddbmm"})

VECTOR_BYTES = 16
"""The widest load of a thread, and the alignment that a TMA descriptor requires, in bytes."""

INT32_MAX = 2**31 - 1


_R = TypeVar("_R")


def read(hint: type[_R], value: object, where: str) -> _R:
    """Return a JSON value as the type `hint`, as `json_codec.encode` wrote it.

    Raises:
        exc.BadGemmError: a key is missing or unknown, or a value has the wrong type.
    """
    try:
        return typing.cast(_R, json_codec.decode(hint, value, where))
    except json_codec.MismatchError as error:
        raise exc.BadGemmError(
            record="JSON", field=error.where, value=error.value, allowed=error.expected
        ) from None


def require(ok: bool, record: str, field: str, value: object, allowed: str) -> None:
    if not ok:
        raise exc.BadGemmError(record=record, field=field, value=value, allowed=allowed)


def _require_dtype(dtype: str, record: str, field: str) -> None:
    require(dtype in DTYPE_BITS, record, field, dtype, f"one of {', '.join(DTYPE_BITS)}")


def size_of(count: int, dtype: str) -> int:
    """Return the bytes of `count` elements."""
    return (count * DTYPE_BITS[dtype] + 7) // 8


def ceiling(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def is_power_of_two(value: int) -> bool:
    return value > 0 and not value & (value - 1)


def next_power_of_two(value: int) -> int:
    """Return the smallest power of two >= `value`; `value` must be 1 or more."""
    return 1 << (value - 1).bit_length()


@dataclass(frozen=True)
class Operand:
    """One of the two operands: dtype, strides and alignment.

    `Operand.of` creates one from a tensor's sizes and strides. It replaces the strides of
    dimensions of size 1, which are never used, by fixed values, so that they do not affect cache
    keys.

    Raises:
        exc.BadGemmError: an unknown dtype, a negative stride, or an alignment that is not a power
            of two or exceeds 16 bytes.
    """

    dtype: str
    strides: tuple[int, int]
    """Row and column stride, in elements."""
    alignment: int
    """In elements: the largest power of two, of at most 16 bytes, that divides the address and
    every stride other than that of the contiguous dimension."""
    batch_stride: int = 0
    """Batch stride, in elements; 0 if the whole batch shares one matrix."""

    def __post_init__(self) -> None:
        _require_dtype(self.dtype, "operand", "dtype")
        require(
            len(self.strides) == 2 and min(*self.strides, self.batch_stride) >= 0,
            "operand",
            "strides",
            (*self.strides, self.batch_stride),
            "two strides of rows and columns and one of matrices, each 0 or more",
        )
        require(
            is_power_of_two(self.alignment) and self.alignment <= _vector(self.dtype),
            "operand",
            "alignment",
            self.alignment,
            f"a power of two of at most {_vector(self.dtype)} elements",
        )

    @classmethod
    def of(
        cls,
        dtype: str,
        shape: tuple[int, int],
        strides: tuple[int, int],
        *,
        batch: int = 1,
        batch_stride: int = 0,
        offset: int = 0,
        base: int = VECTOR_BYTES,
    ) -> Operand:
        """Return the operand for a tensor.

        Args:
            dtype: element dtype; strides and offset of packed dtypes are in unpacked elements.
            shape: rows and columns.
            strides: row and column stride, in elements.
            batch: batch size.
            batch_stride: in elements.
            offset: storage offset, in elements.
            base: alignment of the storage's address in bytes, a power of two.
        """
        _require_dtype(dtype, "operand", "dtype")
        vector = _vector(dtype)
        rows, columns = shape
        row, column = strides
        if columns == 1 and (row == 1 or rows == 1):
            row, column = (1, ceiling(rows, vector) * vector) if rows > 1 else (vector, 1)
        elif columns == 1:
            column = 1
        elif rows == 1:
            row = ceiling(columns, vector) * vector if column == 1 else 1
        if batch == 1:
            batch_stride = 0
        if column == 1:
            used = [row]
        elif row == 1:
            used = [column]
        else:
            used = [row, column]
        alignment = 1
        if len(used) == 1:
            alignment = aligned(dtype, offset, batch_stride, *used, base=base)
        return cls(dtype, (row, column), alignment, batch_stride)

    @property
    def layout(self) -> Literal["row", "column", "strided"]:
        """`row`: the elements of a row are contiguous; `column`: those of a column; `strided`:
        neither.
        """
        if self.strides[1] == 1:
            return "row"
        return "column" if self.strides[0] == 1 else "strided"

    @property
    def leading(self) -> int:
        """Leading dimension in elements: the row stride in layout `row`, the column stride in
        `column`.
        """
        return self.strides[1] if self.layout == "column" else self.strides[0]

    @property
    def vector_bytes(self) -> float:
        """Alignment in bytes, which limits the width of vectorized loads."""
        return self.alignment * DTYPE_BITS[self.dtype] / 8

    def realigned(self, rows: int, columns: int, batch: int) -> Operand:
        """Return the layout of a copy padded so that every row (or column, depending on the layout)
        is 16-byte aligned; self if already aligned.

        Args:
            rows: rows of a matrix.
            columns: columns of a matrix.
            batch: batch size.
        """
        vector = _vector(self.dtype)
        if self.alignment == vector:
            return self
        by_column = self.layout == "column"
        inner, outer = (rows, columns) if by_column else (columns, rows)
        leading = ceiling(inner, vector) * vector
        strides = (1, leading) if by_column else (leading, 1)
        distance = leading * outer if self.batch_stride else 0
        return Operand.of(self.dtype, (rows, columns), strides, batch=batch, batch_stride=distance)

    def span(self, rows: int, columns: int, batch: int) -> int:
        """Return the number of elements from the first to the last of `batch` matrices,
        inclusive.
        """
        row, column = self.strides
        return (batch - 1) * self.batch_stride + (rows - 1) * row + (columns - 1) * column + 1


def aligned(dtype: str, *counts: int, base: int = VECTOR_BYTES) -> int:
    """Return the alignment in elements that strides, offsets and the base address guarantee.

    It is the largest power of two, of at most 16 bytes, that divides all of `counts` and an address
    with an alignment of `base` bytes (a power of two).

    Raises:
        exc.BadGemmError: an unknown dtype.
    """
    _require_dtype(dtype, "operand", "dtype")
    return math.gcd(_vector(dtype), max(1, base * 8 // DTYPE_BITS[dtype]), *counts)


def _vector(dtype: str) -> int:
    return VECTOR_BYTES * 8 // DTYPE_BITS[dtype]


@dataclass(frozen=True)
class EpilogueInput:
    """A tensor that the epilogue reads.

    Raises:
        exc.BadGemmError: an unknown dtype.
    """

    dtype: str
    broadcast: Literal["matrix", "row", "column", "scalar"]
    """Shape: `matrix`: [M, N]; `row`: [N], broadcast over rows; `column`: [M, 1]; `scalar`."""

    def __post_init__(self) -> None:
        _require_dtype(self.dtype, "epilogue", "dtype")

    def size(self, m: int, n: int) -> int:
        """Return the bytes read for an m x n output."""
        count = {"matrix": m * n, "row": n, "column": m, "scalar": 1}[self.broadcast]
        return size_of(count, self.dtype)


@dataclass(frozen=True)
class Epilogue:
    """Operations on the accumulators before they are stored.

    Raises:
        exc.BadGemmError: an unknown dtype, a negative count.
    """

    inputs: tuple[EpilogueInput, ...] = ()
    """For example a bias (row), a residual (matrix), row-wise fp8 scales (a column and a row)."""
    pointwise: int = 0
    """Pointwise cost per element, in units of a multiplication; an erf counts as many."""
    out: str | None = None
    """The stored dtype, if it differs from the problem's. With a reduction and an 8-bit dtype, rows
    are quantized to this dtype by their row amax (`GemmProblem.quantized`)."""
    reductions: int = 0
    """Number of reductions over N that are stored in float32, [M] each: the row amax for fp8."""
    gated: bool = False
    """Whether the two fused weights are gate and up projection, combined to one output of N / 2
    columns: act(gate) * up."""
    tree: str | None = dataclasses.field(default=None, metadata={OPTIONAL: True})
    """The epilogue of a CUTLASS kernel, as the text of a `templates.cutlass.epilogue.Epilogue`;
    None excludes CUTLASS kernels for this problem. It may cover only a part of the epilogue; the
    remaining part runs after the kernel."""
    activation: str = dataclasses.field(default="silu", compare=False, metadata={UNSTORED: True})
    """Activation of the gate, one of `templates.triton.kernels.common.ACTIVATIONS`. Kernels are
    tuned with it so that they need not be compiled again. It is not part of the problem's identity,
    since the GEMM takes far longer than the activation."""
    halves: Literal["gate", "up"] | None = dataclasses.field(
        default=None, compare=False, metadata={UNSTORED: True}
    )
    """Which projection comes first if gate and up are packed in one weight (and one bias). Kernels
    are then tuned with the packed weight, and the reference (Inductor's default) is a single
    matmul. It is not part of the problem's identity either."""

    def __post_init__(self) -> None:
        if self.out is not None:
            _require_dtype(self.out, "epilogue", "out")
        for name in ("pointwise", "reductions"):
            value = getattr(self, name)
            require(value >= 0, "epilogue", name, value, "0 or more")


@dataclass(frozen=True)
class Prologue:
    """Operations on an operand between memory and the tensor cores.

    Raises:
        exc.BadGemmError: an unknown dtype, or a group size that does not match `scales`.
    """

    kind: Literal["dequantize", "normalize", "standardize", "both"]
    """`dequantize` b; divide the rows of a by their root mean square over K (`normalize`, RMSNorm);
    give them mean 0 and standard deviation 1 (`standardize`, LayerNorm); or `both`: dequantize b
    and normalize a."""
    scales: Literal["none", "tensor", "column", "group"] = "none"
    """Granularity of the scales of b: no scales, one per tensor, one per column, or one per `group`
    rows of a column."""
    group: int = 0
    """Elements along K that share a scale and a zero point; 0 unless `scales` is `group`."""
    zero_points: bool = False
    scale_dtype: str = "bfloat16"
    """Dtype of the scales, or of the norm's vectors if nothing is dequantized; otherwise those have
    a's dtype."""
    vectors: int = 0
    """Number of [K] vectors that a norm reads: none, a weight, or a weight and a bias. Only
    `standardize` has a bias."""
    epsilon: float = dataclasses.field(default=1e-5, compare=False, metadata={UNSTORED: True})
    """The norm's epsilon, added under the square root. Kernels are tuned with it so that they need
    not be compiled again. It does not affect the time and therefore is not part of the problem's
    identity."""

    def __post_init__(self) -> None:
        _require_dtype(self.scale_dtype, "prologue", "scale_dtype")
        grouped = self.scales == "group"
        allowed = "1 or more" if grouped else "0"
        ok = self.group >= 1 if grouped else self.group == 0
        require(ok, "prologue", "group", self.group, allowed)
        most = {"normalize": 1, "both": 1, "standardize": 2}.get(self.kind, 0)
        allowed = f"0 to {most} where the kind is {self.kind}"
        require(0 <= self.vectors <= most, "prologue", "vectors", self.vectors, allowed)

    @property
    def dequantizes(self) -> bool:
        """Whether b is dequantized."""
        return self.kind in ("dequantize", "both")

    @property
    def scales_product(self) -> bool:
        """Whether scales of b can be applied to the accumulators; group scales along K cannot."""
        return self.scales in ("tensor", "column")

    @property
    def normalizes(self) -> bool:
        """Whether rows of a are divided by their root mean square."""
        return self.kind in ("normalize", "both")

    @property
    def standardizes(self) -> bool:
        """Whether rows of a are given mean 0 and standard deviation 1."""
        return self.kind == "standardize"

    def size(self, n: int, k: int) -> int:
        """Return the bytes read in addition to the operands; a zero point takes one byte."""
        scales = {
            "none": 0,
            "tensor": 1,
            "column": n,
            "group": n * ceiling(k, self.group or 1),
        }[self.scales]
        vectors = size_of(self.vectors * k, "bfloat16" if self.dequantizes else self.scale_dtype)
        return size_of(scales, self.scale_dtype) + scales * self.zero_points + vectors


@dataclass(frozen=True)
class GemmProblem:
    """One GEMM, with its fused prologue and epilogue.

    Raises:
        exc.BadGemmError: a size below 1, a batch in an operation without one, parts that do not add
            up to N, or a prologue or accumulator dtype that does not match the operation.
    """

    operation: Operation
    m: int
    """Rows of one matrix; for a grouped GEMM divided along M, the total of all groups."""
    n: int
    """Columns, the total of all fused weights."""
    k: int
    a: Operand
    b: Operand
    out: str
    """Output dtype of the GEMM, before the epilogue."""
    batch: int = 1
    """Batch size of bmm and baddbmm, number of groups of grouped."""
    accumulator: str = "float32"
    """`float32`, or `int32` for int_mm."""
    epilogue: Epilogue = Epilogue()
    prologue: Prologue | None = None
    parts: tuple[int, ...] = ()
    """Widths of fused weights that share a (Q, K and V; gate and up); empty for a single weight."""
    deterministic: bool = False
    """Whether every run must give bitwise identical results."""
    tf32: bool = False
    """Whether float32 may be rounded to tf32."""
    fast_accumulation: bool = False
    """Whether fp8 may be accumulated in the reduced precision of the tensor cores."""
    divided: Literal["m", "n", "k"] = "m"
    """The dimension that the groups of a grouped GEMM divide; its size is the total of all groups.
    `m`: rows of a, each group with its own b[K, N]; `n`: columns of b, each group with its own a[M,
    K]; `k`: the reduction dimension, each group with its own output [M, N]."""
    math_flags: str | None = dataclasses.field(default=None, metadata={OPTIONAL: True})
    """Flags of `torch.backends.cuda.matmul` for the operands' dtype that are not at their defaults
    (`numerics.matmul_flags`). They change which cuBLAS kernels may run, so timings under other
    flags do not apply."""

    def __post_init__(self) -> None:
        for name in ("m", "n", "k", "batch"):
            require(getattr(self, name) >= 1, "problem", name, getattr(self, name), "1 or more")
        require(
            self.operation in typing.get_args(Operation),
            "problem",
            "operation",
            self.operation,
            ", ".join(typing.get_args(Operation)),
        )
        batched = self.operation in BATCHED or self.operation == "grouped"
        require(batched or self.batch == 1, "problem", "batch", self.batch, "1 in this operation")
        _require_dtype(self.out, "problem", "out")
        accumulator = "int32" if self.operation == "int_mm" else "float32"
        require(
            self.accumulator == accumulator,
            "problem",
            "accumulator",
            self.accumulator,
            accumulator,
        )
        require(
            self.divided == "m" or self.operation == "grouped",
            "problem",
            "divided",
            self.divided,
            "m in this operation",
        )
        kind = self.prologue.kind if self.prologue else None
        require(
            (self.prologue is not None and self.prologue.dequantizes)
            == (self.operation == "mixed"),
            "problem",
            "prologue",
            kind,
            "dequantize or both in the operation mixed, and only there",
        )
        whole = not self.parts or (min(self.parts) >= 1 and sum(self.parts) == self.n)
        require(whole, "problem", "parts", self.parts, f"numbers above 0 with the sum {self.n}")
        if self.epilogue.gated:
            equal = len(self.parts) == 2 and self.parts[0] == self.parts[1]
            require(equal, "problem", "parts", self.parts, "two equal numbers, one gates the other")

    @classmethod
    def contiguous(
        cls,
        operation: Operation,
        m: int,
        n: int,
        k: int,
        dtype: str = "bfloat16",
        *,
        b_dtype: str | None = None,
        out: str | None = None,
        batch: int = 1,
        layouts: str = "rc",
        **rest: Any,
    ) -> GemmProblem:
        """Return a problem with contiguous tensors.

        Args:
            operation: see `Operation`.
            m: M.
            n: N.
            k: K.
            dtype: dtype of a, and of b and the output unless `b_dtype` and `out` are given.
            b_dtype: dtype of b.
            out: output dtype; defaults to int32 for int_mm, bfloat16 for fp8, and else `dtype`.
            batch: batch size or number of groups.
            layouts: layouts of a and b, each `r` (row) or `c` (column); `rc` is that of nn.Linear.
            rest: other fields.
        """
        if out is None:
            out = "int32" if operation == "int_mm" else "bfloat16" if dtype in FP8 else dtype
        if operation == "mixed":
            rest.setdefault("prologue", Prologue("dequantize", "column", scale_dtype=dtype))
        divided = rest.get("divided", "m") if operation == "grouped" else None
        a_batch = batch if operation in BATCHED or divided == "n" else 1
        b_batch = batch if operation in BATCHED or divided == "m" else 1
        return cls(
            operation,
            m,
            n,
            k,
            _contiguous(dtype, m, k, layouts[0], a_batch),
            _contiguous(b_dtype or dtype, k, n, layouts[1], b_batch),
            out,
            batch,
            "int32" if operation == "int_mm" else "float32",
            **rest,
        )

    def to_json(self, whole: bool = False) -> dict[str, Any]:
        """Return a value for `json.dumps`; `from_json` reads it.

        Args:
            whole: see `json_codec.encode`.
        """
        value: dict[str, Any] = json_codec.encode(self, whole)
        return value

    @classmethod
    def from_json(cls, value: object) -> GemmProblem:
        """Return the problem that `to_json` wrote.

        Raises:
            exc.BadGemmError: a key is missing or unknown, a type is wrong, or the problem is
                invalid.
        """
        return read(cls, value, "problem")

    @functools.cached_property
    def allows_split_k(self) -> bool:
        """Whether several CTAs may split the reduction along K."""
        flags = (self.math_flags or "").split(",")
        return not any(flag.startswith("-") and flag.endswith("_split_k") for flag in flags)

    @functools.cached_property
    def key(self) -> str:
        """One-line key, identical for equal problems in every process and unique to them."""
        return json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))

    @functools.cached_property
    def stored(self) -> str:
        """The dtype that the epilogue stores."""
        return self.epilogue.out or self.out

    @functools.cached_property
    def quantized(self) -> bool:
        """Whether rows are quantized to fp8 or int8 by their row amax.

        The row amax is known only when the whole row has been computed, so a second kernel
        quantizes; it reads what the GEMM kernel stored as `out`.
        """
        return self.epilogue.reductions > 0 and self.stored in QUANTIZED

    @functools.cached_property
    def kernel_stores(self) -> str:
        """The dtype that the GEMM kernel itself stores."""
        return self.out if self.quantized else self.stored

    @functools.cached_property
    def columns(self) -> int:
        """Columns of the output: N, or N / 2 for gate and up projection."""
        return self.n // 2 if self.epilogue.gated else self.n

    @functools.cached_property
    def rows(self) -> int:
        """M of a single matmul; if groups divide M, the average of the groups, rounded up."""
        return self._of_group("m")

    @functools.cached_property
    def depth(self) -> int:
        """K of a single matmul; if groups divide K, the average of the groups, rounded up."""
        return self._of_group("k")

    @functools.cached_property
    def width(self) -> int:
        """N of a single matmul; if groups divide N, the average of the groups, rounded up."""
        return self._of_group("n")

    def _of_group(self, name: str) -> int:
        size: int = getattr(self, name)
        divided = self.operation == "grouped" and self.divided == name
        return ceiling(size, self.batch) if divided else size

    @functools.cached_property
    def outputs(self) -> int:
        """Number of output matrices."""
        batched = self.operation in BATCHED or (self.operation, self.divided) == ("grouped", "k")
        return self.batch if batched else 1

    @functools.cached_property
    def arithmetic(self) -> Literal["half", "tf32", "fp8", "int8", "fma"]:
        """The arithmetic of the multiplication: a rate of `Device.throughput`."""
        if self.multiplied in HALF:
            return "half"
        if self.multiplied in FP8:
            return "fp8"
        if self.multiplied in ("int8", "uint8"):
            return "int8"
        return "tf32" if self.multiplied == "float32" and self.tf32 else "fma"

    @property
    def multiplied(self) -> str:
        """The dtype in which a is multiplied: a's own, or b's with a `standardize` prologue, since
        under autocast a LayerNorm's input is float32.
        """
        standardized = self.prologue is not None and self.prologue.standardizes
        return self.b.dtype if standardized else self.a.dtype

    @functools.cached_property
    def k_major(self) -> bool:
        """Whether K is the contiguous dimension of both operands."""
        return self.a.layout == "row" and self.b.layout == "column"

    @functools.cached_property
    def flops(self) -> int:
        """Number of multiplications and additions."""
        return 2 * self.m * self.n * self.k * (self.batch if self.operation in BATCHED else 1)

    @functools.cached_property
    def a_bytes(self) -> int:
        """Size of a in bytes; a matrix that the whole batch shares counts once."""
        copies = self.batch if self.batch > 1 and self.a.batch_stride else 1
        return copies * size_of(self.m * self.k, self.a.dtype)

    @functools.cached_property
    def b_bytes(self) -> int:
        """Size of b in bytes, of all groups; a matrix that the whole batch shares counts once."""
        copies = self.batch if self.batch > 1 and self.b.batch_stride else 1
        return copies * size_of(self.k * self.n, self.b.dtype)

    @functools.cached_property
    def fused_bytes(self) -> int:
        """Bytes that epilogue and prologue read in addition to a and b."""
        inputs = self.epilogue.inputs
        read = sum(inp.size(self.m, self.columns) for inp in inputs) * self.outputs
        if self.epilogue.gated and self.operation == "addmm" and inputs:
            # Gate and up projection have a bias each.
            read += inputs[0].size(self.m, self.columns)
        if self.prologue is not None:
            read += self.prologue.size(self.n, self.k)
        return read

    @functools.cached_property
    def bytes_read(self) -> int:
        """Minimum bytes that any kernel must read: every input once."""
        return self.a_bytes + self.b_bytes + self.fused_bytes

    @functools.cached_property
    def bytes_written(self) -> int:
        """Minimum bytes that any kernel must write."""
        stored = size_of(self.m * self.columns, self.stored)
        return self.outputs * (stored + size_of(self.epilogue.reductions * self.m, "float32"))

    @property
    def intensity(self) -> float:
        """Arithmetic intensity, FLOP per byte of DRAM traffic."""
        return self.flops / (self.bytes_read + self.bytes_written)

    def roofline(self, device: Device) -> float:
        """Return the lower bound of any kernel's time in microseconds, without launch overhead.

        It is the larger of FLOP over the device's throughput and bytes over its bandwidth
        (Williams, Waterman, Patterson 2009); infinite if the device does not support these dtypes.
        """
        rate = device.throughput(self.arithmetic)
        if not rate:
            return math.inf
        moved = (self.bytes_read + self.bytes_written) / device.bandwidth
        return max(self.flops / rate, moved) * 1e6

    @functools.cached_property
    def largest_span(self) -> int:
        """Elements from the first to the last of the tensor with the largest span."""
        return max(
            self.a.span(self.m, self.k, self.batch),
            self.b.span(self.k, self.n, self.batch),
            self.outputs * self.m * self.columns,
        )

    @functools.cached_property
    def realigned(self) -> GemmProblem:
        """The problem with operands copied where they are not aligned for the widest loads and
        TMA.
        """
        return dataclasses.replace(
            self,
            a=self.a.realigned(self.m, self.k, self.batch),
            b=self.b.realigned(self.k, self.n, self.batch),
        )

    @functools.cached_property
    def tma_obstacle(self) -> str | None:
        """Why TMA cannot load the operands, or None if it can. Source of the conditions: CUDA
        driver API, cuTensorMapEncodeTiled.
        """
        for name, operand, rows, columns in (
            ("a", self.a, self.m, self.k),
            ("b", self.b, self.k, self.n),
        ):
            if operand.layout == "strided":
                return f"{name} has no contiguous dimension"
            if operand.vector_bytes < VECTOR_BYTES:
                return (
                    f"{name} is aligned to {operand.vector_bytes:g} bytes, and TMA needs "
                    f"{VECTOR_BYTES} for its address and every stride"
                )
            inner = columns if operand.layout == "row" else rows
            outer = rows if operand.layout == "row" else columns
            if outer > 1 and operand.leading < inner:
                return f"{name}'s rows overlap"
            if max(rows, columns) > INT32_MAX:
                return f"{name} has a dimension beyond 32-bit coordinates"
        return None


def _contiguous(dtype: str, rows: int, columns: int, layout: str, batch: int) -> Operand:
    strides = (columns, 1) if layout == "r" else (1, rows)
    return Operand.of(
        dtype, (rows, columns), strides, batch=batch, batch_stride=rows * columns * (batch > 1)
    )
