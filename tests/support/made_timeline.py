"""A memory timeline made by hand, in bytes that are easily added."""

from typing import Any

from lm_profiler.record.memory_timeline import CAUSE_TITLES, Allocation, MemoryTimeline

PARAMETERS, GRADIENTS, ACTIVATIONS = (
    list(CAUSE_TITLES).index(cause) for cause in ("parameters", "gradients", "activations")
)


def made_timeline(**changed: Any) -> MemoryTimeline:
    """A step that holds 100 bytes before and after it, and 700 at most, in backward."""
    largest = {"shape": [3, 25], "dtype": "float32", "name": "aten.mm.default", "module": "head", "line": "model.py:7"}
    of: dict[str, Any] = {
        "source": "planned",
        "causes": [*CAUSE_TITLES],
        "start": [100 if number == PARAMETERS else 0 for number in range(len(CAUSE_TITLES))],
        "phases": [("data", 0), ("forward", 0), ("other", 2), ("backward", 3), ("optimizer", 6), ("other", 6)],
        "events": [
            *((ACTIVATIONS, 200), (ACTIVATIONS, 300), (ACTIVATIONS, -100)),
            *((GRADIENTS, 200), (ACTIVATIONS, -400), (GRADIENTS, -200)),
        ],
        "largest": [Allocation(bytes=300, cause="activations", phase="forward", **largest)],
        "saved": [Allocation(bytes=200, count=2, cause="activations")],
        "saved_bytes": 400,
    }
    return MemoryTimeline(**(of | changed))
