"""Figures of a run from its rows, the batches of its steps, and what another warm-up would have given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from lm_profiler.analysis.hardware.roofline import per_second
from lm_profiler.analysis.steps.statistics import Series, summarise
from lm_profiler.analysis.steps.step_model import StepModel, fit, plain
from lm_profiler.record.entry import Cut, Entry
from lm_profiler.record.quantities import HOST_TIMES, MEMORY, MFU, PARTS, TIMED, TIMES, TOKENS_PER_S, Quantity, counted
from lm_profiler.record.run_record import (
    LoaderFacts,
    OddStep,
    RecordError,
    RunRecord,
    Throughput,
    TimeSummary,
    Utilisation,
    if_readable,
)
from lm_profiler.record.steps import StepRow, StepTable

WARMUPS = (0, 1, 2, 5)  # the settings that reports in this field compare

# batches of each worker that must have been made meanwhile for anything to be said: with two workers it is then known
# to about a half, and to a quarter with twice as many
_FEWEST_MADE = 1


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
    step_s = table.host_seconds[:, TIMED.index("step")]
    return [float(np.median(step_s[table.rank == rank])) for rank in np.unique(table.rank)]


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


def model_of(rows: Sequence[StepRow], as_they_are: bool = False) -> StepModel:
    """The model of the step times of ``rows``, which all have the device's; ``as_they_are``: no step is left out."""
    seconds = [row.time("step") for row in rows]
    return plain(seconds) if as_they_are else fit(seconds)


def summaries(rows: Sequence[StepRow], clock: str, model: StepModel) -> dict[str, TimeSummary]:
    """A summary of each part, the step, and forward + backward, over the stretch of ``model``, which is of ``rows``."""
    series = {part: np.array([row.time(part, clock) for row in rows]) for part in TIMES}
    return {part: summarise(x[model.first : model.end], model.interval_of(x)) for part, x in series.items()}


def step_figures(rows: Sequence[StepRow], model: StepModel, samples: float | None = None) -> dict[str, Any]:
    """Return what a record says of measured ``rows``, by its fields; ``samples`` are of the mean step, of all ranks."""
    times = summaries(rows, "device", model)
    step_s = times["step"].mean
    return {
        "time": times,
        "host_time": summaries(rows, "host", model),
        "shares": {part: (times[part].mean or 0.0) / step_s for part in TIMES} if step_s else {},
        "odd_steps": odd_steps(rows, model),
        "throughput": throughput(rows[model.first : model.end], step_s, samples, model.weights),
    }


def odd_steps(rows: Sequence[StepRow], model: StepModel) -> list[OddStep]:
    """Return steps far from what the others predict, the farthest first, each with the part that differs most."""
    odd_indices = np.flatnonzero(model.odd).tolist()
    if not odd_indices:
        return []
    expected_s = model.expected
    parts_s = {part: np.array([row.time(part) for row in rows]) for part in PARTS}
    odd = []
    for index in odd_indices:
        ratio = float(model.seconds[index] / expected_s[index])
        excess_s = {part: float(part_s[index]) - model.usual(index, part_s) for part, part_s in parts_s.items()}
        # A part that differs the other way is no explanation.
        part = max(excess_s, key=excess_s.__getitem__) if ratio > 1.0 else min(excess_s, key=excess_s.__getitem__)
        row = rows[index]
        odd.append(OddStep(step=row.step, step_s=row.time("step"), ratio=ratio, part=part, excess_s=excess_s[part]))
    return sorted(odd, key=lambda step: -abs(step.ratio - 1.0))


def throughput(
    rows: Sequence[StepRow],
    step_s: float | None,
    samples: float | None = None,
    weights: Sequence[float] | Series | None = None,
) -> Throughput:
    """Tokens and ``samples`` of a step over the mean step: time is a sum. Unknown if one of ``rows`` has none.

    The rows count by their ``weights``, as they do in the mean step; all the same if there are none.
    """
    counts = [row.tokens for row in rows if row.tokens is not None]
    is_known = bool(counts) and len(counts) == len(rows)
    tokens = float(np.average(counts, weights=weights)) if is_known else None
    return Throughput(
        tokens_per_step=None if tokens is None else round(tokens),
        tokens_per_s=per_second(tokens, step_s),
        samples_per_step=None if samples is None else round(samples),
        samples_per_s=per_second(samples, step_s),
    )


class BatchCount(NamedTuple):
    """The batches of each step of a rank from ``step`` on, and what is in them; 0 and None are unknown."""

    step: int
    batches: int
    samples: int | None
    elements: int | None = None  # of the largest tensor of each batch, in sum


class MeanCounts(NamedTuple):
    """Batches, samples and elements of a mean step, over all ranks; None is unknown."""

    batches: float | None = None
    samples: float | None = None
    elements: float | None = None


def mean_counts(ranks: Sequence[Sequence[BatchCount]], steps: Sequence[int]) -> MeanCounts:
    """Return the mean over ``steps`` of the counts of all ``ranks``. Unknown where it is for one step of one rank."""
    if not (ranks and all(ranks) and len(steps)):
        return MeanCounts()
    means = np.zeros(3)
    for counts in ranks:
        positions = np.searchsorted([count.step for count in counts], steps, "right") - 1
        by_step = [counts[position] for position in positions]
        known = [[count.batches or None, count.samples, count.elements] for count in by_step]
        means += np.array(known, dtype=float).mean(axis=0)  # None becomes NaN
    batches, samples, elements = (None if np.isnan(mean) else float(mean) for mean in means)
    return MeanCounts(batches, samples, elements)


def short_steps(ranks: Sequence[Sequence[BatchCount]], steps: Sequence[int]) -> dict[int, int]:
    """Return those of ``steps`` in which the first of ``ranks`` had fewer samples than in most, and how many."""
    if not ranks or not ranks[0] or not steps:
        return {}
    counts = ranks[0]
    places = np.searchsorted([count.step for count in counts], steps, "right") - 1
    samples = {step: counts[place].samples for step, place in zip(steps, places, strict=True)}
    numbers = [count for count in samples.values() if count is not None]
    if len(numbers) < len(samples):
        return {}
    usual = float(np.median(numbers))
    return {step: count for step, count in samples.items() if count is not None and count < usual}


def slower_throughput(rate: Throughput, share: float) -> Throughput:
    """Return ``rate`` where the time per step makes only ``share`` of it possible."""
    per_s = {
        name: value * share for name in ("tokens_per_s", "samples_per_s") if (value := getattr(rate, name)) is not None
    }
    return rate.model_copy(update=per_s)


def changed_batches_note(counts: Sequence[BatchCount], last: int, mean: float | None) -> list[str]:
    """Return the note on a rank whose steps up to ``last`` vary in batches; figures are of ``mean`` of them a step."""
    known = [count for count in counts if count.batches and count.step <= last]
    numbers = {count.batches for count in known}
    if len(numbers) < 2 or mean is None:
        return []
    changed = next(count.step for count in known if count.batches != known[0].batches)
    steps = f"a step takes {min(numbers)} to {max(numbers)} batches, from step {changed} on other than before"
    return [f"{steps}: throughput and FLOPs are of {mean:.3g} batches a step"]


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


@dataclass(frozen=True)
class Steps:
    """A run's steps, each a mean over the ranks, and the summary of their parts on the device's clock."""

    rows: Sequence[StepRow]
    times: Mapping[str, TimeSummary]
    left_out: Sequence[StepRow]  # the recorded steps before them


def steps_after(entry: Entry, warmup: int | None = None, count: int | None = None) -> Steps:
    """Return ``count`` (all) recorded steps after the first ``warmup``; as ``entry`` is cut where neither is given.

    Without any cut: the measured steps that the run's own figures are of.
    """
    if warmup is None and count is None and entry.cut is not None:
        warmup, count = entry.cut.warmup, entry.cut.steps
    rows = _recorded(entry)
    first, end = warmup, None
    if first is None:
        own = slice(0, None) if entry.record is None else entry.record.stretch
        begins = sum(row.stage == "warmup" for row in rows)
        first, end = begins + own.start, None if own.stop is None else begins + own.stop
    kept = rows[first:end] if count is None else rows[first : first + count]
    return Steps(kept, summaries(kept, "device", model_of(kept, as_they_are=True)), rows[:first])


def _recorded(entry: Entry) -> list[StepRow]:
    return mean_over_ranks(entry.rows.of_stages("warmup", "measure").timed, world_of(entry.record))


def cut_anew(
    entries: Sequence[Entry], settings: Sequence[int | None], count: int | None
) -> tuple[list[Entry], list[str]]:
    """Return each of ``entries`` once for each warm-up, with figures of ``count`` (all) steps after it; and problems.

    Those that died before their steps stay as they are. A run with fewer steps than were asked for is left out:
    figures of unlike numbers of steps would stand side by side.
    """
    problems, asked = list[str](), [(entry, Cut(setting, count)) for entry in entries for setting in settings]
    cuts = [cut for each in asked if (cut := if_readable(_cut, *each, problems=problems)) is not None]
    return cuts, list(dict.fromkeys(problems))


def _cut(entry: Entry, cut: Cut) -> Entry:
    record = entry.record
    if record is None or not record.time:
        return replace(entry, cut=cut)
    steps = steps_after(entry, cut.warmup, cut.steps)
    if len(steps.rows) < (cut.steps or 1):
        after = "" if cut.warmup is None else f" after {counted(cut.warmup, 'warm-up step')}"
        raise RecordError(f"{entry.folder}: expected {cut.steps or 'any'} steps{after}, found {len(steps.rows)}")
    samples = _exact_samples_per_step(record)
    model = model_of(steps.rows, as_they_are=True)
    figures = step_figures(steps.rows, model, samples)
    # What the run itself told of the same steps; nothing was read of others, as of warm-up.
    told = {of.step: of.model_dump(include={"cause", "cause_s", "beside", "rank"}) for of in record.odd_steps}
    facts = {
        "steps": {**record.steps, "warmup": len(steps.left_out), "measure": len(steps.rows)},
        **figures,
        "odd_steps": [of.model_copy(update=told.get(of.step, {})) for of in figures["odd_steps"]],
        "utilisation": _scaled(record, steps.times),
        "steadiness": None,  # what was said of the run's own cut
        "verdict": None,
    }
    new = replace(entry, cut=cut, record=record.model_copy(update=facts))
    new.__dict__["rows"] = entry.rows  # read once for all settings
    return new


def _exact_samples_per_step(record: RunRecord) -> float | None:
    """Return the samples of a mean step; the record's own number of them is a whole one."""
    rates, step_s = record.throughput, record.time["step"].mean
    if rates is None or rates.samples_per_s is None or step_s is None:
        return None
    return rates.samples_per_s * step_s


def _scaled(record: RunRecord, times: Mapping[str, TimeSummary]) -> Utilisation | None:
    """Shares of a peak go by the inverse of the mean step."""
    use, before, after = record.utilisation, record.time["step"].mean, times["step"].mean
    if use is None or not before or not after:
        return None
    shares = {name: getattr(use, name) for name in ("mfu", "hfu", "of_ceiling")}
    scaled = {name: share * before / after for name, share in shares.items() if share is not None}
    return use.model_copy(update=scaled)


def readable(entries: Sequence[Entry]) -> tuple[list[Entry], list[str]]:
    """Return those of ``entries`` that have steps to cut, and a line on each other."""
    problems = list[str]()
    return [entry for entry in entries if if_readable(_has_steps, entry, problems=problems)], problems


def _has_steps(entry: Entry) -> bool:
    if entry.record is not None and entry.record.steps and _recorded(entry):
        return True
    raise RecordError(f"{entry.folder}: no steps to cut ({entry.status})")
