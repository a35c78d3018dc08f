"""What `improve` tries next: a search that asks for runs and for checks of numbers, and ends with its result.

It has no clock and no randomness, so the same answers give the same search again: a search that was killed continues
when it gets its former answers again.

All candidates are screened against one shared baseline, and the worse half is dropped after a few rounds (sequential
halving: Karnin, Koren & Somekh 2013, ICML). A candidate that looks faster is then tested in fresh pairs, which did
not select it: so only these proofs can err, and they share ``ERROR``, however many candidates there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from lm_profiler.analysis.remedies.remedy import Candidate
from lm_profiler.improve.decision import (
    ENDED,
    FEWEST_PAIRS,
    LAST,
    MOST_PAIRS,
    Checked,
    Compared,
    Ran,
    failed,
    gain,
    judged,
    may_go_on,
    passed_over,
    seconds,
    spread,
    takes_place_of,
)
from lm_profiler.record.improve_record import Ended
from lm_profiler.record.process_spread import ASSUMED_SPREAD, ProcessSpread

# share of searches that may accept a change that does not make the step faster, if processes differ as much as
# before; if they differ three times as much after some changes, up to 4 % do (`benchmarks.improve`)
ERROR = 0.02

SHARE = 4  # pairs that a proof may have, however many others wait: two pairs hardly show a saving of 10 %

# Pairs of runs that compare the final setting with the first again; a quarter of the budget's pairs, if that is
# fewer. The time of one more pair is reserved, since numbers are checked and runs may take longer than before.
LAST_PAIRS = 6

# the fewest runs in a budget for trying anything: the first setting's run, a proof, and the last comparison
FEWEST_RUNS = 1 + 4 * FEWEST_PAIRS

_ROUNDS, _HALVED_AFTER = 6, (2, 4)  # rounds of a screening, each a run of the baseline and of each candidate left

# a candidate this many standard errors faster leaves the screening: the best of a dozen equal ones hardly ever does
_CLEAR = 2.5

# if the step shrinks below this share of that at the last screening, all are screened again: its bound may be gone
_MOVED = 0.85

_SETTLED = ("NUMERICS", "FAILED")  # verdicts that another setting would hardly change


class Searcher:
    """A search for the fastest setting, and its state so far.

    If the budget cannot screen all, candidates with the largest ceiling come first, unknown ceilings after the
    known; within a group, the fewest options first. A proven change is kept; the rest is tried on top. A candidate
    with a change that failed is refused. A run is begun only if it would end in time, by the runs so far, and a run
    that was cut decides nothing.

    ``time`` runs a fresh process of the first setting with these options, the ``number``-th of them (from 0); ``check``
    compares the numbers of a comparison's sides; ``known`` is by how much processes of this machine differ.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        budget_s: float,
        time: Callable[[Mapping[str, str], int], Ran],
        check: Callable[[Compared], Checked],
        accept_numerics: bool = False,
        known: ProcessSpread = ASSUMED_SPREAD,
    ) -> None:
        self.candidates = _ordered(candidates)
        self.left = list(self.candidates)  # candidates that wait for a turn, in order; at the end, those without one
        # the first setting's own run, before any comparison; None until it has ended
        self.first: Ran | None = None
        self.options: Mapping[str, str] = {}  # accepted options, besides those of the first setting
        self.tried: list[Compared] = []  # comparisons in order; some may be under way
        # the final setting compared with the first again; None if nothing was accepted or the budget ran out
        self.last: Compared | None = None
        self.spent_s = 0.0
        # None while it runs; ``done``: all was tried; ``failed``: the first setting does not run
        self.ended: Ended | None = None
        self.budget_s, self.time, self.check_numbers = budget_s, time, check
        self.accept_numerics, self.known = accept_numerics, known
        self.kept: dict[str, Candidate] = {}
        self.runs: dict[frozenset[tuple[str, str]], list[Ran]] = {}
        self.kept_s = 0.0
        self.unproven, self.short = 0, False
        self.screen_anew()

    def screen_anew(self) -> None:
        self.rounds, self.since = 0, 1.0
        self.screened: dict[str, Compared] = {}
        self.out: set[str] = set()

    def improve(self) -> Ended:
        """Search until nothing is left to try, or the budget ends."""
        self.ended = self.searched()
        return self.ended

    def searched(self) -> Ended:
        self.first = first = self.run({})
        if first.seconds is None:
            return "budget" if first.cut else "failed"
        self.kept_s = max(FEWEST_PAIRS, min(LAST_PAIRS + 1, self.room() // 4)) * self.pair_s()
        while chosen := self.chosen():
            taken: set[str] = set()
            for at, compared in enumerate(chosen):
                if compared.candidate.group not in taken and self.room() >= FEWEST_PAIRS:
                    accepted = self.prove(compared, len(chosen) - at)
                    taken |= {compared.candidate.group} if accepted else set()
        more = self.short or bool(self.pool() or self.open())
        last = Compared(LAST, {}, self.options)
        accepted = any(one.accepted for one in self.tried)
        if accepted and (pairs := int(self.left_s / self.pair_s(last))) >= FEWEST_PAIRS:
            self.compare(last, min(LAST_PAIRS, pairs))
        unchecked = accepted and self.last is None
        cut = any(one.why == ENDED for one in self.latest())
        return "budget" if more or unchecked or cut else "done"

    def chosen(self) -> list[Compared]:
        """Return the candidates to prove next, the most promising first; empty if none, or no room, is left."""
        while self.room() >= FEWEST_PAIRS and (pool := self.pool()):
            batch = [one for one in pool if one.name in self.screened]
            if not batch:
                self.rounds, batch = 0, pool[: max(1, 2 * (self.room() - FEWEST_PAIRS) - 1)]
            if len(batch) == 1 and not self.rounds:
                return batch
            if promising := self.screen(batch):
                return [self.on_top(one.candidate) for one in promising]
        return sorted(self.open(), key=lambda one: one.ratio)[:1] if self.room() >= FEWEST_PAIRS else []

    def pool(self) -> list[Compared]:
        """Return candidates still to screen, on top of the latest setting, the highest ceiling first."""
        out = self.out | {one.name for one in self.latest() if one.verdict in _SETTLED or self.failed_in(one)}
        pool = [self.on_top(one) for one in self.candidates if one.name not in out]
        known = [(one, self.screened.get(one.name, one)) for one in pool if one.b_options != self.options]
        return [replace(one, a=before.a, b=before.b) for one, before in known]

    def open(self) -> list[Compared]:
        """Return proofs on the latest setting that more pairs may decide."""
        return [one for one in self.latest() if one.a_options == self.options and may_go_on(one)]

    def latest(self) -> list[Compared]:
        return list({one.name: one for one in self.tried}.values())

    def screen(self, alive: list[Compared]) -> list[Compared]:
        """Run rounds until some candidates clearly look faster, or one is left; return these, the best first."""
        while len(alive) > 1 and self.rounds < _ROUNDS:
            if 2 * self.room() <= len(alive):
                self.short = True
                break
            self.rounds += 1
            alive = self.round(alive)
            by = spread([seconds(runs) for runs in self.runs.values()], self.known)
            alive.sort(key=lambda one: -gain(one.ratios, by))
            if promising := [one for one in alive if gain(one.ratios, by, _CLEAR) > 0.0]:
                return promising
            most = math.ceil(len(alive) / 2) if self.rounds in _HALVED_AFTER else len(alive)
            for one in alive[most:]:
                self.pass_over(one)
            alive = alive[:most]
        for one in alive:
            if one is not alive[0] or not gain(one.ratios, self.spread_beside(one)) > 0.0:
                self.pass_over(one)
        return [one for one in alive if one.name not in self.out]

    def round(self, alive: Sequence[Compared]) -> list[Compared]:
        """Run the shared baseline and each candidate once, in forward and reverse order in turns."""
        base = self.run(self.options)
        if base.seconds is None and not base.cut:  # once more: all candidates depend on it
            base = self.run(self.options)
        left = list[Compared]()
        for one in alive if self.rounds % 2 else reversed(alive):
            if (broken := self.failed_in(one)) is not None:
                one = replace(one, verdict="REFUSED", why=f"{broken.name} FAILED")
            elif base.seconds is None:
                one = failed(replace(one, a=(*one.a, base)))
            else:
                b = self.run(one.b_options)
                one = failed(replace(one, a=(*one.a, base), b=(*one.b, b)))
            self.screened[one.name] = one
            self.tell(one)
            if one.verdict is None:
                left.append(one)
            else:
                self.out.add(one.name)
        return left

    def pass_over(self, compared: Compared) -> None:
        """Drop ``compared``, which does not look faster than the others."""
        self.out.add(compared.name)
        self.tell(passed_over(compared, self.spread_beside(compared)))

    def failed_in(self, compared: Compared) -> Candidate | None:
        """Return a failed change that is part of this one; not one out of memory, which other parts may save."""
        options = compared.candidate.options.items()
        broken = [one.candidate for one in self.latest() if one.b and one.b[-1].failed and not one.b[-1].out_of_memory]
        return next((of for of in broken if of.options.items() < options), None)

    def on_top(self, candidate: Candidate) -> Compared:
        """Return a comparison with the latest setting; the candidate replaces the former one of its group."""
        kept = [one for group, one in self.kept.items() if group != candidate.group]
        options = {option: text for one in (*kept, candidate) for option, text in one.options.items()}
        return Compared(candidate, self.options, options)

    def prove(self, compared: Compared, waiting: int) -> bool:
        """Compare in fresh pairs until a verdict or the share of the budget; return whether the change was accepted."""
        candidate = compared.candidate
        if not compared.pairs:
            # An interval errs on both sides, and only one of them accepts. A proven change uses none of the error
            # (Holm 1979): if it was wrong, the search has erred already.
            compared = replace(self.on_top(candidate), error=ERROR / 2.0**self.unproven)
        self.out.add(candidate.name)
        if (broken := self.failed_in(compared)) is not None:
            self.tell(replace(compared, verdict="REFUSED", why=f"{broken.name} FAILED"))
            return False
        first = not compared.pairs
        share = min(self.room(), max(SHARE, self.room() // waiting))
        compared = self.compare(compared, min(MOST_PAIRS, compared.pairs + share))
        if compared.verdict == "FASTER":
            compared = self.check(candidate, compared)
        self.tell(compared)
        if compared.accepted:
            self.accept(candidate, compared)
        else:
            self.unproven += first
        return compared.accepted

    def accept(self, candidate: Candidate, compared: Compared) -> None:
        self.kept.pop(candidate.group, None)
        self.kept[candidate.group] = candidate  # last: if two set an option, the later one counts
        self.options = compared.b_options
        self.since *= compared.ratio
        if self.since < _MOVED:
            self.screen_anew()

    def check(self, candidate: Candidate, compared: Compared) -> Compared:
        checked = self.check_numbers(compared)
        self.spent_s += checked.took_s
        right = checked.within or (checked.within is None and candidate.may_change is None)
        if right or self.accept_numerics:
            return replace(compared, checked=checked, accepted=True, why=checked.why)
        return replace(compared, checked=checked, verdict="NUMERICS", why=checked.why)

    def compare(self, compared: Compared, most: int) -> Compared:
        """Run pairs, B first and A first in turns, until the interval decides."""
        compared = replace(compared, verdict=None)
        while compared.verdict is None:
            if not self.has_time_for(compared):
                compared = replace(compared, verdict="UNDECIDED", why=ENDED)
                self.tell(compared)
                break
            for side in "ba" if len(compared.a) % 2 == 0 else "ab":
                ran = self.run(compared.b_options if side == "b" else compared.a_options)
                a, b = (compared.a, (*compared.b, ran)) if side == "b" else ((*compared.a, ran), compared.b)
                compared = replace(compared, a=a, b=b)
                compared = judged(compared, most, self.spread_beside(compared))
                self.tell(compared)
                if compared.verdict is not None:
                    break
        return compared

    def spread_beside(self, compared: Compared) -> float:
        """Return how far the processes of all other comparisons differ."""
        own = {id(ran) for ran in (*compared.a, *compared.b)}
        return spread([seconds([ran for ran in runs if id(ran) not in own]) for runs in self.runs.values()], self.known)

    def run(self, options: Mapping[str, str]) -> Ran:
        runs = self.runs.setdefault(frozenset(options.items()), [])
        ran = self.time(options, len(runs))
        runs.append(ran)
        self.spent_s += ran.took_s
        return ran

    def tell(self, compared: Compared) -> None:
        if compared.candidate is LAST:
            self.last = compared
        else:
            self.tried = [*(one for one in self.tried if not takes_place_of(compared, one)), compared]
            self.left = [one for one in self.left if one != compared.candidate]

    @property
    def left_s(self) -> float:
        return self.budget_s - self.spent_s

    def room(self) -> int:
        """Return the pairs that fit in the budget besides reserved ones, if they take as long as the runs so far."""
        return max(0, int((self.left_s - self.kept_s) / self.pair_s()))

    def has_time_for(self, compared: Compared) -> bool:
        """Return whether one more pair would end in time, and leave enough for the last comparison."""
        pair_s = self.pair_s(compared)
        kept_s = 0.0 if compared.candidate is LAST else max(self.kept_s, FEWEST_PAIRS * pair_s)
        return self.left_s >= kept_s + pair_s

    def pair_s(self, compared: Compared | None = None) -> float:
        """Return the seconds of a pair, from the runs of the two settings so far, else from all runs."""
        usual_s = _usual_s([ran for runs in self.runs.values() for ran in runs])
        sides = () if compared is None else (compared.a_options, compared.b_options)
        each_s = [_usual_s(self.runs.get(frozenset(options.items()), ())) or usual_s for options in sides]
        return max(sum(each_s) or 2.0 * usual_s, 1e-9)


def _usual_s(runs: Sequence[Ran]) -> float:
    """Return the mean seconds of runs that succeeded; 0 if none did."""
    took = [ran.took_s for ran in runs if ran.seconds is not None]
    return sum(took) / len(took) if took else 0.0


def _ordered(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Sort by the largest ceiling of each group, the simplest of a group first: if it fails, so do the others."""
    most_s: dict[str, float] = {}
    for one in candidates:
        most_s[one.group] = max(most_s.get(one.group, -math.inf), -math.inf if one.ceiling_s is None else one.ceiling_s)
    return tuple(sorted(candidates, key=lambda one: (-most_s[one.group], len(one.options))))
