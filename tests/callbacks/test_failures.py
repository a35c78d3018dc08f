"""How the ranks ended, and which of them was the cause: every order of ends that two or three ranks can have."""

from pathlib import Path

import pytest

from lm_profiler.analysis.conclude import with_failure_of_ranks
from lm_profiler.callbacks.failures import ends_of_ranks, is_of_the_group
from lm_profiler.callbacks.instruments.profiling_options import Launch
from lm_profiler.record.rank_ends import RankEnd, end_file, end_of_loop, first_end, read_ends
from lm_profiler.record.run_record import Failure, RunRecord, Status

GLOO = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"


def end_of(
    rank: int, at: float, kind: str = "ValueError", followed: bool = False, status: Status = "failed"
) -> RankEnd:
    failure = Failure(phase="forward", step=40, type=kind, message=kind, rank=rank, host=f"host{rank}")
    return RankEnd(status=status, failure=failure, at=at, followed=followed)


BROKEN_COLLECTIVE = end_of(0, 1.0, "RuntimeError", followed=True)
STOPPED_BY_SIGNAL = end_of(0, 1.1, "Terminated", status="interrupted")


def cause_of(
    own: RankEnd, others: dict[int, RankEnd], codes: dict[int, int | None] | None = None, ranks: int = 2
) -> Failure:
    """Return the cause that rank 0 finds if the ``others`` left their ends."""
    found = first_end({0: own, **others}, range(ranks), codes or {})
    return found.failure


@pytest.mark.parametrize(
    "end_of_rank_0, end_of_rank_1, rank",
    [
        (BROKEN_COLLECTIVE, end_of(1, at=5.0), 1),  # whatever the clocks show
        (end_of(0, at=1.0), end_of(1, at=0.5, followed=True), 0),
        (STOPPED_BY_SIGNAL, end_of(1, at=1.0), 1),  # torchrun stopped the other
        (BROKEN_COLLECTIVE, end_of(1, at=1.0, followed=True), 0),  # there is no other cause
        # of two errors the earlier one
        (end_of(0, at=2.0), end_of(1, at=1.0), 1),
        (end_of(0, at=1.0), end_of(1, at=2.0), 0),
    ],
)
def test_an_error_is_the_cause_rather_than_what_follows_from_it(
    end_of_rank_0: RankEnd, end_of_rank_1: RankEnd, rank: int
) -> None:
    ends = [end_of_rank_0, end_of_rank_1]
    assert cause_of(end_of_rank_0, {1: end_of_rank_1}) == ends[rank].failure


def test_a_rank_that_ran_out_of_batches_is_the_cause_of_broken_collectives() -> None:
    loop_end = end_of_loop(1, "host1", steps=12, now_s=1.0)
    caused = first_end({0: BROKEN_COLLECTIVE, 1: loop_end}, range(2), {})
    assert (caused.status, caused.failure.rank, caused.failure.step) == ("failed", 1, 12)
    assert caused.failure.type == "LoopEnded"
    assert cause_of(end_of(0, 5.0), {1: end_of_loop(1, "host1", steps=12, now_s=0.5)}).type == "ValueError"


def test_a_rank_without_a_word_is_the_cause_of_broken_collectives() -> None:
    lost = cause_of(BROKEN_COLLECTIVE, {}, {1: -9})
    assert (lost.type, lost.rank, lost.host) == ("RankLost", 1, "host0")  # started by rank 0, so on its host
    assert "SIGKILL" in lost.message
    unknown = cause_of(BROKEN_COLLECTIVE, {})
    assert (unknown.type, unknown.rank, unknown.host) == ("RankLost", 1, None)
    several = cause_of(BROKEN_COLLECTIVE, {2: end_of(2, 1.0, followed=True)}, ranks=4)
    assert several.rank == 1
    assert "rank 3" in several.message


@pytest.mark.parametrize("codes, kind", [({1: -9}, "RankLost"), ({}, "RankLost"), ({1: None}, "Terminated")])
def test_a_signal_that_comes_once_a_rank_is_lost_is_no_interruption(codes: dict[int, int | None], kind: str) -> None:
    """One that still runs is not lost; and Ctrl-C is the user's."""
    assert cause_of(STOPPED_BY_SIGNAL, {}, codes).type == kind
    assert cause_of(end_of(0, 1.1, "KeyboardInterrupt", status="interrupted"), {}, codes).type == "KeyboardInterrupt"
    both = cause_of(STOPPED_BY_SIGNAL, {1: end_of(1, 1.2, "Terminated", status="interrupted")}, codes)
    assert both == STOPPED_BY_SIGNAL.failure


@pytest.mark.parametrize(
    "code, word", [(0, "no step"), (None, "hangs"), (3, "3"), (-9, "SIGKILL"), (-35, "killed by ")]
)
def test_the_exit_code_shows_how_a_silent_rank_ended(code: int | None, word: str) -> None:
    failure = cause_of(BROKEN_COLLECTIVE, {}, {1: code})
    assert failure.rank == 1
    assert word in failure.message


def test_ends_are_read_from_the_folder_until_all_are_there(tmp_path: Path) -> None:
    """Rank 1 leaves its own while rank 0 looks; rank 2 was killed, which its exit code shows."""
    waited: list[float] = []

    def pause(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            end_of(1, 1.0).write(tmp_path / end_file(1))

    found = ends_of_ranks(BROKEN_COLLECTIVE, tmp_path, 3, lambda: {2: -9}, pause)
    assert found == {0: BROKEN_COLLECTIVE, 1: end_of(1, 1.0)}
    assert len(waited) == 3
    (tmp_path / end_file(0)).write_text("{")  # a damaged one is passed over
    assert read_ends(tmp_path) == {1: end_of(1, 1.0)}


@pytest.mark.parametrize(
    "own, codes, limit_s",
    [
        (BROKEN_COLLECTIVE, {}, 2.0),
        (STOPPED_BY_SIGNAL, {}, 8.0),
        (STOPPED_BY_SIGNAL, {1: None}, 0.0),
        (end_of(0, 1.0), {}, 0.0),
    ],
)
def test_waits_for_ends_are_limited(own: RankEnd, codes: dict[int, int | None], limit_s: float, tmp_path: Path):
    waited: list[float] = []
    assert ends_of_ranks(own, tmp_path, 2, lambda: codes, waited.append) == {0: own}
    assert sum(waited) == pytest.approx(limit_s)


def test_the_reader_names_the_cause_if_the_first_rank_was_killed(tmp_path: Path) -> None:
    record = RunRecord(**Launch().facts(), status="unfinished", verb="fit", failure=None)
    assert with_failure_of_ranks(record, tmp_path) == record
    end_of(1, 1.0, "RuntimeError", followed=True).write(tmp_path / end_file(1))
    lost = with_failure_of_ranks(record, tmp_path).failure
    assert (lost.type, lost.rank, lost.step) == ("RankLost", 0, 40)
    end_of(2, 2.0).write(tmp_path / end_file(2))
    completed = with_failure_of_ranks(record, tmp_path)
    assert (completed.status, completed.failure) == ("failed", end_of(2, 2.0).failure)


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
def test_errors_of_a_broken_group_are_recognized(error: BaseException, of_the_group: bool) -> None:
    assert is_of_the_group(error) == of_the_group
