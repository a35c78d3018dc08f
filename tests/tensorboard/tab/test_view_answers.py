"""What the routes answer for the Kernels and Compare views."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_runs import made_entry
from served import Get, write_trace

from lm_profiler.record.kernels import KernelRow, KernelTable, KindTime, PhaseKernels, Rest
from lm_profiler.record.sweep_files import PLAN_FILE, Cell, SweepPlan
from lm_profiler.report.tables.table_columns import COLUMNS

TABLE = KernelTable(
    source="kernels",
    steps=2,
    window_s=0.5,
    phases={
        "forward": PhaseKernels(
            busy_s=0.4, idle_s=0.1, overlap_s=0.02, kinds={"matmul": KindTime(count=4, total_s=0.42)}
        )
    },
    rows=[
        KernelRow(
            phase="forward",
            kind="matmul",
            name="gemm",
            operator="aten::mm",
            module=None,
            module_type=None,
            count=4,
            total_s=0.42,
        )
    ],
    rest=Rest(rows=0, count=0, total_s=0.0),
    memory_bound_share=0.0,
    communication_share=0.0,
)


def test_kernels_are_of_one_step(get: Get, logdir: Path) -> None:
    folder = made_entry(logdir / "a").folder / "trace"
    folder.mkdir()
    TABLE.write(folder / "rank0.kernels.json")
    (folder / "rank1.kernels.json").write_text("{")
    answer = get("kernels", run="a").json
    assert answer["why"] is None
    found = answer["tables"]["rank0.kernels.json"]
    assert found["phases"] == {"forward": {"time_s": 0.25, "overlap_s": 0.01}}
    assert [(row["name"], row["calls"], row["time_s"]) for row in found["rows"]] == [("gemm", 2, 0.21)]
    assert {row["kind"]: row["time_s"] for row in found["kinds"]} == {"matmul": 0.21, "idle": 0.05}
    assert any("84.0%" in answer for _, answer in found["answers"])
    assert "rank1.kernels.json" in answer["tables"]["rank1.kernels.json"]["error"]


def test_a_run_without_kernels_says_why(get: Get, logdir: Path) -> None:
    made_entry(logdir / "untraced")
    write_trace(made_entry(logdir / "untabled").folder)
    made_entry(logdir / "died", status="oom")
    whys = {run: get("kernels", run=run).json["why"] for run in ("untraced", "untabled", "died")}
    assert "--trace.steps" in whys["untraced"]
    assert "no table" in whys["untabled"]
    assert "oom" in whys["died"]


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


def test_a_comparison_brings_the_texts_that_the_command_prints(get: Get, logdir: Path) -> None:
    made_entry(logdir / "a")
    made_entry(logdir / "b", forward_s=6e-3)
    answer = get("compare", a="a", b="b").json
    rows = {name: cells for name, *cells in answer["rows"]}
    assert answer["header"][-1] == "verdict"
    assert [float(text) for text in rows["step"][0:3]] == pytest.approx([10.0, 13.0, 3.0], abs=0.01)
    assert rows["step"][3] == "+30.0%"
    assert (rows["forward"][-1], rows["backward"][-1]) == ("SLOWER", "UNCLEAR")  # equal, but single processes
    assert answer["closing"][0].startswith("verdict: SLOWER")


@pytest.mark.parametrize("run", ["missing", "../outside"])
def test_there_are_no_kernels_of_what_is_no_run(get: Get, run: str) -> None:
    assert get("kernels", run=run).status_code == 404
