"""Finds losses of logits that were transposed to (batch, classes, positions): flat ones have a faster softmax."""

from __future__ import annotations

from lm_profiler.record.operator_calls import StepCalls

_FORWARD, _BACKWARD = "forward", "backward"
_LOSSES = ("aten::nll_loss2d_forward", "aten::nll_loss_forward")
_COPIES = ("aten::clone", "aten::copy_", "aten::_to_copy")
# The share of the time that flat logits save on a CPU. Alone, softmax and its backward pass took 62 to 75 % less (for
# 100 to 8,000 classes). In a whole step it was half of their time: new memory costs the next operator instead.
_SAVED_SHARE = 0.5


def calls_on_transposed_logits(step: StepCalls) -> dict[int, float]:
    """Return the calls of a cross entropy that are slower because its logits are transposed.

    Returns:
        by the number of a call, or of a call of its backward pass, the share of its time that flat logits save. The
        gradient of the logits need not be copied to the layout of the layer before.
    """
    shares: dict[int, float] = {}
    for number, call in enumerate(step.calls):
        is_softmax = call.has_transposed_logits and call.phase == _FORWARD
        if not is_softmax or not _is_read_by_loss(step, number):
            continue
        shares[number] = _SAVED_SHARE
        for backward in step.backward_of.get(number, ()):
            shares[backward] = _SAVED_SHARE
            for copy in _copies_of_result(step, backward):
                shares[copy] = _SAVED_SHARE
    return shares


def _is_read_by_loss(step: StepCalls, number: int) -> bool:
    """Return whether a loss reads the result of call ``number``."""
    return any(
        step.calls[reader].name in _LOSSES for reader in step.readers_of_result(number)
    )


def _copies_of_result(step: StepCalls, number: int) -> list[int]:
    """Return the calls of backward that copy the result of call ``number``."""
    copies: list[int] = []
    for reader in step.readers_of_result(number):
        call = step.calls[reader]
        if call.phase == _BACKWARD and call.name in _COPIES:
            copies.append(reader)
    return copies
