"""The model, the machine and its utilization, and memory: as measured, as planned, the floors of phases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from lm_profiler.record.figure import Figure, Place, figure, within
from lm_profiler.record.files import Newer, Part
from lm_profiler.record.parts import PARTS


class Environment(Part):
    """The machine and the software of the run."""

    versions: dict[str, str]
    platform: str
    cpu: str
    cpu_count: int = figure("CPU cores", "count", "CPU cores of the machine")
    threads: int = figure(
        "threads", "count", "threads that torch uses within an operator on the CPU"
    )
    device_type: str
    device_name: str
    device_bytes: int | None = figure(
        "device memory", "GiB", "total memory of the device"
    )
    driver: str | None
    world_size: int = figure(
        "ranks", "count", "number of processes (ranks) of the run", group="Ranks"
    )
    flags: dict[str, str | bool]
    git_commit: str | None


_LITTLE_FREE_MEMORY = 0.1  # as a share of the device's memory


class Settings(Part):
    """The options of a run, and features of its machine, on which advice depends. None means unknown: no advice."""

    precision: str | None = None  # Lightning's, or the half precision of most matmuls
    # whether float32 matmuls may run in TF32; None also if the device has no TF32
    tf32: bool | None = None
    # the mixed precision for which the device has matrix units; None if it has none
    half_precision: str | None = None
    compiled: bool | None = None
    num_workers: int | None = None
    # whether nearly each step begins a new pass over the loader's data
    restarts_loader: bool | None = None
    # whether the loader takes many rows for a batch, one by one, from tensors in memory
    fetches_single_rows: bool | None = None
    validation_batch_size: int | None = None
    # whether autograd records a graph in validations
    validates_with_gradients: bool | None = None
    # whether the loader keeps its workers from epoch to epoch
    persistent_workers: bool | None = None
    cores: int | None = None  # CPU cores that this process may use for its loader
    pin_memory: bool | None = None
    fused_optimizer: bool | None = None  # None also if there is no fused kernel
    # whether an optimizer updates each weight separately (foreach=False)
    weight_by_weight: bool = False
    # the parameter groups of all optimizers, and how many different sets of options they have (None: unknown)
    parameter_groups: int | None = None
    different_groups: int | None = None
    # the number of batches in the measured steps after which gradients are clipped, and of those after which this is
    # too early, because later batches still add to the gradients
    clipped_batches: int = 0
    early_clips: int = 0
    checkpointing: bool | None = None
    tokens_per_batch: int | None = None
    samples_per_batch: int | None = None
    tensors_per_batch: int | None = None
    # share of the memory that is free at the peak: of the device's; on the CPU, of that which this run could use
    memory_free_share: float | None = None
    anomalies: bool = False  # whether autograd detects anomalies (detect_anomaly)
    profiler: str | None = None  # the Trainer's own profiler

    @property
    def full_precision(self) -> bool:
        return self.precision is not None and str(self.precision).split("-")[0] == "32"

    @property
    def memory_is_full(self) -> bool:
        """Whether the device has too little free memory for larger batches; False if that is unknown."""
        free_share = self.memory_free_share
        return free_share is not None and free_share < _LITTLE_FREE_MEMORY


class ModelFacts(Part):
    """The profiled module; ``compiled`` is True if any part of it is compiled."""

    class_path: str
    parameters: int = figure("parameters", "count", "number of parameters of the model")
    parameters_without_embedding: int | None = figure(
        "without embedding",
        "count",
        "number of parameters of the model, without those of the embedding",
    )
    parameters_in_products: int | None = figure(
        "parameters per token",
        "count",
        "parameters in the matrix products for a token: without embeddings, which are looked up, and without experts "
        "that are not chosen",
        default=None,
    )
    trainable_parameters: int = figure(
        "trainable parameters", "count", "number of parameters that get gradients"
    )
    bytes: int = figure(
        "parameters and buffers",
        "GiB",
        "memory of the model's parameters and buffers",
        "model_bytes",
    )
    precision: str
    optimizers: list[str]
    accumulate_grad_batches: int = figure(
        "batches per step", "count", "batches per step, whose gradients are accumulated"
    )
    compiled: bool | None = None
    # the outermost modules whose weights all get gradients that no optimizer uses
    without_optimizer: list[str] = Field(default_factory=list)
    layers: int | None = figure(
        "layers",
        "count",
        "number of layers of the model, according to its config",
        "model_layers",
        default=None,
    )
    width: int | None = figure(
        "width",
        "count",
        "width of the model's hidden states, according to its config",
        "model_width",
        default=None,
    )
    vocabulary: int | None = figure(
        "vocabulary",
        "count",
        "number of token ids of the model, according to its config",
        "model_vocabulary",
        default=None,
    )


# If other programs take this share of the CPU time that the run needs, or of the GPU's time, the run counts as
# contended. Smaller shares do not show in step times.
SHARED = 0.05


class Flops(Part):
    """FLOPs of matmuls, convolutions and attention; causal attention counts in full, masked half included."""

    forward: int = figure(
        "forward work",
        "GFLOP",
        "FLOPs of the forward pass in a step, all ranks together",
        "forward_flops",
    )
    backward: int = figure(
        "backward work",
        "GFLOP",
        "FLOPs of the backward pass in a step, all ranks together",
        "backward_flops",
    )
    recomputation: int = figure(
        "recomputed work",
        "GFLOP",
        "FLOPs that activation checkpointing repeats in a step, all ranks together",
        "recomputation_flops",
    )
    optimizer: int = figure(
        "optimizer's work",
        "GFLOP",
        "FLOPs of the optimizer in a step, all ranks together",
        "optimizer_flops",
        default=0,
    )
    attention: int = figure(
        "attention",
        "GFLOP",
        "FLOPs of fused attention in the forward pass of a step, causal attention counted in full, all ranks together",
        "attention_flops",
        default=0,
    )
    causal_attention: Annotated[Literal["full"], Newer] = "full"
    # The operators that ran and were not counted, because they have no formula, or because torch's dispatcher does not
    # see their kernels. If there are any, the FLOPs and all figures computed from them are lower bounds.
    uncounted: list[str] = Field(default_factory=list)
    # the autograd Functions whose FLOPs were counted with a formula
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
    """The matrix products of a step in one dtype. None means unknown."""

    dtype: str = figure("dtype", "text", "dtype of the matrices that are multiplied")
    flops: int = figure(
        "work", "GFLOP", "the model's FLOPs per step in this dtype, all ranks together"
    )
    peak_flops_per_s: float | None = figure(
        "peak", "TFLOP/s", "peak FLOP/s of one device in this dtype"
    )
    mfu: float | None = figure(
        "MFU",
        "%",
        "FLOPs in this dtype / (duration of the step x peak FLOP/s in this dtype)",
    )


class Utilisation(Part):
    """How much of the hardware's peak the mean step uses, in the dtype of most matmuls. None means unknown."""

    mfu: float | None = figure(
        "MFU",
        "%",
        "model FLOPs utilization: the model's FLOPs per step / (duration of the step x peak FLOP/s of the devices)",
        goes_by_step=True,
        place=Place.TABLE,
        run_tag="mfu_percent",
        tag="throughput/mfu",
    )
    hfu: float | None = figure(
        "HFU",
        "%",
        "hardware FLOPs utilization: all FLOPs per step (with recomputation) / (duration of the step x peak FLOP/s)",
        goes_by_step=True,
    )
    peak_flops_per_s: float | None = figure(
        "peak of a device",
        "TFLOP/s",
        "peak FLOP/s of one device in the run's precision, by its datasheet",
    )
    dtype: str | None = figure(
        "dtype of the peak",
        "text",
        "dtype for which the peak of the device is given",
        "peak_dtype",
    )
    peak_source: str | None = figure(
        "source of the peak",
        "text",
        "where the figure for the device's peak comes from",
    )
    ceiling_flops_per_s: float | None = figure(
        "measured matmul rate",
        "TFLOP/s",
        "FLOP/s of a large matrix product, measured on the device after the run",
    )
    of_ceiling: float | None = figure(
        "of the measured matmul rate",
        "%",
        "all FLOPs per step / (duration of the step x measured matmul rate)",
        goes_by_step=True,
    )
    # if the matmuls have several dtypes: the share of the step that they would take, each dtype at its own peak
    mixed_mfu: float | None = figure(
        "MFU by dtype",
        "%",
        "MFU of a run in several dtypes: sum over dtypes of FLOPs / (duration of the step x peak of the dtype)",
        goes_by_step=True,
        default=None,
    )
    by_dtype: list[DtypeUse] = Field(default_factory=list)
    flops: Flops


class GpuSharing(Part):
    """Other processes on the run's GPU, as its driver reports them. None means unknown."""

    processes: int = figure(
        "other processes on the GPU",
        "count",
        "number of other processes on the GPU when the measured steps ended",
        "gpu_others",
    )
    utilisation: float | None = figure(
        "GPU use of others",
        "%",
        "share of the time in which kernels of other processes ran on the GPU",
        "gpu_others_utilisation",
    )
    memory_bytes: int | None = figure(
        "GPU memory of others",
        "GiB",
        "GPU memory that other processes hold",
        "gpu_others_bytes",
    )


class Telemetry(Part):
    """The GPU over the measured steps, as its driver reports it, all programs on it included. None means unknown.

    NVML's power is a mean over the last second on Ampere (except GA100) and later; the energy counter (Volta and later)
    moves every 20 to 100 ms. With several GPUs, energy and power are sums, the clocks are those of the slowest GPU, the
    temperature is that of the hottest, and ``throttle_reasons`` lists the reasons of all.
    """

    energy_per_step_j: float | None = figure(
        "energy per step",
        "J",
        "energy of the GPU over the measured steps, divided by their number",
        default=None,
    )
    energy_per_token_j: float | None = figure(
        "energy per token",
        "J",
        "energy per step, divided by the tokens per step",
        default=None,
    )
    energy_j: float | None = figure(
        "energy", "J", "energy of the GPU over the measured steps"
    )
    energy_source: Annotated[Literal["counter", "power samples"] | None, Newer] = (
        figure(
            "energy from",
            "text",
            "whether the energy was read from a counter or computed from power samples",
        )
    )
    median_power_w: float | None = figure(
        "power", "W", "median power of the GPU over the measured steps"
    )
    power_limit_w: float | None = figure("power limit", "W", "power limit of the GPU")
    median_temperature_c: float | None = figure(
        "temperature", "°C", "median temperature of the GPU over the measured steps"
    )
    median_sm_clock_hz: float | None = figure(
        "SM clock",
        "MHz",
        "median clock of the GPU's multiprocessors over the measured steps",
    )
    max_sm_clock_hz: float | None = figure(
        "highest SM clock", "MHz", "highest boost clock of the GPU's multiprocessors"
    )
    clock_share: float | None = figure(
        "SM clock / highest",
        "%",
        "median clock of the multiprocessors, as a share of their highest clock",
    )
    throttle_reasons: list[str] | None = figure(
        "throttled by",
        "text",
        "reasons for a lower clock that were present in 5 % of the samples or more",
    )
    samples: int = figure(
        "samples",
        "count",
        "number of samples of the GPU's power, temperature and clock",
        "gpu_samples",
    )
    duration_s: float = figure(
        "sampled for",
        "s",
        "duration over which energy was measured and samples were taken",
        "gpu_sampled_s",
    )
    gpus: list[str] = Field(default_factory=list)  # the UUIDs of the GPUs


class Contention(Part):
    """The load of other programs on the run's CPUs over the measured steps. None means unknown.

    ``not_had`` is the result, the other fields are the evidence for it.
    """

    not_had: float | None = figure(
        "CPU time taken",
        "%",
        "share of the CPU time that the run needed but did not get, because other programs used the CPUs",
    )
    had_s: float = figure(
        "CPU time of the run", "s", "CPU time of the run's processes", "cpu_had_s"
    )
    others_s: float | None = figure(
        "CPU time of other processes",
        "s",
        "CPU time of all other processes, on the CPUs that the run may use",
        "cpu_others_s",
    )
    stolen_s: float = figure(
        "CPU time stolen",
        "s",
        "CPU time that the hypervisor gave to other virtual machines (steal time)",
        "cpu_stolen_s",
    )
    throttled_s: float | None = figure(
        "CPU time throttled",
        "s",
        "time for which the quota of the cgroup kept the run from its CPUs",
        "cpu_throttled_s",
    )
    waited_s: float | None = figure(
        "waited for a CPU",
        "s",
        "time for which threads of the run were ready to run but had no CPU",
        "cpu_waited_s",
    )
    pressure: float | None = figure(
        "CPU pressure",
        "%",
        "share of the time in which a task of the run's control group waited for a CPU (pressure stall)",
        "cpu_pressure",
    )
    involuntary_switches: int | None = figure(
        "involuntary switches",
        "count",
        "how often a thread of the run lost its CPU although it could have continued",
    )
    wall_s: float = figure(
        "observed for",
        "s",
        "duration over which the use of CPUs and GPU by other programs was observed",
        "contention_wall_s",
    )
    cpus: int = figure("CPUs", "count", "number of CPUs that the run may use")
    gpu: GpuSharing | None = None

    @property
    def is_shared(self) -> bool:
        """Whether other processes took so much CPU or GPU time that the step times show it."""
        on_gpu = self.gpu is not None and (self.gpu.utilisation or 0.0) >= SHARED
        return on_gpu or (self.not_had or 0.0) >= SHARED


class Sync(Part):
    """A line of code that made the host wait for the device in the ``memory`` stage."""

    file: str = figure(
        "file", "text", "file of the line that made the host wait for the device"
    )
    line: int = figure(
        "line", "count", "number of the line that made the host wait for the device"
    )
    function: str = figure("function", "text", "function that contains the line")
    count: int = figure(
        "times", "count", "how often the line made the host wait for the device"
    )
    call: str = figure("call", "text", "call in the line that waits for the device")


_MOST_SHARES = 16  # experts whose shares are printed


class ExpertLoad(Part):
    """How evenly the router of one layer distributed the tokens among its experts, since the start of the run."""

    layer: int = figure(
        "layer of experts", "count", "number of the layer of experts, counted from 0"
    )
    experts: int = figure(
        "experts",
        "count",
        "number of experts among which the router of the layer chooses",
    )
    tokens: int = figure(
        "tokens",
        "count",
        "number of tokens sent to the experts of the layer, all experts together",
    )
    busiest: int = figure(
        "busiest expert",
        "count",
        "number of the expert that was sent the most tokens, counted from 0",
    )
    busiest_share: float = figure(
        "its share",
        "%",
        "share of the layer's tokens that was sent to the busiest expert",
    )
    shares: str = figure(
        "share of each expert",
        "text",
        "share of the tokens sent to each expert, or to each of the first 16",
    )

    @classmethod
    def from_tokens(cls, layer: int, tokens: Sequence[int]) -> ExpertLoad:
        """Return the load of a ``layer`` from the number of ``tokens`` of each of its experts (at least one expert)."""
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
        """The tokens of the busiest expert divided by the mean tokens per expert."""
        return self.busiest_share * self.experts


class FlopRate(Part):
    """The FLOP/s of one device in matmuls of ``dtype`` (a name of torch), and the source of the figure."""

    dtype: str = figure("dtype", "text", "dtype of the matrices that are multiplied")
    flops_per_s: float = figure(
        "FLOP rate",
        "TFLOP/s",
        "FLOP/s of one device, with which its matrix products in this dtype are compared",
    )
    source: str = figure("source", "text", "where the figure for the rate comes from")


class Rates(Part):
    """The rates of one device: from its datasheet, or measured after the run if it has none. None means unknown."""

    # a rate for each dtype of the run's matmuls; float32 matmuls that run in TF32 have the rate of TF32
    flops: list[FlopRate] = Field(default_factory=list)
    bytes_per_s: float | None = figure(
        "memory bandwidth",
        "GB/s",
        "memory bandwidth of one device, from its datasheet or from a measured copy",
        "bandwidth_bytes_per_s",
        default=None,
    )
    bytes_source: str | None = figure(
        "bandwidth from",
        "text",
        "where the figure for the bandwidth comes from: a datasheet or a measured copy",
        "bandwidth_source",
        default=None,
    )
    copied_bytes_per_s: float | None = figure(
        "measured copy rate",
        "GB/s",
        "bandwidth of a copy within the device's memory, measured after the run",
        default=None,
    )

    def flops_per_s(self, dtype: str) -> float | None:
        """Return the rate of matmuls of ``dtype``, such as "bfloat16"; None if it is unknown."""
        for rate in self.flops:
            if rate.dtype == dtype:
                return rate.flops_per_s
        return None


# -- memory -----------------------------------------------------------------------------------------------------------

LEVEL_SOURCES = (
    "what the bytes held include: all tensors of the device (`allocator`), "
    "or parameters, gradients, optimizer states, buffers and saved tensors (`counted`)"
)


class MemoryReading(Part):
    """Peaks of memory; None if this device or system does not report them."""

    allocated_peak: int | None = figure(
        "peak allocated",
        "GiB",
        "largest number of bytes held by tensors on the device at one time",
        "allocated_peak_bytes",
        place=Place.HEADLINE,
        tag="memory_gib/allocated_peak",
        run_tag="allocated_peak_gib",
        default=None,
    )
    reserved_peak: int | None = figure(
        "peak reserved",
        "GiB",
        "largest number of bytes that torch's allocator had taken from the device at one time",
        "reserved_peak_bytes",
        tag="memory_gib/reserved_peak",
        default=None,
    )
    resident_peak: int | None = figure(
        "peak resident", "GiB", "largest resident memory (RSS) of the process since it began",
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


# the moments of a step at which a sharded run holds other bytes than an unsharded one, each with its title
MOMENTS = {
    "set_up": "after set-up",
    "before_optimizer": "before the optimizer's step",
    "after_optimizer": "after the optimizer's step",
}


class AllocatorReading(Part):
    """The device's caching allocator over the measured steps; None if it does not report a figure."""

    allocated_peak: int | None = figure(
        "allocated",
        "GiB",
        "largest number of bytes held by tensors at one time",
        "allocator_allocated_peak_bytes",
    )
    requested_peak: int | None = figure(
        "requested",
        "GiB",
        "largest number of bytes requested for tensors at one time, before rounding up to blocks",
        "allocator_requested_peak_bytes",
        default=None,
    )
    active_peak: int | None = figure(
        "in use",
        "GiB",
        "largest number of bytes held by tensors, or freed but still used by a stream, at one time",
        "allocator_active_peak_bytes",
    )
    reserved_peak: int | None = figure(
        "reserved",
        "GiB",
        "largest number of bytes that the allocator had taken from the device at one time",
        "allocator_reserved_peak_bytes",
    )
    inactive_split_peak: int | None = figure(
        "inactive split",
        "GiB",
        "peak of the free bytes in segments that are partly in use",
        "allocator_inactive_split_peak_bytes",
    )
    fragmentation: int | None = figure(
        "fragmentation",
        "GiB",
        "upper bound of the bytes reserved but not allocated when allocated memory peaked",
        "allocator_fragmentation_bytes",
    )
    driver_used: int | None = figure(
        "used by all processes",
        "GiB",
        "memory of the device that all processes use, as the driver reports it",
        "allocator_driver_used_bytes",
    )
    alloc_retries: int | None = figure(
        "retries",
        "count",
        "how often the allocator freed its cache to get memory, since the process began",
    )
    ooms: int | None = figure(
        "OOMs",
        "count",
        "how often the allocator ran out of memory, since the process began",
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
    """The memory of a run: peaks over the measured steps; causes and bytes held from steps of the ``memory`` stage."""

    measured: MemoryReading
    parts: dict[str, MemoryReading] = within(
        group="Memory by phase", keys=PARTS, name="{key}_{name}", title="{key}: {title}",
        meaning="{title} memory within {key}", place=Place.ASKED,
    )  # fmt: skip
    causes: dict[str, MemoryCauses] = within(
        group="Memory by cause", keys=PARTS, name="{key}_{name}_bytes", title="{key}: {title}",
        meaning="memory of {title} when allocated memory peaks in {key}", place=Place.ASKED, default_factory=dict,
    )  # fmt: skip
    moments: dict[str, MemoryCauses] = within(
        group="Memory at three moments", keys=MOMENTS, name="{key}_{name}_bytes", title="{word}: {title}",
        meaning="memory of {title} held {word}", place=Place.ASKED, default_factory=dict,
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


SAVED = Figure(
    "saved for backward",
    "GiB",
    "memory that the forward pass leaves for the backward pass: bytes held after forward, minus those before",
)
ADDED = Figure(
    "added by backward",
    "GiB",
    "change of the bytes held from the end of forward to the end of backward: gradients minus saved tensors",
)


def _growth(begin_bytes: int | None, end_bytes: int | None) -> int | None:
    if begin_bytes is None or end_bytes is None:
        return None
    return end_bytes - begin_bytes


PEAK = Figure(
    "planned peak",
    "GiB",
    "largest number of bytes that the step would hold at one time, from a rehearsal without data",
    "planned_peak_bytes",
    place=Place.TABLE,
)
PHASE = Figure(
    "phase of the planned peak",
    "text",
    "phase of the step in which the planned peak of memory would occur",
    "planned_phase",
)


class PlannedMemory(Part):
    """The memory of a step on one device, from a rehearsal without data and torch.compile; empty if that failed."""

    peaks: dict[str, int] = figure(
        "{key}: planned",
        "GiB",
        "largest number of bytes that would be held at one time within {key}, from a rehearsal",
        "{key}_planned_peak_bytes",
        keys=PARTS,
        default_factory=dict,
    )
    at_peak: MemoryCauses | None = within(
        name="planned_{name}_bytes",
        title="planned {title}",
        meaning="memory of {title} in the planned peak",
        default=None,
    )
    moments: dict[str, MemoryCauses] = within(
        group="Memory at three moments", keys=MOMENTS, name="planned_{key}_{name}_bytes",
        title="{word}: planned {title}",
        meaning="memory of {title} that would be held {word}", place=Place.ASKED, default_factory=dict,
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
        "free before the run",
        "GiB",
        "memory of the device that was free before the run, for one replica of the model",
        "available_bytes",
        default=None,
    )
    compiled: bool = False
    unknown: str | None = figure(
        "not planned",
        "text",
        "reason why the memory of a step was not planned",
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
    """The least work of a phase on one device, and the least time that it takes (roofline). None means unknown.

    ``seconds`` is the longer of two times: of the FLOPs at the device's peak, and of the bytes at its bandwidth (for
    ``transfer``, the bandwidth of the bus).
    """

    flops: dict[str, int] = figure(
        "in {key}", "GFLOP", "FLOPs of the matrix products in {key} in PHASE, on one device", "{key}_flops",
        keys=("float32", "bfloat16", "float16", "float64"), default_factory=dict,
    )  # fmt: skip
    bytes: int | None = figure(
        "bytes at least",
        "GiB",
        "least number of bytes that PHASE has to move, on one device",
        "floor_bytes",
        default=None,
    )
    seconds: float | None = figure(
        "floor (ms)",
        "ms",
        "least time of PHASE (roofline): its FLOPs at the peak, or its bytes at the bandwidth if that takes longer",
        "floor_s",
        default=None,
    )
    bound: Annotated[Literal["compute", "memory"] | None, Newer] = figure(
        "floor is set by",
        "text",
        "what sets the least time of PHASE: compute or memory",
        "floor_bound",
        default=None,
    )
    times: float | None = figure(
        "x floor",
        "x",
        "mean time of PHASE, divided by its least time (floor)",
        "times_floor",
        default=None,
    )
