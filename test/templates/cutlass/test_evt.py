"""Epilogues of CUTLASS kernels: rendered code, its results, and refused trees."""

from __future__ import annotations

import ctypes
import math
import subprocess
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.cutlass.epilogue import (
    ACCUMULATOR,
    OPERATIONS,
    Epilogue,
    Node,
    NotExpressible,
    Tensor,
    apply,
    cast,
    clamp,
    constant,
    gelu,
    identity,
    parameter,
    read,
    relu6,
    silu,
)
from inductor_ext.templates.cutlass.evt import render
from inductor_ext.toolchain import components

BF16 = "bfloat16"
PINGPONG = CutlassConfig(90, "warpspecialized_pingpong", (128, 128, 64), BF16, BF16, BF16)
MULTISTAGE = CutlassConfig(
    80, "multistage", (128, 128, 32), BF16, BF16, BF16, stages=4, epilogue="direct"
)
INTEGER = replace(
    PINGPONG, a="int8", b="int8", d="int32", accumulator="int32", tile=(128, 128, 128)
)

BIAS = Tensor(BF16, "row")
RESIDUAL = Tensor(BF16, "matrix", 8)


def out(value: Node, *inputs: Tensor) -> Epilogue:
    return Epilogue(((BF16, value),), inputs)


X, Y, Z = ACCUMULATOR, read(0), read(1)

VALUES: dict[str, Node] = {
    **{
        name: apply(
            name, *(X, Y, Z)[: 1 + max(int(item) for item in "012" if f"{{{item}}}" in cpp)]
        )
        for name, cpp in OPERATIONS.items()
    },
    "relu6": relu6(X),
    "clamp": clamp(apply("mul", X, constant(3.0)), -1.5, None),
    "silu": silu(X),
    "gelu": gelu(X),
    "gelu_tanh": gelu(X, "tanh"),
    "cast": apply("sub", cast(apply("mul", X, Y), BF16), cast(Z, "float16")),
    "alpha_beta": apply("add", apply("mul", parameter(0), X), apply("mul", parameter(1), Y)),
    "by_size": apply("truediv", apply("add", X, Y), parameter(1)),
    "literals": apply("add", apply("mul", X, constant(1 / 3)), constant(-2.0)),
    "infinite": apply("minimum", X, constant(math.inf)),
    "twice": apply("mul", silu(X), silu(X)),
}

SHIM = """
#include <cmath>
#include <cstdint>
#include <cstring>
using std::isnan;
#define CUTLASS_DEVICE inline
#define CUTLASS_PRAGMA_UNROLL
namespace cutlass {
struct bfloat16_t {
  float value;
  explicit bfloat16_t(float x) : value(x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (!std::isnan(x)) bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    std::memcpy(&value, &bits, 4);
  }
  operator float() const { return value; }
};
struct half_t {
  _Float16 value;
  explicit half_t(float x) : value(x) {}
  operator float() const { return value; }
};
}
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
struct Eight {
  static constexpr int kElements = 8;
  float values[8];
  float operator[](int i) const { return values[i]; }
  float& operator[](int i) { return values[i]; }
};
"""
"""The parts of CUTLASS that epilogue functions need, for a C++ compiler."""


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., torch.Tensor]:
    """Run the function of one of `VALUES` on the CPU: its leaves, in the order of the kernel's."""
    compiler = components.probe("cxx")
    if not compiler.available:
        pytest.skip(f"no C++ compiler: {compiler.why}")
    folder = tmp_path_factory.mktemp("epilogue")
    text = [SHIM]
    leaves = {}
    for name, value in VALUES.items():
        rendered = render(out(value, Tensor("float32"), Tensor("float32")), PINGPONG)
        lines = rendered.definitions.splitlines()
        start, end = lines.index("template <class Fragment>"), lines.index("};")
        leaves[name] = sum(line.startswith("using Leaf") for line in lines)
        call = ", ".join(f"x[{i}]" for i in range(leaves[name]))
        text += [
            f"namespace {name}_ {{",
            *lines[start : end + 1],
            "}",
            f'extern "C" void {name}_8(Eight const* x, Eight* y) {{',
            f"*y = {name}_::Compute0<Eight>()({call});",
            "}",
        ]
    file, library = folder / "epilogue.cpp", folder / "epilogue.so"
    file.write_text("\n".join(text))
    subprocess.run(
        [str(compiler.path), "-std=c++17", "-shared", "-fPIC", "-o", library, file], check=True
    )
    functions = ctypes.CDLL(str(library))

    def run(name: str, *values: torch.Tensor) -> torch.Tensor:
        operands = torch.stack(values)
        assert operands.shape == (leaves[name], 8)
        result = torch.empty(8)
        getattr(functions, f"{name}_8")(
            ctypes.c_void_p(operands.data_ptr()), ctypes.c_void_p(result.data_ptr())
        )
        return result

    return run


class TestFunctions:
    @pytest.mark.parametrize("name", VALUES)
    def test_functions_equal_torch(self, computed: Callable[..., Any], name: str) -> None:
        x = torch.tensor([-7.5, -1.0, -0.3, 0.0, 0.25, 1.0, 6.5, math.nan])
        y = torch.tensor([1.5, -1.0, 0.7, 2.0, math.nan, 0.5, -0.1, 3.0])
        z = torch.tensor([0.1, 0.2, -3.0, 4.0, 5.5, -0.6, 0.0, 1.0])
        if name in ("sqrt", "rsqrt", "log"):
            x = x.abs() + 0.5
        epilogue = Epilogue((("float32", VALUES[name]),), (Tensor("float32"),) * 2)
        parameters = (0.4, 2048.0)
        (expected,) = epilogue.evaluate(x, (y, z), parameters)
        order: list[Node] = []
        for node in epilogue.nodes():
            if node.operation in ("accumulator", "read", "parameter") and node not in order:
                order.append(node)
        inputs = {ACCUMULATOR: x, read(0): y, read(1): z}
        inputs |= {parameter(i): torch.full((8,), value) for i, value in enumerate(parameters)}
        result = computed(name, *(inputs[node] for node in order))
        torch.testing.assert_close(result, expected, equal_nan=True, rtol=2e-6, atol=1e-6)

    @pytest.mark.parametrize(
        ("name", "function"),
        [
            ("relu6", torch.nn.functional.relu6),
            ("silu", torch.nn.functional.silu),
            ("gelu", torch.nn.functional.gelu),
            ("gelu_tanh", lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
            ("relu", torch.relu),
            ("clamp", lambda x: torch.clamp(3 * x, min=-1.5)),
            ("sigmoid", torch.sigmoid),
        ],
    )
    def test_activations_equal_torch(
        self, computed: Callable[..., Any], name: str, function: Callable[..., torch.Tensor]
    ) -> None:
        x = torch.tensor([-90.0, -3.0, -0.5, 0.0, 0.5, 3.0, 90.0, math.nan])
        torch.testing.assert_close(
            computed(name, x), function(x), equal_nan=True, rtol=2e-6, atol=1e-6
        )


class TestRendering:
    def test_a_biased_activation(self) -> None:
        value = apply("relu", apply("add", X, Y))
        rendered = render(out(value, BIAS), PINGPONG)
        assert_expected_inline(
            rendered.definitions,
            """\
using Leaf0 = cutlass::epilogue::fusion::Sm90AccFetch;
using Leaf1 = cutlass::epilogue::fusion::Sm90RowBroadcast<0, Tile, cutlass::bfloat16_t, float, Stride<_0, _1, int64_t>>;
template <class Fragment>
struct Compute0 {
  CUTLASS_DEVICE Fragment operator()(Fragment const& x0, Fragment const& x1) const {
    Fragment y;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Fragment::kElements; ++i) {
      float const v0 = x0[i];
      float const v1 = x1[i];
      float const v2 = v0 + v1;
      float const v3 = v2 < 0.0f ? 0.0f : v2;
      y[i] = v3;
    }
    return y;
  }
};
using Output0 = cutlass::epilogue::fusion::Sm90Compute<Compute0, cutlass::bfloat16_t, float, Round>;
using Fusion = cutlass::epilogue::fusion::Sm90EVT<Output0, Leaf0, Leaf1>;""",  # noqa: E501
        )
        assert_expected_inline(
            rendered.arguments,
            """{{}, typename Leaf1::Arguments{static_cast<cutlass::bfloat16_t const*>(call.tensors[3].data), cutlass::bfloat16_t(0), {_0{}, _1{}, call.tensors[3].batch}}, {}}""",  # noqa: E501
        )

    def test_the_same_for_capability_8(self) -> None:
        rendered = render(out(apply("add", X, Y), BIAS), MULTISTAGE)
        kept = [line for line in rendered.definitions.splitlines() if line.startswith("using")]
        assert_expected_inline(
            "\n".join(kept),
            """\
using Leaf0 = cutlass::epilogue::threadblock::VisitorAccFetch;
using Leaf1 = cutlass::epilogue::threadblock::VisitorRowBroadcast<ThreadMap, cutlass::bfloat16_t, Stride<_0, _1, int64_t>>;
using Output0 = cutlass::epilogue::threadblock::VisitorCompute<Compute0, cutlass::bfloat16_t, float, Round>;
using Store0 = cutlass::epilogue::threadblock::VisitorAuxStore<ThreadMap, cutlass::bfloat16_t, Round, Stride<int64_t, _1, int64_t>>;
using Fusion = cutlass::epilogue::threadblock::Sm80EVT<Store0, cutlass::epilogue::threadblock::Sm80EVT<Output0, Leaf0, Leaf1>>;""",  # noqa: E501
        )

    @pytest.mark.parametrize("swap", [False, True])
    def test_exchanged_operands_exchange_rows_and_columns(self, swap: bool) -> None:
        config = replace(PINGPONG, swap_ab=swap, layouts="tnn" if swap else "tnt")
        for tensor, plain, exchanged in (
            (BIAS, "Sm90RowBroadcast", "Sm90ColBroadcast"),
            (Tensor("float32", "column"), "Sm90ColBroadcast", "Sm90RowBroadcast"),
            (RESIDUAL, "Stride<int64_t, _1, int64_t>", "Stride<_1, int64_t, int64_t>"),
        ):
            text = render(out(apply("add", X, Y), tensor), config).definitions
            assert (exchanged if swap else plain) in text

    def test_a_matrix_is_read_by_the_kernel_or_by_threads(self) -> None:
        epilogue = out(
            apply("add", apply("add", X, Y), Z), RESIDUAL, Tensor("float32", "matrix", 2)
        )
        read_by_kernel = render(epilogue, replace(PINGPONG, c=BF16))
        assert read_by_kernel.source == 0
        assert "Sm90SrcFetch<cutlass::bfloat16_t>" in read_by_kernel.definitions
        by_threads = render(epilogue, PINGPONG)
        assert by_threads.source is None
        assert "Sm90AuxLoad<0, void, cutlass::bfloat16_t" in by_threads.definitions
        assert "Stride<int64_t, _1, int64_t>, void, void, 2>" in by_threads.definitions

    def test_several_outputs_are_one_graph(self) -> None:
        summed = apply("add", X, Y)
        epilogue = Epilogue(((BF16, silu(summed)), ("float32", summed)), (RESIDUAL,))
        rendered = render(epilogue, PINGPONG)
        assert_expected_inline(
            rendered.definitions.splitlines()[-1],
            """using Fusion = cutlass::epilogue::fusion::Sm90TopologicalVisitor<float, cute::tuple<seq<>, seq<>, seq<0, 1>, seq<2>, seq<0, 1>>, Leaf0, Leaf1, Output1, Store1, Output0>;""",  # noqa: E501
        )
        # After a, b, the first output and the input.
        assert "call.tensors[4].data" in rendered.arguments
        older = render(epilogue, MULTISTAGE)
        assert "Output1, Store1, Output0, Store0>" in older.definitions

    def test_scalars_are_launch_arguments(self) -> None:
        epilogue = out(VALUES["alpha_beta"], Tensor("float32", "scalar"))
        assert epilogue.parameters == 2
        rendered = render(epilogue, PINGPONG)
        assert "call.scalars[1]" in rendered.arguments
        assert "{float(0)}, {static_cast<float const*>(call.tensors[3].data)}" in rendered.arguments
        # One kernel for all values; a constant makes another one.
        halved, doubled = (out(apply("mul", X, constant(value))) for value in (0.5, 2.0))
        assert render(halved, PINGPONG) != render(doubled, PINGPONG)

    def test_shared_nodes_are_computed_once(self) -> None:
        text = render(out(VALUES["twice"]), PINGPONG).definitions
        assert text.count("expf") == 1

    def test_integers_stay_integers(self) -> None:
        text = render(identity("int32"), INTEGER).definitions
        assert "Sm90Compute<Compute0, int32_t, int32_t, Round>" in text
        assert "float" not in text
        scaled = Epilogue(((BF16, apply("mul", X, Y)),), (Tensor("float32", "row"),))
        text = render(scaled, replace(INTEGER, d=BF16)).definitions
        assert "Sm90Compute<Compute0, cutlass::bfloat16_t, float, Round>" in text
        large = torch.tensor([2**24 + 1], dtype=torch.int32)
        assert identity("int32").evaluate(large, ())[0] == large

    @pytest.mark.parametrize(
        ("make", "reason"),
        [
            (lambda: apply("sin", X), "do not support the operation sin"),
            (lambda: apply("add", X), "add takes 2 operands, not 1"),
            (lambda: cast(X, "float8_e4m3fn"), "round intermediate values to float8_e4m3fn"),
            (lambda: render(out(Y), PINGPONG), "reads input 0, but has 0 inputs"),
            (lambda: render(out(X, Tensor("float64")), PINGPONG), r"float64 \(input 0"),
            (lambda: render(identity("float64"), PINGPONG), "do not store float64"),
            (lambda: render(identity("float32"), PINGPONG), "the kernel stores bfloat16"),
            (
                lambda: render(identity("int32"), replace(PINGPONG, d="int32")),
                "need int32 accumulators",
            ),
            (
                lambda: render(Epilogue((("int32", apply("neg", X)),)), INTEGER),
                "and no epilogue",
            ),
            (
                lambda: render(out(apply("add", X, Y), BIAS), replace(PINGPONG, grouped=True)),
                "grouped matmul may not read tensors",
            ),
            (
                lambda: render(
                    out(apply("add", X, Y), Tensor(BF16, "matrix", 4)), replace(PINGPONG, c=BF16)
                ),
                "aligned to 16 bytes",
            ),
        ],
    )
    def test_inexpressible_nodes_are_refused_with_the_reason(
        self, make: Callable[[], object], reason: str
    ) -> None:
        with pytest.raises(NotExpressible, match=reason):
            make()


def test_a_cast_rounds_where_it_stands() -> None:
    third = torch.tensor([1 / 3])
    (rounded,) = Epilogue((("float32", cast(X, BF16)),)).evaluate(third, ())
    assert rounded == third.bfloat16().float()
    assert rounded != third
    assert cast(X, "float32") is X
