"""What a GEMM kernel computes besides the matmul: its epilogue and its prologue."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from inductor_ext.storage.json_codec import OPTIONAL
from inductor_ext.templates.cutlass import epilogue as cutlass
from inductor_ext.templates.tensors import EpilogueInput, ceiling, require, require_dtype, size_of


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
    tree: cutlass.Epilogue | None = dataclasses.field(default=None, metadata={OPTIONAL: True})
    """The epilogue of a CUTLASS kernel; None excludes CUTLASS kernels for this problem. It may
    cover only a part of the epilogue; the remaining part runs after the kernel."""

    def __post_init__(self) -> None:
        if self.out is not None:
            require_dtype(self.out, "epilogue", "out")
        for name in ("pointwise", "reductions"):
            value = getattr(self, name)
            require(value >= 0, "epilogue", name, value, "0 or more")


NormKind = Literal["rms", "layer"]
"""`rms`: rows are divided by their root mean square over K (RMSNorm); `layer`: they are given mean
0 and standard deviation 1 (LayerNorm)."""


@dataclass(frozen=True)
class RowNorm:
    """A norm of the rows of a.

    Raises:
        exc.BadGemmError: an unknown dtype, or more vectors than the norm has.
    """

    kind: NormKind
    vectors: int = 0
    """Number of [K] vectors that it reads: none, a weight, or (LayerNorm only) a weight and a
    bias."""
    dtype: str = "bfloat16"
    """Dtype of the vectors. Next to a dequantization they have a's dtype, and this is unused."""

    def __post_init__(self) -> None:
        require_dtype(self.dtype, "norm", "dtype")
        limit = 2 if self.kind == "layer" else 1
        ok = 0 <= self.vectors <= limit
        require(ok, "norm", "vectors", self.vectors, f"0 to {limit} for the kind {self.kind}")


@dataclass(frozen=True)
class Dequant:
    """The dequantization of b.

    Raises:
        exc.BadGemmError: an unknown dtype, or a group size that does not match `scales`.
    """

    scales: Literal["none", "tensor", "column", "group"] = "none"
    """Granularity of the scales of b: no scales, one per tensor, one per column, or one per `group`
    rows of a column."""
    group: int = 0
    """Elements along K that share a scale and a zero point; 0 unless `scales` is `group`."""
    zero_points: bool = False
    scale_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        require_dtype(self.scale_dtype, "dequantization", "scale_dtype")
        grouped = self.scales == "group"
        ok = self.group >= 1 if grouped else self.group == 0
        require(ok, "dequantization", "group", self.group, "1 or more" if grouped else "0")

    @property
    def scales_accumulators(self) -> bool:
        """Whether scales can be applied to the accumulators; group scales along K cannot."""
        return self.scales in ("tensor", "column")

    def size(self, n: int, k: int) -> int:
        """Return the bytes of scales and zero points; a zero point takes one byte."""
        scales = {
            "none": 0,
            "tensor": 1,
            "column": n,
            "group": n * ceiling(k, self.group or 1),
        }[self.scales]
        return size_of(scales, self.scale_dtype) + scales * self.zero_points


@dataclass(frozen=True)
class _StoredPrologue:
    """The JSON form of a prologue."""

    kind: Literal["dequantize", "normalize", "standardize", "both"]
    """`normalize`: RMSNorm, `standardize`: LayerNorm, `both`: RMSNorm of a, b is dequantized."""
    scales: Literal["none", "tensor", "column", "group"]
    group: int
    zero_points: bool
    scale_dtype: str
    """Dtype of the scales; if nothing is dequantized, of the norm's vectors."""
    vectors: int


_KINDS = {("rms", False): "normalize", ("layer", False): "standardize", ("rms", True): "both"}


@dataclass(frozen=True)
class Prologue:
    """Operations on the operands between memory and the tensor cores: a norm, a dequantization, or
    an RMSNorm of a with a dequantization of b.

    Raises:
        exc.BadGemmError: there is no operation, or a LayerNorm and a dequantization.
    """

    JSON_FORM: ClassVar[type] = _StoredPrologue

    norm: RowNorm | None = None
    dequant: Dequant | None = None

    def __post_init__(self) -> None:
        both = self.norm is not None and self.dequant is not None
        norm = self.norm and self.norm.kind
        ok = norm == "rms" if both else self.norm is not None or self.dequant is not None
        require(ok, "prologue", "norm", norm, "rms if b is dequantized" if both else "rms, layer")
        if both and self.norm is not None:
            dtype = self.norm.dtype
            require(dtype == RowNorm.dtype, "prologue", "dtype", dtype, f"{RowNorm.dtype} (unused)")

    def size(self, n: int, k: int) -> int:
        """Return the bytes read in addition to the operands."""
        total_bytes = 0
        if self.norm is not None:
            total_bytes += size_of(self.norm.vectors * k, self.norm.dtype)
        if self.dequant is not None:
            total_bytes += self.dequant.size(n, k)
        return total_bytes

    def to_json_form(self) -> _StoredPrologue:
        """Return the fields that JSON holds."""
        norm, dequant = self.norm, self.dequant or Dequant()
        kind: Any = "dequantize"
        if norm is not None:
            kind = _KINDS[norm.kind, self.dequant is not None]
        dtype = norm.dtype if norm and self.dequant is None else dequant.scale_dtype
        vectors = norm.vectors if norm else 0
        return _StoredPrologue(
            kind, dequant.scales, dequant.group, dequant.zero_points, dtype, vectors
        )

    @classmethod
    def from_json_form(cls, stored: _StoredPrologue) -> Prologue:
        """Return the prologue that `to_json_form` stored.

        Raises:
            exc.BadGemmError: see the constructors.
        """
        norm = dequant = None
        if stored.kind in ("dequantize", "both"):
            dequant = Dequant(stored.scales, stored.group, stored.zero_points, stored.scale_dtype)
        else:
            unscaled = (stored.scales, stored.group, stored.zero_points) == ("none", 0, False)
            require(unscaled, "prologue", "scales", stored.scales, f"none in {stored.kind}")
        if stored.kind in ("normalize", "both"):
            dtype = RowNorm.dtype if dequant else stored.scale_dtype
            norm = RowNorm("rms", stored.vectors, dtype)
        elif stored.kind == "standardize":
            norm = RowNorm("layer", stored.vectors, stored.scale_dtype)
        else:
            require(stored.vectors == 0, "prologue", "vectors", stored.vectors, "0 without a norm")
        return cls(norm, dequant)
