"""The one registry of what is measured: names, units, how to print, TensorBoard tags and meanings.

Columns of ``steps.csv``, keys of ``run.json``, tags, table headers and the documentation come from here.
"""

from __future__ import annotations

from dataclasses import dataclass

PHASES = ("data", "transfer", "forward", "zero_grad", "backward", "clip", "optimizer")
PARTS = (*PHASES, "other")
"""What a step is cut into: the phases, and ``other`` for what no phase covers. They add up to the step."""

TIMED = (*PARTS, "step")

_MEANINGS = {
    "data": "the loop asks for a batch, until it has it",
    "transfer": "the batch goes to the device",
    "forward": "training_step (or validation_step, test_step, predict_step)",
    "zero_grad": "gradients are cleared",
    "backward": "backward, without the hooks around it",
    "clip": "gradient clipping",
    "optimizer": "the optimizer's own arithmetic",
    "other": "what no phase covers: hooks, loggers, schedulers, the loop itself",
    "step": "from asking for the step's first batch to asking for the next step's",
    "forward_backward": "forward and backward added up within each step",
}


@dataclass(frozen=True)
class Quantity:
    """One measured quantity. Stored in SI under ``name``; shown as ``value * scale`` in ``shown_unit``."""

    name: str
    title: str
    unit: str
    shown_unit: str
    scale: float
    digits: int
    tag: str | None
    meaning: str

    def show(self, value: float | None, unit: bool = True, digits: int | None = None) -> str:
        """``value`` (SI) for people; ``unknown`` for None. ``digits`` behind the point, if not the usual ones."""
        if value is None:
            return "unknown"
        number = f"{value * self.scale:,.{self.digits if digits is None else digits}f}"
        return f"{number} {self.shown_unit}" if unit and self.shown_unit else number


def _seconds(part: str, clock: str) -> Quantity:
    host = clock == "host"
    return Quantity(
        name=f"{part}_host_s" if host else f"{part}_s",
        title=part.replace("forward_backward", "forward + backward"),
        unit="s",
        shown_unit="ms",
        scale=1e3,
        digits=3,
        tag=f"{'host_time_ms' if host else 'time_ms'}/{part}",
        meaning=_MEANINGS[part] + (", on the host's clock" if host else ""),
    )


def _bytes(reading: str, title: str, meaning: str) -> Quantity:
    return Quantity(f"{reading}_bytes", title, "bytes", "GiB", 2.0**-30, 3, f"memory_gib/{reading}", meaning)


def counted(count: int, noun: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


TIMES = {part: _seconds(part, "device") for part in (*TIMED, "forward_backward")}
"""Time on the device's stream; where there is none, the host's."""
HOST_TIMES = {part: _seconds(part, "host") for part in (*TIMED, "forward_backward")}
MEMORY = {
    "allocated_peak": _bytes("allocated_peak", "peak allocated", "most bytes held by tensors on the device"),
    "reserved_peak": _bytes("reserved_peak", "peak reserved", "most bytes the allocator took from the device"),
    "resident_peak": _bytes("resident_peak", "peak resident", "most bytes of the process in the machine's memory"),
}
TOKENS = Quantity("tokens", "tokens", "1", "", 1.0, 0, None, "tokens trained on in the step")
TOKENS_PER_S = Quantity(
    "tokens_per_s",
    "tokens/s",
    "1/s",
    "tokens/s",
    1.0,
    0,
    "throughput/tokens_per_s",
    "tokens of a step / its time",
)
MFU = Quantity(
    "mfu",
    "MFU",
    "1",
    "%",
    100.0,
    1,
    "throughput/mfu",
    "model FLOPs of a step / (its time x the device's peak)",
)

STEP_COLUMNS = (
    "step",
    "stage",
    *(TIMES[part].name for part in TIMED),
    *(HOST_TIMES[part].name for part in TIMED),
    TOKENS.name,
    *(quantity.name for quantity in MEMORY.values()),
    "rank",
)
"""The header of ``steps.csv``."""
