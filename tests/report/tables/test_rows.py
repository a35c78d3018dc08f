"""Tables of runs made by hand: what is in columns, what is printed once, what repeats and groups share."""

from stored_texts import assert_stored
from tabled import made_run_of

from lm_profiler.record.entry import Entry
from lm_profiler.report.pictures.groups import bar_groups
from lm_profiler.report.tables.formats import terminal
from lm_profiler.report.tables.layouts import pivot
from lm_profiler.report.tables.rows import runs_table
from lm_profiler.report.tables.run_groups import group_by_facts, repeats_together
from lm_profiler.report.tables.table_columns import column

FAST, SLOW = [(0.010, 0.020)] * 6, [(0.020, 0.050)] * 6


def test_facts_that_differ_are_columns():
    entries = [made_run_of("a", FAST, name="a"), made_run_of("b", SLOW, name="b", size="xl", batch_size=8)]
    died = made_run_of("b", failed=("failed", "it broke"), name="b", size="xl", precision="bf16-mixed")
    unknown = [
        Entry(entry.folder, entry.record.model_copy(update={"model": None, "config": None})) for entry in (died,) * 2
    ]
    by = [column("size")]
    unlike = [made_run_of("a", FAST, precision="32-true"), made_run_of("b", SLOW, precision="bf16-mixed")]
    tables = {
        "two runs": runs_table(repeats_together(entries)),
        "a reason names its run": runs_table(repeats_together([made_run_of("a", FAST, name="a"), died])),
        "what most rows do not know": runs_table(repeats_together([made_run_of("a", FAST, name="a"), *unknown])),
        "unlike runs share a row": runs_table(list(group_by_facts(unlike, by).values()), by=by),
    }
    assert_stored("report/rows", {case: terminal(table) for case, table in tables.items()})


def test_a_cell_of_a_pivot_has_a_reason_or_its_number_of_runs():
    entries = [
        made_run_of("a", FAST),
        made_run_of("b", SLOW, precision="bf16-mixed"),
        made_run_of("c", failed=("oom", "no memory left"), size="xl"),
        made_run_of("d", failed=("refused", "too large"), size="2.7B", precision="bf16-mixed"),
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
    entries = [made_run_of("a", FAST), made_run_of("b", SLOW)]
    entries += [made_run_of(status, failed=(status, "no memory left")) for status in ("oom", "refused")]
    [[_, cell]] = pivot(entries, [column("size")], [column("device")], column("step_s")).rows
    assert "n=2" in cell.text
    assert "1 OOM" in cell.text


def test_an_option_that_one_run_leaves_open_is_not_in_all_rows():
    entries = []
    for name, clip in (("a", 1.0), ("b", None)):
        entry = made_run_of(name, FAST, name=name)
        trainer = {**entry.record.config["trainer"], "gradient_clip_val": clip}
        config = {**entry.record.config, "trainer": trainer}
        facts = {"config": config, "overrides": {"trainer.gradient_clip_val": str(clip)}}
        entries.append(Entry(entry.folder, entry.record.model_copy(update=facts)))
    died = made_run_of("c", failed=("failed", "it broke"), name="c")  # of which nobody knows
    entries.append(Entry(died.folder, died.record.model_copy(update={"config": None})))
    table = runs_table(repeats_together(entries))
    assert [heading.title for heading in table.headings][:2] == ["run", "trainer.gradient_clip_val"]
    assert [row[1].text for row in table.rows] == ["1.0", "", ""]
    assert "gradient_clip_val" not in table.above[0]
    texts = {"one that knows nothing": terminal(table), "the others, in one row": terminal(runs_table([entries[:2]]))}
    assert_stored("report/tables: left open", texts)
    assert [group.values for group in bar_groups(entries[:2])] == [(1.0,), (None,)]
