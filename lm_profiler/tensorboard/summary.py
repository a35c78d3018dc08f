"""The scalars of a run's steps as TensorBoard's own files, written without torch."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path


def write_scalars(folder: Path, steps: Iterable[tuple[int, Mapping[str, float]]]) -> None:
    """Write the values of each step, by their tags, into an event file of their own in ``folder``."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder))
    try:
        for step, values in steps:
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
            writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
    finally:
        writer.close()
