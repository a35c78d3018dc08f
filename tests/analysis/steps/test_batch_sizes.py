"""Step times follow the size of the batches only if both change together from step to step."""

import numpy as np
import pytest
from numpy.typing import ArrayLike

from lm_profiler.analysis.steps.batch_sizes import share_explained_by_sizes
from lm_profiler.analysis.steps.step_model import fit
from lm_profiler.analysis.steps.summaries import BatchCount

STEPS = 40
RNG = np.random.default_rng(5)
LENGTHS = RNG.integers(100, 200, STEPS)
NOISE = RNG.normal(0.0, 0.005, STEPS)


def counts(sizes: ArrayLike, name: str = "elements") -> list[BatchCount]:
    entries = []
    for step, size in enumerate(np.asarray(sizes).tolist(), start=1):
        entries.append(BatchCount(step, batches=1, samples=8)._replace(**{name: size}))
    return entries


def explained(seconds: ArrayLike, *ranks: list[BatchCount]) -> float | None:
    model = fit(np.asarray(seconds, float))
    return share_explained_by_sizes(model, ranks, [*range(1, model.seconds.size + 1)])


@pytest.mark.parametrize("name", ["samples", "elements", "token_positions"])
def test_times_that_follow_the_sizes_are_explained(name: str) -> None:
    share = explained(1e-3 * LENGTHS + NOISE, counts(LENGTHS, name))
    assert share is not None
    assert share > 0.9


def test_attention_follows_the_squared_lengths() -> None:
    squares = LENGTHS.astype(float) ** 2
    assert explained(1e-5 * squares, counts(squares, "squared_lengths")) == pytest.approx(1.0)


def test_the_sizes_of_all_ranks_count() -> None:
    other = LENGTHS[::-1]
    share = explained(1e-3 * (LENGTHS + other), counts(LENGTHS), counts(other))
    assert share == pytest.approx(1.0)


RISE = np.linspace(0.0, 1.0, STEPS)
UNRELATED = {
    "noise": (0.1 + NOISE, counts(LENGTHS)),
    "large steps with another cause": (0.1 + 10.0 * np.abs(NOISE), counts(LENGTHS)),
    "times and sizes that both rise": (0.1 + 0.1 * RISE + NOISE, counts(100 + 100 * RISE + 1e3 * NOISE[::-1])),
    "larger batches that are faster": (0.3 - 1e-3 * LENGTHS, counts(LENGTHS)),
    "sizes that hardly differ": (0.1 + 1e-5 * LENGTHS, counts(10_000 + LENGTHS)),
    "equal sizes": (0.1 + NOISE, counts([128] * STEPS)),
    "unknown sizes": (1e-3 * LENGTHS, [BatchCount(1, batches=1, samples=None)]),
    "few steps": (1e-3 * LENGTHS[:10], counts(LENGTHS[:10])),
    "a short last batch": (0.1 + NOISE, counts([128] * (STEPS - 1) + [40])),
}


@pytest.mark.parametrize("case", UNRELATED)
def test_other_times_are_not_explained(case: str) -> None:
    assert explained(*UNRELATED[case]) is None


def test_nothing_is_known_without_counts() -> None:
    assert explained(1e-3 * LENGTHS) is None
