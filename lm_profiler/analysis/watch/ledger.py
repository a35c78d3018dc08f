"""Where the wall time of a whole fit went, in terms that add up to it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lm_profiler.record.parts import PARTS
from lm_profiler.record.watch_files import STEPS

VALIDATION, EPOCH = "validation", "epoch"  # why a loop leaves its steps
CHECKPOINTS, LOGGERS, EPOCH_TURN = "checkpoints", "loggers", "epoch turn"
INSTRUMENTS, STALLED, PAUSED = "own instruments", "stalled", "paused"
CLOSING, UNEXPLAINED = "closing", "unexplained"
WAITING, COMPILING, FIRST_STEP = "waiting for ranks", "compiling", "first step"

COMPILED_IN = [f"{STEPS}{part}" for part in ("optimizer", "backward", "forward")]


class NamedSpan(NamedTuple):
    """A span of time with a name, such as a callback's; others may lie within it.

    A span of no length is a moment: an ``EPOCH`` began, or the loop left its steps for ``VALIDATION``.
    """

    begin_ns: int
    end_ns: int
    what: str

    @property
    def ns(self) -> int:
        return self.end_ns - self.begin_ns


def passed(went: Iterable[tuple[int, str]], saved: Sequence[int] = ()) -> list[NamedSpan]:
    """Return the moments at which a loop ``went`` outside, and its checkpoints, from pairs of instants in ``saved``."""
    checkpoints = zip(saved[::2], saved[1::2], strict=False)
    return [*(NamedSpan(at, at, what) for at, what in went), *(NamedSpan(*ends, CHECKPOINTS) for ends in checkpoints)]


@dataclass(eq=False)
class Ledger:
    """Adds up where the time went since ``began_ns``.

    Time belongs to the innermost name: a checkpoint that a callback writes after validation is checkpoint. Time with
    no name outside of a step is the turn of an epoch if one began there; else it is unexplained.
    """

    began_ns: int
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    last_ns: int = 0
    # seconds of each validation, checkpoint and turn of an epoch since the last call that took them
    longest: dict[str, list[float]] = field(default_factory=dict)
    _later: list[NamedSpan] = field(default_factory=list)  # spans that may lie in steps that are not known yet

    def __post_init__(self) -> None:
        self.last_ns = self.last_ns or self.began_ns

    def until(self, now_ns: int, what: str) -> None:
        """Add all time since the last entry to ``what``."""
        self.seconds[what] += max(now_ns - self.last_ns, 0) * 1e-9
        self.last_ns = max(now_ns, self.last_ns)

    def move(self, seconds: float, what: str, parts: Sequence[str]) -> None:
        """Move ``seconds``, or as many as there are, from ``parts`` to ``what``; the last of ``parts`` gives first."""
        for part in reversed(parts):
            given_s = min(seconds, max(self.seconds[part], 0.0))
            self.seconds[part] -= given_s
            self.seconds[what] += given_s
            seconds -= given_s

    def close(self, now_ns: int) -> None:
        """Add the time from the last step to the end of fit."""
        named_s = sum(span.ns for span in self._outer(self._later)) * 1e-9
        self.until(now_ns, CLOSING)
        self.seconds[CLOSING] -= named_s

    def add(
        self,
        begin_ns: NDArray[np.int64],
        end_ns: NDArray[np.int64],
        host_s: NDArray[np.float64],
        spans: Sequence[NamedSpan],
    ) -> None:
        """Add n steps, their instants (n,) and seconds (n, TIMED), and ``spans`` since the last call as they ended."""
        self._later += spans
        if not len(begin_ns):
            return
        now = [span for span in self._later if span.begin_ns < end_ns[-1]]
        self._later = [span for span in self._later if span.begin_ns >= end_ns[-1]]
        turns_ns, left_ns = (
            [span.begin_ns for span in now if not span.ns and span.what == w] for w in (EPOCH, VALIDATION)
        )
        outer = self._outer(now)
        gaps_ns = begin_ns - np.concatenate([[self.last_ns], end_ns[:-1]])
        away_s = (end_ns - begin_ns) * 1e-9 - host_s[:, -1]  # outside within a step, as in validation
        left_at = np.searchsorted(begin_ns, left_ns, "right") - 1
        away = {int(at): ns for at, ns in zip(left_at[::-1], left_ns[::-1], strict=True)}
        places = np.searchsorted(begin_ns, [span.begin_ns for span in outer], "right") - 1
        in_step_s, rest_away_s = 0.0, float(away_s.sum())
        gap_named_s = np.zeros(len(gaps_ns))
        for place, span in zip(places.tolist(), outer, strict=True):
            seconds = span.ns * 1e-9
            if place in away and 0 <= span.begin_ns - away[place] < away_s[place] * 1e9:
                rest_away_s -= seconds
            elif place >= 0 and span.begin_ns < end_ns[place]:
                in_step_s += seconds
            else:
                gap_named_s[min(place + 1, len(gaps_ns) - 1)] += seconds
        for at, part in enumerate(PARTS):
            self.seconds[f"{STEPS}{part}"] += float(host_s[:, at].sum())
        self.seconds[f"{STEPS}other"] -= in_step_s
        turned = np.unique(np.searchsorted(begin_ns, turns_ns))
        rest_s = np.maximum(gaps_ns * 1e-9 - gap_named_s, 0.0)
        for at in turned[turned < len(rest_s)].tolist():
            self.seconds[EPOCH_TURN] += float(rest_s[at])
            self.longest.setdefault(EPOCH_TURN, []).append(float(gaps_ns[at]) * 1e-9)
        # The time after validation until the loop asks for the next batch belongs to validation.
        self.seconds[VALIDATION] += max(rest_away_s, 0.0)
        self.last_ns = int(end_ns[-1])

    def _outer(self, spans: Sequence[NamedSpan]) -> list[NamedSpan]:
        """Add each span's own time to its name, without that of spans within it; return the outermost spans."""
        outer: list[NamedSpan] = []
        for span in (each for each in spans if each.ns):
            inside_ns = 0
            while outer and outer[-1].begin_ns >= span.begin_ns:  # what lies within a span ended before it
                inside_ns += outer.pop().ns
            outer.append(span)
            self.seconds[span.what] += (span.ns - inside_ns) * 1e-9
            if span.what in (VALIDATION, CHECKPOINTS):
                self.longest.setdefault(span.what, []).append(span.ns * 1e-9)
        return outer

    def terms(self, now_ns: int) -> dict[str, float]:
        """Return the seconds of each term, the largest first; they add up to the wall time until ``now_ns``."""
        wall_s = (now_ns - self.began_ns) * 1e-9
        terms = sorted(self.seconds.items(), key=lambda term: -term[1])
        known = {what: seconds for what, seconds in terms if abs(seconds) >= 1e-6}
        return {**known, UNEXPLAINED: wall_s - sum(known.values())}
