"""Columns about attention alone: FLOP/s of each pass, and their share of the device's peak.

FLOPs are those of FlashAttention's tables (Dao 2023): 4 for each pair of tokens and number of a query, half of it with
a causal mask; 2.5 times as many in backward, which computes the scores again.
"""

from __future__ import annotations

from functools import partial

from lm_profiler.record.entry import Entry
from lm_profiler.record.quantities import TIMES
from lm_profiler.report.tables.column import Column, asked_column

_FLOPS_OF_PAIR = 4
_BACKWARD_OVER_FORWARD = 2.5
_PASSES = ("forward", "backward")


def attention_columns() -> list[Column]:
    """Return the columns; they are unknown for runs of anything but attention alone."""
    columns = []
    for phase in _PASSES:
        name = f"attention_{phase}_flops_per_s"
        meaning = f"FLOPs of attention alone / the time of its {phase}"
        flops_per_s = partial(_flops_per_s, phase)
        title = f"attention {phase}"
        columns.append(asked_column(name, title, meaning, flops_per_s, "TFLOP/s"))
        name = f"attention_{phase}_of_peak"
        meaning = f"the same over the device's peak, {phase}"
        share = partial(_share_of_peak, phase)
        title = f"attention {phase} of peak"
        columns.append(asked_column(name, title, meaning, share, "%"))
    return columns


def _flops_per_s(phase: str, entry: Entry) -> float | None:
    """Return the FLOP/s of attention in ``phase``; None if its FLOPs or its time are unknown."""
    flops = _forward_flops(entry)
    if flops is None or entry.record is None:
        return None
    seconds = TIMES[phase].get(entry.record)
    if not seconds:
        return None
    if phase == "backward":
        flops *= _BACKWARD_OVER_FORWARD
    return float(flops / seconds)


def _share_of_peak(phase: str, entry: Entry) -> float | None:
    """Return the same as a share of the device's peak; None also if that is unknown."""
    flops_per_s = _flops_per_s(phase, entry)
    if flops_per_s is None or entry.record is None:
        return None
    use = entry.record.utilisation
    if use is None or not use.peak_flops_per_s:
        return None
    return float(flops_per_s / use.peak_flops_per_s)


def _forward_flops(entry: Entry) -> float | None:
    """Return the FLOPs of a forward pass over all sequences; None for a run of anything but attention alone."""
    width = entry.option("model.d_model")
    tokens = entry.option("data.context_length")
    sequences = entry.option("data.batch_size")
    numbers = (width, tokens, sequences)
    # Models of whole layers have one of these options, and the module that is only attention has none.
    has_layers = any(
        entry.option(option) is not None
        for option in ("model.size", "model.num_layers")
    )
    are_known = all(isinstance(number, int) for number in numbers)
    if has_layers or not are_known:
        return None
    # ``width`` is the numbers of a token's query, over all heads
    flops = float(_FLOPS_OF_PAIR * sequences * tokens**2 * width)
    is_causal = entry.option("model.is_causal")
    if is_causal is None or is_causal:
        return flops / 2
    return flops
