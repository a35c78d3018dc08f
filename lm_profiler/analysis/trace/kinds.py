"""Derives the kind of a kernel or an operator from its name."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import cast

from lm_profiler.record.kernels import Kind

# kinds with so little arithmetic per byte that they are limited by the memory bandwidth
MEMORY_BOUND: frozenset[Kind] = frozenset(
    {"elementwise", "normalization", "reduction", "softmax", "copies"}
)

_Table = tuple[tuple[Kind, re.Pattern[str]], ...]


def _parsed_table(text: str) -> _Table:
    """Return the rows of ``text``: a kind and a pattern each. Patterns may have blanks; lines with # are comments."""
    rows = (
        line.split(maxsplit=1)
        for line in text.strip().splitlines()
        if not line.startswith("#")
    )
    return tuple(
        (cast(Kind, kind), re.compile(pattern, re.IGNORECASE)) for kind, pattern in rows
    )


# The first row whose pattern occurs anywhere in the name counts, so the order matters. Names of torch.compile list all
# operators that were fused, so its templates come first. cuBLAS's splitKreduce_kernel is part of a matrix product,
# FlashAttention is written with CUTLASS, and a cast is an elementwise_kernel with a functor that copies.
_KERNELS = _parsed_table(r"""
attention      ^triton_(tem_.*|flex_)attention
matmul         ^triton_(tem_|mm|bmm|conv(?!ert))|^triton_.*_(mm|bmm|addmm)_template
elementwise    ^triton_(poi|for)_
reduction      ^triton_(red|per|spl|mix|unk|split_scan)_
# torch.compile's without names that describe them (torch 2.1)
elementwise    ^triton_(_?\d|$)
communication  nccl|rccl|msccl|all_?reduce|all_?gather|reduce_?scatter|(nv|roc)shmem|cross_device_reduce
communication  deep_ep::|symmetric_memory::|multimem_|gloo::|userbuffers|^Memcpy P(to|eer)
communication  hybrid_ep::|moe_comm::|lamport|(uccl|mori)::|(^|[ :_])ep_?(dispatch|combine)|pplx::|mnnvl|moe_?a2a
communication  all_?to_?all
# of torch.cuda._sleep
waiting        (^|[ :_])(spin|(nano)?sleep)_kernel
host_copies    ^Memcpy (HtoD|DtoH|HtoH|M2D|D2M)|MemoryCopy\((M2D|D2M)|^Copy(HostToDevice|DeviceToHost)
copies         ^(hip)?Mem(cpy|set)|AppendMemory(Copy|Fill)|^CopyDeviceToDevice|rocclr_(copy|fill)|reshape_and_cache
# beside attention over the same cache
copies         AppendPagedKV
normalization  (layer|rms|batch|group|instance|weight)_?norm|gammabeta|rowwisemoments|(^|::)bn_(fw|bw)
normalization  (_|l2)norm_(fwd|bwd|forward|backward)
normalization  cuComputeGradInput|Compute(Backward)?FusedParams|ComputeInternalGradients
normalization  (^|[ :])ln_(fwd|bwd)|residual_ln|_[bl]norm|normalization::
# DeepSpeed's, beside products of its own
softmax        attn_softmax
attention      flash(?!infer)|fmha|attention|attn|sdpa|mha_(fwd|bwd|varlen)|dot_do_o|do_o_dot|convert_dq
attention      gemm_softmax_gemm|PagedKVCache|MergeState|(Prefill|Decode|POD)With\w*KVCache|one_col_block
attention      ^(fused_)?(chunk|recurrent)_(fwd|bwd)_kernel|wy_repr|_nsa_|retention|dot_kkt
# SageAttention, in Triton
attention      (^|[ :_])sage_(fwd|bwd)
# AOTriton, which torch has for AMD
attention      (^|[ :_])bwd_(kernel_fuse|preprocess|postprocess)
attention      recompute_w_u|solve_tril|_kernel_d(q|k_?dv)|_fwd_kernel_(aligned|split_?k)|delta_rule|_gla_|_gdn\w*cfg
softmax        softmax|sparsemax
# of a product that was computed before
elementwise    dequant_mm_
# cuBLAS's dot products; the first one's arguments are of a gemv
reduction      reduce_1block|nrm2|asum_kernel
matmul         (?<!fb)gemm|gemv|nvjet|xmma|cublas|wgmma|(?<!kernel_)cutlass(?!::\w+_t\b)|splitkreduce|matmul|dot_kernel
matmul         convol|(^|[_:])conv(\dd|_|$)|asmconv|wgrad|dgrad|winograd|[a-z\d]cudnn_|cask_cudnn
matmul         (^|[_: ])RNN_|^void epilogue::impl
matmul         ^Cijk_|(^|_)b?mm(_|$)|marlin|machete|(^|_)moe_(kernel|stage\d|fused_kernel)
matmul         trsm|syrk|getrf|chunk_(scan|state)_(fwd|bwd)
# Muon's products first
matmul         (^|_)(XXT|XTX|plus_cAA|ns_line|linear_relu_square)_|addmm|int4mm|mfma_moe
elementwise    qk_?rope|apply\w*rope|to_mxfp|cvt_fp|gating_kernel|gate_sigmoid
# of a mixture of experts, as in Triton's kernels and vLLM: counts and prefix sums
reduction      _combined_routing|_bitmatrix|_routing_(compute|clear)|_expt_data|MeanScaleKernel
elementwise    SubMeanKernel|_keyed_add
reduction      moe::dev::routing|(^|_)(router|moe_sum)_|logsumexp|entropy_(fwd|bwd)|_sum$
elementwise    rotary|rope(_|$)|upsample|grid_sampler|__(parallel_for|transform)
copies         roll_cuda|flip_cuda|_pad(_|\d)|im[23]?d?2?col|col2im|unfold
copies         repeat_interleave|^void.*::compute_cuda_kernel
copies         _qkv_split|kv_buffer|store_kv|finalizeKernel|rearrange|to_blocked
copies         partials?_(per_)?segment|offsets_range|to_dense_repr|bucketize_sparse|ipiv_|laswp|tensorTransform
copies         sum_and_scatter|moe_align|reorder|(^|[_: ])cast_|transform_\d{4}
reduction      reduce|reduction|l[p2]norm|lpmax|nll_loss|ctc_loss|cross_entropy|_jsd_|kl_?div|scan|cub::|multinomial
reduction      _loss_(fwd|bwd|forward|backward)|_distance_kernel|cumsum|(^|[ _:])amax_kernel|percentile
reduction      searchsorted|fp8_qparam|(^|[ :])partition_kernel|onesweep
reduction      argm(ax|in)|radix|bitonic|_sort|topk|histogram|_pool|pooling|nms_kernel|(^|\s)cleanup(<|$)
copies         copy(?!sign)|fillfunctor|cat(array|_)|gather|scatter|index|indices|embedding|compute_grad_weight
copies         transpose|permute|tri[ul]_|n(chw|hwc)to|swizzle|row_id_map
elementwise    elementwise|pointwise|foreach|multi_tensor_apply|functor|adam|masked_fill|dropout|distribution
elementwise    silu|gelu|geglu|swiglu|::glu_|relu|unscale|scalePackedTensor|amp_update|quant|k\w*Optimizer
elementwise    act_(and|kernel)|(^|[ :])(compute|clamp)_position_|future_token_ids|(^|[ :])transform_kernel
elementwise    unary|binary|eltwise|element_mul|TensorOp|Op\d?d?Tensor|scal_kernel|axpy|assert_async|bias
elementwise    state_passing|param_update|_update_fused|^_(fg|(exact|approx)_(for|back)ward)_kernel|_dfg_kernel|_dyt_
elementwise    amax_and_scale|[cp]dist_|(^|[ :])cross_kernel|(bit|fp8)rowwise
""")

_POINTWISE = (
    "add|sub|rsub|mul|div|floor_divide|true_divide|remainder|fmod|neg|abs|sign|pow|square|sqrt|rsqrt|reciprocal|exp2?|"
    "log|log1p|log2|sin|cos|tan|erf|polar|complex|sigmoid|tanh|silu|gelu|relu|leaky_relu|elu|celu|selu|mish|softplus|"
    "glu|logit|threshold|hard(tanh|swish|sigmoid)|clamp(_min|_max)?|maximum|minimum|floor|ceil|round|lerp|addcmul|"
    "addcdiv|where|masked_fill|eq|ne|lt|le|gt|ge|isnan|isinf|isfinite|nan_to_num|(logical|bitwise)_(and|or|not)|"
    "dropout|native_dropout|bernoulli|normal|uniform|exponential|random|upsample_\\w+|grid_sampler_[23]d|huber_loss|"
    "smooth_l1_loss|binary_cross_entropy|soft_margin_loss|log_sigmoid(_forward)?|prelu|atan2?|sinh|cosh|expm1|trunc"
)
_REDUCTIONS = (
    "sum|nansum|mean|prod|amax|amin|max|min|argmax|argmin|any|all|norm|linalg_vector_norm|var|std|var_mean|logsumexp|"
    "cumsum|cumprod|sort|topk|median|kthvalue|bincount|multinomial|nll_loss(2d)?_forward|mse_loss|cumm(ax|in)|logcumsumexp|"
    "nonzero|_unique2?|histc|std_mean|aminmax|_?ctc_loss|(_adaptive_)?(max|avg)_pool[123]d(_with_indices)?|"
    "adaptive_(max|avg)_pool[123]d"
)
_COPIES = (
    "copy|cat|fill|zero|index|index_select|index_add|_index_put_impl|gather|scatter|scatter_add|masked_(select|scatter)|"
    "roll|flip|triu|tril|arange|constant_pad_nd|split_with_sizes_copy|nll_loss|embedding_dense|_local_scalar_dense|"
    "_?embedding_bag|repeat_interleave|im2col|col2im|(reflection|replication)_pad[123]d|as_strided_copy|"
    "index_copy|index_fill|scatter_reduce|take|put|_weight_norm_interface"
)


def _pattern_of_names(names: str) -> str:
    """Return a pattern for operators with these ``names``, and for their in-place, backward and foreach variants."""
    return rf"^aten::(_foreach_)?({names})(_backward)?_?$"


# Only operators that compute themselves have a kind. Time of one that calls others (aten::linear, aten::softmax) would
# count twice.
_OPERATORS = _parsed_table(rf"""
communication  nccl|gloo|c10d|all_?reduce|all_?gather|reduce_?scatter
attention      ^aten::_(scaled_dot_product_(flash|efficient|cudnn|fused)|(flash|efficient|cudnn)_attention)
attention      ^(?!aten::|autograd::|\w+Backward\d*$).*(attention|attn|fmha|flash(?!infer)|(prefill|decode)_with)
softmax        ^aten::_(log_|masked_)?softmax
normalization  ^aten::(native_|_fused_|cudnn_|miopen_)(layer|rms|batch|group)_norm
matmul         ^aten::(_foreach_)?(mm|bmm|addmm|addbmm|baddbmm|addmv|mv|dot|vdot|addr|_addmm_activation)_?$
matmul         ^aten::_(scaled|grouped|scaled_grouped|int|weight_int8pack|weight_int4pack)_mm
matmul         ^aten::(mkldnn|_cudnn|miopen)_rnn
matmul         ^aten::(mkldnn|cudnn|miopen|slow)_conv|^aten::(mkldnn_linear|convolution_backward)|^mkl(dnn)?::
elementwise    ^aten::_(fused_(adamw?|sgd|adagrad)|amp_foreach_non_finite)
copies         {_pattern_of_names(_COPIES)}
reduction      {_pattern_of_names(_REDUCTIONS)}
elementwise    {_pattern_of_names(_POINTWISE)}
""")

_PYTHON_ARGUMENTS = re.compile(r"_object_at_|_tensorptr|_(Copy|MMA)Atom|_Tiled")
# parentheses that do not begin the argument list
_PARENTHESES_IN_NAMES = ("(anonymous namespace)", "(M2D", "(D2M")


@lru_cache(maxsize=4096)
def kernel_kind(name: str, operator: str | None = None) -> Kind:
    """Return the kind of the kernel ``name``; if the name is unknown, the kind of the operator that launched it."""
    kind = _first_match(_KERNELS, _without_arguments(name))
    if kind == "other" and operator is not None:
        return operator_kind(operator)
    return kind


@lru_cache(maxsize=4096)
def operator_kind(name: str) -> Kind:
    """Return the kind of the operator ``name``, such as ``aten::mm``, by what it does itself, not by what it calls."""
    return _first_match(_OPERATORS, name)


def _without_arguments(name: str) -> str:
    """Return ``name`` without its argument list, whose types may contain words of other kinds.

    Template arguments are kept.
    """
    if name.startswith("kernel_cutlass_"):
        # CUTLASS's Python kernels have their arguments in the name
        return _PYTHON_ARGUMENTS.split(name, maxsplit=1)[0]
    # The brackets that are open. Within parentheses, < and > are comparisons, as in enable_if<((8)>(0))>.
    open_brackets = ""
    for position, character in enumerate(name):
        if character == "(":
            is_part_of_name = name.startswith(_PARENTHESES_IN_NAMES, position)
            if not open_brackets and not is_part_of_name:
                return name[:position]
            open_brackets += character
        elif character == "<" and not open_brackets.endswith("("):
            open_brackets += character
        else:
            closes_last = open_brackets[-1:] + character in ("()", "<>")
            is_arrow = name[position - 1] == "-"  # ->
            if closes_last and not is_arrow:
                open_brackets = open_brackets[:-1]
    return name


def _first_match(table: _Table, name: str) -> Kind:
    """Return the kind of the first row of ``table`` whose pattern occurs in ``name``; "other" if none does."""
    return next((kind for kind, pattern in table if pattern.search(name)), "other")
