"""Counts the FLOPs of kernels of published packages: flash-attn, Liger-Kernel and causal-conv1d.

A package need not be installed: formulas are looked up by the name of an operator or of an autograd Function that ran.
Causal attention counts in full, as torch's own does. Attention in a window counts the pairs that the window allows, as
in flex attention. Backward counts twice as much as forward, without the scores that a kernel may choose to recompute.

Sources, read in August 2026: flash-attn 2.8.4 (``flash_attn/flash_attn_interface.py``), its version 3
(``hopper/flash_attn_interface.py``, ``hopper/flash_api.cpp``) and 4 (``flash_attn/cute/interface.py``), all at commit
0251105a; liger-kernel 0.8.2 (``src/liger_kernel/ops``) at ead96b61; causal-conv1d 1.6.1
(``causal_conv1d/cpp_functions.py``) at 0d2252d1. Never run on a GPU: tests call stand-ins of the same names and
arguments.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from lm_profiler.measure.counts.flex_attention import value_of
from lm_profiler.measure.counts.registered import Formula, FunctionFormulas
from lm_profiler.measure.counts.uncountable import NoFormulaError

# names of the arguments of operators, up to the last that a formula needs
_WINDOW = "causal window_size_left window_size_right"
_FLASH_2 = f"q k v dropout_p softmax_scale {_WINDOW}"
_FLASH_2_VARLEN = (
    "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale "
    f"{_WINDOW} softcap alibi_slopes return_softmax block_table leftpad_k seqused_k"
)
_FLASH_2_BACKWARD = (
    f"dout q k v out softmax_lse dq dk dv dropout_p softmax_scale {_WINDOW}"
)
_FLASH_2_VARLEN_BACKWARD = (
    "dout q k v out softmax_lse dq dk dv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k "
    f"dropout_p softmax_scale {_WINDOW}"
)
_FLASH_3 = (
    "q k v k_new v_new qv out cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k max_seqlen_q "
    "max_seqlen_k page_table kv_batch_idx leftpad_k rotary_cos rotary_sin seqlens_rotary q_descale k_descale "
    f"v_descale softmax_scale {_WINDOW} attention_chunk"
)
_FLASH_3_LENGTHS = (
    "cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_seqlen_q max_seqlen_k"
)
# The operator in Python takes the lengths before the gradients, that in C++ after them.
_FLASH_3_BACKWARD = (
    f"dout q k v out softmax_lse {_FLASH_3_LENGTHS} dq dk dv softmax_scale {_WINDOW}"
)
_FLASH_3_BACKWARD_CPP = (
    f"dout q k v out softmax_lse dq dk dv {_FLASH_3_LENGTHS} softmax_scale {_WINDOW}"
)

# arguments of ``torch.nn.attention.varlen`` (torch 2.13), whose own formula ignores windows
_VARLEN_LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k causal"
_VARLEN = f"q k v {_VARLEN_LENGTHS} scale window_size enable_gqa seqused_k block_table"
_VARLEN_BACKWARD = (
    f"dout q k v out softmax_lse {_VARLEN_LENGTHS} rng_state scale window_size"
)

# arguments that change which pairs of query and key are multiplied; calls with one of them cannot be counted here
_OTHER_PAIRS = (
    "qv",
    "k_new",
    "seqused_q",
    "seqused_k",
    "leftpad_k",
    "block_table",
    "page_table",
    "gather_kv_indices",
    "mask_mod",
    "block_sparse_tensors",
)


def attention_flops(
    name: str, arguments: Mapping[str, Any], is_masked: bool = True
) -> int:
    """Count the forward of attention by flash-attn: scores, and weighted sums of values.

    Args:
        name: the operator or Function, for messages.
        arguments: the arguments of the call, by name. Tensors are [batch, length, heads, width], or, with
            ``cu_seqlens_q``, [tokens, heads, width].
        is_masked: whether pairs that a window leaves out do not count.

    Raises:
        NoFormulaError: it is unknown which pairs are multiplied.
    """
    for argument in _OTHER_PAIRS:
        if arguments.get(argument) is not None:
            raise NoFormulaError(f"{name} with {argument}")
    if arguments.get("attention_chunk"):
        raise NoFormulaError(f"{name} with attention_chunk")
    query, key, value = arguments["q"], arguments["k"], arguments["v"]
    query_ends = arguments.get("cu_seqlens_q")
    key_ends = arguments.get("cu_seqlens_k")
    if key_ends is None:
        key_ends = query_ends
    query_lengths = _lengths(name, query, query_ends)
    key_lengths = _lengths(name, key, key_ends)
    left_keys, right_keys = _window_limits(arguments)
    pairs = 0
    for queries, keys in zip(query_lengths, key_lengths, strict=True):
        if is_masked:
            pairs += pairs_of_window(queries, keys, left_keys, right_keys)
        else:
            pairs += queries * keys
    heads: int = query.shape[-2]
    widths: int = query.shape[-1] + value.shape[-1]
    return 2 * pairs * heads * widths


def _lengths(name: str, tensor: Tensor, ends: Tensor | None) -> list[int]:
    """Return the length of each sequence in ``tensor``: the differences of ``ends``, or else its second dimension."""
    if ends is None:
        batch, length = tensor.shape[:2]
        return [length] * batch
    ends = value_of(ends)
    if ends is None:
        raise NoFormulaError(f"{name} of sequences whose lengths are unknown")
    lengths: list[int] = ends.diff().tolist()
    return lengths


def _window_limits(arguments: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return how many keys on the left and on the right of its own position a query may attend to; None means all."""
    left_keys = arguments.get("window_size_left")
    right_keys = arguments.get("window_size_right")
    if arguments.get("window_size") is not None:
        left_keys, right_keys = arguments["window_size"]
    if arguments.get("causal"):
        right_keys = 0
    return _limit(left_keys), _limit(right_keys)


def _limit(keys: int | None) -> int | None:
    """Return the limit of a window; None if there is no limit, which flash-attn writes as -1."""
    if keys is None or keys < 0:
        return None
    return keys


@cache
def pairs_of_window(
    queries: int, keys: int, left_keys: int | None, right_keys: int | None
) -> int:
    """Return how many pairs of a query and a key a window allows. The last query is at the position of the last key.

    A window without a limit on the left that ends at the query (``right_keys`` is 0) is causal attention, and counts in
    full. As in flash-attn, a limit that no sequence reaches counts as no limit.
    """
    if left_keys is not None and left_keys >= keys:
        left_keys = None
    if right_keys is not None and right_keys >= keys:
        right_keys = None
    is_causal = left_keys is None and right_keys == 0
    if is_causal or (left_keys is None and right_keys is None):
        return queries * keys
    pairs = 0
    for query in range(queries):
        position = query + keys - queries
        begin = 0 if left_keys is None else max(position - left_keys, 0)
        end = keys if right_keys is None else min(position + right_keys + 1, keys)
        pairs += max(end - begin, 0)
    return pairs


@dataclass(frozen=True)
class AttentionFormula:
    """The formula of an operator that computes attention, or its backward."""

    operator: str
    # the names of the operator's first arguments, in order, separated by spaces
    argument_names: str
    times_forward: int = 1  # FLOPs as a multiple of those of the forward

    def __call__(self, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
        """Count a call of the operator with these arguments; its result ``out_val`` is not needed."""
        arguments = self._arguments(args, kwargs)
        return self.times_forward * attention_flops(self.operator, arguments)

    def unmasked(self, *args: Any, **kwargs: Any) -> int:
        """Count the forward as if no pair were masked."""
        arguments = self._arguments(args, kwargs)
        return attention_flops(self.operator, arguments, is_masked=False)

    def _arguments(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return all arguments of a call by their names."""
        names = self.argument_names.split()
        return {**dict(zip(names, args, strict=False)), **kwargs}


def _convolution(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> int:
    """Count a depthwise convolution of ``x`` [batch, channels, length] by ``weight`` [channels, width]."""
    batch, _channels, length = x.shape
    return 2 * batch * length * weight.numel()


def _convolution_backward(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> int:
    """Count the gradients of input and weight."""
    return 2 * _convolution(x, weight)


def _no_flops(*_: Any, **__: Any) -> int:
    """Count an operator that multiplies no matrices."""
    return 0


_FORWARD_ARGUMENTS = {
    "flash_attn::_flash_attn_forward": _FLASH_2,
    "flash_attn::_flash_attn_varlen_forward": _FLASH_2_VARLEN,
    "flash_attn_3::_flash_attn_forward": _FLASH_3,
    "flash_attn_3::fwd": _FLASH_3,
    "torch_attn::_varlen_attn": _VARLEN,
    "torch_attn::_varlen_attn_out": f"out {_VARLEN}",
}
_BACKWARD_ARGUMENTS = {
    "flash_attn::_flash_attn_backward": _FLASH_2_BACKWARD,
    "flash_attn::_flash_attn_varlen_backward": _FLASH_2_VARLEN_BACKWARD,
    "flash_attn_3::_flash_attn_backward": _FLASH_3_BACKWARD,
    "flash_attn_3::bwd": _FLASH_3_BACKWARD_CPP,
    "torch_attn::_varlen_attn_backward": _VARLEN_BACKWARD,
}


def _operator_formulas() -> dict[str, Formula]:
    """Return the formulas of the operators of packages, by the operators' names."""
    formulas: dict[str, Formula] = {
        "DaoAILab::_causal_conv1d_fwd_cpp": _convolution,
        "DaoAILab::_causal_conv1d_bwd_cpp": _convolution_backward,
        "flash_attn::layer_norm_fwd_impl": _no_flops,
        "flash_attn::layer_norm_bwd_impl": _no_flops,
    }
    for name, names in _FORWARD_ARGUMENTS.items():
        formulas[name] = AttentionFormula(name, names)
    for name, names in _BACKWARD_ARGUMENTS.items():
        formulas[name] = AttentionFormula(name, names, times_forward=2)
    return formulas


# by the operator's name
PACKAGE_FORMULAS = _operator_formulas()


def _formulas_of_attention(function: Any) -> FunctionFormulas:
    """Return the formulas of a Function of flash-attn 4.

    Its arguments are found by their names, because their order differs between releases.
    """

    def forward(*args: Any, **kwargs: Any) -> int:
        return count(args, kwargs, is_masked=True)

    def unmasked(*args: Any, **kwargs: Any) -> int:
        return count(args, kwargs, is_masked=False)

    def count(args: Any, kwargs: Any, is_masked: bool) -> int:
        context = None
        call = inspect.signature(function.forward).bind(context, *args, **kwargs)
        return attention_flops(function.__name__, call.arguments, is_masked)

    return FunctionFormulas(
        forward, backward=None, backward_per_forward=2, unmasked=unmasked
    )


def _formulas_of_experts(function: Any) -> FunctionFormulas:
    """Return the formulas of Liger's mixture of experts: each token is multiplied with the weights of its experts."""

    def forward(
        x: Tensor,
        gate_up_weights: Tensor,
        down_weights: Tensor,
        expert_indices: Tensor,
        *_: Any,
    ) -> int:
        experts = gate_up_weights.shape[0]
        weights_of_expert = (gate_up_weights.numel() + down_weights.numel()) // experts
        return 2 * expert_indices.numel() * weights_of_expert

    return FunctionFormulas(forward, backward=None, backward_per_forward=2)


# autograd Functions whose kernels no operator launches, by module and name, with what makes their formulas
_FUNCTIONS: dict[tuple[str, str], Callable[[Any], FunctionFormulas]] = {
    ("flash_attn.cute.interface", "FlashAttnFunc"): _formulas_of_attention,
    ("flash_attn.cute.interface", "FlashAttnVarlenFunc"): _formulas_of_attention,
    ("liger_kernel.ops.fused_moe", "LigerFusedMoEFunction"): _formulas_of_experts,
}


def imported_functions() -> dict[Any, FunctionFormulas]:
    """Return the Functions of ``_FUNCTIONS`` that the program has imported, with their formulas."""
    formulas = {}
    for (module_name, name), formulas_of in _FUNCTIONS.items():
        function = getattr(sys.modules.get(module_name), name, None)
        if function is not None:
            formulas[function] = formulas_of(function)
    return formulas


# files of Triton kernels that multiply no matrices: those of Liger-Kernel without ``tl.dot``, and those of flash-attn
_LIGER_WITHOUT_PRODUCTS = (
    "attn_res|cross_entropy|dyt|fused_add_rms_norm|fused_linear_cross_entropy|fused_linear_jsd"
    "|fused_linear_scaled_cross_entropy|geglu|group_norm|grpo_loss|jsd|kl_div|layer_norm|llama4_rope"
    "|modulated_rms_norm|multi_token_attention|poly_norm|qwen2vl_mrope|relu_squared|rms_norm|rope|softmax"
    "|sparsemax|swiglu|tiled_mlp|tvd|vocab_parallel_cross_entropy"
)
_FILES_WITHOUT_PRODUCTS = re.compile(
    rf"/liger_kernel/ops/(?:{_LIGER_WITHOUT_PRODUCTS})\.py"
    r"|/flash_attn/(?:ops/triton/(?:layer_norm|rotary|cross_entropy)|layers/rotary)\.py"
)


@cache
def has_no_products(file: str) -> bool:
    """Return whether the kernels that ``file`` launches multiply no matrices."""
    return _FILES_WITHOUT_PRODUCTS.search(file.replace("\\", "/")) is not None
