"""Finds kernels that bypass torch's dispatcher because Triton, CuTe or an extension launches them.

Such a kernel shows in its result: memory that was allocated without a value, that no operator wrote, and that an
operator then reads. Something else must have written it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from traceback import walk_stack
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from lm_profiler.measure.counts.package_formulas import has_no_products
from lm_profiler.measure.user_code import OURS, TORCH, package_of
from lm_profiler.record.text import short_path
from lm_profiler.torch_names import tree_leaves

_ALLOCATIONS = {
    "empty",
    "empty_like",
    "empty_strided",
    "empty_permuted",
    "new_empty",
    "new_empty_strided",
}
# operators that write an argument, though neither their name nor ``out`` shows it
_WRITERS = {
    "rrelu_with_noise",
    "native_batch_norm",
    "cudnn_batch_norm",
    "miopen_batch_norm",
}
# operators that read no elements
_QUERIES = {
    "record_stream",
    "is_pinned",
    "is_same_size",
    "sym_size",
    "sym_numel",
    "sym_stride",
    *_ALLOCATIONS,
}


class ForeignKernels:
    """Observes the operators of a step, and counts the results of foreign kernels: results that no operator wrote."""

    def __init__(self) -> None:
        # the name of a function to the number of results of foreign kernels in memory that it allocated
        self.counts: Counter[str] = Counter()
        # by identity: storages that no operator has written yet, with the name of the function that allocated each
        self._unwritten: dict[int, tuple[ref[Any], str]] = {}

    def begin(self) -> None:
        """Begin a pass: forget earlier allocations, which operators outside of a pass may have written unseen."""
        self._unwritten = {}

    def note_call(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note which new storages ``operator`` writes, and which it reads although no operator wrote them."""
        name = operator.__name__.partition(".")[0]
        if name in _ALLOCATIONS and operator.namespace == "aten":
            self._note_allocation(result)
            return
        if not self._unwritten:
            return
        inputs = list(_storages((args, kwargs)))
        results = list(_storages(result))
        if name not in _QUERIES:
            self._note_inputs(
                inputs, results, may_write=_may_write(operator, name, kwargs)
            )
        for storage in results:
            # a new storage may have the identity of a freed one
            is_new = not any(storage is candidate for candidate in inputs)
            if is_new:
                self._unwritten.pop(id(storage), None)

    def forget(self, value: Any) -> None:
        """Treat the tensors in ``value`` as written, because a formula counted the work that wrote them."""
        for storage in _storages(value):
            self._unwritten.pop(id(storage), None)

    def _note_allocation(self, result: Any) -> None:
        """Note the memory of ``result``, which a function of the program has allocated and nothing has written yet."""
        function = _calling_function(sys._getframe(1))
        if function is None:
            return
        for storage in _storages(result):
            if storage.nbytes():
                self._unwritten[id(storage)] = (ref(storage), function)

    def _note_inputs(
        self, inputs: list[Any], results: list[Any], may_write: bool
    ) -> None:
        """Count the inputs that are read although no operator wrote them: a foreign kernel did."""
        for storage in inputs:
            if id(storage) not in self._unwritten:
                continue
            if may_write:
                del self._unwritten[id(storage)]
                continue
            returns_view = any(storage is result for result in results)
            if returns_view:
                continue  # nothing was read yet
            reference, function = self._unwritten.pop(id(storage))
            # a new storage may have the identity of a freed one
            if reference() is storage:
                self.counts[function] += 1


def _may_write(operator: Any, name: str, kwargs: Any) -> bool:
    """Return whether ``operator`` may write its arguments; unknown operators may."""
    if operator.namespace not in ("aten", "prims", "profiler"):
        return True
    return name.endswith("_") or "out" in kwargs or name in _WRITERS


def _storages(value: Any) -> Iterator[Any]:
    """Yield the storages of the dense tensors in a nested ``value``."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            yield leaf.untyped_storage()


def _calling_function(innermost: FrameType) -> str | None:
    """Return the innermost function outside of torch, as text with its file and line.

    None if the kernels of its file are known to multiply nothing.
    """
    for frame, line in walk_stack(innermost):
        code = frame.f_code
        if package_of(code.co_filename) in (TORCH, OURS):
            continue
        if has_no_products(code.co_filename):
            return None
        # Python 3.10 has no qualified names
        name = getattr(code, "co_qualname", code.co_name).removesuffix(".forward")
        return f"{name} ({short_path(code.co_filename)}:{line})"
    return "an operator of torch"
