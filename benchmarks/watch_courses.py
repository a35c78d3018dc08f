"""Simulated courses of the step time among noise like that of real loops, and whether the watch reports them right.

    python -m benchmarks.watch_courses [--seeds 20] [--kinds NAME …]
    python -m benchmarks.watch_courses --cost

The noise has what real loops have: steps that resemble their neighbours, a heavy tail, single slow steps, bursts of 5
to 60 steps beside a neighbour on the machine, and a machine that wanders by 0.3 %. A change is right if it has the
phase, the step (within 3) and the size (within 10 %). A drift is right if its size at the end is right within 10 %, as
one event or as all stairs. Every other event counts as a false one. Kinds of the second group were written after the
code was done, with noise of another shape.

``--cost`` prints the CPU time that the analysis takes for a slow step, with the counters in which it looks for a cause.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

from lm_profiler.analysis.watch.watched_run import WatchedRun
from lm_profiler.record.counter_table import CounterTable
from lm_profiler.record.parts import PARTS
from lm_profiler.record.run_record import StepCounters
from lm_profiler.record.watch_files import WatchEvent, latest_events

SHARES = np.array([0.02, 0.01, 0.3, 0.01, 0.5, 0.01, 0.1, 0.05])
HANDED_OVER = 200  # steps that come together
STEPS_APART, SIZE_APART, DRIFT_APART = 3, 0.1, 0.1

Seconds = NDArray[np.float64]


class Change(NamedTuple):
    step: int
    part: str
    added_s: float


@dataclass(kw_only=True)
class Course:
    """The steps of a simulated run, and what must be reported of them."""

    seconds: Seconds  # (n, TIMED)
    changes: list[Change] = field(default_factory=list)
    drift_s: float | None = None  # by which the step has grown at the end
    course: str | None = None  # the word for a level that wanders or alternates
    slow_steps: list[int] = field(default_factory=list)


def correlated_noise(steps: int, rng: np.random.Generator) -> Seconds:
    """Return logarithms: AR(1), a heavy tail, single slow steps, bursts, and a machine that wanders."""
    logs: Seconds = lfilter(
        [0.012], [1.0, -0.6], rng.standard_normal(steps)
    ) + 0.01 * rng.standard_t(3, steps)
    keeps = np.exp(-1.0 / 3000.0)
    logs = logs + lfilter(
        [0.003 * np.sqrt(1.0 - keeps**2)], [1.0, -keeps], rng.standard_normal(steps)
    )
    slow = np.flatnonzero(rng.random(steps) < 0.005)
    logs[slow] += np.log1p(0.3 * rng.pareto(3.0, len(slow)))
    begin = int(rng.exponential(3000))
    while begin < steps:
        logs[begin : begin + int(rng.integers(5, 60))] += rng.uniform(0.05, 0.3)
        begin += int(rng.exponential(3000))
    return logs


def other_noise(steps: int, rng: np.random.Generator) -> Seconds:
    """Return logarithms with another shape: skewed noise with a longer memory, and bursts that fade."""
    drawn = rng.gamma(2.0, 1.0, steps) - 2.0
    logs: Seconds = lfilter([0.008], [1.0, -0.85], drawn) + 0.02 * rng.standard_normal(
        steps
    )
    for begin in rng.integers(0, steps, steps // 4000):
        number = np.arange(min(80, steps - begin))
        logs[begin : begin + len(number)] += rng.uniform(0.1, 0.5) * np.exp(
            -number / 15.0
        )
    return logs


def rows(step_s: float, logs: Seconds, added_s: dict[str, Seconds]) -> Seconds:
    """Return steps whose parts share ``step_s``, with ``added_s`` by part."""
    parts_s = step_s * np.exp(logs)[:, None] * SHARES
    for part, seconds in added_s.items():
        parts_s[:, PARTS.index(part)] += seconds
    return np.column_stack([parts_s, parts_s.sum(axis=1)])


# -- tuned on ----------------------------------------------------------------------------------------------------------


def ramp(rng: np.random.Generator, share: float, steps: int) -> Course:
    logs = correlated_noise(steps, rng) + np.log(1.0 + share * np.arange(steps) / steps)
    return Course(seconds=rows(0.003, logs, {}), drift_s=0.003 * share)


def ramp_5(rng: np.random.Generator) -> Course:
    return ramp(rng, 0.05, 20_000)


def ramp_10(rng: np.random.Generator) -> Course:
    return ramp(rng, 0.10, 10_000)


def forward_grows(rng: np.random.Generator) -> Course:
    added_s = 0.0039 * np.arange(12_000) / 12_000
    return Course(
        seconds=rows(0.003, correlated_noise(12_000, rng), {"forward": added_s}),
        drift_s=0.0039,
    )


def stairs(rng: np.random.Generator) -> Course:
    added_s = 0.0007 * (np.arange(12_000) // 400)
    return Course(
        seconds=rows(0.003, correlated_noise(12_000, rng), {"forward": added_s}),
        drift_s=0.0203,
    )


def slower_loader(rng: np.random.Generator) -> Course:
    added_s = 0.003 * (np.arange(1, 12_001) >= 1500)
    seconds = rows(0.003, correlated_noise(12_000, rng), {"data": added_s})
    return Course(seconds=seconds, changes=[Change(1500, "data", 0.003)])


def two_percent(rng: np.random.Generator) -> Course:
    added_s = 0.0002 * (np.arange(1, 6001) >= 3000)
    seconds = rows(0.01, 0.02 * rng.standard_normal(6000), {"forward": added_s})
    return Course(seconds=seconds, changes=[Change(3000, "forward", 0.0002)])


def wandering(rng: np.random.Generator) -> Course:
    keeps = np.exp(-1.0 / 1000.0)
    level = lfilter(
        [0.03 * np.sqrt(1.0 - keeps**2)], [1.0, -keeps], rng.standard_normal(40_000)
    )
    return Course(
        seconds=rows(0.003, correlated_noise(40_000, rng) + level, {}), course="wanders"
    )


def alternating(rng: np.random.Generator) -> Course:
    is_high = np.cumsum(rng.random(40_000) < 1 / 2500) % 2
    return Course(
        seconds=rows(
            0.003, correlated_noise(40_000, rng), {"forward": 0.0009 * is_high}
        ),
        course="alternates",
    )


def steady(rng: np.random.Generator) -> Course:
    return Course(seconds=rows(0.003, correlated_noise(50_000, rng), {}))


# -- written afterwards ------------------------------------------------------------------------------------------------


def saturating(rng: np.random.Generator) -> Course:
    added_s = 0.005 * (1.0 - np.exp(-np.arange(15_000) / 3000))
    return Course(
        seconds=rows(0.008, other_noise(15_000, rng), {"backward": added_s}),
        drift_s=0.005,
    )


def accelerating(rng: np.random.Generator) -> Course:
    number = np.maximum(np.arange(12_000) - 8000, 0)
    added_s = 0.006 * np.expm1(number / 2000) / np.expm1(2.0)
    return Course(
        seconds=rows(0.01, other_noise(12_000, rng), {"data": added_s}), drift_s=0.006
    )


def three_changes(rng: np.random.Generator) -> Course:
    number = np.arange(1, 12_001)
    added_s = {
        "data": 0.0024 * (number >= 3000),
        "backward": 0.0018 * (number >= 6000),
        "forward": 0.003 * (number < 9000),
    }
    changes = [
        Change(3000, "data", 0.0024),
        Change(6000, "backward", 0.0018),
        Change(9000, "forward", -0.003),
    ]
    return Course(
        seconds=rows(0.02, other_noise(12_000, rng), added_s), changes=changes
    )


def irregular_stalls(rng: np.random.Generator) -> Course:
    slow_steps = np.sort(rng.choice(np.arange(500, 11_500), 7, replace=False))
    added_s = np.zeros(12_000)
    added_s[slow_steps - 1] = np.exp(rng.uniform(np.log(0.3), np.log(3.0), 7))
    seconds = rows(0.02, other_noise(12_000, rng), {"transfer": added_s})
    return Course(seconds=seconds, slow_steps=slow_steps.tolist())


def noisier(rng: np.random.Generator) -> Course:
    logs = other_noise(20_000, rng)
    logs[10_000:] *= 2.0
    return Course(seconds=rows(0.008, logs, {}))


def steady_otherwise(rng: np.random.Generator) -> Course:
    return Course(seconds=rows(0.008, other_noise(50_000, rng), {}))


TUNED = (
    ramp_5,
    ramp_10,
    forward_grows,
    stairs,
    slower_loader,
    two_percent,
    wandering,
    alternating,
    steady,
)
AFTERWARDS = (
    saturating,
    accelerating,
    three_changes,
    irregular_stalls,
    noisier,
    steady_otherwise,
)


def events_of(seconds: Seconds) -> list[WatchEvent]:
    ends_ns = np.cumsum(seconds[:, -1] * 1e9).astype(np.int64)
    instants_ns = np.column_stack([np.concatenate([[0], ends_ns[:-1]]), ends_ns])
    run = WatchedRun(workers=0)
    events: list[WatchEvent] = []
    for first in range(0, len(seconds), HANDED_OVER):
        steps = slice(first, first + HANDED_OVER)
        events += run.add(instants_ns[steps], seconds[steps])
    return latest_events([*events, *run.finish()])


def problems_of(course: Course, events: Sequence[WatchEvent]) -> tuple[list[str], int]:
    """Return what was reported wrong or not at all, and the number of other events."""
    problems: list[str] = []
    right: list[WatchEvent] = []
    levels = [event for event in events if event.kind == "level"]
    for change in course.changes:
        near = [event for event in levels if _is_change(event, change)]
        right += near[:1]
        if not near:
            problems.append(f"no change at {change.step}")
    if course.drift_s is not None:
        grown_s = sum(
            event.now - (event.against or 0.0)
            for event in levels
            if event.until_step is None
        )
        right += [event for event in levels if event.until_step is None]
        if abs(grown_s - course.drift_s) > DRIFT_APART * course.drift_s:
            problems.append(
                f"grown by {grown_s * 1e3:.2f} ms, not {course.drift_s * 1e3:.2f}"
            )
        if not any(event.course == "drift" for event in levels):
            problems.append("no drift")
    if course.course is not None:
        courses = [
            event for event in levels if event.course in ("wanders", "alternates")
        ]
        right += courses[:1]
        if not courses or (
            course.course == "alternates" and courses[0].course != "alternates"
        ):
            problems.append(f"not reported as a level that {course.course}")
    slow = [event for event in events if event.kind == "slow step"]
    for step in course.slow_steps:
        group = [event for event in slow if step in event.steps]
        right += group
        if not group:
            problems.append(f"no slow step {step}")
    others = [event for event in events if event not in right]
    return problems, len(others)


def _is_change(event: WatchEvent, change: Change) -> bool:
    if event.part != change.part or event.since_step is None or event.against is None:
        return False
    is_near = abs(event.since_step - change.step) <= STEPS_APART
    error_s = event.now - event.against - change.added_s
    return is_near and abs(error_s) <= SIZE_APART * abs(change.added_s)


def measure(kind: Callable[[np.random.Generator], Course], seeds: int) -> str:
    """Return a line on how many courses of one kind were reported right."""
    right = 0
    others = 0
    steps = 0
    first_problems: list[str] = []
    for seed in range(seeds):
        course = kind(np.random.default_rng(seed))
        problems, other_events = problems_of(course, events_of(course.seconds))
        right += not problems
        others += other_events
        steps += len(course.seconds)
        if problems:
            first_problems.append(f"seed {seed}: {problems[0]}")
    name = kind.__name__.replace("_", " ")
    line = f"{name}: {right} of {seeds} right, {others} other events in {steps:,} steps"
    return "; ".join([line, *first_problems[:3]])


def cpu_s_of_analysis(seconds: Seconds) -> float:
    """Return the CPU seconds of the analysis of steps that each have counters."""
    ends_ns = np.cumsum(seconds[:, -1] * 1e9).astype(np.int64)
    instants_ns = np.column_stack([np.concatenate([[0], ends_ns[:-1]]), ends_ns])
    counters = []
    for index, step_s in enumerate(seconds[:, -1].tolist()):
        counters.append(
            StepCounters(
                step=index + 1,
                rank=0,
                wall_s=step_s,
                between_s=0.0,
                gc_s=0.0,
                cpu_s=step_s,
            )
        )
    run = WatchedRun(workers=0)
    began_s = time.process_time()
    for first in range(0, len(seconds), HANDED_OVER):
        steps = slice(first, first + HANDED_OVER)
        table = CounterTable.from_counters(counters[steps])
        run.add(instants_ns[steps], seconds[steps], table)
    run.finish()
    return time.process_time() - began_s


def print_cost() -> None:
    """Print what slow steps add to the CPU time of the analysis, in runs of 20,000 steps of 5 ms."""
    steps = 20_000
    rng = np.random.default_rng(0)
    logs = 0.02 * rng.standard_normal(steps)
    usual_s = cpu_s_of_analysis(rows(0.005, logs, {}))
    print(f"no slow step: {usual_s / steps * 1e6:.1f} µs of CPU per step")
    for every in (1000, 100, 10):
        delay_s = 0.05 * (np.arange(steps) % every == every - 1)
        cpu_s = cpu_s_of_analysis(rows(0.005, logs, {"forward": delay_s}))
        slow_steps = steps // every
        each_ms = (cpu_s - usual_s) / slow_steps * 1e3
        print(
            f"one of {every} is slow: {cpu_s / steps * 1e6:.1f} µs per step, {each_ms:.2f} ms for each slow one"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--kinds", nargs="*", default=[])
    parser.add_argument("--cost", action="store_true")
    arguments = parser.parse_args()
    if arguments.cost:
        print_cost()
        return
    for title, kinds in (("tuned on", TUNED), ("written afterwards", AFTERWARDS)):
        print(title)
        for kind in kinds:
            if not arguments.kinds or kind.__name__ in arguments.kinds:
                print(f"  {measure(kind, arguments.seeds)}", flush=True)


if __name__ == "__main__":
    main()
