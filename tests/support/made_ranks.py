"""Ranks whose figures can be checked by hand: all take 5 ms of data, 20 of forward, 30 of backward, 10 of optimizer.

One of them, or one in turns, takes longer somewhere, and the others wait for it in backward.
"""

from statistics import median
from typing import Any

from lm_profiler.record.run_record import RankFinding, Ranks, RankSpread, RankTimes, SlowRank

OWN_MS = {"data": 5.0, "forward": 20.0, "backward": 30.0, "optimizer": 10.0}
STEPS = 20


def made_ranks(world: int = 2, slow: int | None = 1, excess_ms: float = 30.0, **options: Any) -> Ranks:
    """Rank ``slow`` takes ``excess_ms`` longer in data; None: nobody does. Hosts have eight ranks each."""
    hosts: dict[str, list[int]] = {}
    for rank in range(world):
        hosts.setdefault(f"node{rank // 8}", []).append(rank)
    times = [_times(rank, f"node{rank // 8}", excess_ms, slow) for rank in range(world)]
    step_s = times[0].all_own_s + times[0].all_waiting_s
    waiting = [rank_times.all_waiting_s for rank_times in times]
    return Ranks.model_validate(
        {
            "world": world,
            "hosts": hosts,
            "steps": STEPS,
            "step_s": step_s,
            "own": {part: _spread([rank_times.own_s[part] for rank_times in times]) for part in OWN_MS},
            "waiting": {"backward": _spread(waiting)},
            "waiting_share": sum(waiting) / world / step_s,
            "by_rank": times,
            "columns": list(range(6, 6 + STEPS)),
            "finding": _straggler(slow, excess_ms / 1e3) if slow is not None else RankFinding(kind="equal"),
            "exposed_s": {"backward": 3.2e-3},
            "exposed_source": "DDP’s own timings",
            "witness": "torch’s flight recorder",
            **options,
        }
    )


def _times(rank: int, host: str, excess_ms: float, slow: int | None) -> RankTimes:
    longer = excess_ms if rank == slow else 0.0
    own = {part: (ms + longer * (part == "data")) / 1e3 for part, ms in OWN_MS.items()}
    waits = 0.0 if slow is None else excess_ms / 1e3 - longer / 1e3
    each = [sum(own.values()) * (1 + 0.01 * ((step * 7 + rank * 3) % 5 - 2)) for step in range(STEPS)]
    return RankTimes(rank=rank, host=host, own_s=own, waiting_s={"backward": waits}, own_by_column_s=each)


def _spread(seconds: list[float]) -> RankSpread:
    most = max(range(len(seconds)), key=lambda rank: seconds[rank])
    return RankSpread(least_s=min(seconds), median_s=median(seconds), largest_s=seconds[most], slowest=most)


def _straggler(rank: int, excess_s: float) -> RankFinding:
    host, low_s, high_s = f"node{rank // 8}", excess_s - 1e-3, excess_s + 1e-3
    slow = SlowRank(
        rank=rank, host=host, phase="data", excess_s=excess_s, low_s=low_s, high_s=high_s, certain=True,
        first_step=6, last_step=5 + STEPS,
    )  # fmt: skip
    return RankFinding(
        kind="straggler",
        rank=rank,
        host=host,
        phase="data",
        excess_s=excess_s,
        saves_s=excess_s - 1e-3,
        low_s=excess_s - 2e-3,
        high_s=excess_s,
        last_in=STEPS,
        others_wait_s=excess_s,
        slow=[slow],
        slow_ranks=1,
        steps=STEPS,
    )
