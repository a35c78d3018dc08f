"""What a run's record and its trace say together of where the step's time went."""

from __future__ import annotations

from lm_profiler.analysis.why.traced import Traced
from lm_profiler.analysis.why.waterfall import Step, waterfall
from lm_profiler.record.run import RunRecord, Waterfall


def waterfall_of(
    record: RunRecord,
    traced: Traced | None,
    devices: int,
    item_of_lists: int | None,
    multiprocessors: int | None,
) -> Waterfall | None:
    """Where the time of the median step went; None where FLOPs or peak are unknown, or nothing was traced.

    Args:
        record: of the run, with its utilisation.
        traced: what the traced steps of rank 0 went to.
        devices: that share the step's FLOPs.
        item_of_lists: bytes of an element of the parameters, where they are of one type.
        multiprocessors: of one device.
    """
    used, times, rates = record.utilisation, record.time.get("step"), record.rates
    if traced is None or used is None or used.dtype is None or times is None or not times.median or rates is None:
        return None
    dtype = "float32" if used.dtype == "tf32" else used.dtype
    rate = next((rate for rate in rates.flops if rate.dtype == dtype), None)
    if rate is None:
        return None
    # The clock that the sheet is of: the machine's own product ran at whatever clock it held.
    of_sheet = used.peak_flops_per_s == rate.flops_per_s
    share = record.telemetry.clock_share if of_sheet and record.telemetry is not None else None
    step = Step(
        step_s=times.median,
        ci_low=times.ci_low,
        ci_high=times.ci_high,
        input_s=times.median * sum(record.shares.get(phase, 0.0) for phase in ("data", "transfer")),
        ideal_s=used.flops.model / devices / rate.flops_per_s,
        recomputed_share=used.flops.recomputation / used.flops.all if used.flops.all else 0.0,
        peak_flops_per_s=rate.flops_per_s,
        peak_source=rate.source,
        bandwidth_bytes_per_s=rates.bytes_per_s,
        bandwidth_source=rates.bytes_source,
        clock_share=share,
        item_of_lists=item_of_lists,
        multiprocessors=multiprocessors,
    )
    return waterfall(step, traced)
