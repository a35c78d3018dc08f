"""Finds the least bytes that each phase of a step moves between a device and its memory.

Each tensor counts as read or written once, regardless of caches, as stored on the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lm_profiler.measure.clocks.tape import BACKWARD, CLIP, FORWARD, OPTIMIZER, ZERO_GRAD
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.memory.causes import gradients, pieces, storages, storages_by_cause, tensors_in
from lm_profiler.measure.memory.saved_tensors import SavedTensors
from lm_profiler.record.quantities import PARTS
from lm_profiler.torch_names import tree_leaves

# Operators that read as many rows or elements of their first tensor as indices say.
_LOOK_UPS = {"embedding", "_embedding_bag", "_embedding_bag_forward_only", "embedding_renorm_"}
_GATHERS = {"index", "index_select", "gather", "take", "_index_put_impl_"}
# operators that read a tensor's shape, and not its elements
_SHAPES_ALONE = {
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
}


class Regions:
    """Distinct pieces of storages. Partial overlaps count twice, but no storage counts for more than its size."""

    def __init__(self) -> None:
        self._pieces: dict[int, dict[tuple[int, int], int]] = {}
        self._whole: dict[int, int] = {}

    def add(self, tensor: Tensor, count: int | None = None) -> None:
        storage = tensor.untyped_storage()
        size = tensor.nbytes if count is None else min(count, tensor.nbytes)
        pieces = self._pieces.setdefault(id(storage), {})
        piece = int(tensor.storage_offset()), tensor.numel()
        pieces[piece] = max(pieces.get(piece, 0), size)
        self._whole[id(storage)] = storage.nbytes()

    def bytes_of(self) -> dict[int, int]:
        return {key: min(self._whole[key], sum(pieces.values())) for key, pieces in self._pieces.items()}


class ForwardTraffic:
    """Collects what forward passes read that they did not make (weights, inputs, buffers), and what they made.

    It sees each operator that runs. A weight counts once a pass, however often it is used; a table only with the rows
    that are looked up. Views read nothing.
    """

    def __init__(self) -> None:
        self.lost = False  # whether an error occurred, and nothing is known
        self.made: set[int] = set()  # the storages that the current or last pass made
        self.copies: set[int] = set()  # those of them that are weights and inputs in autocast's dtype
        self._passes = self._read = 0
        self._reads = Regions()

    def begin(self) -> None:
        self._read += sum(self._reads.bytes_of().values())
        self._passes += 1
        self.made, self.copies, self._reads = set(), set(), Regions()

    def take(self) -> int | None:
        """Return the bytes read by all passes since the last call; None where a pass was not seen, or not in full."""
        self.begin()
        read = self._read if self._passes > 1 and not self.lost else None
        self._passes = self._read = 0
        return read

    def see(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = operator.__name__.partition(".")[0]  # without its overload
        given, results = list(_tensors((args, kwargs))), list(_tensors(result))
        shared = {_identity(tensor) for tensor in given}
        # A view shares its input's storage, and so does an operator that writes in place or into ``out``.
        writes = name.endswith("_") or "out" in kwargs
        views = set() if writes else {_identity(tensor) for tensor in results} & shared
        from_outside = False
        for tensor in given:
            if _identity(tensor) not in self.made and _identity(tensor) not in views and name not in _SHAPES_ALONE:
                from_outside = True
                self._reads.add(tensor, _rows(name, given, results) if tensor is given[0] else None)
        made = {_identity(tensor) for tensor in results} - shared
        self.made |= made
        self.copies -= made  # a new storage may stand where a copy did
        if name == "_to_copy" and from_outside:
            self.copies |= made


def _rows(name: str, given: list[Tensor], results: list[Tensor]) -> int | None:
    """Return the bytes that a look-up reads of its table, the first of ``given``; None where it reads all of it."""
    table = given[0]
    if name in _LOOK_UPS and len(given) > 1:
        return given[1].numel() * table.shape[-1] * table.element_size()
    return results[0].numel() * table.element_size() if name in _GATHERS and results else None


def _tensors(values: Any) -> Iterator[Tensor]:
    return (x for x in tree_leaves(values) if isinstance(x, Tensor) and x.layout is torch.strided)


def _identity(tensor: Tensor) -> int:
    return id(tensor.untyped_storage())


class StepTraffic(NamedTuple):
    by_phase: Mapping[str, int | None]  # the phases that occurred; of the forward pass what is written
    # what the forward pass reads. None where the step is compiled, so that its operators were not seen: then
    # ``by_phase`` includes saved inputs.
    forward_read: int | None


@dataclass(eq=False)
class TrafficReader:
    """Keeps the traffic of the last step: an observer of marks, for a stage that is not timed.

    - forward: reads as in ``ForwardTraffic``; writes what it makes that is saved for backward.
    - backward: reads what was saved (weights included) and the gradients that others are added to; writes gradients.
    - zero_grad: writes zeros into gradients that are kept.
    - clip: reads gradients.
    - optimizer: reads gradients, reads and writes their parameters and states. Unknown where a gradient is sparse:
      then only some of the rows may be touched.
    """

    module: nn.Module
    optimizers: Sequence[Optimizer]  # the plain optimizers, without Lightning's wrapping
    device: torch.device  # the device whose memory is meant
    timeline: Timeline  # the timeline whose marks are observed
    saved: SavedTensors  # what autograd saved; ``HoldingsReader`` switches it on and off
    forward: ForwardTraffic  # sees the operators of forward passes; ``StepFlops`` shows them to it
    traffic: StepTraffic | None = None  # the traffic of the last step that ended
    _bytes: Counter[str] = field(default_factory=Counter)
    _open: frozenset[int] = frozenset()
    _sparse: bool = False
    _stepping: list[Tensor] = field(default_factory=list)
    _gradient_bytes: int = 0
    _has_new_gradients: bool = False  # a backward pass has begun since an optimizer's step was last counted

    def __call__(self, code: int) -> None:
        before, self._open = self._open, frozenset(self.timeline.stack)
        for part in self._open - before:
            self._begins(part)
        for part in before - self._open:
            self._ends(part)

    def step_ended(self) -> None:
        by_phase: dict[str, int | None] = dict(self._bytes)
        if self._sparse:
            by_phase[PARTS[OPTIMIZER]] = None
        self.traffic = StepTraffic(by_phase, self.forward.take())
        self._bytes, self._open, self._sparse = Counter(), frozenset(), False

    def _begins(self, part: int) -> None:
        if part == FORWARD:
            self._add(FORWARD, 0)
        elif part == BACKWARD:
            self._has_new_gradients = True
            saved = self._saved()
            self._add(BACKWARD, sum(saved.values()) + self._gradients())
            made = self._made(saved)
            self._add(FORWARD, sum(size for key, size in saved.items() if key in made))
        elif part == CLIP:
            self._add(CLIP, self._gradients())
        elif part == OPTIMIZER:
            # Gradients are noted now, since the step may clear them; states at its end, since the first step makes
            # them.
            grouped = {p: None for each in self.optimizers for group in each.param_groups for p in group["params"]}
            self._stepping = [p for p in grouped if p.grad is not None]
            # Together: FSDP's gradients are views of one storage.
            self._gradient_bytes = self._stored(p.grad for p in self._stepping if p.grad is not None)

    def _ends(self, part: int) -> None:
        if part in (BACKWARD, ZERO_GRAD):
            self._add(part, self._gradients())
        elif part == OPTIMIZER and self._has_new_gradients:  # not before its closure, where it has changed nothing yet
            self._has_new_gradients = False
            stepped = self._stepping
            states = (each.state.get(parameter, {}) for each in self.optimizers for parameter in stepped)
            self._add(OPTIMIZER, 2 * self._stored([*stepped, *tensors_in(states)]) + self._gradient_bytes)
            self._sparse = self._sparse or any(p.grad is not None and p.grad.is_sparse for p in stepped)

    def _saved(self) -> dict[int, int]:
        regions = Regions()
        for piece in chain.from_iterable(map(pieces, self.saved)):
            stored = piece.untyped_storage().device
            if stored.type == self.device.type and self.device.index in (None, stored.index):
                regions.add(piece)
        return regions.bytes_of()

    def _made(self, saved: Mapping[int, int]) -> set[int]:
        """Return which of ``saved`` the forward pass made; if no operator was seen, all but parameters and the like."""
        if self.forward.made:
            return self.forward.made - self.forward.copies
        held = chain.from_iterable(storages_by_cause(self.module, self.optimizers, self.device))
        return set(saved) - set(held)

    def _gradients(self) -> int:
        return self._stored(gradients(self.module, self.optimizers))

    def _stored(self, tensors: Iterable[Tensor]) -> int:
        return sum(storages(tensors, self.device).values())

    def _add(self, part: int, count: int) -> None:
        self._bytes[PARTS[part]] += count
