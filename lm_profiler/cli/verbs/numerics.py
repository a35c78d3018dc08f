"""``numerics``: what low precision does to a sum, on the smallest example: 0.01, added a thousand times."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lm_profiler.report.tables.table import Heading, Table, TableCell
from lm_profiler.report.tables.terminal import terminal

EXAMPLES = """\
for your own model under your own precision:
  lm_profiler fit --numerics.audit=true"""

_ADDEND, _TIMES = 0.01, 1000
_EXACT = _ADDEND * _TIMES


class Addition(NamedTuple):
    """A thousand additions: what they came to, and why."""

    how: str
    value: float
    why: str


def sums() -> list[Addition]:
    """The same sum in each combination of precisions."""
    whole, half, cast = np.float32(_ADDEND), np.float16(_ADDEND), np.float32(np.float16(_ADDEND))
    additions: list[tuple[str, np.floating, np.floating, str]] = [
        ("float32 += float32", np.float32(0), whole, "24 bits: each addition rounds by at most 5e-7"),
        ("float16 += float16", np.float16(0), half, _OF_SUM),
        ("float32 += float16", np.float32(0), half, _OF_ADDEND),
        ("float32 += float32(float16)", np.float32(0), cast, "the same: the addend is cast up before it is added"),
    ]
    return [Addition(how, _add(total, addend), why) for how, total, addend, why in additions]


_OF_SUM = "11 bits: from 8 on the sum moves in steps of 1/128, and 0.01 becomes 0.0078"
_OF_ADDEND = f"the sum is kept well; the addend is not: 0.01 in float16 is {float(np.float16(_ADDEND)):.8f}"


def _add(total: np.floating, addend: np.floating) -> float:
    """``total += addend``, a thousand times, in the dtype of ``total``."""
    dtype = total.dtype.type
    for _ in range(_TIMES):
        total = dtype(total + addend)
    return float(total)


@dataclass(frozen=True)
class Options:
    """Add 0.01 a thousand times in float32, in float16, and mixed, and say why the sums differ."""


def run(options: Options) -> int:
    """Print the table; returns the exit code."""
    rows = [[how, f"{value:.4f}", f"{value / _EXACT - 1:+.3%}", why] for how, value, why in sums()]
    headings = [Heading(title, title, at in (1, 2)) for at, title in enumerate(("sum", "result", "off by", "why"))]
    cells = [[TableCell(text=text) for text in row] for row in rows]
    table = Table(headings, cells, [f"{_ADDEND} added {_TIMES} times is {_EXACT:g}; here it is"])
    sys.stdout.write(terminal(table, sys.stdout))
    return 0
