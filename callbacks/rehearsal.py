"""A run's steps on fake tensors: what memory each phase would take and what it has to do, told without doing it.

The very loop runs, with the module's own hooks, its precision, its clipping and its accumulation; only the tensors
have no data.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy

from lm_profiler.analysis.hardware.floors import Work
from lm_profiler.callbacks.instruments.memory import MemoryReader
from lm_profiler.callbacks.instruments.work import StepWork
from lm_profiler.callbacks.marks.batches import samples_in
from lm_profiler.callbacks.marks.optimizers import OptimizerMarks
from lm_profiler.callbacks.marks.phases import PhaseProfiler
from lm_profiler.callbacks.outcome.floors import bytes_of_batch, phase_work
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.counts.flop_formulas import UncountableError
from lm_profiler.measure.counts.flops import StepFlops
from lm_profiler.measure.counts.traffic import ForwardTraffic
from lm_profiler.measure.device.precision import float32_matmul_precision
from lm_profiler.measure.fake.world import FakeWorld
from lm_profiler.record.run import MemoryCauses, MemoryLevels

CPU, META = torch.device("cpu"), torch.device("meta")  # the storages of fake tensors


@dataclass(frozen=True)
class Size:
    """Of a batch: by what its rows and its columns are multiplied. Columns only where they are a context."""

    batch: float = 1.0
    context: float = 1.0

    def __call__(self, shape: Sequence[int]) -> Sequence[int]:
        """``shape``, resized."""
        factors = (self.batch, self.context, *[1.0] * len(shape))
        return [max(round(n * factor), 1) for n, factor in zip(shape, factors, strict=False)]


@dataclass(frozen=True)
class RehearsedStep:
    """Bytes of one step on one device: the peak and its causes, by phase, and what is held at moments of it."""

    peaks: Mapping[str, int]
    causes: Mapping[str, MemoryCauses]
    held: MemoryLevels | None


@dataclass(frozen=True)
class RehearsedWork:
    """What each phase of one step has to do at least, and how float32 is multiplied (``float32_matmul_precision``)."""

    by_phase: Mapping[str, Work]
    float32: str


Sizes = Generator[Size, int, None]
"""Gives the size of the next step's batch, and is sent that step's peak in bytes."""


class FakeStrategy(SingleDeviceStrategy):
    """One device whose tensors are fake."""

    def __init__(self, world: FakeWorld) -> None:
        super().__init__(device=CPU)
        self._world = world
        self.size = Size()
        self.rows = 1
        """Of each one that is made, so many are rehearsed."""
        self.samples: int | None = None
        """Of a batch of the run; None where that is unknown."""
        self.batch_bytes = 0
        """Of the last batch."""

    def model_to_device(self) -> None:
        """It is where it is."""

    def tensor_init_context(self, empty_init: bool | None = None) -> Any:
        """Modules that the strategy sees made are fake too."""
        stack = ExitStack()
        stack.enter_context(super().tensor_init_context(empty_init))
        stack.enter_context(self._world.inside())
        return stack

    def teardown(self) -> None:
        """Nothing was moved."""

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        made, whole = samples_in(batch, combined=False), replace(self.size, batch=self.size.batch * self.rows)
        self.samples = None if made is None else made * self.rows
        rehearsed = self._world.faked(batch, whole)
        self.batch_bytes = bytes_of_batch(rehearsed)
        return rehearsed


@dataclass(eq=False)
class Rehearsal(Callback):
    """Runs steps of the sizes that ``sizes`` asks for, after one that makes what lasts: gradients, optimizer states.

    Args:
        world: in which the module was made.
        sizes: what is rehearsed. The first is looked at part by part; of the others the peak is enough.
    """

    world: FakeWorld
    sizes: Sizes
    step: RehearsedStep | None = None
    """The one that was looked at."""
    work: RehearsedWork | None = None
    """Of the same."""
    ended: bool = False
    """Whether all sizes have been rehearsed."""
    _flops: StepFlops | None = None
    _inside: ExitStack = field(default_factory=ExitStack)
    _undo: ExitStack = field(default_factory=ExitStack)
    _begun: bool = False

    def _loop_starts(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(trainer.strategy, FakeStrategy)
        self._strategy = trainer.strategy
        self._trainer, self._timeline, self._forward = trainer, Timeline(), ForwardTraffic()
        timeline, parties = self._timeline, lambda: (pl_module, trainer.optimizers)
        self._reader = MemoryReader(self.world.live, timeline, META, parties, self._forward)
        trainer.profiler = PhaseProfiler(  # type: ignore[attr-defined]
            trainer, timeline, _MOST, self._step_ended, lambda left: left, _nothing, True, _nothing, self
        )
        OptimizerMarks(timeline, self._undo).attach(trainer, pl_module)
        pl_module.log = _nothing  # type: ignore[method-assign]  # what is logged would be asked for its value
        self.world.live.see([*pl_module.parameters(), *pl_module.buffers()])

    def _step_ended(self) -> int:
        peak = self.world.live.peaks()[0] or 0 if self._flops is None else self._seen(self._flops)
        try:
            self._strategy.size = self.sizes.send(peak) if self._begun else next(self.sizes)
        except StopIteration:
            self.ended = True
            return 0
        self._reader.begin("rehearse" if self._begun else "memory")
        if not self._begun:
            self._flops = StepFlops(self._timeline, self._forward, on_shapes=True)
            self._timeline.observers += (self._flops,)
        self._begun = True
        return 1

    def _seen(self, flops: StepFlops) -> int:
        self._reader.step_peaks()
        self._reader.end("memory")
        facts = self._reader.facts
        peaks = {phase: of[0] or 0 for phase, of in facts["part_peaks"].items()}
        self.step, self.work, self._flops = (
            RehearsedStep(peaks, facts["causes"], facts["levels"]),
            self._worked(flops),
            None,
        )
        return max(peaks.values())

    def _worked(self, flops: StepFlops) -> RehearsedWork:
        self._timeline.unobserve(flops)
        flops.stop()
        try:
            work = StepWork(flops.flops(), flops.by_dtype())
        except UncountableError:
            work = None
        batch_bytes = self._strategy.batch_bytes * self._trainer.accumulate_grad_batches
        by_phase = phase_work(self._trainer, work, self._reader.facts["traffic"], batch_bytes)
        return RehearsedWork(by_phase, float32_matmul_precision())

    def _batch_starts(self, *_: Any) -> None:
        self._inside.enter_context(self.world.inside())

    def _batch_ends(self, *_: Any) -> None:
        self._inside.close()

    on_train_start = on_validation_start = on_test_start = on_predict_start = _loop_starts
    # Whatever they are told, they do not ask.
    on_train_batch_start = on_validation_batch_start = _batch_starts  # type: ignore[assignment]
    on_test_batch_start = on_predict_batch_start = _batch_starts  # type: ignore[assignment]
    on_train_batch_end = on_validation_batch_end = _batch_ends  # type: ignore[assignment]
    on_test_batch_end = on_predict_batch_end = _batch_ends  # type: ignore[assignment]


_MOST = 1 << 20
"""Steps; the sizes end before."""


def _nothing(*_: object, **__: object) -> None:
    """Nobody has to be told."""
