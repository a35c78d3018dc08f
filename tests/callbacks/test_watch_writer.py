"""What the watch's thread reports if nothing is handed over to it: training stalls, and in which phase."""

from collections.abc import Callable
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import pytest
import torch
from stored_texts import assert_stored

from lm_profiler.analysis.watch.ledger import EPOCH_TURN, VALIDATION, Ledger
from lm_profiler.analysis.watch.watched_run import WatchedRun
from lm_profiler.callbacks import WatchOptions
from lm_profiler.callbacks.watch_writer import HandOver, RunningSpan, TrainingPosition, WatchWriter
from lm_profiler.measure.clocks import tape as at
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.counts.step_reader import Reading
from lm_profiler.record.watch_files import WatchEvent, read_events, read_status
from lm_profiler.report.run.watch_tables import event_text

S = 1_000_000_000


class Standing(WatchWriter):
    """The writer of rank 5 of 8, by a clock that the test sets, which looks once a second."""

    def __init__(self, folder: Path, cpu_s: float = 0.0) -> None:
        self.now_ns = S
        timeline = Timeline(lambda: self.now_ns)
        super().__init__(
            folder, 5, 8, timeline, WatchedRun(), Ledger(0), WatchOptions(), print, torch.device("cpu"),
            place=TrainingPosition(), cpu_clock=lambda: cpu_s,
        )  # fmt: skip
        self._newest = HandOver(S)

    def wait(self, seconds: int, meanwhile: Callable[[], object] = lambda: None) -> list[WatchEvent]:
        for _ in range(seconds):
            self.now_ns += S
            meanwhile()
            self._check_for_stall()
        return read_events(self.folder)

    def marks(self, *codes: int) -> None:
        for code in codes:
            self.timeline.mark(code)


def in_backward(writer: Standing) -> None:
    writer.marks(at.DATA, at.LEAVE, at.FORWARD, at.LEAVE, at.BACKWARD)


def in_validation(writer: Standing) -> None:
    writer.marks(at.DATA)
    writer.timeline.go_outside(VALIDATION)


def in_a_checkpoint(writer: Standing) -> None:
    in_backward(writer)
    writer.place.spans += [
        RunningSpan(writer.now_ns, "callback: ModelCheckpoint"),
        RunningSpan(writer.now_ns, "checkpoints"),
    ]


def between_epochs(writer: Standing) -> None:
    writer.marks(at.DATA, at.LEAVE, at.END)


@pytest.mark.parametrize(
    "stands, where",
    [(in_backward, "backward"), (in_validation, VALIDATION), (in_a_checkpoint, "checkpoints"),
     (between_epochs, EPOCH_TURN)],
)  # fmt: skip
def test_a_stall_is_reported_once(stands: Callable[[Standing], None], where: str, tmp_path: Path):
    writer = Standing(tmp_path)
    writer.now_ns += 5 * S
    stands(writer)
    assert writer.wait(59) == []
    (event,) = writer.wait(200)
    assert (event.part, event.rank, round(event.now, 3)) == (where, 5, 60.0)
    assert event.cause.startswith("test_watch_writer.py:")
    text = event_text(event, 8)
    assert text.startswith(f"stalled in {where} since 01-01 ")
    assert text.endswith(", rank 5 of 8")
    assert read_status(tmp_path, 5).phase == where


def test_a_pause_that_ends_by_itself_is_no_stall(tmp_path: Path) -> None:
    writer = Standing(tmp_path)
    in_validation(writer)  # whose batches are signs of life
    assert writer.wait(200, lambda: setattr(writer.place, "alive_ns", writer.now_ns)) == []
    assert len(writer.wait(61)) == 1
    # Where it went on by itself it has to take three times as long.
    (tmp_path / "run").mkdir()
    writer = Standing(tmp_path / "run")
    in_a_checkpoint(writer)
    assert len(writer.wait(100)) == 1
    writer.place.spans.clear()
    writer.take(HandOver(writer.now_ns))
    in_a_checkpoint(writer)
    assert len(writer.wait(299)) == 1
    assert len(writer.wait(2)) == 2
    assert "stalled" not in writer.ledger.seconds  # a checkpoint's time is a checkpoint's


def test_a_stall_in_which_a_rank_waits_for_another_is_booked_once(tmp_path: Path) -> None:
    """The comparison of the ranks finds the same 90 s; of the 5 s beside them, which are no stall, 2 s are waiting."""
    writer = Standing(tmp_path)
    writer.ledger.seconds["step: forward"] = 5.0
    in_backward(writer)
    writer.wait(90)
    writer.marks(at.LEAVE, at.END)
    writer.take(HandOver(writer.now_ns, writer.timeline.take_marks()))
    assert writer.ledger.seconds["stalled"] == pytest.approx(90.0)  # what is beyond the usual
    writer._ranks.waited_s = 92.0
    writer.rank, writer.world_size = 0, 2
    writer._compare_ranks(writer.now_ns)
    ledger = writer.ledger.seconds
    assert ledger["stalled"] == pytest.approx(90.0)
    assert ledger["waiting for ranks"] == pytest.approx(2.0)
    assert ledger["step: forward"] + ledger["step: backward"] == pytest.approx(3.0, abs=1.5)


def test_a_pause_of_the_process_is_an_event(tmp_path: Path) -> None:
    for seconds, cpu_s in ((31, 20.0), (4, 0.0)):  # a thread that had to wait is no pause
        writer = Standing(tmp_path, cpu_s)
        in_backward(writer)
        asked_ns, writer.now_ns = writer.now_ns, writer.now_ns + seconds * S
        writer._check_for_pause(asked_ns, 0.0)
        assert read_events(tmp_path) == []
    writer = Standing(tmp_path, cpu_s=3.0)
    in_backward(writer)
    asked_ns, writer.now_ns = writer.now_ns, writer.now_ns + 31 * S
    writer._check_for_pause(asked_ns, 1.0)  # two seconds of work
    (event,) = writer.wait(50)
    assert (event.kind, event.part, event.now) == ("stall", "backward", pytest.approx(30.0))
    assert event.cause == "the process was stopped"
    writer.marks(at.LEAVE, at.END)
    writer.take(HandOver(writer.now_ns, writer.timeline.take_marks()))
    assert writer.ledger.seconds["paused"] == pytest.approx(30.0)
    assert writer.ledger.seconds["step: backward"] == pytest.approx(51.0)


def test_a_clock_that_falls_is_the_cause_of_a_slower_level(tmp_path: Path) -> None:
    writer = Standing(tmp_path)
    capped_ns = writer.now_ns + 1500 * S // 10

    def gpu(began_s: float, ended_s: float) -> tuple[float | None, list[str] | None]:
        if round(began_s * 10) % 5:  # it is read twice a second, and most steps have no reading
            return None, None
        return (1200e6, ["power cap"]) if began_s * 1e9 >= capped_ns else (1500e6, [])

    writer.gpu = gpu
    for second in range(400):
        first = second * 10
        readings: list[Reading] = []
        for step in range(first, first + 10):
            usage = (getrusage(RUSAGE_SELF), b"", ())
            writer.marks(at.DATA, at.LEAVE, at.FORWARD)
            writer.now_ns += S // 8 if writer.now_ns >= capped_ns else S // 10
            writer.marks(at.LEAVE, at.END)
            readings.append(Reading(step + 1, *usage))
        writer.take(HandOver(writer.now_ns, writer.timeline.take_marks(), readings=readings))
    (event,) = read_events(tmp_path)
    assert (event.kind, event.part) == ("level", "forward")
    assert_stored("callbacks/notes: a clock that falls", {"cause": event.cause or ""})
