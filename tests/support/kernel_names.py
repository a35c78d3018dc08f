"""Real names as profilers write them, the operator that launched each where its name says too little, and its kind."""

from __future__ import annotations

ANON = "at::native::(anonymous namespace)::"
DIVISOR = "float2*, float const*, int, int, cudnn::reduced_divisor, bool, int2"
DENSE = "aten::embedding_dense_backward"

NAMES: tuple[tuple[str, str | None, str], ...] = (
    ("nvjet_sm90_tst_192x208_64x4_2x1_v_bz_coopB_bias_TNT", None, "matmul"),
    ("void (anonymous namespace)::multimem_one_shot_reduce_kernel<c10::BFloat16, 16>(int)", None, "communication"),
    ("gloo::_Kernel_half_cudaSum(gloo::float16*, gloo::float16 const*, int)", None, "communication"),
    ("void at::native::lpmax_cleanup<float, (at::native::NormType)3, float>(float const*)", None, "reduction"),
    ("void at::native::glu_backward_kernel<float, at::native::OffsetCalculator>(int)", None, "elementwise"),
    (
        (
            "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::AUnaryFunctor<"
            "double, double, double, at::native::copysign_kernel_cuda(at::TensorIteratorBase&)> > >(int)"
        ),
        *(None, "elementwise"),
    ),
    ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT", None, "matmul"),
    ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_cublas", None, "matmul"),
    ("cutlass3x_sm90_tensorop_s64x128x16gemm_bf16_bf16_f32_bf16_bf16_128x128x64_2x1x1", None, "matmul"),
    (
        (
            "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel::"
            "GemmUniversal<cute::tuple<int, int, int, int>, void> > >(cutlass::gemm::Params)"
        ),
        *(None, "matmul"),
    ),
    ("void cublasLt::epilogue::impl::globalKernel<8, 32, float, __nv_bfloat16>(cublasLt::Params)", None, "matmul"),
    ("void epilogue::impl::globalKernel<float, float, float, true>(int, int, cublasLtEpilogue_t)", None, "matmul"),
    ("volta_scudnn_128x64_relu_interior_nn_v1", None, "matmul"),
    ("cudnn_infer_volta_scudnn_128x64_stridedB_interior_nn_v1", None, "matmul"),
    ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>, true>(Params)", None, "attention"),
    ("void pytorch_flash::flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<64> >(Params)", None, "attention"),
    ("void pytorch_flash::flash_bwd_convert_dq_kernel<Flash_bwd_kernel_traits<64> >(Params)", None, "attention"),
    (
        "fmha_cutlassB_bf16_aligned_64x64_k64_sm80(PyTorchMemEffAttention::AttentionBackwardKernel<>::Params)",
        *(None, "attention"),
    ),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3_64x64x64_kernel0_0", None, "attention"),
    ("void cudnn::fusion::compute_dot_do_o_specialized<__nv_bfloat16, 128>(cudnn::fusion::Params)", None, "attention"),
    ("void cudnn::fusion::convert_dq_to_16bits<__nv_bfloat16, 256>(cudnn::fusion::Params)", None, "attention"),
    ("triton_flex_attention_2", None, "attention"),
    ("triton_tem_fused__to_copy_flex_attention_3", None, "attention"),
    (f"void {ANON}cunn_SoftMaxForwardReg<float, float, {ANON}LogSoftMaxForwardEpilogue, 4>(float*)", None, "softmax"),
    (f"void {ANON}cunn_SoftMaxBackwardSmem<4, float, float, float>(float*)", None, "softmax"),
    (f"void {ANON}vectorized_layer_norm_kernel<float, float, false>(int)", None, "normalization"),
    (f"void {ANON}layer_norm_grad_input_kernel_vectorized<float, float>(float const*)", None, "normalization"),
    (f"void {ANON}cuComputeGradInput<float, float, false>(float const*, int, int)", None, "normalization"),
    ("_rms_norm_forward_kernel", None, "normalization"),
    (
        "void cudnn::bn_fw_tr_1C11_singleread<float, 512, true, 1, 2, 0>(cudnnTensorStruct, cudnn::reduced_divisor)",
        *(None, "normalization"),
    ),
    ("void cudnn::bn_bw_1C11_kernel_new<float, float, float2, 512, true, 1>(float, float)", None, "normalization"),
    ("triton_poi_fused_all_reduce_lift_fresh_0", None, "elementwise"),
    ("triton_poi_fused_all_gather_into_tensor_wait_tensor_view_3", None, "elementwise"),
    ("triton_red_fused_all_reduce_mul_sum_1", None, "reduction"),
    ("triton_per_fused__fused_rms_norm__to_copy_0", None, "reduction"),
    ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", None, "communication"),
    ("ncclSymDevKernel_AllReduce_RSxLD_AGxST_sum_bf16(ncclSymDevArgs)", None, "communication"),
    ("void deep_ep::internode::dispatch<false, 4, false, 512>(int4*, float*)", None, "communication"),
    ("void deep_ep::internode::combine<4, __nv_bfloat16, 8>(int4*, float*)", None, "communication"),
    ("void deep_ep::internode::cached_notify<false, 2>(int*, int)", None, "communication"),
    ("void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*)", None, "communication"),
    ("Memcpy PtoP (Device -> Device)", None, "communication"),
    ("void fbgemm_gpu::permute_2D_data_kernel<false, long, float, float>(int, int, int)", None, "copies"),
    (
        "void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true>(cudnn::ops::nchw2nhwc_params_t)",
        None,
        "copies",
    ),
    (f"void {ANON}embedding_backward_kernel<float, long>(long const*)", DENSE, "copies"),
    (f"void {ANON}sum_and_scatter<float, long>(long const*)", DENSE, "copies"),
    (f"void {ANON}compute_grad_weight<float, long>(long const*)", DENSE, "copies"),
    (f"void {ANON}krn_partials_per_segment<long>(long*, long const*)", DENSE, "copies"),
    ("void at::native::detail::split_with_sizes_copy_out_contiguous_no_cast_kernel<long>(char**)", None, "copies"),
    ("void at::native::detail::chunk_cat_cuda_kernel<float, c10::BFloat16>(float**)", None, "copies"),
    (
        (
            "void reduce_1Block_kernel<float, 128, 7, cublasGemvTensorStridedBatched<float>, "
            "cublasGemvTensorStridedBatched<float> >(float const*, float)"
        ),
        *("aten::dot", "reduction"),
    ),
    ("void at::native::tensor_kernel_scan_innermost_dim<float, std::plus<float> >(float*)", None, "reduction"),
    (
        f"void {ANON}multi_tensor_apply_kernel<{ANON}TensorListMetadata<1>, {ANON}LpNormFunctor<float, 1> >(int)",
        *(None, "reduction"),
    ),
    (f"void {ANON}lpnorm_cleanup<float, (at::native::NormType)1, float>(float const*)", None, "reduction"),
    ("void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*)", None, "elementwise"),
    ("_triton_rope", None, "elementwise"),
    ("_swiglu_forward_kernel", None, "elementwise"),
    ("liger_cross_entropy_kernel", None, "reduction"),
    (f"void fft2d_r2c_32x32<float, false, 0u, false>({DIVISOR})", "aten::cudnn_convolution", "matmul"),
    # Beside that list, in traces of V100, A100 and H100.
    (
        "void cask_cudnn_infer::computeOffsetsKernel<false, false>(cask_cudnn_infer::ComputeOffsetsParams)",
        None,
        "matmul",
    ),
    ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, float>(cublasGemvParams)", None, "matmul"),
    (f"void {ANON}ComputeInternalGradientsCUDAKernel<float>(long, float const*)", None, "normalization"),
    (f"void {ANON}max_pool_forward_nchw<float>(int, float const*, long*)", None, "reduction"),
    ("void at_cuda_detail::cub::DeviceSelectSweepKernel<Policy, bool*, long*>(bool*)", None, "reduction"),
    (f"void {ANON}upsample_bilinear2d_out_frame<float, float>(int, float)", None, "elementwise"),
    ("void cudnn::ops::scalePackedTensor_kernel<float, float>(long, float*, float)", None, "elementwise"),
)
