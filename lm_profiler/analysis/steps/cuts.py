"""Runs that are going on, or whose processes were killed, as far as they came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lm_profiler.analysis.steps.summaries import lag, mean_over_ranks, model_of, step_figures, summaries, world_of
from lm_profiler.record.entry import Cut, Entry
from lm_profiler.record.quantities import counted
from lm_profiler.record.run import OddStep, RecordError, RunRecord, TimeSummary, Utilisation
from lm_profiler.record.steps import StepRow

WARMUPS = (0, 1, 2, 5)  # the settings that reports in this field compare

_STAGES = ("warmup", "measure")


@dataclass(frozen=True)
class Steps:
    """A run's steps, each a mean over the ranks, and the summary of their parts on the device's clock."""

    rows: Sequence[StepRow]
    times: Mapping[str, TimeSummary]
    left_out: Sequence[StepRow]  # the recorded steps before them


def steps_after(entry: Entry, warmup: int | None = None, count: int | None = None) -> Steps:
    """``count`` (all) recorded steps after the first ``warmup``; as ``entry`` is cut where neither is given.

    Without any cut: the measured steps that the run's own figures are of.

    Raises:
        RecordError: its ``steps.csv`` cannot be read.
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
    return mean_over_ranks(entry.rows.of_stages(*_STAGES).timed, world_of(entry.record))


def cut_anew(
    entries: Sequence[Entry], settings: Sequence[int | None], count: int | None
) -> tuple[list[Entry], list[str]]:
    """Return each of ``entries`` once for each warm-up, with figures of ``count`` (all) steps after it; and problems.

    Those that died before their steps stay as they are. A run with fewer steps than were asked for is left out:
    figures of unlike numbers of steps would stand side by side.
    """
    cuts, problems = [], []
    for entry in entries:
        for setting in settings:
            try:
                cuts.append(_cut(entry, Cut(setting, count)))
            except RecordError as error:
                problems.append(str(error))
    return cuts, list(dict.fromkeys(problems))


def _cut(entry: Entry, cut: Cut) -> Entry:
    record = entry.record
    if record is None or not record.time:
        return replace(entry, cut=cut)
    steps = steps_after(entry, cut.warmup, cut.steps)
    if len(steps.rows) < (cut.steps or 1):
        raise RecordError(_too_few(entry, cut.warmup, cut.steps, len(steps.rows)))
    samples = record.throughput.samples_per_step if record.throughput is not None else None
    model = model_of(steps.rows, as_they_are=True)
    figures = step_figures(steps.rows, model, samples, lag(record.verb, record.rank_step_s))
    facts = {
        "steps": {**record.steps, "warmup": len(steps.left_out), "measure": len(steps.rows)},
        **figures,
        "odd_steps": _with_causes(figures["odd_steps"], record.odd_steps),
        "utilisation": _scaled(record, steps.times),
        "steadiness": None,  # what was said of the run's own cut
        "verdict": None,
    }
    new = replace(entry, cut=cut, record=record.model_copy(update=facts))
    new.__dict__["rows"] = entry.rows  # read once for all settings
    return new


def _with_causes(odd: Sequence[OddStep], told: Sequence[OddStep]) -> list[OddStep]:
    """Return ``odd`` with what the run itself told of the same steps; nothing was read of others, as of warm-up."""
    known = {step.step: step.model_dump(include={"cause", "cause_s", "beside", "rank"}) for step in told}
    return [step.model_copy(update=known.get(step.step, {})) for step in odd]


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
    good, problems = [], []
    for entry in entries:
        try:
            if entry.record is not None and entry.record.steps and _recorded(entry):
                good.append(entry)
            else:
                problems.append(f"{entry.folder}: no steps to cut ({entry.status})")
        except RecordError as error:
            problems.append(str(error))
    return good, problems


def long_enough(
    entries: Sequence[Entry], settings: Sequence[int], count: int | None
) -> tuple[list[tuple[Entry, list[int]]], list[str]]:
    """Each readable one of ``entries`` with those of ``settings`` that leave ``count`` (any) steps; and what is not."""
    good, problems = readable(entries)
    enough_steps = []
    for entry in good:
        recorded = len(_recorded(entry))
        left = {setting: max(0, recorded - setting) for setting in settings}
        problems += [_too_few(entry, setting, count, n) for setting, n in left.items() if n < (count or 1)]
        if enough := [setting for setting, n in left.items() if n >= (count or 1)]:
            enough_steps.append((entry, enough))
    return enough_steps, problems


def _too_few(entry: Entry, warmup: int | None, asked: int | None, there: int) -> str:
    after = "" if warmup is None else f" after {counted(warmup, 'warm-up step')}"
    return f"{entry.folder}: expected {asked or 'any'} steps{after}, found {there}"
