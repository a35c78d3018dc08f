"""The least time that a phase could take."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lm_profiler.record.run.part import Newer, Part


class Floor(Part):
    """What a phase of a step has to do at least on one device, and how long that takes at best. None is unknown.

    ``flops`` are of its products, by dtype of the factors; ``bytes`` have to move between the device and its memory (of
    ``transfer``: over the bus). ``seconds`` is the longer of what the FLOPs take at the peak and the bytes at the full
    bandwidth (``RunRecord.rates``), ``bound`` which of the two it is, and ``times`` how many times that the phase took:
    the mean of the measured steps over it.
    """

    flops: dict[str, int] = Field(default_factory=dict)
    bytes: int | None = None
    seconds: float | None = None
    bound: Annotated[Literal["compute", "memory"] | None, Newer] = None
    times: float | None = None
