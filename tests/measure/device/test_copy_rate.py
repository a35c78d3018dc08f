"""The rate of a copy against clocks of known speed; on the real machine only loosely, for it is shared."""

from __future__ import annotations

import pytest
import torch
import warm

from lm_profiler.measure.device import ceilings as module
from lm_profiler.measure.device.ceilings import copy_rate

CPU = torch.device("cpu")
MIB = 1 << 20


def test_bytes_read_and_bytes_written_count_over_the_best_copy() -> None:
    """Copies take 1 ms by this clock but for the fourth, which takes half of it."""
    pauses: list[float] = []
    seconds = iter([1e-3, 1e-3, 1e-3, 0.5e-3, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3])
    now, starts = [0.0], iter([True, False] * 9)

    def clock() -> int:
        if not next(starts):
            now[0] += next(seconds)
        return round(now[0] * 1e9)

    rate = copy_rate(CPU, clock, pauses.append, buffer_bytes=MIB)
    assert rate == pytest.approx(2 * MIB / 0.5e-3)
    assert len(pauses) == 2


def test_a_clock_that_is_too_coarse_tells_nothing() -> None:
    assert copy_rate(CPU, lambda: 0, lambda _: None, buffer_bytes=MIB) is None


def test_without_memory_for_the_buffers_it_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(torch, "ones", lambda *size, **_: made.append(1))
    assert copy_rate(CPU, buffer_bytes=module.usable_bytes(CPU) // 2) is None
    assert not made


def test_the_process_grows_by_64_mib_at_most() -> None:
    code = """
from resource import RUSAGE_SELF, getrusage
import torch
from lm_profiler.measure.device.ceilings import copy_rate
copy_rate(torch.device("cpu"), buffer_bytes=4096)
before = getrusage(RUSAGE_SELF).ru_maxrss
assert copy_rate(torch.device("cpu")) > 0
print((getrusage(RUSAGE_SELF).ru_maxrss - before) >> 10)
"""
    done = warm.run("-c", code)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 66


def test_a_real_copy_on_the_cpu() -> None:
    state = torch.get_rng_state()
    rate = copy_rate(CPU, buffer_bytes=16 * MIB)
    assert rate is not None
    assert 1e8 < rate < 1e13
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.gpu
def test_a_real_copy_on_a_gpu_stays_below_its_datasheet() -> None:
    from lm_profiler.analysis.hardware.roofline import bandwidth

    device = torch.device("cuda", 0)
    rate, sheet = copy_rate(device), bandwidth(torch.cuda.get_device_name(device))
    assert rate is not None
    assert rate > 1e10
    assert sheet is None or 0.5 * sheet.per_s < rate < 1.05 * sheet.per_s
