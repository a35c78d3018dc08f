"""How far the loader's workers are ahead of the loop, where the measured steps begin and where they end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lightning.pytorch import Trainer

from lm_profiler.callbacks.instruments.instrument import Watch
from lm_profiler.lightning_names import COMBINED, FETCHER
from lm_profiler.measure.counts.ready_batches import ready_batches
from lm_profiler.record.run import LoaderFacts


def loader_watch(trainer: Trainer) -> Watch:
    """Of the training loader; of several it does not know how many batches are ready."""
    before: int | None = None

    def ready() -> int | None:
        iterators = _iterators(trainer)
        loader = trainer.train_dataloader
        return ready_batches(iterators[0], getattr(loader, "num_workers", None)) if len(iterators) == 1 else None

    def start() -> None:
        nonlocal before
        before = ready()

    def facts() -> Mapping[str, Any]:
        loader = trainer.train_dataloader
        workers, each = (getattr(loader, name, None) for name in ("num_workers", "prefetch_factor"))
        ahead = workers * (each or 0) if isinstance(workers, int) else None
        return {"loader": LoaderFacts(workers=workers, ahead=ahead, ready_before=before, ready_after=ready())}

    return Watch("batches made ahead", "measure", start, facts)


def _iterators(trainer: Trainer) -> list[Iterator[Any]]:
    """Those that the loop takes its batches from (lightning 2.6: FitLoop, CombinedLoader); none before it has them."""
    fetcher = FETCHER.of(trainer.fit_loop)
    together = None if fetcher is None else COMBINED.of(fetcher.combined_loader)
    return [] if together is None else together.iterators
