"""Counts the batches of a step, and their tokens and samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from math import prod
from operator import getitem, index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lm_profiler.callbacks.marks.useful_tokens import (
    UNKNOWN_USE,
    TokenUse,
    UsefulTokens,
)
from lm_profiler.measure.boundary import Guard, say
from lm_profiler.torch_names import tree_leaves

# the name that tokenizers and collators of transformers give token ids
_TOKEN_IDS = "input_ids"

_Path = tuple[Any, ...]  # the keys that lead to a tensor in a batch


class StepCount(NamedTuple):
    """What the batches of a step hold; None is unknown."""

    batches: int
    tokens: int | None
    samples: int | None
    elements: int | None
    token_use: TokenUse = UNKNOWN_USE


class BatchCounts:
    """Adds up the batches of the running step, their tokens and samples; a count that fails is unknown from then on.

    ``combined`` is true if a batch holds one batch from each of several loaders; ``batch_size`` is that of one loader.
    ``counts_elements`` is whether their elements are counted too, which only the stages need.
    """

    def __init__(
        self,
        module: object = None,
        combined: bool = False,
        report: Callable[[str], object] = say,
        batch_size: int | None = None,
        counts_elements: bool = True,
    ) -> None:
        self._tokens_part = Guard("tokens_in", report)
        self._samples_part = Guard("samples", report)
        self._elements_part = Guard("elements of batches", report)
        # None once one of them failed
        self._count_tokens: Tokens | None = self._tokens_part.run(Tokens, module)
        self._count_samples: Samples | None = Samples(combined, batch_size)
        self._count_elements: Elements | None = Elements() if counts_elements else None
        self._useful_part = Guard("useful tokens", report)
        self._useful_tokens: UsefulTokens | None = UsefulTokens()
        self._has_own_tokens = hasattr(module, "tokens_in")
        self.batches = 0
        self.tokens: int | None = None
        self.samples: int | None = 0
        self.elements: int | None = 0

    def note_host_batch(self, batch: Any) -> None:
        """Note a batch that is about to go to the device, where its masks cannot be read."""
        if self._useful_tokens is not None:
            try:
                self._useful_tokens.note_host_batch(batch)
            except BaseException as error:
                self._useful_part.failed(error)
                self._useful_tokens = None

    def add(self, batch: Any) -> None:
        """Count ``batch``. It runs in every timed step, so Guard.run is written out: each frame takes 0.1 us."""
        self.batches += 1
        tokens: int | None = None
        if self._count_tokens is not None:
            try:
                tokens = self._count_tokens(batch)
                self.tokens = None if tokens is None else (self.tokens or 0) + tokens
            except BaseException as error:
                self._tokens_part.failed(error)
                self._count_tokens = None
                self.tokens = None

        if self._count_samples is not None:
            try:
                samples = self._count_samples(batch)
                if samples is None or self.samples is None:
                    self.samples = None
                else:
                    self.samples += samples
            except BaseException as error:
                self._samples_part.failed(error)
                self._count_samples = None
                self.samples = None

        if self._count_elements is not None:
            try:
                elements = self._count_elements(batch)
                if elements is None or self.elements is None:
                    self.elements = None
                else:
                    self.elements += elements
            except BaseException as error:
                self._elements_part.failed(error)
                self._count_elements = None
                self.elements = None

        if self._useful_tokens is not None:
            try:
                own_count = tokens if self._has_own_tokens else None
                self._useful_tokens.add(batch, own_count)
            except BaseException as error:
                self._useful_part.failed(error)
                self._useful_tokens = None

    def take(self) -> StepCount:
        """Return the counts of the step that ended, and start again from zero; call it between steps."""
        token_use = UNKNOWN_USE
        if self._useful_tokens is not None:
            try:
                token_use = self._useful_tokens.take()
            except BaseException as error:
                self._useful_part.failed(error)
                self._useful_tokens = None
        counts = StepCount(
            self.batches, self.tokens, self.samples, self.elements, token_use
        )
        self.batches = 0
        self.tokens = None
        self.samples = None if self._count_samples is None else 0
        self.elements = None if self._count_elements is None else 0
        return counts


class Tokens:
    """Counts a batch's tokens, by the ``tokens_in`` of ``module`` or else as the size of what is called ``input_ids``.

    The latter includes padding: telling padding apart would make the host wait for the device.
    """

    def __init__(self, module: object) -> None:
        self._tokens_in: Callable[[Any], Any] | None = getattr(
            module, "tokens_in", None
        )
        self._paths_by_kind: dict[Any, list[_Path]] = {}

    def __call__(self, batch: Any) -> int | None:
        """Return the tokens of ``batch``; raises if ``tokens_in`` gives no count."""
        if self._tokens_in is not None:
            tokens = index(self._tokens_in(batch))
            if tokens < 0:
                raise ValueError(f"expected a number of tokens, given {tokens}")
            return tokens

        kind = _kind(batch)
        paths = self._paths_by_kind.get(kind)
        if paths is None:
            # only once per kind: walking through every batch would cost more than all marks
            paths = [path for path, _ in _tensors(batch) if path[-1:] == (_TOKEN_IDS,)]
            self._paths_by_kind[kind] = paths
        if not paths:
            return None
        count: int = sum(reduce(getitem, path, batch).numel() for path in paths)
        return count


class Samples:
    """Counts a batch's samples: its graphs, or a dimension that all its tensors have; None is unknown.

    That is the first dimension, or the second where only this one is as long as the loader's ``batch_size``: sequences
    are often padded into batches whose first dimension is time. It searches each kind of batch once. The samples of
    several ``combined`` loaders add up.
    """

    def __init__(self, combined: bool, batch_size: int | None = None) -> None:
        self._combined = combined
        self._batch_size = batch_size
        self._counters_by_kind: dict[Any, Callable[[Any], int | None]] = {}

    def __call__(self, batch: Any) -> int | None:
        """Return the samples of ``batch``; None if those of a loader that gave a batch are unknown."""
        if not self._combined:
            return self._count(batch)
        total: int | None = None
        for _, loader_batch in _entries(batch):
            if loader_batch is None:  # a loader is exhausted
                continue
            samples = self._count(loader_batch)
            if samples is None:
                return None
            total = (total or 0) + samples
        return total

    def _count(self, batch: Any) -> int | None:
        """Return the samples of the batch of one loader."""
        if batch is None:
            return None
        kind = _kind(batch)
        count = self._counters_by_kind.get(kind)
        if count is None:
            count = _sample_counter(batch, self._batch_size)
            self._counters_by_kind[kind] = count
        return count(batch)


class Elements:
    """Counts the elements of a batch's largest tensor, to which the work on it is nearly proportional."""

    def __init__(self) -> None:
        self._path_by_kind: dict[Any, _Path | None] = {}

    def __call__(self, batch: Any) -> int | None:
        kind = _kind(batch)
        if kind not in self._path_by_kind:
            self._path_by_kind[kind] = _path_of_largest(batch)
        path = self._path_by_kind[kind]
        if path is None:
            return None
        return int(reduce(getitem, path, batch).numel())


def _path_of_largest(batch: Any) -> _Path | None:
    sizes = {path: tensor.numel() for path, tensor in _tensors(batch)}
    return max(sizes, key=sizes.__getitem__, default=None)


_MOST_ENTRIES = 64  # a longer list holds entries of one kind


def _kind(part: Any) -> Any:
    """Return what is equal for batches that hold the same things under the same names."""
    if isinstance(part, Mapping):
        return type(part), tuple((key, _kind(value)) for key, value in part.items())
    if isinstance(part, (list, tuple)) and len(part) <= _MOST_ENTRIES:
        return type(part), tuple(map(_kind, part))
    return type(part)


def _entries(batch: Any) -> list[tuple[Any, Any]]:
    """Return the keys and values of a mapping, or the indices and items of a list; empty for anything else."""
    if isinstance(batch, Mapping):
        return list(batch.items())
    if isinstance(batch, (list, tuple)):
        return list(enumerate(batch))
    return []


def _tensors(part: Any, path: _Path = ()) -> Iterator[tuple[_Path, Tensor]]:
    """Yield the tensors in ``part``, which is at ``path`` in its batch, and their paths."""
    if isinstance(part, Tensor):
        yield path, part
    for key, inner_part in _entries(part):
        yield from _tensors(inner_part, (*path, key))


def _sample_counter(batch: Any, batch_size: int | None) -> Callable[[Any], int | None]:
    """Return a function that counts the samples of batches like ``batch``."""
    if _own_count(batch) is not None:
        return _own_count
    with_paths = [(path, tensor) for path, tensor in _tensors(batch) if tensor.ndim > 0]
    tensors = [tensor for _, tensor in with_paths]
    tensors += [
        leaf
        for leaf in tree_leaves(batch)
        if isinstance(leaf, Tensor) and leaf.ndim > 0
    ]
    first_lengths = {tensor.shape[0] for tensor in tensors}
    if not with_paths or len(first_lengths) != 1:
        return _unknown_count
    is_time_first = (
        batch_size is not None
        and batch_size not in first_lengths
        and all(tensor.ndim > 1 and tensor.shape[1] == batch_size for tensor in tensors)
    )
    dimension = 1 if is_time_first else 0
    path, _ = with_paths[0]

    def count(batch: Any) -> int | None:
        try:
            return int(reduce(getitem, path, batch).shape[dimension])
        except (
            AttributeError,
            IndexError,
            KeyError,
            TypeError,
        ):  # not like the first batch of its kind
            return None

    return count


def _unknown_count(batch: Any) -> None:
    """Return None: the samples of such a batch are unknown."""


def _own_count(batch: Any) -> int | None:
    """Return the batch's own count: graphs (PyTorch Geometric, DGL) or batch size (TensorDict); None without one."""
    if isinstance(batch, (Tensor, dict, list, tuple)):
        return None
    for name in ("num_graphs", "batch_size"):
        count = getattr(batch, name, None)
        if isinstance(count, torch.Size):
            return prod(count) if count else None
        if isinstance(count, int) and not isinstance(count, bool) and count > 0:
            return count
    return None
