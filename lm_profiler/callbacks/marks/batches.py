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

    ``combined`` says that a batch holds one batch of each of several loaders; ``batch_size`` is that of a single one.
    """

    def __init__(
        self,
        module: object = None,
        combined: bool = False,
        report: Callable[[str], object] = say,
        batch_size: int | None = None,
    ) -> None:
        self._of_tokens, self._of_samples = Guard("tokens_in", report), Guard("samples", report)
        self._tokens_in = self._of_tokens.run(Tokens, module)
        self._samples_in: Samples | None = Samples(combined, batch_size)
        self._of_elements = Guard("elements of batches", report)
        self._elements_in: Elements | None = Elements()
        self.batches = 0
        self.tokens: int | None = None
        self.samples: int | None = 0
        self.elements: int | None = 0

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

        if self._elements_in is not None:
            try:
                elements, elements_before = self._elements_in(batch), self.elements
                is_unknown = elements is None or elements_before is None
                self.elements = None if is_unknown else elements_before + elements  # type: ignore[operator]
            except BaseException as error:
                self._of_elements.failed(error)
                self._elements_in = self.elements = None

    def take(self) -> tuple[int, int | None, int | None, int | None]:
        """Return batches, tokens, samples and elements of the step that ended, and start again from zero."""
        taken = self.batches, self.tokens, self.samples, self.elements
        self.batches, self.tokens = 0, None
        self.samples = None if self._samples_in is None else 0
        self.elements = None if self._elements_in is None else 0
        return taken


class Tokens:
    """Counts a batch's tokens, by the ``tokens_in`` of ``module`` or else as the size of what is called ``input_ids``.

    The latter includes padding: telling padding apart would make the host wait for the device.
    """

    def __init__(self, module: object) -> None:
        self._tokens_in: Callable[[Any], Any] | None = getattr(module, "tokens_in", None)
        self._paths_by_kind: dict[Any, list[_Path]] = {}

    def __call__(self, batch: Any) -> int | None:
        """Return the tokens of ``batch``; raises if ``tokens_in`` gives no count."""
        if self._tokens_in is None:
            kind = _kind(batch)
            paths = self._paths_by_kind.get(kind)
            if paths is None:  # only once a kind: walking through every batch would cost more than all marks
                paths = [path for path, _ in _tensors(batch) if path[-1:] == (_NAMED,)]
                self._paths_by_kind[kind] = paths
            return sum(reduce(getitem, path, batch).numel() for path in paths) if paths else None
        tokens = index(self._tokens_in(batch))
        if tokens < 0:
            raise ValueError(f"expected a number of tokens, given {tokens}")
        return tokens


class Samples:
    """Counts a batch's samples: its graphs, or a dimension that all its tensors have; None is unknown.

    That is the first dimension, or the second where only this one is as long as the loader's ``batch_size``: sequences
    are often padded into batches whose first dimension is time. It searches each kind of batch once. The samples of
    several ``combined`` loaders add up.
    """

    def __init__(self, combined: bool, batch_size: int | None = None) -> None:
        self._combined = combined
        self._batch_size = batch_size
        self._counts: dict[Any, Callable[[Any], int | None]] = {}  # by the kind of a loader's batch

    def __call__(self, batch: Any) -> int | None:
        parts = [part for _, part in _parts(batch)] if self._combined else [batch]
        total = None
        for part in parts:
            if part is None:  # a loader is exhausted
                continue
            kind = _kind(part)
            count = self._counts.get(kind)
            if count is None:
                count = self._counts[kind] = _count_of(part, self._batch_size)
            samples = count(part)
            if samples is None:
                return None
            total = samples if total is None else total + samples
        return total


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


def _parts(batch: Any) -> list[tuple[Any, Any]]:
    if isinstance(batch, Mapping):
        return list(batch.items())
    return list(enumerate(batch)) if isinstance(batch, (list, tuple)) else []


def _tensors(part: Any, path: _Path = ()) -> Iterator[tuple[_Path, Tensor]]:
    if isinstance(part, Tensor):
        yield path, part
    for key, inner in _parts(part):
        yield from _tensors(inner, (*path, key))


def _count_of(part: Any, batch_size: int | None) -> Callable[[Any], int | None]:
    """Return a function that counts the samples of a batch like ``part``."""
    if _own_count(part) is not None:
        return _own_count
    with_paths = [(path, tensor) for path, tensor in _tensors(part) if tensor.ndim]
    leaves = [leaf for leaf in tree_leaves(part) if isinstance(leaf, Tensor) and leaf.ndim]
    tensors = [*(tensor for _, tensor in with_paths), *leaves]
    if not with_paths or len({tensor.shape[0] for tensor in tensors}) != 1:
        return lambda part: None
    path, tensor = with_paths[0]
    is_time_first = (
        batch_size is not None
        and tensor.shape[0] != batch_size
        and all(leaf.ndim > 1 and leaf.shape[1] == batch_size for leaf in tensors)
    )
    dimension = 1 if is_time_first else 0

    def count(part: Any) -> int | None:
        try:
            return int(reduce(getitem, path, part).shape[dimension])
        except (AttributeError, IndexError, KeyError, TypeError):  # not like the first batch of its kind
            return None

    return count


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
