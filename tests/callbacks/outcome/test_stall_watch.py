"""A run in which no step ends any more, on a clock of the test's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from torch.distributed import HashStore

from lm_profiler.callbacks.outcome.gather import Exchange
from lm_profiler.callbacks.outcome.rank_position import RankPosition
from lm_profiler.callbacks.outcome.rank_status import RankStatus, StallWatch
from lm_profiler.record.run import Failure, RankEnd

BOOM = RankEnd(status="failed", failure=Failure(phase="forward", step=40, type="ValueError", message="boom"), at=1.0)


class CountedStore:
    """In the place of a connection of one's own."""

    def __init__(self, store: Any) -> None:
        self.store, self.calls = store, 0

    def clone(self) -> CountedStore:
        return self

    def __getattr__(self, name: str) -> Any:
        self.calls += 1
        return getattr(self.store, name)


@dataclass
class Rank:
    """With the watch of it, which looks once a second."""

    store: Any
    rank: int
    now_s: float = 0.0
    steps: int = 0
    at: RankPosition = field(default_factory=lambda: RankPosition(1, "forward", 0.0, {"0": 3}))
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.counted = CountedStore(self.store)
        self.status = RankStatus(Exchange(self.store, self.rank, 2, _run=0), f"host{self.rank}")
        self.status.exchange.store = self.counted
        self.watch = StallWatch(
            self.status, lambda: self.steps, lambda: self.at, self.said.append, 1800.0, lambda: self.now_s
        )

    def runs(self, seconds: int, step_s: int = 0) -> None:
        for second in range(1, seconds + 1):
            self.now_s += 1
            if step_s and second % step_s == 0:
                self.steps += 1
            self.watch.beat()


@pytest.fixture
def ranks() -> tuple[Rank, Rank]:
    store = HashStore()
    both = Rank(store, 0), Rank(store, 1)
    for rank in both:
        rank.status.present()
        rank.counted.calls = 0
    return both


def test_while_steps_end_nothing_is_asked_of_the_store(ranks: tuple[Rank, Rank]) -> None:
    ranks[0].runs(300, step_s=1)
    assert ranks[0].counted.calls == 0


def test_long_steps_that_are_alike_are_no_stall(ranks: tuple[Rank, Rank]) -> None:
    for rank in ranks:
        rank.runs(2000, step_s=50)
        assert rank.said == []
    assert ranks[0].status.places() == {0: None, 1: None}


def test_after_a_minute_rank_0_says_once_who_did_not_come(ranks: tuple[Rank, Rank]) -> None:
    first, second = ranks
    for rank in ranks:
        rank.runs(5, step_s=1)
    first.at, second.at = RankPosition(6, "backward", 0.0, {"0": 4}), RankPosition(6, "forward", 58.0, {"0": 3})
    second.runs(59)
    first.runs(59)
    assert (first.said, second.said) == ([], [])
    first.runs(200)
    (said,) = first.said
    assert "60 s" in said
    assert "rank 1 (host1)" in said
    assert "rank 0" in said


def test_what_holds_all_ranks_alike_is_not_told(ranks: tuple[Rank, Rank]) -> None:
    for _ in range(500):  # a compilation
        for rank in ranks:
            rank.runs(1)
    assert ranks[0].said == []


def test_another_ranks_end_is_seen_within_two_seconds(ranks: tuple[Rank, Rank]) -> None:
    first, second = ranks
    for rank in ranks:
        rank.runs(5, step_s=1)
    second.status.tell(BOOM, None)
    first.runs(2)
    assert first.watch.over


def test_a_store_that_is_gone_is_rank_0s_end(ranks: tuple[Rank, Rank]) -> None:
    second = ranks[1]

    class Gone:
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Connection was likely closed")

    second.counted.store = Gone()
    second.runs(3)
    assert second.watch.over
