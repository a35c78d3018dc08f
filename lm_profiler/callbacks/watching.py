"""The training thread's part of a watched run: marks, one comparison per step, and a hand-over once a second.

It begins where the stages end, with its own marks and files, so that watching does not change the stages' record.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Callback, Trainer

from lm_profiler.analysis.watch import ledger as terms
from lm_profiler.analysis.watch.ledger import Ledger, NamedSpan, passed
from lm_profiler.analysis.watch.watched_run import TracedStep, WatchedRun
from lm_profiler.callbacks.exports import metrics_of, publish
from lm_profiler.callbacks.instruments.action_owners import owner_of
from lm_profiler.callbacks.instruments.profiling_options import ExportOptions, TraceOptions, WatchOptions
from lm_profiler.callbacks.instruments.tracer import Tracer
from lm_profiler.callbacks.marks.actions import NOTHING, EpochHook, Marked
from lm_profiler.callbacks.marks.namespaces import is_a
from lm_profiler.callbacks.marks.optimizers import bracket
from lm_profiler.callbacks.marks.phases import PhaseProfiler
from lm_profiler.callbacks.session import Session
from lm_profiler.callbacks.trackers import Tracker, window_figures
from lm_profiler.callbacks.watch_writer import Handed, TrainingPosition, WatchWriter
from lm_profiler.measure.boundary import UNGUARDED, Guard
from lm_profiler.measure.clocks.stream import stream_of
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.counts.recompiles import compilations
from lm_profiler.measure.counts.step_reader import StepReader, disjoint
from lm_profiler.measure.device.nvml import TelemetrySampler, gpu_of
from lm_profiler.measure.memory.peaks import Probe, probe_of
from lm_profiler.record.parts import PARTS, TIMED
from lm_profiler.record.run_record import LIGHTNING, OURS, RunRecord
from lm_profiler.record.watch_files import STEPS

# least nanoseconds between two hand-overs, and between two readings of counters, which take some microseconds
_HAND_NS, _READ_NS = 1_000_000_000, 5_000_000
# the least nanoseconds between two steps that are noted as our own: a note for each step would fill memory
_NAMED_NS = 5_000

# between two samples of the GPU, and how many are kept: the counters of a second's steps are made within seconds
_SAMPLE_S, _SAMPLES = 0.5, 1000
_ENDLESS = 1 << 60  # steps that are left: training ends by itself, the watch does not end it
_STATM = "/proc/self/statm"
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(eq=False, repr=False)  # no repr: Python shows a signal handler's object, also half made
class Watching:
    """Watches one fit from its set-up on. The constructor asks nothing."""

    callback: Callback  # ours, whose time is named separately
    trainer: Trainer  # the Trainer of the run
    options: WatchOptions  # what may be traced
    clock: Callable[[], int]  # the host's, in nanoseconds
    began_ns: int  # when fit began
    report: Callable[[str], object]  # gets a note of a problem
    part: Guard = UNGUARDED  # guards all of it: if it fails, training continues without it
    steps: int = 0
    resumed_at: int = 0  # the Trainer's count of steps when the loop began
    trackers: Sequence[Tracker] = ()  # get the figures of each window
    ledger: Ledger = field(init=False)
    _timeline: Timeline = field(init=False)
    _phases: PhaseProfiler = field(init=False)
    _reader: StepReader = field(init=False)
    _probe: Probe = field(init=False)
    _user: object = None
    _writer: WatchWriter | None = None
    _spans: list[NamedSpan] = field(default_factory=list)
    place: TrainingPosition = field(default_factory=TrainingPosition)
    _validated_ns: int = 0
    _hand_ns: int = 0
    _read_ns: int = 0
    _tracer: Tracer | None = None
    _traced: int = 0
    _trace_ns: int = 0
    _signalled: bool = False
    _passed_over: int = 0
    _traced_steps: list[TracedStep] = field(default_factory=list)  # since the last hand-over
    _undo: ExitStack = field(default_factory=ExitStack)
    _unpublish: ExitStack = field(default_factory=ExitStack)
    _done: bool = False

    def __post_init__(self) -> None:
        self.part = Guard("watch", self.report, self._leave)
        self.ledger = Ledger(self.began_ns)

    def passed(self, what: str) -> None:
        """Note that ``what`` is over, which began when the noted span before it ended; only before the first step."""
        if self._writer is None and not self._done:
            self._listen()
            self.ledger.until(self.clock(), what)

    def _listen(self) -> None:
        """Handle the signal, which would otherwise end the process, after Lightning has saved the old handler."""
        if self.options.signal and threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGUSR1)
            if before != self._asked_by_signal:
                signal.signal(signal.SIGUSR1, self._asked_by_signal)
                self._undo.callback(self._listen_no_more, before)

    def _listen_no_more(self, before: Any) -> None:
        if signal.getsignal(signal.SIGUSR1) == self._asked_by_signal:  # Lightning may have restored it
            signal.signal(signal.SIGUSR1, before)

    def _asked_by_signal(self, signum: int, frame: object) -> None:
        """Ask for a trace; a signal may come at any line, so nothing else happens here."""
        self._signalled = self.options.traces

    def timed(self, step_ended: Callable[[], int]) -> Callable[[], int]:
        """Return the stages' ``step_ended``, whose time is noted as our own."""

        def noted() -> int:
            began_ns = self.clock()
            try:
                return step_ended()
            finally:
                self._spans.append(NamedSpan(began_ns, self.clock(), terms.INSTRUMENTS))

        return noted

    def start(self, folder: Path, stages: Session, record: RunRecord | None, export: ExportOptions) -> None:
        """Begin to watch, between two steps, after the ``stages`` have ended and left a ``record``."""
        epoch_s = time.time() - self.clock() * 1e-9
        self._book_stages(stages, epoch_s)
        trainer, device, rank = self.trainer, self.trainer.strategy.root_device, self.trainer.global_rank
        self.steps = len(stages.rows)
        self._timeline = timeline = Timeline(self.clock, stream_of(device), self.part)
        self._probe = probe = probe_of(device)
        self._reader = StepReader(self.clock, partial(getattr, probe, "counts"), probe.usage)
        self._reader.start()
        self._undo.callback(self._reader.stop)
        run = WatchedRun(getattr(trainer.train_dataloader, "num_workers", None), epoch_s)
        run.skip(self.steps)
        metrics, write = None, None
        if export.monitoring:
            metrics = metrics_of(folder, rank, stages.rows, record, epoch_s)
            part = Guard("export", self.report)
            write = part.run(publish, metrics, export, rank, trainer.local_rank, self._unpublish)
        gpu = gpu_of(device)
        sampler = None if gpu is None else TelemetrySampler(gpu, _SAMPLE_S, lambda: self.clock() * 1e-9, _SAMPLES)
        if sampler is not None:
            sampler.start()
            self._undo.callback(sampler.stop)
        self._writer = WatchWriter(
            folder, rank, trainer.world_size, timeline, run, self.ledger, self.options, self.report, device,
            self.place, self.resumed_at, metrics, write, None if sampler is None else sampler.during,
        )  # fmt: skip
        self._user = trainer.profiler  # type: ignore[attr-defined]
        self._phases = PhaseProfiler(trainer, timeline, _ENDLESS, self._step_ended, self.callback)
        self._phases.install()
        self._phases.surround(lambda name, span: self.part.run(self._named, name, span, otherwise=span))
        self._phases.mark_optimizers()
        for logger in trainer.loggers:
            for name in ("log_metrics", "save"):
                with suppress(AttributeError):
                    bracket(logger, name, _TimedByName(self, terms.LOGGERS), self.part, self._undo)
        self._writer.start()
        self._spans.append(NamedSpan(self.ledger.last_ns, self.clock(), terms.INSTRUMENTS))

    @property
    def phases(self) -> PhaseProfiler | None:
        """What marks the watched steps; None where the watch could not begin."""
        return None if self.part.out else self._phases

    def leave_epoch(self) -> None:
        self.part.run(lambda: self._phases.leave_epoch())

    def _book_stages(self, stages: Session, epoch_s: float) -> None:
        """Book the stages like all other steps, the first one apart, and their end as our own."""
        others = passed(stages.timeline.went_outside, stages.timeline.saved)
        spans, self._spans = sorted([*self._spans, *others], key=lambda span: span.end_ns), []
        begin_ns, end_ns = np.array(stages.instants_ns, np.int64).reshape(-1, 2).T
        host_s = np.array([row.host_seconds for row in stages.rows]).reshape(-1, len(TIMED))
        spans = [span for span in spans if span.begin_ns < max(end_ns, default=0)]  # the rest is in the stages' end
        self.ledger.add(begin_ns, end_ns, host_s, spans)
        if len(host_s):
            self.ledger.longest.clear()
            for part, seconds in zip(PARTS, host_s[0].tolist(), strict=False):
                self.ledger.seconds[f"{STEPS}{part}"] -= seconds
                self.ledger.seconds[terms.FIRST_STEP] += seconds
            compiled = disjoint(compilations(epoch_s + float(begin_ns[0]) * 1e-9) or ())
            self.ledger.move(
                sum(each.ended_s - each.began_s for each in compiled),
                terms.COMPILING,
                [*terms.COMPILED_IN, terms.FIRST_STEP],
            )
        self.passed(terms.INSTRUMENTS)

    def _named(self, action_name: str, span: Marked) -> Marked:
        """Return the span of an action; hooks, checkpoints and validation have a name."""
        if action_name == "save_checkpoint":
            return _TimedByName(self, terms.CHECKPOINTS)
        if action_name.startswith("[Strategy]") and action_name.endswith(".on_validation_end"):
            return _Then(self, span, self._validated)
        if action_name.startswith("[Strategy]") and action_name.endswith(".validation_step"):
            return _Then(self, span, lambda: setattr(self.place, "alive_ns", self.clock()))
        owner = owner_of(action_name, self.trainer, self.callback)
        has_phase = span is not NOTHING and not isinstance(span, EpochHook)
        if owner[0] in (LIGHTNING, OURS, "") or not owner[1].startswith("on_") or has_phase:
            return span
        kind = "callback" if action_name.startswith("[Callback]") else "hooks"
        return _TimedByName(self, f"{kind}: {owner[0]}")

    def _validated(self) -> None:
        """Add the span of a validation, whose last action is over; it begins where the loop left the step."""
        went = (at for at, what in self._timeline.went_outside if what == terms.VALIDATION)
        if (began := next((at for at in went if at > self._validated_ns), None)) is not None:
            self._validated_ns = self.clock()
            self._spans.append(NamedSpan(began, self._validated_ns, terms.VALIDATION))

    def _step_ended(self) -> int:
        """Count a step; called in every step, so it only compares two clocks."""
        self.steps += 1
        now_ns = self.clock()
        if now_ns >= self._read_ns:
            self._read_ns = now_ns + _READ_NS
            self._reader.read(self.steps)
        if self._tracer is not None:
            self._trace_on(now_ns)
        elif now_ns >= self._hand_ns:
            self._hand_over(now_ns)
        if self._tracer is None and (ended_ns := self.clock()) - now_ns >= _NAMED_NS:
            self._spans.append(NamedSpan(now_ns, ended_ns, terms.INSTRUMENTS))
        return _ENDLESS

    def _hand_over(self, now_ns: int, traced: Tracer | None = None) -> None:
        writer = self._writer
        assert writer is not None
        self._hand_ns = now_ns + _HAND_NS
        writer.put(self._handed(now_ns, traced))
        self._track(writer)
        asked, writer.asked, self._signalled = writer.asked or 2 * self._signalled, 0, False
        if asked:
            self._trace(asked, now_ns)

    def _track(self, writer: WatchWriter) -> None:
        while writer.complete:
            window, step = writer.complete.popleft()
            values = window_figures(window)
            for tracker in self.trackers:
                tracker.send(values, step)

    def _handed(self, now_ns: int, traced: Tracer | None = None) -> Handed:
        timeline = self._timeline
        marks = timeline.take()
        spans, self._spans = [*self._spans, *passed(timeline.went_outside)], []
        timeline.went_outside.clear()
        timeline.saved.clear()
        timeline.hooks.clear()
        passed_over, self._passed_over = self._passed_over, 0
        held, (allocated, _, resident) = self._held_bytes(), self._probe.peaks()
        self._probe.usage()  # discards the reading that belongs to the process's peak: steps read their own
        peak = resident if allocated is None else allocated
        if peak is not None and held is not None:
            peak = max(peak, held)  # Linux may raise a process's peak later
        seen = (*self._reader.take(), held, peak, self.trainer.global_step)
        traced_steps, self._traced_steps = self._traced_steps, []
        return Handed(now_ns, marks, passed_over, spans, *seen, traced, traced_steps)

    def _held_bytes(self) -> int | None:
        held = self._probe.held()
        if held is None:
            with suppress(OSError, ValueError), open(_STATM) as file:  # noqa: PTH123 - half the time of Path.read_text
                return int(file.read().split()[1]) * _PAGE
        return held

    def _trace(self, steps: int, now_ns: int) -> None:
        """Trace the next ``steps`` whole steps, after one in which torch's profiler warms up."""
        trainer, writer = self.trainer, self._writer
        assert writer is not None
        tracer = Tracer(
            TraceOptions(steps=steps), trainer.strategy.root_device, self._timeline, writer.folder, writer.rank,
            lambda: trainer.lightning_module, is_a(self._user, "PyTorchProfiler"), f".step{self.steps + 2}",
        )  # fmt: skip
        tracer.part = Guard("a trace on demand", self.report, tracer.discard)
        tracer.part.run(tracer.start)
        self._tracer, self._traced, self._trace_ns = tracer, 0, now_ns

    def _trace_on(self, now_ns: int) -> None:
        """Continue a trace after each of its steps, and end it after the last."""
        tracer = self._tracer
        assert tracer is not None
        self._traced += 1
        if self._traced <= tracer.options.steps and not tracer.part.out:
            tracer.part.run(tracer.step)
            return
        self._tracer = None
        self._spans.append(NamedSpan(self._trace_ns, now_ns, terms.INSTRUMENTS))
        tracer.part.run(tracer.result)
        for step in self._timeline.reading().finished:
            self._traced_steps.append(TracedStep(step.host_ns[0], step.host_ns[-1], step.host_seconds()))
        self._timeline.restart()  # no figure includes traced steps
        self._passed_over += self._traced
        self._hand_over(self.clock(), tracer)

    def end(self, error: BaseException | None = None) -> None:
        """Write the rest, as the fit is over, or as ``error`` ended it."""
        if self._done:
            return
        self._done = True
        if (writer := self._writer) is None:
            self._undo.close()
            return
        writer.error = None if error is None else type(error).__name__
        self.part.run(lambda: self._phases.close_step())
        if self._tracer is not None:
            self._tracer.part.run(self._tracer.discard)
        handed = None if self.part.out else self.part.run(self._handed, self.clock())
        self._restore()
        if handed is not None:
            self.part.run(writer.end, handed)
            self.part.run(self._track, writer)
        self.part.run(self._unpublish.close)

    def _restore(self) -> None:
        if hasattr(self, "_phases"):
            self._phases.restore()
            self._timeline.stop()
        self._undo.close()

    def _leave(self) -> None:
        """Restore training to its state without the watch, because something here failed."""
        if self._writer is not None:
            self._writer.stop()
        self._restore()
        self._unpublish.close()


@dataclass(eq=False, slots=True)
class _TimedByName:
    """The context of something with a name: adds its span when it is over. It can be entered again where it nests."""

    watching: Watching
    what: str

    def __enter__(self) -> None:
        watching = self.watching
        try:
            watching.place.within.append((watching.clock(), self.what))
        except BaseException as error:
            watching.part.failed(error)

    def __exit__(self, *_: object) -> None:
        watching = self.watching
        try:
            if within := watching.place.within:
                watching._spans.append(NamedSpan(within.pop()[0], watching.clock(), self.what))
        except BaseException as error:
            watching.part.failed(error)


@dataclass(eq=False, slots=True)
class _Then:
    """The context of an action that calls ``over`` once it has ended."""

    watching: Watching
    span: Marked
    over: Callable[[], object]

    def __enter__(self) -> None:
        self.span.__enter__()

    def __exit__(self, *given: Any) -> None:
        self.span.__exit__(*given)
        self.watching.part.run(self.over)
