"""A group of ranks: what they send, which of them is reported as failed, and that none is left."""

from collections.abc import Iterator

import psutil
import pytest
import warm
from tests.support import ranks_at_work

from lm_profiler.processes.rank_group import RankFailed, Work, rank_messages


@pytest.fixture(autouse=True)
def spawned() -> Iterator[None]:
    """Ranks are fresh processes here, as they are for users."""
    with warm.fresh_processes():
        yield


def test_messages_of_every_rank_arrive() -> None:
    pid_of_rank = dict(rank_messages(ranks_at_work.send_pid, 3))
    assert sorted(pid_of_rank) == [0, 1, 2]
    assert not any(psutil.pid_exists(pid) for pid in pid_of_rank.values())


@pytest.mark.parametrize(
    "work, who, how",
    [
        (ranks_at_work.raise_in_rank_1, "rank 1", "ValueError: the planted fault"),
        (ranks_at_work.die_in_rank_1, "rank 1", "SIGKILL"),
    ],
)
def test_the_rank_that_is_the_cause_is_named(work: Work, who: str, how: str) -> None:
    before = set(psutil.Process().children())
    with pytest.raises(RankFailed) as error:
        list(rank_messages(work, 2))
    assert str(error.value).startswith(f"{who} ")
    assert str(error.value).endswith(how)
    left = set(psutil.Process().children()) - before
    assert not [process for process in left if "spawn_main" in " ".join(process.cmdline())]
