"""TensorBoard's event files: ours, with the steps of a run, and the logger of a run whose user chose none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from lightning.pytorch.loggers import TensorBoardLogger

from lm_profiler.tensorboard.summary import scalars_summary, write_events


def write_scalars(folder: Path, scalars: Iterable[tuple[int, Mapping[str, float]]]) -> None:
    """Write the ``scalars`` of each step into an event file of their own in ``folder``.

    Raises:
        OSError: the folder cannot be written to.
    """
    write_events(folder, ((step, scalars_summary(values)) for step, values in scalars))


class EventsLogger(TensorBoardLogger):
    """Lightning's, but leaves no empty ``hparams.yaml``, nor HPARAMS beside which TensorBoard shows no others."""

    def __init__(self, save_dir: str | Path, name: str | None, version: int | str | None) -> None:
        super().__init__(save_dir, name, version, default_hp_metric=False)

    def save(self) -> None:
        if self.hparams:
            super().save()
        else:
            self.experiment.flush()
