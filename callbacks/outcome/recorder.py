"""Turns rows into the record: steps.csv, run.json, TensorBoard scalars and the table on the terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from lm_profiler.analysis.steps.shares import odd, shares, typical
from lm_profiler.analysis.steps.steadiness import steadiness
from lm_profiler.analysis.steps.summaries import (
    ideal_step_s,
    mean_over_ranks,
    rank_medians,
    scalars,
    summaries,
    throughput,
)
from lm_profiler.callbacks.instruments.work import batches_per_step
from lm_profiler.callbacks.outcome.facts import model_facts
from lm_profiler.callbacks.outcome.hardware import Hardware
from lm_profiler.callbacks.outcome.judgement import (
    Unsure,
    free_share,
    judge,
    judge_utilisation,
    run_dtype,
    settings_of,
    why_unsure,
)
from lm_profiler.callbacks.outcome.logger import write_scalars
from lm_profiler.callbacks.outcome.measured import Measured
from lm_profiler.measure.boundary import try_or_note
from lm_profiler.measure.device.contention import contention
from lm_profiler.measure.device.environment import device_name, environment
from lm_profiler.measure.memory.holdings import by_cause
from lm_profiler.record.collection import Entry
from lm_profiler.record.files import write_whole
from lm_profiler.record.kernels import KernelTable
from lm_profiler.record.quantities import MEMORY
from lm_profiler.record.run import (
    Environment,
    Failure,
    MemoryFacts,
    MemoryReading,
    RunRecord,
    Status,
    Telemetry,
    Throughput,
    Utilisation,
    Verb,
    Verdict,
    write_run,
)
from lm_profiler.record.steps import Peaks, StepRow, append_steps, begin_steps, largest, write_steps
from lm_profiler.tensorboard.summary import write_hparams


@dataclass(frozen=True)
class Launch:
    """How the run was started: what a reader needs to start it again."""

    name: str = "lm_profiler"
    command: str = ""
    overrides: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    config_yaml: str | None = None
    folder: Path | None = None
    """Claimed for the run already."""
    started: float = field(default_factory=time.time)

    def facts(self) -> dict[str, Any]:
        """What every record says of it; the duration is up to now."""
        return {
            "name": self.name,
            "started": datetime.fromtimestamp(self.started, timezone.utc).isoformat(timespec="seconds"),
            "duration_s": max(time.time() - self.started, 0.0),
            "command": self.command,
            "overrides": dict(self.overrides),
            "config": dict(self.config) if self.config is not None else None,
        }


class Recorder:
    """Writes one run's files into ``folder``; on rank 0 only."""

    def __init__(self, folder: Path, launch: Launch, trainer: Trainer, module: LightningModule, verb: Verb) -> None:
        self.folder = folder
        self._launch = launch
        self._trainer = trainer
        self._module = module
        self._verb: Verb = verb
        self._surroundings: Environment | None = None

    def begin(self, planned: Mapping[str, int]) -> None:
        """Write what a killed process leaves: a record that says ``unfinished``, and no step yet."""
        if self._launch.config_yaml is not None:
            write_whole(self.folder / "config.yaml", self._launch.config_yaml)
        begin_steps(self.folder / "steps.csv")
        facts: dict[str, Any] = {"status": "unfinished", "failure": None, "verb": self._verb}
        write_run(self.folder, RunRecord(**self._launch.facts(), **facts, steps_planned=dict(planned)))

    def keep(self, rows: Sequence[StepRow]) -> None:
        """Add rows that came since."""
        append_steps(self.folder / "steps.csv", rows)

    def first(self, measured: Measured, status: Status, failure: Failure | None) -> RunRecord:
        """The record without what drivers, git and the machine are asked for, which ``complete`` does."""
        return self._record(measured, status, failure, Hardware(), asking=False)

    def save(self, measured: Measured, record: RunRecord) -> None:
        """Write steps.csv and run.json.

        Raises:
            OSError: the folder cannot be written to.
        """
        write_steps(self.folder / "steps.csv", measured.rows)
        write_run(self.folder, record)

    def complete(self, measured: Measured, record: RunRecord, hardware: Hardware) -> RunRecord:
        """Log the scalars, and write run.json once more with all that was found out since ``record``."""
        record = self._record(measured, record.status, record.failure, hardware)
        notes = list(record.notes)
        try_or_note(
            "scalars in TensorBoard", lambda: self._log_scalars(mean_over_ranks(_timed(measured)), record), notes
        )
        try_or_note("HPARAMS in TensorBoard", lambda: write_hparams(Entry(self.folder, record)), notes)
        record = record.model_copy(update={"notes": notes})
        write_run(self.folder, record)
        return record

    def bare(self, measured: Measured, status: Status, failure: Failure | None) -> RunRecord:
        """The record without any figure."""
        notes = list(measured.notes)
        return RunRecord(**self._launch.facts(), status=status, failure=failure, verb=self._verb, notes=notes)

    def _record(
        self,
        measured: Measured,
        status: Status,
        failure: Failure | None,
        hardware: Hardware,
        asking: bool = True,
    ) -> RunRecord:
        trainer, launch = self._trainer, self._launch
        timed, notes = _timed(measured), [*measured.notes, *hardware.notes]
        steps = mean_over_ranks(timed)
        level = steadiness([row.time("step") for row in steps], measured.recompilations) if steps else None
        steady = steps[level.cut :] if level is not None else []
        usual = typical(steady)
        times, host_times = summaries(steady, "device"), summaries(steady, "host")
        tokens = throughput(steady, times, hardware.samples)
        utilisation = try_or_note("utilisation", lambda: self._utilisation(times["step"].median, hardware), notes)
        surroundings = try_or_note("environment", self._environment, notes) if asking else None
        memory = _memory(timed, measured)
        free = free_share(memory.measured.allocated_peak, surroundings.device_bytes if surroundings else None)
        other_use = try_or_note("contention", lambda: contention(measured.cpu_uses), notes)
        verdict = try_or_note(
            "verdict",
            lambda: self._verdict(
                usual,
                why_unsure(level, len(steady), other_use),
                measured.device_idle,
                utilisation,
                tokens,
                free,
                hardware.kernels,
            ),
            notes,
        )
        first = [row.host_time("step") for row in measured.rows if row.step == 1]
        return RunRecord(
            **launch.facts(),
            status=status,
            failure=failure,
            verb=self._verb,
            environment=surroundings,
            model=try_or_note("model", lambda: model_facts(trainer, self._module), notes),
            steps={stage: len({r.step for r in measured.rows if r.stage == stage}) for stage in measured.planned},
            steps_planned=dict(measured.planned),
            first_step_s=max(first, default=None),
            between_steps_s=measured.between_steps_s,
            time=times,
            host_time=host_times,
            shares=shares(usual),
            odd_steps=odd(steady),
            rank_step_s=rank_medians(timed),
            memory=memory,
            throughput=tokens,
            steadiness=level,
            utilisation=utilisation,
            telemetry=_telemetry(measured.telemetry, steady, tokens.tokens_per_step),
            contention=other_use,
            syncs=measured.syncs,
            numerics=hardware.numerics,
            verdict=verdict,
            notes=notes,
        )

    def _environment(self) -> Environment:
        if self._surroundings is None:  # asking git and drivers takes a moment
            self._surroundings = environment(self._device, self._trainer.world_size)
        return self._surroundings

    @property
    def _device(self) -> torch.device:
        return self._trainer.strategy.root_device

    def _utilisation(self, step_s: float | None, hardware: Hardware) -> Utilisation | None:
        # Ranks on the CPU share its cores: they are one device.
        devices = 1 if self._device.type == "cpu" else self._trainer.world_size
        return judge_utilisation(
            hardware.flops,
            step_s,
            device_name(self._device),
            run_dtype(self._trainer),
            devices,
            hardware.ceiling,
            hardware.peak_flops_per_s,
        )

    def _verdict(
        self,
        steps: Sequence[StepRow],
        unsure: Unsure | None,
        device_idle: float | None,
        utilisation: Utilisation | None,
        tokens: Throughput,
        memory_free_share: float | None,
        kernels: KernelTable | None,
    ) -> Verdict | None:
        trainer, per_step = self._trainer, tokens.tokens_per_step
        per_batch = None if per_step is None else per_step // batches_per_step(trainer, self._verb)
        recomputes = None if utilisation is None else utilisation.flops.recomputation > 0
        settings = settings_of(trainer, self._module, per_batch, recomputes, memory_free_share)
        return judge(steps, unsure, self._device.type != "cpu", device_idle, utilisation, settings, kernels)

    def _log_scalars(self, steps: Sequence[StepRow], record: RunRecord) -> None:
        if not steps:
            return
        ideal_s = ideal_step_s(record)
        write_scalars(self.folder, ((row.step, scalars(row, ideal_s)) for row in steps))


def _timed(measured: Measured) -> list[StepRow]:
    return [row for row in measured.rows if row.stage == "measure" and row.seconds is not None]


def _memory(timed: Sequence[StepRow], measured: Measured) -> MemoryFacts:
    return MemoryFacts(
        measured=_reading(largest(row.memory for row in timed)),
        parts={part: _reading(peaks) for part, peaks in measured.part_peaks.items()},
        causes={part: by_cause(held.peak, held.holdings) for part, held in measured.held.items()},
        held=measured.levels,
        allocator=measured.allocator,
    )


def _reading(peaks: Peaks) -> MemoryReading:
    return MemoryReading(**dict(zip(MEMORY, peaks, strict=True)))


def _telemetry(reading: Telemetry | None, steps: Sequence[StepRow], tokens: int | None) -> Telemetry | None:
    """With a step's share of the energy, which goes by its time."""
    if reading is None or reading.energy_j is None or not reading.duration_s or not steps:
        return reading
    mean_s = sum(row.time("step") for row in steps) / len(steps)
    per_step = reading.energy_j * mean_s / reading.duration_s
    shares = {"energy_per_step_j": per_step, "energy_per_token_j": per_step / tokens if tokens else None}
    return reading.model_copy(update=shares)
