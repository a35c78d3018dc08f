"""Exchanges data between ranks, and merges their measurements.

Ranks use the store of torch's process group, not collective calls: training relies on the order of its collectives, and
a rank whose instruments failed would leave the others waiting forever. Every wait for the store has a time limit. The
store has no password, so its content is JSON of declared types and limited size, checked like an untrusted file. A
process that can reach the store can send figures, but no code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import chain, count
from typing import Any, TypeVar

import numpy as np
import torch.distributed
from pydantic import BaseModel, ConfigDict

from lm_profiler.analysis.ranks.rank_timeline import with_waits
from lm_profiler.callbacks.instruments.instrument import Measured
from lm_profiler.callbacks.instruments.work import sum_over_ranks
from lm_profiler.measure.boundary import error_text
from lm_profiler.measure.device.nvml import combine_telemetry
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.run_record import json_of
from lm_profiler.record.steps import Peaks, StepTable, largest_peaks
from lm_profiler.record.text import ranks_text
from lm_profiler.torch_names import DEFAULT_STORE

# How long to wait for data from another rank. All ranks do the same steps, so none is far behind.
_PATIENCE_S = 60.0

# The most bytes that a rank sends, some 30,000 steps. If a rank has more, they are read from its file. torch refuses
# values beyond 8 MiB (MAX_PAYLOAD_LEN of TCPStoreLibUvBackend.cpp).
MOST_BYTES = 8 * 1024**2 - 1024

# Numbers the runs of this process. All ranks begin the same runs in the same order, so their numbers agree.
_RUN_NUMBERS = count()

Value = TypeVar("Value", str, int)
Item = TypeVar("Item")


class _Message(BaseModel):
    model_config = ConfigDict(
        extra="forbid", ser_json_inf_nan="constants", defer_build=True
    )


class _Answer(_Message):
    """The result of rank 0 for all ranks, or the reason why there is none."""

    value: str | int | None = None
    error: str | None = None


class _Measurements(_Message):
    rows: StepTable
    rest: Measured


def packed(measured: Measured) -> bytes:
    """Return ``measured`` as bytes, which ``unpacked`` reads; empty if there are too many to send."""
    rows = StepTable.from_rows(measured.rows)
    message = _Measurements(rows=rows, rest=replace(measured, rows=()))
    content = json_of(message).encode()
    if len(content) > MOST_BYTES:
        return b""
    return content


def unpacked(content: bytes, rank: int) -> Measured:
    """Return the measurements that ``rank`` has packed into ``content``.

    Raises:
        ValueError: they were too large to be sent, or are not what a rank sends.
    """
    if not content:
        raise ValueError("they are empty")
    if len(content) > MOST_BYTES:
        raise ValueError(f"they are larger than {MOST_BYTES:,} bytes")
    message = _Measurements.model_validate_json(content)
    rows, rest = message.rows, message.rest
    # The types are checked by now. Relations between fields, which types cannot express, are checked here.
    column_lengths = {len(getattr(rows, name)) for name in rows.__dataclass_fields__}
    timeline_ranks = {timeline.rank for timeline in rest.timelines}
    is_of_one_rank = (
        rest.ranks_heard == 1 and np.all(rows.rank == rank) and timeline_ranks <= {rank}
    )
    if len(column_lengths) > 1 or rest.rows or not is_of_one_rank:
        raise ValueError(
            f"the columns differ in length, or do not belong to rank {rank}"
        )
    return replace(rest, rows=rows)


@dataclass(eq=False)
class Exchange:
    """Passes data between the ranks of a run. Each rank must make one; a single process gets its own data back."""

    store: Any = None  # the store that all ranks see; None if this process is alone
    rank: int = 0  # the rank of this process
    ranks: int = 1  # the number of ranks
    patience_s: float = _PATIENCE_S  # how long one rank waits for another
    _run: int = field(default_factory=_RUN_NUMBERS.__next__)
    _question_numbers: Iterator[int] = field(default_factory=count)

    @staticmethod
    def of_process_group() -> Exchange:
        """Return the exchange of torch's default process group; without one, the exchange of a single process."""
        if (
            not torch.distributed.is_available()
            or not torch.distributed.is_initialized()
        ):
            return Exchange()
        store = DEFAULT_STORE.find()()
        # At most half of the group's own limit, because while a rank waits the collectives of the others may time out.
        group_limit_s = store.timeout.total_seconds()
        return Exchange(
            store=store,
            rank=torch.distributed.get_rank(),
            ranks=torch.distributed.get_world_size(),
            patience_s=min(_PATIENCE_S, group_limit_s / 2),
        )

    def from_rank_0(self, subject: str, find: Callable[[], Value]) -> Value:
        """Return on every rank what ``find`` returns on rank 0. All ranks have to call it in the same order.

        Raises:
            Exception: ``find`` raised on rank 0, or its answer has another format or did not come in time.
        """
        if self.store is None:
            return find()
        key = self.key(subject, next(self._question_numbers))
        if self.rank > 0:
            content = self._get(key, self.patience_s)
            answer = _Answer.model_validate_json(content)
            if answer.value is None:
                raise RuntimeError(f"rank 0 has no {subject}: {answer.error}")
            return answer.value  # type: ignore[return-value]  # all ranks pass the same type
        try:
            value = find()
        except BaseException as error:
            # also for Ctrl-C, because the other ranks wait for an answer
            self._put(key, _Answer(error=error_text(error)))
            raise
        self._put(key, _Answer(value=value))
        return value

    def gather(self, measured: Measured) -> Measured:
        """On rank 0, return the measurements of all ranks, with a note on silent ranks; else return ``measured``."""
        if self.store is None:
            return measured
        if self.rank > 0:
            self.store.set(self.key("measured", self.rank), packed(measured))
            return measured

        by_rank = {0: measured}
        silent_ranks: list[int] = []
        problems: list[str] = []
        # One time limit for all ranks together: separate limits would add up to hours.
        deadline_s = time.monotonic() + self.patience_s
        for rank in range(1, self.ranks):
            seconds_left = deadline_s - time.monotonic()
            try:
                content = self._take(
                    self.key("measured", rank), patience_s=max(seconds_left, 0.01)
                )
                by_rank[rank] = unpacked(content, rank)
            except RuntimeError:
                silent_ranks.append(rank)
            except ValueError as error:
                # Any process that can reach the store's port can write to it.
                problems.append(
                    f"the measurements of rank {rank} are invalid and not used: {error_text(error)}"
                )
        if silent_ranks:
            problems.insert(
                0, f"{ranks_text(silent_ranks)} sent no measurements in time"
            )
        merged = merge(by_rank)
        return replace(
            merged,
            timelines=with_waits(merged.timelines),
            notes=[*merged.notes, *problems],
        )

    def key(self, *parts: object) -> str:
        """Return a key in the store that no other run uses."""
        names = ["lm_profiler", str(self._run)]
        names.extend(str(part) for part in parts)
        return "/".join(names)

    def _put(self, key: str, message: _Message) -> None:
        self.store.set(key, message.model_dump_json())

    def _get(self, key: str, patience_s: float) -> bytes:
        self.store.wait([key], timedelta(seconds=patience_s))
        value: bytes = self.store.get(key)
        return value

    def _take(self, key: str, patience_s: float) -> bytes:
        """Get the value of ``key`` and delete it, since it may be large."""
        value = self._get(key, patience_s)
        self.store.delete_key(key)
        return value


def merge(by_rank: Mapping[int, Measured]) -> Measured:
    """Merge the measurements of the ranks, of which rank 0 comes first. Fields that are not merged are rank 0's."""
    ranks = list(by_rank.values())
    return replace(
        ranks[0],
        rows=StepTable.concatenate([StepTable.from_rows(rank.rows) for rank in ranks]),
        batch_counts=_joined(rank.batch_counts for rank in ranks),
        ranks_heard=sum(rank.ranks_heard for rank in ranks),
        part_peaks=_peaks_by_part([rank.part_peaks for rank in ranks]),
        telemetry=combine_telemetry([rank.telemetry for rank in ranks]),
        cpu_uses=_joined(rank.cpu_uses for rank in ranks),
        counters=_joined(rank.counters for rank in ranks),
        seen_flops=sum_over_ranks([rank.seen_flops for rank in ranks]),
        recompilations=sum(rank.recompilations for rank in ranks),
        timelines=_joined(rank.timelines for rank in ranks),
        notes=_merged_notes({number: rank.notes for number, rank in by_rank.items()}),
    )


def _joined(parts: Iterable[Iterable[Item]]) -> list[Item]:
    return list(chain.from_iterable(parts))


def _peaks_by_part(ranks: Sequence[Mapping[str, Peaks]]) -> dict[str, Peaks]:
    """Return the largest peaks of each part over all ranks that have it, in the order of the parts."""
    by_part = {}
    for part in PARTS:
        peaks_of_part = [peaks[part] for peaks in ranks if part in peaks]
        if peaks_of_part:
            by_part[part] = largest_peaks(peaks_of_part)
    return by_part


def _merged_notes(by_rank: Mapping[int, Iterable[str]]) -> list[str]:
    """Return each note once, after the ranks that wrote it; a note that only rank 0 wrote names no rank."""
    writers: dict[str, set[int]] = {}
    for rank, notes in by_rank.items():
        for note in notes:
            writers.setdefault(note, set()).add(rank)

    merged = []
    for note, ranks in writers.items():
        if ranks == {0}:
            merged.append(note)
        else:
            merged.append(f"{ranks_text(ranks)}: {note}")
    return merged
