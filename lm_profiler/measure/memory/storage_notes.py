"""Notes on every storage of a step, for its memory timeline: its origin, its purpose, its end.

They come from a step on fake tensors, or from the history of CUDA's allocator and what was seen at its marks.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from lm_profiler.measure.clocks.tape import BACKWARD, END, FORWARD, OPTIMIZER, OTHER
from lm_profiler.measure.memory.causes import pieces
from lm_profiler.measure.user_code import OURS, package_of
from lm_profiler.record.memory_timeline import HELD, Allocation, MemoryTimeline
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.text import short_path

_CAUSES = tuple(HELD)
_MOST = 10  # the allocations that a timeline lists


class SeenTensor(NamedTuple):
    """A tensor of a known cause; ``storage`` identifies its storage as in the notes."""

    storage: int
    cause: str
    name: str | None
    shape: Sequence[int]
    dtype: str


@dataclass(eq=False)
class TensorsSeen:
    """Reports, at each mark, which storages are parameters, gradients, states and buffers, and what autograd saved.

    Causes are looked up where they may have changed: at the step's begin, and after backward and the optimizer's step.
    """

    module: nn.Module
    optimizers: Sequence[Optimizer]  # the plain optimizers, without Lightning's wrapping
    saved: Iterable[Tensor]  # the tensors that autograd keeps now
    storage: Callable[[Any], int]  # returns the identity of a storage by which the notes know it
    # gets the code of the part that begins, the tensors of known cause, and those saved (None: not looked up)
    told: Callable[[int, list[SeenTensor], list[SeenTensor] | None], object]
    _part: int | None = None

    def __call__(self, code: int) -> None:
        ended, self._part = self._part, code
        known = [*self._known()] if ended in (None, BACKWARD, OPTIMIZER) else []
        saved = None
        if ended == FORWARD and code != FORWARD:
            saved = [each for tensor in self.saved for each in seen("activations", None, tensor, self.storage)]
        self.told(code, known, saved)

    def step_ended(self) -> None:
        # The last tensors of a step are seen too.
        self._part = None
        self(END)
        self._part = None

    def _known(self) -> Iterator[SeenTensor]:
        names: dict[Any, str] = {}
        parameter: Tensor
        for name, parameter in self.module.named_parameters():
            names[parameter] = name
            yield from seen("parameters", name, parameter, self.storage)
            if parameter.grad is not None:
                yield from seen("gradients", f"gradient of {name}", parameter.grad, self.storage)
        for optimizer in self.optimizers:
            for parameter, states in optimizer.state.items():
                for key, state in states.items() if isinstance(states, Mapping) else ():
                    if isinstance(state, Tensor):
                        of = f"{key} of {names.get(parameter, '?')}"
                        yield from seen("optimizer_states", of, state, self.storage)
        for name, buffer in self.module.named_buffers():
            yield from seen("buffers", name, buffer, self.storage)


def seen(cause: str, name: str | None, tensor: Tensor, storage: Callable[[Any], int] = id) -> Iterator[SeenTensor]:
    """Yield a ``SeenTensor`` for each plain tensor in which ``tensor`` is stored."""
    for piece in pieces(tensor):
        shape, dtype = [*map(int, piece.shape)], str(piece.dtype).removeprefix("torch.")
        yield SeenTensor(storage(piece.untyped_storage()), cause, name, shape, dtype)


class Site(NamedTuple):
    """Where a storage was made; None is unknown."""

    operator: str | None = None
    module: str | None = None
    line: str | None = None
    recomputes: bool = False  # whether backward runs a module's forward again there


NOWHERE = Site()


@dataclass(eq=False, slots=True)
class _Noted:
    """One storage, alive from event ``born`` on until event ``died``; None where it outlives the step."""

    bytes: int
    born: int
    cause: str | None = None
    phase: str | None = None
    site: Site = NOWHERE
    shape: Sequence[int] | None = None
    dtype: str | None = None
    name: str | None = None
    died: int | None = None
    saved: bool = False

    def allocation(self) -> Allocation:
        return Allocation(
            bytes=self.bytes,
            cause=self.cause or "rest",
            phase=self.phase,
            shape=None if self.shape is None else [*self.shape],
            dtype=self.dtype,
            name=self.name or self.site.operator,
            module=self.site.module,
            line=self.site.line,
        )


class StorageNotes:
    """Notes of all storages over one step.

    A cause may be known only later, for example a gradient's: it counts for the whole life of the storage.

    Args:
        before: bytes of the storages that exist when the step begins, by identity.
        workspaces: bytes that libraries hold for good by then.
    """

    def __init__(self, before: Mapping[int, int], workspaces: int = 0) -> None:
        self._alive = {key: _Noted(size, -1) for key, size in before.items()}
        self._noted = [*self._alive.values(), _Noted(workspaces, -1, "workspaces")]
        self._events: list[tuple[_Noted, int]] = []
        self._phases: list[tuple[str, int]] = []

    def made(
        self, key: int, size: int, site: Site = NOWHERE, tensor: Tensor | None = None, cause: str | None = None
    ) -> None:
        phase = self._phases[-1][0] if self._phases else None
        noted = _Noted(size, len(self._events), "activations" if site.recomputes else cause, phase, site)
        if tensor is not None:
            noted.shape, noted.dtype = [*map(int, tensor.shape)], str(tensor.dtype).removeprefix("torch.")
        self._alive[key] = noted
        self._noted.append(noted)
        self._events.append((noted, size))

    def freed(self, key: int) -> None:
        """Note the end of a storage; a storage without a note is ignored."""
        noted = self._alive.pop(key, None)
        if noted is not None:
            noted.died = len(self._events)
            self._events.append((noted, -noted.bytes))

    def told(self, code: int, known: Iterable[SeenTensor], saved: Iterable[SeenTensor] | None) -> None:
        """Note that the part ``code`` begins, and the tensors that ``TensorsSeen`` reports then."""
        self._phases.append((PARTS[code] if code < len(PARTS) else PARTS[OTHER], len(self._events)))
        self.see(known)
        if saved is None:
            return
        for noted in self.see(saved):
            noted.saved = True
        for noted in self._alive.values():  # alive after forward but not saved by autograd, such as checkpoints' inputs
            if noted.cause is None and noted.phase == PARTS[FORWARD]:
                noted.cause = "activations"

    def see(self, tensors: Iterable[SeenTensor]) -> list[_Noted]:
        """Learn from ``tensors`` what their storages are; return those that were noted."""
        pairs = [(self._alive[tensor.storage], tensor) for tensor in tensors if tensor.storage in self._alive]
        for noted, tensor in pairs:
            if noted.cause is None or _CAUSES.index(tensor.cause) < _CAUSES.index(noted.cause):
                noted.cause, noted.name = tensor.cause, tensor.name
            if noted.shape is None:
                noted.shape, noted.dtype = tensor.shape, tensor.dtype
        return [noted for noted, _ in pairs]

    def timeline(self, source: Literal["planned", "measured"]) -> MemoryTimeline:
        numbers = {cause: number for number, cause in enumerate(_CAUSES)}
        start = dict.fromkeys(_CAUSES, 0)
        for noted in self._noted:
            if noted.born < 0:
                start[noted.cause or "rest"] += noted.bytes
        saved = [noted for noted in self._noted if noted.saved and noted.cause in ("activations", "rest")]
        timeline = MemoryTimeline(
            source=source,
            causes=[*_CAUSES],
            start=[*start.values()],
            phases=self._phases,
            events=[(numbers[noted.cause or "rest"], by) for noted, by in self._events],
            largest=[],
            saved=_alike(saved)[:_MOST],
            saved_bytes=sum(noted.bytes for noted in saved),
            residual=_residual([noted for noted in self._noted if noted.cause == "activations"]),
        )
        at = timeline.peak_at  # events number `at - 1` and before have happened
        alive = [noted for noted in self._noted if noted.born < at and (noted.died is None or noted.died >= at)]
        largest = sorted(alive, key=lambda of: -of.bytes)[:_MOST]
        return timeline.model_copy(update={"largest": [of.allocation() for of in largest if of.bytes]})


def _alike(noted: Iterable[_Noted]) -> list[Allocation]:
    """Return one allocation for storages that differ only in the index of their layer, the most bytes first."""
    counts: Counter[str] = Counter()
    first: dict[str, Allocation] = {}
    for of in noted:
        allocation = of.allocation()
        module = None if allocation.module is None else re.sub(r"\d+", "*", allocation.module)
        allocation = allocation.model_copy(update={"module": module})
        counts[key := repr(allocation)] += 1
        first[key] = allocation
    rows = [of.model_copy(update={"count": counts[key]}) for key, of in first.items()]
    return sorted(rows, key=lambda of: -of.bytes * of.count)


def _residual(activations: Iterable[_Noted]) -> Allocation | None:
    sums = [of for of in activations if (of.site.operator or "").startswith("aten.add.") and len(of.shape or ()) == 3]
    shapes = Counter((*(of.shape or ()), of.dtype) for of in sums)
    if not shapes:
        return None
    (*shape, dtype), count = shapes.most_common(1)[0]
    first = next(of for of in sums if (*(of.shape or ()), of.dtype) == (*shape, dtype))
    return first.allocation().model_copy(update={"count": count, "module": None})


# bytes to which the allocator rounds up (``kMinBlockSize``); the history has the sizes that were asked for
_BLOCK = 512


@dataclass(eq=False)
class MarksHeard:
    """Keeps the reports of ``TensorsSeen`` in a step, with the instant of each mark; addresses identify storages."""

    # the clock of the allocator's history, in microseconds since 1970
    clock_us: Callable[[], int] = lambda: time.time_ns() // 1000
    # the marks of the last step that ended
    step: list[tuple[int, int, list[SeenTensor], list[SeenTensor] | None]] = field(default_factory=list)
    _now: list[Any] = field(default_factory=list)

    def __call__(self, code: int, known: list[SeenTensor], saved: list[SeenTensor] | None) -> None:
        self._now.append((self.clock_us(), code, known, saved))
        if code == END:
            self.step, self._now = self._now, []


def timeline_of(snapshot: Mapping[str, Any], device: int, heard: MarksHeard) -> MemoryTimeline:
    """Return the timeline of the last step of ``heard`` from torch's ``_snapshot``.

    Memory counts as in use until its last kernel has run (``free_completed``). Sizes are rounded up to the allocator's
    blocks; they exclude the rest of a block that is not split.

    Raises:
        KeyError: the snapshot is of another format.
        ValueError: no step was heard, or it has no history.
    """
    history = [each for each in snapshot["device_traces"][device] if each["action"] in ("alloc", "free_completed")]
    if not heard.step or not history:
        raise ValueError("expected a step and its history, given none")
    begins_us, ends_us = heard.step[0][0], heard.step[-1][0]
    since = [entry for entry in history if entry["time_us"] >= begins_us]
    notes = StorageNotes(_alive_before(snapshot["segments"], device, since))
    marks = [(at_us, None, mark) for at_us, *mark in heard.step]
    entries: list[Any] = [(entry["time_us"], entry, []) for entry in since if entry["time_us"] <= ends_us]
    for _, entry, mark in sorted([*marks, *entries], key=lambda each: each[0]):  # of one instant, the mark comes first
        if entry is None:
            notes.told(*mark)
        elif entry["action"] == "alloc":
            notes.made(entry["addr"], _rounded(entry["size"]), _site(entry["frames"]))
        else:
            notes.freed(entry["addr"])
    return notes.timeline("measured")


def _alive_before(segments: Iterable[Any], device: int, history: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """Return bytes by address of blocks alive before ``history``: those alive now, with all of it undone."""
    blocks = [block for segment in segments if segment["device"] == device for block in segment["blocks"]]
    # A block that waits for a stream was requested to be freed, and is still in use.
    alive = {
        of["address"]: _rounded(of.get("requested_size", of["size"])) for of in blocks if of["state"] != "inactive"
    }
    for entry in reversed([*history]):
        if entry["action"] == "alloc":
            alive.pop(entry["addr"], None)
        else:
            alive[entry["addr"]] = _rounded(entry["size"])
    return alive


def _rounded(size: int) -> int:
    return size + -size % _BLOCK


def _site(frames: Iterable[Mapping[str, Any]]) -> Site:
    """Return the innermost function as the operator, and the innermost line of the user's code."""
    known = [frame for frame in frames if frame["filename"] != "??"]
    while known[1:] and package_of(known[1]["filename"]) == OURS:  # our own counting of FLOPs calls torch
        known = known[2:]
    line = next((of for of in known if not package_of(of["filename"])), None)
    return Site(
        operator=known[0]["name"] if known else None,
        line=None if line is None else f"{short_path(line['filename'])}:{line['line']}",
    )
