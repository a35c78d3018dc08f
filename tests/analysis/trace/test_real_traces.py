"""Traces of real devices, made by others: sums against a brute-force reading, and names that are known."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from cuda_trace import kernel_table
from real_traces import DEVICE, NAMED, ns, trace

from lm_profiler.record.kernels import KernelTable


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
