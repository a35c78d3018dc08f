"""What a run's figures may say when its steps are noisy, or one of them is odd."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from known_loop import instruments, trainer_with
from lightning.pytorch.demos.boring_classes import BoringModel
from recorded import FLOPS, LEVEL, lines

from lm_profiler.callbacks.launch import Launch
from lm_profiler.callbacks.measured import Measured
from lm_profiler.callbacks.outcome.afterwards import LateFacts
from lm_profiler.callbacks.outcome.recorder import Recorder
from lm_profiler.measure.device.contention import CpuUse
from lm_profiler.measure.device.cpu_reading import CpuReading
from lm_profiler.record.entry import Entry
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.run import RunRecord, read_run
from lm_profiler.record.steps import StepRow
from lm_profiler.report.tables.table_columns import COLUMNS

HALF_OF_THE_CEILING = LateFacts(FLOPS, {"float32": 72_000.0})
"""Of steps of 10 ms."""


def recorded(folder: Path, steps: Sequence[Mapping[str, float]], **found: Any) -> RunRecord:
    """The record of measured steps, each given by the milliseconds of its parts."""
    rows = []
    for number, parts in enumerate(steps, 1):
        seconds = tuple(parts.get(part, 0.0) * 1e-3 for part in PARTS)
        rows.append(StepRow(number, "measure", (*seconds, sum(seconds)), (*seconds, sum(seconds))))
    values = {"part_peaks": {}, "between_steps_s": 0.0, "device_idle": None, "recompilations": 0, "notes": ()}
    measured = Measured(rows=rows, planned={"measure": len(rows)}, **{**values, **found})
    trainer = trainer_with([], folder)
    trainer.strategy.connect(BoringModel())
    recorder = Recorder(folder, Launch(), trainer, "fit")
    recorder.complete(measured, recorder.first(measured, "ok", None), HALF_OF_THE_CEILING)
    return read_run(folder)


def one_odd(part: str, at: int, ms: float) -> list[dict[str, float]]:
    """Twenty steps of 4 % data, 31 % forward, 65 % backward, of which one takes ``ms`` more in ``part``."""
    steps = [{"data": 0.04 * t, "forward": 0.31 * t, "backward": 0.65 * t} for t in (*LEVEL, *LEVEL[:4])]
    steps[at][part] += ms
    return steps


def test_the_cost_of_one_odd_step_is_told_apart_and_what_it_names_is_not_certain(tmp_path: Path) -> None:
    found = recorded(tmp_path, one_odd("data", 14, 400.0))
    assert found.steadiness is not None
    assert found.steadiness.level_s == pytest.approx(10e-3, rel=0.005)
    assert found.steadiness.odd_s == pytest.approx(400e-3 / 20, rel=0.005)
    assert found.shares["data"] == pytest.approx((0.4 + 20.0) / 30.0, rel=0.005)
    assert sum(found.shares[name] for name in PARTS) == pytest.approx(1.0)
    assert found.verdict is not None
    assert {found.verdict.bound_by, found.verdict.or_bound_by} == {"input", "compute"}
    assert not found.verdict.certain
    assert found.verdict.share_low is not None
    assert found.verdict.share_low < 1 / 3
    assert found.findings[0].name == "input"
    assert found.findings[0].may


def test_one_odd_step_of_compute_changes_no_verdict(tmp_path: Path) -> None:
    verdict = recorded(tmp_path, one_odd("forward", 14, 400.0)).verdict
    assert verdict is not None
    assert (verdict.bound_by, verdict.certain) == ("compute", True)


def test_the_odd_step_is_told_with_its_phase_and_how_much(tmp_path: Path) -> None:
    found = recorded(tmp_path, one_odd("forward", 14, 6700.0))
    (odd,) = found.odd_steps
    assert (odd.step, odd.part) == (15, "forward")
    assert odd.step_s == pytest.approx(6.7 + LEVEL[14] * 1e-3)
    assert odd.ratio == pytest.approx(odd.step_s / 10e-3, rel=0.01)
    assert odd.excess_s == pytest.approx(6.7, abs=0.001)
    assert lines(found)["odd:"] == ["step 15: 6.7 s, 670 x what others take, +6.7 s in forward"]


def test_a_step_that_was_passed_over_is_odd_too(tmp_path: Path) -> None:
    steps = one_odd("forward", 14, 0.0)
    steps[7] = {"data": 0.4}
    assert lines(recorded(tmp_path, steps))["odd:"] == ["step 8: 0.4 ms, 0.04 x what others take, -6.5 ms in backward"]


def test_of_many_odd_steps_the_worst_three_are_told(tmp_path: Path) -> None:
    steps = [*one_odd("forward", 0, 0.0), *one_odd("forward", 0, 0.0)]
    for n, at in enumerate((6, 12, 18, 24, 30), 1):
        steps[at]["data"] += 10.0 * n
    found = recorded(tmp_path, steps)
    assert [odd.step for odd in found.odd_steps] == [31, 25, 19, 13, 7]
    said = [line.partition(":")[0] for line in lines(found, verbose=True)["odd:"]]
    assert said == ["step 31", "step 25", "step 19", "and 2 more steps"]
    assert len(lines(found)["odd:"]) == 1


def test_a_stall_that_comes_back_belongs_to_the_step(tmp_path: Path) -> None:
    steps = one_odd("forward", 0, 0.0)
    for at in (4, 9, 14, 19):
        steps[at]["data"] += 40.0
    found = recorded(tmp_path, steps)
    data = sum(step["data"] for step in steps)
    assert found.shares["data"] == pytest.approx(data / sum(sum(step.values()) for step in steps))
    assert found.verdict is not None
    assert found.verdict.bound_by == "input"


def test_level_steps_have_no_odd_one(tmp_path: Path) -> None:
    found = recorded(tmp_path, one_odd("forward", 0, 0.0))
    assert found.odd_steps == []
    assert "odd:" not in lines(found)
    for part in ("forward", "data"):
        mean, whole = found.time[part].mean, found.time["step"].mean
        assert mean is not None
        assert whole is not None
        assert found.shares[part] == pytest.approx(mean / whole)


# -- noisy ------------------------------------------------------------------------------------------------------------


def noisy(forward: float, data: float, seed: int = 1) -> list[dict[str, float]]:
    """Twenty steps whose length varies by more than their median is known, with these shares of them."""
    factors = np.exp(0.6 * np.random.default_rng(seed).standard_normal(20))
    return [{"forward": forward * 10 * f, "data": data * 10 * f} for f in factors.tolist()]


def test_a_noisy_run_is_called_that_first_and_what_binds_it_is_not_certain(tmp_path: Path) -> None:
    found = recorded(tmp_path, noisy(0.97, 0.03))
    assert found.steadiness is not None
    assert found.steadiness.word == "noisy"
    assert found.steadiness.known_to is not None
    assert found.steadiness.known_to > 0.05
    assert found.verdict is not None
    assert (found.verdict.bound_by, found.verdict.certain) == ("compute", False)
    (said,) = lines(found)["verdict:"]
    assert said.startswith("noisy: the level is only known to within ±")


def test_a_cause_that_all_the_noise_leaves_standing_is_named(tmp_path: Path) -> None:
    verdict = recorded(tmp_path, noisy(0.5, 0.5)).verdict
    assert verdict is not None
    assert (verdict.bound_by, verdict.certain) == ("input", True)


def test_a_cause_that_may_be_this_runs_luck_is_named_beside_the_other(tmp_path: Path) -> None:
    steps = noisy(1.0, 0.0)
    for at in (3, 8, 11, 15):
        steps[at]["data"] = 30.0  # four in twenty: a third of the whole, more or less
    found = recorded(tmp_path, steps)
    assert found.verdict is not None
    assert {found.verdict.bound_by, found.verdict.or_bound_by} == {"input", "compute"}
    assert not found.verdict.certain
    assert found.findings[0].may


def test_too_few_steps_for_an_interval_carry_no_certain_cause(tmp_path: Path) -> None:
    found = recorded(tmp_path, [{"forward": 10.0}] * 2)
    assert found.verdict is not None
    assert not found.verdict.certain
    assert found.steadiness is not None
    assert (found.steadiness.word, found.steadiness.known_to) == ("noisy", None)


def test_one_recompilation_is_one(tmp_path: Path) -> None:
    one, two = (lines(recorded(tmp_path, one_odd("data", 0, 0.0), recompilations=n))["verdict:"][0] for n in (1, 2))
    assert one.endswith("; 1 recompilation while measuring")
    assert two.endswith("; 2 recompilations while measuring")


# -- shared -----------------------------------------------------------------------------------------------------------

READING = CpuReading(
    at_s=0.0, machine="a", cpus=frozenset({0, 1}), busy_s=0.0, stolen_s=0.0, own_s={7: 0.0}, waited_s={7: 0.0},
    pressure_s=None, throttled_s=None, switches=0,
)  # fmt: skip


def beside(others: float, waited: float) -> CpuUse:
    """Ten seconds of two CPUs; what we had for 5.9 seconds others wanted too."""
    busy = {"busy_s": 5.9 + others + 0.03, "own_s": {7: 5.9}, "waited_s": {7: waited}}
    return CpuUse(READING, replace(READING, at_s=10.0, **busy))


def test_level_steps_on_a_shared_machine_are_never_steady_alone(tmp_path: Path) -> None:
    found = recorded(tmp_path, one_odd("forward", 0, 0.0), cpu_uses=[beside(4.1, 4.1)])
    assert found.contention is not None
    assert found.contention.not_had == pytest.approx(0.41)
    assert found.words == ["steady", "shared"]
    assert COLUMNS["steadiness"].get(Entry(tmp_path, found)) == "steady, shared"
    (said,) = lines(found)["verdict:"]
    assert said.startswith("steady; shared machine, times are upper bounds: other processes took 41% of the CPU time")
    assert found.verdict is not None
    assert (found.verdict.bound_by, found.verdict.certain) == ("compute", False)


def test_others_that_took_nothing_from_us_are_told_and_change_nothing(tmp_path: Path) -> None:
    found = recorded(tmp_path, one_odd("forward", 0, 0.0), cpu_uses=[beside(4.0, 0.0)])
    assert found.words == ["steady"]
    (said,) = lines(found)["verdict:"]
    assert said.startswith("steady; something else used 20% of this machine's CPU time; bound by compute: ")


def test_an_idle_machine_is_not_spoken_of(tmp_path: Path) -> None:
    found = recorded(tmp_path, one_odd("forward", 0, 0.0), cpu_uses=[beside(0.1, 0.1)])
    assert lines(found)["verdict:"][0].startswith("steady; bound by compute: ")


def test_a_limit_that_held_the_run_back_is_told(tmp_path: Path) -> None:
    limited = beside(0.0, 3.0)
    use = CpuUse(replace(limited.begin, throttled_s=0.0), replace(limited.end, throttled_s=3.0))
    said = lines(recorded(tmp_path, one_odd("forward", 0, 0.0), cpu_uses=[use]))["verdict:"][0]
    assert said.startswith("steady; the CPU limit of its cgroup throttled this run for 3.0 s; bound by")


def test_a_run_reads_the_machine_around_its_measured_steps_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    class Counting(BoringModel):
        steps = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.steps += 1
            return super().training_step(batch, batch_idx)

    module = Counting()

    def read() -> CpuReading:
        seen.append(module.steps)
        use = beside(4.1, 4.1)
        return use.begin if len(seen) == 1 else use.end

    monkeypatch.setattr("lm_profiler.measure.device.contention.cpu_reading", read)
    profiler = instruments(2, 6, memory=1)
    trainer_with([profiler], tmp_path).fit(module)
    assert seen == [2, 8]
    found = read_run(profiler.folder)
    assert found.contention is not None
    assert found.contention.not_had == pytest.approx(0.41)


class Multiplies(BoringModel):
    """Steps of some 10 ms of matrix products, on as many threads as there are CPUs."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = torch.ones(512, 512)
        for _ in range(20):
            x = x @ x / 512
        return super().training_step(batch, batch_idx)


def test_beside_a_hog_on_every_cpu_no_run_is_steady_without_a_word_of_it(tmp_path: Path) -> None:
    # Orphans, so that they are not this run's own processes; each would end by itself.
    start = "timeout 100 sh -c 'while :; do :; done' >/dev/null 2>&1 & echo $!"
    hogs = [int(subprocess.check_output(["sh", "-c", start])) for _ in os.sched_getaffinity(0)]
    profiler = instruments(1, 20)
    try:
        trainer_with([profiler], tmp_path).fit(Multiplies())
    finally:
        for hog in hogs:
            os.kill(hog, signal.SIGTERM)
    record = read_run(profiler.folder)
    assert record.contention is not None
    assert record.contention.not_had is not None
    assert record.contention.not_had > 0.05
    assert record.words[-1] == "shared"
    assert "; shared machine, times are upper bounds: " in lines(record)["verdict:"][0]
    assert record.verdict is not None
    assert not record.verdict.certain
    assert all(finding.may for finding in record.findings if finding.name in ("compile", "precision", "small_batch"))
