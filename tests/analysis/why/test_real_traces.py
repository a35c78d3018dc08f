"""Where the time of real devices went, in traces of others: against a sweep over all moments, and brute-force sums."""

import gzip
import json
from collections import Counter
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lm_profiler.analysis.trace.any_trace import read_any_trace
from lm_profiler.analysis.trace.packed_trace import PackedTrace
from lm_profiler.analysis.trace.pieces import traced_work
from lm_profiler.analysis.why.trace_answer import trace_answer
from lm_profiler.analysis.why.traced import Traced, broken_down

ROOT = Path(__file__).resolve().parents[3]
STORED = ROOT / "tests" / "analysis" / "trace" / "traces"
BESIDE = ROOT.parent / "shared" / "traces"
"""More of them, too large to be kept here; not on every machine."""
FOUND = sorted({path.name: path for folder in (BESIDE, STORED) for path in folder.glob("*.json.gz")}.items())
TRACES = [(name, path) for name, path in FOUND if path.stat().st_size < 2e6]  # brute force over more takes long

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
ORDER = ("products", "memory", "communication", "input")

each_trace = pytest.mark.parametrize("path", [path for _, path in TRACES], ids=[name for name, _ in TRACES])


def ns(microseconds: float) -> int:
    return round(Fraction(microseconds) * 1000)


@cache
def events_of(path: Path) -> list[dict[str, Any]]:
    """With one step around all of them where there is none."""
    with gzip.open(path) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    if any(str(e.get("name")).startswith("ProfilerStep") and e.get("cat") == "user_annotation" for e in events):
        return events
    timed = [e for e in events if "dur" in e and e.get("cat") in (*ON_DEVICE, "cuda_runtime", "cpu_op")]
    begin, end = min(e["ts"] for e in timed), max(e["ts"] + e["dur"] for e in timed)
    step = {"ph": "X", "cat": "user_annotation", "pid": 1, "tid": 1, "name": "ProfilerStep#1"}
    return [*events, {**step, "ts": begin, "dur": end - begin}]


@cache
def traced_in(path: Path) -> Traced:
    return broken_down(traced_work(PackedTrace(events_of(path))))


def work_and_window(events: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int, int]:
    """What was launched while the steps lasted, and from when to when they did."""
    steps = [e for e in events if str(e["name"]).startswith("ProfilerStep") and e.get("cat") == "user_annotation"]
    begin, end = min(ns(e["ts"]) for e in steps), max(ns(e["ts"]) + ns(e["dur"]) for e in steps)
    launched = {
        e["args"]["correlation"]: ns(e["ts"])
        for e in events
        if str(e.get("cat")).endswith(("_runtime", "_driver")) and "correlation" in e.get("args", {})
    }
    work = [e for e in events if e.get("cat") in ON_DEVICE]
    work = [e for e in work if begin <= launched.get(e["args"].get("correlation"), ns(e["ts"])) <= end]
    return work, begin, max([end, *(ns(e["ts"]) + ns(e["dur"]) for e in work)])


def swept(intervals: list[tuple[int, int, str]], begin: int, end: int) -> Counter[str]:
    """From one moment at which something begins or ends to the next, the first use of what runs has the time."""
    changes: list[tuple[int, int, str]] = []
    for start, stop, use in intervals:
        changes += [(max(start, begin), 1, use), (max(stop, begin), -1, use)]
    running: Counter[str] = Counter()
    time: Counter[str] = Counter()
    reached = begin
    for moment, change, use in [*sorted(changes), (end, 0, "")]:
        time[next((activity for activity in ORDER if running[activity]), "nothing")] += moment - reached
        reached = moment
        running[use] += change
    return time


@each_trace
def test_every_nanosecond_of_the_window_is_one_uses(path: Path) -> None:
    events = events_of(path)
    work, begin, end = work_and_window(events)
    traced = traced_in(path)
    names = {(piece.name, piece.start): piece.use for piece, _ in traced.pieces}
    ns_by_use = Counter({use: sum(own for piece, own in traced.by_use[use]) for use in ORDER})
    ns_by_use["nothing"] = sum(gap.ns for gap in traced.gaps)
    assert end - begin == ns_by_use.total()
    uses = [(ns(e["ts"]), ns(e["ts"]) + ns(e["dur"]), names.get((e["name"], ns(e["ts"])), "")) for e in work]
    hidden = sum(1 for _, _, use in uses if not use)
    assert hidden <= 0.01 * len(uses)  # behind others that had begun before: their use does not matter
    assert +ns_by_use == +swept(uses, begin, end)


def counts(event: dict[str, Any]) -> bool:
    """Whether the extent of a trace without steps includes this event."""
    category, name = str(event.get("cat")), str(event.get("name"))
    if category.endswith(("_runtime", "_driver")):
        return "correlation" in event.get("args", {})
    is_module = category == "python_function" and name.startswith("nn.Module: ")
    return category in (*ON_DEVICE, "cpu_op", "fwdbwd") or is_module


def extent(events: list[dict[str, Any]]) -> tuple[int, int]:
    """From the first steps' begin, or the first event, to the end of the last."""
    steps = [e for e in events if str(e["name"]).startswith("ProfilerStep") and e.get("cat") == "user_annotation"]
    spans = [(ns(e["ts"]), ns(e["ts"]) + ns(e.get("dur", 0))) for e in steps or filter(counts, events)]
    return min(begin for begin, _ in spans), max(end for _, end in spans)


@pytest.mark.parametrize("path", [path for _, path in TRACES if path.stat().st_size < 1e6], ids=lambda path: path.name)
def test_the_answer_about_any_trace_is_that_of_a_brute_force_count(path: Path) -> None:
    with_step = events_of(path)
    events = with_step if with_step[-1].get("name") != "ProfilerStep#1" else with_step[:-1]
    work, _, _ = work_and_window(with_step)
    begin, end = extent(events)
    end = max([end, *(ns(e["ts"]) + ns(e["dur"]) for e in work)])
    answer = trace_answer(read_any_trace(path))

    lengths, calls = Counter[str](), Counter[str]()
    for event in work:
        lengths[event["name"][:200]] += ns(event["dur"])
        calls[event["name"][:200]] += 1
    for row in answer.kernels.rows:
        lengths[row.name[:200]] -= round(row.total_s * 1e9)
        calls[row.name[:200]] -= row.count
    rest = answer.kernels.rest
    assert (lengths.total(), calls.total()) == (round(rest.total_s * 1e9), rest.count)
    assert not rest.rows or all(left >= 0 for left in lengths.values())

    busy, reached = 0, 0
    for start, stop in sorted((ns(e["ts"]), ns(e["ts"]) + ns(e["dur"])) for e in work):
        busy += max(stop - max(start, reached), 0)
        reached = max(reached, stop)
    assert round(answer.busy_s * 1e9) == busy
    assert round(answer.idle_s * 1e9) == end - begin - busy
    idle_ns = sum(round(idle.total_s * 1e9) for idle in answer.idle)
    assert idle_ns == pytest.approx(end - begin - busy, abs=len(answer.idle))
    copied = sum(e["args"].get("bytes", 0) for e in work if e["name"].startswith(("Mem", "Copy")))
    assert sum(copy.bytes or 0 for copy in answer.copies) in (copied, 0)
