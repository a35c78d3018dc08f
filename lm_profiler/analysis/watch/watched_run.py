"""Events of a running training, from its steps, validations and memory as they come.

Times of single steps and levels are judged on the device's clock where there is one. A slow step is reported where
``conclude`` finds it odd in the steps around it, with the cause that the counters show.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.conclude import FINDINGS, conclude
from lm_profiler.analysis.evidence import Evidence
from lm_profiler.analysis.steps.odd_step_causes import EXPLAINED, cause_of_level
from lm_profiler.analysis.watch.detectors import LevelChanges, MemorySlope, SlowSteps, confirmed
from lm_profiler.analysis.watch.ledger import VALIDATION, NamedSpan
from lm_profiler.record.parts import PARTS, TIMED
from lm_profiler.record.run_record import OddStep, Settings, StepCounters
from lm_profiler.record.steps import StepRow, StepTable
from lm_profiler.record.watch_files import WatchEvent

# steps in memory: a change of level is confirmed in those around it, and a slow step is compared with its neighbours
_RING = 2400
_BEFORE = 1000  # steps before a suspected change that it is confirmed against
_AROUND = 200  # steps on either side of a slow one
_APART_S = 60.0  # seconds between two similar events; those in between are counted
_SLOW_ONCE, _FEWEST = 1.5, 4  # times the longest of this many before: validations, checkpoints, turns of an epoch
_LEAST_S, _LEAST_STEPS = 0.1, 10.0  # ... if it is also longer by this many seconds, and steps
_DATA = PARTS.index("data")
_ASKED = [each for each in FINDINGS if each[0] in ("steps", "figures", "causes of odd steps")]


@dataclass(eq=False)
class WatchedRun:
    """Takes a run's readings as they come, and returns events."""

    workers: int | None = None  # processes of the loader; None is unknown
    epoch_s: float = 0.0  # seconds since 1970 at 0 of the clock of the steps
    steps: int = 0
    levels: LevelChanges = field(default_factory=LevelChanges)
    slow: SlowSteps = field(default_factory=SlowSteps)
    memory: MemorySlope = field(default_factory=MemorySlope)
    _seconds: NDArray[np.float64] = field(default_factory=lambda: np.empty((0, len(TIMED))))
    _ns: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 2), np.int64))
    _counters: deque[StepCounters] = field(default_factory=lambda: deque(maxlen=_RING))
    _spans: deque[NamedSpan] = field(default_factory=lambda: deque(maxlen=_RING))
    _before: defaultdict[str, deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=20)))
    _reported_s: dict[tuple[object, ...], float] = field(default_factory=dict)
    _seen: Counter[tuple[object, ...]] = field(default_factory=Counter)
    _since: Counter[tuple[object, ...]] = field(default_factory=Counter)

    def add(
        self,
        ns: NDArray[np.int64],
        seconds: NDArray[np.float64],
        counters: Sequence[StepCounters] = (),
        spans: Sequence[NamedSpan] = (),
    ) -> list[WatchEvent]:
        """Take the next n steps: (n, 2) when they began and ended, and their (n, TIMED) seconds."""
        if not len(ns):
            return []
        known = np.where(np.isnan(seconds), 0.0, seconds)
        self.steps += len(ns)
        self._ns = np.concatenate([self._ns, ns])[-_RING:]
        self._seconds = np.concatenate([self._seconds, known])[-_RING:]
        self._counters.extend(counters)
        self._spans.extend(spans)
        slow = self.slow.add(known[:, -1])
        return self._emitted([*self._level(known[:, -1]), *(e for at in slow for e in self._slow_step(at + 1))])

    def skip(self, steps: int) -> None:
        """Skip traced steps, which no figure includes."""
        self.steps += steps
        self.slow.judged += steps
        self._seconds, self._ns = self._seconds[:0], self._ns[:0]

    @property
    def _first(self) -> int:
        return self.steps - len(self._seconds) + 1  # the number of the first step in memory, from 1

    def _at_s(self, step: int) -> float:
        """Return when ``step``, which is in memory, ended, in seconds since 1970."""
        return self.epoch_s + float(self._ns[min(max(step - self._first, 0), len(self._ns) - 1), 1]) * 1e-9

    def _level(self, step_s: NDArray[np.float64]) -> list[WatchEvent]:
        ago = self.levels.add(step_s)
        if ago is None:
            return []
        start = max(len(self._seconds) - ago - _BEFORE, 0)
        change = confirmed(self._first + start, self._seconds[start:], ago)
        if change is None:
            self.levels.doubt()
            return []
        self.levels = LevelChanges()  # a new reference
        self.levels.add(self._seconds[change.step - self._first :, -1])
        by = np.abs(change.after_s - change.before_s)[:-1]
        part = int(by.argmax())
        before_s, after_s = float(change.before_s[-1]), float(change.after_s[-1])
        differs_s = after_s - before_s
        odd = OddStep(step=change.step, step_s=after_s, ratio=after_s / before_s, part=PARTS[part], excess_s=differs_s)
        near = [each for each in self._counters if (each.step or 0) >= self._first + start]
        before = [each for each in near if (each.step or 0) < change.step]
        data_s = float(change.before_s[_DATA]), float(change.after_s[_DATA])
        odd = cause_of_level(odd, before, near[len(before) :], data_s, self.workers)
        named = PARTS[part] if by[part] >= EXPLAINED * abs(differs_s) else None
        event = WatchEvent(at_s=self._at_s(change.step), step=self.steps, kind="level", part=named, now=after_s)
        why = {"cause": odd.cause, "cause_s": odd.cause_s, "beside": odd.beside}
        return [event.model_copy(update={"against": before_s, "since_step": change.step, **why})]

    def _slow_step(self, step: int) -> list[WatchEvent]:
        at = step - self._first
        if not 0 <= at < len(self._seconds):
            return []
        around = slice(max(at - _AROUND, 0), at + _AROUND)
        first = self._first + around.start
        each_s = map(tuple, self._seconds[around].tolist())
        rows = StepTable.of(StepRow(at, "measure", seconds, seconds) for at, seconds in enumerate(each_s, first))
        near = [each for each in self._counters if each.step is not None and first <= each.step < first + len(rows)]
        settings = Settings(precision="", num_workers=self.workers)
        record = conclude(Evidence(rows=rows, counters=near, settings=settings), _ASKED)
        return [self._slow_event(odd) for odd in record.odd_steps if odd.step == step]

    def _slow_event(self, odd: OddStep) -> WatchEvent:
        excess_s = odd.step_s * (1.0 - 1.0 / odd.ratio) if odd.ratio else 0.0
        cause, cause_s = odd.cause, odd.cause_s
        named = self._named_in(*self._ns[odd.step - self._first].tolist())
        if named is not None and named[1] >= max(EXPLAINED * excess_s, cause_s or 0.0):
            cause, cause_s = named
        return WatchEvent(
            at_s=self._at_s(odd.step),
            step=odd.step,
            kind="slow step",
            part=odd.part,
            now=odd.step_s,
            against=odd.step_s / odd.ratio if odd.ratio else None,
            cause=cause,
            cause_s=None if cause_s is None else min(cause_s, excess_s),
            beside=odd.beside if cause is None else None,
        )

    def _named_in(self, begin_ns: int, end_ns: int) -> tuple[str, float] | None:
        """Return the innermost name that took longest between two instants, with its seconds."""
        inside = [span for span in self._spans if begin_ns <= span.begin_ns < end_ns and span.what != VALIDATION]
        longest = max(inside, key=lambda span: (span.ns, -span.begin_ns), default=None)
        if longest is None:
            return None
        within = [s for s in inside if s is not longest and longest.begin_ns <= s.begin_ns < longest.end_ns]
        inner = max(within, key=lambda span: span.ns, default=longest)
        if inner.ns > EXPLAINED * longest.ns:
            longest = inner
        return longest.what, longest.ns * 1e-9

    def outside(self, what: str, seconds: Sequence[float], at_s: float) -> list[WatchEvent]:
        """Take how long the last validations, checkpoints or turns of an epoch (``what``) took."""
        events, before = [], self._before[what]
        for each in seconds:
            usual = float(np.median(before)) if before else each
            long = each - usual >= max(_LEAST_S, _LEAST_STEPS * (self.levels.level_s or 0.0))
            if len(before) >= _FEWEST and each > _SLOW_ONCE * max(before) and long:
                events.append(WatchEvent(at_s=at_s, step=self.steps, kind=cast(Any, what), now=each, against=usual))
            else:
                before.append(each)
        return self._emitted(events)

    def held(self, at_s: float, held_bytes: int, free_bytes: Callable[[], int | None]) -> list[WatchEvent]:
        """Take the bytes that are held between steps; ``free_bytes`` asks what the machine has left."""
        per_s = self.memory.add(at_s, held_bytes)
        if per_s is None:
            return []
        self.memory = MemorySlope()
        full_in_s = None if (free := free_bytes()) is None else free / per_s
        grew = WatchEvent(at_s=at_s, step=self.steps, kind="memory", now=per_s * 3600.0, full_in_s=full_in_s)
        return self._emitted([grew])

    def _emitted(self, events: Iterable[WatchEvent]) -> list[WatchEvent]:
        """Return the ``events`` that are worth a line: two of each kind, and then one per minute."""
        emitted = []
        for event in events:
            key = (event.kind, event.part, event.cause)
            self._seen[key] += 1
            self._since[key] += 1
            if self._seen[key] <= 2 or event.at_s - self._reported_s[key] >= _APART_S:
                emitted.append(event.model_copy(update={"times": self._since[key]}))
                self._reported_s[key], self._since[key] = event.at_s, 0
        return emitted

    def repeats(self, event: WatchEvent) -> bool:
        """Return whether something like ``event`` was reported before it."""
        return self._seen[event.kind, event.part, event.cause] > 1
