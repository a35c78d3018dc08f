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
    """Adds up the batches of the running step, their tokens and samples.

    ``combined`` says that a batch holds one batch of each of several loaders. A count that fails is unknown from then
    on: ``report`` gets a note.
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
        """Return batches, tokens and samples of the step that ended, and begin anew."""
        taken = self.batches, self.tokens, self.samples
        self.batches, self.tokens, self.samples = 0, None, None if self._samples_in is None else 0
        return taken


class Tokens:
    """Counts a batch's tokens, by the ``tokens_in`` of ``module`` or else as the size of what is called ``input_ids``.

    The latter includes padding: to tell it apart would make the host wait for the device.
    """

    def __init__(self, module: object) -> None:
        self._tokens_in: Callable[[Any], Any] | None = getattr(module, "tokens_in", None)
        self._paths: list[_Path] | None = None

    def __call__(self, batch: Any) -> int | None:
        """Return the tokens of ``batch``; raises where ``tokens_in`` gives no count, or it is unlike the first one."""
        if self._tokens_in is None:
            if self._paths is None:  # only once: to walk through every batch would cost more than all marks
                self._paths = list(_paths_to_ids(batch))
            return sum(reduce(getitem, path, batch).numel() for path in self._paths) if self._paths else None
        tokens = index(self._tokens_in(batch))
        if tokens < 0:
            raise ValueError(f"expected a number of tokens, given {tokens}")
        return tokens


class Samples:
    """Counts a batch's samples as ``samples_in`` does, but looks only in the first batch where they are."""

    def __init__(self, combined: bool) -> None:
        self._combined = combined
        self._paths: list[_Path] | None = None

    def __call__(self, batch: Any) -> int | None:
        if self._paths:
            try:
                rows: int = sum([reduce(getitem, path, batch).shape[0] for path in self._paths])
                return rows
            except (AttributeError, IndexError, KeyError, TypeError):  # unlike the first, such as when a loader ran dry
                return samples_in(batch, self._combined)
        samples = samples_in(batch, self._combined)
        if self._paths is None and samples is not None:
            self._paths = _paths_to_rows(batch, self._combined)
        return samples


def _parts(batch: Any) -> list[tuple[Any, Any]]:
    if isinstance(batch, Mapping):
        return list(batch.items())
    return list(enumerate(batch)) if isinstance(batch, (list, tuple)) else []


def _paths_to_ids(batch: Any) -> Iterator[_Path]:
    if isinstance(batch, Mapping) and isinstance(batch.get(_NAMED), Tensor):
        yield (_NAMED,)
        return
    for key, part in _parts(batch):
        yield from ((key, *path) for path in _paths_to_ids(part))


def _paths_to_rows(batch: Any, combined: bool) -> list[_Path]:
    """Return the path to a tensor whose rows are the samples, in each loader's batch; none where one has none."""
    if not combined:
        path = None if _own_count(batch) is not None else _first_rows(batch)
        return [] if path is None else [path]
    paths = [[(key, *path) for path in _paths_to_rows(part, combined=False)] for key, part in _parts(batch)]
    return [path for of_part in paths for path in of_part] if all(paths) else []


def _first_rows(part: Any) -> _Path | None:
    if isinstance(part, Tensor):
        return () if part.ndim else None
    paths = ((key, path) for key, inner in _parts(part) if (path := _first_rows(inner)) is not None)
    return next(((key, *path) for key, path in paths), None)


def samples_in(batch: Any, combined: bool) -> int | None:
    """Return the samples of a batch: its graphs, or the first dimension if all tensors have the same; None is unknown.

    ``combined`` says that it holds one batch of each of several loaders, whose samples add up.
    """
    if not combined:
        return _own_count(batch) or _rows(batch)
    counts = [samples_in(part, combined=False) for _, part in _parts(batch) if part is not None]  # None: it ran dry
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
