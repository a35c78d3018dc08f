"""The rate of a copy against clocks of known speed; on the real machine only loosely, for it is shared."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
import torch

from lm_profiler.measure.device import copy_rate as module
from lm_profiler.measure.device.copy_rate import copy_rate, cpu_cache_bytes

CPU = torch.device("cpu")
MIB = 1 << 20


def test_bytes_read_and_bytes_written_count_over_the_best_copy() -> None:
    """Copies take 1 ms by this clock but for the fourth, which takes half of it."""
    pauses: list[float] = []
    seconds = iter([1e-3, 1e-3, 1e-3, 0.5e-3, 1e-3, 1e-3])
    now, starts = [0.0], iter([True, False] * 6)

    def clock() -> int:
        if not next(starts):
            now[0] += next(seconds)
        return round(now[0] * 1e9)

    rate = copy_rate(CPU, clock, pauses.append, buffer_bytes=MIB)
    assert rate == pytest.approx(2 * MIB / 0.5e-3)
    assert len(pauses) == 2


def test_a_clock_that_is_too_coarse_tells_nothing() -> None:
    assert copy_rate(CPU, lambda: 0, lambda _: None, buffer_bytes=MIB) is None


def test_without_memory_for_buffers_beyond_all_caches_it_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(module, "usable_bytes", lambda device: 4 * module.SMALLEST_BYTES - 1)
    monkeypatch.setattr(torch, "ones", lambda *size, **_: made.append(1))
    assert copy_rate(CPU) is None
    assert not made


def test_both_buffers_together_are_twice_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def ones(elements: int, **_: object) -> torch.Tensor:
        asked.append(4 * elements)
        return torch.zeros(1)

    monkeypatch.setattr(module, "usable_bytes", lambda device: 1 << 50)
    monkeypatch.setattr(module, "cpu_cache_bytes", lambda: 3 << 30)
    monkeypatch.setattr(torch, "ones", ones)
    copy_rate(CPU, count().__next__, lambda _: None)
    assert asked == [3 << 30, 3 << 30]


def test_last_level_caches_count_once_each(tmp_path: Path) -> None:
    """Two sockets of two CPUs each: an L2 of 1 MiB a CPU, an L3 of 32 MiB a socket."""
    for cpu in range(4):
        for index, (level, size, shared) in enumerate([(2, "1024K", str(cpu)), (3, "32768K", f"{cpu // 2 * 2}-..")]):
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            for name, text in (("level", str(level)), ("size", size), ("shared_cpu_list", shared)):
                (folder / name).write_text(text + "\n")
    (tmp_path / "cpu0" / "cache" / "index9").mkdir()  # of which nothing can be read
    assert cpu_cache_bytes(tmp_path) == 64 * MIB
    assert cpu_cache_bytes(tmp_path / "missing") == 0


def test_a_real_copy_on_the_cpu() -> None:
    state = torch.get_rng_state()
    rate = copy_rate(CPU, buffer_bytes=16 * MIB)
    assert rate is not None
    assert 1e8 < rate < 1e13
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.gpu
def test_a_real_copy_on_a_gpu_stays_below_its_datasheet() -> None:
    from lm_profiler.analysis.hardware.peaks import bandwidth

    device = torch.device("cuda", 0)
    rate, sheet = copy_rate(device), bandwidth(torch.cuda.get_device_name(device))
    assert rate is not None
    assert rate > 1e10
    assert sheet is None or 0.5 * sheet.bytes_per_s < rate < 1.05 * sheet.bytes_per_s
