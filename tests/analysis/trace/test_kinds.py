"""Kinds by name; the names are from published profiles."""

from __future__ import annotations

import pytest
from kernel_families import BLACKWELL, FAMILIES

from lm_profiler.analysis.trace.kinds import kernel_kind, operator_kind

ANON = "at::native::(anonymous namespace)::"

KERNELS = {
    "matmul": [
        "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NNT",
        "nvjet_sm100_tst_64x16_64x16_2x4_2cta_h_bz_splitK_TNT",
        "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn",
        "ampere_sgemm_128x64_tn",
        "sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize32x32x8_stage3_warpsize1x2x1_ffma_aligna4_alignc4_execute",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x64_32x6_tn_align8>(T1::Params)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, false, __nv_bfloat16>(...)",
        "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false, false, cublasGemvParamsEx>",
        "void gemmSN_TN_kernel<float, 128, 16, 2, 4, 4, 4, true>(...)",
        "triton_tem_fused_addmm_t_view_9",
        "triton_tem_fused_bmm_7",
        "Cijk_Alik_Bljk_F8BS_MT16x16x64",
    ],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false>>(Flash_fwd_params)",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64>>(...)",
        "void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>(Params)",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<...>::Params)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_64x128x64_4x1x1_kernel0_0",
        "triton_tem_fused_flex_attention_backward_split_transpose",
    ],
    "softmax": [
        "void (anonymous namespace)::softmax_warp_forward<c10::BFloat16, c10::BFloat16, float, 9, false, false>(...)",
        f"void {ANON}cunn_SoftMaxForward<4, float, float, float, {ANON}LogSoftMaxForwardEpilogue>(float*, int)",
        f"void {ANON}cunn_SoftMaxBackwardSmem<4, float, float, float>(...)",
    ],
    "normalization": [
        f"void {ANON}vectorized_layer_norm_kernel<c10::BFloat16, float, true>(...)",
        f"void {ANON}GammaBetaBackwardCUDAKernelTemplate<c10::BFloat16, float>(...)",
        f"void {ANON}layer_norm_grad_input_kernel_vectorized<float, float>(...)",
        "void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>(...)",
    ],
    "reduction": [
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float>>>(...)",
        "triton_per_fused__fused_rms_norm__fused_rms_norm_backward__to_copy_add_0",
        "triton_red_fused__log_softmax_1",
        f"void {ANON}nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>(...)",
        f"void {ANON}multi_tensor_apply_kernel<{ANON}TensorListMetadata<1>, {ANON}LpNormFunctor<float, 1>>(...)",
    ],
    "elementwise": [
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, ...>(int, ...)",
        "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::BinaryFunctor<>>>",
        f"void {ANON}multi_tensor_apply_kernel<{ANON}FusedOptimizerTensorListMetadata<4>, {ANON}FusedAdamMathFunctor>",
        "triton_poi_fused_add_addmm_gelu_mul_0",
    ],
    "copies": [
        "Memcpy DtoD (Device -> Device)",
        "Memset (Device)",
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda(...)>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >",
        f"void {ANON}CatArrayBatchedCopy_contig<at::native::OpaqueType<8u>, 1, 128, 1>",
        "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<...>>",
        "void at::native::triu_tril_kernel<bool, int, true, 8, false>(...)",
    ],
    "host_copies": ["Memcpy HtoD (Pinned -> Device)", "Memcpy DtoH (Device -> Pageable)"],
    "communication": [
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "Memcpy PtoP (Device -> Device)",
    ],
    "other": ["my_own_kernel"],
}

OPERATORS = {
    "matmul": ["aten::mm", "aten::bmm", "aten::addmm", "aten::_scaled_mm", "aten::mkldnn_convolution"],
    "attention": ["aten::_scaled_dot_product_flash_attention_for_cpu", "flash_attn::_flash_attn_forward"],
    "softmax": ["aten::_softmax", "aten::_log_softmax_backward_data"],
    "normalization": ["aten::native_layer_norm", "aten::_fused_rms_norm", "aten::native_layer_norm_backward"],
    "elementwise": ["aten::add_", "aten::_foreach_mul_", "aten::silu_backward", "aten::_fused_adamw_"],
    "reduction": ["aten::sum", "aten::_foreach_norm", "aten::linalg_vector_norm", "aten::nll_loss_forward"],
    "copies": ["aten::copy_", "aten::cat", "aten::index_select", "aten::embedding_dense_backward"],
    "communication": ["c10d::allreduce_", "nccl:all_reduce", "_c10d_functional::all_gather_into_tensor"],
    # What only calls others, or moves no byte.
    "other": ["aten::linear", "aten::softmax", "aten::view", "MmBackward0", "aten::empty", "aten::matmul"],
}


@pytest.mark.parametrize("kind, name", [(kind, name) for kind, names in KERNELS.items() for name in names])
def test_kernels(kind: str, name: str) -> None:
    assert kernel_kind(name) == kind


@pytest.mark.parametrize("families", [FAMILIES, BLACKWELL], ids=["libraries", "blackwell"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_kernels_of_the_libraries_that_people_train_with(families: dict[str, str], kind: str) -> None:
    names = [line.strip() for line in families.get(kind, "").strip().splitlines()]
    assert {name: told for name in names if (told := kernel_kind(name)) != kind} == {}


@pytest.mark.parametrize("kind, name", [(kind, name) for kind, names in OPERATORS.items() for name in names])
def test_operators(kind: str, name: str) -> None:
    assert operator_kind(name) == kind


def test_a_kernel_whose_name_says_nothing_is_what_its_operator_is() -> None:
    assert kernel_kind("my_own_kernel", "aten::mm") == "matmul"
    assert kernel_kind("ampere_sgemm_128x64_tn", "aten::add_") == "matmul"
    assert kernel_kind("_fwd_kernel", "flash_attn::_flash_attn_forward") == "attention"
    assert kernel_kind("_fwd_kernel", "flashinfer::rmsnorm") == "other"
