"""Finds the costliest place of the program without layers or torch's losses, such as a regulariser or augmentation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from lm_profiler.record.operator_calls import CodeLine, OperatorCall, StepCalls

_FORWARD, _BACKWARD = "forward", "backward"
# operators of layers that are no matrix products
_LAYERS = (
    "aten::embedding",
    "aten::_embedding_bag",
    "aten::convolution",
    "aten::native_layer_norm",
    "aten::native_batch_norm",
    "aten::native_group_norm",
    "aten::_fused_rms_norm",
    "aten::mkldnn_rnn_layer",
    "aten::_cudnn_rnn",
    "aten::miopen_rnn",
    "aten::_transformer_encoder_layer_fwd",
    "aten::_native_multi_head_attention",
    "aten::_scaled_mm",
    "aten::_int_mm",
    "aten::_grouped_mm",
)
# the beginning of the names of fused attention
_FUSED_ATTENTION = "aten::_scaled_dot_product"
# torch's losses: training needs them, however much they cost
_LOSSES = (
    "aten::nll_loss_forward",
    "aten::nll_loss2d_forward",
    "aten::_ctc_loss",
    "aten::mse_loss",
    "aten::binary_cross_entropy",
    "aten::binary_cross_entropy_with_logits",
    "aten::smooth_l1_loss",
    "aten::huber_loss",
)
_LOG_SOFTMAX = "aten::_log_softmax"
_COPIES = ("aten::_to_copy", "aten::clone")
# operators that read or write rows, or elements, by their numbers
_ROW_COPIES = (
    "aten::index",
    "aten::index_select",
    "aten::index_add",
    "aten::index_add_",
    "aten::index_put",
    "aten::index_put_",
    "aten::gather",
    "aten::scatter",
    "aten::scatter_",
    "aten::scatter_add",
    "aten::scatter_add_",
)
# A place is a line or a function, with all that it calls.
# A place may spend at most this share of its time in layers and losses.
_MOST_SHARE_IN_LAYERS = 0.05
# A place must take at least this share of the time of the operators of forward and backward.
_LEAST_SHARE = 0.15
# A place within the costliest one is reported instead if it takes at least this share of its time.
_LEAST_SHARE_OF_INNER_PLACE = 0.8
_WHOLE_FUNCTION = 0  # stands for a whole function, in place of the number of a line


class SideWork(NamedTuple):
    """The costliest place without layers or losses."""

    calls: list[int]  # its calls and those of their backward passes
    line: CodeLine  # the line that leads to most of their time
    # whether they compute from the outputs of layers what other layers read, as an activation function does
    is_between_layers: bool


def side_work(step: StepCalls, attention: Collection[int]) -> SideWork | None:
    """Return the costliest place without layers or losses.

    A place is a line or a function, with all that it calls. Returns None if the place takes less than 15 % of the time
    of the operators of forward and backward. ``attention`` are the calls of attention, which counts as a layer.
    """
    layers = _calls_of_layers(step).union(attention)
    layers_and_losses = layers | _calls_of_losses(step)
    places_by_call = {
        number: _places_of(call)
        for number, call in enumerate(step.calls)
        if call.phase == _FORWARD
    }
    seconds: defaultdict[CodeLine, float] = defaultdict(float)
    seconds_in_layers: defaultdict[CodeLine, float] = defaultdict(float)
    for number, places in places_by_call.items():
        call_s = step.seconds_with_backward(number)
        for place in places:
            seconds[place] += call_s
            if number in layers_and_losses:
                seconds_in_layers[place] += call_s

    places_without_layers = {
        place
        for place, place_s in seconds.items()
        if seconds_in_layers[place] <= _MOST_SHARE_IN_LAYERS * place_s
    }
    calls_by_place = _calls_by_outermost_place(places_by_call, places_without_layers)
    costliest = max(calls_by_place, key=seconds.__getitem__, default=None)
    model_s = step.phase_s.get(_FORWARD, 0.0) + step.phase_s.get(_BACKWARD, 0.0)
    least_s = _LEAST_SHARE * model_s
    if costliest is None or seconds[costliest] < least_s:
        return None

    place = costliest
    if seconds_in_layers[costliest] > 0.0:
        # It has a few layers, so it may be the whole program: what takes its time is in a function that it calls.
        place = _main_inner_place(step, costliest, calls_by_place[costliest])
    side_calls = [
        number
        for number in calls_by_place[costliest]
        if place in places_by_call[number] and number not in layers_and_losses
    ]
    line = place
    if place.line == _WHOLE_FUNCTION:
        line = _main_line(step, place, side_calls)
    is_between_layers = _is_between(step, side_calls, layers)
    calls: list[int] = []
    for number in side_calls:
        calls += step.with_backward(number)
    if is_between_layers:
        # The remedy is to compile them, which saves the time only of those that can be fused.
        calls = [number for number in calls if _is_fusable(step.calls[number])]
        if sum(step.calls[number].seconds for number in calls) < least_s:
            return None
    return SideWork(calls, line, is_between_layers)


def _calls_by_outermost_place(
    places_by_call: Mapping[int, Sequence[CodeLine]], candidates: Collection[CodeLine]
) -> dict[CodeLine, list[int]]:
    """Return the calls of each of the ``candidates``; a call counts for the outermost of its places among them."""
    calls_by_place: defaultdict[CodeLine, list[int]] = defaultdict(list)
    for number, places in places_by_call.items():
        for place in places:
            if place in candidates:
                calls_by_place[place].append(number)
                break
    return calls_by_place


def _is_fusable(call: OperatorCall) -> bool:
    """Return whether a call could become a part of another one: neither a matrix product nor a copy of rows."""
    return call.product is None and call.name not in _ROW_COPIES


def _main_inner_place(
    step: StepCalls, place: CodeLine, numbers: Iterable[int]
) -> CodeLine:
    """Return the innermost place that has most of the time of ``place``: one within it, or else ``place`` itself.

    ``numbers`` are the calls of ``place``.
    """
    seconds: defaultdict[CodeLine, float] = defaultdict(float)
    depths: dict[CodeLine, int] = {}
    for number in numbers:
        places = _places_of(step.calls[number])
        for depth in range(places.index(place), len(places)):
            seconds[places[depth]] += step.seconds_with_backward(number)
            depths[places[depth]] = depth
    least_s = _LEAST_SHARE_OF_INNER_PLACE * seconds[place]
    main_places = [inner for inner, inner_s in seconds.items() if inner_s >= least_s]
    return max(main_places, key=depths.__getitem__)


def _is_between(
    step: StepCalls, numbers: Iterable[int], layers: Collection[int]
) -> bool:
    """Return whether most of the time of the calls ``numbers`` of forward is between two of the ``layers``."""
    forward = [
        number for number, call in enumerate(step.calls) if call.phase == _FORWARD
    ]
    from_layers: set[int] = set()  # storages that depend on the output of a layer
    calls_after_layers: set[int] = set()
    for number in forward:
        call = step.calls[number]
        if not from_layers.isdisjoint(call.reads):
            calls_after_layers.add(number)
        if number in layers or number in calls_after_layers:
            from_layers.update(call.writes)
    to_layers: set[int] = set()  # storages on which the input of a layer depends
    seconds = seconds_between = 0.0
    members = set(numbers)
    for number in reversed(forward):
        call = step.calls[number]
        leads_to_layer = not to_layers.isdisjoint(call.writes)
        if number in layers or leads_to_layer:
            to_layers.update(call.reads)
        if number in members:
            call_s = step.seconds_with_backward(number)
            seconds += call_s
            if leads_to_layer and number in calls_after_layers:
                seconds_between += call_s
    return seconds_between > 0.5 * seconds


def _calls_of_losses(step: StepCalls) -> set[int]:
    """Return the calls of torch's losses, and of the logarithms of softmax that they read."""
    losses: set[int] = set()
    for number, call in enumerate(step.calls):
        if call.name not in _LOSSES:
            continue
        losses.add(number)
        for storage in call.reads:
            writer = step.only_writer_of(storage)
            if writer is not None and step.calls[writer].name == _LOG_SOFTMAX:
                losses.add(writer)
    return losses


def _calls_of_layers(step: StepCalls) -> set[int]:
    """Return the calls of forward that apply weights, or what was computed from weights alone, to other tensors."""
    layers: set[int] = set()
    storages = _KnownStorages(step.trained)
    for number, call in enumerate(step.calls):
        if call.phase != _FORWARD:
            continue
        # Forward contains backward passes if a sampler or a penalty needs gradients.
        is_backward_of_layer = call.forward in layers
        if storages.has_layer(call) or is_backward_of_layer:
            layers.add(number)
        elif storages.has_only_weights(call):
            storages.weights.update(call.writes)
        storages.note_writes(call)
    return layers


class _KnownStorages:
    """What is known of storages after the calls of forward so far.

    A storage that the step has not written existed before: it is a frozen weight, or belongs to the batch.
    """

    def __init__(self, trained: Collection[int]) -> None:
        # the storages of trained weights, and of what was computed from weights alone
        self.weights = set(trained)
        self._written_in_step: set[int] = set()

    def has_layer(self, call: OperatorCall) -> bool:
        """Return whether a call applies a weight to something else: an operator of ``_LAYERS``, or a matrix product.

        All operators of torch's recurrent cells count, because the program cannot fuse them, and all products with a
        sparse matrix, as in graph networks.
        """
        if call.is_of_cell or call.is_sparse_product:
            return True
        if call.product is None:
            return call.name in _LAYERS or call.name.startswith(_FUSED_ATTENTION)
        factors = {call.product.left.storage, call.product.right.storage}
        if factors.issubset(self.weights):
            return False
        has_weight = not factors.isdisjoint(self.weights)
        # A factor from before the step may be a frozen weight, such as that of a teacher.
        has_older_factor = not factors.issubset(self._written_in_step)
        return has_weight or has_older_factor

    def has_only_weights(self, call: OperatorCall) -> bool:
        """Return whether a call that is no layer computes from weights alone; its results then count as weights.

        Besides trained weights it may read what existed before the step, such as a frozen weight that is adapted.
        """
        if call.product is not None:
            factors = {call.product.left.storage, call.product.right.storage}
            return factors.issubset(self.weights)
        reads_weights = not self.weights.isdisjoint(call.reads)
        other_reads = set(call.reads).difference(self.weights)
        return reads_weights and other_reads.isdisjoint(self._written_in_step)

    def note_writes(self, call: OperatorCall) -> None:
        """Note that the step has written the results of ``call``, unless it copies what existed before the step.

        Autocast copies frozen weights in each step. Such a copy still counts as a frozen weight.
        """
        reads_only_older = self._written_in_step.isdisjoint(call.reads)
        if call.name in _COPIES and reads_only_older:
            return
        self._written_in_step.update(call.writes)


def _places_of(call: OperatorCall) -> list[CodeLine]:
    """Return the functions and lines that led to a call, the outermost first."""
    places: list[CodeLine] = []
    for line in call.lines:
        places += [CodeLine(line.file, _WHOLE_FUNCTION, line.function), line]
    return list(dict.fromkeys(places))


def _main_line(step: StepCalls, function: CodeLine, numbers: Iterable[int]) -> CodeLine:
    """Return the line of ``function`` that led to most of the seconds of its calls ``numbers``."""
    seconds: defaultdict[CodeLine, float] = defaultdict(float)
    for number in numbers:
        for line in step.calls[number].lines:
            if (line.file, line.function) == (function.file, function.function):
                seconds[line] += step.seconds_with_backward(number)
    return max(seconds, key=seconds.__getitem__)
