"""Columns about attention alone: FLOP/s of each pass, and their share of the device's peak.

FLOPs are counted as in FlashAttention's tables (Dao 2023): 4 per pair of tokens and element of a query, half of that
with a causal mask, and 2.5 times as many in backward, which computes the scores again.
"""

from __future__ import annotations

from functools import partial

from lm_profiler.record.entry import Entry
from lm_profiler.record.quantities import TIMES
from lm_profiler.report.tables.column import Column, asked_column

_FLOPS_OF_PAIR = 4  # per pair of tokens and element of a query
_BACKWARD_OVER_FORWARD = 2.5
_PASSES = ("forward", "backward")


def attention_columns() -> list[Column]:
    """Return the columns; their values are known only for runs that measure attention alone."""
    columns = []
    for phase in _PASSES:
        rate = asked_column(
            f"attention_{phase}_flops_per_s",
            f"attention {phase}",
            f"FLOPs of the {phase} pass of attention, divided by its time",
            partial(_flops_per_s, phase),
            "TFLOP/s",
        )
        share = asked_column(
            f"attention_{phase}_of_peak",
            f"attention {phase} of peak",
            f"FLOP/s of the {phase} pass of attention, as a share of the device's peak",
            partial(_share_of_peak, phase),
            "%",
        )
        columns += [rate, share]
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
    """Return the FLOP/s of attention in ``phase`` as a share of the device's peak; None if either is unknown."""
    flops_per_s = _flops_per_s(phase, entry)
    if flops_per_s is None or entry.record is None:
        return None
    use = entry.record.utilisation
    if use is None or not use.peak_flops_per_s:
        return None
    return float(flops_per_s / use.peak_flops_per_s)


def _forward_flops(entry: Entry) -> float | None:
    """Return the FLOPs of a forward pass over all sequences; None unless the run measures attention alone."""
    width = entry.option("model.d_model")
    tokens = entry.option("data.context_length")
    sequences = entry.option("data.batch_size")
    numbers = (width, tokens, sequences)
    # Models with whole layers have one of these options; the module that is only attention has neither.
    has_layers = any(
        entry.option(option) is not None
        for option in ("model.size", "model.num_layers")
    )
    are_known = all(isinstance(number, int) for number in numbers)
    if has_layers or not are_known:
        return None
    # ``width`` is the number of elements of a token's query over all heads.
    flops = float(_FLOPS_OF_PAIR * sequences * tokens**2 * width)
    is_causal = entry.option("model.is_causal")
    if is_causal is None or is_causal:
        return flops / 2
    return flops
