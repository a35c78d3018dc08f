"""Decides which ranks the others wait for: one rank, several, one host, ranks in turns, or none."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TypeVar

import numpy as np

from lm_profiler.analysis.ranks.rank_timeline import OUTSIDE, Seconds
from lm_profiler.analysis.ranks.slow_rank_cause import CountersByRank, RankCause
from lm_profiler.analysis.ranks.slowness import SlowCandidate, slow_ranks
from lm_profiler.analysis.ranks.waiting import RanksWork
from lm_profiler.record.run_record import (
    RANK_PARTS,
    Contention,
    FindingKind,
    RankDoubt,
    RankFinding,
    SlowRank,
    StepCounters,
)

# A rank is slow by itself only if other programs can have caused at most this share of its delay.
_MOST_SHARE_BY_OTHERS = 0.5

_LEAST_SAVED_SHARE = (
    0.02  # fixing slow ranks is reported if it saves this share of the step
)

# if no single rank is slow: making a part equal on all ranks must save this share of the step
_LEAST_SAVED_IF_EVEN = 0.05

# A slow rank is reported only if the saving is smaller by this share when all others are fixed but it is not.
_LEAST_LOST_SHARE = 0.1

# If more ranks than this are slow in one part, they are reported together or not at all.
_MOST_SINGLE_RANKS = 4

# Ranks take turns in a part if its coefficient of variation, over ranks within a step, is this large; less is noise.
_LEAST_VARIATION = 0.20

# the quantile of the normal distribution that is exceeded in 1 % of cases
_CHANCE_QUANTILE = 2.33

# a rank that causes more than this share of all waiting does not take turns with others
_LEAST_SHARE_OF_SINGLE_CAUSE = 0.8

# so that the time of threads is not divided by almost 0 (1 - this share)
_LARGEST_TAKEN_SHARE = 0.95
_FEWEST_STEPS = 3  # with fewer steps, nothing is concluded
_MOST_RECORDED_RANKS = 64  # the most slow ranks that the record lists

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class DelayByOthers:
    """Seconds that other programs can have added to the mean step of each rank."""

    # For the training thread: the time in which it waited for a CPU, plus the slowdown by sharing caches, memory and
    # cores, which is assumed to be ``taken_share`` of its running time. None if unknown.
    training_thread_s: Sequence[float | None]
    # An estimate of how long the rank's other threads waited for a CPU, while the training thread slept.
    other_threads_s: Sequence[float]
    taken_share: float = 0.0  # the share of the CPU time that other programs used

    def is_mostly_own_delay(self, slow: SlowCandidate, cause: RankCause | None) -> bool:
        """Return whether other programs can have caused at most half of the delay of ``slow``.

        They cannot cause a sleep or a late batch. They can only lengthen a ``cause`` in the rank itself.
        """
        most_by_others_s = _MOST_SHARE_BY_OTHERS * slow.seconds
        if cause is not None:
            # even without other programs, the cause explains at least half of the delay
            undisturbed_s = cause.seconds * (1.0 - self.taken_share)
            if undisturbed_s >= most_by_others_s:
                return True
        own_s = self.training_thread_s[slow.rank]
        fast_ranks_s = []
        for rank in slow.fast_ranks:
            rank_s = self.training_thread_s[rank]
            if rank != slow.rank and rank_s is not None:
                fast_ranks_s.append(rank_s)
        if own_s is None or not fast_ranks_s:
            return False
        more_than_others_s = max(own_s - fmean(fast_ranks_s), 0.0)
        return more_than_others_s + self.other_threads_s[slow.rank] <= most_by_others_s


def delay_by_others(
    contention: Contention | None,
    counters: Sequence[StepCounters],
    ranks: Sequence[int],
) -> DelayByOthers | None:
    """Return the delay that other programs can have caused in ``ranks``, from the ``counters`` of measured steps.

    None if no other program used the machine.
    """
    if contention is None or not contention.is_shared:
        return None
    taken_share = min(contention.not_had or 0.0, _LARGEST_TAKEN_SHARE)
    counters_by_rank = CountersByRank(counters)
    training_thread_s: list[float | None] = []
    other_threads_s: list[float] = []
    for rank in ranks:
        training_thread_lost_s, other_threads_lost_s = _seconds_lost_by_threads(
            counters_by_rank, rank, taken_share
        )
        training_thread_s.append(training_thread_lost_s)
        other_threads_s.append(other_threads_lost_s)
    return DelayByOthers(training_thread_s, other_threads_s, taken_share)


def _seconds_lost_by_threads(
    counters: CountersByRank, rank: int, taken_share: float
) -> tuple[float | None, float]:
    """Return the seconds per step that the training thread (None: unknown) and the other threads may have lost."""
    wall_s = counters.mean_s(rank, "wall_s")
    asleep_s = counters.mean_s(rank, "asleep_s")
    waited_s = counters.mean_s(rank, "cpu_wait_s")
    if wall_s is None or asleep_s is None or waited_s is None:
        return None, 0.0
    cpu_s = counters.mean_s(rank, "cpu_s") or 0.0
    ran_s = max(wall_s - asleep_s - waited_s, 0.0)
    training_thread_lost_s = waited_s + taken_share * ran_s
    other_threads_ran_s = max(cpu_s - ran_s, 0.0)
    # They are taken to have got the share of the CPU time that other programs left.
    other_threads_lost_s = other_threads_ran_s * taken_share / (1.0 - taken_share)
    return training_thread_lost_s, other_threads_lost_s


@dataclass(frozen=True)
class ReportingRanks:
    """The ranks that reported their arrivals."""

    numbers: Sequence[int]  # the number of each in the run, by its index here
    hosts: Sequence[str]
    counters: CountersByRank
    # the delay that other programs may have caused; None if none used the machine
    delay_by_others: DelayByOthers | None = None

    def cause_of(self, slow: SlowCandidate) -> RankCause | None:
        """Return the cause of the excess time of ``slow``; None if it is unknown."""
        fast = [self.numbers[rank] for rank in slow.fast_ranks]
        return self.counters.cause_of(self.numbers[slow.rank], fast, slow.seconds)

    def is_mostly_own_delay(self, slow: SlowCandidate) -> bool:
        """Return whether other programs can have caused at most half of the rank's delay."""
        return self.delay_by_others is None or self.delay_by_others.is_mostly_own_delay(
            slow, self.cause_of(slow)
        )


def finding(work: RanksWork, group: ReportingRanks) -> RankFinding:
    """Return which ranks the others wait for.

    These are the ranks that are certain to be slow, if their delay is mostly their own and it is worth fixing. Without
    any, the finding is "unsure" about the ranks that may be slow, with the doubt, if fixing them would be worth it.
    Otherwise no rank is slow.
    """
    steps = len(work.steps)
    if steps < _FEWEST_STEPS:
        return RankFinding(kind="unsure", doubt="few steps", steps=steps)
    slow = slow_ranks(work.own_s, work.step_s)
    certain = [candidate for candidate in slow if candidate.is_certain]
    slow_by_themselves = [
        candidate for candidate in certain if group.is_mostly_own_delay(candidate)
    ]
    certain_finding = _finding_about(slow_by_themselves, work, group)
    if certain_finding is not None:
        return certain_finding

    doubt: RankDoubt
    if len(slow_by_themselves) < len(certain):
        # other programs may have delayed the rest
        doubt = "shared machine"
        doubtful = certain
    else:
        # More steps would show whether these are slow; now chance may explain their delay.
        doubt = "few steps"
        likely = [
            candidate
            for candidate in slow
            if candidate.seconds > candidate.half_interval_s
        ]
        doubtful = likely[:_MOST_SINGLE_RANKS]
    if work.saved_if_fixed_s(doubtful) < _LEAST_SAVED_IF_EVEN * work.step_s:
        return _finding_without_slow_rank(work, group)
    recorded = []
    for candidate in doubtful[:_MOST_RECORDED_RANKS]:
        recorded.append(_slow_rank(replace(candidate, is_certain=False), work, group))
    return RankFinding(kind="unsure", slow=recorded, doubt=doubt, steps=steps)


def _finding_about(
    slow: Sequence[SlowCandidate], work: RanksWork, group: ReportingRanks
) -> RankFinding | None:
    """Return the finding about the slow ranks that are worth fixing; None if this would not save enough."""
    to_fix = _worth_fixing(slow, work)
    saving_s = work.saved_if_fixed_s(to_fix)
    if saving_s < _LEAST_SAVED_SHARE * work.step_s:
        return None
    ranks = sorted({candidate.rank for candidate in to_fix})  # the indices of the ranks
    excess_s = sum(candidate.seconds for candidate in to_fix) / len(ranks)
    half_s = _half_interval_s(to_fix, saving_s, excess_s)
    may_save_nothing = half_s >= saving_s
    if may_save_nothing:
        return None

    rank_numbers = {group.numbers[rank] for rank in ranks}
    hosts = {group.hosts[rank] for rank in ranks}
    phases = {RANK_PARTS[candidate.part] for candidate in to_fix}
    causes: set[str] = set()
    for candidate in to_fix:
        cause = group.cause_of(candidate)
        if cause is not None:
            causes.add(cause.words)
    return RankFinding(
        kind=_kind_of(ranks, group),
        rank=_single_value(rank_numbers),
        host=_single_value(hosts),
        phase=_single_value(phases),
        cause=_single_value(causes),
        excess_s=excess_s,
        saves_s=saving_s,
        low_s=saving_s - half_s,
        high_s=saving_s + half_s,
        last_in=_steps_in_which_last(work, ranks),
        others_wait_s=_others_wait_s(work, to_fix),
        slow=[
            _slow_rank(candidate, work, group)
            for candidate in to_fix[:_MOST_RECORDED_RANKS]
        ],
        slow_ranks=len(ranks),
        steps=len(work.steps),
    )


def _half_interval_s(
    to_fix: Sequence[SlowCandidate], saving_s: float, excess_s: float
) -> float:
    """Return half of the 95 % interval of the saving, from the intervals of the excess times."""
    # Of several slow ranks in a part only one is last, so the widest of their intervals counts, and not their sum.
    half_by_part: dict[int, float] = {}
    for candidate in to_fix:
        widest_s = half_by_part.get(candidate.part, 0.0)
        half_by_part[candidate.part] = max(candidate.half_interval_s, widest_s)
    half_of_excess_s = math.hypot(*half_by_part.values())
    # the step becomes shorter by only a share of the excess, and so does the interval
    saved_share = min(saving_s / excess_s, 1.0)
    return half_of_excess_s * saved_share


def _single_value(values: set[_Value]) -> _Value | None:
    """Return the only one of ``values``; None if there are several, or none."""
    if len(values) != 1:
        return None
    return next(iter(values))


def _kind_of(ranks: Sequence[int], group: ReportingRanks) -> FindingKind:
    """Return the kind of a finding about ``ranks``, which are sorted."""
    if len(ranks) == 1:
        return "straggler"
    hosts = {group.hosts[rank] for rank in ranks}
    ranks_of_hosts = [rank for rank, host in enumerate(group.hosts) if host in hosts]
    has_other_hosts = len(ranks) < len(group.hosts)
    if len(hosts) == 1 and list(ranks) == ranks_of_hosts and has_other_hosts:
        return "host"
    return "several"


def _steps_in_which_last(work: RanksWork, ranks: Sequence[int]) -> int:
    """Return the number of steps in which ``ranks`` caused more waiting than any other rank."""
    by_these_s = work.caused_s[ranks].sum(axis=0)
    by_others_s = np.delete(work.caused_s, ranks, axis=0).max(axis=0, initial=0.0)
    return int(np.count_nonzero(by_these_s > by_others_s))


def _worth_fixing(
    slow: Sequence[SlowCandidate], work: RanksWork
) -> list[SlowCandidate]:
    """Return the slow ranks without which the saving would be clearly smaller, the slowest first.

    Others are slow too, but wait for these. Starting with the least slow ones, ranks are dropped if the saving stays
    about the same.
    """
    to_fix = list(slow)
    saved_s = work.saved_if_fixed_s(to_fix)
    least_loss_s = max(_LEAST_LOST_SHARE * saved_s, _LEAST_SAVED_SHARE * work.step_s)
    # the first rank of a unit is its slowest
    for unit in sorted(_units_of(slow), key=lambda unit: unit[0].seconds):
        rest = [candidate for candidate in to_fix if candidate not in unit]
        if not rest:
            continue
        saved_by_rest_s = work.saved_if_fixed_s(rest)
        if saved_s - saved_by_rest_s < least_loss_s:
            to_fix = rest
            saved_s = saved_by_rest_s
    return to_fix


def _units_of(slow: Sequence[SlowCandidate]) -> list[list[SlowCandidate]]:
    """Return the groups that are fixed or dropped together: one rank each, or all ranks of a part if they are many."""
    by_part = defaultdict[int, list[SlowCandidate]](list)
    for candidate in slow:
        by_part[candidate.part].append(candidate)
    units = []
    for same_part in by_part.values():
        if len(same_part) > _MOST_SINGLE_RANKS:
            units.append(same_part)
        else:
            units.extend([candidate] for candidate in same_part)
    return units


def _slow_rank(
    candidate: SlowCandidate, work: RanksWork, group: ReportingRanks
) -> SlowRank:
    """Return the record's row of a slow rank: its excess, its phase and steps, and the cause."""
    low_s = None
    high_s = None
    if math.isfinite(candidate.half_interval_s):
        low_s = candidate.seconds - candidate.half_interval_s
        high_s = candidate.seconds + candidate.half_interval_s
    cause = group.cause_of(candidate)
    return SlowRank(
        rank=group.numbers[candidate.rank],
        host=group.hosts[candidate.rank],
        phase=RANK_PARTS[candidate.part],
        excess_s=candidate.seconds,
        low_s=low_s,
        high_s=high_s,
        certain=candidate.is_certain,
        cause=None if cause is None else cause.words,
        first_step=int(work.steps[candidate.begin]),
        last_step=int(work.steps[candidate.end - 1]),
    )


def _others_wait_s(work: RanksWork, slow: Sequence[SlowCandidate]) -> float:
    """Return how long the other ranks wait for ``slow`` per step on average; if all are slow, how long a rank waits."""
    ranks = sorted({candidate.rank for candidate in slow})
    waiting_s = work.waiting_s.sum(axis=2)  # (ranks, steps)
    if any(candidate.part == OUTSIDE for candidate in slow):
        waiting_s = waiting_s + work.waiting_outside_s
    all_ranks = len(work.own_s)
    all_are_slow = len(ranks) == all_ranks
    if all_are_slow:
        return float(waiting_s.mean())
    # ``caused_s`` of a rank is a mean over all ranks except itself; here it is a sum over them.
    all_caused_s = float(work.caused_s[ranks].sum(axis=0).mean()) * (all_ranks - 1)
    caused_per_other_s = all_caused_s / (all_ranks - len(ranks))
    # It includes that the slow ranks wait for each other, so it is limited by how long the others wait.
    others_waiting_s = float(np.delete(waiting_s, ranks, axis=0).mean())
    return min(caused_per_other_s, others_waiting_s)


def _finding_without_slow_rank(work: RanksWork, group: ReportingRanks) -> RankFinding:
    """Return the finding if no rank is slow: ranks take turns, or do not differ, or it is unsure which.

    Ranks take turns if some part is uneven and making it equal on all ranks would save enough.
    """
    steps = len(work.steps)
    waits_s = float(work.waiting_s.sum(axis=2).mean())
    saved_s: dict[int, float] = {}
    for part in range(work.own_s.shape[2]):
        if _unevenness(work.own_s[:, :, part]) >= _LEAST_VARIATION:
            saved_s[part] = work.saved_if_even_s(part)
    uneven_part = max(saved_s, key=lambda part: saved_s[part], default=None)
    if uneven_part is None or saved_s[uneven_part] < _LEAST_SAVED_IF_EVEN * work.step_s:
        return RankFinding(kind="equal", others_wait_s=waits_s, steps=steps)

    unsure = RankFinding(
        kind="unsure", phase=RANK_PARTS[uneven_part], others_wait_s=waits_s, steps=steps
    )
    # If one rank causes nearly all waiting, ranks do not take turns, but it is not certain that this rank is slow.
    caused_s = work.caused_s.sum(axis=1)
    worst = int(caused_s.argmax())
    if caused_s[worst] > _LEAST_SHARE_OF_SINGLE_CAUSE * caused_s.sum():
        return unsure.model_copy(
            update={"rank": group.numbers[worst], "doubt": "chance"}
        )
    if group.delay_by_others is not None:
        return unsure.model_copy(update={"doubt": "shared machine"})
    return unsure.model_copy(update={"kind": "turns", "saves_s": saved_s[uneven_part]})


def _unevenness(own_s: Seconds) -> float:
    """Return a lower confidence limit (99 %) of the coefficient of variation of ranks within a step.

    ``own_s`` is [rank, step]. Differences between steps, and constant differences between ranks, do not count. The
    quantile of chi-square is approximated (Wilson and Hilferty 1931).
    """
    mean_s = float(own_s.mean())
    if mean_s <= 0.0:
        return 0.0
    ranks, steps = own_s.shape
    freedom = (ranks - 1) * (steps - 1)
    # what is left after subtracting the mean of each step, and how far each rank is from it on average
    step_means_s = own_s.mean(axis=0)
    rank_levels_s = own_s.mean(axis=1) - mean_s
    residuals_s = own_s - step_means_s - rank_levels_s[:, None]
    variance = float((residuals_s**2).sum()) / freedom

    # The cube root of chi-square per degree of freedom is about normal. This is its variance; its mean is 1 minus that.
    root_variance = 2.0 / (9.0 * freedom)
    root_quantile = 1.0 - root_variance + _CHANCE_QUANTILE * math.sqrt(root_variance)
    chi_square_per_freedom = root_quantile**3
    return math.sqrt(variance / chi_square_per_freedom) / mean_s
