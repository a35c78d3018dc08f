"""What is concluded from evidence made by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cuda_trace import cuda_step, kernel_table
from made_environment import made_environment
from made_facts import line
from made_parts import made_model
from recorded import FLOPS, HALF_OF_THE_CEILING, LEVEL, evidence_of, lines, recorded
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
    Telemetry,
)

MEAN_S = sum(LEVEL) / len(LEVEL) * 1e-3


def test_slow_first_steps_are_in_no_figure() -> None:
    record = recorded([30.0] * 4 + LEVEL)
    steadiness = record.steadiness
    assert (steadiness.word, steadiness.cut) == ("steady", 4)
    mean = sum(LEVEL) / len(LEVEL)
    bias = (120 + sum(LEVEL)) / 20 / mean - 1
    assert steadiness.bias_of_mean == pytest.approx(bias)
    for part in ("step", "forward"):
        for times in (record.time, record.host_time):
            assert times[part].n == len(LEVEL)
            assert times[part].max == pytest.approx(10.2e-3)
            assert times[part].mean == pytest.approx(mean * 1e-3)
    assert record.steps["measure"] == 20  # all that ran


def test_mean_counters_are_of_the_steps_of_the_figures() -> None:
    evidence = evidence_of([30.0] * 4 + LEVEL)
    counters = [StepCounters(step=row.step, gc_s=0.02 if at < 4 else 0.001) for at, row in enumerate(evidence.rows)]
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
    verdict = recorded(LEVEL, **HALF_OF_THE_CEILING, kernels=table).verdict
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
    record = recorded(LEVEL, **HALF_OF_THE_CEILING, traced=traced, repeats_forward=repeats_forward)
    assert [work.kind for work in record.waterfall.needless] == confirmed


def utilisation_with(**changes: Any) -> Any:
    options: dict[str, Any] = {
        "flops": FLOPS, "step_s": 2.0, "device_name": "unheard of", "dtype": "bfloat16", "devices": 1,
        "ceiling_flops_per_s": None, "peak_flops_per_s": 1000.0,
    }  # fmt: skip
    return judge_utilisation(**{**options, **changes})


def test_utilisation_is_flops_over_time_and_peak() -> None:
    found = utilisation_with()
    assert (found.mfu, found.hfu) == pytest.approx((300 / 2 / 1000, 360 / 2 / 1000))
    assert "--peak_tflops" in found.peak_source


def test_several_devices_share_the_step() -> None:
    assert utilisation_with(devices=4).mfu == pytest.approx(300 / 2 / 4000)
    assert utilisation_with(devices=4, ceiling_flops_per_s=100.0).of_ceiling == pytest.approx(360 / 2 / 400)


def test_the_peak_of_a_known_device_is_its_datasheets_unless_given() -> None:
    known = utilisation_with(device_name="NVIDIA H200", peak_flops_per_s=None)
    assert known.peak_flops_per_s == pytest.approx(989.4e12)
    assert "NVIDIA" in known.peak_source
    assert known.mfu == pytest.approx(150 / 989.4e12)
    assert utilisation_with(device_name="NVIDIA H200").peak_flops_per_s == 1000.0


def test_unknown_work_has_no_utilisation() -> None:
    assert recorded(LEVEL, ceilings={"float32": 72_000.0}).utilisation is None
    assert recorded([], **HALF_OF_THE_CEILING).utilisation is None


def test_utilisation_is_of_the_mean_step() -> None:
    record = recorded(LEVEL, **HALF_OF_THE_CEILING, peak_flops_per_s=60_000.0)
    assert record.utilisation.mfu == pytest.approx(300 / MEAN_S / 60_000)
    assert record.utilisation.of_ceiling == pytest.approx(360 / MEAN_S / 72_000)
    assert record.verdict.facts["utilisation"] == pytest.approx(360 / MEAN_S / 72_000)


@pytest.mark.parametrize(
    "has_loader, calls, optimizer, samples",
    [
        (False, [3, 2, 3], "Adam", None),  # as in reinforcement learning, whose calls have one observation or many
        (True, [3, 2, 3], "Adam", 8 * 17 / 6),
        (False, [3, 3, 3], "Adam", 24),  # as in a loop that accumulates gradients
        (False, [20, 20, 20], "LBFGS", None),  # calls the model with the same batch several times
    ],
)
def test_calls_other_than_batches_do_not_count(
    has_loader: bool, calls: list[int], optimizer: str, samples: float | None
) -> None:
    """Without a loader, each call of the model is taken for a batch, here of 8 samples."""
    counts = [BatchCount(step, number, 8 * number) for step, number in zip((1, 3, 4), calls, strict=True)]
    settings = Settings(restarts_loader=False if has_loader else None)
    model = made_model(optimizers=[optimizer])
    record = recorded(LEVEL[:6], loop="own", batch_counts=[counts], settings=settings, model=model)
    known = None if samples is None else round(samples)
    assert record.throughput.samples_per_step == known
    notes = [note for note in record.notes if "batches" in note]
    assert len(notes) == has_loader


def test_a_note_names_the_forward_pass_that_is_called_without_a_mark() -> None:
    call = line(28.0, what="torch", phase="other").model_copy(update={"forward": "unmarked"})
    (note,) = recorded(LEVEL, loop="own", python_times=[call, call]).notes
    assert note.startswith("Net.forward (net.py:12) is called directly, so its time counts as other: ")


@pytest.mark.parametrize("share, is_noted", [(0.6, True), (0.01, False)])
def test_a_note_tells_that_much_of_forward_is_backward(share: float, is_noted: bool) -> None:
    notes = recorded(LEVEL, backward_share_of_forward=share).notes
    assert ("about 60% of forward is backward passes" in " ".join(notes)) == is_noted


@pytest.mark.parametrize("device_type, activity", [("cpu", "torch"), ("cuda", "python")])
def test_on_a_cpu_operators_without_a_call_are_no_python_code(device_type: str, activity: str) -> None:
    """Python does not wait for the kernels of a GPU."""
    operators = LineOperators(
        phase="forward", file="/home/me/net.py", line=11, function="Net.forward", calls=2, seconds=0.028
    )
    environment = made_environment(device_type=device_type)
    record = recorded(LEVEL, python_times=[line(28.0)], line_operators=[operators], environment=environment)
    assert record.python_times[0].what == activity
    assert record.python_times[0].seconds == pytest.approx(0.028)


def test_a_slow_or_throttled_gpu_is_in_the_verdict() -> None:
    plain, ends = recorded(LEVEL), {}
    fields: dict[str, Any] = {**dict.fromkeys(Telemetry.model_fields), "samples": 9, "duration_s": 1.0, "gpus": []}
    for share, reasons in ((0.6, None), (0.9, ["power cap"]), (None, ["power cap", "power brake"]), (0.76, [])):
        telemetry = Telemetry(**{**fields, "clock_share": share, "throttle_reasons": reasons})
        (verdict,) = lines(plain.model_copy(update={"telemetry": telemetry}))["verdict:"]
        ends[f"{share}, {reasons}"] = verdict.removeprefix(lines(plain)["verdict:"][0])
    assert_stored("analysis/notes: a GPU's clock in the verdict", ends)


def steps_with_one_odd(part: str, at: int, ms: float) -> list[dict[str, float]]:
    """Twenty steps of 4 % data, 31 % forward, 65 % backward, of which one takes ``ms`` more in ``part``."""
    steps = [{"data": 0.04 * t, "forward": 0.31 * t, "backward": 0.65 * t} for t in (*LEVEL, *LEVEL[:4])]
    steps[at][part] += ms
    return steps


def test_one_odd_step_of_data_makes_the_verdict_uncertain() -> None:
    found = recorded(steps_with_one_odd("data", 14, 400.0), **HALF_OF_THE_CEILING)
    assert found.steadiness.level_s == pytest.approx(10e-3, rel=0.005)
    assert found.steadiness.odd_s == pytest.approx(400e-3 / 20, rel=0.005)
    assert found.shares["data"] == pytest.approx((0.4 + 20.0) / 30.0, rel=0.005)
    assert sum(found.shares[name] for name in PARTS) == pytest.approx(1.0)
    assert {found.verdict.bound_by, found.verdict.or_bound_by} == {"input", "compute"}
    assert not found.verdict.certain
    assert found.verdict.share_low < 1 / 3
    assert found.findings[0].name == "input"
    assert found.findings[0].may


def test_one_odd_step_of_compute_changes_no_verdict() -> None:
    verdict = recorded(steps_with_one_odd("forward", 14, 400.0), **HALF_OF_THE_CEILING).verdict
    assert (verdict.bound_by, verdict.certain) == ("compute", True)


def test_a_step_that_was_passed_over_is_odd() -> None:
    steps = steps_with_one_odd("forward", 14, 0.0)
    steps[7] = {"data": 0.4}
    found = recorded(steps, **HALF_OF_THE_CEILING)
    assert len(lines(found)["odd:"]) == 1
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
    found = recorded(steps, **HALF_OF_THE_CEILING)
    assert found.shares["data"] == pytest.approx(30.0 / 40.0, rel=0.01)
    assert found.verdict.bound_by == "input"
    assert found.verdict.share == pytest.approx(found.shares["data"], rel=1e-6)


def test_flops_of_two_dtypes_take_the_time_of_both() -> None:
    slow = FlopRate(dtype="float32", flops_per_s=1e9, source="")
    fast = FlopRate(dtype="bfloat16", flops_per_s=4e9, source="")
    floors = [Floor(flops={"float32": 1000}), Floor(flops={"bfloat16": 7000, "float32": 1000})]
    # 9000 in 2000 / 1e9 + 7000 / 4e9 seconds.
    assert mean_rate(floors, Rates(flops=[slow, fast]), fast) == pytest.approx(9000 / 3.75e-6)
    assert mean_rate(floors, Rates(flops=[fast]), fast) == 4e9
    assert mean_rate([], Rates(flops=[fast]), fast) == 4e9


def test_the_clock_is_compared_with_that_of_the_datasheet() -> None:
    """An H100's bf16 peak is of 1830 MHz, though it may run at 1980."""
    unknown = dict.fromkeys(Telemetry.model_fields, None)
    counted = {"samples": 20, "duration_s": 1.0, "gpus": []}
    read = Telemetry(**{**unknown, **counted, "median_sm_clock_hz": 1.2e9, "max_sm_clock_hz": 1.98e9})
    sheet = FlopRate(dtype="bfloat16", flops_per_s=989.4e12, source="NVIDIA H100 whitepaper")
    assert clock_share(read, sheet, 132) == pytest.approx(1.2 / 1.83, rel=1e-3)
    assert clock_share(None, sheet, 132) is None
    for source in (MEASURED_PRODUCT, GIVEN):
        assert clock_share(read, sheet.model_copy(update={"source": source}), 132) is None


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
    steady = record.steadiness
    assert steady.pattern.short_batch
    assert not {finding.name for finding in record.findings} & {"pattern", "odd_steps"}
    full_batches = [BatchCount(step=1, batches=1, samples=8)]
    alike = conclude(replace(evidence_of(step_ms), batch_counts=[full_batches])).steadiness
    assert not alike.pattern.short_batch
    step_ms = [10.0 + 0.05 * (number % 3) for number in range(20)]
    step_ms[12] = 2.0
    counts = [
        BatchCount(step=1, batches=1, samples=8),
        BatchCount(step=13, batches=1, samples=1),
        BatchCount(step=14, batches=1, samples=8),
    ]
    (odd,) = conclude(replace(evidence_of(step_ms), batch_counts=[counts])).odd_steps
    assert odd.step == 13
    assert odd.cause == "a shorter batch (1 sample)"


@pytest.mark.parametrize("name", [name for name, _ in FINDINGS])
def test_a_finding_that_fails_is_a_note(name: str) -> None:
    """Each fails in turn. Those that need it find nothing or add a note, and what was measured is there."""

    def fails(*_: Any) -> dict[str, Any]:
        raise OSError("no such driver")

    evidence = evidence_of(LEVEL, **HALF_OF_THE_CEILING)
    record = conclude(evidence, [(each, fails if each == name else finding) for each, finding in FINDINGS])
    assert record.notes[0].startswith(f"{name} unknown: OSError")
    assert (record.status, record.steps_planned) == ("ok", {"measure": len(LEVEL)})
    whole = conclude(evidence)
    if name not in ("figures", "utilisation", "rates"):
        assert (record.time, record.utilisation) == (whole.time, whole.utilisation)
        assert record.notes[1:] == []
