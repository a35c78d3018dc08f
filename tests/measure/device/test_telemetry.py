"""Reading a GPU in the background, with a fake of NVML."""

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made_environment import made_telemetry

from lm_profiler.measure.device.nvml import Gpu, TelemetrySampler, combine_telemetry, gpu_of
from lm_profiler.record.run_record import Telemetry

CUDA = torch.device("cuda", 1)


class NVMLError(Exception):
    """The base of all errors that NVML raises."""


class FakeNvml:
    """One H100 under load. ``lacks`` names what it does not support, ``reasons`` gives the bits of each sample."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0
    NVMLError = NVMLError

    def __init__(self, *lacks: str, reasons: Callable[[int], int] = lambda sample: 0) -> None:
        self.lacks = lacks
        self.reasons = reasons
        self.samples = 0
        self.threads: set[str] = set()
        self.sampled = threading.Event()
        self.uuids: list[str] = []
        self.mig = 0

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvmlDeviceGet") and name in object.__getattribute__(self, "lacks"):
            return self._refuse
        return object.__getattribute__(self, name)

    def _refuse(self, *arguments: Any) -> int:
        raise NVMLError("Not Supported")

    def nvmlInit(self) -> None:
        if "nvmlInit" in self.lacks:
            raise NVMLError("Driver Not Loaded")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.uuids.append(uuid)
        return "handle"

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        return [self.mig, self.mig]

    def nvmlDeviceGetMaxClockInfo(self, handle: str, kind: int) -> int:
        return 1980

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        return 700_000

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return self.reasons(self.samples)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return 0x4

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        self.threads.add(threading.current_thread().name)
        self.samples += 1
        if self.samples >= 40:
            self.sampled.set()
        return 1410 if self.samples % 2 else 1440

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return 61

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 500_000

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        return 10_000_000 + 50_000 * self.samples


class Seconds:
    """A clock that moves a tenth of a second with each look at it."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 0.1
        return self.now


def read_telemetry(nvml: FakeNvml) -> Telemetry:
    telemetry = TelemetrySampler(Gpu("handle", nvml, "GPU-0"), period_s=1e-4, clock=Seconds())
    telemetry.start()
    telemetry.start()  # runs already
    assert nvml.sampled.wait(10) or "nvmlDeviceGetClockInfo" in nvml.lacks
    return telemetry.stop()


def test_a_reading_is_in_si_units() -> None:
    """NVML reports 1410 and 1440 MHz in turns, at most 1980; 61 °C; 500 of 700 W; 50 J more with each sample."""
    nvml = FakeNvml()
    reading = read_telemetry(nvml)
    assert reading.samples == nvml.samples >= 40
    assert reading.duration_s == pytest.approx(0.1 * (reading.samples - 1))
    assert reading.median_sm_clock_hz in (1.41e9, 1.425e9, 1.44e9)
    assert reading.max_sm_clock_hz == pytest.approx(1.98e9)
    assert 1.41 / 1.98 - 0.01 < reading.clock_share < 1.44 / 1.98 + 0.01
    assert reading.median_temperature_c == 61
    assert reading.median_power_w == pytest.approx(500)
    assert reading.power_limit_w == pytest.approx(700)
    assert reading.energy_j == pytest.approx(50 * (reading.samples - 1))
    assert reading.energy_source == "counter"
    assert reading.throttle_reasons == []


def test_a_thread_of_ours_reads_and_ends() -> None:
    nvml = FakeNvml()
    read_telemetry(nvml)
    assert nvml.threads == {"lm_profiler telemetry"}
    assert "lm_profiler telemetry" not in {thread.name for thread in threading.enumerate()}


def test_a_step_has_its_samples() -> None:
    """Samples of 1410 and 1440 MHz in turns, one each 0.1 s; from the fourth on the power is capped."""
    nvml = FakeNvml(reasons=lambda sample: 0x4 if sample >= 3 else 0)
    telemetry = TelemetrySampler(Gpu("handle", nvml, "GPU-0"), period_s=1e-4, clock=Seconds())
    telemetry.start()
    assert nvml.sampled.wait(10)
    telemetry.stop()
    assert telemetry.readings_between(0.05, 0.15) == (1.41e9, [])
    assert telemetry.readings_between(0.15, 0.35) == (pytest.approx(1.425e9), [])
    assert telemetry.readings_between(0.35, 0.75) == (pytest.approx(1.425e9), ["power cap"])
    assert telemetry.readings_between(0.12, 0.18) == (None, None)


def test_sampling_can_start_again() -> None:
    nvml = FakeNvml()
    telemetry = TelemetrySampler(Gpu("handle", nvml, "GPU-0"), period_s=60)
    assert telemetry.stop() is None
    for _ in range(2):
        telemetry.start()
        reading = telemetry.stop()
        assert reading.samples == 2  # the last one when it stops: it does not sit out its period
    assert telemetry.stop() is None


def test_energy_that_a_gpu_does_not_count_is_unknown() -> None:
    reading = read_telemetry(FakeNvml("nvmlDeviceGetTotalEnergyConsumption"))
    assert (reading.energy_source, reading.energy_j) == (None, None)
    assert reading.median_power_w == pytest.approx(500)


def test_a_gpu_without_any_figure_has_samples_alone() -> None:
    figures = (
        *("ClockInfo", "MaxClockInfo", "Temperature", "PowerUsage", "EnforcedPowerLimit", "TotalEnergyConsumption"),
        *("CurrentClocksEventReasons", "CurrentClocksThrottleReasons"),
    )
    nvml = FakeNvml(*(f"nvmlDeviceGet{figure}" for figure in figures))
    telemetry = TelemetrySampler(Gpu("handle", nvml, "GPU-0"), period_s=1e-4)
    telemetry.start()
    reading = telemetry.stop()
    assert reading.samples >= 2
    known = {name for name, value in vars(reading).items() if value is not None}
    assert known == {"samples", "duration_s", "gpus"}
    assert reading.clock_share is None


def test_an_old_pynvml_is_enough() -> None:
    old_nvml = SimpleNamespace(nvmlDeviceGetPowerUsage=lambda handle: 250_000)
    telemetry = TelemetrySampler(Gpu("handle", old_nvml, "GPU-0"))
    telemetry.start()
    reading = telemetry.stop()
    assert reading.median_power_w == pytest.approx(250)
    assert reading.median_sm_clock_hz is None


def test_a_temperature_that_nvml_refuses_is_unknown() -> None:
    reading = read_telemetry(FakeNvml("nvmlDeviceGetTemperature"))
    assert reading.median_temperature_c is None
    assert reading.median_power_w is not None


def test_reasons_are_named_from_a_twentieth_of_the_samples_on() -> None:
    """The power is capped in every fourth sample; another reason is in one of 40."""
    idle_and_set_clocks, power_cap, sync_boost = 0x3, 0x4, 0x10

    def reasons(sample: int) -> int:
        bits = idle_and_set_clocks
        if sample == 0:
            bits |= sync_boost
        if sample % 4 == 0:
            bits |= power_cap
        return bits

    assert read_telemetry(FakeNvml(reasons=reasons)).throttle_reasons == ["power cap"]


def test_an_older_nvml_names_the_reasons_otherwise() -> None:
    nvml = FakeNvml("nvmlDeviceGetCurrentClocksEventReasons")
    assert read_telemetry(nvml).throttle_reasons == ["power cap"]


@pytest.mark.parametrize(
    "mask, names",
    [
        (0x8, ("hardware slowdown",)),
        (0x48, ("thermal (hardware)",)),  # the general bit adds nothing
        (0x88, ("power brake",)),
        (0x24, ("power cap", "thermal (software)")),
        (0x3, ()),
    ],
)
def test_the_bits_of_nvml_are_named(mask: int, names: tuple[str, ...]) -> None:
    assert read_telemetry(FakeNvml(reasons=lambda sample: mask)).throttle_reasons == list(names)


@pytest.mark.parametrize("uuid", ["0a1b2c3d-0000-1111-2222-333344445555", "GPU-0a1b2c3d-0000-1111-2222-333344445555"])
def test_the_device_is_found_by_its_uuid(uuid: str) -> None:
    nvml = FakeNvml()
    assert gpu_of(CUDA, nvml, SimpleNamespace(uuid=uuid)) is not None
    assert nvml.uuids == ["GPU-0a1b2c3d-0000-1111-2222-333344445555"]


@pytest.mark.parametrize("lacks", ["nvmlInit", "nvmlDeviceGetHandleByUUID"])
def test_without_nvml_or_a_handle_there_is_none(lacks: str) -> None:
    assert gpu_of(CUDA, FakeNvml(lacks), SimpleNamespace(uuid="x")) is None


def telemetry_of_gpu(number: int, **changes: Any) -> Telemetry:
    """100 + ``number`` samples, a clock of 1.5 GHz, 50 °C, 500 of 700 W, 5 kJ, unless ``changes`` has others."""
    facts: dict[str, Any] = {
        "samples": 100 + number,
        "duration_s": 10.0,
        "median_sm_clock_hz": 1.5e9,
        "max_sm_clock_hz": 1.98e9,
        "clock_share": 0.75,
        "median_temperature_c": 50.0,
        "median_power_w": 500.0,
        "power_limit_w": 700.0,
        "energy_j": 5000.0,
        "energy_source": "counter",
        "throttle_reasons": [],
        "gpus": [f"GPU-{number}"],
    }
    return made_telemetry(**{**facts, **changes})


def test_energy_and_power_of_several_gpus_add_up() -> None:
    each = {"energy_j": 5000.0, "median_power_w": 500.0, "power_limit_w": 700.0}
    found = combine_telemetry([telemetry_of_gpu(number, **each) for number in range(8)])
    assert (found.energy_j, found.energy_source) == (8 * 5000.0, "counter")
    assert found.median_power_w == 8 * 500.0
    assert found.power_limit_w == 8 * 700.0
    assert found.duration_s == 10.0
    assert len(found.gpus) == 8


def test_of_several_gpus_the_slowest_and_hottest_counts() -> None:
    slow_and_hot = {"clock_share": 0.5, "median_sm_clock_hz": 0.99e9, "median_temperature_c": 88.0}
    found = combine_telemetry(
        [
            telemetry_of_gpu(0, samples=100),
            telemetry_of_gpu(1, throttle_reasons=["power cap"]),
            telemetry_of_gpu(2, **slow_and_hot),
        ]
    )
    assert (found.clock_share, found.median_sm_clock_hz) == (0.5, 0.99e9)
    assert found.median_temperature_c == 88.0
    assert found.throttle_reasons == ["power cap"]
    assert found.samples == 100


def test_ranks_that_share_a_gpu_count_it_once() -> None:
    shared, other = telemetry_of_gpu(0, energy_j=5000.0), telemetry_of_gpu(1, energy_j=5000.0)
    assert combine_telemetry([shared, shared]) == shared
    assert combine_telemetry([shared, shared, other]).energy_j == 10_000.0


def test_what_one_gpu_lacks_is_unknown_of_all() -> None:
    lacking = {"energy_j": None, "energy_source": None, "throttle_reasons": None}
    found = combine_telemetry([telemetry_of_gpu(0), telemetry_of_gpu(1, median_power_w=500.0, **lacking)])
    assert (found.energy_j, found.energy_source) == (None, None)
    assert found.median_power_w == 500.0 + 500.0
    assert found.throttle_reasons == []


def test_of_a_gpu_that_was_not_read_no_sum_is_known() -> None:
    found = combine_telemetry([telemetry_of_gpu(0, clock_share=0.75), None])
    assert (found.energy_j, found.median_power_w) == (None, None)
    assert found.clock_share == 0.75
    assert combine_telemetry([None, None]) is None
    assert combine_telemetry([telemetry_of_gpu(0)]) == telemetry_of_gpu(0)


def test_a_slice_and_a_cpu_have_no_figures() -> None:
    sliced = FakeNvml()
    sliced.mig = 1
    assert gpu_of(CUDA, sliced, SimpleNamespace(uuid="x")) is None
    assert gpu_of(CUDA, FakeNvml("nvmlDeviceGetMigMode"), SimpleNamespace(uuid="x")) is not None
    assert gpu_of(CUDA, SimpleNamespace(nvmlInit=list), SimpleNamespace(uuid="x")) is None
    assert gpu_of(torch.device("cpu")) is None


@pytest.mark.gpu
def test_a_gpu_at_work_is_read() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    gpu = gpu_of(device)
    if gpu is None:
        pytest.skip("no NVML here, or a MIG slice")
    telemetry = TelemetrySampler(gpu)
    x = torch.ones(4096, 4096, device=device)
    telemetry.start()
    started = time.perf_counter()
    while time.perf_counter() - started < 2:
        x @ x
        torch.cuda.synchronize()
    reading = telemetry.stop()
    assert reading.samples >= 10
    share = reading.clock_share
    assert 0 < share <= 1.01
    if reading.energy_j is not None and reading.median_power_w is not None:
        assert reading.energy_j == pytest.approx(reading.median_power_w * reading.duration_s, rel=0.75)
