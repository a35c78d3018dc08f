"""Finds gradients that are zero because of the values of a step, and not because a position is never used.

A position behind a ReLU that is zero, or one that is not the largest, has no gradient in this step, but may have one in
the next.
"""

from __future__ import annotations

from lm_profiler.record.operator_calls import StepCalls

_FORWARD, _BACKWARD = "forward", "backward"
# beginnings of the names of operators of forward that choose positions by their values
_CHOOSING = (
    "aten::adaptive_max_pool",
    "aten::amax",
    "aten::amin",
    "aten::kthvalue",
    "aten::max",
    "aten::median",
    "aten::min",
    "aten::scatter_reduce",
    "aten::sort",
    "aten::topk",
)
# Operators of forward whose gradient is zero for some of the values that they get. Others multiply or choose by a
# tensor: that is by value only if forward computed it from the weights, unlike a mask of the data.
_CLIPPING = (
    "aten::clamp",
    "aten::clamp_max",
    "aten::clamp_min",
    "aten::hardshrink",
    "aten::hardsigmoid",
    "aten::hardswish",
    "aten::hardtanh",
    "aten::relu",
    "aten::relu_",
    "aten::sigmoid",
    "aten::softshrink",
    "aten::tanh",
    "aten::threshold",
)
# operators of forward that choose by an index, a mask or labels
_CHOOSING_BY_TENSOR = (
    "aten::gather",
    "aten::index",
    "aten::index_select",
    "aten::masked_select",
    "aten::nll_loss2d_forward",
    "aten::nll_loss_forward",
)
_LEAST_EXPLAINED_SHARE = 0.5  # a source must explain at least this share of the zeros


class ZerosByValue:
    """The calls of a backward pass that make gradients zero because of values, and what they lead to."""

    def __init__(self, step: StepCalls) -> None:
        self._step = step
        self._made_from_weights = _storages_made_from_weights(step)
        self._sources = [
            number for number in range(len(step.calls)) if self._is_source(number)
        ]
        # by the number of a source: the storages that it leads to
        self._reached: dict[int, set[int]] = {}

    def explain(self, gradient: int, positions: int, zero_share: float) -> bool:
        """Return whether values explain that ``zero_share`` of the ``positions`` of a gradient are zero.

        ``gradient`` is the storage of the gradient.
        """
        for source in self._sources:
            share = self._share_made_zero(source, positions)
            if (
                share >= _LEAST_EXPLAINED_SHARE * zero_share
                and gradient in self._reached_from(source)
            ):
                return True
        return False

    def _is_source(self, number: int) -> bool:
        """Return whether call ``number`` is one of backward that makes gradients zero because of values."""
        call = self._step.calls[number]
        if call.phase != _BACKWARD or call.forward is None:
            return False
        forward_name = self._step.calls[call.forward].name
        if self._chooses(call.forward):
            return True
        if call.made_zero_rows <= 0.0 and call.made_zero_elements <= 0.0:
            return False
        if forward_name in _CLIPPING:
            return True
        return not self._made_from_weights.isdisjoint(call.reads)

    def _chooses(self, forward: int) -> bool:
        """Return whether the call ``forward`` chooses positions by values, or by what is computed from weights."""
        call = self._step.calls[forward]
        if call.name.startswith(_CHOOSING):
            return True
        # One such storage has the values from which the call chooses; a second one is the tensor by which it chooses.
        made_from_weights = self._made_from_weights.intersection(call.reads)
        return call.name in _CHOOSING_BY_TENSOR and len(made_from_weights) > 1

    def _share_made_zero(self, source: int, positions: int) -> float:
        """Return the share of ``positions`` at which the call ``source`` makes the gradient zero."""
        call = self._step.calls[source]
        assert call.forward is not None
        if self._chooses(call.forward):
            return 1.0
        if call.elements == positions:  # one element for each position
            return call.made_zero_elements
        return call.made_zero_rows

    def _reached_from(self, source: int) -> set[int]:
        """Return the storages of gradients that are computed from the results of the call ``source``."""
        if source in self._reached:
            return self._reached[source]
        reached = set(self._step.calls[source].writes)
        for call in self._step.calls[source + 1 :]:
            if call.phase == _BACKWARD and not reached.isdisjoint(call.reads):
                reached.update(call.writes)
        self._reached[source] = reached
        return reached


def _storages_made_from_weights(step: StepCalls) -> set[int]:
    """Return the storages that forward computes from trained weights."""
    made: set[int] = set()
    for call in step.calls:
        if call.phase != _FORWARD:
            continue
        reads_weights = not step.trained.isdisjoint(call.reads)
        if reads_weights or not made.isdisjoint(call.reads):
            made.update(call.writes)
    return made
