"""Samples clock, temperature, power, energy and throttling of an NVIDIA GPU in a background thread.

The thread asks NVML only, which needs no CUDA context and enqueues nothing on the device.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from statistics import median
from typing import Any, Literal, NamedTuple, TypeVar

from lm_profiler.measure.device.nvml import Gpu
from lm_profiler.record.run import Telemetry

Value = TypeVar("Value")

_CLOCK_SM, _TEMPERATURE_GPU = 1, 0  # nvml.h, nvmlClockType_t and nvmlTemperatureSensors_t
# nvml.h, nvmlClocksEventReasons. Idle (0x1) and clocks set by a user (0x2) are left out: they do not slow a run.
_HARDWARE, _HARDWARE_THERMAL, _POWER_BRAKE = 0x8, 0x40, 0x80
_REASONS = {
    0x4: "power cap",
    _HARDWARE: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal (software)",
    _HARDWARE_THERMAL: "thermal (hardware)",
    _POWER_BRAKE: "power brake",
    0x100: "display clock setting",
    0x200: "board limit",
    0x400: "reliability limit",
}
_SEEN_SHARE = 0.05  # of the samples; a reason that held in fewer is left out


class _Sample(NamedTuple):
    at_s: float
    sm_clock_hz: float | None
    temperature_c: float | None
    power_w: float | None
    reasons: int | None
    energy_j: float | None


@dataclass
class _Log:
    """The samples and constants that one thread collects."""

    samples: list[_Sample] = field(default_factory=list)
    max_sm_clock_hz: float | None = None
    power_limit_w: float | None = None


@dataclass(eq=False)
class TelemetrySampler:
    """Samples one GPU in the background between ``start`` and ``stop``, neither of which raises."""

    gpu: Gpu  # the GPU
    period_s: float = 0.1  # seconds from one sample to the next
    clock: Callable[[], float] = time.perf_counter  # the clock of the samples, in seconds

    def __post_init__(self) -> None:
        self._log = _Log()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start sampling unless it runs already, and drop earlier samples."""
        if self._thread is not None:
            return
        # Both are new, so that an earlier thread that hangs in NVML cannot write into this log.
        self._log, self._stopping = _Log(), threading.Event()
        self._thread = threading.Thread(
            target=self._collect, args=(self._log, self._stopping), name="lm_profiler telemetry", daemon=True
        )
        self._thread.start()

    def stop(self) -> Telemetry | None:
        """Stop with a last sample, and return the telemetry; None if not started.

        Energy counts up to here, so wait for the device first.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return None
        self._stopping.set()
        thread.join(timeout=5.0)  # NVML can hang on a GPU that fell off its bus; the thread is a daemon
        return _reading(self._log, self.gpu.uuid)

    def during(self, began_s: float, ended_s: float) -> tuple[float | None, list[str] | None]:
        """Return the SM clock between two instants and its throttle reasons; None where there is no sample."""
        samples = list(self._log.samples)
        at = [bisect_left(samples, instant, key=lambda sample: sample.at_s) for instant in (began_s, ended_s)]
        inside = samples[slice(*at)]
        reasons = _throttling([sample.reasons for sample in inside if sample.reasons is not None])
        return _median(sample.sm_clock_hz for sample in inside), reasons

    def _collect(self, log: _Log, stopping: threading.Event) -> None:
        log.max_sm_clock_hz = self._ask(1e6, "nvmlDeviceGetMaxClockInfo", _CLOCK_SM)
        log.power_limit_w = self._ask(1e-3, "nvmlDeviceGetEnforcedPowerLimit")
        log.samples.append(self._sample())
        while not stopping.wait(self.period_s):
            log.samples.append(self._sample())
        log.samples.append(self._sample())

    def _sample(self) -> _Sample:
        reasons = self.gpu.ask("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:  # drivers before 535 know it by its old name only
            reasons = self.gpu.ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        return _Sample(
            at_s=self.clock(),
            sm_clock_hz=self._ask(1e6, "nvmlDeviceGetClockInfo", _CLOCK_SM),
            temperature_c=self._ask(1.0, "nvmlDeviceGetTemperature", _TEMPERATURE_GPU),
            power_w=self._ask(1e-3, "nvmlDeviceGetPowerUsage"),
            reasons=reasons,
            energy_j=self._ask(1e-3, "nvmlDeviceGetTotalEnergyConsumption"),
        )

    def _ask(self, unit: float, function: str, *arguments: Any) -> float | None:
        """Return NVML's answer in SI units; ``unit`` is the unit that NVML counts in."""
        answer = self.gpu.ask(function, *arguments)
        return None if answer is None else answer * unit


def _reading(log: _Log, uuid: str) -> Telemetry | None:
    samples = list(log.samples)
    if not samples:
        return None
    energy_j, source = _energy(samples)
    clock_hz, highest_hz = _median(sample.sm_clock_hz for sample in samples), log.max_sm_clock_hz
    return Telemetry(
        samples=len(samples),
        duration_s=samples[-1].at_s - samples[0].at_s,
        median_sm_clock_hz=clock_hz,
        max_sm_clock_hz=highest_hz,
        clock_share=clock_hz / highest_hz if clock_hz and highest_hz else None,
        median_temperature_c=_median(sample.temperature_c for sample in samples),
        median_power_w=_median(sample.power_w for sample in samples),
        power_limit_w=log.power_limit_w,
        energy_j=energy_j,
        energy_source=source,
        throttle_reasons=_throttling([sample.reasons for sample in samples if sample.reasons is not None]),
        gpus=[uuid],
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = _known(values)
    return median(known) if known else None


def _energy(samples: Sequence[_Sample]) -> tuple[float | None, Literal["counter", "power samples"] | None]:
    first, last = samples[0].energy_j, samples[-1].energy_j
    if first is not None and last is not None and last >= first and len(samples) > 1:
        return last - first, "counter"
    # Without a counter, or where it started anew, power is integrated over time (trapezoidal rule).
    powers = [(sample.at_s, sample.power_w) for sample in samples if sample.power_w is not None]
    if len(powers) < 2:
        return None, None
    return sum((p + q) / 2 * (t - s) for (s, p), (t, q) in pairwise(powers)), "power samples"


def _throttling(masks: Sequence[int]) -> list[str] | None:
    if not masks:
        return None
    # NVML sets the general bit along with either of these two, to which it adds nothing.
    masks = [mask & ~_HARDWARE if mask & (_HARDWARE_THERMAL | _POWER_BRAKE) else mask for mask in masks]
    shares = {name: sum(bool(mask & bit) for mask in masks) / len(masks) for bit, name in _REASONS.items()}
    return [name for name, share in shares.items() if share >= _SEEN_SHARE]


def together(readings: Sequence[Telemetry | None]) -> Telemetry | None:
    """Combine all ranks' telemetry: sum of energy and power, slowest clock, highest temperature, all throttle reasons.

    A GPU that several ranks share counts once. A sum is unknown where one GPU's part is; clocks, temperature and
    reasons come from the GPUs that report them. None where no GPU can be read.
    """
    known = _known(readings)
    if not known:
        return None
    cards = list({tuple(reading.gpus): reading for reading in known}.values())
    all_known = len(known) == len(readings)
    slowest = min(cards, key=lambda card: (card.clock_share is None, card.clock_share or 0.0))
    sources = {card.energy_source for card in cards}
    energy_j = _sum(card.energy_j for card in cards) if all_known else None
    reasons = _known(card.throttle_reasons for card in cards)
    return slowest.model_copy(
        update={
            "samples": min(card.samples for card in cards),
            "duration_s": sum(card.duration_s for card in cards) / len(cards),
            "median_temperature_c": max(_known(card.median_temperature_c for card in cards), default=None),
            "median_power_w": _sum(card.median_power_w for card in cards) if all_known else None,
            "power_limit_w": _sum(card.power_limit_w for card in cards) if all_known else None,
            "energy_j": energy_j,
            "energy_source": None if energy_j is None else "counter" if sources == {"counter"} else "power samples",
            "throttle_reasons": list(dict.fromkeys(chain(*reasons))) if reasons else None,
            "gpus": [gpu for card in cards for gpu in card.gpus],
        }
    )


def _known(values: Iterable[Value | None]) -> list[Value]:
    return [value for value in values if value is not None]


def _sum(values: Iterable[float | None]) -> float | None:
    known = list(values)
    return None if None in known else sum(_known(known))
