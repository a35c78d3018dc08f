"""The grid of configs/sweeps/attention.yaml: first one width as it is, then the rest, for as long as there is time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from benchmarks.gpu.findings import Findings, shown
from benchmarks.gpu.parts.tests import ROOT
from benchmarks.gpu.place import TINY_ATTENTION, Place, missing
from lm_profiler.record.entry import Entry

SWEEP = ROOT / "configs" / "sweeps" / "attention.yaml"
FIRST = {"model.compile": "false", "model.d_model": "64"}
_VARIED = ("model.attention", "model.compile", "model.d_model", "data.context_length")
_HEADINGS = (
    "attention",
    "compiled",
    "width",
    "context",
    "status",
    "forward (ms)",
    "backward (ms)",
    "peak (GiB)",
)
# planning takes as long as running
_SHORT = ("--memory.steps=1", "--trace.steps=0", "--check_memory=false")


def run(place: Place, findings: Findings) -> bool:
    plan = yaml.safe_load(Path(SWEEP).read_text("utf-8"))
    grid = {
        key: [str(value).lower() for value in values]
        for key, values in plan["grid"].items()
    }
    both = [
        {"model.compile": c, "model.d_model": d}
        for c in grid["model.compile"]
        for d in grid["model.d_model"]
    ]
    lengths = ["16"] if place.on_cpu else grid["data.context_length"]
    kinds = ["sdpa"] if place.on_cpu else grid["model.attention"]
    rest = [] if place.on_cpu else [each for each in both if each != FIRST]
    entries: list[Entry] = []
    more = False
    for name, chosen in (("first", [FIRST]), ("rest", rest)):
        if chosen:
            found = place.sweep(
                name, *options(place, plan["config"], kinds, lengths, chosen)
            )
            more = more or not found or missing(found)
            entries += found
            findings.table(
                "Attention alone", _HEADINGS, [row(entry) for entry in entries], left=5
            )
            findings.add(cells=len(entries), words=[entry.status for entry in entries])
    return more


def options(
    place: Place,
    config: str,
    kinds: list[str],
    lengths: list[str],
    chosen: list[dict[str, Any]],
) -> list[str]:
    sets = ", ".join(
        "{" + ", ".join(f"{key}: {value}" for key, value in each.items()) + "}"
        for each in chosen
    )
    grid = (
        f"--grid.model.attention={','.join(kinds)}",
        f"--grid.data.context_length={','.join(lengths)}",
    )
    tiny = place.sized(*_SHORT, tiny=TINY_ATTENTION)
    return [f"--config={config}", *grid, f"--list=[{sets}]", *tiny, "--timeout_s=60"]


def row(entry: Entry) -> list[str]:
    """Of one cell, for people."""
    words = [*(entry.overrides.get(name, "") for name in _VARIED), entry.status]
    record = entry.record
    if record is None or not record.time:
        return [*words, "", "", ""]
    peak = None if record.memory is None else record.memory.measured.allocated_peak
    times = (
        shown(record.time[phase].median, scale=1e3) for phase in ("forward", "backward")
    )
    return [*words, *times, shown(peak, scale=2**-30)]
