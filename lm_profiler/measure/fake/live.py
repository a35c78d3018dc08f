"""The bytes that tensors hold, counted as storages are made and freed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from resource import RUSAGE_SELF, getrusage
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from lm_profiler.measure.memory.causes import pieces
from lm_profiler.measure.memory.storage_notes import NOWHERE, Site, StorageNotes
from lm_profiler.record.steps import Peaks
from lm_profiler.torch_names import DISPATCH_MODE, NO_TORCH_FUNCTION, storage_key, tree_leaves

_CONVOLUTIONS = {torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default}


class Uncounted(Exception):
    """Raised where a step holds more than its tensors, by an unknown amount."""


class LiveBytes(DISPATCH_MODE.as_base()):  # type: ignore[misc]  # a class that is looked up at run time
    """Counts each storage from the operator that made it until it is freed: a ``Probe`` for tensors without memory.

    Workspaces that an operator allocates and frees inside itself are not seen; nor is what was made before this mode
    was entered, unless it is handed to ``see``.
    """

    counts: Sequence[int] = ()
    resettable = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # so that torch does not import its compiler to keep it away

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[int, tuple[ref[Any], Callable[[], None], int]] = {}
        self._now = self._peak = 0
        self.notes: StorageNotes | None = None
        """Hears of every storage while it is there."""
        self.site: Callable[[Any], Site] = lambda func: Site(str(func))
        """Returns where an operator is called from; asked only for notes."""
        self._site = NOWHERE
        self.perhaps = 0
        """Bytes that may have been held during a convolution at most: on the CPU it copies its inputs and its result
        into padded layouts of its own."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.mkldnn_rnn_layer.default:
            raise NotImplementedError("what the CPU's kernel of an LSTM keeps for backward, only it knows")
        if any(hasattr(kind, "to_local") for kind in types):
            return NotImplemented  # a DTensor takes itself apart: the operators on its local tensors come here
        if self.notes is not None and getattr(func, "namespace", "") != "prim":  # those ask a tensor, and make none
            self._site = self.site(func)
        made = func(*args, **(kwargs or {}))
        self.see(made)
        self._site = NOWHERE
        if func in _CONVOLUTIONS:
            given = sum(leaf.nbytes for leaf in tree_leaves((args, made)) if isinstance(leaf, Tensor))
            self.perhaps = max(self.perhaps, self._now + 2 * given)
        return made

    def begin(self) -> None:
        """Start counting a run; what was made before stays counted."""

    def take_notes(self) -> StorageNotes:
        """Have a step noted from here on, until ``notes`` is None again; return the notes."""
        sizes = {key: size for key, (_, _, size) in self._held.items()}
        self.notes = StorageNotes(sizes, self._now - sum(sizes.values()))
        return self.notes

    def give_back_unused(self) -> None:
        """Empty the allocator's cache; nothing to do where it has none."""

    def see(self, value: Any) -> None:
        """Count the storages of all tensors in ``value`` that are not counted yet."""
        with NO_TORCH_FUNCTION.find_or(nullcontext)():
            for leaf in tree_leaves(value):
                # A plain meta tensor is what a DTensor asks for the shape of all shards together.
                if isinstance(leaf, Tensor) and not (type(leaf) is Tensor and leaf.is_meta):
                    for piece in pieces(leaf):
                        self._add(piece.untyped_storage(), piece)

    def _add(self, storage: torch.UntypedStorage, tensor: Tensor | None = None) -> None:
        key = storage_key(storage)
        if key in self._held or not storage.nbytes():
            return
        before = self._now
        give_back = self._take(storage.nbytes())

        def gone(_: object) -> None:
            del self._held[key]
            give_back()
            if self.notes is not None:
                self.notes.freed(key)

        # A weak reference: the counter must not keep alive what it counts.
        self._held[key] = ref(storage, gone), give_back, self._now - before
        if self.notes is not None:
            self.notes.made(key, self._now - before, self._site, tensor)

    def follow_resizes(self) -> None:
        """Count storages anew when their size changes: FSDP frees and takes its gathered parameters so.

        Only for a process of its own: it replaces a method of torch.
        """
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            made = resize(storage, size)
            if (held := self._held.pop(key := storage_key(storage), None)) is not None:
                held[1]()
                if self.notes is not None:
                    self.notes.freed(key)
            self._add(storage)
            return made

        setattr(torch.UntypedStorage, resize.__name__, resized)

    def _take(self, size: int) -> Callable[[], None]:
        """Add ``size`` bytes, and return a function that takes them off again."""
        self._rise(size)
        return lambda: self._rise(-size)

    def _rise(self, by: int) -> None:
        self._now += by
        self._peak = max(self._peak, self._now)

    @property
    def workspaces(self) -> int | None:
        """Bytes of workspaces that libraries hold for good; None where none come from the allocator."""
        return None

    def reset(self) -> None:
        """Start the peak anew at what is held now."""
        self._peak = self._now

    def peaks(self) -> Peaks:
        """Return the peak since the last reset for each of ``MEMORY``; here of allocated memory alone."""
        return self._peak, None, None

    @property
    def now(self) -> int:
        """Bytes that tensors hold now."""
        return self._now

    def held(self) -> int | None:
        """Return the bytes that tensors hold now."""
        return self._now

    def usage(self) -> Any:
        """Return the process's resource usage, as getrusage(2) has it."""
        return getrusage(RUSAGE_SELF)


class LiveCpuBytes(LiveBytes):
    """The same on the CPU, whose allocator does not say what is held: ``LevelsReader`` then counts as in a real run."""

    def held(self) -> None:
        """Return None: unknown."""
