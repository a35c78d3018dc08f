"""Runs a run's steps on fake tensors, to find the memory and the work of each phase without computing anything.

Lightning's own loop runs, with the module's hooks, precision, clipping and accumulation; only the tensors have no data.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import getfile
from traceback import walk_tb
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torchmetrics import Metric

from lm_profiler.analysis.hardware.roofline import Work
from lm_profiler.analysis.plan.planned import needed
from lm_profiler.callbacks.instruments.memory import MemoryReader
from lm_profiler.callbacks.instruments.work import StepWork, phase_work
from lm_profiler.callbacks.marks.phases import PhaseProfiler
from lm_profiler.measure.boundary import said
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.counts.flop_formulas import UncountableError
from lm_profiler.measure.counts.step_flops import StepFlops
from lm_profiler.measure.counts.traffic import ForwardTraffic
from lm_profiler.measure.fake.link_bytes import LinkBytes, ring_bytes
from lm_profiler.measure.fake.live import Uncounted
from lm_profiler.measure.fake.unknown import DependsOnValues
from lm_profiler.measure.fake.untouched import WouldChange
from lm_profiler.measure.fake.world import FakeWorld, NotStrided
from lm_profiler.measure.memory.causes import holdings
from lm_profiler.measure.memory.storage_notes import seen
from lm_profiler.measure.memory.traffic import StepTraffic
from lm_profiler.record.memory_timeline import MemoryTimeline
from lm_profiler.record.run import MemoryCauses, MemoryLevels
from lm_profiler.rehearse.call_sites import CallSites
from lm_profiler.rehearse.one_device import FakeDevice, Size, buckets
from lm_profiler.rehearse.ranks import CannotSplit
from lm_profiler.torch_names import ASKED_SHAPE, ASKED_VALUE

META = torch.device("meta")  # on which fake tensors have their storages


@dataclass(frozen=True)
class RehearsedStep:
    """Memory and work of one step on one device, in bytes and FLOPs.

    ``peaks`` and ``causes`` are by phase, ``held`` is what is held at moments of the step, ``work`` is what each phase
    has to do at least. ``reserved`` is what the allocator has reserved by the end of the step; None on the CPU.
    ``sent`` are the bytes that collectives of each phase put on a rank's link.
    ``timeline`` has every allocation.
    """

    peaks: Mapping[str, int]
    causes: Mapping[str, MemoryCauses]
    held: MemoryLevels | None
    work: Mapping[str, Work]
    timeline: MemoryTimeline
    reserved: int | None = None
    sent: Mapping[str, int] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        """The highest peak of all phases."""
        return max(self.peaks.values())


# yields the size of the next steps' batches, and is sent the bytes that these steps need
Sizes = Generator[Size, int, None]

_UNLIKE_STEPS, _LEAST = 8, 2  # steps that are looked at where steps may differ: at most, if there is time, and at least


class _Look:
    """The observers of one step, attached when it begins."""

    def __init__(
        self,
        world: FakeWorld,
        timeline: Timeline,
        trainer: Trainer,
        buckets: Sequence[torch.Tensor],
        set_up: Mapping[str, int],
    ) -> None:
        world.live.perhaps, forward, self._timeline = 0, ForwardTraffic(), timeline
        parties = lambda: (trainer.lightning_module, trainer.optimizers)  # noqa: E731
        self._live, self._sites, self._notes = world.live, CallSites(trainer.lightning_module), world.live.take_notes()
        self._live.site, self._set_up = self._sites, set_up
        for bucket in buckets:
            self._notes.see(seen("rest", "DDP's bucket", bucket))
        self._reader = MemoryReader(world.live, timeline, META, parties, forward, self._notes.told)
        self._reader.begin("memory")
        self._flops = StepFlops(timeline, forward, on_shapes=True)
        timeline.observers += (self._flops,)
        self.link = LinkBytes(timeline)
        world.link = self.link

    def end(self) -> Mapping[str, Any]:
        """Detach the observers; return what the step held and moved."""
        self._reader.step_peaks()
        self._reader.end("memory")
        self._timeline.unobserve(self._flops)
        self._flops.stop()
        self._live.notes = None
        self._sites.stop()
        return self._reader.facts

    def timeline(self) -> MemoryTimeline:
        """Return every allocation of the step."""
        return self._notes.timeline("planned").model_copy(update={"set_up": self._set_up})

    def work(self) -> StepWork:
        """Return what the step multiplied and moved; raises UncountableError where that is unknown."""
        return StepWork(self._flops.flops(), self._flops.by_dtype(), self._reader.facts["traffic"])


@dataclass(eq=False, kw_only=True)
class Rehearsal(Callback):
    """Has Lightning's loop run steps on fake tensors, and looks at some of them.

    The first step is not looked at: it makes what later steps find, gradients and optimizer states.
    """

    world: FakeWorld  # the fake tensors, among which the module was made
    # the first exception: Lightning then tears down what it has not set up yet, which may raise another
    failed: BaseException | None = None
    bucket_bytes: int | None = None  # bytes of DDP's buckets; None where there are none
    _inside: ExitStack = field(default_factory=ExitStack)
    _left: int = 1 << 20  # steps that are left: more than ``_steps`` ever asks for

    def _steps(self) -> Iterator[None]:
        """Yield where a step begins; resumed where that step has ended. When this returns, the loop ends."""
        raise NotImplementedError

    def _look(self) -> _Look:
        return _Look(self.world, self._timeline, self._trainer, self._buckets, self._set_up)

    def _loop_starts(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(trainer.strategy, FakeDevice)
        self._strategy = trainer.strategy
        self._trainer, self._timeline = trainer, Timeline()
        self._course = self._steps()
        self._phases = trainer.profiler = PhaseProfiler(  # type: ignore[attr-defined]
            trainer, self._timeline, self._left, self._step_ended, self, ends=True
        )
        self._phases.mark_optimizers()
        endless(trainer)
        pl_module.log = partial(_log, trainer)  # type: ignore[method-assign]
        for metric in (part for part in pl_module.modules() if isinstance(part, Metric)):
            metric.validate_args = False  # fake tensors have no values to check
            metric.distributed_available_fn = lambda: False  # nor has what other ranks would send
        self.world.begin([*pl_module.parameters()], [*pl_module.buffers()])
        self._buckets: list[torch.Tensor] = []
        if self._strategy.has_buckets:
            with self.world.inside():
                self._buckets = buckets(pl_module)
                self.bucket_bytes = sum(each.nbytes for each in self._buckets)
        held = holdings(pl_module, trainer.optimizers, META)
        self._set_up = {**held._asdict(), "rest": self.world.live.now - held.total}

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Keep the first exception."""
        self.failed = self.failed or exception

    def _step_ended(self) -> int:
        self._left = 0 if next(self._course, _DONE) is _DONE else self._left - 1
        return self._left

    def _batch_starts(self, *_: Any) -> None:
        self._inside.enter_context(self.world.inside())

    def _batch_ends(self, *_: Any) -> None:
        self._inside.close()
        if not self._phases.is_sure:
            self._phases.batch_ended()  # raises where this Lightning has no actions to count steps by

    on_train_start = on_validation_start = on_test_start = on_predict_start = _loop_starts
    # The hooks differ in their arguments, which are not used.
    on_train_batch_start = on_validation_batch_start = _batch_starts  # type: ignore[assignment]
    on_test_batch_start = on_predict_batch_start = _batch_starts  # type: ignore[assignment]
    on_train_batch_end = on_validation_batch_end = _batch_ends  # type: ignore[assignment]
    on_test_batch_end = on_predict_batch_end = _batch_ends  # type: ignore[assignment]


@dataclass(eq=False, kw_only=True)
class RehearsedSizes(Rehearsal):
    """Rehearses steps of the batch sizes that ``sizes`` asks for."""

    # the sizes. Steps of the first size are looked at phase by phase; of the others only the peak is read.
    sizes: Sizes
    # whether all steps are known to do the same. Otherwise several are rehearsed, and the largest counts: a module may
    # skip a step now and then, or do more in every other one, and batches may differ.
    alike: bool = False
    enough_s: float = 1.0  # CPU time for these steps, after which no further one begins
    clock: Callable[[], float] = time.process_time  # seconds of CPU time
    seen: list[RehearsedStep] = field(default_factory=list)  # the steps that were looked at
    known: bool = False  # whether all steps were looked at that had to be

    def _steps(self) -> Iterator[None]:
        self._strategy.size = next(self.sizes)
        until = self.clock() + self.enough_s
        while self._wants_more(until):
            look = self._look()
            yield
            self.seen.append(self._seen(look))
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

    def _seen(self, look: _Look) -> RehearsedStep:
        facts = look.end()
        peaks = {phase: of[0] or 0 for phase, of in facts["part_peaks"].items()}
        if self.world.gpu is None and self.world.live.perhaps > _SURE * max(peaks.values()):
            raise Uncounted("what the CPU's kernels of convolutions hold amid their work, only they know")
        work, reserved = self._worked(look, facts["traffic"]), self.world.live.peaks()[1]
        sent = self._sent(look.link)
        return RehearsedStep(peaks, facts["causes"], facts["levels"], work, look.timeline(), reserved, sent)

    def _sent(self, link: LinkBytes) -> dict[str, int]:
        """Return the bytes that each phase sends: DDP's own reducer is not there to send them."""
        sent = Counter(link.by_phase)
        if self._strategy.reduces:
            trained = (each.nbytes for each in self._trainer.lightning_module.parameters() if each.requires_grad)
            sent["backward"] += ring_bytes("allreduce", sum(trained), self._strategy.ranks)
        return {phase: count for phase, count in sent.items() if count}

    def _worked(self, look: _Look, traffic: StepTraffic) -> dict[str, Work]:
        work = None
        with suppress(UncountableError):
            work = replace(look.work(), traffic=None)
        batch_bytes = self._strategy.batch_bytes * self._trainer.accumulate_grad_batches
        return phase_work(self._trainer, work, traffic, batch_bytes)


_SURE = 1.05  # a peak that may be too low by a larger factor is not reported

_DONE = object()


def endless(trainer: Trainer) -> None:
    """Have the loop run until it is ended.

    Called when training starts: learning-rate schedules have asked for the run's own limits by then.
    """
    trainer.fit_loop.max_epochs, trainer.fit_loop.epoch_loop.max_steps = -1, -1
    configs = trainer.strategy.lr_scheduler_configs  # a schedule that monitors a metric would not find it
    configs[:] = [config for config in configs if not config.reduce_on_plateau]


def _log(trainer: Trainer, name: str, value: Any, *_: object, **__: object) -> None:
    """Replace a module's ``log``: keep the value in ``callback_metrics``, and log nothing."""
    if not isinstance(value, Metric):
        kept = value.detach() if isinstance(value, torch.Tensor) else value
        trainer.callback_metrics[name] = kept


_NO_DATA = "its data is not allocated yet"  # the words of torch's error where a kernel reads values itself

# folders through which a user's error passes: our fake tensors and marks, and Python's own modules
_NOBODYS = (*(os.path.dirname(getfile(each)) for each in (FakeWorld, FakeDevice, PhaseProfiler, os)), "<frozen ")  # noqa: PTH120


def reason_of(error: Exception) -> str:
    """Return why a step cannot be rehearsed, with the line of the user's code."""
    while isinstance(error.__cause__, Exception):  # the parser wraps errors of classes that it makes
        error = error.__cause__
    files = [(f.f_code.co_filename, f.f_lineno) for f, _ in walk_tb(error.__traceback__)]
    theirs = [(name, line) for name, line in files if not name.startswith(_NOBODYS) and "site-packages" not in name]
    where = f" ({os.path.basename(theirs[-1][0])}, line {theirs[-1][1]})" if theirs else ""  # noqa: PTH119
    depends = isinstance(error, (DependsOnValues, ASKED_VALUE.find_or(()), ASKED_SHAPE.find_or(())))
    if depends or _NO_DATA in str(error):
        return f"what it does depends on values, which are not known without running it{where}"
    if isinstance(error, WouldChange):
        return f"{error}{where}"
    if isinstance(error, (CannotSplit, NotStrided, Uncounted)):
        return str(error)
    return f"{said(error)}{where}"
