"""A sweep's files: ``sweep.json``, what is to run, and ``outcome.json`` in a cell's folder, what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from lm_profiler.record.run import Newer, Part, RecordError, Verb, read_as

PLAN_FILE, OUTCOME_FILE = "sweep.json", "outcome.json"

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
    verb: Annotated[Verb, Newer]
    seed: int
    config_sha256: str | None = None
    """Of the content of all config files, one after the other; None without any."""
    configs: dict[str, str] = Field(default_factory=dict)
    """The text of each config file when the sweep began, by the name of its copy in the sweep's folder ``configs``."""
    cells: list[Cell]


class CellOutcome(Part):
    """How the last try of a cell ended. ``run`` is its run folder relative to the sweep's; None where it left no run.

    A file for each cell: jobs on many machines share no file to append to, and a cell whose folder somebody removes
    is missing again.

    ``exit_code`` is negative for the signal that killed it; None where nobody knows.
    """

    cell: str
    status: Annotated[CellStatus, Newer]
    reason: str | None
    run: str | None
    ended: str
    duration_s: float
    exit_code: int | None


def read_plan(folder: Path) -> SweepPlan:
    """Read ``folder/sweep.json``.

    Raises:
        RecordError: there is none, or it is damaged or of another version.
    """
    return read_as(folder / PLAN_FILE, SweepPlan, "a sweep")


def read_outcome(folder: Path, cell_id: str) -> CellOutcome | None:
    """What became of one cell of the sweep in ``folder``; None where nothing is known, or nothing that can be read."""
    try:
        return read_as(folder / cell_id / OUTCOME_FILE, CellOutcome, "a cell's outcome")
    except RecordError:
        return None


def read_outcomes(folder: Path) -> Mapping[str, CellOutcome]:
    """The outcomes of all cells that have one, by their id."""
    cells = (path.parent.name for path in folder.glob(f"*/{OUTCOME_FILE}"))
    return {cell: outcome for cell in cells if (outcome := read_outcome(folder, cell)) is not None}
