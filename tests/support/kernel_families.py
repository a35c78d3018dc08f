"""Kernel names by kind, of the libraries that people train with, arguments shortened.

From published profiles and the sources of PyTorch, cuBLAS, cuDNN, CUTLASS, FlashAttention 2 and 3, xformers, apex,
TransformerEngine, Liger, Unsloth, DeepSpeed, bitsandbytes, vLLM, FlashInfer, Marlin, NCCL, MSCCL, DeepEP, MIOpen,
rocBLAS, quack, FBGEMM, composable kernels, AITER, oneDNN, PyTorch's SYCL kernels, Mamba and flash-linear-attention.
"""

from __future__ import annotations

FAMILIES: dict[str, str] = {
    "matmul": """
        kernel_cutlass_kernel_quackgemm_sm90GemmSm90_object_at__TiledMMA_CopyAtom
        kernel_cutlass_kernel___main__HopperWgmmaGemmKernel_object_at__CopyAtom_ThrID10_TVLayoutSrc1819201
        void RNN_blockPersist_fp_GRU<float, float, float, 128>
        nvjet_sm90_tst_192x208_64x4_2x1_v_bz_coopB_bias_TNT
        nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT
        sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas
        cutlass3x_sm90_tensorop_s64x128x16gemm_bf16
        void cublasLt::epilogue::impl::globalKernel<8, 32>
        volta_scudnn_128x64_relu_interior_nn_v1
        fused_moe_kernel
        void kgemm_4bit_inference_naive<x>
        void kgemmint8
        matmul_kernel
        _scaled_mm_kernel
        _fp8_gemm_kernel
        _matmul_ogs
        void deep_gemm::fp8_gemm_kernel<x>
        deep_gemm::sm90_fp8_gemm_1d2d_impl
        void marlin::Marlin<x>
        void gptq_marlin::Marlin<x>
        void gptq::gemm_half_q_half_gptq_4bit_kernel
        void machete::x
        void marlin_moe_wna16::Marlin
        Cijk_Ailk_Bljk_BBS_BH_MT128x128x32_MI32x32x8x1
        void ck::kernel_gemm_xdl_cshuffle_v1<x>
        miopenSp3AsmConv_v21_1_3_gfx9_fp32_stride1
        miopenGcnAsmConv1x1U
        igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt256x128x32
        gridwise_convolution_implicit_gemm_v4r4_nchw
        naive_conv_ab_nonpacked_fwd_nchw_float_double_float
        gemm_kernel
        jit:gemm:any
        gen_conv
        brg_matmul
        ref_matmul
        xe_hp_systolic_gemm_kernel
        gen9_conv_fwd
        ampere_fp16_s1688gemm_fp16_128x64_ldg8_f2f_stages_32x6_nn
        turing_fp16_s1688gemm_fp16_256x128_ldg8_f2f_tn
        volta_fp16_s884gemm_fp16_128x64_ldg8_f2f_nn
        maxwell_sgemm_128x64_nn
        sm80_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc
        sm80_xmma_wgrad_implicit_gemm_indexed_tf32f32
        cudnn::cnn::conv2d_grouped_direct_kernel
        void cudnn::cnn::wgrad_alg0_engine<float>
        void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>
        void implicit_convolve_sgemm<x>
        void explicit_convolve_sgemm<x>
        void dot_kernel<float>
        void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel<x>
        mamba_chunk_scan_fwd_kernel
        _chunk_scan_fwd_kernel
        _chunk_state_fwd_kernel
        _bmm_chunk_fwd_kernel
        causal_conv1d_fwd_kernel
        triton_mm
        triton_bmm_5
        triton_convolution2d_3
        triton_tem_fused_mm_0
        void splitKreduce_kernel<32, 16>
        void gemmk1_kernel<int, float, 256>
        void cublasLt::splitKreduce_kernel<x>
        void trsm_left_kernel<x>
    """,
    "attention": """
        kernel_cutlass_kernel_flash_attncuteflash_fwd_sm100FlashAttentionForwardSm100_object_at__tensor
        kernel_cutlass_kernel___main__BlackwellFusedMultiHeadAttentionForward_object_at__TiledMMA_ThrLayoutVMNK
        void flashinfer::BatchPODWithKVCacheTensorKernel<x>
        chunk_fwd_kernel_o
        chunk_fwd_kernel_h
        chunk_bwd_kernel_dqkwg
        fused_recurrent_fwd_kernel
        prepare_wy_repr_fwd_kernel
        recompute_w_u_fwd_kernel
        solve_tril_16x16_kernel
        parallel_nsa_fwd_kernel
        void flashinfer::MergeStateKernel<x>
        void flashinfer::BatchPrefillWithRaggedKVCacheKernel<x>
        _bwd_preprocess_do_o_dot
        _bwd_kernel_one_col_block
        void pytorch_flash::flash_fwd_kernel<X>
        flash_bwd_dot_do_o_kernel
        flash_bwd_convert_dq_kernel
        fmha_cutlassB_bf16_aligned_64x64_k64_sm80(PyTorchMemEffAttention::X)
        cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16
        void cudnn::fusion::compute_dot_do_o_specialized<x>
        void cudnn::fusion::convert_dq_to_16bits<x>(y)
        convert_dq_to_16bits
        triton_flex_attention_2
        triton_tem_fused__to_copy_flex_attention_3
        _fwd_kernel_aligned_0d1d2d3d45d6de7de
        void flash::flash_fwd_splitkv_kernel<X>
        void flash::flash_fwd_splitkv_combine_kernel<X>
        void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnBwdSm90<x>>>(P)
        void cutlass::device_kernel<flash::FlashAttnBwdPreprocess<x>>(P)
        void cutlass::device_kernel<flash::FlashAttnFwdCombine<x>>(P)
        void cutlass::device_kernel<cutlass::fmha::kernel::FmhaKernelTma<x>>
        _attn_fwd
        _attn_bwd_preprocess
        _attn_bwd
        _fwd_kernel_splitK
        kernel_unified_attention_2d
        void vllm::paged_attention_v1_kernel<x>
        void vllm::paged_attention_v2_reduce_kernel<x>
        void BatchPrefillWithPagedKVCacheKernel<x>
        void flashinfer::BatchDecodeWithPagedKVCacheKernel<x>
        void flashinfer::PersistentVariableLengthMergeStatesKernel<x>
        void ck_tile::kentry<x, ck_tile::FmhaFwdKernel<y>>
        void ck::kernel_batched_gemm_softmax_gemm_xdl_cshuffle_v1<x>
        attn_fwd.kd
        attn_fwd
        bwd_kernel_dk_dv
        bwd_kernel_dq
        aiter::fmha_fwd_hd128_bf16
        void aiter::mha_fwd
        micro_sdpa
        chunk_gated_delta_rule_fwd_kernel_h
        fused_recurrent_gated_delta_rule_fwd_kernel
    """,
    "softmax": """
        void flashinfer::sampling::OnlineSoftmaxFusedKernel<x>
        _sparsemax_forward_kernel
        cunn_SoftMaxForwardReg<LogSoftMaxForwardEpilogue>
        cunn_SoftMaxBackwardSmem
        void vllm::moe::topkGatingSoftmax<x>
        void transformer_engine::scaled_upper_triang_masked_softmax_warp_forward<x>
        void fused_softmax_forward<x>
        void attn_softmax_v2<x>
        MIOpenSoftmaxFwd
        gen9_softmax_fwd
        at::native::xpu::DispatchSoftmaxForwardKernelFunctor<x>
        void at::native::(anonymous namespace)::masked_softmax_warp_forward<x>
    """,
    "normalization": """
        kernel_cutlass_kernel_quackrmsnormRMSNorm_object_at__tensorptrbf16
        _poly_norm_forward_kernel
        _poly_norm_backward_kernel
        l2norm_fwd_kernel
        vectorized_layer_norm_kernel
        layer_norm_grad_input_kernel_vectorized
        cuComputeGradInput
        _rms_norm_forward_kernel
        void cudnn::bn_fw_tr_1C11_singleread<float>(int, cudnn::reduced_divisor)
        cudnn::bn_bw_1C11_kernel_new
        void vllm::rms_norm_kernel<c10::BFloat16>
        void vllm::fused_add_rms_norm_kernel<x>
        void (anonymous namespace)::cuApplyLayerNorm<float>
        void cuApplyLayerNorm<float, float>
        void cuComputePartGradGammaBeta<float>
        void cuComputeGradGammaBeta<float>
        void cuComputeGradInput<float>
        void layer_norm::ln_fwd_kernel<x>
        void layer_norm::ln_bwd_kernel<x>
        void layer_norm::ln_bwd_finalize_kernel<x>
        void ln_fwd_general_kernel<x>
        void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<x>
        void transformer_engine::normalization::ln_bwd_general_kernel<x>
        void fused_bias_residual_layer_norm<x>
        void fused_residual_ln<x>
        _rms_norm_backward_kernel
        _layer_norm_forward_kernel
        _layer_norm_fwd_1pass_kernel
        _group_norm_forward_kernel
        void ck_tile::kentry<ck_tile::Rmsnorm2dFwd<y>>
        MIOpenBatchNormFwdTrainSpatial
        MIOpenBatchNormBwdSpatialFinalDX
        xe_lnorm_fwd
        ref_layer_normalization_fwd
        gen9_bnorm_fwd
        at::native::xpu::LayerNormForwardKernelFunctor
        void at::native::batch_norm_collect_statistics_kernel<x>
        void at::native::batch_norm_transform_input_kernel<x>
        void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<float>
        void at::native::(anonymous namespace)::GroupNorm1dForward
        void at::native::(anonymous namespace)::ComputeFusedParamsCUDAKernel<x>
        void at::native::(anonymous namespace)::weight_norm_fwd_first_dim_kernel
    """,
    "elementwise": """
        void kdequant_mm_int32_fp16<4, 128, 512>
        void flashinfer::activation::act_and_mul_kernel<c10::BFloat16, x>
        void flashinfer::BatchQKApplyRotaryKernel<x>
        void flashinfer::BatchQKApplyRotaryPosIdsCosSinCacheKernel<x>
        void kPreconditionOptimizer32bit2State<float, 0, 4096, 8>
        void kPreconditionOptimizerStatic8bit2State<float, 0>
        void kOptimizer32bit1State<float, 1>
        void transformer_engine::delayed_scaling_recipe::update_amax_and_scale::kernel_bulk
        void transformer_engine::delayed_scaling_recipe::amax_and_scale_update_impl::kernel_bulk
        _dyt_fwd_kernel
        _approx_backward_kernel
        _DWf_DW_dfg_kernel
        void at::native::(anonymous namespace)::cdist_kernel_cuda_impl<float, x>
        void at::native::cross_kernel<float, x>
        void fbgemm_gpu::_float_to_fused8bitrowwise_cuda_kernel<float>
        void fbgemm_gpu::_fused8bitrowwise_to_float_cuda_kernel<float>
        triton_poi_fused_all_reduce_lift_fresh_0
        triton_poi_fused_all_gather_into_tensor_wait_tensor_view_3
        vllm::rotary_embedding_kernel
        _triton_rope
        _swiglu_forward_kernel
        triton__0d1d2de
        triton_
        void vllm::act_and_mul_kernel<c10::BFloat16, silu_kernel>
        void transformer_engine::(anonymous namespace)::gated_act_kernel<x>
        void transformer_engine::fused_rope_forward_kernel<x>
        void transformer_engine::multi_tensor_apply_kernel<y, transformer_engine::AdamFunctor>
        void transformer_engine::unary_kernel<x>
        void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>>
        void multi_tensor_apply_kernel<TensorListMetadata<2>, ScaleFunctor<float>>
        void multi_tensor_apply_kernel<TensorListMetadata<3>, AxpbyFunctor<float>>
        void dropout_kernel<float>
        void fused_bias_gelu<x>
        void quantize_kernel<4>
        void dequantize_kernel<x>
        void kQuantizeBlockwise<__nv_bfloat16, 64, 2, 0, 2>
        void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>
        void kOptimizerStatic8bit2StateBlockwise<x>
        void kOptimizer32bit2State<x>
        _geglu_tanh_forward_kernel
        _swiglu_backward_kernel
        element_mul_kernel
        _triton_qwen2vl_mrope
        _rope_embedding
        _fg_kernel
        _exact_forward_kernel
        SubTensorOpWithScalar1d
        ref_eltwise_fwd
        gen9_binary
        at::native::xpu::VectorizedElementwiseKernel<4, X>
        typeinfo name for at::native::xpu::UnrolledElementwiseKernel<x>
        at::native::xpu::MultiTensorApplyKernelFunctor<x>
        void cudnn::ops::scalePackedTensor_kernel<float, float>
        void at::native::(anonymous namespace)::upsample_bilinear2d_out_frame<x>
        void at::native::(anonymous namespace)::distribution_elementwise_grid_stride_kernel<x>
        void at::native::(anonymous namespace)::fused_dropout_kernel_vec<x>
        void at::native::(anonymous namespace)::multi_tensor_apply_kernel<A, at::native::UnaryOpFunctor<x>>
        void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl<at::native::BUnaryFunctor<x>>>
        void at::native::(anonymous namespace)::amp_non_finite_check_and_unscale_cuda_kernel
        void at::native::amp_update_scale_cuda_kernel
        void at::native::_assert_async_cuda_kernel<bool>
        void at::native::(anonymous namespace)::grid_sampler_2d_kernel<x>
        _state_passing_fwd_kernel
        triton_poi_fused_mm_1
        triton_for_fused_3
        void scal_kernel<float>
        void axpy_kernel_val<x>
    """,
    "reduction": """
        kernel_cutlass_kernel_quackcross_entropyCrossEntropy_object_at__tensorptrbf16gmemalign16_TiledCopy
        void kPercentileClipping<float, 2048, 4>
        void transformer_engine::(anonymous namespace)::amax_kernel<8, true, float>
        _tv_distance_kernel
        _grpo_loss_fwd_kernel
        _grpo_loss_bwd_kernel
        chunk_local_cumsum_scalar_kernel
        triton_red_fused_all_reduce_mul_sum_1
        triton_per_fused__fused_rms_norm__to_copy_0
        reduce_1Block_kernel<float, cublasGemvTensorStridedBatched<x>>
        tensor_kernel_scan_innermost_dim
        multi_tensor_apply_kernel<LpNormFunctor>
        lpnorm_cleanup
        liger_cross_entropy_kernel
        void vision::ops::(anonymous namespace)::nms_kernel_impl<float>(int)
        void multi_tensor_apply_kernel<TensorListMetadata<1>, L2NormFunctor<float>, float*>
        cleanup(float*, float*, float*)
        liger_fused_linear_cross_entropy_kernel
        liger_jsd_kernel
        _kldiv_kernel_forward
        _cross_entropy_forward
        mloPoolingG
        gen9_reduction
        gen9_pooling_fwd
        at::native::xpu::ReduceKernel<x>
        void cudnn::ops::pooling_fw_4d_kernel<x>
        void reduce_1Block_kernel<x>
        void at::native::(anonymous namespace)::max_pool_forward_nchw<float>
        void at::native::(anonymous namespace)::avg_pool2d_out_cuda_frame<x>
        void at::native::(anonymous namespace)::adaptive_average_pool<x>
        void at::native::tensor_kernel_scan_outer_dim<x>
        void at::native::sbtopk::gatherTopK<x>
        void at::native::mbtopk::radixFindKthValues<x>
        void at::native::bitonicSortKVInPlace<x>
        void cub::DeviceRadixSortSingleTileKernel<x>
        void at::native::(anonymous namespace)::nll_loss_backward_reduce_cuda_kernel_2d<x>
        void at::native::lpnorm_cleanup<x>
        void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormTwoOps<x>>>
        void at::native::(anonymous namespace)::histogram1D<x>
        void at::native::kernelHistogram1D<x>
        void thrust::cuda_cub::core::_kernel_agent<thrust::cuda_cub::__reduce::ReduceAgent<x>>
        void thrust::cuda_cub::cub::DeviceReduceKernel<x>
        void at::native::(anonymous namespace)::cross_entropy
        void at::native::(anonymous namespace)::ctc_loss_log_alpha_gpu_kernel<x>
        selective_scan_fwd_kernel
        triton_red_fused_addmm_2
        triton_unk_fused_mean_pow_0
        void asum_kernel<x>
        void nrm2_kernel<x>
    """,
    "communication": """
        ncclDevKernel_AllGather_RING_LL
        ncclSymDevKernel_AllReduce_RSxLD_AGxST
        void deep_ep::internode::dispatch<x>
        void deep_ep::internode::combine<x>
        void deep_ep::internode::cached_notify<x>
        void deep_ep::intranode::dispatch<8>
        Memcpy PtoP
        void vllm::cross_device_reduce_1stage<x>
        rccl_main
        ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)
        ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)
        ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)
        ncclDevKernel_Generic_4(x)
        mscclKernel_Sum_float_LL
        multimem_all_reduce_kernel
        void c10d::symmetric_memory::multimem_one_shot_all_reduce_kernel<x>
        void two_shot_all_reduce_kernel<x>
        one_shot_all_reduce_kernel
        void c10d::symmetric_memory::barrier_kernel
        nvshmem_putmem_on_stream
        void userbuffers_fp16_sum_inplace_gpu_rw<x>
        kuserbuffers_pushrecv
        void mscclpp::allreduce
    """,
    "copies": """
        void flashinfer::AppendPagedKVCacheKernel<x>
        void flashinfer::AppendPagedKVCacheDecodeKernel<x>
        void transformer_engine::(anonymous namespace)::swizzle_row_scaling_kernel<int4, 4, 32>
        _row_id_map_pass_1_kernel
        void fbgemm_gpu::permute_2D_data_kernel<x>
        nchwToNhwcKernel
        embedding_backward_kernel
        sum_and_scatter
        compute_grad_weight
        split_with_sizes_copy_out_contiguous_no_cast_kernel
        chunk_cat_cuda_kernel
        void vllm::reshape_and_cache_flash_kernel<x>
        void vllm::moe::moe_align_block_size_kernel<x>
        void transformer_engine::cast_transpose_general_kernel<x>
        embedding_forward_kernel
        batched_transpose_32x32_dword
        transpose_NCHW2CNHW
        Im2d2Col
        Im2Col
        Col2Im2dU
        ref_reorder
        simple_reorder
        reorder
        zeCommandListAppendMemoryCopy(D2D)
        zeCommandListAppendMemoryFill
        CopyDeviceToDevice
        hipMemcpy DtoD
        __amd_rocclr_copyBuffer
        __amd_rocclr_fillBufferAligned.kd
        void cudnn::engines_precompiled::nhwcToNchwKernel<x>
        void cudnn::ops::nchwToNhwcKernel<x>
        void at::native::(anonymous namespace)::indexSelectLargeIndex<x>
        void at::native::(anonymous namespace)::indexFuncLargeIndex<x>
        void at::native::_scatter_gather_elementwise_kernel<x>
        void at::native::vectorized_gather_kernel<16, long>
        void at::native::(anonymous namespace)::krn_partials_per_segment<long>
        void at::native::(anonymous namespace)::compute_grad_weight<float>
        void at::native::(anonymous namespace)::multi_tensor_apply_kernel<A, at::native::Copy<float>>
        void at::native::roll_cuda_kernel<float>
        void at::native::(anonymous namespace)::roll_cuda_kernel<x>
        void at::native::replication_pad_forward_kernel2d<x>
        void at::native::(anonymous namespace)::reflection_pad2d_out_kernel<x>
        void at::native::im2col_kernel<float>
        void at::native::col2im_kernel<float>
        void at::native::(anonymous namespace)::flip_cuda_kernel<x>
        void repeat_interleave_kernel
        void at::native::(anonymous namespace)::compute_cuda_kernel<long>
        void at::native::unfold_backward_kernel
        void (anonymous namespace)::elementwise_kernel_with_index<int, X>
        void at::native::(anonymous namespace)::CatArrayBatchedCopy<x>
    """,
    "host_copies": """
        zeCommandListAppendMemoryCopy(M2D)
        zeCommandListAppendMemoryCopy(D2M)
        Memcpy M2D
        CopyHostToDevice
        CopyDeviceToHost
        Memcpy DtoH (Device -> Pinned)
        Memcpy HtoD (Pageable -> Device)
    """,
    "other": """
        _fwd_kernel
        _bwd_kernel
        kernel_cutlass_kernel_mineMine_object_at__tensorptrbf16gmem_TiledCopy_CopyAtom
        void (anonymous namespace)::svd
        void regular_fft<1024u, EPT<4u>, 256u>
        void vector_fft<128u>
        void geam
    """,
}

# On Blackwell: from published profiles of B200, B300, GB200 and GB300, and others as these libraries name theirs, whose
# spelling no profile has confirmed (cuBLAS 13, cuDNN 9, CUTLASS 4 and its Python,
# FlashAttention 4, quack, TransformerEngine, FlashInfer, Triton).
BLACKWELL: dict[str, str] = {
    "matmul": """
        nvjet_sm100_tst_128x256_64x6_2x1_2cta_v_bz_TNT
        nvjet_sm103_hsh_128x256_64x6_2x1_2cta_v_bz_NNT
        nvjet_sm103_qqtst_128x256_128x6_2x2f_2cta_h_bz_NTT
        nvjet_sm103_ootst_FP4
        cutlass3x_sm100_tensorop_s256x256x8tf32gemm_2sm_bias_f32_relu
        cutlass3x_sm100_bstensorop_s256x256x64gemm_block_scaled_ue4m3xe2m1_ue4m3xe2m1_f32_bf16
        void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm10<cutlass::gemm::kernel::Gemm<x>>>
        kernel_cutlass_kernel___main__PersistentDenseGemmKernel_object_at__TiledMMA_ThrLayoutVMNK11110000
        kernel_cutlass_kernel_cudnngrouped_gemmgrouped_gemm_gluBlockScaledMoEGroupedGemmGluBiasKernel_object_at__TiledMMA
        kernel_cutlass_kernel_cudnngrouped_gemm_BlockScaledMoEGroupedGemmQuantKernel_object_at_0x1
        kernel_cutlass_kernel_quackgemm_sm100GemmSm100_object_at__TiledMMA
        kernel_cutlass_kernel_quackgemm_act_GemmActSm100_object_at__TiledMMA
        kernel_cutlass_kernel_quackgemm_dact_GemmDActSm100_object_at__TiledMMA
        bmm_Bfloat16_E2m1E2m1_Fp32_Ab16_Bb16tokFp32_t128x128x256_s6_et128x128_m256x128x64_c2x1x1_rM_TN_transOut
        bmm_E2m1_E2m1E2m1_Fp32_Ab16_Bb16_Cb16_t128x128x512u2_s3x3x3x3x1x3_et128x32
        gemm_Bfloat16_E4m3E4m3_Fp32_t128x64x128u2_s6_et64x64_m64x64x32_cga1x1x1_TN_transOut_sm100f
        void deep_gemm::sm100_bf16_gemm_impl<x>
        void deep_gemm::sm100_fp8_gemm_1d1d_impl<x>
        cudnn_generated_fort_native_matmul_sm100_knob_3_128x128x64_kernel0_0
        cudnn_generated_fort_native_conv_sm100_fprop_knob_1_kernel0_0
        sm100_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_cudnn
        sm100_xmma_wgrad_implicit_gemm_indexed_bf16bf16_bf16f32_f32
        _ZN7cutlass13device_kernelINS_4gemm6kernel13GemmUniversalIN4cute5tuple
        _grouped_mm_kernel
        _matmul_ogs_NNT_bf16xbf16xmxfp4_128x256x128x1_swiglu
        _p_matmul_ogs_NNT_bf16xbf16xmxfp4_32x256x128x1
        triton_tem_fused_mm_3
        triton_tem_fused__grouped_mm_0
        void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, false>
        _causal_conv1d_fwd_kernel
        XXT_kernel
        ba_plus_cAA_kernel
        ns_line_1_kernel
        linear_relu_square_kernel
        _addmm_fp8_rowwise
        _int4mm_kernel
        mfma_moe2_afp4_wfp4_bf16_cshuffle_t64x256x256
    """,
    "attention": """
        kernel_cutlass_kernel_flash_attncuteflash_fwd_sm100FlashAttentionForwardSm100_object_at__tensor0000o11101213
        kernel_cutlass_kernel_flash_attncuteflash_bwd_sm100FlashAttentionBackwardSm100_object_at__TiledMMA
        kernel_cutlass_kernel_flash_attncuteflash_bwd_preprocessFlashAttentionBackwardPreprocess_object_at__tensor
        kernel_cutlass_kernel_flash_attncuteflash_bwd_postprocessFlashAttentionBackwardPostprocess_object_at__tensor
        kernel_cutlass_kernel_flash_attncuteflash_fwd_combineFlashAttentionForwardCombine_object_at__tensor
        kernel_cutlass_kernel___main__BlackwellFusedMultiHeadAttentionForward_object_at__TiledMMA_ThrLayout
        kernel_cutlass_split_kv_kernel___main__BlackwellMultiHeadLatentAttentionForward_object_at__TiledMMA
        kernel_cutlass_bwd___main__BlackwellFusedMultiHeadAttentionBackward_object_at__TiledMMA
        kernel_cutlass_sum_OdO___main__BlackwellFusedMultiHeadAttentionBackward_object_at__tensorptr
        cudnn_generated_fort_native_sdpa_sm100_flash_fprop_f16_knob_1_128x128x128_4x1x1_cga1x1x1_kernel0_0
        cudnn_generated_fort_native_sdpa_sm100_flash_bprop_mxfp8_knob_31_128x128x128
        void cudnn::fusion::fmha_reduce_head<true>
        fmhaSm100fKernel_QkvFp16OFp16H128PagedKvCausalP64MultiCtasKvVarSeqQ8Kv128
        fmhaSm100aKernel_QkvBfloat16OBfloat16H128PagedKvDenseP32VarSeqQ16Kv128StaticSwapsAbForGen
        fmhaKernel_QkvE4m3OBfloat16H128
        void cutlass::device_kernel<cutlass::fmha::kernel::Sm100FmhaFwdKernelTmaWarpspecialized<cute::tuple<int>>>
        void cutlass::device_kernel<cutlass::fmha::kernel::Sm100FmhaBwdKernelTmaWarpSpecialized<cute::tuple<int>>>
        void cutlass::device_kernel<cutlass::fmha::kernel::Sm100FmhaMlaKernelTmaWarpspecialized<cute::tuple<int>>>
        flash_fwd_splitkv_mla_combine_kernel
        chunk_gated_delta_rule_fwd_kernel_h_blockdim64
        chunk_fwd_kernel_o
        kernel_cutlass_kernel_GdnCfgio_dtype_bfloat16
        kernel_cutlass_kernel_GdnBwdCfguse_initial_stateFalse
        kernel_cutlass_kernel_GdnRecomputeCfg_dtype_bfloat16
        chunk_gated_delta_rule_fwd_kkt_solve_kernel
        chunk_bwd_kernel_dqkwg
        fused_recurrent_gated_delta_rule_fwd_kernel
        mha_varlen_fwd
    """,
    "normalization": """
        kernel_cutlass_kernel_flashinfernormkernelsrmsnormRMSNormKernel_object_at__tensorptrbf16gmemalign128
        kernel_cutlass_kernel_flashinfernormkernelsfused_add_rmsnormFusedAddRMSNormKernel_object_at__tensorptr
        kernel_cutlass_kernel_quackrmsnormRMSNorm_object_at__tensorptrbf16_gmem
        kernel_cutlass_kernel_quackrmsnormRMSNormBackward_object_at__tensorptrbf16_gmem
        cudnn_generated_fort_native_rmsnorm_sm100_fwd_kernel0_0
        void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<x>
        l2norm_fwd_kernel
        _gemma_rmsnorm_kernel
        rmsNorm384Vec8Kernel
    """,
    "softmax": """
        kernel_cutlass_kernel_quacksoftmaxSoftmax_object_at__tensorptrf32_gmem
        kernel_cutlass_kernel_quacksoftmaxSoftmaxBackward_object_at__tensorptrf32_gmem
        vllm::moe::topkGatingSoftmax
    """,
    "reduction": """
        kernel_cutlass_kernel_quackcross_entropyCrossEntropy_object_at__tensorptrbf16_gmem
        kernel_cutlass_kernel_quackcross_entropyCrossEntropyBackward_object_at__tensorptrbf16_gmem
        kernel_cutlass_kernel_quacktopkTopK_object_at__tensor
        kernel_cutlass_kernel_quackreduction_baseReductionBase_object_at__tensor
        at_cuda_detail::cub::detail::scan::DeviceScanKernel
        chunk_local_cumsum_scalar_kernel
        triton_red_fused_add_mul_native_layer_norm_view_0
        void moe::dev::routing::routingRenormalize::routingIndicesClusterKernel<x>
        void moe::dev::routing::routingMainKernel<x>
        moe::dev::routing::routingCustom::routingIndicesHistogramScoresKernel
        moe::dev::routing::routingIndicesCoopKernel
        _router_triton_kernel
        softcapped_entropy_fwd_kernel
        fused_softcapped_entropy_bwd_kernel
        _logsumexp_kernel
        _helion_sum
        moe::dev::routing::routingInitExpertCounts
    """,
    "elementwise": """
        kernel_cutlass_kernel_flashinferquantizationkernelsnvfp4_quantizeNVFP4QuantizeTMAKernel_object_at__CopyAtom
        void transformer_engine::dispatch::mxfp8::quantize_kernel::quantize_mxfp8_kernel<x>
        void tensorrt_llm::kernels::quantize_with_block_size<x>
        void cvt_fp16_to_fp4<__nv_bfloat16, false>
        triton_poi_fused_addmm_gelu_view_1
        rope_fused_3way_kernel_v2_0
        fused_gdn_gating_kernel
        _fused_gate_sigmoid_mul_add_kernel
        swiglu_fwdbwd_kernel
        fusedQKRoPE19Half2Kernel
        void flashinfer::RopeQuantizeKernel<x>
        applyMLARopeAndAssignQKVKernelOptContext
        void transformer_engine::adam::AdamFunctorMaster
        act_and_mul_kernel
        _static_quant_fp8
        void transformer_engine::hadamard_transform_kernel
        _clamped_swiglu_kernel
        _to_mxfp8_across_rows_kernel
        to_mxfp8_dim1_kernel
        _lion_update_fused_kernel
        mxfp8_quantize_kernel
    """,
    "copies": """
        void moe::dev::finalize::finalizeKernelVecLoad<KernelParams<cutlass::bfloat16_t, cutlass::bfloat16_t, 4, true>>
        memcpy128
        fused_qkvzba_split_reshape_cat_contiguous_kernel
        fused_qkv_split_gdn_prefill_kernel
        void moe::dev::finalize::finalizeKernelVecLoad<x>
        set_mla_kv_buffer_kernel
        at::native::vectorized_gather_kernel
        _permute_kernel
        void swizzle_scaling_factors_kernel
        void transformer_engine::swizzle_col_scaling_kernel
        triton_scale_swizzle
        triton_mx_block_rearrange_2d_M_groups
        triton_convert_to_blocked
        _fill_indices_kernel
    """,
    "communication": """
        void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<x>
        void tensorrt_llm::kernels::mnnvl::twoshotAllreduceKernel
        ncclDevKernel_AllGather_RING_LL
        ncclSymkDevKernel_AllReduce_AGxLLMC_R
        void hybrid_ep::dispatch_kernel<x>
        userbuffers_fp16_sum_inplace_gpu_rr_rs_oop
        void moe_comm::moeA2ADispatchKernel
        moefinalize_lamport
    """,
}
