"""From the ideal step to the measured one: the terms, each with its ceiling and what it consists of."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lm_profiler.analysis.trace.kernel_sums import module_of
from lm_profiler.analysis.trace.pieces import Piece
from lm_profiler.analysis.why.operators import UNKNOWN_LISTS, Lists, is_cut, least_bytes, product_of
from lm_profiler.analysis.why.traced import Gap, Traced, Weighed, floored
from lm_profiler.record.parts import INPUT_PHASES
from lm_profiler.record.run_record import Contributor, Rates, Term, TermName, Waterfall

LARGEST = 8  # contributors kept per term

_UNLIKE = 0.10  # the share of the measured step by which work in the traced steps may exceed it

_NOTED = 0.01  # the share of the step below which unknown bytes, or excess work, are not worth a note


@dataclass(frozen=True, kw_only=True)
class Step:
    """The untraced step of one device, and what that device could do. None is unknown."""

    step_s: float  # its mean, in the 95 % interval from ``ci_low`` to ``ci_high``
    ci_low: float | None
    ci_high: float | None
    input_s: float  # part of it: waiting for the batch and for its transfer
    ideal_s: float  # the model's FLOPs at the peak
    recomputed_share: float  # share of all FLOPs that activation checkpointing repeats
    rates: Rates  # FLOP/s by the dtype of the factors
    dtype: str  # dtype of most FLOPs; its rate is known
    clock_share: float | None = None  # the measured clock over the clock of the stated peak
    lists: Lists = UNKNOWN_LISTS  # all parameters that an optimizer gets in lists
    waiting_s: Mapping[str, float] = field(default_factory=dict)  # part of it: waiting for other ranks, by phase


def waterfall(step: Step, traced: Traced) -> Waterfall:
    """Return the waterfall of ``step``: kernels take as long as while ``traced``, gaps are the rest.

    Kernels that took longer while traced are scaled down to fit the measured step: during a wait for the batch
    nothing runs on the CPU. So no term is negative, or more than the step. Each term has the least and the most that it
    would be, had only one of the traced steps been traced: this is no interval.
    """
    notes: list[str] = []
    terms = _terms(step, traced, notes)
    each = [_terms(step, traced.alone(at), []) for at in range(len(traced.begins))]
    if len(each) > 1:
        told = [[term.seconds for term in of] for of in zip(terms, *each, strict=True)]
        ends = [{"low_s": min(seconds), "high_s": max(seconds)} for seconds in told]
        terms = [term.model_copy(update=of) for term, of in zip(terms, ends, strict=True)]
    peak = next(rate for rate in step.rates.flops if rate.dtype == step.dtype)
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
        traced_steps=traced.steps,
        terms=terms,
        notes=notes,
    )


def _terms(step: Step, traced: Traced, notes: list[str]) -> list[Term]:
    busy_s, waited_s = _busy_s(traced), max(step.input_s - traced.seconds["input"], 0.0)
    room_s = step.step_s if traced.on_device else max(step.step_s - waited_s, 0.0)
    over = (busy_s - room_s) / step.step_s
    if over > 0.0:
        scaled = [(piece, own * room_s / busy_s) for piece, own in traced.pieces if room_s]
        traced = replace(traced, pieces=scaled, gaps=[])
    if over >= _NOTED:
        ceilings = ", and no ceilings are told" if over > _UNLIKE else ""
        notes.append(
            f"what ran in the traced steps took {ms(busy_s - room_s)} ({over:.0%} of the step) longer than in the "
            f"measured ones: terms are scaled down to these{ceilings}"
        )
    terms = [*_products(step, traced, notes), *_memory(step, traced, notes), *_waiting(step, traced)]
    # The rest makes the terms always add up to the step. Below a nanosecond it is the error of the sum, which
    # differs between rows in memory and those of a file.
    left_s = step.step_s - math.fsum(term.seconds for term in terms)
    terms.append(Term(name="unexplained", seconds=left_s if abs(left_s) >= 1e-9 else 0.0))
    if over > _UNLIKE:
        terms = [term.model_copy(update={"at_most_s": None}) for term in terms]
    return terms


def _busy_s(traced: Traced) -> float:
    return sum(traced.seconds[use] for use in ("products", "memory", "communication", "input"))


def _products(step: Step, traced: Traced, notes: list[str]) -> list[Term]:
    """Return the terms of matmuls and fused attention: what they should take, and their excess."""
    whole = traced.seconds["products"]
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
    parts = floored(traced.by_use["products"], lambda piece: _at_peak(piece, step))
    usual = ideal / whole if whole else 0.0  # where shapes are unknown
    floors = [(piece, own, own * usual if floor is None else floor) for piece, own, floor in parts]
    at_peak = [(piece, floor) for piece, _, floor in floors]
    slow = [(piece, own - floor) for piece, own, floor in floors]
    slow_s = max(whole - repeated - ideal - clock, 0.0)
    in_backward = {"backward": repeated} if repeated else {}
    return [
        _term("ideal", ideal, at_peak, traced).model_copy(update={"at_most_s": None}),
        _term("clock", clock, at_peak, traced),
        _term("slow_products", slow_s, slow, traced, _shape),
        Term(name="recomputation", seconds=repeated, at_most_s=repeated, phases=in_backward),
    ]


def _memory(step: Step, traced: Traced, notes: list[str]) -> list[Term]:
    """Return the terms of all other kernels: what moving their bytes takes, and their excess."""
    lists = _lists_of_a_call(step, traced)
    parts = floored(traced.by_use["memory"], lambda piece: _at_bandwidth(piece, step, lists))
    at_bandwidth = [(piece, floor or 0.0) for piece, _, floor in parts]
    beyond = [(piece, own - (floor or 0.0)) for piece, own, floor in parts]
    unknown_s = sum(own for _, own, floor in parts if floor is None) * 1e-9 / traced.steps
    seconds, beyond_s = (sum(ns for _, ns in some) * 1e-9 / traced.steps for some in (at_bandwidth, beyond))
    if step.rates.bytes_per_s is None:
        notes.append("the memory bandwidth of this device is unknown: memory-bound kernels count as beyond it whole")
    elif unknown_s >= _NOTED * step.step_s:
        notes.append(f"of what is beyond the bandwidth, {ms(unknown_s)} are {_things(traced)} whose bytes are unknown")
    return [
        _term("bandwidth", seconds, at_bandwidth, traced),
        _term("beyond_bandwidth", beyond_s, beyond, traced),
    ]


def _waiting(step: Step, traced: Traced) -> list[Term]:
    """Return the terms of waits, measured in the untraced step, and of gaps, if the trace has any.

    Tracing stretches gaps: it shows where they are, and how long at most. A wait for the batch may be in the traced
    steps alone, or in the others alone: it is never subtracted from gaps elsewhere. A wait for other ranks
    is in the traced steps too: in collectives on a device's stream, else where no operator ran.
    """
    copies, exchanged = traced.seconds["input"], traced.seconds["communication"]
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
    copied = _term("input", copies, list(traced.by_use["input"]), traced)
    unseen = [Gap(1, "data", "not while traced")] * traced.steps
    return [
        _term("communication", exchanged - in_calls, list(traced.by_use["communication"]), traced),
        Term(name="waiting", seconds=waiting_s, phases=by_phase(step.waiting_s.items(), waiting_s)),
        _gap_term("gaps", min(idle - in_gaps - waited, seen), elsewhere, traced),
        _together(copied, _gap_term("input", waited, at_input or unseen, traced)),
    ]


def _less(gaps: Sequence[Gap], waiting_s: Mapping[str, float], steps: int) -> list[Gap]:
    """Return ``gaps`` minus the waits in their phases (seconds per step), which are in the longest gaps."""
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
    why: Callable[[Piece], str | None] | None = None,
) -> Term:
    """Return the term that consists of ``weighed`` pieces; all of it is the ceiling of the saving."""
    if traced.is_part:  # nobody asks of one step what its terms consist of
        return Term(name=name, seconds=seconds)
    return Term(
        name=name,
        seconds=seconds,
        at_most_s=seconds,
        phases=by_phase(((piece.phase, ns) for piece, ns in weighed), seconds),
        contributors=contributors(weighed, seconds, traced.steps, _things(traced), why),
    )


def _gap_term(name: TermName, seconds: float, gaps: Sequence[Gap], traced: Traced) -> Term:
    phases = by_phase(((gap.phase, gap.ns) for gap in gaps), seconds)
    causes = waits(gaps, seconds, traced.steps)
    return Term(name=name, seconds=seconds, at_most_s=seconds, phases=phases, contributors=causes)


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
    """Return what one call of each operator gets whose lists were too long for the trace: all parameters or a part."""
    inputs = {id(piece.inputs): piece.inputs for piece, _ in traced.by_use["memory"]}  # equal inputs are one object
    cut = {key for key, given in inputs.items() if given is not None and is_cut(given)}
    called = {(piece.operator or "", piece.call) for piece, _ in traced.by_use["memory"] if id(piece.inputs) in cut}
    calls = Counter(operator for operator, _ in called)
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


def _shape(piece: Piece) -> str | None:
    product = None if piece.inputs is None else product_of(piece.operator or "", piece.inputs)
    if product is None or not product.m:
        return None
    batch = f"{product.batch} × " if product.batch > 1 else ""
    return f"{batch}m {product.m}, n {product.n}, k {product.k}"


def _things(traced: Traced) -> str:
    return "kernels" if traced.on_device else "operators"


def contributors(
    weighed: Iterable[Weighed],
    seconds: float,
    steps: int,
    things: str,
    why: Callable[[Piece], str | None] | None = None,
) -> list[Contributor]:
    """Return the largest modules of a term of ``seconds`` per step; the weights cover all ``steps``."""
    groups: defaultdict[tuple[str | None, tuple[str, ...]], list[Weighed]] = defaultdict(list)
    for each in weighed:
        piece, ns = each
        if ns > 0:
            path = module_of(piece.module)[0]
            # Work outside of modules is listed separately: an optimizer, a loss that the LightningModule computes.
            groups[path, () if path is not None else (piece.phase, piece.operator or piece.name)].append(each)
    sums = {key: sum(ns for _, ns in group) for key, group in groups.items()}
    scale = seconds / sum(sums.values()) if sums else 0.0
    return [
        Contributor(
            module=path,
            what=": ".join(what) or _most((piece.operator or piece.name, ns) for piece, ns in groups[path, what])[0],
            count=len(groups[path, what]) / steps,
            seconds=ns * scale,
            detail=_detail(groups[path, what], scale, steps, things, why),
        )
        for (path, what), ns in sorted(sums.items(), key=lambda item: -item[1])[:LARGEST]
        if seconds > 0
    ]


def _detail(
    group: Sequence[Weighed], scale: float, steps: int, things: str, why: Callable[[Piece], str | None] | None
) -> str:
    """Return the share of the largest kind, and what is known about the largest piece."""
    kind, ns, kinds = _most((piece.kind, ns) for piece, ns in group)
    times = sum(piece.kind == kind for piece, _ in group) / steps  # per step: 23 in two steps are 11.5
    count = f"{round(times, 2):,g}"
    told = f"{count} {kind} {things[:-1] if count == '1' else things}"
    reason = None if why is None else why(max(group, key=lambda weighed: weighed[1])[0])
    return (told if kinds == 1 else f"{ms(ns * scale)} in {told}") + (f"; {reason}" if reason else "")


def _most(weighed: Iterable[tuple[str, float]]) -> tuple[str, float, int]:
    """Return the name with the largest sum, that sum, and how many names there are."""
    sums: defaultdict[str, float] = defaultdict(float)
    for name, ns in weighed:
        sums[name] += ns
    return (*max(sums.items(), key=lambda item: item[1]), len(sums))


def ms(seconds: float) -> str:
    """Return ``seconds`` in words, to three digits at least."""
    value = seconds * 1e3
    return f"{value:,.0f} ms" if value >= 99.95 else f"{value:.3g} ms"


def by_phase(weighed: Iterable[tuple[str, float]], seconds: float) -> dict[str, float]:
    """Return how ``seconds`` divide among the phases of the ``weighed`` pieces, the longest first."""
    ns: defaultdict[str, float] = defaultdict(float)
    for phase, weight in weighed:
        ns[phase] += weight
    scale = seconds / total if (total := sum(ns.values())) else 0.0
    longest = sorted(ns.items(), key=lambda item: -item[1])
    return {phase: weight * scale for phase, weight in longest if seconds > 0 and weight}


def waits(gaps: Iterable[Gap], seconds: float, steps: int) -> list[Contributor]:
    """Return the largest causes of ``gaps``, which add up to ``seconds`` per step."""
    lost, count = Counter[str](), Counter[str]()
    for gap in gaps:
        lost[f"{gap.phase}: {gap.what}"] += gap.ns
        count[f"{gap.phase}: {gap.what}"] += 1
    return [
        Contributor(module=None, what=what, count=count[what] / steps, seconds=seconds * ns / lost.total())
        for what, ns in lost.most_common(LARGEST)
        if seconds > 0
    ]
