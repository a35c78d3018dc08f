"""Computes the figures of a run from its rows; the warm-up may differ from that of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lm_profiler.analysis.hardware.roofline import per_second
from lm_profiler.analysis.steps.statistics import Series, summarise_times
from lm_profiler.analysis.steps.step_model import StepModel, fit, one_level_model
from lm_profiler.record.entry import Cut, Entry
from lm_profiler.record.quantities import (
    HOST_TIMES,
    MEMORY,
    MFU,
    PARTS,
    TIMED,
    TIMES,
    TOKENS_PER_S,
    Quantity,
    count_text,
)
from lm_profiler.record.run_record import (
    VALIDATION,
    LoaderFacts,
    OddStep,
    RecordError,
    RunRecord,
    Throughput,
    TimeSummary,
    Utilisation,
    none_if_unreadable,
)
from lm_profiler.record.steps import StepRow, StepTable

_FIGURES_OF_FLOPS = {
    "mfu",
    "hfu",
    "of_ceiling",
    "waterfall_ideal_s",
    *(f"{work}_flops" for work in ("forward", "backward", "optimizer")),
}

WARMUPS = (0, 1, 2, 5)  # numbers of warm-up steps that are commonly used

# The rate of the workers is estimated only if each has made this many batches, on average, during the measurement. With
# two workers it is then known to within about 50 %, and with twice as many batches to within 25 %.
_FEWEST_BATCHES_PER_WORKER = 1


def mean_over_ranks(rows: Sequence[StepRow], world: int | None = None) -> list[StepRow]:
    """Return one row per step, over all ranks: mean times (so that parts add up), all tokens, and the largest peaks.

    The tokens of a step are unknown unless all ``world`` ranks (by default, all ranks that have rows) have a row of it.
    """
    table = StepTable.from_rows(rows)
    ranks = max(len(np.unique(table.rank)), world or 0)
    if ranks <= 1 or not len(table):
        return list(table)
    table = StepTable.concatenate([table])  # in the order of steps
    steps, step_starts, row_counts = np.unique(
        table.step, return_index=True, return_counts=True
    )
    has_all_ranks = row_counts == ranks
    summed_tokens = np.add.reduceat(table.tokens, step_starts)
    summed_s = np.add.reduceat(table.seconds, step_starts)
    summed_host_s = np.add.reduceat(table.host_seconds, step_starts)
    means = StepTable(
        step=steps,
        stage=table.stage[step_starts],
        seconds=summed_s / row_counts[:, None],
        host_seconds=summed_host_s / row_counts[:, None],
        tokens=np.where(has_all_ranks, summed_tokens, np.nan),
        memory=np.fmax.reduceat(table.memory, step_starts),
        rank=table.rank[step_starts],
    )
    return list(means)


def world_of(record: RunRecord | None) -> int | None:
    """Return how many ranks the run had; None if the record lacks it."""
    if record is None or record.environment is None:
        return None
    return record.environment.world_size


def rank_medians(rows: Sequence[StepRow]) -> list[float]:
    """Return the median step time of each rank, in seconds on the host's clock, in the order of ranks."""
    table = StepTable.from_rows(rows)
    step_s = table.host_seconds[:, TIMED.index("step")]
    medians = []
    for rank in np.unique(table.rank):
        rank_step_s = step_s[table.rank == rank]
        medians.append(float(np.median(rank_step_s)))
    return medians


def ideal_step_s(record: RunRecord) -> float | None:
    """Return how long a step would take at the device's peak FLOP/s; None if the MFU is unknown."""
    step_s = record.time["step"].mean
    if record.utilisation is None or record.utilisation.mfu is None or step_s is None:
        return None
    return record.utilisation.mfu * step_s


def scalars(row: StepRow, ideal_s: float | None = None) -> dict[str, float]:
    """Return the TensorBoard scalars of one measured step, by tag.

    ``ideal_s`` is how long the step would take at the device's peak; without it there is no MFU.
    """
    values: list[tuple[Quantity, float | None]] = []
    for part, quantity in HOST_TIMES.items():
        values.append((quantity, row.time(part, "host")))
    values += zip(MEMORY.values(), row.memory, strict=True)
    if row.seconds is not None:
        for part, quantity in TIMES.items():
            values.append((quantity, row.time(part)))
        step_s = row.time("step")
        values.append((TOKENS_PER_S, per_second(row.tokens, step_s)))
        if ideal_s is not None:
            values.append((MFU, ideal_s / step_s))
    return {
        str(quantity.tag): value * quantity.scale
        for quantity, value in values
        if value is not None
    }


def model_of(rows: Sequence[StepRow], keeps_all_steps: bool = False) -> StepModel:
    """Return the model of the step times of ``rows``, all of which have times of the device.

    If ``keeps_all_steps``, figures use all steps, and not only the longest level.
    """
    seconds = [row.time("step") for row in rows]
    if keeps_all_steps:
        return one_level_model(seconds)
    return fit(seconds)


def summaries(
    rows: Sequence[StepRow], clock: str, model: StepModel
) -> dict[str, TimeSummary]:
    """Return a summary of the times of each part, the step, and forward + backward.

    Args:
        rows: the measured steps.
        clock: "device" or "host".
        model: the model of these steps; the summaries are over its stretch.
    """
    by_part: dict[str, TimeSummary] = {}
    for part in TIMES:
        seconds = np.array([row.time(part, clock) for row in rows])
        stretch_s = seconds[model.begin : model.end]
        by_part[part] = summarise_times(stretch_s, model.interval_of(seconds))
    return by_part


def step_figures(
    rows: Sequence[StepRow], model: StepModel, samples: float | None = None
) -> dict[str, Any]:
    """Return the record's fields for measured ``rows``; ``samples`` is the mean number per step, over all ranks."""
    times = summaries(rows, "device", model)
    step_s = times["step"].mean
    shares = {}
    if step_s:
        shares = {part: (times[part].mean or 0.0) / step_s for part in TIMES}
    return {
        "time": times,
        "host_time": summaries(rows, "host", model),
        "shares": shares,
        "odd_steps": odd_steps(rows, model),
        "throughput": throughput(
            rows[model.begin : model.end], step_s, samples, model.weights
        ),
    }


def odd_steps(rows: Sequence[StepRow], model: StepModel) -> list[OddStep]:
    """Return the odd steps, ordered by their deviation, each with the part that contributes most to it."""
    odd_indices = np.flatnonzero(model.odd).tolist()
    if not odd_indices:
        return []
    expected_s = model.expected
    parts_s = {}
    for part in PARTS:
        parts_s[part] = np.array([row.time(part) for row in rows])
    odd = []
    for index in odd_indices:
        row = rows[index]
        ratio = float(model.seconds[index] / expected_s[index])
        excess_s: dict[str, float] = {}
        for part, part_s in parts_s.items():
            excess_s[part] = float(part_s[index]) - model.usual_value(index, part_s)
        # of a slow step the part with the largest excess, of a fast step the one with the smallest
        choose = max if ratio > 1.0 else min
        part = choose(excess_s, key=excess_s.__getitem__)
        odd.append(
            OddStep(
                step=row.step,
                step_s=row.time("step"),
                ratio=ratio,
                part=part,
                excess_s=excess_s[part],
            )
        )
    return sorted(odd, key=lambda step: -abs(step.ratio - 1.0))


def throughput(
    rows: Sequence[StepRow],
    step_s: float | None,
    samples: float | None = None,
    weights: Sequence[float] | Series | None = None,
) -> Throughput:
    """Return the mean tokens and samples per step, and divided by the mean step time, per second.

    Tokens are unknown if one of ``rows`` has none.

    Args:
        rows: the steps.
        step_s: their mean time.
        samples: the mean samples per step.
        weights: the weight of each row in the means, as in the mean step time; None for equal ones.
    """
    counts = [row.tokens for row in rows if row.tokens is not None]
    tokens = None
    if counts and len(counts) == len(rows):
        tokens = float(np.average(counts, weights=weights))
    return Throughput(
        tokens_per_step=None if tokens is None else round(tokens),
        tokens_per_s=per_second(tokens, step_s),
        samples_per_step=None if samples is None else round(samples),
        samples_per_s=per_second(samples, step_s),
    )


def with_token_use(
    rate: Throughput, counts: MeanCounts, step_s: float | None
) -> Throughput:
    """Return ``rate`` with the useful tokens (without padding) of ``counts``; a mean step takes ``step_s``."""
    useful_tokens = counts.useful_tokens
    if useful_tokens is None:
        return rate
    figures: dict[str, Any] = {
        "useful_tokens_per_step": round(useful_tokens),
        "useful_tokens_per_s": per_second(useful_tokens, step_s),
    }
    if counts.token_positions:
        figures["occupancy"] = useful_tokens / counts.token_positions
        if counts.unused_positions is not None:
            unused_share = counts.unused_positions / counts.token_positions
            figures["unused_share"] = unused_share
    if counts.squared_lengths is not None:
        figures["squared_lengths_per_step"] = round(counts.squared_lengths)
    return rate.model_copy(update=figures)


class BatchCount(NamedTuple):
    """How many batches a rank processes per step from ``step`` on, and their content; 0 and None mean unknown.

    It applies until the next entry. All counts are sums over the batches of a step.
    """

    step: int
    batches: int
    samples: int | None
    elements: int | None = None  # elements of the largest tensor of each batch
    useful_tokens: int | None = None  # tokens without padding
    token_positions: int | None = None  # tokens with padding
    squared_lengths: int | None = None  # squared lengths of the sequences
    # positions beyond the longest sequence of their batch
    unused_positions: int | None = None


class MeanCounts(NamedTuple):
    """The mean counts per step, summed over all ranks; None means unknown."""

    batches: float | None = None
    samples: float | None = None
    elements: float | None = None
    useful_tokens: float | None = None
    token_positions: float | None = None
    squared_lengths: float | None = None
    unused_positions: float | None = None


def mean_counts(
    ranks: Sequence[Sequence[BatchCount]], steps: Sequence[int]
) -> MeanCounts:
    """Return the mean over ``steps`` of the counts, summed over ``ranks``.

    A count that is unknown for a single step of a single rank is unknown.
    """
    if not (ranks and all(ranks) and len(steps)):
        return MeanCounts()
    means = np.zeros(len(MeanCounts._fields))
    for counts in ranks:
        figures = []
        for count in counts_of_steps(counts, steps):
            # the fields of ``BatchCount`` after ``step`` are those of ``MeanCounts``, in the same order
            _, batches, *sizes = count
            known_batches = batches or None  # 0 means unknown, too
            figures.append([known_batches, *sizes])
        means += np.array(figures, dtype=float).mean(axis=0)  # None becomes NaN
    return MeanCounts(*[None if np.isnan(mean) else float(mean) for mean in means])


def counts_of_steps(
    counts: Sequence[BatchCount], steps: Sequence[int]
) -> list[BatchCount]:
    """Return for each of ``steps`` the entry of ``counts`` that applies: the latest one at or before it."""
    positions = np.searchsorted([count.step for count in counts], steps, "right") - 1
    return [counts[position] for position in positions]


def short_steps(
    ranks: Sequence[Sequence[BatchCount]], steps: Sequence[int]
) -> dict[int, int]:
    """Return the ``steps`` in which the first rank had fewer samples than in the median step, and how many it had."""
    if not ranks or not ranks[0] or not steps:
        return {}
    samples_by_step: dict[int, int] = {}
    for step, count in zip(steps, counts_of_steps(ranks[0], steps), strict=True):
        if count.samples is None:
            return {}  # with an unknown step, the median is unknown
        samples_by_step[step] = count.samples
    usual = float(np.median(list(samples_by_step.values())))
    return {
        step: samples for step, samples in samples_by_step.items() if samples < usual
    }


def slower_throughput(rate: Throughput, share: float) -> Throughput:
    """Return ``rate`` with all rates multiplied by ``share``; the counts per step stay."""
    slower: dict[str, float] = {}
    if rate.tokens_per_s is not None:
        slower["tokens_per_s"] = rate.tokens_per_s * share
    if rate.samples_per_s is not None:
        slower["samples_per_s"] = rate.samples_per_s * share
    if rate.useful_tokens_per_s is not None:
        slower["useful_tokens_per_s"] = rate.useful_tokens_per_s * share
    return rate.model_copy(update=slower)


def share_in_steps(record: RunRecord) -> float:
    """Return the share of the training loop's time, without validation, that the measured steps took.

    The rest is between steps: epoch boundaries, and the profiler's own writing once per second. A rate of the steps
    multiplied by this share is a lower bound, even if other programs on the machine make that time long.
    """
    step = record.time.get("step")
    steps = record.steps.get("measure", 0)
    if step is None or not step.mean or not steps or record.between_steps_s is None:
        return 1.0
    validation_s = 0.0
    for activity in record.between:
        if activity.what == VALIDATION:
            validation_s += activity.seconds
    between_s = max(record.between_steps_s - validation_s, 0.0)
    steps_s = steps * (record.lasting_step_s or step.mean)
    return steps_s / (steps_s + between_s)


def lower_bound_share(quantity: Quantity, record: RunRecord) -> float | None:
    """If a figure is a lower bound, return the factor that makes it one; otherwise None.

    Rates are lower bounds if other programs used the machine. Figures computed from FLOPs are if not all FLOPs were
    counted.
    """
    use = record.utilisation
    if quantity.name in _FIGURES_OF_FLOPS and use is not None and use.flops.uncounted:
        return 1.0
    is_rate = quantity.kind in ("tokens/s", "samples/s")
    if not is_rate or not record.contended:
        return None
    return share_in_steps(record)


def changed_batches_note(
    counts: Sequence[BatchCount], last_step: int, mean: float | None
) -> list[str]:
    """Return a note if the number of batches per step of a rank changes up to ``last_step``; ``mean`` is the mean."""
    batches_by_step: dict[int, int] = {}
    for count in counts:
        if count.batches and count.step <= last_step:
            batches_by_step[count.step] = count.batches
    numbers = list(batches_by_step.values())
    if len(set(numbers)) < 2 or mean is None:
        return []
    first_change = next(
        step for step, batches in batches_by_step.items() if batches != numbers[0]
    )
    steps = f"a step takes {min(numbers)} to {max(numbers)} batches, and the number changes at step {first_change}"
    return [f"{steps}: throughput and FLOPs assume {mean:.3g} batches per step"]


def lasting_step_s(
    mean_s: float, steps: int, batches: float, loader: LoaderFacts | None
) -> float | None:
    """Return the seconds of a step in the long run, when no prefetched batches are left.

    If the queue of prefetched batches shrinks during the measurement, workers are never idle: the batches that they
    made meanwhile show their rate, which then limits the loop.

    Args:
        mean_s: the measured mean step; returned if the queue did not shrink, or if this is unknown.
        steps: the number of measured steps.
        batches: the number of batches per step.
        loader: the state of the loader's queue before and after.

    Returns:
        the seconds; None if the workers made too few batches to estimate their rate.
    """
    used_batches = steps * batches
    if loader is None or not loader.used_up or used_batches <= 0:
        return mean_s
    # A batch that is being made counts as half.
    half_made_before = _half_of_unfinished_batches(loader, loader.ready_before)
    half_made_after = _half_of_unfinished_batches(loader, loader.ready_after)
    # ``used_up`` is by how many batches the queue became shorter
    finished_batches = used_batches - loader.used_up
    made_batches = finished_batches + (half_made_after - half_made_before)
    workers = max(loader.workers or 0, 1)
    if made_batches < _FEWEST_BATCHES_PER_WORKER * workers:
        return None
    # in the long run the loop uses batches as fast as they are made
    return mean_s * used_batches / made_batches


def _half_of_unfinished_batches(loader: LoaderFacts, ready: int | None) -> float:
    """Return half the number of batches that workers are making while ``ready`` are in the queue; 0 if it is full.

    The queue has places for ``loader.ahead`` batches.
    """
    free_places = max((loader.ahead or 0) - (ready or 0), 0)
    batches = min(loader.workers or 0, free_places)
    return batches / 2.0


@dataclass(frozen=True)
class Steps:
    """Steps of a run, averaged over the ranks, with a summary of each part's time on the device."""

    rows: Sequence[StepRow]
    times: Mapping[str, TimeSummary]
    left_out: Sequence[StepRow]  # the recorded steps before them


def steps_after(
    entry: Entry, warmup: int | None = None, count: int | None = None
) -> Steps:
    """Return ``count`` recorded steps (None: all) after the first ``warmup`` steps.

    If neither is given, the cut of ``entry`` is used. If it has none, these are the steps from which the run's own
    figures were computed.
    """
    if warmup is None and count is None and entry.cut is not None:
        warmup = entry.cut.warmup
        count = entry.cut.steps
    rows = _recorded(entry)
    begin = warmup
    end = None
    if begin is None:
        # the run's own stretch, which is counted from its first measured step
        recorded_warmup = sum(row.stage == "warmup" for row in rows)
        stretch = slice(0, None) if entry.record is None else entry.record.stretch
        begin = recorded_warmup + stretch.start
        if stretch.stop is not None:
            end = recorded_warmup + stretch.stop
    if count is not None:
        end = begin + count
    steps = rows[begin:end]
    model = model_of(steps, keeps_all_steps=True)
    return Steps(steps, summaries(steps, "device", model), left_out=rows[:begin])


def first_step(entry: Entry) -> StepRow | None:
    """Return the first step of ``entry``, the mean over the ranks; None if no step was recorded.

    Raises RecordError if the file of steps cannot be read.
    """
    rows = _recorded(entry)
    return rows[0] if rows else None


def _recorded(entry: Entry) -> list[StepRow]:
    """Return the steps of ``entry``, those of its warm-up included, each the mean over the ranks."""
    rows = entry.rows.of_stages("warmup", "measure").timed
    return mean_over_ranks(rows, world_of(entry.record))


# returns for the run in a folder the batch counts of each rank; nothing if they are unknown
ReadBatchCounts = Callable[[Path], Sequence[Sequence[BatchCount]]]


def judged_after_warmups(
    entries: Sequence[Entry],
    warmups: Sequence[int | None],
    count: int | None,
    read_batch_counts: ReadBatchCounts = lambda folder: (),
) -> tuple[list[Entry], list[str]]:
    """Compute the figures of runs as if other numbers of warm-up steps had been chosen.

    Args:
        entries: the runs.
        warmups: the numbers of warm-up steps; None for a run's own.
        count: the number of steps after them; None for all.
        read_batch_counts: returns the batch counts of a run's ranks.

    Returns:
        each run once per warm-up; and the problems. A run that died before its steps is returned unchanged. A run with
        too few steps is a problem and left out, because figures from different numbers of steps cannot be compared.
    """
    problems: list[str] = []
    cut_entries: list[Entry] = []
    for entry in entries:
        counts = read_batch_counts(entry.folder)
        for warmup in warmups:
            cut_entry = none_if_unreadable(
                _cut_entry, entry, Cut(warmup, count), counts, problems=problems
            )
            if cut_entry is not None:
                cut_entries.append(cut_entry)
    return cut_entries, list(dict.fromkeys(problems))


def _cut_entry(entry: Entry, cut: Cut, counts: Sequence[Sequence[BatchCount]]) -> Entry:
    """Return ``entry`` with the figures of the steps of ``cut``; ``counts`` are the batches of each rank's steps.

    Raises:
        RecordError: it has fewer steps.
    """
    record = entry.record
    if record is None or not record.time:
        return replace(entry, cut=cut)
    steps = steps_after(entry, cut.warmup, cut.steps)
    if len(steps.rows) < (cut.steps or 1):
        wanted = f"{cut.steps or 'any'} steps"
        if cut.warmup is not None:
            wanted += f" after {count_text(cut.warmup, 'warm-up step')}"
        raise RecordError(f"{entry.folder}: expected {wanted}, found {len(steps.rows)}")

    model = model_of(steps.rows, keeps_all_steps=True)
    mean = mean_counts(counts, [row.step for row in steps.rows])
    samples = mean.samples
    if samples is None:
        samples = _exact_samples_per_step(record)
    figures = step_figures(steps.rows, model, samples)
    step_s = figures["time"]["step"].mean
    figures["throughput"] = with_token_use(figures["throughput"], mean, step_s)
    # The causes of odd steps are those of the run's own record; in warm-up steps no counters were read.
    causes = {
        odd.step: odd.model_dump(include={"cause", "cause_s", "beside", "rank"})
        for odd in record.odd_steps
    }
    figures["odd_steps"] = [
        odd.model_copy(update=causes.get(odd.step, {})) for odd in figures["odd_steps"]
    ]
    figures["steps"] = {
        **record.steps,
        "warmup": len(steps.left_out),
        "measure": len(steps.rows),
    }
    figures["utilisation"] = _scaled_utilisation(record, steps.times)
    # these are about the steps that the run itself measured
    figures["steadiness"] = None
    figures["verdict"] = None
    cut_entry = replace(entry, cut=cut, record=record.model_copy(update=figures))
    # fills the cached property, so that the file is read once for all settings
    cut_entry.__dict__["rows"] = entry.rows
    return cut_entry


def _exact_samples_per_step(record: RunRecord) -> float | None:
    """Return the mean samples per step from the rate, because the record's ``samples_per_step`` is rounded."""
    rates = record.throughput
    step_s = record.time["step"].mean
    if rates is None or rates.samples_per_s is None or step_s is None:
        return None
    return rates.samples_per_s * step_s


def _scaled_utilisation(
    record: RunRecord, times: Mapping[str, TimeSummary]
) -> Utilisation | None:
    """Return the record's utilisation for steps that take ``times``: it is inversely proportional to the mean step."""
    use = record.utilisation
    recorded_step_s = record.time["step"].mean
    step_s = times["step"].mean
    if use is None or not recorded_step_s or not step_s:
        return None
    scaled: dict[str, float] = {}
    for name in ("mfu", "hfu", "mixed_mfu", "of_ceiling"):
        share = getattr(use, name)
        if share is not None:
            scaled[name] = share * recorded_step_s / step_s
    return use.model_copy(update=scaled)


def readable(entries: Sequence[Entry]) -> tuple[list[Entry], list[str]]:
    """Return the ``entries`` that have steps to cut, and one line about each of the others."""
    problems: list[str] = []
    with_steps = []
    for entry in entries:
        if none_if_unreadable(_has_steps, entry, problems=problems):
            with_steps.append(entry)
    return with_steps, problems


def _has_steps(entry: Entry) -> bool:
    if entry.record is not None and entry.record.steps and _recorded(entry):
        return True
    raise RecordError(f"{entry.folder}: the run recorded no steps ({entry.status})")
