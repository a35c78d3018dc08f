"""What the Run view shows of runs made by hand: forward 3 ms, backward 5 ms, other 2 ms (see made_runs.py)."""

from pathlib import Path
from typing import Any

import pytest
from made_runs import made_entry
from shown import bars_of, block_titled, blocks_of_kind, blocks_of_view, table_rows, text_of

from lm_profiler.record.entry import Entry
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.run_record import OddStep, OtherByOwner, OwnedTime
from lm_profiler.report.pictures.drawing import PART_COLOURS


def series_by_clock(blocks: list[Any]) -> dict[str, dict[str, Any]]:
    """The series of the charts of step times by name, for each clock."""
    return {clock: {series["name"]: series for series in chart["data"]} for clock, chart in charts_of(blocks).items()}


def charts_of(blocks: list[Any]) -> dict[str, Any]:
    """The chart of the steps on each clock."""
    [choice] = blocks_of_kind([block_titled(blocks, "Time of each step")], "choice")
    return {choice["title"]: choice["blocks"][0] for choice in choice["choices"]}


def test_verdict_picture_and_table_come_first(tmp_path: Path) -> None:
    blocks = blocks_of_view("run", made_entry(tmp_path / "run"))
    assert [block["kind"] for block in blocks] == ["card"] * 3 + ["fold"] * (len(blocks) - 3)
    head, steps, phases, *_ = blocks
    assert head["words"] == ["ok", "steady"]
    assert "bound by compute" in text_of([head])
    assert "Next: " in text_of([head])
    assert steps["title"] == "Time of each step"
    titles, *rows = table_rows(phases)
    share = {row[0]: row[titles.index("share")] for row in rows}
    assert (share["forward"], share["backward"], share["other"]) == ("30.0%", "50.0%", "20.0%")
    assert blocks_of_kind(blocks, "command")[0]["text"] == "python -m lm_profiler fit --config a.yaml"


def test_steps_are_bars_of_their_phases(tmp_path: Path) -> None:
    """25 steps with 5 ms of backward, half of it on the host; but for the first, they take 10 ms."""
    series = series_by_clock(blocks_of_view("run", made_entry(tmp_path / "run")))
    assert list(series) == ["Device clock", "Host clock"]
    device, host = series["Device clock"], series["Host clock"]
    assert list(device) == [part for part in PARTS if part in ("forward", "backward", "other")]
    assert device["backward"]["x"] == list(range(1, 26))
    assert device["backward"]["y"] == [5.0] * 25
    assert host["backward"]["y"] == [2.5] * 25
    assert device["backward"]["marker"]["color"] == PART_COLOURS["backward"]
    steps_ms = [sum(parts_ms) for parts_ms in zip(*(bars["y"] for bars in device.values()), strict=True)]
    assert steps_ms[1:] == pytest.approx([10.0] * 24, rel=0.01)


def test_the_warmup_is_shaded_and_its_slow_step_cut_off(tmp_path: Path) -> None:
    """Five steps of warm-up, of which the first takes a second: whole, it would leave nothing of the others' 10 ms."""
    layout = charts_of(blocks_of_view("run", made_entry(tmp_path / "run")))["Device clock"]["layout"]
    [shade] = layout["shapes"]
    assert (shade["x0"], shade["x1"]) == (0.5, 5.5)
    assert "1,008.0 ms" in layout["annotations"][0]["text"]
    assert layout["yaxis"]["range"] == pytest.approx([0, 1.2 * 10.03])


def test_odd_steps_are_marked_with_their_cause(tmp_path: Path) -> None:
    odd = {"ratio": 1.9, "part": "forward", "excess_s": 9e-3}
    with_cause = OddStep(step=15, step_s=10.03e-3, cause="page faults", cause_s=8e-3, rank=1, **odd)
    without_cause = OddStep(step=9, step_s=10e-3, beside="9.0 ms more asleep", rank=0, **odd)
    not_in_the_file = OddStep(step=99, step_s=1.0, **odd)
    odd_steps = [with_cause, without_cause, not_in_the_file]
    entry = made_entry(tmp_path / "odd", odd_steps=odd_steps, rank_step_s=[1.0, 1.0])
    series = series_by_clock(blocks_of_view("run", entry))
    device, host = series["Device clock"]["odd"], series["Host clock"]["odd"]
    assert device["x"] == [15, 9]
    assert device["y"][0] == pytest.approx(10.0, rel=0.01)
    assert host["y"][0] == pytest.approx(5.0, rel=0.01)
    text_of_15, text_of_9 = device["text"]
    assert all(words in text_of_15 for words in ("step 15", "rank 1", "page faults"))
    assert "rank 0" in text_of_9


def test_other_is_shown_by_its_owner(tmp_path: Path) -> None:
    actions = [
        OwnedTime(owner="LearningRateMonitor", action="hook", seconds=4e-3, calls=1.0, in_steps=3),
        OwnedTime(owner="<b>Mine</b>", action="hook", seconds=2e-3, calls=1.0, in_steps=3),
    ]
    entry = made_entry(tmp_path / "run", other_by_owner=OtherByOwner(steps=3, seconds=6e-3, actions=actions))
    rows = bars_of(block_titled(blocks_of_view("run", entry), "Which code uses the time"))
    assert list(rows) == ["LearningRateMonitor.hook", "<b>Mine</b>.hook"]
    assert [row["cells"] for row in rows.values()] == [["4.000", "1", "3 of 3"], ["2.000", "1", "3 of 3"]]
    assert [row["pieces"][0]["width"] for row in rows.values()] == [1.0, 0.5]


def test_a_run_that_died_shows_what_it_has(tmp_path: Path) -> None:
    blocks = blocks_of_view("run", made_entry(tmp_path / "died", status="oom"))
    [error] = [block["text"] for block in blocks_of_kind(blocks, "line") if block.get("look") == "error"]
    assert error == "oom in setup: OutOfMemoryError: no memory left"
    assert blocks_of_kind(blocks, "chart") == []
    assert "Time by phase" not in [block["title"] for block in blocks]


def test_damaged_steps_hide_no_other_part(tmp_path: Path) -> None:
    entry = made_entry(tmp_path / "a", started="yesterday")
    (entry.folder / "steps.csv").write_text("no steps")
    blocks = blocks_of_view("run", entry)
    assert "a/steps.csv" in text_of([block_titled(blocks, "Time of each step")])
    assert table_rows(block_titled(blocks, "Time by phase"))
    assert "Started yesterday" in text_of(blocks)
    assert "no results" in text_of(blocks_of_view("run", Entry(Path("a"), None)))
