"""Who did not come, from what each rank says of where it is."""

from __future__ import annotations

import pytest
from stored_texts import assert_stored

from lm_profiler.callbacks.outcome.rank_position import RankPosition, stragglers, where_they_are

WAITS = RankPosition(40, "backward", 12.0, {"0": 80})
LATE = RankPosition(40, "forward", 13.4, {"0": 79})


@pytest.mark.parametrize(
    "places,late",
    [
        ({0: WAITS, 1: LATE}, [1]),
        ({0: LATE, 1: WAITS, 2: LATE}, [0, 2]),
        ({0: WAITS, 1: WAITS}, []),
        ({0: WAITS, 1: None}, [1]),
        ({0: None, 1: None}, []),
        # Of a group that it does not belong to, a rank has called nothing and is not late.
        ({0: RankPosition(1, "forward", 1, {"0": 5, "1": 7}), 1: RankPosition(1, "forward", 1, {"0": 5, "2": 3})}, []),
        ({0: RankPosition(1, "forward", 1, {"0": 5, "1": 7}), 1: RankPosition(1, "forward", 1, {"1": 6})}, [1]),
    ],
)
def test_who_called_fewer_collectives_or_says_nothing_is_late(
    places: dict[int, RankPosition | None], late: list[int]
) -> None:
    assert stragglers(places) == late


def test_where_a_rank_is_comes_back_from_its_text() -> None:
    assert RankPosition.unpacked(LATE.packed()) == LATE


def test_one_line_says_who_is_late_and_who_waits() -> None:
    text = "rank 1 (b) has been in forward of step 40 for 13 s; rank 0 waits in backward of step 40"
    assert where_they_are({0: WAITS, 1: LATE}, [1], {1: "b"}) == text
    many: dict[int, RankPosition | None] = {rank: LATE if rank < 5 else WAITS for rank in range(16)}
    many[0] = None
    assert_stored("callbacks/rank_position", {"12 ranks": where_they_are(many, stragglers({**many, 0: LATE}))})
