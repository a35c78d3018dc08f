"""The search of `improve`: it requests runs and numerical checks, and decides which changes are accepted.

It has no clock and no randomness, so the same results of runs give the same search. A search that was killed therefore
continues if it gets the earlier results again.

Candidates are proven one after the other, the highest ceiling first. Each is compared in fresh pairs of runs, on top of
the changes that were accepted before it. If a candidate does not look faster at a check, it is postponed. The rest of
the budget goes to the undecided candidates that look best. All proofs share the probability ``ERROR``.
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

# The share of searches that may accept a useless change. If some changes triple the spread of processes, it is up to
# 4 % (`benchmarks.improve`).
ERROR = 0.02

# A candidate may have this many pairs, or half of the remaining pairs if that is more, before the others had a turn.
FIRST_PAIRS = 8

# Pairs that compare the final setting with the first again, or a quarter of the budget's pairs if that is fewer. The
# time of one more pair is reserved, because numbers are checked too, and runs may take longer than earlier ones.
FINAL_PAIRS = 6

# the fewest runs in a budget for trying anything: the first setting's run, a proof, and the last comparison
FEWEST_RUNS = 1 + 4 * FEWEST_PAIRS

# If accepted changes shorten the step to less than this share, rejected candidates are tried again, because something
# else may limit the step now.
_RETRY_SHARE = 0.85

# verdicts that other accepted changes would hardly alter
_SETTLED_VERDICTS = ("NUMERICS", "FAILED")


class Searcher:
    """A search for the fastest setting, and its state so far.

    Candidates are tried in the order of their ceilings, the largest first, those without a known ceiling last; within a
    group the one with the fewest options is first. A proven change is kept, and further candidates are tried on top of
    it. A candidate that contains a failed change is refused. A run is started only if it is expected to end in time,
    judged by earlier runs. A run that the end of the budget stopped decides nothing.

    ``time(options, number)`` runs the first setting with ``options`` in a fresh process, for the ``number``-th time,
    counted from 0. ``check`` compares the numbers of both sides of a comparison. ``machine_spread`` is how far equal
    processes differ on this machine.
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
        # the run of the first setting, before any comparison; None until it has ended
        self.first_run: TimedRun | None = None
        # accepted options, besides those of the first setting
        self.options: Mapping[str, str] = {}
        # comparisons in their order; some may not have ended
        self.tried: list[PairedComparison] = []
        # candidates without a comparison, in their order
        self.untried = list(self.candidates)
        # the final setting compared with the first again; None if nothing was accepted or the budget ran out
        self.final: PairedComparison | None = None
        self.spent_s = 0.0  # seconds of the budget
        # None while the search runs; ``done``: every candidate was tried; ``failed``: the first setting failed
        self.outcome: Ended | None = None

        # What decides the next run.
        self.kept_changes: dict[str, Candidate] = {}  # group → accepted candidate
        # options of a setting → its runs
        self.runs: dict[frozenset[tuple[str, str]], list[TimedRun]] = {}
        # seconds of the budget that are reserved for the final comparison
        self.reserved_s = 0.0
        # name of a candidate → number of proofs that were begun
        self.proof_counts: dict[str, int] = {}
        # names of candidates that had their first turn; reset when accepted changes have shortened the step enough
        self.had_first_turn: set[str] = set()
        # the step time divided by the step time when ``had_first_turn`` was last reset
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
        has_candidates_left = bool(
            self.waiting_candidates() or self.undecided_comparisons()
        )
        has_accepted = any(comparison.accepted for comparison in self.tried)
        if has_accepted:
            self.compare_final_with_first()
        lacks_final_comparison = has_accepted and self.final is None
        was_any_cut = any(
            comparison.reason == ENDED for comparison in self.latest_comparisons()
        )

        if has_candidates_left or lacks_final_comparison or was_any_cut:
            return "budget"
        return "done"

    def reserve_final_comparison(self) -> None:
        """Reserve the seconds of the last comparison: a quarter of the pairs that the budget has, within two limits."""
        quarter = self.pairs_left() // 4
        pairs = max(FEWEST_PAIRS, min(FINAL_PAIRS + 1, quarter))
        self.reserved_s = pairs * self.pair_s()

    def prove_candidates(self) -> None:
        """Give each candidate a turn, the highest ceiling first; then continue with the best undecided one."""
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
                # Another change was accepted since then: begin again on top of it.
                best = self.on_top_of_kept_changes(best.candidate)
            next_look = min(look for look in LOOKS if look > best.pairs)
            self.prove(best, more_pairs=next_look - best.pairs)

    def compare_final_with_first(self) -> None:
        """Compare the final setting with the first one, if the budget still has the time."""
        comparison = PairedComparison(
            candidate=FINAL_SETTING,
            a_options={},  # the first setting
            b_options=self.options,
        )
        pairs = int(self.left_s / self.pair_s(comparison))
        if pairs >= FEWEST_PAIRS:
            self.compare(comparison, min(FINAL_PAIRS, pairs))

    def waiting_candidates(self) -> list[Candidate]:
        """Return the candidates that have not had their first turn, the highest ceiling first."""
        kept_changes = list(self.kept_changes.values())
        waiting = []
        for candidate in self.candidates:
            had_first_turn = candidate.name in self.had_first_turn
            if not had_first_turn and candidate not in kept_changes:
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
        """Return how far the apparent saving of a change exceeds the margin, as a logarithm; negative if below it."""
        return log_gain(comparison.ratios, self.spread_of_other_comparisons(comparison))

    def latest_comparisons(self) -> list[PairedComparison]:
        """Return the latest comparison of each candidate."""
        latest = {comparison.name: comparison for comparison in self.tried}
        return list(latest.values())

    def failed_part_of(self, comparison: PairedComparison) -> Candidate | None:
        """Return a failed change that is part of the change in ``comparison``; None if there is none.

        A change that ran out of memory does not count, because the other parts may need less memory.
        """
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
        """Return a new comparison with the current setting; the candidate replaces the accepted one of its group."""
        options: dict[str, str] = {}
        for group, kept_change in self.kept_changes.items():
            if group != candidate.group:
                options.update(kept_change.options)
        options.update(candidate.options)
        return PairedComparison(candidate, self.options, options)

    def prove(self, comparison: PairedComparison, more_pairs: int) -> None:
        """Compare in at most ``more_pairs`` fresh pairs until there is a verdict; accept the change if it is proven.

        If the change does not look faster at a check, the comparison is postponed; the second time, it is given up.
        """
        candidate = comparison.candidate
        changes_nothing = comparison.b_options == self.options
        if changes_nothing:
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
        was_postponed = comparison.pairs > 0 and self.promised_gain(comparison) <= 0.0
        proof = self.compare(comparison, most_pairs)
        does_not_look_faster = may_continue(proof) and self.promised_gain(proof) <= 0.0
        if was_postponed and does_not_look_faster:
            proof = replace(proof, reason=NOT_FASTER)
        if proof.verdict == "FASTER":
            proof = self.check_numerics(candidate, proof)
        self.keep_comparison(proof)
        if proof.accepted:
            self.accept(candidate, proof)

    def next_error_share(self, candidate: Candidate) -> float:
        """Return the probability with which the candidate's next interval may be wrong.

        An interval may be wrong on either side, but only one side accepts a change. So all candidates that are not
        accepted yet share twice ``ERROR``. Each further proof of a candidate gets half the error of its previous one.
        """
        earlier_proofs = self.proof_counts.get(candidate.name, 0)
        self.proof_counts[candidate.name] = earlier_proofs + 1
        open_candidates = len(self.candidates) - len(self.kept_changes)
        # With one open candidate its share is ``ERROR``, not twice as much.
        shares = max(open_candidates, 2)
        error_of_candidate = 2.0 * ERROR / shares
        return error_of_candidate / 2.0**earlier_proofs

    def accept(self, candidate: Candidate, proof: PairedComparison) -> None:
        """Keep a proven change; if the step has become much faster, rejected candidates get another turn."""
        self.kept_changes.pop(candidate.group, None)
        # Inserted at the end: if two changes set the same option, the later one counts.
        self.kept_changes[candidate.group] = candidate
        self.options = proof.b_options
        self.step_share *= proof.ratio
        if self.step_share >= _RETRY_SHARE:
            return
        self.step_share = 1.0
        # Settled candidates keep their verdict; all others get another turn.
        self.had_first_turn = {
            comparison.name
            for comparison in self.latest_comparisons()
            if self.is_settled(comparison)
        }

    def is_settled(self, comparison: PairedComparison) -> bool:
        """Return whether the verdict would stay the same on top of other accepted changes."""
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
        """Run pairs until the interval decides or the change is postponed; B and A take turns to run first."""
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
                if self.is_postponed(comparison):
                    comparison = replace(comparison, verdict="UNDECIDED")
                self.keep_comparison(comparison)
                if comparison.verdict is not None:
                    break
        return comparison

    def is_postponed(self, comparison: PairedComparison) -> bool:
        """Return whether the comparison is at a check, is not decided, and does not look faster."""
        if comparison.is_final or comparison.verdict is not None:
            return False
        is_whole_pair = len(comparison.runs_a) == len(comparison.runs_b)
        if not is_whole_pair or comparison.pairs not in LOOKS:
            return False
        return self.promised_gain(comparison) <= 0.0

    def with_run(self, comparison: PairedComparison, side: str) -> PairedComparison:
        """Return the comparison with one more run of ``side``, a or b.

        A has run successfully before, so a failure of A is not due to the change: A then runs a second time.
        """
        if side == "b":
            run_b = self.run(comparison.b_options)
            return replace(comparison, runs_b=(*comparison.runs_b, run_b))
        run_a = self.run(comparison.a_options)
        has_failed = run_a.step_s is None and not run_a.was_cut
        if has_failed:
            run_a = self.run(comparison.a_options)
        return replace(comparison, runs_a=(*comparison.runs_a, run_a))

    def spread_of_other_comparisons(self, comparison: PairedComparison) -> float:
        """Return the spread of processes, estimated from the runs of all other comparisons."""
        runs_of_comparison = {
            id(run) for run in (*comparison.runs_a, *comparison.runs_b)
        }
        settings = []
        for runs in self.runs.values():
            other_runs = [run for run in runs if id(run) not in runs_of_comparison]
            settings.append(step_times_s(other_runs))
        return pooled_spread(settings, self.machine_spread)

    def run(self, options: Mapping[str, str]) -> TimedRun:
        """Run the setting with ``options`` once more, and return its time; the budget pays for the run."""
        runs = self.runs.setdefault(frozenset(options.items()), [])
        run = self.time(options, len(runs))
        runs.append(run)
        self.spent_s += run.took_s
        return run

    def keep_comparison(self, comparison: PairedComparison) -> None:
        """Replace the earlier state of the comparison by this one."""
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
        """Return how many pairs, as long as earlier ones, still fit into the budget without the reserved time."""
        pairs = int((self.left_s - self.reserved_s) / self.pair_s())
        return max(0, pairs)

    def has_time_for(self, comparison: PairedComparison) -> bool:
        """Return whether one more pair would end in time and leave enough time for the final comparison."""
        pair_s = self.pair_s(comparison)
        reserved_s = 0.0
        if not comparison.is_final:
            reserved_s = max(self.reserved_s, FEWEST_PAIRS * pair_s)
        return self.left_s >= reserved_s + pair_s

    def pair_s(self, comparison: PairedComparison | None = None) -> float:
        """Return the expected seconds of a pair, from earlier runs of its two settings, or else from all runs."""
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
    """Sort candidates by the largest ceiling of their group; within a group the fewest options are first.

    If the simplest candidate of a group fails, those that contain it are refused.
    """
    group_ceilings_s: dict[str, float] = {}
    for candidate in candidates:
        ceiling_s = -math.inf if candidate.ceiling_s is None else candidate.ceiling_s
        known_ceiling_s = group_ceilings_s.get(candidate.group, -math.inf)
        group_ceilings_s[candidate.group] = max(known_ceiling_s, ceiling_s)

    def sort_key(candidate: Candidate) -> tuple[float, int]:
        return -group_ceilings_s[candidate.group], len(candidate.options)

    return tuple(sorted(candidates, key=sort_key))
