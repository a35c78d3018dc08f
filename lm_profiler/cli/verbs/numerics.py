"""The verb ``numerics``: what low precision does to a sum, shown by adding 0.01 a thousand times."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np

from lm_profiler.report.tables.formats import terminal
from lm_profiler.report.tables.table import Heading, Table, TableCell

EXAMPLES = """\
for your own model under your own precision:
  lm_profiler fit --numerics.audit=true"""

_ADDEND, _TIMES = 0.01, 1000
_EXACT = _ADDEND * _TIMES


def sums() -> list[tuple[str, float, str]]:
    """Return the same sum in each combination of precisions: how it is added, its result, and why."""
    whole, half = np.float32(_ADDEND), np.float16(_ADDEND)
    of_sum = "11 bits: from 8 on the sum moves in steps of 1/128, and 0.01 becomes 0.0078"
    of_addend = f"the sum is kept well; the addend is not: 0.01 in float16 is {half:.8f}"
    of_cast = "the same: the addend is cast up before it is added"
    return [
        ("float32 += float32", _sum(np.float32, whole), "24 bits: each addition rounds by at most 5e-7"),
        ("float16 += float16", _sum(np.float16, half), of_sum),
        ("float32 += float16", _sum(np.float32, half), of_addend),
        ("float32 += float32(float16)", _sum(np.float32, np.float32(half)), of_cast),
    ]


def _sum(kind: type[np.floating], addend: np.floating) -> float:
    """Add ``addend`` a thousand times, one by one, to a sum of ``kind``; ``np.sum`` would add in pairs."""
    return float(np.full(_TIMES, addend).cumsum(dtype=kind)[-1])


@dataclass(frozen=True)
class Options:
    """Add 0.01 a thousand times in float32, in float16, and mixed, and say why the sums differ."""


def run(options: Options) -> int:
    """Print the table and return the exit code."""
    rows = [[how, f"{value:.4f}", f"{value / _EXACT - 1:+.3%}", why] for how, value, why in sums()]
    headings = [Heading(title, title, at in (1, 2)) for at, title in enumerate(("sum", "result", "off by", "why"))]
    cells = [[TableCell(text=text) for text in row] for row in rows]
    table = Table(headings, cells, [f"{_ADDEND} added {_TIMES} times is {_EXACT:g}; here it is"])
    sys.stdout.write(terminal(table, sys.stdout))
    return 0
