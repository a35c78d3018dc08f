"""What was run and on what, what the run made of its machine, and what else used that."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lm_profiler.record.figure import Place, figure
from lm_profiler.record.run.part import Newer, Part


class Environment(Part):
    """What the figures were measured on."""

    versions: dict[str, str]
    platform: str
    cpu: str
    cpu_count: int = figure("CPU cores", "count", "cores of the machine")
    threads: int = figure("threads", "count", "threads that torch uses within an operator")
    device_type: str
    device_name: str
    device_bytes: int | None = figure("device memory", "GiB", "memory of the device")
    driver: str | None
    world_size: int = figure("ranks", "count", "processes of the run", group="Ranks")
    flags: dict[str, str | bool]
    git_commit: str | None


class Settings(Part):
    """What a run has switched on, and what its machine has; None is unknown, and nothing is advised about it.

    ``precision`` is Lightning's, or the half precision that most is multiplied in. ``tf32``: whether float32 products
    may use it (None also where the device has none). ``half_precision`` is the mixed precision that the device has
    matrix units for; None where it has none. ``cores`` are those that this process may use for its loader.
    ``fused_optimizer`` is None also where there is no fused kernel. ``memory_free_share`` is what the peak leaves of
    the device's memory; None on the CPU. ``anomalies``: autograd looks for them. ``profiler`` is the Trainer's own.
    """

    precision: str | None = None
    tf32: bool | None = None
    half_precision: str | None = None
    compiled: bool | None = None
    num_workers: int | None = None
    cores: int | None = None
    pin_memory: bool | None = None
    fused_optimizer: bool | None = None
    checkpointing: bool | None = None
    tokens_per_batch: int | None = None
    samples_per_batch: int | None = None
    memory_free_share: float | None = None
    anomalies: bool = False
    profiler: str | None = None

    @property
    def full_precision(self) -> bool:
        """Known to run in float32."""
        return self.precision is not None and str(self.precision).split("-")[0] == "32"


class ModelFacts(Part):
    """Of the module that was profiled. ``bytes`` counts parameters and buffers; ``compiled``: any part of it is."""

    class_path: str
    parameters: int = figure("parameters", "count", "parameters of the module")
    parameters_without_embedding: int | None = figure(
        "parameters without embedding", "count", "all but those of the token embedding"
    )
    trainable_parameters: int = figure("trainable parameters", "count", "parameters that get gradients")
    bytes: int = figure("parameters and buffers", "GiB", "bytes of parameters and buffers", "model_bytes")
    precision: str
    optimizers: list[str]
    accumulate_grad_batches: int = figure("batches a step", "count", "batches whose gradients are accumulated")
    compiled: bool | None = None


SHARED = 0.05
"""Of the wanted CPU time, or of the GPU's: less of it that something else had is not seen in the times."""


class Flops(Part):
    """Floating-point operations of matrix products, convolutions and attention; in a record, a step's on all ranks.

    Causal attention counts in full, masked half included. ``recomputation`` is what activation checkpointing repeats.
    """

    forward: int = figure("forward work", "GFLOP", "FLOPs of a step's forward, all ranks", "forward_flops")
    backward: int = figure("backward work", "GFLOP", "FLOPs of a step's backward, all ranks", "backward_flops")
    recomputation: int = figure(
        "recomputed work", "GFLOP", "FLOPs of a step that activation checkpointing repeats, all ranks",
        "recomputation_flops",
    )  # fmt: skip
    causal_attention: Annotated[Literal["full"], Newer] = "full"

    @property
    def model(self) -> int:
        """The work that the model asks for: what MFU counts."""
        return self.forward + self.backward

    @property
    def all(self) -> int:
        """All the work that the devices are given: what HFU counts."""
        return self.model + self.recomputation

    def times(self, factor: float) -> Flops:
        """``factor`` times as many."""
        own = ((name, getattr(self, name)) for name in ("forward", "backward", "recomputation"))
        return self.model_copy(update={name: round(count * factor) for name, count in own})


class Utilisation(Part):
    """How close the mean step is to the hardware. Rates in FLOP/s; None is unknown.

    ``mfu`` is of model FLOPs (forward and backward), ``hfu`` of all that were executed, both over ``peak_flops_per_s``
    of all devices in ``dtype``, in which most is multiplied; ``ceiling_flops_per_s`` is one device's own rate in a
    large matrix product, measured after the run, and ``of_ceiling`` the share of it that the executed FLOPs reach.
    """

    mfu: float | None = figure(
        "MFU", "%", "model FLOPs of a step / (its time x the device's peak)", goes_by_step=True, place=Place.TABLE,
        run_tag="mfu_percent", tag="throughput/mfu",
    )  # fmt: skip
    hfu: float | None = figure(
        "HFU", "%", "all executed FLOPs of a step / (its time x the device's peak)", goes_by_step=True
    )
    peak_flops_per_s: float | None = figure(
        "peak of a device", "TFLOP/s", "FLOP/s of one device on its datasheet, in the run's precision"
    )
    dtype: str | None = figure("dtype of the peak", "text", "precision that the peak is of", "peak_dtype")
    peak_source: str | None = figure("source of the peak", "text", "where the peak of a device is from")
    ceiling_flops_per_s: float | None = figure(
        "measured matmul rate", "TFLOP/s", "FLOP/s of one device in a large matrix product, measured after the run"
    )
    of_ceiling: float | None = figure(
        "of the measured matmul rate", "%", "executed FLOPs of a step / (its time x the device's measured matmul rate)",
        goes_by_step=True,
    )  # fmt: skip
    flops: Flops


class GpuSharing(Part):
    """Other processes on the run's GPU at the end of the measured steps, as its driver tells. None is unknown.

    ``utilisation`` is the share of time in which kernels of theirs ran, ``memory_bytes`` what they held.
    """

    processes: int = figure("other processes on the GPU", "count", "at the end of the measured steps", "gpu_others")
    utilisation: float | None = figure(
        "GPU use of others", "%", "share of time in which their kernels ran", "gpu_others_utilisation"
    )
    memory_bytes: int | None = figure(
        "GPU memory of others", "GiB", "GPU memory of other processes", "gpu_others_bytes"
    )


class Telemetry(Part):
    """The GPU over the measured steps, as its driver tells; None where it does not.

    Whole-GPU figures, whoever else uses it. ``max_sm_clock_hz`` is the card's highest boost clock: more than the base
    clock that a datasheet guarantees, and more than many cards hold in long matrix products, which run into the power
    limit; ``clock_share`` is the median SM clock over it. ``median_power_w`` is NVML's power: on Ampere (but GA100) and
    later, a mean over the last second. ``energy_j`` is of the GPU's own counter (Volta and later; it moves every 20 to
    100 ms) or the integral of the power samples; either spans ``duration_s``, and a step's share goes by its time.
    ``throttle_reasons`` held in at least 5 % of the samples. ``gpus`` are the cards' UUIDs: of several, energy and
    power are sums, clocks are the slowest card's, the temperature is the highest, ``throttle_reasons`` are any card's.
    """

    energy_per_step_j: float | None = figure(
        "energy per step", "J", "energy of the GPU over the measured steps / their number", default=None
    )
    energy_per_token_j: float | None = figure("energy per token", "J", "energy of a step / its tokens", default=None)
    energy_j: float | None = figure("energy", "J", "energy of the GPU over the measured steps")
    energy_source: Annotated[Literal["counter", "power samples"] | None, Newer] = figure(
        "source of the energy", "text", "the GPU's own counter, or samples of its power"
    )
    median_power_w: float | None = figure("power", "W", "median power of the GPU over the measured steps")
    power_limit_w: float | None = figure("power limit", "W", "most power that the GPU may draw")
    median_temperature_c: float | None = figure("temperature", "°C", "median temperature of the GPU")
    median_sm_clock_hz: float | None = figure("SM clock", "MHz", "median clock of the GPU's multiprocessors")
    max_sm_clock_hz: float | None = figure("highest SM clock", "MHz", "highest boost clock of the card")
    clock_share: float | None = figure("SM clock / highest", "%", "median SM clock over the card's highest")
    throttle_reasons: list[str] | None = figure(
        "throttled by", "text", "reasons that held in 5 % of the samples or more"
    )
    samples: int = figure("samples", "count", "how often the GPU was read", "gpu_samples")
    duration_s: float = figure("sampled for", "s", "time that energy and samples span", "gpu_sampled_s")
    gpus: list[str] = Field(default_factory=list)


class Contention(Part):
    """What else used the machine over the measured steps, on the CPUs that the run may use. None is unknown.

    Seconds of CPU time: ``had_s`` of the run's own processes, ``others_s`` of all others, ``stolen_s`` of the
    hypervisor, ``throttled_s`` of the control group's limit. ``waited_s`` is how long the run's threads were ready and
    had no CPU, also because of each other. ``pressure`` is the share of ``wall_s`` in which something waited for a CPU;
    ``involuntary_switches`` how often this process lost one. ``not_had`` is the answer: the share of the wanted CPU
    time that something else had.
    """

    not_had: float | None = figure(
        "CPU time taken", "%", "share of the CPU time the run needed that something else took"
    )
    had_s: float = figure("CPU time of the run", "s", "CPU time of the run's own processes", "cpu_had_s")
    others_s: float | None = figure(
        "CPU time of other processes", "s", "CPU time of all other processes", "cpu_others_s"
    )
    stolen_s: float = figure("CPU time stolen", "s", "CPU time that a hypervisor took", "cpu_stolen_s")
    throttled_s: float | None = figure(
        "CPU time throttled", "s", "CPU time the cgroup's limit kept from the run", "cpu_throttled_s"
    )
    waited_s: float | None = figure(
        "waited for a CPU", "s", "how long threads of the run were ready and had no CPU", "cpu_waited_s"
    )
    pressure: float | None = figure(
        "something waited for a CPU", "%", "share of the time in which something waited", "cpu_pressure"
    )
    involuntary_switches: int | None = figure(
        "involuntary switches", "count", "how often this process lost a CPU it still wanted"
    )
    wall_s: float = figure("observed for", "s", "time that these figures span", "contention_wall_s")
    cpus: int = figure("CPUs", "count", "CPUs that the run may use")
    gpu: GpuSharing | None = None

    @property
    def shared(self) -> bool:
        """Whether something else took enough to be seen in the times."""
        on_gpu = self.gpu is not None and (self.gpu.utilisation or 0.0) >= SHARED
        return on_gpu or (self.not_had or 0.0) >= SHARED


class Sync(Part):
    """A line that made the host wait for the device, ``count`` times in the ``memory`` stage."""

    file: str = figure("file", "text", "of the line that made the host wait for the device")
    line: int = figure("line", "count", "its number")
    function: str = figure("function", "text", "what it is in")
    count: int = figure("times", "count", "how often it made the host wait")
    call: str = figure("call", "text", "what waits")


class FlopRate(Part):
    """FLOP/s of one device in matrix products of ``dtype``, as torch names that, and where the figure is from."""

    dtype: str = figure("dtype", "text", "of the factors of matrix products")
    flops_per_s: float = figure("FLOP rate", "TFLOP/s", "FLOP/s of one device that its products are held against")
    source: str = figure("source", "text", "where that figure is from")


class Rates(Part):
    """Of one device: the datasheet's figures, else the machine's own, measured after the run. None is unknown.

    ``flops`` has the dtypes of the run's products; where float32 products run in TF32, theirs is that rate.
    ``bytes_per_s`` is of the device's memory, reading and writing together; ``copied_bytes_per_s`` is what a large copy
    reached on this machine, read and written bytes counted.
    """

    flops: list[FlopRate] = Field(default_factory=list)
    bytes_per_s: float | None = figure(
        "memory bandwidth", "GB/s",
        "bytes/s that the memory of one device can read and write, on its datasheet or else copying",
        "bandwidth_bytes_per_s", default=None,
    )  # fmt: skip
    bytes_source: str | None = figure(
        "source of the bandwidth", "text", "where the memory bandwidth is from", "bandwidth_source", default=None
    )
    copied_bytes_per_s: float | None = figure(
        "measured copy rate", "GB/s", "bytes/s that a large copy on one device read and wrote, measured after the run",
        default=None,
    )  # fmt: skip

    def flops_per_s(self, dtype: str) -> float | None:
        """In products of ``dtype``, such as "bfloat16"."""
        return next((rate.flops_per_s for rate in self.flops if rate.dtype == dtype), None)
