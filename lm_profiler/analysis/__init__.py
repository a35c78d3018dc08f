"""The arithmetic: numbers in, numbers and words out.

May use numpy, scipy and ``record``. Never torch or Lightning, and never prints.
"""

from lm_profiler.analysis.compare.ratio import RatioInterval, change, minimum_detectable_effect, ratio_interval
from lm_profiler.analysis.hardware.advice import Settings
from lm_profiler.analysis.hardware.peaks import DevicePeaks, Peak, device_peaks, matmul_dtype, peak
from lm_profiler.analysis.hardware.utilisation import (
    hfu,
    mfu,
    samples_per_s,
    tokens_per_s,
    transformer_flops_per_token,
)
from lm_profiler.analysis.hardware.verdict import Evidence, Verdict, what_binds
from lm_profiler.analysis.steps.statistics import (
    FINEST_TARGET,
    Summary,
    median_interval,
    precise_enough,
    relative_half_width,
    summarise,
)
from lm_profiler.analysis.steps.steadiness import Steadiness, steadiness, steady_from

__all__ = [
    "FINEST_TARGET",
    "DevicePeaks",
    "Evidence",
    "Peak",
    "RatioInterval",
    "Settings",
    "Steadiness",
    "Summary",
    "Verdict",
    "change",
    "device_peaks",
    "hfu",
    "matmul_dtype",
    "median_interval",
    "mfu",
    "minimum_detectable_effect",
    "peak",
    "precise_enough",
    "ratio_interval",
    "relative_half_width",
    "samples_per_s",
    "steadiness",
    "steady_from",
    "summarise",
    "tokens_per_s",
    "transformer_flops_per_token",
    "what_binds",
]
