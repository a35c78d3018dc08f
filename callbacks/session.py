"""Drives the instruments from step to step, and collects one row a step while the stages pass by."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lm_profiler.analysis.steps.summaries import BatchCount
from lm_profiler.callbacks.instruments.instrument import Instruments
from lm_profiler.callbacks.marks.between import CHECKPOINT, Passed, between_steps, outside_of
from lm_profiler.callbacks.measured import Measured
from lm_profiler.callbacks.progress import Progress
from lm_profiler.callbacks.stages import StageCounter, StoppingRule
from lm_profiler.measure.boundary import Guard
from lm_profiler.measure.clocks.steps import StepMarks
from lm_profiler.measure.clocks.stream import EventStream
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.record.quantities import bytes_text
from lm_profiler.record.run import BetweenSteps, StepCounters
from lm_profiler.record.steps import UNKNOWN, Peaks, StepRow, StepTable

_LAG = 4  # steps to wait before the marks of a step are read: by then the device has usually reached them

# nanoseconds between two writes of rows, and two draws of progress: a killed process loses no more
_KEEP_NS = 1_000_000_000

# least nanoseconds between two readings of memory and counters, which take some ten microseconds each
_APART_NS = 5_000_000

_NAMED = 3  # number of recompilations that a note names

# number, stage, tokens and memory of a step whose marks were not read yet
_Pending = tuple[int, str, int | None, Peaks]


@dataclass(eq=False)
class Session:
    """Drives the instruments from step to step. It works between steps only.

    ``steps`` counts the finished steps. The callback, which sees the batches, adds up ``tokens``, ``batches`` and
    ``samples`` of the running step.
    """

    timeline: Timeline  # takes the marks
    stream: EventStream | None  # the device's clock of ``timeline``, or None
    schedule: StageCounter  # the stages and their steps
    instruments: Instruments  # everything but the times
    progress: Progress | None  # the progress line; None on every rank but one
    rank: int  # global rank of this process
    stopping: StoppingRule  # ends the measuring before its steps are done, where enough is known
    tell: Callable[[str], object]  # reports a problem
    # appends rows to the file; called once a second at most
    keep_rows: Callable[[Sequence[StepRow]], None] | None = None
    notes: list[str] = field(default_factory=list)
    tokens: int | None = None
    batches: int = 0
    samples: int | None = 0
    steps: int = 0
    instants_ns: list[tuple[int, int]] = field(default_factory=list)  # when each row's step began and ended
    _kept: int = 0
    _read_ns: int = 0
    _planned: int = 0
    _peaks: Peaks = UNKNOWN
    _pending: deque[_Pending] = field(default_factory=deque)
    _rows: list[StepRow] = field(default_factory=list)
    _counts: list[BatchCount] = field(default_factory=list)
    _count: tuple[int, int | None] | None = None
    _measured_ns: list[int] = field(default_factory=list)
    _outside: list[tuple[int, int]] = field(default_factory=list)
    _asked: int = 0
    _idle: int = 0
    _finished: bool = False

    def __post_init__(self) -> None:
        self._drawing = Guard("progress", self.tell)
        self._keeping = Guard("writing the steps while they come", self.tell)
        self._kept_ns = self.timeline.clock()
        self._begin_stage()

    def step_ended(self) -> int:
        """Keep the step that ended, begin the next stage where this one is over, and return how many steps are left."""
        schedule = self.schedule
        stage = schedule.stage
        assert stage is not None  # no step is counted after the last stage
        self.steps += 1
        done = schedule.done + 1
        look = stage == "measure" and done >= self.stopping.look_at
        now = self.timeline.clock()
        try:
            if now - self._read_ns >= _APART_NS or look or done >= self._planned or stage == "memory":
                self._read_ns = now
                self._look_around(stage)
        finally:  # else Ctrl-C while reading would lose the step
            self._pending.append((self.steps, stage, self.tokens, self._peaks))
        self.tokens = None
        count = (self.batches, self.samples)
        if count != self._count:  # noted where it changes: nearly all steps have as many
            self._count = count
            self._counts.append(BatchCount(self.steps, *count))
        self.batches, self.samples = 0, 0
        if self.stream is not None and len(self._pending) > _LAG:
            self._read_reached()
        due = now - self._kept_ns >= _KEEP_NS
        if due:
            self.keep()
        if schedule.advance() or (look and self._measured_enough()):
            self._end_stage(stage)
            self._begin_stage()
        elif stage == "trace":
            self.instruments.tracer.part.run(self.instruments.tracer.step)
        if due:
            self._draw()
        return schedule.left

    def _look_around(self, stage: str) -> None:
        """Read memory, and in ``measure`` what else the step that has just ended suffered from."""
        memory, counters = self.instruments.memory, self.instruments.counters
        self._peaks = UNKNOWN  # else an interrupt in the next line would leave those of an earlier step
        self._peaks = memory.part.run(memory.step_peaks, otherwise=UNKNOWN)
        if stage == "measure":
            counters.part.run(counters.reader.read, self.steps)
        if (ranks := self.instruments.ranks) is not None and stage in ("warmup", "measure"):
            ranks.part.run(ranks.look, self.steps)

    def keep(self) -> None:
        """Write the complete rows that were not written yet."""
        self._kept_ns = self.timeline.clock()
        self._read_reached()
        if self.keep_rows is not None and self._kept < len(self._rows):
            self._keeping.run(self.keep_rows, self._rows[self._kept :])
            self._kept = len(self._rows)

    def _measured_enough(self) -> bool:
        self._read_reached()
        elapsed_s = (self.timeline.clock() - self._began_ns) * 1e-9
        if not self.stopping.reached(self.schedule.done, self.measured_s(), elapsed_s):
            return False
        self.schedule.end_stage()
        return True

    def measured_s(self) -> list[float]:
        """Return the seconds of each measured step, as far as they are known by now."""
        return [row.time("step") for row in self._rows if row.stage == "measure" and row.seconds is not None]

    @property
    def rows(self) -> tuple[StepRow, ...]:
        """The rows that were read by now."""
        return tuple(self._rows)

    def finish(self, trace: bool = True) -> None:
        """End the stage that runs, and read what is still on the device: the run is over, as planned or not."""
        tracer = self.instruments.tracer
        if not trace:
            tracer.part.run(tracer.discard)
        if not self._finished and self.schedule.stage is not None:
            self._finished = True
            self._end_stage(self.schedule.stage)
        self._read_all()
        if self.progress is not None:
            self._drawing.run(self.progress.clear)

    def measured(self) -> Measured:
        """Return what this rank measured."""
        facts = self.instruments.facts()
        compiled, graph_pools = facts.pop("recompiled", ()), facts.pop("graph_pools", None)  # these become notes
        return Measured(
            rows=StepTable.of(self._rows),
            steps_planned=self.schedule.planned,
            batch_counts=[self._counts],
            between_steps_s=self._between_steps_s(),
            between=self._between(),
            device_idle=self._idle / self._asked if self._asked else None,
            notes=(
                *self.notes,
                *_recompiled_note(compiled, facts.get("counters", ())),
                *_graph_note(graph_pools),
            ),
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
        if stage in ("measure", "collectives"):  # what ends with these needs their steps' times
            self._read_all()
        if stage == "measure":
            went_on = self.schedule.stage != "measure"
            if went_on and self.rank == 0:  # its answer was everybody's, so it alone knows why measuring stopped
                self.notes += self.stopping.missed(self.measured_s())
        self.instruments.end(stage)
        self.keep()

    def _draw(self) -> None:
        if self.progress is not None and (stage := self.schedule.stage) is not None:
            self._drawing.run(self.progress.draw, stage, self.schedule.done, self.schedule.planned[stage])

    def _read_reached(self) -> None:
        finished = self.timeline.reading().finished
        while finished and self._pending and (self.stream is None or self.stream.reached(finished[0].instants[-1])):
            self._read(self._pending.popleft(), finished.popleft())

    def _read_all(self) -> None:
        """Wait for the device, and read all marks; only the host's where the device is dead."""
        alive = True
        if self.stream is not None:
            try:
                self.stream.wait()
            except Exception:
                alive = False
        finished = self.timeline.reading().finished
        while finished and self._pending:
            self._read(self._pending.popleft(), finished.popleft(), alive)

    def _read(self, pending: _Pending, marks: StepMarks, alive: bool = True) -> None:
        step, stage, tokens, memory = pending
        host = marks.host_seconds()
        seconds: tuple[float, ...] | None = host
        if (ranks := self.instruments.ranks) is not None and alive:
            ranks.part.run(ranks.keep, stage, step, marks)
        if self.stream is not None:
            seconds = marks.stream_seconds(self.stream) if alive else None
            self.stream.release(marks.instants)  # reused, so that steps make no new events
        self._rows.append(StepRow(step, stage, seconds, host, tokens, memory, self.rank))
        self.instants_ns.append((marks.host_ns[0], marks.host_ns[-1]))
        if stage == "measure":
            self.instruments.counters.reader.place(step, marks.host_ns[0], marks.host_ns[-1])
            self._outside += outside_of(marks, self._measured_ns[-1] if self._measured_ns else None)
            self._measured_ns += (marks.host_ns[0], marks.host_ns[-1])
            self._asked += marks.asked
            self._idle += marks.idle

    def _between(self) -> list[BetweenSteps]:
        if not self._measured_ns:
            return []
        timeline = self.timeline
        passed = [Passed(at_ns, at_ns, what) for at_ns, what in timeline.went_outside]
        passed += [Passed(*ends, CHECKPOINT) for ends in zip(timeline.saved[::2], timeline.saved[1::2], strict=False)]
        return between_steps(self._outside, (self._measured_ns[0], self._measured_ns[-1]), passed)

    def _between_steps_s(self) -> float | None:
        if not self._measured_ns:
            return None
        whole = (self._measured_ns[-1] - self._measured_ns[0]) * 1e-9
        return whole - sum(row.time("step", "host") for row in self._rows if row.stage == "measure")


def _recompiled_note(names: Sequence[str], counters: Sequence[StepCounters]) -> list[str]:
    """Return the note on what was compiled while measuring, the first few things and steps by name; empty for none."""
    once = list(dict.fromkeys(names))
    more = f"; and {len(once) - _NAMED} more" if len(once) > _NAMED else ""
    steps = [str(each.step) for each in counters if each.compile_s]
    when = f" (step {', '.join(steps[:_NAMED])}{', …' * (len(steps) > _NAMED)})" if steps else ""
    return [f"recompiled while measuring{when}: {'; '.join(once[:_NAMED])}{more}"] if once else []


def _graph_note(pools: int | None) -> list[str]:
    """Return the note that peaks leave out what CUDA graphs use, whose ``pools`` are in bytes; empty for none."""
    if pools is None:
        return []
    theirs = f"of what is reserved, {bytes_text(pools)} are theirs alone, or a MemPool's"
    return [f"what CUDA graphs use when they are replayed is in no peak of allocated memory: {theirs}"]
