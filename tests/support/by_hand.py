"""A cell and the records that its run may leave, made by hand."""

from pathlib import Path
from typing import Any

from made_environment import made_run

from lm_profiler.record.run_record import Failure, Status
from lm_profiler.record.sweep_files import Cell, CellOutcome, SweepPlan

CELL = Cell(id="x=1", overrides={"a.x": "1"}, repeat=0, arguments=["fit", "--a.x=1"])


def made_sweep_plan(*names: str, **changes: Any) -> SweepPlan:
    cells = [Cell(id=name, overrides={"a.x": name}, repeat=0, arguments=["fit", f"--a.x={name}"]) for name in names]
    return SweepPlan(**{"name": "s", "command": "", "verb": "fit", "seed": 0, "cells": cells, **changes})


def made_outcome(cell: str, status: Any, duration_s: float, reason: str | None = None, **changes: Any) -> CellOutcome:
    known = {"cell": cell, "status": status, "duration_s": duration_s, "reason": reason}
    return CellOutcome(**{"run": None, "ended": "", "exit_code": None, **known, **changes})


def write_cell_record(folder: Path, status: Status, cell: str = CELL.id, failure: Failure | None = None) -> None:
    """What a run of the cell in the sweep's ``folder`` wrote."""
    run = folder / cell / "version_0"
    run.mkdir(parents=True)
    if failure is None and status != "ok":
        failure = Failure(phase="forward", step=3, type="SomeError", message="of mine")
    made_run(name=cell, status=status, failure=failure).write(run / "run.json")
