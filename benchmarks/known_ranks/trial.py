"""One case: the same loop with its delays and without them, in turns, and what was said of it."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from benchmarks.known_ranks.loop import BASE_S, Delay, Sharded, Sleeper, Sleepy
from lm_profiler.callbacks import ActionsOptions, MemoryOptions, StageOptions, TraceOptions, TrainingProfiler
from lm_profiler.record.run import RunRecord

WARMUP = 3


@dataclass(frozen=True)
class Case:
    """What is done to the ranks.

    ``told``: kind, rank and phase of the finding that is right. ``mended``: which of the delays is taken away to see
    what that saves; None: all. ``accumulate`` batches make a step; ``bucket_mb`` is DDP's; ``sharded`` is FSDP2 in
    DDP's place.
    """

    name: str
    delays: Sequence[Delay] = ()
    base_s: Mapping[str, float] = field(default_factory=lambda: dict(BASE_S))
    accumulate: int = 1
    steps: int = 16
    noise: float = 0.0
    seed: int = 0
    bucket_mb: float = 25.0
    width: int = 64
    sharded: bool = False
    told: tuple[str, int | None, str | None] = ("equal", None, None)
    mended: int | None = None

    @property
    def mended_delays(self) -> list[Delay]:
        """Those that are left when the one is mended."""
        return [] if self.mended is None else [d for n, d in enumerate(self.delays) if n != self.mended]


@dataclass(frozen=True)
class Seen:
    """Of one rank and one run, mean seconds a step: slept by phase, held by collectives, in all; on rank 0 the record.

    ``held_s`` is None where nobody sees when collectives hold it.
    """

    slept_s: dict[str, float]
    held_s: float | None
    step_s: float
    record: RunRecord | None = None

    @property
    def unslept_s(self) -> float:
        """It waited, or the loop was at work."""
        return self.step_s - sum(self.slept_s.values())


def watch(case: Case, rank: int, world: int, delayed: bool) -> Seen:
    """The loop once, on this rank."""
    sleeper = Sleeper(case.base_s, case.delays if delayed else case.mended_delays, rank, world, case.noise, case.seed)
    with tempfile.TemporaryDirectory() as folder:
        profiler = TrainingProfiler(
            StageOptions(warmup_steps=WARMUP, measure_steps=case.steps),
            MemoryOptions(steps=1),  # without it, a process of its own counts FLOPs at the end
            TraceOptions(steps=0),
            actions=ActionsOptions(steps=0),
            quiet=True,
            log_dir=folder,
        )
        trainer = quiet_trainer(world, folder, case, callbacks=[profiler])
        with sleeper.hears_broadcasts():
            trainer.fit((Sharded if case.sharded else Sleepy)(sleeper, case.width))
    n = case.accumulate
    slept_s, held_s, batch_s = sleeper.seconds(slice(WARMUP * n, (WARMUP + case.steps) * n))
    return Seen(
        {phase: s * n for phase, s in slept_s.items()},
        None if case.sharded else held_s * n,
        batch_s * n,
        profiler.record if rank == 0 else None,
    )


def quiet_trainer(world: int, folder: str, case: Case | None = None, **options: Any) -> Trainer:
    """Of ``world`` ranks, which writes and prints nothing of its own."""
    case = case or Case("")
    strategy: Any = DDPStrategy(process_group_backend="gloo", bucket_cap_mb=case.bucket_mb)
    if case.sharded:
        strategy = ModelParallelStrategy(world, 1, process_group_backend="gloo")
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")
    return Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy,
        max_epochs=1,
        accumulate_grad_batches=case.accumulate,
        default_root_dir=folder,
        **dict.fromkeys(off, False),
        **options,
    )


def compare(case: Case, rank: int, world: int) -> tuple[Seen, Seen]:
    """With the delays and mended; which comes first alternates, so that a machine that changes favours neither."""
    order = (True, False) if case.seed // 2 % 2 else (False, True)
    seen = {delayed: watch(case, rank, world, delayed) for delayed in order}
    return seen[True], seen[False]


def quieten() -> None:
    """Lightning's own lines, and the warnings of torch and Lightning."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
