"""The table of a record made by hand shows that record's figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_runs import made_record

from lm_profiler.record.quantities import TIMES
from lm_profiler.record.run import (
    Environment,
    Failure,
    Floor,
    MemoryCauses,
    MemoryFacts,
    MemoryReading,
    ModelFacts,
    OddStep,
    OtherByOwner,
    OwnedTime,
    RunRecord,
    Sync,
    Throughput,
    TimeSummary,
)
from lm_profiler.report.run.phase_table import floor_texts
from lm_profiler.report.run.run_page import end_tables, other_lines, summary_lines
from lm_profiler.report.run.verdict import verdict_lines
from lm_profiler.report.tables.terminal import lines

NEVER = TimeSummary(
    n=10, mean=0.0, mean_low=0.0, mean_high=0.0, std=0.0, cv=None, median=0.0, p5=0.0, p95=0.0, min=0.0, max=0.0,
)  # fmt: skip
NOTHING = TimeSummary(
    n=0, mean=None, mean_low=None, mean_high=None, std=None, cv=None, median=None, p5=None, p95=None, min=None,
    max=None,
)  # fmt: skip


def summary(mean_ms: float, **changes: float | None) -> TimeSummary:
    mean = mean_ms * 1e-3
    values = {
        "n": 10, "mean": mean, "mean_low": mean * 0.98, "mean_high": mean * 1.02, "std": mean / 20, "cv": 0.05,
        "median": mean * 1.01, "p5": mean * 0.9, "p95": mean * 1.1, "min": mean * 0.8, "max": mean * 1.2,
    }  # fmt: skip
    return TimeSummary(**{**values, **changes})


TIME = {
    **dict.fromkeys(TIMES, NEVER),
    "data": summary(20),
    "forward": summary(60),
    "backward": summary(100),
    "other": summary(20),
    "forward_backward": summary(160),
    "step": summary(200),
}


def record(**changes: Any) -> RunRecord:
    values: dict[str, Any] = {
        "name": "by hand",
        "status": "ok",
        "failure": None,
        "verb": "fit",
        "started": "2026-01-02T03:04:05+00:00",
        "duration_s": 1.0,
        "command": "",
        "config": None,
        "steps": {"warmup": 5, "measure": 10},
        "time": TIME,
        "host_time": TIME,
        "throughput": Throughput(tokens_per_step=2048, tokens_per_s=10_138.6),
        "memory": MemoryFacts(measured=MemoryReading(allocated_peak=3 * 2**30), parts={}),
        "first_step_s": 1.5,
    }
    return RunRecord(**{**values, **changes})


def printed(what: RunRecord, width: int = 120, verbose: bool = False) -> str:
    tables = end_tables(what, Path("/logs/by hand/version_3"), verbose)
    return "".join(f"{line}\n" for table in tables for line in lines(table, width))


def row(text: str, title: str) -> list[str]:
    """The words of the one line of the table that begins with ``title``."""
    (line,) = [line for line in text.splitlines() if line.startswith(title + "  ")]
    return line.removeprefix(title).split()


def environment(**changes: Any) -> Environment:
    values = {
        "versions": {}, "platform": "", "cpu": "", "cpu_count": 2, "threads": 2, "device_type": "cuda",
        "device_name": "Big GPU", "device_bytes": None, "driver": None, "world_size": 1, "flags": {},
        "git_commit": None,
    }  # fmt: skip
    return Environment(**{**values, **changes})


MODEL = ModelFacts(
    class_path="a.B", parameters=1, parameters_without_embedding=1, trainable_parameters=1, bytes=4,
    precision="bf16-mixed", optimizers=[], accumulate_grad_batches=1,
)  # fmt: skip


def numbers(words: list[str]) -> list[float]:
    kept = (word.strip("[],%±") for word in words)
    return [float(word) for word in kept if word]


@pytest.mark.parametrize(
    "title, mean, share",
    [("data", 20, 10), ("forward", 60, 30), ("backward", 100, 50), ("other", 20, 10), ("step", 200, 100)],
)
def test_a_row_shows_its_part(title: str, mean: float, share: float) -> None:
    cells = numbers(row(printed(record()), title))
    expected = [mean, mean * 0.98, mean * 1.02, mean / 20, 5.0, mean * 1.01, mean * 1.1, share]
    assert cells == pytest.approx(expected, abs=0.051)


def test_forward_and_backward_are_quoted_together() -> None:
    assert numbers(row(printed(record()), "forward + backward"))[0] == 160.0
    without = {**TIME, "backward": NEVER}
    assert "forward + backward" not in printed(record(time=without, host_time=without))


def test_a_phase_that_took_the_host_alone_some_time_has_a_row() -> None:
    assert row(printed(record(time={**TIME, "forward": NEVER})), "forward")


@pytest.mark.parametrize("part", ["transfer", "zero_grad", "clip", "optimizer"])
def test_a_phase_that_never_occurred_has_no_row(part: str) -> None:
    assert part not in printed(record())


def test_quick_steps_are_shown_more_finely() -> None:
    quick = {part: summary(s.mean * 10) if s.mean else NEVER for part, s in TIME.items()}  # the step takes 2 ms
    text = printed(record(time=quick, host_time=quick))
    assert numbers(row(text, "forward"))[0] == 0.6
    assert numbers(row(text, "data"))[3] == 0.01


def test_the_worst_three_steps_are_the_slowest_and_faster_ones_come_after_them() -> None:
    ratios = {3: 0.1, 4: 0.2, 5: 1.6, 6: 0.5, 7: 1.4}  # as they are kept: the farthest from the median first
    odd = [OddStep(step=n, step_s=r * 0.2, ratio=r, part="data", excess_s=(r - 1) * 0.2) for n, r in ratios.items()]
    told = [line for line in summary_lines(record(odd_steps=odd)) if line.startswith("odd: ")]
    assert [line.partition(":")[2].split(":")[0] for line in told[:3]] == [" step 5", " step 7", " step 3"]
    assert told[3:] == ["odd: and 2 more steps"]
    slow = [of.model_copy(update={"ratio": of.ratio + 1, "step_s": of.step_s + 0.2}) for of in odd[:3]]
    told = [line for line in summary_lines(record(odd_steps=[*odd, *slow])) if " x what others take" in line]
    assert [line.split(", ")[1][:5] for line in told] == ["2.6 x", "1.6 x", "1.4 x"]


def test_the_headline_says_what_was_measured_and_where() -> None:
    text = printed(record(environment=environment(world_size=4), model=MODEL))
    assert text.startswith("by hand: 10 steps of fit after 5 warm-up steps on Big GPU x 4, bf16-mixed\n")


def test_on_a_device_the_hosts_time_stands_beside() -> None:
    host = {part: summary(s.mean * 500) if s.mean else NEVER for part, s in TIME.items()}
    text = printed(record(environment=environment(), host_time=host))
    assert "host (ms)" in text
    assert numbers(row(text, "forward"))[-1] == pytest.approx(30.0, abs=0.051)
    assert "host (ms)" not in printed(record(environment=environment(device_type="cpu")))


def test_below_the_table_there_are_throughput_memory_and_the_place() -> None:
    text = printed(record(notes=["mind the gap"]))
    assert "10,139 tokens/s [9,940, 10,346] (2,048 a step)" in text
    assert "peak allocated 3.00 GiB" in text
    assert "peak reserved" not in text  # unknown here
    assert "first step 1,500.000 ms" in printed(record(), verbose=True)
    assert "note: mind the gap" in text
    assert "\nwritten to /logs/by hand/version_3; all of it: " in text


def test_the_lines_are_not_broken_on_a_narrow_terminal() -> None:
    note = "x" * 300
    text = printed(record(notes=[note]), width=40)
    assert f"note: {note}\n" in text


def test_a_failure_is_shown_in_one_line() -> None:
    message = "[enforce fail at alloc_cpu.cpp:127] data [/tmp]. DefaultCPUAllocator: can't allocate memory"
    failure = Failure(phase="backward", step=7, type="RuntimeError", message=message)
    text = printed(record(status="oom", failure=failure))
    assert f"oom in backward of step 7: RuntimeError: {message}\n" in text
    assert numbers(row(text, "step"))[0] == 200.0  # what was measured before is shown as well


def test_a_failure_before_the_first_step_has_no_table() -> None:
    failure = Failure(phase="setup", step=None, type="ValueError", message="no")
    nothing = {"time": dict.fromkeys(TIMES, NOTHING), "throughput": None, "memory": None, "first_step_s": None}
    text = printed(record(status="failed", failure=failure, **nothing))
    assert text.startswith("failed in setup: ValueError: no\nwritten to /logs/by hand/version_3")


def test_a_run_that_was_refused_has_no_times_at_all() -> None:
    text = printed(record(status="refused", time={}, host_time={}, throughput=None, memory=None, first_step_s=None))
    assert "phase" not in text


def test_tokens_without_a_known_time_are_unknown() -> None:
    assert "unknown tokens/s (2,048 a step)" in printed(
        record(throughput=Throughput(tokens_per_step=2048, tokens_per_s=None))
    )


def test_one_measured_step_has_no_spread() -> None:
    one = summary(60, n=1, std=None, cv=None, mean_low=None, mean_high=None, p95=None)
    text = printed(record(time={**TIME, "forward": one}))
    words = row(text, "forward")
    assert words[0] == "60.00"
    assert "±" not in words
    assert "[" not in " ".join(words)


def test_80_columns_cut_no_digit_of_a_run():
    slow = summary(12_345_678.9)
    text = printed(record(time={**TIME, "forward": slow, "step": slow}), width=80)
    assert "…" not in text
    assert "12,345,678.9 [12,098,765.3, 12,592,592.5]" in text
    table = text.partition("10,139 tokens/s")[0].splitlines()[1:]
    assert max(map(len, table)) <= 80
    assert sum(line.startswith("forward ") for line in table) >= 2  # in pieces, each with its names


def test_memory_of_a_small_model_is_told_in_a_unit_that_fits() -> None:
    small = MemoryFacts(measured=MemoryReading(allocated_peak=2**19, resident_peak=3 * 2**28), parts={})
    assert "peak allocated 0.50 MiB, peak resident 0.75 GiB" in summary_lines(made_record(memory=small))


def test_memory_is_told_by_phase_and_by_the_causes_of_the_highest_peak() -> None:
    gib = 2**30
    peaks = {part: MemoryReading(allocated_peak=n * gib) for part, n in (("forward", 3), ("backward", 4), ("other", 2))}
    causes = MemoryCauses(parameters=gib, gradients=gib, optimizer_states=0, buffers=0, activations_and_rest=2 * gib)
    memory = MemoryFacts(measured=MemoryReading(), parts=peaks, causes=dict.fromkeys(peaks, causes))
    lines = summary_lines(made_record(memory=memory))
    assert "peak by phase: forward 3.00 GiB, backward 4.00 GiB, other 2.00 GiB" in lines
    assert "at the peak, in backward: parameters 1.00 GiB, gradients 1.00 GiB, activations and rest 2.00 GiB" in lines
    on_cpu = memory.model_copy(update={"parts": dict.fromkeys(peaks, MemoryReading(resident_peak=gib))})
    said = "\n".join(summary_lines(made_record(memory=on_cpu)))
    assert "held by the step: parameters 1.00 GiB, gradients 1.00 GiB" in said
    assert "peak by phase" not in said


@pytest.mark.parametrize("known_to,said", [(0.0504, "±5.0%"), (0.0512, "±5.1%"), (0.254, "±25%")])
def test_how_well_a_noisy_median_is_known_is_said_finely_near_the_limit(known_to: float, said: str) -> None:
    record = made_record()
    assert record.steadiness is not None
    noisy = record.steadiness.model_copy(update={"word": "noisy", "known_to": known_to})
    printed = "\n".join(verdict_lines(record.model_copy(update={"steadiness": noisy})))
    assert f"noisy: the level is only known to within {said}" in printed


def test_each_phase_stands_beside_the_least_that_it_could_take() -> None:
    floors = {
        "forward": Floor(flops={"bfloat16": 10**12}, bytes=10**9, seconds=0.0301, bound="compute", times=2.0133),
        "backward": Floor(bytes=10**9, seconds=0.15e-3, bound="memory", times=673.0),
        "data": Floor(seconds=0.0, times=None),
    }
    text = printed(record(floors=floors))
    assert row(text, "phase")[-4:] == ["floor", "(ms)", "x", "floor"]
    assert row(text, "forward")[-3:] == ["30.10", "FLOPs", "2.0"]
    assert row(text, "backward")[-3:] == ["0.150", "bytes", "673"]
    assert row(text, "data")[-1] == "10.0%"
    assert "floor" not in printed(record())


def test_a_floor_of_which_one_half_is_unknown_is_of_nothing() -> None:
    text = printed(record(floors={"forward": Floor(flops={"float32": 10}, seconds=0.02, times=3.0)}))
    assert row(text, "forward")[-2:] == ["20.00", "3.0"]


@pytest.mark.parametrize(
    "planned,told",
    [
        ({"unknown": "it took more than 20 s"}, "planned: unknown (it took more than 20 s)"),
        (
            {"peaks": {"forward": 2 << 20, "backward": 1 << 20}},
            "planned: peak 2.00 MiB, in forward; measured, with workspaces of libraries, 0.250 times as much",
        ),
    ],
)
def test_what_was_planned_stands_beside_the_peak_that_the_device_tells(planned: Any, told: str) -> None:
    memory = {"measured": {"allocated_peak": 1 << 19}, "parts": {}}
    assert told in summary_lines(made_record(memory=memory, planned=planned))


def test_on_the_cpu_what_forward_left_stands_beside_what_it_should() -> None:
    planned = {"peaks": {"forward": 2 << 20}, "held": {"start": 0, "forward": 1000, "backward": 0, "source": "counted"}}
    memory = {"measured": {"resident_peak": 1 << 30}, "parts": {}, "held": {**planned["held"], "forward": 990}}
    told = "planned: peak 2.00 MiB, in forward; measured when forward has ended 0.990 times as much"
    assert told in summary_lines(made_record(memory=memory, planned=planned))
    memory["held"]["source"] = "allocator"  # which counts other things
    unknown = "planned: peak 2.00 MiB, in forward; what was measured is unknown"
    assert unknown in summary_lines(made_record(memory=memory, planned=planned))


def test_lines_that_make_the_host_wait_are_named_those_that_do_it_most_first() -> None:
    files = {1: "/a/m1.py", 3: "/a/m3.py", 2: "/lib/site-packages/b/m2.py"}
    syncs = [Sync(file=file, line=n, function="f", count=n, call=f"x{n}.item()") for n, file in files.items()]
    told = "the host waits for the device at: x3.item() (m3.py, line 3), x2.item() (b/m2.py, line 2), 1 more line"
    assert told in printed(record(syncs=syncs), verbose=True).splitlines()
    assert "waits for the device" not in printed(record(syncs=[]), verbose=True)


def test_a_floor_of_next_to_nothing_is_not_shown() -> None:
    assert floor_texts(Floor(bytes=264, seconds=2.64e-9, bound="memory")) == ["", ""]
    assert floor_texts(Floor(bytes=264_000, seconds=2.64e-6, bound="memory", times=20.0)) == ["0.003 bytes", "20.0"]


def owned(measured_s: float | None, *actions: tuple[str, str, float, int]) -> OtherByOwner:
    rows = [OwnedTime(owner=o, action=a, seconds=s, calls=1.0, in_steps=n) for o, a, s, n in actions]
    return OtherByOwner(steps=3, seconds=sum(row.seconds for row in rows), measured_s=measured_s, actions=rows)


ACTIONS = (
    ("LearningRateMonitor", "on_train_batch_start", 1.9e-3, 3),
    ("TensorBoardLogger", "log_metrics", 1.2e-3, 1),
    ("Lightning", "loop", 0.5e-3, 3),
    ("", "my block", 0.4e-3, 3),
    ("lm_profiler", "timing of these", 0.2e-3, 3),
    ("Mine", "on_train_batch_end", 0.1e-3, 3),
)


def test_the_longest_are_named_and_the_rest_is_added_up() -> None:
    record = made_record().model_copy(update={"other_by_owner": owned(4.1e-3, *ACTIONS)})
    [line] = other_lines(record)
    total, _, actions = line.rpartition(" timed: ")
    assert total == "other: 4.10 ms, 4.30 ms while each action of 3 steps was"
    assert actions.split(", ") == [
        "LearningRateMonitor.on_train_batch_start 1.90",
        "TensorBoardLogger.log_metrics 1.20 (in 1 of 3 steps)",
        "Lightning's loop 0.500",
        "my block 0.400",
        "2 more 0.300",
    ]


def test_of_several_ranks_it_is_said_to_be_of_the_first() -> None:
    """The table's figures are of the mean over ranks: these need not agree with them."""
    record = made_record(rank_step_s=[0.01, 0.01]).model_copy(update={"other_by_owner": owned(4.1e-3, *ACTIONS)})
    [line] = other_lines(record)
    assert line.startswith("other of rank 0: 4.10 ms, 4.30 ms while")


def test_what_was_measured_is_left_out_where_it_is_unknown() -> None:
    record = made_record().model_copy(update={"other_by_owner": owned(None, *ACTIONS[2:4])})
    assert other_lines(record) == [
        "other: 0.900 ms while each action of 3 steps was timed: Lightning's loop 0.500, my block 0.400"
    ]


@pytest.mark.parametrize("known", [None, owned(1.0)])
def test_nothing_is_said_where_nothing_was_timed(known: OtherByOwner | None) -> None:
    assert other_lines(made_record().model_copy(update={"other_by_owner": known})) == []
