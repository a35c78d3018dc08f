"""Finds the least bytes that each phase of a step moves between a device and its memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lm_profiler.measure.clocks.steps import BACKWARD, CLIP, FORWARD, OPTIMIZER, ZERO_GRAD
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.counts.traffic import ForwardTraffic, Regions
from lm_profiler.measure.memory.causes import gradients, pieces, storages, storages_by_cause
from lm_profiler.measure.memory.levels import SavedTensors
from lm_profiler.record.quantities import PARTS
from lm_profiler.torch_names import tree_leaves


class StepTraffic(NamedTuple):
    """Bytes moved by one step on one device.

    ``by_phase`` has the phases that occurred, with None where the bytes are unknown. Of the forward pass it has what is
    written; ``forward_read`` is what that reads. ``forward_read`` is None where the step is compiled, so that its
    operators were not seen; ``by_phase`` then includes saved inputs.
    """

    by_phase: Mapping[str, int | None]
    forward_read: int | None


@dataclass(eq=False)
class TrafficReader:
    """Keeps the traffic of the last step: an observer of marks, for a stage that is not timed.

    Each tensor counts as read or written once, regardless of caches: parameters, gradients, optimizer states and what
    autograd saved, as stored on this device.

    - forward: reads as in ``ForwardTraffic``; writes what it makes that is saved for backward.
    - backward: reads what was saved (weights included) and the gradients that others are added to; writes gradients.
    - zero_grad: writes zeros into gradients that are kept.
    - clip: reads gradients.
    - optimizer: reads gradients, reads and writes their parameters and states. Unknown where a gradient is sparse:
      then only some of the rows may be touched.
    """

    module: nn.Module  # the model
    optimizers: Sequence[Optimizer]  # the plain optimizers, without Lightning's wrapping
    device: torch.device  # the device whose memory is meant
    timeline: Timeline  # the timeline whose marks are observed
    saved: SavedTensors  # what autograd saved; ``LevelsReader`` switches it on and off
    forward: ForwardTraffic  # sees the operators of forward passes; ``StepFlops`` shows them to it
    traffic: StepTraffic | None = None  # the traffic of the last step that ended
    _bytes: Counter[str] = field(default_factory=Counter)
    _open: frozenset[int] = frozenset()
    _sparse: bool = False
    _stepping: list[Tensor] = field(default_factory=list)
    _gradient_bytes: int = 0

    def __call__(self, code: int) -> None:
        before, self._open = self._open, frozenset(self.timeline.stack)
        for part in self._open - before:
            self._begins(part)
        for part in before - self._open:
            self._ends(part)

    def step_ended(self) -> None:
        """Keep the step's traffic."""
        by_phase: dict[str, int | None] = dict(self._bytes)
        if self._sparse:
            by_phase[PARTS[OPTIMIZER]] = None
        self.traffic = StepTraffic(by_phase, self.forward.take())
        self._bytes, self._open, self._sparse = Counter(), frozenset(), False

    def _begins(self, part: int) -> None:
        if part == FORWARD:
            self._add(FORWARD, 0)
        elif part == BACKWARD:
            saved = _bytes_of(self.saved, self.device)
            self._add(BACKWARD, sum(saved.values()) + self._gradients())
            self._add(FORWARD, sum(size for key, size in saved.items() if key in self._made(saved)))
        elif part == CLIP:
            self._add(CLIP, self._gradients())
        elif part == OPTIMIZER:
            # Gradients are noted now, since the step may clear them; states at its end, since the first step makes
            # them.
            grouped = _unique(group["params"] for each in self.optimizers for group in each.param_groups)
            self._stepping = [p for p in grouped if p.grad is not None]
            # Together: FSDP's gradients are views of one storage.
            self._gradient_bytes = self._stored(p.grad for p in self._stepping if p.grad is not None)

    def _ends(self, part: int) -> None:
        if part in (BACKWARD, ZERO_GRAD):
            self._add(part, self._gradients())
        elif part == OPTIMIZER:
            stepped = self._stepping
            states = (each.state.get(parameter, {}) for each in self.optimizers for parameter in stepped)
            held = [leaf for leaf in tree_leaves(list(states)) if isinstance(leaf, Tensor)]
            self._add(OPTIMIZER, 2 * self._stored([*stepped, *held]) + self._gradient_bytes)
            self._sparse = self._sparse or any(p.grad is not None and p.grad.is_sparse for p in stepped)

    def _made(self, saved: Mapping[int, int]) -> set[int]:
        """Return which of ``saved`` the forward pass made; all but parameters and the like if operators were not
        seen."""
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


def _unique(groups: Iterable[Iterable[Tensor]]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in chain.from_iterable(groups)}.values())


def _bytes_of(tensors: Iterable[Tensor], device: torch.device) -> dict[int, int]:
    """Return the bytes of each storage on ``device`` that ``tensors`` cover."""
    regions = Regions()
    for piece in chain.from_iterable(map(pieces, tensors)):
        stored = piece.untyped_storage().device
        if stored.type == device.type and device.index in (None, stored.index):
            regions.add(piece)
    return regions.bytes_of()
