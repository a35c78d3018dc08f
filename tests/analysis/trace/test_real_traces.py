"""Traces of real devices, made by others: sums against a brute-force reading, and names that are known."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cuda_trace import kernel_table

from lm_profiler.record.kernels import KernelTable

TRACES = Path(__file__).parent / "traces"
PHASES = ("forward", "backward", "optimizer")
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
NAMED = ("hta_alexnet", "tracelens_h100_qwen1.5_0.5b", "tracelens_normalization", "tracelens_b200_eager")


def ns(event: dict[str, Any], field: str) -> int:
    return round(Fraction(event[field]) * 1000)


@cache
def trace(name: str) -> list[dict[str, Any]]:
    """Its events, with a step around them all and three phases of equal length in it."""
    with gzip.open(TRACES / f"{name}.json.gz") as file:
        events = [e for e in json.load(file)["traceEvents"] if not str(e.get("name")).startswith("ProfilerStep")]
    timed = [e for e in events if "dur" in e and e.get("cat") in (*DEVICE, "cuda_runtime", "cuda_driver", "cpu_op")]
    begin, end = min(e["ts"] for e in timed), max(e["ts"] + e["dur"] for e in timed)
    where = {"ph": "X", "cat": "user_annotation", "pid": 1, "tid": 1}
    third = (end - begin) / 3
    events.append({**where, "name": "ProfilerStep#1", "ts": begin, "dur": end - begin})
    events += [
        {**where, "name": f"phase: {phase}", "ts": begin + i * third, "dur": third} for i, phase in enumerate(PHASES)
    ]
    return events


def brute_force(events: list[dict[str, Any]]) -> tuple[Counter[str], Counter[str], int]:
    """Nanoseconds by name and by phase, one event after another, and how many of them any work covers."""
    ranges = {e["name"].removeprefix("phase: "): e for e in events if str(e.get("name")).startswith("phase: ")}
    launched = {
        e["args"]["correlation"]: ns(e, "ts")
        for e in events
        if str(e.get("cat")).endswith(("_runtime", "_driver")) and "correlation" in e.get("args", {})
    }
    names: Counter[str] = Counter()
    phases: Counter[str] = Counter()
    covered, reached = 0, 0
    for event in sorted((e for e in events if e.get("cat") in DEVICE), key=lambda e: ns(e, "ts")):
        start, length = ns(event, "ts"), ns(event, "dur")
        wanted = launched.get(event["args"]["correlation"], start)
        names[event["name"]] += length
        phases[next((p for p, r in ranges.items() if ns(r, "ts") <= wanted < ns(r, "ts") + ns(r, "dur")), "other")] += (
            length
        )
        covered += max(start + length - max(start, reached), 0)
        reached = max(reached, start + length)
    return names, phases, covered


@pytest.mark.parametrize("name", NAMED)
def test_the_table_of_a_real_trace_adds_up_to_the_nanosecond(name: str) -> None:
    names, phases, covered = brute_force(trace(name))
    table: KernelTable = kernel_table(trace(name))
    found = {p: sum(round(k.total_s * 1e9) for k in part.kinds.values()) for p, part in table.phases.items()}
    assert {p: total for p, total in found.items() if total} == dict(phases)
    assert sum(round(part.busy_s * 1e9) for part in table.phases.values()) == covered
    assert sum(round(row.total_s * 1e9) for row in table.rows) + round(table.rest.total_s * 1e9) == sum(names.values())


@pytest.mark.parametrize("name", NAMED)
def test_no_kernel_of_a_real_trace_is_of_unknown_kind(name: str) -> None:
    table = kernel_table(trace(name))
    assert {row.name for row in table.rows if row.kind == "other"} == set()
