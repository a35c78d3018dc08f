"""Two ranks train the same with and without instruments, several ways; started by test_real_ranks.py.

Argument: a folder. Prints, for each way and rank, whether weights, the optimizer's state and random numbers come
out the same to the last bit, how often the user's hook was called, and what is found where one rank is slow.
"""

import json
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks.known_ranks.loop import Delay
from benchmarks.known_ranks.processes import on_ranks
from benchmarks.known_ranks.trial import Case, watch
from known_loop import make_profiler, trainer_with
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from wall_clock import WallClockCheck

BATCHES = 24
CALLS: list[int] = []


class Dropping(LightningModule):
    """Rank and batch decide its data; dropout draws random numbers. To run a step once more is to wait for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 8))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        mean = batch.mean(0)
        torch.distributed.all_reduce(mean)
        return self.net(batch * (1 + self.global_rank) - mean + torch.rand_like(batch)).square().mean()

    def tokens_in(self, batch: Tensor) -> int:
        return batch.numel()

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader([torch.full((4, 8), 0.1 * n) for n in range(BATCHES)], batch_size=None)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Manual(Dropping):
    """Steps with every third batch, and has the ranks talk with that alone."""

    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        last = batch_idx % 3 == 2
        with self.trainer.strategy.block_backward_sync() if not last else torch.enable_grad():
            self.manual_backward(super().training_step(batch, batch_idx))
        if last:
            optimizer.step()
            optimizer.zero_grad()


class Sharded(Dropping):
    def configure_model(self) -> None:
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def halved(state, bucket):  # without types: torch compares the types themselves, and finds strings
    """A communication hook: gradients travel in half precision."""
    CALLS.append(bucket.index())
    sent = bucket.buffer().to(torch.float16) / torch.distributed.get_world_size()
    future = torch.distributed.all_reduce(sent, async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


class Hooked(Dropping):
    """Registers its hook itself: Lightning passes its option over where the device is the CPU."""

    def on_train_start(self) -> None:
        self.trainer.model.register_comm_hook(None, halved)


Way = tuple[type[Dropping], Callable[[], Any], dict[str, Any]]

WAYS: dict[str, Way] = {
    "DDP": (Dropping, DDPStrategy, {}),
    "DDP, accumulating under no_sync": (Dropping, DDPStrategy, {"accumulate_grad_batches": 4}),
    "DDP, no_sync by hand": (Manual, DDPStrategy, {}),
    "DDP, a communication hook": (Hooked, DDPStrategy, {}),
    "FSDP2": (Sharded, partial(ModelParallelStrategy, 2, 1), {}),
}


def bits(way: Way, rank: int, folder: Path, instrumented: bool) -> dict[str, Any]:
    """What is left of training."""
    module_class, strategy, options = way
    seed_everything(7 + rank, verbose=False)
    CALLS.clear()
    profiler = (
        make_profiler(warmup=1, measure=2, memory=1, trace=1, actions=1, stop_when_done=False) if instrumented else None
    )
    module = module_class()
    if not isinstance(module, Sharded):
        torch.manual_seed(7 + rank)  # DDP makes the weights equal, and the rest differ
    trainer = trainer_with(
        [profiler] if profiler else [],
        folder,
        strategy=strategy(),
        devices=2,
        use_distributed_sampler=False,
        max_epochs=1,
        **options,
    )
    trainer.fit(module)
    if profiler is not None and rank == 0:
        assert profiler.record.status == "ok", profiler.record.notes
        flops, product = profiler.record.utilisation.flops, 2 * 4 * 8 * 16 * options.get("accumulate_grad_batches", 1)
        if module_class is Dropping:  # both ranks: two products forward, three backward
            assert (flops.forward, flops.backward) == (2 * 2 * product, 2 * 3 * product), flops
    states = [value for each in trainer.optimizers[0].state.values() for value in each.values()]
    tensors = [*module.parameters(), *states]
    local = [getattr(each, "to_local", lambda each=each: each)().detach().clone() for each in tensors]
    return {"tensors": [*local, torch.get_rng_state()], "calls": list(CALLS), "steps": trainer.global_step}


def same(bits_of_run: dict[str, Any], other: dict[str, Any]) -> bool:
    return bits_of_run["steps"] == other["steps"] and all(map(torch.equal, bits_of_run["tensors"], other["tensors"]))


SHORT_S = {"data": 1e-3, "forward": 2e-3, "backward": 2e-3, "optimizer": 1e-3, "other": 1e-3}
SLOW = {
    "DDP": Case("", [Delay(1, "data", 80e-3)], SHORT_S, steps=8, turns=0),
    "DDP, rank 0": Case("", [Delay(0, "optimizer", 80e-3)], SHORT_S, steps=8, turns=0),
    "FSDP2": Case("", [Delay(1, "forward", 80e-3)], SHORT_S, steps=8, turns=0, sharded=True),
}


def found(case: Case, rank: int) -> list[Any] | None:
    """What is found, on rank 0; if the machine's wall clock was set meanwhile, the notes that say so."""
    wall_clock = WallClockCheck()
    record = watch(case, rank, 2).record
    if record is None:
        return None
    if record.ranks is None and wall_clock.was_set():
        return [note for note in record.notes if "clock was adjusted" in note]
    assert record.ranks is not None, record.notes
    finding = record.ranks.finding
    return [finding.kind, finding.rank, finding.phase]


def main(folder: str) -> None:
    def work(rank: int) -> dict[str, Any]:
        warnings.simplefilter("ignore")
        results = {}
        for name, way in WAYS.items():
            alone, observed = (bits(way, rank, Path(folder), instrumented) for instrumented in (False, True))
            results[name] = [same(alone, observed), alone["steps"], len(alone["calls"]), len(observed["calls"])]
        return {"same": results, "found": {name: found(case, rank) for name, case in SLOW.items()}}

    print(json.dumps(on_ranks(2, work, limit_s=150)))


if __name__ == "__main__":
    main(*sys.argv[1:])
