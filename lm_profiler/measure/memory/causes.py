"""Splits memory by cause: parameters, gradients, optimizer states, buffers, and the rest; at peaks, and as held."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lm_profiler.measure.boundary import UNGUARDED, Guard
from lm_profiler.measure.clocks.tape import BACKWARD, FORWARD, OPTIMIZER, OUTSIDE
from lm_profiler.measure.memory.saved_tensors import SavedTensors
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.run_record import MemoryCauses, MemoryLevels
from lm_profiler.torch_names import tree_leaves


class Holdings(NamedTuple):
    """Bytes held on one device. Each storage counts once, for its first cause in this order."""

    parameters: int
    gradients: int
    optimizer_states: int
    buffers: int

    @property
    def total(self) -> int:
        return sum(self)


def holdings(module: nn.Module, optimizers: Sequence[Optimizer], device: torch.device) -> Holdings:
    """Return what ``module`` and ``optimizers`` hold now on ``device``.

    Tied weights and views count once, and a sharded tensor (DTensor, FSDP) counts with its local part. Parameters that
    only an optimizer knows (master weights) count as its states. Not seen, and so in the rest: sparse gradients, DDP's
    buckets (except with ``gradient_as_bucket_view``), FSDP's gathered parameters, and the allocator's rounding.
    """
    return _sums(storages_by_cause(module, optimizers, device))


def _sums(causes: Iterable[Mapping[int, int]]) -> Holdings:
    return Holdings(*(sum(new.values()) for new in causes))


def storages_by_cause(
    module: nn.Module, optimizers: Sequence[Optimizer], device: torch.device
) -> Iterator[dict[int, int]]:
    """Yield, for each cause of ``Holdings``, the bytes of each storage on ``device``; no storage occurs twice."""
    parameters = list(module.parameters())
    known = set(map(id, parameters))  # a tensor's own hash takes five times as long
    grouped = [parameter for parameter in _grouped(optimizers) if id(parameter) not in known]
    # A ZeroRedundancyOptimizer keeps its rank's states in an inner optimizer.
    inner = [each for each in (getattr(optimizer, "optim", None) for optimizer in optimizers) if each is not None]
    states = (state for optimizer in (*optimizers, *inner) for state in optimizer.state.values())
    causes = (
        parameters,
        _gradients_of((*parameters, *grouped)),
        chain(grouped, tensors_in(states)),
        module.buffers(),
    )
    seen: set[int] = set()
    for tensors in causes:
        new = {key: size for key, size in storages(tensors, device).items() if key not in seen}
        seen.update(new)
        yield new


def by_cause(peak_allocated: int | None, held: Holdings) -> MemoryCauses:
    """Split ``peak_allocated`` by what was held at that time; the rest is None where it would be negative."""
    rest = None if peak_allocated is None else peak_allocated - held.total
    return MemoryCauses(**held._asdict(), activations_and_rest=rest if rest is None or rest >= 0 else None)


@dataclass(eq=False)
class HoldingsReader:
    """Finds what was held at the peak of each part of a step: an observer of marks, for a stage that is not timed.

    It must come before ``PartPeaks`` among the observers, which resets the peak that this one reads.

    Holdings are read where parts begin and end. The larger of the two readings around a part counts: that sum was
    held at some time in between, so it never exceeds the peak. Gradients grow during backward while activations
    shrink: hooks see each gradient arrive, and tell how many were there at the peak, to within one. Where no such hook
    runs (FSDP2), all gradients of the part count, and its activations are a lower bound. A compiled backward hands its
    gradients over at its end; until then they are in the rest, which is an upper bound.

    It also keeps the levels of the last step. If the allocator does not report what it holds (the CPU's), the storages
    of all causes and those that autograd saved for backward are counted. Outputs that nothing saved are left out.
    """

    module: nn.Module
    optimizers: Sequence[Optimizer]  # the plain optimizers, without Lightning's wrapping
    peak: Callable[[], int | None]  # returns the most bytes allocated since the last reset; None where that is unknown
    device: torch.device  # the device whose memory is read
    held: Callable[[], int | None]  # returns the bytes that the allocator holds now; None if it does not report them
    part: Guard = UNGUARDED  # handles errors in a hook

    def __post_init__(self) -> None:
        self.moments: dict[str, MemoryCauses] = {}  # what was held before and after the optimizer's step
        self.levels: MemoryLevels | None = None  # the levels of the last step that ended
        self.saved = SavedTensors(self.part)
        self._source: Literal["allocator", "counted"] = "counted" if self.held() is None else "allocator"
        self._known: dict[str, int] = {}
        self._hooks: list[Any] = []
        self._part: int | None = None
        self._before = Holdings(0, 0, 0, 0)
        self._arrived: dict[int, int] = {}
        self._top: tuple[int, int] | None = None
        self._by_part: dict[int, tuple[int | None, Holdings]] = {}

    def start(self) -> None:
        arrived = self.part.guard(self._gradient_arrived)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(arrived)
            for parameter in self.module.parameters()
            if parameter.requires_grad and parameter.is_leaf
        ]

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.saved.unwatch()

    def __call__(self, code: int) -> None:
        peak = self.peak()
        causes = [*storages_by_cause(self.module, self.optimizers, self.device)]
        after = _sums(causes)
        if self._part is None:
            self.saved.watch()
        if self._part in (FORWARD, BACKWARD):
            # Accumulation has several passes in a step: the highest level counts.
            ended = PARTS[self._part]
            self._known[ended] = max(self._known.get(ended, 0), self._level(causes))
        if code == FORWARD and "start" not in self._known:
            self._known["start"] = self._level(causes)
        if OPTIMIZER in (code, self._part):
            moment = "before_optimizer" if code == OPTIMIZER else "after_optimizer"
            self.moments[moment] = by_cause(self.held(), after)
        if self._part is not None and self._part != OUTSIDE:
            reading = peak, self._held(peak, after)
            best = self._by_part.get(self._part, reading)
            self._by_part[self._part] = max(best, reading, key=lambda each: (each[0] or 0, each[1].total))
        self._part, self._before, self._top = code, after, None
        self._arrived = causes[Holdings._fields.index("gradients")]

    def step_ended(self) -> None:
        known = {name: self._known.get(name) for name in ("start", "forward", "backward")}
        self.levels = MemoryLevels(**known, source=self._source)
        self.saved.unwatch()
        self._part, self._known = None, {}

    def by_part(self) -> dict[str, MemoryCauses]:
        """Return the highest peak of each part that occurred, over all observed steps, by cause."""
        return {part: by_cause(*self._by_part[code]) for code, part in enumerate(PARTS) if code in self._by_part}

    def _held(self, peak: int | None, after: Holdings) -> Holdings:
        held = max(self._before, after, key=lambda reading: reading.total)
        if self._top is None or peak is None:
            return held
        top, gradients = self._top
        # If the peak rose after the last hook, all gradients that had arrived were there.
        return held._replace(gradients=gradients if peak <= top else sum(self._arrived.values()))

    def _level(self, causes: Sequence[Mapping[int, int]]) -> int:
        if self._source == "allocator":
            return self.held() or 0
        level = storages(self.saved, self.device)
        for cause in causes:
            level.update(cause)
        return sum(level.values())

    def _gradient_arrived(self, parameter: Tensor) -> None:
        if parameter.grad is not None:  # an optimizer that steps inside of backward has cleared it already
            self._arrived.update(storages((parameter.grad,), self.device))
        peak = self.peak()
        if peak is not None and (self._top is None or peak > self._top[0]):
            self._top = peak, sum(self._arrived.values())


def _grouped(optimizers: Iterable[Optimizer]) -> Iterator[Tensor]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]


def gradients(module: nn.Module, optimizers: Sequence[Optimizer]) -> list[Tensor]:
    return _gradients_of((*module.parameters(), *_grouped(optimizers)))


def _gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    # Usually both the module and an optimizer have a parameter: it is checked once.
    return [parameter.grad for parameter in dict.fromkeys(parameters) if parameter.grad is not None]


def tensors_in(states: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors in an optimizer's ``states``, usually dicts of tensors and numbers."""
    for state in states:
        # Torch's walk through any tree takes ten times as long, and a model has thousands of states.
        for value in state.values() if type(state) is dict else (state,):
            if isinstance(value, Tensor):
                yield value
            else:
                yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def storages(tensors: Iterable[Tensor], device: torch.device) -> dict[int, int]:
    """Return the bytes of each storage on ``device``, by its identity."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        # Nearly all are plain, without the attributes that ``pieces`` asks for.
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        for piece in (tensor,) if plain else pieces(tensor):
            storage = piece.untyped_storage()
            on = storage.device
            if on == device or (on.type == device.type and device.index in (None, on.index)):
                sizes[id(storage)] = storage.nbytes()
    return sizes


def pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors in which ``tensor`` is stored in this process."""
    if hasattr(tensor, "to_local"):  # DTensor
        with torch.no_grad():
            yield from pieces(tensor.to_local())
    elif hasattr(tensor, "__tensor_flatten__"):  # any other wrapper subclass
        for name in tensor.__tensor_flatten__()[0]:
            yield from pieces(getattr(tensor, name))
    elif tensor.layout is torch.strided:
        yield tensor
