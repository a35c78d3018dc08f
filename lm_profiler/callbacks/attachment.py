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
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.cuda import nvtx

from lm_profiler.analysis.watch.ledger import INSTRUMENTS
from lm_profiler.callbacks.failures import phase_of
from lm_profiler.callbacks.gather import Exchange
from lm_profiler.callbacks.instruments.action_owners import OwnersWatch
from lm_profiler.callbacks.instruments.instrument import Instrument
from lm_profiler.callbacks.instruments.memory import MemoryReader
from lm_profiler.callbacks.instruments.profiling_options import (
    ProfilingOptions,
    WatchOptions,
)
from lm_profiler.callbacks.instruments.ranks import STEPS, RanksWatch, StreamRanksWatch
from lm_profiler.callbacks.instruments.tracer import PhaseRanges, Tracer
from lm_profiler.callbacks.instruments.watches import (
    StepWatch,
    loader_watch,
    profiler_range,
    watches_of,
)
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
    has_begun: bool = False  # whether there is a session, or making one failed
    is_search: bool = False  # whether this was no run, but a Tuner's search for a batch size or a learning rate
    phases: PhaseProfiler | None = None
    watching: Watching | None = None
    _stopping: StoppingRule | None = None

    def report(self, text: str) -> None:
        """Add a note to the record, and print it at once: there may be no record."""
        self.notes.append(text)
        rank = self.trainer.global_rank
        if rank == 0:
            say(text)
        else:
            say(f"rank {rank}: {text}")

    def prepare(self, began_ns: int) -> None:
        """Begin the ledger of a watched fit, connect the ranks, and limit the steps before there is an optimizer."""
        if self.options.watch is not None:
            self._begin_ledger(self.options.watch, began_ns)
        self.ending.exchange = Exchange.of_process_group()
        has_no_limit = self.trainer.max_epochs == -1 and self.max_steps == -1
        if self.options.stages.stop_when_done and has_no_limit:
            # A learning-rate schedule may ask how many there will be (``Trainer.estimated_stepping_batches``).
            self.trainer.fit_loop.epoch_loop.max_steps = sum(self._steps.values())

    def _begin_ledger(self, watch: WatchOptions, began_ns: int) -> None:
        called_ns = self.options.launch.called_ns
        if called_ns is None:
            called_ns = began_ns
        self.watching = Watching(
            self.callback,
            self.trainer,
            watch,
            self.options.clock,
            called_ns,
            self.report,
        )
        self.watching.ledger.add_until(began_ns, "processes and prepare_data")

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
        self.has_begun = True  # set first: if the rest fails, it is not tried again
        launch = self.options.launch
        exchange = self.ending.exchange
        folder = run_folder(
            self.options.log_dir / launch.name, launch.folder, exchange, self.report
        )
        self.ending.files.folder = folder
        self._begin_files(
            folder
        )  # before the instruments, which may fail: a killed run must have a record
        stream = stream_of(self.trainer.strategy.root_device)
        timeline = Timeline(self.options.clock, stream, self.part)
        if self.options.trace.nvtx:
            ranges = PhaseRanges(nvtx.range_push, nvtx.range_pop)
            timeline.observers += (Guard("trace.nvtx", self.report).guard(ranges),)
        self._stopping = StoppingRule(
            self.options.stages,
            lambda steps: exchange.from_rank_0("answer", lambda: steps),
            steps_of_loop=self._most_measured_steps(),
        )
        session = self._make_session(timeline, stream, folder, self._stopping)
        self.ending.session = session
        phases = self._mark(timeline, session)
        phases.mark_optimizers()

    def _make_session(
        self,
        timeline: Timeline,
        stream: EventStream | None,
        folder: Path,
        stopping: StoppingRule,
    ) -> Session:
        trainer = self.trainer
        is_fit = self.options.verb == "fit"
        progress = None
        if trainer.is_global_zero and not self.options.quiet:
            progress = try_or_note(
                "progress", partial(Progress, self.options.stages), self.notes
            )
        loader = trainer.train_dataloader if is_fit else None
        counts = BatchCounts(
            module=trainer.lightning_module,
            combined=isinstance(loader, (dict, list, tuple)),
            report=self.report,
            batch_size=getattr(loader, "batch_size", None),
        )
        return Session(
            timeline=timeline,
            stream=stream,
            schedule=StageCounter(self._steps),
            instruments=self._make_instruments(timeline, stream, folder),
            progress=progress,
            rank=trainer.global_rank,
            stopping=stopping,
            report=self.report,
            append_rows=partial(append_steps, rank_file(folder, trainer.global_rank)),
            counts=counts,
            is_manual=is_fit and not trainer.lightning_module.automatic_optimization,
        )

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
            Guard("writing an unfinished record", self.report).run(
                self.ending.begin, self._steps
            )
            return
        Guard("writing the steps while they come", self.report).run(
            begin_rows, folder, self.trainer.global_rank
        )

    def only_count(self) -> None:
        """Only count steps from here on, because the profiler itself failed."""
        phases = self.phases
        if phases is None:
            phases = self._mark(Timeline(part=self.part), session=None)
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
        if not self.has_begun:
            if (
                self.ending.exchange.rank > 0
            ):  # begin() would wait for rank 0's folder while rank 0 waits for this rank
                self.ending.is_over = True
                self.ending.restore_trainer()
                return
            self.part.run(self.begin)
        phase = "other"
        step = 1
        session = self.ending.session
        if session is not None and self.phases is not None:
            phase = phase_of(exception, session.timeline, session.steps)
            self.part.run(
                self.phases.close_step
            )  # a step that was complete before the error counts
            step = session.steps + 1
        if not self.ending.is_over:  # closing the last step may have finished the run
            self.ending.died(exception, phase, step)

    def end(self) -> None:
        """Record the run if it is not recorded yet: the Trainer is done."""
        # A Tuner ends its own fit before the loop begins (2.6.6: _TunerExitException).
        tuner_ended_it = is_a(sys.exc_info()[1], TUNER_EXIT.name)
        if not self.has_begun and tuner_ended_it:
            self.is_search = True
            self.ending.is_over = True
            return
        if not self.ending.is_over:
            if not self.has_begun:
                self.part.run(self.start)
            self.ending.finished_early()  # Lightning calls no end hook for a loop without work
        self.ending.restore_trainer()

    def _make_instruments(
        self, timeline: Timeline, stream: EventStream | None, folder: Path
    ) -> Instruments:
        trainer, options = self.trainer, self.options
        device = trainer.strategy.root_device
        rank = trainer.global_rank
        probe = probe_of(device)
        gpu = gpu_of(device)
        sampler = None if gpu is None else TelemetrySampler(gpu)
        forward = ForwardTraffic()
        history: Path | None = None
        mark_log: MarkLog | None = None
        if options.memory.history:
            history = snapshot_file(folder, rank)
            if rank == 0:  # whose timeline stands for all
                mark_log = MarkLog()
        memory = MemoryReader(
            probe=probe,
            timeline=timeline,
            device=device,
            parties=lambda: (trainer.lightning_module, trainer.optimizers),
            forward=forward,
            note_tensors=mark_log,
            storage_id=torch.UntypedStorage.data_ptr,
        )
        tracer = Tracer(
            options=options.trace,
            device=device,
            timeline=timeline,
            folder=folder,
            rank=rank,
            module=self._module,
            taken=is_a(trainer.profiler, "PyTorchProfiler"),  # type: ignore[attr-defined]
        )
        others: list[Instrument] = [
            OwnersWatch(
                trainer,
                timeline,
                lambda: self.phases,
                self.callback,
                options.actions.steps,
            ),
            FlopsWatch(timeline, self._module, forward),
        ]
        if options.verb == "fit":
            others.append(loader_watch(trainer))
        if options.trace.cuda_profiler_range:
            others.append(profiler_range())
        others += watches_of(device, history, sampler, mark_log)
        reader = StepReader(
            timeline.clock, partial(getattr, probe, "counts"), probe.usage
        )
        counters = StepWatch(reader, rank, sampler, timeline.saved)
        return Instruments(
            memory,
            tracer,
            others,
            self.report,
            counters,
            self._make_ranks_watch(device, rank, stream),
        )

    def _module(self) -> LightningModule:
        """Return the trained module, which exists once the loop starts."""
        return self.trainer.lightning_module

    @property
    def _ranks_are_compared(self) -> bool:
        """Whether there are other ranks, and marks and flight recorders share a clock."""
        return (
            self.trainer.world_size > 1 and self.options.clock is time.perf_counter_ns
        )

    @property
    def _steps(self) -> dict[str, int]:
        """The steps of each stage: the same on all ranks, even where the instruments of one fail."""
        on_cuda = self.trainer.strategy.root_device.type == "cuda"
        times_collectives = (
            on_cuda and self._ranks_are_compared and self.options.verb == "fit"
        )
        return self.options.steps(collectives=STEPS if times_collectives else 0)

    def _make_ranks_watch(
        self, device: torch.device, rank: int, stream: EventStream | None
    ) -> RanksWatch | None:
        if not self._ranks_are_compared:
            return None
        arrivals: Arrivals | None = None
        dump = flight_recorder(device.type)
        if dump is not None:
            arrivals = Arrivals(dump, self.options.clock)
        if stream is None:
            return RanksWatch(arrivals, rank, self._wrapped_module)
        waits: StreamWaits | None = None
        if device.type == "cuda":
            waits = StreamWaits(stream.record, self.options.clock)
        return StreamRanksWatch(
            arrivals, rank, self._wrapped_module, stream=stream, waits=waits
        )

    def _wrapped_module(self) -> object:
        return self.trainer.strategy.model

    def _mark(self, timeline: Timeline, session: Session | None) -> PhaseProfiler:
        """Have the Trainer's profiler mark the phases; without a session, count steps alone."""
        step_ended: Callable[[], int] = _no_steps_left
        if session is not None:
            step_ended = session.step_ended
        if self.watching is not None:
            step_ended = self.watching.timed(step_ended)
        following = Guard("stages.until_ci", self.report)
        phases = PhaseProfiler(
            self.trainer,
            timeline,
            sum(self._steps.values()),
            step_ended,
            self.callback,
            follow=lambda steps_left: following.run(
                self._follow_rank_0, steps_left, otherwise=steps_left
            ),
            stages_ended=partial(self.ending.part.run, self._stages_are_over),
            ends=self.options.stages.stop_when_done,
            on_no_step=self._report_no_step,
        )
        phases.install()
        self.phases = (
            phases  # only now: where installing fails, ``leave`` makes another
        )
        return phases

    def _report_no_step(self, place: str) -> None:
        self.report(
            f"{place} had no step, and the Trainer has no other limit: {_NO_STEP}"
        )

    def _stages_are_over(self) -> PhaseProfiler | None:
        """Record the run, and watch the rest of training unless the stages failed: watching would fail too.

        Returns what marks the rest of training, if it is watched.
        """
        session = self.ending.session
        self.ending.finished()
        watching = self.watching
        folder = self.ending.files.folder
        may_watch = not self.ending.is_forked_copy and not self.part.out
        if watching is None or folder is None or session is None or not may_watch:
            return None
        watching.trackers = self.ending.trackers
        watching.part.run(
            watching.start, folder, session, self.ending.record, self.options.export
        )
        if (
            self.phases is not None
        ):  # the stages' profiler entered the epoch that runs now
            self.phases.leave_epoch = watching.leave_epoch  # type: ignore[method-assign]
        return watching.phases

    def _follow_rank_0(self, steps_left: int) -> int:
        """Return the steps left; unless their number was given the ranks agree on it, so all must ask equally often."""
        steps = self._steps
        later_steps = sum(steps.values()) - steps["warmup"] - steps["measure"]
        measured_steps = steps["measure"] - (steps_left - later_steps)
        is_measuring = steps_left > later_steps and measured_steps >= 1
        if self._stopping is None or not is_measuring:
            return steps_left
        if self._stopping.follow_rank_0(measured_steps):
            return later_steps
        return steps_left


def _no_steps_left() -> int:
    return 0
