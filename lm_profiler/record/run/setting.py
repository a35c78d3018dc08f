"""What was run, and on what."""

from __future__ import annotations

from lm_profiler.record.figure import figure
from lm_profiler.record.run.part import Part


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
