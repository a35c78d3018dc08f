"""The search of `improve`: it requests runs and numerical checks, and ends with its result.

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
    FINAL_SETTING,
    LOOKS,
    MOST_PAIRS,
    NumericsCheck,
    PairedComparison,
    TimedRun,
    judge,
    log_gain,
    may_continue,
    pooled_spread,
    replaces,
    step_times_s,
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
FINAL_PAIRS = 6

# the fewest runs in a budget for trying anything: the first setting's run, a proof, and the last comparison
FEWEST_RUNS = 1 + 4 * FEWEST_PAIRS

# if the step shrinks below this share of that when candidates were last rejected, these are tried again: what bounds
# the step may be something else
_RETRY_SHARE = 0.85

_SETTLED_VERDICTS = ("NUMERICS", "FAILED")  # another setting would hardly change them


class Searcher:
    """A search for the fastest setting, and its state so far.

    Candidates with the largest ceiling come first, unknown ceilings after the known; within a group, the fewest options
    first. A proven change is kept; the rest is tried on top. A candidate with a change that failed is refused. A run is
    begun only if it would end in time, by the runs so far, and a run that was cut decides nothing.

    ``time`` runs a fresh process of the first setting with these options, the ``number``-th of them (from 0); ``check``
    compares the numbers of a comparison's sides; ``machine_spread`` is by how much processes of this machine differ.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        budget_s: float,
        time: Callable[[Mapping[str, str], int], TimedRun],
        check: Callable[[PairedComparison], NumericsCheck],
        accept_numerics: bool = False,
        machine_spread: ProcessSpread = ASSUMED_SPREAD,
    ) -> None:
        # What the caller chose.
        self.candidates = _by_ceiling(candidates)
        self.budget_s = budget_s
        self.time = time
        self.check_numbers = check
        self.accept_numerics = accept_numerics
        self.machine_spread = machine_spread

        # The result so far.
        # the first setting's own run, before any comparison; None until it has ended
        self.first_run: TimedRun | None = None
        # accepted options, besides those of the first setting
        self.options: Mapping[str, str] = {}
        # comparisons in order; some may be under way
        self.tried: list[PairedComparison] = []
        # candidates without a comparison, in order
        self.untried = list(self.candidates)
        # the final setting compared with the first again; None if nothing was accepted or the budget ran out
        self.final: PairedComparison | None = None
        self.spent_s = 0.0  # seconds of the budget
        # None while the search runs; ``done``: all was tried; ``failed``: the first setting does not run
        self.outcome: Ended | None = None

        # What decides the next run.
        self.kept_changes: dict[str, Candidate] = {}  # the accepted candidate, by group
        # by the options of a setting
        self.runs: dict[frozenset[tuple[str, str]], list[TimedRun]] = {}
        # seconds of the budget that are kept for the final comparison
        self.reserved_s = 0.0
        # how many proofs were begun, by the candidate's name
        self.proof_counts: dict[str, int] = {}
        # names of the candidates that had their first turn; reset when accepted changes shrink the step enough
        self.had_first_turn: set[str] = set()
        # the step as a share of the step when ``had_first_turn`` was last reset
        self.step_share = 1.0

    def improve(self) -> Ended:
        """Search until nothing is left to try, or the budget ends."""
        self.outcome = self.search()
        return self.outcome

    def search(self) -> Ended:
        """Run the first setting, prove candidates until none is left, and compare the final setting with the first."""
        first_run = self.run({})
        self.first_run = first_run
        if first_run.step_s is None:
            return "budget" if first_run.was_cut else "failed"

        self.reserve_final_comparison()
        self.prove_candidates()
        some_waiting = bool(self.waiting_candidates() or self.undecided_comparisons())
        some_accepted = any(comparison.accepted for comparison in self.tried)
        if some_accepted:
            self.compare_final_with_first()
        final_unchecked = some_accepted and self.final is None
        some_cut = any(
            comparison.reason == ENDED for comparison in self.latest_comparisons()
        )

        if some_waiting or final_unchecked or some_cut:
            return "budget"
        return "done"

    def reserve_final_comparison(self) -> None:
        """Reserve the seconds of the last comparison: a quarter of the pairs that the budget has, within two limits."""
        quarter = self.pairs_left() // 4
        pairs = max(FEWEST_PAIRS, min(FINAL_PAIRS + 1, quarter))
        self.reserved_s = pairs * self.pair_s()

    def prove_candidates(self) -> None:
        """Give each candidate a turn, the highest ceiling first; then go on with what looks best."""
        while self.pairs_left() >= FEWEST_PAIRS:
            waiting = self.waiting_candidates()
            if waiting:
                candidate = waiting[0]
                self.had_first_turn.add(candidate.name)
                half = self.pairs_left() // 2
                self.prove(
                    self.on_top_of_kept_changes(candidate),
                    more_pairs=max(FIRST_PAIRS, half),
                )
                continue
            undecided = self.undecided_comparisons()
            if not undecided:
                return
            best = max(undecided, key=self.promised_gain)
            if best.a_options != self.options:
                # another change was accepted since: begin anew on top of it
                best = self.on_top_of_kept_changes(best.candidate)
            next_look = min(look for look in LOOKS if look > best.pairs)
            self.prove(best, more_pairs=next_look - best.pairs)

    def compare_final_with_first(self) -> None:
        """Compare the final setting with the first one, if the budget still has the time."""
        comparison = PairedComparison(
            candidate=FINAL_SETTING, a_options={}, b_options=self.options
        )
        pairs = int(self.left_s / self.pair_s(comparison))
        if pairs >= FEWEST_PAIRS:
            self.compare(comparison, min(FINAL_PAIRS, pairs))

    def waiting_candidates(self) -> list[Candidate]:
        """Return candidates that wait for their first turn, the highest ceiling first."""
        kept_changes = list(self.kept_changes.values())
        waiting = []
        for candidate in self.candidates:
            if (
                candidate.name not in self.had_first_turn
                and candidate not in kept_changes
            ):
                waiting.append(candidate)
        return waiting

    def undecided_comparisons(self) -> list[PairedComparison]:
        """Return comparisons that more pairs may decide."""
        return [
            comparison
            for comparison in self.latest_comparisons()
            if may_continue(comparison)
        ]

    def promised_gain(self, comparison: PairedComparison) -> float:
        """Return by how much a change looks faster than the least that counts, in logarithms."""
        return log_gain(comparison.ratios, self.spread_of_other_comparisons(comparison))

    def latest_comparisons(self) -> list[PairedComparison]:
        """Return the latest comparison of each candidate."""
        latest = {comparison.name: comparison for comparison in self.tried}
        return list(latest.values())

    def failed_part_of(self, comparison: PairedComparison) -> Candidate | None:
        """Return a failed change that is part of this one; not one out of memory, which other parts may save."""
        options = comparison.candidate.options.items()
        for earlier in self.latest_comparisons():
            if not earlier.runs_b:
                continue
            latest_run = earlier.runs_b[-1]
            has_failed = (
                latest_run.failure is not None and not latest_run.may_lack_memory
            )
            is_part = earlier.candidate.options.items() < options
            if has_failed and is_part:
                return earlier.candidate
        return None

    def on_top_of_kept_changes(self, candidate: Candidate) -> PairedComparison:
        """Return a comparison with the latest setting; the candidate replaces the former one of its group."""
        options: dict[str, str] = {}
        for group, kept_change in self.kept_changes.items():
            if group != candidate.group:
                options.update(kept_change.options)
        options.update(candidate.options)
        return PairedComparison(candidate, self.options, options)

    def prove(self, comparison: PairedComparison, more_pairs: int) -> None:
        """Compare in fresh pairs until a verdict or for ``more_pairs``, and keep the change if it is proven.

        The comparison is put off at a check at which the change does not look faster, and given up at the second.
        """
        candidate = comparison.candidate
        if comparison.b_options == self.options:
            return
        if comparison.pairs == 0:
            comparison = replace(comparison, error=self.next_error_share(candidate))
        failed_part = self.failed_part_of(comparison)
        if failed_part is not None:
            self.keep_comparison(
                replace(
                    comparison, verdict="REFUSED", reason=f"{failed_part.name} FAILED"
                )
            )
            return

        most_pairs = min(
            MOST_PAIRS, comparison.pairs + min(more_pairs, self.pairs_left())
        )
        was_put_off = comparison.pairs > 0 and self.promised_gain(comparison) <= 0.0
        proof = self.compare(comparison, most_pairs)
        does_not_look_faster = may_continue(proof) and self.promised_gain(proof) <= 0.0
        if was_put_off and does_not_look_faster:
            proof = replace(proof, reason=NOT_FASTER)
        if proof.verdict == "FASTER":
            proof = self.check_numerics(candidate, proof)
        self.keep_comparison(proof)
        if proof.accepted:
            self.accept(candidate, proof)

    def next_error_share(self, candidate: Candidate) -> float:
        """Return the share of tries in which the candidate's next interval may be wrong.

        An interval errs on both sides, and only one of them accepts: so all candidates that are not accepted yet share
        twice ``ERROR``. Each further proof of the same candidate has half of the error of the one before.
        """
        earlier_proofs = self.proof_counts.get(candidate.name, 0)
        self.proof_counts[candidate.name] = earlier_proofs + 1
        open_candidates = max(len(self.candidates) - len(self.kept_changes), 2)
        error_of_candidate = 2.0 * ERROR / open_candidates
        return error_of_candidate / 2.0**earlier_proofs

    def accept(self, candidate: Candidate, proof: PairedComparison) -> None:
        """Keep a proven change; if the step has become much faster, what was rejected gets another turn."""
        self.kept_changes.pop(candidate.group, None)
        # last: if two set an option, the later one counts
        self.kept_changes[candidate.group] = candidate
        self.options = proof.b_options
        self.step_share *= proof.ratio
        if self.step_share >= _RETRY_SHARE:
            return
        self.step_share = 1.0
        # only settled candidates have had their turn: all others get another
        self.had_first_turn = {
            comparison.name
            for comparison in self.latest_comparisons()
            if self.is_settled(comparison)
        }

    def is_settled(self, comparison: PairedComparison) -> bool:
        """Whether no other setting would change its verdict."""
        if comparison.accepted or comparison.verdict in _SETTLED_VERDICTS:
            return True
        return self.failed_part_of(comparison) is not None

    def check_numerics(
        self, candidate: Candidate, proof: PairedComparison
    ) -> PairedComparison:
        """Accept a proven change if its numbers are right, or if wrong ones are accepted."""
        numerics = self.check_numbers(proof)
        self.spent_s += numerics.took_s
        proof = replace(proof, numerics=numerics, reason=numerics.reason)
        unknown_but_harmless = (
            numerics.is_tolerated is None and candidate.may_change is None
        )
        if numerics.is_tolerated or unknown_but_harmless or self.accept_numerics:
            return replace(proof, accepted=True)
        return replace(proof, verdict="NUMERICS")

    def compare(
        self, comparison: PairedComparison, most_pairs: int
    ) -> PairedComparison:
        """Run pairs, B first and A first in turns, until the interval decides or the change is put off."""
        comparison = replace(comparison, verdict=None)
        while comparison.verdict is None:
            if not self.has_time_for(comparison):
                comparison = replace(comparison, verdict="UNDECIDED", reason=ENDED)
                self.keep_comparison(comparison)
                break
            is_even_pair = len(comparison.runs_a) % 2 == 0
            order = "ba" if is_even_pair else "ab"
            for side in order:
                comparison = self.with_run(comparison, side)
                comparison = judge(
                    comparison, most_pairs, self.spread_of_other_comparisons(comparison)
                )
                if self.is_put_off(comparison):
                    comparison = replace(comparison, verdict="UNDECIDED")
                self.keep_comparison(comparison)
                if comparison.verdict is not None:
                    break
        return comparison

    def is_put_off(self, comparison: PairedComparison) -> bool:
        """Whether a check has come at which the change neither is decided nor looks faster."""
        if comparison.is_final or comparison.verdict is not None:
            return False
        is_whole_pair = len(comparison.runs_a) == len(comparison.runs_b)
        if not is_whole_pair or comparison.pairs not in LOOKS:
            return False
        return self.promised_gain(comparison) <= 0.0

    def with_run(self, comparison: PairedComparison, side: str) -> PairedComparison:
        """Return the comparison with one more run of ``side``, a or b."""
        if side == "b":
            run_b = self.run(comparison.b_options)
            return replace(comparison, runs_b=(*comparison.runs_b, run_b))
        run_a = self.run(comparison.a_options)
        has_failed = run_a.step_s is None and not run_a.was_cut
        if has_failed:  # once more: it ran well before, so that its failure is not due to the change
            run_a = self.run(comparison.a_options)
        return replace(comparison, runs_a=(*comparison.runs_a, run_a))

    def spread_of_other_comparisons(self, comparison: PairedComparison) -> float:
        """Return how far the processes of all other comparisons differ."""
        runs_of_comparison = {
            id(run) for run in (*comparison.runs_a, *comparison.runs_b)
        }
        settings = []
        for runs in self.runs.values():
            other_runs = [run for run in runs if id(run) not in runs_of_comparison]
            settings.append(step_times_s(other_runs))
        return pooled_spread(settings, self.machine_spread)

    def run(self, options: Mapping[str, str]) -> TimedRun:
        runs = self.runs.setdefault(frozenset(options.items()), [])
        run = self.time(options, len(runs))
        runs.append(run)
        self.spent_s += run.took_s
        return run

    def keep_comparison(self, comparison: PairedComparison) -> None:
        """Put the comparison in the place of its former state."""
        if comparison.is_final:
            self.final = comparison
            return
        other_comparisons = []
        for former in self.tried:
            if not replaces(comparison, former):
                other_comparisons.append(former)
        self.tried = [*other_comparisons, comparison]
        self.untried = [
            candidate for candidate in self.untried if candidate != comparison.candidate
        ]

    @property
    def left_s(self) -> float:
        return self.budget_s - self.spent_s

    def pairs_left(self) -> int:
        """Return the pairs that fit in the budget besides reserved ones, if they take as long as the runs so far."""
        pairs = int((self.left_s - self.reserved_s) / self.pair_s())
        return max(0, pairs)

    def has_time_for(self, comparison: PairedComparison) -> bool:
        """Return whether one more pair would end in time, and leave enough for the last comparison."""
        pair_s = self.pair_s(comparison)
        reserved_s = 0.0
        if not comparison.is_final:
            reserved_s = max(self.reserved_s, FEWEST_PAIRS * pair_s)
        return self.left_s >= reserved_s + pair_s

    def pair_s(self, comparison: PairedComparison | None = None) -> float:
        """Return the seconds of a pair, from the runs of the two settings so far, else from all runs."""
        all_runs: list[TimedRun] = []
        for runs in self.runs.values():
            all_runs += runs
        usual_s = _mean_duration_s(all_runs)
        pair_s = 2.0 * usual_s
        if comparison is not None:
            a_s = self.mean_run_s(comparison.a_options) or usual_s
            b_s = self.mean_run_s(comparison.b_options) or usual_s
            pair_s = a_s + b_s
        return max(pair_s, 1e-9)

    def mean_run_s(self, options: Mapping[str, str]) -> float:
        """Return the mean seconds that successful runs with ``options`` took; 0 if none succeeded."""
        setting = frozenset(options.items())
        return _mean_duration_s(self.runs.get(setting, ()))


def _mean_duration_s(runs: Iterable[TimedRun]) -> float:
    """Return the mean seconds that successful runs took; 0 if none succeeded."""
    durations_s = [run.took_s for run in runs if run.step_s is not None]
    if not durations_s:
        return 0.0
    return sum(durations_s) / len(durations_s)


def _by_ceiling(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Sort by the largest ceiling of each group, the simplest of a group first: if it fails, so do the others."""
    largest_s: dict[str, float] = {}
    for candidate in candidates:
        largest_so_far_s = largest_s.setdefault(candidate.group, -math.inf)
        if candidate.ceiling_s is not None:
            largest_s[candidate.group] = max(largest_so_far_s, candidate.ceiling_s)

    def order(candidate: Candidate) -> tuple[float, int]:
        return -largest_s[candidate.group], len(candidate.options)

    return tuple(sorted(candidates, key=order))
