"""How many batches a step takes, and how long it takes once batches that were made before are used up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lm_profiler.record.run import LoaderFacts


class BatchCount(NamedTuple):
    """The batches of each step of a rank from ``step`` on, and the samples in them.

    0 batches and None samples are unknown.
    """

    step: int
    batches: int
    samples: int | None


class MeanCounts(NamedTuple):
    """Batches and samples of a mean step, over all ranks; None is unknown."""

    batches: float | None = None
    samples: float | None = None


def mean_counts(ranks: Sequence[Sequence[BatchCount]], steps: Sequence[int]) -> MeanCounts:
    """Return the mean over ``steps`` of the counts of all ``ranks``. Unknown where it is for one step of one rank."""
    if not (ranks and all(ranks) and len(steps)):
        return MeanCounts()
    batches, samples = 0.0, 0.0
    for counts in ranks:
        own = [counts[at] for at in np.searchsorted([count.step for count in counts], steps, "right") - 1]
        batches += float(np.mean([count.batches or np.nan for count in own]))
        samples += float(np.mean([np.nan if count.samples is None else count.samples for count in own]))
    return MeanCounts(*(None if np.isnan(mean) else mean for mean in (batches, samples)))


def changed_batches_note(counts: Sequence[BatchCount], last: int, mean: float | None) -> list[str]:
    """Return the note on a rank whose steps up to ``last`` do not all take as many batches; ``mean`` is of measured
    ones."""
    known = [count for count in counts if count.batches and count.step <= last]
    numbers = {count.batches for count in known}
    if len(numbers) < 2 or mean is None:
        return []
    changed = next(count.step for count in known if count.batches != known[0].batches)
    steps = f"a step takes {min(numbers)} to {max(numbers)} batches, from step {changed} on other than before"
    return [f"{steps}: throughput and FLOPs are of the mean of the measured steps, {mean:.3g} batches"]


# batches of each worker that must have been made meanwhile for anything to be said: then it is known to a quarter
FEWEST = 2


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
    """Return half the number of batches that are being made: none where the queue is full."""
    free = max((loader.ahead or 0) - (ready or 0), 0)
    return min(loader.workers or 0, free) / 2.0
