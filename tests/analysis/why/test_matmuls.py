"""Tiles from real names of kernels, and what shapes cost."""

from __future__ import annotations

import pytest

from lm_profiler.analysis.why.matmuls import Product, quantization, tile_of


@pytest.mark.parametrize(
    "kernel, tile",
    [
        ("nvjet_tst_192x208_64x4_2x1_v_bz_coopB_bias_TNT", (192, 208)),
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", (256, 128)),
        ("ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn", (128, 256)),
        ("ampere_sgemm_128x64_tn", (128, 64)),
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize32x64x8_stage3_warpsize1x2x1_ffma", (32, 64)),
        (
            "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x64_32x6_tn_align8>(Params)",
            (128, 64),
        ),
        ("cutlass3x_sm90_tensorop_s64x128x16gemm_bf16_bf16_f32_bf16_bf16_128x256x64_2x1x1_0_tnn_align8", (128, 256)),
        ("Cijk_Alik_Bljk_BBS_BH_MT256x224x64_MI16x16x1", (256, 224)),
        ("nvjet_tst_64x16_64x16_2x4_2cta_h_bz_splitK_TNT", None),
        ("void gemv2T_kernel_val<int, float, 128, 16, 4, 4, false>(cublasGemvParamsEx)", None),
    ],
)
def test_the_tile_of_a_kernel(kernel: str, tile: tuple[int, int] | None) -> None:
    assert tile_of(kernel) == tile


def product(m: int, n: int, batch: int = 1) -> Product:
    return Product(2 * batch * m * n * 64, "bfloat16", batch, m, n, 64)


def test_one_tile_more_than_there_is_room_for_costs_nearly_half() -> None:
    """As in NVIDIA's guide: an A100 has 108 multiprocessors, so that 109 tiles take two waves."""
    kernel = "ampere_bf16_s16816gemm_bf16_256x128_ldg8_f2f_stages_64x3_tn"
    full, more = (quantization(kernel, product(256, 128 * tiles), 108) for tiles in (108, 109))
    assert full is not None
    assert more is not None
    assert (full.waves, full.wave_loss, full.tile_loss) == (1.0, 0.0, 0.0)
    assert more.wave_loss == pytest.approx(1 - 109 / 216)


def test_a_column_beyond_the_last_tile_costs_a_tile() -> None:
    cut = quantization("ampere_sgemm_128x128_tn", product(128, 129, batch=3), 108)
    assert cut is not None
    assert (cut.tiles, cut.tile_loss) == (6, pytest.approx(1 - 129 / 256))


def test_the_better_way_to_lay_a_tile_counts() -> None:
    cut = quantization("ampere_bf16_s16816gemm_bf16_256x64_ldg8_f2f_stages_64x3_tn", product(64, 256), 108)
    assert cut is not None
    assert (cut.tile, cut.tiles) == ((64, 256), 1)


def test_without_a_tile_or_multiprocessors_nothing_is_said() -> None:
    assert quantization("my_gemm", product(128, 128), 108) is None
    assert quantization("ampere_sgemm_128x128_tn", product(128, 128), 0) is None
