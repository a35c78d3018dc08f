"""Heat maps, bars and lines of any figure show the figures of the runs."""

from pathlib import Path

import pytest
from made_runs import made_entry

from lm_profiler.record.entry import Entry
from lm_profiler.report.pictures.plots import draw
from lm_profiler.usage_error import UsageError

FORWARD_MS = {("sdpa", 64): 3, ("sdpa", 256): 13, ("math", 64): 23, ("math", 256): None}


@pytest.fixture
def swept(tmp_path: Path) -> list[Entry]:
    """Two kinds of attention by two contexts; a step is the forward pass and 7 ms; one ran out of memory."""
    entries = []
    for (attention, context), milliseconds in FORWARD_MS.items():
        overrides = {"model.attention": attention, "data.context_length": str(context)}
        folder = tmp_path / f"{attention}{context}"
        if milliseconds is None:
            entries.append(made_entry(folder, overrides, status="oom"))
        else:
            entries.append(made_entry(folder, overrides, forward_s=milliseconds * 1e-3))
    return entries


def test_a_heat_map_shows_the_figure(swept: list[Entry]) -> None:
    axes = draw("heat", swept, by="context_length").axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["64", "256"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["math", "sdpa"]
    shown = {text.get_position(): text.get_text() for text in axes.texts}
    assert shown == {(0, 0): "30.00", (1, 0): "10.00", (0, 1): "OOM", (1, 1): "20.00"}


def test_bars_show_the_figure(swept: list[Entry]) -> None:
    axes = draw("bars", swept, by="context_length", value="forward_s").axes[0]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    widths = {labels[round(bar.get_y() + bar.get_height() / 2)]: bar.get_width() for bar in axes.patches}
    assert widths == pytest.approx({"context 64, math": 23, "context 64, sdpa": 3, "context 256, sdpa": 13}, rel=1e-3)
    assert "context 256, math: OOM" in labels


def test_axes_are_logarithmic_on_request(swept: list[Entry]) -> None:
    assert draw("line", swept, by="context_length").axes[0].get_yscale() == "linear"
    axes = draw("line", swept, by="context_length", value="step_s", is_logarithmic=True).axes[0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    low, high = axes.get_ylim()
    assert 0 < low < 10 < 30 < high
    bars = draw("bars", swept, is_logarithmic=True).axes[0]
    assert bars.get_xscale() == "log"
    for axis in (axes.yaxis, bars.xaxis):
        texts = [label.get_text() for label in axis.get_ticklabels(which="both") if label.get_text()]
        assert len(texts) > 1
        assert all(float(text) > 0 for text in texts)  # formulas are off, so none may be written


@pytest.mark.parametrize("kind", ["heat", "bars", "line"])
def test_pictures_without_a_figure_are_refused(swept: list[Entry], kind: str) -> None:
    with pytest.raises(UsageError, match="differ in exactly two"):
        draw("heat", swept[:2])
    with pytest.raises(UsageError, match="expected a figure such as step_s, given 'attention'"):
        draw(kind, swept, by="context_length", value="attention")
