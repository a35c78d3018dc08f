"""Real training loops with one planted trouble each, for ``python -m benchmarks.watch loops``.

A loop is a small network on the CPU, 2 to 6 ms per step. What is planted takes real time: it sleeps, so that it takes
as long as asked for, also on a busy machine. Every plant knows what must be reported of it. How much a change costs is
clocked by the loop itself, without the watch: after a longer sleep the rest of the step takes longer, too.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lm_profiler.callbacks import (
    ActionsOptions,
    MemoryOptions,
    StageOptions,
    TraceOptions,
    TrainingProfiler,
    WatchOptions,
)
from lm_profiler.record.watch_files import WatchEvent

STAGE_STEPS = 4  # steps of the stages before the watch begins

# seconds that something at a place takes longer in a step (from 1, as the watch counts)
Delay = Callable[[int], float]


@dataclass(frozen=True, kw_only=True)
class Plant:
    """A planted trouble, and the events that must be reported of it."""

    # by place: a phase, ``callback`` or ``logger``
    delays: dict[str, Delay] = field(default_factory=dict)
    # by phase: the steps that are slow
    slow_steps: dict[str | None, list[int]] = field(default_factory=dict)
    # levels: the step, the phase, seconds added
    changes: list[tuple[int, str, float]] = field(default_factory=list)
    # the phase, and the seconds added in the last step
    drift: tuple[str, float] | None = None
    # how long each validation takes
    validations_s: list[float] = field(default_factory=list)
    # how long each checkpoint takes
    checkpoints_s: list[float] = field(default_factory=list)
    # garbage that takes as long to collect, by step
    collected_s: dict[int, float] = field(default_factory=dict)

    def planted_steps(self) -> set[int]:
        """Return the steps that are slow, and the one before each: a batch may be fetched there."""
        steps: set[int] = set()
        for slow in self.slow_steps.values():
            steps.update(slow)
            steps.update(step - 1 for step in slow)
        return steps

    def changes_within(self, first: int, steps: int) -> bool:
        """Return whether the level changes in one of these steps."""
        return any(first <= step <= first + steps for step, _, _ in self.changes)

    def with_clocked_changes(self, began_s: Sequence[float]) -> Plant:
        """Return the plant with the cost of each change as the loop clocked it.

        ``began_s`` is the time at which each step began. The cost is the difference of the median steps after and
        before the change, of 500 steps each.
        """
        steps_s = np.diff(began_s)
        changes = []
        for step, part, _ in self.changes:
            before_s = float(np.median(steps_s[step - 500 : step - 1]))
            after_s = float(np.median(steps_s[step : step + 500]))
            changes.append((step, part, after_s - before_s))
        return replace(self, changes=changes)


def at_steps(delays_s: dict[int, float]) -> Delay:
    return lambda step: delays_s.get(step, 0.0)


def since(first: int, seconds: float) -> Delay:
    def delay(step: int) -> float:
        return seconds if step >= first else 0.0

    return delay


def stairs(every: int, rise_s: float) -> Delay:
    return lambda step: step // every * rise_s


def ramp(last: int, seconds: float, power: float = 1.0) -> Delay:
    return lambda step: seconds * (step / last) ** power


class Batches(IterableDataset[Tensor]):
    """Batches that are made at once, apart from what is planted in ``data``."""

    def __init__(self, steps: int, delay: Callable[[], None]) -> None:
        self.steps = steps
        self.delay = delay

    def __iter__(self) -> Iterator[Tensor]:
        batch = torch.ones(32, 128)
        for _ in range(self.steps):
            self.delay()
            yield batch


class DelayInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Loop) -> Tensor:
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.module.delay("backward")
        return grad, None


class DelayedSGD(torch.optim.SGD):
    def __init__(self, module: Loop) -> None:
        super().__init__(module.parameters(), lr=1e-4)
        self.module = module

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.module.delay("optimizer")
        return loss


class Loop(LightningModule):
    """A small network whose phases take what the plant asks for."""

    def __init__(self, plant: Plant, steps: int, epoch_steps: int) -> None:
        super().__init__()
        self.plant = plant
        self.steps = steps
        self.epoch_steps = epoch_steps
        self.validations = 0
        self.network = torch.nn.Sequential(
            torch.nn.Linear(128, 256), torch.nn.GELU(), torch.nn.Linear(256, 128)
        )
        self.batches_fetched = 0
        self.began_s: list[float] = []  # when each step's training_step was called

    def delay(self, place: str, step: int | None = None) -> None:
        """Sleep as long as the plant asks for at ``place``."""
        if place not in self.plant.delays:
            return
        if step is None:
            step = self.trainer.fit_loop.epoch_loop.total_batch_idx + 1
        seconds = self.plant.delays[place](step)
        if seconds > 0:
            time.sleep(seconds)

    def fetch_delay(self) -> None:
        self.batches_fetched += 1
        self.delay("data", self.batches_fetched)

    def train_dataloader(self) -> Any:
        return DataLoader(Batches(self.epoch_steps, self.fetch_delay), batch_size=None)

    def val_dataloader(self) -> Any:
        if not self.plant.validations_s:
            return []
        return DataLoader(torch.ones(2, 128), batch_size=1)  # type: ignore[arg-type]

    def validation_step(self, batch: Tensor, batch_index: int) -> None:
        if batch_index == 0:
            time.sleep(
                self.plant.validations_s[
                    self.validations % len(self.plant.validations_s)
                ]
            )
            self.validations += 1

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        self.began_s.append(time.perf_counter())
        step = self.trainer.fit_loop.epoch_loop.total_batch_idx + 1
        self.delay("forward", step)
        if step in self.plant.collected_s:
            collect_garbage(self.plant.collected_s[step])
        loss = self.network(batch).square().mean()
        delayed: Tensor = DelayInBackward.apply(loss, self)  # type: ignore[no-untyped-call]
        return delayed

    def configure_optimizers(self) -> Any:
        return DelayedSGD(self)


def collect_garbage(seconds: float) -> None:
    """Have Python collect garbage for about ``seconds``: a finalizer in a cycle sleeps."""

    class Slow:
        def __del__(self) -> None:
            time.sleep(seconds)

    slow = Slow()
    slow.me = slow  # type: ignore[attr-defined]
    del slow
    gc.collect()


class DelayedCallback(Callback):
    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        module.delay("callback", trainer.fit_loop.epoch_loop.total_batch_idx + 1)


class SlowSaves(Callback):
    """Writes a checkpoint every ``every`` steps, which takes as long as the plant asks for."""

    def __init__(self, plant: Plant, steps: int) -> None:
        self.saves_s = plant.checkpoints_s
        self.every = steps // (len(plant.checkpoints_s) + 1)

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        index = trainer.global_step // self.every - 1
        if trainer.global_step % self.every == 0 and index < len(self.saves_s):
            self.seconds = self.saves_s[index]
            trainer.save_checkpoint(
                Path(trainer.default_root_dir) / "saved.ckpt", weights_only=False
            )

    def on_save_checkpoint(self, *_: Any) -> None:
        time.sleep(self.seconds)


class DelayedLogger(CSVLogger):
    module: Any = None

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if self.module is not None:
            self.module.delay("logger")


class LogsAlways(Callback):
    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        if (trainer.global_step) % 50 == 0:
            trainer.logger.log_metrics({"a": 0.0}, trainer.global_step)  # type: ignore[union-attr]


def plants(steps: int) -> dict[str, Plant]:
    """Return one plant of each kind for a loop of so many steps."""
    singles = {
        "data": 0.15,
        "forward": 0.3,
        "backward": 0.45,
        "optimizer": 0.6,
        "callback": 0.75,
    }
    at = {place: round(share * steps) for place, share in singles.items()}
    phases = {place: "other" if place == "callback" else place for place in singles}
    short = [round(share * steps) for share in (0.2, 0.35, 0.5, 0.7, 0.9)]
    flushes = list(range(200, steps, max(steps // 480, 1) * 50))
    collected = dict.fromkeys(range(steps // 10, steps, steps // 13), 1.2)
    change = steps // 8
    return {
        "one slow step in each phase": Plant(
            delays={place: at_steps({step: 1.0}) for place, step in at.items()},
            slow_steps={phases[place]: [step] for place, step in at.items()},
        ),
        "five steps of 85 ms": Plant(
            delays={"forward": at_steps(dict.fromkeys(short, 0.085))},
            slow_steps={"forward": short},
        ),
        "flushes of a logger": Plant(
            delays={"logger": at_steps(dict.fromkeys(flushes, 0.3))},
            slow_steps={"other": flushes},
        ),
        "garbage": Plant(
            collected_s=collected, slow_steps={"forward": list(collected)}
        ),
        "a slower loader": Plant(
            delays={"data": since(change, 0.003)}, changes=[(change, "data", 0.003)]
        ),
        "a drift": Plant(
            delays={"forward": ramp(steps, 0.004)}, drift=("forward", 0.004)
        ),
        "stairs": Plant(
            delays={"forward": stairs(steps // 30, 0.0003)}, drift=("forward", 0.0087)
        ),
        "steady": Plant(),
    }


_STEPS_APART, _SIZE_APART, _DRIFT_APART = 3, 0.1, 0.15


def missing(plant: Plant, events: Sequence[WatchEvent]) -> list[str]:
    """Return what was planted and not reported right."""
    wrong = []
    for part, steps in plant.slow_steps.items():
        reported = [
            step for event in events if event.part == part for step in event.steps
        ]
        for step in steps:
            if not any(abs(step - other) <= _STEPS_APART for other in reported):
                wrong.append(f"no slow step {step} in {part}")
    levels = [event for event in events if event.kind == "level"]
    for step, part, added_s in plant.changes:
        near = [
            event
            for event in levels
            if abs((event.since_step or 0) - step) <= _STEPS_APART
            and event.part == part
        ]
        if not near:
            wrong.append(f"no change at {step} in {part}")
        elif (
            abs(near[-1].now - (near[-1].against or 0.0) - added_s)
            > _SIZE_APART * added_s
        ):
            wrong.append(f"change at {step}: wrong size")
    if plant.drift is not None:
        part, added_s = plant.drift
        grown_s = 0.0  # reported as one course, or stair by stair
        for event in levels:
            if event.part == part and event.until_step is None:
                grown_s += event.now - (event.against or 0.0)
        if abs(grown_s - added_s) > _DRIFT_APART * added_s:
            wrong.append(f"grown by {grown_s * 1e3:.2f} ms, not {added_s * 1e3:.2f}")
    return wrong


def planted_events(plant: Plant) -> int:
    """Return how many events the plant should have."""
    return len(plant.slow_steps) + len(plant.changes) + (plant.drift is not None)


def train(
    folder: Path, plant: Plant, steps: int, epoch_steps: int = 10**9
) -> list[float]:
    """Train ``steps`` steps with the plant, watched; return when each step began by ``time.perf_counter``.

    The run's folder is made below ``folder``.
    """
    torch.set_num_threads(1)
    module = Loop(plant, steps, min(epoch_steps, steps))
    profiler = TrainingProfiler(
        StageOptions(warmup_steps=1, measure_steps=STAGE_STEPS - 1),
        MemoryOptions(steps=0),
        TraceOptions(steps=0),
        actions=ActionsOptions(steps=0),
        quiet=True,
        log_dir=folder,
        watch=WatchOptions(traces=False),
    )
    callbacks: list[Callback] = [profiler]
    if "callback" in plant.delays:
        callbacks.append(DelayedCallback())
    if plant.checkpoints_s:
        callbacks.append(SlowSaves(plant, steps))
    logger: Any = False
    if "logger" in plant.delays:
        logger = DelayedLogger(folder / "metrics")
        logger.module = module
        callbacks.append(LogsAlways())
    trainer = Trainer(
        max_steps=steps,
        logger=logger,
        callbacks=callbacks,
        default_root_dir=folder,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=1,
        limit_val_batches=2 if plant.validations_s else 0,
        use_distributed_sampler=False,
    )
    trainer.fit(module)
    return module.began_s
