"""How often torch.compile compiled."""

from __future__ import annotations

import sys


def recompilations() -> int:
    """Graphs compiled so far in this process; 0 where torch.compile was never used."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0
