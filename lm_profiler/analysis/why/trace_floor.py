"""Computes the floor and the waterfall of a trace that has no run, with FLOPs and bytes from the trace's shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from lm_profiler.analysis.hardware.roofline import Dtype, least_compute_s, rates_of
from lm_profiler.analysis.trace.pieces import Piece
from lm_profiler.analysis.why.operators import UNKNOWN_LISTS, least_bytes, product_of
from lm_profiler.analysis.why.traced import Traced
from lm_profiler.analysis.why.waterfall_terms import Step, waterfall
from lm_profiler.record.run_record import Rates, Waterfall
from lm_profiler.record.trace_answer import TraceFloor

_DTYPES = ("float32", "bfloat16", "float16")
# if a larger share of the products' time has no shapes, there is no waterfall
_MOSTLY_UNKNOWN = 0.5


def floor_of(traced: Traced, device: str, notes: list[str]) -> TraceFloor | None:
    """Return the least time of the traced work on ``device``; None, with a note, if rates or shapes are unknown."""
    rates = _datasheet_rates(traced, device)
    if not rates.flops and rates.bytes_per_s is None:
        notes.append(
            f"no floor: no datasheet of {device!r} is known; --device takes a name as the driver reports it"
        )
        return None
    work = _Work(traced)
    if not work.flops and not work.bytes:
        notes.append(
            "no floor: the trace has no shapes; record them with record_shapes=True"
        )
        return None
    memory_s = None
    if rates.bytes_per_s is not None:
        memory_s = work.bytes / rates.bytes_per_s
    # a dict, so that each source is named once, and in order
    sources = dict.fromkeys(rate.source for rate in rates.flops)
    if rates.bytes_source is not None:
        sources[rates.bytes_source] = None
    return TraceFloor(
        device=device,
        products_s=_least_time_of_products(work, rates, device, notes),
        memory_s=memory_s,
        unknown_s=work.unknown_ns * 1e-9,
        source="; ".join(sources),
    )


def _least_time_of_products(
    work: _Work, rates: Rates, device: str, notes: list[str]
) -> float | None:
    """Return the seconds of the FLOPs of ``work`` at the peak; None, with a note, if the peak of a dtype is unknown."""
    for dtype in work.flops:
        if rates.flops_per_s(dtype) is None:
            notes.append(
                f"the floor of the matrix products is unknown: no peak is published for {dtype} on {device}"
            )
            return None
    return least_compute_s(work.flops, rates)


def waterfall_of(traced: Traced, device: str, notes: list[str]) -> Waterfall | None:
    """Return the waterfall of the traced step on its own ``device``; None if shapes or rates are unknown."""
    work = _Work(traced)
    rates = _datasheet_rates(traced, device)
    if not work.products_ns:
        return None
    if work.unknown_products_ns > _MOSTLY_UNKNOWN * work.products_ns:
        share = work.unknown_products_ns / work.products_ns
        notes.append(
            f"no waterfall: the FLOPs are unknown for {share:.0%} of the time of matmuls, because the trace has "
            "no shapes "
            "(record_shapes=True), or because these are convolutions"
        )
        return None
    [(main_dtype, _)] = work.flops.most_common(1)
    main_rate = rates.flops_per_s(main_dtype)
    if main_rate is None:
        return None
    ideal_s = 0.0
    for dtype, flops in work.flops.items():
        # A dtype without a published peak gets that of the dtype with most FLOPs.
        flops_per_s = rates.flops_per_s(dtype) or main_rate
        ideal_s += flops / flops_per_s
    # Products of unknown FLOPs are taken to be as fast as the others.
    known_share = 1.0 - work.unknown_products_ns / work.products_ns
    pieces_ns = sum(own_ns for _, own_ns in traced.pieces)
    gaps_ns = sum(gap.ns for gap in traced.gaps)
    window_ns = pieces_ns + gaps_ns
    step = Step(
        step_s=window_ns * 1e-9 / traced.steps,
        ci_low=None,
        ci_high=None,
        input_s=0.0,
        ideal_s=ideal_s / known_share / traced.steps,
        recomputed_share=0.0,
        rates=rates,
        dtype=main_dtype,
    )
    return waterfall(step, traced)


class _Work:
    """FLOPs by dtype and bytes of the calls whose shapes the trace has, and the time of the others."""

    def __init__(self, traced: Traced) -> None:
        self.flops: Counter[str] = Counter()
        self.bytes = 0
        self.products_ns = 0.0
        self.unknown_products_ns = 0.0
        self.unknown_ns = 0.0
        self._add_products(traced)
        self._add_memory(traced)

    def _add_products(self, traced: Traced) -> None:
        """Add the FLOPs of all matrix products, each call once, and the time of those whose shapes are unknown."""
        counted_calls = set[int]()
        for piece, own_ns in traced.by_use["products"]:
            self.products_ns += own_ns
            product = None
            if piece.inputs is not None:
                product = product_of(piece.operator or "", piece.inputs)
            if product is None:
                self.unknown_products_ns += own_ns
                self.unknown_ns += own_ns
            elif _is_new(piece, counted_calls):
                self.flops[product.dtype or "float32"] += product.flops

    def _add_memory(self, traced: Traced) -> None:
        """Add the least bytes of all other kernels, each call once, and the time of those with unknown bytes."""
        counted_calls = set[int]()
        for piece, own_ns in traced.by_use["memory"]:
            moved_bytes = None
            if piece.inputs is not None:
                moved_bytes = least_bytes(
                    piece.operator or "", piece.inputs, UNKNOWN_LISTS
                )
            if moved_bytes is None:
                self.unknown_ns += own_ns
            elif _is_new(piece, counted_calls):
                self.bytes += moved_bytes


def _is_new(piece: Piece, counted_calls: set[int]) -> bool:
    """Return whether the call of ``piece`` is not counted yet, and count it: it may launch several kernels."""
    if piece.call_number in counted_calls:
        return False
    if piece.call_number >= 0:
        counted_calls.add(piece.call_number)
    return True


def _datasheet_rates(traced: Traced, device: str) -> Rates:
    """Return the datasheet's rates of ``device``; the kernels' names show in which precision float32 runs."""
    float32_as: Dtype = "float32"
    if _uses_tf32(piece for piece, _ in traced.by_use["products"]):
        float32_as = "tf32"
    return rates_of(
        device, dict.fromkeys(_DTYPES), copied_bytes_per_s=None, float32_as=float32_as
    )


def _uses_tf32(products: Iterable[Piece]) -> bool:
    return any("tf32" in piece.name.lower() for piece in products)
