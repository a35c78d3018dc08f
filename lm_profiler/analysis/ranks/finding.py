"""Which ranks the others wait for: one rank, several, one host, ranks in turns, or none."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from lm_profiler.analysis.ranks.rank_timeline import Seconds
from lm_profiler.analysis.ranks.slowness import Slow, slow_ranks
from lm_profiler.analysis.ranks.waiting import RanksWork
from lm_profiler.record.run_record import RANK_PARTS, Contention, RankDoubt, RankFinding, SlowRank, StepCounters

_MOST = 0.5  # the largest share of a rank's lateness that other programs may cause for the rank to be blamed

_WORTH = 0.02  # the least share of the step that mending must save to be reported

_JITTER = 0.05  # the least share of the step that evening a part must save, if no single rank is slow

# a rank's part is named if mending all ranks without it saves less by this share
_MATTERS = 0.1

_ALONE = 4  # more ranks than this that are slow in one part are mended together or not at all

# standard deviation over mean of a rank's part relative to the others' in the same step: below this it is plain noise
_UNEVEN = 0.20

_CHANCE = 2.33  # the normal quantile of one in a hundred

_ONE = 0.8  # a rank that causes more than this share of all waiting does not take turns with others

_COUNTED = ("wall_s", "asleep_s", "cpu_wait_s", "cpu_s")

_LEAST_STEPS = 3
_MOST_KEPT = 64


@dataclass(frozen=True)
class Contended:
    """Seconds that other programs can have added to the mean step of each rank."""

    # how long the training thread was ready to run without a CPU, plus how much shared caches, memory and cores may
    # have slowed it, which is taken to be the share that other programs used
    added_s: Sequence[float | None]
    # how long its other threads may have waited for a CPU: not counted, but the training thread slept meanwhile
    threads_s: Sequence[float]

    def is_sure(self, slow: Slow) -> bool:
        """Return whether other programs can cause at most half of its lateness; they cannot cause a sleep or a late
        batch."""
        mine = self.added_s[slow.rank]
        theirs = [seconds for rank in slow.fast if rank != slow.rank and (seconds := self.added_s[rank]) is not None]
        if mine is None or not theirs:
            return False
        return max(mine - fmean(theirs), 0.0) + self.threads_s[slow.rank] <= _MOST * slow.seconds


def contended(shared: Contention | None, counters: Sequence[StepCounters], ranks: Sequence[int]) -> Contended | None:
    """Return what other programs can have added to ``ranks``, from the ``counters`` of their measured steps; None where
    nothing else used the machine."""
    if shared is None or not shared.shared:
        return None
    taken = min(shared.not_had or 0.0, 0.95)
    by_rank = defaultdict[int, list[StepCounters]](list)
    for one in counters:
        if one.step is not None:
            by_rank[one.rank].append(one)
    lost = [_lost_s(by_rank[rank], taken) for rank in ranks]
    return Contended([added for added, _ in lost], [threads for _, threads in lost])


def _lost_s(steps: Sequence[StepCounters], taken: float) -> tuple[float | None, float]:
    """Return what the training thread, None if unknown, and the other threads may have lost in the mean step."""
    known = {name: [v for one in steps if (v := getattr(one, name)) is not None] for name in _COUNTED}
    if not all(known[name] for name in _COUNTED[:3]):
        return None, 0.0
    wall_s, asleep_s, waited_s, cpu_s = (fmean(values or [0.0]) for values in known.values())
    ran_s = max(wall_s - asleep_s - waited_s, 0.0)
    return waited_s + taken * ran_s, max(cpu_s - ran_s, 0.0) * taken / (1.0 - taken)


@dataclass(frozen=True)
class HeardRanks:
    """The ranks that reported their arrivals."""

    named: Sequence[int]  # the number of each
    hosts: Sequence[str]
    contended: Contended | None = None  # the delay that other programs may have caused, if any used the machine


def finding(work: RanksWork, group: HeardRanks) -> RankFinding:
    """Return which ranks the others wait for."""
    steps = len(work.steps)
    if steps < _LEAST_STEPS:
        return RankFinding(kind="unsure", doubt="few steps", steps=steps)
    slow = slow_ranks(work.own_s, work.step_s)
    certain = [one for one in slow if one.certain]
    sure = certain if group.contended is None else [one for one in certain if group.contended.is_sure(one)]
    if (told := _told(sure, work, group)) is not None:
        return told
    doubt: RankDoubt = "shared machine" if certain != sure else "few steps"
    doubted = certain if certain != sure else [one for one in slow if one.seconds > one.half_s][:_ALONE]
    if work.saves_s(doubted) >= _JITTER * work.step_s:
        kept = [_slow_rank(replace(one, certain=False), work, group) for one in doubted[:_MOST_KEPT]]
        return RankFinding(kind="unsure", slow=kept, doubt=doubt, steps=steps)
    return _nobody(work, group)


def _told(slow: Sequence[Slow], work: RanksWork, group: HeardRanks) -> RankFinding | None:
    """Return the finding about those of ``slow`` that must be mended, if that saves enough to be reported."""
    mended = _that_matter(slow, work)
    saves_s = work.saves_s(mended)
    if saves_s < _WORTH * work.step_s:
        return None
    ranks = sorted({one.rank for one in mended})
    excess_s = sum(one.seconds for one in mended) / len(ranks)
    # The saving is as uncertain as the excess time; of equally slow ranks, one comes last.
    longest = {part: max(one.half_s for one in mended if one.part == part) for part in {one.part for one in mended}}
    half_s = math.hypot(*longest.values()) * min(saves_s / excess_s, 1.0)
    if half_s >= saves_s:
        return None
    hosts = {group.hosts[rank] for rank in ranks}
    there = [rank for rank, host in enumerate(group.hosts) if host in hosts]
    is_host = len(hosts) == 1 and ranks == there and len(there) < len(group.hosts)
    caused_s = work.caused_s[ranks].sum(axis=0)
    return RankFinding(
        kind="straggler" if len(ranks) == 1 else "host" if is_host else "several",
        rank=group.named[ranks[0]] if len(ranks) == 1 else None,
        host=hosts.pop() if len(hosts) == 1 else None,
        phase=RANK_PARTS[mended[0].part] if len(longest) == 1 else None,
        excess_s=excess_s,
        saves_s=saves_s,
        low_s=saves_s - half_s,
        high_s=saves_s + half_s,
        last_in=int(np.count_nonzero(caused_s > np.delete(work.caused_s, ranks, axis=0).max(axis=0, initial=0.0))),
        others_wait_s=_others_wait_s(work, ranks),
        slow=[_slow_rank(one, work, group) for one in mended[:_MOST_KEPT]],
        slow_ranks=len(ranks),
        steps=len(work.steps),
    )


def _that_matter(slow: Sequence[Slow], work: RanksWork) -> list[Slow]:
    """Return those whose mending adds to the saving, the slowest first; mending the others may save nothing."""
    parts = [[one for one in slow if one.part == part] for part in {one.part for one in slow}]
    units = [unit for some in parts for unit in ([some] if len(some) > _ALONE else [[one] for one in some])]
    kept = list(slow)
    saved_s = all_s = work.saves_s(kept)
    for unit in sorted(units, key=lambda unit: unit[0].seconds):
        without = [one for one in kept if one not in unit]
        less_s = work.saves_s(without)
        if without and saved_s - less_s < max(_MATTERS * all_s, _WORTH * work.step_s):
            kept, saved_s = without, less_s
    return kept


def _slow_rank(one: Slow, work: RanksWork, group: HeardRanks) -> SlowRank:
    return SlowRank(
        rank=group.named[one.rank],
        host=group.hosts[one.rank],
        phase=RANK_PARTS[one.part],
        excess_s=one.seconds,
        low_s=one.seconds - one.half_s if math.isfinite(one.half_s) else None,
        high_s=one.seconds + one.half_s if math.isfinite(one.half_s) else None,
        certain=one.certain,
        first_step=int(work.steps[one.first]),
        last_step=int(work.steps[one.end - 1]),
    )


def _others_wait_s(work: RanksWork, ranks: Sequence[int]) -> float:
    """Return how long ranks outside of ``ranks`` wait for them on average; for all ranks, how long each waits."""
    waiting_s, everyone = work.waiting_s.sum(axis=2), len(work.own_s)
    if len(ranks) == everyone:
        return float(waiting_s.mean())
    by_all = float(work.caused_s[ranks].sum(axis=0).mean()) * (everyone - 1)  # slow ranks wait for each other, too
    return min(by_all / (everyone - len(ranks)), float(np.delete(waiting_s, ranks, axis=0).mean()))


def _nobody(work: RanksWork, group: HeardRanks) -> RankFinding:
    """Return the finding without a slow rank: ranks take turns, perhaps because of other programs, or do not differ."""
    steps = len(work.steps)
    uneven = [part for part, own_s in enumerate(np.moveaxis(work.own_s, 2, 0)) if _unevenness(own_s) >= _UNEVEN]
    saved = {part: work.evened_s(part) for part in uneven}
    part = max(saved, key=lambda each: saved[each], default=None)
    waits_s = float(work.waiting_s.sum(axis=2).mean())
    if part is None or saved[part] < _JITTER * work.step_s:
        return RankFinding(kind="equal", others_wait_s=waits_s, steps=steps)
    caused = work.caused_s.sum(axis=1)
    worst = int(caused.argmax())
    known = RankFinding(kind="unsure", phase=RANK_PARTS[part], others_wait_s=waits_s, steps=steps)
    if caused[worst] > _ONE * caused.sum():
        return known.model_copy(update={"rank": group.named[worst], "doubt": "chance"})
    if group.contended is not None:
        return known.model_copy(update={"doubt": "shared machine"})
    return known.model_copy(update={"kind": "turns", "saves_s": saved[part]})


def _unevenness(own: Seconds) -> float:
    """Return a lower bound of std over mean of a rank's time relative to the other ranks' in the same step.

    Plain noise exceeds the bound in one of a hundred tries (chi-square approximation of Wilson and Hilferty 1931).
    """
    mean = float(own.mean())
    if mean <= 0.0:
        return 0.0
    ranks, steps = own.shape
    freedom = (ranks - 1) * (steps - 1)
    # A rank's own level is not jitter.
    apart = own - own.mean(axis=0) - (own.mean(axis=1) - mean)[:, None]
    by_chance = (1.0 - 2.0 / (9.0 * freedom) + _CHANCE * math.sqrt(2.0 / (9.0 * freedom))) ** 3
    return math.sqrt(float((apart**2).sum()) / freedom / by_chance) / mean
