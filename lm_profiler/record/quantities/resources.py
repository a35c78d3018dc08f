"""Figures of what a run used: the hardware's peak, memory, the GPU, the machine's CPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lm_profiler.record.parts import PARTS
from lm_profiler.record.quantities.quantity import Place, Quantity, at, computed, figure, figures_of
from lm_profiler.record.quantities.times import MEMORY, MFU, per_step
from lm_profiler.record.run import MemoryCauses, RunRecord


def _added(after: str, before: str) -> Callable[[RunRecord], int | None]:
    """How much more is held at one moment of a step than at another."""

    def get(record: RunRecord) -> int | None:
        more, less = (at(f"memory.held.{moment}")(record) for moment in (after, before))
        return None if more is None or less is None else more - less

    return get


_PEAK = "FLOP/s of one device on its datasheet, in the run's precision"
_CEILING = "FLOP/s of one device in a large matrix product, measured after the run"
_BANDWIDTH = "bytes/s that the memory of one device can read and write, on its datasheet or else copying"
_COPIED = "bytes/s that a large copy on one device read and wrote, measured after the run"
_AGAIN = "FLOPs of a step that activation checkpointing repeats, all ranks"
_OF_CEILING = "executed FLOPs of a step / (its time x the device's measured matmul rate)"

UTILISATION = (
    MFU,
    per_step("utilisation.hfu", "HFU", "%", "all executed FLOPs of a step / (its time x the device's peak)"),
    *figures_of(
        "utilisation",
        ("peak_flops_per_s", "peak of a device", "TFLOP/s", _PEAK),
        ("dtype", "dtype of the peak", "text", "precision that the peak is of", "peak_dtype"),
        ("peak_source", "source of the peak", "text", "where the peak of a device is from"),
        ("ceiling_flops_per_s", "measured matmul rate", "TFLOP/s", _CEILING),
    ),
    *figures_of(
        "rates",
        ("bytes_per_s", "memory bandwidth", "GB/s", _BANDWIDTH, "bandwidth_bytes_per_s"),
        ("bytes_source", "source of the bandwidth", "text", "where the memory bandwidth is from", "bandwidth_source"),
        ("copied_bytes_per_s", "measured copy rate", "GB/s", _COPIED),
    ),
    per_step("utilisation.of_ceiling", "of the measured matmul rate", "%", _OF_CEILING),
    *figures_of(
        "utilisation.flops",
        ("forward", "forward work", "GFLOP", "FLOPs of a step's forward, all ranks", "forward_flops"),
        ("backward", "backward work", "GFLOP", "FLOPs of a step's backward, all ranks", "backward_flops"),
        ("recomputation", "recomputed work", "GFLOP", _AGAIN, "recomputation_flops"),
    ),
)

CAUSES = {cause: cause.replace("_", " ") for cause in MemoryCauses.model_fields}
"""What memory is taken for, and what that is called."""

_SAVED, _LESS = "bytes that forward leaves for backward", "what backward added: gradients, less what was saved for it"
_HOW_HELD = "`allocator`: all tensors of the device; `counted`: parameters, gradients, states, buffers, saved tensors"

HELD = (
    computed("saved_bytes", "saved for backward", "GiB", _SAVED, _added("forward", "start")),
    computed("backward_added_bytes", "added by backward", "GiB", _LESS, _added("backward", "forward")),
    *figures_of(
        "memory.held",
        ("start", "held: forward begins", "GiB", "bytes held when forward begins", "held_start_bytes"),
        ("forward", "held: forward has ended", "GiB", "bytes held when forward has ended", "held_forward_bytes"),
        ("backward", "held: backward has ended", "GiB", "bytes held when backward has ended", "held_backward_bytes"),
        ("source", "source of held", "text", _HOW_HELD, "held_source"),
    ),
)


def _over_planned(record: RunRecord) -> float | None:
    """Peaks where the device tells them; what forward left otherwise: a process's resident size is no judge."""
    planned, memory = record.planned, record.memory
    if planned is None or memory is None:
        return None
    pairs = [(memory.measured.allocated_peak, planned.peak)]
    if memory.held is not None and planned.held is not None and memory.held.source == planned.held.source:
        pairs.append((memory.held.forward, planned.held.forward))
    return next((measured / whole for measured, whole in pairs if measured is not None and whole), None)


_OVER = "peak allocated over the planned one; where the device does not tell it, what forward left over what it should"
_RESERVED = "what the allocator of a GPU would take of it, gaps between blocks included, if that is not short"
_FREE = "what one replica could have had when the run began"

PLANNED = (
    replace(
        computed("planned_peak_bytes", "planned peak", "GiB", "most bytes at one time, rehearsed", at("planned.peak")),
        place=Place.TABLE,
    ),
    computed("planned_phase", "phase of the planned peak", "text", "where the peak would be", at("planned.phase")),
    computed("measured_over_planned", "measured / planned", "x", _OVER, _over_planned),
    *figures_of(
        "planned",
        ("reserved", "planned reserved", "GiB", _RESERVED, "planned_reserved_bytes"),
        ("available", "free before the run", "GiB", _FREE, "available_bytes"),
        ("unknown", "not planned", "text", "why it could not be rehearsed", "planned_unknown"),
    ),
    *figures_of(
        "planned.at_peak",
        *(
            (cause, f"planned {words}", "GiB", "of the planned peak", f"planned_{cause}_bytes")
            for cause, words in CAUSES.items()
        ),
    ),
    *figures_of(
        "planned.held",
        *(
            (moment, f"planned: {when}", "GiB", f"bytes that would be held when {when}", f"planned_{moment}_held_bytes")
            for moment, when in (
                ("start", "forward begins"),
                ("forward", "forward has ended"),
                ("backward", "backward has ended"),
            )
        ),
        ("source", "source of planned levels", "text", _HOW_HELD, "planned_held_source"),
    ),
    *(
        figure(f"planned.peaks.{part}", f"{part}: planned", "GiB", "planned peak within", f"{part}_planned_peak_bytes")
        for part in PARTS
    ),
)


def _of_part(part: str, where: str, field: str, title: str, meaning: str) -> Quantity:
    path, name = f"memory.{where}.{part}.{field}", f"{part}_{field}_bytes"
    return figure(path, f"{part}: {title}", "GiB", f"{meaning} {part}", name, of=part, place=Place.ASKED)


MEMORY_BY_PHASE = [
    _of_part(part, "parts", reading, whole.title, f"{whole.title} within")
    for reading, whole in MEMORY.items()
    for part in PARTS
]
MEMORY_BY_CAUSE = [
    _of_part(part, "causes", cause, words, f"{words} in the peak allocated of")
    for cause, words in CAUSES.items()
    for part in PARTS
]

_ALLOCATOR_BYTES = {
    "allocated_peak": ("allocated", "most bytes held by tensors over the measured steps"),
    "requested_peak": ("requested", "the same before the allocator rounds it up to its blocks"),
    "active_peak": ("in use", "most bytes in use, blocks that wait for a stream included"),
    "reserved_peak": ("reserved", "most bytes taken from the device"),
    "inactive_split_peak": ("inactive split", "most bytes free in blocks that are partly in use"),
    "fragmentation": ("fragmentation", "upper bound of what was reserved but unused at the peak of use"),
    "driver_used": ("used on the device", "memory that all processes use, as the driver reports"),
}

ALLOCATOR = figures_of(
    "memory.allocator",
    *((field, title, "GiB", told, f"allocator_{field}_bytes") for field, (title, told) in _ALLOCATOR_BYTES.items()),
    ("alloc_retries", "retries", "count", "how often the allocator had to free its cache, since the process began"),
    ("ooms", "OOMs", "count", "how often memory ran out, since the process began"),
)

_CARDS = "cards of the run: energy and power are their sums, clocks the slowest's, the temperature the highest"

GPU = (
    computed("gpus", "GPUs", "count", _CARDS, lambda record: (record.telemetry and len(record.telemetry.gpus)) or None),
    *figures_of(
        "telemetry",
        ("energy_per_step_j", "energy per step", "J", "energy of the GPU over the measured steps / their number"),
        ("energy_per_token_j", "energy per token", "J", "energy of a step / its tokens"),
        ("energy_j", "energy", "J", "energy of the GPU over the measured steps"),
        ("energy_source", "source of the energy", "text", "the GPU's own counter, or samples of its power"),
        ("median_power_w", "power", "W", "median power of the GPU over the measured steps"),
        ("power_limit_w", "power limit", "W", "most power that the GPU may draw"),
        ("median_temperature_c", "temperature", "°C", "median temperature of the GPU"),
        ("median_sm_clock_hz", "SM clock", "MHz", "median clock of the GPU's multiprocessors"),
        ("max_sm_clock_hz", "highest SM clock", "MHz", "highest boost clock of the card"),
        ("clock_share", "SM clock / highest", "%", "median SM clock over the card's highest"),
        ("throttle_reasons", "throttled by", "text", "reasons that held in 5 % of the samples or more"),
        ("samples", "samples", "count", "how often the GPU was read", "gpu_samples"),
        ("duration_s", "sampled for", "s", "time that energy and samples span", "gpu_sampled_s"),
    ),
)

CONTENTION = (
    *figures_of(
        "contention",
        ("not_had", "CPU time taken", "%", "share of the CPU time the run needed that something else took"),
        ("had_s", "CPU time of the run", "s", "CPU time of the run's own processes", "cpu_had_s"),
        ("others_s", "CPU time of other processes", "s", "CPU time of all other processes", "cpu_others_s"),
        ("stolen_s", "CPU time stolen", "s", "CPU time that a hypervisor took", "cpu_stolen_s"),
        ("throttled_s", "CPU time throttled", "s", "CPU time the cgroup's limit kept from the run", "cpu_throttled_s"),
        ("waited_s", "waited for a CPU", "s", "how long threads of the run were ready and had no CPU", "cpu_waited_s"),
        ("pressure", "something waited for a CPU", "%", "share of the time in which something waited", "cpu_pressure"),
        ("involuntary_switches", "involuntary switches", "count", "how often this process lost a CPU it still wanted"),
        ("wall_s", "observed for", "s", "time that these figures span", "contention_wall_s"),
        ("cpus", "CPUs", "count", "CPUs that the run may use"),
    ),
    *figures_of(
        "contention.gpu",
        ("processes", "other processes on the GPU", "count", "at the end of the measured steps", "gpu_others"),
        ("utilisation", "GPU use of others", "%", "share of time in which their kernels ran", "gpu_others_utilisation"),
        ("memory_bytes", "GPU memory of others", "GiB", "GPU memory of other processes", "gpu_others_bytes"),
    ),
)
