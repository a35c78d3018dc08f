"""Puts delays into the workers of the loader that is profiled, where delays were asked for.

The workers start before ``on_train_start``, so the loader's collate function is replaced earlier, where Lightning hands
it to the strategy. Each loader gets its own function back.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, update_wrapper
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import DataLoader

from lm_profiler.measure.boundary import Guard
from lm_profiler.measure.delays.workers import DelayedCollate, WorkerDelays
from lm_profiler.record.run import Verb
from lm_profiler.torch_names import LOADER_ITERATOR

_STAGES = {
    "fit": (RunningStage.TRAINING, "train_dataloader"),
    "validate": (RunningStage.VALIDATING, "val_dataloaders"),
    "test": (RunningStage.TESTING, "test_dataloaders"),
    "predict": (RunningStage.PREDICTING, "predict_dataloaders"),
}


class DelayedLoader:
    """The loader of one run. To be made in ``setup``, before there is a loader.

    Args:
        trainer: the run's.
        verb: what is profiled; loaders of the Trainer's other verbs are left alone.
        part: guards what Lightning calls.
    """

    def __init__(self, trainer: Trainer, verb: Verb, part: Guard) -> None:
        self._trainer, self._part = trainer, part
        self._stage, self._name = _STAGES[verb]
        self._undo = ExitStack()
        self._wait_for_loaders()

    def restore(self) -> None:
        """Give strategy and loaders back what they had."""
        self._undo.close()

    @property
    def _loader(self) -> Any:
        loaders = getattr(self._trainer, self._name)
        return loaders[0] if isinstance(loaders, (list, tuple)) and len(loaders) == 1 else loaders

    @property
    def is_on_host(self) -> bool:
        """Whether batches are made in the loop's own thread, where they are asked for."""
        return isinstance(self._loader, DataLoader) and not self._loader.num_workers

    @property
    def delays(self) -> WorkerDelays | None:
        """The delays of its workers; None where there are none, or they cannot be delayed."""
        collate = getattr(self._loader, "collate_fn", None)
        return collate.delays if isinstance(collate, DelayedCollate) else None

    def why_not(self, held_s: float) -> str | None:
        """Return why the workers cannot be delayed, and held for ``held_s`` in all; None if there is no reason."""
        loader = self._loader
        if self.is_on_host:
            return None
        if self.delays is None:
            kind = type(loader).__name__
            return f"expected one DataLoader of torch whose workers start with the run, given a {kind}"
        if 0 < loader.timeout < 2 * held_s:  # the loader would give its workers up while they are held
            return f"expected a timeout of {2 * held_s:.3g} s or more, or none, given {loader.timeout:g} s"
        return None

    @property
    def ahead(self) -> int:
        """Most batches that the workers have prefetched."""
        loader = self._loader
        return int(loader.num_workers * loader.prefetch_factor) if self.delays is not None else 0

    def _wait_for_loaders(self) -> None:
        strategy: Any = self._trainer.strategy
        process = strategy.process_dataloader
        had = "process_dataloader" in vars(strategy)

        def processed(loader: object) -> object:
            loader = process(loader)
            self._part.run(self._wrap, loader)
            return loader

        # To undo this, our attribute is deleted where the method is the class's: else it would stay in pickles.
        strategy.process_dataloader = update_wrapper(processed, process)
        give_back: Callable[[], None] = partial(delattr, strategy, "process_dataloader")
        self._undo.callback(partial(setattr, strategy, "process_dataloader", process) if had else give_back)

    def _wrap(self, loader: Any) -> None:
        if self._trainer.state.stage != self._stage or not isinstance(loader, DataLoader) or not loader.num_workers:
            return
        own = loader.collate_fn
        if isinstance(own, DelayedCollate) or LOADER_ITERATOR.of(loader) is not None:
            return  # persistent workers run already
        loader.collate_fn = DelayedCollate(own, WorkerDelays(loader.num_workers))
        self._undo.callback(setattr, loader, "collate_fn", own)
