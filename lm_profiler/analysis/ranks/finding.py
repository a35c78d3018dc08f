"""For whom the others wait: one rank, one host, another one each time, or nobody."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lm_profiler.analysis.ranks.excess import Excess, excesses, standard_error, student
from lm_profiler.analysis.ranks.replay import Replay
from lm_profiler.analysis.ranks.work import RanksWork
from lm_profiler.record.parts import PARTS
from lm_profiler.record.run import RankFinding

_WORTH = 0.02
"""Of the step: what mending must save at least, to be spoken of."""

_JITTER = 0.05
"""Of the step: what evening a part must save, where no rank is the slow one."""

_UNEVEN = 0.20
"""Standard deviation over mean, of a part of one rank beside the others' in the same step: below, it is plain noise."""

_CHANCE = 2.33
"""The normal quantile of one in a hundred."""

_ONE = 0.8
"""Of all waiting: whoever causes more of it does not take turns with others."""

_TAIL = 0.025
_LEAST_STEPS = 3
_TRIED = 8
_HOST = 1.25
"""Mending a whole host must save so many times what its worst rank would."""


@dataclass(frozen=True)
class _Mend:
    """``ranks`` are slower in ``parts``, together by ``excess_s`` with a standard error of ``error_s``."""

    ranks: tuple[int, ...]
    host: str | None
    parts: tuple[int, ...]
    excess_s: float
    error_s: float
    saves_s: float
    certain: bool


def finding(replay: Replay, named: Sequence[int], hosts: Sequence[str], uncertainty_s: float = 0.0) -> RankFinding:
    """What the steps say.

    Args:
        replay: of the steps.
        named: what each rank is called.
        hosts: of each.
        uncertainty_s: by how much two ranks' clocks may differ still.
    """
    work = replay.work
    if len(replay.course.steps) < _LEAST_STEPS:
        return RankFinding(kind="unsure", evidence="too few steps to tell who waits for whom")
    best, whole = _best(_mends_of_ranks(replay)), _best(_mends_of_hosts(replay, hosts))
    alone_s = best.saves_s if best is not None and best.certain else 0.0
    if whole is not None and whole.certain and whole.saves_s > _HOST * alone_s:
        best = whole
    if best is not None and best.saves_s >= _WORTH * work.step_s:
        low_s, high_s = _interval(best, len(replay.course.steps), uncertainty_s)
        if best.certain and low_s > 0.0:
            return _told(best, replay, named, hosts, low_s, high_s)
        if best.saves_s >= _JITTER * work.step_s and low_s > 0.0:
            return RankFinding(kind="unsure", evidence=_unsure(best, replay, named))
    return _nobody(replay, named)


def _best(mends: Sequence[_Mend]) -> _Mend | None:
    """What saves most, of those that are no chance, if there are any."""
    return max(mends, key=lambda mend: (mend.certain, mend.saves_s), default=None)


def _mends_of_ranks(replay: Replay) -> list[_Mend]:
    """Of each rank and part that takes longer; of a rank that does in several, all of them at once as well."""
    work, mends = replay.work, []
    everyone = range(len(work.own_s))
    slow = sorted(excesses(work.own_s), key=lambda e: (not e.certain, -e.seconds))[:_TRIED]
    for one in slow:
        mends.append(_mend(replay, (one.group,), None, [one], everyone))
    for rank in dict.fromkeys(one.group for one in slow):
        its = [one for one in slow if one.group == rank and one.certain]
        if len(its) > 1:
            together = _mend(replay, (rank,), None, its, everyone)
            if together.saves_s > _HOST * max(mend.saves_s for mend in mends if mend.ranks == (rank,)):
                mends.append(together)
    return mends


def _mends_of_hosts(replay: Replay, hosts: Sequence[str]) -> list[_Mend]:
    """Of each host with several ranks: by the medians of its ranks, as if it was one."""
    names = list(dict.fromkeys(hosts))
    ranks = [tuple(r for r, host in enumerate(hosts) if host == name) for name in names]
    if len(names) < 2 or max(map(len, ranks)) < 2:
        return []
    own_s = np.stack([np.median(replay.work.own_s[list(group)], axis=0) for group in ranks])
    everyone = range(len(hosts))
    slow = [one for one in excesses(own_s) if len(ranks[one.group]) > 1][:_TRIED]
    return [_mend(replay, ranks[one.group], names[one.group], [one], everyone) for one in slow]


def _mend(
    replay: Replay, ranks: tuple[int, ...], host: str | None, slow: Sequence[Excess], everyone: Sequence[int]
) -> _Mend:
    parts = tuple(one.part for one in slow)
    others = [rank for rank in everyone if rank not in ranks]
    saves_s = replay.saves_s(ranks, parts, others)
    error_s = slow[0].error_s
    if len(parts) > 1:
        own = replay.work.own_s[:, :, list(parts)].sum(axis=2)
        error_s = standard_error(own[ranks[0]] - own[others].mean(axis=0))
    excess_s = sum(one.seconds for one in slow)
    return _Mend(ranks, host, parts, excess_s, error_s, saves_s, all(one.certain for one in slow))


def _interval(mend: _Mend, steps: int, uncertainty_s: float) -> tuple[float, float]:
    """Of 95 %: what the rank takes longer is known so well, and so much of it goes into the saving."""
    through = min(max(mend.saves_s / mend.excess_s, 0.0), 1.0) if mend.excess_s > 0.0 else 1.0
    half = student(_TAIL, steps - 1) * mend.error_s * through + uncertainty_s
    return mend.saves_s - half, mend.saves_s + half


def _told(
    mend: _Mend, replay: Replay, named: Sequence[int], hosts: Sequence[str], low_s: float, high_s: float
) -> RankFinding:
    work, steps = replay.work, len(replay.course.steps)
    one = len(mend.ranks) == 1 and mend.host is None
    caused = work.caused_s[list(mend.ranks)].sum(axis=0)
    rest = np.delete(work.caused_s, list(mend.ranks), axis=0).max(axis=0)
    last_in, wait_s = int(np.count_nonzero(caused > rest)), float(caused.mean())
    part = PARTS[mend.parts[0]] if len(mend.parts) == 1 else None
    on_host = f" (host {hosts[mend.ranks[0]]})" if len(set(hosts)) > 1 else ""
    who = f"rank {named[mend.ranks[0]]}{on_host} is" if one else f"the ranks of host {mend.host} are"
    where = "" if part is None else f" in {part}"
    if part is None:
        where = f" in {', '.join(PARTS[code] for code in sorted(mend.parts))}"
    evidence = (
        f"{who} {_ms(mend.excess_s)} slower{where} than the median of the others; the other ranks wait"
        f" {_ms(wait_s)} a step for {'it' if one else 'them'}; mending it would save {_ms(mend.saves_s)} a step"
        f" [{low_s * 1e3:.1f}, {high_s * 1e3:.1f}]"
    )
    return RankFinding(
        kind="straggler" if one else "host",
        rank=named[mend.ranks[0]] if one else None,
        host=hosts[mend.ranks[0]],
        phase=part,
        excess_s=mend.excess_s,
        saves_s=mend.saves_s,
        low_s=low_s,
        high_s=high_s,
        last_in=last_in,
        others_wait_s=wait_s,
        evidence=f"{evidence}; last in {last_in} of {steps} steps",
    )


def _unsure(mend: _Mend, replay: Replay, named: Sequence[int]) -> str:
    who = f"rank {named[mend.ranks[0]]}" if mend.host is None else f"host {mend.host}"
    where = ", ".join(PARTS[code] for code in sorted(mend.parts))
    steps = len(replay.course.steps)
    return f"{who} took {_ms(mend.excess_s)} longer in {where} than the others; too few steps ({steps}) to be sure"


def _nobody(replay: Replay, named: Sequence[int]) -> RankFinding:
    """No rank is the slow one: they take turns, or do not differ."""
    work = replay.work
    uneven = [part for part in range(len(PARTS)) if _unevenness(work, part) >= _UNEVEN]
    saved = {part: replay.evened_s(part) for part in uneven}
    part = max(saved, key=lambda each: saved[each], default=None)
    waits_s = float(work.waiting_s.sum(axis=2).mean())
    if part is not None and saved[part] >= _JITTER * work.step_s:
        caused = work.caused_s.sum(axis=1)
        if caused.max() > _ONE * caused.sum():
            who, steps = f"rank {named[int(caused.argmax())]} was slow in {PARTS[part]}", len(replay.course.steps)
            by_chance = f"{who} in some steps; too few steps ({steps}) to say whether by chance"
            return RankFinding(kind="unsure", others_wait_s=waits_s, evidence=by_chance)
        evidence = (
            f"another rank is slow in {PARTS[part]} each time: the ranks wait {_ms(waits_s)} a step in the mean;"
            f" were all as the median rank there, a step would be {_ms(saved[part])} shorter"
        )
        return RankFinding(
            kind="turns", phase=PARTS[part], saves_s=saved[part], others_wait_s=waits_s, evidence=evidence
        )
    share = waits_s / work.step_s if work.step_s > 0.0 else 0.0
    evidence = f"no rank is slower than the others; in the mean they wait {_ms(waits_s)} a step ({share:.0%})"
    return RankFinding(kind="equal", others_wait_s=waits_s, evidence=evidence)


def _unevenness(work: RanksWork, part: int) -> float:
    """Standard deviation over mean of a rank's time beside the other ranks' in the same step: what it is at the least.

    Plain noise exceeds its own by so much in one of a hundred tries (chi-square as Wilson and Hilferty 1931 have it).
    """
    own = work.own_s[:, :, part]
    mean = float(own.mean())
    if mean <= 0.0:
        return 0.0
    ranks, steps = own.shape
    freedom = (ranks - 1) * (steps - 1)
    # Ranks' own levels are no jitter.
    apart = own - own.mean(axis=0) - (own.mean(axis=1) - mean)[:, None]
    by_chance = (1.0 - 2.0 / (9.0 * freedom) + _CHANCE * math.sqrt(2.0 / (9.0 * freedom))) ** 3
    return math.sqrt(float((apart**2).sum()) / freedom / by_chance) / mean


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
