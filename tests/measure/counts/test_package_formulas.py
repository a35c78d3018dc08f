"""FLOPs of kernels of published packages, on stand-ins with the names and arguments of the packages' own operators."""

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from on_shapes import steps_of
from torch import Tensor, nn

from lm_profiler.measure.counts.flops import FlopCounter
from lm_profiler.measure.counts.package_formulas import PACKAGE_FORMULAS, pairs_of_window
from lm_profiler.measure.counts.uncountable import NoFormulaError
from lm_profiler.record.run_record import Flops

BATCH, LENGTH, HEADS, WIDTH = 2, 64, 4, 8
DENSE = 4 * BATCH * HEADS * LENGTH**2 * WIDTH  # FLOPs of attention's forward


def counted_flops(work: Callable[[], Any]) -> Flops:
    counter = FlopCounter()
    with counter:
        work()
    return counter.flops()


LIBRARY = torch.library.Library("flash_attn", "FRAGMENT")  # an operator lives as long as its library
# flash-attn 2.8.4, flash_attn/flash_attn_interface.py
LIBRARY.define(
    "_flash_attn_forward(Tensor q, Tensor k, Tensor v, float dropout_p, float softmax_scale, bool causal, "
    "int window_size_left, int window_size_right, float softcap, Tensor? alibi_slopes, bool return_softmax) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.impl(
    "_flash_attn_forward",
    lambda q, *_: (torch.zeros_like(q), *(torch.zeros(1) for _ in range(3))),
    "CompositeExplicitAutograd",
)
flash_2: Any = torch.ops.flash_attn._flash_attn_forward
# The other operators are not made here: their formulas are given what torch would give them, by place as published.
flash_2_varlen = PACKAGE_FORMULAS["flash_attn::_flash_attn_varlen_forward"]
flash_2_backward = PACKAGE_FORMULAS["flash_attn::_flash_attn_backward"]
flash_3 = PACKAGE_FORMULAS["flash_attn_3::_flash_attn_forward"]
flash_3_backward = PACKAGE_FORMULAS["flash_attn_3::_flash_attn_backward"]
convolution = PACKAGE_FORMULAS["DaoAILab::_causal_conv1d_fwd_cpp"]
convolution_backward = PACKAGE_FORMULAS["DaoAILab::_causal_conv1d_bwd_cpp"]


def queries(heads: int = HEADS) -> Tensor:
    return torch.zeros(BATCH, LENGTH, heads, WIDTH)


@pytest.mark.parametrize(
    "causal, left, right, pairs",
    [
        (False, -1, -1, LENGTH**2),
        (True, -1, -1, LENGTH**2),  # in full, as torch's own
        (True, 15, -1, sum(min(i + 1, 16) for i in range(LENGTH))),
        (True, LENGTH, -1, LENGTH**2),  # flash-attn takes such a window for none
        (False, 3, 3, 7 * LENGTH - 2 * (3 + 2 + 1)),
    ],
)
def test_flash_attention_counts_the_pairs_of_its_window(causal: bool, left: int, right: int, pairs: int) -> None:
    q, k = queries(), queries(heads=1)  # one head of keys for all queries
    masks = (0.0, 1.0, causal, left, right, 0.0, None, False)
    truth = 4 * BATCH * HEADS * WIDTH * pairs
    flops = counted_flops(lambda: flash_2(q, k, k, *masks))
    assert (flops.forward, flops.uncounted) == (truth, [])
    assert flops.attention == DENSE  # as if no pair were masked

    gradients = (q, q, k, k, q, torch.zeros(1), torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(k))
    assert flash_2_backward(*gradients, *masks) == 2 * truth


@pytest.mark.parametrize("left", [None, 0, 2, 9])
@pytest.mark.parametrize("right", [None, 1, 3])
@pytest.mark.parametrize("query_count, key_count", [(5, 5), (3, 8), (8, 3)])
def test_a_window_allows_the_documented_pairs(query_count: int, key_count: int, left: int | None, right: int | None):
    """Query i meets keys from i + Tk - Tq - left to i + Tk - Tq + right, both inclusive."""
    position = torch.arange(query_count)[:, None] + key_count - query_count
    key = torch.arange(key_count)[None]
    allowed = torch.ones(query_count, key_count, dtype=torch.bool)
    if left is not None and left < key_count:
        allowed &= key >= position - left
    if right is not None and right < key_count:
        allowed &= key <= position + right
    assert pairs_of_window(query_count, key_count, left, right) == int(allowed.sum())


def test_packed_lengths_count() -> None:
    q = torch.zeros(60, HEADS, WIDTH)
    ends = torch.tensor([0, 10, 25, 60], dtype=torch.int32)
    truth = 4 * HEADS * WIDTH * (10**2 + 15**2 + 35**2)
    assert flash_2_varlen(q, q, q, ends, ends, 35, 35, 0.0, 1.0, True) == truth


def test_packed_lengths_without_values_are_a_lower_bound() -> None:
    q: Any = torch.zeros(60, HEADS, WIDTH)
    unknown: Any = SimpleNamespace(fake_mode="any", constant=None)  # as a fake tensor that no value is known of
    with pytest.raises(NoFormulaError, match="_varlen_forward of sequences whose lengths are unknown"):
        flash_2_varlen(q, q, q, unknown, unknown, 35, 35, 0.0, 1.0, True)


def test_used_lengths_of_a_cache_are_a_lower_bound() -> None:
    q, used = queries(), torch.full((BATCH,), 3, dtype=torch.int32)
    with pytest.raises(NoFormulaError, match=r"^flash_attn_3::_flash_attn_forward with seqused_k"):
        flash_3(q, q, q, seqused_k=used)


def test_the_third_version_counts() -> None:
    q = queries()
    truth = 4 * BATCH * HEADS * WIDTH * sum(min(i + 1, 16) for i in range(LENGTH))
    assert flash_3(q, q, q, causal=True, window_size_left=15) == truth
    lengths, gradients = [None] * 6, [torch.zeros_like(q) for _ in range(3)]
    assert flash_3_backward(q, q, q, q, q, torch.zeros(1), *lengths, *gradients, None, True, 15) == 2 * truth


def test_windows_of_torchs_own_packed_attention_count() -> None:
    q, ends = torch.zeros(60, HEADS, WIDTH), torch.tensor([0, 10, 60], dtype=torch.int32)
    pairs = sum(min(i + 1, 4) for i in range(10)) + sum(min(i + 1, 4) for i in range(50))
    truth = 4 * HEADS * WIDTH * pairs
    forward = PACKAGE_FORMULAS["torch_attn::_varlen_attn"]
    assert forward(q, q, q, ends, None, 50, 50, False, None, [3, 0]) == truth
    backward = PACKAGE_FORMULAS["torch_attn::_varlen_attn_backward"]
    empty = torch.zeros(1)
    assert backward(q, q, q, q, q, empty, ends, ends, 50, 50, False, empty, None, [3, 0]) == 2 * truth
    assert backward(q, q, q, q, q, empty, ends, ends, 50, 50, True, empty) == 8 * HEADS * WIDTH * (10**2 + 50**2)


def written(result: Tensor, value: float = 0.0) -> Tensor:
    """Write as a kernel does that is launched past torch's dispatcher."""
    np.copyto(result.numpy(), value)
    return result


class FlashAttnFunc(torch.autograd.Function):
    """The signature of version 4 (flash_attn/cute/interface.py), up to the window."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        qv: Tensor | None = None,
        gather_kv_indices: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int | None, int | None] = (None, None),
    ) -> Tensor:
        ctx.save_for_backward(q)
        return written(torch.empty_like(q))

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        (q,) = ctx.saved_tensors
        return (*[written(torch.empty_like(q)) for _ in range(3)], None, None, None, None, None)


class LigerFusedMoEFunction(torch.autograd.Function):
    """The signature of liger-kernel 0.8.2 (src/liger_kernel/ops/fused_moe.py)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, gate_up_proj, down_proj)
        return written(torch.empty_like(x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return (*[written(torch.empty_like(saved)) for saved in ctx.saved_tensors], None, None)


def test_functions_of_imported_packages_count(monkeypatch: pytest.MonkeyPatch) -> None:
    q = queries().requires_grad_()
    assert steps_of(FlashAttnFunc, q, q, q).flops().uncounted  # nobody knows this class
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", SimpleNamespace(FlashAttnFunc=FlashAttnFunc))
    flops = steps_of(FlashAttnFunc, q, q, q, None, None, None, True, (15, None)).flops()
    truth = 4 * BATCH * HEADS * WIDTH * sum(min(i + 1, 16) for i in range(LENGTH))
    assert (flops.forward, flops.backward, flops.attention, flops.uncounted) == (truth, 2 * truth, DENSE, [])
    assert "forward" in vars(FlashAttnFunc)
    assert "run" not in FlashAttnFunc.forward.__name__


def test_ligers_experts_count_by_the_experts_of_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(LigerFusedMoEFunction=LigerFusedMoEFunction)
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.fused_moe", module)
    tokens, width, inner, experts, per_token = 6, 8, 16, 4, 2
    x = torch.zeros(tokens, width, requires_grad=True)
    gate_up, down = torch.zeros(experts, 2 * inner, width), torch.zeros(experts, width, inner)
    chosen = torch.zeros(tokens, per_token, dtype=torch.int32)
    flops = steps_of(LigerFusedMoEFunction, x, gate_up, down, chosen, torch.zeros(tokens, per_token)).flops()
    truth = 6 * tokens * per_token * width * inner  # three matrices, two FLOPs per number
    assert (flops.forward, flops.backward, flops.uncounted) == (truth, 2 * truth, [])


# What Liger's fused loss does: torch multiplies, and a Triton kernel turns logits into their gradient in place.
_FUSED_LOSS = """
def fused_linear_cross_entropy_forward(x, weight, empty, launch):
    loss = launch(empty(len(x)))
    gradient = launch(empty(*x.shape))
    for begin in range(0, len(x), 2):
        logits = x[begin:begin + 2] @ weight.t()
        gradient[begin:begin + 2] = logits @ weight
        logits.t() @ x[begin:begin + 2]
    return loss.sum() + gradient.sum()
"""


@pytest.mark.parametrize(
    "file, is_counted", [("fused_linear_cross_entropy", True), ("fused_neighborhood_attention", False)]
)
def test_ligers_elementwise_kernels_leave_the_count_complete(file: str, is_counted: bool) -> None:
    module = ModuleType(file)
    path = f"/site-packages/liger_kernel/ops/{file}.py"
    exec(compile(_FUSED_LOSS, path, "exec"), vars(module))
    rows, width, vocabulary = 4, 8, 32
    x, weight = torch.zeros(rows, width), torch.zeros(vocabulary, width)
    flops = counted_flops(lambda: module.fused_linear_cross_entropy_forward(x, weight, torch.empty, written))
    assert flops.forward == 3 * 2 * rows * width * vocabulary
    assert (flops.uncounted == []) is is_counted


def test_causal_convolutions_count_as_torchs_own() -> None:
    channels, kernel = 6, 3
    x, weight = torch.zeros(BATCH, channels, LENGTH, requires_grad=True), torch.zeros(channels, kernel)
    truth = 2 * BATCH * LENGTH * channels * kernel
    assert convolution(x, weight, None, None, None, torch.empty(x.shape), None, False) == truth
    gradients = (None, torch.empty(x.shape), torch.empty_like(weight), None, torch.empty(0))
    assert convolution_backward(x.detach(), weight, None, x.detach(), None, None, *gradients, False) == 2 * truth

    own = nn.Conv1d(channels, channels, kernel, groups=channels, padding="same", bias=False)
    of_torch = counted_flops(lambda: own(x).sum().backward())
    assert of_torch.forward + of_torch.backward == 3 * truth
