"""Lanes of made-up traces of two ranks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from xml.etree import ElementTree

import pytest
from raised import refusal
from stored_texts import assert_stored

from lm_profiler.record.entry import Entry
from lm_profiler.report.pictures.over_time import overlap
from lm_profiler.report.pictures.plots import save_figure
from lm_profiler.usage_error import UsageError


def group_of(folder: Path, hosts: int = 1) -> Any:
    record = SimpleNamespace(ranks=SimpleNamespace(host_count=hosts))
    return SimpleNamespace(entries=[cast(Entry, SimpleNamespace(folder=folder, record=record))], full_label="naive")


def write(folder: Path, rank: int, begin_us: float) -> None:
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


def lanes(folder: Path, hosts: int = 1) -> list[list[tuple[float, float]]]:
    [axes] = overlap([group_of(folder, hosts)]).axes
    spans = [[path.get_extents() for path in lane.get_paths()] for lane in axes.collections]
    return [[(round(box.x0, 6), round(box.x1, 6)) for box in lane] for lane in spans]


def test_each_rank_has_what_computes_all_that_communicates_and_what_is_exposed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write(tmp_path, 0, 5000)
    write(tmp_path, 1, 5300)
    first = [[(0.1, 0.501)], [(0.4, 0.6)], [(0.5, 0.6)]]
    assert lanes(tmp_path) == [*first, [(0.4, 0.801)], [(0.7, 0.9)], [(0.8, 0.9)]]
    assert lanes(tmp_path, hosts=2) == first * 2  # their clocks have nothing in common


def test_any_name_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write(tmp_path, 0, 5000)
    group = group_of(tmp_path)
    group.full_label = name = "</text><script>$x^{_$ & \\frac"
    save_figure(lambda: overlap([group]), tmp_path / "a.svg")
    drawn = ElementTree.parse(tmp_path / "a.svg")  # it is XML still
    assert name in "".join(element.text or "" for element in drawn.iter())


def test_runs_without_traces_are_refused(tmp_path: Path) -> None:
    told = refusal(UsageError, lambda: overlap([group_of(tmp_path)]))
    assert_stored("report/notes: overlap", {"no traces": told})
