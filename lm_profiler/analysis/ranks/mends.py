"""What could be mended: a rank, several ranks or a host that take longer in a part, and what that would save."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.ranks.excess import Excess, excess_of, excesses, standard_error
from lm_profiler.analysis.ranks.replay import Replay

_TRIED = 8
MORE = 1.25
"""So many times what mending less of it would save, mending more of it must save."""

_ALIKE = 0.5
"""Of what the slowest rank takes longer: ranks that take so much longer as well are slow together."""

_MEMBERS = 256
"""Of the ranks that are slow together, so many are tested."""


@dataclass(frozen=True)
class Mend:
    """``ranks`` are slower in ``parts``, together by ``excess_s`` with a standard error of ``error_s``."""

    ranks: tuple[int, ...]
    host: str | None
    parts: tuple[int, ...]
    excess_s: float
    error_s: float
    saves_s: float
    certain: bool


def best_of(mends: Sequence[Mend]) -> Mend | None:
    """What saves most, of those that are no chance, if there are any."""
    return max(mends, key=lambda mend: (mend.certain, mend.saves_s), default=None)


def mends_of_ranks(replay: Replay) -> list[Mend]:
    """Of each rank and part that takes longer; of a rank that does in several, all of them at once as well."""
    work, mends = replay.work, []
    slow = sorted(excesses(work.own_s), key=lambda e: (not e.certain, -e.seconds))[:_TRIED]
    for one in slow:
        mends.append(_mend(replay, (one.group,), None, [one]))
    for rank in dict.fromkeys(one.group for one in slow):
        its = [one for one in slow if one.group == rank and one.certain]
        if len(its) > 1:
            together = _mend(replay, (rank,), None, its)
            if together.saves_s > MORE * max(mend.saves_s for mend in mends if mend.ranks == (rank,)):
                mends.append(together)
    return mends


def mends_of_several(replay: Replay) -> list[Mend]:
    """Of the ranks that are slow in the same part: where another one is as slow, mending one of them saves nothing."""
    own_s = replay.work.own_s
    alike: dict[tuple[int, ...], list[Excess]] = defaultdict(list)
    slow = [one for one in excesses(own_s) if one.certain]
    for worst in {one.part: one for one in reversed(slow)}.values():
        ranks = _as_slow(own_s[:, :, worst.part].mean(axis=1), _ALIKE * worst.seconds)
        together = excess_of(own_s, ranks, worst.part, [rank for rank in ranks if rank != worst.group][:_MEMBERS])
        if len(ranks) > 1 and together is not None:
            alike[ranks].append(together)
    mends = []
    for ranks, parts in alike.items():
        each = [_mend(replay, ranks, None, [one]) for one in parts]
        whole = _mend(replay, ranks, None, parts)
        best = best_of(each)
        mends += [whole] if best is None or whole.saves_s > MORE * best.saves_s else [best]
    return mends


def _as_slow(means_s: NDArray[np.float64], least_s: float) -> tuple[int, ...]:
    """The ranks, fewer than all of them, that take so much more than the median of those that do not."""
    usual_s = float(np.median(means_s))
    for _ in range(2):  # of the slow ones the median is free only when they are out
        slow = np.flatnonzero(means_s >= usual_s + least_s)
        usual_s = float(np.median(np.delete(means_s, slow))) if len(slow) < len(means_s) else usual_s
    return tuple(np.flatnonzero(means_s >= usual_s + least_s).tolist())


def mends_of_hosts(replay: Replay, hosts: Sequence[str]) -> list[Mend]:
    """Of each host with several ranks: by the medians of its ranks, as if it was one."""
    names = list(dict.fromkeys(hosts))
    ranks = [tuple(r for r, host in enumerate(hosts) if host == name) for name in names]
    if len(names) < 2 or max(map(len, ranks)) < 2:
        return []
    own_s = np.stack([np.median(replay.work.own_s[list(group)], axis=0) for group in ranks])
    slow = [one for one in excesses(own_s) if len(ranks[one.group]) > 1][:_TRIED]
    return [_mend(replay, ranks[one.group], names[one.group], [one]) for one in slow]


def _mend(replay: Replay, ranks: tuple[int, ...], host: str | None, slow: Sequence[Excess]) -> Mend:
    parts = tuple(one.part for one in slow)
    others = [rank for rank in range(len(replay.work.own_s)) if rank not in ranks]
    saves_s = replay.saves_s(ranks, parts, others)
    error_s = slow[0].error_s
    if len(parts) > 1:
        own = replay.work.own_s[:, :, list(parts)].sum(axis=2)
        error_s = standard_error(own[list(ranks)].mean(axis=0) - own[others].mean(axis=0))
    excess_s = sum(one.seconds for one in slow)
    return Mend(ranks, host, parts, excess_s, error_s, saves_s, all(one.certain for one in slow))
