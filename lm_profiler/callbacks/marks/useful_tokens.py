"""Counts a batch's tokens without padding, and the lengths of its sequences, from masks that are on the host.

A mask on a device is never read: that would make the host wait. ``note_host_batch`` gets batches before their transfer.
Masks are kept while the step runs, and counted after its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IGNORED_LABEL = -100  # the label of a position without a loss, in torch's cross-entropy

Numbers = NDArray[Any]

_ATTENTION_MASKS = ("attention_mask",)
_LABELS = ("labels",)
_BOUNDARIES = ("cu_seqlens", "cu_seqlens_q", "cu_seq_lens", "cu_seq_lens_q")
_POSITIONS = ("position_ids",)
# Tensors of numbers in a list or tuple have no names: those with the label that is ignored are taken for labels.
_UNNAMED = "unnamed "
_NAMES = {*_ATTENTION_MASKS, *_LABELS, *_BOUNDARIES, *_POSITIONS, "input_ids"}

_LABEL_DTYPES = (torch.int64, torch.int32, torch.int16)

_MOST_DEPTH = 3  # of containers within a batch


class TokenUse(NamedTuple):
    """The tokens of a step. None means unknown."""

    useful: int | None = None  # without padding
    positions: int | None = None  # with padding
    squares: int | None = None  # the sum of the squared lengths of its sequences
    unused: int | None = None  # positions beyond the longest sequence of their batch

    def __add__(self, other: Any) -> TokenUse:
        """Return the sums of both counts; a sum is unknown if one of its terms is."""
        sums = []
        for count, other_count in zip(self, other, strict=True):
            total = None
            if count is not None and other_count is not None:
                total = count + other_count
            sums.append(total)
        return TokenUse(*sums)


UNKNOWN_USE = TokenUse()


class UsefulTokens:
    """Adds up the useful tokens of the batches of a step."""

    def __init__(self) -> None:
        self._host_tensors: dict[str, Tensor] | None = None  # of the batch on its way
        # of the running step: the tensors of each batch, and the tokens that the module itself counted
        self.batches: list[tuple[dict[str, Tensor], int | None]] = []

    def note_host_batch(self, batch: Any) -> None:
        """Note the masks of ``batch``, which is about to go to the device."""
        self._host_tensors = dict(_named_tensors(batch))

    def has_token_tensors(self, batch: Any) -> bool:
        """Return whether ``batch``, or what was noted before its transfer, has tensors that ``add`` needs."""
        tensors = self._host_tensors or dict(_named_tensors(batch))
        return any(
            not name.startswith(_UNNAMED) or _has_ignored_labels(tensor)
            for name, tensor in tensors.items()
        )

    def add(self, batch: Any, own_count: int | None) -> None:
        """Add ``batch``, as the step got it; what was noted before its transfer counts instead.

        ``own_count`` are the tokens that the module itself counted, if it does.
        """
        tensors = self._host_tensors
        self._host_tensors = None
        if not tensors:
            tensors = dict(_named_tensors(batch))
        if tensors:
            self.batches.append((tensors, own_count))

    def take(self) -> TokenUse:
        """Return the tokens of the step that ended, and start again; call it between steps."""
        batches = self.batches
        if not batches:
            return UNKNOWN_USE
        self.batches = []
        uses = [token_use(tensors, own_count) for tensors, own_count in batches]
        total = uses[0]
        for use in uses[1:]:
            total = total + use
        return total


def _named_tensors(part: Any, depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of ``part`` that describe its tokens, by their names; one of each name."""
    if isinstance(part, Mapping):
        for name, value in part.items():
            if isinstance(value, Tensor):
                if name in _NAMES:
                    yield name, value
            elif depth < _MOST_DEPTH:
                yield from _named_tensors(value, depth + 1)
    elif isinstance(part, (list, tuple)) and depth < _MOST_DEPTH:
        for index, value in enumerate(part[:8]):
            if not isinstance(value, Tensor):
                yield from _named_tensors(value, depth + 1)
            elif value.ndim == 2 and value.dtype in _LABEL_DTYPES:
                yield f"{_UNNAMED}{index}", value


def _has_ignored_labels(tensor: Tensor) -> bool:
    """Return whether ``tensor``, if it is on the host, holds the label of a position without a loss."""
    return tensor.device.type == "cpu" and bool((tensor == IGNORED_LABEL).any())


def token_use(tensors: Mapping[str, Tensor], own_count: int | None = None) -> TokenUse:
    """Return how many tokens a batch has, and how many of them are no padding, as its ``tensors`` show it.

    ``tensors`` are by their names in the batch: attention masks, labels, positions and the like. ``own_count`` is the
    module's own count of useful tokens. Without any such tensor both numbers are unknown.
    """
    mask = _host_array(tensors, _ATTENTION_MASKS, dimensions=(2,))
    labels = _host_array(tensors, _LABELS, dimensions=(2,))
    if labels is None:
        labels = _unnamed_labels(tensors)
    boundaries = _host_array(tensors, _BOUNDARIES, dimensions=(1,))
    positions = _host_array(tensors, _POSITIONS, dimensions=(1, 2))
    ids = tensors.get("input_ids")

    useful = own_count
    count = None
    if ids is not None:
        count = ids.numel()
    if mask is not None:
        count = mask.size
        useful = _first_known(useful, int(np.count_nonzero(mask)))
    if boundaries is not None and boundaries.size:
        useful = _first_known(useful, int(boundaries[-1]))
    if labels is not None:
        count = _first_known(count, labels.size)
        useful = _first_known(useful, int(np.count_nonzero(labels != IGNORED_LABEL)))
    if positions is not None:
        count = _first_known(count, positions.size)
        useful = _first_known(useful, positions.size)
    if count is None and boundaries is None:
        return TokenUse()
    lengths = _lengths(mask, boundaries, positions)
    squares = None
    if lengths is not None:
        squares = int(np.square(lengths.astype(np.int64)).sum())
    return TokenUse(
        useful=useful,
        positions=_first_known(count, useful),
        squares=squares,
        unused=_unused_positions(mask, labels),
    )


def _unnamed_labels(tensors: Mapping[str, Tensor]) -> Numbers | None:
    """Return the first tensor without a name that has ignored labels; None if there is none."""
    for name, tensor in tensors.items():
        if name.startswith(_UNNAMED) and _has_ignored_labels(tensor):
            array: Numbers = tensor.numpy()
            return array
    return None


def _unused_positions(mask: Numbers | None, labels: Numbers | None) -> int | None:
    """Return the positions that no sequence of the batch reaches; None if both are unknown.

    Labels show only the unused positions at the end: those at the beginning are ignored in a prompt, too.
    """
    if mask is not None:
        rows: int = mask.shape[0]
        return rows * (_empty_columns(mask) + _empty_columns(mask[:, ::-1]))
    if labels is not None:
        rows = labels.shape[0]
        is_used = labels != IGNORED_LABEL
        return rows * _empty_columns(is_used[:, ::-1])
    return None


def _empty_columns(array: Numbers) -> int:
    """Return how many columns at the beginning of ``array`` hold only zeros; 0 if all do."""
    if array.size == 0 or array[:, 0].any():  # in most batches: no search is needed
        return 0
    return int(np.argmax(array.any(axis=0)))


def _first_known(count: int | None, second_count: int | None) -> int | None:
    if count is None:
        return second_count
    return count


def _host_array(
    tensors: Mapping[str, Tensor], names: tuple[str, ...], dimensions: tuple[int, ...]
) -> Numbers | None:
    """Return the first tensor of one of ``names`` that is on the host; None if there is none."""
    for name in names:
        tensor = tensors.get(name)
        if tensor is None or tensor.device.type != "cpu" or tensor.is_floating_point():
            continue
        if tensor.ndim in dimensions:
            array: Numbers = tensor.numpy()
            return array
    return None


def _lengths(
    mask: Numbers | None,
    boundaries: Numbers | None,
    positions: Numbers | None,
) -> Numbers | None:
    """Return the lengths of the sequences, without padding; None if they are unknown."""
    if boundaries is not None:
        return np.diff(boundaries)
    if positions is not None:
        rows = np.atleast_2d(positions)
        is_useful = np.ones(rows.shape, bool)
        if mask is not None and mask.shape == rows.shape:
            is_useful = mask != 0
        return _lengths_between(rows == 0, is_useful)
    if mask is None:
        return None
    is_packed = mask.dtype != bool and mask.size and mask.max() > 1
    if is_packed:  # the sequences of a row are numbered
        starts = np.zeros(mask.shape, bool)
        starts[:, 1:] = mask[:, 1:] != mask[:, :-1]
        return _lengths_between(starts, mask != 0)
    row_lengths: Numbers = np.count_nonzero(mask, axis=1)
    return row_lengths


def _lengths_between(starts: Numbers, is_useful: Numbers) -> Numbers:
    """Return how many useful positions follow each start; each row begins a sequence."""
    starts = starts.copy()
    starts[:, :1] = True
    sequences = np.cumsum(starts.ravel())
    return np.bincount(sequences, weights=is_useful.ravel())
