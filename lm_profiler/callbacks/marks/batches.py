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

# the most layouts of batches that are remembered; a program may pad each batch to another length
_MOST_LAYOUTS = 4096

# the keys and indices that lead to a tensor in a batch, from the outermost container inwards
_Path = tuple[Any, ...]


class StepCount(NamedTuple):
    """The sizes of the batches of a step, added up; None means unknown."""

    batches: int
    tokens: int | None
    samples: int | None
    elements: int | None
    token_use: TokenUse = UNKNOWN_USE


class BatchSizes(NamedTuple):
    """The sizes of one batch; None means unknown. Batches of one layout share one object."""

    tokens: int | None
    samples: int | None
    elements: int | None
    has_token_names: bool  # whether some of its tensors describe its tokens


class BatchCounts:
    """Adds up the batches of the running step, their tokens and samples; a count that fails is unknown from then on.

    Batches are counted in every timed step, where code costs several times as much as in a tight loop. So the sizes
    that follow from a batch's layout are found once per layout, and a step only notes the sizes of its batches.

    Args:
        module: the module that trains; its method ``tokens_in`` counts tokens, if it has one.
        combined: whether a batch holds one batch from each of several loaders.
        report: gets a sentence if a count fails.
        batch_size: the batch size of the loader; None without one.
        counts_elements: whether elements are counted too, which only the stages need.
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
        self._failed_counts: list[str] = []  # the names of their guards
        # the sizes of each batch of the running step
        self._sizes: list[BatchSizes] = []
        # the tokens of each of these batches by the module's own count, if it has one
        self._own_tokens: list[int | None] = []
        # the same two of the previous step, and their sums
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
        """Count ``batch``.

        Runs in every timed step, so Guard.run is written out, and so is layout_of for usual batches.
        """
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
        except BaseException as error:
            if comes_from_outside(error):
                raise
            # The program's own mapping raises. Each counter will meet the error in its own guard.
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
        """Return the sizes of ``batch``, and remember them for its ``layout`` unless that is None."""
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
            # Remembered sizes still have the counts that are unknown from now on.
            self._failed_counts = failed_counts
            self._sizes_by_layout.clear()
        if layout is not None and len(self._sizes_by_layout) < _MOST_LAYOUTS:
            self._sizes_by_layout[layout] = sizes
        return sizes

    def take(self) -> StepCount:
        """Return the counts of the step that ended, and start again from zero; call it between steps.

        If they equal the counts of the previous step, as in nearly all steps, the same object is returned.
        """
        has_same_sizes = (
            self._sizes == self._last_sizes
            and self._own_tokens == self._last_own_tokens
        )
        # Useful tokens depend on the content of batches, not only on their sizes.
        has_useful_tokens = (
            bool(self._useful_tokens.batches)
            or self._last_count.token_use is not UNKNOWN_USE
        )
        if has_same_sizes and not has_useful_tokens:
            self._sizes.clear()
            self._own_tokens.clear()
            return self._last_count
        return self._add_up()

    def _add_up(self) -> StepCount:
        """Return the sums over the batches of the step that ended, and start again from zero."""
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
    """Return the tokens that the program's own ``tokens_in`` counts in ``batch``; raise if that is no count."""
    tokens = index(tokens_in(batch))
    if tokens < 0:
        raise no_count(tokens)
    return tokens


def no_count(tokens: int) -> ValueError:
    """Return the error of a ``tokens_in`` that returned a negative number."""
    return ValueError(f"expected a number of tokens, given {tokens}")


class Tokens:
    """Counts a batch's tokens, by the ``tokens_in`` of ``module``, or else as the size of the tensors ``input_ids``.

    The latter includes padding, because the host would have to wait for the device to recognize padding.
    """

    def __init__(self, module: object) -> None:
        self.tokens_in: Callable[[Any], Any] | None = getattr(module, "tokens_in", None)
        self._paths_by_kind: dict[Any, list[_Path]] = {}

    def __call__(self, batch: Any) -> int | None:
        """Return the tokens of ``batch``; None if nothing shows them. Raise if ``tokens_in`` returns no count."""
        if self.tokens_in is not None:
            return own_tokens(self.tokens_in, batch)
        kind = kind_of(batch)
        paths = self._paths_by_kind.get(kind)
        if paths is None:
            # once per kind, because searching every batch would cost more than all marks
            paths = []
            for path, _ in _tensors_with_paths(batch):
                is_token_ids = bool(path) and path[-1] == _TOKEN_IDS
                if is_token_ids:
                    paths.append(path)
            self._paths_by_kind[kind] = paths
        if not paths:
            return None
        count: int = sum(_part_at(path, batch).numel() for path in paths)
        return count


class Samples:
    """Counts a batch's samples: its graphs, or the length of a dimension that all its tensors share.

    That is the first dimension, or the second if only the second is as long as the loader's ``batch_size``: sequences
    are often padded into batches whose first dimension is time. Each kind of batch is searched once. The samples of
    several ``combined`` loaders are added.
    """

    def __init__(self, combined: bool, batch_size: int | None = None) -> None:
        self._combined = combined
        self._batch_size = batch_size
        self._counters_by_kind: dict[Any, Callable[[Any], int | None]] = {}

    def __call__(self, batch: Any) -> int | None:
        """Return the samples of ``batch``; None if those of one of its loaders are unknown."""
        if not self._combined:
            return self._count(batch)
        total: int | None = None
        for _, loader_batch in _entries(batch):
            if loader_batch is None:  # its loader has no more batches
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
        count_samples = self._counters_by_kind.get(kind)
        if count_samples is None:
            count_samples = _sample_counter(batch, self._batch_size)
            self._counters_by_kind[kind] = count_samples
        return count_samples(batch)


class Elements:
    """Counts the elements of a batch's largest tensor, to which the work on it is nearly proportional."""

    def __init__(self) -> None:
        # the path of the largest tensor in batches of a kind; None if they have no tensor
        self._path_by_kind: dict[Any, _Path | None] = {}

    def __call__(self, batch: Any) -> int | None:
        """Return the elements of the largest tensor; None without tensors. Each kind of batch is searched once."""
        kind = kind_of(batch)
        if kind not in self._path_by_kind:
            self._path_by_kind[kind] = _path_of_largest(batch)
        path = self._path_by_kind[kind]
        if path is None:
            return None
        return int(_part_at(path, batch).numel())


def _part_at(path: _Path, batch: Any) -> Any:
    """Return what is at ``path`` in ``batch``: the keys and indices that lead to it, the outermost first."""
    return reduce(getitem, path, batch)


def _path_of_largest(batch: Any) -> _Path | None:
    """Return the path of the largest tensor in ``batch``; None without tensors."""
    sizes = {path: tensor.numel() for path, tensor in _tensors_with_paths(batch)}
    return max(sizes, key=sizes.__getitem__, default=None)


def _entries(batch: Any) -> list[tuple[Any, Any]]:
    """Return the keys and values of a mapping, or the indices and items of a list; empty for anything else."""
    if isinstance(batch, Mapping):
        return list(batch.items())
    if isinstance(batch, (list, tuple)):
        return list(enumerate(batch))
    return []


def _tensors_with_paths(part: Any, path: _Path = ()) -> Iterator[tuple[_Path, Tensor]]:
    """Yield each tensor in ``part`` after its path; ``path`` is that of ``part`` in its batch."""
    if isinstance(part, Tensor):
        yield path, part
    for key, inner_part in _entries(part):
        yield from _tensors_with_paths(inner_part, (*path, key))


def _sample_counter(batch: Any, batch_size: int | None) -> Callable[[Any], int | None]:
    """Return a function that counts the samples of batches like ``batch``.

    The samples are the length of the first dimension if it is the same in all tensors, and otherwise unknown. If only
    the second dimension of all tensors is as long as the loader's ``batch_size``, it is used instead.
    """
    if _own_count(batch) is not None:
        return _own_count
    paths: list[_Path] = []
    tensors: list[Tensor] = []
    for path, tensor in _tensors_with_paths(batch):
        if tensor.ndim > 0:
            paths.append(path)
            tensors.append(tensor)
    # also those in containers for which there is no path, such as dataclasses
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.ndim > 0:
            tensors.append(leaf)
    first_lengths = {tensor.shape[0] for tensor in tensors}
    if not paths or len(first_lengths) != 1:
        return _unknown_count
    is_time_first = (
        batch_size is not None
        and batch_size not in first_lengths
        and all(tensor.ndim > 1 and tensor.shape[1] == batch_size for tensor in tensors)
    )
    dimension = 1 if is_time_first else 0
    first_path = paths[0]

    def count(batch: Any) -> int | None:
        """Return the length of that dimension in the tensor at ``first_path``."""
        try:
            return int(_part_at(first_path, batch).shape[dimension])
        except (AttributeError, IndexError, KeyError, TypeError):
            # The batch is not like the first one of its kind.
            return None

    return count


def _unknown_count(batch: Any) -> None:
    """Return None, because the samples of such a batch are unknown."""


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
