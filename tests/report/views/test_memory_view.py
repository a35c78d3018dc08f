"""The Memory view: a stack that reaches the peak, and what is alive there."""

from pathlib import Path
from typing import Any

import pytest
from made_runs import made_entry
from made_timeline import made_timeline
from shown import bars_of, block_titled, blocks_of_kind, blocks_of_view, series_of, table_rows, text_of

from lm_profiler.record.memory_timeline import write_timeline
from lm_profiler.record.run_record import MemoryCauses, MemoryFacts, MemoryReading
from lm_profiler.report.pictures.drawing import CAUSE_COLOURS


def memory_facts(**causes: int) -> MemoryFacts:
    none = dict.fromkeys(MemoryCauses.model_fields, 0)
    held = {"forward": MemoryCauses(**none | {"parameters": 100}), "backward": MemoryCauses(**none | causes)}
    return MemoryFacts(measured=MemoryReading(allocated_peak=2**31), parts={}, causes=held)


def with_timelines(folder: Path, *sources: str, **options: Any) -> list[Any]:
    entry = made_entry(folder / "run", **options)
    for source in sources:
        write_timeline(made_timeline(source=source), entry.folder)
    return blocks_of_view("memory", entry)


def test_the_stack_reaches_the_peak(tmp_path: Path) -> None:
    """Of 700 bytes."""
    card = block_titled(with_timelines(tmp_path, "planned"), "Bytes in use over one step")
    series = series_of(card)
    assert list(series) == ["parameters", "gradients", "activations"]
    for cause, area in series.items():
        assert area["fillcolor"] == CAUSE_COLOURS[cause]
    heights_kib = [sum(stack) for stack in zip(*(area["y"] for area in series.values()), strict=True)]
    assert max(heights_kib) == pytest.approx(700 / 1024, rel=1e-3)
    [chart] = blocks_of_kind([card], "chart")
    texts = [annotation["text"] for annotation in chart["layout"]["annotations"]]
    assert texts == ["forward", "backward", "<b>peak 0.68 KiB</b>"]
    assert chart["layout"]["yaxis"]["range"][1] > max(heights_kib)


def test_what_is_alive_at_the_peak_is_listed(tmp_path: Path) -> None:
    """The largest are 300 bytes of activations."""
    _, largest, *_ = table_rows(block_titled(with_timelines(tmp_path, "planned"), "Peak 0.68 KiB"))
    assert largest[:3] == ["300 B", "1", "activations"]


def test_plan_and_history_share_a_scale(tmp_path: Path) -> None:
    charts = blocks_of_kind(with_timelines(tmp_path, "planned", "measured"), "chart")
    assert len(charts) == 2
    assert charts[0]["layout"]["yaxis"]["range"] == charts[1]["layout"]["yaxis"]["range"]


def test_unknown_memory_has_a_reason(tmp_path: Path) -> None:
    assert "--check_memory=true" in text_of(with_timelines(tmp_path / "none"))


def test_causes_have_one_colour_in_all_pictures(tmp_path: Path) -> None:
    blocks = with_timelines(tmp_path, memory=memory_facts(parameters=100, gradients=100, activations_and_rest=200))
    card = block_titled(blocks, "Measured")
    assert "Most memory is held in backward: 400 B." in text_of([card])
    rows = bars_of(card)
    assert [(name, row["cells"]) for name, row in rows.items()] == [
        ("activations and rest", ["200 B", "50.0%"]),
        ("parameters", ["100 B", "25.0%"]),
        ("gradients", ["100 B", "25.0%"]),
    ]
    assert rows["parameters"]["pieces"][0]["colour"] == CAUSE_COLOURS["parameters"]
    assert sum(row["pieces"][0]["width"] for row in rows.values()) == pytest.approx(1.0)
