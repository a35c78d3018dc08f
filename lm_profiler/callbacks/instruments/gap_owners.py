"""The ``actions`` stage of a loop without named actions: divides the time that no phase covers among its gaps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import nn

from lm_profiler.callbacks.instruments.owners import Owner, Owners, OwnersInstrument
from lm_profiler.measure.clocks import tape
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.run_record import BEFORE, BETWEEN, VALIDATION

_PROGRAM = ""  # the class name of the owners of gaps, which belong to no class
# the phases in the words of a loop's code
_PHASES_IN_CODE = {
    "data": "fetching a batch",
    "transfer": "the transfer of the batch",
    "forward": "the forward pass",
    "zero_grad": "zero_grad()",
    "backward": "backward()",
    "clip": "clipping gradients",
    "optimizer": "optimizer.step()",
}
# the same, for a gap that has the same phase on both sides
_PAIRS_IN_CODE = {
    "data": "two batches",
    "transfer": "two transfers of a batch",
    "forward": "two forward passes",
    "zero_grad": "two calls of zero_grad()",
    "backward": "two calls of backward()",
    "clip": "two clippings of gradients",
    "optimizer": "two calls of optimizer.step()",
}


class GapOwners(Owners):
    """Attributes the time of a gap to its name, such as ``between the forward pass and backward()``.

    The name is known when the gap ends.
    """

    # the phase before the gap; None before the first phase of a run
    _last_phase: str | None = None

    def observe(self, code: int) -> None:
        """If a gap ends, name it, so that its time is attributed to that name."""
        if self.code == tape.OTHER:
            gap = Owner(_PROGRAM, _name_of_gap(self._last_phase, code))
            self._running[-1] = gap
            self._calls[gap] += 1
        elif self.code != tape.OUTSIDE:
            self._last_phase = PARTS[self.code]
        super().observe(code)


def _name_of_gap(last_phase: str | None, code: int) -> str:
    """Return the name of the time between ``last_phase`` and the part that begins with ``code``."""
    end = VALIDATION
    if code < tape.OTHER:
        if PARTS[code] == last_phase:
            return f"{BETWEEN} {_PAIRS_IN_CODE[last_phase]}"
        end = _PHASES_IN_CODE.get(PARTS[code], PARTS[code])
    if last_phase is None:
        return f"{BEFORE} {end}"
    begin = _PHASES_IN_CODE.get(last_phase, last_phase)
    step_ends = code == tape.OTHER  # the last mark of a step has this code
    if step_ends:
        return f"{BETWEEN} {begin} and the next step"
    return f"{BETWEEN} {begin} and {end}"


@dataclass(eq=False, kw_only=True)
class GapsWatch(OwnersInstrument):
    """Instrument that divides the time of ``other`` among the gaps between phases."""

    # returns whether the model is compiled; called once the model exists
    is_compiled: Callable[[], bool]
    # returns the modules that the optimizers of the loop train
    modules: Callable[[], Sequence[nn.Module]]

    def start(self) -> None:
        """Begin to time the gaps, and the program's lines unless the step is compiled."""
        owners = GapOwners(self.timeline, self.steps, guard=self.guard)
        self._owners = owners
        if not self.is_compiled():  # a compiled step runs hardly any Python
            self._follow_lines(owners, self._is_trained, self._may_follow)
        self.observe(self.timeline, owners.observe)

    def end(self, stage: str) -> None:
        """Take the facts, and again at the end of each later stage: by then more modules may have changed."""
        is_later_stage = "python_times" in self.facts
        super().end(stage)
        if is_later_stage and self._owners is not None:
            self.facts.update(self._owners.facts())

    def _is_trained(self, module: nn.Module) -> bool:
        """Return whether ``module`` is one of the trained modules, or inside of one, or has most weights from them."""
        if any(part is module for part in self._trained_parts()):
            return True
        # Reinforcement learning often acts with another module, whose weights share the memory of the trained ones.
        addresses = _addresses_of_weights([module])
        shared_addresses = addresses & _addresses_of_weights(self.modules())
        return len(shared_addresses) > 0.5 * len(addresses)

    def _may_follow(self, module: nn.Module) -> bool:
        """Return whether ``module`` has weights like a trained module or a part of it, as a target network has.

        Such a module may get the weights of the trained one only once in many steps.
        """
        shapes = _shapes_of_weights(module)
        if not shapes:
            return False
        return any(
            _shapes_of_weights(trained) == shapes for trained in self._trained_parts()
        )

    def _trained_parts(self) -> Iterator[nn.Module]:
        """Yield the trained modules, and all modules inside of them."""
        for trained in self.modules():
            yield from trained.modules()


def _shapes_of_weights(module: nn.Module) -> list[torch.Size]:
    return [parameter.shape for parameter in module.parameters()]


def _addresses_of_weights(modules: Sequence[nn.Module]) -> set[int]:
    """Return where the weights of ``modules`` are in memory, without those that have no memory of their own."""
    addresses: set[int] = set()
    for module in modules:
        for parameter in module.parameters():
            with suppress(RuntimeError, ValueError):  # raised by tensors without memory
                addresses.add(parameter.data_ptr())
    addresses.discard(0)
    return addresses
