"""A run's steps on fake tensors: what memory each phase would take and what it has to do, told without doing it.

The very loop runs, with the module's own hooks, its precision, its clipping and its accumulation; only the tensors
have no data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torchmetrics import Metric

from lm_profiler.analysis.hardware.roofline import Work
from lm_profiler.analysis.plan.planned import needed
from lm_profiler.callbacks.instruments.memory import MemoryReader
from lm_profiler.callbacks.instruments.work import StepWork
from lm_profiler.callbacks.marks.batches import samples_in
from lm_profiler.callbacks.marks.optimizers import OptimizerMarks
from lm_profiler.callbacks.marks.phases import PhaseProfiler
from lm_profiler.callbacks.outcome.floors import bytes_of_batch, phase_work
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.counts.flop_formulas import UncountableError
from lm_profiler.measure.counts.step_flops import StepFlops
from lm_profiler.measure.counts.traffic import ForwardTraffic
from lm_profiler.measure.device.precision import float32_matmul_precision
from lm_profiler.measure.fake.live import Uncounted
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
        return [n and max(round(n * factor), 1) for n, factor in zip(shape, factors, strict=False)]


@dataclass(frozen=True)
class RehearsedWork:
    """What each phase of one step has to do at least, and how float32 is multiplied (``float32_matmul_precision``)."""

    by_phase: Mapping[str, Work]
    float32: str


@dataclass(frozen=True)
class RehearsedStep:
    """Bytes of one step on one device: the peak and its causes, by phase, and what is held at moments of it.

    ``reserved`` is what the allocator has taken of the device by then; None on the CPU, where nobody reserves.
    """

    peaks: Mapping[str, int]
    causes: Mapping[str, MemoryCauses]
    held: MemoryLevels | None
    work: RehearsedWork
    reserved: int | None = None

    @property
    def peak(self) -> int:
        """Of all phases."""
        return max(self.peaks.values())


Sizes = Generator[Size, int, None]
"""Gives the size of the next steps' batches, and is sent the bytes that these steps need."""

_UNLIKE_STEPS, _LEAST = 8, 2
"""Where steps may differ: so many are looked at if there is time, and at least so many."""


class FakeStrategy(SingleDeviceStrategy):
    """One device whose tensors are fake; with DDP's buckets it is one of several."""

    def __init__(self, world: FakeWorld, has_buckets: bool = False) -> None:
        super().__init__(device=CPU)
        self.has_buckets = has_buckets
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
        sizes: what is rehearsed. Steps of the first are looked at part by part; of the others the peak is enough.
        alike: whether all steps are known to do the same. Otherwise several are rehearsed, and the largest counts: a
            module may do without a step now and then, or do more in every other one, and batches may differ.
        enough_s: of CPU time for these; it stops in between.
        clock: seconds of CPU time.
    """

    world: FakeWorld
    sizes: Sizes
    alike: bool = False
    enough_s: float = 1.0
    clock: Callable[[], float] = time.process_time
    seen: list[RehearsedStep] = field(default_factory=list)
    """Those that were looked at."""
    known: bool = False
    """Whether all were that had to be."""
    failed: BaseException | None = None
    """The first that was raised: Lightning then takes down what it had not set up yet, which may raise another."""
    bucket_bytes: int | None = None
    """Of DDP's buckets; None where there are none."""
    _inside: ExitStack = field(default_factory=ExitStack)
    _undo: ExitStack = field(default_factory=ExitStack)
    _left: int = 1 << 20
    """Steps; the sizes end before."""

    def _loop_starts(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(trainer.strategy, FakeStrategy)
        self._strategy = trainer.strategy
        self._trainer, self._module, self._timeline = trainer, pl_module, Timeline()
        self._course = self._steps()
        trainer.profiler = PhaseProfiler(  # type: ignore[attr-defined]
            trainer, self._timeline, self._left, self._step_ended, lambda left: left, _nothing, True, _nothing, self
        )
        OptimizerMarks(self._timeline, self._undo).attach(trainer, pl_module)
        endless(trainer)
        pl_module.log = partial(_log, trainer)  # type: ignore[method-assign]
        for metric in (part for part in pl_module.modules() if isinstance(part, Metric)):
            metric.validate_args = False  # values are taken to be right
        self.world.begin([*pl_module.parameters()], [*pl_module.buffers()])
        if self._strategy.has_buckets:
            with self.world.inside():
                self._buckets = buckets(pl_module)
                self.bucket_bytes = sum(each.nbytes for each in self._buckets)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Keep it."""
        self.failed = self.failed or exception

    def _step_ended(self) -> int:
        self._left = 0 if next(self._course, _DONE) is _DONE else self._left - 1
        return self._left

    def _steps(self) -> Iterator[None]:
        """From step to step: it yields where one begins, and goes on where that one has ended."""
        self._strategy.size = next(self.sizes)
        until = self.clock() + self.enough_s
        while self._wants_more(until):
            reader, flops = self._look()
            yield
            self.seen.append(self._seen(reader, flops))
        self.known = True
        peaks = [step.peak for step in self.seen]
        peak, times, live = max(peaks), 1 if len({*peaks}) == 1 else len(peaks), self.world.live
        with suppress(StopIteration):
            while True:
                self._strategy.size, peak = self.sizes.send(needed(peak, live.peaks()[1])), 0
                live.give_back_unused()
                for _ in range(times):
                    live.reset()
                    yield
                    peak = max(peak, live.peaks()[0] or 0)

    def _wants_more(self, until: float) -> bool:
        few = len(self.seen) < (1 if self.alike else _UNLIKE_STEPS)
        return few and (len(self.seen) < _LEAST or self.clock() < until)

    def _look(self) -> tuple[MemoryReader, StepFlops]:
        self.world.live.perhaps, forward = 0, ForwardTraffic()
        parties = lambda: (self._module, self._trainer.optimizers)  # noqa: E731
        reader = MemoryReader(self.world.live, self._timeline, META, parties, forward)
        reader.begin("memory")
        flops = StepFlops(self._timeline, forward, on_shapes=True)
        self._timeline.observers += (flops,)
        return reader, flops

    def _seen(self, reader: MemoryReader, flops: StepFlops) -> RehearsedStep:
        reader.step_peaks()
        reader.end("memory")
        facts = reader.facts
        peaks = {phase: of[0] or 0 for phase, of in facts["part_peaks"].items()}
        if self.world.gpu is None and self.world.live.perhaps > _SURE * max(peaks.values()):
            raise Uncounted("what the CPU's kernels of convolutions hold amid their work, only they know")
        work, reserved = self._worked(flops, facts["traffic"]), self.world.live.peaks()[1]
        return RehearsedStep(peaks, facts["causes"], facts["levels"], work, reserved)

    def _worked(self, flops: StepFlops, traffic: Any) -> RehearsedWork:
        self._timeline.unobserve(flops)
        flops.stop()
        try:
            work = StepWork(flops.flops(), flops.by_dtype())
        except UncountableError:
            work = None
        batch_bytes = self._strategy.batch_bytes * self._trainer.accumulate_grad_batches
        by_phase = phase_work(self._trainer, work, traffic, batch_bytes)
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


_SURE = 1.05
"""By so much a peak may be off and still be told."""

_DONE = object()


_BUCKET = 25 << 20


def buckets(module: torch.nn.Module) -> list[torch.Tensor]:
    """What DDP reduces gradients in: tensors of as many elements as they have, of 25 MiB and the rest of a parameter.

    ``bucket_cap_mb`` of torch.nn.parallel.DistributedDataParallel, without its smaller first one. Dense gradients alone
    are in them.
    """
    sizes: dict[torch.dtype, list[int]] = {}
    for parameter in module.parameters():
        if parameter.requires_grad:
            of = sizes.setdefault(parameter.dtype, [0])
            if of[-1] * parameter.itemsize >= _BUCKET:
                of.append(0)
            of[-1] += parameter.numel()
    return [torch.empty(size, dtype=dtype) for dtype, of in sizes.items() for size in of]


def endless(trainer: Trainer) -> None:
    """It runs until it is ended. Whatever asked until now, as schedules do, has been told what the run was given."""
    trainer.fit_loop.max_epochs, trainer.fit_loop.epoch_loop.max_steps = -1, -1
    configs = trainer.strategy.lr_scheduler_configs  # one that waits for a figure would not find it
    configs[:] = [config for config in configs if not config.reduce_on_plateau]


def _log(trainer: Trainer, name: str, value: Any, *_: object, **__: object) -> None:
    """In the place of a module's ``log``: its value is there to be asked for, and nobody else is told."""
    if not isinstance(value, Metric):
        kept = value.detach() if isinstance(value, torch.Tensor) else value
        trainer._logger_connector._callback_metrics[name] = kept


def _nothing(*_: object, **__: object) -> None:
    """Nobody has to be told."""
