"""Counts passes over the data of loaders, to find loops that begin a new pass for each batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import ref

from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from lm_profiler.torch_names import ITERATED_DATASET

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
        # returns the dataset of the last pass that turned out to be for validation
        self._validation_dataset_ref: Callable[[], Any] = DEAD_REFERENCE
        self._loader_ref: Callable[[], Any] = (
            DEAD_REFERENCE  # the loader of the last pass
        )
        self._repeated_passes = 0  # begun over a dataset that had one before
        self._finished_passes = 0  # in which the loop took all batches

    def begin(self, loader: Any) -> None:
        """Note that a pass for training over the data of ``loader`` begins."""
        dataset = getattr(loader, "dataset", None)
        with suppress(TypeError):  # such as a list, to which no weak references exist
            dataset_ref = ref(dataset)
            self._loader_ref = ref(loader)
            self._repeated_passes += self._has_dataset(dataset)
            self._datasets[id(dataset)] = dataset_ref

    def finish(self, iterator: Any) -> None:
        """Note that the loop took all batches of a pass, which may have begun before this object was made."""
        self._finished_passes += 1
        dataset = ITERATED_DATASET.get_or(iterator)
        with suppress(TypeError):
            self._datasets[id(dataset)] = ref(dataset)

    def take_back(self, iterator: Any) -> None:
        """Note that the last pass, whose batches come from ``iterator``, is for validation."""
        dataset = ITERATED_DATASET.get_or(iterator)
        if self._has_dataset(dataset):
            self._datasets.pop(id(dataset))
            self._validation_dataset_ref = ref(dataset)
        self._loader_ref = DEAD_REFERENCE

    def are_for_validation(self, loader: Any) -> bool:
        """Return whether the last pass that was taken back had the data of ``loader``."""
        dataset = self._validation_dataset_ref()
        return dataset is not None and getattr(loader, "dataset", None) is dataset

    def forget_validation(self) -> None:
        """Note that a pass that was taken for validation trains."""
        self._validation_dataset_ref = DEAD_REFERENCE

    def include(self, loader: Any) -> bool:
        """Return whether the loop has trained with the data of ``loader`` before."""
        return self._has_dataset(getattr(loader, "dataset", None))

    def _has_dataset(self, dataset: Any) -> bool:
        known_ref = self._datasets.get(id(dataset), DEAD_REFERENCE)
        return dataset is not None and known_ref() is dataset

    @property
    def loader(self) -> Any:
        """The loader of the loop; None if there were several, or if it no longer exists."""
        return self._loader_ref() if len(self._datasets) == 1 else None

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
