"""Turns evidence into the record: pure arithmetic, the same at a run's end, for an old or a killed run, and in a test.

Each finding is a separate function; one that fails leaves a note, and its figures unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from lm_profiler.analysis.binding import RunFacts, binding
from lm_profiler.analysis.evidence import Evidence, read_evidence
from lm_profiler.analysis.hardware.roofline import (
    Dtype,
    Work,
    beaten_floors,
    clock_share,
    floor_of,
    judge_utilisation,
    matmul_dtype,
    mean_rate,
    rates_of,
    torch_name,
)
from lm_profiler.analysis.ranks.ranks_summary import ranks_of
from lm_profiler.analysis.savings import findings_of
from lm_profiler.analysis.steps.level_check import level_check_note
from lm_profiler.analysis.steps.odd_step_causes import mean_counters, with_causes
from lm_profiler.analysis.steps.step_model import StepModel, steadiness
from lm_profiler.analysis.steps.summaries import (
    MeanCounts,
    changed_batches_note,
    lasting_step_s,
    mean_counts,
    mean_over_ranks,
    model_of,
    rank_medians,
    short_steps,
    slower_throughput,
    step_figures,
    world_of,
)
from lm_profiler.analysis.why.operators import Lists
from lm_profiler.analysis.why.waterfall_terms import Step, waterfall
from lm_profiler.record.entry import UNFINISHED, Collection, Entry
from lm_profiler.record.parts import INPUT_PHASES
from lm_profiler.record.quantities import MEMORY, PARTS, counted, duration_text
from lm_profiler.record.rank_ends import first_end, read_ends
from lm_profiler.record.run_record import (
    Environment,
    Flops,
    MemoryFacts,
    MemoryReading,
    OddStep,
    Rates,
    RunRecord,
    Steadiness,
    Waterfall,
    if_readable,
)
from lm_profiler.record.steps import Peaks, StepRow, StepTable
from lm_profiler.record.text import ranks_text

# Lightning's names of precisions, by torch's names of dtypes
_PRECISIONS = {"float32": "32", "bfloat16": "bf16", "float16": "16"}

_ON_HOST = "arrivals at collectives, from torch's flight recorder"
_ON_STREAM = "durations of collectives on the device's stream, in steps after the measured ones"

_SAME_SIZE = 0.01  # relative distance of mean batch sizes that is not worth a note
_ALIKE = 1e-6  # relative distance of figures that count as the same: rows in a file are rounded to a nanosecond
_INPUTS = frozenset(of.name for of in fields(Evidence)) - {"notes"}


class RunSteps:
    """The measured steps of ``evidence``, and what several findings ask of them.

    A run that failed has the steps that all its ranks finished.
    """

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.rows = StepTable.from_rows(evidence.rows)
        timed = self.rows.of_stages("measure").timed
        self.timed = timed if evidence.failure is None else timed.finished_by_all()
        self.steps = mean_over_ranks(self.timed, evidence.world_size)

    @cached_property
    def model(self) -> StepModel:
        return model_of(self.steps)

    @property
    def stretch(self) -> Sequence[StepRow]:
        """The steps that the figures use."""
        return self.steps[self.model.first : self.model.end]

    @cached_property
    def counts(self) -> MeanCounts:
        """Batches and samples of a step of the stretch, over all ranks."""
        return mean_counts(self.evidence.batch_counts, [row.step for row in self.stretch])

    @property
    def batches(self) -> float | None:
        """Batches of a measured step of rank 0; None is unknown."""
        return mean_counts(self.evidence.batch_counts[:1], self.timed.step.tolist()).batches

    @cached_property
    def short_steps(self) -> dict[int, int]:
        """The measured steps of rank 0 with fewer samples than most, and their samples: the last of an epoch."""
        return short_steps(self.evidence.batch_counts[:1], self.timed.step.tolist())

    @property
    def workers(self) -> int | None:
        """Processes of the loader."""
        return None if self.evidence.settings is None else self.evidence.settings.num_workers

    @cached_property
    def machine(self) -> Environment:
        if self.evidence.environment is None:
            raise ValueError("the machine is unknown")
        return self.evidence.environment

    def facts(self, record: RunRecord) -> RunFacts:
        return RunFacts(record, self.steps, self.model, self.evidence.device_idle, self.evidence.kernels)

    @property
    def devices(self) -> int:
        """The number of devices that share a step's FLOPs. Ranks on the CPU share its cores: they are one device."""
        return 1 if self.machine.device_type == "cpu" else self.evidence.world_size

    def dtype(self, precision: str) -> Dtype | None:
        return matmul_dtype(precision, str(self.machine.flags.get("float32_matmul_precision", "highest")))

    @property
    def main_dtype(self) -> Dtype | None:
        """The dtype in which this run multiplies most."""
        return self.dtype(main_precision(self.evidence))

    @cached_property
    def work(self) -> tuple[Flops | None, Mapping[str, Work]]:
        """The work of a mean measured step. Where that is not as large as the counted one, bytes are unknown."""
        seen, scale = self.evidence, self.work_scale
        if scale == 1.0:
            return seen.flops, seen.work
        by_phase = dict[str, Work]()
        for phase, work in seen.work.items():
            flops = None
            if work.flops is not None:
                flops = {dtype: round(count * scale) for dtype, count in work.flops.items()}
            by_phase[phase] = Work(flops, None)
        return None if seen.flops is None else seen.flops.times(scale), by_phase

    @property
    def work_scale(self) -> float:
        """The size of a mean measured step over that of the step whose work was counted; 1 where it is unknown.

        The size is the number of elements of the batches, or else of batches: work is proportional to the number of
        samples, and but for attention to the length of sequences.
        """
        seen, counts = self.evidence, self.counts
        if counts.elements and seen.work_elements:
            return counts.elements / seen.work_elements
        if counts.batches and seen.work_batches:
            return counts.batches / seen.work_batches
        return 1.0

    @property
    def unlike_batches_note(self) -> list[str]:
        """Return a note if the batches of measured steps are not as large as those whose work was counted."""
        seen, counts = self.evidence, self.counts
        if seen.flops is None or not (counts.elements and counts.batches and seen.work_elements and seen.work_batches):
            return []
        mean, counted = counts.elements / counts.batches, seen.work_elements / seen.work_batches
        if math.isclose(mean, counted, rel_tol=_SAME_SIZE):
            return []
        sizes = f"a batch of {counted:,.0f} elements, scaled to the mean of {mean:,.0f}"
        return [
            f"batches differ in size: FLOPs are those of {sizes}; attention on longer sequences takes more than that"
        ]


def main_precision(evidence: Evidence) -> str:
    """Return Lightning's name of the precision of most FLOPs: a module may enter autocast by itself."""
    seen = evidence.by_dtype
    return _PRECISIONS.get(max(seen, key=seen.__getitem__), "") if any(seen.values()) else evidence.precision


Found = dict[str, Any]  # fields of the record

# a function of the run, the record so far, and the notes, to which it may add; it returns fields of the record
Finding = Callable[[RunSteps, RunRecord, list[str]], Found]


def conclude(evidence: Evidence, findings: Iterable[tuple[str, Finding]] | None = None) -> RunRecord:
    """Return the record of ``evidence``, with all findings unless ``findings`` names some."""
    notes, shared = list(evidence.notes), {of.name for of in fields(evidence)} & RunRecord.model_fields.keys()
    record = RunRecord(**{name: getattr(evidence, name) for name in shared})
    run = RunSteps(evidence)
    for what, finding in FINDINGS if findings is None else findings:
        try:
            facts = finding(run, record, notes)
        except Exception as error:  # the measurements and the other findings are still right
            notes.append(f"{what} unknown: {type(error).__name__}: {error}".removesuffix(": "))
            continue
        record = record.model_copy(update=facts)  # the next finding may need it
    return record.model_copy(update={"notes": notes})


def _steps(run: RunSteps, record: RunRecord, notes: list[str]) -> Found:
    evidence, rows = run.evidence, run.rows
    stages = dict.fromkeys([*evidence.steps_planned, *np.unique(rows.stage).tolist()])
    return {
        "steps": {stage: len(np.unique(rows.of_stages(stage).step)) for stage in stages},
        "first_step_s": max((row.time("step", "host") for row in rows.select(rows.step == 1)), default=None),
    }


def _times_of_steps(run: RunSteps, record: RunRecord, notes: list[str]) -> Found:
    samples = run.counts.samples if run.evidence.ranks_heard == run.evidence.world_size else None
    parts_s = {part: np.array([row.time(part) for row in run.steps]) for part in PARTS}
    last = int(run.timed.step.max()) if len(run.timed) else 0
    figured = {row.step for row in run.stretch} if run.steps else set()
    notes += changed_batches_note(next(iter(run.evidence.batch_counts), []), last, run.counts.batches)
    return {
        **step_figures(run.steps, run.model, samples),
        "mean_counters": mean_counters([each for each in run.evidence.counters if each.step in figured]),
        "rank_step_s": rank_medians(run.timed),
        "steadiness": _steadiness(run, parts_s) if run.steps else None,
    }


def _steadiness(run: RunSteps, parts_s: Mapping[str, Any]) -> Steadiness:
    """Return the course of the steps; a pattern whose slow or fast steps have a shorter batch is marked as that."""
    steady = steadiness(run.model, run.evidence.recompilations, parts_s, first_step=run.steps[0].step)
    pattern = steady.pattern
    if pattern is None:
        return steady
    places = {place - 1 for place in pattern.slow}
    differing = [row.step for index, row in enumerate(run.steps) if index % pattern.every in places]
    if not differing or not set(differing) <= run.short_steps.keys():
        return steady
    return steady.model_copy(update={"pattern": pattern.model_copy(update={"short_batch": True})})


def _causes(run: RunSteps, record: RunRecord, notes: list[str]) -> Found:
    odd, counters = with_causes(record.odd_steps, run.timed, run.evidence.counters, run.workers)
    odd = [_with_short_batch(step, run.short_steps) for step in odd]
    return {"odd_steps": odd, "step_counters": counters}


def _check_of_level(run: RunSteps, record: RunRecord, notes: list[str]) -> Found:
    """Note if the steps of the stage ``actions`` differ from the level; its last step is followed line by line."""
    later = mean_over_ranks(run.rows.of_stages("actions").timed, run.evidence.world_size)
    notes += level_check_note(run.model, run.steps, later[:-1])
    return {}


def _loader(run: RunSteps, record: RunRecord, notes: list[str]) -> Found:
    """Return the loader with the share of the time in which its workers were awake; unknown of several ranks.

    What the processes of this run used beyond the one that trains is the workers'.
    """
    evidence = run.evidence
    loader, contention = evidence.loader, evidence.contention
    if loader is None or not loader.workers or contention is None or evidence.world_size > 1 or not contention.wall_s:
        return {}
    trained_s = sum(counters.cpu_s or 0.0 for counters in evidence.counters)
    trainer_waited_s = sum(counters.cpu_wait_s or 0.0 for counters in evidence.counters)
    awake_s = max(contention.had_s - trained_s, 0.0) + max((contention.waited_s or 0.0) - trainer_waited_s, 0.0)
    awake_share = min(awake_s / (contention.wall_s * loader.workers), 1.0)
    return {"loader": loader.model_copy(update={"awake_share": awake_share})}


def _with_short_batch(odd: OddStep, short: Mapping[int, int]) -> OddStep:
    """Return ``odd`` with its shorter batch as the cause, if it took less time for that."""
    if odd.ratio >= 1.0 or odd.step not in short:
        return odd
    cause = f"a shorter batch ({counted(short[odd.step], 'sample')})"
    return odd.model_copy(update={"cause": cause, "cause_s": odd.step_s / odd.ratio - odd.step_s})


def _made_ahead(run: RunSteps, record: RunRecord, notes: list[str]) -> Found:
    """Return the step in the long run, and its throughput, where the measured steps lived on prefetched batches.

    One batch per worker is usual.
    """
    loader, steps, step = run.evidence.loader, run.steps, record.time.get("step")
    if loader is None or not steps or step is None or (loader.used_up or 0) <= (loader.workers or 0):
        return {}
    batches = run.batches or run.evidence.accumulate_grad_batches
    mean_s = fmean(row.time("step") for row in steps)
    lasting_s = lasting_step_s(mean_s, len(steps), batches, loader)
    taken = round(len(steps) * batches)
    before = f"{loader.used_up} of the {taken} batches that were measured had been made before by the loader's workers"
    if lasting_s is None:
        notes.append(f"{before}: how long a step takes in the long run is unknown, too few batches were made meanwhile")
        return {}
    measured_s = step.mean or mean_s
    if lasting_s <= measured_s:
        return {}
    longer = f"in the long run a step takes about {duration_text(lasting_s)}, not {duration_text(measured_s)}"
    notes.append(f"{before}: {longer}; throughput, verdict and advice are of the long run")
    figures: Found = {"lasting_step_s": lasting_s}
    if record.throughput is not None:
        figures["throughput"] = slower_throughput(record.throughput, measured_s / lasting_s)
    return figures


def _memory(run: RunSteps, record: RunRecord, notes: list[str]) -> Found:
    seen = run.evidence
    facts = MemoryFacts(
        measured=_reading(run.timed.largest_memory),
        parts={part: _reading(peaks) for part, peaks in seen.part_peaks.items()},
        causes=dict(seen.causes),
        moments=dict(seen.moments),
        held=seen.levels,
        allocator=seen.allocator,
    )
    return {"memory": facts}


def _reading(peaks: Peaks) -> MemoryReading:
    return MemoryReading(**dict(zip(MEMORY, peaks, strict=True)))


def _energy(run: RunSteps, record: RunRecord, notes: list[str]) -> Found:
    """Return the energy of a step, by its share of the time; unknown if not all ranks reported their GPUs."""
    reading, steps, seen = run.evidence.telemetry, run.stretch, run.evidence
    if reading is None or reading.energy_j is None or not reading.duration_s or not steps:
        return {}
    if seen.ranks_heard < seen.world_size:
        return {}
    tokens = None if record.throughput is None else record.throughput.tokens_per_step
    per_step = reading.energy_j * fmean(row.time("step") for row in steps) / reading.duration_s
    shares = {"energy_per_step_j": per_step, "energy_per_token_j": per_step / tokens if tokens else None}
    return {"telemetry": reading.model_copy(update=shares)}


def _owners(run: RunSteps, record: RunRecord, notes: list[str]) -> Found:
    """The owners of ``other`` beside rank 0's own ``other`` in the stretch: other ranks log nothing."""
    if (owned := run.evidence.other_by_owner) is None:
        return {}
    own = list(run.timed.select(run.timed.rank == 0))[run.model.first : run.model.end]
    measured_s = fmean(row.time("other", "host") for row in own) if own else None
    return {"other_by_owner": owned.model_copy(update={"measured_s": measured_s})}


def _utilisation(run: RunSteps, record: RunRecord, notes: list[str]) -> Found:
    flops, step_s = run.work[0], record.time["step"].mean
    if flops is None or not step_s:
        return {}
    notes += run.unlike_batches_note
    dtype = run.main_dtype
    ceiling = None if dtype is None else run.evidence.ceilings.get(torch_name(dtype))
    given, name = run.evidence.peak_flops_per_s, run.machine.device_name
    return {"utilisation": judge_utilisation(flops, step_s, name, dtype, run.devices, ceiling, given)}


def _ranks(run: RunSteps, record: RunRecord, notes: list[str]) -> Found:
    """Return who waited in the stretch, or in the later steps whose collectives were timed on the stream."""
    seen = run.evidence
    if len(seen.timelines) < 2:
        return {}
    on_stream = any(timeline.waited_ns is not None for timeline in seen.timelines)
    known = ranks_of(
        seen.timelines,
        seen.world_size,
        seen.reduces_in_backward,
        steps=None if on_stream else [row.step for row in run.stretch],
        witness=_ON_STREAM if on_stream else _ON_HOST,
        traced=seen.traced,
        contention=seen.contention,
        counters=seen.counters,
    )
    return {"ranks": known}


def _rates(run: RunSteps, record: RunRecord, notes: list[str]) -> Found:
    seen, dtype, use = run.evidence, run.main_dtype, record.utilisation
    given, measured = {}, dict(seen.ceilings)
    if dtype is not None and seen.peak_flops_per_s is not None:
        given[torch_name(dtype)] = seen.peak_flops_per_s
    if dtype is not None and use is not None:
        measured[torch_name(dtype)] = use.ceiling_flops_per_s  # unknown where the step beat it
    return {"rates": rates_of(run.machine.device_name, measured, seen.copied_bytes_per_s, run.dtype("32"), given)}


def _floors(run: RunSteps, record: RunRecord, notes: list[str]) -> Found:
    work, rates = run.work[1], record.rates or Rates()
    took_s = {phase: record.time[phase].mean for phase in work}
    floors = {phase: floor_of(of, rates, took_s[phase]) for phase, of in work.items()}
    return {"floors": floors, "details": beaten_floors(work, rates, took_s)}


def waterfall_of(seen: Evidence, record: RunRecord, devices: int) -> Waterfall | None:
    """Return where the mean step went, on one of ``devices``; None where FLOPs, peak or trace are unknown."""
    traced, used, times, rates = seen.traced, record.utilisation, record.time.get("step"), record.rates
    if traced is None or used is None or used.dtype is None or times is None or not times.mean or rates is None:
        return None
    dtype = torch_name(used.dtype)
    rate = next((rate for rate in rates.flops if rate.dtype == dtype), None)
    if rate is None:
        return None
    first = next((of for of in record.ranks.by_rank if of.rank == 0), None) if record.ranks is not None else None
    step = Step(
        step_s=times.mean,
        ci_low=times.mean_low,
        ci_high=times.mean_high,
        input_s=times.mean * sum(record.shares.get(phase, 0.0) for phase in INPUT_PHASES),
        waiting_s={} if first is None else first.waiting_s,  # waits of the traced rank
        ideal_s=used.flops.model / devices / mean_rate(record.floors.values(), rates, rate),
        recomputed_share=used.flops.recomputation / used.flops.all if used.flops.all else 0.0,
        rates=rates,
        dtype=dtype,
        clock_share=clock_share(record.telemetry, rate, seen.multiprocessors),
        lists=seen.lists or Lists(0, None),
    )
    phases = {part: record.shares[part] * times.mean for part in PARTS if record.shares.get(part)}
    return waterfall(step, traced).model_copy(update={"step_phases": phases})


def _settings(run: RunSteps, record: RunRecord, notes: list[str]) -> Found:
    """Return what is switched on already, so that no remedy proposes it."""
    if (asked := run.evidence.settings) is None:
        return {}
    use, rate = record.utilisation, record.throughput
    batches = max(run.counts.batches or run.evidence.work_batches or 1, 1)
    peak_bytes = record.memory.measured.allocated_peak if record.memory is not None else None
    device_bytes = record.environment.device_bytes if record.environment is not None else None
    figures: dict[str, Any] = {}
    if use is not None:
        figures["checkpointing"] = use.flops.recomputation > 0
        if use.dtype in ("bfloat16", "float16", "float64"):  # also by the module's own autocast
            figures["precision"] = use.dtype
    for name in ("tokens", "samples"):
        count = getattr(rate, f"{name}_per_step", None)
        figures[f"{name}_per_batch"] = None if count is None else round(count / batches)
    if peak_bytes is not None and device_bytes:  # on the CPU nothing is known
        figures["memory_free_share"] = 1.0 - peak_bytes / device_bytes
    return {"settings": asked.model_copy(update=figures)}


# what is found, in the order in which findings need each other; a note on one that fails begins with its name
FINDINGS: Sequence[tuple[str, Finding]] = (
    ("steps", _steps),
    ("figures", _times_of_steps),
    ("check of the level", _check_of_level),
    ("causes of odd steps", _causes),
    ("batches made ahead", _made_ahead),
    ("the loader's workers", _loader),
    ("memory", _memory),
    ("energy", _energy),
    ("owners of other", _owners),
    ("utilisation", _utilisation),
    ("who waits for whom", _ranks),
    ("rates", _rates),
    ("floors", _floors),
    ("waterfall", lambda run, record, _: {"waterfall": waterfall_of(run.evidence, record, run.devices)}),
    ("settings", _settings),
    ("findings", lambda run, record, _: {"findings": findings_of(record)}),
    ("verdict", lambda run, record, _: {"verdict": binding(run.facts(record))}),
)


@dataclass(frozen=True)
class Change:
    """A change of ``field``, a dotted path in the record; None where the old or the new record lacks it."""

    field: str
    before: Any
    now: Any


def concluded_again(folder: Path, record: RunRecord) -> tuple[RunRecord, list[Change]]:
    """Return the record of the run in ``folder`` by today's rules, and what differs from ``record``, which it left.

    Raises:
        RecordError: its evidence is not there, or is damaged.
    """
    now = conclude(read_evidence(folder))
    return now, list(_changes(record.model_dump(exclude=set(_INPUTS)), now.model_dump(exclude=set(_INPUTS))))


def _changes(before: Any, now: Any, path: str = "") -> Iterator[Change]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in dict.fromkeys([*before, *now]):
            yield from _changes(before.get(name), now.get(name), f"{path}.{name}".lstrip("."))
    elif isinstance(before, Sequence) and isinstance(now, Sequence) and not isinstance(before, str):
        for at in range(max(len(before), len(now))):
            was, is_ = (of[at] if at < len(of) else None for of in (before, now))
            yield from _changes(was, is_, f"{path}[{at}]")
    else:
        numbers = isinstance(before, (int, float)) and isinstance(now, (int, float))
        alike = math.isclose(before, now, rel_tol=_ALIKE, abs_tol=1e-9) if numbers else before == now
        if not alike:
            yield Change(path, before, now)


def with_unfinished(runs: Collection) -> Collection:
    """Return ``runs``; an unfinished run gets the figures of the steps that it finished."""
    problems = list(runs.problems)
    entries = [if_readable(_so_far, entry, problems=problems) or entry for entry in runs.entries]
    return replace(runs, entries=entries, problems=problems)


def _so_far(entry: Entry) -> Entry:
    if entry.record is None or entry.record.status != "unfinished":
        return entry
    ended = as_its_ranks_ended(entry.record, entry.folder)
    return replace(entry, record=as_far_as_it_came(ended, entry.rows))


def as_its_ranks_ended(record: RunRecord, folder: Path) -> RunRecord:
    """Return ``record``, which rank 0 did not complete, with the first cause among the ends that its ranks left."""
    cause = first_end(read_ends(folder), range(world_of(record) or 1), {})
    if cause is None or cause.status == "ok":
        return record
    return record.model_copy(update={"status": cause.status, "failure": cause.failure})


def as_far_as_it_came(record: RunRecord, rows: StepTable) -> RunRecord:
    """Return ``record``, which has no steps yet, with the figures of the steps in ``rows``."""
    known = {of.name: getattr(record, of.name) for of in fields(Evidence) if of.name in RunRecord.model_fields}
    told = conclude(Evidence(**known, rows=rows, world_size=world_of(record) or 1))
    ranks, measured = np.unique(rows.rank).tolist(), told.steps.get("measure", 0)
    whose = f" of {ranks_text(ranks)}, whose steps are here" if len(ranks) > 1 else ""
    why = f"unfinished: {UNFINISHED}" if record.status == "unfinished" else "rank 0 wrote no end of the run"
    note = f"{why}; known are the {counted(measured, 'measured step')} that it finished{whose}"
    return told.model_copy(update={"notes": [*told.notes, note]})
