"""How many batches and samples a step takes: it may change amid a run, and an epoch's last batch may be smaller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class BatchCount(NamedTuple):
    """From ``step`` on, each step of a rank takes so many batches, which hold so many samples.

    0 batches and None samples are unknown.
    """

    step: int
    batches: int
    samples: int | None


class MeanCounts(NamedTuple):
    """Of a mean step, over all ranks; None is unknown."""

    batches: float | None = None
    samples: float | None = None


def mean_counts(ranks: Sequence[Sequence[BatchCount]], steps: Sequence[int]) -> MeanCounts:
    """The mean over ``steps``, of the counts of all ``ranks``. Unknown where it is for one step of one rank."""
    if not (ranks and all(ranks) and len(steps)):
        return MeanCounts()
    batches, samples = 0.0, 0.0
    for counts in ranks:
        own = [counts[at] for at in np.searchsorted([count.step for count in counts], steps, "right") - 1]
        batches += float(np.mean([count.batches or np.nan for count in own]))
        samples += float(np.mean([np.nan if count.samples is None else count.samples for count in own]))
    return MeanCounts(*(None if np.isnan(mean) else mean for mean in (batches, samples)))


def changed_batches_note(counts: Sequence[BatchCount], last: int, mean: float | None) -> list[str]:
    """The note on a rank whose steps up to ``last`` do not all take as many batches; ``mean`` is of measured ones."""
    known = [count for count in counts if count.batches and count.step <= last]
    numbers = {count.batches for count in known}
    if len(numbers) < 2 or mean is None:
        return []
    changed = next(count.step for count in known if count.batches != known[0].batches)
    steps = f"a step takes {min(numbers)} to {max(numbers)} batches, from step {changed} on other than before"
    return [f"{steps}: throughput and FLOPs are of the mean of the measured steps, {mean:.3g} batches"]
