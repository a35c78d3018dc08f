"""Runs with a few steps given by hand, for tests of tables."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compared import ENVIRONMENT, MODEL, record

from lm_profiler.analysis.steps.summaries import model_of, summaries
from lm_profiler.models.config import PRESETS
from lm_profiler.record.entry import Entry
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.run_record import Failure
from lm_profiler.record.steps import StepRow, StepTable, write_steps
from lm_profiler.record.sweep_files import OUTCOME_FILE, PLAN_FILE, Cell, CellOutcome, SweepPlan

Steps = Sequence[tuple[float, float]]
"""Seconds of forward and backward, a pair a step."""


def step_rows(measured: Steps, warmup: Steps = ()) -> list[StepRow]:
    """Rows of ``warmup`` and then of ``measured`` steps, which consist of their two phases alone."""
    found = []
    for number, (forward_s, backward_s) in enumerate([*warmup, *measured], 1):
        parts = dict.fromkeys(PARTS, 0.0) | {"forward": forward_s, "backward": backward_s}
        seconds = (*parts.values(), forward_s + backward_s)
        found.append(StepRow(number, "warmup" if number <= len(warmup) else "measure", seconds, seconds))
    return found


def config(**options: Any) -> dict[str, Any]:
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


def facts(measured: Steps = (), warmup: Steps = (), device: tuple[str, str] = ("cuda", "H100"), **options: Any) -> Any:
    """What a record says of such a run; of a run that died where ``failed`` says (status, message)."""
    status, message = options.pop("failed", ("ok", None))
    rows = step_rows(measured, warmup)[len(warmup) :]
    size = PRESETS[options.get("size", "small")]
    counts = {"parameters": size.num_parameters(), "parameters_without_embedding": size.num_parameters(False)}
    known = {
        "environment": ENVIRONMENT.model_copy(update={"device_type": device[0], "device_name": device[1]}),
        "model": MODEL.model_copy(update={**counts, "precision": options.get("precision", "32-true")}),
        "steps": {"warmup": len(warmup), "measure": len(measured)},
        "time": summaries(rows, "device", model_of(rows, keeps_all_steps=True)) if rows else {},
        "host_time": summaries(rows, "host", model_of(rows, keeps_all_steps=True)) if rows else {},
        "memory": None,
        "throughput": None,
    }
    failure = None if message is None else Failure(phase="backward", step=1, type="Error", message=message)
    return {
        **known,
        "name": options.pop("name", "run"),
        "status": status,
        "failure": failure,
        "config": config(**options),
    }


def run(folder: str, measured: Steps = (), warmup: Steps = (), **options: Any) -> Entry:
    """A run that is on no disk; see ``facts``."""
    found = Entry(Path(folder), record(**facts(measured, warmup, **options)))
    found.__dict__["rows"] = StepTable.from_rows(
        step_rows(measured, warmup)
    )  # where the cached property would keep what it read
    return found


def write(folder: Path, measured: Steps = (), warmup: Steps = (), **options: Any) -> Path:
    """The same on the disk."""
    folder.mkdir(parents=True)
    record(**facts(measured, warmup, **options)).write(folder / "run.json")
    write_steps(folder / "steps.csv", step_rows(measured, warmup))
    return folder


def write_sweep(folder: Path, cells: Sequence[tuple[dict[str, str], int, str, Path | None]]) -> Path:
    """A sweep of ``cells``: overrides, repeat, how it ended (``missing``: it was not tried), and its run."""
    planned = [Cell(id=f"cell{at}", overrides=c[0], repeat=c[1], arguments=["fit"]) for at, c in enumerate(cells)]
    folder.mkdir(parents=True, exist_ok=True)
    SweepPlan(name="sweep", command="", verb="fit", seed=0, cells=planned).write(folder / PLAN_FILE)
    for cell, (_, _, status, at) in zip(planned, cells, strict=True):
        if status == "missing":
            continue
        (folder / cell.id).mkdir(exist_ok=True)
        where = None if at is None else str(at.relative_to(folder))
        left = {"reason": None if status == "ok" else f"it was {status}", "ended": "", "duration_s": 1.0}
        outcome = CellOutcome(cell=cell.id, status=status, run=where, exit_code=0, **left)
        outcome.write(folder / cell.id / OUTCOME_FILE)
    return folder
