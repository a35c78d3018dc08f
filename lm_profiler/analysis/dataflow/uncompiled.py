"""Finds how much of a step ``torch.compile`` leaves as it is."""

from __future__ import annotations

from lm_profiler.record.operator_calls import StepCalls

_FORWARD, _BACKWARD = "forward", "backward"


def uncompiled_shares(step: StepCalls) -> dict[str, float]:
    """Return the shares of the operators of forward and of backward, by their time, that torch.compile does not fuse.

    These are the operators of torch's recurrent layers, such as ``nn.GRU``, and of their backward passes. They are all
    operators if backward differentiates gradients that forward has computed (``create_graph=True``), as for forces of
    molecules: torch.compile does not support that. A phase without such operators is missing.
    """
    if _differentiates_gradients(step):
        return {_FORWARD: 1.0, _BACKWARD: 1.0}
    seconds = {_FORWARD: 0.0, _BACKWARD: 0.0}
    for number, call in enumerate(step.calls):
        if call.is_of_recurrent_layer:
            for related in step.with_backward(number):
                phase = step.calls[related].phase
                if phase in seconds:
                    seconds[phase] += step.calls[related].seconds
    return {
        phase: uncompiled_s / step.phase_s[phase]
        for phase, uncompiled_s in seconds.items()
        if uncompiled_s > 0.0
    }


def _differentiates_gradients(step: StepCalls) -> bool:
    """Return whether backward differentiates gradients that forward has computed by a backward pass of its own."""
    for call in step.calls:
        if call.phase != _BACKWARD or call.forward is None:
            continue
        differentiated = step.calls[call.forward]
        # a call that has a forward call belongs to a backward pass
        computes_gradient = differentiated.forward is not None
        if differentiated.phase == _FORWARD and computes_gradient:
            return True
    return False
