"""Drives the instruments from step to step, and collects one row per step through the stages."""

from __future__ import annotations

import gc
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from lm_profiler.analysis.steps.summaries import BatchCount
from lm_profiler.analysis.watch.ledger import CHECKPOINTS, EPOCH, VALIDATION, NamedSpan, SpansInOrder, passed
from lm_profiler.analysis.watch.outside_steps import RunStep, outside_steps
from lm_profiler.callbacks.instruments.instrument import Instrument, Measured
from lm_profiler.callbacks.instruments.memory import MemoryReader
from lm_profiler.callbacks.instruments.ranks import RanksWatch
from lm_profiler.callbacks.instruments.tracer import Tracer
from lm_profiler.callbacks.instruments.watches import StepWatch
from lm_profiler.callbacks.marks.batches import BatchCounts
from lm_profiler.callbacks.stages import Progress, StageCounter, StoppingRule
from lm_profiler.measure.boundary import Guard
from lm_profiler.measure.clocks.stream import EventStream
from lm_profiler.measure.clocks.tape import OUTSIDE, StepMarks
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.record.quantities import bytes_text
from lm_profiler.record.run_record import BetweenSteps, OutsideSteps, StepCounters
from lm_profiler.record.steps import UNKNOWN, Peaks, StepRow, StepTable

_LAG = 4  # steps to wait before the marks of a step are read: by then the device has usually reached them

# nanoseconds between two writes of rows, and two draws of progress: a killed process loses at most this
_KEEP_NS = 1_000_000_000

# least nanoseconds between two readings of memory and counters, which take some ten microseconds each
_APART_NS = 5_000_000

_NAMED = 3  # number of recompilations that a note names

_CHECKPOINT, _INSTRUMENTS = "checkpoint", "instruments"  # what may pass between steps, beside VALIDATION and EPOCH

_UNSEEN_BACKWARD = (
    "no backward pass was seen: the program calls neither manual_backward nor loss.backward(). What computes its "
    "gradients, such as torch.autograd.grad, counts as the phase that calls it, mostly forward"
)

# number, stage, tokens and memory of a step whose marks were not read yet
_Pending = tuple[int, str, int | None, Peaks]


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
    ) -> None:
        self.memory, self.tracer, self.counters, self.ranks = memory, tracer, counters, ranks
        # Memory resets the peaks that the others may add to. The counters must not include what the others cost at both
        # ends. Among the others, one that a reading would disturb comes before the one that reads.
        self._all: list[Instrument] = [memory, tracer, *others, *([] if ranks is None else [ranks]), counters]
        for instrument in self._all:
            instrument.part = Guard(instrument.name, report, instrument.discard)

    def begin(self, stage: str) -> None:
        for instrument in self._all:
            instrument.part.run(instrument.begin, stage)

    def end(self, stage: str) -> None:
        for instrument in reversed(self._all):
            if instrument.part.out:
                instrument.part.undo()  # inside a backward pass, where it failed, not everything could be undone
            else:
                instrument.part.run(instrument.end, stage)

    def discard(self) -> None:
        for instrument in reversed(self._all):
            instrument.part.run(instrument.discard)

    def facts(self) -> dict[str, Any]:
        """Return what all instruments know so far, by the names of the fields of ``Measured``."""
        return {name: value for instrument in self._all for name, value in instrument.facts.items()}


@dataclass(eq=False)
class Session:
    """Drives the instruments from step to step. It works between steps only; ``steps`` counts the finished ones."""

    timeline: Timeline  # takes the marks
    stream: EventStream | None  # the device's clock of ``timeline``, or None
    schedule: StageCounter  # the stages and their steps
    instruments: Instruments  # everything but the times
    progress: Progress | None  # the progress line; None on every rank but one
    rank: int  # global rank of this process
    stopping: StoppingRule  # ends the measuring before its steps are done, where enough is known
    report: Callable[[str], object]  # gets a note
    # appends rows to the file; called once a second at most
    keep_rows: Callable[[Sequence[StepRow]], None] | None = None
    counts: BatchCounts = field(default_factory=BatchCounts)  # of the running step; the callback adds each batch
    is_manual: bool = False  # whether the module steps its optimizers by itself (``automatic_optimization = False``)
    notes: list[str] = field(default_factory=list)
    steps: int = 0
    rows: list[StepRow] = field(default_factory=list)  # rows that were read so far
    instants_ns: list[tuple[int, int]] = field(default_factory=list)  # when each row's step began and ended
    _kept: int = 0
    _read_ns: int = 0
    _planned: int = 0
    _peaks: Peaks = UNKNOWN
    _pending: deque[_Pending] = field(default_factory=deque)
    _counts: list[BatchCount] = field(default_factory=list)
    _count: tuple[int, int | None, int | None] | None = None
    _measured_ns: tuple[int, int] | None = None  # between which steps were measured
    _outside: list[tuple[int, int]] = field(default_factory=list)  # spans in which the loop was in no step
    _run_steps: list[RunStep] = field(default_factory=list)  # the steps of all stages
    _own_spans: list[tuple[int, int]] = field(default_factory=list)  # in which this session worked between steps
    _asked: int = 0
    _idle: int = 0
    _finished: bool = False

    def __post_init__(self) -> None:
        self._drawing = Guard("progress", self.report)
        self._keeping = Guard("writing the steps while they come", self.report)
        self._kept_ns = self.timeline.clock()
        self._begin_stage()

    def step_ended(self) -> int:
        """Keep the step that ended, begin the next stage if this one is over, and return how many steps are left."""
        count_before = gc.get_count()[0]
        schedule = self.schedule
        stage = schedule.stage
        assert stage is not None  # no step is counted after the last stage
        self.steps += 1
        done = schedule.done + 1
        look = stage == "measure" and done >= self.stopping.look_at
        batches, tokens, samples, elements = self.counts.take()
        now = self.timeline.clock()
        try:
            if now - self._read_ns >= _APART_NS or look or done >= self._planned or stage == "memory":
                self._read_ns = now
                self._look_around(stage)
        finally:  # otherwise Ctrl-C while reading would lose the step
            self._pending.append((self.steps, stage, tokens, self._peaks))
        if (batches, samples, elements) != self._count:  # noted when it changes: nearly all steps have the same number
            self._count = batches, samples, elements
            self._counts.append(BatchCount(self.steps, batches, samples, elements))
        if self.stream is not None and len(self._pending) > _LAG:
            self._read_reached()
        due = now - self._kept_ns >= _KEEP_NS
        if due:
            self.keep()
        is_over = schedule.advance() or (look and self._measured_enough())
        if is_over:
            self._end_stage(stage)
            self._begin_stage()
        elif stage == "trace":
            self.instruments.tracer.part.run(self.instruments.tracer.step)
        if due:
            self._draw()
        if due or is_over:
            self._own_spans.append((now, self.timeline.clock()))
        self.instruments.counters.reader.add_own_objects(count_before)
        return schedule.left

    def _look_around(self, stage: str) -> None:
        """Read memory, and in ``measure`` what else disturbed the step that has just ended."""
        memory, counters = self.instruments.memory, self.instruments.counters
        self._peaks = UNKNOWN  # otherwise an interrupt in the next line would leave the peaks of an earlier step
        self._peaks = memory.part.run(memory.step_peaks, otherwise=UNKNOWN)
        if stage == "measure":
            counters.part.run(counters.reader.read, self.steps)
        if (ranks := self.instruments.ranks) is not None and stage in ("warmup", "measure"):
            ranks.part.run(ranks.look, self.steps)

    def keep(self) -> None:
        """Write the complete rows that were not written yet."""
        self._kept_ns = self.timeline.clock()
        self._read_reached()
        if self.keep_rows is not None and self._kept < len(self.rows):
            self._keeping.run(self.keep_rows, self.rows[self._kept :])
            self._kept = len(self.rows)

    def _measured_enough(self) -> bool:
        self._read_reached()
        elapsed_s = (self.timeline.clock() - self._began_ns) * 1e-9
        if not self.stopping.reached(self.schedule.done, self.measured_s(), elapsed_s):
            return False
        self.schedule.end_stage()
        return True

    def measured_s(self) -> list[float]:
        return [row.time("step") for row in self.rows if row.stage == "measure" and row.seconds is not None]

    def finish(self, trace: bool = True) -> None:
        """End the stage that runs, and read what is still on the device: the run is over, as planned or not."""
        tracer = self.instruments.tracer
        if not trace:
            tracer.part.run(tracer.discard)
        if not self._finished and self.schedule.stage is not None:
            self._finished = True
            self._end_stage(self.schedule.stage)
        self._read_reached(wait=True)
        if self.progress is not None:
            self._drawing.run(self.progress.clear)

    def measured(self) -> Measured:
        facts = self.instruments.facts()
        graph_pools = facts.pop("graph_pools", None)  # becomes a note
        return Measured(
            rows=StepTable.from_rows(self.rows),
            steps_planned=self.schedule.planned,
            batch_counts=[self._counts],
            between_steps_s=sum(end - begin for begin, end in self._outside) * 1e-9 if self._measured_ns else None,
            between=self._between(),
            outside=self._outside_steps(),
            stages_s=self._stages_s(),
            device_idle=self._idle / self._asked if self._asked else None,
            notes=(*self.notes, *self._unseen_backward(), *_notes(facts.get("counters", ()), graph_pools)),
            **facts,
        )

    def _begin_stage(self) -> None:
        stage = self.schedule.stage
        if stage is None:
            return
        self.instruments.begin(stage)
        self._draw()
        self._planned = self.schedule.planned[stage]
        self._read_ns = -_APART_NS  # the first step is read
        self._began_ns = self.timeline.clock()

    def _end_stage(self, stage: str) -> None:
        if stage in ("measure", "collectives"):  # instruments that end with these stages need their steps' times
            self._read_reached(wait=True)
        if stage == "measure":
            went_on = self.schedule.stage != "measure"
            if went_on and self.rank == 0:  # rank 0 decided for all ranks, so it alone knows why measuring stopped
                self.notes += self.stopping.missed(self.measured_s())
        self.instruments.end(stage)
        self.keep()

    def _draw(self) -> None:
        if self.progress is not None and (stage := self.schedule.stage) is not None:
            self._drawing.run(self.progress.draw, stage, self.schedule.done, self.schedule.planned[stage])

    def _read_reached(self, wait: bool = False) -> None:
        """Read the marks that the device has reached, or ``wait`` for all; only the host's if the device is dead."""
        stream, alive = self.stream, True
        if wait and stream is not None:
            try:
                stream.wait()
            except Exception:
                alive = False
        finished = self.timeline.reading().finished
        while finished and self._pending and (wait or stream is None or stream.reached(finished[0].instants[-1])):
            self._read(self._pending.popleft(), finished.popleft(), alive)

    def _read(self, pending: _Pending, marks: StepMarks, alive: bool) -> None:
        step, stage, tokens, memory = pending
        host = marks.host_seconds()
        seconds: tuple[float, ...] | None = host
        if (ranks := self.instruments.ranks) is not None and alive:
            ranks.part.run(ranks.keep, stage, step, marks)
        if self.stream is not None:
            seconds = marks.stream_seconds(self.stream) if alive else None
            self.stream.release(marks.instants)  # reused, so that steps create no new events
        self.rows.append(StepRow(step, stage, seconds, host, tokens, memory, self.rank))
        ns = marks.host_ns
        self.instants_ns.append((ns[0], ns[-1]))
        away_ns = [span for code, span in zip(marks.codes, pairwise(ns), strict=False) if code == OUTSIDE]
        self._run_steps.append(RunStep(stage, ns[0], ns[-1], self.rows[-1].time("data", "host"), away_ns))
        if stage == "measure":
            self.instruments.counters.reader.place(step, ns[0], ns[-1])
            if self._measured_ns is not None:
                self._outside.append((self._measured_ns[1], ns[0]))
            self._measured_ns = (self._measured_ns or ns)[0], ns[-1]
            self._outside += away_ns
            self._asked += marks.asked
            self._idle += marks.idle

    def _unseen_backward(self) -> list[str]:
        """Return a note if the user's own steps changed weights, but none of them had a backward pass."""
        measured = [row for row in self.rows if row.stage == "measure"]
        has_stepped = any(row.time("optimizer", "host") > 0.0 for row in measured)
        has_backward = any(row.time("backward", "host") > 0.0 for row in measured)
        if not self.is_manual or not has_stepped or has_backward:
            return []
        return [_UNSEEN_BACKWARD]

    def _between(self) -> list[BetweenSteps]:
        if self._measured_ns is None:
            return []
        events = passed(self.timeline.went_outside, self.timeline.saved)
        return between_steps(self._outside, self._measured_ns, events)

    def _outside_steps(self) -> list[OutsideSteps]:
        events = passed(self.timeline.went_outside, self.timeline.saved)
        events += [NamedSpan(*hook) for hook in self.timeline.hooks]
        return outside_steps(self._run_steps, events, self._own_spans)

    def _stages_s(self) -> float | None:
        """Return the seconds from the first step's beginning to the last one's end, without this session's work."""
        if not self._run_steps:
            return None
        begin_ns, end_ns = self._run_steps[0].begin_ns, self._run_steps[-1].end_ns
        own_ns = sum(end - begin for begin, end in self._own_spans if end <= end_ns)
        return (end_ns - begin_ns - own_ns) * 1e-9


def between_steps(
    outside: Sequence[tuple[int, int]], within: tuple[int, int], events: Sequence[NamedSpan]
) -> list[BetweenSteps]:
    """Return what took time in the spans ``outside`` of steps, the longest first; checkpoints also within steps.

    A span counts as validation if validation began in it, else as the turn of an epoch if one began in it, else as our
    own. The time of a checkpoint counts only as checkpoint.
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    times: defaultdict[str, int] = defaultdict(int)
    first_ns, last_ns = within
    saved = [event for event in events if event.what == CHECKPOINTS and first_ns <= event.begin_ns < last_ns]
    saved_in_order = SpansInOrder(saved)
    events_in_order = SpansInOrder(events)
    for begin_ns, end_ns in outside:
        kinds = {event.what for event in events_in_order.beginning(begin_ns, end_ns)}
        what = _INSTRUMENTS
        if VALIDATION in kinds:
            what = VALIDATION
        elif EPOCH in kinds:
            what = EPOCH
        saving_ns = 0
        for event in saved_in_order.beginning(begin_ns, end_ns):
            saving_ns += min(event.end_ns, end_ns) - event.begin_ns
        seconds[what] += (end_ns - begin_ns - saving_ns) * 1e-9
        times[what] += 1
    if saved:
        seconds[_CHECKPOINT] = sum(event.ns for event in saved) * 1e-9
        times[_CHECKPOINT] = len(saved)
    between = [BetweenSteps(what=what, seconds=s, times=times[what]) for what, s in seconds.items() if s > 0.0]
    return sorted(between, key=lambda each: -each.seconds)


def _notes(counters: Sequence[StepCounters], graph_pools: int | None) -> Iterator[str]:
    """Yield what was compiled while measuring, and that peaks leave out what CUDA graphs use."""
    compiled = {str(each.step): each.compiled for each in counters if each.compiled}
    if once := list(dict.fromkeys(compiled.values())):
        more = f"; and {len(once) - _NAMED} more" if len(once) > _NAMED else ""
        when = f"{', '.join([*compiled][:_NAMED])}{', …' * (len(compiled) > _NAMED)}"
        yield f"recompiled while measuring (step {when}): {'; '.join(once[:_NAMED])}{more}"
    if graph_pools is not None:
        theirs = f"{bytes_text(graph_pools)} of the reserved memory belong only to them, or to a MemPool"
        yield f"no peak of allocated memory includes what CUDA graphs use when replayed: {theirs}"
