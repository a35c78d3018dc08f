"""Finds gradient accumulation whose small micro-batches spend much of their time on the overhead of calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from lm_profiler.analysis.dataflow.loops import overhead_of_calling_s, share_of_overhead
from lm_profiler.record.operator_calls import (
    UNRECORDED_UPDATE,
    CodeLine,
    StepCalls,
)

_FORWARD, _BACKWARD, _OPTIMIZER = "forward", "backward", "optimizer"
_FEWEST_PASSES = 2
# at least this share of the calls of each pass must also be in the first pass
_LEAST_EQUAL_SHARE = 0.9

# the numbers of the calls of a forward pass of the model, in order
_Pass = list[int]


def calls_of_micro_batches(step: StepCalls) -> dict[int, float]:
    """Return the calls of the passes whose gradients are accumulated, if one pass over all samples could replace them.

    All passes run the same operators from the same lines. None reads what an earlier one has computed, and no other
    code uses the gradients between them, as for differential privacy or adversarial training.

    Returns:
        by the number of a call, the share of its time that one pass would save: the overhead of calling in all passes
        but one.
    """
    if step.has_gradients_of_inputs:
        return {}
    passes = _passes_before_update(step)
    if len(passes) < _FEWEST_PASSES or not _are_equal(step, passes):
        return {}
    if _any_depends_on_earlier(step, passes):
        return {}
    call_overhead_s = overhead_of_calling_s(step)
    saved_share = 1.0 - 1.0 / len(passes)
    shares: dict[int, float] = {}
    for numbers in passes:
        for number in numbers:
            for related in step.with_backward(number):
                overhead = share_of_overhead(step.calls[related], call_overhead_s)
                shares[related] = saved_share * overhead
    return shares


def line_of_passes(step: StepCalls, numbers: Iterable[int]) -> CodeLine | None:
    """Return a line of the innermost function that led to all forward calls among ``numbers``; None without one."""
    stacks = []
    for number in numbers:
        call = step.calls[number]
        if call.phase == _FORWARD and call.lines:
            stacks.append(call.lines)
    common_line = None
    for lines_at_depth in zip(*stacks, strict=False):
        functions = {(line.file, line.function) for line in lines_at_depth}
        if len(functions) > 1:
            break
        common_line = lines_at_depth[0]
    return common_line


def _passes_before_update(step: StepCalls) -> list[_Pass]:
    """Return the passes of forward that backward followed, before the first update of the weights.

    Empty if other code uses the gradients.
    """
    passes: list[_Pass] = []
    current_pass: _Pass = []
    for number, call in enumerate(step.calls):
        if call.name == UNRECORDED_UPDATE:
            return []
        if call.phase == _OPTIMIZER and passes:
            break
        if call.phase == _FORWARD:
            current_pass.append(number)
        elif call.phase == _BACKWARD and current_pass:
            passes.append(current_pass)
            current_pass = []
    return passes


def _are_equal(step: StepCalls, passes: Sequence[_Pass]) -> bool:
    """Return whether all passes run nearly the same operators from the same lines on tensors of equal sizes."""
    first_calls = _counted_calls(step, passes[0])
    for numbers in passes[1:]:
        common = first_calls & _counted_calls(step, numbers)
        longest = max(len(numbers), len(passes[0]))
        if common.total() < _LEAST_EQUAL_SHARE * longest:
            return False
    return True


def _counted_calls(
    step: StepCalls, numbers: Sequence[int]
) -> Counter[tuple[str, tuple[CodeLine, ...], int]]:
    """Return how often each operator is called by each sequence of lines with each size."""
    counts: Counter[tuple[str, tuple[CodeLine, ...], int]] = Counter()
    for number in numbers:
        call = step.calls[number]
        counts[call.name, call.lines, call.size] += 1
    return counts


def _any_depends_on_earlier(step: StepCalls, passes: Sequence[_Pass]) -> bool:
    """Return whether a pass reads what an earlier pass has written, such as a hidden state or adapted weights.

    Statistics that only the call reads which updates them, as in batch normalization, do not count.
    """
    written_by_earlier: set[int] = set()
    for numbers in passes:
        written: set[int] = set()
        for number in numbers:
            call = step.calls[number]
            reads_of_others = set(call.reads) - set(call.writes) - written
            if not reads_of_others.isdisjoint(written_by_earlier):
                return True
            written.update(call.writes)
        written_by_earlier |= written
    return False
