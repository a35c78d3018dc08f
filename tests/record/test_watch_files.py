"""Files of a watched run: sketches that merge, last steps in bounded files, lines that are being written."""

import resource
from pathlib import Path

import numpy as np
import psutil
import pytest
from raised import refusal
from stored_texts import assert_stored

from lm_profiler.record.files import RecordError
from lm_profiler.record.parts import TIMED
from lm_profiler.record.watch_files import (
    EVENTS,
    LAST_STEPS,
    STATUS,
    STEP_ROW,
    Sketch,
    WatchEvent,
    WatchStatus,
    append_last_steps,
    append_lines,
    process_has_ended,
    process_name,
    read_events,
    read_last_steps,
)

DRAWS = np.random.default_rng(0).lognormal(-3.0, 1.0, 5000)


def test_quantiles_are_right_to_two_percent_however_windows_are_merged() -> None:
    whole, pieces = Sketch.from_seconds(DRAWS), Sketch()
    for piece in np.split(DRAWS, 10):
        pieces = pieces.merge(Sketch.model_validate_json(Sketch.from_seconds(piece).model_dump_json()))
    assert pieces.buckets == whole.buckets
    assert pieces.mean == pytest.approx(DRAWS.mean())
    assert (pieces.count, pieces.min, pieces.max) == (5000, DRAWS.min(), DRAWS.max())
    for share in (0.01, 0.5, 0.99):
        assert pieces.quantile(share) == pytest.approx(np.quantile(DRAWS, share, method="lower"), rel=0.021)
    empty = Sketch.from_seconds(np.array([np.nan]))
    assert (empty.mean, empty.quantile(0.5), empty.count) == (None, None, 0)


def test_the_last_steps_are_kept_in_bounded_files(tmp_path: Path) -> None:
    rows = np.zeros(100, STEP_ROW)
    for first in range(0, 5000, 100):
        rows["step"] = np.arange(first, first + 100)
        append_last_steps(tmp_path / LAST_STEPS, rows, 1000 * STEP_ROW.itemsize)
    kept = read_last_steps(tmp_path)["step"]
    assert kept.tolist() == list(range(kept[0], 5000))
    assert 500 <= len(kept) <= 1100
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 1100 * STEP_ROW.itemsize


def test_an_event_is_listed_once_with_its_trace(tmp_path: Path) -> None:
    event = WatchEvent(at_s=5.0, step=40, kind="level", now=0.2, against=0.1)
    other = WatchEvent(at_s=6.0, step=41, kind="slow step", now=0.9)
    append_lines(tmp_path / EVENTS, [event, other, event.model_copy(update={"trace": "trace/rank0.step41"})])
    assert [event.trace for event in read_events(tmp_path)] == ["trace/rank0.step41", None]


def test_rows_of_other_phases_are_refused(tmp_path: Path) -> None:
    status = {"rank": 0, "began_s": 0.0, "written_s": 0.0, "steps": 10, "phase": "", "ledger": {}, "wall_s": 0.0}
    seconds = dict.fromkeys([*TIMED[:6], "ema", *TIMED[6:]], 0.0)
    WatchStatus(**status, world_size=1, seconds=seconds).write(tmp_path / STATUS)
    append_last_steps(tmp_path / LAST_STEPS, np.zeros(10, STEP_ROW), 1000)
    message = refusal(RecordError, lambda: read_last_steps(tmp_path))
    assert_stored("record/problems: rows of other phases", {"one more": message}, run=tmp_path)


def test_a_line_written_in_part_is_removed(tmp_path: Path) -> None:
    event, path, steps = WatchEvent(step=3, kind="stall", now=61.0), tmp_path / EVENTS, tmp_path / LAST_STEPS
    rows = np.zeros(10, STEP_ROW)
    append_lines(path, [event])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, limits[1]))
    try:
        with pytest.raises(OSError, match="No space left"):
            append_lines(path, [event])
        with pytest.raises(OSError, match="No space left"):
            append_last_steps(steps, rows, 1000 * STEP_ROW.itemsize)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    append_lines(path, [event.model_copy(update={"step": 4})])
    append_last_steps(steps, rows, 1000 * STEP_ROW.itemsize)
    assert len(read_events(tmp_path)) == 2
    assert len(read_last_steps(tmp_path)) == 10


def test_a_slow_step_that_waits_names_the_rank_that_was_slow_in_the_same_step(tmp_path: Path) -> None:
    def event(rank: int, step: int, part: str, cause: str | None = None) -> WatchEvent:
        return WatchEvent(at_s=step, rank=rank, step=step, kind="slow step", part=part, now=0.3, cause=cause)

    append_lines(tmp_path / "events.jsonl", [event(0, 7, "backward"), event(0, 8, "backward"), event(0, 9, "data")])
    others = [event(3, 7, "data", "empty queue"), event(3, 9, "backward", "garbage collection")]
    append_lines(tmp_path / "events.rank3.jsonl", others)
    causes = {(event.rank, event.step): event.cause for event in read_events(tmp_path)}
    assert causes[0, 7] == "waiting for rank 3"
    assert causes[0, 8] is None  # nobody else was slow then
    assert causes[0, 9] is None  # it was in data, which waits for no rank
    assert causes[3, 7] == "empty queue"


def test_a_process_goes_on_though_the_wall_clock_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    name = process_name()
    create_time = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: create_time(process) + 60.0)
    assert not process_has_ended(name)


def test_a_later_process_of_the_same_number_is_another() -> None:
    machine_and_number, _, start = process_name().rpartition(" ")
    ticks = int(start.removeprefix("boot+"))
    assert process_has_ended(f"{machine_and_number} boot+{ticks - 1}")


def test_a_name_that_an_older_version_wrote() -> None:
    machine_and_number, _, _ = process_name().rpartition(" ")
    began_s = psutil.Process().create_time()
    assert not process_has_ended(f"{machine_and_number} {began_s:.0f}")
    assert process_has_ended(f"{machine_and_number} {began_s - 60:.0f}")


def level(step: int, now: float, against: float, **fields: object) -> WatchEvent:
    return WatchEvent(at_s=float(step), step=step, kind="level", now=now, against=against, since_step=step, **fields)


SLOWER = level(2000, 0.0171, 0.0114, part="backward")
"""A change of the program."""
MACHINE = [
    level(3077, 0.0205, 0.0096, in_all_parts=True),
    level(3157, 0.0598, 0.0191, in_all_parts=True, until_step=3316, cause="waiting for a CPU", cause_s=0.02),
    level(3339, 0.0207, 0.0864),
    level(4390, 0.0437, 0.0217, part="backward", cause="waiting for a CPU", cause_s=0.006),
]
WAITS = WatchEvent(at_s=1.0, step=1, kind="slow step", now=0.1, against=0.05, cause="waiting for a CPU", times=51)


def events_read(folder: Path, written: list[WatchEvent]) -> list[WatchEvent]:
    append_lines(folder / EVENTS, written)
    return read_events(folder)


def test_a_busy_machine_is_one_event(tmp_path: Path) -> None:
    """From 9.6 to 86.4 ms, by four changes, one of which went back."""
    waits, slower, machine = events_read(tmp_path, [SLOWER, *MACHINE, WAITS])
    assert (waits, slower) == (WAITS, SLOWER)
    assert (machine.course, machine.times, machine.since_step, machine.part) == ("wanders", 5, 3077, None)
    assert (machine.against, machine.now, machine.cause) == (0.0096, 0.0864, "waiting for a CPU")


@pytest.mark.parametrize(
    "written",
    [
        [SLOWER, MACHINE[0], MACHINE[2]],  # nothing shows that the machine was busy
        [WAITS, SLOWER, MACHINE[0]],  # once
        [WAITS, MACHINE[0], level(4000, 0.03, 0.0205, in_all_parts=True)],  # slower twice, as by longer sequences
        [WAITS, MACHINE[0], MACHINE[2].model_copy(update={"rank": 1})],
    ],
)
def test_other_changes_of_level_stay_events_of_their_own(written: list[WatchEvent], tmp_path: Path) -> None:
    assert len(events_read(tmp_path, written)) == len(written)
