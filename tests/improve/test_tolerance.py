"""What counts as the same numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lm_profiler.analysis.remedies.remedy import OTHER_BATCH, WITHOUT_CLIPPING
from lm_profiler.improve.tolerance import distances, judge, loss_tolerance, trains_the_same
from lm_profiler.record.run import ModelFacts, NumericsFacts, RunRecord
from tests.support.made_runs import made_record


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
    assert "64 tokens" in (why or "")


def test_nothing_is_known_of_a_run_without_an_audit() -> None:
    assert distances(None, facts([1.0])) == (None, None)


MODEL = ModelFacts(
    class_path="mine.Module", parameters=100, parameters_without_embedding=90, trainable_parameters=100, bytes=400,
    precision="32-true", optimizers=["AdamW"], accumulate_grad_batches=1,
)  # fmt: skip


def trained(
    norms: list[float | None] | None = None, losses: list[float | None] | None = None, **model: Any
) -> RunRecord:
    numbers = facts([2.0, 1.5] if losses is None else losses)
    numbers = numbers.model_copy(update={"gradient_norms": [1.0, 0.9] if norms is None else norms})
    return made_record(numerics=numbers, model=MODEL.model_copy(update=model))


@pytest.mark.parametrize(
    "b,within,why",
    [
        (trained(), True, None),
        (trained(losses=[2.0 * (1 + 9e-6), 1.5]), True, None),
        (trained(losses=[2.0, 1.5 * (1 + 2e-5)]), False, "loss of a step off by 0.002 %"),
        (trained(norms=[1.0, 0.9 * 1.001]), False, "norm of the gradients of a step off by 0.1 %"),
        (trained(parameters=64), False, "another model: 64 parameters instead of 100"),
        (trained(trainable_parameters=90), False, "another model: 90 parameters that are trained instead of 100"),
        (trained(bytes=200), False, "another model: 200 bytes instead of 400"),
        (trained(optimizers=["SGD"]), False, "another optimizer: SGD"),
        (trained(losses=[2.0, None]), False, "loss of a step off by more than can be told"),
        (trained(losses=[2.0]), None, "loss of the first steps unknown"),
        (trained(norms=[]), None, "norm of the gradients of the first steps unknown"),
        (made_record(), None, "what the option changes is unknown"),
    ],
)
def test_an_option_that_is_not_known_must_train_the_same(b: RunRecord, within: bool | None, why: str | None) -> None:
    told, said = trains_the_same(trained(), b)
    assert told is within
    assert (said or "").startswith(why or "")
    assert (said is None) == (why is None)


def test_clipping_that_is_taken_away_with_an_option_that_is_not_known_is_seen() -> None:
    clipped, free = ({"trainer": {"gradient_clip_val": value}} for value in (1.0, None))
    a, b = (trained().model_copy(update={"config": config}) for config in (clipped, free))
    assert trains_the_same(a, a) == (True, None)
    same, why = trains_the_same(a, b)
    assert not same
    assert "clipped" in (why or "")
    assert "--accept_numerics" in (why or "")


def test_with_other_batches_that_are_allowed_an_option_that_is_not_known_must_leave_the_model() -> None:
    assert trains_the_same(trained(), trained(losses=[9.0, 9.0]), same_batches=False) == (True, None)
    assert trains_the_same(trained(), trained(parameters=64), same_batches=False)[0] is False


@pytest.mark.parametrize(
    "losses, tolerance",
    [
        ([2.0, 2.001, 1.999, 2.0, 2.002], 0.01),
        ([2.0, 2.2, 1.9, 2.1, 1.8], 3.93 * 0.158114 / 2.0),
        ([-2.0, -2.2, -1.9, -2.1, -1.8], 3.93 * 0.158114 / 2.0),
        ([2.0, 2.2], 0.01),  # too few to tell
        ([0.0, 0.0, 0.0, 0.0], 0.01),
    ],
)
def test_what_equal_runs_differ_by_is_tolerated_but_never_less_than_one_percent(
    losses: list[float], tolerance: float
) -> None:
    told = [facts([loss - 0.5, loss + 0.5]) for loss in losses]
    assert loss_tolerance([*told, None, facts([None])]) == pytest.approx(tolerance, rel=1e-5)
    assert judge(tolerance * 0.99, 0.0, None, tolerance=tolerance)[0] is True
    assert judge(tolerance * 1.01, 0.0, None, tolerance=tolerance)[0] is False
