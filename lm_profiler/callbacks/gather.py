"""What the ranks send each other, and the merging of what they measured.

Nothing here is a collective call: every rank must keep the order of training's collectives, and a rank whose
instruments failed would leave the others waiting for ever. The store in which torch's process group was set up has no
order, and every wait has an end. It listens without a password: its content is JSON of declared types and of
bounded size, checked like a file from a stranger. Whoever reaches it can send figures, but no code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import numpy as np
import torch.distributed
from pydantic import BaseModel, ConfigDict

from lm_profiler.analysis.ranks.rank_timeline import with_waits
from lm_profiler.callbacks.instruments.instrument import Measured
from lm_profiler.callbacks.instruments.work import of_all_ranks
from lm_profiler.measure.boundary import said
from lm_profiler.measure.device.nvml import together
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.run_record import json_of
from lm_profiler.record.steps import UNKNOWN, StepTable, largest_peaks
from lm_profiler.record.text import ranks_text
from lm_profiler.torch_names import DEFAULT_STORE

_PATIENCE_S = 60.0  # seconds to wait for what another rank sends: all do the same steps, so none is far behind

# Most bytes that a rank sends, some 30,000 steps; a rank with more has them read from its file. Torch refuses
# values beyond 8 MiB (MAX_PAYLOAD_LEN of TCPStoreLibUvBackend.cpp).
MOST_BYTES = 8 * 1024**2 - 1024

# Numbers this process's runs. All ranks begin the same runs in the same order, so that the numbers agree.
_RUNS = count()

Value = TypeVar("Value", str, int)


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants", defer_build=True)


class _Answer(_Message):
    """What rank 0 found out for all ranks, or why it could not."""

    value: str | int | None = None
    error: str | None = None


class _Measurements(_Message):
    rows: StepTable
    rest: Measured


def packed(measured: Measured) -> bytes:
    """Return ``measured`` as bytes for ``unpacked``; empty where it is too large to be sent."""
    message = _Measurements(rows=StepTable.from_rows(measured.rows), rest=replace(measured, rows=()))
    content = json_of(message).encode()
    return content if len(content) <= MOST_BYTES else b""


def unpacked(content: bytes, rank: int) -> Measured:
    """Return what ``rank`` packed.

    Raises:
        ValueError: it was too large, or is not what our ranks send.
    """
    if not 0 < len(content) <= MOST_BYTES:
        raise ValueError(f"they have more than {MOST_BYTES:,} bytes")
    message = _Measurements.model_validate_json(content)
    rows, rest = message.rows, message.rest
    # The types are checked; relations between fields, which types cannot express, are checked here.
    lengths = {len(getattr(rows, name)) for name in rows.__dataclass_fields__}
    others = {each.rank for each in rest.timelines} - {rank}
    if len(lengths) > 1 or others or rest.rows or rest.ranks_heard != 1 or np.any(rows.rank != rank):
        raise ValueError(f"its columns differ in length, or are not of rank {rank}")
    return replace(rest, rows=rows)


@dataclass(eq=False)
class Exchange:
    """Passes data between the ranks of a run, each of which must make one; a single process gets its own data back."""

    store: Any = None  # the store that all ranks see; None where this process is alone
    rank: int = 0  # the rank of this process
    ranks: int = 1  # the number of ranks
    patience_s: float = _PATIENCE_S  # how long one rank waits for another
    _run: int = field(default_factory=_RUNS.__next__)
    _asked: Iterator[int] = field(default_factory=count)

    @staticmethod
    def of_process_group() -> Exchange:
        """Return the exchange of torch's default process group; without one, the exchange of a single process."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return Exchange()
        store = DEFAULT_STORE.find()()
        # Half of the group's own limit: while a rank waits longer, the others' collectives time out.
        patience_s = min(_PATIENCE_S, store.timeout.total_seconds() / 2)
        return Exchange(store, torch.distributed.get_rank(), torch.distributed.get_world_size(), patience_s)

    def of_first(self, what: str, find: Callable[[], Value]) -> Value:
        """Return on every rank what ``find`` returns on rank 0. All ranks have to ask in the same order.

        Raises:
            Exception: ``find`` raised on rank 0, or its answer is not in our format, or did not come in time.
        """
        if self.store is None:
            return find()
        key = self.key(what, next(self._asked))
        if self.rank > 0:
            answer = _Answer.model_validate_json(self._get(key, self.patience_s))
            if answer.value is None:
                raise RuntimeError(f"rank 0 has no {what}: {answer.error}")
            return answer.value  # type: ignore[return-value]  # all ranks ask for the same
        try:
            value = find()
        except BaseException as error:  # also Ctrl-C: the other ranks wait for an answer
            self.store.set(key, _Answer(error=said(error)).model_dump_json())
            raise
        self.store.set(key, _Answer(value=value).model_dump_json())
        return value

    def gather(self, measured: Measured) -> Measured:
        """Return what all ranks measured, with a note on silent ranks; on ranks other than 0, return ``measured``."""
        if self.store is None:
            return measured
        if self.rank > 0:
            self.store.set(self.key("measured", self.rank), packed(measured))
            return measured
        # One limit for all ranks together: one for each would add up to hours.
        everyone, missing, unread, until = {0: measured}, [], [], time.monotonic() + self.patience_s
        for rank in range(1, self.ranks):
            key = self.key("measured", rank)
            try:
                content = self._get(key, max(until - time.monotonic(), 0.01))
                self.store.delete_key(key)  # it may be large
                everyone[rank] = unpacked(content, rank)
            except RuntimeError:
                missing.append(rank)
            except ValueError as error:  # not from our ranks: whoever reaches the store's port can write to it
                unread.append(f"what came as measurements of rank {rank} is not used: {said(error)}")
        merged = merge(everyone)
        silent = [f"{ranks_text(missing)} sent no measurements in time"] if missing else []
        notes = [*merged.notes, *silent, *unread]
        return replace(merged, timelines=with_waits(merged.timelines), notes=notes)

    def key(self, *what: object) -> str:
        """Return a key in the store that no other run uses."""
        return "/".join(("lm_profiler", str(self._run), *map(str, what)))

    def _get(self, key: str, patience_s: float) -> bytes:
        self.store.wait([key], timedelta(seconds=patience_s))
        value: bytes = self.store.get(key)
        return value


def merge(of_ranks: Mapping[int, Measured]) -> Measured:
    """Merge what the ranks measured, rank 0 first. Fields that are not merged are rank 0's."""
    measured = [*of_ranks.values()]
    parts = [part for part in PARTS if any(part in m.part_peaks for m in measured)]
    return replace(
        measured[0],
        rows=StepTable.concatenate([StepTable.from_rows(m.rows) for m in measured]),
        batch_counts=[counts for m in measured for counts in m.batch_counts],
        ranks_heard=sum(m.ranks_heard for m in measured),
        part_peaks={part: largest_peaks(m.part_peaks.get(part, UNKNOWN) for m in measured) for part in parts},
        telemetry=together([m.telemetry for m in measured]),
        cpu_uses=[use for m in measured for use in m.cpu_uses],
        counters=[counters for m in measured for counters in m.counters],
        seen_flops=of_all_ranks([m.seen_flops for m in measured]),
        recompilations=sum(m.recompilations for m in measured),
        timelines=[timeline for m in measured for timeline in m.timelines],
        notes=_merge_notes((note, rank) for rank, m in of_ranks.items() for note in m.notes),
    )


def _merge_notes(notes: Iterable[tuple[str, int]]) -> list[str]:
    """Return each note once, with all ranks that wrote it; a note of rank 0 alone does not name the rank."""
    saying: dict[str, set[int]] = {}
    for note, rank in notes:
        saying.setdefault(note, set()).add(rank)
    return [note if ranks == {0} else f"{ranks_text(ranks)}: {note}" for note, ranks in saying.items()]
