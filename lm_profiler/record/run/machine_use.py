"""What a run made of its machine, and what else used that."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lm_profiler.record.run.part import Newer, Part

SHARED = 0.05
"""Of the wanted CPU time, or of the GPU's: less of it that something else had is not seen in the times."""


class Flops(Part):
    """Floating-point operations of matrix products, convolutions and attention; in a record, a step's on all ranks.

    Causal attention counts in full, masked half included. ``recomputation`` is what activation checkpointing repeats.
    """

    forward: int
    backward: int
    recomputation: int
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

    flops: Flops
    dtype: str | None
    peak_flops_per_s: float | None
    peak_source: str | None
    mfu: float | None
    hfu: float | None
    ceiling_flops_per_s: float | None
    of_ceiling: float | None


class GpuSharing(Part):
    """Other processes on the run's GPU at the end of the measured steps, as its driver tells. None is unknown.

    ``utilisation`` is the share of time in which kernels of theirs ran, ``memory_bytes`` what they held.
    """

    processes: int
    utilisation: float | None
    memory_bytes: int | None


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

    samples: int
    duration_s: float
    median_sm_clock_hz: float | None
    max_sm_clock_hz: float | None
    clock_share: float | None
    median_temperature_c: float | None
    median_power_w: float | None
    power_limit_w: float | None
    energy_j: float | None
    energy_source: Annotated[Literal["counter", "power samples"] | None, Newer]
    energy_per_step_j: float | None = None
    energy_per_token_j: float | None = None
    throttle_reasons: list[str] | None
    gpus: list[str] = Field(default_factory=list)


class Contention(Part):
    """What else used the machine over the measured steps, on the CPUs that the run may use. None is unknown.

    Seconds of CPU time: ``had_s`` of the run's own processes, ``others_s`` of all others, ``stolen_s`` of the
    hypervisor, ``throttled_s`` of the control group's limit. ``waited_s`` is how long the run's threads were ready and
    had no CPU, also because of each other. ``pressure`` is the share of ``wall_s`` in which something waited for a CPU;
    ``involuntary_switches`` how often this process lost one. ``not_had`` is the answer: the share of the wanted CPU
    time that something else had.
    """

    wall_s: float
    cpus: int
    had_s: float
    waited_s: float | None
    others_s: float | None
    stolen_s: float
    throttled_s: float | None
    pressure: float | None
    involuntary_switches: int | None
    not_had: float | None
    gpu: GpuSharing | None = None

    @property
    def shared(self) -> bool:
        """Whether something else took enough to be seen in the times."""
        on_gpu = self.gpu is not None and (self.gpu.utilisation or 0.0) >= SHARED
        return on_gpu or (self.not_had or 0.0) >= SHARED


class Sync(Part):
    """A line that made the host wait for the device, ``count`` times in the ``memory`` stage."""

    file: str
    line: int
    function: str
    count: int
    call: str
