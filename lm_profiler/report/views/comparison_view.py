"""Two sides of runs in the view Compare, as ``lm_profiler compare`` prints them."""

from __future__ import annotations

from dataclasses import replace

from lm_profiler.analysis.compare.comparison import Comparison
from lm_profiler.report.run.comparison_table import comparison_table
from lm_profiler.report.views.blocks import Json, fold, line, table


def comparison_blocks(comparison: Comparison) -> list[Json]:
    """Return the verdict, the table and the differences; if the sides did different work, the result is in a fold."""
    printed = comparison_table(comparison)
    verdict, *notes = [text for text in printed.below if text]
    differences = {"kind": "verbatim", "text": "\n".join(printed.above).strip()}
    result = [
        line(verdict, "headline"),
        *table(replace(printed, above=[], below=[])),
        *(line(note, "quiet") for note in notes),
    ]
    if comparison.unlike:
        refusal = line(
            "These runs did different work or ran on different devices, so their times can hardly be compared.",
            "error",
        )
        return [refusal, differences, fold("Compare anyway", *result)]
    return [*result, fold("What differs", differences)]
