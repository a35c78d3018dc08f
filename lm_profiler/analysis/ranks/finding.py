"""For whom the others wait: one rank, one host, another one each time, or nobody."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lm_profiler.analysis.ranks.between import late_from_between
from lm_profiler.analysis.ranks.excess import student
from lm_profiler.analysis.ranks.mends import MORE, Mend, best_of, mends_of_hosts, mends_of_ranks, mends_of_several
from lm_profiler.analysis.ranks.replay import Replay
from lm_profiler.analysis.ranks.work import RanksWork
from lm_profiler.record.parts import PARTS
from lm_profiler.record.run import RankFinding
from lm_profiler.record.text import ranks_text

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

_NAMED = 16
_TAIL = 0.025
_LEAST_STEPS = 3


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
    best, whole = best_of(mends_of_ranks(replay)), best_of(mends_of_hosts(replay, hosts))
    alone_s = best.saves_s if best is not None and best.certain else 0.0
    for more in (whole, best_of(mends_of_several(replay))):
        if more is not None and more.certain and more.saves_s > MORE * alone_s:
            best, alone_s = more, more.saves_s
    if best is not None and best.saves_s >= _WORTH * work.step_s:
        low_s, high_s = _interval(best, len(replay.course.steps), uncertainty_s)
        if best.certain and low_s > 0.0:
            return _told(best, replay, named, hosts, low_s, high_s)
        if best.saves_s >= _JITTER * work.step_s and low_s > 0.0:
            return RankFinding(kind="unsure", evidence=_unsure(best, replay, named))
    return _nobody(replay, named)


def _interval(mend: Mend, steps: int, uncertainty_s: float) -> tuple[float, float]:
    """Of 95 %: what the rank takes longer is known so well, and so much of it goes into the saving."""
    through = min(max(mend.saves_s / mend.excess_s, 0.0), 1.0) if mend.excess_s > 0.0 else 1.0
    half = student(_TAIL, steps - 1) * mend.error_s * through + uncertainty_s
    return mend.saves_s - half, mend.saves_s + half


def _told(
    mend: Mend, replay: Replay, named: Sequence[int], hosts: Sequence[str], low_s: float, high_s: float
) -> RankFinding:
    work, steps = replay.work, len(replay.course.steps)
    one, names = len(mend.ranks) == 1 and mend.host is None, _names([named[rank] for rank in mend.ranks], len(named))
    caused = work.caused_s[list(mend.ranks)].sum(axis=0)
    rest = np.delete(work.caused_s, list(mend.ranks), axis=0).max(axis=0)
    last_in, wait_s = int(np.count_nonzero(caused > rest)), _others_wait_s(work, mend.ranks)
    part = PARTS[mend.parts[0]] if len(mend.parts) == 1 else None
    on = list(dict.fromkeys(hosts[rank] for rank in mend.ranks))
    on_host = f" (host{'s' * (len(on) > 1)} {', '.join(on)})" if len(set(hosts)) > 1 else ""
    it = "it" if one else "them"
    who = f"{names}{on_host} {'is' if one else 'are'}" if mend.host is None else f"the ranks of host {mend.host} are"
    evidence = (
        f"{who} {_ms(mend.excess_s)} slower in {_where(mend)} than the median of the others; the other ranks wait"
        f" {_ms(wait_s)} a step for {it}; mending {it} would save {_ms(mend.saves_s)} a step"
        f" [{low_s * 1e3:.1f}, {high_s * 1e3:.1f}]"
    )
    return RankFinding(
        kind="straggler" if one else "several" if mend.host is None else "host",
        rank=named[mend.ranks[0]] if one else None,
        host=on[0] if len(on) == 1 else None,
        phase=part,
        excess_s=mend.excess_s,
        saves_s=mend.saves_s,
        low_s=low_s,
        high_s=high_s,
        last_in=last_in,
        others_wait_s=wait_s,
        evidence=f"{evidence}; last in {last_in} of {steps} steps",
    )


def _names(ranks: Sequence[int], world: int) -> str:
    """Of many ranks the first."""
    return ranks_text(ranks) if len(ranks) <= _NAMED else f"{len(ranks):,} of {world:,} ranks, {ranks[0]} the first,"


def _where(mend: Mend) -> str:
    return ", ".join(PARTS[code] for code in sorted(mend.parts))


def _others_wait_s(work: RanksWork, ranks: tuple[int, ...]) -> float:
    """How long those that are not of ``ranks`` wait for them, in the mean."""
    everyone = len(work.own_s)
    by_all = float(work.caused_s[list(ranks)].sum(axis=0).mean()) * (everyone - 1) / (everyone - len(ranks))
    return min(by_all, float(np.delete(work.waiting_s, list(ranks), axis=0).sum(axis=2).mean()))


def _unsure(mend: Mend, replay: Replay, named: Sequence[int]) -> str:
    who = _names([named[rank] for rank in mend.ranks], len(named)) if mend.host is None else f"host {mend.host}"
    few = f"too few steps ({len(replay.course.steps)}) to be sure"
    return f"{who} took {_ms(mend.excess_s)} longer in {_where(mend)} than the others; {few}"


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
    late = late_from_between(replay.course)
    if late is not None and late.seconds >= _JITTER * work.step_s:
        evidence += (
            f"; between the steps (validation, checkpoints, an epoch's end) rank {named[late.rank]} took"
            f" {_ms(late.seconds)} a step longer than the median of the others"
        )
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
