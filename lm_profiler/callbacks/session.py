"""Drives the instruments from step to step, and collects one row per step through the stages."""

from __future__ import annotations

import gc
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from pathlib import PurePath
from typing import Any

from lm_profiler.analysis.steps.summaries import BatchCount
from lm_profiler.analysis.watch.ledger import (
    CHECKPOINTS,
    EPOCH,
    VALIDATION,
    NamedSpan,
    SpansInOrder,
    spans_outside_steps,
)
from lm_profiler.analysis.watch.outside_steps import (
    RunStep,
    first_steps_of_epochs,
    outside_steps,
)
from lm_profiler.callbacks.instruments.instrument import Instrument, Measured
from lm_profiler.callbacks.instruments.memory import MemoryReader
from lm_profiler.callbacks.instruments.owners import OwnersInstrument
from lm_profiler.callbacks.instruments.part_times import PartTimes
from lm_profiler.callbacks.instruments.ranks import RanksWatch
from lm_profiler.callbacks.instruments.tracer import Tracer
from lm_profiler.callbacks.instruments.watches import StepWatch
from lm_profiler.callbacks.marks.batches import BatchCounts, StepCount
from lm_profiler.callbacks.stages import Progress, StageCounter, StoppingRule
from lm_profiler.measure.boundary import Guard
from lm_profiler.measure.clocks.stream import EventStream
from lm_profiler.measure.clocks.tape import (
    DATA,
    OTHER,
    OUTSIDE,
    ClippedBatches,
    StepMarks,
)
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.record.operator_calls import CodeLine
from lm_profiler.record.quantities import bytes_text
from lm_profiler.record.run_record import BetweenSteps, OutsideSteps, StepCounters
from lm_profiler.record.steps import UNKNOWN, Peaks, StepRow, StepTable

# Marks of a step are read this many steps later; the device has usually reached them by then.
_LAG_STEPS = 4
# how often marks are read if there is a device, in steps: its events can be reused once they are read
_READ_MARKS_EVERY = 8

# nanoseconds between two writes of rows, and two draws of progress: a killed process loses at most this
_WRITE_EVERY_NS = 1_000_000_000

# least nanoseconds between two readings of memory and counters, which take some ten microseconds each
_READ_EVERY_NS = 5_000_000

_MOST_RECOMPILATIONS = 3  # the most recompilations that a note names

# what may take time between steps, beside VALIDATION and EPOCH
_CHECKPOINT = "checkpoint"
_INSTRUMENTS = "instruments"

_UNSEEN_BACKWARD = (
    "no backward pass was seen: the program calls neither manual_backward nor loss.backward(). Code that computes "
    "gradients in another way, such as torch.autograd.grad, counts as the phase that calls it, usually forward"
)


class Instruments:
    """All instruments of one run, in the order in which they begin; they end in the opposite order."""

    def __init__(
        self,
        memory: MemoryReader,
        tracer: Tracer,
        others: Iterable[Instrument],
        report: Callable[[str], object],
        counters: StepWatch,
        ranks: RanksWatch | None = None,
        part_times: PartTimes | None = None,
        owners: OwnersInstrument | None = None,
    ) -> None:
        self.memory = memory
        self.tracer = tracer
        self.counters = counters
        self.ranks = ranks
        self.part_times = part_times
        self.owners = owners  # one of ``others``
        # They begin in this order and end in the opposite one. Memory is first to begin and last to end: it resets the
        # peaks, to which the others add. Among the others, one that a reading would disturb comes before the one that
        # reads. The counters are last to begin and first to end, so that they do not include what the others cost.
        self._in_order: list[Instrument] = [memory, tracer, *others]
        if ranks is not None:
            self._in_order.append(ranks)
        if part_times is not None:
            self._in_order.append(part_times)
        self._in_order.append(counters)
        for instrument in self._in_order:
            instrument.guard = Guard(instrument.name, report, instrument.discard)

    def begin(self, stage: str) -> None:
        for instrument in self._in_order:
            instrument.guard.run(instrument.begin, stage)

    def end(self, stage: str) -> None:
        """End the instruments of ``stage``, in the reverse of the order in which they began."""
        for instrument in reversed(self._in_order):
            instrument.guard.end(instrument.end, stage)

    def discard(self) -> None:
        """Stop all instruments without a result."""
        for instrument in reversed(self._in_order):
            instrument.guard.end(instrument.discard)

    def facts(self) -> dict[str, Any]:
        """Return what all instruments have measured so far, by the names of the fields of ``Measured``."""
        facts = dict[str, Any]()
        for instrument in self._in_order:
            facts.update(instrument.facts)
        return facts


# A finished step whose marks were not read yet: its number, stage, tokens and peaks. A plain tuple, because each step
# makes one: a class would be one more Python frame.
_UnreadStep = tuple[int, str, int | None, Peaks]


@dataclass(eq=False)
class Session:
    """Drives the instruments from step to step, and works only between steps."""

    timeline: Timeline  # takes the marks
    stream: EventStream | None  # the device's clock of ``timeline``, or None
    schedule: StageCounter  # the stages and their steps
    instruments: Instruments  # measure everything except the times of phases
    progress: Progress | None  # the progress line; None on every rank but one
    rank: int  # global rank of this process
    stopping: StoppingRule  # ends the measuring early if enough is known
    report: Callable[[str], object]  # receives notes for the user
    # appends rows to the file; called once per second at most
    append_rows: Callable[[Sequence[StepRow]], None] | None = None
    # counts the batches of the running step, which the callback adds
    counts: BatchCounts = field(default_factory=BatchCounts)
    # by how many steps the stages may become longer than planned
    spare_steps: float = 0
    # limits the loop to the steps of the stages, when these have become longer
    limit_steps: Callable[[Mapping[str, int]], object] = lambda steps_of_stages: None
    is_manual: bool = False  # whether the module steps its optimizers by itself (``automatic_optimization = False``)
    notes: list[str] = field(default_factory=list)
    steps: int = 0  # the steps that have finished
    rows: list[StepRow] = field(default_factory=list)  # rows that were read so far
    # when the step of each row began and ended
    instants_ns: list[tuple[int, int]] = field(default_factory=list)
    _written_rows: int = 0
    _last_reading_ns: int = 0  # when instruments were last read
    _planned_steps: int = 0  # the planned steps of the current stage
    _peaks: Peaks = UNKNOWN  # the peaks that were last read
    _unread_steps: deque[_UnreadStep] = field(default_factory=deque)
    # the sizes of the batches of a step: an entry for each step in which they change
    _batch_counts: list[BatchCount] = field(default_factory=list)
    _last_count: StepCount | None = None  # the sizes of the batches of the last step
    # batches, samples, elements, and the counts of ``TokenUse`` in the last entry of ``_batch_counts``
    _last_sizes: tuple[Any, ...] | None = None
    # Usually a step that ended is only noted. More is due, such as reading instruments, writing rows and ending the
    # stage, when the stage has had this many steps, or the clock has reached this instant.
    _next_due_step: int = 0
    _next_due_ns: int = 0
    _last_due_step: int = 0  # the last step after which there was more to do
    # when the first measured step began and the last one ended
    _measured_ns: tuple[int, int] | None = None
    # spans between measured steps, and spans within them in which the loop left the step
    _gaps_ns: list[tuple[int, int]] = field(default_factory=list)
    _run_steps: list[RunStep] = field(default_factory=list)  # the steps of all stages
    # spans between steps in which this session worked
    _own_spans_ns: list[tuple[int, int]] = field(default_factory=list)
    # phases at whose start it was checked whether the device was idle
    _idle_checks: int = 0
    _idle_starts: int = 0  # phases at whose start the device was idle
    _clipped_batches: ClippedBatches = field(default_factory=ClippedBatches)
    _is_finished: bool = False

    def __post_init__(self) -> None:
        self._drawing = Guard("progress", self.report)
        self._writing = Guard("writing steps during the run", self.report)
        self._last_write_ns = self.timeline.clock()
        self._begin_stage()

    def step_ended(self) -> int:
        """Keep the step that ended, begin the next stage if this one is over, and return how many steps are left.

        After nearly all steps nothing else is due. Then this calls only one other function of ours, to count batches.
        """
        schedule = self.schedule
        stage = schedule.stage
        assert stage is not None  # no step is counted after the last stage
        self.steps += 1
        count = self.counts.take()
        # ``take`` returns the same object as long as the batch sizes stay the same
        if count is not self._last_count:
            self._keep_count(count)
        now_ns = self.timeline.clock()
        is_more_due = (
            now_ns >= self._next_due_ns
            or schedule.steps_done + 1 >= self._next_due_step
        )
        if is_more_due:
            return self._end_step(stage, count.tokens, now_ns)
        # memory is not read after this step: the peaks are those of the last reading
        self._unread_steps.append((self.steps, stage, count.tokens, self._peaks))
        # what StageCounter.advance does if its stage is not over; written out, because a call would cost time
        schedule.steps_done += 1
        schedule.steps_left -= 1
        return schedule.steps_left

    def _keep_count(self, count: StepCount) -> None:
        """Keep what the batches of the step held, if that differs from the previous step."""
        self._last_count = count
        sizes = (count.batches, count.samples, count.elements, *count.token_use)
        if sizes != self._last_sizes:
            self._last_sizes = sizes
            self._batch_counts.append(BatchCount(self.steps, *sizes))

    def _end_step(self, stage: str, tokens: int | None, now_ns: int) -> int:
        """Keep the step that ended at ``now_ns``, and do what is due after it; return how many steps are left.

        ``step_ended`` calls this only if something is due.
        """
        new_objects_before = gc.get_count()[0]
        steps_done = self.schedule.steps_done + 1
        # whether the stopping rule is evaluated after this step
        may_stop = stage == "measure" and steps_done >= self.stopping.next_check
        is_reading_due = (
            may_stop
            or steps_done >= self._planned_steps
            or stage == "memory"
            or now_ns - self._last_reading_ns >= _READ_EVERY_NS
        )
        try:
            if is_reading_due:
                self._last_reading_ns = now_ns
                self._read_instruments(stage)
        finally:
            # also after Ctrl-C while reading, which would otherwise lose the step
            self._unread_steps.append((self.steps, stage, tokens, self._peaks))
        if self.stream is not None and len(self._unread_steps) > _LAG_STEPS:
            self._read_reached_steps()

        is_write_due = now_ns - self._last_write_ns >= _WRITE_EVERY_NS
        if is_write_due:
            self.write_rows()
        is_stage_over = self.schedule.advance()
        if may_stop and not is_stage_over:
            is_stage_over = self._end_measuring_if_enough()
        if is_stage_over:
            self._end_stage(stage)
            self._begin_stage()
        elif stage == "trace":
            tracer = self.instruments.tracer
            tracer.guard.run(tracer.step)
        if is_write_due:
            self._draw_progress()
        if is_write_due or is_stage_over:
            self._own_spans_ns.append((now_ns, self.timeline.clock()))
        self._next_due_ns = min(
            self._last_reading_ns + _READ_EVERY_NS,
            self._last_write_ns + _WRITE_EVERY_NS,
        )
        if may_stop or self.stream is not None:
            self._note_next_due_step()
        self._note_own_objects(new_objects_before)
        return self.schedule.steps_left

    def _note_own_objects(self, new_objects_before: int) -> None:
        """Report the objects that this session made to the log of garbage collections.

        A collection that these objects cause is then not attributed to the program. ``new_objects_before`` is Python's
        count of objects since the last collection, as ``_end_step`` began. Each earlier step since the last due one
        made one object, its entry of ``_unread_steps``.
        """
        garbage = self.instruments.counters.reader.garbage
        garbage.add_own_objects(new_objects_before)
        garbage.own_objects += self.steps - self._last_due_step - 1
        self._last_due_step = self.steps

    def _note_next_due_step(self) -> None:
        """Note after which step of the stage there is more to do than to keep the step."""
        stage = self.schedule.stage
        if stage not in ("warmup", "measure"):
            # The other stages are not timed: there is more to do after each of their steps.
            self._next_due_step = 0
            return
        self._next_due_step = self._planned_steps
        if stage == "measure":
            self._next_due_step = min(self._planned_steps, self.stopping.next_check)
        if self.stream is not None:
            next_reading_step = self.schedule.steps_done + _READ_MARKS_EVERY
            self._next_due_step = min(self._next_due_step, next_reading_step)

    def _read_instruments(self, stage: str) -> None:
        """Read memory, and in ``measure`` the counters of the step that has just ended.

        In ``warmup`` and ``measure`` also read the ranks' collective calls, if that is due.
        """
        memory = self.instruments.memory
        # first unknown, so that an interrupt in the next line does not leave the peaks of an earlier step
        self._peaks = UNKNOWN
        self._peaks = memory.guard.run(memory.end_step, otherwise=UNKNOWN)
        if stage == "measure":
            counters = self.instruments.counters
            counters.guard.run(counters.reader.read, self.steps)
        ranks = self.instruments.ranks
        if ranks is not None and stage in ("warmup", "measure"):
            ranks.guard.run(ranks.read_if_due, self.steps)

    def write_rows(self) -> None:
        """Write the complete rows that were not written yet."""
        self._last_write_ns = self.timeline.clock()
        self._read_reached_steps()
        if self.append_rows is None or self._written_rows == len(self.rows):
            return
        self._writing.run(self.append_rows, self.rows[self._written_rows :])
        self._written_rows = len(self.rows)

    def _end_measuring_if_enough(self) -> bool:
        """If the measured steps are enough, end the stage ``measure``; return whether they are."""
        self._read_reached_steps()
        elapsed_s = (self.timeline.clock() - self._stage_began_ns) * 1e-9
        is_enough = self.stopping.is_enough(
            self.schedule.steps_done, self.measured_s(), elapsed_s
        )
        if is_enough:
            self.schedule.end_stage()
        return is_enough

    def measured_s(self) -> list[float]:
        """Return the seconds of the measured steps whose times are known."""
        return [
            row.time("step")
            for row in self.rows
            if row.stage == "measure" and row.seconds is not None
        ]

    def finish(self, keep_trace: bool = True) -> None:
        """End the stage that runs, and read what is still on the device, because the run has ended or failed."""
        if not keep_trace:
            tracer = self.instruments.tracer
            tracer.guard.run(tracer.discard)
        stage = self.schedule.stage
        if not self._is_finished and stage is not None:
            self._is_finished = True
            self._end_stage(stage)
        self._read_reached_steps(wait=True)
        if self.progress is not None:
            self._drawing.run(self.progress.clear)

    def measured(self) -> Measured:
        """Return all that was measured on this rank so far."""
        facts = self.instruments.facts()
        graph_pools_bytes = facts.pop("graph_pools", None)  # becomes a note
        lines_outside = facts.pop("lines_outside", {})
        callers_outside = facts.pop("callers_outside", {})
        notes = [
            *self.notes,
            *self._unseen_backward_note(),
            *_recompilation_note(facts.get("counters", ())),
            *_graph_pools_note(graph_pools_bytes),
        ]
        device_idle = None
        if self._idle_checks > 0:
            device_idle = self._idle_starts / self._idle_checks
        return Measured(
            rows=StepTable.from_rows(self.rows),
            steps_planned=self.schedule.planned,
            batch_counts=[self._batch_counts],
            between_steps_s=self._between_steps_s(),
            between=self._time_between_steps(),
            outside=self._outside_steps(lines_outside, callers_outside),
            first_steps_of_epochs=self._first_steps_of_epochs(),
            stages_s=self._stages_s(),
            device_idle=device_idle,
            clipped_batches=self._clipped_batches.count,
            early_clips=self._clipped_batches.early,
            notes=notes,
            **facts,
        )

    def _begin_stage(self) -> None:
        """Begin the next stage, if there is one."""
        stage = self.schedule.stage
        if stage is None:
            return
        self.instruments.begin(stage)
        self._draw_progress()
        self._planned_steps = self.schedule.planned[stage]
        self._last_reading_ns = -_READ_EVERY_NS  # the first step is read
        self._stage_began_ns = self.timeline.clock()
        self._next_due_ns = 0
        self._note_next_due_step()

    def _end_stage(self, stage: str) -> None:
        """End the instruments of ``stage``, and write the rows of its steps.

        The schedule is already at the next stage, unless the run ends within this one.
        """
        if stage in ("measure", "collectives"):
            # instruments that end with these stages need their steps' times
            self._read_reached_steps(wait=True)
        measuring_is_complete = stage == "measure" and self.schedule.stage != "measure"
        if measuring_is_complete:
            if self.rank == 0:
                # Rank 0 decided for all ranks, so it alone knows why measuring stopped.
                self.notes += self.stopping.missed_target(self.measured_s())
            self._plan_action_steps()
        self.instruments.end(stage)
        self.write_rows()

    def _plan_action_steps(self) -> None:
        """Plan enough steps of the ``actions`` stage to show why every few measured steps are slow, if they are."""
        owners = self.instruments.owners
        planned = self.schedule.planned.get("actions", 0)
        if owners is None or planned == 0:
            return
        step_s = self.measured_s()
        most_steps = min(planned + self.spare_steps, len(step_s))
        steps = owners.guard.run(
            owners.plan_steps, step_s, most_steps, otherwise=planned
        )
        if steps > planned:
            self.schedule.extend("actions", steps)
            self.limit_steps(self.schedule.planned)

    def _draw_progress(self) -> None:
        """Draw the progress line, if there is one."""
        stage = self.schedule.stage
        if self.progress is None or stage is None:
            return
        self._drawing.run(
            self.progress.draw,
            stage,
            self.schedule.steps_done,
            self.schedule.planned[stage],
        )

    def _read_reached_steps(self, wait: bool = False) -> None:
        """Make rows of the steps that the device has reached; of all finished steps with ``wait``.

        If the device has died, the rows have only the times of the host.
        """
        is_device_alive = True
        if wait and self.stream is not None:
            try:
                self.stream.wait()
            except Exception:
                is_device_alive = False
        finished = self.timeline.reading().finished
        while finished and self._unread_steps:
            is_readable = (
                wait
                or self.stream is None
                or self.stream.reached(finished[0].events[-1])
            )
            if not is_readable:
                return
            unread = self._unread_steps.popleft()
            marks = finished.popleft()
            self._read_step(unread, marks, is_device_alive)

    def _read_step(
        self, unread: _UnreadStep, marks: StepMarks, is_device_alive: bool
    ) -> None:
        """Make the row of a step of any stage from its ``marks``, and pass the marks to what else needs them."""
        step, stage, tokens, peaks = unread
        ranks = self.instruments.ranks
        if ranks is not None and is_device_alive:
            ranks.guard.run(ranks.keep, stage, step, marks)
        host_s = marks.host_seconds()
        seconds: tuple[float, ...] | None = host_s
        if self.stream is not None:
            seconds = marks.stream_seconds(self.stream) if is_device_alive else None
            # reused, so that steps create no new events
            self.stream.release(marks.events)
        row = StepRow(step, stage, seconds, host_s, tokens, peaks, self.rank)
        self.rows.append(row)

        begin_ns, end_ns = marks.host_ns[0], marks.host_ns[-1]
        self.instants_ns.append((begin_ns, end_ns))
        away_ns: list[tuple[int, int]] = []
        if OUTSIDE in marks.codes:
            away_ns = _spans_outside(marks)
        self._run_steps.append(
            RunStep(
                stage,
                begin_ns,
                end_ns,
                data_s=host_s[DATA],
                away_ns=away_ns,
                other_s=host_s[OTHER],
            )
        )
        if stage == "measure":
            self._add_measured_step(step, marks, away_ns, is_device_alive)

    def _add_measured_step(
        self,
        step: int,
        marks: StepMarks,
        away_ns: Sequence[tuple[int, int]],
        is_device_alive: bool,
    ) -> None:
        """Pass the ``marks`` of a measured step to the instruments of measured steps, and add the gap before the step.

        ``away_ns`` has the begin and the end of each time in which the loop left the step, which counts as a gap, too.
        """
        begin_ns, end_ns = marks.host_ns[0], marks.host_ns[-1]
        self.instruments.counters.reader.note_instants(step, begin_ns, end_ns)
        part_times = self.instruments.part_times
        if part_times is not None and is_device_alive:
            part_times.guard.run(part_times.keep, marks)
        if self._measured_ns is None:
            self._measured_ns = begin_ns, end_ns
        else:
            first_begin_ns, last_end_ns = self._measured_ns
            self._gaps_ns.append((last_end_ns, begin_ns))
            self._measured_ns = first_begin_ns, end_ns
        self._gaps_ns += away_ns
        self._idle_checks += marks.idle_checks
        self._idle_starts += marks.idle_starts
        self._clipped_batches.add(marks.codes)

    def _unseen_backward_note(self) -> list[str]:
        """Return a note if the module's manual optimization stepped an optimizer, but no backward pass was seen."""
        if not self.is_manual:
            return []
        measured = [row for row in self.rows if row.stage == "measure"]
        has_stepped = any(row.time("optimizer", "host") > 0.0 for row in measured)
        has_backward = any(row.time("backward", "host") > 0.0 for row in measured)
        if not has_stepped or has_backward:
            return []
        return [_UNSEEN_BACKWARD]

    def _between_steps_s(self) -> float | None:
        if self._measured_ns is None:
            return None
        return sum(end_ns - begin_ns for begin_ns, end_ns in self._gaps_ns) * 1e-9

    def _time_between_steps(self) -> list[BetweenSteps]:
        """Return what took time between the measured steps."""
        if self._measured_ns is None:
            return []
        events = spans_outside_steps(
            self.timeline.departures, self.timeline.checkpoint_instants_ns
        )
        return between_steps(self._gaps_ns, self._measured_ns, events)

    def _outside_steps(
        self,
        lines: Mapping[str, CodeLine | None],
        callers: Mapping[str, CodeLine | None],
    ) -> list[OutsideSteps]:
        """Return what took time outside of the steps of all stages.

        Args:
            lines: by the name of an activity, the line in which it spends most of its time; None if it is unknown.
            callers: by the same name, the line of the loop that calls the activity; None if it is unknown.
        """
        timeline = self.timeline
        events = spans_outside_steps(
            timeline.departures, timeline.checkpoint_instants_ns
        )
        for begin_ns, end_ns, hook in timeline.epoch_hooks:
            events.append(NamedSpan(begin_ns, end_ns, hook))
        activities = []
        for activity in outside_steps(self._run_steps, events, self._own_spans_ns):
            line = lines.get(activity.what)
            if line is not None:
                activity = activity.model_copy(update=line._asdict())
            caller = callers.get(activity.what)
            if caller is not None:
                place = f"{PurePath(caller.file).name}:{caller.line}"
                activity = activity.model_copy(update={"caller": place})
            activities.append(activity)
        return activities

    def _first_steps_of_epochs(self) -> list[int]:
        """Return the numbers of the steps that begin an epoch."""
        events = SpansInOrder(spans_outside_steps(self.timeline.departures))
        indices = first_steps_of_epochs(self._run_steps, events)
        return [self.rows[index].step for index in sorted(indices)]

    def _stages_s(self) -> float | None:
        """Return the seconds from the first step's beginning to the last step's end, without this session's work."""
        if not self._run_steps:
            return None
        run_begin_ns = self._run_steps[0].begin_ns
        run_end_ns = self._run_steps[-1].end_ns
        own_ns = 0
        for begin_ns, end_ns in self._own_spans_ns:
            if end_ns <= run_end_ns:
                own_ns += end_ns - begin_ns
        return (run_end_ns - run_begin_ns - own_ns) * 1e-9


def _spans_outside(marks: StepMarks) -> list[tuple[int, int]]:
    """Return when the loop left the step, and when it came back (ns)."""
    spans_ns = zip(marks.codes, pairwise(marks.host_ns), strict=False)
    return [span_ns for code, span_ns in spans_ns if code == OUTSIDE]


def between_steps(
    gaps_ns: Sequence[tuple[int, int]],
    measured_ns: tuple[int, int],
    events: Sequence[NamedSpan],
) -> list[BetweenSteps]:
    """Return what took time in the gaps between steps, the longest first; checkpoints also count within steps.

    A gap counts as validation if a validation began in it, else as an epoch boundary if an epoch began in it, else as
    our own time. The time of a checkpoint counts only as checkpoint.

    Args:
        gaps_ns: when each gap began and ended.
        measured_ns: when the first measured step began and the last one ended.
        events: the validations, epoch boundaries and checkpoints of the run.
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    times: defaultdict[str, int] = defaultdict(int)
    first_ns, last_ns = measured_ns
    checkpoints = [
        event
        for event in events
        if event.what == CHECKPOINTS and first_ns <= event.begin_ns < last_ns
    ]
    checkpoints_in_order = SpansInOrder(checkpoints)
    events_in_order = SpansInOrder(events)
    for begin_ns, end_ns in gaps_ns:
        saving_ns = 0
        for event in checkpoints_in_order.beginning(begin_ns, end_ns):
            saving_ns += min(event.end_ns, end_ns) - event.begin_ns
        cause = _cause_of_gap(
            {event.what for event in events_in_order.beginning(begin_ns, end_ns)}
        )
        seconds[cause] += (end_ns - begin_ns - saving_ns) * 1e-9
        times[cause] += 1
    if checkpoints:
        seconds[_CHECKPOINT] = sum(event.ns for event in checkpoints) * 1e-9
        times[_CHECKPOINT] = len(checkpoints)

    between = []
    for cause, cause_s in seconds.items():
        if cause_s > 0.0:
            between.append(
                BetweenSteps(what=cause, seconds=cause_s, times=times[cause])
            )
    return sorted(between, key=attrgetter("seconds"), reverse=True)


def _cause_of_gap(kinds: set[str]) -> str:
    """Return the cause of a gap in which events of these ``kinds`` began."""
    if VALIDATION in kinds:
        return VALIDATION
    if EPOCH in kinds:
        return EPOCH
    return _INSTRUMENTS


def _recompilation_note(counters: Sequence[StepCounters]) -> list[str]:
    """Return a note on what was compiled while measuring, if anything was."""
    compiled_in = {str(step.step): step.compiled for step in counters if step.compiled}
    if not compiled_in:
        return []
    compiled = list(dict.fromkeys(compiled_in.values()))
    names = "; ".join(compiled[:_MOST_RECOMPILATIONS])
    if len(compiled) > _MOST_RECOMPILATIONS:
        names += f"; and {len(compiled) - _MOST_RECOMPILATIONS} more"
    steps = ", ".join([*compiled_in][:_MOST_RECOMPILATIONS])
    if len(compiled_in) > _MOST_RECOMPILATIONS:
        steps += ", …"
    return [f"recompiled while measuring (step {steps}): {names}"]


def _graph_pools_note(graph_pools_bytes: int | None) -> list[str]:
    """Return a note that peaks leave out what CUDA graphs use, if there are any."""
    if graph_pools_bytes is None:
        return []
    reserved = f"{bytes_text(graph_pools_bytes)} of the reserved memory belong only to CUDA graphs, or to a MemPool"
    return [
        f"peaks of allocated memory exclude the memory of replayed CUDA graphs: {reserved}"
    ]
