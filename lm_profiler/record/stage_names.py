"""What a run is doing, stage by stage, as its output says it and as whoever reads that output knows it."""

from __future__ import annotations

STAGE_NAMES = {
    "warmup": "warm-up",
    "measure": "measuring",
    "collectives": "timing collectives",
    "whatif": "delaying places",
    "actions": "timing actions",
    "memory": "reading memory",
    "trace": "tracing",
}
"""In their order."""
