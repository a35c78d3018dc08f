"""The Why view, as plain JSON: the waterfall's bars, what each opens, and what it is measured against."""

from __future__ import annotations

from lm_profiler.record.entry import Entry
from lm_profiler.record.quantities import GROUPS, TERMS, term_title
from lm_profiler.record.run import Waterfall
from lm_profiler.report.page.answers import Json, table_of
from lm_profiler.report.run.facts import known_table
from lm_profiler.report.run.waterfall import (
    Rung,
    ceiling_text,
    no_waterfall,
    not_drawn,
    of_the_step,
    rungs,
    step_text,
    title_in,
    unsure,
)
from lm_profiler.report.run.waterfall_tables import contributors


def why(entry: Entry) -> Json:
    """``terms`` in the order of their bars and the ``step`` that they add up to; or ``why`` there are none.

    Of ``pieces`` each is seconds of a phase; those of no known phase have an empty name. Texts are in ms.
    """
    record = entry.record
    if record is None or record.waterfall is None:
        return {"why": "No waterfall: a cell that left no run." if record is None else no_waterfall(record)}
    fall = record.waterfall
    text, _, interval = step_text(fall).partition(" ")
    return {
        "why": None,
        "words": record.words,
        "step": {
            "seconds": fall.step_s,
            "text": text,
            "interval": interval,
            "low_s": fall.ci_low,
            "high_s": fall.ci_high,
            "pieces": of_the_step(record) or {"": fall.step_s},
        },
        "terms": [_term(rung, fall) for rung in rungs(fall)],
        "facts": table_of(known_table(record, GROUPS["Waterfall"])),
        "to_win": unsure(fall) or "a ceiling, never a gain",
        "not_drawn": not_drawn(fall),
        "notes": fall.notes,
    }


def _term(rung: Rung, fall: Waterfall) -> Json:
    term = rung.term
    return {
        "name": term.name,
        "title": rung.title,
        "meaning": _meaning(term.name, fall),
        "start_s": rung.start_s,
        "seconds": term.seconds,
        "text": rung.signed_text,
        "share": term.seconds / fall.step_s if fall.step_s else None,
        "at_most": ceiling_text(fall, term) or None,
        "pieces": rung.pieces,
        "contributors": table_of(contributors(term, fall)),
    }


def _meaning(name: str, fall: Waterfall) -> str:
    if title_in(fall, name) != term_title(name):
        return "kernels that wait for memory, whose bandwidth is unknown"
    return TERMS[name][1] if name in TERMS else ""
