"""The floor of a planned step, against figures of the datasheet."""

from __future__ import annotations

import pytest

from lm_profiler.analysis.hardware.roofline import Work
from lm_profiler.analysis.plan.floors import planned_floors
from lm_profiler.analysis.plan.planned import Planned


def test_a_planned_floor_is_of_the_peaks_of_that_gpu() -> None:
    work = {"forward": Work({"bfloat16": 10**12}, 10**9), "optimizer": Work({}, 67 * 10**8), "clip": Work({}, None)}
    planned = Planned({}, {}, work=work, float32="highest")
    floors = planned_floors(planned, "NVIDIA H100 80GB HBM3")
    assert floors.by_phase["forward"].seconds == pytest.approx(1e12 / 989.4e12)
    assert floors.by_phase["optimizer"].seconds == pytest.approx(2e-3)  # 3.35 TB/s
    assert floors.seconds == pytest.approx(1e12 / 989.4e12 + 2e-3)
    assert floors.unknown == ["clip"]
    assert planned_floors(planned, "a GPU").seconds is None


def test_float32_that_may_run_as_tf32_is_held_against_its_peak() -> None:
    planned = Planned({}, {}, work={"forward": Work({"float32": 10**12}, 0)}, float32="high")
    assert planned_floors(planned, "NVIDIA H100 80GB HBM3").seconds == pytest.approx(1e12 / 494.7e12)
