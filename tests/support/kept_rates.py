"""The rates of this machine as earlier runs would have kept them, so that a run need not read them."""

from __future__ import annotations

import pytest
import torch

from lm_profiler.measure.device.kept_ceilings import known_ceiling, known_copy_rate


def keep_rates(flops_per_s: float, bytes_per_s: float) -> None:
    """Keep FLOP/s in float32 and bytes/s of a CPU in the cache folder, where runs find them."""
    device = torch.device("cpu")
    for _ in range(2):  # what two readings agree on is not read again for a day
        known_ceiling(device, torch.float32, pytest.fail, probe=lambda *_: flops_per_s)
        known_copy_rate(device, probe=lambda _: bytes_per_s)
