"""A group of ranks: what they send, which of them is told to have failed, and that none is left."""

from collections.abc import Iterator

import psutil
import pytest
import warm
from tests.support import ranks_at_work

from lm_profiler.processes.rank_group import RankFailed, Work, rank_messages


@pytest.fixture(autouse=True)
def spawned() -> Iterator[None]:
    """Ranks are fresh processes here, as they are for users."""
    with warm.fresh():
        yield


def test_every_ranks_messages_come_and_no_process_is_left() -> None:
    told = dict(rank_messages(ranks_at_work.tell, 3))
    assert sorted(told) == [0, 1, 2]
    assert not any(psutil.pid_exists(pid) for pid in told.values())


@pytest.mark.parametrize(
    "work, who, how",
    [
        (ranks_at_work.raise_in_rank_1, "rank 1", "ValueError: the planted fault"),
        (ranks_at_work.die_in_rank_1, "rank 1", "SIGKILL"),
    ],
)
def test_the_rank_that_is_the_cause_is_named(work: Work, who: str, how: str) -> None:
    before = set(psutil.Process().children())
    with pytest.raises(RankFailed) as told:
        list(rank_messages(work, 2))
    assert str(told.value).startswith(f"{who} ")
    assert str(told.value).endswith(how)
    left = set(psutil.Process().children()) - before
    assert not [each for each in left if "spawn_main" in " ".join(each.cmdline())]
