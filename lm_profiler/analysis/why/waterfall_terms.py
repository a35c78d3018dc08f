"""From the ideal step to the measured one: the terms, each with its ceiling and what it consists of."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lm_profiler.analysis.hardware.roofline import IN_CACHES
from lm_profiler.analysis.trace.pieces import INPUT_PHASES, Piece
from lm_profiler.analysis.why.contributors import by_phase, contributors, ms, waits
from lm_profiler.analysis.why.matmuls import product_of, quantization
from lm_profiler.analysis.why.moved import UNKNOWN_LISTS, Lists, is_cut, least_bytes
from lm_profiler.analysis.why.traced import Gap, Traced, Weighed, floored
from lm_profiler.record.quantities import with_prefix
from lm_profiler.record.run import Rates, Term, TermName, Waterfall

_UNLIKE = 1.10  # traced steps in which more ran, as a share of the measured step, were unlike the measured ones

_NOTED = 0.01  # the share of the step below which unknown bytes are not worth a note


@dataclass(frozen=True, kw_only=True)
class Step:
    """The untraced step of one device, and what that device could do. None is unknown."""

    step_s: float  # its mean, in the 95 % interval from ``ci_low`` to ``ci_high``
    ci_low: float | None
    ci_high: float | None
    input_s: float  # of it, waiting for the batch and for its transfer
    ideal_s: float  # the model's FLOPs at the peak
    recomputed_share: float  # of all FLOPs, what activation checkpointing repeats
    rates: Rates  # FLOP/s by the dtype of the factors
    dtype: str  # in which most is multiplied; there is a rate of it
    clock_share: float | None = None  # the clock that was held over the one that the peak is stated for
    lists: Lists = UNKNOWN_LISTS  # the parameters that an optimizer is given in lists, all of them together
    multiprocessors: int | None = None  # of the device
    waiting_s: Mapping[str, float] = field(default_factory=dict)  # of it, waiting for other ranks, by phase


def waterfall(step: Step, traced: Traced) -> Waterfall:
    """Return the waterfall of ``step``: kernels took what they took while ``traced``, and gaps are what they leave of
    it."""
    notes: list[str] = []
    busy_s = _busy_s(traced)
    too_long = busy_s > _UNLIKE * step.step_s
    if too_long:  # its share of the step is what can be told
        factor = step.step_s / busy_s
        traced = replace(traced, pieces=[(piece, own * factor) for piece, own in traced.pieces], gaps=[])
        notes.append(
            f"what ran in the traced steps took {busy_s / step.step_s - 1.0:.0%} longer than the measured step: terms "
            "are scaled down to it, and no ceilings are told"
        )
    terms = [*_products(step, traced, notes), *_memory(step, traced, notes), *_waiting(step, traced)]
    peak = next(rate for rate in step.rates.flops if rate.dtype == step.dtype)
    # What is left, so that the terms always add up to the step; it may be negative. Below a nanosecond it is the error
    # of the sum, which differs between rows in memory and those of a file.
    left_s = step.step_s - math.fsum(term.seconds for term in terms)
    terms.append(Term(name="unexplained", seconds=left_s if abs(left_s) >= 1e-9 else 0.0))
    if too_long:
        terms = [term.model_copy(update={"at_most_s": None}) for term in terms]
    return Waterfall(
        source="kernels" if traced.on_device else "operators",
        step_s=step.step_s,
        ci_low=step.ci_low,
        ci_high=step.ci_high,
        peak_flops_per_s=peak.flops_per_s,
        peak_source=peak.source,
        bandwidth_bytes_per_s=step.rates.bytes_per_s,
        bandwidth_source=step.rates.bytes_source,
        clock_share=step.clock_share,
        terms=[_with_interval(term, step, traced) for term in terms],
        notes=notes,
    )


def _busy_s(traced: Traced) -> float:
    """Return the seconds that anything ran in a traced step, the copies of its batch included."""
    return sum(traced.seconds(use) for use in ("products", "memory", "communication", "input"))


def _with_interval(term: Term, step: Step, traced: Traced) -> Term:
    """Add the interval: what ran scatters as the traced steps do, what is left of the step as the mean step does
    besides."""
    if traced.scatter is None or term.name == "ideal":
        return term
    half = traced.scatter * term.seconds
    if term.name in ("gaps", "input", "waiting", "unexplained") and term.seconds:
        step_half = 0.0 if step.ci_low is None or step.ci_high is None else (step.ci_high - step.ci_low) / 2.0
        half = math.hypot(step_half, traced.scatter * _busy_s(traced))
    low = term.seconds - half
    ends = {"low_s": low if term.name == "unexplained" else max(low, 0.0), "high_s": term.seconds + half}
    return term.model_copy(update=ends)


def _products(step: Step, traced: Traced, notes: list[str]) -> list[Term]:
    """Return the terms of matmuls and fused attention: what they should take, and why they take longer."""
    whole = traced.seconds("products")
    repeated = whole * step.recomputed_share
    ideal = min(step.ideal_s, whole - repeated)
    if step.ideal_s > ideal:
        notes.append(
            f"the model's FLOPs take {ms(step.ideal_s)} at the peak, but its products took {ms(ideal)}: fused causal "
            "attention does half of what is counted, some products have no kernel of a known name, or the peak is not "
            "this device's"
        )
    clock = 0.0
    if step.clock_share:
        clock = min(max(ideal / step.clock_share - ideal, 0.0), whole - repeated - ideal)
    parts = floored(traced.of("products"), lambda piece: _at_peak(piece, step))
    usual = ideal / whole if whole else 0.0  # where shapes are unknown
    floors = [(piece, own, own * usual if floor is None else floor) for piece, own, floor in parts]
    at_peak = [(piece, floor) for piece, _, floor in floors]
    slow = [(piece, own - floor) for piece, own, floor in floors]
    slow_s = max(whole - repeated - ideal - clock, 0.0)
    return [
        _term("ideal", ideal, at_peak, traced).model_copy(update={"at_most_s": None}),
        _term("clock", clock, at_peak, traced),
        _term("slow_products", slow_s, slow, traced, lambda piece: _shape(piece, step)),
        Term(
            name="recomputation",
            seconds=repeated,
            at_most_s=repeated,
            phases={"backward": repeated} if repeated else {},
        ),
    ]


def _memory(step: Step, traced: Traced, notes: list[str]) -> list[Term]:
    """Return the terms of all other kernels: what moving their bytes takes, and what they take longer."""
    lists = _lists_of_a_call(step, traced)
    parts = floored(traced.of("memory"), lambda piece: _at_bandwidth(piece, step, lists))
    at_bandwidth = [(piece, floor or 0.0) for piece, _, floor in parts]
    beyond = [(piece, own - (floor or 0.0)) for piece, own, floor in parts]
    rate = step.rates.bytes_per_s
    beaten_s = sum(own for _, own, floor in parts if floor is not None and floor >= own) * 1e-9 / traced.steps
    unknown_s = sum(own for _, own, floor in parts if floor is None) * 1e-9 / traced.steps
    seconds, beyond_s = (sum(ns for _, ns in some) * 1e-9 / traced.steps for some in (at_bandwidth, beyond))
    if rate is None:
        notes.append("the memory bandwidth of this device is unknown: memory-bound kernels count as beyond it whole")
    elif unknown_s >= _NOTED * step.step_s:
        notes.append(f"of what is beyond the bandwidth, {ms(unknown_s)} are {_things(traced)} whose bytes are unknown")
    if rate is not None and beaten_s >= _NOTED * step.step_s:
        notes.append(
            f"of memory traffic, {ms(beaten_s)} are {_things(traced)} that took no longer than their bytes take at the "
            f"bandwidth, {with_prefix(rate, 'B/s')}: {IN_CACHES}"
        )
    return [
        _term("bandwidth", seconds, at_bandwidth, traced),
        _term("beyond_bandwidth", beyond_s, beyond, traced),
    ]


def _waiting(step: Step, traced: Traced) -> list[Term]:
    """Return the terms of waits that were measured in the untraced step, and of gaps as far as the trace has seen any.

    The trace stretches gaps: it says where they are, and how much at most. A wait for the batch may be in the traced
    steps alone, or in the others alone: neither is taken out of gaps that were seen elsewhere. A wait for other ranks
    is in the traced steps, too: in collectives on a device's stream, else where no operator ran.
    """
    copies, exchanged = traced.seconds("input"), traced.seconds("communication")
    for_ranks = sum(step.waiting_s.values())
    in_calls = min(for_ranks, exchanged) if traced.on_device else 0.0
    busy = _busy_s(traced)
    gaps = traced.gaps if in_calls else _less(traced.gaps, step.waiting_s, traced.steps)
    at_input = [gap for gap in gaps if gap.phase in INPUT_PHASES]
    elsewhere = [gap for gap in gaps if gap.phase not in INPUT_PHASES]
    seen = sum(gap.ns for gap in elsewhere) * 1e-9 / traced.steps
    idle = max(step.step_s - busy, 0.0)
    in_gaps = min(for_ranks - in_calls, idle)
    for_input = step.input_s - sum(step.waiting_s.get(phase, 0.0) for phase in INPUT_PHASES)
    waited = min(max(for_input - copies, 0.0), idle - in_gaps)
    waiting_s = in_calls + in_gaps
    copied = _term("input", copies, list(traced.of("input")), traced)
    unseen = [Gap(1, "data", "not while traced")] * traced.steps
    return [
        _term("communication", exchanged - in_calls, list(traced.of("communication")), traced),
        Term(name="waiting", seconds=waiting_s, phases=by_phase(step.waiting_s.items(), waiting_s)),
        _gap_term("gaps", min(idle - in_gaps - waited, seen), elsewhere, traced),
        _together(copied, _gap_term("input", waited, at_input or unseen, traced)),
    ]


def _less(gaps: Sequence[Gap], waiting_s: Mapping[str, float], steps: int) -> list[Gap]:
    """``gaps`` without what was waited in their phases, seconds a step: it is in the longest."""
    left, kept = {phase: round(seconds * 1e9 * steps) for phase, seconds in waiting_s.items()}, []
    # Waiting for a rank takes milliseconds, launching microseconds: so the longest gaps are the waits.
    for gap in sorted(gaps, key=lambda gap: -gap.ns):
        taken = min(gap.ns, left.get(gap.phase, 0))
        if taken:
            left[gap.phase] -= taken
        if gap.ns > taken:
            kept.append(gap._replace(ns=gap.ns - taken))
    return kept


def _term(
    name: TermName,
    seconds: float,
    weighed: Sequence[Weighed],
    traced: Traced,
    why: Callable[[Piece], str | None] = lambda piece: None,
) -> Term:
    """Return the term that consists of ``weighed`` pieces; all of it is the ceiling of what could be won."""
    things = _things(traced)
    return Term(
        name=name,
        seconds=seconds,
        at_most_s=seconds,
        phases=by_phase(((piece.phase, ns) for piece, ns in weighed), seconds),
        contributors=contributors(weighed, seconds, traced.steps, things, why),
    )


def _gap_term(name: TermName, seconds: float, gaps: Sequence[Gap], traced: Traced) -> Term:
    return Term(
        name=name,
        seconds=seconds,
        at_most_s=seconds,
        phases=by_phase(((gap.phase, gap.ns) for gap in gaps), seconds),
        contributors=waits(gaps, seconds, traced.steps),
    )


def _together(one: Term, other: Term) -> Term:
    seconds = one.seconds + other.seconds
    phases = {p: one.phases.get(p, 0.0) + other.phases.get(p, 0.0) for p in (*one.phases, *other.phases)}
    parts = sorted((*one.contributors, *other.contributors), key=lambda part: -part.seconds)
    return Term(name=one.name, seconds=seconds, at_most_s=seconds, phases=phases, contributors=parts)


def _at_peak(piece: Piece, step: Step) -> float | None:
    product = None if piece.inputs is None else product_of(piece.operator or "", piece.inputs)
    rate = None if product is None else step.rates.flops_per_s(product.dtype or step.dtype)
    return None if product is None or rate is None else product.flops / rate * 1e9


def _lists_of_a_call(step: Step, traced: Traced) -> dict[str, Lists]:
    """Return, for each operator whose lists were too long for the trace, what one call gets: all parameters or a
    part."""
    known: dict[int, bool] = {}  # equal inputs of a trace are one object
    cut = set()
    for piece, _ in traced.of("memory"):
        if piece.inputs is None:
            continue
        key = id(piece.inputs)
        if key not in known:
            known[key] = is_cut(piece.inputs)
        if known[key]:
            cut.add((piece.operator or "", piece.call))
    calls = Counter(operator for operator, _ in cut)
    elements = step.lists.elements
    return {
        operator: step.lists._replace(elements=None if elements is None else elements * traced.steps // count)
        for operator, count in calls.items()
    }


def _at_bandwidth(piece: Piece, step: Step, lists: Mapping[str, Lists]) -> float | None:
    if piece.inputs is None or step.rates.bytes_per_s is None:
        return None
    moved = least_bytes(piece.operator or "", piece.inputs, lists.get(piece.operator or "", step.lists))
    return None if moved is None else moved / step.rates.bytes_per_s * 1e9


def _shape(piece: Piece, step: Step) -> str | None:
    """Return the shape of a matmul, and what of the device its tiles and waves leave idle."""
    product = None if piece.inputs is None else product_of(piece.operator or "", piece.inputs)
    if product is None or not product.m:
        return None
    batch = f"{product.batch} × " if product.batch > 1 else ""
    said = f"{batch}m {product.m}, n {product.n}, k {product.k}"
    cut = quantization(piece.name, product, step.multiprocessors or 0)
    if cut is None:
        return said
    rows, columns = cut.tile
    return (
        f"{said} in {cut.tiles} tiles of {rows}×{columns}, {cut.tile_loss:.0%} of them outside; "
        f"{cut.waves:.2f} waves on {step.multiprocessors} multiprocessors, {cut.wave_loss:.0%} of their room empty"
    )


def _things(traced: Traced) -> str:
    return "kernels" if traced.on_device else "operators"
