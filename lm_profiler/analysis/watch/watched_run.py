"""Finds the events of a running training, from its steps, validations and memory as they arrive.

Steps are judged by the times of the device, if there is one, and otherwise of the host. An event is returned again when
it changes: it was repeated, its size was corrected, or it has ended (see ``WatchEvent``).
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
from lm_profiler.analysis.watch.ledger import (
    EPOCH,
    EPOCH_TURN,
    VALIDATION,
    NamedSpan,
)
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
from lm_profiler.record.counter_table import NO_COUNTERS, CounterTable
from lm_profiler.record.parts import PARTS, TIMED
from lm_profiler.record.run_record import OddStep, StepCounters
from lm_profiler.record.watch_files import WatchEvent

_READINGS = 2400  # readings of counters, named spans and steps that are kept in memory
_USUAL_READINGS = 200  # the last readings of counters, whose median is the usual one
# of the slow steps of one call, only this many get a cause: the slowest
_MOST_EXPLAINED = 20
# A span can explain a slow step only if it takes this share of a usual step. Shorter spans are dropped, but none of 50
# ms or more.
_SPAN_SHARE = 0.25
_LONGEST_SPAN_NS = 50_000_000
_PAGES = 1000  # fewer page faults are no cause: each takes a microsecond
# A cause explains a level if it explains at least 3 of the 4 quarters of its steps.
_QUARTERS = 4
_FEWEST_QUARTERS = 3
_DATA = PARTS.index("data")
# in logarithms: a change of several parts of the step is reported as one of the program only if it is this large
_LARGE = 0.1

# A traced step is slow if its excess over the usual traced step is at least this many seconds, and this many times the
# usual step. It is compared with steps of the same trace because tracing slows down all of them.
_TRACED_EXCESS_S = 0.2
_TRACED_RATIO = 3.0


class OwnWork(NamedTuple):
    """A time in which the thread of the watch worked, and so took Python's global lock from the training thread."""

    begin_ns: int
    end_ns: int
    cpu_s: float  # the thread's CPU time in it


class TracedStep(NamedTuple):
    """A traced step. Figures do not include it, because tracing slows it down."""

    begin_ns: int
    end_ns: int
    # the seconds of each part, and last of the whole step, on the host's clock
    seconds: Sequence[float]


@dataclass(eq=False, kw_only=True)
class WatchedRun:
    """Receives the readings of a run as they arrive, and returns events that are new or have changed."""

    workers: int | None = None  # processes of the loader; None means unknown
    on_device: bool = False  # whether the steps are timed on a device's clock
    # the instant 0 of the clock of the steps, in seconds since 1970
    epoch_s: float = 0.0
    steps: int = 0  # number of steps so far
    levels: LevelFollower = field(init=False)
    memory: MemoryWatch = field(default_factory=MemoryWatch)
    # seconds until memory is full, when its growth was last reported
    _full_in_s: float | None = None
    _machine: MachineSpeed = field(default_factory=MachineSpeed)
    _slow: SlowSteps = field(default_factory=SlowSteps)
    _groups: SlowStepGroups = field(default_factory=SlowStepGroups)
    _durations: dict[str, Durations] = field(default_factory=dict)
    # the numbers of the last steps, and when they ended
    _numbers: deque[int] = field(default_factory=lambda: deque(maxlen=_READINGS))
    _ends_ns: deque[int] = field(default_factory=lambda: deque(maxlen=_READINGS))
    _counters: CounterTable = field(default_factory=CounterTable)
    _spans: deque[NamedSpan] = field(default_factory=lambda: deque(maxlen=_READINGS))
    _own_work: deque[OwnWork] = field(default_factory=lambda: deque(maxlen=_READINGS))
    # the instants at which epochs began
    _epochs_ns: deque[int] = field(default_factory=lambda: deque(maxlen=_READINGS))
    _began_ns: int | None = None
    # The keys of the next dictionaries are the id() of changes of level:
    # step and time of a change's event, which identify the event
    _names: dict[int, dict[str, Any]] = field(default_factory=dict)
    # the factor by which the levels of a change of the machine's speed are multiplied in its event
    _scales: dict[int, float] = field(default_factory=dict)
    # its cause, and the seconds that this explains
    _causes: dict[int, tuple[str | None, float | None]] = field(default_factory=dict)
    # the changes themselves, which must stay alive so that their id() stays unique
    _named_objects: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.levels = LevelFollower(self._is_worth_reporting)

    @property
    def step_s(self) -> float | None:
        """The current time of a step; None before it is known."""
        program_s = self.levels.level_s
        if program_s is None:
            return None
        return program_s * self._machine.slowness

    def add(
        self,
        ns: NDArray[np.int64],
        seconds: NDArray[np.float64],
        counters: CounterTable = NO_COUNTERS,
        spans: Sequence[NamedSpan] = (),
    ) -> list[WatchEvent]:
        """Add the next steps; return events that are new or have changed.

        Args:
            ns: (n, 2) when they began and ended.
            seconds: (n, TIMED) the seconds of their parts, and last of the whole step.
            counters: the readings of counters since the last call.
            spans: the named spans that have ended since the last call.
        """
        self._counters = self._counters.followed_by(counters, _READINGS)
        self._add_spans(spans)
        if not len(ns):
            return []
        numbers = np.arange(self.steps + 1, self.steps + len(ns) + 1)
        self.steps += len(ns)
        if self._began_ns is None:
            self._began_ns = int(ns[0, 0])
        self._numbers.extend(numbers.tolist())
        self._ends_ns.extend(ns[:, 1].tolist())
        is_timed = ~np.isnan(seconds[:, -1])  # an instant of a device may be unknown
        numbers = numbers[is_timed]
        seconds = np.nan_to_num(seconds[is_timed])
        slow_steps = self._slow.add(numbers, ns[is_timed], seconds)
        slow = [step for step in slow_steps if not self._is_own_delay(step)]
        if not self.on_device:
            numbers, seconds = self._machine.remove(numbers, seconds)
            self.levels.smallest_change = self._machine.smallest_program_change
        self.levels.add(numbers, seconds)
        return self._changed_events(slow, run_is_over=False)

    def finish(self) -> list[WatchEvent]:
        """Judge the last steps, and return all events that have changed since they were last returned."""
        no_steps = np.empty(0, np.int64)
        no_ns = np.empty((0, 2), np.int64)
        no_seconds = np.empty((0, len(TIMED)))
        # This judges the steps that still wait for later ones.
        slow = self._slow.add(no_steps, no_ns, no_seconds, run_is_over=True)
        self.levels.add(*self._machine.finish())
        self.levels.finish()
        events = self._changed_events(slow, run_is_over=True)
        for term, durations in self._durations.items():
            durations.finish()
            events += self._duration_events(term, durations)
        growth = self.memory.finish()
        if growth is not None:
            events.append(self._memory_event(growth))
        return events

    def skip(self, steps: int) -> None:
        """Count ``steps`` traced steps without judging their times, which tracing lengthens."""
        self.steps += steps
        self.levels.forget_unfinished()
        self._machine.forget_unfinished()

    def judge_traced(
        self, first_step: int, traced: Sequence[TracedStep]
    ) -> list[WatchEvent]:
        """Return the events of traced steps that took far longer than the others of their trace.

        Args:
            first_step: the number of the first of them.
            traced: all steps of one trace, in order.
        """
        if not traced:
            return []
        # (n, TIMED) seconds of the parts, and last of the whole step; then their medians
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
        return self._changed_events(slow_steps, run_is_over=False)

    def add_own_work(self, work: OwnWork) -> None:
        """Record when the thread of the watch worked, so that the delays that it causes are not reported."""
        self._own_work.append(work)

    def add_durations(
        self, term: str, seconds: Sequence[float], at_s: float
    ) -> list[WatchEvent]:
        """Record the durations of validations, checkpoints or epoch boundaries; return events that follow from them.

        Args:
            term: the name in the ledger of one of these three.
            seconds: how long each took, in order.
            at_s: the time now, in seconds since 1970.
        """
        if term not in self._durations:
            self._durations[term] = Durations(reports_cost=term == EPOCH_TURN)
        durations = self._durations[term]
        for duration_s in seconds:
            durations.add(duration_s, self.steps, at_s, self.step_s or 0.0)
        return self._duration_events(term, durations)

    def add_held_bytes(
        self, at_s: float, held_bytes: int, free_bytes: Callable[[], int | None]
    ) -> list[WatchEvent]:
        """Record the bytes of memory held between steps; return the event if memory grows.

        ``free_bytes`` returns how many bytes are free on the machine, or None if this is unknown.
        """
        growth = self.memory.add(at_s, held_bytes, self.steps)
        if growth is None:
            return []
        self._full_in_s = _seconds_until_full(growth, free_bytes)
        return [self._memory_event(growth)]

    # -- slow steps ----------------------------------------------------------------------------------------------------

    def _add_spans(self, spans: Sequence[NamedSpan]) -> None:
        """Keep the begins of epochs, and the spans that are long enough to explain a slow step.

        Each step has several shorter spans, and validation lies outside the steps.
        """
        step_ns = (self.step_s or 0.0) * 1e9
        shortest_ns = min(_SPAN_SHARE * step_ns, _LONGEST_SPAN_NS)
        for span in spans:
            if span.what == EPOCH and not span.ns:
                self._epochs_ns.append(span.begin_ns)
            elif span.ns and span.ns >= shortest_ns and span.what != VALIDATION:
                self._spans.append(span)

    def _changed_events(
        self, slow: Sequence[SlowStep], run_is_over: bool
    ) -> list[WatchEvent]:
        """Return events that have changed: of ``slow`` steps, of the program's level, and of the machine's speed."""
        self._group_slow_steps(slow)
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

    def _group_slow_steps(self, slow: Sequence[SlowStep]) -> None:
        """Add slow steps to the groups of their phase and cause; only the slowest of them get a cause."""
        if not slow:
            return
        slowest = sorted(slow, key=lambda step: -step.excess_s)[:_MOST_EXPLAINED]
        steps_to_explain = {step.step for step in slowest}
        usual = None
        if len(self._counters):
            usual = usual_counters(self._counters.last(_USUAL_READINGS))
        for step in slow:
            cause, cause_s = None, 0.0
            if step.step in steps_to_explain:
                reading = self._counters.row_of(step.step)
                cause, cause_s = self._cause_of_slow_step(step, reading, usual)
            watched_s = (step.end_ns - (self._began_ns or 0)) * 1e-9
            occurrence = Occurrence(
                slow=step,
                at_s=self._seconds_since_1970(step.end_ns),
                cause=cause,
                cause_s=cause_s,
                starts_epoch=self._starts_epoch(step),
            )
            self._groups.add(occurrence, watched_s)

    def _is_own_delay(self, step: SlowStep) -> bool:
        """Return whether the work of the watch during ``step`` may explain most of its excess."""
        own_s = 0.0
        for work in self._own_work:
            begin_ns = max(work.begin_ns, step.begin_ns)
            end_ns = min(work.end_ns, step.end_ns)
            # The thread of the watch may itself have waited in this time, and delayed nobody.
            own_s += min(max(end_ns - begin_ns, 0) * 1e-9, work.cpu_s)
        return own_s >= 0.5 * step.excess_s

    def _starts_epoch(self, step: SlowStep) -> bool:
        """Return whether an epoch began in the step, or within a usual step time before it."""
        before_ns = step.begin_ns - round(step.usual_s * 1e9)
        return any(before_ns <= epoch_ns <= step.end_ns for epoch_ns in self._epochs_ns)

    def _cause_of_slow_step(
        self, step: SlowStep, counters: StepCounters | None, usual: StepCounters | None
    ) -> tuple[str | None, float]:
        """Return the cause of a slow step, by its counters or the longest span in it, and the seconds it explains."""
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
        """Return the longest span that begins between two instants, or a span within it that is most of it."""
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
        """Return the event of a group of slow steps; its times are means over the group."""
        interval = group.interval()
        starts_epochs = group.starts_epochs()
        is_regular = interval is not None or starts_epochs
        growth = group.growth()
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
            grew_from_s=None if growth is None else growth[0],
            grew_to_s=None if growth is None else growth[1],
            every_steps=interval,
            starts_epochs=starts_epochs or None,
            share=None if is_regular else group.share(),
        )

    # -- levels --------------------------------------------------------------------------------------------------------

    def _is_worth_reporting(self, change: LevelChange) -> bool:
        """Return whether a change is likely one of the program: it is in one part of the step, or it is large.

        Small changes of several parts may be due to the machine, which does not slow down all parts by the same factor.
        """
        if self.on_device:
            return True
        is_large = change.log_size >= _LARGE
        is_in_part = change.part is not None
        smallest = self._machine.smallest_program_change
        return is_large or (is_in_part and change.log_size >= smallest)

    def _level_event(self, change: LevelChange) -> WatchEvent:
        """Return the event of a change of the program's level.

        The program's levels are at the machine's usual speed. The event has both of them at the mean speed since the
        change: how long steps have taken since then, and how long they would have taken without the change. A drift
        has them at the present speed.
        """
        scale = self._machine.slowness
        if change.course != "drift":
            last_step = change.until_step or self.steps
            scale = self._machine.mean_slowness(change.since_step, last_step)
        event = self._change_event(change, scale)
        return event.model_copy(update={"part": change.part})

    def _machine_event(self, change: LevelChange) -> WatchEvent:
        """Return the event of a change of the machine's speed.

        The levels of such a change are those of a step of usual length. The event has them for a step of present
        length.
        """
        present_step_s = self.levels.level_s or self._machine.usual_step_s
        scale = present_step_s / self._machine.usual_step_s
        if change.course != "drift":
            # later corrections of the event keep its first scale
            scale = self._scales.setdefault(id(change), scale)
        event = self._change_event(change, scale)
        return event.model_copy(update={"in_all_parts": True})

    def _change_event(self, change: LevelChange, scale: float) -> WatchEvent:
        """Return the event of a change of level, with the levels multiplied by ``scale``."""
        identity = self._event_identity(
            change, change.found_step, self._end_time_s(change.found_step)
        )
        cause, cause_s = self._cause_of_level(change)
        return WatchEvent(
            **identity,
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

    def _event_identity(self, key: object, step: int, at_s: float) -> dict[str, Any]:
        """Return ``step`` and ``at_s`` from the first call for ``key``, as fields of its ``WatchEvent``.

        They identify the event when it is reported again.
        """
        if id(key) not in self._names:
            self._names[id(key)] = {"step": step, "at_s": at_s}
            self._named_objects.append(key)
        return self._names[id(key)]

    def _end_time_s(self, step: int) -> float:
        """Return when ``step``, or the last step if it is not in memory, ended, in seconds since 1970."""
        if step in self._numbers:
            return self._seconds_since_1970(self._ends_ns[self._numbers.index(step)])
        return self._seconds_since_1970(self._ends_ns[-1])

    def _cause_of_level(self, change: LevelChange) -> tuple[str | None, float | None]:
        """Return the cause of a change of level, and the seconds per step it explains; it must last like the level.

        The counters before the change are compared with those after it. Once they are no longer in memory, the cause
        that was found last is kept.
        """
        is_single_change = change.course is None
        if not is_single_change:
            return None, None
        readings_before = self._counters.between(0, change.since_step - 1)
        last_step = self.steps if change.until_step is None else change.until_step
        readings_after = self._counters.between(change.since_step, last_step)
        if len(readings_before) < 2 or len(readings_after) < 2 * _QUARTERS:
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
        cause = self._lasting_cause(odd, readings_after, usual, data_s)
        self._causes[id(change)] = cause
        return cause

    def _lasting_cause(
        self,
        odd: OddStep,
        readings: CounterTable,
        usual: StepCounters,
        data_s: tuple[float, float],
    ) -> tuple[str | None, float | None]:
        """Return the cause of a level, and the seconds per step that it explains; (None, None) if there is none.

        The cause must explain at least three of the four quarters of the level's steps.

        Args:
            odd: a step as long as the level, compared with the level before.
            readings: the readings of counters during the level, in order.
            usual: the counters per step at the level before.
            data_s: how long a step waited for its batch at the level before, and at this level.
        """
        # For each kind of cause, one entry for each quarter that it explains: the cause as text, and its seconds.
        causes_by_kind = defaultdict[str, list[str]](list)
        seconds_by_kind = defaultdict[str, list[float]](list)
        for indices in np.array_split(np.arange(len(readings)), _QUARTERS):
            first, last = int(indices[0]), int(indices[-1])
            quarter = counters_per_step(readings.part(first, last + 1))
            explained = explained_by(odd, quarter, usual, data_s, self.workers)
            cause = explained.cause
            if cause is not None and _is_worth_naming(cause, quarter):
                kind = cause_kind(cause)
                causes_by_kind[kind].append(cause)
                seconds_by_kind[kind].append(explained.cause_s or 0.0)
        main_kind = max(
            causes_by_kind, key=lambda kind: len(causes_by_kind[kind]), default=""
        )
        if len(causes_by_kind[main_kind]) < _FEWEST_QUARTERS:
            return None, None
        cause_s = float(np.mean(seconds_by_kind[main_kind]))
        last_cause = causes_by_kind[main_kind][-1]
        return last_cause, cause_s

    # -- between steps -------------------------------------------------------------------------------------------------

    def _duration_events(self, term: str, durations: Durations) -> list[WatchEvent]:
        """Return the events of long durations of ``term`` that are new, or have changed, since the last call."""
        events = []
        for changed in durations.take_changed():
            events.append(self._duration_event(term, changed))
        return events

    def _duration_event(self, term: str, durations: LongDurations) -> WatchEvent:
        """Return the event of long durations of ``term``, such as validations or checkpoints."""
        is_drift = durations.is_drift
        return WatchEvent(
            at_s=durations.at_s,
            # Kind, step and time identify an event. A drift may have the time of the single long duration that it
            # withdraws, but another step at which it was found.
            step=durations.found_step,
            kind=cast(Any, term),  # a term of the ledger that is also a kind of event
            now=durations.now_s,
            against=durations.against_s,
            since_step=durations.first_step if is_drift else None,
            until_step=durations.until_step,
            course="drift" if is_drift else None,
            times=durations.times,
            cost_s=None if is_drift else durations.excess_s,
            share=durations.share,
            withdrawn=durations.is_withdrawn,
        )

    def _memory_event(self, growth: MemoryGrowth) -> WatchEvent:
        """Return the event of growing memory: bytes per hour, and the seconds until the free memory is used up."""
        return WatchEvent(
            at_s=growth.at_s,
            step=growth.step,
            kind="memory",
            now=growth.bytes_per_s * 3600.0,
            full_in_s=self._full_in_s,
            since_step=growth.since_step,
            until_step=growth.until_step,
            grew_bytes=round(growth.grew_bytes),
            held_bytes=round(growth.now_bytes),
            withdrawn=growth.is_withdrawn,
        )


def _seconds_until_full(
    growth: MemoryGrowth, free_bytes: Callable[[], int | None]
) -> float | None:
    """Return in how many seconds ``growth`` uses up the free memory; None if it has ended, or if this is unknown."""
    if growth.until_step is not None or growth.bytes_per_s <= 0.0:
        return None
    free = free_bytes()
    return None if free is None else free / growth.bytes_per_s


def _is_worth_naming(cause: str, counters: StepCounters) -> bool:
    """Return whether a cause is large enough to be named: a few page faults, which take microseconds, are not."""
    return "page fault" not in cause or (counters.minor_faults or 0.0) >= _PAGES
