"""The picture of a memory timeline, as what it draws."""

from __future__ import annotations

import pytest
from made_timeline import made_timeline
from matplotlib.colors import to_hex

from lm_profiler.record.memory_timeline import CAUSE_TITLES
from lm_profiler.report.pictures.drawing import CAUSE_COLOURS
from lm_profiler.report.pictures.over_time import memory_timelines, titled_timelines
from lm_profiler.usage_error import UsageError


def test_causes_phases_the_peak_and_what_is_alive_there_are_drawn() -> None:
    figure = memory_timelines(titled_timelines([made_timeline()]))
    above, below = figure.axes
    stack = {to_hex(area.get_facecolor()[0]).upper(): area.get_paths()[0].get_extents() for area in above.collections}
    assert stack[CAUSE_COLOURS["activations"]].y1 == 700 / 1024  # on top of the gradients
    texts = [text.get_text() for text in above.texts]
    assert texts == ["forward", "backward", "peak 0.68 KiB"]
    assert above.get_ylim()[1] > 700 / 1024
    (mark,) = [line for line in above.lines if line.get_marker() == "v"]
    assert (mark.get_xdata()[0], mark.get_ydata()[0]) == (4, 700 / 1024)
    cells = [text.get_text() for text in below.texts]
    assert cells[4:] == ["300 B", "activations", "3 × 25, float32", "mm, head, model.py:7"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["parameters", "gradients", "activations"]


def test_two_stand_side_by_side_to_one_scale() -> None:
    half = made_timeline(source="measured", start=[50, *[0] * (len(CAUSE_TITLES) - 1)])
    figure = memory_timelines(titled_timelines([made_timeline(), half], "logs/a"))
    left, right = figure.axes[:2]
    assert left.get_ylim() == right.get_ylim()
    assert {axes.get_title(loc="left").split(":")[0] for axes in (left, right)} == {"logs/a"}


def test_none_and_too_many_are_refused() -> None:
    with pytest.raises(UsageError, match="given none"):
        memory_timelines({})
    with pytest.raises(UsageError, match="given 5; name fewer"):
        memory_timelines({str(number): made_timeline() for number in range(5)})
