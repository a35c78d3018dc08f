"""What counts as the same numbers."""

import math
from typing import Any

import numpy as np
import pytest
from stored_texts import assert_stored
from tests.support.made_parts import made_model
from tests.support.made_runs import made_record

from lm_profiler.analysis.remedies.remedy import OTHER_BATCH, UNKNOWN
from lm_profiler.improve.tolerance import check_numbers
from lm_profiler.record.run_record import NumericsFacts, RunRecord

SIZE = {"parameters": 100, "parameters_without_embedding": 90, "trainable_parameters": 100, "bytes": 400}
MODEL = made_model(**SIZE, optimizers=["AdamW"])


def trained(
    losses: list[float | None] | None = None,
    gradient_error: float | None = 0.0,
    norms: list[float | None] | None = None,
    **model: Any,
) -> RunRecord:
    numbers = NumericsFacts(
        loss=1.0, reference_loss=1.0, output_error=0.0, gradient_error=gradient_error, kinds=[],
        losses=[2.0, 1.5] if losses is None else losses, gradient_norms=[1.0, 0.9] if norms is None else norms,
    )  # fmt: skip
    return made_record(numerics=numbers, model=MODEL.model_copy(update=model))


def with_tokens(record: RunRecord, count: int) -> RunRecord:
    throughput = record.throughput.model_copy(update={"tokens_per_step": count, "samples_per_step": None})
    return record.model_copy(update={"throughput": throughput})


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
def test_losses_are_compared_over_common_steps(a: list[float | None], b: list[float | None], loss: float | None):
    check = check_numbers(trained(a), trained(b, 0.03), None)
    assert (check.loss_error, check.gradient_error) == (None if loss is None else pytest.approx(loss), 0.03)


@pytest.mark.parametrize(
    "loss,gradients,may_change,within",
    [
        (0.009, 0.049, "rounding: any", True),
        (0.011, 0.0, "rounding: any", False),
        (0.0, 0.051, None, False),
        (math.inf, 0.0, None, False),
        (None, 0.0, None, None),
        (None, 0.2, None, False),
        (0.5, 0.0, OTHER_BATCH, True),
        (0.5, 0.2, OTHER_BATCH, False),
    ],
)
def test_both_are_tolerable(loss: float | None, gradients: float | None, may_change: str | None, within: bool | None):
    losses = [] if loss is None else [None if loss == math.inf else 2.0 * (1 + loss)]
    check = check_numbers(trained([2.0]), trained([*losses], gradients), may_change)
    assert check.is_tolerated is within
    assert (check.reason is None) is (within is True)


@pytest.mark.parametrize("free_batch,gradients,within", [(False, 0.0, False), (True, 0.0, True), (True, 0.2, False)])
def test_a_step_of_other_tokens_is_judged_as_another_batch(free_batch: bool, gradients: float, within: bool) -> None:
    a, b = with_tokens(trained([2.0]), 128), with_tokens(trained([3.0], gradients), 64)
    check = check_numbers(a, b, None, free_batch)
    assert check.is_tolerated is within
    assert "64 tokens" in (check.reason or "")


@pytest.mark.parametrize("far", [False, True])
def test_numbers_must_be_near_those_of_the_first_setting_too(far: bool) -> None:
    first = trained([1.985 if far else 1.99])
    assert check_numbers(trained([2.0]), trained([2.009]), None, first_setting=first).is_tolerated is not far


OTHERS: dict[str, tuple[RunRecord, bool | None]] = {
    "the same": (trained(), True),
    "loss off by 9e-6": (trained([2.0 * (1 + 9e-6), 1.5]), True),
    "loss off by 2e-5": (trained([2.0, 1.5 * (1 + 2e-5)]), False),
    "gradients off by 1e-3": (trained(norms=[1.0, 0.9 * 1.001]), False),
    "parameters": (trained(parameters=64), False),
    "trainable parameters": (trained(trainable_parameters=90), False),
    "bytes": (trained(bytes=200), False),
    "optimizers": (trained(optimizers=["SGD"]), False),
    "loss of one step unknown": (trained([2.0, None]), False),
    "one step": (trained([2.0]), None),
    "no gradients": (trained(norms=[]), None),
    "no audit": (made_record(), None),
}


def test_an_unknown_option_must_train_the_same() -> None:
    texts = {}
    for case, (b, within) in OTHERS.items():
        check = check_numbers(trained(), b, UNKNOWN)
        assert check.is_tolerated is within, case
        assert (check.reason is None) == (within is True), case
        texts[case] = check.reason or ""
    assert_stored("improve/numbers: other", texts)
    clipped, free = ({"trainer": {"gradient_clip_val": value}} for value in (1.0, None))
    a, b = (trained().model_copy(update={"config": config}) for config in (clipped, free))
    assert check_numbers(a, a, UNKNOWN).is_tolerated
    check = check_numbers(a, b, UNKNOWN)
    assert check.is_tolerated is False
    assert_stored("improve/numbers: clipping", {"taken away": check.reason or ""})


def test_an_unknown_option_may_change_batches_but_not_the_model() -> None:
    a = with_tokens(trained(), 128)
    assert check_numbers(a, with_tokens(trained([9.0, 9.0]), 64), UNKNOWN, free_batch=True).is_tolerated
    assert not check_numbers(a, with_tokens(trained(parameters=64), 64), UNKNOWN, free_batch=True).is_tolerated


def test_a_run_without_an_audit_is_not_judged() -> None:
    check = check_numbers(made_record(), trained(), None)
    assert (check.is_tolerated, check.loss_error, check.gradient_error) == (None, None, None)


@pytest.mark.parametrize(
    "scatter, error, refused",
    [(0.05, 0.0, (0.0, 0.06)), (0.02, 0.03, (0.9, 1.0)), (0.0, 0.011, (1.0, 1.0)), (0.5, 0.5, (0.85, 1.0))],
)
def test_a_mean_loss_may_differ_by_chance(scatter: float, error: float, refused: tuple[float, float]):
    """Other random numbers move each step's loss by ``scatter``, in one run in twenty by more than chance explains."""
    rng, a = np.random.default_rng(2), trained([2.0] * 10)
    off = []
    for _ in range(100):
        losses = (2.0 * (1.0 + error + scatter * rng.standard_normal(10))).tolist()
        b = a.model_copy(update={"numerics": a.numerics.model_copy(update={"losses": losses})})
        off.append(check_numbers(a, b, None).is_tolerated is False)
    assert refused[0] <= np.mean(off) <= refused[1]
