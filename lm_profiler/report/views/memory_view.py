"""The Memory view: the bytes in use over one step by cause, the peak, and the allocations at the peak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lm_profiler.record.entry import Entry
from lm_profiler.record.figure import byte_unit, share_text
from lm_profiler.record.memory_timeline import (
    CAUSE_TITLES,
    SOURCES,
    MemoryTimeline,
    read_timelines,
    timeline_file,
)
from lm_profiler.record.quantities import CAUSES, bytes_text
from lm_profiler.record.run_record import RunRecord
from lm_profiler.report.pictures.drawing import CAUSE_COLOURS, PALE, PART_COLOURS
from lm_profiler.report.run.plan_table import allocation_tables
from lm_profiler.report.views.blocks import (
    Json,
    bar,
    bars,
    card,
    chart,
    escaped,
    fold,
    line,
    piece,
    table,
)
from lm_profiler.report.views.view import Limits, View, left_no_run

# characters that fit on the axis; the name of a phase with less room is slanted
_CHARACTERS_ON_AXIS = 80
_COARSE_COLOURS = CAUSE_COLOURS | {"activations_and_rest": CAUSE_COLOURS["activations"]}
_HEADROOM = 1.12  # the end of the axis as a multiple of the peak, so that there is room for its text


def blocks(entry: Entry, limits: Limits) -> list[Json]:
    """Return the memory timelines, and what was held at the peak if no timeline shows it."""
    record = entry.record
    assert record is not None
    timelines = read_timelines(entry.folder)
    # All timelines have one scale, so that planned and measured memory can be compared.
    most_bytes = max((timeline.peak for timeline in timelines), default=0)
    view_blocks = []
    for timeline in timelines:
        view_blocks += _timeline(timeline, limits.points, most_bytes)
    phase, causes = _causes_at_peak(record)
    # On the CPU the causes do not include activations. Then the card is shown only if there is no timeline.
    has_activations = causes.get("activations_and_rest", 0) > 0
    if any(causes.values()) and (has_activations or not timelines):
        view_blocks.append(_peak_card(phase, causes))
    return view_blocks


def missing(entry: Entry) -> str | None:
    """Return why there is no memory to show, and what to do; None if there is some."""
    if entry.record is None:
        return left_no_run(entry)
    has_timeline = any(
        timeline_file(entry.folder, source).is_file() for source in SOURCES
    )
    _, causes = _causes_at_peak(entry.record)
    if has_timeline or any(causes.values()):
        return None
    return "The memory of this run is unknown: it was neither measured nor planned (--check_memory=true plans it)."


MEMORY = View("memory", "Memory", blocks, missing)


def _causes_at_peak(record: RunRecord) -> tuple[str, dict[str, int]]:
    """Return the phase that holds the most bytes, and the bytes of each cause in it; empty if causes are unknown."""
    if record.memory is None:
        return "", {}
    largest_phase = ""
    largest_causes: dict[str, int] = {}
    for phase, causes in record.memory.causes.items():
        bytes_by_cause = {name: held_bytes or 0 for name, held_bytes in causes}
        is_larger = sum(bytes_by_cause.values()) > sum(largest_causes.values())
        if is_larger or not largest_phase:
            largest_phase = phase
            largest_causes = bytes_by_cause
    return largest_phase, largest_causes


def _peak_card(phase: str, causes: Mapping[str, int]) -> Json:
    """Return a bar for each cause in the phase of the peak. In most runs its neighbours hold nearly the same."""
    peak_bytes = sum(causes.values())
    rows = []
    for cause in sorted(causes, key=lambda name: causes[name], reverse=True):
        held_bytes = causes[cause]
        if not held_bytes:
            continue
        share = held_bytes / peak_bytes
        text = bytes_text(held_bytes)
        part = piece(0.0, share, _COARSE_COLOURS[cause], text)
        rows.append(bar(CAUSES[cause], [part], [text, share_text(share)]))
    peak = bytes_text(peak_bytes)
    headline = line(f"Most memory is held in {phase}: {peak}.", "headline")
    chart = bars(["", "", "bytes", "share"], rows)
    return card("Measured: memory by cause", headline, chart)


def _timeline(
    timeline: MemoryTimeline, most_points: int, most_bytes: int
) -> list[Json]:
    """Return the chart of the bytes in use over one step by cause, and folds with the allocations."""
    peak = bytes_text(timeline.peak)
    title = f"Bytes in use over one step: {SOURCES[timeline.source]}"
    headline = line(f"Peak {peak}.", "headline")
    meaning = "The axis counts allocations and frees in their order, not time."
    stack = _chart(timeline, most_points, most_bytes)
    view_blocks = [card(title, headline, line(meaning, "quiet"), stack)]
    for allocations in allocation_tables(timeline):
        name = allocations.above[-1].rstrip(":")
        name = name[0].upper() + name[1:]
        view_blocks.append(fold(name, *table(replace(allocations, above=[]))))
    return view_blocks


def _chart(timeline: MemoryTimeline, most_points: int, most_bytes: int) -> Json:
    """Return plotly's chart of the bytes in use by cause, with the phases shaded; ``most_bytes`` is the axis' end."""
    unit, scale = byte_unit(most_bytes)
    places, curves = timeline.curves(most_points)
    data = []
    for cause, held_bytes in curves.items():
        name = CAUSE_TITLES.get(cause, cause)
        trace = {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": places,
            "stackgroup": "held",
            "y": [round(count / scale, 4) for count in held_bytes],
            "line": {"shape": "hv", "width": 0},
            "fillcolor": CAUSE_COLOURS.get(cause, PALE),
            "hovertemplate": f"{name}: %{{y:.3f}} {unit}<extra></extra>",
        }
        data.append(trace)
    events = len(timeline.events)
    layout = {
        "hovermode": "x unified",
        "shapes": [_phase_area(*phase) for phase in timeline.phase_spans()],
        "annotations": [
            *(_phase_name(*phase, events) for phase in timeline.phase_spans()),
            _peak_mark(timeline, scale),
        ],
        "margin": {"t": 52},
        "legend": {"y": -0.22, "yanchor": "top"},
        "xaxis": {
            "title": {"text": "allocations and frees of one step"},
            "range": [0, events or 1],
        },
        "yaxis": {
            "title": {"text": f"bytes in use ({unit})"},
            "range": [0, _HEADROOM * most_bytes / scale or 1],
        },
    }
    return chart(data, layout)


def _phase_area(phase: str, begins: int, ends: int) -> Json:
    """Return Plotly's shaded area of a phase, from event ``begins`` to event ``ends``."""
    return {
        "type": "rect",
        "xref": "x",
        "yref": "paper",
        "x0": begins,
        "x1": ends,
        "y0": 0,
        "y1": 1,
        "layer": "below",
        "fillcolor": PART_COLOURS.get(phase, PALE),
        "opacity": 0.18,
        "line": {"width": 0},
    }


def _phase_name(phase: str, begins: int, ends: int, events: int) -> Json:
    """Return Plotly's text with the name of a phase above its area, slanted if the area is narrow."""
    is_narrow = (ends - begins) * _CHARACTERS_ON_AXIS < events * len(phase)
    return {
        "x": (begins + ends) / 2,
        "xref": "x",
        "y": 1,
        "yref": "paper",
        "yanchor": "bottom",
        "xanchor": "left" if is_narrow else "center",
        "textangle": -35 if is_narrow else 0,
        "text": escaped(phase),
        "showarrow": False,
        "font": {"size": 11},
    }


def _peak_mark(timeline: MemoryTimeline, scale: float) -> Json:
    """Return Plotly's arrow to the peak, with its bytes."""
    is_near_the_end = timeline.peak_at > 0.6 * len(timeline.events)
    arrow = {
        "showarrow": True,
        "arrowcolor": PALE,
        "ax": -60 if is_near_the_end else 60,
        "ay": -14,
    }
    text = f"<b>peak {escaped(bytes_text(timeline.peak))}</b>"
    return {"x": timeline.peak_at, "y": timeline.peak / scale, "text": text, **arrow}
