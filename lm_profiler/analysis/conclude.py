"""Turns evidence into the record, by pure functions. They are the same at the end of a run and for old or killed runs.

Each group of figures is computed by a function of its own. If one fails, a note says so and its figures are unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import zip_longest
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from lm_profiler.analysis.binding import RunFacts, binding
from lm_profiler.analysis.dataflow.line_operators import with_line_operators
from lm_profiler.analysis.evidence import Evidence, read_evidence
from lm_profiler.analysis.hardware.roofline import (
    Dtype,
    Work,
    beaten_floors,
    clock_share,
    floor_of,
    is_rate_of,
    judge_utilisation,
    matmul_dtype,
    mean_rate,
    narrow_dtype,
    rates_of,
    torch_name,
    with_uses_by_dtype,
)
from lm_profiler.analysis.ranks.ranks_summary import ranks_of
from lm_profiler.analysis.savings.optimizer import CLOSURE_OPTIMIZER
from lm_profiler.analysis.savings.ranking import findings_of
from lm_profiler.analysis.steps.batch_sizes import share_explained_by_sizes
from lm_profiler.analysis.steps.level_check import level_check_note
from lm_profiler.analysis.steps.odd_step_causes import mean_counters, with_causes
from lm_profiler.analysis.steps.step_model import StepModel, steadiness
from lm_profiler.analysis.steps.summaries import (
    BatchCount,
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
    with_token_use,
    world_of,
)
from lm_profiler.analysis.trace.unexplained_kernels import unexplained_kernels
from lm_profiler.analysis.why.operators import TensorListFacts
from lm_profiler.analysis.why.waterfall_terms import Step, waterfall
from lm_profiler.record.entry import UNFINISHED, Collection, Entry
from lm_profiler.record.kernels import KernelTable
from lm_profiler.record.machine import FlopRate
from lm_profiler.record.parts import INPUT_PHASES
from lm_profiler.record.quantities import MEMORY, PARTS, count_text, duration_text
from lm_profiler.record.rank_ends import first_end, read_ends
from lm_profiler.record.run_record import (
    Environment,
    Flops,
    MemoryFacts,
    MemoryReading,
    NeedlessWork,
    OddStep,
    Rates,
    RunRecord,
    Steadiness,
    Waterfall,
    none_if_unreadable,
)
from lm_profiler.record.steps import Peaks, StepRow, StepTable
from lm_profiler.record.text import ranks_text

# Lightning's names of precisions, by torch's names of dtypes
_PRECISIONS = {"float64": "64", "float32": "32", "bfloat16": "bf16", "float16": "16"}

_ON_HOST = "arrivals at collectives, from torch's flight recorder"
_ON_STREAM = (
    "durations of collectives on the device's stream, in steps after the measured ones"
)

# a smaller share of forward that is backward passes is not worth a note
_LARGE_BACKWARD_SHARE = 0.1
# the most names in the note on operators whose FLOPs were not counted
_MOST_UNCOUNTED = 5
_SAME_SIZE = 0.01  # mean batch sizes that differ by a smaller share count as equal
_SAME_FIGURE = 1e-6  # figures that differ by a smaller share count as equal: rows in a file are rounded to a nanosecond
_INPUTS = {field.name for field in fields(Evidence)} - {"notes"}


class RunSteps:
    """The measured steps of a run, and figures of them that several functions below use.

    If the run failed, only the steps that all its ranks finished count.
    """

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.rows = StepTable.from_rows(evidence.rows)  # of all ranks and stages
        # the measured steps of all ranks that have times of the device
        timed = self.rows.of_stages("measure").timed
        self.timed = timed if evidence.failure is None else timed.finished_by_all()
        # the same, one row per step: the mean over the ranks
        self.steps = mean_over_ranks(self.timed, evidence.world_size)

    @cached_property
    def model(self) -> StepModel:
        return model_of(self.steps)

    @property
    def stretch(self) -> Sequence[StepRow]:
        """The steps that the figures describe: the longest level, for example."""
        return self.steps[self.model.begin : self.model.end]

    @cached_property
    def counts(self) -> MeanCounts:
        """The mean numbers of batches, samples and so on per step of the stretch, over all ranks."""
        return mean_counts(
            self.evidence.batch_counts, [row.step for row in self.stretch]
        )

    @property
    def batches(self) -> float | None:
        """The mean number of batches per measured step of rank 0; None means unknown."""
        return mean_counts(
            self.evidence.batch_counts[:1], self.timed.step.tolist()
        ).batches

    @property
    def batches_note(self) -> list[str]:
        """A note if the number of batches per step changes on rank 0."""
        rank_counts: Sequence[BatchCount] = ()
        if self.evidence.batch_counts:
            rank_counts = self.evidence.batch_counts[0]
        last_step = int(self.timed.step.max()) if len(self.timed) else 0
        return changed_batches_note(rank_counts, last_step, self.counts.batches)

    @cached_property
    def has_unknown_batches(self) -> bool:
        """Whether calls of the model counted as batches, because no loader was seen, although they seem to be none.

        Their number then differs from step to step, as in reinforcement learning, or the optimizer makes several calls
        with the same batch.
        """
        evidence = self.evidence
        settings = evidence.settings
        has_loader = settings is None or settings.restarts_loader is not None
        if evidence.loop == "Trainer" or has_loader:
            return False
        optimizers: Sequence[str] = ()
        if evidence.model is not None:
            optimizers = evidence.model.optimizers
        return CLOSURE_OPTIMIZER in optimizers or bool(self.batches_note)

    @cached_property
    def short_steps(self) -> dict[int, int]:
        """The samples of the measured steps of rank 0 that have fewer than most, such as the last step of an epoch."""
        return short_steps(self.evidence.batch_counts[:1], self.timed.step.tolist())

    @property
    def workers(self) -> int | None:
        """The number of the loader's worker processes; None means unknown."""
        if self.evidence.settings is None:
            return None
        return self.evidence.settings.num_workers

    @property
    def new_workers(self) -> int:
        """The number of worker processes that the loader starts for each epoch."""
        settings = self.evidence.settings
        if settings is None or settings.persistent_workers:
            return 0
        return settings.num_workers or 0

    @cached_property
    def machine(self) -> Environment:
        if self.evidence.environment is None:
            raise ValueError("the machine is unknown")
        return self.evidence.environment

    def facts(self, record: RunRecord) -> RunFacts:
        """Return the facts from which ``binding`` finds the bottleneck."""
        return RunFacts(
            record,
            self.steps,
            self.model,
            self.evidence.device_idle,
            self.evidence.kernels,
        )

    @property
    def devices(self) -> int:
        """The number of devices that share the FLOPs of a step; 1 on the CPU, whose cores all ranks share."""
        if self.machine.device_type == "cpu":
            return 1
        return self.evidence.world_size

    def dtype(self, precision: str) -> Dtype | None:
        """Return the dtype in which Lightning's ``precision`` multiplies matrices on this machine; None if unknown."""
        float32_precision = self.machine.flags.get(
            "float32_matmul_precision", "highest"
        )
        return matmul_dtype(precision, str(float32_precision))

    @property
    def main_dtype(self) -> Dtype | None:
        """The dtype of most of the FLOPs of this run."""
        narrow = narrow_dtype(_main_dtype(self.evidence))
        return narrow or self.dtype(main_precision(self.evidence))

    @cached_property
    def work(self) -> tuple[Flops | None, Mapping[str, Work]]:
        """The FLOPs of a mean measured step, and its work by phase.

        They were counted in one step, and are scaled if the mean step has larger or smaller batches. Bytes are then
        unknown.
        """
        evidence = self.evidence
        scale = self.work_scale
        if scale == 1.0:
            return evidence.flops, evidence.work
        by_phase: dict[str, Work] = {}
        for phase, work in evidence.work.items():
            phase_flops = None
            if work.flops is not None:
                phase_flops = {
                    dtype: round(count * scale) for dtype, count in work.flops.items()
                }
            by_phase[phase] = Work(phase_flops, bytes=None)
        flops = None
        if evidence.flops is not None:
            flops = evidence.flops.times(scale)
        return flops, by_phase

    @property
    def work_scale(self) -> float:
        """The ratio of the size of a mean measured step to that of the step whose work was counted; 1 if unknown.

        The size is the number of elements in the batches, or else the number of batches. Work is proportional to the
        number of samples, and (except in attention) to the length of sequences.
        """
        evidence = self.evidence
        counts = self.counts
        if counts.elements and evidence.work_elements:
            return counts.elements / evidence.work_elements
        if counts.batches and evidence.work_batches:
            return counts.batches / evidence.work_batches
        return 1.0

    @property
    def unlike_batches_note(self) -> list[str]:
        """A note if batches of the measured steps differ in size from those whose work was counted."""
        evidence = self.evidence
        counts = self.counts
        if evidence.flops is None or self.has_unknown_batches:
            return []
        if (
            not counts.elements
            or not counts.batches
            or not evidence.work_elements
            or not evidence.work_batches
        ):
            return []
        mean_elements = counts.elements / counts.batches
        counted_elements = evidence.work_elements / evidence.work_batches
        if math.isclose(mean_elements, counted_elements, rel_tol=_SAME_SIZE):
            return []
        sizes = f"a batch of {counted_elements:,.0f} elements and scaled to the mean of {mean_elements:,.0f}"
        return [
            f"batches differ in size: FLOPs were counted for {sizes}; attention on longer sequences needs more"
        ]


def main_precision(evidence: Evidence) -> str:
    """Return Lightning's name of the precision of most FLOPs, which may differ from the Trainer's option (autocast)."""
    main_dtype = _main_dtype(evidence)
    if main_dtype is None:
        return evidence.precision
    return _PRECISIONS.get(main_dtype, "")


def _main_dtype(evidence: Evidence) -> str | None:
    """Return torch's name of the dtype of most FLOPs; None if none were counted."""
    flops_by_dtype = evidence.by_dtype
    if not any(flops_by_dtype.values()):
        return None
    return max(flops_by_dtype, key=flops_by_dtype.__getitem__)


Fields = dict[str, Any]  # fields of the record

# Returns fields of the record. Takes the run, the record so far, and the list of notes, to which it may add.
ComputeFields = Callable[[RunSteps, RunRecord, list[str]], Fields]


def conclude(
    evidence: Evidence, findings: Iterable[tuple[str, ComputeFields]] | None = None
) -> RunRecord:
    """Return the record of ``evidence``; ``findings`` are the functions that compute it (by default ``FINDINGS``)."""
    if findings is None:
        findings = FINDINGS
    notes = list(evidence.notes)
    record = RunRecord(**_shared_fields(evidence))
    run = RunSteps(evidence)
    for name, compute_fields in findings:
        try:
            figures = compute_fields(run, record, notes)
        except Exception as error:
            # the measurements, and the figures of the other functions, are still correct
            notes.append(
                f"{name} unknown: {type(error).__name__}: {error}".removesuffix(": ")
            )
            continue
        record = record.model_copy(update=figures)  # the next function may need them
    return record.model_copy(update={"notes": notes})


def _shared_fields(source: Evidence | RunRecord) -> Fields:
    """Return the fields that evidence and record have in common."""
    names = []
    for field in fields(Evidence):
        if field.name in RunRecord.model_fields:
            names.append(field.name)
    return {name: getattr(source, name) for name in names}


def _step_count_fields(run: RunSteps, record: RunRecord, notes: list[str]) -> Fields:
    """Return the number of steps of each stage (also of planned ones), and the slowest rank's first step in seconds."""
    rows = run.rows
    stages = dict.fromkeys(
        [*run.evidence.steps_planned, *np.unique(rows.stage).tolist()]
    )
    first_steps_s = [row.time("step", "host") for row in rows.select(rows.step == 1)]
    return {
        "steps": {
            stage: len(np.unique(rows.of_stages(stage).step)) for stage in stages
        },
        "first_step_s": max(first_steps_s, default=None),
    }


def _times_of_steps(run: RunSteps, record: RunRecord, notes: list[str]) -> Fields:
    """Return the figures of the measured steps: their times, throughput, counters and course."""
    evidence = run.evidence
    samples = None
    if evidence.ranks_heard == evidence.world_size and not run.has_unknown_batches:
        samples = run.counts.samples
    if not run.has_unknown_batches:
        notes += run.batches_note
    figures = step_figures(run.steps, run.model, samples)
    # the counts are sums over all ranks
    if evidence.ranks_heard == evidence.world_size:
        step_s = figures["time"]["step"].mean
        rate = with_token_use(figures["throughput"], run.counts, step_s)
        figures["throughput"] = rate
    figures["rank_step_s"] = rank_medians(run.timed)
    figures["mean_counters"] = None
    figures["steadiness"] = None
    if run.steps:
        used_steps = {row.step for row in run.stretch}
        counters = []
        for reading in evidence.counters:
            if reading.step in used_steps:
                counters.append(reading)
        figures["mean_counters"] = mean_counters(counters)
        figures["steadiness"] = _steadiness(run)
    return figures


def _steadiness(run: RunSteps) -> Steadiness:
    """Return the course of the steps, with what the sizes of the batches explain.

    They may explain a share of the variation, and a pattern in which all slow steps have a shorter batch.
    """
    parts_s = {}
    for part in PARTS:
        parts_s[part] = np.array([row.time(part) for row in run.steps])
    steady = steadiness(
        run.model, run.evidence.recompilations, parts_s, first_step=run.steps[0].step
    )
    explained_share = share_explained_by_sizes(
        run.model, run.evidence.batch_counts, [row.step for row in run.steps]
    )
    steady = steady.model_copy(update={"explained_by_sizes": explained_share})
    pattern = steady.pattern
    if pattern is None:
        return steady
    # the record counts phases from 1
    slow_phases = {place - 1 for place in pattern.slow}
    slow_steps = set()
    for index, row in enumerate(run.steps):
        if index % pattern.every in slow_phases:
            slow_steps.add(row.step)
    if not slow_steps or not slow_steps <= run.short_steps.keys():
        return steady
    short_pattern = pattern.model_copy(update={"short_batch": True})
    return steady.model_copy(update={"pattern": short_pattern})


def _odd_step_fields(run: RunSteps, record: RunRecord, notes: list[str]) -> Fields:
    """Return the odd steps with their causes, and the counters that show these."""
    odd, counters = with_causes(
        record.odd_steps,
        run.timed,
        run.evidence.counters,
        run.workers,
        run.evidence.first_steps_of_epochs,
        run.new_workers,
    )
    odd = [_with_short_batch(step, run.short_steps) for step in odd]
    return {"odd_steps": odd, "step_counters": counters}


def _check_of_level(run: RunSteps, record: RunRecord, notes: list[str]) -> Fields:
    """Add a note if the steps of the stage ``actions`` differ from the level.

    Its last step does not count, because Python is profiled in it.
    """
    later = mean_over_ranks(
        run.rows.of_stages("actions").timed, run.evidence.world_size
    )
    notes += level_check_note(run.model, run.steps, later[:-1])
    return {}


def _loader_fields(run: RunSteps, record: RunRecord, notes: list[str]) -> Fields:
    """Return the loader's facts with the share of time in which workers were awake; nothing with several ranks.

    The CPU time of the workers is that of all processes of the run minus that of the training process.
    """
    evidence = run.evidence
    loader = evidence.loader
    contention = evidence.contention
    if loader is None or not loader.workers or evidence.world_size > 1:
        return {}
    if contention is None or not contention.wall_s:
        return {}
    trainer_ran_s = sum(counters.cpu_s or 0.0 for counters in evidence.counters)
    trainer_waited_s = sum(counters.cpu_wait_s or 0.0 for counters in evidence.counters)
    workers_ran_s = max(contention.had_s - trainer_ran_s, 0.0)
    workers_waited_s = max((contention.waited_s or 0.0) - trainer_waited_s, 0.0)
    workers_s = contention.wall_s * loader.workers
    # A worker is awake if it runs, or waits for a CPU.
    awake_share = min((workers_ran_s + workers_waited_s) / workers_s, 1.0)
    return {"loader": loader.model_copy(update={"awake_share": awake_share})}


def _with_short_batch(odd: OddStep, short_batches: Mapping[int, int]) -> OddStep:
    """Return ``odd`` with fewer samples as its cause if it was fast because of them; otherwise unchanged.

    ``short_batches`` has the samples of the steps that have fewer than most.
    """
    if odd.ratio >= 1.0 or odd.step not in short_batches:
        return odd
    cause = f"fewer samples than usual ({short_batches[odd.step]:,})"
    return odd.model_copy(
        update={"cause": cause, "cause_s": odd.step_s / odd.ratio - odd.step_s}
    )


def _lasting_step(run: RunSteps, record: RunRecord, notes: list[str]) -> Fields:
    """Return the long-run time of a step and its throughput, if the measured steps used up prefetched batches."""
    loader = run.evidence.loader
    steps = run.steps
    step = record.time.get("step")
    if loader is None or not steps or step is None:
        return {}
    # it is normal that the queue shrinks by one batch per worker
    if (loader.used_up or 0) <= (loader.workers or 0):
        return {}
    batches = run.batches or run.evidence.accumulate_grad_batches
    mean_s = fmean(row.time("step") for row in steps)
    lasting_s = lasting_step_s(mean_s, len(steps), batches, loader)
    measured_batches = round(len(steps) * batches)
    prefetched = f"{loader.used_up} of the {measured_batches} measured batches were prefetched by the loader's workers"
    if lasting_s is None:
        notes.append(
            f"{prefetched}: the long-run time of a step is unknown, because too few batches were loaded during "
            "the measurement"
        )
        return {}
    measured_s = step.mean or mean_s
    if lasting_s <= measured_s:
        return {}
    longer = f"in the long run a step takes about {duration_text(lasting_s)}, not {duration_text(measured_s)}"
    notes.append(
        f"{prefetched}: {longer}; throughput, verdict and advice use the long-run time"
    )
    figures: Fields = {"lasting_step_s": lasting_s}
    if record.throughput is not None:
        figures["throughput"] = slower_throughput(
            record.throughput, measured_s / lasting_s
        )
    return figures


def _memory_fields(run: RunSteps, record: RunRecord, notes: list[str]) -> Fields:
    """Return the record's section on memory: peaks, memory by cause, and memory between phases."""
    evidence = run.evidence
    facts = MemoryFacts(
        measured=_memory_reading(run.timed.largest_memory),
        parts={
            part: _memory_reading(peaks) for part, peaks in evidence.part_peaks.items()
        },
        causes=dict(evidence.causes),
        # what was held at instants such as the end of set-up
        moments=dict(evidence.moments),
        held=evidence.levels,  # bytes of parameters, gradients, states and activations
        allocator=evidence.allocator,
    )
    return {"memory": facts}


def _memory_reading(peaks: Peaks) -> MemoryReading:
    """Return ``peaks``, which are in the order of the columns of memory, by their names."""
    return MemoryReading(**dict(zip(MEMORY, peaks, strict=True)))


def _energy_fields(run: RunSteps, record: RunRecord, notes: list[str]) -> Fields:
    """Return the energy per step, as its share of all energy by time; unknown unless all ranks reported their GPUs."""
    evidence = run.evidence
    telemetry = evidence.telemetry
    if telemetry is None or telemetry.energy_j is None or not telemetry.duration_s:
        return {}
    if not run.stretch or evidence.ranks_heard < evidence.world_size:
        return {}
    mean_step_s = fmean(row.time("step") for row in run.stretch)
    per_step_j = telemetry.energy_j * mean_step_s / telemetry.duration_s
    per_token_j = None
    if record.throughput is not None and record.throughput.tokens_per_step:
        per_token_j = per_step_j / record.throughput.tokens_per_step
    energies_j = {"energy_per_step_j": per_step_j, "energy_per_token_j": per_token_j}
    return {"telemetry": telemetry.model_copy(update=energies_j)}


def _owner_fields(run: RunSteps, record: RunRecord, notes: list[str]) -> Fields:
    """Return which code took the time of ``other``, with the mean of ``other`` on rank 0 (only rank 0 logs)."""
    owned = run.evidence.other_by_owner
    if owned is None:
        return {}
    rows_of_rank_0 = list(run.timed.select(run.timed.rank == 0))
    stretch = rows_of_rank_0[run.model.begin : run.model.end]
    measured_s = None
    if stretch:
        measured_s = fmean(row.time("other", "host") for row in stretch)
    return {"other_by_owner": owned.model_copy(update={"measured_s": measured_s})}


def _python_times(run: RunSteps, record: RunRecord, notes: list[str]) -> Fields:
    """Return the times of the program's lines, in which operators such as ``x @ y`` count as torch."""
    environment = run.evidence.environment
    if environment is not None and environment.device_type != "cpu":
        # Their times are those of the device's kernels, for which Python does not wait.
        return {}
    operators = run.evidence.line_operators
    return {"python_times": with_line_operators(record.python_times, operators)}


def _utilisation_fields(run: RunSteps, record: RunRecord, notes: list[str]) -> Fields:
    """Return the FLOP/s of a step as a share of the machine's measured ceiling, and of its datasheet's peak."""
    flops, _ = run.work
    step_s = record.time["step"].mean
    if flops is None or not step_s:
        return {}
    notes += run.unlike_batches_note
    flops = _with_unexplained_kernels(flops, run.evidence.kernels)
    notes += _uncounted_note(flops)
    dtype = run.main_dtype
    ceiling_flops_per_s = None
    if dtype is not None:
        ceiling_flops_per_s = run.evidence.ceilings.get(torch_name(dtype))
    use = judge_utilisation(
        flops,
        step_s,
        run.machine.device_name,
        dtype,
        run.devices,
        ceiling_flops_per_s,
        run.evidence.peak_flops_per_s,
    )
    return {"utilisation": use}


def _with_unexplained_kernels(flops: Flops, kernels: KernelTable | None) -> Flops:
    """Return ``flops`` with the names of kernels that may multiply matrices but were not counted, by a trace."""
    if kernels is None:
        return flops
    names = unexplained_kernels(kernels, flops.functions_counted, flops.uncounted)
    return flops.model_copy(update={"uncounted": [*flops.uncounted, *names]})


def _uncounted_note(flops: Flops) -> list[str]:
    """Return a note if the FLOPs are a lower bound; it names what was not counted."""
    if not flops.uncounted:
        return []
    names = ", ".join(flops.uncounted[:_MOST_UNCOUNTED])
    more = len(flops.uncounted) - _MOST_UNCOUNTED
    if more > 0:
        names += f" and {more} more"
    return [
        (
            f"FLOPs, MFU and floors are lower bounds, because the FLOPs of {names} are unknown: give their formula to "
            "lm_profiler.register_flops"
        )
    ]


def _rank_fields(run: RunSteps, record: RunRecord, notes: list[str]) -> Fields:
    """Return the work and waiting of the ranks in the stretch.

    If collectives were timed on a device's stream, in later steps, the figures are those of these steps instead.
    """
    evidence = run.evidence
    if len(evidence.timelines) < 2:
        return {}
    is_on_stream = any(
        timeline.waited_ns is not None for timeline in evidence.timelines
    )
    ranks = ranks_of(
        evidence.timelines,
        evidence.world_size,
        evidence.reduces_in_backward,
        steps=None if is_on_stream else [row.step for row in run.stretch],
        witness=_ON_STREAM if is_on_stream else _ON_HOST,
        traced=evidence.traced,
        contention=evidence.contention,
        counters=evidence.counters,
    )
    return {"ranks": ranks}


def _rate_fields(run: RunSteps, record: RunRecord, notes: list[str]) -> Fields:
    """Return the peak rates of the machine: stated by the user, or from its datasheet, or else measured."""
    evidence = run.evidence
    use = record.utilisation
    # FLOP/s by torch's name of the dtype; the user states only that of the main dtype
    stated: dict[str, float] = {}
    measured = dict(evidence.ceilings)
    if run.main_dtype is not None:
        main_dtype = _main_dtype(evidence) or torch_name(run.main_dtype)
        if evidence.peak_flops_per_s is not None:
            stated[main_dtype] = evidence.peak_flops_per_s
        if use is not None:
            # None if the step was faster than the ceiling
            measured[main_dtype] = use.ceiling_flops_per_s
    device_name = run.machine.device_name
    copied_bytes_per_s = evidence.copied_bytes_per_s
    rates = rates_of(device_name, measured, copied_bytes_per_s, run.dtype("32"), stated)
    figures: Fields = {"rates": rates}
    step_s = record.time["step"].mean
    if use is not None and step_s:
        by_dtype = evidence.by_dtype
        figures["utilisation"] = with_uses_by_dtype(
            use, by_dtype, rates, step_s, run.devices
        )
    return figures


def _floor_fields(run: RunSteps, record: RunRecord, notes: list[str]) -> Fields:
    """Return the floor (least time) of each phase, and details on phases that were faster than their floor."""
    _, work_by_phase = run.work
    rates = record.rates or Rates()
    took_s = {phase: record.time[phase].mean for phase in work_by_phase}
    floors = {
        phase: floor_of(work, rates, took_s[phase])
        for phase, work in work_by_phase.items()
    }
    return {"floors": floors, "details": beaten_floors(work_by_phase, rates, took_s)}


def _waterfall_fields(run: RunSteps, record: RunRecord, notes: list[str]) -> Fields:
    """Return the waterfall: the terms that add up from the ideal step to the measured one."""
    return {"waterfall": waterfall_of(run.evidence, record, run.devices)}


def waterfall_of(
    evidence: Evidence, record: RunRecord, devices: int
) -> Waterfall | None:
    """Return the waterfall of the mean step on one of ``devices``; None if FLOPs, peak or trace are unknown."""
    traced = evidence.traced
    use = record.utilisation
    times = record.time.get("step")
    rates = record.rates
    if traced is None or rates is None:
        return None
    if use is None or use.dtype is None or times is None or not times.mean:
        return None
    used_dtype = use.dtype
    rate = next((rate for rate in rates.flops if is_rate_of(rate, used_dtype)), None)
    if rate is None:
        return None
    input_share = sum(record.shares.get(phase, 0.0) for phase in INPUT_PHASES)
    seconds_by_phase = {
        part: record.shares[part] * times.mean
        for part in PARTS
        if record.shares.get(part)
    }
    without_optimizer: Sequence[str] = ()
    if evidence.model is not None:
        without_optimizer = evidence.model.without_optimizer
    step = Step(
        step_s=times.mean,
        ci_low=times.mean_low,
        ci_high=times.mean_high,
        input_s=times.mean * input_share,
        waiting_s=_waiting_of_traced_rank_s(record),
        # the model's FLOPs are those of forward and backward
        ideal_s=use.flops.model / devices / _rate_of_passes(record, rates, rate),
        recomputed_share=_recomputed_share(use.flops),
        rates=rates,
        dtype=rate.dtype,
        clock_share=clock_share(record.telemetry, rate, evidence.multiprocessors),
        lists=evidence.lists or TensorListFacts(elements=0, item_bytes=None),
        without_optimizer=without_optimizer,
        phase_s={} if traced.on_device else seconds_by_phase,
    )
    divided_step = waterfall(step, traced)
    changes = {
        "step_phases": seconds_by_phase,
        "ideal_is_lower_bound": bool(use.flops.uncounted),
        "needless": _without_refuted(divided_step.needless, evidence),
    }
    return divided_step.model_copy(update=changes)


def _rate_of_passes(record: RunRecord, rates: Rates, usual: FlopRate) -> float:
    """Return the mean FLOP/s of forward and backward, each dtype at its own rate; ``usual`` if one rate is unknown."""
    floors = []
    for phase, floor in record.floors.items():
        if phase != "optimizer":
            floors.append(floor)
    return mean_rate(floors, rates, usual)


def _recomputed_share(flops: Flops) -> float:
    """Return the share of the FLOPs of forward and backward that checkpointing spends on repeating forward."""
    flops_of_passes = flops.model + flops.recomputation
    if not flops_of_passes:
        return 0.0
    return flops.recomputation / flops_of_passes


def _without_refuted(
    works: Iterable[NeedlessWork], evidence: Evidence
) -> list[NeedlessWork]:
    """Return those of ``works``, which the trace shows as possibly needless, that the data flow does not refute.

    The trace compares inputs by identity, and does not see changes through ``Tensor.data``. It knows only the shapes
    of broadcasts, and the data flow also knows what reads them.
    """
    confirmed = []
    for work in works:
        if work.kind == "repeated_forward":
            is_refuted = evidence.repeats_forward is False
        elif work.kind == "broadcast":
            is_refuted = evidence.has_data_flow
        else:
            is_refuted = False
        if not is_refuted:
            confirmed.append(work)
    return confirmed


def _waiting_of_traced_rank_s(record: RunRecord) -> Mapping[str, float]:
    """Return how long rank 0, which is traced, waited in each phase; empty if that is unknown."""
    if record.ranks is None:
        return {}
    for rank in record.ranks.by_rank:
        if rank.rank == 0:
            return rank.waiting_s
    return {}


def _settings_fields(run: RunSteps, record: RunRecord, notes: list[str]) -> Fields:
    """Return the settings of the run, with facts that are known only now; remedies depend on them."""
    settings = run.evidence.settings
    if settings is None:
        return {}
    use = record.utilisation
    batches = max(run.counts.batches or run.evidence.work_batches or 1, 1)
    figures: dict[str, Any] = {
        "clipped_batches": run.evidence.clipped_batches,
        "early_clips": run.evidence.early_clips,
    }
    if use is not None:
        figures["checkpointing"] = use.flops.recomputation > 0
    main_dtype = _main_dtype(run.evidence)
    if main_dtype in ("bfloat16", "float16", "float64"):
        # because of the module's own autocast, or of the dtype of its weights
        figures["precision"] = main_dtype
    figures["tokens_per_batch"] = None
    figures["samples_per_batch"] = None
    rate = record.throughput
    if rate is not None and rate.tokens_per_step is not None:
        figures["tokens_per_batch"] = round(rate.tokens_per_step / batches)
    if rate is not None and rate.samples_per_step is not None:
        figures["samples_per_batch"] = round(rate.samples_per_step / batches)
    if record.memory is not None and record.environment is not None:
        figures["memory_free_share"] = _free_share_of_memory(
            run.evidence, record.environment, record.memory.measured
        )
    return {"settings": settings.model_copy(update=figures)}


def _free_share_of_memory(
    evidence: Evidence, environment: Environment, measured: MemoryReading
) -> float | None:
    """Return the share of the memory which the run could use that was free at its peak; None if it is unknown.

    On the CPU the run could use what its processes held after the measured steps, and what was available then: other
    programs and the loader's workers need the rest, or the process is limited to less.
    """
    peak_bytes = measured.allocated_peak
    usable_bytes = environment.device_bytes
    if environment.device_type == "cpu":
        if evidence.resident_bytes is None or evidence.available_bytes is None:
            return None
        # The ranks share the available memory. If they are on several machines, each rank may use more than this.
        available_bytes = evidence.available_bytes / environment.world_size
        peak_bytes = measured.resident_peak
        usable_bytes = round(evidence.resident_bytes + available_bytes)
    if peak_bytes is None or not usable_bytes:
        return None
    return max(1.0 - peak_bytes / usable_bytes, 0.0)


_IMBALANCED = 2.0  # the busiest expert gets at least this many times the tokens of the mean expert


def _imbalance_of_experts(run: RunSteps, record: RunRecord, notes: list[str]) -> Fields:
    """Add a note if an expert gets at least twice as many tokens as the mean one."""
    if not record.experts:
        return {}
    worst = max(record.experts, key=attrgetter("busiest_ratio"))
    if worst.busiest_ratio >= _IMBALANCED:
        notes.append(
            f"experts are imbalanced: in layer {worst.layer}, expert {worst.busiest} of {worst.experts} gets "
            f"{worst.busiest_share:.1%} of the tokens ({1 / worst.experts:.1%} if balanced)"
        )
    return {}


def _findings_fields(run: RunSteps, record: RunRecord, notes: list[str]) -> Fields:
    """Return what could be saved, the largest saving first."""
    return {"findings": findings_of(record)}


def _verdict_fields(run: RunSteps, record: RunRecord, notes: list[str]) -> Fields:
    """Return the bottleneck of the run."""
    return {"verdict": binding(run.facts(record))}


def _unmarked_forward(run: RunSteps, record: RunRecord, notes: list[str]) -> Fields:
    """Add a note if the program calls the forward pass of its model directly, so that it is in no phase."""
    functions: dict[str, str] = {}  # the line, by the function
    for row in record.python_times:
        if row.forward == "unmarked":
            functions.setdefault(row.function, f"{Path(row.file).name}:{row.line}")
    for function, line in functions.items():
        notes.append(
            f"{function} ({line}) is called directly, so its time counts as other: call the module itself, such as "
            "model(batch) instead of model.forward(batch)"
        )
    return {}


def _backward_within_forward(
    run: RunSteps, record: RunRecord, notes: list[str]
) -> Fields:
    """Add a note if much of forward is backward passes, as in meta-learning, penalties of gradients, and samplers."""
    share = run.evidence.backward_share_of_forward
    if share >= _LARGE_BACKWARD_SHARE:
        notes.append(
            f"about {share:.0%} of forward is backward passes that the program runs there itself (loss.backward() or "
            "torch.autograd.grad); they are not in the figures of backward"
        )
    return {}


# The functions that compute the record, in an order in which each finds the figures that it needs. If one fails, the
# note begins with its name.
FINDINGS: Sequence[tuple[str, ComputeFields]] = (
    ("steps", _step_count_fields),
    ("figures", _times_of_steps),
    ("check of the level", _check_of_level),
    ("causes of odd steps", _odd_step_fields),
    ("batches made ahead", _lasting_step),
    ("the loader's workers", _loader_fields),
    ("memory", _memory_fields),
    ("energy", _energy_fields),
    ("owners of other", _owner_fields),
    ("lines of Python", _python_times),
    ("forward passes without a mark", _unmarked_forward),
    ("backward passes within forward", _backward_within_forward),
    ("utilisation", _utilisation_fields),
    ("who waits for whom", _rank_fields),
    ("rates", _rate_fields),
    ("floors", _floor_fields),
    ("waterfall", _waterfall_fields),
    ("settings", _settings_fields),
    ("load of experts", _imbalance_of_experts),
    ("findings", _findings_fields),
    ("verdict", _verdict_fields),
)


@dataclass(frozen=True)
class Change:
    """A figure that differs between two records."""

    field: str  # the path of the field in the record, with dots
    before: Any  # None if the old record lacks it
    now: Any  # None if the new record lacks it


def concluded_again(folder: Path, record: RunRecord) -> tuple[RunRecord, list[Change]]:
    """Compute the record of the run in ``folder`` again from its evidence; return it and the changes from ``record``.

    Raises:
        RecordError: the evidence is missing or damaged.
    """
    new_record = conclude(read_evidence(folder))
    figures_before = record.model_dump(exclude=_INPUTS)
    figures_now = new_record.model_dump(exclude=_INPUTS)
    return new_record, list(_changed_values(figures_before, figures_now))


def _changed_values(before: Any, now: Any, path: str = "") -> Iterator[Change]:
    """Yield the differences between two values at ``path`` of a record: mappings, sequences, numbers or others."""
    are_sequences = isinstance(before, Sequence) and isinstance(now, Sequence)
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in dict.fromkeys([*before, *now]):
            field_path = f"{path}.{name}".lstrip(".")
            yield from _changed_values(before.get(name), now.get(name), field_path)
    elif are_sequences and not isinstance(before, str):
        # a missing item is None
        for index, (item_before, item_now) in enumerate(zip_longest(before, now)):
            yield from _changed_values(item_before, item_now, f"{path}[{index}]")
    elif isinstance(before, (int, float)) and isinstance(now, (int, float)):
        if not math.isclose(before, now, rel_tol=_SAME_FIGURE, abs_tol=1e-9):
            yield Change(path, before, now)
    elif before != now:
        yield Change(path, before, now)


def with_unfinished(runs: Collection) -> Collection:
    """Return ``runs``, with figures for unfinished runs from the steps that they have finished."""
    problems = list(runs.problems)
    entries = [
        none_if_unreadable(_with_figures_so_far, entry, problems=problems) or entry
        for entry in runs.entries
    ]
    return replace(runs, entries=entries, problems=problems)


def _with_figures_so_far(entry: Entry) -> Entry:
    """Return ``entry``; if its run is unfinished, with the figures of its steps so far.

    If ranks have ended, the failure of the rank that ended first is added.
    """
    if entry.record is None or entry.record.status != "unfinished":
        return entry
    record = with_failure_of_ranks(entry.record, entry.folder)
    return replace(entry, record=with_figures_of_recorded_steps(record, entry.rows))


def with_failure_of_ranks(record: RunRecord, folder: Path) -> RunRecord:
    """Return ``record``, which rank 0 did not complete, with the failure that caused the end of its ranks."""
    ranks = range(world_of(record) or 1)
    cause = first_end(read_ends(folder), ranks, codes={})  # exit codes are unknown
    if cause is None or cause.status == "ok":
        return record
    return record.model_copy(update={"status": cause.status, "failure": cause.failure})


def with_figures_of_recorded_steps(record: RunRecord, rows: StepTable) -> RunRecord:
    """Return ``record``, which has no figures yet, with those of the steps in ``rows``."""
    evidence = Evidence(
        **_shared_fields(record), rows=rows, world_size=world_of(record) or 1
    )
    concluded = conclude(evidence)
    reason = "rank 0 did not record how the run ended"
    if record.status == "unfinished":
        reason = f"unfinished: {UNFINISHED}"
    measured_steps = count_text(concluded.steps.get("measure", 0), "measured step")
    note = f"{reason}; the figures use the {measured_steps} that the run finished"
    ranks = np.unique(rows.rank).tolist()
    if len(ranks) > 1:
        note += f" on {ranks_text(ranks)}, whose files were found"
    return concluded.model_copy(update={"notes": [*concluded.notes, note]})
