"""The memory timeline as a record: its curve, its phases, its file."""

from pathlib import Path

import pytest
from made_timeline import made_timeline

from lm_profiler.record.files import RecordError
from lm_profiler.record.memory_timeline import MemoryTimeline, read_timelines, timeline_file, write_timeline


def stack_heights(curves: dict[str, list[int]]) -> list[int]:
    return [sum(heights) for heights in zip(*curves.values(), strict=True)]


def test_the_curve_adds_up() -> None:
    """100 bytes of parameters, and what each of six events adds or frees."""
    timeline = made_timeline()
    assert timeline.totals == [100, 300, 600, 500, 700, 300, 100]
    assert (timeline.peak, timeline.peak_at) == (700, 4)
    places, curves = timeline.curves()
    assert stack_heights(curves) == timeline.totals
    assert places == [*range(7)]
    assert "buffers" not in curves  # what is never held has no area


def test_a_curve_of_fewer_places_keeps_the_peak() -> None:
    places, curves = made_timeline().curves(most_places=3)
    assert len(places) <= 3
    assert max(stack_heights(curves)) == 700


def test_forward_and_backward_are_shaded() -> None:
    assert made_timeline().phase_spans() == [("forward", 0, 2), ("backward", 3, 6)]


def test_moments_have_what_is_held_by_cause() -> None:
    moments = made_timeline().moments()
    assert set(moments) == {"before_optimizer", "after_optimizer"}
    held = moments["after_optimizer"]
    assert (held.parameters, held.gradients, held.activations_and_rest) == (100, 0, 0)
    set_up = made_timeline(set_up={"parameters": 100, "rest": 7}).moments()["set_up"]
    assert (set_up.parameters, set_up.activations_and_rest) == (100, 7)


def test_a_timeline_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_timelines(tmp_path) == []
    timelines = [made_timeline(), made_timeline(source="measured")]
    for timeline in reversed(timelines):
        write_timeline(timeline, tmp_path)
    assert read_timelines(tmp_path) == timelines
    timeline_file(tmp_path, "planned").write_text('{"source": "planned"}')
    with pytest.raises(RecordError, match="not a memory timeline"):
        read_timelines(tmp_path)


@pytest.mark.parametrize("broken", [{"events": [(9, 1)]}, {"start": [1]}, {"phases": [("forward", 99)]}])
def test_dangling_references_are_refused(broken: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="expected"):
        MemoryTimeline.model_validate(made_timeline().model_dump() | broken)
