"""Measuring ends when the median is known well enough: on a clock that the test sets, and once for real."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from known_loop import trainer_with
from known_session import Loop
from lightning.pytorch.demos.boring_classes import BoringModel

from lm_profiler.analysis.steps.statistics import relative_half_width
from lm_profiler.callbacks import MemoryOptions, StageOptions, TraceOptions, TrainingProfiler
from lm_profiler.callbacks.stages import StoppingRule


def alone(own: int) -> int:
    return own


def notes(folder: Path, options: StageOptions, step_ms: Iterable[float]) -> list[str]:
    """What the record will say of it."""
    run = Loop(folder, options, alone)
    for ms in step_ms:
        if not run.ended:
            run.step(ms)
    return list(run.session.measured().notes)


def measured(folder: Path, options: StageOptions, step_ms: Iterable[float], agree: Callable[[int], int] = alone) -> int:
    """How many steps of ``step_ms`` are measured until the stage ends."""
    run = Loop(folder, options, agree)
    for ms in step_ms:
        run.step(ms)
        if run.ended:
            break
    return len([row for row in run.session.measured().rows if row.stage == "measure"])


def test_level_steps_end_it_at_the_fewest(tmp_path: Path) -> None:
    assert measured(tmp_path, StageOptions(warmup_steps=0, until_ci=0.005), [10.0] * 100) == 10


def test_noise_is_measured_until_the_interval_is_within_the_target(tmp_path: Path) -> None:
    # Median about 10 ms; the noise repeats with period 7 and so has no trend.
    noise = [10 + ((7 * n) % 11 - 5) * 0.1 for n in range(1000)]
    options = StageOptions(warmup_steps=0, until_ci=0.02)
    count = measured(tmp_path, options, noise)
    widths = {n: relative_half_width([ms * 1e-3 for ms in noise[:n]]) for n in range(10, count + 1, 5)}
    assert count > 10
    assert count % 5 == 0
    assert [n for n, width in widths.items() if width is not None and width <= 0.02] == [count]


def test_slow_first_steps_do_not_count(tmp_path: Path) -> None:
    # With the four slow steps among ten, the interval would span 10 to 30 ms.
    assert measured(tmp_path, StageOptions(warmup_steps=0, until_ci=0.005), [30.0] * 4 + [10.0] * 100) == 15


def test_the_cap_on_steps_holds(tmp_path: Path) -> None:
    never = [10.0, 20.0] * 100
    assert measured(tmp_path, StageOptions(warmup_steps=0, until_ci=0.005, max_steps=33), never) == 33


@pytest.mark.parametrize("max_seconds, steps", [(23.0, 16), (24.0, 16), (1.5, 2), (0.5, 1)])
def test_the_cap_on_seconds_holds_to_within_a_step(tmp_path: Path, max_seconds: float, steps: int) -> None:
    never = [1000.0, 2000.0] * 100  # 15 steps take 22 s, 16 take 24 s
    assert measured(tmp_path, StageOptions(warmup_steps=0, until_ci=0.005, max_seconds=max_seconds), never) == steps


def test_there_need_be_no_cap_on_seconds(tmp_path: Path) -> None:
    options = StageOptions(warmup_steps=0, until_ci=0.005, max_seconds=float("inf"))
    assert measured(tmp_path, options, [10.0] * 100) == 10


def test_a_cap_that_ends_it_is_noted(tmp_path: Path) -> None:
    capped = StageOptions(warmup_steps=0, until_ci=0.005, max_steps=33)
    (note,) = notes(tmp_path, capped, [10.0, 20.0] * 100)
    # Of 17 times 10 and 16 times 20 the median is 10, its interval 10 to 20.
    reached = "after 33 steps the median is known to ±50.0%, the target was ±0.5%"
    assert note == f"measuring stopped at its limit: {reached}; raise stages.max_steps or stages.max_seconds"
    assert notes(tmp_path, capped, [10.0] * 100) == []
    assert notes(tmp_path, StageOptions(warmup_steps=0, measure_steps=12), [10.0, 20.0] * 100) == []


@pytest.mark.parametrize("target", [0.0049, 0.0, -1.0, float("nan")])
def test_a_target_finer_than_one_process_can_promise_is_refused(target: float) -> None:
    with pytest.raises(
        ValueError, match=r"^stages.until_ci: expected a share from 0.005, the finest .* to under 1, given "
    ) as refused:
        StageOptions(until_ci=target)
    assert str(refused.value).endswith(f"given {target!r}")


@pytest.mark.parametrize("step_ms", [[10.0] * 60, [10.0, 20.0] * 30], ids=["own yes", "own no"])
def test_every_rank_asks_as_often_and_does_what_the_first_says(tmp_path: Path, step_ms: list[float]) -> None:
    asked: list[int] = []

    def rank_zero(own: int) -> int:
        asked.append(own)
        return [4, 5, 5, 5, 0][len(asked) - 1]  # at 1, 5, 10, 15 and 20 steps

    assert measured(tmp_path, StageOptions(warmup_steps=0, until_ci=0.005), step_ms, rank_zero) == 20
    assert asked == ([4, 5, 0, 0, 0] if step_ms[0] == step_ms[1] else [4, 5, 5, 5, 5])


def test_without_a_target_nobody_is_asked(tmp_path: Path) -> None:
    def never(own: int) -> int:
        pytest.fail("a collective call that the other ranks may not make")

    assert not StoppingRule(StageOptions(), never).asks(10)
    assert measured(tmp_path, StageOptions(warmup_steps=0, measure_steps=12), [10.0] * 20, never) == 12


def test_a_real_fit_records_how_many_it_took(tmp_path: Path) -> None:
    options = StageOptions(warmup_steps=2, until_ci=0.2, max_steps=40)
    profiler = TrainingProfiler(options, MemoryOptions(steps=0), TraceOptions(steps=0), quiet=True)
    trainer_with([profiler], tmp_path).fit(BoringModel())
    record = profiler.record
    assert record is not None
    assert record.status == "ok"
    count = record.steps["measure"]
    assert 10 <= count <= 40
    assert count % 5 == 0
    assert record.steps_planned["measure"] == 40
    step = record.time["step"]
    if count < 40:
        assert step.median is not None
        assert step.ci_low is not None
        assert step.ci_high is not None
        assert (step.ci_high - step.ci_low) / 2 <= 0.2 * step.median


def test_one_step_is_one(tmp_path: Path) -> None:
    options = StageOptions(warmup_steps=0, until_ci=0.02, max_seconds=0.001)
    (said,) = notes(tmp_path, options, [10.0] * 3)
    assert "after 1 step the median is unknown" in said
