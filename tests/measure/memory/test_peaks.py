"""Peaks: of a probe that the test makes up, and of this process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lm_profiler.measure.clocks import tape as at
from lm_profiler.measure.clocks.tape import OUTSIDE
from lm_profiler.measure.memory.peaks import (
    PartPeaks,
    ProcessProbe,
    available_bytes,
    bytes_below_peak,
    probe_of,
    unreclaimable_bytes,
)
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.steps import Peaks

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peaks are read as Linux has them")
MEGABYTE = 2**20


class FakeProbe:
    """An allocator with a number of bytes held, and the most since the last reset."""

    def __init__(self) -> None:
        self.held = self.peak = 0
        self.resettable = True

    def hold(self, held: int) -> None:
        self.held = held
        self.peak = max(self.peak, held)

    def reset(self) -> None:
        self.peak = self.held

    def peaks(self) -> Peaks:
        return self.peak, None, None


def mark_step(parts: PartPeaks, probe: FakeProbe, scale: int = 1) -> Peaks:
    """Hold up to 1 byte in data, 70 in forward, 900 outside of the step, 60 in optimizer; backward begins with 50."""
    parts(at.DATA)
    probe.hold(1 * scale)
    parts(at.FORWARD)
    probe.hold(70 * scale)
    probe.hold(50 * scale)
    parts(at.BACKWARD)
    probe.hold(20 * scale)
    parts(OUTSIDE)
    probe.hold(900 * scale)
    probe.hold(20 * scale)
    parts(at.OPTIMIZER)
    probe.hold(60 * scale)
    parts(at.OTHER)
    return parts.take_step()


def test_a_peak_belongs_to_the_part_in_which_it_rose() -> None:
    """The 900 bytes that are held outside of the step are no peak of it."""
    probe = FakeProbe()
    parts = PartPeaks(probe)
    assert mark_step(parts, probe) == (70, None, None)
    assert parts.by_part() == {
        "data": (1, None, None),
        "forward": (70, None, None),
        "backward": (50, None, None),  # held when it began
        "optimizer": (60, None, None),
    }


def test_a_part_has_the_peak_of_all_steps_and_of_nothing_between_them() -> None:
    """The peak of a step is in forward, of 70 bytes; the first step holds ten times as much."""
    probe = FakeProbe()
    parts = PartPeaks(probe)
    mark_step(parts, probe, scale=10)
    probe.hold(900_000)
    probe.hold(0)
    assert mark_step(parts, probe) == (70, None, None)
    assert parts.by_part()["forward"] == (700, None, None)


def test_the_cpu_has_the_processs_memory_of_which_some_is_available() -> None:
    assert isinstance(probe_of(torch.device("cpu")), ProcessProbe)
    import psutil

    available = available_bytes(torch.device("cpu"))
    assert 0 < available <= psutil.virtual_memory().total


@linux
def test_the_peak_of_the_process_is_its_own() -> None:
    code = """
from resource import RUSAGE_SELF, getrusage
import torch
from lm_profiler.measure.memory.peaks import PartPeaks, ProcessProbe
data = torch.ones(300 << 20, dtype=torch.uint8)
del data
before = getrusage(RUSAGE_SELF).ru_maxrss
probe = ProcessProbe()
parts = PartPeaks(probe)
for code in (0, 2, 3):
    parts(code)
    if code == 2:
        higher = torch.ones(900 << 20, dtype=torch.uint8)
        del higher
parts(9)
probe.reset()
(of_part,) = parts.by_part().values()
print(before * 1024, probe.peaks()[2], of_part[2], getrusage(RUSAGE_SELF).ru_maxrss * 1024, *parts.by_part())
"""
    # By a shell that forks: what execs takes the peak of whoever it was before as its own.
    command = ["sh", "-c", '"$0" -c "$1"; exit $?', sys.executable, code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    *peaks, risen_in = done.stdout.split()
    before, after, of_part, of_process = map(int, peaks)
    assert after == of_part == of_process > before + 150 * MEGABYTE
    assert risen_in == PARTS[2]


@linux
def test_memory_of_the_parent_process_is_not_counted() -> None:
    """A sweep starts its cells from a process that may have held far more than they."""
    code = """
import sys
from types import SimpleNamespace
from lm_profiler.measure.memory.peaks import ProcessProbe
probe = ProcessProbe()
probe.reset()
print(probe.peaks()[2])
"""
    parent = f"""
import subprocess, sys
data = bytearray(b"x") * (900 << 20)
print(subprocess.run([sys.executable, "-c", {code!r}], capture_output=True, text=True, check=True).stdout)
"""
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, check=True, env=os.environ)
    assert int(done.stdout) < 700 * MEGABYTE


def test_peaks_are_read_from_the_allocators_nested_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    device, resets = torch.device("cuda", 0), []
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", resets.append)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", {device: 7}.get)
    monkeypatch.setattr(
        torch.cuda,
        "memory_stats_as_nested_dict",
        {
            device: {
                "allocated_bytes": {"all": {"peak": 8}},
                "reserved_bytes": {"all": {"peak": 9}},
                "num_alloc_retries": 2,
                "num_device_alloc": 5,
            }
        }.get,
    )
    probe = probe_of(device)
    probe.reset()
    assert resets == [device]
    assert (probe.held(), *probe.peaks()) == (7, 8, 9, None)
    assert probe.counts == (2, 5)


@pytest.mark.parametrize(
    "lines, expected",
    [
        (["Name:\tpython", "VmRSS:\t    300 kB", "RssAnon:\t    100 kB", "RssFile:\t    120 kB"], 180 * 1024),
        (["Name:\tVmRSS", "VmRSS:\t    300 kB"], 300 * 1024),  # file pages are not counted apart
        (["Name:\tpython"], None),
        (None, None),  # not Linux
    ],
)
def test_memory_of_the_process_leaves_out_file_pages_if_they_are_known(
    lines: list[str] | None, expected: int | None, tmp_path: Path
) -> None:
    status_file = tmp_path / "status"
    if lines is not None:
        status_file.write_text("\n".join(lines))
    assert unreclaimable_bytes(status_file) == expected


@pytest.mark.gpu
def test_a_devices_peak_is_that_of_its_allocator() -> None:
    device = torch.device("cuda", 0)
    probe = probe_of(device)
    held = torch.empty(MEGABYTE, dtype=torch.uint8, device=device)
    probe.reset()
    before = probe.peaks()[0]
    data = torch.empty(64 * MEGABYTE, dtype=torch.uint8, device=device)
    del data
    allocated, reserved, resident_peak = probe.peaks()
    assert allocated == before + 64 * MEGABYTE
    assert reserved >= allocated
    assert resident_peak is None
    probe.reset()
    assert probe.peaks()[0] == before
    del held


@pytest.mark.parametrize(
    "lines, expected",
    [
        (["VmHWM:\t   900 kB", "VmRSS:\t   300 kB"], 600 * 1024),
        (["VmHWM:\t   900 kB"], 0),
        ([], 0),
    ],
)
def test_room_below_the_peak(lines: list[str], expected: int, tmp_path: Path) -> None:
    status_file = tmp_path / "status"
    status_file.write_text("\n".join(lines))
    assert bytes_below_peak(status_file) == expected
