"""The one registry of what is measured: names, units, how to print, TensorBoard tags, meanings, where records have it.

Columns of ``steps.csv``, keys of ``run.json`` and ``improve.json``, tags, table headers and the documentation come
from here.

May use ``run`` and ``improve``, the records' types. Never a second list of figures: whoever shows one asks here.
"""

from lm_profiler.record.parts import PARTS, PHASES, TIMED
from lm_profiler.record.quantities.figures import FIGURES, GROUPS, QUANTITIES, overview
from lm_profiler.record.quantities.floors import FLOOR, TIMES_FLOOR
from lm_profiler.record.quantities.improve import TRIED_COLUMNS
from lm_profiler.record.quantities.lists import LISTS
from lm_profiler.record.quantities.plan import PLANNED_COLUMNS, REMEDY_COLUMNS
from lm_profiler.record.quantities.quantity import Place, Quantity, bytes_text, counted, duration_text, with_prefix
from lm_profiler.record.quantities.resources import CAUSES
from lm_profiler.record.quantities.times import (
    HOST_TIMES,
    MEMORY,
    MFU,
    STEP_COLUMNS,
    TIMES,
    TOKENS,
    TOKENS_PER_S,
)
from lm_profiler.record.quantities.waterfall import TERMS, term_title

__all__ = [
    "CAUSES", "FIGURES", "FLOOR", "GROUPS", "HOST_TIMES", "LISTS", "MEMORY", "MFU", "PARTS", "PHASES",
    "PLANNED_COLUMNS", "QUANTITIES", "REMEDY_COLUMNS", "STEP_COLUMNS", "TERMS", "TIMED", "TIMES", "TIMES_FLOOR",
    "TOKENS", "TOKENS_PER_S", "TRIED_COLUMNS", "Place", "Quantity", "bytes_text", "counted", "duration_text",
    "overview", "term_title", "with_prefix",
]  # fmt: skip
