"""One case: what was said of a loop with delays, and then the same loop without them and with them in turns.

What mending saves is the difference of those turns, blocks of a few steps in the same processes: two runs differ by
themselves, by how the ranks fall into step, by more than what is looked for. Of each block the first step does not
count, because ranks carry into it what the block before did to them; of three blocks the median counts. The instruments
have ended by then. Delays are of 40 ms and more: where four ranks share two cores, Lightning's own milliseconds become
longer when all are at work at the same time, which no replay foresees, and of such a delay that is under 5 %.
"""

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
from benchmarks.known_ranks.notes import Notes
from lm_profiler.callbacks import (
    ActionsOptions,
    MemoryOptions,
    StageOptions,
    TraceOptions,
    TrainingProfiler,
)
from lm_profiler.record.run_record import RunRecord

WARMUP = 3
AFTER = 8
"""Steps of the instruments' stages after the measured ones, at least."""

BLOCK = 6
"""Steps of a turn: the first, and five that count, of which one is an every fifth."""


@dataclass(frozen=True)
class Case:
    """What is done to the ranks.

    ``steps`` are measured; ``turns``: how often it then runs without the delays and with them.
    ``told``: kind, rank and phase of the finding that is right. All delays are taken away to see what that saves.
    ``accumulate`` batches make a step; ``bucket_mb`` is DDP's; ``sharded`` is FSDP2 in DDP's place.
    """

    name: str
    delays: Sequence[Delay] = ()
    base_s: Mapping[str, float] = field(default_factory=lambda: dict(BASE_S))
    accumulate: int = 1
    steps: int = 16
    turns: int = 3
    noise: float = 0.0
    seed: int = 0
    bucket_mb: float = 25.0
    width: int = 64
    sharded: bool = False
    told: tuple[str, int | None, str | None] = ("equal", None, None)


@dataclass(frozen=True)
class Seen:
    """Of one rank: what it noted; on rank 0 the record."""

    notes: Notes
    record: RunRecord | None = None


def blocks(case: Case, delayed: bool) -> list[range]:
    """Steps that count of the turns with the delays, or of those without."""
    began = WARMUP + case.steps + AFTER
    return [
        range(began + n * BLOCK + 1, began + (n + 1) * BLOCK)
        for n in range(int(delayed), 2 * case.turns, 2)
    ]


def watch(case: Case, rank: int, world: int) -> Seen:
    """The loop once, on this rank."""
    began = WARMUP + case.steps + AFTER

    def delayed(step: int) -> bool:
        return step < began or (step - began) // BLOCK % 2 == 1

    sleeper = Sleeper(
        *(
            case.base_s,
            case.delays,
            rank,
            world,
            case.accumulate,
            delayed,
            case.noise,
            case.seed,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        profiler = TrainingProfiler(
            StageOptions(
                warmup_steps=WARMUP, measure_steps=case.steps, stop_when_done=False
            ),
            MemoryOptions(
                steps=1
            ),  # without it, a process of its own counts FLOPs at the end
            TraceOptions(steps=0),
            actions=ActionsOptions(steps=0),
            quiet=True,
            log_dir=folder,
        )
        steps = began + 2 * case.turns * BLOCK + 1
        trainer = quiet_trainer(
            world, folder, case, callbacks=[profiler], max_steps=steps
        )
        with sleeper.notes.hears_collectives():
            trainer.fit((Sharded if case.sharded else Sleepy)(sleeper, case.width))
    return Seen(sleeper.notes, profiler.record if rank == 0 else None)


def quiet_trainer(
    world: int, folder: str, case: Case | None = None, **options: Any
) -> Trainer:
    """Of ``world`` ranks, which writes and prints nothing of its own."""
    case = case or Case("")
    strategy: Any = DDPStrategy(
        process_group_backend="gloo", bucket_cap_mb=case.bucket_mb
    )
    if case.sharded:
        strategy = ModelParallelStrategy(world, 1, process_group_backend="gloo")
    off = (
        "logger",
        "enable_checkpointing",
        "enable_progress_bar",
        "enable_model_summary",
        "use_distributed_sampler",
    )
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


def quieten() -> None:
    """Lightning's own lines, and the warnings of torch and Lightning."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
