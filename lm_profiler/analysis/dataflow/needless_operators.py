"""Collects the operators of a step that may be needless: for each reason, their time and their line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import NamedTuple

from lm_profiler.analysis.dataflow.attention import (
    calls_of_attention,
    calls_on_stored_scores,
    find_scores,
)
from lm_profiler.analysis.dataflow.cancelled import cancelled_calls, line_of_cancelled
from lm_profiler.analysis.dataflow.causal_masks import calls_with_causal_masks
from lm_profiler.analysis.dataflow.cells import (
    calls_of_cells,
    calls_of_recurrent_layers,
)
from lm_profiler.analysis.dataflow.copies import (
    copying_calls,
    layers_on_copied_rows,
)
from lm_profiler.analysis.dataflow.growing_copies import growing_copies
from lm_profiler.analysis.dataflow.indexing import calls_of_indexing
from lm_profiler.analysis.dataflow.liveness import Liveness, liveness_of
from lm_profiler.analysis.dataflow.loops import calls_in_loops, line_of_loops
from lm_profiler.analysis.dataflow.micro_batches import (
    calls_of_micro_batches,
    line_of_passes,
)
from lm_profiler.analysis.dataflow.packed_sequences import (
    calls_on_packed_sequences,
    without_packed_sequences,
)
from lm_profiler.analysis.dataflow.products import (
    calls_at_ignored_positions,
    calls_on_broadcasts,
    products_in_costly_order,
    products_with_zeros,
)
from lm_profiler.analysis.dataflow.repeats import (
    constant_calls,
    longest_line,
    repeated_calls,
)
from lm_profiler.analysis.dataflow.side_work import side_work
from lm_profiler.analysis.dataflow.slices import gradients_of_slices
from lm_profiler.analysis.dataflow.small_parameters import calls_on_small_parameters
from lm_profiler.analysis.dataflow.sparse_gradients import calls_for_unused_rows
from lm_profiler.analysis.dataflow.summed_layers import calls_of_summed_layers
from lm_profiler.analysis.dataflow.transposed_logits import (
    calls_on_transposed_logits,
)
from lm_profiler.record.findings import (
    OVERLAPPING_REASONS,
    NeedlessOperators,
    NeedlessReason,
)
from lm_profiler.record.operator_calls import CodeLine, OperatorCall, StepCalls

_FORWARD, _BACKWARD, _OPTIMIZER = "forward", "backward", "optimizer"
# parts of the names of operators that factorize a matrix or solve a system
_FACTORIZING = (
    "cholesky",
    "eigh",
    "svd",
    "lstsq",
    "solve",
    "linalg_inv",
    "linalg_lu",
    "linalg_qr",
)
# Calls whose largest tensor has fewer elements are ignored: they are mostly call overhead, and may be control flow.
_LEAST_SIZE = 1 << 10
# the reasons that are about small calls
_REASONS_ABOUT_SMALL_CALLS = (
    "accumulated",
    "looped",
    "cells",
    "small_parameters",
)
# a reason with a smaller share of the time of the step's operators is left out
_LEAST_SHARE = 0.02
# The least share of the step's time that the memory format channels_last must save. Of seven models, those above it
# gained 0.7 to 1.7 times the estimate; those below it gained -11 to 18 %: some operators then change the layout back.
_LEAST_SHARE_OF_LAYOUT = 0.2
# The least share of the time of a convolution and its backward pass that another form must save: the trials that show
# it are short.
_LEAST_SHARE_OF_CONVOLUTION = 0.25
_SAVED_BY_FLOAT32 = 0.5  # the share of the time in float64 that float32 saves


def needless_operators(
    step: StepCalls, least_share: float = _LEAST_SHARE
) -> list[NeedlessOperators]:
    """Return the operators of ``step`` that may be needless, one entry per reason.

    A call counts only for the first reason that applies. A reason is left out if its operators take less than
    ``least_share`` of the time of all operators.
    """
    entries: list[NeedlessOperators] = []
    total_s = sum(step.phase_s.values())
    liveness = liveness_of(step)
    # calls that cannot be avoided count for no reason
    counted_calls = _gradients_beside_needed_ones(step, liveness)
    for reason, shares, place in _groups(step, liveness):
        new_shares = {}
        for number, share in shares.items():
            is_large = (
                reason in _REASONS_ABOUT_SMALL_CALLS
                or step.calls[number].size >= _LEAST_SIZE
            )
            is_new = reason in OVERLAPPING_REASONS or number not in counted_calls
            if is_large and is_new:
                new_shares[number] = share
        if reason not in OVERLAPPING_REASONS:
            counted_calls.update(new_shares)
        needless_s = 0.0
        for number, share in new_shares.items():
            needless_s += share * step.calls[number].seconds
        if needless_s > 0.0 and needless_s >= least_share * total_s:
            entries.append(_operators(step, reason, new_shares, place))
    return entries


def backward_share_of_forward(step: StepCalls) -> float:
    """Return the share of forward's operators, by their time, that belong to backward passes within it."""
    forward_s = step.phase_s.get(_FORWARD, 0.0)
    if forward_s <= 0.0:
        return 0.0
    backward_s = 0.0
    for call in step.calls:
        if call.phase == _FORWARD and call.forward is not None:
            backward_s += call.seconds
    return backward_s / forward_s


def factorizing_operators(step: StepCalls) -> list[str]:
    """Return the names of operators of the step that factorize a matrix or solve a system, which loses digits."""
    names = {call.name for call in step.calls}
    return sorted(name for name in names if any(part in name for part in _FACTORIZING))


class _Group(NamedTuple):
    """The calls that are needless for one reason."""

    reason: NeedlessReason
    # by the number of a call, the share of its time that is needless
    shares: Mapping[int, float]
    line: CodeLine | None = None  # the line that causes them; None: that with most time


def _groups(step: StepCalls, liveness: Liveness | None) -> Iterator[_Group]:
    """Yield a group for each reason, in the order in which reasons apply; groups may be empty, and may overlap."""
    yield from _groups_with_needless_results(step, liveness)
    yield from _groups_on_parts_of_tensors(step)
    yield from _groups_in_costly_formats(step)
    yield from _groups_in_costly_code(step, liveness)


def _groups_with_needless_results(
    step: StepCalls, liveness: Liveness | None
) -> Iterator[_Group]:
    """Yield the groups of calls whose results nothing needs, or that other calls compute, too."""
    dead = _dead_calls_of_model(step, liveness)
    yield _Group("unused", dict.fromkeys(dead, 1.0))
    cancelled = dict.fromkeys(cancelled_calls(step), 1.0)
    yield _Group("cancelled", cancelled, line_of_cancelled(step, cancelled))
    causal = calls_with_causal_masks(step)
    attention = [number for number in causal if step.calls[number].causal_mask]
    yield _Group("causal", causal, step.place_of(attention))
    yield _Group("constant", dict.fromkeys(constant_calls(step), 1.0))
    repeated = repeated_calls(step, dead)
    repeating_line = longest_line(step, repeated)
    yield _Group("repeated", dict.fromkeys(repeated, 1.0), repeating_line)
    yield _Group("summed", calls_of_summed_layers(step))


def _groups_on_parts_of_tensors(step: StepCalls) -> Iterator[_Group]:
    """Yield the groups of calls that compute more than needed, because they work on whole tensors or on single parts.

    Examples are products with zeros, positions that the loss ignores, and gradients of slices.
    """
    yield _Group("zeros", products_with_zeros(step))
    ignored, in_last_layers = calls_at_ignored_positions(step)
    products = _products_among(step, ignored)
    yield _Group("ignored", ignored, step.place_of(products))
    last_products = _products_among(step, in_last_layers)
    yield _Group("ignored_at_last", in_last_layers, step.place_of(last_products))
    broadcast = calls_on_broadcasts(step)
    broadcasting = [number for number in broadcast if step.calls[number].broadcasts]
    yield _Group("broadcast", broadcast, step.place_of(broadcasting))
    yield _Group("growing", growing_copies(step))
    slices = gradients_of_slices(step)
    yield _Group("packed_equal", calls_on_packed_sequences(step, slices, "equal"))
    yield _Group("packed", calls_on_packed_sequences(step, slices, "different"))
    yield _Group("sliced", without_packed_sequences(step, slices))
    yield _Group("order", products_in_costly_order(step))
    unused_rows = calls_for_unused_rows(step)
    tables = [number for number in unused_rows if step.calls[number].zero_rows > 0.0]
    yield _Group("unused_rows", unused_rows, step.place_of(tables))
    small_parameters = calls_on_small_parameters(step)
    stacks = [
        number for number in small_parameters if step.calls[number].phase == _FORWARD
    ]
    yield _Group("small_parameters", small_parameters, step.place_of(stacks))
    yield _Group("renormalized", dict.fromkeys(_renormalizing_calls(step), 1.0))
    yield _Group("indexed", calls_of_indexing(step))
    yield _Group("transposed", calls_on_transposed_logits(step))


def _groups_in_costly_formats(step: StepCalls) -> Iterator[_Group]:
    """Yield the groups of calls that another type of numbers or another layout of tensors makes faster."""
    double = [number for number, call in enumerate(step.calls) if call.makes_double]
    shares_of_double = dict.fromkeys(double, _SAVED_BY_FLOAT32)
    if not step.is_double:
        # the first call introduces float64
        yield _Group("some_double", shares_of_double, _line_of_first(step, double))
    elif not factorizing_operators(step):
        # factorizing matrices or solving systems may need the digits of float64
        yield _Group("double", shares_of_double)
    if _computes_in_half_precision(step):
        yield _Group("narrow", _saved_by(step, attrgetter("float32_share")))
    yield _Group("channels_first", _saved_by_channels_last(step))
    yield _Group("sparse_layout", _saved_by_csr(step))
    by_layers = _saved_in_convolutions(step, attrgetter("linear_share"))
    yield _Group("patches", by_layers)
    by_fft = _saved_in_convolutions(step, attrgetter("fourier_share"))
    yield _Group("fourier", by_fft)


def _groups_in_costly_code(
    step: StepCalls, liveness: Liveness | None
) -> Iterator[_Group]:
    """Yield the groups of calls that could be avoided, or replaced by fewer calls, if the program were written anew."""
    figures = dict.fromkeys(_calls_only_python_reads(step, liveness), 1.0)
    yield _Group("figures", figures)
    scores = find_scores(step)
    yield _Group("scores", dict.fromkeys(calls_on_stored_scores(step, scores), 1.0))
    cells = {**calls_of_cells(step), **calls_of_recurrent_layers(step)}
    yield _Group("cells", cells)
    micro_batches = calls_of_micro_batches(step)
    calling_line = line_of_passes(step, micro_batches)
    yield _Group("accumulated", micro_batches, calling_line)
    looped = calls_in_loops(step)
    yield _Group("looped", looped, line_of_loops(step, looped))
    yield _Group("gathered", layers_on_copied_rows(step))
    yield _Group("copied", dict.fromkeys(copying_calls(step), 1.0))
    work = side_work(step, calls_of_attention(step, scores))
    if work is not None:
        reason: NeedlessReason = "side_work"
        if work.is_between_layers:
            reason = "unfused"
        yield _Group(reason, dict.fromkeys(work.calls, 1.0), work.line)


def _computes_in_half_precision(step: StepCalls) -> bool:
    """Return whether most of forward's layers, by their time, compute in half precision on the CPU.

    A program in float32 may also have some tensors in half precision, such as features that it reads from files.
    """
    half_s = 0.0
    all_s = 0.0
    for call in step.calls:
        if call.phase == _FORWARD and call.is_layer:
            all_s += call.seconds
            if call.has_half_input:
                half_s += call.seconds
    return half_s > 0.5 * all_s


def _saved_by(
    step: StepCalls, share_of: Callable[[OperatorCall], float | None]
) -> dict[int, float]:
    """Return the calls that were tried with changed tensors, with the share of their time that the change saves.

    ``share_of`` returns the time with changed tensors as a share of a call's time, or None if the call was not tried.
    It may be above 1; the saved share is then negative.
    """
    shares = {}
    for number, call in enumerate(step.calls):
        share = share_of(call)
        if share is not None:
            shares[number] = 1.0 - share
    return shares


def _saved_by_channels_last(step: StepCalls) -> dict[int, float]:
    """Return the calls on images, with the share of their time that another layout saves, if it is much in all."""
    shares = _saved_by(step, attrgetter("channels_last_share"))
    saved_s = sum(
        share * step.calls[number].seconds for number, share in shares.items()
    )
    is_much = saved_s >= _LEAST_SHARE_OF_LAYOUT * sum(step.phase_s.values())
    return shares if is_much else {}


def _saved_by_csr(step: StepCalls) -> dict[int, float]:
    """Return the products with a constant sparse matrix in COO, with the share of their time that CSR saves.

    Only a matrix that stays the same can be converted once, before training. If the step computes it, or its gradient,
    ``csr_share`` of the product in forward is None. The products of the backward pass then do not count either.
    """
    all_shares = _saved_by(step, attrgetter("csr_share"))
    shares = {}
    for number, share in all_shares.items():
        forward = step.calls[number].forward
        # a call of forward has no forward call of its own
        is_constant = forward is None or forward in all_shares
        if is_constant:
            shares[number] = share
    return shares


def _saved_in_convolutions(
    step: StepCalls, share_of: Callable[[OperatorCall], float | None]
) -> dict[int, float]:
    """Return the convolutions that are slower than another form of them, with the share of time that this form saves.

    A convolution and its backward pass change their form together. ``share_of`` returns the time of the other form as a
    share of a call's time, or None if the call was not tried.
    """
    all_shares = _saved_by(step, share_of)
    shares: dict[int, float] = {}
    for number in all_shares:
        if step.calls[number].forward is not None:
            continue
        related = [call for call in step.with_backward(number) if call in all_shares]
        saved_s = sum(all_shares[call] * step.calls[call].seconds for call in related)
        all_s = sum(step.calls[call].seconds for call in related)
        if saved_s >= _LEAST_SHARE_OF_CONVOLUTION * all_s:
            shares.update({call: all_shares[call] for call in related})
    return shares


def _renormalizing_calls(step: StepCalls) -> list[int]:
    """Return the calls by which embeddings with ``max_norm`` renormalize the rows that are looked up."""
    return [
        number
        for number, call in enumerate(step.calls)
        if call.name == "aten::embedding_renorm_"
    ]


def _products_among(step: StepCalls, numbers: Iterable[int]) -> list[int]:
    """Return the calls of ``numbers`` that are matrix products."""
    return [number for number in numbers if step.calls[number].product is not None]


def _dead_calls_of_model(step: StepCalls, liveness: Liveness | None) -> list[int]:
    """Return the dead calls, except those of an optimizer (the user does not write it) and those that only allocate."""
    if liveness is None:
        return []
    dead = []
    for number in sorted(liveness.dead):
        call = step.calls[number]
        if call.phase != _OPTIMIZER and "empty" not in call.name:
            dead.append(number)
    return dead


def _gradients_beside_needed_ones(
    step: StepCalls, liveness: Liveness | None
) -> set[int]:
    """Return the backward calls that nothing needs, but that autograd makes because it needs another gradient.

    Layers compute only the gradients that are asked for. Some other operators, such as ``scatter_reduce``, always
    compute those of all their inputs.
    """
    if liveness is None:
        return set()
    unavoidable: set[int] = set()
    for number in liveness.dead:
        forward = step.calls[number].forward
        if forward is None or step.calls[forward].is_layer:
            continue
        if any(other not in liveness.dead for other in step.backward_of[forward]):
            unavoidable.add(number)
    return unavoidable


def _calls_only_python_reads(step: StepCalls, liveness: Liveness | None) -> list[int]:
    """Return the calls of forward and backward whose results only Python reads (metrics, hooks).

    Trained layers, and what is computed from their outputs, are left out: Python may feed the result back into
    training (the actions of an agent, generated text).
    """
    if liveness is None:
        return []
    needed = liveness.needed
    # storages of the outputs of such layers, and of what was computed from them
    layer_storages: set[int] = set()
    found = []
    for number, call in enumerate(step.calls):
        if number not in liveness.needed_only_elsewhere:
            continue
        is_trained_layer = call.is_layer and not step.trained.isdisjoint(call.reads)
        consumes_output = not layer_storages.isdisjoint(call.reads)
        if is_trained_layer or consumes_output:
            layer_storages.update(call.writes)
        elif call.phase in (_FORWARD, _BACKWARD):
            # a loss itself is only read, but it has to be computed for its gradients
            has_gradients = not needed.isdisjoint(step.backward_of.get(number, ()))
            if not has_gradients:
                found.append(number)
    return found


def _line_of_first(step: StepCalls, numbers: list[int]) -> CodeLine | None:
    """Return the innermost line that led to the first of the calls ``numbers``; None if there is none."""
    if not numbers:
        return None
    lines = step.lines_of(numbers[0])
    return lines[-1] if lines else None


def _operators(
    step: StepCalls,
    reason: NeedlessReason,
    shares: Mapping[int, float],
    place: CodeLine | None,
) -> NeedlessOperators:
    """Return the record's entry for one reason; ``shares`` has the needless share of each call, by its number."""
    seconds_by_phase: defaultdict[str, float] = defaultdict(float)
    seconds_by_name: defaultdict[str, float] = defaultdict(float)
    for number, share in shares.items():
        call = step.calls[number]
        seconds_by_phase[call.phase] += share * call.seconds
        seconds_by_name[call.name] += share * call.seconds
    phase_shares = {}
    for phase, seconds in seconds_by_phase.items():
        if seconds != 0.0:
            phase_shares[phase] = seconds / step.phase_s[phase]
    if place is None:
        place = step.place_of(shares)
    return NeedlessOperators(
        reason=reason,
        phase_shares=phase_shares,
        count=len(shares),
        what=max(seconds_by_name, key=seconds_by_name.__getitem__),
        # what was measured by repeating a call may be longer than the call in the step
        share=min(max(shares.values()), 1.0),
        file=None if place is None else place.file,
        line=None if place is None else place.line,
        function=None if place is None else place.function,
    )
