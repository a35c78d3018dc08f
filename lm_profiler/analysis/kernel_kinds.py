"""What a kernel or an operator does, told by its name."""

from __future__ import annotations

import re
from functools import lru_cache

from lm_profiler.record.kernels import Kind

MEMORY_BOUND: frozenset[Kind] = frozenset({"elementwise", "normalization", "reduction", "softmax", "copies"})
"""Kinds with so little arithmetic for each byte that memory sets their pace."""

# Asked from top to bottom; the first that is found anywhere in the name counts. Order matters: cuBLAS's
# splitKreduce_kernel is part of a matrix product, FlashAttention is written with CUTLASS, and a cast is an
# elementwise_kernel whose functor copies.
_KERNELS: tuple[tuple[Kind, str], ...] = (
    ("communication", r"nccl|rccl|all_?reduce|all_?gather|reduce_?scatter|nvshmem|Memcpy P(to|eer)"),
    ("host_copies", r"^Memcpy (HtoD|DtoH|HtoH)"),
    ("copies", r"^Mem(cpy|set)"),
    # torch.compile's, whose names list all that was fused: the template says what the kernel does.
    ("attention", r"^triton_tem_.*attention"),
    ("matmul", r"^triton_(tem_|mm|bmm)|^triton_.*_(mm|bmm|addmm)_template"),
    ("elementwise", r"^triton_(poi|for)_"),
    ("reduction", r"^triton_(red|per|split_scan)_"),
    ("normalization", r"(layer|rms|batch|group|instance)_?norm|gammabeta|rowwisemoments|^bn_(fw|bw)"),
    ("attention", r"flash|fmha|attention|attn|sdpa"),
    ("softmax", r"softmax"),
    ("matmul", r"gemm|gemv|nvjet|xmma|cublas|wgmma|cutlass|splitkreduce|convol|wgrad|dgrad|winograd|matmul|dot_kernel"),
    ("matmul", r"^Cijk_|(^|_)b?mm(_|$)"),
    ("reduction", r"reduce|reduction|lpnorm|nll_loss|cross_entropy|devicescan|radixsort|multinomial|argm(ax|in)"),
    ("copies", r"copy|fillfunctor|cat(array|_)|gather|scatter|index|embedding|transpose|permute|tri[ul]_"),
    ("elementwise", r"elementwise|pointwise|foreach|multi_tensor_apply|functor|adam|masked_fill|dropout|distribution"),
    ("elementwise", r"silu|gelu|swiglu|rope|rotary|unscale"),
)

_POINTWISE = (
    "add|sub|rsub|mul|div|floor_divide|true_divide|remainder|fmod|neg|abs|sign|pow|square|sqrt|rsqrt|reciprocal|exp2?|"
    "log|log1p|log2|sin|cos|tan|erf|polar|complex|sigmoid|tanh|silu|gelu|relu|leaky_relu|elu|celu|selu|mish|softplus|"
    "glu|logit|threshold|hard(tanh|swish|sigmoid)|clamp(_min|_max)?|maximum|minimum|floor|ceil|round|lerp|addcmul|"
    "addcdiv|where|masked_fill|eq|ne|lt|le|gt|ge|isnan|isinf|isfinite|nan_to_num|(logical|bitwise)_(and|or|not)|"
    "dropout|native_dropout|bernoulli|normal|uniform"
)
_REDUCTIONS = (
    "sum|nansum|mean|prod|amax|amin|max|min|argmax|argmin|any|all|norm|linalg_vector_norm|var|std|var_mean|logsumexp|"
    "cumsum|cumprod|sort|topk|median|kthvalue|bincount|multinomial|nll_loss(2d)?_forward|mse_loss"
)
_COPIES = (
    "copy|cat|fill|zero|index|index_select|index_add|_index_put_impl|gather|scatter|scatter_add|masked_(select|scatter)|"
    "roll|flip|triu|tril|arange|constant_pad_nd|split_with_sizes_copy|nll_loss|embedding_dense|_local_scalar_dense"
)


def _named(names: str) -> str:
    """Operators of these names: in place, their backward ones and the foreach ones too."""
    return rf"^aten::(_foreach_)?({names})(_backward)?_?$"


# Only operators that compute: one that only calls others (aten::linear, aten::softmax) has no kind, or its children
# would count twice.
_OPERATORS: tuple[tuple[Kind, str], ...] = (
    ("communication", r"nccl|gloo|c10d|all_?reduce|all_?gather|reduce_?scatter"),
    ("attention", r"^aten::_(scaled_dot_product_(flash|efficient|cudnn|fused)|(flash|efficient|cudnn)_attention)"),
    ("attention", r"^(?!aten::|autograd::).*(attention|attn|fmha)"),
    ("softmax", r"^aten::_(log_|masked_)?softmax"),
    ("normalization", r"^aten::(native_|_fused_|cudnn_|miopen_)(layer|rms|batch|group)_norm"),
    ("matmul", r"^aten::(_foreach_)?(mm|bmm|addmm|addbmm|baddbmm|addmv|mv|dot|vdot|addr|_addmm_activation)_?$"),
    ("matmul", r"^aten::_(scaled|grouped|scaled_grouped|int|weight_int8pack|weight_int4pack)_mm"),
    ("matmul", r"^aten::(mkldnn|cudnn|miopen|slow)_conv|^aten::(mkldnn_linear|convolution_backward)|^mkl(dnn)?::"),
    ("elementwise", r"^aten::_(fused_(adamw?|sgd|adagrad)|amp_foreach_non_finite)"),
    ("copies", _named(_COPIES)),
    ("reduction", _named(_REDUCTIONS)),
    ("elementwise", _named(_POINTWISE)),
)


@lru_cache(maxsize=4096)
def kernel_kind(name: str, operator: str | None = None) -> Kind:
    """What runs on the device under ``name``; where that says nothing, what ``operator`` does, which launched it.

    Args:
        name: as the profiler writes it: a kernel's, with its arguments or without, or ``Memcpy …``.
        operator: such as ``aten::mm``.
    """
    kind = _first(_KERNELS, name)
    return operator_kind(operator) if kind == "other" and operator is not None else kind


@lru_cache(maxsize=4096)
def operator_kind(name: str) -> Kind:
    """What the operator ``name``, such as ``aten::mm``, does itself, without the operators that it calls."""
    return _first(_OPERATORS, name)


def _first(table: tuple[tuple[Kind, str], ...], name: str) -> Kind:
    return next((kind for kind, pattern in table if re.search(pattern, name, re.IGNORECASE)), "other")
