"""The least that a phase could take: figures of each phase that has work to do."""

from __future__ import annotations

from lm_profiler.record.parts import PHASES
from lm_profiler.record.quantities.quantity import Place, Quantity, figure

_WORKING = [phase for phase in PHASES if phase != "data"]
_MULTIPLYING = ("forward", "backward")
_DTYPES = ("float32", "bfloat16", "float16", "float64")

_FIGURES = (
    ("seconds", "floor (ms)", "ms", "least time of {}: its FLOPs at the peak or its bytes at the bandwidth", "floor_s"),
    ("times", "x floor", "x", "mean time of {} over its floor", "times_floor"),
    ("bound", "floor is of", "text", "what the floor of {} is of: compute or memory", "floor_bound"),
    ("bytes", "bytes at least", "GiB", "bytes that {} has to move at least, one device", "floor_bytes"),
)


FLOOR, TIMES_FLOOR = (
    figure(field, title, unit, meaning.format("the phase"), name) for field, title, unit, meaning, name in _FIGURES[:2]
)
"""Columns of a table of phases."""


def _of_phase(phase: str, field: str, title: str, unit: str, meaning: str, name: str) -> Quantity:
    path = f"floors.{phase}.{field}"
    more = {"of": phase, "place": Place.ASKED}
    return figure(path, f"{phase}: {title}", unit, meaning.format(phase), f"{phase}_{name}", **more)


def _of_dtype(phase: str, dtype: str) -> Quantity:
    told = f"FLOPs of {{}} whose factors are {dtype}, one device"
    return _of_phase(phase, f"flops.{dtype}", f"in {dtype}", "GFLOP", told, f"{dtype}_flops")


FLOORS = (
    *(_of_phase(phase, *row) for row in _FIGURES for phase in _WORKING),
    *(_of_dtype(phase, dtype) for dtype in _DTYPES for phase in _MULTIPLYING),
)
