"""Runs with a few steps given by hand, for tests of tables."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import compared
from by_hand import made_outcome
from made_environment import made_step

from lm_profiler.analysis.steps.summaries import model_of, summaries
from lm_profiler.models.config import PRESETS
from lm_profiler.record.entry import Entry
from lm_profiler.record.run_record import Failure
from lm_profiler.record.steps import StepRow
from lm_profiler.record.sweep_files import OUTCOME_FILE, PLAN_FILE, Cell, SweepPlan

Steps = Sequence[tuple[float, float]]
"""Seconds of forward and backward, a pair a step."""


def step_rows(measured: Steps, warmup: Steps = ()) -> list[StepRow]:
    """Rows of ``warmup`` and then of ``measured`` steps, which consist of their two phases alone."""
    found = []
    for number, (forward_s, backward_s) in enumerate([*warmup, *measured], 1):
        stage = "warmup" if number <= len(warmup) else "measure"
        found.append(made_step(number, {"forward": forward_s, "backward": backward_s}, stage))
    return found


def config_with(**options: Any) -> dict[str, Any]:
    """A resolved config; ``options`` by the last part of their names."""
    model = {"size": "small", "compile": False, "attention": "sdpa", "optimizer": "adamw"}
    data = {"batch_size": 4, "context_length": 512}
    return {
        "trainer": {"precision": options.pop("precision", "32-true")},
        "model": {"class_path": "lm_profiler.training.LanguageModel", "init_args": {**model, **_of(model, options)}},
        "data": {"class_path": "lm_profiler.training.FakeTokens", "init_args": {**data, **_of(data, options)}},
    }


def _of(section: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    own = {*section, "d_model", "d_ff", "num_layers", "num_heads"} if "size" in section else set(section)
    return {name: value for name, value in options.items() if name in own}


def facts_of_run(
    measured: Steps = (), warmup: Steps = (), device: tuple[str, str] = ("cuda", "H100"), **options: Any
) -> Any:
    """Return the record of such a run; of one that died if ``failed`` gives status and message."""
    status, message = options.pop("failed", ("ok", None))
    rows = step_rows(measured, warmup)[len(warmup) :]
    size = PRESETS[options.get("size", "small")]
    counts = {"parameters": size.num_parameters(), "parameters_without_embedding": size.num_parameters(False)}
    known = {
        "environment": compared.ENVIRONMENT.model_copy(update={"device_type": device[0], "device_name": device[1]}),
        "model": compared.MODEL.model_copy(update={**counts, "precision": options.get("precision", "32-true")}),
        "time": summaries(rows, "device", model_of(rows, keeps_all_steps=True)) if rows else {},
        "host_time": summaries(rows, "host", model_of(rows, keeps_all_steps=True)) if rows else {},
        "memory": None,
        "throughput": None,
    }
    failure = None if message is None else Failure(phase="backward", step=1, type="Error", message=message)
    name = options.pop("name", "run")
    return {**known, "name": name, "status": status, "failure": failure, "config": config_with(**options)}


def made_run_of(folder: str, measured: Steps = (), warmup: Steps = (), **options: Any) -> Entry:
    """A run that is on no disk; see ``facts_of_run``."""
    return compared.entry_of_rows(folder, step_rows(measured, warmup), **facts_of_run(measured, warmup, **options))


def write_run_of(folder: Path, measured: Steps = (), warmup: Steps = (), **options: Any) -> Path:
    """The same on the disk."""
    return compared.write_run(folder, step_rows(measured, warmup), **facts_of_run(measured, warmup, **options))


def write_sweep(
    folder: Path, cells: Sequence[tuple[dict[str, str], int, str, Path | None]], names: Sequence[str] = ()
) -> Path:
    """A sweep of ``cells``: overrides, repeat, how it ended (``missing``: it was not tried), and its run."""
    names = names or [f"cell{at}" for at in range(len(cells))]
    planned = [
        Cell(id=name, overrides=planned_cell[0], repeat=planned_cell[1], arguments=["fit"])
        for name, planned_cell in zip(names, cells, strict=True)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    SweepPlan(name="sweep", command="", verb="fit", seed=0, cells=planned).write(folder / PLAN_FILE)
    for cell, (_, _, status, at) in zip(planned, cells, strict=True):
        if status == "missing":
            continue
        (folder / cell.id).mkdir(exist_ok=True)
        where = None if at is None else str(at.relative_to(folder))
        reason = None if status == "ok" else f"it was {status}"
        made_outcome(cell.id, status, 1.0, reason, run=where, exit_code=0).write(folder / cell.id / OUTCOME_FILE)
    return folder
