"""A training loop whose every phase takes a known time."""

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import SGD
from torch.utils.data import IterableDataset

from lm_profiler.callbacks import ActionsOptions, MemoryOptions, StageOptions, TraceOptions, TrainingProfiler
from lm_profiler.record.quantities import PARTS, TIMED
from lm_profiler.record.run_record import RunRecord, read_run
from lm_profiler.record.steps import StepRow, read_steps

TRUTH_S = {
    "data": 6e-3,
    "transfer": 3e-3,
    "forward": 20e-3,
    "zero_grad": 4e-3,
    "backward": 40e-3,
    "clip": 5e-3,
    "optimizer": 10e-3,
}
TOKENS_IN_A_BATCH = 7


class SimulatedClock:
    """Stands still but for the known waits: what is measured is exact, whatever else the machine does meanwhile."""

    now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


ROUNDING_S = 5e-9
"""How far off the sum of a few times may be in steps.csv, which keeps nanoseconds."""

CLOCK: Callable[[], int] = time.perf_counter_ns
"""Of the waits and of the instruments, in nanoseconds."""

WAITED_S: defaultdict[str, list[float]] = defaultdict(list)
"""How long each wait really took, by phase: on a busy machine the process may not run when a wait should end."""


def spend(phase: str, seconds: float | None = None) -> None:
    """Let the time that ``phase`` takes go by: on a real clock the CPU is busy meanwhile."""
    began = now = CLOCK()
    until = began + round((TRUTH_S[phase] if seconds is None else seconds) * 1e9)
    if isinstance(CLOCK, SimulatedClock):
        CLOCK.now_ns = now = until
    while now < until:
        now = CLOCK()
    WAITED_S[phase].append((now - began) * 1e-9)


class SlowLoader:
    """A loader is any iterable with a length. Torch's own takes 0.1 ms a batch, which would add to the truth."""

    def __init__(self, length: int = 1000, phase: str = "data") -> None:
        self._batches = [torch.ones(TOKENS_IN_A_BATCH)] * length
        self._phase = phase

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self._batches:
            spend(self._phase, TRUTH_S["data"])
            yield batch


class SlowStream(IterableDataset[Tensor]):
    """Has no length, so that Lightning fetches one batch ahead."""

    def __init__(self, length: int = 1000) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(self.length):
            spend("data")
            yield torch.ones(TOKENS_IN_A_BATCH)


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        spend("backward")
        return grad


class SlowSGD(SGD):
    """Slow by itself, whatever its closure takes. It changes nothing: the times are all there is to it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.0)

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        spend("optimizer")
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        spend("zero_grad")


class KnownModule(LightningModule):
    """Automatic optimization with a known time in every phase."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(1.0))

    def tokens_in(self, batch: Tensor) -> int:
        return batch.numel()

    def transfer_batch_to_device(self, batch: Tensor, device: torch.device, dataloader_idx: int) -> Tensor:
        amid = self.trainer.state.fn is TrainerFn.FITTING and not self.trainer.training
        spend("outside" if amid else "transfer", TRUTH_S["transfer"])
        return batch.to(device)

    def loss(self) -> Tensor:
        spend("forward")
        return SlowBackward.apply(self.weight)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        return self.loss()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        spend("zero_grad")

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        spend("clip")

    def configure_optimizers(self) -> Any:
        return SlowSGD(self.parameters())


class Evaluated(KnownModule):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        amid = self.trainer.state.fn is TrainerFn.FITTING
        spend("outside" if amid else "forward", TRUTH_S["forward"])

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        spend("forward")

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        spend("forward")
        return torch.zeros(1)


def make_profiler(
    warmup: int = 2,
    measure: int | None = 11,
    memory: int = 0,
    trace: int = 0,
    stop_when_done: bool = True,
    actions: int = 0,
    **options: Any,
) -> TrainingProfiler:
    return TrainingProfiler(
        StageOptions(warmup_steps=warmup, measure_steps=measure, stop_when_done=stop_when_done),
        MemoryOptions(steps=memory),
        TraceOptions(steps=trace),
        actions=ActionsOptions(steps=actions),
        **{"clock": CLOCK, "quiet": True, **options},
    )


def trainer_with(
    callbacks: Sequence[Callback], folder: Path, make: Callable[..., Trainer] = Trainer, **options: Any
) -> Trainer:
    """A Trainer that writes nothing of its own, for a loop that has not waited yet."""
    WAITED_S.clear()
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": -1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": folder,
    }
    return make(callbacks=list(callbacks), **{**defaults, **options})


def profiled_fit(
    module: LightningModule,
    folder: Path,
    data: Any = None,
    callbacks: Sequence[Callback] = (),
    profiler: TrainingProfiler | None = None,
    val_dataloaders: Any = None,
    beside: Any = None,
    **options: Any,
) -> TrainingProfiler:
    """``beside`` is the Trainer's own profiler."""
    profiler = profiler or make_profiler()
    trainer = trainer_with([*callbacks, profiler], folder, profiler=beside, **options)
    trainer.fit(module, data if data is not None else SlowLoader(), val_dataloaders)
    return profiler


def measured_rows(profiler: TrainingProfiler) -> list[StepRow]:
    return [row for row in read_steps(profiler.folder / "steps.csv") if row.stage == "measure"]


def assert_times(
    profiler: TrainingProfiler,
    truth_s: dict[str, float],
    measure: int = 11,
    waits: dict[str, int] | None = None,
    fetched_ahead: int = 0,
) -> RunRecord:
    """Every phase takes its truth on a simulated clock, and no less on a real one.

    ``truth_s`` is what a step takes in each part, and nothing in a part without an entry; ``waits`` how many waits that
    are, 1 by default. The truth is made of the waits as long as they really were.
    """
    record = read_run(profiler.folder)
    assert record == profiler.record
    assert record.status == "ok"
    assert record.steps["measure"] == measure
    rows = measured_rows(profiler)
    assert len(rows) == measure
    wrong = {}
    for part in PARTS:
        nominal_s = truth_s.get(part, 0.0)
        skipped, n = (fetched_ahead if part == "data" else 0), (waits or {}).get(part, 1)
        waited_s = WAITED_S[part][skipped:] if nominal_s else []
        off_s = [row.time(part) - sum(waited_s[(row.step - 1) * n : row.step * n]) for row in rows]
        if not are_right(off_s):
            wrong[part] = f"{1e3 * min(off_s):.3f} to {1e3 * max(off_s):.3f} ms more than {1e3 * nominal_s:g}"
    assert not wrong
    assert_summaries(record, rows)
    return record


def assert_summaries(record: RunRecord, rows: Sequence[StepRow]) -> None:
    """Assert that run.json sums up the rows, without those listed as left out, and that the parts of each add up."""
    kept = rows[record.stretch]
    for part in TIMED:
        assert record.time[part].n == len(kept)
        assert record.time[part].mean == pytest.approx(statistics.mean(r.time(part) for r in kept), abs=2e-9)
    for row in rows:
        assert row.seconds == row.host_seconds  # the CPU has one clock
        parts_s = sum(row.time(part) for part in PARTS)
        assert abs(parts_s - row.time("step")) < 1e-8  # steps.csv keeps nanoseconds, of nine values


def assert_waited(rows: Sequence[StepRow], part: str, waits: Sequence[int]) -> None:
    """``part`` took as long as its waits really did, where each step, beginning with the first, had so many."""
    waited_s = iter(WAITED_S[part])
    off_s = [row.time(part) - sum(islice(waited_s, n)) for row, n in zip(rows, waits, strict=True)]
    assert are_right(off_s), off_s


def are_right(off_s: Sequence[float]) -> bool:
    """Whether a part of the steps took as long as its waits, where ``off_s`` is by how much each is longer.

    On a real clock no step may be shorter, but any may be longer: how much Lightning itself takes depends on the
    machine. Nothing is missed by that: the parts add up to the step, so a wait that counts elsewhere makes the part
    that it belongs to too short. How little Lightning takes is what benchmarks.known_answer finds.
    """
    longest_s = ROUNDING_S if isinstance(CLOCK, SimulatedClock) else math.inf
    return min(off_s) > -1e-6 and max(off_s) < longest_s
