"""Runs parts one by one, each in a process of its own with a time limit, and keeps the summary up to date."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.gpu.card import watched
from benchmarks.gpu.registry import MACHINE, UNFINISHED, Part
from benchmarks.gpu.summary import STATUS_FILE, write_summary
from lm_profiler.processes.cell_processes import CellProcesses
from lm_profiler.processes.child import end_text
from lm_profiler.record.calls import OK
from lm_profiler.record.files import write_whole

_PROGRAM = "benchmarks.gpu.part"
_LOADED = (
    "lightning.pytorch",
    "torch.utils.tensorboard",
    "lm_profiler.cli.verbs.trainer",
)
MODULES = _LOADED if sys.platform == "linux" else ()
"""What the server that starts the parts has loaded: a part is a copy of it (as cells of a sweep)."""

LARGEST_BYTES = 8 << 20
"""Larger files are removed when their part has ended: the whole folder shall stay one of a few MB."""

_HOW = {OK: None, UNFINISHED: "there is more to do than its time sufficed for"}

_PATIENCE = 10
"""Times its own limit is a part's on the CPU, where a busy machine shall prove nothing."""


def run_parts(
    parts: Sequence[Part], folder: Path, on_cpu: bool, limit_s: float | None
) -> bool:
    """Run the parts that have not ended well in ``folder`` yet; returns whether all of them have now.

    Args:
        parts: In this order.
        folder: Of all results; each part has its own below.
        on_cpu: The same code with tiny sizes.
        limit_s: Of each part but the machine's description, instead of its own limit.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (
        CellProcesses(_PROGRAM, MODULES) as processes,
        nullcontext() if on_cpu else watched(folder),
    ):
        for part in parts:
            place = folder / f"{part.number:02}-{part.name}"
            if _status(place).get("status") != "done":
                print(f"{part.number:>2} {part.name}: {part.question}", flush=True)
                patience = _PATIENCE if on_cpu and limit_s is None else 1
                try:
                    _run(
                        processes,
                        part,
                        place,
                        "cpu" if on_cpu else "gpu",
                        part.limit(limit_s) * patience,
                    )
                finally:
                    write_summary(folder, on_cpu)
            if part is MACHINE and _status(place)["status"] != "done":
                return False  # there is nothing to measure on
    return all(
        _status(folder / f"{part.number:02}-{part.name}")["status"] == "done"
        for part in parts
    )


def _run(
    processes: CellProcesses,
    part: Part,
    place: Path,
    accelerator: str,
    limit_s: float,
) -> None:
    place.mkdir(parents=True, exist_ok=True)
    output = place / "output.txt"
    processes.start(
        part.name, [part.name, str(place), str(limit_s), accelerator], output, {}
    )
    began, began_s = datetime.now(timezone.utc), time.monotonic()
    how: str | None = "interrupted"
    duration_s: float | None = None
    try:
        how, duration_s = _ended(processes, part.name, limit_s)
    finally:  # whoever ends the command keeps what the part has found so far
        status = {
            **asdict(part),
            "limit_s": limit_s,
            "status": "done" if how is None else "not done",
            "how": how,
            "began": began.isoformat(timespec="seconds"),
            "duration_s": round(
                time.monotonic() - began_s if duration_s is None else duration_s, 2
            ),
            "left_out": _remove_large(place),
        }
        write_whole(place / STATUS_FILE, json.dumps(status, indent=1) + "\n")
    print(
        f"   {'done' if how is None else how} after {status['duration_s']:.0f} s",
        flush=True,
    )
    if how is not None and (
        said := output.read_text("utf-8", "replace").strip().splitlines()
    ):
        print(f"   {said[-1]}", flush=True)


def _ended(
    processes: CellProcesses, name: str, limit_s: float
) -> tuple[str | None, float]:
    """Wait for the part's end, and bring it about when its time is over.

    Returns how it ended, None where it ended well, and its seconds.
    """
    began_s = time.monotonic()
    events = processes.wait_for_ends(limit_s)
    is_over_its_time = not events
    if is_over_its_time:
        processes.signal(name, signal.SIGKILL)
        events = processes.wait_for_ends(None)
    duration_s = time.monotonic() - began_s
    [event] = events
    if is_over_its_time:
        return f"killed after its limit of {limit_s:g} s", duration_s
    if event.code in _HOW:
        return _HOW[event.code], duration_s
    return event.lost or end_text(event.code), duration_s


def _remove_large(place: Path) -> list[str]:
    large = [
        path
        for path in place.rglob("*")
        if path.is_file() and path.stat().st_size > LARGEST_BYTES
    ]
    told = [
        f"{path.relative_to(place)} ({path.stat().st_size / 2**20:.1f} MiB)"
        for path in large
    ]
    for path in large:
        path.unlink()
    return told


def _status(place: Path) -> dict[str, Any]:
    try:
        told: dict[str, Any] = json.loads((place / STATUS_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return {"status": "missing"}
    return told
