"""What a run's record and its trace say together of where the step's time went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from lm_profiler.analysis.hardware.device_rates import GIVEN, MEASURED_PRODUCT, sheet_clock_hz
from lm_profiler.analysis.trace.pieces import INPUT_PHASES
from lm_profiler.analysis.why.moved import Lists
from lm_profiler.analysis.why.traced import Traced
from lm_profiler.analysis.why.waterfall_terms import Step, waterfall
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.run import Floor, FlopRate, Rates, RunRecord, Telemetry, Waterfall


def waterfall_of(
    record: RunRecord,
    traced: Traced | None,
    devices: int,
    lists: Lists,
    multiprocessors: int | None,
) -> Waterfall | None:
    """Where the time of the mean step went; None where FLOPs or peak are unknown, or nothing was traced.

    Args:
        record: of the run, with its utilisation.
        traced: what the traced steps of rank 0 went to.
        devices: that share the step's FLOPs.
        lists: what an optimizer is given in lists of tensors.
        multiprocessors: of one device.
    """
    used, times, rates = record.utilisation, record.time.get("step"), record.rates
    if traced is None or used is None or used.dtype is None or times is None or not times.mean or rates is None:
        return None
    dtype = "float32" if used.dtype == "tf32" else used.dtype
    rate = next((rate for rate in rates.flops if rate.dtype == dtype), None)
    if rate is None:
        return None
    step = Step(
        step_s=times.mean,
        ci_low=times.mean_low,
        ci_high=times.mean_high,
        input_s=times.mean * sum(record.shares.get(phase, 0.0) for phase in INPUT_PHASES),
        waiting_s=_waiting_s(record),
        ideal_s=used.flops.model / devices / mean_rate(record.floors.values(), rates, rate),
        recomputed_share=used.flops.recomputation / used.flops.all if used.flops.all else 0.0,
        rates=rates,
        dtype=dtype,
        clock_share=clock_share(record.telemetry, rate, multiprocessors),
        lists=lists,
        multiprocessors=multiprocessors,
    )
    phases = {part: record.shares[part] * times.mean for part in PARTS if record.shares.get(part)}
    return waterfall(step, traced).model_copy(update={"step_phases": phases})


def _waiting_s(record: RunRecord) -> dict[str, float]:
    """For other ranks, by phase: of the rank that was traced."""
    return next((of.waiting_s for of in record.ranks.by_rank if of.rank == 0), {}) if record.ranks is not None else {}


def mean_rate(floors: Iterable[Floor], rates: Rates, usual: FlopRate) -> float:
    """FLOP/s of all that is multiplied, each dtype at its own rate; the usual one where a rate is unknown."""
    flops: Counter[str] = Counter()
    for floor in floors:
        flops.update(floor.flops)
    known = {dtype: rates.flops_per_s(dtype) for dtype in flops}
    if not flops.total() or not all(known.values()):
        return usual.flops_per_s
    return flops.total() / sum(count / (known[dtype] or 1.0) for dtype, count in flops.items())


def clock_share(telemetry: Telemetry | None, rate: FlopRate, multiprocessors: int | None) -> float | None:
    """The clock held over the sheet's; None for a rate of the machine's own, measured at whatever clock it held."""
    if rate.source in (MEASURED_PRODUCT, GIVEN) or telemetry is None:
        return None
    if not telemetry.median_sm_clock_hz or not telemetry.max_sm_clock_hz:
        return None
    stated_hz = sheet_clock_hz(rate.flops_per_s, multiprocessors or 0, telemetry.max_sm_clock_hz)
    return None if stated_hz is None else telemetry.median_sm_clock_hz / stated_hz


def lists_of(parameters: Iterable[Any]) -> Lists:
    """What an optimizer of ``parameters`` is given in lists: this rank's part of them."""
    local = [parameter.to_local() if hasattr(parameter, "to_local") else parameter for parameter in parameters]
    items = {tensor.element_size() for tensor in local}
    return Lists(sum(tensor.numel() for tensor in local), items.pop() if len(items) == 1 else None)
