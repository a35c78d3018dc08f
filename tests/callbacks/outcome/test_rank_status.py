"""How the ranks ended, and which of them was the cause: every order of ends that two or three ranks can have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from lm_profiler.callbacks.outcome.gather import Exchange
from lm_profiler.callbacks.outcome.rank_position import RankPosition
from lm_profiler.callbacks.outcome.rank_status import RankStatus, how_it_ended, is_of_the_group
from lm_profiler.record.run import Failure, RankEnd, Status

GLOO = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"


def end_of(
    rank: int, at: float, kind: str = "ValueError", followed: bool = False, status: Status = "failed"
) -> RankEnd:
    failure = Failure(phase="forward", step=40, type=kind, message=kind, rank=rank, host=f"host{rank}")
    return RankEnd(status=status, failure=failure, at=at, followed=followed)


def statuses(ranks: int, codes: dict[int, int] | None = None) -> list[RankStatus]:
    store = HashStore()
    all_of_them = [
        RankStatus(
            Exchange(store, rank, ranks, _run=0), f"host{rank}", dict if rank else lambda: codes or {}, lambda: 0.0
        )
        for rank in range(ranks)
    ]
    for status in all_of_them:
        status.present()
    return all_of_them


def cause(own: RankEnd, others: dict[int, RankEnd], codes: dict[int, int] | None = None, ranks: int = 2) -> Failure:
    """As rank 0 tells it, where the ``others`` told their ends."""
    everyone = statuses(ranks, codes=codes)
    for rank, end in others.items():
        everyone[rank].tell(end, None)
    return everyone[0].cause(own, *everyone[0].others(None, 0.0)).failure


def test_an_error_is_the_cause_and_the_broken_collective_is_not() -> None:
    broken = end_of(0, 1.0, "RuntimeError", followed=True)
    assert cause(broken, {1: end_of(1, 5.0)}) == end_of(1, 5.0).failure  # whatever the clocks say
    assert cause(end_of(0, 1.0), {1: end_of(1, 0.5, followed=True)}).rank == 0


def test_of_two_errors_the_earlier_is_the_cause() -> None:
    assert cause(end_of(0, 2.0), {1: end_of(1, 1.0)}).rank == 1
    assert cause(end_of(0, 1.0), {1: end_of(1, 2.0)}).rank == 0


def test_what_stops_the_others_after_an_error_is_not_the_cause() -> None:
    terminated = end_of(0, 1.1, "Terminated", status="interrupted")  # by torchrun
    assert cause(terminated, {1: end_of(1, 1.0)}).type == "ValueError"


def test_a_rank_without_a_word_is_the_cause_of_broken_collectives() -> None:
    broken = end_of(0, 1.0, "RuntimeError", followed=True)
    lost = cause(broken, {}, {1: -9})
    assert (lost.type, lost.rank, lost.host) == ("RankLost", 1, "host1")
    assert "SIGKILL" in lost.message
    assert cause(broken, {}).type == "RankLost"
    several = cause(broken, {2: end_of(2, 1.0, followed=True)}, ranks=4)
    assert several.rank == 1
    assert "rank 3" in several.message


def test_a_rank_that_had_nothing_left_to_do_is_told_as_that() -> None:
    everyone = statuses(2)
    everyone[1].done()
    broken = end_of(0, 1.0, "RuntimeError", followed=True)
    told = everyone[0].cause(broken, *everyone[0].others(None, 0.0)).failure
    assert told.rank == 1
    assert "no step" in told.message


def test_who_did_not_come_in_time_is_the_cause_of_a_time_limit() -> None:
    everyone = statuses(2)
    store = everyone[0].exchange.store
    everyone[0].place(RankPosition(40, "backward", 20, {"0": 8}), store)
    everyone[1].place(RankPosition(40, "data", 21, {"0": 7}), store)
    everyone[1].tell(end_of(1, 9.0, "Stuck", followed=True), None)
    told = everyone[0].cause(end_of(0, 1.0, "RuntimeError", followed=True), *everyone[0].others(None, 0.0)).failure
    assert (told.rank, told.host, told.phase, told.step) == (1, "host1", "data", 40)
    assert "21 s" in told.message


def test_where_nothing_says_more_the_ranks_own_error_is_what_is_told() -> None:
    broken = end_of(0, 1.0, "RuntimeError", followed=True)
    assert cause(broken, {1: end_of(1, 1.0, followed=True)}) == broken.failure


def test_the_folder_tells_where_the_store_is_gone(tmp_path: Path) -> None:
    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("Connection was likely closed")

    _, second, third = everyone = statuses(3)
    for status in everyone:
        status.exchange.store = Gone()
    second.tell(end_of(1, 1.0), tmp_path)
    assert not third.is_there()
    ends, silent = third.others(tmp_path, 0.0)
    assert (ends, silent) == ({1: end_of(1, 1.0)}, [0])


def test_a_run_of_one_process_has_nothing_to_tell(tmp_path: Path) -> None:
    status = RankStatus(Exchange())
    status.tell(end_of(0, 1.0), tmp_path)
    assert list(tmp_path.iterdir()) == []
    failure = Failure(phase="data", step=1, type="OSError", message="")
    assert status.end_of("failed", failure, followed=False).failure == failure


@pytest.mark.parametrize(
    "error,of_the_group",
    [
        (RuntimeError(GLOO), True),
        (RuntimeError("[gloo/unbound_buffer.cc:78] Timed out waiting 20000ms for recv operation to complete"), True),
        (RuntimeError("NCCL communicator was aborted on rank 1."), True),
        (type("DistBackendError", (RuntimeError,), {})("whatever"), True),
        (ConnectionResetError("Connection reset by peer"), True),
        (ValueError("Connection closed"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_what_a_broken_group_says(error: BaseException, of_the_group: bool) -> None:
    assert is_of_the_group(error) == of_the_group


def test_how_a_process_ended() -> None:
    said = [how_it_ended(code) for code in (None, 0, 3, -9, -35)]
    assert len({*said}) == len(said)
    assert [word in line for word, line in zip(("0", "3", "SIGKILL"), said[1:4], strict=True)] == [True] * 3
    assert said[4].startswith("killed by ")
