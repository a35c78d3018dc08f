"""Whatever lies below a folder is in the table or in a warning that names it."""

import json
import os
from pathlib import Path

import pytest
from stored_texts import assert_stored
from tabled import write_run_of, write_sweep

from lm_profiler.analysis.conclude import with_unfinished
from lm_profiler.record.entry import collect
from lm_profiler.record.improve_record import IMPROVE_FILE, ImproveRecord
from lm_profiler.record.quantities import QUANTITIES
from lm_profiler.record.run_record import RecordError, read_run
from lm_profiler.report.tables.table_columns import column

STEPS = [(0.001, 0.002)] * 6


def test_runs_are_found_once(tmp_path: Path):
    first = write_run_of(tmp_path / "a" / "version_0", STEPS)
    second = write_run_of(tmp_path / "b" / "deeper" / "version_0", STEPS)
    found = collect([second, tmp_path, first])
    assert [entry.folder for entry in found.entries] == [second, first]
    assert found.problems == []


def test_runs_are_in_the_order_of_their_versions(tmp_path: Path):
    for number in (10, 2, 1):
        write_run_of(tmp_path / f"version_{number}", STEPS)
    names = [entry.folder.name for entry in collect([tmp_path]).entries]
    assert names == ["version_1", "version_2", "version_10"]


def test_runs_within_a_run_are_not_found(tmp_path: Path):
    searched = tmp_path / "search"
    run = write_run_of(searched / "cell" / "version_0", STEPS)
    write_run_of(run / "deeper" / "version_0", STEPS)
    search = ImproveRecord(name="search", command="improve", started="2026", budget_s=1.0, elapsed_s=1.0)
    search.write(searched / IMPROVE_FILE)
    found = collect([tmp_path])
    assert list(found.searches) == [searched]
    assert [entry.folder for entry in found.entries] == [run]
    assert found.problems == []


def test_a_record_of_a_later_version_or_none_is_a_problem_as_stored(tmp_path: Path):
    path = write_run_of(tmp_path / "run", STEPS) / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema_version": 99}))
    assert_stored("record/problems: later version", {"of version 99": collect([tmp_path]).problems}, logs=tmp_path)
    for name in ("gone", "dangling"):
        (write_run_of(tmp_path / name, STEPS) / "run.json").unlink()
    (tmp_path / "dangling" / "run.json").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folder" / "run.json").mkdir(parents=True)
    problems = {name: collect([tmp_path / name]).problems for name in ("gone", "dangling", "folder")}
    assert all(len(problems) == 1 for problems in problems.values())
    assert_stored("record/problems: no record", problems, logs=tmp_path)


def test_links_are_no_runs_of_their_own(tmp_path: Path):
    logs, elsewhere = tmp_path / "logs", write_run_of(tmp_path / "elsewhere", STEPS)
    run = write_run_of(logs / "run", STEPS)
    (logs / "latest").symlink_to(run)
    (logs / "away").symlink_to(elsewhere)
    (logs / "gone").symlink_to(tmp_path / "nowhere")
    found = collect([logs])
    assert [entry.folder for entry in found.entries] == [run]
    assert_stored("record/problems: links", {"away, and to nowhere": sorted(found.problems)}, logs=logs, here=tmp_path)


def test_an_unreadable_folder_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    locked = write_run_of(tmp_path / "locked", STEPS)
    scandir = os.scandir

    def refuse(path: str) -> object:  # root may read everything, so permissions alone would test nothing
        if Path(path) == locked:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert_stored("record/problems: locked", {"a folder": collect([tmp_path]).problems}, logs=tmp_path)


def test_damaged_steps_are_reported_when_read(tmp_path: Path):
    path = write_run_of(tmp_path / "run", STEPS) / "steps.csv"
    whole = path.read_bytes()
    for content in (b"step,stage\n1,measure\n", whole[:-40], whole.replace(b"0.001", b"nan"), b"\xff\xfe", None):
        path.write_bytes(content) if content is not None else path.unlink()
        [entry] = collect([tmp_path]).entries
        with pytest.raises(RecordError, match=str(path)):
            entry.rows  # noqa: B018 - reads the file


def test_a_sweep_is_its_cells_in_the_order_of_its_plan(tmp_path: Path):
    """Of one that did not run it is known what it would have run on, and what was not swept: from its neighbours."""
    sweep = tmp_path / "sweep"
    ran = write_run_of(sweep / "cell0" / "version_0", STEPS)
    refused = write_run_of(sweep / "cell1" / "version_0", failed=("refused", "no room"))
    write_sweep(
        sweep,
        [
            ({"data.a": "1"}, 0, "ok", ran),
            ({"data.a": "2"}, 0, "refused", refused),
            ({"data.a": "3"}, 0, "timeout", None),
            ({"data.a": "4"}, 0, "missing", None),
        ],
    )
    found = collect([tmp_path])
    assert found.problems == []
    assert [entry.status for entry in found.entries] == ["ok", "refused", "timeout", "not run"]
    assert [entry.overrides["data.a"] for entry in found.entries] == ["1", "2", "3", "4"]
    _, _, timed_out, _ = found.entries
    assert column("device").get(timed_out) == "H100"
    assert column("size").get(timed_out) == "small"
    assert column("data.a").get(timed_out) == 3


def test_an_earlier_run_in_the_folder_of_a_cell_is_a_run_of_its_own(tmp_path: Path):
    sweep = tmp_path / "again"
    earlier = write_run_of(sweep / "cell0" / "version_0", STEPS)
    write_sweep(sweep, [({"data.a": "1"}, 0, "ok", write_run_of(sweep / "cell0" / "version_1", STEPS))])
    [entry] = collect([earlier]).entries
    assert (entry.folder, entry.cell) == (earlier, None)


def test_an_unfinished_cell_shows_what_it_has(tmp_path: Path):
    sweep = tmp_path / "sweep"
    write_sweep(sweep, [({"data.a": "1"}, 0, "missing", None), ({"data.a": "2"}, 0, "missing", None)])
    for version in (2, 10):
        write_run_of(sweep / "cell0" / f"version_{version}", STEPS)
    begun = sweep / "cell0" / "version_10"
    read_run(begun).model_copy(update={"status": "unfinished", "time": {}}).write(begun / "run.json")
    running, waiting = with_unfinished(collect([tmp_path])).entries
    assert (running.status, running.folder, running.name) == ("unfinished", begun, "cell0")
    assert column("step_s").get(running) is not None
    assert (waiting.status, waiting.record) == ("not run", None)


def test_runs_of_a_damaged_sweep_are_kept(tmp_path: Path):
    run = write_run_of(tmp_path / "cell0" / "version_0", STEPS)
    write_sweep(tmp_path, [({}, 0, "ok", run)])
    (tmp_path / "sweep.json").write_text("{")
    found = collect([tmp_path])
    assert [entry.folder for entry in found.entries] == [run]
    assert str(tmp_path / "sweep.json") in found.problems[0]


def test_a_cell_with_a_damaged_outcome_was_not_run(tmp_path: Path):
    write_sweep(tmp_path, [({}, 0, "timeout", None)])
    outcome = tmp_path / "cell0" / "outcome.json"
    outcome.write_text("{")
    found = collect([tmp_path])
    assert [entry.status for entry in found.entries] == ["not run"]
    assert str(outcome) in found.problems[0]


@pytest.fixture
def unfinished(tmp_path: Path) -> Path:
    """A run that was killed while it wrote its fifth row, as it leaves its folder."""
    folder = write_run_of(tmp_path / "killed", [(0.1, 0.2)] * 3, warmup=[(0.5, 0.5)], name="killed")
    record = read_run(folder)
    nothing = {"time": {}, "host_time": {}, "steps": {}, "environment": None, "model": None, "status": "unfinished"}
    record.model_copy(update=nothing).write(folder / "run.json")
    with (folder / "steps.csv").open("a") as file:
        file.write("5,measure,0.1,0.")
    return folder


def test_an_unfinished_run_has_the_figures_of_the_steps_that_it_finished_if_any(unfinished: Path):
    found = with_unfinished(collect([unfinished]))
    [entry] = found.entries
    assert found.problems == []
    assert entry.status == "unfinished"
    assert_stored("record/problems: unfinished", {"reason": entry.reason})
    assert entry.record.steps == {"warmup": 1, "measure": 3}
    assert QUANTITIES["duration_s"].get(entry.record) is None  # its record is of the moment at which the loop began
    assert entry.record.time["step"].median == pytest.approx(0.3)
    assert entry.record.first_step_s == pytest.approx(1.0)
    assert entry.record.shares["forward"] == pytest.approx(1 / 3)
    assert len(entry.rows) == 4
    (unfinished / "steps.csv").write_text("")
    found = with_unfinished(collect([unfinished]))
    assert [entry.status for entry in found.entries] == ["unfinished"]
    assert_stored("record/problems: no steps", {"an empty file": found.problems}, run=unfinished)
