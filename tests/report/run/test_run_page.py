"""The table of a record made by hand shows that record's figures."""

from pathlib import Path
from typing import Any

import pytest
from made_environment import made_environment, made_run
from made_parts import made_model
from made_runs import made_record
from stored_texts import assert_stored

from lm_profiler.record.quantities import TIMES
from lm_profiler.record.run_record import (
    Environment,
    Failure,
    Floor,
    MemoryCauses,
    MemoryFacts,
    MemoryReading,
    NumericsFacts,
    NumericsKind,
    OddStep,
    OtherByOwner,
    OwnedTime,
    RunRecord,
    Sync,
    Throughput,
    TimeSummary,
)
from lm_profiler.report.run.run_page import end_tables, other_lines, summary_lines
from lm_profiler.report.run.sections import floor_texts
from lm_profiler.report.tables.formats import lines, render

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
        "started": "2026-01-02T03:04:05+00:00",
        "steps": {"warmup": 5, "measure": 10},
        "time": TIME,
        "host_time": TIME,
        "throughput": Throughput(tokens_per_step=2048, tokens_per_s=10_138.6),
        "memory": MemoryFacts(measured=MemoryReading(allocated_peak=3 * 2**30), parts={}),
        "first_step_s": 1.5,
    }
    return made_run(**{**values, **changes})


def printed(what: RunRecord, width: int = 120, verbose: bool = False) -> str:
    tables = end_tables(what, Path("/logs/by hand/version_3"), verbose)
    return "".join(f"{line}\n" for table in tables for line in lines(table, width))


def row_of(text: str, title: str) -> list[str]:
    """The words of the one line of the table that begins with ``title``."""
    (line,) = [line for line in text.splitlines() if line.startswith(title + "  ")]
    return line.removeprefix(title).split()


def environment(**changes: Any) -> Environment:
    return made_environment(**{"device_type": "cuda", "device_name": "Big GPU", **changes})


MODEL = made_model(class_path="a.B", parameters_without_embedding=1, precision="bf16-mixed")


def ended(status: Any, message: str = "no", step: int | None = None, **changes: Any) -> RunRecord:
    phase = "setup" if step is None else "backward"
    failure = Failure(phase=phase, step=step, type="RuntimeError", message=message)
    return record(status=status, failure=failure, **changes)


BEFORE_STEPS: dict[str, Any] = {"throughput": None, "memory": None, "first_step_s": None}
ENDS = {
    "a run that ended well, with a note": record(notes=["mind the gap"]),
    "on four devices": record(environment=environment(world_size=4), model=MODEL),
    "out of memory; what was measured before is shown as well": ended(
        "oom", "[enforce fail at alloc_cpu.cpp:127] data [/tmp]. DefaultCPUAllocator: can't allocate memory", 7
    ),
    "before the first step": ended("failed", time=dict.fromkeys(TIMES, NOTHING), **BEFORE_STEPS),
    "refused": record(status="refused", time={}, host_time={}, **BEFORE_STEPS),
    "tokens without a known time": record(throughput=Throughput(tokens_per_step=2048, tokens_per_s=None)),
}


def test_lines_of_a_run_are_as_stored(tmp_path: Path) -> None:
    assert_stored("report/end", {case: printed(record) for case, record in ENDS.items()})
    case, of = next(iter(ENDS.items()))
    assert_stored("report/end_verbose", {case: printed(of, verbose=True)})
    assert_stored("report/summary", {case: summary_lines(record) for case, record in SUMMARIES.items()})
    assert_stored("report/other", {case: other_lines(record) for case, record in OTHER.items()})
    record = made_run(name="x", numerics=NUMERICS)
    overflowed = record.model_copy(update={"numerics": NUMERICS.model_copy(update={"loss": None})})
    cases = {"a figure that is unknown": record, "a loss that overflowed": overflowed}
    assert_stored(
        "report/numerics",
        {case: render(end_tables(record, tmp_path), "terminal") for case, record in cases.items()},
        here=tmp_path,
    )


def odd_steps(*ratios: float) -> list[OddStep]:
    """As they are kept: the farthest from the median first."""
    ratios = sorted(ratios, key=lambda ratio: -abs(ratio - 1))
    return [
        OddStep(step=n, step_s=ratio * 0.2, ratio=ratio, part="data", excess_s=(ratio - 1) * 0.2)
        for n, ratio in enumerate(ratios, 3)
    ]


GIB = 2**30
PEAKS = {part: MemoryReading(allocated_peak=n * GIB) for part, n in (("forward", 3), ("backward", 4), ("other", 2))}
CAUSES = MemoryCauses(parameters=GIB, gradients=GIB, optimizer_states=0, buffers=0, activations_and_rest=2 * GIB)
BY_PHASE = MemoryFacts(measured=MemoryReading(), parts=PEAKS, causes=dict.fromkeys(PEAKS, CAUSES))
ON_CPU = BY_PHASE.model_copy(update={"parts": dict.fromkeys(PEAKS, MemoryReading(resident_peak=GIB))})
HELD = {"start": 0, "forward": 1000, "backward": 0, "source": "counted"}
PLANNED = {"peaks": {"forward": 2 << 20, "backward": 1 << 20}}


def measured(**memory: Any) -> dict[str, Any]:
    return {"memory": {"parts": {}, **memory}}


def noisy_record(known_to: float, **changes: Any) -> RunRecord:
    made = made_record()
    steadiness = made.steadiness.model_copy(update={"word": "noisy", "known_to": known_to, **changes})
    return made.model_copy(update={"steadiness": steadiness})


def syncs(*counts: int) -> list[Sync]:
    files = {1: "/a/m1.py", 3: "/a/m3.py", 2: "/lib/site-packages/b/m2.py"}
    return [Sync(file=files[n], line=n, function="f", count=n, call=f"x{n}.item()") for n in counts]


OF_DEVICE, OF_CPU = {"measured": {"allocated_peak": 1 << 19}}, {"measured": {"resident_peak": 1 << 30}}
SUMMARIES = {
    "memory of a small model has a unit that fits": made_record(
        memory=MemoryFacts(measured=MemoryReading(allocated_peak=2**19, resident_peak=3 * 2**28), parts={})
    ),
    "memory by phase, and the causes of the highest peak": made_record(memory=BY_PHASE),
    "on the CPU, what the step holds": made_record(memory=ON_CPU),
    "a level that is known to 5.04 %": noisy_record(0.0504),
    "a level that is known to 5.12 %": noisy_record(0.0512),
    "a level that is known to 25 %": noisy_record(0.254),
    "step times that follow the batch size": noisy_record(0.094, explained_by_sizes=0.897),
    "the same, without a known level": noisy_record(1.2, explained_by_sizes=0.897),
    "a plan that took too long": made_record(**measured(**OF_DEVICE), planned={"unknown": "it took more than 20 s"}),
    "a plan, beside the peak that a device reports": made_record(**measured(**OF_DEVICE), planned=PLANNED),
    "a plan, beside what forward left on the CPU": made_record(
        **measured(**OF_CPU, held={**HELD, "forward": 990}), planned={**PLANNED, "held": HELD}
    ),
    "a plan, where what was held is of the allocator, which counts other things": made_record(
        **measured(**OF_CPU, held={**HELD, "forward": 990, "source": "allocator"}), planned={**PLANNED, "held": HELD}
    ),
    "the lines that make the host wait, those that do it most first": record(syncs=syncs(1, 3, 2)),
    "no line makes the host wait": record(syncs=[]),
    "the three slowest of the odd steps": record(odd_steps=odd_steps(2.6, 1.4, 0.1, 0.2, 1.6, 0.5, 1.3)),
    "of fewer slow ones, the fast ones come after them": record(odd_steps=odd_steps(0.1, 0.2, 1.6, 0.5, 1.4)),
}


def test_each_phase_stands_beside_the_least_that_it_could_take() -> None:
    floors = {
        "forward": Floor(flops={"bfloat16": 10**12}, bytes=10**9, seconds=0.0301, bound="compute", times=2.0133),
        "backward": Floor(bytes=10**9, seconds=0.15e-3, bound="memory", times=673.0),
        "data": Floor(seconds=0.0, times=None),
    }
    text = printed(record(floors=floors))
    assert row_of(text, "phase")[-4:] == ["floor", "(ms)", "x", "floor"]
    assert row_of(text, "forward")[-3:] == ["30.10", "FLOPs", "2.0"]
    assert row_of(text, "backward")[-3:] == ["0.150", "bytes", "673"]
    assert row_of(text, "data")[-1] == "10.0%"
    assert "floor" not in printed(record())


@pytest.mark.parametrize(
    "floor, texts",
    [
        (Floor(flops={"float32": 10}, seconds=0.02, times=3.0), ["20.00", "3.0"]),  # its bytes are unknown
        (Floor(bytes=264_000, seconds=2.64e-6, bound="memory", times=20.0), ["0.003 bytes", "20.0"]),
        (Floor(bytes=264, seconds=2.64e-9, bound="memory"), ["", ""]),  # too short for its figures
    ],
)
def test_a_floor_has_as_many_figures_as_mean_something(floor: Floor, texts: list[str]) -> None:
    assert floor_texts(floor) == texts


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


OTHER = {
    "the longest are named, and the rest is added up": made_record(other_by_owner=owned(4.1e-3, *ACTIONS)),
    # The table's figures are of the mean over ranks: these need not agree with them.
    "of several ranks it is of the first": made_record(rank_step_s=[0.01] * 2, other_by_owner=owned(4.1e-3, *ACTIONS)),
    "what was measured is unknown": made_record(other_by_owner=owned(None, *ACTIONS[2:4])),
    "nothing was timed": made_record(),
    "no action was seen": made_record(other_by_owner=owned(1.0)),
}


NUMERICS = NumericsFacts(
    loss=6.4203345,
    reference_loss=6.41873,
    output_error=0.0057,
    gradient_error=None,
    kinds=[
        NumericsKind(
            kind="Linear",
            modules=15,
            parameters=["float32"],
            outputs=["bfloat16", "float32"],
            gradients=["float32"],
            gradient_error=None,
        ),
        NumericsKind(kind="SwiGLU", modules=2, parameters=[], outputs=["bfloat16"], gradients=[], gradient_error=None),
    ],
)
