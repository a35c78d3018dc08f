"""Events of a running training, from its steps, validations and memory as they come.

Times of single steps and levels are judged on the device's clock where there is one. An event is returned again when
more is known of it: its repetitions, its size, where it ended (see ``WatchEvent``).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.steps.odd_step_causes import (
    EXPLAINED,
    counters_per_step,
    explained_by,
    usual_counters,
)
from lm_profiler.analysis.watch.durations import Durations, LongDurations
from lm_profiler.analysis.watch.ledger import EPOCH, VALIDATION, NamedSpan
from lm_profiler.analysis.watch.level_change import LevelChange
from lm_profiler.analysis.watch.levels import LevelFollower
from lm_profiler.analysis.watch.machine_speed import MachineSpeed
from lm_profiler.analysis.watch.memory_growth import MemoryGrowth, MemoryWatch
from lm_profiler.analysis.watch.slow_steps import (
    Occurrence,
    SlowStep,
    SlowStepGroup,
    SlowStepGroups,
    SlowSteps,
    cause_kind,
)
from lm_profiler.record.parts import PARTS, TIMED
from lm_profiler.record.run_record import OddStep, StepCounters
from lm_profiler.record.watch_files import WatchEvent

_READINGS = 2400  # readings of counters, named spans and steps in memory
_USUAL_READINGS = 200  # readings whose median is the usual one
_MOST_EXPLAINED = 20  # slow steps of one hand-over whose cause is looked for; the others count without a cause
# of a usual step, below which a named span cannot explain a slow one
_SPAN_SHARE = 0.25
_LONGEST_SPAN_NS = 50_000_000  # a span of this length is kept in any case
_PAGES = 1000  # page faults that are worth being a cause: each takes a microsecond
# a cause of a level holds in at least so many of so many parts of it
_LASTING_PARTS = 4
_LASTING = 3
_DATA = PARTS.index("data")
# of the logarithm of a step: a change of the program that lies in no part of the step, but in several
_LARGE = 0.1

# A traced step is slow if it takes so many seconds and so many times more than the others of the same trace, which
# tracing slows down as much.
_TRACED_EXCESS_S = 0.2
_TRACED_RATIO = 3.0


class TracedStep(NamedTuple):
    """A step that was traced, so that no figure includes it."""

    begin_ns: int
    end_ns: int
    seconds: Sequence[float]  # of each part and of the step, on the host's clock


@dataclass(eq=False, kw_only=True)
class WatchedRun:
    """Takes a run's readings as they come, and returns events that are new or known better."""

    workers: int | None = None  # processes of the loader; None means unknown
    on_device: bool = False  # whether a device's clock times the steps
    epoch_s: float = 0.0  # seconds since 1970 at 0 of the clock of the steps
    steps: int = 0
    levels: LevelFollower = field(init=False)
    memory: MemoryWatch = field(default_factory=MemoryWatch)
    _machine: MachineSpeed = field(default_factory=MachineSpeed)
    _slow: SlowSteps = field(default_factory=SlowSteps)
    _groups: SlowStepGroups = field(default_factory=SlowStepGroups)
    _durations: defaultdict[str, Durations] = field(
        default_factory=lambda: defaultdict(Durations)
    )
    _numbers: deque[int] = field(default_factory=lambda: deque(maxlen=_READINGS))
    _ends_ns: deque[int] = field(default_factory=lambda: deque(maxlen=_READINGS))
    _counters: deque[StepCounters] = field(
        default_factory=lambda: deque(maxlen=_READINGS)
    )
    _spans: deque[NamedSpan] = field(default_factory=lambda: deque(maxlen=_READINGS))
    # when epochs began
    _epochs_ns: deque[int] = field(default_factory=lambda: deque(maxlen=_READINGS))
    _began_ns: int | None = None
    # rank, step and time of events, by identity
    _names: dict[int, dict[str, Any]] = field(default_factory=dict)
    # by which the levels of changes are multiplied in their events, by identity
    _scales: dict[int, float] = field(default_factory=dict)
    # the objects of those identities, so that they stay alive
    _named_objects: list[object] = field(default_factory=list)
    _causes: dict[int, tuple[str | None, float | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.levels = LevelFollower(self._is_worth_reporting)

    @property
    def step_s(self) -> float | None:
        """How long a step takes now, in seconds; None before it is known."""
        program_s = self.levels.level_s
        if program_s is None:
            return None
        return program_s * self._machine.slowness

    def add(
        self,
        ns: NDArray[np.int64],
        seconds: NDArray[np.float64],
        counters: Sequence[StepCounters] = (),
        spans: Sequence[NamedSpan] = (),
    ) -> list[WatchEvent]:
        """Take the next n steps: (n, 2) when they began and ended, and their (n, TIMED) seconds."""
        self._counters.extend(counters)
        self._add_spans(spans)
        if not len(ns):
            return []
        numbers = np.arange(self.steps + 1, self.steps + len(ns) + 1)
        self.steps += len(ns)
        if self._began_ns is None:
            self._began_ns = int(ns[0, 0])
        self._numbers.extend(numbers.tolist())
        self._ends_ns.extend(ns[:, 1].tolist())
        is_timed = ~np.isnan(seconds[:, -1])  # on a device, an instant may be unknown
        numbers = numbers[is_timed]
        seconds = np.nan_to_num(seconds[is_timed])
        slow = self._slow.add(numbers, ns[is_timed], seconds)
        if not self.on_device:
            numbers, seconds = self._machine.remove(numbers, seconds)
            self.levels.smallest_change = self._machine.smallest_program_change
        self.levels.add(numbers, seconds)
        return self._events(slow, run_is_over=False)

    def finish(self) -> list[WatchEvent]:
        """Judge the last steps, and return all events that have changed since they were last returned."""
        no_steps = np.empty(0, np.int64)
        no_ns = np.empty((0, 2), np.int64)
        no_seconds = np.empty((0, len(TIMED)))
        slow = self._slow.add(no_steps, no_ns, no_seconds, run_is_over=True)
        self.levels.finish()
        self._machine.finish()
        events = self._events(slow, run_is_over=True)
        for term, durations in self._durations.items():
            durations.finish()
            events += self._duration_events(term, durations)
        return events

    def skip(self, steps: int) -> None:
        """Skip traced steps, which no figure includes."""
        self.steps += steps
        self._slow.forget()
        self.levels.forget_unfinished()
        self._machine.forget_unfinished()

    def judge_traced(
        self, first_step: int, traced: Sequence[TracedStep]
    ) -> list[WatchEvent]:
        """Return the event of traced steps that took far longer than tracing takes; ``first_step`` is their number."""
        if not traced:
            return []
        seconds = np.array([step.seconds for step in traced])
        usual_parts_s = np.median(seconds, axis=0)
        usual_s = max(float(usual_parts_s[-1]), self.step_s or 0.0)
        slow_steps = []
        for index, step in enumerate(traced):
            excess_s = float(seconds[index, -1]) - usual_s
            if excess_s < max(_TRACED_EXCESS_S, _TRACED_RATIO * usual_s):
                continue
            part_excess_s = seconds[index, :-1] - usual_parts_s[:-1]
            largest = int(part_excess_s.argmax())
            slow_step = SlowStep(
                step=first_step + index,
                begin_ns=step.begin_ns,
                end_ns=step.end_ns,
                step_s=usual_s + excess_s,
                usual_s=usual_s,
                part=PARTS[largest],
                part_s=float(seconds[index, largest]),
                data_s=float(seconds[index, _DATA]),
                usual_data_s=float(usual_parts_s[_DATA]),
            )
            slow_steps.append(slow_step)
        return self._events(slow_steps, run_is_over=False)

    def add_durations(
        self, term: str, seconds: Sequence[float], at_s: float
    ) -> list[WatchEvent]:
        """Record how long the latest validations, checkpoints or epoch boundaries took; return the events they cause.

        Args:
            term: which of these three it is, by its name in the ledger.
            seconds: how long each took, in order.
            at_s: the time now, in seconds since 1970.
        """
        durations = self._durations[term]
        for duration_s in seconds:
            durations.add(duration_s, self.steps, at_s, self.step_s or 0.0)
        return self._duration_events(term, durations)

    def add_held_bytes(
        self, at_s: float, held_bytes: int, free_bytes: Callable[[], int | None]
    ) -> list[WatchEvent]:
        """Record the bytes that are held between steps; ``free_bytes`` returns what the machine has left."""
        growth = self.memory.add(at_s, held_bytes, self.steps)
        if growth is None:
            return []
        return [self._memory_event(growth, free_bytes)]

    # -- what the steps show -------------------------------------------------------------------------------------------

    def _add_spans(self, spans: Sequence[NamedSpan]) -> None:
        """Keep the spans that may explain a slow step; a run has several short ones in each step."""
        level_ns = (self.step_s or 0.0) * 1e9
        shortest_ns = min(_SPAN_SHARE * level_ns, _LONGEST_SPAN_NS)
        for span in spans:
            if span.what == EPOCH and not span.ns:
                self._epochs_ns.append(span.begin_ns)
            elif span.ns >= shortest_ns and span.what != VALIDATION:
                self._spans.append(span)

    def _events(self, slow: Sequence[SlowStep], run_is_over: bool) -> list[WatchEvent]:
        """Return the events of the ``slow`` steps, and of changes of level and of the machine's speed."""
        self._group(slow)
        now_s = self.epoch_s
        if self._ends_ns:
            now_s = self._seconds_since_1970(self._ends_ns[-1])
        groups = self._groups.to_write(now_s, run_is_over)
        events = [self._slow_step_event(group) for group in groups]
        for change in self.levels.take_changed():
            events.append(self._level_event(change))
        for change in self._machine.take_changed():
            events.append(self._machine_event(change))
        return events

    def _seconds_since_1970(self, ns: int) -> float:
        return self.epoch_s + ns * 1e-9

    def _group(self, slow: Sequence[SlowStep]) -> None:
        """Put slow steps into groups by phase and cause; of many, only the slowest are explained."""
        if not slow:
            return
        slowest = sorted(slow, key=lambda step: -step.excess_s)[:_MOST_EXPLAINED]
        explained = {step.step for step in slowest}
        counters = [*self._counters]
        usual = usual_counters(counters[-_USUAL_READINGS:]) if counters else None
        by_step = {reading.step: reading for reading in counters}
        for step in slow:
            cause, cause_s = None, 0.0
            if step.step in explained:
                cause, cause_s = self._cause(step, by_step.get(step.step), usual)
            watched_s = (step.end_ns - (self._began_ns or 0)) * 1e-9
            occurrence = Occurrence(
                slow=step,
                at_s=self._seconds_since_1970(step.end_ns),
                cause=cause,
                cause_s=cause_s,
                starts_epoch=self._starts_epoch(step),
            )
            self._groups.add(occurrence, watched_s)

    def _starts_epoch(self, step: SlowStep) -> bool:
        """Return whether an epoch began in the step, or between it and the one before it."""
        before_ns = step.begin_ns - round(step.usual_s * 1e9)
        return any(before_ns <= epoch_ns <= step.end_ns for epoch_ns in self._epochs_ns)

    def _cause(
        self, step: SlowStep, counters: StepCounters | None, usual: StepCounters | None
    ) -> tuple[str | None, float]:
        """Return what explains most of a slow step, and how many seconds of it."""
        cause = None
        cause_s = 0.0
        if counters is not None and usual is not None:
            odd = OddStep(
                step=step.step,
                step_s=step.step_s,
                ratio=step.step_s / step.usual_s,
                part=step.part or "",
                excess_s=step.excess_s,
            )
            data_s = (step.usual_data_s, step.data_s)
            odd = explained_by(odd, counters, usual, data_s, self.workers)
            if odd.cause is not None and _is_worth_naming(odd.cause, counters):
                cause = odd.cause
                cause_s = odd.cause_s or 0.0
        span = self._longest_span(step.begin_ns, step.end_ns)
        if span is not None:
            span_s = span.ns * 1e-9
            if span_s >= max(EXPLAINED * step.excess_s, cause_s):
                cause = span.what
                cause_s = span_s
        return cause, min(cause_s, step.excess_s)

    def _longest_span(self, begin_ns: int, end_ns: int) -> NamedSpan | None:
        """Return the span that took longest between two instants; the one within it that explains most of it."""
        spans = [span for span in self._spans if begin_ns <= span.begin_ns < end_ns]
        if not spans:
            return None
        longest = max(spans, key=lambda span: (span.ns, -span.begin_ns))
        inner_spans = []
        for span in spans:
            begins_in_longest = longest.begin_ns <= span.begin_ns < longest.end_ns
            if begins_in_longest and span is not longest:
                inner_spans.append(span)
        longest_inner = max(inner_spans, key=lambda span: span.ns, default=longest)
        if longest_inner.ns > EXPLAINED * longest.ns:
            return longest_inner
        return longest

    def _slow_step_event(self, group: SlowStepGroup) -> WatchEvent:
        """Return the event of a group of slow steps, with the means over the group."""
        interval = group.interval()
        starts_epochs = group.starts_epochs()
        is_regular = interval is not None or starts_epochs
        return WatchEvent(
            at_s=group.first_at_s,
            step=group.first_step,
            kind="slow step",
            part=group.part,
            now=group.step_s / group.times,
            against=group.usual_s / group.times,
            cause=group.cause,
            cause_s=group.cause_s / group.times if group.cause is not None else None,
            times=group.times,
            cost_s=group.excess_s,
            steps=list(group.steps),
            every_steps=interval,
            starts_epochs=starts_epochs or None,
            share=None if is_regular else group.share(),
        )

    # -- levels --------------------------------------------------------------------------------------------------------

    def _is_worth_reporting(self, change: LevelChange) -> bool:
        """Return whether a change of the program lies in a part of the step, or is large.

        The machine does not slow all parts by the same factor, so small changes of several parts are left of it.
        """
        if self.on_device:
            return True
        is_large = change.log_size >= _LARGE
        is_in_part = change.part is not None
        smallest = self._machine.smallest_program_change
        return is_large or (is_in_part and change.log_size >= smallest)

    def _level_event(self, change: LevelChange) -> WatchEvent:
        """Return the event of a change of the program."""
        event = self._change_event(change, scale=self._machine.slowness)
        return event.model_copy(update={"part": change.part})

    def _machine_event(self, change: LevelChange) -> WatchEvent:
        """Return the event of a change of the machine's slowness, for a step as long as they are now."""
        program_s = self.levels.level_s or self._machine.usual_step_s
        event = self._change_event(change, program_s / self._machine.usual_step_s)
        return event.model_copy(update={"in_all_parts": True})

    def _change_event(self, change: LevelChange, scale: float) -> WatchEvent:
        """Return the event of a change of level; its relative levels times ``scale`` are seconds."""
        name = self._name(change, change.found_step, self._end_of(change.found_step))
        if change.course != "drift":
            scale = self._scales.setdefault(id(change), scale)
        cause, cause_s = self._cause_of_level(change)
        return WatchEvent(
            **name,
            kind="level",
            now=scale * float(change.after_s[-1]),
            against=scale * float(change.before_s[-1]),
            since_step=change.since_step,
            until_step=change.until_step,
            course=change.course,
            times=change.times,
            cause=cause,
            cause_s=cause_s,
            withdrawn=change.is_withdrawn or change.is_hidden,
        )

    def _name(self, key: object, step: int, at_s: float) -> dict[str, Any]:
        """Return step and time of the event of ``key``, which stay as they were at first."""
        if id(key) not in self._names:
            self._names[id(key)] = {"step": step, "at_s": at_s}
            self._named_objects.append(key)
        return self._names[id(key)]

    def _end_of(self, step: int) -> float:
        """Return when ``step`` ended, in seconds since 1970."""
        if step in self._numbers:
            return self._seconds_since_1970(self._ends_ns[self._numbers.index(step)])
        return self._seconds_since_1970(self._ends_ns[-1])

    def _cause_of_level(self, change: LevelChange) -> tuple[str | None, float | None]:
        """Return what explains a level, if it lasts as long as the level does.

        Later corrections of the event keep the cause, unless the readings around the change are still in memory.
        """
        is_single_change = change.course is None
        if not is_single_change:
            return None, None
        readings_before = []
        readings_after = []
        for reading in self._counters:
            step = reading.step or 0
            if step < change.since_step:
                readings_before.append(reading)
            elif change.until_step is None or step <= change.until_step:
                readings_after.append(reading)
        if len(readings_before) < 2 or len(readings_after) < 2 * _LASTING_PARTS:
            return self._causes.get(id(change), (None, None))

        odd = OddStep(
            step=change.since_step,
            step_s=float(change.after_s[-1]),
            ratio=float(change.after_s[-1] / change.before_s[-1]),
            part=change.part or "",
            excess_s=change.size_s,
        )
        data_s = float(change.before_s[_DATA]), float(change.after_s[_DATA])
        usual = counters_per_step(readings_before)
        # by kind of cause: the causes and their seconds in each part of the level that it explains
        names_by_kind = defaultdict[str, list[str]](list)
        seconds_by_kind = defaultdict[str, list[float]](list)
        for indices in np.array_split(np.arange(len(readings_after)), _LASTING_PARTS):
            part_counters = counters_per_step([readings_after[i] for i in indices])
            explained = explained_by(odd, part_counters, usual, data_s, self.workers)
            name = explained.cause
            if name is not None and _is_worth_naming(name, part_counters):
                names_by_kind[cause_kind(name)].append(name)
                seconds_by_kind[cause_kind(name)].append(explained.cause_s or 0.0)
        cause: tuple[str | None, float | None] = (None, None)
        kind = max(names_by_kind, key=lambda kind: len(names_by_kind[kind]), default="")
        if len(names_by_kind[kind]) >= _LASTING:
            cause_s = float(np.mean(seconds_by_kind[kind]))
            cause = (names_by_kind[kind][-1], cause_s)
        self._causes[id(change)] = cause
        return cause

    # -- what is outside of steps --------------------------------------------------------------------------------------

    def _duration_events(self, term: str, durations: Durations) -> list[WatchEvent]:
        events = []
        for changed in durations.take_changed():
            events.append(self._duration_event(term, changed))
        return events

    def _duration_event(self, term: str, durations: LongDurations) -> WatchEvent:
        """Return the event of long durations of ``term``, such as validations or checkpoints."""
        # Reports of one event have the same kind, step and instant. A course and the single long duration that it
        # withdraws may share the instant, so the step is the one at which it was found, which differs.
        is_course = durations.is_course
        return WatchEvent(
            at_s=durations.at_s,
            step=durations.found_step,
            kind=cast(Any, term),
            now=durations.now_s,
            against=durations.against_s,
            since_step=durations.first_step if is_course else None,
            until_step=durations.until_step,
            course="drift" if is_course else None,
            times=durations.times,
            cost_s=None if is_course else durations.excess_s,
            withdrawn=durations.is_withdrawn,
        )

    def _memory_event(
        self, growth: MemoryGrowth, free_bytes: Callable[[], int | None]
    ) -> WatchEvent:
        """Return the event of a memory that grows: bytes per hour, and in how many seconds the rest will be used up."""
        full_in_s = None
        if growth.until_step is None and growth.bytes_per_s > 0.0:
            free = free_bytes()
            full_in_s = None if free is None else free / growth.bytes_per_s
        return WatchEvent(
            at_s=growth.at_s,
            step=growth.step,
            kind="memory",
            now=growth.bytes_per_s * 3600.0,
            full_in_s=full_in_s,
            until_step=growth.until_step,
            grew_bytes=round(growth.grew_bytes),
        )


def _is_worth_naming(cause: str, counters: StepCounters) -> bool:
    """Return whether a cause means something to a user: a few page faults take microseconds."""
    return "page fault" not in cause or (counters.minor_faults or 0.0) >= _PAGES
