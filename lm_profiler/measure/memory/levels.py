"""Reads the memory held where forward and backward begin and end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.optim import Optimizer

from lm_profiler.measure.boundary import UNGUARDED, Guard
from lm_profiler.measure.clocks.steps import BACKWARD, FORWARD
from lm_profiler.measure.memory.causes import storages, storages_by_cause
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.run_record import MemoryLevels
from lm_profiler.torch_names import DYNAMO, GRAPH_TASK


@dataclass(eq=False)
class LevelsReader:
    """Keeps the memory levels of the last step: an observer of marks, for a stage that is not timed.

    Where the allocator does not say what it holds (the CPU's), the storages of parameters, gradients, optimizer states
    and buffers are counted, and those that autograd saved for backward. Outputs that nothing saved are left out.
    """

    module: nn.Module
    optimizers: Sequence[Optimizer]  # the plain optimizers, without Lightning's wrapping
    held: Callable[[], int | None]  # returns the bytes that the allocator holds now; None where it does not say
    device: torch.device  # the device whose memory is read
    part: Guard = UNGUARDED  # handles errors in a hook

    def __post_init__(self) -> None:
        self.saved = SavedTensors(self.part)
        self._counted = self.held() is None
        self._part: int | None = None
        self._known: dict[str, int] = {}
        self.levels: MemoryLevels | None = None  # those of the last step that ended

    def __call__(self, code: int) -> None:
        if self._part is None:
            self.saved.watch()
        if self._part in (FORWARD, BACKWARD):
            # Accumulation has several passes in a step: the highest level counts.
            part = PARTS[self._part]
            self._known[part] = max(self._known.get(part, 0), self._now())
        if code == FORWARD and "start" not in self._known:
            self._known["start"] = self._now()
        self._part = code

    def step_ended(self) -> None:
        known = {name: self._known.get(name) for name in ("start", "forward", "backward")}
        self.levels = MemoryLevels(**known, source="counted" if self._counted else "allocator")
        self.stop()

    def stop(self) -> None:
        self.saved.unwatch()
        self._part, self._known = None, {}

    @property
    def watching(self) -> bool:
        """Whether hooks are left in torch; ``stop`` during a backward pass leaves them."""
        return self.saved.seeing

    def _now(self) -> int:
        if not self._counted:
            return self.held() or 0
        held = storages(self.saved, self.device)
        for cause in storages_by_cause(self.module, self.optimizers, self.device):
            held.update(cause)
        return sum(held.values())


@dataclass(eq=False)
class _SavedTensor:
    """A tensor that autograd saved; the graph keeps this object alive as long as it needs the tensor."""

    tensor: Tensor


class SavedTensors:
    """The tensors that autograd keeps for backward, of those saved while this object watched.

    Its hooks are entered outside the step's own hooks, which take precedence: what those pack elsewhere (activation
    checkpointing, ``save_on_cpu``) is not seen, as it is not saved on the device.
    """

    def __init__(self, part: Guard = UNGUARDED) -> None:
        self._packed: WeakSet[_SavedTensor] = WeakSet()
        self._part = part
        # torch.compile would compile the hook too, where it compiles a part of the step.
        pack = torch.compiler.disable(self._pack) if DYNAMO.loaded() else self._pack
        hooks = graph.saved_tensors_hooks(pack, _unpack)
        self._enter: Callable[[], object] = hooks.__enter__
        self._exit: Callable[[], object] = hooks.__exit__
        self.seeing = False
        self._disable: Any = None

    def __iter__(self) -> Iterator[Tensor]:
        return (packed.tensor for packed in self._packed)

    def watch(self) -> None:
        """Watch what is saved from here on, in this thread."""
        self._disable = graph.disable_saved_tensors_hooks
        graph.disable_saved_tensors_hooks = self._stepping_aside  # type: ignore[assignment]
        self._set_watching(True)

    def unwatch(self) -> None:
        """Stop watching. Does nothing during a backward pass, at whose end torch restores the hooks of its start."""
        if GRAPH_TASK.find()() != -1:
            return
        self._set_watching(False)
        if self._disable is not None:
            graph.disable_saved_tensors_hooks = self._disable
            self._disable = None

    def _set_watching(self, seeing: bool) -> None:
        # One statement: an interrupt between entering and noting it would leave the hooks in, or remove them twice.
        if seeing and not self.seeing:
            _, self.seeing = self._enter(), True
        elif self.seeing and not seeing:
            _, self.seeing = self._exit(), False

    def _pack(self, tensor: Tensor) -> Tensor | _SavedTensor:
        return self._part.run(self._keep, tensor) or tensor

    def _keep(self, tensor: Tensor) -> _SavedTensor:
        packed = _SavedTensor(tensor.detach())  # not attached: an operator's saved output would be a reference cycle
        self._packed.add(packed)
        return packed

    @contextmanager
    def _stepping_aside(self, message: str) -> Iterator[None]:
        """Leave our hooks while ``torch.func`` disables hooks: otherwise it would refuse to differentiate."""
        disabled: AbstractContextManager[None] = self._disable(message)
        before = self.seeing
        self._set_watching(False)
        try:
            with disabled:
                yield
        finally:
            self._set_watching(before)


def _unpack(packed: Tensor | _SavedTensor) -> Tensor:
    return packed.tensor if isinstance(packed, _SavedTensor) else packed
