"""Columns about the kernels in each run's trace: the share of each kind, and the largest kernels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import get_args

from lm_profiler.record.entry import Entry
from lm_profiler.record.kernels import (
    KernelTable,
    Kind,
    kernel_files,
    read_kernels,
)
from lm_profiler.record.run_record import RecordError
from lm_profiler.record.text import shortened
from lm_profiler.report.tables.column import Column, asked_column

_PASSES = ("forward", "backward")
PRODUCTS = ("matmul", "attention")


def kernel_columns() -> list[Column]:
    """Return the columns of shares, then those of the largest kernels."""
    columns = []
    for kind in get_args(Kind):
        columns.append(_share_column(kind, phase=None))
        for phase in _PASSES:
            columns.append(_share_column(kind, phase))
    columns.append(_top_column(phase=None))
    columns.append(
        asked_column(
            "top_other_kernel",
            "top other kernel",
            "kernel that takes the most time in a traced step, except matmuls and attention",
            partial(_top_kernel, None, PRODUCTS),
        )
    )
    for phase in _PASSES:
        columns.append(_top_column(phase))
    return columns


def _share_column(kind: Kind, phase: str | None) -> Column:
    """Return the column of the share of ``kind`` in the pass ``phase``, or in the whole step."""
    word = kind.replace("_", " ")
    name, title, whole = _names_of_pass(f"share_{kind}", f"{word} share", phase)
    meaning = f"share of {whole} that {word} kernels take"
    share = partial(_share_of_kind, kind, phase)
    return asked_column(name, title, meaning, share, "%")


def _top_column(phase: str | None) -> Column:
    """Return the column of the largest kernel of the pass ``phase``, or of the whole step."""
    name, title, whole = _names_of_pass("top_kernel", "top kernel", phase)
    meaning = f"kernel that takes the most time in {whole}"
    kinds_left_out: Sequence[str] = ()
    top = partial(_top_kernel, phase, kinds_left_out)
    return asked_column(name, title, meaning, top)


def _names_of_pass(name: str, title: str, phase: str | None) -> tuple[str, str, str]:
    """Return the name and the title of a column of the pass ``phase``, and what the column is about.

    Without a phase the column is about the whole step.
    """
    if phase is None:
        return name, title, "a traced step"
    return f"{name}_{phase}", f"{title}, {phase}", f"the {phase} pass of a traced step"


def _share_of_kind(kind: Kind, phase: str | None, entry: Entry) -> float | None:
    """Return the share of a kind of kernels in the time of a phase, or of the step; None without a trace."""
    table = first_kernels(entry)
    if table is None:
        return None
    phases = None if phase is None else [phase]
    whole_s = table.phases_s(phases)
    if not whole_s:
        return None
    return table.kind_s(kind, phases) / whole_s


def _top_kernel(phase: str | None, without: Sequence[str], entry: Entry) -> str | None:
    """Return the name of the largest kernel that is not of the kinds ``without``, and its share."""
    table = first_kernels(entry)
    if table is None:
        return None
    phases = None if phase is None else [phase]
    kernels = table.by_name(phases, kinds_left_out=without)
    whole_s = table.phases_s(phases)
    if not kernels or not whole_s:
        return None
    largest = kernels[0]
    return f"{shortened(largest.name)} {largest.total_s / whole_s:.1%}"


def first_kernels(entry: Entry) -> KernelTable | None:
    """Return the kernels of the first rank that was traced; None if no rank was, or if the file is damaged."""
    for file in kernel_files(entry.folder):
        return _read(file, file.stat().st_mtime_ns)
    return None


@lru_cache(maxsize=256)
def _read(file: Path, changed_ns: int) -> KernelTable | None:
    """Read ``file`` once for all columns, until it changes."""
    try:
        return read_kernels(file)
    except RecordError:
        return None
