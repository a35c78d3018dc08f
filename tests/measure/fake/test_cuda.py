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


def added(make: Callable[[], Any], work: Callable[[Any], Tensor], gpu: bool = True) -> int:
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


def given(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("dtype, each", [(torch.float32, WIDE), (torch.bfloat16, NARROW)])
def test_a_norm_by_mean_squares_keeps_its_input_and_a_number_a_row(dtype: torch.dtype, each: int) -> None:
    def normed(gpu: bool) -> int:
        make = lambda: (nn.RMSNorm(WIDTH, dtype=dtype), given(ROWS, WIDTH, dtype=dtype))  # noqa: E731
        return added(make, lambda made: made[0](made[1]), gpu)

    assert each <= normed(True) <= each + 2 * MIN_BLOCK
    assert normed(False) >= 2 * each  # the CPU's is made of others


def test_dropout_keeps_a_byte_a_number_and_backward_gives_equal_shapes() -> None:
    narrow, wide = partial(given, ROWS, WIDTH, dtype=torch.bfloat16), partial(given, ROWS, WIDTH)
    assert added(narrow, nn.Dropout(0.1)) == NARROW + ROWS * WIDTH
    assert added(narrow, nn.Dropout(0.1), gpu=False) == 2 * NARROW
    assert added(wide, lambda x: torch.dropout(x, 0.1, train=True)) == WIDE + ROWS * WIDTH
    for nothing in (nn.Dropout(0.0), nn.Dropout(0.1).eval(), partial(torch.dropout, p=0.1, train=False)):
        assert added(wide, nothing) == added(wide, nothing, gpu=False)
    # Backward gives gradients of the same shapes.
    world = FakeWorld(HOPPER)
    with world.inside():
        norm, x = nn.RMSNorm(WIDTH), given(ROWS, WIDTH)
        F.dropout(norm(x), 0.1).sum().backward()
        assert (x.grad.shape, norm.weight.grad.shape) == (x.shape, norm.weight.shape)


@pytest.mark.parametrize("dropped", [0.0, 0.1])
def test_fused_attention_keeps_no_scores_whatever_it_drops(dropped: float) -> None:
    def attended(gpu: bool, *args: Any, **kwargs: Any) -> int:
        attend = lambda x: F.scaled_dot_product_attention(x, x, x, *args, **kwargs)  # noqa: E731
        return added(partial(given, B, H, T, E), attend, gpu)

    fused = 4 * B * H * T * E + 4 * B * H * T  # its result, and the log of a sum a row
    seeds = 2 * MIN_BLOCK
    assert attended(True, dropout_p=dropped, is_causal=True) == fused + seeds
    assert attended(True, None, dropped) == fused + seeds
    assert (attended(False, dropout_p=dropped) > 4 * B * H * T * T) == (dropped > 0)


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
        x = given(B, H, T, E, dtype=dtype)
        taken = str(F.scaled_dot_product_attention(x, x, x, torch.empty(T, T, dtype=dtype) if masked else None).grad_fn)
    assert (f"DotProduct{kernel}Attention" in taken) if kernel else "DotProduct" not in taken


@pytest.mark.parametrize("dtype, as_it_was_given", [(torch.float32, False), (torch.bfloat16, True)])
def test_the_result_of_attention_lies_as_its_kernel_has_it(dtype: torch.dtype, as_it_was_given: bool) -> None:
    with FakeWorld(HOPPER).inside():
        x = given(B, H, T, E, dtype=dtype)
        assert F.scaled_dot_product_attention(x, x, x).is_contiguous() == as_it_was_given


def test_the_kernel_of_attention_is_also_that_of_modules_of_torch() -> None:
    def attending(dropped: float, weights: bool, gpu: bool = True) -> int:
        def make() -> tuple[nn.Module, Tensor]:
            return nn.MultiheadAttention(H * E, H, dropped, batch_first=True), given(B, T, H * E)

        return added(make, lambda made: made[0](*[made[1]] * 3, need_weights=weights)[0], gpu)

    scores = B * H * T * T
    assert attending(0.1, False) <= attending(0.0, False) + 2 * MIN_BLOCK  # it drops what it never holds
    assert attending(0.1, False) < attending(0.0, True) - scores
    assert attending(0.1, True, gpu=False) - attending(0.0, True, gpu=False) == 2 * 4 * scores
    assert attending(0.1, True) - attending(0.0, True) == (4 + 1) * scores


@pytest.mark.parametrize("allowed", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
def test_the_kernel_that_is_asked_for_is_taken(allowed: SDPBackend) -> None:
    with FakeWorld(HOPPER).inside(), sdpa_kernel(allowed):
        x = given(B, H, T, E, dtype=torch.bfloat16)
        taken = F.scaled_dot_product_attention(x, x, x).grad_fn
        assert allowed.name.split("_")[0].lower() in str(taken).lower() or allowed == SDPBackend.MATH
        assert ("ScaledDot" in str(taken)) == (allowed != SDPBackend.MATH)


def test_under_autocast_the_loss_keeps_logarithms_as_they_come_and_a_copy_in_float32() -> None:
    def lost(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(x, torch.zeros(ROWS, dtype=torch.int64))

    kept = added(partial(given, ROWS, WIDTH, dtype=torch.bfloat16), lost)
    few = 4 * MIN_BLOCK  # the classes, the loss, the sum of weights
    assert NARROW + WIDE <= kept <= NARROW + WIDE + few


def test_each_thread_that_multiplies_has_a_workspace_for_good() -> None:
    cublas = 32 << 20
    world = FakeWorld(HOPPER)
    with world.inside():
        x, bias = given(ROWS, ROWS), given(ROWS)
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
        x = given(ROWS, ROWS)
        before = _held(world)
        y = x @ x
        assert _held(world) == before + y.nbytes + cublas
