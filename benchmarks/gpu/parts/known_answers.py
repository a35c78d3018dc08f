"""Kernels of known length in every phase, and what the instruments make of them.

The truth is a pair of events of our own around each of them, on the stream that the loop uses. On the CPU the device is
made up: its streams take the time that they are given, and nothing else.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from unittest import mock

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.parts.tests import ROOT
from benchmarks.gpu.place import Place
from lm_profiler.record.quantities import PHASES

sys.path.insert(0, str(ROOT / "tests" / "support"))
from known_loop import (  # the tests' loop is no package
    make_profiler,
    measured_rows,
    trainer_with,
)
from sleepy_loop import (
    CudaDevice,
    Device,
    Graphed,
    MadeUpDevice,
    Sleepy,
    SleepyLoader,
    TwoStreams,
)

WARMUP, MEASURE = 2, 8
SHARE, LEAST_S = 0.01, 20e-6
"""A phase is right within this share of it, or this long."""

_OF_A_BATCH = frozenset(("data", "transfer", "forward", "backward"))
SCENARIOS: dict[str, tuple[Callable[[Device], Sleepy], int]] = {
    "one stream": (Sleepy, 1),
    "two streams": (TwoStreams, 1),
    "accumulation of 4": (Sleepy, 4),
    "CUDA graph": (Graphed, 1),
}
"""The module, and how many batches a step has."""


def run(place: Place, findings: Findings) -> None:
    device: Device = MadeUpDevice() if place.on_cpu else CudaDevice()
    rows: list[list[str]] = []
    worst = 0.0
    for name, (module, batches) in SCENARIOS.items():
        for phase, truth_s, ours_s in measured(
            place, device, module(device), name, batches
        ):
            off_s = ours_s - truth_s
            worst = max(worst, abs(off_s) / max(SHARE * truth_s, LEAST_S))
            rows.append(
                [
                    name,
                    phase,
                    f"{truth_s * 1e3:.3f}",
                    f"{ours_s * 1e3:.3f}",
                    f"{off_s * 1e6:+.1f}",
                ]
            )
            findings.table(
                "Median of a phase",
                ("", "phase", "truth (ms)", "measured (ms)", "off (µs)"),
                rows,
                left=2,
            )
        findings.add(worst_of_allowed=worst)
    findings.aim(
        "every phase in every scenario",
        "1 % or 20 µs",
        f"{worst:.2f} of that at worst",
        worst <= 1,
    )


def measured(
    place: Place, device: Device, module: Sleepy, name: str, batches: int
) -> list[tuple[str, float, float]]:
    """Each phase with the median of its truth and of what was measured, in seconds."""
    folder = place.folder / name.replace(" ", "_")
    folder.mkdir(exist_ok=True)
    clock = device.clock if isinstance(device, MadeUpDevice) else time.perf_counter_ns
    profiler = make_profiler(WARMUP, MEASURE, log_dir=folder, clock=clock)
    trainer = trainer_with(
        [profiler],
        folder,
        accelerator=place.accelerator,
        accumulate_grad_batches=batches,
    )
    if isinstance(device, MadeUpDevice):
        with mock.patch(
            "lm_profiler.callbacks.attachment.stream_of", return_value=device
        ):
            trainer.fit(module, SleepyLoader(module.sleep))
    else:
        trainer.fit(module, SleepyLoader(module.sleep))
    rows = measured_rows(profiler)
    found = []
    for phase in PHASES:
        times = batches if phase in _OF_A_BATCH else 1
        truth_s = module.sleep.step_seconds(phase, times, WARMUP, WARMUP + MEASURE)
        found.append(
            (
                phase,
                statistics.median(truth_s),
                statistics.median(row.time(phase) for row in rows),
            )
        )
    return found
