"""What `improve` tries next: a generator that asks for trials, is told how they went, and ends with what it found.

It has no clock and no chance of its own, so the same answers give the same search again: a search that was killed goes
on when the answers that it had are told anew.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace

from lm_profiler.analysis.compare.ratio import change
from lm_profiler.analysis.improve.decision import FEWEST_PAIRS, anytime_interval, hopeless, spread
from lm_profiler.analysis.improve.trials import (
    Candidate,
    Check,
    Checked,
    Compared,
    Improvement,
    Improving,
    Question,
    Ran,
    Trial,
    seconds,
)
from lm_profiler.record.improve import TriedVerdict

ERROR = 0.05
"""Share of all searches that may accept a change which does not make the step faster."""

MOST_PAIRS = 40
"""Of runs in one comparison."""

SHARE = 4
"""Pairs that a comparison may have, however many wait: two say little of what saves 10 %."""

LAST_PAIRS = 6
"""Of runs that compare the final setting with the first anew. The time of one pair more is kept for them, for numbers
are checked and runs may take longer than they did; or of a quarter of the budget's pairs, where that is fewer."""

_SETTLED = ("NUMERICS", "FAILED")
"""Of these another setting would hardly change anything."""

_UNLIKELY = "more pairs would hardly show it to be faster"
_ENDED = "the budget ended it"


def improve(candidates: Sequence[Candidate], budget_s: float, accept_numerics: bool = False) -> Improving:
    """Asks for runs and checks; is sent a ``Ran`` for each ``Trial`` and a ``Checked`` for each ``Check``.

    The group with the largest ceiling goes first, unknown ones after the known, and in it what has the fewest options.
    What wins is kept, and the rest is tried on top of it. What contains a change that failed is refused.
    Where budget is left, comparisons that did not decide go on, and what was tried on an earlier setting is tried on
    the latest. The budget is of seconds that runs and checks took: no pair is begun that would not end in time, by the
    runs so far, and a run that was cut decides nothing.
    """
    return _Searcher(candidates, budget_s, accept_numerics).search()


class _Searcher:
    """The state of a search between two questions."""

    def __init__(self, candidates: Sequence[Candidate], budget_s: float, accept_numerics: bool) -> None:
        self.now = Improvement(left=_ordered(candidates))
        self.budget_s, self.accept_numerics = budget_s, accept_numerics
        self.candidates = len(candidates)
        self.kept: dict[str, Candidate] = {}
        self.runs: dict[frozenset[tuple[str, str]], list[Ran]] = {}
        self.kept_s = 0.0

    def search(self) -> Improving:
        first = yield from self.run({})
        self.now = replace(self.now, first=first)
        if first.seconds is None:
            return replace(self.now, ended="budget" if first.cut else "failed")
        self.kept_s = max(FEWEST_PAIRS, min(LAST_PAIRS + 1, self.room() // 4)) * self.pair_s()
        while (turn := self.next()) and (self.room() >= FEWEST_PAIRS or self.clear(turn)):
            yield from self.try_(turn)
        last = Compared(None, {}, self.now.options)
        if self.now.accepted and (pairs := int(self.left_s / self.pair_s(last))) >= FEWEST_PAIRS:
            yield from self.compare(last, min(LAST_PAIRS, pairs))
        unchecked = bool(self.now.accepted) and self.now.last is None
        cut = any(one.why == _ENDED for one in self.latest())
        return replace(self.now, ended="budget" if turn or unchecked or cut else "done")

    def next(self) -> Compared | None:
        """What is clear by now; else what nobody has tried; else the most promising; else what was tried before."""
        here = sorted(self.open(), key=_ratio)
        for one in here:
            if self.clear(one):
                return one
        if self.now.left:
            return self.on_top(self.now.left[0])
        if here:
            return here[0]
        earlier = [one for one in self.latest() if not one.accepted and one.verdict not in _SETTLED]
        again = [self.on_top(one.candidate) for one in earlier if one.candidate and one.a_options != self.now.options]
        return next((one for one in again if one.b_options != self.now.options and not self.failed_in(one)), None)

    def failed_in(self, compared: Compared) -> Candidate | None:
        """A change that this one contains and that failed, but not for memory, which the rest of it may save."""
        options = {} if compared.candidate is None else compared.candidate.options
        broken = [one.candidate for one in self.latest() if one.b and one.b[-1].failed and not one.b[-1].out_of_memory]
        return next((of for of in broken if of is not None and of.options.items() < options.items()), None)

    def latest(self) -> list[Compared]:
        """Of each candidate."""
        return list({one.candidate.name: one for one in self.now.tried if one.candidate is not None}.values())

    def open(self) -> list[Compared]:
        """Comparisons with the latest setting that more pairs may decide."""
        return [one for one in self.latest() if one.a_options == self.now.options and _may_go_on(one)]

    def clear(self, compared: Compared) -> bool:
        """Whether it is FASTER by what the others have shown meanwhile of how far processes differ."""
        return compared.pairs > 0 and self.judged(compared, MOST_PAIRS).verdict == "FASTER"

    def on_top(self, candidate: Candidate) -> Compared:
        """Of the candidate with the latest setting, where it takes the place of what its group had."""
        kept = [one for group, one in self.kept.items() if group != candidate.group]
        options = {option: text for one in (*kept, candidate) for option, text in one.options.items()}
        return Compared(candidate, self.now.options, options)

    def try_(self, compared: Compared) -> Generator[Question, Ran | Checked, None]:
        """A comparison to its verdict, or to the end of its share of the budget."""
        candidate = compared.candidate
        assert candidate is not None
        waiting = len(self.now.left) or len(self.open())
        share = min(self.room(), max(SHARE, self.room() // max(1, waiting)))
        self.now = replace(
            self.now,
            left=tuple(one for one in self.now.left if one != candidate),
            tried=(*(one for one in self.now.tried if one is not compared), compared),
        )
        if (failed := self.failed_in(compared)) is not None:
            self.tell(replace(compared, verdict="REFUSED", why=f"{failed.name} FAILED"))
            return
        compared = yield from self.compare(compared, min(MOST_PAIRS, compared.pairs + share))
        if compared.verdict == "FASTER":
            compared = yield from self.check(candidate, compared)
        if compared.accepted:
            self.kept.pop(candidate.group, None)
            self.kept[candidate.group] = candidate  # behind the others: where both set an option, the later one counts
            self.now = replace(self.now, options=compared.b_options)
        self.tell(compared)

    def check(self, candidate: Candidate, compared: Compared) -> Generator[Question, Ran | Checked, Compared]:
        checked = yield Check(candidate, compared.a_options, compared.b_options, self.now)
        assert isinstance(checked, Checked)
        self.now = replace(self.now, spent_s=self.now.spent_s + checked.took_s)
        right = checked.within or (checked.within is None and candidate.may_change is None)
        if right or self.accept_numerics:
            return replace(compared, checked=checked, accepted=True, why=checked.why)
        return replace(compared, checked=checked, verdict="NUMERICS", why=checked.why)

    def compare(self, compared: Compared, most: int) -> Generator[Question, Ran | Checked, Compared]:
        """Pairs of runs, B first and A first in turns, until the interval decides."""
        if compared.pairs:
            compared = self.judged(compared, most)
        while compared.verdict is None:
            if not self.has_time_for(compared):
                compared = replace(compared, verdict="UNDECIDED", why=_ENDED)
                self.tell(compared)
                break
            for side in "ba" if len(compared.a) % 2 == 0 else "ab":
                ran = yield from self.run(compared.b_options if side == "b" else compared.a_options)
                a, b = (compared.a, (*compared.b, ran)) if side == "b" else ((*compared.a, ran), compared.b)
                compared = self.judged(replace(compared, a=a, b=b), most)
                self.tell(compared)
                if compared.verdict is not None:
                    break
        return compared

    def judged(self, compared: Compared, most: int) -> Compared:
        """By how far the processes of all other comparisons differ, with its part of the error."""
        own = {id(ran) for ran in (*compared.a, *compared.b)}
        others = [seconds([ran for ran in runs if id(ran) not in own]) for runs in self.runs.values()]
        tries = [one for one in self.now.tried if one.candidate == compared.candidate]
        earlier = [one for one in tries if one.a_options != compared.a_options]
        # An interval may err on both of its sides and one of them accepts; each further try has half the error.
        error = ERROR if compared.candidate is None else 2.0 * ERROR / self.candidates / 2.0 ** (len(earlier) + 1)
        return judged(replace(compared, verdict=None), error, most, spread(others))

    def run(self, options: Mapping[str, str]) -> Generator[Question, Ran | Checked, Ran]:
        runs = self.runs.setdefault(frozenset(options.items()), [])
        ran = yield Trial(options, len(runs), self.now)
        assert isinstance(ran, Ran)
        runs.append(ran)
        self.now = replace(self.now, spent_s=self.now.spent_s + ran.took_s)
        return ran

    def tell(self, compared: Compared) -> None:
        if compared.candidate is None:
            self.now = replace(self.now, last=compared)
        else:
            self.now = replace(self.now, tried=(*self.now.tried[:-1], compared))

    @property
    def left_s(self) -> float:
        return self.budget_s - self.now.spent_s

    def room(self) -> int:
        """Pairs that the budget has room for beside those that are kept, if they take as long as the runs so far."""
        return max(0, int((self.left_s - self.kept_s) / self.pair_s()))

    def has_time_for(self, compared: Compared) -> bool:
        """Whether one pair more would end in time, and leave what the last comparison needs."""
        pair_s = self.pair_s(compared)
        kept_s = 0.0 if compared.candidate is None else max(self.kept_s, FEWEST_PAIRS * pair_s)
        return self.left_s >= kept_s + pair_s

    def pair_s(self, compared: Compared | None = None) -> float:
        """What a pair takes, by the runs of the two settings so far, else by all."""
        usual_s = _usual_s([ran for runs in self.runs.values() for ran in runs])
        sides = () if compared is None else (compared.a_options, compared.b_options)
        each_s = [_usual_s(self.runs.get(frozenset(options.items()), ())) or usual_s for options in sides]
        return max(sum(each_s) or 2.0 * usual_s, 1e-9)


def _usual_s(runs: Sequence[Ran]) -> float:
    """What a run that ended well took; 0 where none did."""
    took = [ran.took_s for ran in runs if ran.seconds is not None]
    return sum(took) / len(took) if took else 0.0


def judged(compared: Compared, error: float, most: int, spread: float) -> Compared:
    """With its interval and, once that decides or there is no more to be had, its verdict."""
    for side, runs in (("", compared.b), ("what it is compared with ", compared.a)):
        if runs and runs[-1].seconds is None:
            if runs[-1].cut:
                return replace(compared, verdict="UNDECIDED", why=_ENDED)
            refused = runs[-1].refused
            verdict: TriedVerdict = "FAILED" if refused is None else "REFUSED"
            why = f"{side}{refused or runs[-1].failed or 'has no measured step'}"
            return replace(compared, verdict=verdict, why=why)
    if len(compared.a) != len(compared.b):
        return compared
    interval = anytime_interval(compared.ratios, error, spread)
    compared, word = replace(compared, interval=interval), change(interval)
    last = compared.candidate is None
    if word != "UNCLEAR" and not (last and compared.pairs < most):
        return replace(compared, verdict=word)
    if not last and hopeless(compared.ratios, spread):
        return replace(compared, verdict="UNDECIDED", why=_UNLIKELY)
    return replace(compared, verdict="UNDECIDED" if compared.pairs >= most else None)


def _may_go_on(compared: Compared) -> bool:
    return compared.verdict == "UNDECIDED" and compared.why is None and compared.pairs < MOST_PAIRS


def _ratio(compared: Compared) -> float:
    return compared.b_s / compared.a_s if compared.a_s and compared.b_s else math.inf


def _ordered(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """By the largest ceiling of each one's group, and of these the plainest first: what fails in it fails in others."""
    most_s: dict[str, float] = {}
    for one in candidates:
        most_s[one.group] = max(most_s.get(one.group, -math.inf), -math.inf if one.ceiling_s is None else one.ceiling_s)
    return tuple(sorted(candidates, key=lambda one: (-most_s[one.group], len(one.options))))
