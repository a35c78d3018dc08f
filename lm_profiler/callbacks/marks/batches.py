"""Counts the batches of a step, and their tokens and samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from math import prod
from operator import getitem, index
from typing import Any

import torch
from torch import Tensor

from lm_profiler.measure.boundary import Guard, say
from lm_profiler.torch_names import tree_leaves

_NAMED = "input_ids"  # the name that tokenizers and collators of transformers give token ids

_Path = tuple[Any, ...]  # the keys that lead to a tensor in a batch


class BatchCounts:
    """Adds up the batches of the running step, their tokens and samples; a count that fails is unknown from then on.

    ``combined`` says that a batch holds one batch of each of several loaders.
    """

    def __init__(self, module: object = None, combined: bool = False, report: Callable[[str], object] = say) -> None:
        self._of_tokens, self._of_samples = Guard("tokens_in", report), Guard("samples", report)
        self._tokens_in = self._of_tokens.run(Tokens, module)
        self._samples_in: Samples | None = Samples(combined)
        self.batches = 0
        self.tokens: int | None = None
        self.samples: int | None = 0

    def add(self, batch: Any) -> None:
        """Count ``batch``. It runs in every timed step, so Guard.run is written out: each frame takes 0.1 us."""
        self.batches += 1
        if self._tokens_in is not None:
            try:
                tokens = self._tokens_in(batch)
                self.tokens = None if tokens is None else (self.tokens or 0) + tokens
            except BaseException as error:
                self._of_tokens.failed(error)
                self._tokens_in = self.tokens = None
        if self._samples_in is not None:
            try:
                samples, before = self._samples_in(batch), self.samples
                self.samples = None if samples is None or before is None else before + samples
            except BaseException as error:
                self._of_samples.failed(error)
                self._samples_in = self.samples = None

    def take(self) -> tuple[int, int | None, int | None]:
        """Return batches, tokens and samples of the step that ended, and start again from zero."""
        taken = self.batches, self.tokens, self.samples
        self.batches, self.tokens, self.samples = 0, None, None if self._samples_in is None else 0
        return taken


class Tokens:
    """Counts a batch's tokens, by the ``tokens_in`` of ``module`` or else as the size of what is called ``input_ids``.

    The latter includes padding: telling padding apart would make the host wait for the device.
    """

    def __init__(self, module: object) -> None:
        self._tokens_in: Callable[[Any], Any] | None = getattr(module, "tokens_in", None)
        self._paths: list[_Path] | None = None

    def __call__(self, batch: Any) -> int | None:
        """Return the tokens of ``batch``; raises if ``tokens_in`` gives no count, or the batch is unlike the first."""
        if self._tokens_in is None:
            if self._paths is None:  # only once: walking through every batch would cost more than all marks
                self._paths = [path for path, _ in _tensors(batch) if path[-1:] == (_NAMED,)]
            return sum(reduce(getitem, path, batch).numel() for path in self._paths) if self._paths else None
        tokens = index(self._tokens_in(batch))
        if tokens < 0:
            raise ValueError(f"expected a number of tokens, given {tokens}")
        return tokens


class Samples:
    """Counts a batch's samples: its graphs, or the first dimension that all its tensors have; None is unknown.

    It searches only the first batch for them. The samples of several ``combined`` loaders add up.
    """

    def __init__(self, combined: bool) -> None:
        self._combined = combined
        self._counts: dict[Any, Callable[[Any], int | None]] | None = None  # by the loader's key in the batch

    def __call__(self, batch: Any) -> int | None:
        parts = _parts(batch) if self._combined else [(None, batch)]
        if self._counts is None:
            self._counts = {key: _count_of(part) for key, part in parts}
        try:
            counts = [self._counts[key](part) for key, part in parts if part is not None]  # None: a loader is exhausted
            return sum(counts) if counts else None  # type: ignore[arg-type]  # an unknown one is a TypeError
        except (AttributeError, IndexError, KeyError, TypeError):  # not like the first batch
            return None


def _parts(batch: Any) -> list[tuple[Any, Any]]:
    if isinstance(batch, Mapping):
        return list(batch.items())
    return list(enumerate(batch)) if isinstance(batch, (list, tuple)) else []


def _tensors(part: Any, path: _Path = ()) -> Iterator[tuple[_Path, Tensor]]:
    if isinstance(part, Tensor):
        yield path, part
    for key, inner in _parts(part):
        yield from _tensors(inner, (*path, key))


def _count_of(part: Any) -> Callable[[Any], int | None]:
    """Return a function that counts the samples of a batch like ``part``."""
    if _own_count(part) is not None:
        return _own_count
    rows = {leaf.shape[0] for leaf in tree_leaves(part) if isinstance(leaf, Tensor) and leaf.ndim}
    first = next((path for path, tensor in _tensors(part) if tensor.ndim), None)
    if len(rows) != 1 or first is None:
        return lambda part: None
    return lambda part: int(reduce(getitem, first, part).shape[0])


def _own_count(batch: Any) -> int | None:
    """Return the batch's own count: graphs (PyTorch Geometric, DGL) or batch size (TensorDict); None without one."""
    if isinstance(batch, (Tensor, dict, list, tuple)):
        return None
    for name in ("num_graphs", "batch_size"):
        given = getattr(batch, name, None)
        if isinstance(given, torch.Size):
            return prod(given) if given else None
        if isinstance(given, int) and not isinstance(given, bool) and given > 0:
            return given
    return None
