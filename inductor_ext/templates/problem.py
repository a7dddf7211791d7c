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
import typing
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from inductor_ext import exc
from inductor_ext.storage import json_codec
from inductor_ext.storage.json_codec import OPTIONAL, UNSTORED
from inductor_ext.templates.device import Device
from inductor_ext.templates.fused_ops import Dequant, Epilogue, Prologue, RowNorm
from inductor_ext.templates.tensors import (
    FP8,
    HALF,
    INT32_MAX,
    QUANTIZED,
    VECTOR_BYTES,
    Operand,
    ceiling,
    require,
    require_dtype,
    size_of,
)

Operation = Literal["mm", "addmm", "bmm", "baddbmm", "int_mm", "mixed", "scaled", "grouped"]
"""`mixed`: b is dequantized to a's dtype. `scaled`: fp8 with scales, which are epilogue inputs.
`grouped`: grouped GEMM; the groups divide one dimension (`GemmProblem.divided`)."""

BATCHED = frozenset({"bmm", "baddbmm"})


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


@dataclass(frozen=True)
class KernelDetails:
    """Constants of a kernel that do not affect its time.

    Kernels are tuned with them so that they need not be compiled again. They are not part of a
    problem's identity: problems that differ only in them are equal, and share a tuning result,
    whose JSON omits them.
    """

    activation: str = "silu"
    """Activation of the gate, one of `templates.triton.kernels.common.ACTIVATIONS`. The GEMM takes
    far longer than the activation."""
    packed_first: Literal["gate", "up"] | None = None
    """Which projection comes first if gate and up are packed in one weight (and one bias). Kernels
    are then tuned with the packed weight, and the reference (Inductor's default) is a single
    matmul."""
    epsilon: float = 1e-5
    """The norm's epsilon, added under the square root."""


@dataclass(frozen=True)
class GemmProblem:
    """One GEMM, with its fused prologue and epilogue.

    Equality, the hash and `key` are those of all fields but `details`.

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
    epilogue: Epilogue = dataclasses.field(default=Epilogue())
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
    details: KernelDetails = dataclasses.field(
        default=KernelDetails(), compare=False, metadata={UNSTORED: True}
    )

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
        require_dtype(self.out, "problem", "out")
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
        require(
            (self.dequant is not None) == (self.operation == "mixed"),
            "problem",
            "prologue",
            self.prologue,
            "with a dequantization in the operation mixed, and only there",
        )
        valid = not self.parts or (min(self.parts) >= 1 and sum(self.parts) == self.n)
        require(valid, "problem", "parts", self.parts, f"numbers above 0 with the sum {self.n}")
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
            rest.setdefault("prologue", Prologue(dequant=Dequant("column", scale_dtype=dtype)))
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

    @property
    def norm(self) -> RowNorm | None:
        """The norm of the rows of a."""
        return None if self.prologue is None else self.prologue.norm

    @property
    def dequant(self) -> Dequant | None:
        """The dequantization of b."""
        return None if self.prologue is None else self.prologue.dequant

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
    def stored_dtype(self) -> str:
        """The dtype that the epilogue stores."""
        return self.epilogue.out or self.out

    @functools.cached_property
    def quantized(self) -> bool:
        """Whether rows are quantized to fp8 or int8 by their row amax.

        The row amax is known only when the whole row has been computed, so a second kernel
        quantizes; it reads what the GEMM kernel stored as `out`.
        """
        return self.epilogue.reductions > 0 and self.stored_dtype in QUANTIZED

    @functools.cached_property
    def kernel_dtype(self) -> str:
        """The dtype that the GEMM kernel itself stores."""
        return self.out if self.quantized else self.stored_dtype

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
        if self.multiply_dtype in HALF:
            return "half"
        if self.multiply_dtype in FP8:
            return "fp8"
        if self.multiply_dtype in ("int8", "uint8"):
            return "int8"
        return "tf32" if self.multiply_dtype == "float32" and self.tf32 else "fma"

    @property
    def multiply_dtype(self) -> str:
        """The dtype in which a is multiplied: a's own, or b's with a LayerNorm, whose input is
        float32 under autocast.
        """
        has_layer_norm = self.norm is not None and self.norm.kind == "layer"
        return self.b.dtype if has_layer_norm else self.a.dtype

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
        total = sum(inp.size(self.m, self.columns) for inp in inputs) * self.outputs
        if self.epilogue.gated and self.operation == "addmm" and inputs:
            # Gate and up projection have a bias each.
            total += inputs[0].size(self.m, self.columns)
        if self.prologue is not None:
            total += self.prologue.size(self.n, self.k)
        return total

    @functools.cached_property
    def bytes_read(self) -> int:
        """Minimum bytes that any kernel must read: every input once."""
        return self.a_bytes + self.b_bytes + self.fused_bytes

    @functools.cached_property
    def bytes_written(self) -> int:
        """Minimum bytes that any kernel must write."""
        output_bytes = size_of(self.m * self.columns, self.stored_dtype)
        return self.outputs * (output_bytes + size_of(self.epilogue.reductions * self.m, "float32"))

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
        memory_time = (self.bytes_read + self.bytes_written) / device.bandwidth
        return max(self.flops / rate, memory_time) * 1e6

    @functools.cached_property
    def largest_span(self) -> int:
        """Elements from the first to the last of the tensor with the largest span."""
        return max(
            self.a.span(self.m, self.k, self.batch),
            self.b.span(self.k, self.n, self.batch),
            self.outputs * self.m * self.columns,
        )

    @functools.cached_property
    def with_aligned_operands(self) -> GemmProblem:
        """The problem with operands copied where they are not aligned for the widest loads and
        TMA.
        """
        return dataclasses.replace(
            self,
            a=self.a.align(self.m, self.k, self.batch),
            b=self.b.align(self.k, self.n, self.batch),
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
