"""The tensors that autograd saves for backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd import graph

from lm_profiler.measure.boundary import UNGUARDED, Guard
from lm_profiler.torch_names import DYNAMO, GRAPH_TASK


@dataclass(eq=False)
class _SavedTensor:
    """A tensor that autograd saved; the graph keeps this object alive as long as it needs the tensor."""

    tensor: Tensor


class SavedTensors:
    """The tensors that autograd keeps for backward, of those saved while this object watched.

    Its hooks are entered outside the step's own hooks, which take precedence: what those pack elsewhere (activation
    checkpointing, ``save_on_cpu``) is not seen, as it is not saved on the device.
    """

    def __init__(self, guard: Guard = UNGUARDED) -> None:
        self._packed: WeakSet[_SavedTensor] = WeakSet()
        self._guard = guard
        # torch.compile would compile the hook too, if it compiles a part of the step.
        pack = torch.compiler.disable(self._pack) if DYNAMO.loaded() else self._pack
        hooks = graph.saved_tensors_hooks(pack, _unpack)
        self._enter: Callable[[], object] = hooks.__enter__
        self._exit: Callable[[], object] = hooks.__exit__
        self.is_watching = False
        self._disable: Any = None

    def __iter__(self) -> Iterator[Tensor]:
        return (packed.tensor for packed in self._packed)

    def watch(self) -> None:
        """Watch what is saved from here on, in this thread."""
        self._disable = graph.disable_saved_tensors_hooks
        graph.disable_saved_tensors_hooks = self._stepping_aside  # type: ignore[assignment]
        self._set_watching(is_watching=True)

    def unwatch(self) -> None:
        """Stop watching. Does nothing during a backward pass, at whose end torch restores the hooks of its start."""
        if GRAPH_TASK.find()() != -1:
            return
        self._set_watching(is_watching=False)
        if self._disable is not None:
            graph.disable_saved_tensors_hooks = self._disable
            self._disable = None

    def _set_watching(self, is_watching: bool) -> None:
        # One statement: an interrupt between entering and noting it would leave the hooks in, or remove them twice.
        if is_watching and not self.is_watching:
            _, self.is_watching = self._enter(), True
        elif self.is_watching and not is_watching:
            _, self.is_watching = self._exit(), False

    def _pack(self, tensor: Tensor) -> Tensor | _SavedTensor:
        return self._guard.run(self._keep, tensor) or tensor

    def _keep(self, tensor: Tensor) -> _SavedTensor:
        # not attached: an operator's saved output would be a reference cycle
        packed = _SavedTensor(tensor.detach())
        self._packed.add(packed)
        return packed

    @contextmanager
    def _stepping_aside(self, message: str) -> Iterator[None]:
        """Leave our hooks while ``torch.func`` disables hooks: otherwise it would refuse to differentiate."""
        disabled: AbstractContextManager[None] = self._disable(message)
        before = self.is_watching
        self._set_watching(is_watching=False)
        try:
            with disabled:
                yield
        finally:
            self._set_watching(before)


def _unpack(packed: Tensor | _SavedTensor) -> Tensor:
    return packed.tensor if isinstance(packed, _SavedTensor) else packed
