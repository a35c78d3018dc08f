"""What `improve` tries next: a search that asks for runs and for checks of numbers, and ends with its result.

It has no clock and no randomness, so the same answers give the same search again: a search that was killed continues
when it gets its former answers again.

Candidates are proven one after the other, the highest ceiling first, each in fresh pairs of runs on top of what was
accepted before it. One that does not look faster at a check is put off; what is left of the budget goes to those that
look best. The proofs share ``ERROR``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from lm_profiler.analysis.remedies.remedy import Candidate
from lm_profiler.improve.decision import (
    FEWEST_PAIRS,
    LAST,
    LOOKS,
    MOST_PAIRS,
    Checked,
    Compared,
    Ran,
    gain,
    judged,
    may_go_on,
    seconds,
    spread,
    takes_place_of,
)
from lm_profiler.record.improve_record import ENDED, NOT_FASTER, Ended
from lm_profiler.record.process_spread import ASSUMED_SPREAD, ProcessSpread

# share of searches that may accept a change that does not make the step faster, if processes differ as much as
# before; if they differ three times as much after some changes, up to 4 % do (`benchmarks.improve`)
ERROR = 0.02

# Pairs that a candidate may have before the others had a turn, if that is more than half of what is left.
FIRST_PAIRS = 8

# Pairs of runs that compare the final setting with the first again; a quarter of the budget's pairs, if that is
# fewer. The time of one more pair is reserved, since numbers are checked and runs may take longer than before.
LAST_PAIRS = 6

# the fewest runs in a budget for trying anything: the first setting's run, a proof, and the last comparison
FEWEST_RUNS = 1 + 4 * FEWEST_PAIRS

# if the step shrinks below this share of that when candidates were last rejected, these are tried again: what bounds
# the step may be something else
_MOVED = 0.85

_SETTLED = ("NUMERICS", "FAILED")  # verdicts that another setting would hardly change


class Searcher:
    """A search for the fastest setting, and its state so far.

    Candidates with the largest ceiling come first, unknown ceilings after the known; within a group, the fewest options
    first. A proven change is kept; the rest is tried on top. A candidate with a change that failed is refused. A run is
    begun only if it would end in time, by the runs so far, and a run that was cut decides nothing.

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
        self.candidates = _by_ceiling(candidates)
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
        self.budget_s = budget_s
        self.time = time
        self.check_numbers = check
        self.accept_numerics = accept_numerics
        self.known = known
        self.kept: dict[str, Candidate] = {}  # the accepted candidate of each group
        self.runs: dict[frozenset[tuple[str, str]], list[Ran]] = {}  # of each setting
        self.reserved_s = 0.0  # for the last comparison
        self.begun: dict[str, int] = {}  # how many proofs of a candidate were begun
        self.had_a_turn: set[str] = set()  # names of candidates that wait for no first turn
        self.shrunk_to = 1.0  # the step, as a share of that when candidates were last rejected

    def improve(self) -> Ended:
        """Search until nothing is left to try, or the budget ends."""
        self.ended = self.search()
        return self.ended

    def search(self) -> Ended:
        """Run the first setting, prove candidates until none is left, and compare the final setting with the first."""
        first = self.run({})
        self.first = first
        if first.seconds is None:
            return "budget" if first.cut else "failed"

        self.reserve_last_comparison()
        self.prove_candidates()
        some_waiting = bool(self.waiting() or self.undecided())
        some_accepted = any(comparison.accepted for comparison in self.tried)
        if some_accepted:
            self.compare_final_with_first()
        final_unchecked = some_accepted and self.last is None
        some_cut = any(comparison.why == ENDED for comparison in self.latest())

        if some_waiting or final_unchecked or some_cut:
            return "budget"
        return "done"

    def reserve_last_comparison(self) -> None:
        """Reserve the seconds of the last comparison: a quarter of the pairs that the budget has, within two limits."""
        quarter = self.pairs_left() // 4
        pairs = max(FEWEST_PAIRS, min(LAST_PAIRS + 1, quarter))
        self.reserved_s = pairs * self.pair_s()

    def prove_candidates(self) -> None:
        """Give each candidate a turn, the highest ceiling first; then go on with what looks best."""
        while self.pairs_left() >= FEWEST_PAIRS:
            waiting = self.waiting()
            if waiting:
                candidate = waiting[0]
                self.had_a_turn.add(candidate.name)
                half = self.pairs_left() // 2
                self.prove(self.on_top(candidate), more_pairs=max(FIRST_PAIRS, half))
                continue
            undecided = self.undecided()
            if not undecided:
                return
            best = max(undecided, key=self.promise)
            if best.a_options != self.options:  # another change was accepted since: begin anew on top of it
                best = self.on_top(best.candidate)
            next_look = min(look for look in LOOKS if look > best.pairs)
            self.prove(best, more_pairs=next_look - best.pairs)

    def compare_final_with_first(self) -> None:
        """Compare the final setting with the first one, if the budget still has the time."""
        comparison = Compared(LAST, {}, self.options)
        pairs = int(self.left_s / self.pair_s(comparison))
        if pairs >= FEWEST_PAIRS:
            self.compare(comparison, min(LAST_PAIRS, pairs))

    def waiting(self) -> list[Candidate]:
        """Return candidates that wait for their first turn, the highest ceiling first."""
        kept = list(self.kept.values())
        return [
            candidate
            for candidate in self.candidates
            if candidate.name not in self.had_a_turn and candidate not in kept
        ]

    def undecided(self) -> list[Compared]:
        """Return comparisons that more pairs may decide."""
        return [comparison for comparison in self.latest() if may_go_on(comparison)]

    def promise(self, comparison: Compared) -> float:
        """Return by how much a change looks faster than the least that counts, in logarithms."""
        return gain(comparison.ratios, self.spread_beside(comparison))

    def latest(self) -> list[Compared]:
        return list({comparison.name: comparison for comparison in self.tried}.values())

    def failed_in(self, comparison: Compared) -> Candidate | None:
        """Return a failed change that is part of this one; not one out of memory, which other parts may save."""
        options = comparison.candidate.options.items()
        for other in self.latest():
            has_failed = bool(other.b) and other.b[-1].failed is not None and not other.b[-1].out_of_memory
            if has_failed and other.candidate.options.items() < options:
                return other.candidate
        return None

    def on_top(self, candidate: Candidate) -> Compared:
        """Return a comparison with the latest setting; the candidate replaces the former one of its group."""
        kept = [other for group, other in self.kept.items() if group != candidate.group]
        options: dict[str, str] = {}
        for change in (*kept, candidate):
            options.update(change.options)
        return Compared(candidate, self.options, options)

    def prove(self, comparison: Compared, more_pairs: int) -> None:
        """Compare in fresh pairs until a verdict or for ``more_pairs``, and keep the change if it is proven.

        The comparison is put off at a check at which the change does not look faster, and given up at the second.
        """
        candidate = comparison.candidate
        if comparison.b_options == self.options:
            return
        if comparison.pairs == 0:
            comparison = replace(comparison, error=self.next_error(candidate))
        broken_part = self.failed_in(comparison)
        if broken_part is not None:
            self.report(replace(comparison, verdict="REFUSED", why=f"{broken_part.name} FAILED"))
            return

        most_pairs = min(MOST_PAIRS, comparison.pairs + min(more_pairs, self.pairs_left()))
        was_put_off = comparison.pairs > 0 and self.promise(comparison) <= 0.0
        proof = self.compare(comparison, most_pairs)
        does_not_look_faster = may_go_on(proof) and self.promise(proof) <= 0.0
        if was_put_off and does_not_look_faster:
            proof = replace(proof, why=NOT_FASTER)
        if proof.verdict == "FASTER":
            proof = self.check(candidate, proof)
        self.report(proof)
        if proof.accepted:
            self.accept(candidate, proof)

    def next_error(self, candidate: Candidate) -> float:
        """Return the share of tries in which the candidate's next interval may be wrong.

        An interval errs on both sides, and only one of them accepts: so all candidates that are not accepted yet share
        twice ``ERROR``. Each further proof of the same candidate has half of the error of the one before.
        """
        times = self.begun.get(candidate.name, 0)
        self.begun[candidate.name] = times + 1
        open_candidates = max(len(self.candidates) - len(self.kept), 2)
        return 2.0 * ERROR / open_candidates / 2.0**times

    def accept(self, candidate: Candidate, proof: Compared) -> None:
        """Keep a proven change; if the step has become much faster, what was rejected gets another turn."""
        self.kept.pop(candidate.group, None)
        self.kept[candidate.group] = candidate  # last: if two set an option, the later one counts
        self.options = proof.b_options
        self.shrunk_to *= proof.ratio
        if self.shrunk_to >= _MOVED:
            return
        self.shrunk_to = 1.0
        self.had_a_turn = {comparison.name for comparison in self.latest() if self.is_settled(comparison)}

    def is_settled(self, comparison: Compared) -> bool:
        """Whether no other setting would change its verdict."""
        return comparison.accepted or comparison.verdict in _SETTLED or self.failed_in(comparison) is not None

    def check(self, candidate: Candidate, proof: Compared) -> Compared:
        """Accept a proven change if its numbers are right, or if wrong ones are accepted."""
        checked = self.check_numbers(proof)
        self.spent_s += checked.took_s
        unknown_but_harmless = checked.within is None and candidate.may_change is None
        if checked.within or unknown_but_harmless or self.accept_numerics:
            return replace(proof, checked=checked, accepted=True, why=checked.why)
        return replace(proof, checked=checked, verdict="NUMERICS", why=checked.why)

    def compare(self, comparison: Compared, most_pairs: int) -> Compared:
        """Run pairs, B first and A first in turns, until the interval decides or the change is put off."""
        comparison = replace(comparison, verdict=None)
        while comparison.verdict is None:
            if not self.has_time_for(comparison):
                comparison = replace(comparison, verdict="UNDECIDED", why=ENDED)
                self.report(comparison)
                break
            order = "ba" if len(comparison.a) % 2 == 0 else "ab"
            for side in order:
                comparison = self.with_run(comparison, side)
                comparison = judged(comparison, most_pairs, self.spread_beside(comparison))
                if self.is_put_off(comparison):
                    comparison = replace(comparison, verdict="UNDECIDED")
                self.report(comparison)
                if comparison.verdict is not None:
                    break
        return comparison

    def is_put_off(self, comparison: Compared) -> bool:
        """Whether a check has come at which the change neither is decided nor looks faster."""
        if comparison.candidate is LAST or comparison.verdict is not None:
            return False
        is_whole_pair = len(comparison.a) == len(comparison.b)
        return is_whole_pair and comparison.pairs in LOOKS and self.promise(comparison) <= 0.0

    def with_run(self, comparison: Compared, side: str) -> Compared:
        """Return the comparison with one more run of ``side``, a or b."""
        if side == "a":
            ran = self.run(comparison.a_options)
            has_failed = ran.seconds is None and not ran.cut
            if has_failed:  # once more: it ran well before, and says nothing of the change
                ran = self.run(comparison.a_options)
            return replace(comparison, a=(*comparison.a, ran))
        return replace(comparison, b=(*comparison.b, self.run(comparison.b_options)))

    def spread_beside(self, comparison: Compared) -> float:
        """Return how far the processes of all other comparisons differ."""
        own = {id(ran) for ran in (*comparison.a, *comparison.b)}
        settings = []
        for runs in self.runs.values():
            settings.append(seconds([ran for ran in runs if id(ran) not in own]))
        return spread(settings, self.known)

    def run(self, options: Mapping[str, str]) -> Ran:
        runs = self.runs.setdefault(frozenset(options.items()), [])
        ran = self.time(options, len(runs))
        runs.append(ran)
        self.spent_s += ran.took_s
        return ran

    def report(self, comparison: Compared) -> None:
        """Put the comparison in the place of its former state."""
        if comparison.candidate is LAST:
            self.last = comparison
            return
        others = [other for other in self.tried if not takes_place_of(comparison, other)]
        self.tried = [*others, comparison]
        self.left = [candidate for candidate in self.left if candidate != comparison.candidate]

    @property
    def left_s(self) -> float:
        return self.budget_s - self.spent_s

    def pairs_left(self) -> int:
        """Return the pairs that fit in the budget besides reserved ones, if they take as long as the runs so far."""
        return max(0, int((self.left_s - self.reserved_s) / self.pair_s()))

    def has_time_for(self, comparison: Compared) -> bool:
        """Return whether one more pair would end in time, and leave enough for the last comparison."""
        pair_s = self.pair_s(comparison)
        reserved_s = 0.0
        if comparison.candidate is not LAST:
            reserved_s = max(self.reserved_s, FEWEST_PAIRS * pair_s)
        return self.left_s >= reserved_s + pair_s

    def pair_s(self, comparison: Compared | None = None) -> float:
        """Return the seconds of a pair, from the runs of the two settings so far, else from all runs."""
        usual_s = _mean_duration_s(ran for runs in self.runs.values() for ran in runs)
        pair_s = 2.0 * usual_s
        if comparison is not None:
            a_s = _mean_duration_s(self.runs.get(frozenset(comparison.a_options.items()), ()))
            b_s = _mean_duration_s(self.runs.get(frozenset(comparison.b_options.items()), ()))
            pair_s = (a_s or usual_s) + (b_s or usual_s)
        return max(pair_s, 1e-9)


def _mean_duration_s(runs: Iterable[Ran]) -> float:
    """Return the mean seconds that successful runs took; 0 if none succeeded."""
    durations_s = [ran.took_s for ran in runs if ran.seconds is not None]
    return sum(durations_s) / len(durations_s) if durations_s else 0.0


def _by_ceiling(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Sort by the largest ceiling of each group, the simplest of a group first: if it fails, so do the others."""
    largest_s: dict[str, float] = {}
    for candidate in candidates:
        ceiling_s = -math.inf if candidate.ceiling_s is None else candidate.ceiling_s
        largest_s[candidate.group] = max(largest_s.get(candidate.group, -math.inf), ceiling_s)
    return tuple(sorted(candidates, key=lambda candidate: (-largest_s[candidate.group], len(candidate.options))))
