"""Peak rates of the hardware, the utilisation of a step, the floor of each phase, and texts about other programs.

A device must be in the table by the exact name that its driver reports. With a similar name ("NVIDIA H100 PCIe" for
"NVIDIA H100 80GB HBM3", a MIG slice for the whole GPU) figures could be wrong by a factor. If there is no figure of a
datasheet, the rate that was measured on the machine is used.

The floor of a phase is the larger of two times: its FLOPs at the peak, and its least bytes at the bandwidth. This is
the roofline model (Williams, Waterman and Patterson 2009), applied to a phase.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil, log2
from typing import Literal, NamedTuple

from lm_profiler.analysis.hardware.narrow_peaks import COLUMN_OF_DTYPE, NARROW_PEAKS
from lm_profiler.analysis.hardware.peak_table import ROWS
from lm_profiler.record.quantities import with_prefix
from lm_profiler.record.run_record import (
    SHARED,
    Contention,
    DtypeUse,
    Floor,
    FlopRate,
    Flops,
    GpuSharing,
    Rates,
    Telemetry,
    Utilisation,
)

Dtype = Literal["float32", "tf32", "bfloat16", "float16", "float8", "float4"]

MEASURED_PRODUCT = "a large matrix product, measured after the run"
GIVEN = "given with --peak_tflops"
MEASURED_COPY = "a large copy, measured after the run"

BEATEN = 1.05  # If a step is faster than a rate or a floor by more than this factor, that figure must be wrong.
LEAST_S = 1e-6  # floors below this have no meaning, because any launch of a kernel takes longer

_FLOAT32: dict[str, Dtype] = {"highest": "float32", "high": "tf32", "medium": "tf32"}
_DTYPES: dict[str, Dtype] = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    **COLUMN_OF_DTYPE,
}
# If other programs use this share of the CPU time, a note says so. Even if no thread waits for a CPU, they use caches
# and memory bandwidth, and lower the clock.
_LARGE_CPU_SHARE = 0.10
# Datasheets round their figures, so the clock that follows from them may exceed the highest one by this factor.
_ROUNDED = 1.02


class Rate(NamedTuple):
    """A rate of one device (FLOP/s, or bytes/s read and written), with the source of the figure."""

    per_s: float
    source: str


@dataclass(frozen=True)
class Work:
    """The work of a phase of one step on one device: FLOPs by dtype, bytes moved in its memory. None means unknown."""

    flops: Mapping[str, int] | None
    bytes: int | None
    on_the_bus: bool = False  # whether the bytes move between host and device, over a bus of unknown bandwidth


def bandwidth(device_name: str) -> Rate | None:
    """Return the memory bandwidth of a device; None if unknown."""
    row = _BY_NAME.get(_normalised(device_name))
    if row is None or row.memory is None:
        return None
    return Rate(row.memory * 1e9, row.memory_source or row.source)


def peak(device_name: str, dtype: Dtype) -> Rate | None:
    """Return the peak of a device for dense matrix products in ``dtype``; None if it is not published."""
    name = _normalised(device_name)
    is_narrow = dtype in COLUMN_OF_DTYPE.values()
    row = _NARROW_BY_NAME.get(name) if is_narrow else _BY_NAME.get(name)
    teraflops: float | None = getattr(row, dtype, None)
    if row is None or teraflops is None:
        return None
    return Rate(teraflops * 1e12, row.source)


def _normalised(name: str) -> str:
    """Return ``name`` in lower case, with single blanks, and without "NVIDIA", which older drivers omit."""
    return " ".join(name.split()).casefold().removeprefix("nvidia ")


_BY_NAME = {_normalised(name): row for row in ROWS for name in row.names}
_NARROW_BY_NAME = {_normalised(name): peaks for name, peaks in NARROW_PEAKS.items()}


def matmul_dtype(
    precision: str, float32_matmul_precision: str = "highest"
) -> Dtype | None:
    """Return the dtype in which a Lightning ``precision`` multiplies matrices; None if no peak is tabulated for it.

    ``float32_matmul_precision`` is torch's: "high" and "medium" let float32 products run in TF32.
    """
    kind = str(precision).split("-")[0]
    if kind == "32":
        return _FLOAT32.get(float32_matmul_precision)
    return {"bf16": "bfloat16", "16": "float16"}.get(kind)  # type: ignore[return-value]


def narrow_dtype(name: str | None) -> Dtype | None:
    """Return the dtype of products of factors with torch's dtype ``name``, if it has 8 or 4 bits; otherwise None."""
    return COLUMN_OF_DTYPE.get(name or "")


def is_rate_of(rate: FlopRate, dtype: str) -> bool:
    """Return whether ``rate`` is that of products in ``dtype``."""
    return rate.dtype == torch_name(dtype) or narrow_dtype(rate.dtype) == dtype


def torch_name(dtype: str) -> str:
    """Return torch's name of the dtype of the factors of products in ``dtype``: for TF32 these are float32."""
    return "float32" if dtype == "tf32" else dtype


def rates_of(
    device_name: str,
    measured: Mapping[str, float | None],
    copied_bytes_per_s: float | None,
    float32_as: Dtype | None = "float32",
    given: Mapping[str, float] | None = None,
) -> Rates:
    """Return the rates of a device: those stated by the user, or of its datasheet, or else measured.

    Args:
        device_name: as its driver reports it.
        measured: the measured FLOP/s by torch's names of dtypes (None: not measured).
        copied_bytes_per_s: the measured bytes per second.
        float32_as: the dtype in which float32 is multiplied.
        given: the FLOP/s stated by the user, by torch's names of dtypes.
    """
    flops = []
    for dtype, measured_flops_per_s in measured.items():
        rate = _sheet_rate(device_name, dtype, float32_as)
        if given and dtype in given:
            rate = Rate(given[dtype], GIVEN)
        if rate is None and measured_flops_per_s is not None:
            rate = Rate(measured_flops_per_s, MEASURED_PRODUCT)
        if rate is not None:
            flops.append(
                FlopRate(dtype=dtype, flops_per_s=rate.per_s, source=rate.source)
            )
    memory = bandwidth(device_name)
    if memory is None and copied_bytes_per_s is not None:
        memory = Rate(copied_bytes_per_s, MEASURED_COPY)
    return Rates(
        flops=flops,
        bytes_per_s=None if memory is None else memory.per_s,
        bytes_source=None if memory is None else memory.source,
        copied_bytes_per_s=copied_bytes_per_s,
    )


def _sheet_rate(device_name: str, dtype: str, float32_as: Dtype | None) -> Rate | None:
    """Return the datasheet's peak for products of factors in ``dtype``; None if it states none."""
    sheet_dtype = float32_as if dtype == "float32" else _DTYPES.get(dtype)
    return None if sheet_dtype is None else peak(device_name, sheet_dtype)


def mean_rate(floors: Iterable[Floor], rates: Rates, usual: FlopRate) -> float:
    """Return the mean FLOP/s of all matrix products at the rates of their dtypes; ``usual`` if one rate is unknown."""
    flops_by_dtype: Counter[str] = Counter()
    for floor in floors:
        flops_by_dtype.update(floor.flops)
    seconds = least_compute_s(flops_by_dtype, rates)
    return flops_by_dtype.total() / seconds if seconds else usual.flops_per_s


def clock_share(
    telemetry: Telemetry | None, rate: FlopRate, multiprocessors: int | None
) -> float | None:
    """Return the ratio of the measured clock rate to that of the datasheet; None if unknown, and for measured rates."""
    if rate.source in (MEASURED_PRODUCT, GIVEN) or telemetry is None:
        return None
    if not telemetry.median_sm_clock_hz or not telemetry.max_sm_clock_hz:
        return None
    stated_hz = sheet_clock_hz(
        rate.flops_per_s, multiprocessors or 0, telemetry.max_sm_clock_hz
    )
    if stated_hz is None:
        return None
    return telemetry.median_sm_clock_hz / stated_hz


def sheet_clock_hz(
    peak_flops_per_s: float, multiprocessors: int, max_clock_hz: float
) -> float | None:
    """Return the clock at which a device with these ``multiprocessors`` has its datasheet's dense peak.

    The number of FLOPs that the matrix units of a multiprocessor do per clock cycle is a power of two. (NVIDIA, in
    fp16: 1024 on Volta, 2048 on GA100, 4096 on GH100, at most half of that on consumer chips. AMD's CDNA is alike.) So
    the clock follows from the peak, up to a factor of two. It is the one in the upper half of the card's clocks: the
    989.4 TFLOP/s of an H100 SXM in bf16 assume 1830 MHz, although it may run at 1980.
    """
    if not (peak_flops_per_s > 0 and multiprocessors > 0 and max_clock_hz > 0):
        return None
    multiprocessor_flops_per_s = peak_flops_per_s / multiprocessors
    # the least power of two with which the clock is not above the highest one
    least_flops_per_clock = multiprocessor_flops_per_s / (max_clock_hz * _ROUNDED)
    flops_per_clock: float = 2 ** ceil(log2(least_flops_per_clock))
    return multiprocessor_flops_per_s / flops_per_clock


def share_of_peak(
    flops_per_step: float | None,
    step_s: float | None,
    peak_flops_per_s: float | None,
    devices: int = 1,
) -> float | None:
    """Return MFU or HFU, depending on the FLOPs (Chowdhery et al. 2022, "PaLM", appendix B).

    FLOPs are those of one step over all ``devices``: those that the model needs (MFU), or these and what activation
    checkpointing computes again (HFU). The peak is that of one device. None if any figure is unknown.
    """
    if flops_per_step is None or step_s is None or peak_flops_per_s is None:
        return None
    return flops_per_step / (step_s * peak_flops_per_s * devices)


def judge_utilisation(
    flops: Flops,
    step_s: float,
    device_name: str,
    dtype: Dtype | None,
    devices: int,
    ceiling_flops_per_s: float | None,
    peak_flops_per_s: float | None,
) -> Utilisation:
    """Return the shares of the devices' peak and of their measured ceiling that a step reaches.

    Args:
        flops: the FLOPs of a step, over all ranks.
        step_s: the seconds of a step.
        device_name: the name of each device, by which its peak is looked up.
        dtype: the dtype of the products; None if it is unknown.
        devices: the number of devices.
        ceiling_flops_per_s: the rate that one device reached in a measurement; None if there was none.
        peak_flops_per_s: the peak of one device, if the user gave it.
    """
    peak_rate = None
    if peak_flops_per_s is not None:
        peak_rate = Rate(peak_flops_per_s, GIVEN)
    elif dtype is not None:
        peak_rate = peak(device_name, dtype)
    rate = None
    source = None
    if peak_rate is not None:
        rate = peak_rate.per_s
        source = peak_rate.source

    # the same ratio as for a peak, with the measured rate in its place
    share_of_ceiling = share_of_peak(flops.all, step_s, ceiling_flops_per_s, devices)
    if share_of_ceiling is not None and share_of_ceiling > BEATEN:
        # No step beats the machine: something else used it while the ceiling was measured.
        ceiling_flops_per_s = None
        share_of_ceiling = None
    return Utilisation(
        flops=flops,
        dtype=dtype,
        peak_flops_per_s=rate,
        peak_source=source,
        mfu=share_of_peak(flops.model, step_s, rate, devices),
        hfu=share_of_peak(flops.all, step_s, rate, devices),
        ceiling_flops_per_s=ceiling_flops_per_s,
        of_ceiling=share_of_ceiling,
    )


def with_uses_by_dtype(
    use: Utilisation,
    flops_by_dtype: Mapping[str, int],
    rates: Rates,
    step_s: float,
    devices: int,
) -> Utilisation:
    """Return ``use`` with the MFU of each dtype at its own peak, and their sum, if it multiplies in several dtypes.

    ``flops_by_dtype`` are those of one rank, recomputation included. They show how the model's FLOPs are divided among
    dtypes. The sum is unknown if one of the peaks is.
    """
    total = sum(flops_by_dtype.values())
    if len(flops_by_dtype) < 2 or not total:
        return use
    uses: list[DtypeUse] = []
    for dtype, count in flops_by_dtype.items():
        flops = use.flops.model * count / total
        peak_flops_per_s = _peak_of_dtype(dtype, rates)
        mfu = share_of_peak(flops, step_s, peak_flops_per_s, devices)
        uses.append(
            DtypeUse(
                dtype=dtype,
                flops=round(flops),
                peak_flops_per_s=peak_flops_per_s,
                mfu=mfu,
            )
        )
    shares = [dtype_use.mfu for dtype_use in uses if dtype_use.mfu is not None]
    mixed_mfu = sum(shares) if len(shares) == len(uses) else None
    return use.model_copy(update={"by_dtype": uses, "mixed_mfu": mixed_mfu})


def _peak_of_dtype(dtype: str, rates: Rates) -> float | None:
    """Return the peak of a dtype; None if its rate is unknown or was measured, which is less than the peak."""
    for rate in rates.flops:
        if rate.dtype == dtype:
            return None if rate.source == MEASURED_PRODUCT else rate.flops_per_s
    return None


def per_second(count: float | None, step_s: float | None) -> float | None:
    """Return ``count`` of a step, over all devices, per second; None if either is unknown."""
    if count is None or step_s is None:
        return None
    return count / step_s


def floor_of(work: Work, rates: Rates, took_s: float | None) -> Floor:
    """Return the least time of a phase's work (its roofline floor), and whether computing or memory sets it.

    ``took_s`` is the measured time of the phase. If it is shorter than the FLOPs take at the peak, the peak is not that
    of the device, and the phase has no floor.
    """
    floor_without_time = Floor(flops=dict(work.flops or {}), bytes=work.bytes)
    compute_s = least_compute_s(work.flops, rates)
    if compute_s is None or _is_beaten(compute_s, took_s):
        return floor_without_time
    seconds, bound = _seconds_and_bound(compute_s, _memory_s(work, rates), took_s)
    if seconds is None:
        return floor_without_time
    times = None
    if took_s is not None and seconds >= LEAST_S:
        times = took_s / seconds
    figures = {"seconds": seconds, "bound": bound, "times": times}
    return floor_without_time.model_copy(update=figures)


def _memory_s(work: Work, rates: Rates) -> float | None:
    """Return the seconds that moving the bytes takes at the memory's bandwidth; None if either is unknown."""
    # ``rates`` has the bandwidth of the device's memory, not that of the bus between host and device.
    if work.bytes is None or work.on_the_bus or not rates.bytes_per_s:
        return None
    return work.bytes / rates.bytes_per_s


def _seconds_and_bound(
    compute_s: float, memory_s: float | None, took_s: float | None
) -> tuple[float | None, str | None]:
    """Return the longer of two least times, and which of them it is; None for what is unknown.

    ``compute_s`` is 0 if the phase has no FLOPs.
    """
    if memory_s is not None and not _is_beaten(memory_s, took_s):
        if memory_s > compute_s:
            return memory_s, "memory"
        if compute_s == 0.0:
            # Nothing sets the floor of a phase without any work.
            return 0.0, None
        return compute_s, "compute"
    if compute_s == 0.0:
        return None, None
    if memory_s is None:
        # Moving the bytes might take longer than the FLOPs, so the bound is unknown.
        return compute_s, None
    # The phase took less time than its bytes would take from memory, so they were in caches. Only FLOPs count then.
    return compute_s, "compute"


def beaten_floors(
    work: Mapping[str, Work], rates: Rates, took_s: Mapping[str, float | None]
) -> list[str]:
    """Return a note on the phases that have no floor because they beat it."""
    beaten_phases = []
    for phase, phase_work in work.items():
        phase_s = took_s.get(phase)
        if not phase_s:
            continue
        least_s = floor_of(phase_work, rates, took_s=None).seconds
        checked_s = floor_of(phase_work, rates, phase_s).seconds
        if least_s is not None and checked_s is None:
            beaten_phases.append(phase)
    if not beaten_phases:
        return []
    rate_texts = []
    for rate in rates.flops:
        rate_texts.append(
            f"{with_prefix(rate.flops_per_s, 'FLOP/s')} in {rate.dtype} ({rate.source})"
        )
    if rates.bytes_per_s:
        rate_texts.append(
            f"{with_prefix(rates.bytes_per_s, 'B/s')} ({rates.bytes_source})"
        )
    needed = (
        f"at {', '.join(rate_texts)}, FLOPs or bytes would take longer than measured"
    )
    return [
        (
            f"no floor is shown for {', '.join(beaten_phases)}: {needed}; either data came from caches, or a rate is "
            "too low"
        )
    ]


def least_compute_s(flops: Mapping[str, int] | None, rates: Rates) -> float | None:
    """Return seconds of matmuls run one after the other; None if FLOPs or rate of a dtype are unknown."""
    if flops is None:
        return None
    seconds = 0.0
    for dtype, count in flops.items():
        rate = rates.flops_per_s(dtype)
        if rate is None:
            return None
        seconds += count / rate
    return seconds


def _is_beaten(floor_s: float, took_s: float | None) -> bool:
    """Return whether a phase took clearly less time than a floor, so that this figure must be wrong."""
    return took_s is not None and floor_s > BEATEN * took_s


def contention_lines(contention: Contention | None) -> list[str]:
    """Return a phrase for each thing that took CPU time or GPU from the run; empty if nothing did, or it is unknown."""
    if contention is None:
        return []
    phrases = []
    cpu_time_s = contention.wall_s * contention.cpus
    others_s = contention.others_s or 0.0
    if (contention.not_had or 0.0) >= SHARED:
        phrases.append(
            f"shared machine, times are upper bounds: other processes took {contention.not_had:.0%} of the CPU time "
            "that this run needed"
        )
    elif others_s >= _LARGE_CPU_SHARE * cpu_time_s:
        phrases.append(
            f"other processes used {others_s / cpu_time_s:.0%} of this machine's CPU time"
        )
    throttled_s = contention.throttled_s or 0.0
    if contention.had_s > 0.0 and throttled_s >= SHARED * contention.had_s:
        phrases.append(
            f"the CPU limit of the run's cgroup throttled it for {throttled_s:.1f} s"
        )
    if contention.gpu is not None and contention.gpu.processes:
        phrases.append(_gpu_sharing_text(contention.gpu))
    return phrases


def _gpu_sharing_text(gpu: GpuSharing) -> str:
    """Return how many other processes are on the GPU, and how much of it they use."""
    processes = "1 other process"
    if gpu.processes != 1:
        processes = f"{gpu.processes} other processes"
    time_share = "unknown use"
    if gpu.utilisation is not None:
        time_share = f"{gpu.utilisation:.0%}"
    memory = "unknown memory"
    if gpu.memory_bytes is not None:
        memory = f"{gpu.memory_bytes * 2**-30:.1f} GiB"
    return f"{processes} on this GPU: {time_share} of the GPU's time, {memory}"
