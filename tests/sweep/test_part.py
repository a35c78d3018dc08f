"""Which part of a sweep a process runs, and parts that run beside each other."""

from __future__ import annotations

from pathlib import Path

import pytest
from by_hand import plan

from lm_profiler.sweep.folder import SweepFolder
from lm_profiler.sweep.part import SweepPart, part_of
from lm_profiler.usage_error import UsageError

SLURM = {"SLURM_ARRAY_TASK_ID": "14", "SLURM_ARRAY_TASK_MIN": "10", "SLURM_ARRAY_TASK_STEP": "2"}
ARRAY = {**SLURM, "SLURM_ARRAY_TASK_COUNT": "4"}


@pytest.mark.parametrize(
    "given,environment,part",
    [
        (None, {}, None),
        ("2/8", {}, SweepPart(2, 8)),
        ("2/8", ARRAY, SweepPart(2, 8)),  # what is said goes before what the scheduler says
        (None, ARRAY, SweepPart(3, 4)),
        ("/8", {"JOB_COMPLETION_INDEX": "7"}, SweepPart(8, 8)),
        ("/4", ARRAY, SweepPart(3, 4)),
    ],
)
def test_a_part_is_what_is_given_or_what_the_scheduler_says(
    given: str | None, environment: dict[str, str], part: SweepPart | None
) -> None:
    assert part_of(given, environment) == part


@pytest.mark.parametrize(
    "given,environment,told",
    [
        ("0/8", {}, "part: expected one from 1/8 to 8/8, given 0/8"),
        ("9/8", {}, "part: expected one from 1/8 to 8/8, given 9/8"),
        ("half", {}, "part: expected a part such as 1/8, given 'half'"),
        ("/8", {}, "part: expected a number, as in 1/8, outside of a job array, given '/8'"),
        ("/2", {"JOB_COMPLETION_INDEX": "2"}, "part: expected one from 1/2 to 2/2, given 3/2"),
        (
            None,
            {"JOB_COMPLETION_INDEX": "0"},
            "part: expected how many pods there are with JOB_COMPLETION_",
        ),
    ],
)
def test_what_names_no_part_is_told_in_a_line(given: str | None, environment: dict[str, str], told: str) -> None:
    with pytest.raises(UsageError) as error:
        part_of(given, environment)
    assert str(error.value).startswith(told)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 9])
def test_the_parts_together_are_the_whole_and_none_has_a_cell_of_another(count: int) -> None:
    cells = list("abcdefg")
    parts = [SweepPart(number + 1, count).of(cells) for number in range(count)]
    assert sorted(cell for part in parts for cell in part) == cells
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def open_part(path: Path, text: str | None) -> SweepFolder:
    """With a clock that does not wait."""
    return SweepFolder(path, plan("a", "b", "c"), lambda seconds: None, None if text is None else part_of(text, {}))


def test_parts_run_beside_each_other_and_beside_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm_profiler.sweep.folder._PATIENCE_S", 0.0)
    with open_part(tmp_path / "s", "1/2") as first, open_part(tmp_path / "s", "2/2") as second:
        first.begin()
        assert {cell.id for cell in first.missing()} | {cell.id for cell in second.missing()} == {"a", "b", "c"}
        for other in ("1/2", "2/2", "1/3", None):
            with pytest.raises(UsageError, match="expected a sweep that is not running"):
                open_part(tmp_path / "s", other)
    for again in ("1/3", None, "2/2"):
        with open_part(tmp_path / "s", again):
            pass


def test_a_part_that_never_began_removes_nothing_while_another_is_about_to(tmp_path: Path) -> None:
    with open_part(tmp_path / "s", "1/2") as first:
        with open_part(tmp_path / "s", "2/2"):
            pass
        first.begin()
    assert (tmp_path / "s" / "sweep.json").exists()
    with open_part(tmp_path / "t", "1/2"):
        pass
    assert not (tmp_path / "t").exists()
