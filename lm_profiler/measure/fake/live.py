"""The bytes that tensors hold, counted as their storages come and go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from resource import RUSAGE_SELF, getrusage
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from lm_profiler.measure.memory.causes import pieces
from lm_profiler.record.steps import Peaks
from lm_profiler.torch_names import DISPATCH_MODE, NO_TORCH_FUNCTION, storage_key, tree_leaves

_CONVOLUTIONS = {torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default}


class Uncounted(Exception):
    """What a step holds is not what its tensors take."""


class LiveBytes(DISPATCH_MODE.as_base()):  # type: ignore[misc]  # whose type is known when it is there
    """Counts every storage from the operator that made it until nobody holds it; a ``Probe`` of tensors without memory.

    What an operator allocates and frees inside of itself (workspaces) is not seen, nor is what was made before it was
    entered, unless ``see`` is told.
    """

    counts: Sequence[int] = ()
    resettable = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # so that torch does not import its compiler to keep it away

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[int, ref[Any]] = {}
        self._now = self._peak = 0
        self.perhaps = 0
        """What may have been held amid a convolution: it copies what it is given, and what it makes, into layouts of
        its own, padded."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.mkldnn_rnn_layer.default:
            raise NotImplementedError("what the CPU's kernel of an LSTM keeps for backward, only it knows")
        made = func(*args, **(kwargs or {}))
        self.see(made)
        if func in _CONVOLUTIONS:
            given = sum(leaf.nbytes for leaf in tree_leaves((args, made)) if isinstance(leaf, Tensor))
            self.perhaps = max(self.perhaps, self._now + 2 * given)
        return made

    def begin(self) -> None:
        """What was made until now stays counted."""

    def give_back_unused(self) -> None:
        """An allocator that keeps what is freed does so no more, up to here."""

    def see(self, value: Any) -> None:
        """Count the storages of all tensors in ``value`` that are not counted yet."""
        with NO_TORCH_FUNCTION.find_or(nullcontext)():
            for leaf in tree_leaves(value):
                if isinstance(leaf, Tensor):
                    for piece in pieces(leaf):
                        self._add(piece.untyped_storage())

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage_key(storage)
        if key in self._held:
            return
        give_back = self._take(storage.nbytes())

        def gone(_: object) -> None:
            del self._held[key]
            give_back()

        self._held[key] = ref(storage, gone)

    def _take(self, size: int) -> Callable[[], None]:
        """Count so many bytes more; what is returned counts them no more."""
        self._rise(size)
        return lambda: self._rise(-size)

    def _rise(self, by: int) -> None:
        self._now += by
        self._peak = max(self._peak, self._now)

    @property
    def workspaces(self) -> int | None:
        """Bytes that libraries have taken to work in, and keep; None where none does through the allocator."""
        return None

    def reset(self) -> None:
        """Peaks count from here on."""
        self._peak = self._now

    def peaks(self) -> Peaks:
        """The most since the last reset, for each of ``MEMORY``: what an allocator calls allocated."""
        return self._peak, None, None

    def held(self) -> int | None:
        """Bytes that tensors hold now."""
        return self._now

    def usage(self) -> Any:
        """The process's, as getrusage(2) has it."""
        return getrusage(RUSAGE_SELF)


class LiveCpuBytes(LiveBytes):
    """The same on the CPU, whose allocator does not say what is held, so that it is counted as in a real run."""

    def held(self) -> None:
        """Unknown."""
