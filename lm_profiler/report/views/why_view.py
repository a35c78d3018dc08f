"""The Why view: a bar for each term of the waterfall. A click on a bar shows its contributors."""

from __future__ import annotations

from collections.abc import Mapping

from lm_profiler.record.entry import Entry
from lm_profiler.record.figure import ms_text, share_text
from lm_profiler.record.quantities import GROUPS, PARTS
from lm_profiler.record.run_record import RunRecord, Waterfall
from lm_profiler.report.pictures.drawing import PALE, PART_COLOURS
from lm_profiler.report.run import waterfall_text
from lm_profiler.report.run.sections import known_table
from lm_profiler.report.run.waterfall_text import Rung
from lm_profiler.report.views.blocks import (
    Json,
    bar,
    bars,
    card,
    fold,
    line,
    piece,
    table,
    whisker,
)
from lm_profiler.report.views.view import Limits, View, left_no_run

_NAMED_SHARE = 0.01  # the share of the step from which the headline names a term
_NAMED_TERMS = 2
_VISIBLE_SHARE = 0.002  # the share of the step from which a piece can be seen


def blocks(entry: Entry, _: Limits) -> list[Json]:
    """Return the waterfall as bars that can be opened, and below it the peaks and rates that it uses."""
    record = entry.record
    assert record is not None
    waterfall = record.waterfall
    assert waterfall is not None
    rungs = waterfall_text.rungs(waterfall)
    text, interval = _step_texts(waterfall)
    title = f"From the ideal step to the measured one: {text} ms {interval}".rstrip()
    ends_s = [rung.start_s + rung.term.seconds for rung in rungs]
    axis_s = max(waterfall.step_s, waterfall.ci_high or 0.0, *ends_s) or 1.0
    scale = 1.0 / axis_s
    rows = [_term_bar(rung, waterfall, scale) for rung in rungs]
    rows.append(_step_bar(record, waterfall, scale))
    ceiling = (
        waterfall_text.reason_without_ceilings(waterfall)
        or "an upper limit, not an expected gain"
    )
    texts_below = [f"Open a bar to see its parts. Could save at most: {ceiling}."]
    texts_below += [f"Note: {note}" for note in waterfall.notes]
    lines_below = [line(text, "quiet") for text in texts_below]
    drawn = bars(["", "", "ms", "share", "could save at most"], rows)
    legend = {"kind": "legend", "entries": _visible_phases(record, rungs, waterfall)}
    terms_card = card(
        title,
        line(_headline(rungs, waterfall), "headline"),
        legend,
        drawn,
        *lines_below,
        words=record.words,
    )
    facts = known_table(record, GROUPS["Waterfall"])
    return [terms_card, fold("What it is measured against", *table(facts))]


def missing(entry: Entry) -> str | None:
    """Return the reason why this view has no waterfall for the run; None if it has one."""
    record = entry.record
    if record is None:
        return left_no_run(entry)
    if record.waterfall is None:
        return f"No waterfall: {waterfall_text.missing_input(record)}"
    if record.contended:
        # On a shared machine the terms would contain the time that other processes took.
        return f"No waterfall: {waterfall_text.NO_SUM}."
    return None


WHY = View("why", "Why", blocks, missing)


def _headline(rungs: list[Rung], waterfall: Waterfall) -> str:
    """Return the time of the ideal step, and the largest of the other terms."""
    ideal, *further_rungs = rungs
    text = f"{ideal.text} ms ({_share(ideal.term.seconds, waterfall)}) would be ideal."
    large_rungs = []
    for rung in further_rungs:
        if rung.term.seconds >= _NAMED_SHARE * waterfall.step_s:
            large_rungs.append(rung)
    if not large_rungs:
        return text
    large_rungs.sort(key=lambda rung: rung.term.seconds, reverse=True)
    names = [f"{rung.text} ms {rung.title}" for rung in large_rungs[:_NAMED_TERMS]]
    return f"{text} The largest additions: {', '.join(names)}."


def _visible_phases(
    record: RunRecord, rungs: list[Rung], waterfall: Waterfall
) -> list[list[str]]:
    """Return the phases whose pieces can be seen, with their colours."""
    bars_pieces = [rung.pieces for rung in rungs]
    bars_pieces.append(waterfall_text.phases_of_step(record))
    least_s = _VISIBLE_SHARE * waterfall.step_s
    colours = []
    for part in PARTS:
        if any(pieces.get(part, 0.0) >= least_s for pieces in bars_pieces):
            colours.append([part, PART_COLOURS[part]])
    return colours


def _term_bar(rung: Rung, waterfall: Waterfall, scale: float) -> Json:
    """Return the bar of a term of the waterfall, with its meaning and what it consists of inside."""
    ceiling = waterfall_text.ceiling_text(waterfall, rung.term)
    meaning = waterfall_text.meaning_in(waterfall, rung.term.name)
    text = f"{rung.title}."
    if meaning:
        text = f"{rung.title[0].upper()}{rung.title[1:]}: {meaning}."
    range_text = waterfall_text.ends_text(waterfall, rung.term)
    if range_text:
        text += f" It took {range_text}."
    if ceiling:
        text += f" Could save at most {ceiling} ms."
    contributors = waterfall_text.contributors(rung.term, waterfall)
    contributor_blocks = table(contributors)
    if not contributors.rows:
        contributor_blocks = [line("Its parts are unknown.", "quiet")]
    return bar(
        rung.title,
        _pieces(rung.pieces, rung.start_s, scale),
        [rung.signed_text, _share(rung.term.seconds, waterfall), ceiling],
        name=rung.term.name,
        tip=meaning,
        inside=[line(text), *contributor_blocks],
    )


def _step_bar(record: RunRecord, waterfall: Waterfall, scale: float) -> Json:
    """Return the bar of the measured step, in pieces by phase, with its interval."""
    phases = waterfall_text.phases_of_step(record) or {"": waterfall.step_s}
    text, interval = _step_texts(waterfall)
    span = whisker(
        waterfall.ci_low, waterfall.ci_high, scale, f"95 % interval {interval}"
    )
    cells = [text, _share(waterfall.step_s, waterfall), ""]
    return bar(
        "measured step",
        _pieces(phases, start_s=0.0, scale=scale),
        cells,
        whisker=span,
        is_total=True,
    )


def _pieces(phases: Mapping[str, float], start_s: float, scale: float) -> list[Json]:
    """Return adjacent pieces that begin at ``start_s``; a piece without a known phase is hatched."""
    pieces = []
    for phase, seconds in phases.items():
        end_s = start_s + seconds
        tip = f"{phase or 'no known phase'}: {ms_text(seconds)} ms"
        colour = PART_COLOURS.get(phase, PALE) if phase else None
        pieces.append(piece(start_s * scale, end_s * scale, colour, tip))
        start_s = end_s
    return pieces


def _step_texts(waterfall: Waterfall) -> tuple[str, str]:
    """Return the measured step in ms, and its interval."""
    text, _, interval = waterfall_text.step_text(waterfall).partition(" ")
    return text, interval


def _share(seconds: float, waterfall: Waterfall) -> str:
    return share_text(seconds / waterfall.step_s) if waterfall.step_s else ""
