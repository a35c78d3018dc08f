"""The stages pass by, on a clock that the test sets and a device that it simulates."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import Clock, FakeStream
from known_session import STEP_MS, Loop

from lm_profiler.callbacks import StageOptions
from lm_profiler.record.steps import Peaks


class CountingProbe:
    """Its n-th reading since the last reset is n."""

    def __init__(self) -> None:
        self.resets = self.readings = 0
        self.resettable = True

    def reset(self) -> None:
        self.resets += 1
        self.readings = 0

    def peaks(self) -> Peaks:
        self.readings += 1
        return self.readings, None, None

    def held(self) -> int:
        return 0


class RecordingProgress:
    """Remembers the progress that is reported to it."""

    def __init__(self) -> None:
        self.reports: list[tuple[str, int, int]] = []
        self.cleared = 0

    def draw(self, stage: str, done: int, planned: int) -> None:
        self.reports.append((stage, done, planned))

    def clear(self) -> None:
        self.cleared += 1


def loop_with_device(folder: Path, stages: dict[str, int], **device: Any) -> tuple[Loop, FakeStream]:
    clock = Clock()
    stream = FakeStream(clock, **device)
    options = StageOptions(measure_steps=40)
    return Loop(folder, options, int, stages, clock, stream, CountingProbe(), RecordingProgress()), stream


def test_rows_hold_both_clocks_in_order(tmp_path: Path) -> None:
    run, _ = loop_with_device(tmp_path, {"warmup": 2, "measure": 3}, slowness=3, late_ms=25)
    run.run(5)
    rows = run.finish().rows
    stages = [(1, "warmup"), (2, "warmup"), (3, "measure"), (4, "measure"), (5, "measure")]
    assert [(row.step, row.stage) for row in rows] == stages
    for row in rows:
        assert row.time("forward", "host") == pytest.approx(4e-3)
        assert row.time("forward") == pytest.approx(12e-3)
        assert row.time("step") == pytest.approx(30e-3)
    alone = Loop(tmp_path, StageOptions(), stages={"measure": 3})  # without a device
    alone.run(3)
    for row in alone.finish().rows:
        assert row.seconds == row.host_seconds
        assert row.time("step") == pytest.approx(STEP_MS * 1e-3)


@pytest.mark.parametrize("late_ms", [0, 3, 25, 1000])
def test_the_device_is_waited_for_once_when_the_measuring_ends(tmp_path: Path, late_ms: float) -> None:
    run, stream = loop_with_device(tmp_path, {"warmup": 10, "measure": 30, "memory": 1}, late_ms=late_ms)
    run.run(39)
    assert stream.waits == 0
    run.run(1)
    assert stream.waits == 1
    run.run(1)
    measured = run.finish()
    assert len(measured.rows) == 41
    # A reading that came too early would fail in the fake device.
    assert all(row.seconds is not None for row in measured.rows)


def test_a_long_run_makes_a_bounded_number_of_events(tmp_path: Path) -> None:
    run, stream = loop_with_device(tmp_path, {"warmup": 0, "measure": 1000}, late_ms=25)  # two steps and a half
    run.run(1000)
    marks_a_step = 3
    assert stream.made <= 8 * marks_a_step
    assert len(run.finish().rows) == 1000
    assert len(stream.free) == stream.made  # all were handed back


def test_steps_of_a_device_that_died_have_host_times(tmp_path: Path) -> None:
    run, stream = loop_with_device(tmp_path, {"measure": 20}, late_ms=25)
    run.run(10)
    stream.dead = True
    rows = run.finish().rows
    assert [row.step for row in rows] == list(range(1, 11))
    known = [row.seconds is not None for row in rows]
    assert known == sorted(known, reverse=True)  # those read before it died, then none
    assert not known[-1]
    assert all(row.time("step", "host") == pytest.approx(STEP_MS * 1e-3) for row in rows)


def test_peaks_are_reset_with_each_stage(tmp_path: Path) -> None:
    run, _ = loop_with_device(tmp_path, {"warmup": 2, "measure": 3, "memory": 2, "trace": 0})
    run.run(5)
    assert run.session.instruments.memory.probe.resets == 3
    run.run(1)
    assert run.ended == 0
    run.run(1)
    assert run.ended == 1
    assert run.session.schedule.stage is None
    measured = run.finish()
    assert [row.memory[0] for row in measured.rows[:5]] == [1, 2, 1, 2, 3]
    assert set(measured.part_peaks) == {"forward", "other"}
    assert run.timeline.observers == ()
    assert [row.stage for row in measured.rows[-2:]] == ["memory"] * 2


def test_tokens_belong_to_the_step_in_which_they_were_counted(tmp_path: Path) -> None:
    run, _ = loop_with_device(tmp_path, {"measure": 3})
    for batch in ({"input_ids": torch.zeros(5)}, "words", {"input_ids": torch.zeros(7)}):
        run.session.counts.add(batch)
        run.run(1)
    assert [row.tokens for row in run.finish().rows] == [5, None, 7]


def test_progress_is_drawn_once_a_second(tmp_path: Path) -> None:
    run, _ = loop_with_device(tmp_path, {"warmup": 1, "measure": 4})
    run.run(2)
    run.clock.pass_ms(1000)
    run.run(1)
    run.finish()
    assert run.session.progress.reports == [("warmup", 0, 1), ("measure", 0, 4), ("measure", 2, 4)]
    assert run.session.progress.cleared == 1


def test_short_steps_share_a_reading(tmp_path: Path) -> None:
    """The first step of a stage is read, then one at least 5 ms after the last reading, and the stage's last.

    Three steps of 1 ms are the warm-up. Of the measured ones, 4 to 11 take 2 ms, 12 takes 30, 13 to 20 take 1.
    """
    run = Loop(tmp_path, StageOptions(warmup_steps=3, measure_steps=17))
    for ms in (1, 1, 1, *[2] * 8, 30, *[1] * 8):
        run.step(ms)
    steps_read = [step for step, *_ in run.session.instruments.counters.reader.timed_readings]
    assert steps_read == [0, 4, 7, 10, 12, 17, 20]
    resident_peaks = [resident for _, _, resident in (row.memory for row in run.session.measured().rows)]
    assert all(resident_peaks)  # of the last reading, where a step has none of its own
    assert len(resident_peaks) == 20
