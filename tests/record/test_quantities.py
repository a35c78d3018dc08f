"""The registry agrees with the names that are published (docs/stability.md) and with itself."""

from collections import Counter

import pytest

from lm_profiler.record import quantities as q

ALL = [*q.TIMES.values(), *q.HOST_TIMES.values(), *q.MEMORY.values(), q.TOKENS, q.TOKENS_PER_S, q.MFU]
PHASES = ["data", "transfer", "forward", "zero_grad", "backward", "clip", "optimizer"]


def test_columns_and_tags_are_the_published_ones() -> None:
    assert list(q.PHASES) == PHASES
    assert list(q.PARTS) == [*PHASES, "other"]
    for values in ([x.name for x in ALL], [x.tag for x in ALL if x.tag], list(q.STEP_COLUMNS)):
        assert [value for value, n in Counter(values).items() if n > 1] == []
    times = [f"{part}_s" for part in (*PHASES, "other", "step")]
    hosts = [f"{part}_host_s" for part in (*PHASES, "other", "step")]
    start = ["step", "stage", *times, *hosts, "tokens"]
    assert list(q.STEP_COLUMNS[: len(start)]) == start
    assert set(q.STEP_COLUMNS[len(start) :]) >= {"allocated_peak_bytes", "reserved_peak_bytes", "rank"}
    tags = {x.name: x.tag for x in ALL}
    for part in (*PHASES, "other", "step"):
        assert tags[f"{part}_s"] == f"time_ms/{part}"
        assert tags[f"{part}_host_s"] == f"host_time_ms/{part}"
    assert tags["allocated_peak_bytes"] == "memory_gib/allocated_peak"
    assert tags["tokens_per_s"] == "throughput/tokens_per_s"
    assert tags["mfu"] == "throughput/mfu"


@pytest.mark.parametrize(
    "quantity, value, shown",
    [
        (q.TIMES["forward"], 0.0123456, "12.346 ms"),
        (q.TIMES["step"], 1234.5, "1,234,500.000 ms"),
        (q.TIMES["step"], None, "unknown"),
        (q.TIMES["step"], 0.0, "0.000 ms"),
        (q.MEMORY["allocated_peak"], 3 * 2**29, "1.500 GiB"),
        (q.TOKENS_PER_S, 12345.6, "12,346 tokens/s"),
        (q.TOKENS, 4096, "4,096"),
        (q.MFU, 0.4321, "43.2 %"),
    ],
)
def test_values_are_shown_for_people(quantity: q.Quantity, value: float | None, shown: str) -> None:
    assert quantity.show(value) == shown


BYTES = {
    0: "0 B", 511: "511 B", 512: "0.50 KiB", 2**19: "0.50 MiB", 2**19 - 1024: "511 KiB", 796 * 2**20: "0.78 GiB",
    12.3 * 2**20: "12.3 MiB", 79.15 * 2**30: "79.2 GiB", 3 * 2**40: "3.00 TiB", -(2**20): "-1.00 MiB",
}  # fmt: skip
SECONDS = {
    0.0: "0 ms", 0.0095: "9.5 ms", 0.9994: "999 ms", 0.9996: "1.0 s", 75.4: "75.4 s", 570.0: "9.5 min",
    3723.0: "62 min", 5400.0: "1.5 h",
}  # fmt: skip


def test_values_have_the_unit_that_fits_them() -> None:
    assert {count: q.bytes_text(count) for count in BYTES} == BYTES
    assert {seconds: q.duration_text(seconds) for seconds in SECONDS} == SECONDS
