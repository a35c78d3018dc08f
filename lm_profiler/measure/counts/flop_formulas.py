"""The FLOPs of one operator of torch, from its arguments and its result.

Convention: a multiply-add is two FLOPs. Only matmuls, convolutions and attention count; element-wise work, norms,
softmax, look-ups, distances without a matmul, solvers and Fourier transforms do not. Causal attention counts in full,
4·B·T²·D forward per layer, as in PaLM (Chowdhery et al. 2022, appendix B) and most published MFUs; to count half of
it, subtract 2·B·T²·D per layer forward and 4·B·T²·D backward. Flash kernels compute the scores again in their backward:
not counted, as it is their own choice. Recurrent layers of oneDNN and cuDNN compute the gradient of their input even
where nobody needs it: counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lm_profiler.torch_names import SCHEMA, SPARSE_VALUES

Formula = Callable[..., int]  # takes the operator's arguments and, as ``out_val``, its result; returns FLOPs

# Operators of distributed torch, which communicate and multiply nothing.
_PARALLEL = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "fsdp")
TORCHS_OWN = frozenset(("aten", "prim", "prims", "profiler", "higher_order", *_PARALLEL))
# namespaces whose operators are known: those that multiply have a formula or are in ``_UNKNOWN``
_KNOWN = {*TORCHS_OWN, "torchvision", "torchaudio", "torch_scatter", "torch_cluster"} - {"higher_order"}

# operators that multiply, and have no formula in torch or here
_UNKNOWN = {
    *("aten::_int_mm", "aten::_trilinear", "aten::_foreach_mm", "aten::conv_tbc", "aten::_mixed_dtypes_linear"),
    *("aten::hspmm", "aten::sparse_sampled_addmm", "aten::_sparse_sparse_matmul", "aten::_sparse_mm_reduce_impl"),
    *("aten::_sparse_semi_structured_linear", "aten::_sparse_semi_structured_mm"),
    *("aten::_sparse_semi_structured_addmm", "aten::_cslt_sparse_mm", "aten::_dyn_quant_matmul_4bit"),
    *("aten::_weight_int4pack_mm", "aten::_weight_int4pack_mm_for_cpu", "aten::_weight_int8pack_mm"),
    *("aten::_weight_int4pack_mm_with_scales_and_zeros", "aten::quantized_gru", "aten::quantized_lstm"),
    *("aten::_native_multi_head_attention", "aten::_transformer_encoder_layer_fwd"),
    *("aten::_triton_multi_head_attention", "aten::_triton_scaled_dot_attention"),
    *("aten::mkldnn_linear", "aten::mkldnn_convolution", "aten::miopen_convolution", "aten::_mps_convolution"),
    *("aten::_lstm_mps", "torchvision::deform_conv2d", "torchvision::_deform_conv2d_backward"),
}
OVERLOAD = type(torch.ops.aten.add.Tensor)  # the class of operators with a schema; higher-order operators have others


class UncountableError(Exception):
    """Raised where the FLOPs are unknown; the message is the end of "FLOPs unknown: …"."""


def formula_of(operator: Any) -> Formula | None:
    """Return the formula of ``operator``, an overload or a higher-order operator; None where it multiplies nothing.

    Raises:
        UncountableError: It is unknown.
    """
    name = _name(operator)
    for packet in (getattr(operator, "overloadpacket", operator), _without_underscore(name)):
        if packet is not None and (formula := _OURS.get(packet) or flop_registry.get(packet)):
            return formula
    if name.partition("::")[0] in _KNOWN and name not in _UNKNOWN:
        return None
    raise UncountableError(f"{name} has no formula; torch.utils.flop_counter.register_flop_formula gives it one")


def _name(operator: Any) -> str:
    if not isinstance(operator, OVERLOAD):
        return f"higher_order::{operator}"
    return str(SCHEMA.of(operator).name)


def _without_underscore(name: str) -> Any:
    """Return ``addmm`` for ``addmm_``, which does the same in place."""
    namespace, _, base = name.partition("::")
    if namespace != "aten" or not base.endswith("_") or base.startswith("__"):
        return None
    return getattr(torch.ops.aten, base[:-1], None)


def _matmul(left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    """Count the matmul of [G, M, K] and [G, K, N], where G, M and N may be missing.

    Routed groups (mixture of experts) share the rows of ``left``, which count once.
    """
    columns = right.shape[-1] if right.ndim > 1 else 1
    if left.layout is not torch.strided:
        return 2 * _stored(left) * columns
    if right.layout is not torch.strided:
        return 2 * _stored(right) * left.shape[0]
    groups = left.shape[0] if left.ndim == right.ndim == 3 else 1
    return 2 * groups * prod(left.shape[-2:]) * columns


def _stored(factor: Tensor) -> int:
    """Return the number of stored elements of a sparse matrix."""
    if factor.layout not in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc):
        raise UncountableError(f"a product with a matrix of layout {factor.layout}")
    if factor.layout is torch.sparse_coo:
        return int(SPARSE_VALUES.of(factor)().shape[0])
    return int(factor.values().shape[factor.ndim - 2])


def _euclidean_distances(left: Tensor, right: Tensor, **_: Any) -> int:
    return 2 * prod(left.shape) * right.shape[-2]


def _convolution(x: Tensor, weight: Tensor, *rest: Any, out_val: Tensor, **__: Any) -> int:
    """Count a convolution. ``rest``: bias, stride, padding, dilation, whether it is transposed, …"""
    return _convolution_flops(x.shape, weight, out_val.shape, rest[4])


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any, **__: Any) -> int:
    """Count the gradients of input and weight, each as much work as the convolution itself.

    ``rest``: the bias' sizes, stride, padding, dilation, whether it is transposed, …, and which gradients are wanted.
    """
    of_input, of_weight, _ = map(int, rest[7])  # the bias' gradient is a sum
    return (of_input + of_weight) * _convolution_flops(x.shape, weight, grad.shape, rest[4])


def _convolution_flops(x: Sequence[int], weight: Tensor, out: Sequence[int], transposed: bool) -> int:
    """Count one multiply-add for each weight and output position; input positions where it is transposed."""
    return 2 * weight.numel() * x[0] * prod((x if transposed else out)[2:])


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    # Two matmuls: the scores of queries and keys, and the weighted sums of values.
    return 2 * prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _backward_of(name: str, inputs: int) -> Formula:
    """Return a formula for the backward of attention on sequences of different lengths: twice torch's own forward.

    The backward takes the gradient, the forward's ``inputs`` arguments, its results, and then the lengths.
    """
    forward = flop_registry.get(getattr(torch.ops.aten, name, None))
    if forward is None:
        return _unknown
    return lambda _, *args, **__: 2 * int(forward(*args[:inputs], *args[5:9]))


def _unknown(*_: Any, **__: Any) -> int:
    raise UncountableError("this torch has no formula for attention of sequences of unlike lengths")


def _recurrent_layer(x: Tensor, w_input: Tensor, w_hidden: Tensor, *_: Any, **__: Any) -> int:
    return 2 * prod(x.shape[:-1]) * (w_input.numel() + w_hidden.numel())


def _recurrent(x: Tensor, weights: Sequence[Tensor], *_: Any, **__: Any) -> int:
    return 2 * prod(x.shape[:-1]) * sum(weight.numel() for weight in weights if weight.ndim == 2)


def _after_first(formula: Formula) -> Formula:
    """Return ``formula`` without the first argument, a bias or a gradient."""
    return lambda _, *args, **kwargs: formula(*args, **kwargs)


def _twice(formula: Formula) -> Formula:
    return lambda *args, **kwargs: 2 * formula(*args, **kwargs)


_FUSED = (
    *("flash_attention", "flash_attention_for_cpu", "efficient_attention"),
    *("cudnn_attention", "fused_attention_overrideable"),
)
_SCALED_OR_GROUPED = ("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2", "_scaled_mm_v2")
_BY_NAME: dict[str, Formula] = {
    **dict.fromkeys((*_SCALED_OR_GROUPED, "mm", "bmm", "mv", "dot", "vdot"), _matmul),
    **dict.fromkeys(
        ("addmm", "baddbmm", "addbmm", "addmv", "_addmm_activation", "_sparse_addmm"), _after_first(_matmul)
    ),
    "_euclidean_dist": _euclidean_distances,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    **{f"_scaled_dot_product_{kind}": _attention for kind in _FUSED},
    **{f"_scaled_dot_product_{kind}_backward": _after_first(_twice(_attention)) for kind in _FUSED},
    "_flash_attention_backward": _backward_of("_flash_attention_forward", inputs=3),
    "_efficient_attention_backward": _backward_of("_efficient_attention_forward", inputs=4),
    "mkldnn_rnn_layer": _recurrent_layer,
    "mkldnn_rnn_layer_backward": _twice(_recurrent_layer),
    **dict.fromkeys(("_cudnn_rnn", "miopen_rnn"), _recurrent),
    **dict.fromkeys(("_cudnn_rnn_backward", "miopen_rnn_backward"), _twice(_recurrent)),
}

_OURS: dict[Any, Formula] = {
    **{getattr(torch.ops.aten, name): formula for name, formula in _BY_NAME.items() if hasattr(torch.ops.aten, name)},
    # Known by name: importing them would import torch's compiler.
    **{operator: _twice(_attention) for operator in flop_registry if str(operator) == "flex_attention_backward"},
}
