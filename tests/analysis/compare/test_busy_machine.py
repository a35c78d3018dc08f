"""On a busy machine times are upper bounds: what waiting for a CPU does not stretch decides, or nothing does."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compared import busy_entry, entry_of_steps

from lm_profiler.analysis.compare.comparison import Comparison, compare
from lm_profiler.analysis.compare.sides import CPU_TIME, WITHOUT_CPU_WAITS, comparable_step_s
from lm_profiler.analysis.evidence import Evidence, write_evidence
from lm_profiler.record.entry import Entry
from lm_profiler.record.process_spread import ASSUMED_SPREAD, ProcessSpread
from lm_profiler.record.run_record import GpuSharing, StepCounters

STEPS = 20


def process_times(rng: np.random.Generator, scale: float = 1.0) -> list[float]:
    """Steps of 16 ms of one process; processes differ by 2 %."""
    process = float(np.exp(0.02 * rng.standard_normal()))
    return list(0.016 * scale * process * np.exp(0.02 * rng.standard_normal(STEPS)))


def busy_runs(rng: np.random.Generator, name: str, runs: int, scale: float, most_missed: float) -> list[Entry]:
    """Others take between nothing and ``most_missed``, as chance has it, and stretch CPU time by up to a tenth."""
    entries = []
    for number in range(runs):
        missed = most_missed * float(rng.random())
        stretch = 1.0 + 0.1 * missed * float(rng.random())
        entries.append(busy_entry(f"{name}{number}", process_times(rng, scale), missed, stretch=stretch))
    return entries


@pytest.mark.parametrize(
    "most_missed, runs, spread",
    [(0.3, 3, ASSUMED_SPREAD), (0.8, 1, ASSUMED_SPREAD), (0.8, 1, ProcessSpread(std=0.005, freedom=4))],
    ids=["three runs", "one run", "one run, and a calm machine's spread, which is not believed"],
)
def test_runs_under_unlike_load_are_seldom_called_different(most_missed: float, runs: int, spread: ProcessSpread):
    rng = np.random.default_rng(39)
    words = []
    for _ in range(50):
        a = busy_runs(rng, "a", runs, 1.0, most_missed)
        b = busy_runs(rng, "b", runs, 1.0, most_missed)
        words.append(compare(a, b, spread).verdict)
    assert sum(word in ("FASTER", "SLOWER") for word in words) <= 2


def test_equal_programs_on_a_busy_machine_are_not_slower() -> None:
    rng = np.random.default_rng(1)
    calm, busy = entry_of_steps("a", process_times(rng)), busy_entry("b", process_times(rng), 0.3)
    found = compare([calm], [busy])
    assert found.step.b_s / found.step.a_s > 1.35
    assert (found.verdict, found.step.verdict) == ("UNCLEAR", "UNCLEAR")


def test_one_more_layer_is_found_by_its_cpu_time() -> None:
    rng = np.random.default_rng(2)
    found = 0
    for _ in range(40):
        a, b = busy_runs(rng, "a", 5, 1.0, 0.8), busy_runs(rng, "b", 5, 1.12, 0.8)
        found += compare(a, b).verdict == "SLOWER"
    assert found >= 32


def compare_busy_sides(changes_b: dict[str, Any], work_b: float = 1.0) -> Comparison:
    a = [busy_entry(f"a{number}", [0.016 + number * 1e-5] * STEPS, 0.4) for number in range(3)]
    b = [busy_entry(f"b{number}", [(0.016 + number * 1e-5) * work_b] * STEPS, 0.4, **changes_b) for number in range(3)]
    return compare(a, b)


def test_sleep_counts_as_time() -> None:
    found = compare_busy_sides({"asleep_s": 0.01})
    assert (found.verdict, found.decision.part) == ("SLOWER", WITHOUT_CPU_WAITS)
    assert [row.verdict for row in found.work if row.part == CPU_TIME] == ["SAME"]
    found = compare_busy_sides({"asleep_s": 0.008}, work_b=0.5)
    assert [row.verdict for row in found.work if row.part == CPU_TIME] == ["FASTER"]
    assert found.verdict != "FASTER"


def test_cpu_time_is_compared_only_of_equal_thread_counts() -> None:
    entries = compare_busy_sides({}).work
    assert [row.part for row in entries] == [WITHOUT_CPU_WAITS, CPU_TIME]
    fewer_threads = busy_entry("b", [0.016] * STEPS, 0.4)
    environment = fewer_threads.record.environment
    record = fewer_threads.record.model_copy(update={"environment": environment.model_copy(update={"threads": 1})})
    other = replace(fewer_threads, record=record)
    other.__dict__["rows"] = fewer_threads.rows
    assert [row.part for row in compare([busy_entry("a", [0.016] * STEPS, 0.4)], [other]).work] == [WITHOUT_CPU_WAITS]


def test_nothing_is_decided_if_others_used_the_gpu() -> None:
    a, b = busy_entry("a", [0.016] * STEPS, 0.4), busy_entry("b", [0.032] * STEPS, 0.4)
    assert compare([a], [b]).verdict == "SLOWER"
    gpu = GpuSharing(processes=1, utilisation=0.5, memory_bytes=None)
    contention = b.record.contention.model_copy(update={"gpu": gpu})
    b = replace(b, record=b.record.model_copy(update={"contention": contention}))
    b.__dict__["rows"] = a.rows
    found = compare([a], [b])
    assert (found.verdict, found.work) == ("UNCLEAR", [])


def test_counters_of_single_steps_count_after_the_warm_up_only(tmp_path: Path) -> None:
    """The first three measured steps are warm-up, and took ten times the CPU time."""
    work = [0.1] * 3 + [0.01, 0.0101, 0.0099] * 6
    made = busy_entry(str(tmp_path), work, 0.5)
    counters = [
        StepCounters(step=step, rank=0, wall_s=2 * seconds, cpu_wait_s=seconds, asleep_s=0.0, cpu_s=seconds)
        for step, seconds in enumerate(work, 1)
    ]
    write_evidence(tmp_path, Evidence(counters=counters))
    found = compare([made], [busy_entry("b", [0.01] * STEPS, 0.5)])
    by_part = {row.part: row for row in found.work}
    assert by_part[CPU_TIME].a_s == pytest.approx(0.01)
    assert by_part[WITHOUT_CPU_WAITS].a_s == pytest.approx(0.01)


def test_waits_for_a_cpu_are_not_compared() -> None:
    assert comparable_step_s(busy_entry("a", [0.016] * STEPS, 0.5, asleep_s=0.03)) == pytest.approx(0.046)
    assert comparable_step_s(entry_of_steps("a", [0.016] * STEPS)) == pytest.approx(0.016)
    # Others used a tenth of the CPU time for which the run's own threads, such as a loader's workers, waited.
    made = busy_entry("a", [0.01] * STEPS, 0.5)
    contention = made.record.contention.model_copy(update={"waited_s": 10.0, "others_s": 1.0})
    own = replace(made, record=made.record.model_copy(update={"contention": contention}))
    own.__dict__["rows"] = made.rows
    assert comparable_step_s(own) == pytest.approx(0.019)
