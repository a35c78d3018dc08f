"""The training thread's part of a watched run: marks, one comparison per step, and a hand-over once per second.

It begins when the stages end, with its own marks and files, so that watching does not change the record of the stages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer

from lm_profiler.analysis.watch import ledger as terms
from lm_profiler.analysis.watch.ledger import Ledger, NamedSpan, spans_outside_steps
from lm_profiler.analysis.watch.watched_run import TracedStep, WatchedRun
from lm_profiler.callbacks.exports import metrics_of, publish
from lm_profiler.callbacks.instruments.action_owners import owner_of
from lm_profiler.callbacks.instruments.profiling_options import (
    ExportOptions,
    TraceOptions,
    WatchOptions,
)
from lm_profiler.callbacks.instruments.tracer import Tracer
from lm_profiler.callbacks.live import CountedBatches, LiveRows, StageFigures
from lm_profiler.callbacks.marks.actions import NOTHING, EpochHook, Marked
from lm_profiler.callbacks.marks.batches import BatchCounts
from lm_profiler.callbacks.marks.namespaces import is_a
from lm_profiler.callbacks.marks.optimizers import wrap_in_context
from lm_profiler.callbacks.marks.phases import PhaseProfiler
from lm_profiler.callbacks.session import Session
from lm_profiler.callbacks.trackers import Tracker
from lm_profiler.callbacks.watch_writer import (
    HandOver,
    RunningSpan,
    TrainingPosition,
    WatchWriter,
)
from lm_profiler.measure.boundary import UNGUARDED, Guard, print_message
from lm_profiler.measure.clocks.stream import stream_of
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.counts.recompiles import compilations
from lm_profiler.measure.counts.step_reader import ReadGpu, StepReader, disjoint
from lm_profiler.measure.device.nvml import TelemetrySampler, gpu_of
from lm_profiler.measure.memory.peaks import Probe, probe_of, unreclaimable_bytes
from lm_profiler.record.files import relative_to_cwd
from lm_profiler.record.parts import PARTS
from lm_profiler.record.quantities import count_text
from lm_profiler.record.run_record import LIGHTNING, OURS, RunRecord
from lm_profiler.record.watch_files import STEPS, read_events

_HAND_OVER_NS = 1_000_000_000  # least time between two hand-overs
_READ_NS = 5_000_000  # least time between two readings of counters, which take some microseconds each
# Shorter times of our own between two steps are not noted: a note for each step would fill memory.
_LEAST_OWN_NS = 5_000

_SAMPLE_S = 0.5  # between two samples of the GPU
# the samples that are kept; a step's counters are computed within seconds of its samples
_SAMPLES = 1000
# the number of steps left that the marks receive: the watch does not end training
_ENDLESS = 1 << 60


@dataclass(eq=False)
class Watching:
    """Watches one fit from its set-up on. The constructor reads nothing from the Trainer."""

    callback: Callback | None  # our own callback, whose time is named separately
    trainer: Trainer  # the Trainer of the run
    options: WatchOptions  # options that state what may be traced
    clock: Callable[[], int]  # the host's, in nanoseconds
    began_ns: int  # the instant at which fit began
    report: Callable[[str], object]  # gets a note of a problem
    # guards the whole watch: if it fails, training continues without it
    guard: Guard = UNGUARDED
    steps: int = 0  # the number of steps that have ended, those of the stages included
    resumed_at: int = 0  # the Trainer's count of steps when the loop began
    quiet: bool = False  # whether nothing is printed when the watch ends
    trackers: Sequence[Tracker] = ()  # get the figures of each window, and live figures
    ledger: Ledger = field(init=False)
    place: TrainingPosition = field(default_factory=TrainingPosition)
    _timeline: Timeline = field(init=False)
    _phases: PhaseProfiler = field(init=False)
    _reader: StepReader = field(init=False)
    _probe: Probe = field(init=False)
    _users_profiler: object = None  # ``trainer.profiler`` as the user has set it
    _writer: WatchWriter | None = None
    # named spans since the last hand-over
    _spans: list[NamedSpan] = field(default_factory=list)
    _last_validation_ns: int = 0  # when the last validation ended
    _next_hand_over_ns: int = 0
    _next_reading_ns: int = 0
    _tracer: Tracer | None = None  # the tracer of the trace that runs
    _steps_of_trace: int = 0  # steps of that trace so far
    _trace_began_ns: int = 0
    # steps that were traced since the last hand-over
    _traced_steps: list[TracedStep] = field(default_factory=list)
    # counts batches since the last hand-over; None if the counts are not used
    _counts: BatchCounts | None = None
    _steps_at_hand_over: int = 0  # ``steps`` at the last hand-over
    # steps since the last hand-over that are in no figure, because they were traced
    _skipped_steps: int = 0
    _undo: ExitStack = field(default_factory=ExitStack)
    _unpublish: ExitStack = field(default_factory=ExitStack)
    _has_ended: bool = False

    def __post_init__(self) -> None:
        self.guard = Guard("watch", self.report, self._give_up)
        self.ledger = Ledger(self.began_ns)

    def book_time_until_now(self, term: str) -> None:
        """Add the time since the last entry of the ledger to ``term``.

        This serves the time before the watch's first step; later calls do nothing.
        """
        if self._writer is None and not self._has_ended:
            self.ledger.add_until(self.clock(), term)

    def timed(self, step_ended: Callable[[], int]) -> Callable[[], int]:
        """Return ``step_ended`` of the stages as a function whose time is noted as our own."""

        def timed_step_ended() -> int:
            begin_ns = self.clock()
            try:
                return step_ended()
            finally:
                self._add_own_span(begin_ns, self.clock())

        return timed_step_ended

    def _add_own_span(self, begin_ns: int, end_ns: int) -> None:
        self._spans.append(NamedSpan(begin_ns, end_ns, terms.INSTRUMENTS))

    def start(
        self,
        folder: Path,
        session: Session,
        record: RunRecord | None,
        export: ExportOptions,
    ) -> None:
        """Begin to watch, between two steps, after the ``session`` has ended and left a ``record``."""
        epoch_s = time.time() - self.clock() * 1e-9
        self._book_session(session, epoch_s)
        self.steps = len(session.rows)
        self._steps_at_hand_over = self.steps
        device = self.trainer.strategy.root_device
        self._timeline = Timeline(self.clock, stream_of(device), self.guard)
        self._start_reader(device)
        self._writer = self._make_writer(folder, session, record, export, epoch_s)
        self._begin_marking()
        self._writer.start()
        self._add_own_span(self.ledger.last_ns, self.clock())

    def _start_reader(self, device: torch.device) -> None:
        """Start to read the counters of each step, and the allocator's."""
        self._probe = probe_of(device)
        read_allocator = partial(getattr, self._probe, "counts")
        self._reader = StepReader(self.clock, read_allocator, self._probe.usage)
        self._reader.start()
        self._undo.callback(self._reader.stop)

    def _make_writer(
        self,
        folder: Path,
        session: Session,
        record: RunRecord | None,
        export: ExportOptions,
        epoch_s: float,
    ) -> WatchWriter:
        """Return the writer of this rank's watch files, with live rows for loggers, and metrics if requested."""
        trainer = self.trainer
        device = trainer.strategy.root_device
        run = WatchedRun(
            workers=getattr(trainer.train_dataloader, "num_workers", None),
            on_device=device.type != "cpu",
            epoch_s=epoch_s,
        )
        run.skip(self.steps)
        writer = WatchWriter(
            folder=folder,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            timeline=self._timeline,
            run=run,
            ledger=self.ledger,
            options=self.options,
            report=self.report,
            device=device,
            place=self.place,
            resumed_at=self.resumed_at,
            gpu=self._start_sampler(device),
        )
        stage_figures = StageFigures.from_stages(session.rows, record)
        if export.monitoring or self.trackers:
            self._count_batches()
        if self.trackers:
            writer.live_rows = LiveRows(
                stages=stage_figures,
                ranks=trainer.world_size,
                every_steps=trainer.log_every_n_steps,  # type: ignore[attr-defined]
                began_ns=self.clock(),
            )
        if export.monitoring:
            writer.metrics = metrics_of(
                folder, trainer.global_rank, stage_figures, epoch_s
            )
            guard = Guard("export", self.report)
            writer.publish = guard.run(
                publish,
                writer.metrics,
                export,
                trainer.global_rank,
                trainer.local_rank,
                self._unpublish,
            )
        return writer

    def _count_batches(self) -> None:
        """Count the batches of each step from now on.

        The hook for that is set on this one callback object, until the watch ends. If the class defined it, Lightning
        would call it at each step of runs that count nothing, too.
        """
        trainer = self.trainer
        loader = trainer.train_dataloader
        self._counts = BatchCounts(
            module=trainer.lightning_module,
            combined=isinstance(loader, (dict, list, tuple)),
            report=self.report,
            batch_size=getattr(loader, "batch_size", None),
            counts_elements=False,
        )
        hooks = vars(self.callback)
        hooks["on_train_batch_end"] = self._on_train_batch_end
        # It is replaced by None, not deleted, because Lightning skips a hook that is not callable.
        self._undo.callback(hooks.update, on_train_batch_end=None)

    def _on_train_batch_end(
        self,
        trainer: Trainer,
        module: object,
        outputs: object,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count the batch: a hook that Lightning calls outside of the step's time."""
        if self._counts is None:
            return
        try:
            self._counts.add(batch)
        except BaseException as error:
            self.guard.handle(error)

    def _start_sampler(self, device: torch.device) -> ReadGpu | None:
        """Sample the GPU's clock from now on; return a function that reads the samples, or None without a GPU."""
        gpu = gpu_of(device)
        if gpu is None:
            return None
        sampler = TelemetrySampler(
            gpu, period_s=_SAMPLE_S, clock=lambda: self.clock() * 1e-9, kept=_SAMPLES
        )
        sampler.start()
        self._undo.callback(sampler.stop)
        return sampler.readings_between

    def _begin_marking(self) -> None:
        """Begin to take marks, and to name what happens outside of phases."""
        trainer = self.trainer
        self._users_profiler = trainer.profiler  # type: ignore[attr-defined]
        self._phases = PhaseProfiler(
            trainer,
            self._timeline,
            steps_left=_ENDLESS,
            step_ended=self._step_ended,
            callback=self.callback,
        )
        self._phases.install()
        self._phases.surround(
            lambda name, span: self.guard.run(
                self._named_span, name, span, otherwise=span
            )
        )
        self._phases.mark_optimizers()
        if self._counts is not None:
            self._phases.see_host_batches(self._counts.note_host_batch)
        for logger in trainer.loggers:
            for method in ("log_metrics", "save"):
                with suppress(AttributeError):
                    wrap_in_context(
                        logger,
                        method,
                        _TimedByName(self, terms.LOGGERS),
                        self.guard,
                        self._undo,
                    )

    @property
    def phases(self) -> PhaseProfiler | None:
        """The marker of the watched steps; None if the watch could not begin."""
        if self.guard.is_disabled:
            return None
        return self._phases

    def take_over(self, stages_phases: PhaseProfiler) -> None:
        """Make the running epoch report its end here, although it reported its start to the marker of the stages."""
        stages_phases.leave_epoch = self.leave_epoch  # type: ignore[method-assign]

    def leave_epoch(self) -> None:
        self.guard.run(lambda: self._phases.leave_epoch())

    def _book_session(self, session: Session, epoch_s: float) -> None:
        """Add the time of ``session``, which has just ended, to the ledger.

        Its steps are added as steps, its first step also as a term of its own. The time from its last step until now,
        in which it wrote its results, is time of our instruments.
        """
        timeline = session.timeline
        spans = self._spans + spans_outside_steps(
            timeline.departures, timeline.checkpoint_instants_ns
        )
        self._spans = []
        if session.rows:
            self._book_steps(session, spans, epoch_s)
        self.book_time_until_now(terms.INSTRUMENTS)

    def _book_steps(
        self, session: Session, spans: Sequence[NamedSpan], epoch_s: float
    ) -> None:
        """Add to the ledger the steps of ``session``, and the ``spans`` that began before the last step ended."""
        # The instants are a pair for each step: when it began and when it ended.
        begin_ns, end_ns = np.array(session.instants_ns, np.int64).T
        host_s = np.array([row.host_seconds for row in session.rows])  # [step, part]
        last_end_ns = int(end_ns.max())
        # The time after the last step is one entry of the ledger, so spans within it would count twice.
        spans_of_steps = [span for span in spans if span.begin_ns < last_end_ns]
        spans_of_steps.sort(key=attrgetter("end_ns"))
        self.ledger.add(begin_ns, end_ns, host_s, spans_of_steps)
        first_step_began_s = epoch_s + float(begin_ns[0]) * 1e-9
        self._book_first_step(host_s[0].tolist(), first_step_began_s)

    def _book_first_step(self, host_s: Sequence[float], began_s: float) -> None:
        """In the ledger, move the first step from the parts of steps to a term of its own.

        Compilations since it began go to another term. ``host_s`` are the seconds of its parts.
        """
        self.ledger.longest.clear()
        for part, seconds in zip(PARTS, host_s, strict=False):
            self.ledger.seconds[f"{STEPS}{part}"] -= seconds
            self.ledger.seconds[terms.FIRST_STEP] += seconds
        compiled = disjoint(compilations(began_s) or ())
        compiled_s = sum(
            compilation.ended_s - compilation.began_s for compilation in compiled
        )
        self.ledger.move(
            compiled_s, terms.COMPILING, [*terms.COMPILED_IN, terms.FIRST_STEP]
        )

    def _named_span(self, action_name: str, span: Marked) -> Marked:
        """Return the span of an action during the watch; ``span`` is the span that the action has otherwise.

        The user's hooks and checkpoints get a span that adds their time to the ledger by a name.
        """
        if action_name == "save_checkpoint":
            return _TimedByName(self, terms.CHECKPOINTS)
        is_strategys = action_name.startswith("[Strategy]")
        if is_strategys and action_name.endswith(".on_validation_end"):
            return _CallsAfterwards(self, span, self._book_validation)
        if is_strategys and action_name.endswith(".validation_step"):
            return _CallsAfterwards(self, span, self._note_sign_of_life)
        owner, hook = owner_of(action_name, self.trainer, self.callback)
        is_users_hook = owner not in (LIGHTNING, OURS, "") and hook.startswith("on_")
        has_phase = span is not NOTHING and not isinstance(span, EpochHook)
        if not is_users_hook or has_phase:
            return span
        kind = "callback" if action_name.startswith("[Callback]") else "hooks"
        return _TimedByName(self, f"{kind}: {owner}")

    def _note_sign_of_life(self) -> None:
        self.place.alive_ns = self.clock()

    def _book_validation(self) -> None:
        """Add the span of the validation that has just ended; it began when the loop left the step."""
        for left_ns, reason in self._timeline.departures:
            if reason == terms.VALIDATION and left_ns > self._last_validation_ns:
                self._last_validation_ns = self.clock()
                self._spans.append(
                    NamedSpan(left_ns, self._last_validation_ns, terms.VALIDATION)
                )
                return

    def _step_ended(self) -> int:
        """Count a step. It runs after every step, so usually it only compares the clock with two instants."""
        self.steps += 1
        now_ns = self.clock()
        if now_ns >= self._next_reading_ns:
            self._next_reading_ns = now_ns + _READ_NS
            self._reader.read(self.steps)
        if self._tracer is not None:
            self._continue_trace(self._tracer, now_ns)
        elif now_ns >= self._next_hand_over_ns:
            self._hand_over(now_ns)
        if self._tracer is None:
            end_ns = self.clock()
            if end_ns - now_ns >= _LEAST_OWN_NS:
                self._add_own_span(now_ns, end_ns)
        return _ENDLESS

    def _hand_over(self, now_ns: int, traced: Tracer | None = None) -> None:
        """Pass the data since the last hand-over to the writer; begin a trace if one was requested."""
        writer = self._writer
        assert writer is not None
        self._next_hand_over_ns = now_ns + _HAND_OVER_NS
        writer.put(self._hand_over_data(now_ns, traced))
        self._send_windows(writer)
        steps_to_trace = writer.traces.take()
        if steps_to_trace > 0:
            self._begin_trace(writer, steps_to_trace, now_ns)

    def _send_windows(self, writer: WatchWriter) -> None:
        """Send complete windows and live figures to the trackers."""
        while writer.unsent:
            values, step = writer.unsent.popleft()
            for tracker in self.trackers:
                tracker.send(values, step)

    def _hand_over_data(self, now_ns: int, traced: Tracer | None = None) -> HandOver:
        """Return what happened since the last hand-over."""
        timeline = self._timeline
        marks = timeline.take_marks()
        spans = [*self._spans, *spans_outside_steps(timeline.departures)]
        self._spans = []
        timeline.departures.clear()
        timeline.checkpoint_instants_ns.clear()
        timeline.epoch_hooks.clear()
        skipped_steps = self._skipped_steps
        self._skipped_steps = 0
        held_bytes = self._held_bytes()
        peak_bytes = self._peak_bytes(held_bytes)
        traced_steps = self._traced_steps
        self._traced_steps = []
        taken = self._reader.take()
        counted = self._take_counts()
        return HandOver(
            now_ns=now_ns,
            marks=marks,
            skipped_steps=skipped_steps,
            spans=spans,
            readings=taken.readings,
            collections=taken.collections,
            compilations=taken.compilations,
            held_bytes=held_bytes,
            peak_bytes=peak_bytes,
            global_step=self.trainer.global_step,
            traced=traced,
            traced_steps=traced_steps,
            counted=counted,
        )

    def _take_counts(self) -> CountedBatches | None:
        """Return the contents of the batches since the last hand-over; None if they are not counted."""
        steps = self.steps - self._steps_at_hand_over
        self._steps_at_hand_over = self.steps
        if self._counts is None:
            return None
        count = self._counts.take()
        useful_tokens = count.token_use.useful
        return CountedBatches(steps, count.tokens, count.samples, useful_tokens)

    def _held_bytes(self) -> int | None:
        """Return the bytes that the device holds; without a device, the process's memory except for mapped files."""
        held_bytes = self._probe.held()
        if held_bytes is not None:
            return held_bytes
        return unreclaimable_bytes()

    def _peak_bytes(self, held_bytes: int | None) -> int | None:
        """Return the allocator's peak, or else the peak of the process; None if both are unknown."""
        allocated_bytes, _, resident_bytes = self._probe.peaks()
        # Discard the usage that was read with the peak of the process: each step reads its own.
        self._probe.usage()
        peak_bytes = resident_bytes if allocated_bytes is None else allocated_bytes
        if peak_bytes is None or held_bytes is None:
            return peak_bytes
        # Linux may update the peak of a process late, so that it is below the bytes held now.
        return max(peak_bytes, held_bytes)

    def _begin_trace(self, writer: WatchWriter, steps: int, now_ns: int) -> None:
        """Trace the next ``steps`` whole steps, after one step in which torch's profiler warms up."""
        trainer = self.trainer
        first_traced_step = self.steps + 2
        tracer = Tracer(
            options=TraceOptions(steps=steps),
            device=trainer.strategy.root_device,
            timeline=self._timeline,
            folder=writer.folder,
            rank=writer.rank,
            module=lambda: trainer.lightning_module,
            is_profiler_taken=is_a(self._users_profiler, "PyTorchProfiler"),
            label=f".step{first_traced_step}",
        )
        tracer.guard = Guard("a trace on demand", self.report, tracer.discard)
        tracer.guard.run(tracer.start)
        self._tracer = tracer
        self._steps_of_trace = 0
        self._trace_began_ns = now_ns

    def _continue_trace(self, tracer: Tracer, now_ns: int) -> None:
        """Continue a trace after each of its steps, and end it after the last."""
        self._steps_of_trace += 1
        # A trace has one step more than requested: the first is the profiler's warm-up.
        has_steps_left = self._steps_of_trace <= tracer.options.steps
        if has_steps_left and not tracer.guard.is_disabled:
            tracer.guard.run(tracer.step)
            return
        self._tracer = None
        self._add_own_span(self._trace_began_ns, now_ns)
        tracer.guard.end(tracer.result)
        for step in self._timeline.reading().finished:
            self._traced_steps.append(
                TracedStep(
                    begin_ns=step.host_ns[0],
                    end_ns=step.host_ns[-1],
                    seconds=step.host_seconds(),
                )
            )
        self._timeline.restart()  # no figure includes traced steps
        self._skipped_steps += self._steps_of_trace
        self._hand_over(self.clock(), tracer)

    def end(self, error: BaseException | None = None) -> None:
        """Write what is left to write. The fit has ended, or ``error`` has ended it."""
        if self._has_ended:
            return
        self._has_ended = True
        writer = self._writer
        if writer is None:
            self._undo.close()
            return
        if error is not None:
            writer.error = type(error).__name__
        self.guard.run(lambda: self._phases.close_step())
        if self._tracer is not None:
            self._tracer.guard.run(self._tracer.discard)
        last = self.guard.run(lambda: self._hand_over_data(self.clock()))
        self._restore()
        if last is not None:
            self.guard.run(writer.end, last)
            self.guard.run(self._send_windows, writer)
            self.guard.run(self._print_events, writer.folder)
        self.guard.run(self._unpublish.close)

    def _print_events(self, folder: Path) -> None:
        """Print how many steps were watched and how many events there were, on rank 0."""
        if self.quiet or self.trainer.global_rank != 0:
            return
        steps = count_text(self.steps, "step")
        events = count_text(len(read_events(folder)), "event")
        command = f"lm_profiler watch {quote(str(relative_to_cwd(folder)))}"
        print_message(f"watched {steps}, {events}: {command}")

    def _restore(self) -> None:
        """Take away everything that this watch has added to training."""
        has_marks = hasattr(self, "_phases")
        if has_marks:
            self._phases.restore()
            self._timeline.stop()
        self._undo.close()

    def _give_up(self) -> None:
        """Restore training to its state without the watch, because something here failed."""
        if self._writer is not None:
            self._writer.stop()
        self._restore()
        self._unpublish.close()


@dataclass(eq=False, slots=True)
class _TimedByName:
    """The context of something with a name: adds its span when it ends. It may be nested in itself."""

    watching: Watching
    name: str

    def __enter__(self) -> None:
        """Note that the named span begins."""
        watching = self.watching
        try:
            watching.place.spans.append(RunningSpan(watching.clock(), self.name))
        except BaseException as error:
            watching.guard.handle(error)

    def __exit__(self, *_: object) -> None:
        """Note that the named span ends, and keep its time."""
        watching = self.watching
        try:
            if watching.place.spans:
                begin_ns = watching.place.spans.pop().begin_ns
                watching._spans.append(NamedSpan(begin_ns, watching.clock(), self.name))
        except BaseException as error:
            watching.guard.handle(error)


@dataclass(eq=False, slots=True)
class _CallsAfterwards:
    """The context of an action that calls ``call`` once it has ended."""

    watching: Watching
    span: Marked
    call: Callable[[], object]

    def __enter__(self) -> None:
        self.span.__enter__()

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        self.span.__exit__(kind, value, traceback)
        self.watching.guard.run(self.call)
