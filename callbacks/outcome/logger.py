"""The logger of a run whose user chose none."""

from __future__ import annotations

from lightning.pytorch.loggers import TensorBoardLogger


class EventsLogger(TensorBoardLogger):
    """Lightning's, but leaves no empty ``hparams.yaml``."""

    def save(self) -> None:
        if self.hparams:
            super().save()
        else:
            self.experiment.flush()
