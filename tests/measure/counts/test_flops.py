"""FLOP counts against closed forms, and what counting must leave alone."""

from __future__ import annotations

import os
import random
import warnings
from collections import UserDict, namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from on_shapes import count_work
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchmetrics import SumMetric

from lm_profiler.measure.copies.module_copies import UncopyableError
from lm_profiler.measure.counts.flops import FlopCounter
from lm_profiler.measure.counts.uncountable import UncountableError
from lm_profiler.measure.memory.peaks import ProcessProbe
from lm_profiler.models.config import TransformerConfig, preset
from lm_profiler.models.transformer import Transformer
from lm_profiler.record.run_record import Flops
from lm_profiler.training import LanguageModel

CONFIG = TransformerConfig(d_model=16, d_ff=48, num_layers=3, num_heads=2, vocab_size=31)
BATCH, CONTEXT = 2, 8
PRODUCT = 2 * BATCH * 8 * 8
"""FLOPs of ``Linear(8, 8)`` on ``ROWS``."""
ROWS = torch.zeros(BATCH, 8)


def total(module: nn.Module, batch: Any) -> Tensor:
    out: Tensor = module(batch)
    return out.sum()


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def token_batch(batch: int = BATCH, context: int = CONTEXT) -> tuple[Tensor, Tensor]:
    return (torch.zeros(batch, context, dtype=torch.long),) * 2


def of(forward: int, backward: int, recomputation: int) -> Flops:
    return Flops(forward=forward, backward=backward, recomputation=recomputation)


def counted(module: nn.Module, step: Callable[..., Any] = total, batch: Any = ROWS, **kwargs: Any) -> Flops:
    return count_work(module, step, batch, **kwargs).flops


class TestTransformer:
    def test_is_six_n_and_attention_per_token(self) -> None:
        config, context = preset("small"), 256
        with torch.device("meta"):
            model = Transformer(config)
        flops = counted(model, cross_entropy, token_batch(3, context))
        n = config.num_parameters(embedding=False)
        rule = 6 * n + 12 * config.num_layers * config.d_model * context
        # The rule takes the norms' gains, 0.02 % of N here, for matrices.
        assert flops.model / (3 * context) == pytest.approx(rule, rel=5e-4)

    @pytest.mark.parametrize("compile_model", [False, True])
    def test_counts_the_lightning_module(self, compile_model: bool) -> None:
        sizes = {"d_model": 16, "d_ff": 48, "num_layers": 3, "num_heads": 2, "vocab_size": 31}
        module = LanguageModel(size="small", compile=False, **sizes)
        module.configure_model()
        if compile_model:
            module.model._compiled_call_impl = pytest.fail  # what `compile` sets; it must not be called
        flops = counted(module, lambda m, b: m.training_step(b, 0), token_batch())
        assert flops == counted(Transformer(CONFIG), cross_entropy, token_batch())


class TestOtherModules:
    def test_first_layer_needs_no_input_gradient_and_frozen_weights_none(self) -> None:
        flops = counted(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
        assert flops == of(2 * PRODUCT, 3 * PRODUCT, 0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False))
        assert counted(model).backward == 2 * PRODUCT  # the first's weight, the second's input

    def test_tied_weights_stay_tied(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        model[1].weight = model[0].weight
        seen = []

        def step(m: Any, b: Tensor) -> Tensor:
            seen.append(m[0].weight is m[1].weight and m[0].weight is not model[0].weight)
            return total(m, b)

        assert counted(model, step).model == 5 * PRODUCT
        assert set(seen) == {True}

    def test_vectors_and_a_tensor_that_the_step_brings_along_count(self) -> None:
        assert counted(nn.Linear(8, 8), lambda m, b: total(m, ROWS)).forward == PRODUCT
        model = nn.Linear(4, 3)
        assert counted(model, batch=torch.zeros(4)).forward == 2 * 4 * 3
        assert counted(model, lambda m, b: m.weight @ b @ torch.zeros(3), torch.zeros(4)).forward == 2 * 4 * 3 + 6

    def test_routed_experts_count_their_rows_once(self) -> None:
        def step(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
            return torch._grouped_mm(batch[0], model.weight, offs=batch[1]).square().sum()

        model = nn.Module()
        model.weight = nn.Parameter(torch.zeros(3, 16, 32, dtype=torch.bfloat16))
        batch = torch.zeros(24, 16, dtype=torch.bfloat16), torch.tensor([8, 16, 24], dtype=torch.int32)
        assert counted(model, step, batch) == of(2 * 24 * 16 * 32, 2 * 24 * 16 * 32, 0)

    @pytest.mark.parametrize("wrap", [nn.utils.parametrizations.weight_norm, torch.compile])
    def test_wrapped_modules_count_as_plain(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.compile's own imports
            model = wrap(nn.Linear(8, 8))
        assert counted(model) == of(PRODUCT, PRODUCT, 0)

    def test_sharded_weights_count_whole(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        try:
            model = fully_shard(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (1,)))
            assert counted(model) == of(PRODUCT, PRODUCT, 0)
            with pytest.raises(UncopyableError, match="DistributedDataParallel"):
                count_work(nn.parallel.DistributedDataParallel(nn.Linear(8, 8)), total, ROWS)
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
        out: Any = checkpoint(self.segment, self.second(x), use_reentrant=self.reentrant)
        return out


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
        assert counted(self.layer(), total, x).forward == forward
        assert self.evaluated(self.layer(), x) == of(forward, 0, 0)
        assert self.evaluated(nn.TransformerEncoder(self.layer(), 2), x) == of(2 * forward, 0, 0)

    def test_padded_sequences_count_with_their_own_lengths(self) -> None:
        x, lengths = torch.zeros(self.ROWS, self.LENGTH, self.WIDTH), [self.LENGTH, 20]
        padding = torch.arange(self.LENGTH) >= torch.tensor(lengths)[:, None]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls nested tensors a prototype
            seen = self.evaluated(nn.TransformerEncoder(self.layer(), 2), x, None, padding)
        assert seen == of(2 * self.layer_flops(lengths), 0, 0)

    def test_attention_counts_as_in_training(self) -> None:
        x = torch.zeros(self.ROWS, self.LENGTH, self.WIDTH)
        attention = nn.MultiheadAttention(self.WIDTH, self.HEADS, batch_first=True)
        assert self.evaluated(attention, x, x, x) == of(self.attention_flops([self.LENGTH] * self.ROWS), 0, 0)


def test_recomputation_of_torch_and_of_others() -> None:
    for reentrant in (False, True):
        assert counted(Checkpointed(reentrant)) == of(3 * PRODUCT, 3 * PRODUCT, 2 * PRODUCT)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    flops = counted(model, lambda m, b: OwnCheckpoint.apply(m[1], m[0](b)).sum())
    assert flops == of(2 * PRODUCT, 3 * PRODUCT, PRODUCT)


Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Item:
    x: Tensor


@pytest.mark.parametrize(
    "batch",
    [{"x": ROWS}, [[ROWS]], (ROWS, 3, "text"), Pair(ROWS, None), Item(ROWS), UserDict(x=ROWS)],
    ids=lambda batch: type(batch).__name__,
)
def test_containers(batch: Any) -> None:
    def step(model: nn.Module, batch: Any) -> dict[str, Any]:
        x = batch.x if hasattr(batch, "x") else batch["x"] if "x" in batch else batch[0]
        return {"loss": total(model, x[0] if isinstance(x, list) else x), "other": 1}

    before = repr(batch)
    assert counted(nn.Linear(8, 8), step, batch).forward == PRODUCT
    assert repr(batch) == before
    assert ROWS.device.type == "cpu"


class Busy(nn.Module):
    """Holds what modules hold, and changes all of it in its step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout()
        self.metric = SumMetric(nan_strategy="disable")
        self.table = torch.ones(8)  # neither a parameter nor a buffer
        self.device = torch.device("cpu")
        self.history: list[Tensor] = []
        self.count = 0
        self.call = self.multiply
        self.file = open(__file__)  # noqa: PTH123, SIM115 - what no deepcopy can take
        self.register_buffer("positions", torch.arange(8))

    def multiply(self, x: Tensor) -> Tensor:
        out: Tensor = self.drop(self.norm(self.linear(x))) * self.table + torch.randn(8, device=self.device)
        return out

    def forward(self, x: Tensor) -> Tensor:
        out = self.call(x + self.positions + torch.rand(8))
        print("a step")
        warnings.warn("a step", stacklevel=1)
        random.random()
        np.random.rand()
        self.history.append(out)
        self.metric.update(out.detach().sum())
        self.count += 1
        return out.sum()


class TestUndisturbed:
    def test_module_random_states_and_output(self, capsys: pytest.CaptureFixture[str]) -> None:
        model = Busy()
        model.file.close()
        hooked: list[Any] = []
        model.linear.register_forward_hook(lambda *args: hooked.append(args))
        total(model.linear, ROWS + 1).backward()
        hooked.clear()
        tensors = [*model.state_dict().values(), *(p.grad for p in model.linear.parameters()), model.table]
        before = [t.clone() for t in tensors]
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        assert counted(model, lambda m, b: m(b)).forward == PRODUCT
        assert all(map(torch.equal, tensors, before))
        assert [p.grad for p in model.norm.parameters()] == [None, None]
        assert torch.equal(torch.get_rng_state(), states[0])
        assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
        assert (model.history, model.count, model.metric.update_count, hooked) == ([], 0, 0, [])
        assert capsys.readouterr() == ("", "")

    @pytest.mark.parametrize("training", [True, False])
    def test_mode_of_training_holds_and_the_callers_gradient_mode_does_not(self, training: bool) -> None:
        seen = []
        with torch.inference_mode():
            counted(nn.Linear(8, 8).train(training), lambda m, b: (seen.append(m.training), total(m, b))[1])
        assert set(seen) == {training}

    def test_weights_are_never_allocated_again(self) -> None:
        probe, clear = ProcessProbe(), Path("/proc/self/clear_refs")
        if not os.access(clear, os.W_OK):
            pytest.skip("the process's peak cannot be reset here")
        # 512 MiB that were asked for and never touched: a copy would touch them.
        real = nn.Sequential(*(nn.utils.skip_init(nn.Linear, 8192, 8192) for _ in range(2)))
        counted(real, batch=torch.zeros(1, 8192))  # whatever torch imports on the way
        clear.write_text("5")
        start = probe.peaks()[2]
        counted(real, batch=torch.zeros(1, 8192))
        peak = probe.peaks()[2]
        assert peak - start < 100e6


@torch.library.custom_op("lm_profiler_tests::product", mutates_args=())
def product(left: Tensor, right: Tensor) -> Tensor:
    return left @ right


@product.register_fake
def _(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1])


class TestUncountable:
    @pytest.mark.parametrize(
        "step",
        [
            pytest.param(lambda m, b: total(m, b) * b.sum().item(), id="item"),
            pytest.param(lambda m, b: m(b[b[:, 0] > 0]).sum(), id="mask"),
            pytest.param(lambda m, b: total(m, b) * b.numpy().sum(), id="numpy"),
            pytest.param(lambda m, b: total(m, b).detach(), id="no graph"),
            pytest.param(lambda m, b: None, id="no loss"),
            pytest.param(lambda m, b: {"out": total(m, b)}, id="no loss in the mapping"),
            pytest.param(lambda m, b: LightningModule().trainer, id="no trainer"),
        ],
    )
    def test_step_is_unknown(self, step: Callable[..., Any]) -> None:
        with pytest.raises((UncountableError, RuntimeError, TypeError, AttributeError)):
            count_work(nn.Linear(8, 8), step, ROWS)

    def test_operators_without_a_formula_make_a_lower_bound(self) -> None:
        def step(model: nn.Linear, batch: Tensor) -> Tensor:
            bilinear = F.bilinear(batch, batch, model.weight[None])
            return total(model, batch) + product(batch, batch.t()).sum() + bilinear.sum()

        flops = count_work(nn.Linear(8, 8), step, ROWS).flops
        assert flops.forward == PRODUCT
        assert {"lm_profiler_tests::product", "aten::_trilinear"} <= {*flops.uncounted}

    def test_weights_without_a_shape_are_unknown(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            lazy = nn.LazyLinear(3)
        with pytest.raises(UncopyableError, match="no shape"):
            count_work(lazy, total, ROWS)
        with pytest.raises(UncopyableError, match="not a dense one"):
            count_work(nn.Linear(8, 8), lambda m, b: total(m, b[0]), [ROWS.to_sparse()])

    def test_other_errors_of_the_step_are_told(self) -> None:
        with pytest.raises(KeyError, match="labels"):
            count_work(nn.Linear(8, 8), lambda m, b: b["labels"], {"x": ROWS})
