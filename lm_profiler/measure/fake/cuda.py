"""Imitates CUDA's kernels where they compute or save something else than the CPU's, on which a rehearsal runs.

Kernel choices and saved tensors are those of torch 2.11. Differences that change a plan by less than 1 % are not
imitated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from types import FunctionType
from typing import Any, Literal, TypeGuard, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lm_profiler.measure.fake.offload import refuse_host_tensors
from lm_profiler.torch_names import tree_map

_HALF_PRECISION = (torch.bfloat16, torch.float16)

# Functions that autocast computes in float32 on CUDA, but mostly in the dtype of the input on the CPU
# (``AT_FORALL_FP32`` and the lists after it in torch's ATen/autocast_mode.h, and functions that call these). Rare ones
# are left out.
_IN_FLOAT32_OF_ALL_RELEASES = frozenset({
    "binary_cross_entropy_with_logits", "cdist", "cosine_similarity", "cumprod", "cumsum", "exp", "expm1",
    "group_norm", "interpolate", "kl_div", "l1_loss", "layer_norm", "linalg_vector_norm", "log", "log1p",
    "log_softmax", "mse_loss", "nll_loss", "norm", "normalize", "pow", "prod", "reciprocal", "rsqrt", "smooth_l1_loss",
    "softmax", "softmin", "softplus", "sum", "__pow__", "__rdiv__", "__rpow__", "__rtruediv__",
})  # fmt: skip
# the same for functions that autocast changes only in some versions of torch; in 2.11 it does not change the last one
_IN_FLOAT32_OF_SOME_RELEASES = ("huber_loss", "logsumexp", "rms_norm")


def _is_in_autocast(name: str) -> bool:
    """Return whether autocast on CUDA changes the operator ``name`` in this version of torch."""
    operator = getattr(torch.ops.aten, name).default
    return bool(operator.has_kernel_for_dispatch_key("AutocastCUDA"))


_IN_FLOAT32 = _IN_FLOAT32_OF_ALL_RELEASES.union(
    filter(_is_in_autocast, _IN_FLOAT32_OF_SOME_RELEASES)
)


class KernelsOfCuda(TorchFunctionMode):
    """Imitates CUDA on the CPU.

    It computes in float32 what autocast computes in float32 on CUDA, and saves for backward what CUDA's kernels save.

    Args:
        gpu: compute capability of the GPU.
    """

    def __init__(self, gpu: tuple[int, int]) -> None:
        super().__init__()
        # by the name of a function of torch: what runs in its place
        self._replacements: dict[str, Callable[..., Tensor]] = {
            "rms_norm": _rms_norm,
            "dropout": _dropout,
            "cross_entropy": _cross_entropy,
            "scaled_dot_product_attention": partial(_attention, gpu),
        }

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call ``func`` (torch calls this for each function) as CUDA would: with its fused kernels and autocast."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map(_to_float32, (args, kwargs))
        replacement = self._replacements.get(name)
        if replacement is not None:
            if "input" in kwargs:
                # The replacements take the input as their first argument after ``func``, whatever they call it.
                args = (kwargs.pop("input"), *args)
            return replacement(func, *args, **kwargs)
        if _calls_other_functions(func):
            # torch has left this mode for the call, but the functions inside need it.
            with self:
                return _without_mode_checks(func)(*args, **kwargs)
        result = func(*args, **kwargs)
        refuse_host_tensors(result, kwargs)
        return result


# functions in which recomputation may run
_BACKWARD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)


def _calls_other_functions(func: Callable[..., Any]) -> TypeGuard[FunctionType]:
    """Return whether ``func`` may call functions of torch that are imitated here.

    Those of ``torch.nn.functional`` that are written in Python do: ``F.multi_head_attention_forward`` calls fused
    functions. So does recomputation in a backward pass, which must use the kernels of forward.
    """
    if not isinstance(func, FunctionType):
        return False
    return func.__globals__ is vars(F) or func in _BACKWARD


@cache
def _without_mode_checks(func: FunctionType) -> Callable[..., Any]:
    """Return torch's ``func`` without its check for modes, which would pass the call to the calling mode again."""
    checks = (
        "has_torch_function",
        "has_torch_function_unary",
        "has_torch_function_variadic",
    )
    names = {**func.__globals__, **dict.fromkeys(checks, _answer_no)}
    copy = FunctionType(
        func.__code__, names, func.__name__, func.__defaults__, func.__closure__
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _answer_no(*tensors: object) -> bool:
    return False


def _to_float32(value: Any) -> Any:
    """Return a tensor in half precision as float32; anything else unchanged."""
    if isinstance(value, Tensor) and value.dtype in _HALF_PRECISION:
        return value.float()
    return value


def _rms_norm(
    func: Callable[..., Tensor],
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Compute a layer norm instead, which saves nearly the same as CUDA's ``_fused_rms_norm``.

    CUDA's kernel saves its input and one number per row; a layer norm saves one more number per row. The CPU's RMS norm
    is composed of other operators, and saves a second tensor of the input's size.
    """
    if x.is_complex() or (weight is not None and weight.dtype != x.dtype):
        # not fused on CUDA either
        return func(x, normalized_shape, weight, eps)
    return F.layer_norm(x, normalized_shape, weight, None)


def _dropout(
    func: Callable[..., Tensor],
    x: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    **options: Any,
) -> Tensor:
    """Call ``native_dropout``, whose mask takes a byte per element as on CUDA; the CPU's has the input's dtype."""
    training = options.get("train", training)  # its name in torch.dropout
    if inplace:
        return func(x, p, training, inplace=True)
    if not training or not 0 < p < 1:
        return func(x, p, training)
    return torch.native_dropout(x, p, True)[0]


def _cross_entropy(
    func: Callable[..., Tensor], x: Tensor, target: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Under autocast, save both the log-probabilities in low precision and their copy in float32, as CUDA does.

    ``cross_entropy_loss`` is not in CUDA's autocast list, so it calls ``log_softmax`` in the dtype of its input. Only
    ``nll_loss`` is in the list, and gets a copy in float32.
    """
    has_low_precision = x.dtype in _HALF_PRECISION
    if not torch.is_autocast_enabled("cpu") or not has_low_precision:
        return func(x, target, *args, **kwargs)
    has_probabilities = target.is_floating_point()
    if has_probabilities or kwargs.pop("label_smoothing", 0.0):
        return func(x.float(), target, *args, **kwargs)
    with torch.autocast("cpu", enabled=False):
        class_dimension = 0 if x.dim() == 1 else 1
        log_probabilities = F.log_softmax(x, class_dimension)
        return F.nll_loss(log_probabilities.float(), target, *args, **kwargs)


_AMPERE = (8, 0)
_LARGEST_HEAD = 256  # the largest head dimension that a fused kernel takes


def _attention(
    gpu: tuple[int, int],
    func: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Call the attention kernel that CUDA would choose.

    Each fused kernel saves its result, a log-sum-exp per row and the dropout seed; they differ in the memory layout of
    the result. Without a fused kernel, the scores are stored.
    """
    if torch.is_autocast_enabled("cpu"):
        query = _to_autocast_dtype(query)
        key = _to_autocast_dtype(key)
        value = _to_autocast_dtype(value)
    if attn_mask is not None:  # a boolean mask is converted to numbers
        attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:-1], key.shape[-2])
    aten = torch.ops.aten
    scale = options.get("scale")
    is_grouped = options.get("enable_gqa", False)
    mask_arguments = (attn_mask, True, dropout_p, is_causal)
    kernel = _attention_kernel(gpu, query, attn_mask is not None, is_grouped)
    if kernel == "flash":
        result = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )
    elif kernel == "cudnn":
        result = aten._scaled_dot_product_cudnn_attention(
            query, key, value, *mask_arguments, False, scale=scale
        )
    elif kernel == "efficient":
        result = aten._scaled_dot_product_efficient_attention(
            query, key, value, *mask_arguments, scale=scale
        )
    else:
        result = aten._scaled_dot_product_attention_math(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            None,
            scale=scale,
            enable_gqa=is_grouped,
        )
    return cast(Tensor, result[0])


def _attention_kernel(
    gpu: tuple[int, int], query: Tensor, has_mask: bool, is_grouped: bool
) -> Literal["flash", "cudnn", "efficient", "math"]:
    """Return the attention kernel that CUDA would choose (ATen/native/transformers/cuda/sdp_utils.cpp).

    ``flash`` also stands for cuDNN's kernel without a mask, which saves the same. ``math`` is not fused.
    """
    switches = torch.backends.cuda
    has_fused_shape = query.dim() == 4 and query.shape[-1] <= _LARGEST_HEAD
    if not has_fused_shape:
        return "math"
    is_half = query.dtype in _HALF_PRECISION
    is_hopper_or_blackwell = gpu[0] in (9, 10)  # of Blackwell only the data-center GPUs
    has_cudnn = is_hopper_or_blackwell and switches.cudnn_sdp_enabled()
    has_flash = gpu >= _AMPERE and switches.flash_sdp_enabled()
    if is_half and not has_mask and (has_cudnn or has_flash):
        return "flash"
    if is_half and has_cudnn:
        return "cudnn"
    takes_dtype = is_half or query.dtype == torch.float32
    if gpu < _AMPERE and query.dtype == torch.bfloat16:
        takes_dtype = False
    if takes_dtype and not is_grouped and switches.mem_efficient_sdp_enabled():
        return "efficient"
    return "math"


def _to_autocast_dtype(tensor: Tensor) -> Tensor:
    """Return a tensor of floats in the dtype of autocast; others, such as indices, unchanged."""
    if not tensor.is_floating_point():
        return tensor
    return tensor.to(torch.get_autocast_dtype("cpu"))
