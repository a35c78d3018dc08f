"""Counts a batch's tokens without padding, and the lengths of its sequences, from masks that are on the host.

A mask on a device is never read, because the host would have to wait for the device. So ``note_host_batch`` receives
batches before their transfer. Masks are kept while the step runs, and counted after it ends.
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
# cumulative lengths of the sequences of a batch without padding: [0, length of the first, …, all tokens]
_BOUNDARIES = ("cu_seqlens", "cu_seqlens_q", "cu_seq_lens", "cu_seq_lens_q")
_POSITIONS = ("position_ids",)
# The prefix of our names for integer tensors in a list or tuple, which have none. They count as labels if they contain
# the ignored label.
_UNNAMED = "unnamed "
_NAMES = {*_ATTENTION_MASKS, *_LABELS, *_BOUNDARIES, *_POSITIONS, "input_ids"}

_LABEL_DTYPES = (torch.int64, torch.int32, torch.int16)

_SHORTEST_PADDING = 2  # positions
_MOST_DEPTH = 3  # the deepest level of containers in a batch that is searched
# how many items of a list or tuple are searched: one could hold every sample
_MOST_ITEMS = 8


class TokenUse(NamedTuple):
    """Counts of the tokens of a step. None means unknown."""

    useful: int | None = None  # tokens without padding
    positions: int | None = None  # tokens with padding
    squares: int | None = None  # the sum of the squared lengths of the sequences
    unused: int | None = None  # positions that no sequence of their batch reaches

    def __add__(self, other: Any) -> TokenUse:
        """Return the sum of each count; a sum is unknown if one of its terms is."""
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
        # tensors by name of the batch that is being transferred
        self._host_tensors: dict[str, Tensor] | None = None
        # of each batch of the running step: its tensors by name, and the tokens that the module itself counted
        self.batches: list[tuple[dict[str, Tensor], int | None]] = []

    def note_host_batch(self, batch: Any) -> None:
        """Note the masks of ``batch``, which is about to go to the device."""
        self._host_tensors = dict(_named_tensors(batch))

    def has_token_tensors(self, batch: Any) -> bool:
        """Return whether ``batch`` has tensors from which ``add`` can count; those before its transfer, if noted."""
        tensors = self._host_tensors or dict(_named_tensors(batch))
        return any(
            not name.startswith(_UNNAMED) or _has_ignored_labels(tensor)
            for name, tensor in tensors.items()
        )

    def add(self, batch: Any, own_count: int | None) -> None:
        """Add ``batch``, as the step received it; if it was noted before its transfer, the noted tensors count.

        ``own_count`` is the number of tokens that the module itself counted; None if it does not count.
        """
        tensors = self._host_tensors
        self._host_tensors = None
        if not tensors:
            tensors = dict(_named_tensors(batch))
        if tensors:
            self.batches.append((tensors, own_count))

    def take(self) -> TokenUse:
        """Return the tokens of the step that ended, and forget its batches; call it between steps."""
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
    """Yield the names and tensors in ``part`` that may describe its tokens.

    ``part`` is a batch, or a container within it at ``depth``. In a mapping, the name of a tensor decides. In a list or
    tuple, a tensor may be labels if it has two dimensions and a dtype of labels, and gets a name of ours.
    """
    if isinstance(part, Mapping):
        for name, value in part.items():
            if isinstance(value, Tensor):
                if name in _NAMES:
                    yield name, value
            elif depth < _MOST_DEPTH:
                yield from _named_tensors(value, depth + 1)
    elif isinstance(part, (list, tuple)) and depth < _MOST_DEPTH:
        for index, value in enumerate(part[:_MOST_ITEMS]):
            if not isinstance(value, Tensor):
                yield from _named_tensors(value, depth + 1)
            elif value.ndim == 2 and value.dtype in _LABEL_DTYPES:
                yield f"{_UNNAMED}{index}", value


def _has_ignored_labels(tensor: Tensor) -> bool:
    """Return whether ``tensor`` contains the ignored label; False if it is on a device."""
    return tensor.device.type == "cpu" and bool((tensor == IGNORED_LABEL).any())


def token_use(tensors: Mapping[str, Tensor], own_count: int | None = None) -> TokenUse:
    """Count the tokens of a batch.

    Args:
        tensors: its tensors by name: attention masks, labels, positions and the like.
        own_count: the module's own count of useful tokens, which takes precedence; None without one.
    """
    mask = _host_array(tensors, _ATTENTION_MASKS, dimensions=(2,))
    labels = _host_array(tensors, _LABELS, dimensions=(2,))
    if labels is None:
        labels = _unnamed_labels(tensors)
    boundaries = _host_array(tensors, _BOUNDARIES, dimensions=(1,))
    position_ids = _host_array(tensors, _POSITIONS, dimensions=(1, 2))
    ids = tensors.get("input_ids")
    if boundaries is None and all(
        source is None for source in (mask, ids, labels, position_ids)
    ):
        return UNKNOWN_USE

    lengths = _sequence_lengths(mask, boundaries, position_ids)
    host_ids = _host_array(tensors, ("input_ids",), dimensions=(2,))
    row_lengths = None
    if lengths is None and labels is not None and host_ids is not None:
        row_lengths = _lengths_before_padding(host_ids, labels)
        lengths = row_lengths
    squares = None
    if lengths is not None:
        # in 64 bits, because squares of 32-bit lengths may overflow
        squares = int(np.square(lengths.astype(np.int64)).sum())
    useful = own_count
    if useful is None:
        useful = _useful_tokens(mask, boundaries, row_lengths, labels, position_ids)
    positions = _padded_tokens(mask, ids, labels, position_ids)
    if positions is None:
        positions = useful  # sequences without padding: only their boundaries are known
    return TokenUse(useful, positions, squares, _unused_positions(mask, labels))


def _useful_tokens(
    mask: Numbers | None,
    boundaries: Numbers | None,
    row_lengths: Numbers | None,
    labels: Numbers | None,
    position_ids: Numbers | None,
) -> int | None:
    """Return the tokens of a batch without padding, from the first source that is there; None without any.

    ``row_lengths`` are the lengths of the rows of the batch, found from its ids and labels.
    """
    if mask is not None:
        return int(np.count_nonzero(mask))
    if boundaries is not None and boundaries.size:
        return int(boundaries[-1])
    if row_lengths is not None:
        return int(row_lengths.sum())
    if labels is not None:
        return int(np.count_nonzero(labels != IGNORED_LABEL))
    if position_ids is not None:
        return position_ids.size
    return None


def _padded_tokens(
    mask: Numbers | None,
    ids: Tensor | None,
    labels: Numbers | None,
    position_ids: Numbers | None,
) -> int | None:
    """Return the tokens of a batch with padding, from the first source that is there; None without any."""
    if mask is not None:
        return mask.size
    if ids is not None:
        return ids.numel()
    if labels is not None:
        return labels.size
    if position_ids is not None:
        return position_ids.size
    return None


def _unnamed_labels(tensors: Mapping[str, Tensor]) -> Numbers | None:
    """Return the first tensor without a name that has ignored labels; None if there is none."""
    for name, tensor in tensors.items():
        if name.startswith(_UNNAMED) and _has_ignored_labels(tensor):
            array: Numbers = tensor.numpy()
            return array
    return None


def _unused_positions(mask: Numbers | None, labels: Numbers | None) -> int | None:
    """Return how many positions of the batch no sequence reaches; None without ``mask`` and ``labels``.

    Both are [sequence, position]. Labels show only unused positions at the end: at the beginning, the labels of a
    prompt are ignored, too.
    """
    if mask is not None:
        rows: int = mask.shape[0]
        empty_at_begin = _empty_columns(mask)
        empty_at_end = _empty_columns(mask[:, ::-1])
        return rows * (empty_at_begin + empty_at_end)
    if labels is not None:
        rows = labels.shape[0]
        is_used = labels != IGNORED_LABEL
        empty_at_end = _empty_columns(is_used[:, ::-1])
        return rows * empty_at_end
    return None


def _empty_columns(array: Numbers) -> int:
    """Return how many columns at the beginning of ``array`` contain only zeros; 0 if all columns do."""
    # Most batches have no empty column at the beginning, and need no search.
    if array.size == 0 or array[:, 0].any():
        return 0
    is_used = array.any(axis=0)
    first_used = np.argmax(is_used)
    return int(first_used)


def _host_array(
    tensors: Mapping[str, Tensor], names: tuple[str, ...], dimensions: tuple[int, ...]
) -> Numbers | None:
    """Return the first integer tensor with one of ``names`` that is on the host; None if there is none.

    It must have one of these numbers of ``dimensions``.
    """
    for name in names:
        tensor = tensors.get(name)
        if tensor is None or tensor.device.type != "cpu" or tensor.is_floating_point():
            continue
        if tensor.ndim in dimensions:
            array: Numbers = tensor.numpy()
            return array
    return None


def _sequence_lengths(
    mask: Numbers | None,
    boundaries: Numbers | None,
    positions: Numbers | None,
) -> Numbers | None:
    """Return the lengths of the sequences, without padding; None if they are unknown.

    Args:
        mask: attention mask [row, position], 0 for padding.
        boundaries: where each sequence begins among the tokens of the batch, and where the last one ends.
        positions: position of each token in its sequence, from 0, [row, position] or [position].
    """
    if boundaries is not None:
        return np.diff(boundaries)
    if positions is not None:
        rows = np.atleast_2d(positions)
        is_useful = np.ones(rows.shape, bool)
        if mask is not None and mask.shape == rows.shape:
            is_useful = mask != 0
        # The positions of each sequence begin at 0.
        return _lengths_between(rows == 0, is_useful)
    if mask is None:
        return None
    is_packed = mask.dtype != bool and mask.size and mask.max() > 1
    if is_packed:
        # A row has several sequences, whose positions have the numbers 1, 2, … in the mask.
        begins_sequence = np.zeros(mask.shape, bool)
        begins_sequence[:, 1:] = mask[:, 1:] != mask[:, :-1]
        return _lengths_between(begins_sequence, mask != 0)
    row_lengths: Numbers = np.count_nonzero(mask, axis=1)
    return row_lengths


def _lengths_before_padding(ids: Numbers, labels: Numbers) -> Numbers | None:
    """Return the lengths of sequences from their ``ids`` and ``labels``, both [row, position]; None if unknown.

    Padding is the end of a row in which labels are ignored and the same id is repeated, the same one in all rows. Other
    ignored labels, such as those of a prompt, are no padding.
    """
    if ids.shape != labels.shape or ids.size == 0:
        return None
    columns = ids.shape[1]
    last_ids = ids[:, -1]
    may_be_padding = (labels == IGNORED_LABEL) & (ids == last_ids[:, None])
    # the length of the padding of each row: from its end, the first position that is no padding; argmin finds no such
    # position in a row that is all padding
    padding: Numbers = np.argmin(may_be_padding[:, ::-1], axis=1)
    padding[may_be_padding.all(axis=1)] = columns
    # A single ignored label may be the label of the last token.
    padding[padding < _SHORTEST_PADDING] = 0
    padding_ids = set(last_ids[padding > 0].tolist())
    if len(padding_ids) > 1:
        return None
    lengths: Numbers = columns - padding
    return lengths


def _lengths_between(begins_sequence: Numbers, is_useful: Numbers) -> Numbers:
    """Return how many useful positions each sequence has.

    Both arrays are [row, position], of booleans. Each row begins a sequence in any case.
    """
    begins_sequence = begins_sequence.copy()
    begins_sequence[:, :1] = True
    sequence_of_position = np.cumsum(begins_sequence.ravel())
    return np.bincount(sequence_of_position, weights=is_useful.ravel())
