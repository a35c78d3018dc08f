"""What is concluded from evidence made by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cuda_trace import cuda_step, kernel_table
from made_environment import made_environment, made_telemetry
from made_facts import python_line
from made_parts import made_model
from recorded import FLOPS, HALF_OF_THE_CEILING, LEVEL, evidence_of, printed_lines, record_of
from stored_texts import assert_stored

from lm_profiler.analysis.conclude import FINDINGS, conclude
from lm_profiler.analysis.hardware.roofline import GIVEN, MEASURED_PRODUCT, clock_share, judge_utilisation, mean_rate
from lm_profiler.analysis.steps.summaries import BatchCount
from lm_profiler.analysis.why.traced import Traced
from lm_profiler.record.operator_calls import LineOperators
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.run_record import (
    Floor,
    FlopRate,
    LoaderFacts,
    NeedlessWork,
    Rates,
    RunRecord,
    Settings,
    StepCounters,
)

MEAN_S = sum(LEVEL) / len(LEVEL) * 1e-3


def test_slow_first_steps_are_in_no_figure() -> None:
    """Of 20 steps the first four take 30 ms, the others about 10 and at most 10.2."""
    record = record_of([30.0] * 4 + LEVEL)
    steadiness = record.steadiness
    assert (steadiness.word, steadiness.cut) == ("steady", 4)
    mean_of_all_s = (4 * 30e-3 + 16 * MEAN_S) / 20
    assert steadiness.bias_of_mean == pytest.approx(mean_of_all_s / MEAN_S - 1)
    for part in ("step", "forward"):
        for times in (record.time, record.host_time):
            assert times[part].n == 16
            assert times[part].max == pytest.approx(10.2e-3)
            assert times[part].mean == pytest.approx(MEAN_S)
    assert record.steps["measure"] == 20  # all that ran


def test_mean_counters_are_of_the_steps_of_the_figures() -> None:
    """The first four steps are cut; garbage takes 20 ms in them, and 1 ms in the others."""
    evidence = evidence_of([30.0] * 4 + LEVEL)
    counters = []
    for row in evidence.rows:
        is_cut = row.step <= 4
        counters.append(StepCounters(step=row.step, gc_s=0.02 if is_cut else 0.001))
    mean = conclude(replace(evidence, counters=counters)).mean_counters
    assert mean.gc_s == pytest.approx(0.001)


@pytest.mark.parametrize(
    "all_reduce_us, adam_us, bound_by, share",
    [
        (30, 20, "compute", 1.0),
        (80, 20, "communication", 70 / 220),  # 10 of the all-reduce run beside a matrix product
        (30, 200, "memory bandwidth", 202 / 350),  # the optimizer's kernel and its memset
    ],
)
def test_the_trace_finds_what_the_marks_cannot(all_reduce_us: float, adam_us: float, bound_by: str, share: float):
    table = kernel_table(cuda_step(all_reduce_us, adam_us))
    verdict = record_of(LEVEL, **HALF_OF_THE_CEILING, kernels=table).verdict
    assert (verdict.bound_by, verdict.share) == (bound_by, pytest.approx(share))


@pytest.mark.parametrize(
    "repeats_forward, confirmed",
    [
        (None, ["repeated_forward", "broadcast", "unused_gradients"]),  # no data flow was recorded
        (True, ["repeated_forward", "unused_gradients"]),
        (False, ["unused_gradients"]),
    ],
)
def test_the_data_flow_refutes_what_the_trace_only_suspects(repeats_forward: bool | None, confirmed: list[str]) -> None:
    suspected = [
        NeedlessWork(kind=kind, phase="forward", what="net (Net)", count=1.0, seconds=0.001)
        for kind in ("repeated_forward", "broadcast", "unused_gradients")
    ]
    traced = Traced([], [], steps=1, on_device=False, needless=tuple(suspected))
    record = record_of(LEVEL, **HALF_OF_THE_CEILING, traced=traced, repeats_forward=repeats_forward)
    assert [work.kind for work in record.waterfall.needless] == confirmed


@pytest.mark.parametrize(
    "ranks, resident_gib, available_gib, free_share",
    [
        (1, 3, 7, 0.6),  # 4 of 10 GiB that the process could have
        (1, 3, 1, 0.0),  # other programs, or a limit, leave as much as the peak needs
        (2, 3, 10, 0.5),  # 4 of 8 GiB for each process
        (1, None, None, None),  # an older record
    ],
)
def test_on_a_cpu_memory_is_free_only_as_far_as_the_process_could_have_had_it(
    ranks: int, resident_gib: int | None, available_gib: int | None, free_share: float | None
) -> None:
    """The machine has 16 GiB, of which a process held 4 at its peak."""
    gib = 2**30
    evidence = evidence_of(LEVEL)
    rows = [replace(row, memory=(None, None, 4 * gib)) for row in evidence.rows]
    evidence = replace(
        evidence,
        rows=rows,
        environment=made_environment(device_bytes=16 * gib, world_size=ranks),
        resident_bytes=None if resident_gib is None else resident_gib * gib,
        available_bytes=None if available_gib is None else available_gib * gib,
    )
    settings = conclude(evidence).settings
    assert settings.memory_free_share == (None if free_share is None else pytest.approx(free_share))


def utilisation_with(**changes: Any) -> Any:
    """Of 300 FLOPs of the model, 360 with recomputation, in 2 s on one device with a peak of 1000 FLOP/s."""
    options: dict[str, Any] = {
        "flops": FLOPS, "step_s": 2.0, "device_name": "unheard of", "dtype": "bfloat16", "devices": 1,
        "ceiling_flops_per_s": None, "peak_flops_per_s": 1000.0,
    }  # fmt: skip
    return judge_utilisation(**{**options, **changes})


def test_utilisation_is_flops_over_time_and_peak() -> None:
    """The model has 300 FLOPs per step, 360 with recomputation."""
    found = utilisation_with(step_s=2.0, peak_flops_per_s=1000.0)
    assert found.mfu == pytest.approx(300 / 2.0 / 1000)
    assert found.hfu == pytest.approx(360 / 2.0 / 1000)
    assert "--peak_tflops" in found.peak_source


def test_several_devices_share_the_step() -> None:
    """The model has 300 FLOPs per step, 360 with recomputation."""
    found = utilisation_with(devices=4, step_s=2.0, peak_flops_per_s=1000.0, ceiling_flops_per_s=100.0)
    assert found.mfu == pytest.approx(300 / 2.0 / (4 * 1000))
    assert found.of_ceiling == pytest.approx(360 / 2.0 / (4 * 100))


def test_the_peak_of_a_known_device_is_its_datasheets_unless_given() -> None:
    from_datasheet = utilisation_with(device_name="NVIDIA H200", step_s=2.0, peak_flops_per_s=None)
    assert from_datasheet.peak_flops_per_s == pytest.approx(989.4e12)
    assert "NVIDIA" in from_datasheet.peak_source
    assert from_datasheet.mfu == pytest.approx(300 / 2.0 / 989.4e12)
    given = utilisation_with(device_name="NVIDIA H200", peak_flops_per_s=1000.0)
    assert given.peak_flops_per_s == 1000.0


def test_unknown_work_has_no_utilisation() -> None:
    assert record_of(LEVEL, ceilings={"float32": 72_000.0}).utilisation is None
    assert record_of([], **HALF_OF_THE_CEILING).utilisation is None


def test_utilisation_is_of_the_mean_step() -> None:
    """The model has 300 FLOPs per step, 360 with recomputation; the ceiling of the machine is 72,000 FLOP/s."""
    record = record_of(LEVEL, **HALF_OF_THE_CEILING, peak_flops_per_s=60_000.0)
    of_ceiling = 360 / MEAN_S / 72_000
    assert record.utilisation.mfu == pytest.approx(300 / MEAN_S / 60_000)
    assert record.utilisation.of_ceiling == pytest.approx(of_ceiling)
    assert record.verdict.facts["utilisation"] == pytest.approx(of_ceiling)


@pytest.mark.parametrize(
    "has_loader, calls, optimizer, samples",
    [
        # as in reinforcement learning, whose calls have one observation or many
        (False, [3, 2, 3], "Adam", None),
        (True, [3, 2, 3], "Adam", round(8 * (3 + 3 + 2 + 3 + 3 + 3) / 6)),
        (False, [3, 3, 3], "Adam", 8 * 3),  # as in a loop that accumulates gradients
        (False, [20, 20, 20], "LBFGS", None),  # calls the model with the same batch several times
    ],
)
def test_calls_other_than_batches_do_not_count(
    has_loader: bool, calls: list[int], optimizer: str, samples: int | None
) -> None:
    """Without a loader, each call of the model is taken for a batch, here of 8 samples.

    Steps 1 and 2 have so many calls, step 3, and steps 4 to 6.
    """
    counts = [BatchCount(step, number, 8 * number) for step, number in zip((1, 3, 4), calls, strict=True)]
    settings = Settings(restarts_loader=False if has_loader else None)
    model = made_model(optimizers=[optimizer])
    record = record_of(LEVEL[:6], loop="own", batch_counts=[counts], settings=settings, model=model)
    assert record.throughput.samples_per_step == samples
    notes = [note for note in record.notes if "batches" in note]
    assert len(notes) == has_loader


def test_a_note_names_the_forward_pass_that_is_called_without_a_mark() -> None:
    call = python_line(28.0, what="torch", phase="other").model_copy(update={"forward": "unmarked"})
    (note,) = record_of(LEVEL, loop="own", python_times=[call, call]).notes
    assert note.startswith("Net.forward (net.py:12) is called directly, so its time counts as other: ")


@pytest.mark.parametrize("share, is_noted", [(0.6, True), (0.01, False)])
def test_a_note_tells_that_much_of_forward_is_backward(share: float, is_noted: bool) -> None:
    notes = record_of(LEVEL, backward_share_of_forward=share).notes
    assert ("about 60% of forward is backward passes" in " ".join(notes)) == is_noted


@pytest.mark.parametrize("device_type, activity", [("cpu", "torch"), ("cuda", "python")])
def test_on_a_cpu_operators_without_a_call_are_no_python_code(device_type: str, activity: str) -> None:
    """Python does not wait for the kernels of a GPU."""
    operators = LineOperators(
        phase="forward", file="/home/me/net.py", line=11, function="Net.forward", calls=2, seconds=0.028
    )
    environment = made_environment(device_type=device_type)
    record = record_of(LEVEL, python_times=[python_line(28.0)], line_operators=[operators], environment=environment)
    assert record.python_times[0].what == activity
    assert record.python_times[0].seconds == pytest.approx(0.028)


def test_a_slow_or_throttled_gpu_is_in_the_verdict() -> None:
    """What follows in the line of the verdict on the words without telemetry."""
    record = record_of(LEVEL)
    (without_telemetry,) = printed_lines(record)["verdict:"]
    additions = {}
    for share, reasons in ((0.6, None), (0.9, ["power cap"]), (None, ["power cap", "power brake"]), (0.76, [])):
        telemetry = made_telemetry(clock_share=share, throttle_reasons=reasons)
        (verdict,) = printed_lines(record.model_copy(update={"telemetry": telemetry}))["verdict:"]
        additions[f"{share}, {reasons}"] = verdict.removeprefix(without_telemetry)
    assert_stored("analysis/notes: a GPU's clock in the verdict", additions)


def steps_with_one_odd(part: str, excess_ms: float) -> list[dict[str, float]]:
    """Twenty steps of 10 ms, 4 % data, 31 % forward, 65 % backward; the 15th takes ``excess_ms`` more in ``part``."""
    steps = []
    for step_ms in (*LEVEL, *LEVEL[:4]):
        steps.append({"data": 0.04 * step_ms, "forward": 0.31 * step_ms, "backward": 0.65 * step_ms})
    steps[14][part] += excess_ms
    return steps


def test_one_odd_step_of_data_makes_the_verdict_uncertain() -> None:
    """One of 20 steps of 10 ms waits for data for 400 ms: 20 ms of the mean step of 30."""
    found = record_of(steps_with_one_odd("data", excess_ms=400.0), **HALF_OF_THE_CEILING)
    assert found.steadiness.level_s == pytest.approx(10e-3, rel=0.005)
    assert found.steadiness.odd_s == pytest.approx(400e-3 / 20, rel=0.005)
    assert found.shares["data"] == pytest.approx((0.4 + 20.0) / 30.0, rel=0.005)
    assert sum(found.shares[name] for name in PARTS) == pytest.approx(1.0)
    verdict = found.verdict
    assert {verdict.bound_by, verdict.or_bound_by} == {"input", "compute"}
    assert not verdict.certain
    assert verdict.share_low < 1 / 3
    first = found.findings[0]
    assert (first.name, first.may) == ("input", True)


def test_one_odd_step_of_compute_changes_no_verdict() -> None:
    verdict = record_of(steps_with_one_odd("forward", excess_ms=400.0), **HALF_OF_THE_CEILING).verdict
    assert (verdict.bound_by, verdict.certain) == ("compute", True)


def test_a_step_that_was_passed_over_is_odd() -> None:
    """The eighth step has only its 0.4 ms of data: what it lacks is mostly 6.5 ms of backward."""
    steps = steps_with_one_odd("forward", excess_ms=0.0)
    steps[7] = {"data": 0.4}
    found = record_of(steps, **HALF_OF_THE_CEILING)
    assert len(printed_lines(found)["odd:"]) == 1
    (odd,) = found.odd_steps
    assert (odd.step, odd.part) == (8, "backward")
    assert odd.step_s == pytest.approx(0.4e-3)
    assert odd.excess_s == pytest.approx(-6.5e-3, abs=0.1e-3)


def test_the_verdict_and_the_table_have_the_same_share_of_the_mean_step() -> None:
    """Two workers that sleep: one batch of two is ready, and the loop waits 60 ms for the other."""
    steps = []
    for number, step_ms in enumerate(LEVEL + LEVEL):
        waits_ms = 60.0 if number % 2 else 0.0
        steps.append({"data": waits_ms, "forward": 0.4 * step_ms, "backward": 0.6 * step_ms})
    found = record_of(steps, **HALF_OF_THE_CEILING)
    assert found.shares["data"] == pytest.approx(30.0 / 40.0, rel=0.01)
    assert found.verdict.bound_by == "input"
    assert found.verdict.share == pytest.approx(found.shares["data"], rel=1e-6)


def test_flops_of_two_dtypes_take_the_time_of_both() -> None:
    """2000 FLOPs in float32 take 2 us, 7000 in bfloat16 1.75 us."""
    slow = FlopRate(dtype="float32", flops_per_s=1e9, source="")
    fast = FlopRate(dtype="bfloat16", flops_per_s=4e9, source="")
    floors = [Floor(flops={"float32": 1000}), Floor(flops={"bfloat16": 7000, "float32": 1000})]
    assert mean_rate(floors, Rates(flops=[slow, fast]), fast) == pytest.approx(9000 / (2e-6 + 1.75e-6))
    assert mean_rate(floors, Rates(flops=[fast]), fast) == 4e9
    assert mean_rate([], Rates(flops=[fast]), fast) == 4e9


def test_the_clock_is_compared_with_that_of_the_datasheet() -> None:
    """An H100's bf16 peak is of 1830 MHz, though it may run at 1980."""
    telemetry = made_telemetry(median_sm_clock_hz=1.2e9, max_sm_clock_hz=1.98e9)
    sheet = FlopRate(dtype="bfloat16", flops_per_s=989.4e12, source="NVIDIA H100 whitepaper")
    assert clock_share(telemetry, sheet, 132) == pytest.approx(1.2 / 1.83, rel=1e-3)
    assert clock_share(None, sheet, 132) is None
    for source in (MEASURED_PRODUCT, GIVEN):
        assert clock_share(telemetry, sheet.model_copy(update={"source": source}), 132) is None


def record_with_loader(workers: int | None, before: int | None) -> RunRecord:
    """20 measured steps of 10 ms, whose loader had ``before`` batches ready as they began, and none at the end."""
    loader = LoaderFacts(workers=workers, ahead=before, ready_before=before, ready_after=before and 0)
    counts = [[BatchCount(step=1, batches=1, samples=8)]]
    return conclude(replace(evidence_of(LEVEL), loader=loader, batch_counts=counts))


def test_notes_on_batches_made_before_the_measurement() -> None:
    texts = {}
    for workers, before in ((4, 4), (4, 8), (4, 16), (0, 0), (None, None)):  # each of four may just have made one
        texts[f"{workers} workers, {before} before"] = record_with_loader(workers, before).notes
    assert_stored("analysis/notes: batches made before", texts)


def test_batches_made_before_hide_the_loaders_time() -> None:
    """Of the 20 batches 10 were ready before, so the loader took twice as long as measured for the rest."""
    hidden, usual = record_with_loader(4, 10), record_with_loader(4, 4)
    assert usual.lasting_step_s is None
    assert hidden.lasting_step_s == pytest.approx(2.0 * MEAN_S, rel=0.01)
    assert hidden.throughput.samples_per_s == pytest.approx(8 / hidden.lasting_step_s, rel=1e-6)
    (found,) = [finding for finding in hidden.findings if finding.name == "input"]
    assert found.saves_s == pytest.approx(hidden.lasting_step_s - MEAN_S, rel=0.2)
    assert hidden.verdict.bound_by == "input"


def test_a_shorter_last_batch_is_no_pattern() -> None:
    """Epochs of four steps, of which the last has three samples of eight, and takes half of the time."""
    noise = np.random.default_rng(0).normal(1.0, 0.01, 40)
    step_ms, counts = [], []
    for number in range(40):
        is_last = number % 4 == 3
        step_ms.append(float(noise[number]) * (5.0 if is_last else 10.0))
        counts.append(BatchCount(number + 1, batches=1, samples=3 if is_last else 8))
    record = conclude(replace(evidence_of(step_ms), batch_counts=[counts]))
    assert record.steadiness.pattern.short_batch
    assert not {finding.name for finding in record.findings} & {"pattern", "odd_steps"}
    only_full_batches = [BatchCount(step=1, batches=1, samples=8)]
    record = conclude(replace(evidence_of(step_ms), batch_counts=[only_full_batches]))
    assert not record.steadiness.pattern.short_batch


def test_a_shorter_batch_is_the_cause_of_an_odd_step() -> None:
    """Step 13 has one sample of eight, and takes 2 ms of 10."""
    step_ms = [10.0 + 0.05 * (number % 3) for number in range(20)]
    step_ms[12] = 2.0
    counts = [
        BatchCount(step=1, batches=1, samples=8),
        BatchCount(step=13, batches=1, samples=1),
        BatchCount(step=14, batches=1, samples=8),
    ]
    (odd,) = conclude(replace(evidence_of(step_ms), batch_counts=[counts])).odd_steps
    assert odd.step == 13
    assert odd.cause == "fewer samples than usual (1)"


@pytest.mark.parametrize("name", [name for name, _ in FINDINGS])
def test_a_finding_that_fails_is_a_note(name: str) -> None:
    """Each fails in turn. Those that need it find nothing or add a note, and what was measured is there."""

    def fail(*_: Any) -> dict[str, Any]:
        raise OSError("no such driver")

    evidence = evidence_of(LEVEL, **HALF_OF_THE_CEILING)
    findings = [(other_name, fail if other_name == name else finding) for other_name, finding in FINDINGS]
    record = conclude(evidence, findings)
    assert record.notes[0].startswith(f"{name} unknown: OSError")
    assert (record.status, record.steps_planned) == ("ok", {"measure": len(LEVEL)})
    if name not in ("figures", "utilisation", "rates"):
        without_failure = conclude(evidence)
        assert record.time == without_failure.time
        assert record.utilisation == without_failure.utilisation
        assert record.notes[1:] == []
