"""Tables of runs made by hand: what is shown, what is said once, what repeats and groups have together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from stored_texts import assert_stored
from tabled import run

from lm_profiler.record.entry import Entry
from lm_profiler.record.run_record import PlannedMemory
from lm_profiler.record.sweep_files import Cell
from lm_profiler.report.pictures.groups import bar_groups
from lm_profiler.report.tables.formats import terminal
from lm_profiler.report.tables.layouts import pivot
from lm_profiler.report.tables.rows import raw_runs_table, runs_table
from lm_profiler.report.tables.run_groups import group_by_facts, repeats_together
from lm_profiler.report.tables.table import Table
from lm_profiler.report.tables.table_columns import column, columns_named

FAST, SLOW = [(0.010, 0.020)] * 6, [(0.020, 0.050)] * 6


def of_sweep(entry: Entry, repeat: int, **overrides: str) -> Entry:
    cell = Cell(id=f"cell{repeat}", overrides=overrides, repeat=repeat, arguments=["fit"])
    return replace(entry, cell=cell, sweep=Path("sweep"))


def titles(table: Table) -> list[str]:
    return [heading.title for heading in table.headings]


def test_facts_that_differ_are_columns_and_the_others_are_said_once_as_stored():
    entries = [run("a", FAST, name="a"), run("b", SLOW, name="b", size="xl", batch_size=8)]
    died = run("b", failed=("failed", "it broke"), name="b", size="xl", precision="bf16-mixed")
    unknown = [Entry(of.folder, of.record.model_copy(update={"model": None, "config": None})) for of in (died,) * 2]
    by = [column("size")]
    unlike = [run("a", FAST, precision="32-true"), run("b", SLOW, precision="bf16-mixed")]
    said = {
        "two runs": runs_table(repeats_together(entries)),
        "a reason names its run": runs_table(repeats_together([run("a", FAST, name="a"), died])),
        "what most rows do not know": runs_table(repeats_together([run("a", FAST, name="a"), *unknown])),
        "unlike runs share a row": runs_table(list(group_by_facts(unlike, by).values()), by=by),
    }
    assert_stored("report/rows", {case: terminal(table) for case, table in said.items()})


def test_repeats_of_a_cell_share_a_row_of_the_median_of_their_medians():
    steps_s = (0.030, 0.032, 0.050)
    entries = [
        of_sweep(run(f"{n}", [(0.01, s - 0.01)] * 6), n, **{"model.size": "small"}) for n, s in enumerate(steps_s)
    ]
    failed = of_sweep(run("3", failed=("failed", "it broke")), 3, **{"model.size": "small"})
    [row] = raw_runs_table(repeats_together([*entries, failed])).records()
    assert (row["step_s"], row["step_s_low"], row["step_s_high"], row["n"]) == pytest.approx((0.032, 0.030, 0.050, 3))
    assert row["status"] == "3 ok, 1 failed"
    shown = terminal(runs_table(repeats_together([*entries, failed])))
    assert_stored("report/tables: repeats", {"three repeats, and one that failed": shown})


def test_runs_are_rows_and_cells_stand_in_their_order_with_a_missing_one_beside():
    table = runs_table(repeats_together([run("logs/a/version_0", FAST), run("logs/a/version_1", FAST)]))
    assert [row[0].value for row in table.rows] == ["logs/a/version_0", "logs/a/version_1"]
    cells = [of_sweep(run(size, FAST, size=size), 0, **{"model.size": size}) for size in ("xl", "small")]
    table = runs_table(repeats_together(cells))
    assert titles(table)[0] == "size"
    assert [row[0].text for row in table.rows] == ["xl", "small"]
    # A cell without a run stands beside those that have one.
    ran = of_sweep(run("a", FAST, batch_size=8), 0, **{"data.batch_size": "8", "trainer.precision": "32"})
    cell = Cell(id="b", overrides={"data.batch_size": "16", "trainer.precision": "32"}, repeat=0, arguments=["fit"])
    killed = replace(ran, record=None, cell=cell, sibling=ran, folder=Path("b"))
    table = pivot([killed, ran], [column("batch_size")], [column("precision"), column("device")], column("step_s"))
    assert [[cell.text for cell in row] for row in table.rows] == [["8", "30.00 [29.98, 30.02]"], ["16", "not run"]]
    assert titles(table) == ["batch", "32-true H100"]


def test_chosen_columns_are_shown_as_chosen_and_a_phase_that_never_ran_has_no_time():
    chosen = columns_named(["data.batch_size", "backward_s", "verb"], [run("a", FAST)])
    table = runs_table([[run("a", FAST)]], chosen)
    assert titles(table) == ["batch", "backward (ms)", "verb"]
    assert [cell.text for cell in table.rows[0]] == ["4", "20.00 [19.99, 20.01]", "fit"]
    forward_only = run("b", [(0.010, 0.0)] * 6, name="b")
    table = raw_runs_table(repeats_together([run("a", FAST, name="a"), forward_only]))
    assert [row["backward_s"] for row in table.records()] == [0.020, None]
    shown = runs_table(repeats_together([run("a", FAST, name="a"), run("b", FAST, name="b", num_layers=3)]))
    assert "num_layers" in titles(shown)
    assert "d_model 768" in shown.above[0]
    refused = run("a", failed=("refused", "too large"), size="xl")
    refused = Entry(refused.folder, refused.record.model_copy(update={"model": None}))
    [row] = runs_table([[refused]], [column("parameters")]).rows
    assert (row[0].value, row[0].text) == (1_998_235_200, "1,998,235,200")


def test_a_pivot_says_why_a_cell_has_no_figure_and_of_how_many_runs_it_is():
    entries = [
        run("a", FAST),
        run("b", SLOW, precision="bf16-mixed"),
        run("c", failed=("oom", "no memory left"), size="xl"),
        run("d", failed=("refused", "too large"), size="2.7B", precision="bf16-mixed"),
    ]
    table = pivot(entries, [column("size")], [column("precision")], column("step_s"))
    assert_stored("report/tables: pivot", {"sizes by precisions": terminal(table)})
    assert table.records()[1] == {
        "size": "xl",
        "32-true": None,
        "32-true_low": None,
        "32-true_high": None,
        "32-true_status": "oom",
        "bf16-mixed": None,
        "bf16-mixed_low": None,
        "bf16-mixed_high": None,
        "bf16-mixed_status": None,
    }
    entries = [run("a", FAST), run("b", SLOW)]
    entries += [run(status, failed=(status, "no memory left")) for status in ("oom", "refused")]
    [[_, cell]] = pivot(entries, [column("size")], [column("device")], column("step_s")).rows
    assert "n=2" in cell.text
    assert "1 OOM" in cell.text


def test_any_option_of_a_call_can_tell_runs_apart():
    runs = [run(name, FAST, name=name) for name in "ab"]
    given = [{"model": "my.Module", "peak_tflops": "10"}, {"peak_tflops": "20"}]
    entries = []
    for entry, overrides in zip(runs, given, strict=True):
        config = {**entry.record.config, "peak_tflops": int(overrides["peak_tflops"])}
        entries.append(Entry(entry.folder, entry.record.model_copy(update={"overrides": overrides, "config": config})))
    table = runs_table(repeats_together(entries))
    assert titles(table)[:2] == ["run", "peak_tflops"]
    model = entries[0].record.config["model"]["class_path"]
    assert f"model {model}" in table.above[0]  # its class, not all of its options
    assert [found.name for found in columns_named(["peak_tflops"], entries)] == ["peak_tflops"]


def test_an_option_that_one_run_leaves_open_is_not_in_all_rows():
    entries = []
    for name, clip in (("a", 1.0), ("b", None)):
        entry = run(name, FAST, name=name)
        trainer = {**entry.record.config["trainer"], "gradient_clip_val": clip}
        config = {**entry.record.config, "trainer": trainer}
        facts = {"config": config, "overrides": {"trainer.gradient_clip_val": str(clip)}}
        entries.append(Entry(entry.folder, entry.record.model_copy(update=facts)))
    died = run("c", failed=("failed", "it broke"), name="c")  # of which nobody knows
    entries.append(Entry(died.folder, died.record.model_copy(update={"config": None})))
    table = runs_table(repeats_together(entries))
    assert titles(table)[:2] == ["run", "trainer.gradient_clip_val"]
    assert [row[1].text for row in table.rows] == ["1.0", "", ""]
    assert "gradient_clip_val" not in table.above[0]
    said = {"one that knows nothing": terminal(table), "the others, in one row": terminal(runs_table([entries[:2]]))}
    assert_stored("report/tables: left open", said)
    assert [group.values for group in bar_groups(entries[:2])] == [(1.0,), (None,)]


def test_a_plan_that_is_unknown_has_its_reason_below_the_table():
    entries = [run("a", FAST, name="a"), run("b", FAST, name="b"), run("c", FAST, name="c")]
    reason = "values of fake tensors are unknown"
    plans = [PlannedMemory(unknown=reason), PlannedMemory(unknown=reason), None]
    groups = []
    for entry, plan in zip(entries, plans, strict=True):
        groups.append([replace(entry, record=entry.record.model_copy(update={"planned": plan}))])
    expected = f"planned memory unknown: a; b: {reason}"
    assert [line for line in runs_table(groups).below if "planned" in line] == [expected]
    chosen = columns_named(["name", "planned_peak_bytes"], [group[0] for group in groups])
    lines = [line for line in runs_table(groups, chosen).below if "planned" in line]
    assert lines == [expected, "planned memory unknown: c: not asked for (--check_memory=true)"]
    # Nobody asked for a plan: nothing is missing.
    assert not any("planned" in line for line in [*runs_table(groups[2:]).above, *runs_table(groups[2:]).below])
