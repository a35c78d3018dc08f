"""What a search asks for, what it is told, and what it knows: the words between `improve` and whoever runs trials."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field

from lm_profiler.analysis.compare.ratio import RatioInterval
from lm_profiler.record.improve import Ended, TriedVerdict


@dataclass(frozen=True)
class Candidate:
    """A change that may make the step faster."""

    name: str  # as the table says it: ``bf16-mixed``, ``data.num_workers=4``
    options: Mapping[str, str]  # what the call gets more: text as written on the command line, by option
    group: str  # candidates of one group take each other's place (all values of one option)
    ceiling_s: float | None = None  # seconds of a step that it saves at most, where the first run tells
    may_change: str | None = None  # what it may change in the results; None where nothing


@dataclass(frozen=True)
class Ran:
    """The outcome of a run."""

    # of a step (mean of the measured ones), scaled to the first setting's tokens or samples, so that batches compare;
    # None where it did not get that far
    seconds: float | None
    took_s: float  # seconds of the budget that it took, start and end included
    failed: str | None = None  # in a few words, why it did not end well
    refused: str | None = None  # in a few words, why it was not begun: what the hardware lacks, or what would not fit
    memory_bytes: int | None = None  # its peak
    cut: bool = False  # whether the budget's end was its end: that says nothing of the setting
    out_of_memory: bool = False  # whether that may be why it failed: it said so, or was killed


@dataclass(frozen=True)
class Checked:
    """Whether a winner computes what it did before."""

    within: bool | None  # whether all distances are within the tolerance; None where that is unknown
    took_s: float = 0.0  # seconds of the budget that it took
    # distance of the mean loss of the first steps, over the same batches and seed, as a share
    loss: float | None = None
    gradients: float | None = None  # distance of the gradients from those in float32, as a share
    why: str | None = None  # in a few words: which tolerance it was, or why it is unknown


@dataclass(frozen=True)
class Compared:
    """A comparison, ended or under way: B is A with the candidate."""

    candidate: Candidate | None  # what was tried; None for the last comparison, of the final setting with the first
    a_options: Mapping[str, str]  # of A, beside those of the first setting
    b_options: Mapping[str, str]  # of B
    a: tuple[Ran, ...] = ()  # runs of A, in the order of the pairs
    b: tuple[Ran, ...] = ()  # runs of B
    # Of the ratio of seconds, B over A; None where too little is known. It holds at all looks together.
    interval: RatioInterval | None = None
    error: float = 0.05  # in how many of all tries an interval of it may be wrong, at any look
    verdict: TriedVerdict | None = None  # of the step's time, or why there is none; None while it is under way
    accepted: bool = False  # whether B is what the rest is tried on
    checked: Checked | None = None  # of the numbers; None where that was not asked
    why: str | None = None  # in a few words, where the verdict alone does not say it

    @property
    def pairs(self) -> int:
        """The number of pairs in which both runs ended well."""
        return min(len(seconds(self.a)), len(seconds(self.b)))

    @property
    def ratios(self) -> list[float]:
        """Seconds of B over seconds of A, for each pair."""
        return [b / a for a, b in zip(seconds(self.a), seconds(self.b), strict=False)]

    @property
    def a_s(self) -> float | None:
        """Seconds of a step of A: the geometric mean of its runs."""
        return geometric_mean(seconds(self.a)[: self.pairs])

    @property
    def b_s(self) -> float | None:
        """Seconds of a step of B: the geometric mean of its runs."""
        return geometric_mean(seconds(self.b)[: self.pairs])

    @property
    def saved_s(self) -> tuple[float, float, float] | None:
        """Seconds of a step that B saves, the least, and the most that the interval allows."""
        if self.interval is None or self.a_s is None:
            return None
        best, high, low = (self.a_s * (1.0 - x) for x in (self.interval.ratio, self.interval.low, self.interval.high))
        return best, low, high


@dataclass(frozen=True)
class Improvement:
    """The state of a search so far."""

    # the run of the first setting alone, before anything was compared; None until it has ended
    first: Ran | None = None
    # what has been accepted: options beside those of the first setting
    options: Mapping[str, str] = field(default_factory=dict)
    tried: tuple[Compared, ...] = ()  # comparisons in order; some may be under way
    left: tuple[Candidate, ...] = ()  # candidates that wait for their turn, in order (at the end: that had none)
    # the final setting against the first, anew; None where nothing was accepted or the budget did not last
    last: Compared | None = None
    spent_s: float = 0.0  # seconds of the budget
    # none while it goes on; ``done``: all was tried; ``failed``: the first setting does not run
    ended: Ended | None = None

    @property
    def accepted(self) -> tuple[Compared, ...]:
        """The way down, in order."""
        return tuple(one for one in self.tried if one.accepted)


@dataclass(frozen=True)
class Trial:
    """Asked for: a fresh process of the first setting with these options; the ``number``-th of them (from 0)."""

    options: Mapping[str, str]
    number: int
    search: Improvement = field(compare=False, repr=False)


@dataclass(frozen=True)
class Check:
    """Asked for: whether a winner's numbers are right, compared with those of the setting that it was tried on."""

    candidate: Candidate
    a_options: Mapping[str, str]
    b_options: Mapping[str, str]
    search: Improvement = field(compare=False, repr=False)


Question = Trial | Check
Improving = Generator[Question, Ran | Checked, Improvement]


def seconds(runs: Sequence[Ran]) -> list[float]:
    """Return the seconds of the runs that ended well."""
    return [run.seconds for run in runs if run.seconds is not None]


def geometric_mean(values: Sequence[float]) -> float | None:
    """Return the geometric mean; None where there are no values."""
    return math.exp(math.fsum(math.log(value) for value in values) / len(values)) if values else None
