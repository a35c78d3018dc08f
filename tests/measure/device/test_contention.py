"""What else used the machine: from counts whose truth is known, from files made by hand, and from a real hog."""

import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stored_texts import assert_stored

from lm_profiler.analysis.hardware.roofline import contention_lines
from lm_profiler.measure.device.contention import CpuReading, CpuUse, contention, cpu_reading
from lm_profiler.record.run_record import GpuSharing

START = CpuReading(
    at_s=100.0, machine="a", cpus=frozenset({0, 1}), busy_s=1000.0, stolen_s=1.0, own_s={7: 50.0},
    waited_s={7: 3.0, 8: 0.0}, pressure_s=20.0, throttled_s=None, switches=5,
)  # fmt: skip


def use_of_10_s(own: float, others: float, waited: float | None, start: CpuReading = START, **changes: Any) -> CpuUse:
    """Ten seconds in which we ran for ``own``, others for ``others``, and our two threads waited for ``waited``."""
    (pid,) = start.own_s
    if waited is None:
        start = replace(start, waited_s=None)
    end = replace(
        start,
        at_s=110.0,
        busy_s=1000.0 + own + others,
        own_s={pid: 50.0 + own},
        waited_s=None if waited is None else {7: 3.0 + waited / 2, 8: waited / 2},
        switches=105,
    )
    return CpuUse(start, replace(end, **changes))


@pytest.mark.parametrize(
    "own, others, waited, not_had",
    [
        (10.0, 10.0, 10.0, 0.5),  # two threads of ours against a hog on each of two CPUs: half
        (40 / 3, 20 / 3, 20 / 3, 1 / 3),  # against one hog: three tasks on two CPUs
        (20.0, 0.0, 20.0, 0.0),  # four threads of ours on two CPUs, and nobody else: they wait for each other
        (40 / 3, 20 / 3, 80 / 3, 1 / 3),  # four threads of ours and two hogs: alone we would have had 20
        (10.0, 10.0, 0.0, 0.0),  # one thread of ours, one hog, two CPUs: nobody waits
        (10.0, 0.1, 0.2, 0.0),  # an idle machine
    ],
)
def test_unmet_time_is_what_others_had_while_we_waited(own: float, others: float, waited: float, not_had: float):
    found = contention([use_of_10_s(own, others, waited)])
    assert found.not_had == pytest.approx(not_had, abs=0.01)
    assert (found.wall_s, found.cpus, found.involuntary_switches) == (10.0, 2, 100)
    assert found.had_s == pytest.approx(own)
    assert found.others_s == pytest.approx(others, abs=0.031)
    assert found.is_shared == (not_had > 0.05)


def test_time_stolen_by_a_hypervisor_is_not_had() -> None:
    found = contention([use_of_10_s(own=15.0, others=0.0, waited=0.0, stolen_s=6.0)])
    assert found.not_had == pytest.approx(5 / 20)


def test_waiting_for_ones_own_limit_is_not_contention() -> None:
    limited = use_of_10_s(own=10.0, others=500.0, waited=8.0, start=replace(START, throttled_s=2.0), throttled_s=10.0)
    found = contention([limited])
    assert (found.throttled_s, found.not_had) == (8.0, pytest.approx(0.0))


def test_without_thread_counts_pressure_is_the_least() -> None:
    found = contention([use_of_10_s(own=10.0, others=10.0, waited=None, pressure_s=24.0)])
    assert (found.waited_s, found.pressure) == (None, pytest.approx(0.4))
    assert found.not_had == pytest.approx(4 / 14)


def test_without_counts_contention_is_unknown() -> None:
    unknown = use_of_10_s(own=10.0, others=10.0, waited=None, start=replace(START, pressure_s=None), pressure_s=None)
    unseen = use_of_10_s(own=10.0, others=-9.9, waited=10.0)  # sums that do not hold what we used ourselves
    for use in (unknown, unseen):
        found = contention([use])
        assert found.not_had is None
        assert not found.is_shared
    assert contention([]) is None
    short = use_of_10_s(own=0.02, others=0.02, waited=0.02, at_s=100.05)
    assert contention([short]) is None


def test_ranks_and_workers_are_no_other_programs() -> None:
    other = replace(START, own_s={9: 50.0})
    busy = {"busy_s": 1020.0}  # both ranks run for ten seconds, and nothing else
    uses = [
        use_of_10_s(own=10.0, others=0.0, waited=5.0, **busy),
        use_of_10_s(own=10.0, others=0.0, waited=5.0, start=other, **busy),
    ]
    found = contention(uses)
    assert (found.had_s, found.not_had) == (pytest.approx(20.0), pytest.approx(0.0))
    alone = contention(uses[:1])
    assert alone.not_had == pytest.approx(5 / 15)
    # A worker that ends or begins is ours all the same.
    begin = replace(START, own_s={7: 50.0, 8: 4.0})
    # 8 ended after 6 more seconds, which 7's count now holds with all before; 9 began.
    end = replace(START, at_s=110.0, busy_s=1020.0, own_s={7: 50.0 + 5.0 + 10.0, 9: 9.0})
    found = contention([CpuUse(begin, end)])
    assert found.had_s == pytest.approx(5.0 + 6.0 + 9.0)
    assert found.others_s == pytest.approx(0.0)


def test_the_machine_that_was_shared_most_is_reported() -> None:
    uses = [
        use_of_10_s(own=10.0, others=0.0, waited=0.0),
        use_of_10_s(own=10.0, others=10.0, waited=10.0, start=replace(START, machine="b")),
    ]
    assert contention(uses) == contention(uses[::-1]) == contention(uses[1:])


@pytest.mark.parametrize(
    "gpu, shared, name",
    [
        (GpuSharing(processes=1, utilisation=0.37, memory_bytes=3 * 2**30), True, "measure/notes: a shared GPU"),
        (GpuSharing(processes=2, utilisation=None, memory_bytes=None), False, "measure/notes: a GPU of others"),
        (GpuSharing(processes=0, utilisation=0.0, memory_bytes=0), False, "measure/notes: a GPU of one's own"),
    ],
)
def test_a_shared_gpu_is_in_the_words(gpu: GpuSharing, shared: bool, name: str) -> None:
    found = contention([replace(use_of_10_s(own=10.0, others=0.0, waited=0.0, start=START), gpu=gpu)])
    assert found.gpu == gpu
    assert found.is_shared == shared
    assert_stored(name, {"lines": contention_lines(found)})


def _proc(folder: Path, **files: str) -> Path:
    me = os.getpid()
    tick = os.sysconf("SC_CLK_TCK")
    made = {
        "stat": f"cpu 1 1 1 1 1 1 1 1\n{_cpu_lines(tick)}intr 5\n",
        f"{me}/stat": f"{me} (a ) b) R 1 0 0 0 0 0 0 0 0 0 {3 * tick} {2 * tick} {1 * tick} 0 0 0",
        f"{me}/task/{me}/schedstat": "1 2500000000 3",
        f"{me}/task/71/schedstat": "1 500000000 3",
        "70/stat": f"70 (worker) S {me} 0 0 0 0 0 0 0 0 0 {4 * tick} 0 0 0 0 0",
        "70/task/70/schedstat": "1 250000000 3",
        "80/stat": f"80 (stranger) R 1 0 0 0 0 0 0 0 0 0 {99 * tick} 0 0 0 0 0",
        "80/task/80/schedstat": "1 9000000000 3",
        "pressure/cpu": "some avg10=1.00 avg60=1.00 avg300=1.00 total=1500000\nfull avg10=0.00 total=7\n",
        "self/cgroup": "1:name=systemd:/\n0::/mine\n",
        "sys/kernel/random/boot_id": "here\n",
        **files,
    }
    for name, text in made.items():
        path = folder / "proc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "proc"


def _cpu_lines(tick: int) -> str:
    """Each of our CPUs was busy for 10 + 1 + 2 seconds and stolen for one; another is not ours."""
    ours = "".join(f"cpu{n} {10 * tick} {tick} {2 * tick} 9 9 9 9 {tick} 7 7\n" for n in os.sched_getaffinity(0))
    return ours + f"cpu9999 {50 * tick} 0 0 0 0 0 0 0 0 0\n"


def test_a_reading_is_of_our_cpus_and_children(tmp_path: Path) -> None:
    """Each of our CPUs was busy for 13 seconds; we have two threads (one of them is 71) and a child, process 70."""
    found = cpu_reading(_proc(tmp_path), tmp_path / "none")
    me, cpus = os.getpid(), len(os.sched_getaffinity(0))
    assert found.busy_s == 13.0 * cpus
    assert found.stolen_s == 1.0 * cpus
    assert found.machine == "here\n"
    assert found.own_s == {me: 3 + 2 + 1, 70: 4}
    assert found.waited_s == {me: 2.5, 71: 0.5, 70: 0.25}
    assert found.pressure_s == 1.5
    assert found.throttled_s is None


def test_without_proc_the_reading_is_unknown(tmp_path: Path) -> None:
    assert cpu_reading(tmp_path / "none") is None
    assert cpu_reading(_proc(tmp_path, stat="of another kind\ncpu0 x\n")) is None


@pytest.mark.parametrize(
    "cgroup, file, text",
    [
        ("0::/mine\n", "mine/cpu.stat", "usage_usec 5\nthrottled_usec 2500000\n"),
        ("3:cpu,cpuacct:/mine\n", "cpu,cpuacct/mine/cpu.stat", "nr_periods 5\nthrottled_time 2500000000\n"),
    ],
)
def test_limits_are_of_our_control_group(tmp_path: Path, cgroup: str, file: str, text: str) -> None:
    groups = tmp_path / "cgroup"
    (groups / file).parent.mkdir(parents=True)
    (groups / "cgroup.controllers").write_text("cpu")
    (groups / file).write_text(text)
    (groups / file).with_name("cpu.pressure").write_text("some avg10=0 total=3000000\n")
    found = cpu_reading(_proc(tmp_path, **{"self/cgroup": cgroup}), groups)
    assert (found.throttled_s, found.pressure_s) == (2.5, 3.0)


def test_load_on_every_cpu_is_measured() -> None:
    hogs = [subprocess.Popen(["sh", "-c", "echo; while :; do :; done"], stdout=subprocess.PIPE, start_new_session=True)
            for _ in os.sched_getaffinity(0)]  # fmt: skip
    try:
        for hog in hogs:
            hog.stdout.readline()
        # Hogs that we started ourselves are ours, so they are left out by hand.
        strangers = {hog.pid for hog in hogs}
        begin = _without(strangers)
        until_s = time.perf_counter() + 2.0
        while time.perf_counter() < until_s:
            pass
        found = contention([CpuUse(begin, _without(strangers))])
    finally:
        for hog in hogs:
            hog.kill()
            hog.communicate()
    assert found.not_had > 0.2  # half, by the scheduler's fairness
    assert found.is_shared


def _without(strangers: set[int]) -> CpuReading:
    found = cpu_reading()
    assert strangers <= set(found.own_s)
    own = {pid: seconds for pid, seconds in found.own_s.items() if pid not in strangers}
    waited = {thread: seconds for thread, seconds in found.waited_s.items() if thread not in strangers}
    return replace(found, own_s=own, waited_s=waited)
