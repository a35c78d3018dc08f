"""What each card did while all parts ran, every second: whatever is found odd later can be held beside it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from lm_profiler.measure.device.nvml import Gpu, initialized

FILE = "cards.csv"
_ASKED = {
    "sm_clock_mhz": ("nvmlDeviceGetClockInfo", 1),
    "memory_clock_mhz": ("nvmlDeviceGetClockInfo", 2),
    "power_mw": ("nvmlDeviceGetPowerUsage",),
    "power_limit_mw": ("nvmlDeviceGetEnforcedPowerLimit",),
    "temperature_c": ("nvmlDeviceGetTemperature", 0),
    "throttle_reasons": ("nvmlDeviceGetCurrentClocksEventReasons",),
}


@contextmanager
def watched(folder: Path, period_s: float = 1.0) -> Iterator[None]:
    """Have it written into ``folder``, after what an earlier call has written; without NVML there is no file."""
    if (nvml := initialized()) is None:
        yield
        return
    over = threading.Event()
    thread = threading.Thread(
        target=_write, args=(nvml, folder / FILE, over, period_s), daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(5.0)  # NVML can hang on a card that fell off its bus


def _write(nvml: Any, path: Path, over: threading.Event, period_s: float) -> None:
    cards = [
        Gpu(nvml.nvmlDeviceGetHandleByIndex(index), nvml, "")
        for index in range(nvml.nvmlDeviceGetCount())
    ]
    is_new = not path.exists()
    with path.open("a", buffering=1) as file:
        if is_new:
            print("at", "card", *_ASKED, "used_bytes", sep=",", file=file)
        while True:
            at = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
            for index, card in enumerate(cards):
                memory = card.call("nvmlDeviceGetMemoryInfo")
                told = [
                    *(card.call(*asked) for asked in _ASKED.values()),
                    None if memory is None else memory.used,
                ]
                print(
                    at,
                    index,
                    *("" if each is None else each for each in told),
                    sep=",",
                    file=file,
                )
            if over.wait(period_s):
                return
