"""Counts the batches of a step, and their tokens and samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from math import prod
from operator import getitem, index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lm_profiler.callbacks.marks.batch_kinds import get_shape, kind_of, layout_of
from lm_profiler.callbacks.marks.useful_tokens import (
    UNKNOWN_USE,
    TokenUse,
    UsefulTokens,
)
from lm_profiler.measure.boundary import Guard, comes_from_outside, print_message
from lm_profiler.torch_names import tree_leaves

# the name that tokenizers and collators of transformers give token ids
_TOKEN_IDS = "input_ids"

_MOST_LAYOUTS = 4096  # of batches that are remembered: a program may pad each batch to a length of its own

_Path = tuple[Any, ...]  # the keys that lead to a tensor in a batch


class StepCount(NamedTuple):
    """What the batches of a step hold; None means unknown."""

    batches: int
    tokens: int | None
    samples: int | None
    elements: int | None
    token_use: TokenUse = UNKNOWN_USE


class BatchSizes(NamedTuple):
    """What one batch holds; None means unknown. Batches of one layout share it: they are compared by identity."""

    tokens: int | None
    samples: int | None
    elements: int | None
    has_token_names: bool  # whether some of its tensors describe its tokens


class BatchCounts:
    """Adds up the batches of the running step, their tokens and samples; a count that fails is unknown from then on.

    ``combined`` is true if a batch holds one batch from each of several loaders; ``batch_size`` is that of one loader.
    ``report`` gets a sentence if a count fails. ``counts_elements`` is whether their elements are counted too, which
    only the stages need.

    A batch is counted in every timed step, where code costs several times as much as in a tight loop. So what follows
    from a batch's layout is counted once per layout, and a step keeps only which layouts its batches have.
    """

    def __init__(
        self,
        module: object = None,
        combined: bool = False,
        report: Callable[[str], object] = print_message,
        batch_size: int | None = None,
        counts_elements: bool = True,
    ) -> None:
        self._tokens_guard = Guard("tokens_in", report)
        self._samples_guard = Guard("samples", report)
        self._elements_guard = Guard("elements of batches", report)
        self._useful_guard = Guard("useful tokens", report)
        # the module's own count; None if it has none, and then ``_count_tokens`` counts
        self._tokens_in: Callable[[Any], Any] | None = None
        self._count_tokens: Tokens | None = self._tokens_guard.run(Tokens, module)
        if self._count_tokens is not None:
            self._tokens_in = self._count_tokens.tokens_in
        self._count_samples = Samples(combined, batch_size)
        self._count_elements: Elements | None = Elements() if counts_elements else None
        self._useful_tokens = UsefulTokens()
        self._sizes_by_layout: dict[Any, BatchSizes] = {}
        self._failed_counts: list[str] = []
        # of each batch of the running step
        self._sizes: list[BatchSizes] = []
        # the tokens of each batch by the module's own count, if it has one
        self._own_tokens: list[int | None] = []
        # of the step before, and what they add up to
        self._last_sizes: list[BatchSizes] = []
        self._last_own_tokens: list[int | None] = []
        self._last_count = StepCount(batches=0, tokens=None, samples=0, elements=0)

    def note_host_batch(self, batch: Any) -> None:
        """Note a batch that is about to go to the device, where its masks cannot be read."""
        if not self._useful_guard.is_disabled:
            try:
                self._useful_tokens.note_host_batch(batch)
            except BaseException as error:
                self._useful_guard.handle(error)

    def add(self, batch: Any) -> None:
        """Count ``batch``. It runs in every timed step: Guard.run is written out, and layout_of for usual batches."""
        batch_class = type(batch)
        try:
            layout: Any
            if batch_class is list or batch_class is tuple:
                layout = (batch_class, *map(get_shape, batch))
            elif batch_class is dict:
                layout = (batch_class, *batch, *map(get_shape, batch.values()))
            else:
                layout = layout_of(batch)
        except AttributeError:  # something in it has no shape
            layout = None
        except BaseException as error:  # in the program's own mapping: each counter meets it in its own guard
            if comes_from_outside(error):
                raise
            layout = None
        sizes = self._sizes_by_layout.get(layout)
        if sizes is None:
            sizes = self._sizes_of(batch, layout)
        self._sizes.append(sizes)
        tokens = None
        if self._tokens_in is not None:
            if not self._tokens_guard.is_disabled:
                try:
                    # own_tokens, written out
                    tokens = index(self._tokens_in(batch))
                    if tokens < 0:
                        raise no_count(tokens)
                except BaseException as error:
                    self._tokens_guard.handle(error)
            self._own_tokens.append(tokens)
        if sizes.has_token_names:
            self._useful_guard.run(self._useful_tokens.add, batch, tokens)

    def _sizes_of(self, batch: Any, layout: Any) -> BatchSizes:
        """Return what ``batch`` holds, and keep it for its ``layout`` unless that is None."""
        tokens: int | None = None
        if self._count_tokens is not None and self._tokens_in is None:
            tokens = self._tokens_guard.run(self._count_tokens, batch)
        samples = self._samples_guard.run(self._count_samples, batch)
        elements: int | None = None
        if self._count_elements is not None:
            elements = self._elements_guard.run(self._count_elements, batch)
        has_token_names = self._useful_guard.run(
            self._useful_tokens.has_token_tensors, batch
        )
        sizes = BatchSizes(tokens, samples, elements, bool(has_token_names))
        guards = (self._tokens_guard, self._samples_guard, self._elements_guard)
        failed_counts = [guard.name for guard in guards if guard.is_disabled]
        if failed_counts != self._failed_counts:
            # what such a count was before is unknown from now on, too
            self._failed_counts = failed_counts
            self._sizes_by_layout.clear()
        if layout is not None and len(self._sizes_by_layout) < _MOST_LAYOUTS:
            self._sizes_by_layout[layout] = sizes
        return sizes

    def take(self) -> StepCount:
        """Return the counts of the step that ended, and start again from zero; call it between steps.

        Where they are those of the step before, as in nearly all steps, they are the same object.
        """
        is_like_last = (
            self._sizes == self._last_sizes
            and self._own_tokens == self._last_own_tokens
            and not self._useful_tokens.batches
            and self._last_count.token_use is UNKNOWN_USE
        )
        if is_like_last:
            self._sizes.clear()
            self._own_tokens.clear()
            return self._last_count
        return self._add_up()

    def _add_up(self) -> StepCount:
        """Return the counts of the step that ended from those of its batches, and start again from zero."""
        token_use = UNKNOWN_USE
        if self._useful_tokens.batches:
            token_use = self._useful_guard.run(
                self._useful_tokens.take, otherwise=UNKNOWN_USE
            )
        tokens: int | None = None
        if self._tokens_in is not None:
            tokens = _sum_of_known(self._own_tokens)
        else:
            tokens = _sum_of_known([sizes.tokens for sizes in self._sizes])
        if not self._sizes:
            tokens = None
        count = StepCount(
            batches=len(self._sizes),
            tokens=tokens,
            samples=_sum_of_known([sizes.samples for sizes in self._sizes]),
            elements=_sum_of_known([sizes.elements for sizes in self._sizes]),
            token_use=token_use,
        )
        if count != self._last_count:
            self._last_count = count
        self._last_sizes = self._sizes
        self._last_own_tokens = self._own_tokens
        self._sizes = []
        self._own_tokens = []
        return self._last_count


def _sum_of_known(counts: Sequence[int | None]) -> int | None:
    """Return the sum of ``counts``; None if one of them is unknown."""
    total = 0
    for count in counts:
        if count is None:
            return None
        total += count
    return total


def own_tokens(tokens_in: Callable[[Any], Any], batch: Any) -> int:
    """Return the tokens that the program's own ``tokens_in`` counts in ``batch``; raises if that is no count."""
    tokens = index(tokens_in(batch))
    if tokens < 0:
        raise no_count(tokens)
    return tokens


def no_count(tokens: int) -> ValueError:
    """Return the error of a ``tokens_in`` that returned a negative number."""
    return ValueError(f"expected a number of tokens, given {tokens}")


class Tokens:
    """Counts a batch's tokens, by the ``tokens_in`` of ``module`` or else as the size of what is called ``input_ids``.

    The latter includes padding: telling padding apart would make the host wait for the device.
    """

    def __init__(self, module: object) -> None:
        self.tokens_in: Callable[[Any], Any] | None = getattr(module, "tokens_in", None)
        self._paths_by_kind: dict[Any, list[_Path]] = {}

    def __call__(self, batch: Any) -> int | None:
        """Return the tokens of ``batch``; raises if ``tokens_in`` gives no count."""
        if self.tokens_in is not None:
            return own_tokens(self.tokens_in, batch)
        kind = kind_of(batch)
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
    """Counts a batch's samples: its graphs, or a dimension that all its tensors have; None means unknown.

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
        kind = kind_of(batch)
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
        kind = kind_of(batch)
        if kind not in self._path_by_kind:
            self._path_by_kind[kind] = _path_of_largest(batch)
        path = self._path_by_kind[kind]
        if path is None:
            return None
        return int(reduce(getitem, path, batch).numel())


def _path_of_largest(batch: Any) -> _Path | None:
    sizes = {path: tensor.numel() for path, tensor in _tensors(batch)}
    return max(sizes, key=sizes.__getitem__, default=None)


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
        except (AttributeError, IndexError, KeyError, TypeError):
            # not like the first batch of its kind
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
