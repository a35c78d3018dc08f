"""Asks a GPU's driver through NVIDIA's management library (NVML), without CUDA: its sensors, and who else uses it.

Any module named ``pynvml`` is used, also an old one, which lacks functions and constants of nvidia-ml-py. So any
exception means that the answer is unknown.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, median
from typing import Any, NamedTuple, TypeVar

import torch

from lm_profiler.record.run_record import GpuSharing, Telemetry

Value = TypeVar("Value")

_PATIENCE_S = 5.0  # seconds to wait for NVML, which can hang on a GPU that fell off its bus
_NOT_FOUND = 6  # nvml.h, NVML_ERROR_NOT_FOUND: nothing ran on the GPU since then
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
_SEEN_SHARE = 0.05  # share of the samples; a reason in fewer is left out


@dataclass(frozen=True)
class Gpu:
    """A GPU: its NVML handle, the module ``nvml`` to ask with, and its UUID."""

    handle: Any
    nvml: Any
    uuid: str

    def ask(self, function: str, *arguments: Any) -> Any:
        """Return NVML's answer about this GPU; None where the GPU, driver or pynvml does not support ``function``."""
        try:
            return getattr(self.nvml, function)(self.handle, *arguments)
        except Exception:  # also where the GPU is lost for a moment
            return None


def initialized(nvml: Any = None) -> Any:
    """Return ``nvml``, or else ``pynvml``, initialized; None where it is not installed or finds no driver."""
    try:
        nvml = nvml or importlib.import_module("pynvml")
        nvml.nvmlInit()  # never shut down: NVML counts its users, and handles must stay valid
    except Exception:
        return None
    return nvml


def gpu_of(device: torch.device, nvml: Any = None, properties: Any = None) -> Gpu | None:
    """Return the GPU of a CUDA device; None off NVIDIA, without NVML, and under MIG.

    Call it from the thread that uses CUDA. Tests hand in ``nvml`` and the ``properties`` of the device.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    # CUDA and NVML number devices differently, and CUDA_VISIBLE_DEVICES is CUDA's alone: only the UUID is the same.
    uuid = str((properties or torch.cuda.get_device_properties(device)).uuid)
    uuid = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
    nvml = initialized(nvml)
    try:
        gpu = Gpu(nvml.nvmlDeviceGetHandleByUUID(uuid), nvml, uuid)
    except Exception:
        return None
    # Under MIG NVML has the whole card's figures; it has no such mode where the GPU has no MIG.
    sliced = gpu.ask("nvmlDeviceGetMigMode")
    return None if sliced is not None and sliced[0] else gpu


def compute_capability(device: torch.device, nvml: Any = None) -> tuple[int, int] | None:
    """Return a GPU's compute capability; None where unknown. It is not opened, so that this process can still fork."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    nvml, at = initialized(nvml), device.index or 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    try:
        name = visible.split(",")[at].strip() if visible else str(at)
        by_number = name.isdecimal()
        handle = nvml.nvmlDeviceGetHandleByIndex(int(name)) if by_number else nvml.nvmlDeviceGetHandleByUUID(name)
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    except Exception:
        return None
    return major, minor


def gpu_sharing(gpu: Gpu, since_s: float, patience_s: float = _PATIENCE_S) -> GpuSharing | None:
    """Return the use of ``gpu`` by others after ``since_s`` (seconds since 1970, as NVML stamps its samples).

    None where NVML does not answer within ``patience_s``, hence the thread.
    """
    readings: list[GpuSharing | None] = []
    thread = threading.Thread(
        target=lambda: readings.append(_look(gpu, int(since_s * 1e6))), name="lm_profiler gpu", daemon=True
    )
    thread.start()
    thread.join(timeout=patience_s)
    return readings[0] if readings else None


def _look(gpu: Gpu, since_us: int) -> GpuSharing | None:
    processes = gpu.ask("nvmlDeviceGetComputeRunningProcesses")
    if processes is None:
        return None
    running = {each.pid: each.usedGpuMemory for each in processes}
    if os.getpid() not in running:
        # Inside a container NVML has the host's process ids, or none. One of the processes is this one.
        return GpuSharing(processes=len(running) - 1, utilisation=None, memory_bytes=None) if running else None
    del running[os.getpid()]
    used, held = _utilisation(gpu, since_us), list(running.values())
    return GpuSharing(
        processes=len(running.keys() | (used or {}).keys()),
        utilisation=None if used is None else min(sum(used.values()), 1.0),
        memory_bytes=None if None in held else sum(held),
    )


def _utilisation(gpu: Gpu, since_us: int) -> dict[int, float] | None:
    """Return the share of time in which kernels of each other process ran; processes without kernels are left out."""
    try:
        samples = gpu.nvml.nvmlDeviceGetProcessUtilization(gpu.handle, since_us)
    except Exception as error:
        return {} if getattr(error, "value", None) == _NOT_FOUND else None
    shares = defaultdict[int, list[float]](list)
    for sample in samples:
        if sample.pid not in (0, os.getpid()) and sample.timeStamp >= since_us:
            shares[sample.pid].append(sample.smUtil / 100)
    return {pid: fmean(seen) for pid, seen in shares.items() if any(seen)}


class _Sample(NamedTuple):
    at_s: float
    sm_clock_hz: float | None
    max_sm_clock_hz: float | None
    temperature_c: float | None
    power_w: float | None
    power_limit_w: float | None
    reasons: int | None
    energy_j: float | None


@dataclass(eq=False)
class TelemetrySampler:
    """Samples clock, temperature, power, energy and throttling of a GPU between ``start`` and ``stop``.

    Neither raises. The background thread enqueues nothing on the device.
    """

    gpu: Gpu
    period_s: float = 0.1  # seconds from one sample to the next
    clock: Callable[[], float] = time.perf_counter  # the clock of the samples, in seconds
    kept: int | None = None  # the number of last samples to keep; None keeps all

    def __post_init__(self) -> None:
        self._samples = deque[_Sample](maxlen=self.kept)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start sampling unless it runs already, and drop earlier samples."""
        if self._thread is not None:
            return
        # Both are new, so that an earlier thread that hangs in NVML cannot add to these samples.
        self._samples, self._stopping = deque(maxlen=self.kept), threading.Event()
        self._thread = threading.Thread(
            target=self._collect, args=(self._samples, self._stopping), name="lm_profiler telemetry", daemon=True
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
        thread.join(timeout=_PATIENCE_S)
        return _reading([*self._samples], self.gpu.uuid)

    def during(self, began_s: float, ended_s: float) -> tuple[float | None, list[str] | None]:
        """Return the SM clock between two instants and its throttle reasons; None where there is no sample."""
        samples = list(self._samples)
        at = [bisect_left(samples, instant, key=lambda sample: sample.at_s) for instant in (began_s, ended_s)]
        inside = samples[slice(*at)]
        return _median(sample.sm_clock_hz for sample in inside), _throttling(inside)

    def _collect(self, samples: deque[_Sample], stopping: threading.Event) -> None:
        samples.append(self._sample())
        while not stopping.wait(self.period_s):
            samples.append(self._sample())
        samples.append(self._sample())

    def _sample(self) -> _Sample:
        reasons = self.gpu.ask("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:  # drivers before 535 know it by its old name only
            reasons = self.gpu.ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        return _Sample(
            at_s=self.clock(),
            sm_clock_hz=self._ask(1e6, "nvmlDeviceGetClockInfo", _CLOCK_SM),
            max_sm_clock_hz=self._ask(1e6, "nvmlDeviceGetMaxClockInfo", _CLOCK_SM),
            temperature_c=self._ask(1.0, "nvmlDeviceGetTemperature", _TEMPERATURE_GPU),
            power_w=self._ask(1e-3, "nvmlDeviceGetPowerUsage"),
            power_limit_w=self._ask(1e-3, "nvmlDeviceGetEnforcedPowerLimit"),
            reasons=reasons,
            energy_j=self._ask(1e-3, "nvmlDeviceGetTotalEnergyConsumption"),
        )

    def _ask(self, unit: float, function: str, *arguments: Any) -> float | None:
        """Return NVML's answer in SI units; ``unit`` is the unit that NVML counts in."""
        answer = self.gpu.ask(function, *arguments)
        return None if answer is None else answer * unit


def _reading(samples: Sequence[_Sample], uuid: str) -> Telemetry | None:
    if not samples:
        return None
    first_j, last_j = samples[0].energy_j, samples[-1].energy_j
    energy_j = None  # the counter may restart, and GPUs before Volta have none
    if first_j is not None and last_j is not None and last_j >= first_j and len(samples) > 1:
        energy_j = last_j - first_j
    clock_hz, highest_hz = (_median(getattr(each, of) for each in samples) for of in ("sm_clock_hz", "max_sm_clock_hz"))
    return Telemetry(
        samples=len(samples),
        duration_s=samples[-1].at_s - samples[0].at_s,
        median_sm_clock_hz=clock_hz,
        max_sm_clock_hz=highest_hz,
        clock_share=clock_hz / highest_hz if clock_hz and highest_hz else None,
        median_temperature_c=_median(sample.temperature_c for sample in samples),
        median_power_w=_median(sample.power_w for sample in samples),
        power_limit_w=_median(sample.power_limit_w for sample in samples),
        energy_j=energy_j,
        energy_source=None if energy_j is None else "counter",
        throttle_reasons=_throttling(samples),
        gpus=[uuid],
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = _known(values)
    return median(known) if known else None


def _throttling(samples: Sequence[_Sample]) -> list[str] | None:
    masks = _known(sample.reasons for sample in samples)
    if not masks:
        return None
    # NVML sets the general bit along with either of these two, to which it adds nothing.
    masks = [mask & ~_HARDWARE if mask & (_HARDWARE_THERMAL | _POWER_BRAKE) else mask for mask in masks]
    shares = {name: sum(bool(mask & bit) for mask in masks) / len(masks) for bit, name in _REASONS.items()}
    return [name for name, share in shares.items() if share >= _SEEN_SHARE]


def together(readings: Sequence[Telemetry | None]) -> Telemetry | None:
    """Combine all ranks' telemetry: sum of energy and power, slowest clock, highest temperature, all throttle reasons.

    A GPU that several ranks share counts once. A sum is unknown if one GPU's part is; clocks, temperature and
    reasons come from the GPUs that report them. None where no GPU can be read.
    """
    known = _known(readings)
    if not known:
        return None
    cards = list({tuple(reading.gpus): reading for reading in known}.values())
    all_known = len(known) == len(readings)
    slowest = min(cards, key=lambda card: (card.clock_share is None, card.clock_share or 0.0))
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
            "energy_source": None if energy_j is None else "counter",
            "throttle_reasons": list(dict.fromkeys(chain(*reasons))) if reasons else None,
            "gpus": [gpu for card in cards for gpu in card.gpus],
        }
    )


def _known(values: Iterable[Value | None]) -> list[Value]:
    return [value for value in values if value is not None]


def _sum(values: Iterable[float | None]) -> float | None:
    known = list(values)
    return None if None in known else sum(_known(known))
