"""What the list of runs holds for the view Compare."""

from __future__ import annotations

from pathlib import Path

from made_runs import made_entry
from served import Get

from lm_profiler.record.sweep_files import PLAN_FILE, Cell, SweepPlan
from lm_profiler.report.tables.table_columns import COLUMNS


def test_options_that_were_given_are_columns_that_every_run_fills(get: Get, logdir: Path) -> None:
    made_entry(logdir / "a", {"data.context_length": "256", "trainer.benchmark": "true", "name": "x"})
    made_entry(logdir / "b")
    answer = get("runs").json
    assert answer["options"][:2] == ["context_length", "trainer.benchmark"]
    assert set(answer["options"][2:]) < COLUMNS.keys()  # what runs are compared by where nobody gave an option
    assert {column["name"] for column in answer["columns"]} - COLUMNS.keys() == {"trainer.benchmark"}
    assert [run["values"]["context_length"] for run in answer["runs"]] == [256, 128]


def test_repeats_of_a_cell_share_a_point(get: Get, logdir: Path) -> None:
    cells = [
        Cell(id=f"{size},r{repeat}", overrides={"model.size": size}, repeat=repeat, arguments=["fit"])
        for size in ("small", "large")
        for repeat in range(2)
    ]
    (logdir / "sweep").mkdir()
    SweepPlan(name="sweep", command="", verb="fit", seed=0, cells=cells).write(logdir / "sweep" / PLAN_FILE)
    made_entry(logdir / "alone")
    points = {run["run"]: run["point"] for run in get("runs").json["runs"]}
    assert points.pop("alone") is None
    assert points["sweep/small,r0"] == points["sweep/small,r1"] != points["sweep/large,r0"]
    assert len(set(points.values())) == 2
