"""Traces of real devices, made by others, with a step and phases added."""

import gzip
import json
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

TRACES = Path(__file__).parents[1] / "analysis/trace/traces"
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
