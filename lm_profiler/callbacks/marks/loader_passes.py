"""Counts passes over the data of loaders, to find loops that begin a new pass for each batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

# a weak reference to what no longer exists: it returns None
DEAD_REFERENCE: Callable[[], Any] = ref(set())

# A loader is restarted by the loop if this share of the steps begins a pass, each of more than so many batches.
_LARGE_SHARE_OF_STEPS = 0.8
_FEW_BATCHES = 3


class LoaderPasses:
    """The passes of one loop over the data of its loaders.

    It keeps neither loaders nor datasets alive, and while the loop runs it calls no code of the program: even the
    length of a loader may draw random numbers.
    """

    def __init__(self) -> None:
        # weak references to the datasets of which a pass has begun, by identity
        self._datasets: dict[int, Callable[[], Any]] = {}
        # weak reference to the loader of the last pass
        self._loader_ref: Callable[[], Any] = DEAD_REFERENCE
        # the numbers of workers of all loaders of which a pass has begun
        self._worker_counts: set[int | None] = set()
        self._repeated_passes = 0  # begun over a dataset that had one before
        self._finished_passes = 0  # in which the loop took all batches
        # whether the loop has taken all batches of the last pass
        self.is_last_pass_finished = False

    def begin(self, loader: Any) -> None:
        """Note that a pass for training over the data of ``loader`` begins."""
        self.is_last_pass_finished = False
        self._worker_counts.add(getattr(loader, "num_workers", None))
        self._loader_ref = ref(loader)
        dataset = getattr(loader, "dataset", None)
        try:
            dataset_ref = ref(dataset)
        except TypeError:  # such as a list, to which no weak references exist
            dataset = loader
            dataset_ref = self._loader_ref
        known_ref = self._datasets.get(id(dataset), DEAD_REFERENCE)
        if known_ref() is dataset:
            self._repeated_passes += 1
        else:
            self._datasets[id(dataset)] = dataset_ref

    def finish(self) -> None:
        """Note that the loop took all batches of a pass."""
        self._finished_passes += 1
        self.is_last_pass_finished = True

    @property
    def loader(self) -> Any:
        """The loader of the loop; None if there were several, or if it no longer exists."""
        return self._loader_ref() if len(self._datasets) == 1 else None

    @property
    def num_workers(self) -> int | None:
        """The number of workers of each loader, even if it no longer exists; None without any, or if they differ."""
        if len(self._worker_counts) != 1:
            return None
        (count,) = self._worker_counts
        return count

    def are_begun_in(self, steps: int) -> bool:
        """Return whether nearly all ``steps`` began a pass that the loop left before its end.

        ``next(iter(loader))`` in a loop does this.
        """
        abandoned_passes = self._repeated_passes - self._finished_passes
        if abandoned_passes < _LARGE_SHARE_OF_STEPS * steps:
            return False
        return _has_several_batches(self._loader_ref())


def _has_several_batches(loader: Any) -> bool:
    """Return whether ``loader`` has torch's own samplers, and a pass over its data has more than a few batches."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    if type(batch_sampler) is not BatchSampler:
        return False
    if type(batch_sampler.sampler) not in (RandomSampler, SequentialSampler):
        return False
    return len(batch_sampler) > _FEW_BATCHES
