"""Calls of operators of which nothing is known but what a test looks at."""

from typing import Any

from lm_profiler.record.operator_calls import OperatorCall


def made_call(name: str = "aten::add", reads: tuple[int, ...] = (), **facts: Any) -> OperatorCall:
    """A call of forward, which takes a second and writes storage 1 unless ``facts`` replace that."""
    return OperatorCall(**{"name": name, "phase": "forward", "seconds": 1.0, "reads": reads, "writes": (1,), **facts})
