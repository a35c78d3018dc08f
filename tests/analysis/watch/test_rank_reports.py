"""Who is late and who is silent, by what rank 0 sees of the ranks' reports."""

import numpy as np
import pytest

from lm_profiler.analysis.watch.rank_reports import RankReports
from lm_profiler.record.watch_files import WatchStatus

STEP = {"data": 0.001, "forward": 0.030, "backward": 0.060, "optimizer": 0.009}


def report(rank: int, steps: int, written_s: float, seconds: dict[str, float] = STEP) -> WatchStatus:
    """Return what ``rank`` reports after ``steps`` steps of ``seconds`` each."""
    sums = {part: part_s * steps for part, part_s in seconds.items()}
    return WatchStatus(
        rank=rank, world_size=4, began_s=0.0, written_s=written_s, steps=steps, timed=steps, phase="backward",
        seconds=sums,
    )  # fmt: skip


@pytest.mark.parametrize("part", ["data", "forward", "optimizer"])
@pytest.mark.parametrize("world", [2, 4])
def test_a_late_rank_is_reported_once_and_once_as_chronic(part: str, world: int) -> None:
    """Rank 1 takes 20 ms longer in each of 500 steps, and the others wait for it in backward; they report five times.

    It is called late after 100 steps at the least, and chronic after 300.
    """
    of_late_rank = {**STEP, part: STEP[part] + 0.02}
    of_others = {**STEP, "backward": STEP["backward"] + 0.02}
    watched, events = RankReports(), []
    for number in range(6):
        reports = {}
        for rank in range(world):
            reports[rank] = report(rank, 100 * number, number, of_late_rank if rank == 1 else of_others)
        events += watched.judge(30.0 * number, reports)
    late, chronic = events
    assert (late.kind, late.rank, late.part, late.chronic) == ("rank late", 1, part, False)
    assert (chronic.kind, chronic.rank, chronic.part, chronic.chronic) == ("rank late", 1, part, True)
    assert chronic.now == pytest.approx(STEP[part] + 0.02)
    assert chronic.against == pytest.approx(STEP[part])
    assert chronic.cost_s == pytest.approx(300 * 0.02)
    assert watched.waited_s == pytest.approx(500 * 0.02)


def test_noise_is_not_reported_as_a_late_rank() -> None:
    random, watched, sums = np.random.default_rng(0), RankReports(), np.zeros((4, len(STEP)))
    for look in range(200):
        sums += 100 * np.array([*STEP.values()]) * random.normal(1.0, 0.03, sums.shape)
        reports = {rank: report(rank, steps=100 * look, written_s=look) for rank in range(4)}
        for rank, rank_report in reports.items():
            rank_report.seconds.update(zip(STEP, sums[rank], strict=True))
        assert watched.judge(30.0 * look, reports) == []


@pytest.mark.parametrize("hours", [-5.0, 0.0, 5.0])
def test_silence_is_measured_by_rank_0s_clock(hours: float) -> None:
    watched, events = RankReports(), []
    for look in range(8):
        now_s = 30.0 * look
        stuck = report(3, 70, min(look, 2) + 3600.0 * hours)
        events += watched.judge(now_s, {0: report(0, 70, now_s), 3: stuck})
    (event,) = events
    assert (event.kind, event.rank, event.part, event.step) == ("silent rank", 3, "backward", 70)
    assert (event.at_s, event.now) == (120.0, 60.0)  # the report changed last 60 s after the first look
    assert watched.silent == {3: 60.0}
    assert watched.judge(240.0, {0: report(0, 71, 240.0), 3: report(3, 71, 9.0)}) == []
    assert watched.silent == {}


def test_a_rank_that_has_ended_or_cannot_be_read_is_not_silent() -> None:
    watched = RankReports()
    for look in range(8):
        ended = report(1, 9, 1.0).model_copy(update={"ended": True})
        unread = {} if look % 2 else {2: report(2, 9, look)}
        assert watched.judge(30.0 * look, {0: report(0, 9, look), 1: ended, **unread}) == []
