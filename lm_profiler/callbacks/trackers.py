"""Sends results to the Trainer's own loggers: figures to each, and files to those that accept files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

from lm_profiler.callbacks.instruments.profiling_options import TrackedFigures
from lm_profiler.measure.boundary import Guard
from lm_profiler.record.entry import collect
from lm_profiler.record.figure import Place
from lm_profiler.record.quantities import QUANTITIES
from lm_profiler.record.run_record import RunRecord
from lm_profiler.record.watch_files import WatchWindow

PATIENCE_S = 10.0  # seconds that training waits for a tracker to take what is sent
# largest file that is sent: a tracker's server may be far away, or on a free plan
_MOST_BYTES = 64 * 2**20


def figures(record: RunRecord, wanted: TrackedFigures = True) -> dict[str, float]:
    """Return the known figures of a run, by names that every tracker accepts.

    They are the figures of the usual table of runs, or with ``"all"`` those of files for programs.
    """
    place = Place.FILE if wanted == "all" else Place.TABLE
    values = dict[str, float]()
    for name, quantity in QUANTITIES.items():
        if quantity.place > place or quantity.is_text:
            continue
        value = quantity.get(record)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number:
            values[f"lm_profiler/{name}"] = float(value)
    return values


def facts(record: RunRecord) -> dict[str, str | int]:
    """Return the known facts about the model and the machine, for a tracker's hyperparameters."""
    values = dict[str, str | int | None]()
    if record.model is not None:
        values["parameters"] = record.model.parameters
        values["trainable_parameters"] = record.model.trainable_parameters
        values["precision"] = record.model.precision
        values["accumulate_grad_batches"] = record.model.accumulate_grad_batches
    if record.environment is not None:
        values["device"] = record.environment.device_name
        values["world_size"] = record.environment.world_size
    return {
        f"lm_profiler/{name}": value
        for name, value in values.items()
        if value is not None
    }


def window_figures(window: WatchWindow) -> dict[str, float]:
    """Return the mean seconds of the steps of ``window`` and of their parts, under their own names."""
    values = dict[str, float]()
    for part, summary in window.seconds.items():
        if summary.mean is not None:
            values[f"lm_profiler/watch/{part}_s"] = summary.mean
    return values


def _send_to_mlflow(logger: Any, files: Sequence[Path]) -> None:
    for path in files:
        logger.experiment.log_artifact(logger.run_id, str(path), "lm_profiler")


def _send_to_wandb(logger: Any, files: Sequence[Path]) -> None:
    """Send files to Weights & Biases as one artifact."""
    from wandb import Artifact

    artifact = Artifact(f"lm_profiler-{logger.experiment.id}", type="profile")
    for path in files:
        artifact.add_file(str(path))
    logger.experiment.log_artifact(artifact)


def _send_to_comet(logger: Any, files: Sequence[Path]) -> None:
    for path in files:
        logger.experiment.log_asset(str(path), path.name)


# functions that send files to a logger, by its class name, which is the same in both of Lightning's namespaces
_FILE_SENDERS = {
    "MLFlowLogger": _send_to_mlflow,
    "WandbLogger": _send_to_wandb,
    "CometLogger": _send_to_comet,
}


class Tracker:
    """Sends results to one ``logger`` of the Trainer, until the logger fails or blocks for the first time."""

    def __init__(self, logger: Any, report: Callable[[str], object]) -> None:
        kind = type(logger)
        self._guard = Guard(kind.__name__, report, outcome="did not take the results")
        class_names = [base.__name__ for base in kind.__mro__]
        # sends files to the logger; None if it does not accept files
        self.send_files: Callable[[Any, Sequence[Path]], None] | None = None
        for class_name in class_names:
            if class_name in _FILE_SENDERS:
                self.send_files = _FILE_SENDERS[class_name]
                break
        # TensorBoard's logger would add a scalar to the facts, ``hp_metric``. The files in the run's folder show them.
        self._takes_facts = "TensorBoardLogger" not in class_names
        # The plain methods: a watched run later wraps them to time the program's calls, in which ours must not count.
        self._logger = logger
        self._log = logger.log_metrics
        self._save = logger.save

    def send(
        self,
        values: Mapping[str, float],
        step: int,
        files: Sequence[Path] = (),
        facts: Mapping[str, str | int] | None = None,
    ) -> None:
        """Log ``values`` for the Trainer's ``step``, ``files`` if the logger accepts them, and ``facts``.

        ``facts`` become hyperparameters. A logger may block, for example if its server cannot be reached: training
        waits ``PATIENCE_S`` for it.
        """

        def send() -> None:
            self._log(values, step=step)
            if facts and self._takes_facts:
                self._logger.log_hyperparams(dict(facts))
            self._save()
            if self.send_files is not None:
                small_files = [
                    path for path in files if path.stat().st_size <= _MOST_BYTES
                ]
                self.send_files(self._logger, small_files)

        thread = Thread(
            target=self._guard.run, args=(send,), name="lm_profiler export", daemon=True
        )
        thread.start()
        thread.join(PATIENCE_S)
        if thread.is_alive():
            self._guard.disable(f"it did not take the results within {PATIENCE_S:g} s")


def results(folder: Path, trace: Path, report: Callable[[str], object]) -> list[Path]:
    """Write the page of the run in ``folder``; return the paths of the page and of the ``trace``, if they exist."""
    page = folder / "report.html"

    def write() -> None:
        from lm_profiler.report.page.page import write_page

        write_page(collect([folder]), page)

    Guard("the page for the trackers", report, outcome="cannot be written").run(write)
    return [path for path in (page, trace) if path.exists()]
