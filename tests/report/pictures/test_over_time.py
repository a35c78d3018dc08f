"""The picture of a memory timeline, as what it draws."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from xml.etree import ElementTree

import pytest
from made_timeline import made_timeline
from matplotlib.colors import to_hex
from raised import refusal
from stored_texts import assert_stored

from lm_profiler.record.entry import Entry
from lm_profiler.record.memory_timeline import CAUSE_TITLES
from lm_profiler.report.pictures.drawing import CAUSE_COLOURS
from lm_profiler.report.pictures.over_time import memory_timelines, overlap, titled_timelines
from lm_profiler.report.pictures.plots import save_figure
from lm_profiler.usage_error import UsageError


def test_a_memory_timeline_is_drawn() -> None:
    """Its peak of 700 bytes is the fifth moment, in backward; the largest allocation there has 300 bytes."""
    figure = memory_timelines(titled_timelines([made_timeline()]))
    curves, table = figure.axes
    tops = {}
    for area in curves.collections:
        colour = to_hex(area.get_facecolor()[0]).upper()
        tops[colour] = area.get_paths()[0].get_extents().y1
    assert tops[CAUSE_COLOURS["activations"]] == 700 / 1024  # on top of the gradients
    assert curves.get_ylim()[1] > 700 / 1024
    assert [text.get_text() for text in curves.texts] == ["forward", "backward", "peak 0.68 KiB"]
    (peak_mark,) = [line for line in curves.lines if line.get_marker() == "v"]
    assert peak_mark.get_xdata()[0] == 4
    assert peak_mark.get_ydata()[0] == 700 / 1024
    titles_and_cells = [text.get_text() for text in table.texts]
    assert titles_and_cells[4:] == ["300 B", "activations", "3 × 25, float32", "mm, head, model.py:7"]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["parameters", "gradients", "activations"]


def test_two_timelines_share_a_scale() -> None:
    half = made_timeline(source="measured", start=[50, *[0] * (len(CAUSE_TITLES) - 1)])
    figure = memory_timelines(titled_timelines([made_timeline(), half], "logs/a"))
    left, right = figure.axes[:2]
    assert left.get_ylim() == right.get_ylim()
    for axes in (left, right):
        assert axes.get_title(loc="left").startswith("logs/a:")


def test_one_to_four_timelines_are_drawn() -> None:
    with pytest.raises(UsageError, match="given none"):
        memory_timelines({})
    with pytest.raises(UsageError, match="given 5; name fewer"):
        memory_timelines({str(number): made_timeline() for number in range(5)})


def group_of(folder: Path, hosts: int = 1) -> Any:
    record = SimpleNamespace(ranks=SimpleNamespace(host_count=hosts))
    return SimpleNamespace(entries=[cast(Entry, SimpleNamespace(folder=folder, record=record))], full_label="naive")


def write_trace(folder: Path, rank: int, begin_us: float) -> None:
    events = [
        ("ProfilerStep#1", "user_annotation", 0, 1000, 1),
        ("phase: backward", "user_annotation", 100, 900, 1),
        ("aten::mm", "cpu_op", 100, 500, 1),
        ("gloo:all_reduce", "user_annotation", 400, 600, 2),
    ]
    (folder / "trace").mkdir(exist_ok=True)
    rows = [
        {"ph": "X", "name": name, "cat": kind, "ts": begin_us + start, "dur": end - start, "pid": 1, "tid": thread}
        for name, kind, start, end, thread in events
    ]
    with gzip.open(folder / "trace" / f"rank{rank}.pt.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": rows}, file)


def lanes_ms(folder: Path, hosts: int = 1) -> list[list[tuple[float, float]]]:
    """Begin and end of the bars in each lane of the picture."""
    [axes] = overlap([group_of(folder, hosts)]).axes
    lanes = []
    for lane in axes.collections:
        boxes = [path.get_extents() for path in lane.get_paths()]
        lanes.append([(round(box.x0, 6), round(box.x1, 6)) for box in boxes])
    return lanes


def test_each_rank_has_its_bars(tmp_path: Path) -> None:
    """A product, an all-reduce, and the part of it that is not hidden; rank 1 is 0.3 ms later."""
    write_trace(tmp_path, rank=0, begin_us=5000)
    write_trace(tmp_path, rank=1, begin_us=5300)
    of_rank_0 = [[(0.1, 0.501)], [(0.4, 0.6)], [(0.5, 0.6)]]
    of_rank_1 = [[(0.4, 0.801)], [(0.7, 0.9)], [(0.8, 0.9)]]
    assert lanes_ms(tmp_path) == of_rank_0 + of_rank_1
    assert lanes_ms(tmp_path, hosts=2) == of_rank_0 + of_rank_0  # their clocks have nothing in common


def test_runs_without_traces_are_refused(tmp_path: Path) -> None:
    message = refusal(UsageError, lambda: overlap([group_of(tmp_path / "none")]))
    assert_stored("report/notes: overlap", {"no traces": message})


def test_any_name_can_be_drawn(tmp_path: Path) -> None:
    write_trace(tmp_path, rank=0, begin_us=5000)
    write_trace(tmp_path, rank=1, begin_us=5300)
    group = group_of(tmp_path)
    group.full_label = name = "</text><script>$x^{_$ & \\frac"
    save_figure(lambda: overlap([group]), tmp_path / "a.svg")
    drawn = ElementTree.parse(tmp_path / "a.svg")  # it is XML still
    assert name in "".join(element.text or "" for element in drawn.iter())
