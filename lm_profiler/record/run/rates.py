"""What one device can do at best."""

from __future__ import annotations

from pydantic import Field

from lm_profiler.record.figure import figure
from lm_profiler.record.run.part import Part


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
        "memory bandwidth",
        "GB/s",
        "bytes/s that the memory of one device can read and write, on its datasheet or else copying",
        "bandwidth_bytes_per_s",
        default=None,
    )
    bytes_source: str | None = figure(
        "source of the bandwidth", "text", "where the memory bandwidth is from", "bandwidth_source", default=None
    )
    copied_bytes_per_s: float | None = figure(
        "measured copy rate",
        "GB/s",
        "bytes/s that a large copy on one device read and wrote, measured after the run",
        default=None,
    )

    def flops_per_s(self, dtype: str) -> float | None:
        """In products of ``dtype``, such as "bfloat16"."""
        return next((rate.flops_per_s for rate in self.flops if rate.dtype == dtype), None)
