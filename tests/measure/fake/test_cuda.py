"""What fused kernels of CUDA keep for backward, by hand: no other tensor than what they are known to save."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lm_profiler.measure.fake.live import MIN_BLOCK
from lm_profiler.measure.fake.world import FakeWorld

HOPPER, AMPERE, TURING = (9, 0), (8, 0), (7, 5)
ROWS, WIDTH = 64, 1024
WIDE, NARROW = 4 * ROWS * WIDTH, 2 * ROWS * WIDTH
B, H, T, E = 2, 4, 256, 64


def bytes_added(make: Callable[[], Any], work: Callable[[Any], Tensor], gpu: bool = True) -> int:
    """Bytes that ``work`` leaves of what ``make`` has made, its result included."""
    world = FakeWorld(HOPPER if gpu else None)
    with world.inside():
        made = make()
        before = _held(world)
        kept = work(made)
        after = _held(world)
    del kept
    return after - before


def _held(world: FakeWorld) -> int:
    return world.live.held_bytes


def made_tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("dtype, each", [(torch.float32, WIDE), (torch.bfloat16, NARROW)])
def test_rms_norm_keeps_its_input_and_one_number_per_row(dtype: torch.dtype, each: int) -> None:
    def normed(gpu: bool) -> int:
        make = lambda: (nn.RMSNorm(WIDTH, dtype=dtype), made_tensor(ROWS, WIDTH, dtype=dtype))  # noqa: E731
        return bytes_added(make, lambda made: made[0](made[1]), gpu)

    assert each <= normed(gpu=True) <= each + 2 * MIN_BLOCK
    assert normed(gpu=False) >= 2 * each  # the CPU's is made of others


def test_dropout_keeps_one_byte_per_number() -> None:
    narrow, wide = partial(made_tensor, ROWS, WIDTH, dtype=torch.bfloat16), partial(made_tensor, ROWS, WIDTH)
    assert bytes_added(narrow, nn.Dropout(0.1)) == NARROW + ROWS * WIDTH
    assert bytes_added(narrow, nn.Dropout(0.1), gpu=False) == 2 * NARROW
    assert bytes_added(wide, lambda x: torch.dropout(x, 0.1, train=True)) == WIDE + ROWS * WIDTH
    for nothing in (nn.Dropout(0.0), nn.Dropout(0.1).eval(), partial(torch.dropout, p=0.1, train=False)):
        assert bytes_added(wide, nothing) == bytes_added(wide, nothing, gpu=False)


def test_gradients_have_the_shapes_of_their_tensors() -> None:
    world = FakeWorld(HOPPER)
    with world.inside():
        norm, x = nn.RMSNorm(WIDTH), made_tensor(ROWS, WIDTH)
        F.dropout(norm(x), 0.1).sum().backward()
        assert (x.grad.shape, norm.weight.grad.shape) == (x.shape, norm.weight.shape)


@pytest.mark.parametrize("dropped", [0.0, 0.1])
def test_fused_attention_keeps_no_scores(dropped: float) -> None:
    def attended(gpu: bool, **options: Any) -> int:
        attend = lambda x: F.scaled_dot_product_attention(x, x, x, **options)  # noqa: E731
        return bytes_added(partial(made_tensor, B, H, T, E), attend, gpu)

    fused = 4 * B * H * T * E + 4 * B * H * T  # its result, and the log of a sum a row
    seeds = 2 * MIN_BLOCK
    assert attended(gpu=True, dropout_p=dropped, is_causal=True) == fused + seeds
    assert attended(gpu=True, attn_mask=None, dropout_p=dropped) == fused + seeds
    assert (attended(gpu=False, dropout_p=dropped) > 4 * B * H * T * T) == (dropped > 0)


@pytest.mark.parametrize(
    "gpu, dtype, masked, kernel",
    [
        (HOPPER, torch.bfloat16, True, "Cudnn"),
        (AMPERE, torch.bfloat16, False, "Flash"),
        (AMPERE, torch.bfloat16, True, "Efficient"),
        (TURING, torch.float16, False, "Efficient"),
        (TURING, torch.bfloat16, False, None),
        (TURING, torch.float32, False, "Efficient"),
    ],
)
def test_attention_has_its_gpus_kernel(gpu: tuple[int, int], dtype: torch.dtype, masked: bool, kernel: str | None):
    """As torch 2.11 chose on simulated ones (benchmarks/simulated_gpu)."""
    with FakeWorld(gpu).inside():
        x = made_tensor(B, H, T, E, dtype=dtype)
        taken = str(F.scaled_dot_product_attention(x, x, x, torch.empty(T, T, dtype=dtype) if masked else None).grad_fn)
    assert (f"DotProduct{kernel}Attention" in taken) if kernel else "DotProduct" not in taken


@pytest.mark.parametrize("dtype, as_it_was_given", [(torch.float32, False), (torch.bfloat16, True)])
def test_the_layout_of_attentions_result_is_that_of_its_kernel(dtype: torch.dtype, as_it_was_given: bool) -> None:
    with FakeWorld(HOPPER).inside():
        x = made_tensor(B, H, T, E, dtype=dtype)
        assert F.scaled_dot_product_attention(x, x, x).is_contiguous() == as_it_was_given


def test_the_kernel_of_attention_is_also_that_of_modules_of_torch() -> None:
    def attending(dropped: float, weights: bool, gpu: bool = True) -> int:
        def make() -> tuple[nn.Module, Tensor]:
            return nn.MultiheadAttention(H * E, H, dropped, batch_first=True), made_tensor(B, T, H * E)

        return bytes_added(make, lambda made: made[0](*[made[1]] * 3, need_weights=weights)[0], gpu)

    scores = B * H * T * T
    fused = attending(dropped=0.0, weights=False)
    fused_with_dropout = attending(dropped=0.1, weights=False)
    with_weights = attending(dropped=0.0, weights=True)
    assert fused_with_dropout <= fused + 2 * MIN_BLOCK  # dropout applies to scores that are never held
    assert fused_with_dropout < with_weights - scores
    assert attending(dropped=0.1, weights=True) - with_weights == (4 + 1) * scores
    on_cpu = attending(dropped=0.0, weights=True, gpu=False)
    assert attending(dropped=0.1, weights=True, gpu=False) - on_cpu == 2 * 4 * scores


@pytest.mark.parametrize("allowed", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
def test_the_selected_kernel_is_used(allowed: SDPBackend) -> None:
    with FakeWorld(HOPPER).inside(), sdpa_kernel(allowed):
        x = made_tensor(B, H, T, E, dtype=torch.bfloat16)
        taken = F.scaled_dot_product_attention(x, x, x).grad_fn
        assert allowed.name.split("_")[0].lower() in str(taken).lower() or allowed == SDPBackend.MATH
        assert ("ScaledDot" in str(taken)) == (allowed != SDPBackend.MATH)


def test_under_autocast_the_loss_keeps_a_copy_in_float32() -> None:
    def lost(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(x, torch.zeros(ROWS, dtype=torch.int64))

    kept = bytes_added(partial(made_tensor, ROWS, WIDTH, dtype=torch.bfloat16), lost)
    few = 4 * MIN_BLOCK  # the classes, the loss, the sum of weights
    assert NARROW + WIDE <= kept <= NARROW + WIDE + few


def test_each_thread_that_multiplies_has_a_workspace_for_good() -> None:
    cublas = 32 << 20
    world = FakeWorld(HOPPER)
    with world.inside():
        x, bias = made_tensor(ROWS, ROWS), made_tensor(ROWS)
        before = _held(world)
        y = F.linear(x, x, bias)
        assert _held(world) == before + y.nbytes + cublas
        for _ in range(2):
            y.sum().backward()
            x.grad = bias.grad = None
            y = F.linear(x, x, bias)
        del y
        assert _held(world) == before + 2 * cublas


@pytest.mark.parametrize("gpu, cublas", [(HOPPER, 32 << 20), (AMPERE, (8 << 20) + (128 << 10))])
def test_a_workspace_is_as_large_as_on_its_gpu(gpu: tuple[int, int], cublas: int) -> None:
    world = FakeWorld(gpu)
    with world.inside():
        x = made_tensor(ROWS, ROWS)
        before = _held(world)
        y = x @ x
        assert _held(world) == before + y.nbytes + cublas
