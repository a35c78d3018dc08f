"""Figures of a run from its rows: what run.json holds, and what another warm-up would have given."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from lm_profiler.analysis.hardware.utilisation import per_second
from lm_profiler.analysis.steps.statistics import summarise
from lm_profiler.analysis.steps.typical import odd, shares, typical
from lm_profiler.record.quantities import HOST_TIMES, MEMORY, MFU, TIMES, TOKENS_PER_S, Quantity
from lm_profiler.record.run import RunRecord, Throughput, TimeSummary
from lm_profiler.record.steps import StepRow, largest


def mean_over_ranks(rows: Sequence[StepRow]) -> list[StepRow]:
    """One row a step: times averaged over the ranks (so that parts still add up), tokens summed, the largest peaks."""
    by_step: dict[int, list[StepRow]] = {}
    for row in rows:
        by_step.setdefault(row.step, []).append(row)
    return [_merge(by_step[step]) for step in sorted(by_step)]


def _merge(rows: Sequence[StepRow]) -> StepRow:
    if len(rows) == 1:
        return rows[0]
    tokens = [row.tokens for row in rows]
    device = [row.seconds for row in rows]
    return dataclasses.replace(
        rows[0],
        seconds=None if None in device else _means([s for s in device if s is not None]),
        host_seconds=_means([row.host_seconds for row in rows]),
        tokens=None if None in tokens else sum(t for t in tokens if t is not None),
        memory=largest(row.memory for row in rows),
    )


def _means(values: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(sum(column) / len(values) for column in zip(*values, strict=True))


def summaries(steps: Sequence[StepRow], clock: str) -> dict[str, TimeSummary]:
    """A summary of each part, the step, and forward + backward."""
    complete = [row for row in steps if clock == "host" or row.seconds is not None]
    return {part: summarise([row.time(part, clock) for row in complete]) for part in TIMES}


def rank_medians(rows: Sequence[StepRow]) -> list[float]:
    """Median step time of each rank, in seconds."""
    ranks = sorted({row.rank for row in rows})
    medians = (summarise([r.time("step", "host") for r in rows if r.rank == rank]).median for rank in ranks)
    return [median for median in medians if median is not None]


def ideal_step_s(record: RunRecord) -> float | None:
    """How long a step would take at the device's peak: what MFU is a share of. None where the MFU is unknown."""
    share = record.utilisation.mfu if record.utilisation is not None else None
    step_s = record.time["step"].median
    return share * step_s if share is not None and step_s is not None else None


def scalars(row: StepRow, ideal_s: float | None = None) -> dict[str, float]:
    """The TensorBoard scalars of one measured step, which at the device's peak would take ``ideal_s``."""
    values: list[tuple[Quantity, float | None]] = [(of, row.time(part, "host")) for part, of in HOST_TIMES.items()]
    values += zip(MEMORY.values(), row.memory, strict=True)
    if row.seconds is not None:
        step_s = row.time("step")
        values += [(of, row.time(part)) for part, of in TIMES.items()]
        values.append((TOKENS_PER_S, per_second(row.tokens, step_s)))
        values.append((MFU, None if ideal_s is None else ideal_s / step_s))
    return {str(of.tag): value * of.scale for of, value in values if value is not None}


def step_figures(steps: Sequence[StepRow], samples: int | None = None) -> dict[str, Any]:
    """What a record says of ``steps`` of ``samples`` each, by its fields."""
    times = summaries(steps, "device")
    return {
        "time": times,
        "host_time": summaries(steps, "host"),
        "shares": shares(typical(steps)),
        "odd_steps": odd(steps),
        "throughput": throughput(steps, times, samples),
    }


def throughput(steps: Sequence[StepRow], times: Mapping[str, TimeSummary], samples: int | None = None) -> Throughput:
    """Tokens and ``samples`` of a step over the median step time; unknown where they are for one of the steps."""
    counts = [row.tokens for row in steps if row.tokens is not None]
    tokens = summarise(counts).median if len(counts) == len(steps) else None
    step_s = times["step"].median or None
    return Throughput(
        tokens_per_step=None if tokens is None else round(tokens),
        tokens_per_s=per_second(tokens, step_s),
        samples_per_step=samples,
        samples_per_s=per_second(samples, step_s),
    )
