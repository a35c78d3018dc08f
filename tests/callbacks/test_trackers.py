"""The figures of a run in the user's own loggers: real ones of Lightning, and some that fail or block."""

from __future__ import annotations

import csv
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import Tiny
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from lm_profiler.callbacks import TrainingProfiler, profiling_callbacks
from lm_profiler.callbacks.trackers import figures, send_figures
from lm_profiler.record.quantities import QUANTITIES

pytestmark = pytest.mark.usefixtures("no_rates")


def fitted(folder: Path, *loggers: Logger) -> TrainingProfiler:
    callbacks = profiling_callbacks(1, 4, 0, 0, log_dir=folder, action_steps=0, export_trackers=True)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = Trainer(
        accelerator="cpu", max_steps=6, log_every_n_steps=1, callbacks=callbacks, logger=[*loggers], **quiet
    )
    trainer.fit(Tiny(), DataLoader(torch.rand(64, 4), batch_size=4))
    [profiler] = callbacks
    assert isinstance(profiler, TrainingProfiler)
    return profiler


def test_each_logger_gets_the_figures_of_the_record(tmp_path: Path) -> None:
    board, lines = TensorBoardLogger(tmp_path / "board"), CSVLogger(tmp_path / "csv")
    record = fitted(tmp_path / "logs", board, lines).record
    assert record is not None
    with Path(lines.log_dir, "metrics.csv").open(encoding="utf-8") as file:
        [row] = [row for row in csv.DictReader(file) if row.get("lm_profiler/step_s")]
    assert float(row["lm_profiler/step_s"]) == pytest.approx(record.time["step"].mean, rel=1e-6)
    events = EventAccumulator(board.log_dir)
    events.Reload()
    [scalar] = events.Scalars("lm_profiler/step_s")
    assert scalar.value == pytest.approx(record.time["step"].mean, rel=1e-6)
    assert set(figures(record)) <= set(events.Tags()["scalars"])


def test_names_are_legal_in_every_tracker() -> None:
    names = [f"lm_profiler/{name}" for name in QUANTITIES]
    assert [name for name in names if not re.fullmatch(r"[a-zA-Z0-9_/. -]+", name)] == []  # MLflow's rule


class Failing(CSVLogger):
    def log_metrics(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("the server is gone")


class Blocking(CSVLogger):
    over = threading.Event()

    def log_metrics(self, *_: Any, **__: Any) -> None:
        self.over.wait()


def test_logger_that_raises_is_told_once_and_training_goes_on(tmp_path: Path) -> None:
    profiler = fitted(tmp_path / "logs", Failing(tmp_path / "a"), CSVLogger(tmp_path / "b"))
    assert profiler.record is not None
    assert profiler.record.status == "ok"


def test_what_fails_or_blocks_is_told_and_left(tmp_path: Path) -> None:
    record = fitted(tmp_path / "logs").record
    assert record is not None
    told: list[str] = []
    blocking, last = Blocking(tmp_path / "a"), CSVLogger(tmp_path / "c")
    send_figures([blocking, Failing(tmp_path / "b"), last], record, 5, told.append, patience_s=0.05)
    blocking.over.set()
    assert [line.split()[0] for line in told] == ["Blocking", "Failing"]
    assert Path(last.log_dir, "metrics.csv").exists()
