"""Whose a sweep's folder is, and what is missing in it."""

import json
from functools import partial
from pathlib import Path

from by_hand import made_sweep_plan, write_cell_record
from raised import refusal
from stored_texts import assert_stored

from lm_profiler.record.sweep_files import PLAN_FILE
from lm_profiler.sweep.schedule import ProcessEnd, clear, record_outcome
from lm_profiler.sweep.sweep_folder import SweepFolder
from lm_profiler.sweep.sweep_plan import part_of
from lm_profiler.usage_error import UsageError


def missing(path: Path) -> set[str]:
    with SweepFolder(path, made_sweep_plan("a", "b", "c", "d")) as folder:
        return {cell.id for cell in folder.missing()}


def test_a_cell_with_an_outcome_is_not_missing(tmp_path: Path) -> None:
    cells = made_sweep_plan("a", "b", "c", "d")
    cells.write(tmp_path / PLAN_FILE)
    write_cell_record(tmp_path, "ok", "a")
    write_cell_record(tmp_path, "interrupted", "b")
    write_cell_record(tmp_path, "ok", "c")  # still running when everything was killed
    for cell in cells.cells[:2]:
        record_outcome(tmp_path, cell, ProcessEnd(0 if cell.id == "a" else 130, 1.0))
    assert missing(tmp_path) == {"b", "c", "d"}


def test_a_cell_whose_folder_is_removed_is_missing(tmp_path: Path) -> None:
    cells, failed = made_sweep_plan("a", "b"), tmp_path / "failed"
    failed.mkdir()
    cells.write(failed / PLAN_FILE)
    for cell in cells.cells:
        write_cell_record(failed, "failed", cell.id)
        record_outcome(failed, cell, ProcessEnd(1, 1.0))
    with SweepFolder(failed, cells) as folder:
        assert folder.missing() == []
        assert list(clear(failed, cells.cells[0]).iterdir()) == []
        assert folder.missing() == [cells.cells[0]]


def test_another_plan_or_something_else_is_refused(tmp_path: Path) -> None:
    made_sweep_plan("a", "b").write(tmp_path / PLAN_FILE)
    before = (tmp_path / "sweep.json").read_text()
    others = {
        "cells": made_sweep_plan("a", "c"),
        "verb": made_sweep_plan("a", "b", verb="test"),
        "seed": made_sweep_plan("a", "b", seed=1),
        "config": made_sweep_plan("a", "b", config_sha256="1"),
    }
    messages = {case: refusal(UsageError, partial(SweepFolder, tmp_path, other)) for case, other in others.items()}
    assert_stored("sweep/refused: another", messages, here=tmp_path)
    assert (tmp_path / "sweep.json").read_text() == before


def test_of_two_sweeps_that_begin_at_once_the_second_is_refused(tmp_path: Path) -> None:
    first = SweepFolder(tmp_path, made_sweep_plan("a"))

    def sleep(seconds: float) -> None:
        first.begin()
        first.__exit__(None, None, None)

    message = refusal(UsageError, lambda: SweepFolder(tmp_path, made_sweep_plan("b"), sleep))
    assert_stored("sweep/refused: at once", {"the second": message}, here=tmp_path)


def test_folders_of_something_else_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    (other / "version_0").mkdir(parents=True)
    messages = {"a run": refusal(UsageError, lambda: SweepFolder(other, made_sweep_plan("a")))}
    (other / "sweep.json").write_text(json.dumps({"schema_version": 99}))
    messages["a damaged sweep"] = refusal(UsageError, lambda: SweepFolder(other, made_sweep_plan("a")))
    assert_stored("sweep/refused: something else", messages, here=other)
    # Nothing is left of a sweep that never began.
    with SweepFolder(tmp_path / "logs" / "s", made_sweep_plan("a")):
        pass
    assert list(tmp_path.iterdir()) == [other]
    with SweepFolder(tmp_path / "logs" / "s", made_sweep_plan("a")) as folder:
        assert folder.is_new
        folder.begin()
    assert (tmp_path / "logs" / "s" / "sweep.json").exists()


def test_a_part_that_never_began_removes_nothing(tmp_path: Path) -> None:
    with open_part(tmp_path / "s", "1/2") as first:
        with open_part(tmp_path / "s", "2/2"):
            pass
        first.begin()
    assert (tmp_path / "s" / "sweep.json").exists()
    with open_part(tmp_path / "t", "1/2"):
        pass
    assert not (tmp_path / "t").exists()


def open_part(path: Path, text: str | None, cells: str = "abc") -> SweepFolder:
    """With a clock that does not wait."""
    return SweepFolder(path, made_sweep_plan(*cells), lambda seconds: None, None if text is None else part_of(text))


def test_parts_run_only_beside_each_other(tmp_path: Path) -> None:
    with open_part(tmp_path / "s", "1/2") as first, open_part(tmp_path / "s", "2/2") as second:
        first.begin()
        assert {cell.id for cell in first.missing()} | {cell.id for cell in second.missing()} == {"a", "b", "c"}
        messages = {
            f"beside both halves {other or 'the whole'}": refusal(UsageError, partial(open_part, tmp_path / "s", other))
            for other in ("1/2", "2/2", "1/3", None)
        }
    assert_stored("sweep/refused: part", messages, here=tmp_path)
    for again in ("1/3", None, "2/2"):
        with open_part(tmp_path / "s", again):
            pass
