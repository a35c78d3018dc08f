"""What the ranks send each other, and the merging of what they measured.

Nothing here is a collective call: those of training come in an order that every rank must keep, and a rank whose
instruments failed would leave the others waiting for ever. The store in which torch's process group was set up has no
order, and every wait has an end.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import torch.distributed

from lm_profiler.analysis.why.slack_model import Experiment
from lm_profiler.callbacks.instruments.work import of_all_ranks
from lm_profiler.callbacks.measured import Measured
from lm_profiler.callbacks.outcome.clocks import with_clocks
from lm_profiler.callbacks.outcome.messages import MOST_BYTES, Answer, packed, unpacked
from lm_profiler.measure.boundary import said
from lm_profiler.measure.collectives.alignment import ClockComparison
from lm_profiler.measure.device.telemetry import together
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.steps import UNKNOWN, StepTable, largest
from lm_profiler.record.text import ranks_text
from lm_profiler.torch_names import DEFAULT_STORE

_PATIENCE_S = 60.0
"""For what another rank says: all do the same steps."""

_PIECE_BYTES = 4 * 1024**2
"""Of one value: torch's store refuses those beyond 8 MiB (MAX_PAYLOAD_LEN of TCPStoreLibUvBackend.cpp)."""

_MEASURED = "measured"

_OF_RANK = re.compile(r"rank (\d+): (.*)", re.DOTALL)

_RUNS = count()
"""Of this process. Every rank begins the same runs in the same order, so that a number names the same run on all."""

Value = TypeVar("Value", str, int)


@dataclass(eq=False)
class Exchange:
    """Between the ranks of one run. To be made by all of them; alone, it hands everything back at once.

    Args:
        store: what all ranks see; None where this process is alone.
        rank: of this process.
        ranks: how many there are.
        patience_s: how long one rank waits for another.
        clocks: compares those of the ranks, where there are others.
    """

    store: Any = None
    rank: int = 0
    ranks: int = 1
    patience_s: float = _PATIENCE_S
    clocks: ClockComparison | None = field(default=None, init=False)
    _run: int = field(default_factory=_RUNS.__next__)
    _asked: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        if self.store is not None:
            within = torch.distributed.PrefixStore  # type: ignore[attr-defined]  # the stubs lack it
            own = within(self.key("clocks"), self.store)
            self.clocks = ClockComparison(own, self.rank, self.ranks, self.patience_s)

    @staticmethod
    def of_process_group() -> Exchange:
        """Between the ranks of torch's default process group, where there is one with a store."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return Exchange()
        store = DEFAULT_STORE.find()()
        # Half of the group's own limit: whoever waits longer lets the others' collectives run out meanwhile.
        patience_s = min(_PATIENCE_S, store.timeout.total_seconds() / 2)
        return Exchange(store, torch.distributed.get_rank(), torch.distributed.get_world_size(), patience_s)

    def compare_clocks(self) -> None:
        """Of all ranks, which do it together.

        Raises:
            RuntimeError: rank 0 said nothing in time.
        """
        if self.clocks is not None:
            self.clocks.compare()

    def of_first(self, what: str, find: Callable[[], Value]) -> Value:
        """What ``find`` returns on rank 0, on every rank; all ask in the same order.

        Raises:
            RuntimeError: it raised there, or rank 0 never said anything.
            ValueError: something else than rank 0 answered.
            Exception: on rank 0, what ``find`` raises.
        """
        if self.store is None:
            return find()
        key = self.key(what, next(self._asked))
        if self.rank > 0:
            answer = Answer.model_validate_json(self._get(key, self.patience_s))
            if answer.value is None:
                raise RuntimeError(f"rank 0 has no {what}: {answer.error}")
            return answer.value  # type: ignore[return-value]  # all ranks ask for the same
        try:
            value = find()
        except BaseException as error:
            self.store.set(key, Answer(error=said(error)).model_dump_json())
            raise
        self.store.set(key, Answer(value=value).model_dump_json())
        return value

    def gather(self, measured: Measured) -> Measured:
        """On rank 0, what every rank measured, with a note on each that did not say in time; elsewhere its own."""
        if self.store is None:
            return measured
        if self.rank > 0:
            self._send(self.key(_MEASURED, self.rank), packed(measured))
            return measured
        everyone, missing, unread, until = [measured], [], [], time.monotonic() + self.patience_s
        for rank in range(1, self.ranks):
            try:
                content = self._receive(self.key(_MEASURED, rank), until - time.monotonic())
                everyone.append(unpacked(content, rank))
            except RuntimeError:
                missing.append(rank)
            except ValueError as error:  # not of ours: whoever knows the port can write there
                unread.append(f"what came as measurements of rank {rank} is not used: {said(error)}")
        merged = merge(everyone)
        silent = [f"{ranks_text(missing)} sent no measurements in time"] if missing else []
        notes = [*merged.notes, *silent, *unread]
        if self.clocks is None:
            return replace(merged, notes=notes)
        timelines, unlike = with_clocks(merged.timelines, self.clocks)
        return replace(merged, timelines=timelines, notes=[*notes, *unlike])

    def key(self, *what: object) -> str:
        """In the store, of this run alone."""
        return "/".join(("lm_profiler", str(self._run), *map(str, what)))

    def _send(self, key: str, content: bytes) -> None:
        """In pieces that a store takes; how many they are comes last."""
        pieces = [content[at : at + _PIECE_BYTES] for at in range(0, len(content), _PIECE_BYTES)]
        for number, piece in enumerate(pieces):
            self.store.set(f"{key}/{number}", piece)
        self.store.set(key, str(len(pieces)))

    def _receive(self, key: str, patience_s: float) -> bytes:
        """What was sent; the store forgets it, for it may be much.

        Raises:
            RuntimeError: it did not come in time.
            ValueError: it is larger than what ranks send.
        """
        if patience_s <= 0 and not self.store.check([key]):
            raise RuntimeError(f"{key} did not come in time")
        count = int(self._get(key, max(patience_s, 0.01)))
        if not 0 <= count <= MOST_BYTES // _PIECE_BYTES:
            raise ValueError(f"expected {MOST_BYTES // _PIECE_BYTES} pieces at most, given {count}")
        content = bytearray()
        for piece in (f"{key}/{number}" for number in range(count)):
            content += self._get(piece, max(patience_s, 0.01))
            self.store.delete_key(piece)
            if len(content) > MOST_BYTES:
                raise ValueError(f"expected {MOST_BYTES} bytes at most")
        return bytes(content)

    def _get(self, key: str, patience_s: float) -> bytes:
        self.store.wait([key], timedelta(seconds=patience_s))
        value: bytes = self.store.get(key)
        return value


def merge(measured: Sequence[Measured]) -> Measured:
    """One ``Measured`` of several ranks', rank 0's first, whose own the rest is. Telemetry is of all their GPUs."""
    parts = [part for part in PARTS if any(part in m.part_peaks for m in measured)]
    experiment, unlike = _delays(measured)
    return replace(
        measured[0],
        rows=StepTable.joined([StepTable.of(m.rows) for m in measured]),
        batch_counts=[counts for m in measured for counts in m.batch_counts],
        ranks_heard=sum(m.ranks_heard for m in measured),
        part_peaks={part: largest(m.part_peaks.get(part, UNKNOWN) for m in measured) for part in parts},
        telemetry=together([m.telemetry for m in measured]),
        cpu_uses=[use for m in measured for use in m.cpu_uses],
        counters=[counters for m in measured for counters in m.counters],
        flops=of_all_ranks([m.flops for m in measured]),
        recompilations=sum(m.recompilations for m in measured),
        experiment=experiment,
        timelines=[timeline for m in measured for timeline in m.timelines],
        reducers=[reducer for m in measured for reducer in m.reducers],
        notes=[*_said_once(note for m in measured for note in m.notes), *unlike],
    )


def _said_once(notes: Iterable[str]) -> list[str]:
    """What several ranks say becomes one note of them all. Rank 0 does not name itself."""
    saying: dict[str, set[int]] = {}
    for note in notes:
        named = _OF_RANK.fullmatch(note)
        saying.setdefault(named[2] if named else note, set()).add(int(named[1]) if named else 0)
    return [note if ranks == {0} else f"{ranks_text(ranks)}: {note}" for note, ranks in saying.items()]


def _delays(measured: Sequence[Measured]) -> tuple[Experiment | None, list[str]]:
    """Rank 0's, where all ranks had the same plan: a step waits for the slowest of them. Else a note."""
    plans = [None if m.experiment is None else m.experiment.blocks for m in measured]
    if all(plan == plans[0] for plan in plans):
        return measured[0].experiment, []
    return None, ["slack unknown: not every rank had the same delays"]
