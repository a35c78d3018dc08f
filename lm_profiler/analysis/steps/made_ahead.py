"""What a step takes in the long run, where the measured ones lived on batches that were made before."""

from __future__ import annotations

from lm_profiler.record.run import LoaderFacts

FEWEST = 2
"""Batches of each worker that must have been made meanwhile for anything to be said: then it is known to a quarter."""


def lasting_step_s(mean_s: float, steps: int, batches: float, loader: LoaderFacts | None) -> float | None:
    """Seconds of a step that can go on: as long as the workers take to make its batches.

    In the seconds of ``steps`` that took ``batches`` each, workers made all but those that were ``used_up``, and where
    the queue shrinks they never rest: so that is their rate, and the loop's once nothing is left. It is ``mean_s``
    where nothing was used up, or where nobody counts.

    Workers that are at work have half made a batch each, as far as is known.

    Returns:
        None where too few batches were made meanwhile to tell a rate.
    """
    used_up = loader.used_up if loader is not None else None
    taken = steps * batches
    if loader is None or not used_up or taken <= 0:
        return mean_s
    made = taken - used_up + _begun(loader, loader.ready_after) - _begun(loader, loader.ready_before)
    return mean_s * taken / made if made >= FEWEST * max(loader.workers or 0, 1) else None


def _begun(loader: LoaderFacts, ready: int | None) -> float:
    """Batches that are being made, half of each: of a queue that is full none."""
    free = max((loader.ahead or 0) - (ready or 0), 0)
    return min(loader.workers or 0, free) / 2.0
