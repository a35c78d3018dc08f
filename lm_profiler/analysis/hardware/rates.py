"""The rates that a run is held against: the datasheet's first, else what the machine was measured to do."""

from __future__ import annotations

from collections.abc import Mapping

from lm_profiler.analysis.hardware.peaks import Dtype, bandwidth, peak
from lm_profiler.record.run import FlopRate, Rates

_DTYPES: dict[str, Dtype] = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}
MEASURED_PRODUCT = "a large matrix product, measured after the run"
GIVEN = "given with --peak_tflops"
MEASURED_COPY = "a large copy, measured after the run"


def rates_of(
    device_name: str,
    measured: Mapping[str, float | None],
    copied_bytes_per_s: float | None,
    float32_as: Dtype | None = "float32",
    given: Mapping[str, float] | None = None,
) -> Rates:
    """Of the device that reports itself as ``device_name``.

    Args:
        device_name: as ``peak`` takes it.
        measured: the machine's own FLOP/s for each dtype that is asked for, by torch's names; None is unknown.
        copied_bytes_per_s: its own bytes/s in a large copy.
        float32_as: in what float32 products run; None is unknown.
        given: FLOP/s that the user says, before all others.
    """
    flops = []
    for dtype, own in measured.items():
        tabulated = float32_as if dtype == "float32" else _DTYPES.get(dtype)
        sheet = None if tabulated is None else peak(device_name, tabulated)
        if given is not None and dtype in given:
            flops.append(FlopRate(dtype=dtype, flops_per_s=given[dtype], source=GIVEN))
        elif sheet is not None:
            flops.append(FlopRate(dtype=dtype, flops_per_s=sheet.flops_per_s, source=sheet.source))
        elif own is not None:
            flops.append(FlopRate(dtype=dtype, flops_per_s=own, source=MEASURED_PRODUCT))
    memory = bandwidth(device_name)
    copy_source = None if copied_bytes_per_s is None else MEASURED_COPY
    return Rates(
        flops=flops,
        bytes_per_s=copied_bytes_per_s if memory is None else memory.bytes_per_s,
        bytes_source=copy_source if memory is None else memory.source,
        copied_bytes_per_s=copied_bytes_per_s,
    )
