"""Keeps each rank's phases and collectives in the measured steps, which tell who waits for whom."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from sys import intern
from typing import Any, ClassVar

import numpy as np

from lm_profiler.analysis.ranks.rank_timeline import ClockOffset, Collective, RankTimeline
from lm_profiler.analysis.ranks.shared_calls import told_apart
from lm_profiler.callbacks.instruments.instrument import Instrument
from lm_profiler.measure.boundary import UNGUARDED, Guard
from lm_profiler.measure.clocks.steps import StepMarks
from lm_profiler.measure.collectives.recorder import Arrivals
from lm_profiler.measure.collectives.reducer import bucket_bytes
from lm_profiler.record.quantities import counted

# most collectives whose arrivals a rank sends, at 25 bytes each: 1,024 ranks then send half a gigabyte together
MOST_CALLS = 20_000

_FULL = 0.75  # share of the flight recorder's ring buffer that may fill up before it is read

_BESIDE = "amid backward are more collectives than DDP has buckets, and their sizes do not tell which are its own"

UNKNOWN_WAITS = "who waits for whom is unknown"


@dataclass(eq=False)
class RanksWatch(Instrument):
    """Instrument that keeps the marks of the measured steps, and the calls in torch's flight recorder.

    The recorder is a ring buffer, so it is read between steps, before it overwrites what was not read.
    """

    arrivals: Arrivals | None  # reads the flight recorder; None where this torch has none
    rank: int  # this process's
    # returns the module that trains, as its strategy wrapped it; called when the steps are over
    wrapped: Callable[[], object] = lambda: None
    part: Guard = UNGUARDED
    facts: dict[str, Any] = field(default_factory=dict)
    name: str = "who waits for whom"
    stage: ClassVar[str] = "measure"  # the stage whose steps it keeps
    _steps: list[int] = field(default_factory=list)
    _marks: list[StepMarks] = field(default_factory=list)
    _since: int | None = None
    _due: int = 1

    def begin(self, stage: str) -> None:
        if self.arrivals is not None and self._since is None:
            self._since = 0
            self.arrivals.drain()  # calls before the first step belong to none

    def look(self, steps: int) -> None:
        """Read the recorder where it could overflow before the next look; ``steps`` have ended, warm-up or measured."""
        if self.arrivals is None or steps < self._due:
            return
        fresh = self.arrivals.drain()
        a_step = max(fresh / max(steps - (self._since or 0), 1), 1e-3)
        # The rest is left for steps that call more, and for validation. To read the whole ring takes some 15 ms.
        self._since, self._due = steps, steps + max(int(self.arrivals.room * _FULL / a_step), 1)

    def keep(self, stage: str, step: int, marks: StepMarks) -> None:
        """Keep the marks of a step of ``stage``."""
        if stage == self.stage:
            self._steps.append(step)
            self._marks.append(marks)

    def end(self, stage: str) -> None:
        if stage != self.stage or not self._marks:
            return
        if self.arrivals is not None:
            self._drain(self.arrivals)
        why_not = self._why_not()
        if why_not is None and self.arrivals is not None:
            timeline = self._told_apart(self._timeline(self.arrivals), self.arrivals)
            if timeline is not None:
                self.facts["timelines"] = [timeline]
                return
            why_not = _BESIDE
        if self.rank == 0 or (self.arrivals is not None and (self.arrivals.lost or self.arrivals.clock_was_set)):
            self.part.tell(f"{UNKNOWN_WAITS}: {why_not}")  # reasons that all ranks share are told by rank 0

    def _drain(self, arrivals: Arrivals) -> None:
        arrivals.drain()

    def _timeline(self, arrivals: Arrivals) -> RankTimeline:
        return timeline_of(self.rank, self._steps, self._marks, arrivals)

    def _told_apart(self, timeline: RankTimeline, arrivals: Arrivals) -> RankTimeline | None:
        """Return ``timeline`` with DDP's buckets told apart from other calls amid backward; None if they cannot be."""
        buckets = bucket_bytes(self.wrapped())
        if buckets is None:
            return timeline
        return told_apart(timeline, {(c.group, c.number): c.sent_bytes for c in arrivals.calls}, buckets)

    def _why_not(self) -> str | None:
        arrivals = self.arrivals
        if arrivals is None:
            return "this torch has no flight recorder"
        if arrivals.lost:
            return (
                f"a step calls more collectives than torch's flight recorder holds; it holds"
                f" {counted(arrivals.room, 'call')}, set TORCH_FR_BUFFER_SIZE to more"
            )
        if arrivals.clock_was_set:
            return "this machine's clock was set while steps were measured"
        if arrivals.room == 0 or arrivals.last < 0:  # no entry at all, not even of DDP's first broadcast
            return "torch's flight recorder is empty; where it is off, TORCH_FR_BUFFER_SIZE=2000 switches it on"
        if not arrivals.at_ns or arrivals.at_ns[-1] < self._marks[0].host_ns[0]:
            return "torch's flight recorder has no collective of the measured steps"
        return None

    def discard(self) -> None:
        """Do nothing: no object of training's was changed."""


def timeline_of(rank: int, steps: Sequence[int], marks: Sequence[StepMarks], arrivals: Arrivals) -> RankTimeline:
    """Return what ``rank`` did in ``steps``, with its ``arrivals`` from the last one before them.

    Where there are more than ``MOST_CALLS``, only the last steps are kept.
    """
    at_ns = np.array(arrivals.at_ns, dtype=np.int64)
    until = int(np.searchsorted(at_ns, marks[-1].host_ns[-1], "right"))
    before = np.searchsorted(at_ns, [each.host_ns[0] for each in marks])
    few = min(int(np.searchsorted(before, until - MOST_CALLS)), len(marks) - 1)
    since, marks = max(int(before[few]) - 1, 0), marks[few:]
    return RankTimeline(
        rank,
        socket.gethostname(),
        np.array(steps[few:], dtype=np.int64),
        np.cumsum([0, *(len(each.codes) for each in marks)], dtype=np.int64),
        np.array([code for each in marks for code in each.codes], dtype=np.uint8),
        np.array([at for each in marks for at in each.host_ns], dtype=np.int64),
        at_ns[since:until],
        # Interned, so that thousands of equal names are one string.
        [Collective(intern(call.group), call.number, intern(call.name)) for call in arrivals.calls[since:until]],
        ClockOffset(),
    )
