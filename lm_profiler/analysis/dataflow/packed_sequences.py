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
    """Return those of ``slices`` that a recurrent layer takes from packed sequences with ``lengths``.

    ``slices`` are the calls that compute the gradients of slices, or add up these gradients, with the needless share of
    each call.
    """
    return {
        number: share
        for number, share in slices.items()
        if packed_lengths_of(step, number) == lengths
    }


def without_packed_sequences(
    step: StepCalls, slices: Mapping[int, float]
) -> dict[int, float]:
    """Return those of ``slices`` that a loop of the program takes, not a recurrent layer from packed sequences."""
    return {
        number: share
        for number, share in slices.items()
        if packed_lengths_of(step, number) is None
    }
