"""Finds recurrent layers that take slice after slice of packed sequences, where a padded tensor needs no slices."""

from __future__ import annotations

from collections.abc import Mapping

from lm_profiler.record.operator_calls import OperatorCall, PackedLengths, StepCalls


def packed_lengths_of(step: StepCalls, number: int) -> PackedLengths | None:
    """Return how the lengths of the packed sequences differ that a call works on; None for all other calls.

    A call of a backward pass works on those of its forward call.
    """
    call: OperatorCall = step.calls[number]
    if call.packed_lengths is None and call.forward is not None:
        call = step.calls[call.forward]
    return call.packed_lengths


def calls_on_packed_sequences(
    step: StepCalls, slices: Mapping[int, float], lengths: PackedLengths
) -> dict[int, float]:
    """Return the calls for the gradients of ``slices`` that recurrent layers take of sequences of such ``lengths``.

    ``slices`` are all calls that compute such gradients, or add them up, with the needless share of each.
    """
    shares: dict[int, float] = {}
    for number, share in slices.items():
        if packed_lengths_of(step, number) == lengths:
            shares[number] = share
    return shares


def without_packed_sequences(
    step: StepCalls, numbers: Mapping[int, float]
) -> dict[int, float]:
    """Return ``numbers`` without calls of layers that get packed sequences: no loop of the program makes them."""
    return {
        number: share
        for number, share in numbers.items()
        if packed_lengths_of(step, number) is None
    }
