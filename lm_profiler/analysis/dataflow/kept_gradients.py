"""Finds gradients that are filled with zeros before each backward pass, instead of being dropped."""

from __future__ import annotations

from lm_profiler.record.operator_calls import StepCalls

_ZERO_GRAD, _OPTIMIZER = "zero_grad", "optimizer"
_FILL = "aten::zero_"
_FILL_OF_LIST = "aten::_foreach_zero_"
# Larger gradients may be cheaper to keep: the C library returns the memory of a dropped one to the system (32 MiB, at
# most four bytes an element), so each new one costs page faults.
_MOST_ELEMENTS = 1 << 23


def calls_for_kept_gradients(step: StepCalls) -> dict[int, float]:
    """Return the calls that fill gradients with zeros, and those of the optimizer if it reads gradients that stay zero.

    Returns:
        by the number of the call, the share of its time that ``set_to_none=True`` saves. Of the optimizer that is the
        share of elements whose gradients only the fills write: those of layers that the step does not use.
    """
    fills = []
    for number, call in enumerate(step.calls):
        is_fill = call.name in (_FILL, _FILL_OF_LIST)
        if call.phase == _ZERO_GRAD and is_fill and call.size < _MOST_ELEMENTS:
            fills.append(number)
    shares = dict.fromkeys(fills, 1.0)
    unused_share = _unused_share(step, fills)
    if unused_share > 0.0:
        for number, call in enumerate(step.calls):
            if call.phase == _OPTIMIZER:
                shares[number] = unused_share
    return shares


def _unused_share(step: StepCalls, fills: list[int]) -> float:
    """Return the share of the filled elements that the step leaves zero; 0 if they are filled in one call."""
    unused_elements = 0
    all_elements = 0
    for number in fills:
        call = step.calls[number]
        all_elements += call.elements
        writers = {
            step.calls[writer].name
            for storage in call.writes
            for writer in step.writers[storage]
        }
        if writers == {_FILL}:
            unused_elements += call.elements
    return unused_elements / all_elements if all_elements else 0.0
