"""Records of steps made by hand, through the function that makes every record."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from made_environment import made_environment, made_step

from lm_profiler.analysis.conclude import conclude
from lm_profiler.analysis.evidence import Evidence
from lm_profiler.record.run_record import Flops, RunRecord, Settings
from lm_profiler.report.run.run_page import end_tables
from lm_profiler.report.tables.formats import render

LEVEL = [10.0, 10.2, 9.9, 10.1, 10.0, 9.8, 10.0, 10.1, 9.9, 10.0, 10.2, 9.8, 10.0, 10.1, 9.9, 10.0]

FLOPS = Flops(forward=100, backward=200, recomputation=60)

HALF_OF_THE_CEILING: dict[str, Any] = {"flops": FLOPS, "ceilings": {"float32": 72_000.0}}
"""Of steps of 10 ms."""

CPU = made_environment(threads=1, device_bytes=2**34, flags={"float32_matmul_precision": "highest"})


def evidence_of(steps_ms: Sequence[float | Mapping[str, float]], **found: Any) -> Evidence:
    """Measured steps on a CPU, each given by its milliseconds, all of them forward, or by those of its parts."""
    rows = []
    for number, step in enumerate(steps_ms, 1):
        parts = step if isinstance(step, Mapping) else {"forward": step}
        rows.append(made_step(number, {part: ms * 1e-3 for part, ms in parts.items()}))
    known = {"environment": CPU, "settings": Settings(precision="32-true", cores=2), "between_steps_s": 0.0}
    return Evidence(rows=rows, steps_planned={"measure": len(rows)}, **{**known, **found})


def record_of(steps_ms: Sequence[float | Mapping[str, float]], **found: Any) -> RunRecord:
    """The record of ``evidence_of`` the same."""
    return conclude(evidence_of(steps_ms, **found))


def printed_lines(record: RunRecord, verbose: bool = False) -> dict[str, list[str]]:
    """Return what is printed at the run's end, by the line's first word."""
    values: dict[str, list[str]] = {}
    for line in render(end_tables(record, Path("/logs"), verbose), "terminal").splitlines():
        first, _, rest = line.partition(" ")
        values.setdefault(first, []).append(rest)
    return values
