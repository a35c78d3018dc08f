"""The least time that a phase could take."""

from __future__ import annotations

from typing import Annotated, Literal

from lm_profiler.record.figure import figure
from lm_profiler.record.run.part import Newer, Part


class Floor(Part):
    """What a phase of a step has to do at least on one device, and how long that takes at best. None is unknown.

    ``flops`` are of its products, by dtype of the factors; ``bytes`` have to move between the device and its memory (of
    ``transfer``: over the bus). ``seconds`` is the longer of what the FLOPs take at the peak and the bytes at the full
    bandwidth (``RunRecord.rates``), ``bound`` which of the two it is, and ``times`` how many times that the phase took:
    the mean of the measured steps over it.
    """

    flops: dict[str, int] = figure(
        "in {key}", "GFLOP", "FLOPs of PHASE whose factors are {key}, one device", "{key}_flops",
        keys=("float32", "bfloat16", "float16", "float64"), default_factory=dict,
    )  # fmt: skip
    bytes: int | None = figure(
        "bytes at least", "GiB", "bytes that PHASE has to move at least, one device", "floor_bytes", default=None
    )
    seconds: float | None = figure(
        "floor (ms)",
        "ms",
        "least time of PHASE: its FLOPs at the peak or its bytes at the bandwidth",
        "floor_s",
        default=None,
    )
    bound: Annotated[Literal["compute", "memory"] | None, Newer] = figure(
        "floor is of", "text", "what the floor of PHASE is of: compute or memory", "floor_bound", default=None
    )
    times: float | None = figure("x floor", "x", "mean time of PHASE over its floor", "times_floor", default=None)
