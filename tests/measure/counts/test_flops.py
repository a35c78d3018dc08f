"""FLOP counts against closed forms, and what counting must leave alone."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_shapes import count_work
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lm_profiler.measure.copies.module_copies import UncopyableError
from lm_profiler.measure.counts.flops import FlopCounter
from lm_profiler.record.run_record import Flops

BATCH = 2
PRODUCT = 2 * BATCH * 8 * 8
"""FLOPs of ``Linear(8, 8)`` on ``ROWS``."""
ROWS = torch.zeros(BATCH, 8)


def output_sum(module: nn.Module, batch: Any) -> Tensor:
    out: Tensor = module(batch)
    return out.sum()


def flops_of(forward: int, backward: int, recomputation: int) -> Flops:
    return Flops(forward=forward, backward=backward, recomputation=recomputation)


def counted_flops(module: nn.Module, step: Callable[..., Any] = output_sum, batch: Any = ROWS, **kwargs: Any) -> Flops:
    return count_work(module, step, batch, **kwargs).flops


class TestOtherModules:
    def test_gradients_that_nothing_needs_do_not_count(self) -> None:
        flops = counted_flops(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
        assert flops == flops_of(2 * PRODUCT, 3 * PRODUCT, 0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False))
        assert counted_flops(model).backward == 2 * PRODUCT  # the first's weight, the second's input

    def test_products_with_vectors_count(self) -> None:
        assert counted_flops(nn.Linear(8, 8), lambda m, b: output_sum(m, ROWS)).forward == PRODUCT
        model = nn.Linear(4, 3)
        assert counted_flops(model, batch=torch.zeros(4)).forward == 2 * 4 * 3
        assert counted_flops(model, lambda m, b: m.weight @ b @ torch.zeros(3), torch.zeros(4)).forward == 2 * 4 * 3 + 6

    def test_routed_experts_count_their_rows_once(self) -> None:
        def step(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
            return torch._grouped_mm(batch[0], model.weight, offs=batch[1]).square().sum()

        model = nn.Module()
        model.weight = nn.Parameter(torch.zeros(3, 16, 32, dtype=torch.bfloat16))
        batch = torch.zeros(24, 16, dtype=torch.bfloat16), torch.tensor([8, 16, 24], dtype=torch.int32)
        assert counted_flops(model, step, batch) == flops_of(2 * 24 * 16 * 32, 2 * 24 * 16 * 32, 0)

    @pytest.mark.parametrize("wrap", [nn.utils.parametrizations.weight_norm, torch.compile])
    def test_wrapped_modules_count_as_plain(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.compile's own imports
            model = wrap(nn.Linear(8, 8))
        assert counted_flops(model) == flops_of(PRODUCT, PRODUCT, 0)

    def test_sharded_weights_count_whole(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        try:
            model = fully_shard(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (1,)))
            assert counted_flops(model) == flops_of(PRODUCT, PRODUCT, 0)
            with pytest.raises(UncopyableError, match="DistributedDataParallel"):
                count_work(nn.parallel.DistributedDataParallel(nn.Linear(8, 8)), output_sum, ROWS)
        finally:
            dist.destroy_process_group()


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.reentrant = reentrant

    def segment(self, x: Tensor) -> Tensor:
        with torch.no_grad():  # recomputed too, though gradients are off
            shift = self.second(x)
        return torch.tanh(self.first(x) + shift)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.segment, self.second(x), use_reentrant=self.reentrant)


class OwnCheckpoint(torch.autograd.Function):
    """What libraries with a checkpointing of their own do."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.run, ctx.x = run, x.detach()
        return run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.x.requires_grad_()
            y = ctx.run(x)
        torch.autograd.backward(y, grad)
        return None, x.grad


class TestFusedEvaluation:
    """What torch runs as one operator in evaluation, and as many in training."""

    ROWS, LENGTH, WIDTH, HEADS, INNER = 2, 32, 48, 4, 96

    def attention_flops(self, lengths: Sequence[int]) -> int:
        return sum(8 * length * self.WIDTH**2 + 4 * length**2 * self.WIDTH for length in lengths)

    def layer_flops(self, lengths: Sequence[int]) -> int:
        return self.attention_flops(lengths) + sum(lengths) * 4 * self.WIDTH * self.INNER

    def layer(self) -> nn.TransformerEncoderLayer:
        return nn.TransformerEncoderLayer(self.WIDTH, self.HEADS, self.INNER, batch_first=True, dropout=0.0)

    def evaluated(self, module: nn.Module, *inputs: Any) -> Flops:
        counter = FlopCounter()
        with torch.inference_mode(), counter:
            module.eval()(*inputs)
        return counter.flops()

    def test_encoder_layers_count_as_in_training(self) -> None:
        x = torch.zeros(self.ROWS, self.LENGTH, self.WIDTH)
        forward = self.layer_flops([self.LENGTH] * self.ROWS)
        assert counted_flops(self.layer(), output_sum, x).forward == forward
        assert self.evaluated(self.layer(), x) == flops_of(forward, 0, 0)
        assert self.evaluated(nn.TransformerEncoder(self.layer(), 2), x) == flops_of(2 * forward, 0, 0)

    def test_padded_sequences_count_with_their_own_lengths(self) -> None:
        x, lengths = torch.zeros(self.ROWS, self.LENGTH, self.WIDTH), [self.LENGTH, 20]
        padding = torch.arange(self.LENGTH) >= torch.tensor(lengths)[:, None]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls nested tensors a prototype
            seen = self.evaluated(nn.TransformerEncoder(self.layer(), 2), x, None, padding)
        assert seen == flops_of(2 * self.layer_flops(lengths), 0, 0)

    def test_attention_counts_as_in_training(self) -> None:
        x = torch.zeros(self.ROWS, self.LENGTH, self.WIDTH)
        attention = nn.MultiheadAttention(self.WIDTH, self.HEADS, batch_first=True)
        assert self.evaluated(attention, x, x, x) == flops_of(self.attention_flops([self.LENGTH] * self.ROWS), 0, 0)


def test_recomputation_of_torch_and_of_others() -> None:
    for reentrant in (False, True):
        assert counted_flops(Checkpointed(reentrant)) == flops_of(3 * PRODUCT, 3 * PRODUCT, 2 * PRODUCT)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    flops = counted_flops(model, lambda m, b: OwnCheckpoint.apply(m[1], m[0](b)).sum())
    assert flops == flops_of(2 * PRODUCT, 3 * PRODUCT, PRODUCT)
