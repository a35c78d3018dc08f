"""Figures of a run from its rows, and the batches of its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lm_profiler.analysis.hardware.roofline import per_second
from lm_profiler.analysis.steps.statistics import Series, summarise
from lm_profiler.analysis.steps.step_model import StepModel, fit, plain
from lm_profiler.record.quantities import HOST_TIMES, MEMORY, MFU, PARTS, TIMED, TIMES, TOKENS_PER_S, Quantity
from lm_profiler.record.run import LoaderFacts, OddStep, RunRecord, Throughput, TimeSummary, Verb
from lm_profiler.record.steps import StepRow, StepTable

# batches of each worker that must have been made meanwhile for anything to be said: then it is known to a quarter
_FEWEST_MADE = 2


def mean_over_ranks(rows: Sequence[StepRow], world: int | None = None) -> list[StepRow]:
    """One row a step: times averaged over the ranks (so that parts still add up), tokens summed, the largest peaks.

    Tokens are unknown of a step of which not all ``world`` ranks (those that there are) left a row.
    """
    table = StepTable.of(rows)
    ranks = max(len(np.unique(table.rank)), world or 0)
    if ranks <= 1 or not len(table):
        return list(table)
    table = StepTable.joined([table])
    steps, first, count = np.unique(table.step, return_index=True, return_counts=True)
    means = StepTable(
        step=steps,
        stage=table.stage[first],
        seconds=np.add.reduceat(table.seconds, first) / count[:, None],
        host_seconds=np.add.reduceat(table.host_seconds, first) / count[:, None],
        tokens=np.where(count == ranks, np.add.reduceat(table.tokens, first), np.nan),
        memory=np.fmax.reduceat(table.memory, first),
        rank=table.rank[first],
    )
    return list(means)


def world_of(record: RunRecord | None) -> int | None:
    """Return how many ranks the run had; None where it does not say."""
    return None if record is None or record.environment is None else record.environment.world_size


def rank_medians(rows: Sequence[StepRow]) -> list[float]:
    """Median step time of each rank, in seconds."""
    table = StepTable.of(rows)
    by_rank = np.argsort(table.rank, kind="stable")
    first = np.unique(table.rank[by_rank], return_index=True)[1]
    each = np.split(table.host_seconds[by_rank, TIMED.index("step")], first[1:]) if len(table) else []
    return [float(np.median(step_s)) for step_s in each]


def ideal_step_s(record: RunRecord) -> float | None:
    """Return how long a step would take at the device's peak: what MFU is a share of. None where the MFU is unknown."""
    share = record.utilisation.mfu if record.utilisation is not None else None
    step_s = record.time["step"].mean
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


def lag(verb: Verb, rank_step_s: Sequence[float]) -> float:
    """The slowest rank's step over the mean of all ranks' steps, at the median: what has to be waited for at the end.

    1 in a fit, whose ranks wait for each other within every step.
    """
    return max(rank_step_s) * len(rank_step_s) / sum(rank_step_s) if verb != "fit" and any(rank_step_s) else 1.0


def model_of(rows: Sequence[StepRow], as_they_are: bool = False) -> StepModel:
    """The model of the step times of ``rows``, which all have the device's; ``as_they_are``: no step is left out."""
    seconds = [row.time("step") for row in rows]
    return plain(seconds) if as_they_are else fit(seconds)


def summaries(rows: Sequence[StepRow], clock: str, model: StepModel) -> dict[str, TimeSummary]:
    """A summary of each part, the step, and forward + backward, over the stretch of ``model``, which is of ``rows``."""
    return {part: _summary(np.array([row.time(part, clock) for row in rows]), model) for part in TIMES}


def _summary(x: Series, model: StepModel) -> TimeSummary:
    return summarise(x[model.first : model.end], model.interval_of(x))


def step_figures(
    rows: Sequence[StepRow], model: StepModel, samples: float | None = None, lag: float = 1.0
) -> dict[str, Any]:
    """Return what a record says of measured ``rows``, by its fields; ``samples`` are of the mean step, of all ranks."""
    times, here = summaries(rows, "device", model), rows[model.first : model.end]
    return {
        "time": times,
        "host_time": summaries(rows, "host", model),
        "shares": shares(times),
        "odd_steps": odd_steps(rows, model),
        "throughput": throughput(here, times, samples, lag),
    }


def shares(times: Mapping[str, TimeSummary]) -> dict[str, float]:
    """Return the share of each part in the mean step, which add up to 1; nothing where the step took no time."""
    whole = times["step"].mean
    return {part: (times[part].mean or 0.0) / whole for part in TIMES} if whole else {}


def odd_steps(rows: Sequence[StepRow], model: StepModel) -> list[OddStep]:
    """Steps far from what the others would let expect, the farthest first, each with the part that differs most."""
    at_odd = np.flatnonzero(model.odd)
    expected = model.expected if at_odd.size else model.seconds
    ratios = model.seconds[at_odd] / expected[at_odd]
    usual = {part: model.parts_of(np.array([row.time(part) for row in rows])).level for part in PARTS if at_odd.size}
    order = np.argsort(-np.abs(ratios - 1.0), kind="stable")
    return [_odd(rows[int(at_odd[at])], float(ratios[at]), usual) for at in order]


def _odd(row: StepRow, ratio: float, usual: Mapping[str, float]) -> OddStep:
    excess_s = {part: row.time(part) - usual[part] for part in PARTS}
    part = (max if ratio > 1.0 else min)(excess_s, key=excess_s.__getitem__)
    return OddStep(step=row.step, step_s=row.time("step"), ratio=ratio, part=part, excess_s=excess_s[part])


def throughput(
    rows: Sequence[StepRow], times: Mapping[str, TimeSummary], samples: float | None = None, lag: float = 1.0
) -> Throughput:
    """Tokens and ``samples`` of a step over the mean step: time is a sum. Unknown where they are for one of ``rows``.

    Where ranks do not wait for each other, the step of the slowest counts, ``lag`` times the mean: all have as many.
    """
    counts = [row.tokens for row in rows if row.tokens is not None]
    tokens = sum(counts) / len(counts) if counts and len(counts) == len(rows) else None
    mean_s = times["step"].mean
    step_s = mean_s * lag if mean_s else None
    return Throughput(
        tokens_per_step=None if tokens is None else round(tokens),
        tokens_per_s=per_second(tokens, step_s),
        samples_per_step=None if samples is None else round(samples),
        samples_per_s=per_second(samples, step_s),
    )


class BatchCount(NamedTuple):
    """The batches of each step of a rank from ``step`` on, and the samples in them; 0 and None are unknown."""

    step: int
    batches: int
    samples: int | None


class MeanCounts(NamedTuple):
    """Batches and samples of a mean step, over all ranks; None is unknown."""

    batches: float | None = None
    samples: float | None = None


def mean_counts(ranks: Sequence[Sequence[BatchCount]], steps: Sequence[int]) -> MeanCounts:
    """Return the mean over ``steps`` of the counts of all ``ranks``. Unknown where it is for one step of one rank."""
    if not (ranks and all(ranks) and len(steps)):
        return MeanCounts()
    batches, samples = 0.0, 0.0
    for counts in ranks:
        own = [counts[at] for at in np.searchsorted([count.step for count in counts], steps, "right") - 1]
        batches += float(np.mean([count.batches or np.nan for count in own]))
        samples += float(np.mean([np.nan if count.samples is None else count.samples for count in own]))
    return MeanCounts(*(None if np.isnan(mean) else mean for mean in (batches, samples)))


def changed_batches_note(counts: Sequence[BatchCount], last: int, mean: float | None) -> list[str]:
    """Return the note on a rank whose steps up to ``last`` vary in batches; ``mean`` is of the measured ones."""
    known = [count for count in counts if count.batches and count.step <= last]
    numbers = {count.batches for count in known}
    if len(numbers) < 2 or mean is None:
        return []
    changed = next(count.step for count in known if count.batches != known[0].batches)
    steps = f"a step takes {min(numbers)} to {max(numbers)} batches, from step {changed} on other than before"
    return [f"{steps}: throughput and FLOPs are of the mean of the measured steps, {mean:.3g} batches"]


def lasting_step_s(mean_s: float, steps: int, batches: float, loader: LoaderFacts | None) -> float | None:
    """Seconds of a step that can go on: as long as the workers take to make its batches.

    In the seconds of ``steps`` that took ``batches`` each, workers made all but those that were ``used_up``, and where
    the queue shrinks they never rest: so that is their rate, and the loop's once nothing is left. It is ``mean_s``
    where nothing was used up, or where nobody counts; None where too few were made meanwhile to tell a rate.
    """
    used_up = loader.used_up if loader is not None else None
    taken = steps * batches
    if loader is None or not used_up or taken <= 0:
        return mean_s
    made = taken - used_up + _begun(loader, loader.ready_after) - _begun(loader, loader.ready_before)
    return mean_s * taken / made if made >= _FEWEST_MADE * max(loader.workers or 0, 1) else None


def _begun(loader: LoaderFacts, ready: int | None) -> float:
    """Return half the number of batches that are being made: none where the queue is full."""
    free = max((loader.ahead or 0) - (ready or 0), 0)
    return min(loader.workers or 0, free) / 2.0
