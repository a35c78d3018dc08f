"""What the watch's thread reports if nothing is handed over to it: training stalls, and in which phase."""

from collections.abc import Callable
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import pytest
import torch
from stored_texts import assert_stored

from lm_profiler.analysis.watch.ledger import EPOCH, EPOCH_TURN, VALIDATION, Ledger, NamedSpan
from lm_profiler.analysis.watch.watched_run import WatchedRun
from lm_profiler.callbacks import WatchOptions
from lm_profiler.callbacks.watch_writer import HandOver, RunningSpan, TrainingPosition, WatchWriter
from lm_profiler.measure.clocks import tape as at
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.counts.step_reader import Reading
from lm_profiler.record.watch_files import WatchEvent, read_events, read_status
from lm_profiler.report.run.watch_tables import event_text

S = 1_000_000_000


class SimulatedWriter(WatchWriter):
    """The writer of rank 5 of 8, by a clock that the test sets; it checks for a stall once per second."""

    def __init__(self, folder: Path, cpu_s: float = 0.0) -> None:
        self.now_ns = S
        timeline = Timeline(lambda: self.now_ns)
        super().__init__(
            folder, 5, 8, timeline, WatchedRun(), Ledger(0), WatchOptions(), print, torch.device("cpu"),
            place=TrainingPosition(), cpu_clock=lambda: cpu_s,
        )  # fmt: skip
        self._newest = HandOver(S)

    def wait(self, seconds: int, meanwhile: Callable[[], object] = lambda: None) -> list[WatchEvent]:
        """Let so many seconds pass; return all events so far."""
        for _ in range(seconds):
            self.now_ns += S
            meanwhile()
            self._check_for_stall()
        return read_events(self.folder)

    def pause(self, seconds: int, cpu_s_before: float) -> None:
        """Let the writer notice that its thread did not run for so long; the process had used ``cpu_s_before``."""
        before_ns = self.now_ns
        self.now_ns += seconds * S
        self._check_for_pause(before_ns, cpu_s_before)

    def marks(self, *codes: int) -> None:
        for code in codes:
            self.timeline.mark(code)

    def end_step(self) -> None:
        self.marks(at.LEAVE, at.END)
        self.take(HandOver(self.now_ns, self.timeline.take_marks()))


def in_backward(writer: SimulatedWriter) -> None:
    writer.marks(at.DATA, at.LEAVE, at.FORWARD, at.LEAVE, at.BACKWARD)


def in_validation(writer: SimulatedWriter) -> None:
    writer.marks(at.DATA)
    writer.timeline.go_outside(VALIDATION)


def in_a_checkpoint(writer: SimulatedWriter) -> None:
    in_backward(writer)
    writer.place.spans += [
        RunningSpan(writer.now_ns, "callback: ModelCheckpoint"),
        RunningSpan(writer.now_ns, "checkpoints"),
    ]


def between_epochs(writer: SimulatedWriter) -> None:
    writer.marks(at.DATA, at.LEAVE, at.END)


@pytest.mark.parametrize(
    "begin, phase",
    [(in_backward, "backward"), (in_validation, VALIDATION), (in_a_checkpoint, "checkpoints"),
     (between_epochs, EPOCH_TURN)],
)  # fmt: skip
def test_a_stall_is_reported_once(begin: Callable[[SimulatedWriter], None], phase: str, tmp_path: Path):
    """After a minute, and not again in the next 199 seconds."""
    writer = SimulatedWriter(tmp_path)
    writer.now_ns += 5 * S
    begin(writer)
    assert writer.wait(59) == []
    (event,) = writer.wait(200)
    assert event.part == phase
    assert event.rank == 5
    assert event.now == pytest.approx(60.0, abs=1e-3)
    assert event.cause.startswith("test_watch_writer.py:")
    text = event_text(event, 8)
    assert text.startswith(f"stalled in {phase} since 01-01 ")
    assert text.endswith(", rank 5 of 8")
    assert read_status(tmp_path, 5).phase == phase


def test_validation_does_not_stall_while_its_batches_end(tmp_path: Path) -> None:
    writer = SimulatedWriter(tmp_path)
    in_validation(writer)

    def end_batch() -> None:
        writer.place.alive_ns = writer.now_ns

    assert writer.wait(200, meanwhile=end_batch) == []
    assert len(writer.wait(61)) == 1


def test_a_checkpoint_stalls_if_it_takes_three_times_as_long_as_the_last(tmp_path: Path) -> None:
    """The first took 100 s: it was reported as a stall, and ended by itself."""
    writer = SimulatedWriter(tmp_path)
    in_a_checkpoint(writer)
    assert len(writer.wait(100)) == 1
    writer.place.spans.clear()
    writer.take(HandOver(writer.now_ns))
    in_a_checkpoint(writer)
    assert len(writer.wait(299)) == 1
    assert len(writer.wait(2)) == 2
    assert "stalled" not in writer.ledger.seconds  # it is booked as time of checkpoints


def test_a_stall_in_which_a_rank_waits_for_another_is_booked_once(tmp_path: Path) -> None:
    """The comparison of ranks finds 92 s of waiting: the 90 s of the stall, and 2 of the 5 s of forward."""
    writer = SimulatedWriter(tmp_path)
    ledger = writer.ledger.seconds
    ledger["step: forward"] = 5.0
    in_backward(writer)
    writer.wait(90)
    writer.end_step()
    assert ledger["stalled"] == pytest.approx(90.0)
    writer._ranks.waited_s = 92.0
    writer.rank, writer.world_size = 0, 2
    writer._compare_ranks(writer.now_ns)
    assert ledger["stalled"] == pytest.approx(90.0)
    assert ledger["waiting for ranks"] == pytest.approx(92.0 - 90.0)
    assert ledger["step: forward"] + ledger["step: backward"] == pytest.approx(5.0 - 2.0, abs=1.5)


def test_a_pause_of_the_process_is_an_event(tmp_path: Path) -> None:
    writer = SimulatedWriter(tmp_path, cpu_s=3.0)
    in_backward(writer)
    writer.pause(31, cpu_s_before=1.0)  # the process worked for 2 s of it
    (event,) = writer.wait(50)
    assert (event.kind, event.part) == ("stall", "backward")
    assert event.now == pytest.approx(30.0)
    assert event.cause == "the process was stopped"
    writer.end_step()
    assert writer.ledger.seconds["paused"] == pytest.approx(30.0)
    assert writer.ledger.seconds["step: backward"] == pytest.approx(31 + 50 - 30.0)


@pytest.mark.parametrize("seconds, cpu_s", [(31, 20.0), (4, 0.0)], ids=["the process worked", "too short"])
def test_a_thread_that_had_to_wait_is_no_pause(tmp_path: Path, seconds: int, cpu_s: float) -> None:
    writer = SimulatedWriter(tmp_path, cpu_s)
    in_backward(writer)
    writer.pause(seconds, cpu_s_before=0.0)
    assert read_events(tmp_path) == []


def test_a_clock_that_falls_is_the_cause_of_a_slower_level(tmp_path: Path) -> None:
    """Steps take 0.1 s. After 150 s a power cap lowers the clock from 1500 to 1200 MHz, and they take 0.125 s."""
    writer = SimulatedWriter(tmp_path)
    capped_ns = writer.now_ns + 150 * S

    def read_clock(began_s: float, ended_s: float) -> tuple[float | None, list[str] | None]:
        if round(began_s * 10) % 5:  # the clock is read twice per second: most steps have no reading
            return None, None
        is_capped = began_s * 1e9 >= capped_ns
        return (1200e6, ["power cap"]) if is_capped else (1500e6, [])

    writer.gpu = read_clock
    usage = getrusage(RUSAGE_SELF)
    for batch_of_steps in range(400):
        readings: list[Reading] = []
        for step in range(1, 11):
            writer.marks(at.DATA, at.LEAVE, at.FORWARD)
            writer.now_ns += S // 8 if writer.now_ns >= capped_ns else S // 10
            writer.marks(at.LEAVE, at.END)
            readings.append(Reading(10 * batch_of_steps + step, usage, b"", ()))
        writer.take(HandOver(writer.now_ns, writer.timeline.take_marks(), readings=readings))
    (event,) = read_events(tmp_path)
    assert (event.kind, event.part) == ("level", "forward")
    assert_stored("callbacks/notes: a clock that falls", {"cause": event.cause or ""})


def test_slow_first_steps_of_epochs_are_called_so(tmp_path: Path) -> None:
    """Each epoch has 50 steps of 10 ms, and the first of them takes 60 ms longer."""
    writer = SimulatedWriter(tmp_path)
    for step in range(600):
        epoch = [NamedSpan(writer.now_ns, writer.now_ns, EPOCH)] if step % 50 == 0 else []
        writer.marks(at.DATA)
        writer.now_ns += 70_000_000 if epoch else 10_000_000
        writer.marks(at.LEAVE, at.END)
        writer.take(HandOver(writer.now_ns, writer.timeline.take_marks(), spans=epoch))
    writer.end(HandOver(writer.now_ns))
    (event,) = read_events(tmp_path)
    assert event.part == "data"
    assert event.starts_epochs
