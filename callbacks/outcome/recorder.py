"""Turns rows into the record: steps.csv, run.json, TensorBoard scalars and the table on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer

from lm_profiler.analysis.binding import binding
from lm_profiler.analysis.findings import findings_of
from lm_profiler.analysis.hardware.device_rates import matmul_dtype, rates_of
from lm_profiler.analysis.steps.batch_counts import changed_batches_note, mean_counts
from lm_profiler.analysis.steps.odd_step_causes import mean_counters, with_causes
from lm_profiler.analysis.steps.steadiness import steadiness
from lm_profiler.analysis.steps.step_model import StepModel, plain
from lm_profiler.analysis.steps.summaries import (
    ideal_step_s,
    lag,
    mean_over_ranks,
    model_of,
    rank_medians,
    scalars,
    step_figures,
)
from lm_profiler.analysis.why.traced import Traced
from lm_profiler.callbacks.instruments.actions import beside_measured
from lm_profiler.callbacks.launch import Launch
from lm_profiler.callbacks.measured import Measured
from lm_profiler.callbacks.outcome.afterwards import LateFacts
from lm_profiler.callbacks.outcome.facts import made_ahead_notes, memory_facts, model_facts, slack_of, telemetry_of
from lm_profiler.callbacks.outcome.floors import floors_of
from lm_profiler.callbacks.outcome.judgement import (
    judge_utilisation,
    run_dtype,
    settings_of,
    torch_name,
    workers_of,
)
from lm_profiler.callbacks.outcome.waiting import ranks_facts
from lm_profiler.callbacks.outcome.why import lists_of, waterfall_of
from lm_profiler.measure.boundary import try_or_note
from lm_profiler.measure.device.contention import contention
from lm_profiler.measure.device.environment import device_name, environment
from lm_profiler.measure.device.precision import float32_matmul_precision
from lm_profiler.record.entry import Entry
from lm_profiler.record.files import write_whole
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.run import (
    Failure,
    Rates,
    RunRecord,
    Status,
    Utilisation,
    Verb,
    Waterfall,
)
from lm_profiler.record.step_files import begin_rows, with_rows_left, write_rows
from lm_profiler.record.steps import StepRow, StepTable
from lm_profiler.tensorboard.summary import scalars_summary, write_events, write_hparams


@dataclass(eq=False)
class Recorder:
    """Writes one run's files into ``folder``; on rank 0 only."""

    folder: Path
    launch: Launch
    trainer: Trainer
    verb: Verb
    peak_flops_per_s: float | None = None
    """Of one device, where the user says it."""
    _steady: Sequence[StepRow] = ()
    _steps: Sequence[StepRow] = ()
    _model: StepModel = field(default_factory=lambda: plain(()))
    _known: Mapping[str, Any] = field(default_factory=dict)
    """What every record has, from the beginning on."""

    def begin(self, planned: Mapping[str, int]) -> None:
        """Write a record with the status ``unfinished`` and no steps: what a killed process leaves."""
        if self.launch.config_yaml is not None:
            write_whole(self.folder / "config.yaml", self.launch.config_yaml)
        begin_rows(self.folder, 0)
        self._known = self._model_and_machine([])  # at the end they are asked again, and what is unknown is told
        self.bare(Measured((), planned), "unfinished", None).write(self.folder / "run.json")

    def first(self, measured: Measured, status: Status, failure: Failure | None) -> RunRecord:
        """The record of what was measured; ``complete`` adds what module, drivers and git say."""
        rows, world, notes = StepTable.of(measured.rows), self.trainer.world_size, list(measured.notes)
        if failure is None and measured.ranks < world:  # some could not send theirs
            rows = try_or_note("steps that ranks left", lambda: with_rows_left(rows, self.folder), notes) or rows
        timed = rows.of_stages("measure").timed
        timed = timed if failure is None else timed.finished_by_all()
        steps = self._steps = mean_over_ranks(timed, world)
        model = self._model = model_of(steps)
        parts_s = {part: np.array([row.time(part) for row in steps]) for part in PARTS}
        level = steadiness(model, measured.recompilations, parts_s) if steps else None
        steady = self._steady = steps[model.first : model.end]
        rank_step_s = rank_medians(timed)
        figures = step_figures(steps, model, lag=lag(self.verb, rank_step_s))
        causes = partial(with_causes, figures["odd_steps"], timed, measured.counters, workers_of(self.trainer))
        last = int(timed.step.max()) if len(timed) else 0
        batches = mean_counts(measured.batch_counts[:1], timed.step.tolist()).batches
        notes += changed_batches_note([] if not measured.batch_counts else measured.batch_counts[0], last, batches)
        ahead = partial(made_ahead_notes, measured.loader, steps, batches or self.trainer.accumulate_grad_batches)
        notes += try_or_note("batches made ahead", ahead, notes) or []
        told = try_or_note("causes of odd steps", causes, notes)
        figures["odd_steps"], counters = told or (figures["odd_steps"], [])
        return self.bare(
            replace(measured, notes=notes),
            status,
            failure,
            **figures,
            step_counters=counters,
            mean_counters=mean_counters(measured.counters),
            steps={stage: len(np.unique(rows.of_stages(stage).step)) for stage in measured.planned},
            first_step_s=max((row.time("step", "host") for row in rows.where(rows.step == 1)), default=None),
            between_steps_s=measured.between_steps_s,
            between=list(measured.between),
            rank_step_s=rank_step_s,
            loader=measured.loader,
            memory=memory_facts(timed, measured),
            steadiness=level,
            telemetry=telemetry_of(measured, world, steady, figures["throughput"].tokens_per_step),
            contention=try_or_note("contention", lambda: contention(measured.cpu_uses), notes),
            syncs=measured.syncs,
            slack=try_or_note("slack", lambda: slack_of(measured, notes), notes),
            thread_use=measured.thread_use,
            python_times=list(measured.python_times),
            other_by_owner=beside_measured(measured.other_by_owner, timed, slice(model.first, model.end)),
        )

    def save(self, folder: Path, measured: Measured, record: RunRecord) -> RunRecord:
        """Write the steps and run.json into ``folder``, which is the run's from then on.

        Raises:
            OSError: it cannot be written to.
        """
        notes = write_rows(folder, measured.rows, all_ended=record.failure is None)
        record = record.model_copy(update={"notes": [*record.notes, *notes]})
        record.write(folder / "run.json")
        self.folder = folder
        return record

    def complete(self, measured: Measured, record: RunRecord, late: LateFacts) -> RunRecord:
        """``record`` with what was determined since; written again, also for TensorBoard."""
        notes = [*record.notes, *late.notes]
        step_s = record.time["step"].mean
        trainer = self.trainer
        counts = mean_counts(measured.batch_counts, [row.step for row in self._steady])
        samples = counts.samples if measured.ranks == trainer.world_size else None
        late = late.of_step_of(counts.batches)
        facts: dict[str, Any] = {
            "duration_s": self.launch.facts()["duration_s"],
            **self._model_and_machine(notes),
            "utilisation": try_or_note("utilisation", lambda: self._utilisation(step_s, late), notes),
            **step_figures(self._steps, self._model, samples, lag(self.verb, record.rank_step_s)),
            "odd_steps": record.odd_steps,
            "numerics": late.numerics,
        }
        waits = partial(ranks_facts, trainer, measured, self._steady, late.traced, record.contention)
        facts["ranks"] = try_or_note("who waits for whom", waits, notes)
        facts["rates"] = try_or_note("rates", lambda: self._rates(facts["utilisation"], late), notes)
        record = record.model_copy(update=facts)
        details: list[str] = []
        floors = try_or_note("floors", lambda: floors_of(record, late.work, details), notes) or {}
        record = record.model_copy(update={"floors": floors, "details": details})
        fell = try_or_note("waterfall", lambda: self._waterfall(record, late.traced), notes)
        settings = try_or_note("settings", partial(settings_of, trainer, record, late.batches or 1), notes)
        record = record.model_copy(update={"waterfall": fell, "settings": settings})
        judged = partial(binding, record, self._steps, self._model, measured.device_idle, late.kernels)
        verdict = try_or_note("verdict", judged, notes)
        findings = try_or_note("findings", lambda: findings_of(record), notes) or []
        record = record.model_copy(update={"verdict": verdict, "findings": findings})
        try_or_note("scalars in TensorBoard", lambda: self._log_scalars(record), notes)
        try_or_note("HPARAMS in TensorBoard", lambda: write_hparams(Entry(self.folder, record)), notes)
        record = record.model_copy(update={"notes": notes})
        record.write(self.folder / "run.json")
        return record

    def bare(self, measured: Measured, status: Status, failure: Failure | None, **figures: Any) -> RunRecord:
        """The record without any but these ``figures``."""
        return RunRecord(
            **self.launch.facts(),
            status=status,
            failure=failure,
            verb=self.verb,
            steps_planned=dict(measured.planned),
            notes=list(measured.notes),
            **{**self._known, **figures},
        )

    def _model_and_machine(self, notes: list[str]) -> dict[str, Any]:
        trainer = self.trainer
        device, ranks = trainer.strategy.root_device, trainer.world_size
        return {
            "model": try_or_note("model", lambda: model_facts(trainer), notes),
            "environment": try_or_note("environment", lambda: environment(device, ranks), notes),
        }

    def _utilisation(self, step_s: float | None, late: LateFacts) -> Utilisation | None:
        device, trainer = self.trainer.strategy.root_device, self.trainer
        # Ranks on the CPU share its cores: they are one device.
        devices = 1 if device.type == "cpu" else trainer.world_size
        name, dtype = device_name(device), run_dtype(trainer, late.by_dtype)
        ceiling = None if dtype is None else late.ceilings.get(torch_name(dtype))
        peak = self.peak_flops_per_s
        return judge_utilisation(late.flops, step_s, name, dtype, devices, ceiling, peak)

    def _rates(self, utilisation: Utilisation | None, late: LateFacts) -> Rates:
        dtype, given, measured = run_dtype(self.trainer, late.by_dtype), {}, dict(late.ceilings)
        if dtype is not None and self.peak_flops_per_s is not None:
            given[torch_name(dtype)] = self.peak_flops_per_s
        if dtype is not None and utilisation is not None:
            measured[torch_name(dtype)] = utilisation.ceiling_flops_per_s  # unknown where the step beat it
        device = self.trainer.strategy.root_device
        float32_as = matmul_dtype("32", float32_matmul_precision(device.type))
        return rates_of(device_name(device), measured, late.copied_bytes_per_s, float32_as, given)

    def _waterfall(self, record: RunRecord, traced: Traced | None) -> Waterfall | None:
        device = self.trainer.strategy.root_device
        # Ranks on the CPU share its cores: they are one device.
        devices = 1 if device.type == "cpu" else self.trainer.world_size
        lists = lists_of(p for p in self.trainer.lightning_module.parameters() if p.requires_grad)
        processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else None
        return waterfall_of(record, traced, devices, lists, processors)

    def _log_scalars(self, record: RunRecord) -> None:
        if self._steps:
            ideal_s = ideal_step_s(record)
            write_events(self.folder, ((row.step, scalars_summary(scalars(row, ideal_s))) for row in self._steps))
