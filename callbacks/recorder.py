"""Turns rows into the record: steps.csv, run.json, TensorBoard scalars and the table on the terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lm_profiler.measure.environment import environment
from lm_profiler.record.files import claim_run_dir, write_whole
from lm_profiler.record.quantities import MEMORY
from lm_profiler.record.run import (
    Failure,
    MemoryFacts,
    MemoryReading,
    ModelFacts,
    RunRecord,
    Status,
    Verb,
    write_run,
)
from lm_profiler.record.steps import Peaks, StepRow, largest, write_steps
from lm_profiler.report.summary import mean_over_ranks, rank_medians, scalars, summaries, throughput


@dataclass(frozen=True)
class Launch:
    """How the run was started: what a reader needs to start it again."""

    name: str = "lm_profiler"
    command: str = ""
    config: Mapping[str, Any] | None = None
    config_yaml: str | None = None
    started: float = field(default_factory=time.time)


@dataclass(frozen=True)
class Measured:
    """All that a run has to say when it ends, of every rank."""

    rows: Sequence[StepRow]
    part_peaks: Mapping[str, Peaks]
    planned: Mapping[str, int]
    between_steps_s: float | None
    notes: Sequence[str]


def run_folder(trainer: Trainer, launch: Launch) -> Path:
    """The folder of this run, made by rank 0 and known to all: the logger's, or a new one under default_root_dir.

    A folder that holds a record already belongs to another run.
    """
    logger = next((x for x in trainer.loggers if isinstance(x, (TensorBoardLogger, CSVLogger))), None)
    folder: Path | None = None
    if trainer.is_global_zero:
        if logger is None:
            folder = claim_run_dir(Path(trainer.default_root_dir) / launch.name)
        else:
            folder = Path(logger.log_dir)
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / "run.json").exists():
                folder = claim_run_dir(folder.parent)
    return Path(str(trainer.strategy.broadcast(str(folder))))


class Recorder:
    """Writes one run's files into ``folder``; on rank 0 only."""

    def __init__(
        self, folder: Path, launch: Launch, trainer: Trainer, module: LightningModule, verb: Verb
    ) -> None:
        self.folder = folder
        self._launch = launch
        self._trainer = trainer
        self._module = module
        self._verb: Verb = verb
        if launch.config_yaml is not None:
            write_whole(folder / "config.yaml", launch.config_yaml)

    def write(self, measured: Measured, status: Status, failure: Failure | None) -> RunRecord:
        """Write steps.csv, then run.json, then the scalars."""
        write_steps(self.folder / "steps.csv", measured.rows)
        record = self._record(measured, status, failure)
        write_run(self.folder, record)
        self._log_scalars(mean_over_ranks([row for row in measured.rows if row.stage == "measure"]))
        return record

    def _record(self, measured: Measured, status: Status, failure: Failure | None) -> RunRecord:
        trainer, launch = self._trainer, self._launch
        timed = [row for row in measured.rows if row.stage == "measure"]
        steps = mean_over_ranks(timed)
        first = [row.host_time("step") for row in measured.rows if row.step == 1]
        times = summaries(steps, "device")
        return RunRecord(
            name=launch.name,
            status=status,
            failure=failure,
            verb=self._verb,
            started=datetime.fromtimestamp(launch.started, timezone.utc).isoformat(timespec="seconds"),
            duration_s=max(time.time() - launch.started, 0.0),
            command=launch.command,
            config=dict(launch.config) if launch.config is not None else None,
            environment=environment(trainer.strategy.root_device, trainer.world_size),
            model=model_facts(trainer, self._module),
            steps={
                stage: len({r.step for r in measured.rows if r.stage == stage}) for stage in measured.planned
            },
            steps_planned=dict(measured.planned),
            first_step_s=max(first, default=None),
            between_steps_s=measured.between_steps_s,
            time=times,
            host_time=summaries(steps, "host"),
            rank_step_s=rank_medians(timed),
            memory=_memory(timed, measured.part_peaks),
            throughput=throughput(steps, times),
            notes=list(measured.notes),
        )

    def _log_scalars(self, steps: Sequence[StepRow]) -> None:
        if not steps:
            return
        loggers = list(self._trainer.loggers)
        if not any(isinstance(logger, TensorBoardLogger) for logger in loggers):
            loggers.append(TensorBoardLogger(self.folder.parent, name=None, version=self.folder.name))
        for logger in loggers:
            for row in steps:
                logger.log_metrics(scalars(row), step=row.step)
            logger.save()


def model_facts(trainer: Trainer, module: LightningModule) -> ModelFacts:
    """Facts of the profiled module, as it stands after set-up."""
    parameters = list(module.parameters())
    embeddings = {id(m.weight) for m in module.modules() if type(m).__name__ == "Embedding"}
    total = sum(p.numel() for p in parameters)
    return ModelFacts(
        class_path=f"{type(module).__module__}.{type(module).__qualname__}",
        parameters=total,
        parameters_without_embedding=total - sum(p.numel() for p in parameters if id(p) in embeddings),
        trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        bytes=sum(t.numel() * t.element_size() for t in (*parameters, *module.buffers())),
        precision=str(trainer.precision),
        optimizers=[type(optimizer).__name__.lstrip("_") for optimizer in trainer.optimizers],
        accumulate_grad_batches=trainer.accumulate_grad_batches,
    )


def _memory(timed: Sequence[StepRow], parts: Mapping[str, Peaks]) -> MemoryFacts:
    return MemoryFacts(
        measured=_reading(largest(row.memory for row in timed)),
        parts={part: _reading(p) for part, p in parts.items()},
    )


def _reading(peaks: Peaks) -> MemoryReading:
    return MemoryReading(**dict(zip(MEMORY, peaks, strict=True)))
