"""The picture of a waterfall: each bar begins where the one before it ends, in the colours of its phases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_runs import made_entry
from made_waterfall import STEP_MS, TERMS_MS, made_waterfall
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex

from lm_profiler.record.quantities import TERMS
from lm_profiler.report.pictures.drawing import PART_COLOURS
from lm_profiler.report.pictures.plots import draw, save_plot

SHARES = {"data": 0.1, "forward": 0.3, "backward": 0.6}


def entry(folder: Path, **options: Any) -> Any:
    return made_entry(folder, **{"waterfall": made_waterfall(), "shares": SHARES, **options})


def spans(axes: Axes) -> dict[str, list[tuple[float, float, str]]]:
    """By the label of its row, from where to where each bar reaches, and its colour."""
    names = [tick.get_text() for tick in axes.get_yticklabels()]
    found: dict[str, list[tuple[float, float, str]]] = {name: [] for name in names}
    for box in axes.patches:
        middle, (left, right) = box.get_y() + box.get_height() / 2, sorted((box.get_x(), box.get_x() + box.get_width()))
        found[names[round(middle)]].append((left, right, to_hex(box.get_facecolor()).upper()))
    return found


def test_bars_lead_from_nought_to_the_measured_step(tmp_path: Path) -> None:
    [axes] = draw("waterfall", [entry(tmp_path)]).axes
    found = spans(axes)
    taking = {name: ms for name, ms in TERMS_MS.items() if ms}
    assert [*found] == [*(TERMS[name][0] for name in taking), "measured step"]
    start = 0.0
    for name, ms in taking.items():
        bar = found[TERMS[name][0]]
        assert (bar[0][0], bar[-1][1]) == pytest.approx((start, start + ms))
        start += ms
    assert found["measured step"][-1][1] == pytest.approx(STEP_MS)
    [_, forward, backward] = (colour for *_, colour in found["measured step"])
    assert (forward, backward) == (PART_COLOURS["forward"], PART_COLOURS["backward"])


def test_each_bar_is_cut_into_its_phases(tmp_path: Path) -> None:
    [axes] = draw("waterfall", [entry(tmp_path)]).axes
    (left, middle, forward), (_, right, backward) = spans(axes)["slow matmuls"]
    assert (middle - left, right - middle) == pytest.approx((41.0 / 3, 41.0 * 2 / 3))
    assert (forward, backward) == (PART_COLOURS["forward"], PART_COLOURS["backward"])
    assert [colour for *_, colour in spans(axes)["input"]] == [PART_COLOURS["data"]]


def test_figures_stand_behind_the_bars_and_the_interval_at_the_end(tmp_path: Path) -> None:
    [axes] = draw("waterfall", [entry(tmp_path)]).axes
    said = [text.get_text() for text in axes.texts]
    assert said[:3] == ["62.1  (37%)", "+0.8", "+41.0  (24%)"]
    assert said[-1] == "168.3 ms"
    [interval] = axes.containers[-1].lines[2][0].get_segments()
    assert interval[:, 0] == pytest.approx([167.3, 170.3])


def test_a_negative_rest_leads_back(tmp_path: Path) -> None:
    fall = made_waterfall({"ideal": 8.0, "bandwidth": 4.0, "unexplained": -2.0}, 10.0)
    [axes] = draw("waterfall", [entry(tmp_path, waterfall=fall)]).axes
    ends = [end for left, right, _ in spans(axes)["unexplained"] for end in (left, right)]
    assert (min(ends), max(ends)) == pytest.approx((10.0, 12.0))
    assert "-2.00" in [text.get_text() for text in axes.texts]


def test_of_unknown_phases_a_bar_is_hatched(tmp_path: Path) -> None:
    fall = made_waterfall()
    bare = fall.model_copy(update={"terms": [term.model_copy(update={"phases": {}}) for term in fall.terms]})
    [axes] = draw("waterfall", [entry(tmp_path, waterfall=bare, shares={})]).axes
    assert {box.get_hatch() for box in axes.patches} == {"////"}


def test_several_runs_share_their_terms_and_the_scale_and_the_others_are_told(tmp_path: Path) -> None:
    fall = made_waterfall({"ideal": 80.0, "recomputation": 30.0, "unexplained": 0.0}, 110.0)
    runs = [
        entry(tmp_path / "a", overrides={"model.size": "small"}),
        entry(tmp_path / "b", overrides={"model.size": "large"}, waterfall=fall),
        made_entry(tmp_path / "c", {"model.size": "xl"}, status="oom"),
        made_entry(tmp_path / "d", {"model.size": "medium"}),
    ]
    figure = draw("waterfall", runs)
    one, other = figure.axes
    assert one.get_xlim() == other.get_xlim()
    assert one.get_ylim() == other.get_ylim()
    rows = [tick.get_text() for tick in one.get_yticklabels()]
    assert rows.index("slow matmuls") < rows.index("recomputation") < rows.index("memory traffic")
    told = figure.get_supxlabel()
    assert "xl: No" in told
    assert "medium: No" in told
    assert "--trace.steps=2." in told


@pytest.mark.parametrize("count", [1, 3])
def test_nothing_runs_off_the_edge(tmp_path: Path, count: int) -> None:
    runs = [entry(tmp_path / str(n), name=f"{n} name of a run that is rather long " * 4) for n in range(count)]
    figure = draw("waterfall", runs, "name")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    boxes = [axes.get_tightbbox(canvas.get_renderer()) for axes in figure.axes]
    for axes, box in zip(figure.axes, boxes, strict=True):
        assert box.x0 >= -1
        assert box.x1 <= figure.bbox.width + 1
        ends = [text.get_window_extent(canvas.get_renderer()).x1 for text in axes.texts]
        assert np.max(ends) <= axes.bbox.x1 + 1


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_it_is_saved_in_each_format(tmp_path: Path, suffix: str) -> None:
    save_plot("waterfall", [entry(tmp_path / "run", name="<b>$x^{_$")], tmp_path / f"a{suffix}")
    assert (tmp_path / f"a{suffix}").stat().st_size > 1000


def test_without_any_or_with_too_many_a_line_says_what_was_expected(tmp_path: Path) -> None:
    many = [entry(tmp_path / str(n), name=f"run {n}") for n in range(13)]
    for runs, message in (
        (
            [made_entry(tmp_path / "untraced")],
            r"^plot: expected runs whose .*, given none\. No waterfall: no step .*--trace",
        ),
        (many, r"^plot: expected at most 12 runs for waterfall, given 13"),
    ):
        with pytest.raises(ValueError, match=message):
            draw("waterfall", runs, "name")
