"""Which lateness of a rank other programs cannot have made: on a shared machine only that is said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from lm_profiler.analysis.ranks.slowness import Slow
from lm_profiler.record.run import Contention, StepCounters

_MOST = 0.5
"""Of what a rank takes longer: other programs may have made so much of it, and it is still its own doing."""


@dataclass(frozen=True)
class Contended:
    """What other programs can have added to the mean step of each rank, in seconds.

    Attributes:
        added_s: what the training thread was ready to run and had no CPU, and what caches, memory and cores that are
            shared may have slowed its running by, which is taken to be the share that others had.
        threads_s: what its other threads may have waited for a CPU: nobody counts that, but the thread slept meanwhile.
    """

    added_s: Sequence[float | None]
    threads_s: Sequence[float]

    def is_sure(self, slow: Slow) -> bool:
        """Whether at most half of its lateness can be other programs' doing: not that of a sleep or a late batch."""
        mine = self.added_s[slow.rank]
        theirs = [seconds for rank in slow.fast if rank != slow.rank and (seconds := self.added_s[rank]) is not None]
        if mine is None or not theirs:
            return False
        return max(mine - fmean(theirs), 0.0) + self.threads_s[slow.rank] <= _MOST * slow.seconds


def contended(shared: Contention | None, counters: Sequence[StepCounters], ranks: Sequence[int]) -> Contended | None:
    """Of ``ranks``, from the ``counters`` of their measured steps; None where nothing else used the machine."""
    if shared is None or not shared.shared:
        return None
    by_rank: dict[int, list[StepCounters]] = {rank: [] for rank in ranks}
    for one in counters:
        if one.step is not None and one.rank in by_rank:
            by_rank[one.rank].append(one)
    taken = min(shared.not_had or 0.0, 0.95)
    known = [_of_rank(steps, taken) for steps in by_rank.values()]
    return Contended([added for added, _ in known], [threads for _, threads in known])


def _of_rank(steps: Sequence[StepCounters], taken: float) -> tuple[float | None, float]:
    """What the training thread may have lost a step, None where that is unknown; and its other threads."""
    mean: Mapping[str, float | None] = {
        name: fmean(values) if (values := [v for one in steps if (v := getattr(one, name)) is not None]) else None
        for name in ("wall_s", "asleep_s", "cpu_wait_s", "cpu_s")
    }
    wall_s, asleep_s, waited_s, cpu_s = mean.values()
    if wall_s is None or asleep_s is None or waited_s is None:
        return None, 0.0
    ran_s = max(wall_s - asleep_s - waited_s, 0.0)
    return waited_s + taken * ran_s, max((cpu_s or 0.0) - ran_s, 0.0) * taken / (1.0 - taken)
