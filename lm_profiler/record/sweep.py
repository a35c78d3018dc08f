"""A sweep's files: ``sweep.json``, what is to run, and ``cells.jsonl``, what became of each cell."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, ValidationError

from lm_profiler.record.files import write_whole
from lm_profiler.record.run import Part, RecordError, Verb

PLAN_FILE, OUTCOMES_FILE = "sweep.json", "cells.jsonl"

CellStatus = Literal["ok", "oom", "failed", "timeout", "refused", "interrupted"]
"""How a cell ended. ``interrupted`` counts as missing: it is run again when the sweep goes on."""


class Cell(Part):
    """One point of a sweep, run once. ``arguments`` are those of ``python -m lm_profiler``, the verb first."""

    id: str
    """Unique, and the name of its folder below the sweep's."""
    overrides: dict[str, str]
    """The swept options, by their name without the dashes; ordered as the sweep names them."""
    repeat: int
    """0 for the first time."""
    arguments: list[str]


class SweepPlan(Part):
    """What a sweep is to run, in this order."""

    schema_version: Literal[1] = 1
    name: str
    command: str
    verb: Verb
    seed: int
    cells: list[Cell]


class CellOutcome(Part):
    """How one try of a cell ended. ``run`` is its run folder relative to the sweep's; None where it left no run."""

    # Not frozen to known keys alone: lines of a newer version stay readable.
    model_config = ConfigDict(extra="ignore", frozen=True)

    cell: str
    status: CellStatus
    reason: str | None
    run: str | None
    ended: str
    duration_s: float
    exit_code: int | None


def write_plan(folder: Path, plan: SweepPlan) -> None:
    """Write ``plan`` as ``folder/sweep.json``."""
    write_whole(folder / PLAN_FILE, plan.model_dump_json(indent=1) + "\n")


def read_plan(folder: Path) -> SweepPlan:
    """Read ``folder/sweep.json``.

    Raises:
        RecordError: there is none, or it is damaged or of another version.
    """
    path = folder / PLAN_FILE
    try:
        return SweepPlan.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, ValidationError) as error:
        first = error.errors()[0]["msg"] if isinstance(error, ValidationError) else "is not text"
        raise RecordError(f"{path}: not a sweep of version 1: {first}") from None


def append_outcome(folder: Path, outcome: CellOutcome) -> None:
    """Add a line to ``folder/cells.jsonl``; it is on the disk when this returns."""
    line = (outcome.model_dump_json() + "\n").encode()
    handle = os.open(folder / OUTCOMES_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.write(handle, line)
        os.fsync(handle)
    finally:
        os.close(handle)


def read_outcomes(folder: Path) -> Mapping[str, CellOutcome]:
    """The last outcome of each cell, by its id. A line that a crash cut short is passed over."""
    try:
        lines = (folder / OUTCOMES_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return {}
    outcomes = {}
    for line in lines:
        try:
            outcome = CellOutcome.model_validate(json.loads(line))
        except (ValueError, ValidationError):
            continue
        outcomes[outcome.cell] = outcome
    return outcomes
