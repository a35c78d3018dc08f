"""Notes every storage of a step for the step's memory timeline: where it was made, what it is for, when it was freed.

The notes come from a step on fake tensors, or from the history of CUDA's allocator together with the tensors that were
reported at the marks of the step.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from lm_profiler.measure.clocks.tape import BACKWARD, END, FORWARD, OPTIMIZER, OTHER
from lm_profiler.measure.memory.block_memory import block_memory
from lm_profiler.measure.memory.causes import plain_tensors_of
from lm_profiler.measure.user_code import OURS, package_of
from lm_profiler.record.memory_timeline import (
    CAUSE_TITLES,
    Allocation,
    BlockMemory,
    MemoryTimeline,
)
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.text import short_path

_CAUSES = tuple(CAUSE_TITLES)  # a storage with several causes counts for the first
_LISTED = 10  # how many allocations a timeline lists


class SeenTensor(NamedTuple):
    """A tensor whose cause is known."""

    storage: int  # identifies its storage in the notes
    cause: str
    name: str | None
    shape: Sequence[int]
    dtype: str


@dataclass(eq=False)
class TensorReporter:
    """Reports, at each mark, which storages are parameters, gradients, states and buffers, and what autograd saved.

    Causes are found only when they may have changed: when a step begins, and after backward and the optimizer's step.
    """

    module: nn.Module
    # the plain optimizers, without Lightning's wrapping
    optimizers: Sequence[Optimizer]
    saved: Iterable[Tensor]  # the tensors that autograd keeps now
    # returns the number that identifies a storage in the notes
    identity_of: Callable[[Any], int]
    # takes the code of the part that begins, the tensors with causes, and those that autograd saved (None unless
    # forward has ended)
    report: Callable[[int, list[SeenTensor], list[SeenTensor] | None], object]
    # the part that the last mark began; None if a step begins
    _running_part: int | None = None

    def __call__(self, code: int) -> None:
        """Report the tensors at the mark that begins the part ``code`` and ends the part before it."""
        ended_part = self._running_part
        self._running_part = code
        causes_may_have_changed = ended_part in (None, BACKWARD, OPTIMIZER)
        tensors: list[SeenTensor] = []
        if causes_may_have_changed:
            tensors = list(self._tensors_with_cause())
        forward_has_ended = ended_part == FORWARD and code != FORWARD
        saved_tensors: list[SeenTensor] | None = None
        if forward_has_ended:
            saved_tensors = list(self._saved_tensors())
        self.report(code, tensors, saved_tensors)

    def step_ended(self) -> None:
        """Report the tensors once more at the end of the step."""
        self._running_part = None  # so that causes are found again
        self(END)
        self._running_part = None

    def _saved_tensors(self) -> Iterator[SeenTensor]:
        """Yield what autograd saved for backward."""
        for tensor in self.saved:
            yield from seen_tensors("activations", None, tensor, self.identity_of)

    def _tensors_with_cause(self) -> Iterator[SeenTensor]:
        """Yield the parameters, gradients, optimizer states and buffers, each with its cause and its name."""
        names: dict[Any, str] = {}
        parameter: Tensor
        for name, parameter in self.module.named_parameters():
            names[parameter] = name
            yield from seen_tensors("parameters", name, parameter, self.identity_of)
            if parameter.grad is not None:
                yield from seen_tensors(
                    "gradients", f"gradient of {name}", parameter.grad, self.identity_of
                )
        for optimizer in self.optimizers:
            for parameter, states in optimizer.state.items():
                parameter_name = names.get(parameter, "?")
                if not isinstance(states, Mapping):
                    continue
                for key, state in states.items():
                    if isinstance(state, Tensor):
                        state_name = f"{key} of {parameter_name}"
                        yield from seen_tensors(
                            "optimizer_states", state_name, state, self.identity_of
                        )
        for name, buffer in self.module.named_buffers():
            yield from seen_tensors("buffers", name, buffer, self.identity_of)


def seen_tensors(
    cause: str,
    name: str | None,
    tensor: Tensor,
    identity_of: Callable[[Any], int] = id,
) -> Iterator[SeenTensor]:
    """Yield a ``SeenTensor`` for each plain tensor in which ``tensor`` is stored.

    ``identity_of`` returns the number that identifies a storage.
    """
    for piece in plain_tensors_of(tensor):
        identity = identity_of(piece.untyped_storage())
        yield SeenTensor(
            storage=identity,
            cause=cause,
            name=name,
            shape=_shape(piece),
            dtype=_dtype_name(piece),
        )


def _shape(tensor: Tensor) -> list[int]:
    return [int(size) for size in tensor.shape]


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


class Site(NamedTuple):
    """The place where a storage was made; None means unknown."""

    operator: str | None = None
    module: str | None = None
    line: str | None = None
    recomputes: bool = False  # whether backward recomputes a module's forward there


NOWHERE = Site()


@dataclass(eq=False, slots=True)
class _Note:
    """One storage."""

    bytes: int
    # the number of the event that made it; -1 if it existed before the step
    made_at: int
    cause: str | None = None
    phase: str | None = None
    site: Site = NOWHERE
    shape: Sequence[int] | None = None
    dtype: str | None = None
    name: str | None = None
    # the number of the event that freed it; None if it outlives the step
    freed_at: int | None = None
    is_saved: bool = False  # whether autograd saved it for backward

    @property
    def known_cause(self) -> str:
        return self.cause or "rest"

    def is_alive_at(self, event: int) -> bool:
        """Return whether the storage is alive after all events before number ``event``."""
        is_made = self.made_at < event
        is_freed = self.freed_at is not None and self.freed_at < event
        return is_made and not is_freed

    def allocation(self) -> Allocation:
        """Return the storage as a row of the record's timeline."""
        shape = None if self.shape is None else [*self.shape]
        return Allocation(
            bytes=self.bytes,
            cause=self.known_cause,
            phase=self.phase,
            shape=shape,
            dtype=self.dtype,
            name=self.name or self.site.operator,
            module=self.site.module,
            line=self.site.line,
        )


class StorageNotes:
    """Notes of all storages over one step.

    A cause, for example that of a gradient, may be known only later; it then counts for the whole life of the storage.

    Args:
        sizes: bytes of the storages that exist when the step begins, by identity.
        workspaces: bytes that libraries hold permanently when the step begins.
    """

    def __init__(self, sizes: Mapping[int, int], workspaces: int = 0) -> None:
        self._alive = {
            storage: _Note(size, made_at=-1) for storage, size in sizes.items()
        }
        self._notes = [
            *self._alive.values(),
            _Note(workspaces, made_at=-1, cause="workspaces"),
        ]
        # the events: for each allocation and free the note of the storage, and the change of bytes in use
        self._events: list[tuple[_Note, int]] = []
        # the phases in order, each with the number of events before it
        self._phases: list[tuple[str, int]] = []

    def note_made(
        self,
        storage: int,
        size: int,
        site: Site = NOWHERE,
        tensor: Tensor | None = None,
        cause: str | None = None,
    ) -> None:
        """Note a new storage of ``size`` bytes, which contains ``tensor``, and was made at ``site``."""
        phase = self._phases[-1][0] if self._phases else None
        if site.recomputes:
            cause = "activations"
        note = _Note(
            size, made_at=len(self._events), cause=cause, phase=phase, site=site
        )
        if tensor is not None:
            note.shape = _shape(tensor)
            note.dtype = _dtype_name(tensor)
        self._alive[storage] = note
        self._notes.append(note)
        self._events.append((note, size))

    def note_freed(self, storage: int) -> None:
        """Note that a storage is freed; a storage without a note is ignored."""
        note = self._alive.pop(storage, None)
        if note is not None:
            note.freed_at = len(self._events)
            self._events.append((note, -note.bytes))

    def note_part(
        self,
        code: int,
        tensors: Iterable[SeenTensor],
        saved_tensors: Iterable[SeenTensor] | None,
    ) -> None:
        """Note that the part ``code`` begins, and the tensors that ``TensorReporter`` reports then."""
        phase = PARTS[code] if code < len(PARTS) else PARTS[OTHER]
        self._phases.append((phase, len(self._events)))
        self.note_causes(tensors)
        if saved_tensors is None:
            return
        for note in self.note_causes(saved_tensors):
            note.is_saved = True
        for note in self._alive.values():
            # What forward made and is still alive counts too, such as the inputs of checkpoints.
            if note.cause is None and note.phase == PARTS[FORWARD]:
                note.cause = "activations"

    def note_causes(self, tensors: Iterable[SeenTensor]) -> list[_Note]:
        """Note the causes of the storages of ``tensors``; return the notes of these storages.

        A storage may be reported with several causes. Then the first of them in ``_CAUSES`` counts.
        """
        notes: list[_Note] = []
        for tensor in tensors:
            note = self._alive.get(tensor.storage)
            if note is None:
                continue
            notes.append(note)
            is_first_cause = note.cause is None
            if note.cause is not None:
                is_first_cause = _CAUSES.index(tensor.cause) < _CAUSES.index(note.cause)
            if is_first_cause:
                note.cause = tensor.cause
                note.name = tensor.name
            if note.shape is None:
                note.shape = tensor.shape
                note.dtype = tensor.dtype
        return notes

    def timeline(self, source: Literal["planned", "measured"]) -> MemoryTimeline:
        """Return the memory timeline of the step: what was held when it began, and each allocation and free."""
        start_bytes = dict.fromkeys(_CAUSES, 0)
        for note in self._notes:
            existed_before_step = note.made_at < 0
            if existed_before_step:
                start_bytes[note.known_cause] += note.bytes
        events = [
            (_CAUSES.index(note.known_cause), change) for note, change in self._events
        ]
        saved = [
            note
            for note in self._notes
            if note.is_saved and note.cause in ("activations", "rest")
        ]
        timeline = MemoryTimeline(
            source=source,
            causes=[*_CAUSES],
            start=[*start_bytes.values()],
            phases=self._phases,
            events=events,
            largest=[],
            saved=_merged_over_layers(saved)[:_LISTED],
            saved_bytes=sum(note.bytes for note in saved),
            residual=self._residual_stream(),
            block=self._block_memory(saved),
        )
        return timeline.model_copy(
            update={"largest": self._largest_at(timeline.peak_at)}
        )

    def _block_memory(self, saved: Iterable[_Note]) -> BlockMemory | None:
        """Return the memory of one block of a module that repeats blocks; None if it has none."""
        gradients = []
        for note in self._notes:
            if note.cause == "gradients":
                gradients.append(note.allocation())
        return block_memory([note.allocation() for note in saved], gradients)

    def _largest_at(self, event: int) -> list[Allocation]:
        """Return the largest allocations that are alive after all events before number ``event``."""
        alive = [note for note in self._notes if note.is_alive_at(event)]
        alive.sort(key=attrgetter("bytes"), reverse=True)
        return [note.allocation() for note in alive[:_LISTED] if note.bytes]

    def _residual_stream(self) -> Allocation | None:
        """Return the allocation of a residual stream, with the number of such allocations; None if there is none.

        It is taken to be the most common shape among activations of three axes that additions made.
        """
        # sums by shape and dtype
        sums: dict[Any, list[_Note]] = {}
        for note in self._notes:
            shape = note.shape or ()
            operator = note.site.operator or ""
            is_sum = operator.startswith("aten.add.")
            if is_sum and note.cause == "activations" and len(shape) == 3:
                sums.setdefault((*shape, note.dtype), []).append(note)
        if not sums:
            return None
        most_common = max(sums.values(), key=len)
        allocation = most_common[0].allocation()
        changes = {"count": len(most_common), "module": None}
        return allocation.model_copy(update=changes)


def _merged_over_layers(notes: Iterable[_Note]) -> list[Allocation]:
    """Return one allocation for storages that differ only in the index of their layer, the most bytes first."""
    # by the text of an allocation, which cannot be hashed
    groups: dict[str, list[Allocation]] = {}
    for note in notes:
        allocation = note.allocation()
        if allocation.module is not None:
            any_layer = re.sub(r"\d+", "*", allocation.module)
            allocation = allocation.model_copy(update={"module": any_layer})
        groups.setdefault(repr(allocation), []).append(allocation)
    rows = [
        group[0].model_copy(update={"count": len(group)}) for group in groups.values()
    ]
    return sorted(rows, key=_group_bytes, reverse=True)


def _group_bytes(group: Allocation) -> int:
    return group.bytes * group.count


# The allocator rounds sizes up to a multiple of it (``kMinBlockSize``); the history has the sizes that were requested.
_BLOCK = 512


def _now_us() -> int:
    return time.time_ns() // 1000


class _Mark(NamedTuple):
    """The reports of ``TensorReporter`` at one mark, and its instant."""

    time_us: int
    code: int
    tensors: list[SeenTensor]
    saved_tensors: list[SeenTensor] | None


@dataclass(eq=False)
class MarkLog:
    """Keeps the reports of ``TensorReporter`` in a step, with the instant of each mark.

    Storages are identified by their addresses, as in the allocator's history.
    """

    # the clock of the allocator's history, in microseconds since 1970
    clock_us: Callable[[], int] = _now_us
    # the marks of the last step that ended
    step: list[_Mark] = field(default_factory=list)
    _running_step: list[_Mark] = field(default_factory=list)

    def __call__(
        self,
        code: int,
        tensors: list[SeenTensor],
        saved_tensors: list[SeenTensor] | None,
    ) -> None:
        """Keep what was reported at a mark; the mark END ends the step."""
        self._running_step.append(_Mark(self.clock_us(), code, tensors, saved_tensors))
        if code == END:
            self.step = self._running_step
            self._running_step = []


def timeline_from_snapshot(
    snapshot: Mapping[str, Any], device: int, mark_log: MarkLog
) -> MemoryTimeline:
    """Return the timeline of the last step of ``mark_log`` from torch's ``_snapshot``.

    Memory counts as in use until its last kernel has run (``free_completed``). Sizes are rounded up to the allocator's
    blocks; they exclude the rest of a block that is not split.

    Raises:
        KeyError: the snapshot is of another format.
        ValueError: the log has no step, or the snapshot no history.
    """
    trace = snapshot["device_traces"][device]
    history = [
        entry for entry in trace if entry["action"] in ("alloc", "free_completed")
    ]
    if not mark_log.step or not history:
        raise ValueError("the snapshot has no history of a marked step")

    begins_us = mark_log.step[0].time_us
    ends_us = mark_log.step[-1].time_us
    history_from_begin = [entry for entry in history if entry["time_us"] >= begins_us]
    notes = StorageNotes(
        _alive_before(snapshot["segments"], device, history_from_begin)
    )
    # marks and entries of the history, each with its time
    timed: list[tuple[int, Any]] = [(mark.time_us, mark) for mark in mark_log.step]
    for entry in history_from_begin:
        if entry["time_us"] <= ends_us:
            timed.append((entry["time_us"], entry))
    # if a mark and an entry have the same time, the mark comes first
    timed.sort(key=itemgetter(0))
    for _, mark_or_entry in timed:
        if isinstance(mark_or_entry, _Mark):
            mark = mark_or_entry
            notes.note_part(mark.code, mark.tensors, mark.saved_tensors)
            continue
        _note_entry(notes, mark_or_entry)
    return notes.timeline("measured")


def _note_entry(notes: StorageNotes, entry: Mapping[str, Any]) -> None:
    """Note the allocation or the free of a storage that ``entry`` of the allocator's history records."""
    if entry["action"] == "alloc":
        size = _rounded(entry["size"])
        notes.note_made(entry["addr"], size, _site_of_allocation(entry["frames"]))
    else:
        notes.note_freed(entry["addr"])


def _alive_before(
    segments: Iterable[Any], device: int, history: Sequence[Mapping[str, Any]]
) -> dict[int, int]:
    """Return the bytes by address of the blocks that were alive before ``history``.

    They are the blocks that are alive now, with the entries of ``history`` undone from the last to the first.
    """
    alive: dict[int, int] = {}
    for segment in segments:
        if segment["device"] != device:
            continue
        for block in segment["blocks"]:
            # A block that waits for a stream was requested to be freed, and is still in use.
            if block["state"] != "inactive":
                alive[block["address"]] = _rounded(
                    block.get("requested_size", block["size"])
                )
    for entry in reversed(history):
        if entry["action"] == "alloc":
            alive.pop(entry["addr"], None)
        else:
            alive[entry["addr"]] = _rounded(entry["size"])
    return alive


def _rounded(size: int) -> int:
    return size + -size % _BLOCK


def _site_of_allocation(frames: Iterable[Mapping[str, Any]]) -> Site:
    """Return the place of an allocation: the innermost function as the operator, and the innermost line of the user.

    ``frames`` begins with the innermost.
    """
    known_frames = [frame for frame in frames if frame["filename"] != "??"]
    while len(known_frames) > 1 and package_of(known_frames[1]["filename"]) == OURS:
        # Our counter of FLOPs has called the operator: leave out the counter and what it called.
        known_frames = known_frames[2:]
    if not known_frames:
        return NOWHERE
    operator = known_frames[0]["name"]
    for frame in known_frames:
        is_users_code = not package_of(frame["filename"])
        if is_users_code:
            return Site(
                operator, line=f"{short_path(frame['filename'])}:{frame['line']}"
            )
    return Site(operator)
