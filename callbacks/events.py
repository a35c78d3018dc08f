"""TensorBoard's event files: ours, with the steps of a run, and the logger of a run whose user chose none."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from lightning.pytorch.loggers import TensorBoardLogger


def write_scalars(folder: Path, scalars: Iterable[tuple[int, Mapping[str, float]]]) -> None:
    """Write the ``scalars`` of each step into an event file of their own in ``folder``.

    Raises:
        OSError: the folder cannot be written to.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder))
    try:
        for step, values in scalars:
            shown = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
            writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=shown)))
    finally:
        writer.close()


class EventsLogger(TensorBoardLogger):
    """Lightning's, but leaves no empty ``hparams.yaml``, nor HPARAMS beside which TensorBoard shows no others."""

    def __init__(self, save_dir: str | Path, name: str | None, version: int | str | None) -> None:
        super().__init__(save_dir, name, version, default_hp_metric=False)

    def save(self) -> None:
        if self.hparams:
            super().save()
        else:
            self.experiment.flush()
