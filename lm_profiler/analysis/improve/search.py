"""What `improve` tries next: a generator that asks for runs, is told how they went, and ends with the search.

It has no clock and no chance of its own, so the same answers give the same search again: a search that was killed goes
on when the runs that it had are told anew.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lm_profiler.analysis.compare.ratio import RatioInterval, change
from lm_profiler.analysis.improve.decision import anytime_interval
from lm_profiler.record.improve import Ended, TriedVerdict

ERROR = 0.05
"""Share of all searches that may accept a change which does not make the step faster."""

MOST_PAIRS = 12
"""Of runs in one comparison."""

LAST_PAIRS = 4
"""Of runs that compare the final setting with the first anew."""


@dataclass(frozen=True)
class Candidate:
    """A change that may make the step faster.

    Attributes:
        name: As the table says it: ``bf16-mixed``, ``data.num_workers=4``.
        options: What the call gets more: text as written on the command line, by option.
        group: Candidates of one group take each other's place (all values of one option).
        ceiling_s: Seconds of a step that it saves at most, where the first run tells.
        may_change: What it may change in the results; None where nothing.
    """

    name: str
    options: Mapping[str, str]
    group: str
    ceiling_s: float | None = None
    may_change: str | None = None


@dataclass(frozen=True)
class Ran:
    """How a run went.

    Attributes:
        seconds: Of a step (median of the measured ones), scaled to the first setting's tokens or samples, so that
            batches compare; None where it did not get that far.
        took_s: Seconds of the budget that it took, start and end included.
        failed: In a few words, why it did not end well.
        refused: In a few words, why it was not begun: what the hardware lacks, or what would not fit.
        memory_bytes: Its peak.
    """

    seconds: float | None
    took_s: float
    failed: str | None = None
    refused: str | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Checked:
    """Whether a winner computes what it did before.

    Attributes:
        within: Whether all distances are within the tolerance; None where that is unknown.
        took_s: Seconds of the budget that it took.
        loss: Largest distance of the loss over the same batches and seed, as a share.
        gradients: Distance of the gradients from those in float32, as a share.
        why: In a few words: which tolerance it was, or why it is unknown.
    """

    within: bool | None
    took_s: float = 0.0
    loss: float | None = None
    gradients: float | None = None
    why: str | None = None


@dataclass(frozen=True)
class Compared:
    """A comparison, ended or under way: B is A with the candidate.

    Attributes:
        candidate: What was tried; None for the last comparison, of the final setting with the first.
        a_options: Of A, beside those of the first setting.
        b_options: Of B.
        a: Runs of A, in the order of the pairs.
        b: Runs of B.
        interval: Of the ratio of seconds, B over A; None where too little is known. It holds whenever it is looked at.
        verdict: Of the step's time, or why there is none; None while it is under way.
        accepted: Whether B is what the rest is tried on.
        checked: Of the numbers; None where that was not asked.
        why: In a few words, where the verdict alone does not say it.
    """

    candidate: Candidate | None
    a_options: Mapping[str, str]
    b_options: Mapping[str, str]
    a: tuple[Ran, ...] = ()
    b: tuple[Ran, ...] = ()
    interval: RatioInterval | None = None
    verdict: TriedVerdict | None = None
    accepted: bool = False
    checked: Checked | None = None
    why: str | None = None

    @property
    def pairs(self) -> int:
        """Of runs, both of which ended well."""
        return min(len(seconds(self.a)), len(seconds(self.b)))

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
    """What is known so far.

    Attributes:
        first: The run of the first setting alone, before anything was compared; None until it has ended.
        options: What has been accepted: options beside those of the first setting.
        tried: Comparisons in order; the last may be under way.
        left: Candidates that wait for their turn, in order (at the end: that had none).
        last: The final setting against the first, anew; None where nothing was accepted or the budget did not last.
        spent_s: Seconds of the budget.
        ended: None while it goes on; ``done``: all was tried; ``failed``: the first setting does not run.
    """

    first: Ran | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    tried: tuple[Compared, ...] = ()
    left: tuple[Candidate, ...] = ()
    last: Compared | None = None
    spent_s: float = 0.0
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


Asked = Trial | Check
Improving = Generator[Asked, Ran | Checked, Improvement]


def improve(candidates: Sequence[Candidate], budget_s: float, accept_numerics: bool = False) -> Improving:
    """Asks for runs and checks; is sent a ``Ran`` for each ``Trial`` and a ``Checked`` for each ``Check``.

    The largest ceiling goes first, unknown ones after the known. What wins is kept, and the rest is tried on top of it.
    The budget is of seconds that runs and checks took; a run under way is not cut.
    """
    return _Searcher(candidates, budget_s, accept_numerics).search()


def seconds(runs: Sequence[Ran]) -> list[float]:
    """Of those that ended well."""
    return [run.seconds for run in runs if run.seconds is not None]


def geometric_mean(values: Sequence[float]) -> float | None:
    """None of no values."""
    return math.exp(math.fsum(math.log(value) for value in values) / len(values)) if values else None


class _Searcher:
    """The state of a search between two questions."""

    def __init__(self, candidates: Sequence[Candidate], budget_s: float, accept_numerics: bool) -> None:
        self.now = Improvement(left=tuple(sorted(candidates, key=_by_ceiling)))
        self.budget_s, self.accept_numerics = budget_s, accept_numerics
        self.error = ERROR / max(1, len(candidates))
        self.numbers: Counter[frozenset[tuple[str, str]]] = Counter()
        self.kept: dict[str, Candidate] = {}

    def search(self) -> Improving:
        first = yield from self.run({})
        self.now = replace(self.now, first=first)
        if first.seconds is None:
            return replace(self.now, ended="failed")
        while self.now.left and self.pairs_left() > LAST_PAIRS:
            candidate, *left = self.now.left
            self.now = replace(self.now, left=tuple(left))
            yield from self.try_(candidate)
        if self.now.accepted:
            last = yield from self.compare(Compared(None, {}, self.now.options), self.error, LAST_PAIRS)
            self.now = replace(self.now, last=last, tried=self.now.tried[:-1])
        return replace(self.now, ended="budget" if self.now.left else "done")

    def try_(self, candidate: Candidate) -> Generator[Asked, Ran | Checked, None]:
        kept = {**self.kept, candidate.group: candidate}
        options = {option: text for one in kept.values() for option, text in one.options.items()}
        most = max(2, (self.pairs_left() - LAST_PAIRS) // (len(self.now.left) + 1))
        tried = yield from self.compare(
            Compared(candidate, self.now.options, options), self.error, min(most, MOST_PAIRS)
        )
        if tried.verdict == "FASTER":
            tried = yield from self.check(candidate, tried)
        if tried.accepted:
            self.kept = kept
            self.now = replace(self.now, options=options)
        self.tell(tried)

    def check(self, candidate: Candidate, tried: Compared) -> Generator[Asked, Ran | Checked, Compared]:
        checked = yield Check(candidate, tried.a_options, tried.b_options, self.now)
        assert isinstance(checked, Checked)
        self.now = replace(self.now, spent_s=self.now.spent_s + checked.took_s)
        right = checked.within or (checked.within is None and candidate.may_change is None)
        if right or self.accept_numerics:
            return replace(tried, checked=checked, accepted=True)
        return replace(tried, checked=checked, verdict="NUMERICS", why=checked.why)

    def compare(self, tried: Compared, error: float, most: int) -> Generator[Asked, Ran | Checked, Compared]:
        """Pairs of runs, A first and B first in turns, until the interval decides."""
        self.now = replace(self.now, tried=(*self.now.tried, tried))
        while tried.verdict is None:
            for b in (False, True) if tried.pairs % 2 == 0 else (True, False):
                ran = yield from self.run(tried.b_options if b else tried.a_options)
                tried = replace(tried, b=(*tried.b, ran)) if b else replace(tried, a=(*tried.a, ran))
                tried = judged(tried, error, most)
                self.tell(tried)
                if tried.verdict is not None:
                    break
        return tried

    def run(self, options: Mapping[str, str]) -> Generator[Asked, Ran | Checked, Ran]:
        key = frozenset(options.items())
        ran = yield Trial(options, self.numbers[key], self.now)
        assert isinstance(ran, Ran)
        self.numbers[key] += 1
        self.now = replace(self.now, spent_s=self.now.spent_s + ran.took_s)
        return ran

    def tell(self, tried: Compared) -> None:
        self.now = replace(self.now, tried=(*self.now.tried[:-1], tried))

    def pairs_left(self) -> int:
        """That the budget has room for, if they take as long as the runs so far."""
        runs = sum(self.numbers.values())
        return int((self.budget_s - self.now.spent_s) / (2.0 * self.now.spent_s / runs))


def judged(tried: Compared, error: float, most: int) -> Compared:
    """With its interval and, once that decides or ``most`` pairs have run, its verdict."""
    for side, runs in (("", tried.b), ("what it is compared with ", tried.a)):
        if runs and runs[-1].seconds is None:
            refused = runs[-1].refused
            verdict: TriedVerdict = "FAILED" if refused is None else "REFUSED"
            return replace(tried, verdict=verdict, why=f"{side}{refused or runs[-1].failed or 'has no measured step'}")
    if len(tried.a) != len(tried.b):
        return tried
    interval = anytime_interval(seconds(tried.a), seconds(tried.b), error)
    word = change(interval)
    if word != "UNCLEAR":
        return replace(tried, interval=interval, verdict=word)
    return replace(tried, interval=interval, verdict="UNDECIDED" if tried.pairs >= most else None)


def _by_ceiling(candidate: Candidate) -> float:
    return math.inf if candidate.ceiling_s is None else -candidate.ceiling_s
