"""Asks a GPU's driver through NVIDIA's management library (NVML), without CUDA: its sensors, and its other users.

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
from operator import attrgetter
from statistics import fmean, median
from typing import Any, NamedTuple, TypeVar

import torch

from lm_profiler.record.run_record import GpuSharing, Telemetry

Value = TypeVar("Value")

# seconds to wait for NVML, which can hang on a GPU that fell off its bus
_PATIENCE_S = 5.0
_NOT_FOUND = 6  # nvml.h, NVML_ERROR_NOT_FOUND: no kernel ran on the GPU in the time that was asked for
_CLOCK_SM = 1  # nvml.h, nvmlClockType_t
_TEMPERATURE_GPU = 0  # nvml.h, nvmlTemperatureSensors_t
# NVML's units in SI units
_MHZ, _CELSIUS, _MILLIWATT, _MILLIJOULE = 1e6, 1.0, 1e-3, 1e-3
# nvml.h, nvmlClocksEventReasons. Idle (0x1) and clocks set by a user (0x2) are left out: they do not slow a run.
_HARDWARE = 0x8
_HARDWARE_THERMAL = 0x40
_POWER_BRAKE = 0x80
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
_LEAST_SHARE = 0.05  # share of the samples; a reason in fewer is left out


@dataclass(frozen=True)
class Gpu:
    """A GPU: its NVML handle, the module ``nvml`` to ask with, and its UUID."""

    handle: Any
    nvml: Any
    uuid: str

    def call(self, function: str, *arguments: Any) -> Any:
        """Return NVML's answer about this GPU; None if the GPU, driver or pynvml does not support ``function``."""
        try:
            return getattr(self.nvml, function)(self.handle, *arguments)
        except Exception:  # for example if the GPU is lost for a moment
            return None


def initialized(nvml: Any = None) -> Any:
    """Return ``nvml``, or else ``pynvml``, initialized; None if it is not installed or finds no driver."""
    try:
        nvml = nvml or importlib.import_module("pynvml")
        nvml.nvmlInit()  # never shut down: NVML counts its users, and handles must stay valid
    except Exception:
        return None
    return nvml


def gpu_of(
    device: torch.device, nvml: Any = None, properties: Any = None
) -> Gpu | None:
    """Return the GPU of a CUDA device; None for other vendors than NVIDIA, without NVML, and under MIG.

    Call it from the thread that uses CUDA. Tests pass ``nvml`` and the ``properties`` of the device.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    # CUDA and NVML number devices differently, and CUDA_VISIBLE_DEVICES is CUDA's alone: only the UUID is the same.
    if properties is None:
        properties = torch.cuda.get_device_properties(device)
    uuid = str(properties.uuid)
    if not uuid.startswith("GPU-"):
        uuid = f"GPU-{uuid}"
    nvml = initialized(nvml)
    try:
        gpu = Gpu(nvml.nvmlDeviceGetHandleByUUID(uuid), nvml, uuid)
    except Exception:
        return None
    # Under MIG, NVML has the figures of the whole card. If the GPU has no MIG, NVML reports no mode.
    mig_mode = gpu.call("nvmlDeviceGetMigMode")
    is_sliced = mig_mode is not None and bool(mig_mode[0])
    return None if is_sliced else gpu


def compute_capability(
    device: torch.device, nvml: Any = None
) -> tuple[int, int] | None:
    """Return a GPU's compute capability; None if unknown. It is not opened, so that this process can still fork."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    nvml = initialized(nvml)
    index = device.index or 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    try:
        name = str(index)
        if visible:
            name = visible.split(",")[index].strip()
        if name.isdecimal():
            handle = nvml.nvmlDeviceGetHandleByIndex(int(name))
        else:
            handle = nvml.nvmlDeviceGetHandleByUUID(name)
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    except Exception:
        return None
    return major, minor


def gpu_sharing(
    gpu: Gpu, since_s: float, patience_s: float = _PATIENCE_S
) -> GpuSharing | None:
    """Return the use of ``gpu`` by others after ``since_s`` (seconds since 1970, as NVML stamps its samples).

    None if NVML does not answer within ``patience_s``. A thread calls it, because it may hang.
    """
    readings: list[GpuSharing | None] = []

    def read() -> None:
        """Add the reading to ``readings``, since the result of a thread's function is dropped."""
        readings.append(_read_sharing(gpu, int(since_s * 1e6)))

    thread = threading.Thread(target=read, name="lm_profiler gpu", daemon=True)
    thread.start()
    thread.join(timeout=patience_s)
    return readings[0] if readings else None


def _read_sharing(gpu: Gpu, since_us: int) -> GpuSharing | None:
    """Return which other processes use the GPU, with their use of it since ``since_us``; None if unknown."""
    processes = gpu.call("nvmlDeviceGetComputeRunningProcesses")
    if not processes:
        return None
    bytes_by_pid = {process.pid: process.usedGpuMemory for process in processes}
    if os.getpid() not in bytes_by_pid:
        # Inside a container NVML has the host's process ids, or none. One of the processes is this one.
        return GpuSharing(
            processes=len(bytes_by_pid) - 1, utilisation=None, memory_bytes=None
        )
    del bytes_by_pid[os.getpid()]

    other_pids = set(bytes_by_pid)
    utilisation: float | None = None
    shares = _utilisation_by_process(gpu, since_us)
    if shares is not None:
        other_pids.update(shares)
        utilisation = min(sum(shares.values()), 1.0)
    memory_bytes: int | None = None
    if None not in bytes_by_pid.values():
        memory_bytes = sum(bytes_by_pid.values())
    return GpuSharing(
        processes=len(other_pids), utilisation=utilisation, memory_bytes=memory_bytes
    )


def _utilisation_by_process(gpu: Gpu, since_us: int) -> dict[int, float] | None:
    """Return, by process id, the share of time in which kernels of each other process ran; None if it is unknown.

    Processes without kernels are left out. ``since_us`` is in microseconds since 1970.
    """
    try:
        samples = gpu.nvml.nvmlDeviceGetProcessUtilization(gpu.handle, since_us)
    except Exception as error:
        ran_nothing = getattr(error, "value", None) == _NOT_FOUND
        return {} if ran_nothing else None
    shares: defaultdict[int, list[float]] = defaultdict(list)
    for sample in samples:
        is_other_process = sample.pid not in (0, os.getpid())
        if is_other_process and sample.timeStamp >= since_us:
            shares[sample.pid].append(sample.smUtil / 100)
    return {
        pid: fmean(pid_shares) for pid, pid_shares in shares.items() if any(pid_shares)
    }


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
    # the clock of the samples, in seconds
    clock: Callable[[], float] = time.perf_counter
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
        self._samples = deque(maxlen=self.kept)
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._collect,
            args=(self._samples, self._stopping),
            name="lm_profiler telemetry",
            daemon=True,
        )
        self._thread.start()

    def stop(self) -> Telemetry | None:
        """Stop with a last sample, and return the telemetry; None if not started.

        Energy counts up to here, so wait for the device first.
        """
        thread = self._thread
        self._thread = None
        if thread is None:
            return None
        self._stopping.set()
        thread.join(timeout=_PATIENCE_S)
        return _telemetry_of_samples([*self._samples], self.gpu.uuid)

    def readings_between(
        self, began_s: float, ended_s: float
    ) -> tuple[float | None, list[str] | None]:
        """Return the SM clock between two instants and its throttle reasons; None if there is no sample."""
        samples = list(self._samples)
        begin = bisect_left(samples, began_s, key=attrgetter("at_s"))
        end = bisect_left(samples, ended_s, key=attrgetter("at_s"))
        samples_between = samples[begin:end]
        clock_hz = _median(sample.sm_clock_hz for sample in samples_between)
        return clock_hz, _throttle_reasons(samples_between)

    def _collect(self, samples: deque[_Sample], stopping: threading.Event) -> None:
        """Add samples until ``stopping`` is set, and a last one then. Runs in the background thread."""
        samples.append(self._sample())
        while not stopping.wait(self.period_s):
            samples.append(self._sample())
        samples.append(self._sample())

    def _sample(self) -> _Sample:
        """Return the GPU's clocks, temperature, power and energy now; None for what it does not report."""
        reasons = self.gpu.call("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:  # drivers before 535 have it under its old name only
            reasons = self.gpu.call("nvmlDeviceGetCurrentClocksThrottleReasons")
        return _Sample(
            at_s=self.clock(),
            sm_clock_hz=self._call_in_si_units(
                _MHZ, "nvmlDeviceGetClockInfo", _CLOCK_SM
            ),
            max_sm_clock_hz=self._call_in_si_units(
                _MHZ, "nvmlDeviceGetMaxClockInfo", _CLOCK_SM
            ),
            temperature_c=self._call_in_si_units(
                _CELSIUS, "nvmlDeviceGetTemperature", _TEMPERATURE_GPU
            ),
            power_w=self._call_in_si_units(_MILLIWATT, "nvmlDeviceGetPowerUsage"),
            power_limit_w=self._call_in_si_units(
                _MILLIWATT, "nvmlDeviceGetEnforcedPowerLimit"
            ),
            reasons=reasons,
            energy_j=self._call_in_si_units(
                _MILLIJOULE, "nvmlDeviceGetTotalEnergyConsumption"
            ),
        )

    def _call_in_si_units(
        self, unit: float, function: str, *arguments: Any
    ) -> float | None:
        """Return NVML's answer in SI units; ``unit`` is the unit that NVML counts in."""
        answer = self.gpu.call(function, *arguments)
        return None if answer is None else answer * unit


def _telemetry_of_samples(samples: Sequence[_Sample], uuid: str) -> Telemetry | None:
    """Return what the samples of one GPU show: medians, the energy between first and last; None without samples."""
    if not samples:
        return None
    clock_hz = _median(sample.sm_clock_hz for sample in samples)
    highest_hz = _median(sample.max_sm_clock_hz for sample in samples)
    clock_share = None
    if clock_hz and highest_hz:
        clock_share = clock_hz / highest_hz
    energy_j = _energy_between(samples[0], samples[-1]) if len(samples) > 1 else None
    return Telemetry(
        samples=len(samples),
        duration_s=samples[-1].at_s - samples[0].at_s,
        median_sm_clock_hz=clock_hz,
        max_sm_clock_hz=highest_hz,
        clock_share=clock_share,
        median_temperature_c=_median(sample.temperature_c for sample in samples),
        median_power_w=_median(sample.power_w for sample in samples),
        power_limit_w=_median(sample.power_limit_w for sample in samples),
        energy_j=energy_j,
        energy_source=None if energy_j is None else "counter",
        throttle_reasons=_throttle_reasons(samples),
        gpus=[uuid],
    )


def _energy_between(first: _Sample, last: _Sample) -> float | None:
    """Return the energy in joules from the first sample to the last; None if it is unknown.

    The counter of energy may restart, and GPUs before Volta have none.
    """
    if first.energy_j is None or last.energy_j is None:
        return None
    if last.energy_j < first.energy_j:
        return None
    return last.energy_j - first.energy_j


def _median(values: Iterable[float | None]) -> float | None:
    """Return the median of the known values; None if there are none."""
    known_values = _without_none(values)
    return median(known_values) if known_values else None


def _throttle_reasons(samples: Sequence[_Sample]) -> list[str] | None:
    """Return the reasons why the GPU throttled in at least 5 % of the samples; None if no sample has reasons."""
    masks: list[int] = []
    for mask in _without_none(sample.reasons for sample in samples):
        # If NVML sets one of these two bits, it also sets the general bit, which adds no information.
        has_special_bit = bool(mask & (_HARDWARE_THERMAL | _POWER_BRAKE))
        masks.append(mask & ~_HARDWARE if has_special_bit else mask)
    if not masks:
        return None
    reasons: list[str] = []
    for bit, name in _REASONS.items():
        times = sum(bool(mask & bit) for mask in masks)
        if times / len(masks) >= _LEAST_SHARE:
            reasons.append(name)
    return reasons


def combine_telemetry(readings: Sequence[Telemetry | None]) -> Telemetry | None:
    """Combine all ranks' telemetry: sum of energy and power, slowest clock, highest temperature, all throttle reasons.

    A GPU that several ranks share counts once. A sum is unknown if one GPU's part is; clocks, temperature and
    reasons come from the GPUs that report them. None if no GPU can be read.
    """
    known_readings = _without_none(readings)
    if not known_readings:
        return None
    # one reading of each GPU, or of each set of GPUs whose readings were combined before
    by_gpus = {tuple(reading.gpus): reading for reading in known_readings}
    distinct_readings = list(by_gpus.values())
    slowest = min(distinct_readings, key=_clock_order)
    energy_j = None
    power_w = None
    power_limit_w = None
    all_were_read = len(known_readings) == len(readings)
    if all_were_read:
        energy_j = _sum_if_known(reading.energy_j for reading in distinct_readings)
        power_w = _sum_if_known(reading.median_power_w for reading in distinct_readings)
        power_limit_w = _sum_if_known(
            reading.power_limit_w for reading in distinct_readings
        )
    temperatures_c = _without_none(
        reading.median_temperature_c for reading in distinct_readings
    )
    throttle_reasons = None
    reasons_by_reading = _without_none(
        reading.throttle_reasons for reading in distinct_readings
    )
    if reasons_by_reading:
        throttle_reasons = list(dict.fromkeys(chain.from_iterable(reasons_by_reading)))
    total_duration_s = sum(reading.duration_s for reading in distinct_readings)
    return slowest.model_copy(
        update={
            "samples": min(reading.samples for reading in distinct_readings),
            "duration_s": total_duration_s / len(distinct_readings),
            "median_temperature_c": max(temperatures_c, default=None),
            "median_power_w": power_w,
            "power_limit_w": power_limit_w,
            "energy_j": energy_j,
            "energy_source": None if energy_j is None else "counter",
            "throttle_reasons": throttle_reasons,
            "gpus": list(
                chain.from_iterable(reading.gpus for reading in distinct_readings)
            ),
        }
    )


def _clock_order(reading: Telemetry) -> tuple[bool, float]:
    """Return a key that sorts slow clocks first, and unknown ones last."""
    return reading.clock_share is None, reading.clock_share or 0.0


def _without_none(values: Iterable[Value | None]) -> list[Value]:
    return [value for value in values if value is not None]


def _sum_if_known(values: Iterable[float | None]) -> float | None:
    """Return the sum; None if a value is unknown."""
    summands = list(values)
    if None in summands:
        return None
    return sum(_without_none(summands))
