"""Without a number of steps, time decides how many are measured: on a clock that the test sets, and in real loops."""

import math
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from known_loop import make_profiler, trainer_with
from lightning.pytorch.demos.boring_classes import BoringModel

from lm_profiler.callbacks import StageOptions, WatchOptions
from lm_profiler.callbacks.loop_length import fewest_steps_left
from lm_profiler.callbacks.stages import StoppingRule


def count_steps(step_s: Iterator[float], steps_of_loop: float = math.inf) -> tuple[int, float]:
    """How many steps are measured, and how many seconds that takes."""
    rule = StoppingRule(StageOptions(), int, steps_of_loop)
    elapsed_s = 0.0
    for steps, seconds in enumerate(step_s, start=1):
        elapsed_s += seconds
        if steps >= rule.next_check and rule.is_enough(steps, [], elapsed_s):
            return steps, elapsed_s
    pytest.fail("measuring never ended")


@pytest.mark.parametrize(
    "step_s, fewest, most",
    [
        (0.25, 40, 40),  # 40 steps take 10 s
        (1.0, 40, 40),
        (0.025, 400, 401),  # 10 s
        (3.0, 19, 20),  # a minute
        (1.6, 36, 38),
        (0.0005, 5000, 5000),  # no more rows than that
        (20.0, 10, 10),  # fewer are too few
    ],
)
def test_measuring_takes_40_steps_and_10_seconds_or_a_minute(step_s: float, fewest: int, most: int) -> None:
    steps, _ = count_steps(repeat(step_s))
    assert fewest <= steps <= most


def test_steps_that_change_neither_end_it_early_nor_make_it_much_longer() -> None:
    """50 steps of 2 ms, then of 1 s: the looks are never further apart than the steps before doubled."""
    _, elapsed_s = count_steps(chain(repeat(0.002, 50), repeat(1.0)))
    assert elapsed_s < 100.0
    steps, _ = count_steps(chain([30.0], repeat(0.1)))
    assert steps >= 40


@pytest.mark.parametrize("steps_of_loop, expected", [(90, 90), (12, 40), (-3, 40), (math.inf, 1000)])
def test_the_loop_keeps_the_steps_of_the_other_stages(steps_of_loop: float, expected: int) -> None:
    steps, _ = count_steps(repeat(0.01), steps_of_loop)
    assert abs(steps - expected) <= 1


def loop(**limits: Any) -> Any:
    progress = SimpleNamespace(current=SimpleNamespace(ready=limits.pop("resumed_batches", 0)))
    usual = {
        "max_steps": -1,
        "max_epochs": -1,
        "global_step": 0,
        "current_epoch": 0,
        "accumulate_grad_batches": 1,
        "num_training_batches": 100,
        "num_val_batches": [30, 20],
        "optimizers": [object()],
        "fit_loop": SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress)),
    }
    return SimpleNamespace(**{**usual, **limits})


@pytest.mark.parametrize(
    "limits, expected",
    [
        ({}, math.inf),
        ({"max_steps": 60}, 60),
        ({"max_steps": 60, "global_step": 20}, 40),
        ({"max_steps": 60, "optimizers": [1, 2]}, 30),
        ({"max_epochs": 3}, 300),
        ({"max_epochs": 3, "current_epoch": 2, "resumed_batches": 25}, 75),
        ({"max_epochs": 1, "accumulate_grad_batches": 8}, 13),
        ({"max_epochs": 1, "num_training_batches": math.inf}, 1),
        ({"max_epochs": 2, "max_steps": 150}, 150),
    ],
)
def test_steps_of_a_fit(limits: dict[str, Any], expected: float) -> None:
    assert fewest_steps_left(loop(**limits), "fit") == expected
    assert fewest_steps_left(loop(**limits), "validate") == 50


def test_a_real_fit_of_one_epoch_comes_to_all_stages(tmp_path: Path) -> None:
    """BoringModel has 64 batches: measured are 64 - 2 - 4 - 1 - 3 = 54, in far less than 10 s."""
    profiler = make_profiler(warmup=2, measure=None, memory=1, trace=2, stop_when_done=False, actions=3)
    trainer = trainer_with([profiler], tmp_path, max_epochs=1)
    trainer.fit(BoringModel())
    assert profiler.record.status == "ok"
    assert profiler.record.steps == {"warmup": 2, "measure": 54, "actions": 4, "memory": 1, "trace": 3}
    assert profiler.record.steps_planned["measure"] == 40
    assert trainer.global_step == 64
    watched = make_profiler(warmup=2, measure=None, actions=3, watch=WatchOptions())
    trainer_with([watched], tmp_path, max_epochs=1).fit(BoringModel())
    assert watched.record.steps["measure"] == 40  # the rest is watched
