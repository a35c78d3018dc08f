"""Divides the wall time of a whole fit into terms that add up to it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lm_profiler.record.parts import PARTS
from lm_profiler.record.watch_files import STEPS

# names of terms; the first two are also reasons for which a loop leaves its steps
VALIDATION, EPOCH = "validation", "epoch"
CHECKPOINTS, LOGGERS, EPOCH_TURN = "checkpoints", "loggers", "epoch turn"
INSTRUMENTS, STALLED, PAUSED = "own instruments", "stalled", "paused"
CLOSING, UNEXPLAINED = "closing", "unexplained"
WAITING, COMPILING, FIRST_STEP = "waiting for ranks", "compiling", "first step"

_LEAST_S = 1e-6  # shorter terms are left out

# the terms from which the time of compilation is moved to ``COMPILING``
COMPILED_IN = [f"{STEPS}{part}" for part in ("optimizer", "backward", "forward")]


# the name of a moment: after the end of its data, the loop continues with a batch that it had asked for in advance
LAST_BATCH = "last batch"


class NamedSpan(NamedTuple):
    """An interval of time with a name, such as that of a callback. Other spans may lie within it.

    A span of length 0 is a moment: ``EPOCH`` means that the loop reached the end of its data or that an epoch began,
    ``VALIDATION`` that the loop left its steps.
    """

    begin_ns: int
    end_ns: int
    what: str

    @property
    def ns(self) -> int:
        return self.end_ns - self.begin_ns


class SpansInOrder:
    """Spans sorted by their start, so that those of an interval are found without searching all of them."""

    def __init__(self, spans: Sequence[NamedSpan]) -> None:
        self._spans = sorted(spans, key=lambda span: span.begin_ns)
        self._begins_ns = [span.begin_ns for span in self._spans]

    def beginning(self, begin_ns: int, end_ns: int) -> Sequence[NamedSpan]:
        """Return the spans that begin between two instants, both included."""
        begin = bisect_left(self._begins_ns, begin_ns)
        end = bisect_right(self._begins_ns, end_ns)
        return self._spans[begin:end]

    def around(self, begin_ns: int, end_ns: int) -> Sequence[NamedSpan]:
        """Return the spans that begin between two instants, and the span before them, which may end there.

        The spans must not overlap.
        """
        begin = max(bisect_left(self._begins_ns, begin_ns) - 1, 0)
        end = bisect_right(self._begins_ns, end_ns)
        return self._spans[begin:end]


def spans_outside_steps(
    departures: Iterable[tuple[int, str]], checkpoint_instants_ns: Sequence[int] = ()
) -> list[NamedSpan]:
    """Return the departures of a loop from its steps, and its checkpoints, as named spans.

    Args:
        departures: the instant and the reason of each departure.
        checkpoint_instants_ns: the start of the first checkpoint, its end, the start of the second, and so on.
    """
    spans = []
    for instant_ns, reason in departures:
        spans.append(NamedSpan(instant_ns, instant_ns, reason))
    begins_ns = checkpoint_instants_ns[::2]
    ends_ns = checkpoint_instants_ns[1::2]
    for begin_ns, end_ns in zip(begins_ns, ends_ns, strict=False):
        # the last checkpoint may not have ended
        spans.append(NamedSpan(begin_ns, end_ns, CHECKPOINTS))
    return spans


@dataclass(eq=False)
class Ledger:
    """Divides the time since ``began_ns`` into terms.

    The time of nested spans belongs to the innermost one: a checkpoint that a callback writes after validation counts
    as checkpoint. Time between steps that is in no span counts as epoch boundary if an epoch began there, and otherwise
    as unexplained.
    """

    began_ns: int
    # the seconds of each term
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    last_ns: int = 0  # the instant until which all time has been added
    # the seconds of each validation, checkpoint and epoch boundary, until the caller takes them out
    longest: dict[str, list[float]] = field(default_factory=dict)
    # spans that may lie in steps which have not been added yet
    _waiting_spans: list[NamedSpan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.last_ns = self.last_ns or self.began_ns

    def add_until(self, now_ns: int, term: str) -> None:
        """Add the time since the last entry to ``term``."""
        self.seconds[term] += max(now_ns - self.last_ns, 0) * 1e-9
        self.last_ns = max(now_ns, self.last_ns)

    def move(self, seconds: float, term: str, sources: Sequence[str]) -> None:
        """Move ``seconds`` (or fewer if there are fewer) from ``sources`` to ``term``, from the last source first."""
        for source in reversed(sources):
            moved_s = min(seconds, max(self.seconds[source], 0.0))
            self.seconds[source] -= moved_s
            self.seconds[term] += moved_s
            seconds -= moved_s

    def close(self, now_ns: int) -> None:
        """Add the time from the last step to the end of fit; the time outside all spans counts as ``CLOSING``."""
        outer_spans = self._add_own_times(self._waiting_spans)
        named_s = sum(span.ns for span in outer_spans) * 1e-9
        self.add_until(now_ns, CLOSING)
        self.seconds[CLOSING] -= named_s

    def add(
        self,
        begin_ns: NDArray[np.int64],
        end_ns: NDArray[np.int64],
        host_s: NDArray[np.float64],
        spans: Sequence[NamedSpan],
    ) -> None:
        """Add steps, and the spans that ended since the last call.

        A span counts for the term of its name. So its time is subtracted from the time within which it lies: the time
        that the loop spent away from a step, the step's part ``other``, or the gap before a step. The rest of the time
        away counts as validation. The rest of a gap counts as epoch boundary if an epoch began in it.

        Args:
            begin_ns: (n,) when the steps began.
            end_ns: (n,) when they ended.
            host_s: (n, TIMED) the seconds of their parts, and last of the whole step, on the host's clock.
            spans: the spans in the order in which they ended.
        """
        self._waiting_spans += spans
        if not len(begin_ns):
            return
        spans_until_end = self._take_spans_until(int(end_ns[-1]))
        outer_spans = self._add_own_times(spans_until_end)
        # (n,) how long the loop had left each step before it ended, for example for validation
        away_s = (end_ns - begin_ns) * 1e-9 - host_s[:, -1]
        departures_ns = _departures_for_validation(begin_ns, spans_until_end)

        # (n,) the time before each step since the step before it
        gaps_ns = begin_ns - np.concatenate([[self.last_ns], end_ns[:-1]])
        unnamed_gaps_s = gaps_ns * 1e-9
        step_ends_ns = end_ns.tolist()
        unnamed_away_s = float(away_s.sum())
        for span, step in zip(
            outer_spans, _last_steps_before(outer_spans, begin_ns), strict=True
        ):
            seconds = span.ns * 1e-9
            departure_ns = departures_ns.get(step)
            is_away = departure_ns is not None and _begins_within(
                span, departure_ns, away_s[step]
            )
            is_in_step = step >= 0 and span.begin_ns < step_ends_ns[step]
            if is_away:
                unnamed_away_s -= seconds
            elif is_in_step:
                self.seconds[f"{STEPS}other"] -= seconds
            else:
                following_step = min(step + 1, len(gaps_ns) - 1)
                unnamed_gaps_s[following_step] -= seconds

        for part, seconds in zip(PARTS, host_s.sum(axis=0).tolist(), strict=False):
            self.seconds[f"{STEPS}{part}"] += seconds
        # The time after validation until the loop asks for the next batch belongs to validation.
        self.seconds[VALIDATION] += max(unnamed_away_s, 0.0)
        for step in _steps_after_epoch_boundaries(begin_ns, spans_until_end):
            self.seconds[EPOCH_TURN] += max(float(unnamed_gaps_s[step]), 0.0)
            self.longest.setdefault(EPOCH_TURN, []).append(float(gaps_ns[step]) * 1e-9)
        self.last_ns = int(end_ns[-1])

    def _take_spans_until(self, end_ns: int) -> list[NamedSpan]:
        """Remove and return the waiting spans that began before ``end_ns``."""
        spans = []
        waiting_spans = []
        for span in self._waiting_spans:
            if span.begin_ns < end_ns:
                spans.append(span)
            else:
                waiting_spans.append(span)
        self._waiting_spans = waiting_spans
        return spans

    def _add_own_times(self, spans: Sequence[NamedSpan]) -> list[NamedSpan]:
        """Add the time of each span, without the spans within it, to the term of its name; return the outermost spans.

        ``spans`` are in the order in which they ended, so that the spans within another one come before it.
        """
        outer_spans: list[NamedSpan] = []
        for span in spans:
            if not span.ns:
                continue
            inner_ns = 0
            while outer_spans and outer_spans[-1].begin_ns >= span.begin_ns:
                inner_ns += outer_spans.pop().ns
            outer_spans.append(span)
            self.seconds[span.what] += (span.ns - inner_ns) * 1e-9
            if span.what in (VALIDATION, CHECKPOINTS):
                self.longest.setdefault(span.what, []).append(span.ns * 1e-9)
        return outer_spans

    def terms(self, now_ns: int) -> dict[str, float]:
        """Return the seconds of each term, the largest first; with ``UNEXPLAINED`` they add up to the wall time."""
        terms = {}
        for term, seconds in sorted(self.seconds.items(), key=lambda item: -item[1]):
            if abs(seconds) >= _LEAST_S:
                terms[term] = seconds
        wall_s = (now_ns - self.began_ns) * 1e-9
        terms[UNEXPLAINED] = wall_s - sum(terms.values())
        return terms


def _is_moment(span: NamedSpan, reason: str) -> bool:
    """Return whether ``span`` is the moment at which the loop left its steps for ``reason``."""
    return span.ns == 0 and span.what == reason


def _begins_within(span: NamedSpan, since_ns: int, seconds: float) -> bool:
    """Return whether ``span`` begins in the ``seconds`` that follow ``since_ns``."""
    return 0 <= span.begin_ns - since_ns < seconds * 1e9


def _last_steps_before(
    spans: Sequence[NamedSpan], begin_ns: NDArray[np.int64]
) -> list[int]:
    """Return for each span the index of the last step that began before it, or with it; -1 if there is none."""
    span_begins_ns = np.array([span.begin_ns for span in spans], np.int64)
    last_steps: list[int] = (
        np.searchsorted(begin_ns, span_begins_ns, "right") - 1
    ).tolist()
    return last_steps


def _departures_for_validation(
    begin_ns: NDArray[np.int64], spans: Sequence[NamedSpan]
) -> dict[int, int]:
    """Return when (ns) the loop first left a step for validation, by the index of the step.

    A departure before the first step, such as for the validation before training, was from none of these steps.
    """
    departures_ns: dict[int, int] = {}
    departures = [span for span in spans if _is_moment(span, VALIDATION)]
    for span, step in zip(
        departures, _last_steps_before(departures, begin_ns), strict=True
    ):
        if step >= 0:
            departures_ns.setdefault(step, span.begin_ns)
    return departures_ns


def _steps_after_epoch_boundaries(
    begin_ns: NDArray[np.int64], spans: Sequence[NamedSpan]
) -> list[int]:
    """Return the indices of the steps before which an epoch began."""
    steps = set()
    for span in spans:
        if _is_moment(span, EPOCH):
            step = int(np.searchsorted(begin_ns, span.begin_ns))
            if step < len(begin_ns):
                steps.add(step)
    return sorted(steps)
