"""What was run, and on what."""

from __future__ import annotations

from lm_profiler.record.run.part import Part


class Environment(Part):
    """What the figures were measured on."""

    versions: dict[str, str]
    platform: str
    cpu: str
    cpu_count: int
    threads: int
    device_type: str
    device_name: str
    device_bytes: int | None
    driver: str | None
    world_size: int
    flags: dict[str, str | bool]
    git_commit: str | None


class ModelFacts(Part):
    """Of the module that was profiled. ``bytes`` counts parameters and buffers; ``compiled``: any part of it is."""

    class_path: str
    parameters: int
    parameters_without_embedding: int | None
    trainable_parameters: int
    bytes: int
    precision: str
    optimizers: list[str]
    accumulate_grad_batches: int
    compiled: bool | None = None
