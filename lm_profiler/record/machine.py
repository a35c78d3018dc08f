"""The model, the machine and its utilization, and memory: as measured, as planned, the floors of phases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from lm_profiler.record.figure import Figure, Place, figure, within
from lm_profiler.record.files import Newer, Part
from lm_profiler.record.parts import PARTS


class Environment(Part):
    """The machine and the software that the figures were measured on."""

    versions: dict[str, str]
    platform: str
    cpu: str
    cpu_count: int = figure("CPU cores", "count", "cores of the machine")
    threads: int = figure(
        "threads", "count", "threads that torch uses within an operator"
    )
    device_type: str
    device_name: str
    device_bytes: int | None = figure("device memory", "GiB", "memory of the device")
    driver: str | None
    world_size: int = figure("ranks", "count", "processes of the run", group="Ranks")
    flags: dict[str, str | bool]
    git_commit: str | None


class Settings(Part):
    """The options that a run has switched on, and what its machine offers; nothing is advised about an unknown one."""

    precision: str | None = None  # Lightning's, or the half precision of most matmuls
    # whether float32 matmuls may use it; None also where the device has none
    tf32: bool | None = None
    # the mixed precision that the device has matrix units for; None if it has none
    half_precision: str | None = None
    compiled: bool | None = None
    num_workers: int | None = None
    # whether the loader keeps its workers from epoch to epoch
    persistent_workers: bool | None = None
    cores: int | None = None  # CPU cores that this process may use for its loader
    pin_memory: bool | None = None
    fused_optimizer: bool | None = None  # None also if there is no fused kernel
    # whether an optimizer updates each weight separately (foreach=False)
    weight_by_weight: bool = False
    # groups of parameters of all optimizers, and as many as have different options (None: unknown)
    parameter_groups: int | None = None
    different_groups: int | None = None
    checkpointing: bool | None = None
    tokens_per_batch: int | None = None
    samples_per_batch: int | None = None
    # the share of the device's memory that the peak leaves free; None on the CPU
    memory_free_share: float | None = None
    anomalies: bool = False  # whether autograd looks for anomalies
    profiler: str | None = None  # the Trainer's own profiler

    @property
    def full_precision(self) -> bool:
        return self.precision is not None and str(self.precision).split("-")[0] == "32"


class ModelFacts(Part):
    """The profiled module; it is ``compiled`` if any part of it is."""

    class_path: str
    parameters: int = figure("parameters", "count", "parameters of the module")
    parameters_without_embedding: int | None = figure(
        "without embedding", "count", "parameters without those of the embedding"
    )
    parameters_in_products: int | None = figure(
        "parameters per token",
        "count",
        "that a token is multiplied by: without embeddings that are looked up, of experts those that it is sent to",
        default=None,
    )
    trainable_parameters: int = figure(
        "trainable parameters", "count", "parameters that get gradients"
    )
    bytes: int = figure(
        "parameters and buffers",
        "GiB",
        "bytes of parameters and buffers",
        "model_bytes",
    )
    precision: str
    optimizers: list[str]
    accumulate_grad_batches: int = figure(
        "batches per step", "count", "batches whose gradients are accumulated"
    )
    compiled: bool | None = None
    # the outermost modules whose weights all get gradients that no optimizer uses
    without_optimizer: list[str] = Field(default_factory=list)
    layers: int | None = figure(
        "layers", "count", "of the model, by its config", "model_layers", default=None
    )
    width: int | None = figure(
        "width",
        "count",
        "of the model's hidden states, by its config",
        "model_width",
        default=None,
    )
    vocabulary: int | None = figure(
        "vocabulary",
        "count",
        "token ids of the model, by its config",
        "model_vocabulary",
        default=None,
    )


# The share of the needed CPU time, or of the GPU's time, that others may take before the run counts as contended. Less
# does not show in step times.
SHARED = 0.05


class Flops(Part):
    """FLOPs of matmuls, convolutions and attention; causal attention counts in full, masked half included."""

    forward: int = figure(
        "forward work", "GFLOP", "FLOPs of a step's forward, all ranks", "forward_flops"
    )
    backward: int = figure(
        "backward work",
        "GFLOP",
        "FLOPs of a step's backward, all ranks",
        "backward_flops",
    )
    recomputation: int = figure(
        "recomputed work", "GFLOP", "repeated FLOPs, all ranks", "recomputation_flops"
    )
    optimizer: int = figure(
        "optimizer's work",
        "GFLOP",
        "FLOPs of a step's optimizer, all ranks",
        "optimizer_flops",
        default=0,
    )
    attention: int = figure(
        "attention", "GFLOP", "part of a step's forward in fused attention, in full, all ranks", "attention_flops",
        default=0,
    )  # fmt: skip
    causal_attention: Annotated[Literal["full"], Newer] = "full"
    # What ran and was not counted: operators without a formula, functions with kernels that torch's dispatcher does
    # not see. The FLOPs, and what follows from them, are then lower bounds.
    uncounted: list[str] = Field(default_factory=list)
    # the autograd Functions whose FLOPs a formula counts
    functions_counted: list[str] = Field(default_factory=list)

    @property
    def model(self) -> int:
        """The FLOPs of the model without recomputation, which MFU counts."""
        return self.forward + self.backward

    @property
    def all(self) -> int:
        return self.model + self.recomputation + self.optimizer

    def times(self, factor: float) -> Flops:
        """Return all counts multiplied by ``factor``."""
        changes = {
            "forward": round(self.forward * factor),
            "backward": round(self.backward * factor),
            "recomputation": round(self.recomputation * factor),
            "optimizer": round(self.optimizer * factor),
            "attention": round(self.attention * factor),
        }
        return self.model_copy(update=changes)


class DtypeUse(Part):
    """The products of a step in one dtype. None means unknown."""

    dtype: str = figure("dtype", "text", "of the factors")
    flops: int = figure(
        "work", "GFLOP", "the model's FLOPs of a step in this dtype, all ranks"
    )
    peak_flops_per_s: float | None = figure(
        "peak", "TFLOP/s", "of a device, in this dtype"
    )
    mfu: float | None = figure(
        "MFU", "%", "those FLOPs / (the time of the step x that peak)"
    )


class Utilisation(Part):
    """The mean step's share of the hardware's peak, in the dtype of most matmuls. None means unknown."""

    mfu: float | None = figure(
        "MFU", "%", "model FLOPs of a step / (its time x the device's peak)", goes_by_step=True, place=Place.TABLE,
        run_tag="mfu_percent", tag="throughput/mfu",
    )  # fmt: skip
    hfu: float | None = figure(
        "HFU",
        "%",
        "all FLOPs of a step / (its time x the device's peak)",
        goes_by_step=True,
    )
    peak_flops_per_s: float | None = figure(
        "peak of a device", "TFLOP/s", "on its datasheet, in the run's precision"
    )
    dtype: str | None = figure(
        "dtype of the peak", "text", "precision of the peak", "peak_dtype"
    )
    peak_source: str | None = figure(
        "source of the peak", "text", "where the peak of a device comes from"
    )
    ceiling_flops_per_s: float | None = figure(
        "measured matmul rate", "TFLOP/s", "of a large matmul after the run"
    )
    of_ceiling: float | None = figure(
        "of the measured matmul rate",
        "%",
        "all FLOPs of a step / (its time x that rate)",
        goes_by_step=True,
    )
    # with several dtypes: the share of the step that its products would take, each dtype at its own peak
    mixed_mfu: float | None = figure(
        "MFU by dtype", "%", "sum over dtypes of FLOPs / (time of the step x the dtype's peak)",
        goes_by_step=True, default=None,
    )  # fmt: skip
    by_dtype: list[DtypeUse] = Field(default_factory=list)
    flops: Flops


class GpuSharing(Part):
    """Other processes on the run's GPU, as its driver reports them. None means unknown."""

    processes: int = figure(
        "other processes on the GPU",
        "count",
        "at the end of the measured steps",
        "gpu_others",
    )
    utilisation: float | None = figure(
        "GPU use of others",
        "%",
        "share of the time in which their kernels ran",
        "gpu_others_utilisation",
    )
    memory_bytes: int | None = figure(
        "GPU memory of others", "GiB", "that other processes hold", "gpu_others_bytes"
    )


class Telemetry(Part):
    """The whole GPU over the measured steps, as its driver reports it, with all of its users. None means unknown.

    NVML's power is a mean over the last second on Ampere (except GA100) and later; the energy counter (Volta and later)
    moves every 20 to 100 ms. With several cards, energy and power are sums, clocks the slowest card's, temperature the
    highest, ``throttle_reasons`` those of any card.
    """

    energy_per_step_j: float | None = figure(
        "energy per step", "J", "of the measured steps / their count", default=None
    )
    energy_per_token_j: float | None = figure(
        "energy per token", "J", "energy of a step / its tokens", default=None
    )
    energy_j: float | None = figure(
        "energy", "J", "energy of the GPU over the measured steps"
    )
    energy_source: Annotated[Literal["counter", "power samples"] | None, Newer] = (
        figure("energy from", "text", "a counter, or power samples")
    )
    median_power_w: float | None = figure(
        "power", "W", "median power of the GPU over the measured steps"
    )
    power_limit_w: float | None = figure(
        "power limit", "W", "most power that the GPU may draw"
    )
    median_temperature_c: float | None = figure(
        "temperature", "°C", "median temperature of the GPU"
    )
    median_sm_clock_hz: float | None = figure(
        "SM clock", "MHz", "median clock of the GPU's multiprocessors"
    )
    max_sm_clock_hz: float | None = figure(
        "highest SM clock", "MHz", "highest boost clock of the card"
    )
    clock_share: float | None = figure(
        "SM clock / highest", "%", "median SM clock over the card's highest"
    )
    throttle_reasons: list[str] | None = figure(
        "throttled by", "text", "reasons in 5 % of the samples or more"
    )
    samples: int = figure(
        "samples", "count", "how often the GPU was read", "gpu_samples"
    )
    duration_s: float = figure(
        "sampled for", "s", "time that energy and samples span", "gpu_sampled_s"
    )
    gpus: list[str] = Field(default_factory=list)  # the cards' UUIDs


class Contention(Part):
    """Other load on the run's CPUs over the measured steps: ``not_had``, and its evidence. None means unknown."""

    not_had: float | None = figure(
        "CPU time taken", "%", "share of the needed CPU time that other programs took"
    )
    had_s: float = figure(
        "CPU time of the run", "s", "CPU time of the run's own processes", "cpu_had_s"
    )
    others_s: float | None = figure(
        "CPU time of other processes", "s", "of all other processes", "cpu_others_s"
    )
    stolen_s: float = figure(
        "CPU time stolen", "s", "CPU time that a hypervisor took", "cpu_stolen_s"
    )
    throttled_s: float | None = figure(
        "CPU time throttled",
        "s",
        "kept from the run by the cgroup",
        "cpu_throttled_s",
    )
    waited_s: float | None = figure(
        "waited for a CPU",
        "s",
        "time for which threads were ready without a CPU",
        "cpu_waited_s",
    )
    pressure: float | None = figure(
        "CPU pressure",
        "%",
        "share of the time in which a process waited for a CPU",
        "cpu_pressure",
    )
    involuntary_switches: int | None = figure(
        "involuntary switches",
        "count",
        "times that a thread lost its CPU while it could run",
    )
    wall_s: float = figure(
        "observed for", "s", "time that these figures span", "contention_wall_s"
    )
    cpus: int = figure("CPUs", "count", "CPUs that the run may use")
    gpu: GpuSharing | None = None

    @property
    def shared(self) -> bool:
        """Whether other processes took enough to be seen in the times."""
        on_gpu = self.gpu is not None and (self.gpu.utilisation or 0.0) >= SHARED
        return on_gpu or (self.not_had or 0.0) >= SHARED


class Sync(Part):
    """A line of code that made the host wait for the device in the ``memory`` stage."""

    file: str = figure(
        "file", "text", "of the line that made the host wait for the device"
    )
    line: int = figure("line", "count", "its number")
    function: str = figure("function", "text", "the function that contains it")
    count: int = figure("times", "count", "how often it made the host wait")
    call: str = figure("call", "text", "the call that waits")


_MOST_SHARES = 16  # experts whose shares are printed


class ExpertLoad(Part):
    """How unequally one layer's tokens were shared among its experts in training, from the start of the run on."""

    layer: int = figure("layer of experts", "count", "its number, from 0")
    experts: int = figure(
        "experts", "count", "among which the router of the layer chooses"
    )
    tokens: int = figure(
        "tokens", "count", "that these experts were sent, all together"
    )
    busiest: int = figure("busiest expert", "count", "its number, from 0")
    busiest_share: float = figure(
        "its share", "%", "share of the tokens that the busiest expert was sent"
    )
    shares: str = figure(
        "share of each expert", "text", "of the first experts, if there are many"
    )

    @classmethod
    def from_tokens(cls, layer: int, tokens: Sequence[int]) -> ExpertLoad:
        """Return the load of a ``layer`` by the ``tokens`` of each of its experts, of which there are some."""
        total = sum(tokens)
        most_tokens = max(tokens)
        texts = [f"{count / total:.1%}" for count in tokens[:_MOST_SHARES]]
        if len(tokens) > _MOST_SHARES:
            texts.append("…")
        return cls(
            layer=layer,
            experts=len(tokens),
            tokens=total,
            busiest=list(tokens).index(most_tokens),
            busiest_share=most_tokens / total,
            shares=" ".join(texts),
        )

    @property
    def busiest_ratio(self) -> float:
        """The tokens of the busiest expert over those of the mean expert."""
        return self.busiest_share * self.experts


class FlopRate(Part):
    """FLOP/s of one device in matmuls of ``dtype``, by torch's name, and the source of the figure."""

    dtype: str = figure("dtype", "text", "of the factors of matrix products")
    flops_per_s: float = figure(
        "FLOP rate",
        "TFLOP/s",
        "FLOP/s of one device that its products are compared with",
    )
    source: str = figure("source", "text", "where that figure comes from")


class Rates(Part):
    """Rates of one device from its datasheet, or else measured on the machine after the run. None means unknown."""

    # a rate for each dtype of the run's matmuls; float32 matmuls that run in TF32 have the rate of TF32
    flops: list[FlopRate] = Field(default_factory=list)
    bytes_per_s: float | None = figure(
        "memory bandwidth",
        "GB/s",
        "bytes/s, on a datasheet or copying",
        "bandwidth_bytes_per_s",
        default=None,
    )
    bytes_source: str | None = figure(
        "bandwidth from",
        "text",
        "datasheet or a copy",
        "bandwidth_source",
        default=None,
    )
    copied_bytes_per_s: float | None = figure(
        "measured copy rate", "GB/s", "of a copy after the run", default=None
    )

    def flops_per_s(self, dtype: str) -> float | None:
        """Return the rate of matmuls of ``dtype``, such as "bfloat16"; None if it is unknown."""
        for rate in self.flops:
            if rate.dtype == dtype:
                return rate.flops_per_s
        return None


# -- memory -----------------------------------------------------------------------------------------------------------

LEVEL_SOURCES = (
    "`allocator`: all tensors of the device; "
    "`counted`: parameters, gradients, states, buffers, saved tensors"
)


class MemoryReading(Part):
    """Peaks of memory; None if this device or system does not report them."""

    allocated_peak: int | None = figure(
        "peak allocated", "GiB", "most bytes held by tensors on the device", "allocated_peak_bytes",
        place=Place.HEADLINE, tag="memory_gib/allocated_peak", run_tag="allocated_peak_gib", default=None,
    )  # fmt: skip
    reserved_peak: int | None = figure(
        "peak reserved", "GiB", "most bytes the allocator took from the device", "reserved_peak_bytes",
        tag="memory_gib/reserved_peak", default=None,
    )  # fmt: skip
    resident_peak: int | None = figure(
        "peak resident", "GiB", "most bytes of the process in the machine's memory, since it began",
        "resident_peak_bytes", place=Place.HEADLINE, tag="memory_gib/resident_peak", run_tag="resident_peak_gib",
        default=None,
    )  # fmt: skip


class MemoryCauses(Part):
    """The causes of an allocated peak; ``activations_and_rest`` is the remainder, None means unknown."""

    parameters: int = figure("parameters", "GiB", "{title}")
    gradients: int = figure("gradients", "GiB", "{title}")
    optimizer_states: int = figure("optimizer states", "GiB", "{title}")
    buffers: int = figure("buffers", "GiB", "{title}")
    activations_and_rest: int | None = figure("activations and rest", "GiB", "{title}")


# moments at which sharded and unsharded runs differ, each with its title
MOMENTS = {
    "set_up": "after set-up",
    "before_optimizer": "before the optimizer's step",
    "after_optimizer": "after the optimizer's step",
}


class AllocatorReading(Part):
    """The device's caching allocator over the measured steps; None if it does not report."""

    allocated_peak: int | None = figure(
        "allocated", "GiB", "most held by tensors", "allocator_allocated_peak_bytes"
    )
    requested_peak: int | None = figure(
        "requested",
        "GiB",
        "the same, not rounded up to blocks",
        "allocator_requested_peak_bytes",
        default=None,
    )
    active_peak: int | None = figure(
        "in use",
        "GiB",
        "including blocks that a stream still uses",
        "allocator_active_peak_bytes",
    )
    reserved_peak: int | None = figure(
        "reserved", "GiB", "most taken from the device", "allocator_reserved_peak_bytes"
    )
    inactive_split_peak: int | None = figure(
        "inactive split",
        "GiB",
        "free in blocks partly in use",
        "allocator_inactive_split_peak_bytes",
    )
    fragmentation: int | None = figure(
        "fragmentation", "GiB", "at most, at the peak", "allocator_fragmentation_bytes"
    )
    driver_used: int | None = figure(
        "used in all", "GiB", "by all processes", "allocator_driver_used_bytes"
    )
    alloc_retries: int | None = figure(
        "retries", "count", "how often it freed its cache, since the process began"
    )
    ooms: int | None = figure(
        "OOMs", "count", "how often memory ran out, since the process began"
    )


class MemoryLevels(Part):
    """Bytes held (not peaks) at moments of a step of the ``memory`` stage; None if the step has no such phase.

    ``allocator``: all tensors of the device; ``counted``, on the CPU: parameters, gradients, states, buffers, tensors
    saved by autograd. ``forward`` and ``backward`` are the maximum over the step's batches.
    """

    start: int | None = figure("forward begins", "GiB", "{title}")
    forward: int | None = figure("forward has ended", "GiB", "{title}")
    backward: int | None = figure("backward has ended", "GiB", "{title}")
    source: Annotated[Literal["allocator", "counted"], Newer]


class MemoryFacts(Part):
    """Peaks over the measured steps; their causes by part of the step, and bytes held, from the ``memory`` stage."""

    measured: MemoryReading
    parts: dict[str, MemoryReading] = within(
        group="Memory by phase", keys=PARTS, name="{key}_{name}", title="{key}: {title}",
        meaning="{title} within {key}", place=Place.ASKED,
    )  # fmt: skip
    causes: dict[str, MemoryCauses] = within(
        group="Memory by cause", keys=PARTS, name="{key}_{name}_bytes", title="{key}: {title}",
        meaning="{title} in the peak allocated of {key}", place=Place.ASKED, default_factory=dict,
    )  # fmt: skip
    moments: dict[str, MemoryCauses] = within(
        group="Memory at three moments", keys=MOMENTS, name="{key}_{name}_bytes", title="{word}: {title}",
        meaning="{title} held {word}", place=Place.ASKED, default_factory=dict,
    )  # fmt: skip
    held: MemoryLevels | None = within(
        name="held_{name}_bytes", title="held: {title}", meaning="bytes held when {title}",
        instead={"source": Figure("source of held", "text", LEVEL_SOURCES, "held_source")}, default=None,
    )  # fmt: skip
    allocator: AllocatorReading | None = within(group="Allocator", default=None)

    @property
    def saved_bytes(self) -> Annotated[int | None, SAVED]:
        """The bytes held after forward, minus those held before it."""
        if self.held is None:
            return None
        return _growth(self.held.start, self.held.forward)

    @property
    def backward_added_bytes(self) -> Annotated[int | None, ADDED]:
        """The bytes held after backward, minus those held before it."""
        if self.held is None:
            return None
        return _growth(self.held.forward, self.held.backward)


SAVED = Figure("saved for backward", "GiB", "bytes that forward leaves for backward")
ADDED = Figure(
    "added by backward",
    "GiB",
    "bytes added by backward: gradients, minus the tensors saved for it",
)


def _growth(begin_bytes: int | None, end_bytes: int | None) -> int | None:
    if begin_bytes is None or end_bytes is None:
        return None
    return end_bytes - begin_bytes


PEAK = Figure(
    "planned peak",
    "GiB",
    "most bytes at one time, rehearsed",
    "planned_peak_bytes",
    place=Place.TABLE,
)
PHASE = Figure(
    "phase of the planned peak", "text", "where the peak would be", "planned_phase"
)


class PlannedMemory(Part):
    """The memory of a step on one device, rehearsed without data (and torch.compile); empty if that failed."""

    peaks: dict[str, int] = figure(
        "{key}: planned", "GiB", "planned peak within {key}", "{key}_planned_peak_bytes", keys=PARTS,
        default_factory=dict,
    )  # fmt: skip
    at_peak: MemoryCauses | None = within(
        name="planned_{name}_bytes",
        title="planned {title}",
        meaning="of the planned peak",
        default=None,
    )
    moments: dict[str, MemoryCauses] = within(
        group="Memory at three moments", keys=MOMENTS, name="planned_{key}_{name}_bytes",
        title="{word}: planned {title}",
        meaning="{title} that would be held {word}", place=Place.ASKED, default_factory=dict,
    )  # fmt: skip
    held: MemoryLevels | None = within(
        name="planned_{name}_held_bytes", title="planned: {title}", meaning="bytes that would be held when {title}",
        instead={"source": Figure("source of planned levels", "text", LEVEL_SOURCES, "planned_held_source")},
        default=None,
    )  # fmt: skip
    reserved: int | None = figure(
        "planned reserved", "GiB",
        "memory that a GPU's allocator would reserve, including gaps between blocks, if enough is free",
        "planned_reserved_bytes", default=None,
    )  # fmt: skip
    available: int | None = figure(
        "free before the run", "GiB", "for one replica", "available_bytes", default=None
    )
    compiled: bool = False
    unknown: str | None = figure(
        "not planned",
        "text",
        "reason why it was not rehearsed",
        "planned_unknown",
        default=None,
    )

    @property
    def phase(self) -> Annotated[str | None, PHASE]:
        return max(self.peaks, key=lambda phase: self.peaks[phase], default=None)

    @property
    def peak(self) -> Annotated[int | None, PEAK]:
        """The largest peak of all phases, in bytes."""
        return max(self.peaks.values(), default=None)


class Floor(Part):
    """The least work of a phase on one device and its least time (roofline). None means unknown.

    ``seconds`` is the longer of two: the FLOPs at the peak, or the bytes at the bandwidth (``transfer``: of the bus).
    """

    flops: dict[str, int] = figure(
        "in {key}", "GFLOP", "FLOPs of PHASE whose factors are {key}, one device", "{key}_flops",
        keys=("float32", "bfloat16", "float16", "float64"), default_factory=dict,
    )  # fmt: skip
    bytes: int | None = figure(
        "bytes at least",
        "GiB",
        "PHASE has to move, one device",
        "floor_bytes",
        default=None,
    )
    seconds: float | None = figure(
        "floor (ms)",
        "ms",
        "least time of PHASE: FLOPs or bytes",
        "floor_s",
        default=None,
    )
    bound: Annotated[Literal["compute", "memory"] | None, Newer] = figure(
        "floor is set by",
        "text",
        "compute or memory in PHASE",
        "floor_bound",
        default=None,
    )
    times: float | None = figure(
        "x floor", "x", "mean time of PHASE over its floor", "times_floor", default=None
    )
