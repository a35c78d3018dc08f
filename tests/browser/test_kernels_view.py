"""The Kernels view shows the figures of the tables beside the run's traces."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect
from tab import MARKUP, OpenTab, Tab

RUN = "demo/version_0"
TABLE = "trace/rank0.kernels.json"


@pytest.fixture
def table(logdir: Path) -> dict[str, Any]:
    return json.loads((logdir / RUN / TABLE).read_text())


@pytest.fixture
def kernels(open_tab: OpenTab) -> Callable[..., Tab]:
    """Opens the view of a run in the tab."""

    def open_(run: str = RUN) -> Tab:
        tab = open_tab()
        tab.open_run(run, "Kernels")
        return tab

    return open_


def milliseconds(table: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Of one step, by kind and phase; ``no operator`` is what no operator covers."""
    found: dict[str, dict[str, float]] = {}
    for phase, of_phase in table["phases"].items():
        seconds = {kind: of_kind["total_s"] for kind, of_kind in of_phase["kinds"].items()}
        for kind, total_s in (seconds | {"no operator": of_phase["idle_s"]}).items():
            found.setdefault(kind, {})[phase] = total_s * 1e3 / table["steps"]
    for by_phase in found.values():
        by_phase["step"] = sum(by_phase.values())
    return found


@pytest.mark.parametrize("open_either, theme", [("tab", "light"), ("page", "dark")], indirect=["open_either"])
def test_bars_and_figures_say_where_the_time_went_by_phase_and_kind(
    open_either: OpenTab, table: dict[str, Any], theme: str, screenshot: Any
) -> None:
    tab = open_either(theme)
    tab.open_run(RUN, "Kernels")
    card = tab.card("Time by phase and kind")
    exact = milliseconds(table)
    bars = tab.chart(card)["data"]
    assert bars.keys() == {kind for kind, by_phase in exact.items() if by_phase["step"]}
    for kind, drawn in bars.items():
        assert drawn["y"] == [*table["phases"], "step"]
        assert drawn["x"] == pytest.approx([exact[kind].get(phase, 0.0) for phase in drawn["y"]], rel=1e-5)
    header, *rows = tab.table(card)
    assert header[0] == "ms a step"
    for phase, *cells in rows:
        for kind, cell in zip(header[1:-1], cells, strict=False):
            assert float(cell or 0) == pytest.approx(exact[kind].get(phase, 0.0), abs=6e-4)
    screenshot(tab, f"kernels-{theme}")


def test_shares_are_of_each_phase(kernels: Callable[..., Tab], table: dict[str, Any]) -> None:
    tab = kernels()
    card = tab.card("Time by phase and kind")
    card.get_by_role("button", name="share of the phase").click()
    header, *rows = tab.table(card)
    forward = dict(zip(header, next(row for row in rows if row[0] == "forward"), strict=True))
    found = table["phases"]["forward"]
    share = found["kinds"]["matmul"]["total_s"] / (found["busy_s"] + found["idle_s"])
    assert float(forward["matmul"]) == pytest.approx(100 * share, abs=0.06)
    assert forward["all"] == "100.0"


def test_the_largest_are_listed_sorted_and_filtered(kernels: Callable[..., Tab], table: dict[str, Any]) -> None:
    tab = kernels()
    card = tab.card("Largest operators")
    header, *rows = tab.table(card)
    assert len(rows) == min(100, len(table["rows"]))
    largest = dict(zip(header, rows[0], strict=True))
    first = table["rows"][0]
    assert (largest["phase"], largest["kind"], largest["operator"]) == (first["phase"], first["kind"], first["name"])
    assert float(largest["ms a step"].replace(",", "")) == pytest.approx(
        first["total_s"] * 1e3 / table["steps"], abs=6e-4
    )
    assert float(largest["of the step"].rstrip("%")) == pytest.approx(
        100 * first["total_s"] / table["window_s"], abs=0.06
    )
    assert float(largest["calls a step"]) == first["count"] / table["steps"]

    card.get_by_role("button", name="calls a step").click()
    counts = [float(row[header.index("calls a step")].replace(",", "")) for row in tab.table(card)[1:]]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == max(row["count"] for row in table["rows"]) / table["steps"]

    card.get_by_label("Phase").select_option("forward")
    card.get_by_label("Kind").select_option("matmul")
    card.get_by_label("Filter").fill("MODEL.head")
    [only] = tab.table(card)[1:]
    assert only[:3] == ["forward", "matmul", "aten::mm"]
    assert only[header.index("module")] == "model.head"


def test_the_answers_name_the_largest_operator_of_each_pass(kernels: Callable[..., Tab], table: dict[str, Any]) -> None:
    tab = kernels()
    answers = dict(tab.table(tab.card("the answers"))[1:])
    for phase in ("forward", "backward"):
        sums: dict[str, float] = {}
        for row in table["rows"]:
            if row["phase"] == phase:
                sums[row["name"]] = sums.get(row["name"], 0.0) + row["total_s"]
        name = max(sums, key=lambda name: sums[name])
        assert f"{name}: {sums[name] * 1e3 / table['steps']:.3f} ms" in answers[f"largest in {phase}"]


def test_a_rank_is_chosen_and_a_damaged_table_does_not_hide_the_others(
    open_either: OpenTab, logdir: Path, table: dict[str, Any]
) -> None:
    folder = logdir / RUN / "trace"
    twice = {**table, "steps": table["steps"] * 2, "rows": [{**table["rows"][0], "name": MARKUP, "module": MARKUP}]}
    try:
        (folder / "rank1.kernels.json").write_text(json.dumps(twice))
        (folder / "rank2.kernels.json").write_text("{")
        tab = open_either()
        tab.open_run(RUN, "Kernels")
        chooser = tab.inside.get_by_label("Rank")
        chooser.select_option(label="rank 1")
        header, row = tab.table(tab.card("Largest operators"))
        assert (row[header.index("operator")], row[header.index("module")]) == (MARKUP, MARKUP)
        assert tab.inside.locator("img").count() == 0
        chooser.select_option(label="rank 2")
        expect(tab.inside.locator("main")).to_contain_text("rank2.kernels.json: not a table of kernels of version 1")
    finally:
        for rank in (1, 2):
            (folder / f"rank{rank}.kernels.json").unlink()


def test_without_a_table_it_says_why(kernels: Callable[..., Tab], logdir: Path) -> None:
    for name, left_out, why in (
        ("untraced", "trace", "No trace, so no kernels"),
        ("untabled", "*.kernels.json", "There is a trace but no table"),
    ):
        shutil.copytree(logdir / RUN, logdir / name, ignore=shutil.ignore_patterns(left_out))
        try:
            expect(kernels(name).inside.locator("section[data-view=Kernels]")).to_contain_text(why)
        finally:
            shutil.rmtree(logdir / name)


def test_kinds_and_phases_of_a_later_version_are_drawn(
    kernels: Callable[..., Tab], logdir: Path, table: dict[str, Any]
) -> None:
    folder = logdir / RUN / "trace"
    forward = table["phases"]["forward"]
    kinds = {("melted" if kind == "matmul" else kind): time for kind, time in forward["kinds"].items()}
    later = {**table, "phases": {**table["phases"], "forward": {**forward, "kinds": kinds}, "melting": forward}}
    try:
        (folder / "rank1.kernels.json").write_text(json.dumps(later))
        tab = kernels()
        tab.inside.get_by_label("Rank").select_option(label="rank 1")
        card = tab.card("Time by phase and kind")
        exact = milliseconds(later)
        bars = tab.chart(card)["data"]
        for kind in ("melted", "matmul"):
            assert bars[kind]["x"] == pytest.approx(
                [exact[kind].get(phase, 0.0) for phase in bars[kind]["y"]], rel=1e-5
            )
        assert "melting" in bars["matmul"]["y"]
    finally:
        (folder / "rank1.kernels.json").unlink()
