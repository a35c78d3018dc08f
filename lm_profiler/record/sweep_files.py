"""The files of a sweep: ``sweep.json``, its plan, and ``outcome.json`` in each cell's folder, how the cell ended."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from lm_profiler.record.run_record import (
    Newer,
    Part,
    Verb,
    none_if_unreadable,
    read_part,
)

PLAN_FILE, OUTCOME_FILE = "sweep.json", "outcome.json"

# How a cell ended. ``interrupted`` counts as missing: it is run again when the sweep is resumed.
CellStatus = Literal["ok", "oom", "failed", "timeout", "refused", "interrupted"]


class Cell(Part):
    """One point of a sweep, run once. ``arguments`` are those of ``python -m lm_profiler``, the verb first."""

    id: str  # the name of its folder below the sweep's, which is unique
    # the swept options, by their name without the dashes; ordered as the sweep names them
    overrides: dict[str, str]
    repeat: int  # the number of the repeat, from 0
    arguments: list[str]


class SweepPlan(Part):
    """The plan of a sweep: its cells in the order in which they run."""

    schema_version: Literal[1] = 1
    name: str
    command: str
    verb: Annotated[Verb, Newer]
    seed: int
    # the digest of all config files, one after the other; None without any
    config_sha256: str | None = None
    # the text of each config file when the sweep began, by the name of its copy in the sweep's folder ``configs``
    configs: dict[str, str] = Field(default_factory=dict)
    cells: list[Cell]


class CellOutcome(Part):
    """How the last try of a cell ended."""

    # A file per cell: jobs on many machines share no file to append to, and a removed folder counts as missing.
    cell: str
    status: Annotated[CellStatus, Newer]
    reason: str | None
    run: str | None  # its run folder, relative to the sweep's; None if it left no run
    ended: str
    duration_s: float
    exit_code: int | None  # negative for the signal that killed it; None means unknown


def read_plan(folder: Path) -> SweepPlan:
    return read_part(folder / PLAN_FILE, SweepPlan, "a sweep")


def read_outcome(folder: Path, cell_id: str) -> CellOutcome | None:
    """Return how one cell of the sweep in ``folder`` ended; None if it has no outcome that can be read."""
    return none_if_unreadable(
        read_part, folder / cell_id / OUTCOME_FILE, CellOutcome, "a cell's outcome"
    )


def read_outcomes(folder: Path) -> Mapping[str, CellOutcome]:
    """Return how the cells in ``folder`` ended, by their ids, as far as they have ended."""
    cells = (path.parent.name for path in folder.glob(f"*/{OUTCOME_FILE}"))
    return {
        cell: outcome
        for cell in cells
        if (outcome := read_outcome(folder, cell)) is not None
    }
