"""Kinds of kernels, by name."""

from __future__ import annotations

from benchmarks.gemm import kernel_kinds

_NAMES = {
    "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_9": "Triton, reduction",
    "triton_per_fused_convolution_native_layer_norm_2": "Triton, reduction",
    "triton_poi_fused__scaled_dot_product_cudnn_attention_bmm_3": "Triton, pointwise",
    "triton_tem_fused_addmm_relu_0": "matmul",
    "nvjet_sm90_tst_128x8_64x12_2x1_v_bz_TNT": "matmul",
    "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm>": "matmul",
    "void cublasLt::splitKreduce_kernel<32, 16, int>": "matmul",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7": "attention",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>": "attention",
    "attend": "attention",
    "combine": "attention",
    "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc": "convolution",
    "Memcpy DtoD (Device -> Device)": "copy or fill",
    "void at::native::sbtopk::gatherTopK<float>": "other",
}


def test_a_name_tells_the_kind() -> None:
    assert {name: kernel_kinds.find_kind(name) for name in _NAMES} == _NAMES


def test_rows_sum_each_kind_and_name_the_longest() -> None:
    stock = {"nvjet_a": 3.0, "nvjet_b": 5.0, "triton_poi_fused_add_0": 2.0}
    rows = kernel_kinds.make_rows("m", {"stock": stock, "ours": {"nvjet_b": 4.0}})
    values = {row["metric"]: (row["stock"], row["ours"], row["note"]) for row in rows}
    assert values == {
        "matmul": (8.0, 4.0, "Inductor: nvjet_b 5.0; nvjet_a 3.0. The extension: nvjet_b 4.0"),
        "Triton, pointwise": (
            2.0,
            None,
            "Inductor: triton_poi_fused_add_0 2.0. The extension: none",
        ),
        "all kernels": (10.0, 4.0, None),
    }
