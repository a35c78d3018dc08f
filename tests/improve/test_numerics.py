"""What counts as the same numbers."""

from __future__ import annotations

import math

import pytest

from lm_profiler.improve.changes import OTHER_BATCH, WITHOUT_CLIPPING
from lm_profiler.improve.numerics import distances, judge
from lm_profiler.record.run import NumericsFacts


def facts(losses: list[float | None], gradient_error: float | None = 0.0) -> NumericsFacts:
    return NumericsFacts(
        loss=1.0, reference_loss=1.0, output_error=0.0, gradient_error=gradient_error, kinds=[], losses=losses
    )


@pytest.mark.parametrize(
    "a,b,loss",
    [
        ([2.0, 4.0], [2.0, 4.06], 0.01),
        ([2.0, 4.0, 9.0], [2.0, 4.06], 0.01),  # of the steps that both have
        ([-2.0], [-2.5], 0.25),
        ([2.0], [None], math.inf),
        ([None], [2.0], None),
        ([0.0], [1.0], None),
        ([], [], None),
    ],
)
def test_losses_are_compared_over_the_steps_that_both_have(
    a: list[float | None], b: list[float | None], loss: float | None
) -> None:
    expected = None if loss is None else pytest.approx(loss)
    assert distances(facts(a), facts(b, 0.03)) == (expected, 0.03)


@pytest.mark.parametrize(
    "loss,gradients,may_change,within",
    [
        (0.009, 0.049, "rounding: any", True),
        (0.011, 0.0, "rounding: any", False),
        (0.0, 0.051, None, False),
        (math.inf, 0.0, None, False),
        (None, 0.0, None, None),
        (None, 0.2, None, False),
        (0.0, 0.0, WITHOUT_CLIPPING, False),
        (0.5, 0.0, OTHER_BATCH, True),
        (0.5, 0.2, OTHER_BATCH, False),
    ],
)
def test_both_must_be_within_their_tolerance(
    loss: float | None, gradients: float | None, may_change: str | None, within: bool | None
) -> None:
    told, why = judge(loss, gradients, may_change)
    assert told is within
    assert (why is None) is (within is True)


@pytest.mark.parametrize("free_batch,gradients,within", [(False, 0.0, False), (True, 0.0, True), (True, 0.2, False)])
def test_a_step_of_other_tokens_is_judged_as_another_batch(free_batch: bool, gradients: float, within: bool) -> None:
    told, why = judge(0.5, gradients, None, ("tokens", 128, 64), free_batch)
    assert told is within
    assert "a step has 64 tokens instead of 128" in (why or "")


def test_nothing_is_known_of_a_run_without_an_audit() -> None:
    assert distances(None, facts([1.0])) == (None, None)
