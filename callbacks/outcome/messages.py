"""What ranks send each other, as JSON of declared types: whoever reaches their store can send figures, but no code.

The store of torch's process group listens without a password. So everything that comes from it is checked as a file of
a stranger's would be: its size first, then the type of each value.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from pydantic import BaseModel, ConfigDict

from lm_profiler.callbacks.instruments.instrument import Measured
from lm_profiler.record.run import json_of
from lm_profiler.record.steps import StepTable

# Most bytes that a rank sends: about a million steps. Those of a rank with more are read from its file.
MOST_BYTES = 256 * 1024**2


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants", defer_build=True)


class Answer(_Message):
    """What rank 0 found out for all ranks, or why it could not."""

    value: str | int | None = None
    error: str | None = None


class _Measurements(_Message):
    rows: StepTable
    rest: Measured


def packed(measured: Measured) -> bytes:
    """Return ``measured`` as bytes for ``unpacked``; empty where it is too large to be sent."""
    message = _Measurements(rows=StepTable.of(measured.rows), rest=replace(measured, rows=()))
    content = json_of(message).encode()
    return content if len(content) <= MOST_BYTES else b""


def unpacked(content: bytes, rank: int) -> Measured:
    """Return what ``rank`` packed.

    Raises:
        ValueError: it was too large, or is not what a rank of ours sends.
    """
    if not content:
        raise ValueError(f"they have more than {MOST_BYTES >> 20} MiB")
    message = _Measurements.model_validate_json(content)
    rows, rest = message.rows, message.rest
    # The types are right by now; these are relations between fields, which no type can hold.
    lengths = {len(getattr(rows, name)) for name in rows.__dataclass_fields__}
    others = {*(each.rank for each in rest.timelines), *(each.rank for each in rest.reducers)} - {rank}
    if len(lengths) > 1 or others or rest.rows or rest.ranks_heard != 1 or np.any(rows.rank != rank):
        raise ValueError(f"its columns differ in length, or are not of rank {rank}")
    return replace(rest, rows=rows)
