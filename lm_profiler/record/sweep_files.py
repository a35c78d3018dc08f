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
    """One run of a sweep: a combination of options, or a repeat of it."""

    id: str  # the name of its folder within that of the sweep
    # the values of the swept options, by the name of the option without dashes, in the order of the sweep
    overrides: dict[str, str]
    repeat: int  # the number of the repeat, from 0
    arguments: list[str]  # the arguments of ``python -m lm_profiler``, the verb first


class SweepPlan(Part):
    """The plan of a sweep: its cells in the order in which they run."""

    schema_version: Literal[1] = 1
    name: str
    command: str
    verb: Annotated[Verb, Newer]
    seed: int
    # the digest of all config files, concatenated; None if there are none
    config_sha256: str | None = None
    # the text of each config file at the start of the sweep, by the name of its copy in the folder ``configs``
    configs: dict[str, str] = Field(default_factory=dict)
    cells: list[Cell]


class CellOutcome(Part):
    """How the last attempt of a cell ended.

    Each cell has a file of its own: jobs on several machines need not append to a common file, and a cell whose folder
    was removed counts as missing.
    """

    cell: str
    status: Annotated[CellStatus, Newer]
    reason: str | None
    # the folder of its run, relative to that of the sweep; None if there is no run
    run: str | None
    ended: str
    duration_s: float
    exit_code: int | None  # negative for the signal that killed it; None means unknown


def read_plan(folder: Path) -> SweepPlan:
    return read_part(folder / PLAN_FILE, SweepPlan, "a sweep")


def read_outcome(folder: Path, cell_id: str) -> CellOutcome | None:
    """Return how a cell of the sweep in ``folder`` ended; None if its outcome is missing or unreadable."""
    return none_if_unreadable(
        read_part, folder / cell_id / OUTCOME_FILE, CellOutcome, "a cell's outcome"
    )


def read_outcomes(folder: Path) -> Mapping[str, CellOutcome]:
    """Return how the cells of the sweep in ``folder`` ended, by their ids, without those that have not ended."""
    outcomes: dict[str, CellOutcome] = {}
    for path in folder.glob(f"*/{OUTCOME_FILE}"):
        cell_id = path.parent.name
        outcome = read_outcome(folder, cell_id)
        if outcome is not None:
            outcomes[cell_id] = outcome
    return outcomes
