"""Other programs on the machine neither hide a change of the program's own level, nor look like one."""

import numpy as np
import pytest
from numpy.typing import NDArray

from lm_profiler.analysis.watch.watched_run import WatchedRun
from lm_profiler.record.parts import PARTS
from lm_profiler.record.run_record import StepCounters
from lm_profiler.record.watch_files import WatchEvent, latest_events

STEPS = 600
OWN_S = np.array([0.0005, 0.0001, 0.004, 0.0001, 0.003, 0.0001, 0.001, 0.0005])


def events_of(own_s: NDArray[np.float64], waited_s: NDArray[np.float64], on_device: bool = False) -> list[WatchEvent]:
    """Watch steps of (n, parts) ``own_s``, which wait for a CPU where they compute, and return what is reported."""
    computing = OWN_S.copy()
    computing[PARTS.index("data")] = 0.0
    parts_s = own_s + waited_s[:, None] * computing / computing.sum()
    step_s = parts_s.sum(axis=1)
    seconds = np.column_stack([parts_s, step_s])
    ends_ns = np.cumsum(step_s * 1e9).astype(np.int64)
    ns = np.column_stack([ends_ns - (step_s * 1e9).astype(np.int64), ends_ns])
    run, reported = WatchedRun(workers=0, on_device=on_device), []
    for begin in range(0, len(ns), 50):
        counters = [
            StepCounters(step=index + 1, wall_s=step_s[index], between_s=0.0, gc_s=0.0, cpu_wait_s=waited_s[index])
            for index in range(begin, min(begin + 50, len(ns)))
        ]
        reported += run.add(ns[begin : begin + 50], seconds[begin : begin + 50], counters)
    return latest_events([*reported, *run.finish()])


def waiting(rng: np.random.Generator) -> NDArray[np.float64]:
    """Waits of a busy machine: whole stretches of steps have none, or as much as the step and more."""
    stretches = rng.choice([0.0, 0.006, 0.012], size=STEPS // 20, p=[0.4, 0.3, 0.3])
    return np.repeat(stretches, 20) * rng.uniform(0.7, 1.3, STEPS)


def own_steps(rng: np.random.Generator) -> NDArray[np.float64]:
    return OWN_S * np.exp(0.02 * rng.standard_normal((STEPS, len(OWN_S))))


@pytest.mark.parametrize("seed", range(5))
def test_a_busy_machine_hides_no_slower_loader(seed: int) -> None:
    rng = np.random.default_rng(seed)
    own_s = own_steps(rng)
    own_s[300:, PARTS.index("data")] += 0.006
    (event,) = [event for event in events_of(own_s, waiting(rng)) if event.kind == "level"]
    assert event.part == "data"
    assert event.since_step == pytest.approx(301, abs=20)
    # Which part waited how long is unknown, so the parts share it: the change seems smaller than it is.
    assert 0.003 < event.now - (event.against or 0.0) < 0.0065


@pytest.mark.parametrize("seed", range(5))
def test_a_busy_machine_is_no_change_of_the_program(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    assert [event for event in events_of(own_steps(rng), waiting(rng)) if event.kind == "level"] == []


def test_waiting_that_lasts_is_reported_as_waiting() -> None:
    rng = np.random.default_rng(7)
    waited_s = np.where(np.arange(STEPS) >= 300, 0.005, 0.0)
    (event,) = [event for event in events_of(own_steps(rng), waited_s) if event.kind == "level"]
    assert event.cause == "waiting for a CPU"
    assert event.since_step == pytest.approx(301, abs=3)


def test_a_device_does_not_wait_for_the_host() -> None:
    """On a device's clock, the host's waiting is in no step's time: nothing is taken out."""
    rng = np.random.default_rng(8)
    own_s = own_steps(rng)
    own_s[300:, PARTS.index("forward")] += 0.005
    waited_s = np.zeros(STEPS)
    (event,) = [event for event in events_of(own_s, waited_s, on_device=True) if event.kind == "level"]
    assert event.part == "forward"
