"""Runs with figures that can be checked by hand: forward 3 ms, backward 5 ms, other 2 ms."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from made_environment import made_environment, made_step

from lm_profiler.analysis.steps.summaries import model_of, summaries, throughput
from lm_profiler.record.entry import Entry
from lm_profiler.record.run_record import (
    Failure,
    Flops,
    MemoryFacts,
    MemoryReading,
    RunRecord,
    Steadiness,
    Utilisation,
    Verdict,
)
from lm_profiler.record.steps import StepRow, write_steps

FORWARD_S = 3e-3
WARMUP = 5


def made_rows(forward_s: float = FORWARD_S, steps: int = 25) -> list[StepRow]:
    """The first step takes a second; the others the sum of the parts, with ±1 % on the forward pass."""
    rows = []
    for step in range(1, steps + 1):
        wobble = (0.0, 0.01, -0.01, 0.0)[step % 4]  # of 20 steps the mean is the median
        parts = {"forward": forward_s * (1 + wobble), "backward": 5e-3, "other": 2e-3 if step > 1 else 1.0}
        stage = "warmup" if step <= WARMUP else "measure"
        rows.append(made_step(step, parts, stage, host=0.5, tokens=512, memory=(2**31, 2**31, 2**30)))
    return rows


def made_record(
    overrides: Mapping[str, str] | None = None,
    status: Any = "ok",
    name: str = "run",
    forward_s: float = FORWARD_S,
    **options: Any,
) -> RunRecord:
    """Of ``made_rows``; one that did not end well died before its first step."""
    config: dict[str, dict[str, Any]] = {"model": {"size": "small"}, "data": {"batch_size": 4, "context_length": 128}}
    for path, value in (overrides or {}).items():
        section, _, option = path.partition(".")
        config.setdefault(section, {})[option] = _typed(value)
    facts = {
        "name": name,
        "status": status,
        "failure": None,
        "verb": "fit",
        "started": "2026-01-02T03:04:05+00:00",
        "duration_s": 10.0,
        "command": "python -m lm_profiler fit --config a.yaml",
        "overrides": dict(overrides or {}),
        "config": config,
    }
    if status != "ok":
        failure = Failure(phase="setup", step=None, type="OutOfMemoryError", message="no memory left")
        return RunRecord.model_validate({**facts, "failure": failure, **options})
    return RunRecord.model_validate({**facts, **_measured(made_rows(forward_s)), **options})


def _measured(rows: list[StepRow]) -> dict[str, Any]:
    steps = [row for row in rows if row.stage == "measure"]
    model = model_of(steps, keeps_all_steps=True)
    time, host_time = (summaries(steps, clock, model) for clock in ("device", "host"))
    flops = Flops(forward=1, backward=2, recomputation=0)
    use = Utilisation(
        flops=flops,
        dtype="bfloat16",
        peak_flops_per_s=1e12,
        peak_source="a test",
        mfu=0.4,
        hfu=0.4,
        ceiling_flops_per_s=None,
        of_ceiling=None,
    )
    return {
        "environment": made_environment(device_type="cuda", device_name="a GPU"),
        "steps": {"warmup": WARMUP, "measure": len(steps)},
        "time": time,
        "host_time": host_time,
        "memory": MemoryFacts(measured=MemoryReading(allocated_peak=2**31, resident_peak=2**30), parts={}),
        "throughput": throughput(steps, time["step"].mean, 4),
        "steadiness": Steadiness(
            word="steady", cut=0, drift=0.0, lag1=0.0, bias_of_mean=None, evidence="", recompilations=0
        ),
        "utilisation": use,
        "verdict": Verdict(bound_by="compute", share=0.8, evidence="it computes", advice="Try torch.compile."),
    }


def made_entry(folder: Path, overrides: Mapping[str, str] | None = None, **options: Any) -> Entry:
    """A run in ``folder``, with its run.json, and its steps.csv where it has steps."""
    record = made_record(overrides, **options)
    folder.mkdir(parents=True, exist_ok=True)
    record.write(folder / "run.json")
    if record.status == "ok":
        write_steps(folder / "steps.csv", made_rows(options.get("forward_s", FORWARD_S)))
    return Entry(folder, record)


def _typed(value: str) -> Any:
    return int(value) if value.isdecimal() else {"true": True, "false": False}.get(value, value)
