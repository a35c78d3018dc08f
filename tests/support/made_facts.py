"""Records of runs whose step takes 100 ms, with facts that a finding is drawn from."""

from typing import Any

import numpy as np
from made_environment import made_environment, made_run, made_step

from lm_profiler.analysis.steps.step_model import steadiness
from lm_profiler.analysis.steps.summaries import model_of, step_figures
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.run_record import (
    Contention,
    OtherByOwner,
    OtherThreads,
    OwnedTime,
    PythonTime,
    RunRecord,
    Settings,
    Term,
    ThreadUse,
    Waterfall,
)
from lm_profiler.record.steps import StepRow

USUAL_MS = {
    "data": 2.0,
    "transfer": 0.5,
    "forward": 50.0,
    "zero_grad": 0.5,
    "backward": 35.0,
    "optimizer": 10.0,
    "other": 2.0,
}
STEPS = 40


def rows_with(
    ms: dict[str, float] | None = None, steps: int = STEPS, noise: float = 0.01, seed: int = 0
) -> list[StepRow]:
    """Steps whose parts take ``ms`` on average; the rest as usual."""
    rng = np.random.default_rng(seed)
    parts = {**USUAL_MS, **(ms or {})}
    rows = []
    for step in range(1, steps + 1):
        wobble = {part: float(np.exp(noise * rng.standard_normal())) for part in PARTS}
        rows.append(made_step(step, {part: ms * 1e-3 * wobble[part] for part, ms in parts.items()}))
    return rows


def record_with(
    ms: dict[str, float] | None = None, noise: float = 0.01, device: str = "cpu", **facts: Any
) -> RunRecord:
    """A record of ``rows_with`` such steps, and of ``facts``."""
    rows = rows_with(ms, noise=noise)
    model = model_of(rows)
    environment = made_environment(device_type=device, device_name=device)
    known = {
        "duration_s": 10.0, "environment": environment, "steps": {"measure": len(rows)},
        "steadiness": steadiness(model), "settings": Settings(),
    }  # fmt: skip
    return made_run(**{**known, **step_figures(rows, model), **facts})


def owners_of_ms(**seconds: float) -> OtherByOwner:
    """``Class__hook``, and how many milliseconds of a step it takes."""
    actions = [
        OwnedTime(owner=name.split("__")[0], action=name.split("__")[1], seconds=ms * 1e-3, calls=1.0, in_steps=3)
        for name, ms in seconds.items()
    ]
    return OtherByOwner(steps=3, seconds=sum(seconds.values()) * 1e-3, actions=actions)


def python_line(
    ms: float, what: str = "python", phase: str = "forward", calls: int = 1, function: str = "Net.forward"
) -> PythonTime:
    return PythonTime(
        phase=phase, file="/home/me/net.py", line=12, function=function, what=what, seconds=ms * 1e-3, calls=calls
    )


def thread_use_of(
    asleep_ms: float = 0.0, wall_ms: float = 50.0, no_cpu_ms: float = 0.0, phase: str = "forward"
) -> dict[str, ThreadUse]:
    ran_s = (wall_ms - asleep_ms - no_cpu_ms) * 1e-3
    return {phase: ThreadUse(wall_s=wall_ms * 1e-3, ran_s=ran_s, no_cpu_s=no_cpu_ms * 1e-3)}


def thread_that_ran(ms: float, lock_wait_ms: float = 5.0) -> OtherThreads:
    return OtherThreads(
        ran_s=ms * 1e-3, lock_wait_s=lock_wait_ms * 1e-3, busiest="Prefetcher", file="/home/me/net.py", line=31,
        function="wait_for_space",
    )  # fmt: skip


def waterfall_of_ms(*terms: Term, **terms_ms: float) -> Waterfall:
    """The waterfall of a step of 100 ms, of ``terms`` and of others that take so many milliseconds."""
    named_terms = [Term.model_validate({"name": name, "seconds": ms * 1e-3}) for name, ms in terms_ms.items()]
    return Waterfall(
        source="operators", step_s=0.1, ci_low=None, ci_high=None, peak_flops_per_s=1e11, peak_source="a test",
        bandwidth_bytes_per_s=1e10, bandwidth_source="a test", clock_share=None, terms=[*terms, *named_terms],
    )  # fmt: skip


def busy_machine(share: float = 0.6) -> Contention:
    return Contention(
        wall_s=4.0, cpus=2, had_s=4.0, waited_s=3.0, others_s=4.0, stolen_s=0.0, throttled_s=0.0, pressure=0.5,
        involuntary_switches=9, not_had=share,
    )  # fmt: skip
