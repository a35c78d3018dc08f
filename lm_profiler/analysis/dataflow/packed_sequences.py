"""Finds recurrent layers that take slice after slice of packed sequences, where a padded tensor needs no slices."""

from __future__ import annotations

from collections.abc import Mapping

from lm_profiler.record.operator_calls import OperatorCall, PackedLengths, StepCalls


def packed_lengths_of(step: StepCalls, number: int) -> PackedLengths | None:
    """Return the ``packed_lengths`` of a call, or those of the forward call to whose backward pass it belongs.

    None if it does not work on packed sequences.
    """
    call: OperatorCall = step.calls[number]
    if call.packed_lengths is None and call.forward is not None:
        call = step.calls[call.forward]
    return call.packed_lengths


def calls_on_packed_sequences(
    step: StepCalls, slices: Mapping[int, float], lengths: PackedLengths
) -> dict[int, float]:
    """Return those of ``slices`` that work on packed sequences with ``lengths``, because a recurrent layer takes them.

    ``slices`` are the calls that compute the gradients of slices, or add these up, with the needless share of each.
    """
    return {
        number: share
        for number, share in slices.items()
        if packed_lengths_of(step, number) == lengths
    }


def without_packed_sequences(
    step: StepCalls, slices: Mapping[int, float]
) -> dict[int, float]:
    """Return those of ``slices`` that do not work on packed sequences, so that a loop of the program takes them."""
    return {
        number: share
        for number, share in slices.items()
        if packed_lengths_of(step, number) is None
    }
