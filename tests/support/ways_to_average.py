"""Two ranks that train a small language model in every way to average gradients, and the same in one process."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from known_loop import trainer_with
from lightning.pytorch import seed_everything
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lm_profiler.training import FakeTokens, LanguageModel

STEPS, ACCUMULATED, RANKS = 3, 2, 2
TINY: dict[str, Any] = {"d_model": 16, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 50}

WAYS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "naive_ddp": ("naive_ddp", "64-true", {}),
    "flat_ddp": ("flat_ddp", "64-true", {}),
    "overlap_ddp": ("overlap_ddp", "64-true", {}),
    "own": ("own", "64-true", {}),
    "zero": ("ddp", "64-true", {"shard_optimizer_states": True}),
    "fsdp2": ("fsdp2", "32-true", {}),
}
"""The strategy, the precision and what else the module is given."""


class HandoutDDP(nn.Module):
    """The interface that the handout of Stanford's CS336 asks for, and no more: no ``no_sync``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.works = module, list[Any]()
        for parameter in module.parameters():
            dist.broadcast(parameter.data, 0)
            parameter.register_post_accumulate_grad_hook(self._reduce)

    def _reduce(self, parameter: Tensor) -> None:
        self.works.append((dist.all_reduce(parameter.grad, async_op=True), parameter))

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.module(*inputs, **named)

    def finish_gradient_synchronization(self) -> None:
        for work, parameter in self.works:
            work.wait()
            parameter.grad /= RANKS
        self.works.clear()


class CastingDDP(nn.Module):
    """Computes in ``compute_dtype``, and averages nothing: for one process."""

    def __init__(self, module: nn.Module, compute_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.module, self.compute_dtype = module, compute_dtype

    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", self.compute_dtype):
            return self.module(x)

    def finish_gradient_synchronization(self) -> None:
        pass


class NoWrapper(nn.Module):
    """Lacks what a wrapper has to have."""


def batches() -> Tensor:
    """Token ids [step · accumulated, rank, B, T + 1]."""
    return torch.randint(31, (STEPS * ACCUMULATED, RANKS, 2, 9), generator=torch.Generator().manual_seed(1))


def trained(tokens: Tensor, strategy: Any, precision: Any, seed: int = 0, **options: Any) -> dict[str, Tensor]:
    """Return the parameters after ``STEPS`` steps over ``tokens`` [step, B, T + 1]."""
    seed_everything(seed, verbose=False)
    module = LanguageModel(
        d_model=16, d_ff=32, num_layers=2, num_heads=2, vocab_size=31, optimizer="adamw", lr=0.01, **options
    )
    trainer = trainer_with(
        [], Path(), devices=1 if strategy == "auto" else RANKS, strategy=strategy, precision=precision, max_epochs=1,
        accumulate_grad_batches=ACCUMULATED, gradient_clip_val=0.5, use_distributed_sampler=False,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice on workers and on validation
        trainer.fit(module, DataLoader([(step[:, :-1], step[:, 1:]) for step in tokens], batch_size=None))
    whole = {name: _whole(value) for name, value in module.named_parameters()}
    return {name: value.detach().clone() for name, value in whole.items()}


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def train_in_every_way(rank: int, send: Callable[[object], None], port: int) -> None:
    """Train as one rank. Parameters differ at first where the way has them sent from rank 0, which sends the result."""
    from lm_profiler.training.data_parallel import WrappedDDP

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", GROUP_RANK="0",
        MASTER_ADDR="localhost", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="test",
    )  # fmt: skip
    mine = batches()[:, rank]
    for way, (strategy, precision, options) in WAYS.items():
        made = WrappedDDP(f"{__name__}:HandoutDDP") if strategy == "own" else strategy
        result = trained(mine, made, precision, seed=0 if way == "fsdp2" else rank, **options)
        if rank == 0:
            send((way, {name: value.tolist() for name, value in result.items()}))
    send((f"metrics of {rank}", logged_and_true()))


def logged_and_true() -> tuple[Any, Any]:
    """Return what is logged after each step of a rank, and its own tokens' negative log-probabilities."""
    from kept import Keeps

    seed_everything(1, verbose=False)
    keeps = Keeps()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = trainer_with([keeps], Path(), strategy="ddp", devices=2, max_steps=4)
        trainer.fit(LanguageModel(**TINY, lr=0.1, metrics=True), FakeTokens(batch_size=2, context_length=12))
    return keeps.logged, keeps.truth
