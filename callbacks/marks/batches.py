"""Counts the tokens and the samples of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from math import prod
from operator import getitem, index
from typing import Any

import torch
from torch import Tensor

from lm_profiler.torch_names import tree_leaves

_NAMED = "input_ids"  # the name that tokenizers and collators of transformers give token ids


class Tokens:
    """Counts a batch's tokens, by the module's ``tokens_in`` or else as the size of what is called ``input_ids``.

    The latter includes padding: to tell it apart would make the host wait for the device.

    Args:
        module: the module that trains.
    """

    def __init__(self, module: object) -> None:
        self._tokens_in: Callable[[Any], Any] | None = getattr(module, "tokens_in", None)
        self._paths: list[tuple[Any, ...]] | None = None

    def __call__(self, batch: Any) -> int | None:
        """Return the tokens of ``batch``; None where it has none.

        Raises:
            TypeError: ``tokens_in`` returned no whole number.
            ValueError: it returned a negative one.
            Exception: whatever else ``tokens_in`` raises, or a batch that is unlike the first one.
        """
        if self._tokens_in is None:
            return self._named(batch)
        tokens = index(self._tokens_in(batch))
        if tokens < 0:
            raise ValueError(f"expected a number of tokens, given {tokens}")
        return tokens

    def _named(self, batch: Any) -> int | None:
        if self._paths is None:  # only once: to walk through every batch would cost more than all marks
            self._paths = list(_paths_to_ids(batch))
        return sum(reduce(getitem, path, batch).numel() for path in self._paths) if self._paths else None


def _paths_to_ids(batch: Any) -> Iterator[tuple[Any, ...]]:
    if isinstance(batch, Mapping):
        if isinstance(batch.get(_NAMED), Tensor):
            yield (_NAMED,)
            return
        parts: Any = batch.items()
    elif isinstance(batch, (list, tuple)):
        parts = enumerate(batch)
    else:
        return
    for key, part in parts:
        yield from ((key, *path) for path in _paths_to_ids(part))


class Samples:
    """Counts a batch's samples as ``samples_in`` does, but finds only in the first batch where they are.

    Args:
        combined: whether a batch holds one batch of each of several loaders.
    """

    def __init__(self, combined: bool) -> None:
        self._combined = combined
        self._paths: list[tuple[Any, ...]] | None = None

    def __call__(self, batch: Any) -> int | None:
        """Return the samples of ``batch``; None is unknown.

        Raises:
            Exception: whatever a batch of the user's own type raises.
        """
        if self._paths:
            try:
                rows: int = sum([reduce(getitem, path, batch).shape[0] for path in self._paths])
                return rows
            except (AttributeError, IndexError, KeyError, TypeError):  # unlike the first, such as when a loader ran dry
                return samples_in(batch, self._combined)
        samples = samples_in(batch, self._combined)
        if self._paths is None and samples is not None:
            self._paths = list(_paths_to_rows(batch, self._combined))
        return samples


def _paths_to_rows(batch: Any, combined: bool) -> Iterator[tuple[Any, ...]]:
    """Yield the path to a tensor whose rows are the samples, in each part that does not give its own count."""
    if combined:
        parts = list(batch.items() if isinstance(batch, Mapping) else enumerate(batch))
        paths = [[(key, *path) for path in _paths_to_rows(part, combined=False)] for key, part in parts]
        yield from (path for of_part in paths for path in of_part if all(paths))
    elif _own_count(batch) is None and (path := _first_rows(batch)) is not None:
        yield path


def _first_rows(part: Any) -> tuple[Any, ...] | None:
    if isinstance(part, Tensor):
        return () if part.ndim else None
    parts: Any = part.items() if isinstance(part, Mapping) else enumerate(part) if type(part) in (list, tuple) else ()
    paths = ((key, path) for key, inner in parts if (path := _first_rows(inner)) is not None)
    return next(((key, *path) for key, path in paths), None)


def samples_in(batch: Any, combined: bool) -> int | None:
    """Return the samples of a batch: its graphs, or the first dimension if all tensors have the same; None is unknown.

    Args:
        batch: a batch as its loader made it.
        combined: whether it holds one batch of each of several loaders, whose samples add up.
    """
    if not combined:
        return _own_count(batch) or _rows(batch)
    parts = list(batch.values() if isinstance(batch, Mapping) else batch)
    counts = [samples_in(part, combined=False) for part in parts if part is not None]  # None: that loader ran dry
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None


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


def _rows(batch: Any) -> int | None:
    rows = {leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim}
    return rows.pop() if len(rows) == 1 else None
