"""Finds loops that take slice after slice of a tensor, each of which gets a gradient as large as the whole tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from lm_profiler.record.operator_calls import CodeLine, StepCalls

_BACKWARD = "backward"
# each fills a whole tensor with zeros, apart from the gradient of the slice
_SLICE_GRADIENTS = ("aten::select_backward", "aten::slice_backward")
_SUM = "aten::add"
_FEWEST_SLICES = 8  # of a tensor by a line: with fewer it is no loop


def gradients_of_slices(step: StepCalls) -> dict[int, float]:
    """Return the calls that compute the gradients of the slices of a loop, and those that add these gradients up.

    For n slices they write n whole tensors, of which all elements but those of the slice are zero, and add them up. If
    all slices are taken at once (``unbind``, ``split``), backward joins their gradients to one tensor.

    Returns:
        by the number of the call, the share of its work that is needless.
    """
    # by the line that takes the slices, and by the storage of the tensor from which they are taken
    gradients_by_tensor: defaultdict[tuple[CodeLine, int], list[int]] = defaultdict(
        list
    )
    for number, call in enumerate(step.calls):
        lines = step.lines_of(number)
        if call.name in _SLICE_GRADIENTS and call.forward is not None and lines:
            for storage in step.calls[call.forward].reads:
                gradients_by_tensor[lines[-1], storage].append(number)

    shares: dict[int, float] = {}
    for (_, storage), gradients in gradients_by_tensor.items():
        if len(gradients) < _FEWEST_SLICES:
            continue
        if not _can_be_taken_at_once(step, storage, gradients):
            continue
        needless_share = 1.0 - 1.0 / len(gradients)
        elements = step.calls[gradients[0]].elements
        for number in (*gradients, *_calls_that_add(step, gradients, elements)):
            shares[number] = needless_share
    return shares


def _can_be_taken_at_once(
    step: StepCalls, storage: int, gradients: Sequence[int]
) -> bool:
    """Return whether the slices of ``gradients`` do not overlap, and no call changes ``storage`` between them.

    A program that fills a table row by row reads the rows that it has written before.
    """
    slices: list[int] = []
    for gradient in gradients:
        forward = step.calls[gradient].forward
        assert forward is not None
        slices.append(forward)
    for writer in step.writers.get(storage, ()):
        if min(slices) < writer < max(slices):
            return False
    sliced_elements = sum(step.calls[number].elements for number in set(slices))
    return sliced_elements <= step.calls[gradients[0]].elements


def _calls_that_add(step: StepCalls, numbers: list[int], elements: int) -> set[int]:
    """Return the calls of backward that add results of the calls ``numbers``, if the sum has ``elements`` elements."""
    sums: set[int] = set()
    for number in numbers:
        for reader in step.readers_of_result(number):
            call = step.calls[reader]
            is_sum = call.phase == _BACKWARD and call.name.startswith(_SUM)
            if is_sum and call.elements == elements:
                sums.add(reader)
    return sums
