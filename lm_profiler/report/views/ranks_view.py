"""The Ranks view: who works and who waits, by phase and step by step; the rank that others wait for stands out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

import numpy as np

from lm_profiler.analysis.ranks.slowness import fast_ranks
from lm_profiler.record.entry import Entry
from lm_profiler.record.figure import ms_text
from lm_profiler.record.quantities import GROUPS, PARTS, Quantity, count_text
from lm_profiler.record.run_record import Ranks, RankTimes
from lm_profiler.report.pictures.drawing import PALE, SERIES_COLOURS
from lm_profiler.report.run.rank_lines import communication_lines, who_waits
from lm_profiler.report.run.sections import known_table
from lm_profiler.report.tables.table import Table, text_table
from lm_profiler.report.views.blocks import (
    Json,
    card,
    chart,
    escaped,
    fold,
    line,
    shade,
    side_by_side,
    table,
)
from lm_profiler.report.views.view import Limits, View, left_no_run

_EXCESS_COLOUR = SERIES_COLOURS[1]  # for own work beyond that of the fast ranks
_WAITING_COLOUR = PALE
# An excess of this share of the mean step may have the full colour; a smaller one is paler, so that noise is pale.
_FULL_COLOUR_SHARE = 0.1
_FULL_COLOUR_SHARE_OF_ONE_STEP = 0.2
_MOST_NAMES = 16  # the most ranks that an axis names
# the height of the chart of steps, and of a rank in it
_LEAST_PX = 190
_MOST_PX = 930
_RANK_PX = 24


def blocks(entry: Entry, _: Limits) -> list[Json]:
    """Return the conclusion about the ranks, own work and waiting by phase, and own work over the steps."""
    record = entry.record
    assert record is not None
    ranks = record.ranks
    assert ranks is not None
    rows = _rank_times(ranks)
    conclusion = who_waits(ranks)
    head = [line(f"{conclusion[0].upper()}{conclusion[1:]}.", "headline")]
    head += [line(text, "quiet") for text in communication_lines(ranks)]
    steps = count_text(ranks.steps, "step")
    title = f"Which ranks work, which wait: {_ranks_text(ranks)}, mean of {steps}"
    if not _has_all_ranks(ranks):
        drawn = f"{len(rows):,} of {count_text(ranks.heard, 'rank')} are drawn"
        choice = (
            "rank 0, and the ranks with the most and the least own work, the most first"
        )
        head.append(line(f"{drawn}: {choice}.", "quiet"))
    pictures = [_by_phase(ranks, rows)]
    if ranks.columns:
        pictures.append(_by_steps(ranks, rows))
    facts = known_table(record, _SOURCES)
    return [
        card(title, *head),
        side_by_side(*pictures),
        fold("Sources of these figures", *table(facts)),
    ]


def missing(entry: Entry) -> str | None:
    """Return why no rank is shown; None if the record has ranks."""
    record = entry.record
    if record is None:
        return left_no_run(entry)
    if record.ranks is not None:
        return None
    world = 1 if record.environment is None else record.environment.world_size
    if world > 1:
        return (
            f"{world:,} ranks, but waiting is unknown: see the notes of the Run view."
        )
    return "There is only one rank, so no rank waits for another."


RANKS = View("ranks", "Ranks", blocks, missing)


def _is_source(figure: Quantity) -> bool:
    if figure.name == "ranks_heard":
        return True
    return figure.path.startswith("ranks.") and "finding" not in figure.path


_SOURCES = [figure for figure in GROUPS["Ranks"] if _is_source(figure)]


def _has_all_ranks(ranks: Ranks) -> bool:
    """Return whether the record has every rank that sent its figures; of very many ranks it has only the extremes."""
    return len(ranks.by_rank) == ranks.heard


def _ranks_text(ranks: Ranks) -> str:
    """Return the number of ranks, and how many of them sent measurements if not all did: ``7 of 8 ranks``."""
    world = count_text(ranks.world, "rank")
    if ranks.heard == ranks.world:
        return world
    return f"{ranks.heard:,} of {world}"


def _rank_times(ranks: Ranks) -> list[RankTimes]:
    """Return the ranks by their numbers; if only the extremes are known, sorted by own work, the most first."""
    if _has_all_ranks(ranks):
        return sorted(ranks.by_rank, key=lambda row: row.rank)
    return sorted(ranks.by_rank, key=lambda row: (-row.all_own_s, row.rank))


def excess_over_fast(ranks: Ranks, rows: Sequence[RankTimes], part: str) -> list[float]:
    """Return for each rank its seconds of own work in ``part`` minus those of the fast ranks."""
    seconds = [row.own_s.get(part, 0.0) for row in rows]
    if not _has_all_ranks(ranks):
        # The median of the extremes is not the median of all ranks, which the record has too.
        return [own_s - ranks.own[part].median_s for own_s in seconds]
    return _excess_over_median_of_fast(seconds)


def _excess_over_median_of_fast(seconds: Sequence[float]) -> list[float]:
    """Return how much longer each rank takes than the median of the fast ranks."""
    if len(seconds) < 2:
        return [0.0] * len(seconds)
    fast_seconds = [seconds[index] for index in fast_ranks(np.array(seconds))]
    usual_s = median(fast_seconds)
    return [own_s - usual_s for own_s in seconds]


def _by_phase(ranks: Ranks, rows: Sequence[RankTimes]) -> Json:
    """Return the table of own work and waiting; a cell is shaded by the rank's excess over the fast ranks."""
    phases = []
    for part in PARTS:
        if part in ranks.own and ranks.own[part].largest_s:
            phases.append(part)
    excess_s = {part: excess_over_fast(ranks, rows, part) for part in phases}
    # the excess that has the full colour: the largest one, or more if all are small
    full_s = _FULL_COLOUR_SHARE * ranks.step_s
    for row in rows:
        full_s = max(full_s, row.all_waiting_s)
    for excess_in_part_s in excess_s.values():
        full_s = max(full_s, *excess_in_part_s)

    titles = ["rank"]
    if len(ranks.hosts) > 1:
        titles.insert(0, "host")
    texts = []
    shades = []
    for index, row in enumerate(rows):
        names = {"host": row.host, "rank": str(row.rank)}
        row_texts = [names[title] for title in titles]
        row_shades: list[Json | None] = [None] * len(titles)
        for part in phases:
            row_texts.append(f"{row.own_s.get(part, 0.0) * 1e3:,.1f}")
            row_shades.append(shade(_EXCESS_COLOUR, excess_s[part][index] / full_s))
        row_texts.append(f"{row.all_waiting_s * 1e3:,.1f}")
        row_shades.append(shade(_WAITING_COLOUR, row.all_waiting_s / full_s))
        texts.append(row_texts)
        shades.append(row_shades)
    all_titles = [*titles, *phases, "waiting"]
    own_table: Table = text_table(all_titles, texts, left=len(titles) - 1)
    entries = [
        ["more than the fast ranks", _EXCESS_COLOUR],
        ["waiting", _WAITING_COLOUR],
    ]
    legend = {"kind": "legend", "entries": entries}
    return card("Own work and waiting (ms)", legend, *table(own_table, shades=shades))


def _by_steps(ranks: Ranks, rows: Sequence[RankTimes]) -> Json:
    """Return a heat map of the excess of own work over the fast ranks, by rank and step."""
    own_s = np.array([row.own_by_column_s for row in rows])
    columns = [_excess_over_median_of_fast(column.tolist()) for column in own_s.T]
    excess_s = np.array(columns).T  # [rank, step]
    shown_ms = np.round(np.maximum(excess_s, 0.0) * 1e3, 4).tolist()
    texts = []
    for row, differences_s in zip(rows, excess_s.tolist(), strict=True):
        texts.append([_difference_text(row, seconds) for seconds in differences_s])
    most_s = max(_FULL_COLOUR_SHARE_OF_ONE_STEP * ranks.step_s, float(np.max(excess_s)))
    data = {
        "type": "heatmap",
        "name": "own work",
        "x": [str(step) for step in ranks.columns],
        "y": list(range(len(rows))),
        "z": shown_ms,
        "customdata": texts,
        "hovertemplate": "%{customdata}<extra>step %{x}</extra>",
        "colorscale": [[0, f"{_EXCESS_COLOUR}00"], [1, _EXCESS_COLOUR]],
        "zmin": 0,
        "zmax": most_s * 1e3,
        "ygap": 0 if len(rows) > _MOST_NAMES else 2,
        "colorbar": {
            "title": {"text": "ms more", "side": "right"},
            "thickness": 12,
            "outlinewidth": 0,
        },
    }
    text = (
        "Colour shows how much more own work a rank has than the fast ranks. A continuous line is a rank that is "
        "always slow; scattered spots are ranks that take turns at being slow."
    )
    layout = _layout_by_steps(rows, has_several_hosts=len(ranks.hosts) > 1)
    heat_map = card(
        "Own work, step by step", line(text, "quiet"), chart([data], layout)
    )
    return heat_map | {"grows": True}


def _layout_by_steps(rows: Sequence[RankTimes], has_several_hosts: bool) -> Json:
    """Return Plotly's layout of the heat map by rank and step; at most ``_MOST_NAMES`` of the ``rows`` are named."""
    stride = math.ceil(len(rows) / _MOST_NAMES)
    named_rows = range(0, len(rows), stride)
    names = []
    for index in named_rows:
        name = str(rows[index].rank)
        if has_several_hosts:
            name = f"{escaped(rows[index].host)} · {name}"
        names.append(name)
    return {
        "height": max(_LEAST_PX, min(_MOST_PX, 90 + _RANK_PX * len(rows))),
        "xaxis": {
            "title": {"text": "step"},
            "type": "category",
            "showgrid": False,
            "nticks": 20,
        },
        "yaxis": {
            "title": {"text": "rank"},
            "autorange": "reversed",
            "showgrid": False,
            "zeroline": False,
            "tickvals": list(named_rows),
            "ticktext": names,
        },
    }


def _difference_text(row: RankTimes, seconds: float) -> str:
    """Return the text of a cell of the heat map: ``seconds`` are the rank's excess over the fast ranks."""
    direction = "less" if seconds < 0 else "more"
    difference = f"{ms_text(abs(seconds), digits=2)} ms {direction}"
    return f"rank {row.rank} ({escaped(row.host)}): {difference}"
