"""Tests whether the step time follows the size of the batches, so that steps which differ need no other explanation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lm_profiler.analysis.steps.statistics import Series
from lm_profiler.analysis.steps.step_model import StepModel
from lm_profiler.analysis.steps.summaries import BatchCount, counts_of_steps

_FEWEST_STEPS = 15  # with fewer steps, a relation may be a coincidence
# the standard deviation that sizes must have, as a share of the mean
_LEAST_SPREAD = 0.02
# The share of the variation of the step times that sizes must explain. In runs of programs with varying batches it was
# 53 to 92 % if the model takes longer for larger batches, and below 10 % otherwise.
_LEAST_EXPLAINED = 0.5
# the counts that may be the size of a step's batches
_SIZES = ("samples", "elements", "token_positions", "squared_lengths")


def share_explained_by_sizes(
    model: StepModel, ranks: Sequence[Sequence[BatchCount]], steps: Sequence[int]
) -> float | None:
    """Return the share of the variation of the step times that the size of the batches explains.

    None if sizes explain less than half of it, or less than half of the changes from each step to the next: two series
    that both rise look related, even if neither depends on the other. None, too, if the batches of a rank are unknown.

    Args:
        model: the model of the step times; odd steps do not count.
        ranks: by rank, what its batches hold; empty if unknown.
        steps: the numbers of the steps.
    """
    is_inlier = ~model.odd
    if int(is_inlier.sum()) < _FEWEST_STEPS or not ranks or not all(ranks):
        return None
    seconds = model.seconds[is_inlier]
    shares = []
    for name in _SIZES:
        sizes = _sizes_of_steps(name, ranks, steps)[is_inlier]
        has_spread = sizes.std() >= _LEAST_SPREAD * sizes.mean()
        if not has_spread:  # also if sizes are NaN, because they are unknown
            continue
        share = _explained_share(sizes, seconds)
        share_of_changes = _explained_share(np.diff(sizes), np.diff(seconds))
        if min(share, share_of_changes) >= _LEAST_EXPLAINED:
            shares.append(share)
    return max(shares, default=None)


def _sizes_of_steps(
    name: str, ranks: Sequence[Sequence[BatchCount]], steps: Sequence[int]
) -> NDArray[np.float64]:
    """Return the count ``name`` of each of ``steps``, the sum over the ranks; NaN if it is unknown."""
    total = np.zeros(len(steps))
    for counts in ranks:
        sizes = [getattr(count, name) for count in counts_of_steps(counts, steps)]
        total += np.array(sizes, dtype=float)  # None becomes NaN
    return total


def _explained_share(causes: Series, effects: Series) -> float:
    """Return the share of the variance of ``effects`` that a straight line in ``causes`` explains; 0 if it falls."""
    if causes.std() == 0.0 or effects.std() == 0.0:
        return 0.0
    correlation = float(np.corrcoef(causes, effects)[0, 1])
    return max(correlation, 0.0) ** 2
