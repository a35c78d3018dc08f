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

from lm_profiler.analysis.ranks.on_stream import with_waits
from lm_profiler.analysis.ranks.rank_timeline import ClockOffset, RankTimeline
from lm_profiler.callbacks.instruments.instrument import Measured
from lm_profiler.callbacks.instruments.work import of_all_ranks
from lm_profiler.callbacks.outcome.messages import MOST_BYTES, Answer, packed, unpacked
from lm_profiler.measure.boundary import said
from lm_profiler.measure.collectives.alignment import ClockComparison
from lm_profiler.measure.device.telemetry import together
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.steps import UNKNOWN, StepTable, largest
from lm_profiler.record.text import ranks_text
from lm_profiler.torch_names import DEFAULT_STORE

_PATIENCE_S = 60.0  # seconds to wait for what another rank sends: all do the same steps, so none is far behind

# size of one value in the store: torch refuses values beyond 8 MiB (MAX_PAYLOAD_LEN of TCPStoreLibUvBackend.cpp)
_PIECE_BYTES = 4 * 1024**2

# matches a note of another rank than the first, as ``Attachment.tell`` writes it
_NOTE_OF_RANK = re.compile(r"rank (\d+): (.*)", re.DOTALL)

# Numbers this process's runs. All ranks begin the same runs in the same order, so that the numbers agree.
_RUNS = count()

Value = TypeVar("Value", str, int)


@dataclass(eq=False)
class Exchange:
    """Passes data between the ranks of one run, which all have to make one; a process that is alone gets its own back.

    ``clocks`` compares the ranks' clocks; None where this process is alone.
    """

    store: Any = None  # the store that all ranks see; None where this process is alone
    rank: int = 0  # this process's
    ranks: int = 1  # how many there are
    patience_s: float = _PATIENCE_S  # how long one rank waits for another
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
        """Return the exchange of torch's default process group; where there is none, that of a process alone."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return Exchange()
        store = DEFAULT_STORE.find()()
        # Half of the group's own limit: whoever waits longer lets the others' collectives run out meanwhile.
        patience_s = min(_PATIENCE_S, store.timeout.total_seconds() / 2)
        return Exchange(store, torch.distributed.get_rank(), torch.distributed.get_world_size(), patience_s)

    def compare_clocks(self) -> None:
        """Compare the clocks of all ranks, which have to call this together.

        Raises:
            RuntimeError: rank 0 did not answer in time.
        """
        if self.clocks is not None:
            self.clocks.compare()

    def of_first(self, what: str, find: Callable[[], Value]) -> Value:
        """Return on every rank what ``find`` returns on rank 0. All ranks have to ask in the same order.

        Raises:
            RuntimeError: ``find`` raised on rank 0, or rank 0 did not answer in time.
            ValueError: the answer is not one of ours.
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
        except BaseException as error:  # also Ctrl-C: the other ranks wait for an answer
            self.store.set(key, Answer(error=said(error)).model_dump_json())
            raise
        self.store.set(key, Answer(value=value).model_dump_json())
        return value

    def gather(self, measured: Measured) -> Measured:
        """Return what all ranks measured, with a note on silent ones; on other ranks than the first, ``measured``."""
        if self.store is None:
            return measured
        if self.rank > 0:
            self._send(self.key("measured", self.rank), packed(measured))
            return measured
        # One limit for all ranks together: one for each would add up to hours.
        everyone, missing, unread, until = [measured], [], [], time.monotonic() + self.patience_s
        for rank in range(1, self.ranks):
            try:
                content = self._receive(self.key("measured", rank), until - time.monotonic())
                everyone.append(unpacked(content, rank))
            except RuntimeError:
                missing.append(rank)
            except ValueError as error:  # not one of ours: whoever reaches the store's port can write to it
                unread.append(f"what came as measurements of rank {rank} is not used: {said(error)}")
        merged = merge(everyone)
        silent = [f"{ranks_text(missing)} sent no measurements in time"] if missing else []
        notes = [*merged.notes, *silent, *unread]
        if self.clocks is None:
            return replace(merged, notes=notes)
        timelines, unlike = with_clocks(merged.timelines, self.clocks)
        return replace(merged, timelines=timelines, notes=[*notes, *unlike])

    def key(self, *what: object) -> str:
        """Return a key in the store that no other run uses."""
        return "/".join(("lm_profiler", str(self._run), *map(str, what)))

    def _send(self, key: str, content: bytes) -> None:
        """Send ``content`` in pieces. Their number comes last: whoever reads it finds all of them."""
        pieces = [content[at : at + _PIECE_BYTES] for at in range(0, len(content), _PIECE_BYTES)]
        for number, piece in enumerate(pieces):
            self.store.set(f"{key}/{number}", piece)
        self.store.set(key, str(len(pieces)))

    def _receive(self, key: str, patience_s: float) -> bytes:
        """Return what was sent under ``key``, and delete it from the store, since it may be large.

        Raises:
            RuntimeError: it did not come in time.
            ValueError: it is larger than anything that ranks send.
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
    """Merge what the ranks ``measured``, rank 0 first. Fields that are not merged are rank 0's."""
    parts = [part for part in PARTS if any(part in m.part_peaks for m in measured)]
    return replace(
        measured[0],
        rows=StepTable.joined([StepTable.of(m.rows) for m in measured]),
        batch_counts=[counts for m in measured for counts in m.batch_counts],
        ranks_heard=sum(m.ranks_heard for m in measured),
        part_peaks={part: largest(m.part_peaks.get(part, UNKNOWN) for m in measured) for part in parts},
        telemetry=together([m.telemetry for m in measured]),
        cpu_uses=[use for m in measured for use in m.cpu_uses],
        counters=[counters for m in measured for counters in m.counters],
        seen_flops=of_all_ranks([m.seen_flops for m in measured]),
        recompilations=sum(m.recompilations for m in measured),
        timelines=[timeline for m in measured for timeline in m.timelines],
        reducers=[reducer for m in measured for reducer in m.reducers],
        notes=_merge_notes(note for m in measured for note in m.notes),
    )


def with_clocks(timelines: Sequence[RankTimeline], clocks: ClockComparison) -> tuple[list[RankTimeline], list[str]]:
    """Return ``timelines`` with their clocks and waits, and a note on ranks left out because their clock is unknown.

    Called on rank 0, with whose clock all others were compared.
    """
    known, unknown = [], []
    for timeline in timelines:
        compared = clocks.of(timeline.rank, int(timeline.host_ns[-1]))
        if compared is None:
            unknown.append(timeline.rank)
        else:
            known.append(replace(timeline, clock=ClockOffset(*zip(*compared, strict=True))))
    known = with_waits(known)
    if not unknown:
        return known, []
    who = f"who waits for whom is not known of {ranks_text(unknown)}"
    return known, [f"{who}, whose clock could not be compared with rank 0's"]


def _merge_notes(notes: Iterable[str]) -> list[str]:
    """Return ``notes``, each once, with the ranks that wrote it. Rank 0 alone does not name itself in a note."""
    saying: dict[str, set[int]] = {}
    for note in notes:
        named = _NOTE_OF_RANK.fullmatch(note)
        saying.setdefault(named[2] if named else note, set()).add(int(named[1]) if named else 0)
    return [note if ranks == {0} else f"{ranks_text(ranks)}: {note}" for note, ranks in saying.items()]
