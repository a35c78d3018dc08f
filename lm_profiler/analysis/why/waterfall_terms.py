"""Computes the waterfall: the terms that add up from the ideal step to the measured one, and what each consists of."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, TypeVar

from lm_profiler.analysis.trace.kernel_sums import module_of
from lm_profiler.analysis.trace.pieces import Piece
from lm_profiler.analysis.why.operators import (
    UNKNOWN_LISTS,
    Product,
    TensorListFacts,
    is_cut,
    least_bytes,
    product_of,
)
from lm_profiler.analysis.why.traced import Gap, Traced, Weighed, with_floors
from lm_profiler.record.parts import INPUT_PHASES
from lm_profiler.record.run_record import (
    Contributor,
    NeedlessWork,
    Rates,
    Term,
    TermName,
    Waterfall,
)

MOST_CONTRIBUTORS = 8  # contributors that are kept per term

_OPTIMIZER_PRODUCTS: TermName = "optimizer_products"

# If the work in the traced steps exceeds the measured step by more than this share, no ceilings are shown.
_MOST_EXCESS = 0.10

_LEAST_NOTED_SHARE = 0.01  # excess work, and work with unknown bytes, gets a note from this share of the step on


@dataclass(frozen=True, kw_only=True)
class Step:
    """The mean untraced step of one device, and the speed of the device. None means unknown."""

    # the seconds of the step, whose 95 % interval is from ``ci_low`` to ``ci_high``
    step_s: float
    ci_low: float | None
    ci_high: float | None
    input_s: float  # the part of the step that waits for the batch and its transfer
    ideal_s: float  # the time of the model's FLOPs at the peak rate
    recomputed_share: float  # share of all FLOPs that activation checkpointing repeats
    rates: Rates  # the peak FLOP/s by the dtype of the factors
    dtype: str  # dtype of most FLOPs; its rate is known
    # the measured clock rate over the clock rate of the stated peak
    clock_share: float | None = None
    without_optimizer: Sequence[str] = ()  # modules whose weights no optimizer updates
    lists: TensorListFacts = (
        UNKNOWN_LISTS  # the parameters that an optimizer gets in lists
    )
    # the part of the step that waits for other ranks, by phase
    waiting_s: Mapping[str, float] = field(default_factory=dict)
    # the step by phase, on the clock that times operators; empty on a device, where work runs later than its phase
    phase_s: Mapping[str, float] = field(default_factory=dict)


def waterfall(step: Step, traced: Traced) -> Waterfall:
    """Return the waterfall of ``step``. The times of kernels are those in the ``traced`` steps; gaps are the rest.

    If the kernels took longer in the traced steps, they are scaled down to fit the measured step (on the CPU, to fit
    each phase). So no term is negative or larger than the step. Each term also has its smallest and its largest value
    from any single traced step, which is not a confidence interval.
    """
    notes: list[str] = []
    terms = _all_terms(step, traced, notes)
    terms_by_step = []
    for index in range(len(traced.begins)):
        terms_by_step.append(_all_terms(step, traced.only_step(index), notes=[]))
    has_optimizer_products = any(
        term.name == _OPTIMIZER_PRODUCTS and term.seconds for term in terms
    )
    if not has_optimizer_products:  # as with most optimizers
        terms = _without_optimizer_products(terms)
        for index, terms_of_step in enumerate(terms_by_step):
            terms_by_step[index] = _without_optimizer_products(terms_of_step)
    if len(terms_by_step) > 1:
        terms = _with_extremes(terms, terms_by_step)
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
        needless=list(_needless_work(step, traced)),
        notes=notes,
    )


def _needless_work(step: Step, traced: Traced) -> Iterator[NeedlessWork]:
    """Yield the possibly needless work of a step; if a phase is shorter without tracing, so is the work in it."""
    # the time of each phase in all traced steps together
    phase_ns: defaultdict[str, float] = defaultdict(float)
    for piece, own_ns in traced.pieces:
        phase_ns[piece.phase] += own_ns
    for gap in traced.gaps:
        phase_ns[gap.phase] += gap.ns
    for work in [*traced.needless, *_unused_gradients(step, traced)]:
        traced_s = phase_ns[work.phase] * 1e-9 / traced.steps
        untraced_s = step.phase_s.get(work.phase, traced_s)
        factor = 1.0
        if traced_s > 0.0:
            factor = min(untraced_s / traced_s, 1.0)
        yield work.model_copy(update={"seconds": work.seconds * factor})


def _unused_gradients(step: Step, traced: Traced) -> Iterator[NeedlessWork]:
    """Yield the backward pass of each module whose weights no optimizer updates."""
    for path in step.without_optimizer:
        times_ns = []
        for piece, own_ns in traced.pieces:
            module = piece.module or ""
            is_inside = module.startswith((f"{path} (", f"{path}."))
            if is_inside and piece.phase == "backward":
                times_ns.append(own_ns)
        yield NeedlessWork(
            kind="unused_gradients",
            phase="backward",
            what=path,
            count=len(times_ns) / traced.steps,
            seconds=sum(times_ns) * 1e-9 / traced.steps,
        )


def _without_optimizer_products(terms: Sequence[Term]) -> list[Term]:
    return [term for term in terms if term.name != _OPTIMIZER_PRODUCTS]


def _with_extremes(
    terms: Sequence[Term], terms_by_step: Sequence[Sequence[Term]]
) -> list[Term]:
    """Return ``terms`` with the smallest and the largest value of each, over all steps and any single one of them."""
    with_extremes = []
    for index, term in enumerate(terms):
        seconds = [term.seconds]
        for terms_of_step in terms_by_step:
            seconds.append(terms_of_step[index].seconds)
        extremes = {"low_s": min(seconds), "high_s": max(seconds)}
        with_extremes.append(term.model_copy(update=extremes))
    return with_extremes


def _all_terms(step: Step, traced: Traced, notes: list[str]) -> list[Term]:
    """Return the terms of the waterfall, which add up to the step; reasons why they are uncertain go to ``notes``.

    Traced work that took longer than the measured step is scaled down. If it took much longer, terms have no ceilings.
    """
    busy_s = _busy_s(traced)
    # how long the work may take: on the CPU nothing runs while the host waits for a batch
    available_s = step.step_s
    if not traced.on_device:
        waited_s = max(step.input_s - traced.seconds["input"], 0.0)
        available_s = max(step.step_s - waited_s, 0.0)
    # as a share of the step
    excess = (busy_s - available_s) / step.step_s
    has_ceilings = excess <= _MOST_EXCESS
    if excess > 0.0:
        scaled_pieces = []
        if available_s > 0.0:
            for piece, own_ns in traced.pieces:
                scaled_pieces.append((piece, own_ns * available_s / busy_s))
        traced = replace(traced, pieces=scaled_pieces, gaps=[])
    if excess >= _LEAST_NOTED_SHARE:
        ceilings = "" if has_ceilings else ", and no ceilings are shown"
        notes.append(
            f"the work in the traced steps took {ms(busy_s - available_s)} ({excess:.0%} of the step) longer than in "
            f"the measured steps: terms are scaled down to the measured steps{ceilings}"
        )
    elif step.phase_s:
        # the work fits into the step as a whole, so it is also fitted into each phase
        traced = _fitted_to_phases(traced, step)

    terms = _product_terms(step, traced, notes)
    terms += _memory_bound_terms(step, traced, notes)
    terms += _waiting_terms(step, traced)
    # The rest is a term too, so that the terms add up to the step. Below a nanosecond it is a rounding error, which
    # differs between rows in memory and rows read from a file.
    rest_s = step.step_s - math.fsum(term.seconds for term in terms)
    if abs(rest_s) < 1e-9:
        rest_s = 0.0
    terms.append(Term(name="unexplained", seconds=rest_s))
    if has_ceilings:
        return terms
    return [term.model_copy(update={"at_most_s": None}) for term in terms]


def _fitted_to_phases(traced: Traced, step: Step) -> Traced:
    """Return ``traced`` with the operators of each phase scaled down to the untraced phase; its gaps get the rest.

    Tracing lengthens operators, small ones most. If only the whole step were fitted, the time that tracing added to one
    phase would be missing from the gaps of others. The sum of all gaps stays at most as long as in the traced steps.
    """
    # by phase
    operators_ns: defaultdict[str, float] = defaultdict(float)
    for piece, own_ns in traced.pieces:
        operators_ns[piece.phase] += own_ns
    gaps_ns: defaultdict[str, float] = defaultdict(float)
    for gap in traced.gaps:
        gaps_ns[gap.phase] += gap.ns

    operator_factors: dict[str, float] = {}  # by which operators are scaled down
    fitted_gaps_ns = dict(gaps_ns)
    for phase, phase_s in step.phase_s.items():
        if phase in INPUT_PHASES:
            continue
        phase_ns = phase_s * 1e9 * traced.steps
        waited_ns = step.waiting_s.get(phase, 0.0) * 1e9 * traced.steps
        fitted_ns = min(operators_ns[phase], max(phase_ns - waited_ns, 0.0))
        if operators_ns[phase]:
            operator_factors[phase] = fitted_ns / operators_ns[phase]
        if gaps_ns[phase]:
            fitted_gaps_ns[phase] = phase_ns - fitted_ns

    # All gaps are scaled down if their sum would exceed that of the traced steps.
    traced_sum_ns = sum(gaps_ns.values())
    fitted_sum_ns = sum(fitted_gaps_ns.values())
    excess_factor = 1.0
    if fitted_sum_ns > traced_sum_ns:
        excess_factor = traced_sum_ns / fitted_sum_ns

    pieces = []
    for piece, own_ns in traced.pieces:
        pieces.append((piece, own_ns * operator_factors.get(piece.phase, 1.0)))
    gaps = []
    for gap in traced.gaps:
        gap_factor = 0.0
        if gaps_ns[gap.phase]:
            gap_factor = fitted_gaps_ns[gap.phase] / gaps_ns[gap.phase] * excess_factor
        gaps.append(gap._replace(ns=round(gap.ns * gap_factor)))
    return replace(traced, pieces=pieces, gaps=gaps)


def _busy_s(traced: Traced) -> float:
    """Return the seconds of a traced step in which work ran."""
    return sum(
        traced.seconds[use] for use in ("products", "memory", "communication", "input")
    )


def _product_terms(step: Step, traced: Traced, notes: list[str]) -> list[Term]:
    """Return the terms that add up to the time of matrix products and fused attention.

    They are the time of the model's FLOPs at the peak rate, the additional time due to a lowered clock and due to slow
    kernels, recomputation, and the products of the optimizer.
    """
    optimizers_products: list[Weighed] = []
    model_products: list[Weighed] = []
    for piece, own_ns in traced.by_use["products"]:
        if piece.phase == "optimizer":
            optimizers_products.append((piece, own_ns))
        else:
            model_products.append((piece, own_ns))
    # The products of the model are divided into: recomputed ones, the ideal time, what a lowered clock adds to that,
    # and the rest, which is due to slow kernels.
    products_s = _seconds_of_step(model_products, traced)
    repeated_s = products_s * step.recomputed_share
    ideal_s = min(step.ideal_s, products_s - repeated_s)
    if step.ideal_s > ideal_s:
        notes.append(
            f"the model's FLOPs take {ms(step.ideal_s)} at the peak, but its matrix products took {ms(ideal_s)}: "
            "fused causal "
            "attention does half of the counted FLOPs, some products have kernels with unknown names, or the peak "
            "belongs to another device"
        )
    beyond_ideal_s = products_s - repeated_s - ideal_s
    clock_s = 0.0
    if step.clock_share:
        slowed_s = ideal_s / step.clock_share - ideal_s
        clock_s = min(max(slowed_s, 0.0), beyond_ideal_s)
    slow_s = max(beyond_ideal_s - clock_s, 0.0)

    mean_share_at_peak = 0.0
    if products_s:
        mean_share_at_peak = ideal_s / products_s
    # Each piece with its time at the peak rate, and with the rest of its time. A term is divided in proportion to them.
    at_peak: list[Weighed] = []
    beyond_peak: list[Weighed] = []
    floor_of_piece = partial(_at_peak_ns, step=step)
    for piece, own_ns, floor_ns in with_floors(model_products, floor_of_piece):
        if floor_ns is None:  # its shapes are unknown: assume the mean rate
            floor_ns = own_ns * mean_share_at_peak
        at_peak.append((piece, floor_ns))
        beyond_peak.append((piece, own_ns - floor_ns))
    ideal_term = _term("ideal", ideal_s, at_peak, traced)
    repeated_by_phase = {"backward": repeated_s} if repeated_s else {}
    return [
        ideal_term.model_copy(update={"at_most_s": None}),
        _term("clock", clock_s, at_peak, traced),
        _term("slow_products", slow_s, beyond_peak, traced, why=_product_sizes_text),
        Term(
            name="recomputation",
            seconds=repeated_s,
            at_most_s=repeated_s,
            phases=repeated_by_phase,
        ),
        _term(
            _OPTIMIZER_PRODUCTS,
            _seconds_of_step(optimizers_products, traced),
            optimizers_products,
            traced,
            why=_product_sizes_text,
        ),
    ]


def _memory_bound_terms(step: Step, traced: Traced, notes: list[str]) -> list[Term]:
    """Return the two terms of memory-bound kernels: the time to move their bytes, and the time beyond that."""
    # each piece with the time to move its bytes, and with the rest of its time
    at_bandwidth = []
    beyond_bandwidth = []
    unknown_ns = 0.0
    tensor_lists = _estimated_tensor_lists(step, traced)
    floor_of_piece = partial(_at_bandwidth_ns, step=step, tensor_lists=tensor_lists)
    for piece, own_ns, floor_ns in with_floors(traced.by_use["memory"], floor_of_piece):
        if floor_ns is None:
            unknown_ns += own_ns
            floor_ns = 0.0
        at_bandwidth.append((piece, floor_ns))
        beyond_bandwidth.append((piece, own_ns - floor_ns))
    note = _note_on_bandwidth(step, traced, unknown_s=unknown_ns * 1e-9 / traced.steps)
    if note is not None:
        notes.append(note)
    bandwidth_s = _seconds_of_step(at_bandwidth, traced)
    beyond_s = _seconds_of_step(beyond_bandwidth, traced)
    return [
        _term("bandwidth", bandwidth_s, at_bandwidth, traced),
        _term("beyond_bandwidth", beyond_s, beyond_bandwidth, traced),
    ]


def _note_on_bandwidth(step: Step, traced: Traced, unknown_s: float) -> str | None:
    """Return a note on what 'beyond bandwidth' includes because a rate or the bytes of kernels are unknown.

    ``unknown_s`` are the seconds per step of the memory-bound kernels whose bytes are unknown. None without need.
    """
    if step.rates.bytes_per_s is None:
        return (
            "the memory bandwidth of this device is unknown, so all time of memory-bound kernels is in 'beyond "
            "bandwidth'"
        )
    if unknown_s >= _LEAST_NOTED_SHARE * step.step_s:
        return (
            f"{ms(unknown_s)} of 'beyond bandwidth' belong to {_kernels_or_operators(traced)} "
            "that move an unknown number of bytes"
        )
    return None


def _seconds_of_step(weighed: Iterable[Weighed], traced: Traced) -> float:
    """Return the seconds of a mean step that the nanoseconds of ``weighed`` pieces, over all traced steps, make up."""
    return sum(ns for _, ns in weighed) * 1e-9 / traced.steps


def _waiting_terms(step: Step, traced: Traced) -> list[Term]:
    """Return the terms of communication, of waiting for other ranks, of gaps, and of input.

    Waits are those of the untraced step. Gaps are in the traced steps, which show where they are and (since tracing
    lengthens them) how long at most. A wait for a batch may occur only in the traced steps or only in the others, so it
    is not subtracted from gaps of other phases. A wait for other ranks occurs in both: within the collectives of a
    device, or otherwise in gaps.
    """
    # 1. Waits for other ranks are within collectives, or in gaps.
    copies_s = traced.seconds["input"]
    exchange_s = traced.seconds["communication"]
    rank_waits_s = sum(step.waiting_s.values())
    rank_waits_in_calls_s = min(rank_waits_s, exchange_s) if traced.on_device else 0.0
    gaps: Sequence[Gap] = traced.gaps
    if not rank_waits_in_calls_s:
        gaps = _without_waits(gaps, step.waiting_s, traced.steps)
    input_gaps = []
    other_gaps = []
    for gap in gaps:
        if gap.phase in INPUT_PHASES:
            input_gaps.append(gap)
        else:
            other_gaps.append(gap)
    other_gaps_s = sum(gap.ns for gap in other_gaps) * 1e-9 / traced.steps

    # 2. The idle time of the untraced step is divided among waits for ranks, waits for a batch, and other gaps.
    idle_s = max(step.step_s - _busy_s(traced), 0.0)
    rank_waits_in_gaps_s = min(rank_waits_s - rank_waits_in_calls_s, idle_s)
    rank_waits_at_input_s = 0.0
    for phase in INPUT_PHASES:
        rank_waits_at_input_s += step.waiting_s.get(phase, 0.0)
    batch_waits_s = max(step.input_s - rank_waits_at_input_s - copies_s, 0.0)
    batch_waits_s = min(batch_waits_s, idle_s - rank_waits_in_gaps_s)
    if not input_gaps:
        # one gap per step, of any length: the time of a term is divided in proportion to its gaps
        input_gaps = [Gap(ns=1, phase="data", what="not while traced")] * traced.steps
    other_idle_s = idle_s - rank_waits_in_gaps_s - batch_waits_s
    idle_in_other_gaps_s = min(other_idle_s, other_gaps_s)

    # 3. the terms
    communication = _term(
        "communication",
        exchange_s - rank_waits_in_calls_s,
        traced.by_use["communication"],
        traced,
    )
    waiting_s = rank_waits_in_calls_s + rank_waits_in_gaps_s
    waiting_by_phase = by_phase(step.waiting_s.items(), waiting_s)
    waiting = Term(name="waiting", seconds=waiting_s, phases=waiting_by_phase)
    other_waits = _gap_term("gaps", idle_in_other_gaps_s, other_gaps, traced)
    copies = _term("input", copies_s, traced.by_use["input"], traced)
    batch_waits = _gap_term("input", batch_waits_s, input_gaps, traced)
    return [communication, waiting, other_waits, _sum_of(copies, batch_waits)]


def _without_waits(
    gaps: Sequence[Gap], waiting_s: Mapping[str, float], steps: int
) -> list[Gap]:
    """Return ``gaps`` without the waits in their phases (per step), which are taken from the longest gaps."""
    waits_left_ns = {}
    for phase, seconds in waiting_s.items():
        waits_left_ns[phase] = round(seconds * 1e9 * steps)
    shortened = []
    # The longest gaps are the waits: waiting for a rank takes milliseconds, other gaps take microseconds.
    for gap in sorted(gaps, key=lambda gap: gap.ns, reverse=True):
        waited_ns = min(gap.ns, waits_left_ns.get(gap.phase, 0))
        if waited_ns > 0:
            waits_left_ns[gap.phase] -= waited_ns
        if gap.ns > waited_ns:
            shortened.append(gap._replace(ns=gap.ns - waited_ns))
    return shortened


def _term(
    name: TermName,
    seconds: float,
    weighed: Sequence[Weighed],
    traced: Traced,
    why: Callable[[Piece], str | None] | None = None,
) -> Term:
    """Return a term of ``seconds`` per step, with its phases and largest contributors.

    ``weighed`` are the kernels or operators of the term, with the nanoseconds of each that belong to it. ``why``
    returns the reason why a piece is slow, which is shown beside it, or None.
    """
    if traced.is_part:
        # ``_with_extremes`` needs only the seconds of a single traced step
        return Term(name=name, seconds=seconds)
    return Term(
        name=name,
        seconds=seconds,
        at_most_s=seconds,
        phases=by_phase([(piece.phase, ns) for piece, ns in weighed], seconds),
        contributors=contributors(
            weighed, seconds, traced.steps, _kernels_or_operators(traced), why
        ),
    )


def _gap_term(
    name: TermName, seconds: float, gaps: Sequence[Gap], traced: Traced
) -> Term:
    """Return a term of ``seconds`` per step that consists of ``gaps``, in which nothing ran."""
    phases = by_phase([(gap.phase, gap.ns) for gap in gaps], seconds)
    causes = causes_of_gaps(gaps, seconds, traced.steps)
    return Term(
        name=name,
        seconds=seconds,
        at_most_s=seconds,
        phases=phases,
        contributors=causes,
    )


def _sum_of(term_a: Term, term_b: Term) -> Term:
    """Return the sum of two terms, with the name of ``term_a``; all of both terms could be saved."""
    seconds = term_a.seconds + term_b.seconds
    phases = dict(term_a.phases)
    for phase, phase_s in term_b.phases.items():
        phases[phase] = phases.get(phase, 0.0) + phase_s
    parts = [*term_a.contributors, *term_b.contributors]
    parts.sort(key=lambda part: part.seconds, reverse=True)
    return Term(
        name=term_a.name,
        seconds=seconds,
        at_most_s=seconds,
        phases=phases,
        contributors=parts,
    )


def _product_of_piece(piece: Piece) -> Product | None:
    if piece.inputs is None:
        return None
    return product_of(piece.operator or "", piece.inputs)


def _at_peak_ns(piece: Piece, step: Step) -> float | None:
    """Return how many nanoseconds the whole call would take at the peak rate of its dtype; None if unknown."""
    product = _product_of_piece(piece)
    if product is None:
        return None
    flops_per_s = step.rates.flops_per_s(product.dtype or step.dtype)
    if flops_per_s is None:
        return None
    return product.flops / flops_per_s * 1e9


def _estimated_tensor_lists(step: Step, traced: Traced) -> dict[str, TensorListFacts]:
    """Return the facts about the lists of tensors that one call gets, by operator, for lists that the trace cut off.

    Their elements are estimated: all calls of such an operator in a step are assumed to get all parameters together.
    """
    inputs_are_cut: dict[int, bool] = {}  # by id: equal inputs are the same object
    calls_of_operator = defaultdict[str, set[int]](set)
    for piece, _ in traced.by_use["memory"]:
        if piece.inputs is None:
            continue
        key = id(piece.inputs)
        if key not in inputs_are_cut:
            inputs_are_cut[key] = is_cut(piece.inputs)
        if inputs_are_cut[key]:
            calls_of_operator[piece.operator or ""].add(piece.call_number)

    lists_by_operator = {}
    for operator, calls in calls_of_operator.items():
        elements = step.lists.elements
        if elements is not None:
            elements = elements * traced.steps // len(calls)
        lists_by_operator[operator] = step.lists._replace(elements=elements)
    return lists_by_operator


def _at_bandwidth_ns(
    piece: Piece, step: Step, tensor_lists: Mapping[str, TensorListFacts]
) -> float | None:
    """Return how many nanoseconds moving the bytes of the whole call would take at the memory bandwidth; or None.

    ``tensor_lists`` has the facts about the lists of tensors that a call gets, by operator, where the trace lacks them.
    """
    if piece.inputs is None or step.rates.bytes_per_s is None:
        return None
    operator = piece.operator or ""
    lists_of_call = tensor_lists.get(operator, step.lists)
    moved_bytes = least_bytes(operator, piece.inputs, lists_of_call)
    if moved_bytes is None:
        return None
    return moved_bytes / step.rates.bytes_per_s * 1e9


def _product_sizes_text(piece: Piece) -> str | None:
    """Return the sizes of the matrix product that ``piece`` computes, as text; None if it is unknown."""
    product = _product_of_piece(piece)
    if product is None or not product.m:
        return None
    batch = f"{product.batch} × " if product.batch > 1 else ""
    return f"{batch}m {product.m}, n {product.n}, k {product.k}"


def _kernels_or_operators(traced: Traced) -> str:
    return "kernels" if traced.on_device else "operators"


class _ContributorKey(NamedTuple):
    """Identifies a contributor: a module; or for work outside of modules, a phase and an operator or kernel.

    Examples of the latter are the optimizer, and a loss that the LightningModule computes itself.
    """

    module: str | None
    phase: str | None
    name: str | None


def contributors(
    weighed: Iterable[Weighed],
    seconds: float,
    steps: int,
    things: str,
    why: Callable[[Piece], str | None] | None = None,
) -> list[Contributor]:
    """Return the largest contributors to a term.

    Args:
        weighed: the pieces of the term over all ``steps``, with their nanoseconds.
        seconds: the time of the term per step, which is divided among the contributors.
        steps: the number of traced steps.
        things: the word for pieces: "kernels" or "operators".
        why: returns the reason why a piece is slow, or None; it is called for the largest piece of a contributor.
    """
    if seconds <= 0.0:
        return []
    groups: defaultdict[_ContributorKey, list[Weighed]] = defaultdict(list)
    sums_ns: defaultdict[_ContributorKey, float] = defaultdict(float)
    for piece, ns in weighed:
        if ns > 0:
            key = _contributor_key(piece)
            groups[key].append((piece, ns))
            sums_ns[key] += ns
    if not sums_ns:
        return []
    seconds_per_ns = seconds / sum(sums_ns.values())

    largest_contributors = []
    for key in _largest_first(sums_ns)[:MOST_CONTRIBUTORS]:
        group = groups[key]
        largest_contributors.append(
            Contributor(
                module=key.module,
                what=_contributor_name(key, group),
                count=len(group) / steps,
                seconds=sums_ns[key] * seconds_per_ns,
                detail=_contributor_detail(group, seconds_per_ns, steps, things, why),
            )
        )
    return largest_contributors


def _contributor_key(piece: Piece) -> _ContributorKey:
    """Return the key of the row to which the time of ``piece`` is added: its module, or else its phase and name."""
    path, _ = module_of(piece.module)
    if path is not None:
        return _ContributorKey(module=path, phase=None, name=None)
    return _ContributorKey(module=None, phase=piece.phase, name=_piece_name(piece))


def _piece_name(piece: Piece) -> str:
    return piece.operator or piece.name


def _contributor_name(key: _ContributorKey, group: Sequence[Weighed]) -> str:
    """Return the phase and the name of work outside of modules; of a module, its operator with the most time."""
    if key.phase is not None and key.name is not None:
        return f"{key.phase}: {key.name}"
    return _largest_sum((_piece_name(piece), ns) for piece, ns in group).name


def _contributor_detail(
    group: Sequence[Weighed],
    seconds_per_ns: float,
    steps: int,
    things: str,
    why: Callable[[Piece], str | None] | None,
) -> str:
    """Return a text with the count and the time of the largest kind of pieces, and why the largest piece is slow.

    Args:
        group: the pieces, each with the nanoseconds that count.
        seconds_per_ns: the factor from nanoseconds of the trace to seconds of one step.
        steps: the number of traced steps.
        things: the word for the pieces, in the plural.
        why: returns why a piece is slow; None if that is not explained.
    """
    largest_kind = _largest_sum((piece.kind, ns) for piece, ns in group)
    pieces_of_kind = sum(1 for piece, _ in group if piece.kind == largest_kind.name)
    count = f"{round(pieces_of_kind / steps, 2):,g}"  # 23 in two steps are 11.5
    word = things.removesuffix("s") if count == "1" else things
    detail = f"{count} {largest_kind.name} {word}"
    if largest_kind.names > 1:
        detail = f"{ms(largest_kind.ns * seconds_per_ns)} in {detail}"
    if why is not None:
        largest_piece, _ = max(group, key=lambda weighed: weighed[1])
        reason = why(largest_piece)
        if reason:
            detail += f"; {reason}"
    return detail


_Key = TypeVar("_Key")


def _largest_first(sums_ns: Mapping[_Key, float]) -> list[_Key]:
    """Return the keys sorted by their sums, the largest first; keys with equal sums keep their order.

    Sums are rounded, because scaling makes equal sums differ in their last digits.
    """
    return sorted(sums_ns, key=lambda key: round(sums_ns[key], 3), reverse=True)


class _LargestSum(NamedTuple):
    """The name with the largest sum, that sum, and how many names there are."""

    name: str
    ns: float
    names: int


def _largest_sum(weighed: Iterable[tuple[str, float]]) -> _LargestSum:
    """Return the name with the largest sum of nanoseconds, this sum, and the number of names."""
    sums_ns: defaultdict[str, float] = defaultdict(float)
    for name, ns in weighed:
        sums_ns[name] += ns
    largest = _largest_first(sums_ns)[0]
    return _LargestSum(name=largest, ns=sums_ns[largest], names=len(sums_ns))


def ms(seconds: float) -> str:
    """Return ``seconds`` as text in milliseconds, with at least three digits."""
    milliseconds = seconds * 1e3
    if milliseconds >= 99.95:
        return f"{milliseconds:,.0f} ms"
    return f"{milliseconds:.3g} ms"


def by_phase(weighed: Iterable[tuple[str, float]], seconds: float) -> dict[str, float]:
    """Divide ``seconds`` among phases in proportion to the ``weighed`` ones; the longest phase comes first."""
    if seconds <= 0.0:
        return {}
    weights: defaultdict[str, float] = defaultdict(float)
    for phase, weight in weighed:
        weights[phase] += weight
    total = sum(weights.values())
    longest = sorted(weights, key=lambda phase: weights[phase], reverse=True)
    return {
        phase: weights[phase] * seconds / total for phase in longest if weights[phase]
    }


def causes_of_gaps(
    gaps: Iterable[Gap], seconds: float, steps: int
) -> list[Contributor]:
    """Return the largest causes of ``gaps``, with shares of ``seconds`` per step in proportion to their length."""
    if seconds <= 0.0:
        return []
    lost_ns: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for gap in gaps:
        cause = f"{gap.phase}: {gap.what}"
        lost_ns[cause] += gap.ns
        counts[cause] += 1
    causes = []
    for cause, ns in lost_ns.most_common(MOST_CONTRIBUTORS):
        seconds_lost = seconds * ns / lost_ns.total()
        causes.append(
            Contributor(
                module=None,
                what=cause,
                count=counts[cause] / steps,
                seconds=seconds_lost,
            )
        )
    return causes
