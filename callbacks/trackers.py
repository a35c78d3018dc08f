"""Sends the figures of a run to the loggers of the user's own Trainer, once the stages are over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lm_profiler.measure.boundary import said
from lm_profiler.record.figure import Place
from lm_profiler.record.quantities import QUANTITIES
from lm_profiler.record.run import RunRecord

_PATIENCE_S = 10.0
"""Seconds that a tracker has to take the figures: one that cannot reach its server must not hold up training."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Where the results go beside the run's own folder.

    Args:
        trackers: Log the run's figures to each logger of the Trainer, as lm_profiler/<name> in SI units, when the
            stages are over: TensorBoard, CSV, W&B, MLflow, Comet, Neptune or any other.
    """

    trackers: bool = False


def figures(record: RunRecord) -> dict[str, float]:
    """Return the figures that files for programs have, by names that every tracker takes; unknown ones are left out."""
    known = {name: of.get(record) for name, of in QUANTITIES.items() if of.place <= Place.FILE and not of.is_text}
    return {
        f"lm_profiler/{name}": float(value)
        for name, value in known.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def send_figures(
    loggers: Sequence[Any],
    record: RunRecord,
    step: int,
    tell: Callable[[str], object],
    patience_s: float = _PATIENCE_S,
) -> None:
    """Log the figures of ``record`` to each of ``loggers`` as those of the Trainer's ``step``.

    What fails is told, and so is a logger that is not done after ``patience_s`` seconds: it may go on by itself.
    """
    values = figures(record)
    for logger in loggers:
        failed: list[BaseException] = []

        def log(logger: Any = logger, failed: list[BaseException] = failed) -> None:
            try:
                logger.log_metrics(values, step=step)
                logger.save()
            except BaseException as error:  # in a thread of its own nobody else would see it
                failed.append(error)

        # A thread, because only a thread can be left behind.
        thread = threading.Thread(target=log, name="lm_profiler-tracker", daemon=True)
        thread.start()
        thread.join(patience_s)
        name = type(logger).__name__
        if failed:
            tell(f"{name} did not take the figures: {said(failed[0])}")
        elif thread.is_alive():
            tell(f"{name} has not taken the figures within {patience_s:.0f} s; training goes on")
