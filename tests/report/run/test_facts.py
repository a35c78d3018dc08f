"""What a record knows beside times and verdict, as text: figures put in here by hand come out with their units."""

from __future__ import annotations

import pytest
from made_runs import made_record

from lm_profiler.record.run import (
    AllocatorReading,
    Contention,
    Flops,
    GpuSharing,
    MemoryFacts,
    MemoryLevels,
    MemoryReading,
    Sync,
    Telemetry,
)
from lm_profiler.report.run.facts import bytes_text, facts, held


@pytest.mark.parametrize(
    "count, text",
    [
        (0, "0 B"),
        (511, "511 B"),
        (512, "0.50 KiB"),
        (2**19, "0.50 MiB"),
        (2**19 - 1024, "511 KiB"),
        (796 * 2**20, "0.78 GiB"),
        (12.3 * 2**20, "12.3 MiB"),
        (79.15 * 2**30, "79.2 GiB"),
        (3 * 2**40, "3.00 TiB"),
        (-(2**20), "-1.00 MiB"),
    ],
)
def test_bytes_come_in_the_unit_that_fits_them(count: float, text: str) -> None:
    assert bytes_text(count) == text


def test_what_is_unknown_is_left_out_and_so_is_a_group_without_facts() -> None:
    assert facts(made_record(status="oom")) == {}
    assert held(made_record()) == []


def test_activations_are_what_forward_leaves_on_the_cpu_too() -> None:
    levels = MemoryLevels(start=2**20, forward=5 * 2**20, backward=3 * 2**20, source="counted")
    found = dict(held(made_record(memory=MemoryFacts(measured=MemoryReading(), parts={}, held=levels))))
    assert found["activations: what forward leaves for backward"] == "4.00 MiB"
    assert (found["when forward begins"], found["when backward ends"]) == ("1.00 MiB", "3.00 MiB")
    assert found["of what"].startswith("counted: ")


def test_every_group_tells_its_figures() -> None:
    made = made_record()
    telemetry = Telemetry(
        samples=9,
        duration_s=2.0,
        median_sm_clock_hz=1.4e9,
        max_sm_clock_hz=1.98e9,
        clock_share=0.7,
        median_temperature_c=71.0,
        median_power_w=612.0,
        power_limit_w=700.0,
        energy_j=1200.0,
        energy_source="counter",
        energy_per_step_j=6.0,
        energy_per_token_j=0.012,
        throttle_reasons=["sw_power_cap"],
    )
    allocator = AllocatorReading(
        allocated_peak=1,
        active_peak=2**31,
        reserved_peak=None,
        inactive_split_peak=None,
        fragmentation=2**28,
        driver_used=None,
        alloc_retries=2,
        ooms=0,
    )
    flops = Flops(forward=10**12, backward=2 * 10**12, recomputation=10**12)
    found = facts(
        made_record(
            first_step_s=1.5,
            between_steps_s=0.031,
            rank_step_s=[0.010, 0.012],
            utilisation=made.utilisation.model_copy(update={"flops": flops, "hfu": 0.5}),
            telemetry=telemetry,
            memory=made.memory.model_copy(update={"allocator": allocator}),
            syncs=[Sync(file="m.py", line=n, function="f", count=n, call="item") for n in range(1, 13)],
        )
    )
    assert ("between the measured steps", "31.000 ms") in found["Steps"]
    assert ("longest median step", "12.000 ms, rank 1, 20.0% longer") in found["Ranks"]
    use = dict(found["Use of the hardware"])
    assert use["work of a step"] == "1 TFLOP forward, 2 TFLOP backward, 1 TFLOP computed again"
    assert use["HFU, of all that was computed"] == "50.0 %"
    assert use["peak of a device"] == "1 TFLOP/s in bfloat16 (a test)"
    gpu = dict(found["The GPU while measuring"])
    assert (gpu["SM clock"], gpu["power"]) == ("1,400 MHz of at most 1,980", "612 W of at most 700")
    assert (gpu["energy of a step"], gpu["energy of a token"]) == ("6 J", "0.012 J")
    assert gpu["throttled"] == "sw_power_cap"
    assert found["The device's allocator"] == [
        ("in use, at most", "2.00 GiB"),
        ("reserved and not in use when most was", "256 MiB"),
        ("freed its cache to go on", "2 times"),
    ]
    lines = found["Lines that make the host wait for the device"]
    assert lines[0] == ("m.py:12 in f", "12 × item")
    assert lines[-1] == ("and 2 more lines", "")


def test_who_used_the_machine_is_told_in_cpu_seconds() -> None:
    contention = Contention(
        wall_s=2.0,
        cpus=2,
        had_s=1.5,
        waited_s=None,
        others_s=1.25,
        stolen_s=0.0,
        throttled_s=None,
        pressure=0.4,
        involuntary_switches=None,
        not_had=0.41,
        gpu=GpuSharing(processes=2, utilisation=0.3, memory_bytes=2**30),
    )
    assert facts(made_record(contention=contention))["Who used the machine"] == [
        ("CPU time of the run", "1.5 s"),
        ("of other processes", "1.25 s"),
        ("that a hypervisor took", "0 s"),
        ("wanted and not had", "41%"),
        ("something waited for a CPU", "40% of 2 s on 2"),
        ("other processes on the GPU", "2, which held 1.00 GiB"),
    ]
