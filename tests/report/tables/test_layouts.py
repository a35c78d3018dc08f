"""The layouts of published reports, letter by letter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from stored_texts import assert_stored
from tabled import run

from lm_profiler.analysis.steps.summaries import judged_after_warmups
from lm_profiler.record.entry import Entry
from lm_profiler.record.run_record import MemoryFacts, MemoryLevels, MemoryReading
from lm_profiler.record.sweep_files import Cell
from lm_profiler.report.tables.formats import markdown, terminal
from lm_profiler.report.tables.layouts import blocks, devices, laid_out, modes, warmups, wide
from lm_profiler.report.tables.rows import raw_runs_table
from lm_profiler.report.tables.run_groups import repeats_together

# mean 2 and 4, sample standard deviation sqrt(2) times the half distance of the pair
STEPS = [(0.1, 0.3), (0.3, 0.5)]


def test_the_layouts_are_as_stored():
    two = [run("a", STEPS), run("b", failed=("oom", "no memory left"), size="xl")]
    unlike = [run("a", STEPS), run("b", STEPS, precision="bf16-mixed", num_layers=3)]
    warmed = run("a", STEPS, warmup=[(9.0, 9.0), (0.5, 0.7)])
    cpu, h100 = ("cpu", "EPYC"), ("cuda", "H100")
    across = [
        run("a", [(0.2507, 0.7151)] * 3, device=cpu),
        run("b", [(0.0242, 0.0562)] * 3, device=h100),
        run("c", failed=("oom", "no memory left"), size="medium", device=h100),
    ]
    said = {
        "blocks: each step, then the summary": terminal(blocks(two)),
        "blocks in Markdown: fenced, and the summary is a table": markdown(blocks([run("a", STEPS)])),
        "blocks of equal sizes say what tells them apart": terminal(blocks(unlike)),
        "blocks after other warm-ups: what was left out under a banner each": terminal(
            blocks(judged_after_warmups([warmed], [0, 1], 3)[0])
        ),
        "devices across, and sizes down": markdown(devices(across)),
        "a row for each pass and warm-up": markdown(
            warmups(judged_after_warmups([run("a", STEPS, warmup=[(0.5, 0.5)])], [0, 1], None)[0])
        ),
    }
    assert_stored("report/layouts", said)


def test_wide_has_a_row_for_each_warm_up_and_a_column_for_what_tells_rows_apart():
    none = run("a", [(9.0, 9.0), *STEPS, *STEPS])
    some = run("b", [*STEPS, *STEPS], warmup=[(9.0, 9.0)], size="medium")
    found = wide(judged_after_warmups([none, some], [0, 1], 4)[0]).records()
    facts = [(row["model"], row["warmup_steps"], row["benchmark_steps"]) for row in found]
    assert facts == [("small", 0, 4), ("small", 1, 4), ("medium", 0, 4), ("medium", 1, 4)]
    assert [row["fwd avg (sec)"] for row in found] == pytest.approx([(9 + 0.5) / 4, 0.2, (9 + 0.5) / 4, 0.2])
    # Wide has a column for all that tells its rows apart.
    both, full = of_mode("b", 2.0, 3.0, optimizer="none"), of_mode("c", 4.0, 6.0, attention="math")
    table = wide([both, full])
    facts = [(row["optimizer"], row["attention"]) for row in table.records()]
    assert facts == [("none", "sdpa"), ("adamw", "math")]
    assert [of.figures for of in table.headings if of.name in ("optimizer", "attention")] == [False, False]
    cells = [Cell(id=f"r{repeat}", overrides={}, repeat=repeat, arguments=["fit"]) for repeat in range(2)]
    rows = wide([replace(run(cell.id, STEPS), cell=cell) for cell in cells]).records()
    assert [row["repeat"] for row in rows] == [0, 1]
    # Two devices of a type go by their names.
    entries = [run("a", STEPS, device=("cuda", "H100")), run("b", STEPS, device=("cuda", "A100"))]
    titles = [heading.title for heading in devices(entries).headings][-4:]
    assert titles == ["A100 forward", "A100 forward+backward", "H100 forward", "H100 forward+backward"]


def test_the_forward_pass_alone_stands_beside_training_and_is_not_mixed_with_it():
    trained, alone = run("a", STEPS), run("b", [(0.05, 0.0)] * 2)
    alone = Entry(alone.folder, alone.record.model_copy(update={"verb": "validate"}))
    [row] = devices([trained, alone]).rows
    assert [cell.text for cell in row[-2:]] == ["50.0ms", "600.0ms"]
    found = wide([trained, alone]).records()
    passes = ("fwd avg (sec)", "back avg (sec)", "fwd & back avg (sec)", "fwd & back std (sec)")
    assert [(row["verb"], *(row[of] for of in passes)) for row in found] == [
        ("fit", *map(pytest.approx, (0.2, 0.4, 0.6, 0.08**0.5))),
        ("validate", pytest.approx(0.05), None, None, None),
    ]


def test_wide():
    entries = [run("a", STEPS), run("b", failed=("oom", "no memory left"), size="xl", compile=True)]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in markdown(wide(entries)).splitlines()[:4]]
    titles = ["device", "batch_size", "compile", "model", "context_length", "dtype"]
    passes = [f"{part} {what} (sec)" for part in ("fwd", "back", "fwd & back") for what in ("avg", "std")]
    assert lines[0] == [*titles, *passes, "status"]
    assert [cell[-1] for cell in lines[1]] == [*"-:--:-", *"::::::", "-"]  # figures stand to the right
    figures = ["0.2", "0.141421", "0.4", "0.141421", "0.6", "0.282843"]
    assert lines[2] == ["cuda", "4", "False", "small", "512", "float32", *figures, "ok"]
    assert lines[3] == ["cuda", "4", "True", "xl", "512", "float32", *[""] * 6, "OOM"]


@pytest.mark.parametrize(
    "precision, shown", [("bf16-true", "bfloat16"), ("16-true", "float16"), ("bf16-mixed", "bf16-mixed")]
)
def test_wide_names_the_dtype_and_says_where_it_is_mixed(precision: str, shown: str):
    assert wide([run("a", STEPS, precision=precision)]).records()[0]["dtype"] == shown


def attention_alone() -> Entry:
    held = MemoryLevels(start=2**20, forward=5 * 2**20, backward=3 * 2**20, source="allocator")
    entry = run("a", STEPS)
    config = {"model": {"d_model": 64, "attention": "math"}, "data": {"batch_size": 8, "context_length": 256}}
    memory = MemoryFacts(measured=MemoryReading(), parts={}, held=held)
    return Entry(entry.folder, entry.record.model_copy(update={"config": config, "memory": memory}))


def test_wide_of_attention_alone_has_its_width_and_what_it_holds():
    [row] = wide([attention_alone()]).records()
    assert list(row) == [
        *("device", "batch_size", "compile", "model", "d_model", "context_length", "dtype"),
        *("fwd avg (sec)", "fwd std (sec)", "back avg (sec)", "back std (sec)"),
        *("fwd & back avg (sec)", "fwd & back std (sec)"),
        *("model mem", "model+fwd mem", "model+fwd+back mem", "fwd mem", "back mem", "status"),
    ]
    assert (row["model"], row["d_model"]) == ("math", 64)
    memory = ("model mem", "model+fwd mem", "model+fwd+back mem", "fwd mem", "back mem")
    assert [row[name] / 2**20 for name in memory] == [1, 5, 3, 4, -2]


def of_mode(folder: str, forward_s: float, backward_s: float, verb: str = "fit", **options):
    entry = run(folder, [(forward_s - 0.1, backward_s - 0.1), (forward_s + 0.1, backward_s + 0.1)], **options)
    config = {**entry.record.config, "model": {"init_args": {**entry.record.config["model"]["init_args"]}}}
    config["model"]["init_args"]["optimizer"] = options.get("optimizer", "adamw")
    return replace(entry, record=entry.record.model_copy(update={"verb": verb, "config": config}))


def test_each_mode_is_timed_by_the_runs_that_do_no_more_and_else_by_a_part_of_a_longer_step():
    alone = of_mode("a", 1.0, 0.1, verb="validate")
    both, full = of_mode("b", 2.0, 3.0, optimizer="none"), of_mode("c", 4.0, 6.0)
    keys = ("forward_s", "forward_backward_s", "step_s")

    def means(*entries):
        return [[row[key] for key in keys] for row in modes(entries).records()]

    assert means(full, both, alone) == [pytest.approx([1.0, 5.0, 10.0])]
    assert means(full, both) == [pytest.approx([2.0, 5.0, 10.0])]
    assert means(full) == [pytest.approx([4.0, 10.0, 10.0])]
    assert means(both) == [[pytest.approx(2.0), pytest.approx(5.0), None]]
    text = modes([full, both, alone]).rows[0]
    assert [cell.text for cell in text[-3:]] == ["1,000.00 ± 141.42", "5,000.00 ± 282.84", "10,000.00 ± 282.84"]
    # The mean of a run without an optimizer and of one with it is the time of neither.

    def times(*entries):
        [row] = devices(entries).rows
        return [cell.value for cell in row[-2:]]

    assert times(full, both, alone) == pytest.approx([1.0, 5.0])
    assert times(full, both) == pytest.approx([2.0, 5.0])
    assert times(full) == pytest.approx([4.0, 10.0])


@pytest.mark.parametrize("layout, column", [(modes, "forward_s"), (devices, "CUDA forward"), (blocks, "Forward (s)")])
def test_programs_get_the_standard_deviation_that_people_are_shown(layout, column: str):
    [row] = layout([run("a", STEPS)]).records()
    assert (row[column], row[f"{column}_std"]) == (pytest.approx(0.2), pytest.approx(0.02**0.5))


def test_a_layout_shows_the_smallest_size_first_and_cells_as_their_sweep_names_them():
    entries = [run(size, STEPS, size=size) for size in ("2.7B", "large", "medium", "xl")]
    for layout in ("wide", "blocks", "warmups"):
        table = laid_out(entries, layout)
        shown = list(dict.fromkeys(row[0].text.split(",")[0] for row in table.rows))
        if layout == "wide":
            shown = [row["model"] for row in table.records()]
        assert shown == ["medium", "large", "xl", "2.7B"]
    cells = [replace(entry, sweep=Path("sweep")) for entry in entries]
    assert [row["model"] for row in laid_out(cells, "wide").records()] == ["2.7B", "large", "medium", "xl"]


@pytest.mark.parametrize("status, word", [("oom", "OOM"), ("refused", "OOM (planned)")])
def test_a_mode_that_did_not_fit_says_so_in_its_cell_and_sizes_are_rows(status: str, word: str):
    died = run("d", failed=(status, "no memory left"), size="xl")
    table = modes([of_mode("a", 1.0, 0.1, verb="validate", size="xl"), died, of_mode("b", 1.0, 1.0)])
    assert [[cell.text for cell in row][-1] for row in table.rows] == ["2,000.00 ± 282.84", word]
    assert table.rows[1][-3].value == pytest.approx(1.0)


@pytest.mark.parametrize("layout", [blocks, wide, devices, modes])
def test_a_run_of_which_nothing_is_known_is_shown(layout):
    entry = run("a", failed=("failed", "it broke"))
    record = entry.record.model_copy(update={"config": None, "model": None, "environment": None})
    assert len(layout([Entry(entry.folder, record)]).rows) == 1


RNG = np.random.default_rng(0)
WARMUP_S = [(3.0, 1.0), (0.5, 0.6)]
MEASURED_S = [tuple(pair) for pair in RNG.uniform(0.1, 0.2, size=(10, 2))]
FORWARD, BACKWARD = np.array([*WARMUP_S, *MEASURED_S]).T


@pytest.mark.parametrize("setting", [0, 1, 2, 5])
def test_each_setting_leaves_out_that_many_recorded_steps(setting: int):
    cuts, problems = judged_after_warmups([run("a", MEASURED_S, WARMUP_S)], [0, 1, 2, 5], None)
    assert problems == []
    [row] = [row for row in raw_runs_table(repeats_together(cuts)).records() if row["warmup_steps"] == setting]
    assert row["steps_measure"] == 12 - setting
    seconds = {
        "forward": FORWARD,
        "backward": BACKWARD,
        "forward_backward": FORWARD + BACKWARD,
        "step": FORWARD + BACKWARD,
    }
    for part, of in seconds.items():
        kept = of[setting:]
        assert row[f"{part}_s"] == pytest.approx(kept.mean())
        assert row[f"{part}_std_s"] == pytest.approx(kept.std(ddof=1))
        assert row[f"{part}_cv"] == pytest.approx(kept.std(ddof=1) / kept.mean())
        assert row[f"{part}_median_s"] == pytest.approx(np.median(kept))


def test_settings_of_a_pass_stand_one_below_the_other():
    table = warmups(judged_after_warmups([run("a", MEASURED_S, WARMUP_S)], [0, 2], None)[0])
    assert [(row["forward_only"], row["warmup_steps"]) for row in table.records()] == [
        *((True, 0), (True, 2), (False, 0), (False, 2))
    ]
    assert [row["avg"] for row in table.records()][2:] == pytest.approx(
        [(FORWARD + BACKWARD).mean(), (FORWARD + BACKWARD)[2:].mean()]
    )
