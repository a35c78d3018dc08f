"""Attaches the instruments of a run to its loop when the loop begins, and removes them when the record is made."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.cuda import nvtx

from lm_profiler.analysis.watch.ledger import INSTRUMENTS
from lm_profiler.callbacks.failures import phase_of
from lm_profiler.callbacks.gather import Exchange
from lm_profiler.callbacks.instruments.instrument import Instrument
from lm_profiler.callbacks.instruments.loop import Loop, Marks
from lm_profiler.callbacks.instruments.memory import MemoryReader
from lm_profiler.callbacks.instruments.outside_lines import OutsideLines
from lm_profiler.callbacks.instruments.owners import ActionSteps
from lm_profiler.callbacks.instruments.part_times import PartTimes
from lm_profiler.callbacks.instruments.profiling_options import (
    ProfilingOptions,
    WatchOptions,
)
from lm_profiler.callbacks.instruments.ranks import STEPS, RanksWatch, StreamRanksWatch
from lm_profiler.callbacks.instruments.tracer import PhaseRanges, Tracer
from lm_profiler.callbacks.instruments.watches import (
    StepWatch,
    profiler_range,
    watches_of,
)
from lm_profiler.callbacks.instruments.work import FlopsWatch
from lm_profiler.callbacks.instruments.worker_code import WORKER_CODE, WorkerLines
from lm_profiler.callbacks.marks.namespaces import is_a
from lm_profiler.callbacks.marks.step_counter import StepCounter
from lm_profiler.callbacks.run_files import run_folder, snapshot_file
from lm_profiler.callbacks.run_finisher import RunFinisher
from lm_profiler.callbacks.session import Instruments, Session
from lm_profiler.callbacks.stages import Progress, StageCounter, StoppingRule
from lm_profiler.lightning_names import TUNER_EXIT
from lm_profiler.measure.boundary import UNGUARDED, Guard, print_message, try_or_note
from lm_profiler.measure.clocks.stream import EventStream, stream_of
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.collective_calls import Arrivals, StreamWaits, flight_recorder
from lm_profiler.measure.counts.step_operators import StepOperators
from lm_profiler.measure.counts.step_reader import StepReader
from lm_profiler.measure.counts.traffic import ForwardTraffic
from lm_profiler.measure.device.nvml import TelemetrySampler, gpu_of
from lm_profiler.measure.memory.peaks import Probe, probe_of
from lm_profiler.measure.memory.storage_notes import MarkLog
from lm_profiler.record.steps import append_steps, begin_rows, rank_file


@dataclass(eq=False)
class Attachment:
    """The instruments of one run and its loop. The constructor calls nothing that could fail."""

    loop: Loop  # the loop of the run
    options: ProfilingOptions  # the options of the run
    restore_loop: Callable[[], None]  # removes what marks the loop
    guard: Guard = UNGUARDED  # guards every call of an instrument
    finisher: RunFinisher = field(init=False)
    notes: list[str] = field(default_factory=list)  # notes that were reported so far
    has_begun: bool = False  # whether there is a session, or making it has failed
    is_search: bool = False  # whether this was not a run but a Tuner's search for a batch size or a learning rate
    phases: Marks | None = None
    watching: Any = None  # the ``Watching`` of the rest of a fit
    _stopping: StoppingRule | None = None

    def __post_init__(self) -> None:
        # Two guards, because the profiler may fail while a record can still be written, which may fail too.
        self.guard = Guard("the profiler", self.report, self.only_count)
        self.finisher = RunFinisher(
            self.loop,
            self.options,
            self.guard,
            self.restore_loop,
            self.report,
            self.notes,
        )
        self.finisher.guard = Guard(
            "the record", self.report, self.finisher.recording_failed
        )

    def report(self, text: str, *, prints: bool = True) -> None:
        """Add a note to the record, and also print it now if ``prints``, because there may be no record."""
        self.notes.append(text)
        if not prints:
            return
        rank = self.loop.rank
        if rank == 0:
            print_message(text)
        else:
            print_message(f"rank {rank}: {text}")

    def prepare(self, began_ns: int) -> None:
        """Begin the ledger of a watched fit, connect the ranks, and limit the steps of the loop.

        This is before the optimizers are made, because a learning-rate schedule may ask for the number of steps.
        """
        if self.options.watch is not None:
            self._begin_ledger(self.options.watch, began_ns)
        if self.loop.rank == 0:
            self.guard.run(WORKER_CODE.install)
        self.finisher.exchange = Exchange.of_process_group()
        self._limit_steps(self._steps)

    def _limit_steps(self, steps_of_stages: Mapping[str, int]) -> None:
        """Limit the loop to the steps of its stages, and one more, because a loader without a length is prefetched."""
        if self.options.stages.stop_when_done:
            self.loop.limit_steps(sum(steps_of_stages.values()) + 1)

    def _begin_ledger(self, watch: WatchOptions, began_ns: int) -> None:
        """Begin the ledger of the loop's time, if the loop can be watched: it starts when the program was called."""
        called_ns = self.options.launch.called_ns
        if called_ns is None:
            called_ns = began_ns
        self.watching = self.loop.watch(
            watch, self.options.clock, called_ns, self.report
        )
        if self.watching is not None:
            self.watching.quiet = self.options.quiet
            self.watching.ledger.add_until(began_ns, "processes and prepare_data")

    def start(self) -> None:
        """Begin the run, at the start of the loop."""
        if self.watching is not None:
            self.watching.book_time_until_now("set-up")
            self.watching.resumed_at = self.loop.step_number
        self.begin()
        if self.watching is not None:
            self.watching.book_time_until_now(INSTRUMENTS)

    def begin(self) -> None:
        """Make the folder, its first files, the instruments and the marks.

        Ranks wait for each other only for the folder, which rank 0 chooses.
        """
        # set first, so that it is not tried again if the rest fails
        self.has_begun = True
        launch = self.options.launch
        exchange = self.finisher.exchange
        folder = run_folder(
            self.options.log_dir / launch.name, launch.folder, exchange, self.report
        )
        self.finisher.files.folder = folder
        # before the instruments, which may fail, so that a killed run has a record
        self._begin_files(folder)
        stream = stream_of(self.loop.device)
        timeline = Timeline(self.options.clock, stream, self.guard)
        if self.options.trace.nvtx:
            ranges = PhaseRanges(nvtx.range_push, nvtx.range_pop)
            timeline.observers += (Guard("trace.nvtx", self.report).wrap(ranges),)
        steps_of_loop = try_or_note(
            "steps of the loop", self.loop.fewest_steps_left, self.notes
        )
        self._stopping = StoppingRule(
            self.options.stages,
            lambda steps: exchange.from_rank_0("answer", lambda: steps),
            steps_of_loop=self._most_measured_steps(steps_of_loop),
        )
        spare_steps = self._spare_steps(steps_of_loop)
        session = self._make_session(
            timeline, stream, folder, self._stopping, spare_steps
        )
        self.finisher.session = session
        phases = self._install_marks(timeline, session)
        phases.mark_optimizers()
        phases.see_host_batches(session.counts.note_host_batch)

    def _make_session(
        self,
        timeline: Timeline,
        stream: EventStream | None,
        folder: Path,
        stopping: StoppingRule,
        spare_steps: float,
    ) -> Session:
        """Return the session that drives the run, with its instruments; none of them has begun."""
        loop = self.loop
        progress = None
        if loop.rank == 0 and not self.options.quiet:
            progress = try_or_note(
                "progress", partial(Progress, self.options.stages), self.notes
            )
        return Session(
            timeline=timeline,
            stream=stream,
            schedule=StageCounter(self._steps),
            instruments=self._make_instruments(timeline, stream, folder),
            progress=progress,
            rank=loop.rank,
            stopping=stopping,
            report=self.report,
            append_rows=partial(append_steps, rank_file(folder, loop.rank)),
            counts=loop.batch_counts(self.report),
            is_manual=loop.steps_by_itself,
            spare_steps=spare_steps,
            limit_steps=self._limit_steps,
        )

    def _spare_steps(self, steps_of_loop: float | None) -> float:
        """Return by how many steps the stages may become longer, so that the loop still reaches all of them."""
        if self.loop.world_size > 1:
            # Several ranks would have to agree on a longer stage.
            return 0
        if steps_of_loop is None:
            return math.inf
        return steps_of_loop - sum(self._steps.values())

    def _most_measured_steps(self, steps_of_loop: float | None) -> float:
        """Return how many steps the loop has for measuring, so that it still reaches all other stages; 0 if unknown."""
        if not self.options.stages.is_timed:
            return math.inf
        if steps_of_loop is None:
            return 0
        other_steps = sum(self._steps.values()) - self._steps["measure"]
        return steps_of_loop - other_steps

    def _begin_files(self, folder: Path) -> None:
        """Write the files that a killed process leaves: on rank 0 an unfinished record, on others a file for rows."""
        if self.loop.rank == 0:
            Guard("writing an unfinished record", self.report).run(
                self.finisher.begin, self._steps
            )
            return
        Guard("writing steps during the run", self.report).run(
            begin_rows, folder, self.loop.rank
        )

    def count_batch(self, batch: Any) -> None:
        """Count a batch that the loop has worked on; called in every timed step."""
        finisher = self.finisher
        session = finisher.session
        if finisher.is_over or session is None or self.guard.is_disabled:
            return
        try:
            session.counts.add(batch)
            if not finisher.collector.has_batch:
                finisher.collector.remember_batch(batch)
        except BaseException as error:
            self.guard.handle(error)

    def count_ended_batch(
        self, trainer: object, module: object, outputs: object, batch: Any, *_: Any
    ) -> None:
        """Count a batch like ``count_batch``, as Lightning's hook at the end of a batch.

        It is written out, because it runs in every step. ``count_batch`` has remembered the first batch already.
        """
        finisher = self.finisher
        session = finisher.session
        if finisher.is_over or session is None or self.guard.is_disabled:
            return
        try:
            session.counts.add(batch)
        except BaseException as error:
            self.guard.handle(error)

    def only_count(self) -> None:
        """Only count steps from now on, because the profiler itself failed."""
        phases = self.phases
        if phases is None:
            phases = self._install_marks(Timeline(guard=self.guard), session=None)
        phases.count_only()
        if self.finisher.session is not None:
            self.finisher.session.instruments.discard()

    def end_evaluation(self) -> None:
        """Record an evaluation whose loop has ended."""
        if self.options.verb == "fit" or self.finisher.is_over:
            return
        if self.phases is not None:
            self.guard.run(self.phases.close_step)
        self.finisher.finished_early()

    def died(self, exception: BaseException) -> None:
        """Record a run that ``exception`` ended."""
        if not self.has_begun:
            if self.finisher.exchange.rank > 0:
                # begin() would wait for rank 0's folder while rank 0 waits for this rank
                self.finisher.is_over = True
                self.restore_loop()
                return
            self.guard.run(self.begin)
        phase = "other"
        step = 1
        session = self.finisher.session
        if session is not None and self.phases is not None:
            phase = phase_of(exception, session.timeline, session.steps)
            # a step that was complete before the error counts
            self.guard.run(self.phases.close_step)
            step = session.steps + 1
        # Closing the last step may have finished the run.
        if not self.finisher.is_over:
            self.finisher.died(exception, phase, step)

    def end(self) -> None:
        """Record the run if it is not recorded yet, because the loop has ended."""
        # A Tuner ends its own fit before the loop begins (2.6.6: _TunerExitException).
        tuner_ended_it = is_a(sys.exc_info()[1], TUNER_EXIT.name)
        if not self.has_begun and tuner_ended_it:
            self.is_search = True
            self.finisher.is_over = True
            WORKER_CODE.restore()
            return
        if not self.finisher.is_over:
            if not self.has_begun:
                self.guard.run(self.start)
            # Needed for a loop without work, for which Lightning calls no hook at its end.
            self.finisher.finished_early()
        self.restore_loop()

    def _make_instruments(
        self, timeline: Timeline, stream: EventStream | None, folder: Path
    ) -> Instruments:
        """Return the instruments of a run, as the options and the device allow; none of them has begun."""
        loop, options = self.loop, self.options
        device = loop.device
        rank = loop.rank
        probe = probe_of(device)
        gpu = gpu_of(device)
        sampler = None if gpu is None else TelemetrySampler(gpu)
        forward = ForwardTraffic()
        history: Path | None = None
        mark_log: MarkLog | None = None
        if options.memory.history:
            history = snapshot_file(folder, rank)
            if rank == 0:  # only its memory timeline is shown
                mark_log = MarkLog()
        memory = self._make_memory_reader(probe, timeline, forward, mark_log)
        tracer = self._make_tracer(timeline, folder)
        action_steps = options.actions.steps
        owners = loop.owners_watch(timeline, ActionSteps(action_steps, action_steps))
        others: list[Instrument] = [
            owners,
            FlopsWatch(timeline, self._get_module, forward, self._operators_maker()),
        ]
        if rank == 0:
            others += [OutsideLines(timeline), WorkerLines(lambda: loop.loader)]
        prefetched = loop.loader_watch()
        if prefetched is not None:
            others.append(prefetched)
        if options.trace.cuda_profiler_range:
            others.append(profiler_range())
        others += watches_of(device, history, sampler, mark_log)
        reader = StepReader(
            timeline.clock, partial(getattr, probe, "counts"), probe.usage
        )
        counters = StepWatch(reader, rank, sampler, timeline.checkpoint_instants_ns)
        return Instruments(
            memory,
            tracer,
            others,
            self.report,
            counters,
            ranks=self._make_ranks_watch(device, rank, stream),
            part_times=PartTimes(timeline),
            owners=owners,
        )

    def _make_memory_reader(
        self,
        probe: Probe,
        timeline: Timeline,
        forward: ForwardTraffic,
        mark_log: MarkLog | None,
    ) -> MemoryReader:
        """Return the reader of the memory that ``probe`` sees; ``mark_log``, if any, notes tensors for a timeline."""
        loop = self.loop
        return MemoryReader(
            probe=probe,
            timeline=timeline,
            device=loop.device,
            parties=lambda: (loop.module, loop.optimizers),
            forward=forward,
            note_tensors=mark_log,
            storage_id=torch.UntypedStorage.data_ptr,
        )

    def _make_tracer(self, timeline: Timeline, folder: Path) -> Tracer:
        """Return the tracer of this rank, which writes into the run's ``folder``."""
        return Tracer(
            options=self.options.trace,
            device=self.loop.device,
            timeline=timeline,
            folder=folder,
            rank=self.loop.rank,
            module=self._get_module,
            is_profiler_taken=self.loop.traces_by_itself,
        )

    def _operators_maker(self) -> Callable[[], StepOperators] | None:
        """Return a function that makes the recorder of a step's operators; None on all ranks except rank 0."""
        loop = self.loop
        if loop.rank > 0:
            return None

        def wait() -> None:
            if loop.device.type == "cuda":
                torch.cuda.synchronize(loop.device)

        # On the CPU, the time that the thread ran is not lengthened by other programs.
        clock = time.thread_time_ns
        if loop.device.type != "cpu":
            clock = time.perf_counter_ns

        def make() -> StepOperators:
            return StepOperators(
                lambda: (loop.module, loop.optimizers),
                wait,
                clock,
                sees_all=loop.world_size == 1,
                report=self.report,
            )

        return make

    def _get_module(self) -> nn.Module:
        """Return the trained module, which exists when the loop starts."""
        return self.loop.module

    @property
    def _ranks_are_compared(self) -> bool:
        """Whether there are several ranks, and marks use the clock of torch's flight recorders."""
        return self.loop.world_size > 1 and self.options.clock is time.perf_counter_ns

    @property
    def _steps(self) -> dict[str, int]:
        """The steps of each stage, the same on all ranks, even if the instruments of one fail."""
        on_cuda = self.loop.device.type == "cuda"
        times_collectives = (
            on_cuda and self._ranks_are_compared and self.options.verb == "fit"
        )
        collectives_steps = STEPS if times_collectives else 0
        return self.options.steps(collectives_steps)

    def _make_ranks_watch(
        self, device: torch.device, rank: int, stream: EventStream | None
    ) -> RanksWatch | None:
        """Return the instrument that finds slow ranks; None if no ranks are compared.

        Arrivals are the instants at which the host called collectives, from torch's flight recorder. Waits are the
        times that the device's stream waited for another stream, such as that of the collectives.
        """
        if not self._ranks_are_compared:
            return None
        arrivals: Arrivals | None = None
        read_flight_recorder = flight_recorder(device.type)
        if read_flight_recorder is not None:
            arrivals = Arrivals(read_flight_recorder, self.options.clock)
        if stream is None:
            return RanksWatch(arrivals, rank, self._get_wrapped_module)
        waits: StreamWaits | None = None
        if device.type == "cuda":
            waits = StreamWaits(stream.record, self.options.clock)
        return StreamRanksWatch(
            arrivals, rank, self._get_wrapped_module, stream=stream, waits=waits
        )

    def _get_wrapped_module(self) -> object:
        return self.loop.wrapped_module

    def _install_marks(self, timeline: Timeline, session: Session | None) -> Marks:
        """Install the marks of the loop's phases; without a session, only count steps."""
        step_ended: Callable[[], int] = _no_steps_left
        if session is not None:
            step_ended = session.step_ended
        if self.watching is not None:
            step_ended = self.watching.timed(step_ended)
        # in a guard of its own: a rank asks rank 0 when the guard of its instruments is disabled
        agreement_guard = Guard("stages.until_ci", self.report)
        counter = StepCounter(
            timeline,
            sum(self._steps.values()),
            step_ended,
            agree_on_steps_left=lambda steps_left: agreement_guard.run(
                self._agree_with_rank_0, steps_left, otherwise=steps_left
            ),
            stages_ended=partial(self.finisher.guard.run, self._stages_are_over),
            ends_loop=self.options.stages.stop_when_done,
        )
        phases = self.loop.make_marks(timeline, counter, self.report)
        phases.install()
        # set only now: if installing fails, ``only_count`` makes other marks
        self.phases = phases
        return phases

    def _stages_are_over(self) -> Marks | None:
        """Record the run, and begin to watch the rest of training if that was requested.

        If the instruments of the stages failed, watching does not begin, because it would fail too.

        Returns:
            The marks of the rest of training; None if it is not watched.
        """
        session = self.finisher.session
        self.finisher.finished()
        watching = self.watching
        folder = self.finisher.files.folder
        may_watch = not self.finisher.is_forked_copy and not self.guard.is_disabled
        if watching is None or folder is None or session is None or not may_watch:
            return None
        watching.trackers = self.finisher.trackers
        watching.guard.run(
            watching.start, folder, session, self.finisher.record, self.options.export
        )
        if self.phases is not None:
            watching.take_over(self.phases)
        successor: Marks | None = watching.phases
        return successor

    def _agree_with_rank_0(self, steps_left: int) -> int:
        """Return the steps left on a rank whose instruments failed: rank 0 decides when enough is measured.

        All ranks must ask rank 0 equally often.
        """
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
