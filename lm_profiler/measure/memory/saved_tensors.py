"""Keeps track of the tensors that autograd saves for backward."""

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
from lm_profiler.torch_names import (
    DYNAMO,
    GRAPH_TASK,
    INNERMOST_HOOKS,
    MODE_STACK,
)

_OUR_PACKAGE = __name__.partition(".")[0]


@dataclass(eq=False)
class _SavedTensor:
    """A tensor that autograd saved; the graph keeps this object alive as long as it needs the tensor."""

    tensor: Tensor


class SavedTensors:
    """The tensors that autograd saved while this object watched and still keeps for backward.

    The program's own hooks take precedence: ours lie below them, even if a step begins or ends within their context. A
    tensor that they replace (activation checkpointing, ``save_on_cpu``) is not seen here; it is not saved on the device
    either.
    """

    def __init__(self, guard: Guard = UNGUARDED) -> None:
        self._packed: WeakSet[_SavedTensor] = WeakSet()
        self._guard = guard
        # Not compiled: torch.compile would otherwise compile the hook with a part of the step.
        pack = torch.compiler.disable(self._pack) if DYNAMO.loaded() else self._pack
        self._hooks = graph.saved_tensors_hooks(pack, _unpack)
        self._enter: Callable[[], object] = self._hooks.__enter__
        self._exit: Callable[[], object] = self._hooks.__exit__
        self.is_watching = False
        # torch's ``disable_saved_tensors_hooks`` while it is replaced
        self._disable: Any = None

    def __iter__(self) -> Iterator[Tensor]:
        return (packed.tensor for packed in self._packed)

    def watch(self) -> None:
        """Watch what autograd saves from now on, in this thread."""
        self._disable = graph.disable_saved_tensors_hooks
        graph.disable_saved_tensors_hooks = self._disable_without_ours  # type: ignore[assignment]
        self._set_watching(is_watching=True)

    def unwatch(self) -> None:
        """Stop watching. During a backward pass do nothing: at its end torch restores the hooks from its start."""
        if GRAPH_TASK.find()() != -1:
            return
        self._set_watching(is_watching=False)
        if self._disable is not None:
            graph.disable_saved_tensors_hooks = self._disable
            self._disable = None

    def _set_watching(self, is_watching: bool) -> None:
        """Add or remove our hooks below those of the program, and note that they are there.

        Both are done in a single statement, so that an interrupt hardly comes between them. Otherwise the hooks could
        stay, or be removed twice.
        """
        if is_watching == self.is_watching:
            return
        programs_hooks = self._take_programs_hooks()
        try:
            if is_watching:
                _, self.is_watching = self._enter(), True
            else:
                _, self.is_watching = self._exit(), False
        finally:
            for hooks in reversed(programs_hooks):
                hooks.__enter__()

    def _take_programs_hooks(self) -> list[graph.saved_tensors_hooks]:
        """Remove the program's hooks down to ours, or all if ours are not there; return them, the last first.

        They must be put back: each context of the program removes, when it ends, whatever hooks are on top.
        """
        find_innermost = INNERMOST_HOOKS.find()
        removed: list[graph.saved_tensors_hooks] = []
        while True:
            innermost = find_innermost(True)  # also while something is traced
            if innermost is None or innermost[0] is self._hooks.pack_hook:
                return removed
            hooks = graph.saved_tensors_hooks(*innermost)
            hooks.__exit__()
            removed.append(hooks)

    def _pack(self, tensor: Tensor) -> Tensor | _SavedTensor:
        """Return what autograd keeps in place of ``tensor``, and gives to ``_unpack`` when it needs the tensor."""
        return self._guard.run(self._wrap, tensor) or tensor

    def _wrap(self, tensor: Tensor) -> _SavedTensor | None:
        """Return a wrapper of ``tensor``, which ``_packed`` has as long as autograd keeps it.

        None while the program records operators: a callback may export the model in a step, for example by
        ``torch.jit.trace``, and ``detach`` would become a part of the exported program.
        """
        if _program_records_operators():
            return None
        # detached, because an operator that saves its own output would make a reference cycle
        packed = _SavedTensor(tensor.detach())
        self._packed.add(packed)
        return packed

    @contextmanager
    def _disable_without_ours(self, message: str) -> Iterator[None]:
        """Replace torch's ``disable_saved_tensors_hooks``: remove our hooks for the time in which it disables hooks.

        ``torch.func`` disables them, and would refuse to differentiate if there were any.
        """
        disabled: AbstractContextManager[None] = self._disable(message)
        was_watching = self.is_watching
        self._set_watching(is_watching=False)
        try:
            with disabled:
                yield
        finally:
            self._set_watching(was_watching)


def _program_records_operators() -> bool:
    """Return whether the program itself records the operators that are called now.

    It does so by ``torch.jit.trace``, or by a mode that is not ours, as ``torch.export`` and ``make_fx`` do.
    """
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return True
    return any(
        not type(mode).__module__.startswith(_OUR_PACKAGE)
        for mode in MODE_STACK.find()()
    )


def _unpack(packed: Tensor | _SavedTensor) -> Tensor:
    return packed.tensor if isinstance(packed, _SavedTensor) else packed
