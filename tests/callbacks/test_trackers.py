"""The results of a run in the user's own loggers, with the real trackers, which need no network."""

import csv
import json
import re
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
import yaml
from faults import Tiny
from known_loop import make_profiler, trainer_with
from lightning.pytorch.loggers import CometLogger, CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from stored_texts import assert_stored
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from lm_profiler.callbacks import ExportOptions, TrainingProfiler, WatchOptions, trackers
from lm_profiler.callbacks.trackers import figures
from lm_profiler.record.figure import Place
from lm_profiler.record.quantities import QUANTITIES
from lm_profiler.record.watch_files import read_windows

# the trackers use what their own libraries call deprecated
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.usefixtures("counted_apart")]


@pytest.fixture(autouse=True)
def patient(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no fault of a tracker."""
    monkeypatch.setattr(trackers, "PATIENCE_S", getattr(request, "param", 300.0))


def fit_with_tracker(folder: Path, *loggers: Logger, trace_steps: int = 0) -> TrainingProfiler:
    profiler = make_profiler(
        warmup=1, measure=4, trace=trace_steps, log_dir=folder, export=ExportOptions(trackers=True)
    )
    trainer = trainer_with([profiler], folder, max_steps=8, log_every_n_steps=1, logger=[*loggers])
    trainer.fit(Tiny(), DataLoader(torch.rand(64, 4), batch_size=4))
    return profiler


def test_a_tracker_gets_the_main_figures(tmp_path: Path) -> None:
    """Those that tables have, at most twelve."""
    lines = CSVLogger(tmp_path / "csv")
    record = fit_with_tracker(tmp_path / "logs", lines).record
    with Path(lines.log_dir, "metrics.csv").open(encoding="utf-8") as file:
        [row] = [row for row in csv.DictReader(file) if row.get("lm_profiler/step_s")]
    assert float(row["lm_profiler/step_s"]) == pytest.approx(record.time["step"].mean, rel=1e-6)
    logged = {name for name in row if name.startswith("lm_profiler/")}
    of_tables = {f"lm_profiler/{name}" for name, quantity in QUANTITIES.items() if quantity.place <= Place.TABLE}
    assert logged == set(figures(record)) <= of_tables
    assert {"lm_profiler/step_s", "lm_profiler/forward_s"} <= logged
    assert len(logged) <= 12

    all_figures = figures(record, "all")
    assert len(all_figures) > 100
    assert logged <= set(all_figures)
    allowed_by_mlflow = re.compile(r"[a-zA-Z0-9_/. -]+")
    assert [name for name in all_figures if not allowed_by_mlflow.fullmatch(name)] == []

    parameters = yaml.safe_load(Path(lines.log_dir, "hparams.yaml").read_text(encoding="utf-8"))
    assert parameters["lm_profiler/parameters"] == sum(parameter.numel() for parameter in Tiny().parameters())
    assert parameters["lm_profiler/accumulate_grad_batches"] == 1


def test_tensorboard_gets_the_main_figures_as_scalars(tmp_path: Path) -> None:
    board = TensorBoardLogger(tmp_path / "board")
    record = fit_with_tracker(tmp_path / "logs", board).record
    events = EventAccumulator(board.log_dir)
    events.Reload()
    [scalar] = events.Scalars("lm_profiler/step_s")
    assert scalar.value == pytest.approx(record.time["step"].mean, rel=1e-6)
    tags = set(events.Tags()["scalars"])
    assert set(figures(record)) <= tags
    assert "hp_metric" not in tags


class Failing(CSVLogger):
    def log_metrics(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("the server is gone")


class Blocking(CSVLogger):
    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        if any(name.startswith("lm_profiler/") for name in metrics):
            NOW.wait(60.0)


NOW = threading.Event()  # the server answers again


@pytest.mark.parametrize("patient", [0.1], indirect=True)
def test_loggers_that_block_or_raise_are_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    last = CSVLogger(tmp_path / "b")
    profiler = fit_with_tracker(tmp_path / "logs", Blocking(tmp_path / "a"), Failing(tmp_path / "c"), last)
    NOW.set()
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lm_profiler: ")]
    assert_stored("callbacks/notes: a logger that blocks", {"warnings": lines})
    assert profiler.record.status == "ok"
    assert "lm_profiler/" in Path(last.log_dir, "metrics.csv").read_text()


@pytest.mark.usefixtures("hands_over_often")
def test_a_watched_run_logs_its_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole window, and the steps that are left."""
    monkeypatch.setattr("lm_profiler.callbacks.watch_output._STEPS_OF_WINDOW", 100)
    steps, watch = 150, WatchOptions(traces=False)
    lines = CSVLogger(tmp_path / "csv")
    export = ExportOptions(trackers=True)
    profiler = make_profiler(warmup=1, measure=4, log_dir=tmp_path / "logs", export=export, watch=watch)
    data = DataLoader(torch.rand(steps, 4), batch_size=1)
    trainer_with([profiler], tmp_path, max_steps=steps, logger=lines).fit(Tiny(), data)
    with Path(lines.log_dir, "metrics.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row.get("lm_profiler/watch/step_s")]
    windows = read_windows(next((tmp_path / "logs").glob("*/version_*")))
    assert len(windows) == 2
    assert sum(window.steps for window in windows) == steps - 5  # those of the stages are in none
    for row, window in zip(rows, windows, strict=True):  # each at its own last step, the last window too
        assert float(row["lm_profiler/watch/step_s"]) == pytest.approx(window.seconds["step"].mean, rel=1e-6)
        assert int(row["step"]) == window.first_step + window.steps - 1


def artifacts_of(profiler: TrainingProfiler) -> set[str]:
    """Names of the files that a tracker keeps, which are in the run's folder."""
    page, trace = profiler.folder / "report.html", profiler.folder / "trace" / "rank0.pt.trace.json.gz"
    assert page.exists()
    assert trace.exists()
    return {page.name, trace.name}


def test_mlflow_receives_figures_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database takes seconds to be made
    logger = MLFlowLogger("profiles", tracking_uri=f"file:{tmp_path}/mlflow", artifact_location=f"{tmp_path}/kept")
    profiler = fit_with_tracker(tmp_path / "logs", logger, trace_steps=1)
    metrics = logger.experiment.get_run(logger.run_id).data.metrics
    kept = {key: value for key, value in metrics.items() if key.startswith("lm_profiler/")}
    assert kept == pytest.approx(figures(profiler.record))
    [metric] = logger.experiment.get_metric_history(logger.run_id, "lm_profiler/step_s")
    assert metric.step == 7  # after the stages
    assert {path.name for path in (tmp_path / "kept").rglob("*.*")} == artifacts_of(profiler)


def test_wandb_receives_figures_and_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    artifacts: list[wandb.Artifact] = []
    monkeypatch.setattr("wandb.sdk.wandb_run.Run.log_artifact", lambda run, artifact: artifacts.append(artifact))
    logger = WandbLogger(project="profiles", save_dir=tmp_path, offline=True)
    profiler = fit_with_tracker(tmp_path / "logs", logger, trace_steps=1)
    kept = {name: value for name, value in dict(logger.experiment.summary).items() if name in figures(profiler.record)}
    wandb.finish()
    assert kept == pytest.approx(figures(profiler.record))
    [artifact] = artifacts
    assert artifact.type == "profile"
    assert artifact.manifest.entries.keys() == artifacts_of(profiler)


def test_comet_receives_figures_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMET_START_ONLINE", "false")  # with online=False Lightning disables the experiment instead
    off = ("log_env_details", "log_code", "log_git_metadata", "auto_output_logging")
    logger = CometLogger(api_key="x" * 25, offline_directory=str(tmp_path / "comet"), **dict.fromkeys(off, False))
    profiler = fit_with_tracker(tmp_path / "logs", logger, trace_steps=1)
    logger.experiment.end()
    [kept] = (tmp_path / "comet").glob("*.zip")
    with zipfile.ZipFile(kept) as files:
        messages = [json.loads(line) for line in files.read("messages.json").decode().splitlines()]
    payloads = [message["payload"] for message in messages]
    values = {
        payload["metric"]["metricName"]: payload["metric"]["metricValue"] for payload in payloads if "metric" in payload
    }
    assert {name: values[name] for name in figures(profiler.record)} == pytest.approx(figures(profiler.record))
    assets = {payload["additional_params"]["fileName"] for payload in payloads if payload.get("upload_type") == "asset"}
    assert assets == artifacts_of(profiler)
