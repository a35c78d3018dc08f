"""steps.csv: what is written is read back, and what is not one is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
from raised import refusal
from stored_texts import assert_stored

from lm_profiler.record.quantities import STEP_COLUMNS
from lm_profiler.record.steps import UNKNOWN, Peaks, StepRow, largest_peaks, read_steps, write_steps

# of the eight parts of a step: 1 to 8 ms on the device, a tenth of that on the host
DEVICE_S = tuple(0.001 * n for n in range(1, 9))
HOST_S = tuple(0.0001 * n for n in range(1, 9))


def step_row(step: int, **options: object) -> StepRow:
    values = {"seconds": (*DEVICE_S, sum(DEVICE_S)), "host_seconds": (*HOST_S, sum(HOST_S))}
    return StepRow(step, **{"stage": "measure", **values, **options})


ROWS = [
    step_row(1, stage="warmup", tokens=4096, memory=(1 << 40, 2 << 40, 123), rank=0),
    step_row(2, seconds=None, memory=(None, None, 5), rank=3),
    step_row(3, tokens=0, memory=UNKNOWN),
]


def test_rows_are_read_to_the_nanosecond(tmp_path: Path) -> None:
    write_steps(tmp_path / "steps.csv", ROWS)
    for written, read in zip(ROWS, read_steps(tmp_path / "steps.csv"), strict=True):
        assert read.host_seconds == pytest.approx(written.host_seconds, abs=0.5e-9)
        if written.seconds is None:
            assert read.seconds is None
        else:
            assert read.seconds == pytest.approx(written.seconds, abs=0.5e-9)
        times = {"seconds": None, "host_seconds": None}
        assert replace(read, **times) == replace(written, **times)


def test_rows_that_were_read_are_written_as_before(tmp_path: Path) -> None:
    write_steps(tmp_path / "first.csv", ROWS)
    write_steps(tmp_path / "second.csv", read_steps(tmp_path / "first.csv"))
    assert (tmp_path / "first.csv").read_bytes() == (tmp_path / "second.csv").read_bytes()


def test_a_file_without_rows_has_its_columns(tmp_path: Path) -> None:
    write_steps(tmp_path / "steps.csv", [])
    assert (tmp_path / "steps.csv").read_text() == ",".join(STEP_COLUMNS) + "\n"
    assert len(read_steps(tmp_path / "steps.csv")) == 0


DAMAGES = {
    "empty": lambda text: "",
    "other columns": lambda text: "a,b\n1,2\n",
    "a column's name": lambda text: text.replace("forward_s", "forwards_s", 1),
    "no number": lambda text: text.replace("0.001", "fast", 1),
    "cut off": lambda text: text[:-30],
    "half a line more": lambda text: text + "5,measure\n",
    "half a token": lambda text: text.replace("4096", "4096.5", 1),
}


def test_damaged_steps_files_are_refused(tmp_path: Path) -> None:
    path, messages = tmp_path / "steps.csv", {}
    for case, damage in DAMAGES.items():
        write_steps(path, ROWS)
        path.write_text(damage(path.read_text()))
        messages[case] = refusal(ValueError, lambda: read_steps(path))
    assert_stored("record/problems: no steps.csv", messages, run=tmp_path)


def test_a_row_has_the_time_of_a_part_on_each_clock() -> None:
    """On the device the n-th part takes n ms; forward is the third part, backward the fifth."""
    row = step_row(1)
    assert row.time("forward") == 0.003
    assert row.time("forward_backward") == pytest.approx(0.003 + 0.005)
    assert row.time("step") == pytest.approx(sum(DEVICE_S))
    assert row.time("backward", "host") == pytest.approx(0.0005)


def test_a_row_without_times_of_the_device_has_those_of_the_host() -> None:
    row = step_row(2, seconds=None)
    assert row.time("step", "host") == pytest.approx(sum(HOST_S))
    message = refusal(ValueError, lambda: row.time("forward"))
    assert_stored("record/problems: an unknown time", {"step 2": message})


@pytest.mark.parametrize(
    "peaks, largest",
    [
        ([(1, None, 5), (3, None, None), (2, None, 4)], (3, None, 5)),
        ([(0, 0, 0)], (0, 0, 0)),
        ([], UNKNOWN),
    ],
)
def test_of_each_kind_of_peak_the_largest_known_one_counts(peaks: list[Peaks], largest: Peaks) -> None:
    assert largest_peaks(peaks) == largest
