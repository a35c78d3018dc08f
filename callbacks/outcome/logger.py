"""The logger of a run whose user chose none."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch.loggers import TensorBoardLogger


class EventsLogger(TensorBoardLogger):
    """Lightning's, but leaves no empty ``hparams.yaml``, nor HPARAMS beside which TensorBoard shows no others."""

    def __init__(self, save_dir: str | Path, name: str | None, version: int | str | None) -> None:
        super().__init__(save_dir, name, version, default_hp_metric=False)

    def save(self) -> None:
        if self.hparams:
            super().save()
        else:
            self.experiment.flush()
