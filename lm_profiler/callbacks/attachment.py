"""Attaches the instruments of a run to its Trainer when the loop starts, and removes them when the record is made."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch import Callback, Trainer
from torch.cuda import nvtx

from lm_profiler.analysis.watch.ledger import INSTRUMENTS
from lm_profiler.callbacks.failures import phase_of
from lm_profiler.callbacks.gather import Exchange
from lm_profiler.callbacks.instruments.action_owners import OwnersWatch
from lm_profiler.callbacks.instruments.memory import MemoryReader
from lm_profiler.callbacks.instruments.profiling_options import ProfilingOptions
from lm_profiler.callbacks.instruments.ranks import STEPS, RanksWatch, StreamRanksWatch
from lm_profiler.callbacks.instruments.tracer import PhaseRanges, Tracer
from lm_profiler.callbacks.instruments.watches import StepWatch, loader_watch, profiler_range, watches_of
from lm_profiler.callbacks.instruments.work import FlopsWatch
from lm_profiler.callbacks.loop_length import fewest_steps_left
from lm_profiler.callbacks.marks.batches import BatchCounts
from lm_profiler.callbacks.marks.namespaces import is_a
from lm_profiler.callbacks.marks.phases import PhaseProfiler
from lm_profiler.callbacks.run_files import run_folder, snapshot_file
from lm_profiler.callbacks.run_finisher import RunFinisher
from lm_profiler.callbacks.session import Instruments, Session
from lm_profiler.callbacks.stages import Progress, StageCounter, StoppingRule
from lm_profiler.callbacks.watching import Watching
from lm_profiler.lightning_names import TUNER_EXIT
from lm_profiler.measure.boundary import UNGUARDED, Guard, say, try_or_note
from lm_profiler.measure.clocks.stream import EventStream, stream_of
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.collective_calls import Arrivals, StreamWaits, flight_recorder
from lm_profiler.measure.counts.step_reader import StepReader
from lm_profiler.measure.counts.traffic import ForwardTraffic
from lm_profiler.measure.device.nvml import TelemetrySampler, gpu_of
from lm_profiler.measure.memory.peaks import probe_of
from lm_profiler.measure.memory.storage_notes import MarkLog
from lm_profiler.record.steps import append_steps, begin_rows, rank_file

_NO_STEP = "the loader is empty, or every batch is skipped"


@dataclass(eq=False)
class Attachment:
    """The instruments of one run, from ``setup`` on. The constructor calls nothing that could fail."""

    callback: Callback  # the profiler whose run it is
    trainer: Trainer  # the Trainer of the run
    options: ProfilingOptions  # the options of the run
    max_steps: int  # the Trainer's own, which is restored at the end
    part: Guard = UNGUARDED  # guards every call
    ending: RunFinisher = field(init=False)
    notes: list[str] = field(default_factory=list)  # what was reported so far
    begun: bool = False  # true once there is a session
    is_search: bool = False  # whether this was no run, but a Tuner's search for a batch size or a learning rate
    phases: PhaseProfiler | None = None
    watching: Watching | None = None
    _stopping: StoppingRule | None = None

    def report(self, text: str) -> None:
        """Add a note to the record, and print it at once: there may be no record."""
        self.notes.append(text)
        say(f"rank {rank}: {text}" if (rank := self.trainer.global_rank) else text)

    def prepare(self, began_ns: int) -> None:
        """Begin the ledger of a watched fit, connect the ranks, and limit the steps before there is an optimizer."""
        options, ending = self.options, self.ending
        if options.watch is not None:
            since_ns = began_ns if (called_ns := options.launch.called_ns) is None else called_ns
            self.watching = Watching(self.callback, self.trainer, options.watch, options.clock, since_ns, self.report)
            self.watching.ledger.until(began_ns, "processes and prepare_data")
        ending.exchange = Exchange.of_process_group()
        if options.stages.stop_when_done and self.trainer.max_epochs == -1 and self.max_steps == -1:
            # A learning-rate schedule may ask how many there will be (``Trainer.estimated_stepping_batches``).
            self.trainer.fit_loop.epoch_loop.max_steps = sum(self._steps.values())

    def start(self) -> None:
        """Begin the run, at the start of the loop."""
        if self.watching is not None:
            self.watching.passed("set-up")
            self.watching.resumed_at = self.trainer.global_step
        self.begin()
        if self.watching is not None:
            self.watching.passed(INSTRUMENTS)

    def begin(self) -> None:
        """Make the record and the instruments; asks other ranks only for rank 0's folder."""
        self.begun = True  # set first: if the rest fails, it is not tried again
        trainer, options, ending, exchange = self.trainer, self.options, self.ending, self.ending.exchange
        launch = options.launch
        folder = run_folder(options.log_dir / launch.name, launch.folder, exchange, self.report)
        ending.files.folder = folder
        self._begin_files(folder)  # before the instruments, which may fail: a killed run must have a record
        stream = stream_of(trainer.strategy.root_device)
        timeline = Timeline(options.clock, stream, self.part)
        if options.trace.nvtx:
            ranges = PhaseRanges(nvtx.range_push, nvtx.range_pop)
            timeline.observers += (Guard("trace.nvtx", self.report).guard(ranges),)
        self._stopping = StoppingRule(
            options.stages,
            lambda own: exchange.from_rank_0("answer", lambda: own),
            steps_of_loop=self._most_measured_steps(),
        )
        loader = trainer.train_dataloader if options.verb == "fit" else None
        combined, silent = isinstance(loader, (dict, list, tuple)), options.quiet or not trainer.is_global_zero
        session = ending.session = Session(
            timeline=timeline,
            stream=stream,
            schedule=StageCounter(self._steps),
            instruments=self._instruments(timeline, stream, folder),
            progress=None if silent else try_or_note("progress", partial(Progress, options.stages), self.notes),
            rank=trainer.global_rank,
            stopping=self._stopping,
            report=self.report,
            append_rows=partial(append_steps, rank_file(folder, trainer.global_rank)),
            counts=BatchCounts(trainer.lightning_module, combined, self.report, getattr(loader, "batch_size", None)),
            is_manual=options.verb == "fit" and not trainer.lightning_module.automatic_optimization,
        )
        phases = self._replace_profiler(timeline, session)
        phases.mark_optimizers()

    def _most_measured_steps(self) -> float:
        """Return how many steps the loop has for measuring, so that it comes to all other stages; 0 if unknown."""
        if not self.options.stages.is_timed:
            return math.inf
        find_steps = partial(fewest_steps_left, self.trainer, self.options.verb)
        steps_of_loop = try_or_note("steps of the loop", find_steps, self.notes)
        if steps_of_loop is None:
            return 0
        other_steps = sum(self._steps.values()) - self._steps["measure"]
        return steps_of_loop - other_steps

    def _begin_files(self, folder: Path) -> None:
        """Write what a killed process leaves: on rank 0 an unfinished record, on other ranks a file for rows."""
        if self.trainer.is_global_zero:
            Guard("writing an unfinished record", self.report).run(self.ending.begin, self._steps)
        else:
            Guard("writing the steps while they come", self.report).run(begin_rows, folder, self.trainer.global_rank)

    def leave(self) -> None:
        """Only count steps from here on, because the profiler itself failed."""
        phases = self.phases or self._replace_profiler(Timeline(part=self.part), None)
        phases.count_only()
        if self.ending.session is not None:
            self.ending.session.instruments.discard()

    def end_evaluation(self) -> None:
        """Record an evaluation: its loop is over."""
        if self.options.verb == "fit" or self.ending.is_over:
            return
        if self.phases is not None:
            self.part.run(self.phases.close_step)
        self.ending.finished_early()

    def died(self, exception: BaseException) -> None:
        """Record a run that ``exception`` ended."""
        if not self.begun:
            if self.ending.exchange.rank > 0:  # begin() would wait for rank 0's folder while rank 0 waits for this rank
                self.ending.is_over = True
                self.ending.restore_trainer()
                return
            self.part.run(self.begin)
        phase, step, session = "other", 1, self.ending.session
        if session is not None and self.phases is not None:
            phase = phase_of(exception, session.timeline, session.steps)
            self.part.run(self.phases.close_step)  # a step that was complete before the error counts
            step = session.steps + 1
        if not self.ending.is_over:  # closing the last step may have finished the run
            self.ending.died(exception, phase, step)

    def end(self) -> None:
        """Record the run if it is not recorded yet: the Trainer is done."""
        if not self.begun and is_a(sys.exc_info()[1], TUNER_EXIT.name):
            # A Tuner ends its own fit before the loop begins (2.6.6: _TunerExitException).
            self.is_search = True
            self.ending.is_over = True
            return
        if not self.ending.is_over:
            if not self.begun:
                self.part.run(self.start)
            self.ending.finished_early()  # Lightning calls no end hook for a loop without work
        self.ending.restore_trainer()

    def _instruments(self, timeline: Timeline, stream: EventStream | None, folder: Path) -> Instruments:
        trainer, options = self.trainer, self.options
        device, rank, user = trainer.strategy.root_device, trainer.global_rank, trainer.profiler  # type: ignore[attr-defined]
        module = lambda: trainer.lightning_module  # noqa: E731 - it exists once the loop starts
        probe, gpu = probe_of(device), gpu_of(device)
        sampler = None if gpu is None else TelemetrySampler(gpu)
        forward, history = ForwardTraffic(), snapshot_file(folder, rank) if options.memory.history else None
        mark_log = None if history is None or rank else MarkLog()  # rank 0's timeline stands for all
        parties = lambda: (trainer.lightning_module, trainer.optimizers)  # noqa: E731
        reader = StepReader(timeline.clock, partial(getattr, probe, "counts"), probe.usage)
        return Instruments(
            MemoryReader(probe, timeline, device, parties, forward, mark_log, torch.UntypedStorage.data_ptr),
            Tracer(options.trace, device, timeline, folder, rank, module, is_a(user, "PyTorchProfiler")),
            [
                OwnersWatch(trainer, timeline, lambda: self.phases, self.callback, options.actions.steps),
                FlopsWatch(timeline, module, forward),
                *([loader_watch(trainer)] if options.verb == "fit" else []),
                *([profiler_range()] if options.trace.cuda_profiler_range else []),
                *watches_of(device, history, sampler, mark_log),
            ],
            self.report,
            StepWatch(reader, rank, sampler, timeline.saved),
            self._ranks(device, rank, stream),
        )

    @property
    def _together(self) -> bool:
        # whether there are other ranks, and marks and flight recorders share a clock
        return self.trainer.world_size > 1 and self.options.clock is time.perf_counter_ns

    @property
    def _steps(self) -> dict[str, int]:
        """The steps of each stage: the same on all ranks, even where the instruments of one fail."""
        on_cuda = self.trainer.strategy.root_device.type == "cuda"
        return self.options.steps(STEPS if on_cuda and self._together and self.options.verb == "fit" else 0)

    def _ranks(self, device: torch.device, rank: int, stream: EventStream | None) -> RanksWatch | None:
        if not self._together:
            return None
        dump = flight_recorder(device.type)
        arrivals = None if dump is None else Arrivals(dump, self.options.clock)
        wrapped = lambda: self.trainer.strategy.model  # noqa: E731
        if stream is None:
            return RanksWatch(arrivals, rank, wrapped)
        waits = StreamWaits(stream.record, self.options.clock) if device.type == "cuda" else None
        return StreamRanksWatch(arrivals, rank, wrapped, stream=stream, waits=waits)

    def _replace_profiler(self, timeline: Timeline, session: Session | None) -> PhaseProfiler:
        following, recording = Guard("stages.until_ci", self.report), self.ending.part
        step_ended: Callable[[], int] = (lambda: 0) if session is None else session.step_ended
        phases = PhaseProfiler(
            self.trainer,
            timeline,
            sum(self._steps.values()),
            step_ended if self.watching is None else self.watching.timed(step_ended),
            self.callback,
            follow=lambda left: following.run(self._follow, left, otherwise=left),
            done=partial(recording.run, self._stages_are_over),
            ends=self.options.stages.stop_when_done,
            on_no_step=lambda what: self.report(f"{what} had no step, and the Trainer has no other limit: {_NO_STEP}"),
        )
        phases.install()
        self.phases = phases  # only now: where installing fails, ``leave`` makes another
        return phases

    def _stages_are_over(self) -> PhaseProfiler | None:
        """Record the run, and watch the rest of training unless the stages failed: watching would fail too.

        Returns what marks the rest of training, if it is watched.
        """
        session, ending = self.ending.session, self.ending
        ending.finished()
        watching = self.watching
        may_watch = not ending.is_forked_copy and not self.part.out
        if watching is not None and ending.files.folder is not None and session is not None and may_watch:
            watching.trackers = ending.trackers
            watching.part.run(watching.start, ending.files.folder, session, ending.record, self.options.export)
            if self.phases is not None:  # the stages' profiler entered the epoch that runs now
                self.phases.leave_epoch = watching.leave_epoch  # type: ignore[method-assign]
            return watching.phases
        return None

    def _follow(self, left: int) -> int:
        """Return the steps left; unless their number was given the ranks agree on it, so all must ask equally often."""
        steps = self._steps
        later = sum(steps.values()) - steps["warmup"] - steps["measure"]
        measured = steps["measure"] - (left - later)
        if self._stopping is None or left <= later or measured < 1:
            return left
        return later if self._stopping.follow_rank_0(measured) else left
