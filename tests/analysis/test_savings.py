"""Each finding is drawn from its own facts, and not without them; the likeliest saving comes first."""

from pathlib import Path
from typing import Any, get_args

import compared
import pytest
from made_environment import made_utilisation
from made_facts import (
    busy_machine,
    owners_of_ms,
    python_line,
    record_with,
    thread_that_ran,
    thread_use_of,
    waterfall_of_ms,
)
from made_ranks import made_ranks

from lm_profiler.analysis.remedies.catalogue import REMEDIES, remedy_of
from lm_profiler.analysis.savings.ranking import FINDERS, findings_of
from lm_profiler.analysis.savings.step_costs import WORTH
from lm_profiler.record.machine import Flops
from lm_profiler.record.run_record import (
    EXCHANGE,
    NO_CPU,
    BetweenSteps,
    Contributor,
    Finding,
    Floor,
    LargeResult,
    LoaderFacts,
    NeedlessKind,
    NeedlessOperators,
    NeedlessReason,
    NeedlessWork,
    OddStep,
    OtherByOwner,
    OuterCall,
    OutsideSteps,
    OwnedTime,
    RepeatedResult,
    RunRecord,
    Settings,
    StepCounters,
    StepPattern,
    Sync,
    Term,
    ThreadUse,
    Throughput,
    Waterfall,
)


def time_between_steps(what: str, seconds: float, times: int) -> dict[str, Any]:
    return {"between": [BetweenSteps(what=what, seconds=seconds, times=times)], "between_steps_s": seconds}


def outside_steps(what: str, seconds: float, times: int, per_step_s: float, **more: Any) -> dict[str, Any]:
    return {"outside": [OutsideSteps(what=what, seconds=seconds, times=times, per_step_s=per_step_s, **more)]}


def gaps_after_syncs() -> dict[str, Any]:
    waits = Contributor(module=None, what="forward: after cudaStreamSynchronize in aten::item", count=1.0, seconds=0.03)
    waterfall = waterfall_of_ms(Term(name="gaps", seconds=0.03, contributors=[waits]), ideal=60.0)
    return {"waterfall": waterfall, "syncs": [Sync(file="a.py", line=3, function="f", count=9, call=".item()")]}


def waterfall_in_dispatch_mode() -> Waterfall:
    modes = [Contributor(module="net", what="PythonDispatchMode", count=9.0, seconds=0.02),
             Contributor(module=None, what="backward: PythonDispatchMode", count=9.0, seconds=0.01)]  # fmt: skip
    return waterfall_of_ms(Term(name="beyond_bandwidth", seconds=0.03, contributors=modes), ideal=60.0)


def with_needless(*works: tuple[NeedlessKind, str, float]) -> Waterfall:
    needless = [
        NeedlessWork(kind=kind, phase=phase, what="net (Net)", count=1.0, seconds=seconds)
        for kind, phase, seconds in works
    ]
    return waterfall_of_ms(ideal=90.0).model_copy(update={"needless": needless})


def needless(reason: NeedlessReason) -> dict[str, Any]:
    """Half of forward, and a quarter of backward."""
    operators = NeedlessOperators(
        reason=reason, count=4, what="aten::mm", share=0.98, phase_shares={"forward": 0.5, "backward": 0.25},
        file="net.py", line=12, function="Net.forward",
    )  # fmt: skip
    return {"needless_operators": [operators]}


def repeated_result(ms: float, phase: str = "forward", **facts: Any) -> RepeatedResult:
    return RepeatedResult(
        phase=phase, function="kernel", file="net.py", line=3, seconds=ms * 1e-3, **{"calls": 4, "repeats": 3, **facts}
    )


def gaps_of_ms(times_ms: dict[str, float]) -> OtherByOwner:
    """The gaps between the phases of a loop, and how many milliseconds of a step each takes."""
    gaps = [OwnedTime(owner="", action=gap, seconds=ms * 1e-3, calls=1.0, in_steps=3) for gap, ms in times_ms.items()]
    return OtherByOwner(steps=3, seconds=sum(times_ms.values()) * 1e-3, actions=gaps)


def names_of(record: RunRecord) -> list[str]:
    return [finding.name for finding in findings_of(record)]


def found_in(record: RunRecord, name: str) -> Finding:
    (finding,) = [finding for finding in findings_of(record) if finding.name == name]
    return finding


HALVES = {"forward": 50.0, "backward": 50.0}


def padded(unused: float, **facts: Any) -> Throughput:
    return Throughput(tokens_per_step=100, tokens_per_s=1e3, unused_share=unused, **{"occupancy": 0.2, **facts})


def clipping(clip_ms: float, **settings: Any) -> RunRecord:
    return record_with({"clip": clip_ms}, settings=Settings(**settings))


CASES: dict[str, tuple[str, float, RunRecord]] = {
    "the loader": ("input", 60.0, record_with({"data": 60.0}, settings=Settings(num_workers=0, cores=2))),
    "the program makes tensors of lists in its transfer": (
        "owner", 30.0,
        record_with({"transfer": 30.0}, python_times=[python_line(28.0, what="torch", phase="transfer", calls=1)]),
    ),
    "a slow call in code between the phases": (
        "slow_call", 25.0,
        record_with(
            {"other": 30.0},
            other_by_owner=owners_of_ms(C__on_train_batch_end=29.0),
            slow_calls=[python_line(25.0, "NumPy's choice with p", "other", function="C.draw")],
        ),
    ),
    "a slow call in the loader": (
        "slow_call", 35.0,
        record_with(
            {"data": 60.0},
            settings=Settings(num_workers=0, cores=2),
            slow_calls=[python_line(35.0, "json.loads", "data", function="D.__getitem__")],
        ),
    ),
    "the copy": ("transfer", 30.0, record_with({"transfer": 30.0}, device="cuda", settings=Settings(pin_memory=False))),
    "validation": ("validation", 100.0, record_with(**time_between_steps("validation", 4.0, 8))),
    "checkpoints": ("checkpoint", 50.0, record_with(**time_between_steps("checkpoint", 2.0, 20))),
    "epochs": ("epoch", 50.0, record_with(**time_between_steps("epoch", 2.0, 10), settings=Settings(num_workers=0))),
    "validation that came after the measured steps": (
        "validation", 800.0, record_with(**outside_steps("validation", 36.0, 1, per_step_s=0.8)),
    ),
    "workers that start anew at each epoch": (
        "worker_start", 60.0,
        record_with({"data": 52.0},
                    outside=[OutsideSteps(what="epoch", seconds=0.4, times=4, per_step_s=0.01),
                             OutsideSteps(what="first batch", seconds=2.0, times=4, per_step_s=0.05, in_step=True)],
                    settings=Settings(num_workers=1, persistent_workers=False)),
    ),
    "a loader that is made anew at each epoch": (
        "reload", 40.0,
        record_with(**outside_steps("train_dataloader", 1.6, 8, per_step_s=0.04, owner="M.train_dataloader")),
    ),
    "a hook at the end of an epoch": (
        "owner", 40.0,
        record_with(**outside_steps("M.on_train_epoch_end", 1.6, 8, per_step_s=0.04, owner="M.on_train_epoch_end")),
    ),
    "a loader behind a full queue": (
        "input", 52.0, record_with(lasting_step_s=0.150, settings=Settings(num_workers=2, cores=2)),
    ),
    "some slow steps of unknown cause": (
        "odd_steps", 50.0, record_with(
            odd_steps=[OddStep(step=step, step_s=1.1, ratio=11.0, part="forward", excess_s=1.0) for step in (5, 9, 20)],
            steadiness=record_with().steadiness.model_copy(update={"odd_s": 0.050})),
    ),
    "a callback": (
        "owner", 30.0, record_with({"other": 30.0}, other_by_owner=owners_of_ms(Ema__on_train_batch_end=30.0)),
    ),
    "a logger": (
        "logging", 30.0, record_with({"other": 30.0}, other_by_owner=owners_of_ms(CSVLogger__log_metrics=30.0)),
    ),
    "a sleep": (
        "sleep", 20.0, record_with(python_times=[python_line(20.0, "time.sleep")], thread_use=thread_use_of(20.0)),
    ),
    "Python": ("python", 20.0, record_with(python_times=[python_line(20.0)], thread_use=thread_use_of())),
    "numpy": ("python", 20.0, record_with(python_times=[python_line(20.0, "numpy")], thread_use=thread_use_of())),
    "many small operators": ("python", 40.0, record_with(python_times=[python_line(40.0, "torch", calls=8000)])),
    "values that are logged in the step": (
        "logging", 20.0, record_with(python_times=[python_line(20.0, "Lightning", calls=300)]),
    ),
    "a sleep of unknown line": ("sleep", 25.0, record_with(thread_use=thread_use_of(25.0))),
    "a thread that polls": (
        "threads", 25.0, record_with(thread_use=thread_use_of(25.0), other_threads=thread_that_ran(ms=50.0)),
    ),
    "garbage": ("garbage", 20.0, record_with(mean_counters=StepCounters(gc_s=0.02))),
    "garbage that a callback collects": (
        "garbage", 20.0,
        record_with(mean_counters=StepCounters(gc_s=0.05),
                    python_times=[python_line(30.0, "gc.collect", phase="other")]),
    ),
    "compiling again": ("compilation", 40.0, record_with(mean_counters=StepCounters(compile_s=0.04, compiled="f"))),
    "anomalies": ("anomalies", 85.0, record_with(settings=Settings(anomalies=True))),
    "waiting for the device": ("sync", 30.0, record_with(device="cuda", **gaps_after_syncs())),
    "an optimizer with many kernels": (
        "optimizer", 0.75 * 40.0, record_with({"optimizer": 40.0}, settings=Settings(fused_optimizer=False)),
    ),
    "a batch that is too small": (
        "small_batch", 30.25, record_with({"optimizer": 60.0}, settings=Settings(samples_per_batch=64)),
    ),
    "a batch of two, that may be one of eight": (
        "small_batch", 0.75 * 60.5,
        record_with({"optimizer": 60.0}, settings=Settings(samples_per_batch=2, fused_optimizer=False)),
    ),
    "an optimizer that goes from weight to weight": (
        "optimizer", 0.75 * 12.0,
        record_with({"optimizer": 12.0}, waterfall=waterfall_of_ms(ideal=35.0, gaps=10.0, beyond_bandwidth=18.0),
                    settings=Settings(compiled=False, fused_optimizer=False, weight_by_weight=True)),
    ),
    "an optimizer that multiplies matrices": (
        "optimizer_products", 60.0,
        record_with({"optimizer": 70.0},
                    waterfall=waterfall_of_ms(ideal=5.0, slow_products=15.0, optimizer_products=60.0),
                    floors={"optimizer": Floor(flops={"bfloat16": 6 * 10**12})},
                    settings=Settings(samples_per_batch=64)),
    ),
    "float64 of unknown rate": ("double", 96.0 / 2.0, record_with(settings=Settings(precision="64-true"))),
    "gaps and traffic": (
        "compile", 60.0,
        record_with(device="cuda", waterfall=waterfall_of_ms(ideal=35.0, gaps=10.0, beyond_bandwidth=50.0),
                    settings=Settings(compiled=False)),
    ),
    "gaps and traffic on the CPU": (
        "compile", 30.0,
        record_with(waterfall=waterfall_of_ms(ideal=35.0, gaps=10.0, beyond_bandwidth=50.0),
                    settings=Settings(compiled=False)),
    ),
    "float32 products": (
        "precision", 80.0,
        record_with(waterfall=waterfall_of_ms(ideal=50.0, slow_products=30.0),
                    settings=Settings(precision="32-true", half_precision="bf16-mixed")),
    ),
    "float64 products": (
        "double", 80.0, record_with(waterfall=waterfall_of_ms(ideal=80.0), settings=Settings(precision="64-true")),
    ),
    "recomputation": (
        "recomputation", 25.0,
        record_with(waterfall=waterfall_of_ms(ideal=70.0, recomputation=25.0),
                    settings=Settings(checkpointing=True, memory_free_share=0.6)),
    ),
    "a second pass on the same batch": (
        "repeated_forward", 40.0,
        record_with(
            waterfall=with_needless(("repeated_forward", "forward", 0.025), ("repeated_forward", "backward", 0.015))),
    ),
    "a backward pass that runs twice": (
        "repeated_backward", 15.0, record_with(waterfall=with_needless(("repeated_backward", "backward", 0.015))),
    ),
    "gradients that no optimizer uses": (
        "unused_gradients", 20.0, record_with(waterfall=with_needless(("unused_gradients", "backward", 0.020))),
    ),
    "a perceptual loss whose network gets gradients": (
        "unused_gradients", 15.0,
        record_with({"other": 30.0, "backward": 40.0},
                    outer_calls=[OuterCall(outer_function="Features.forward", file="loss.py", line=49, seconds=0.012,
                                           forward="passing_unfrozen")]),
    ),
    "a column less a row": (
        "broadcast", 30.0,
        record_with(waterfall=with_needless(("broadcast", "forward", 0.010), ("broadcast", "backward", 0.020))),
    ),
    "a group for each weight": (
        "groups", 36.0, record_with({"optimizer": 40.0}, settings=Settings(parameter_groups=20, different_groups=2)),
    ),
    "Python code at each operator": (
        "dispatch_mode", 30.0, record_with({"forward": 60.0, "backward": 40.0}, waterfall=waterfall_in_dispatch_mode())
    ),
    "an optimizer that computes roots": (
        "owner", 42.0,
        record_with({"optimizer": 50.0}, settings=Settings(samples_per_batch=64), python_times=[
            python_line(40.0, what="torch", phase="optimizer", calls=16, function="Shampoo.root"),
            python_line(2.0, phase="optimizer", calls=0, function="Shampoo.root"),
        ]),
    ),
    "batches wider than their longest sequence": ("padding", 0.4 * 85.0, record_with(throughput=padded(unused=0.4))),
    "short sequences beside long ones": (
        "padding", (0.1 + 0.6 * 0.4) * 85.0,
        record_with(throughput=padded(unused=0.1, occupancy=0.5, squared_lengths_per_step=9)),
    ),
    "communication": ("communication", 30.0, record_with(waterfall=waterfall_of_ms(ideal=60.0, communication=30.0))),
    "a slow rank": ("ranks", 30.0, record_with(ranks=made_ranks(excess_ms=31.0))),
    "clipping after each of four batches": (
        "clip", 0.75 * 12.0, clipping(12.0, clipped_batches=160, early_clips=120),
    ),
    "a kernel that is computed for each recording": (
        "same_result", 30.0,
        record_with({"data": 60.0}, repeated_results=[repeated_result(30.0, phase="data")],
                    settings=Settings(num_workers=0, cores=2)),
    ),
    "photographs that are prepared before they are cropped": (
        "large_result", 45.0,
        record_with({"data": 60.0}, settings=Settings(num_workers=0, cores=2), large_results=[
            LargeResult(function="tone", file="net.py", line=3, seconds=0.050, shape="3 x 80 x 80",
                        used_shape="3 x 25 x 25", used_share=0.1),
        ]),
    ),
    "a graph that each layer normalizes": (
        "same_result", 25.0, record_with(HALVES, **needless("repeated"), repeated_results=[repeated_result(25.0)]),
    ),
    "every fifth step": (
        "pattern", 12.0, record_with(steadiness=record_with().steadiness.model_copy(
            update={"pattern": StepPattern(every=5, slow=[5], extra=0.6, part="forward"), "pattern_s": 0.012})),
    ),
}  # fmt: skip
CASES |= {
    f"operators for which the data flow says {reason}": (
        reason,
        37.5,
        record_with(HALVES, **needless(reason)),
    )
    for reason in get_args(NeedlessReason)
}


@pytest.mark.parametrize("case", CASES)
def test_the_planted_cause_comes_first_with_its_advice(case: str) -> None:
    name, saves_ms, record = CASES[case]
    found = findings_of(record)
    assert found[0].name == name
    assert found[0].saves_s * 1e3 == pytest.approx(saves_ms, rel=0.05)
    assert 0.0 < found[0].share <= 1.0
    advice_of_first = remedy_of(found[0], record)
    assert advice_of_first.endswith(".")
    if found[0].file:
        assert f"({Path(found[0].file).name}:{found[0].line})" in advice_of_first
    advice = [remedy_of(finding, record.model_copy(update={"loop": "own"})) for finding in findings_of(record)]
    assert all(text.endswith(".") for text in advice)
    has_only_a_trainer = name == "reload" or "hook" in case or "callback" in case
    if not has_only_a_trainer:
        assert not [text for text in advice for option in OPTIONS_OF_A_TRAINER if option in text]


def test_the_time_of_a_slow_call_is_in_one_finding_alone() -> None:
    _, _, record = CASES["a slow call in the loader"]
    slow_call, loader = findings_of(record)
    assert (slow_call.name, loader.name) == ("slow_call", "input")
    assert slow_call.saves_s + loader.saves_s == pytest.approx(record.time["data"].mean)
    assert names_of(CASES["a slow call in code between the phases"][2]) == ["slow_call"]


@pytest.mark.parametrize(
    "facts, names",
    [
        ({}, ["threads"]),
        ({"other_threads": None}, ["sleep"]),
        ({"other_threads": thread_that_ran(ms=8.0)}, ["sleep"]),
        # it computes without the lock
        ({"other_threads": thread_that_ran(ms=50.0, lock_wait_ms=0.1)}, ["sleep"]),
        ({"rank_step_s": [0.1, 0.1]}, []),  # ranks wait for each other, too
        ({"python_times": [python_line(25.0, "time.sleep")]}, ["sleep"]),
        ({"python_times": [python_line(10.0)]}, ["threads", "python"]),
        ({"python_times": [python_line(60.0)]}, ["threads", "python"]),
    ],
)
def test_a_sleep_is_due_to_another_thread_if_that_holds_the_lock(facts: dict[str, Any], names: list[str]) -> None:
    """The findings do not share time: forward takes 50 ms."""
    known = {"thread_use": thread_use_of(25.0), "other_threads": thread_that_ran(ms=50.0), **facts}
    found = findings_of(record_with(**known))
    assert [finding.name for finding in found] == names
    assert sum(finding.saves_s for finding in found) <= 0.0505


def test_an_owner_is_not_charged_for_waiting_for_another_thread() -> None:
    record = record_with(
        {"other": 40.0},
        other_by_owner=owners_of_ms(Ema__on_train_batch_end=40.0),
        thread_use=thread_use_of(30.0, wall_ms=40.0, phase="other"),
        other_threads=thread_that_ran(ms=50.0),
    )
    assert found_in(record, "threads").saves_s == pytest.approx(0.030, rel=0.02)
    assert found_in(record, "owner").saves_s == pytest.approx(0.010, rel=0.02)


def test_a_wait_for_another_thread_costs_a_device_no_more_than_it_idles() -> None:
    use = thread_use_of(25.0) | thread_use_of(30.0, wall_ms=35.0, phase="backward")
    record = record_with(
        device="cuda", thread_use=use, other_threads=thread_that_ran(ms=90.0), waterfall=waterfall_of_ms(gaps=20.0)
    )
    assert found_in(record, "threads").saves_s == pytest.approx(0.020)


OPTIONS_OF_A_TRAINER = ("Trainer", "trainer", "batch_idx", "val_", "every_n", "AsyncCheckpointIO", "mixed", "--", "on_")


@pytest.mark.parametrize(
    "action, mean_ms, median_ms, p95_ms, timed_ms, saves_ms",
    [
        ("zero_grad and backward", 30.0, 0.2, 0.3, 0.4, 0.0),  # what passed in other steps is not in this place
        ("zero_grad and validation", 30.0, 20.0, 60.0, 12.0, 0.0),  # 36 ms once in 40 steps
        ("backward and data", 30.0, 20.0, 60.0, 12.0, 10.0),  # the mean allows for no more
        ("backward and data", 30.0, 10.0, 60.0, 12.0, 12.0),
        ("backward and data", 30.0, 10.0, 12.0, 12.0, 0.0),  # 36 ms in fewer than a step of 20
    ],
)
@pytest.mark.parametrize("is_busy", [False, True])
def test_a_gap_that_one_of_three_steps_had_is_not_that_of_every_step(
    action: str, mean_ms: float, median_ms: float, p95_ms: float, timed_ms: float, saves_ms: float, is_busy: bool
) -> None:
    """``other`` takes so long in measured steps; the gap took ``timed_ms`` in the mean of three timed ones."""
    timed_s = timed_ms * 1e-3
    gap = OwnedTime(owner="", action=f"between {action}", seconds=timed_s, calls=1 / 3, in_steps=1, least_s=timed_s)
    record = record_with(
        {"other": mean_ms},
        other_by_owner=OtherByOwner(steps=3, seconds=timed_s, actions=[gap]),
        loop="own",
        contention=busy_machine() if is_busy else None,
        **outside_steps("validation", 0.1, 1, per_step_s=0.1 / 40),
    )
    measured_s = {"mean": mean_ms * 1e-3, "median": median_ms * 1e-3, "p95": p95_ms * 1e-3}
    other = record.host_time["other"].model_copy(update=measured_s)
    record = record.model_copy(update={"host_time": {**record.host_time, "other": other}})
    saved_s = sum(finding.saves_s for finding in findings_of(record) if finding.name == "owner")
    assert saved_s == pytest.approx(saves_ms * 1e-3)


@pytest.mark.parametrize(
    "forward, text",
    [
        (
            None,
            "Do less work between zero_grad and forward, or do it less often: most of the time is spent in ",
        ),
        ("untrained", "Call Net.forward (net.py:12) less often: it is not trained."),
        ("unmarked", None),  # the model itself, for which there is a note
    ],
)
def test_the_advice_about_a_forward_pass_in_a_gap_depends_on_the_module(forward: Any, text: str | None) -> None:
    gaps = gaps_of_ms({"between zero_grad and forward": 30.0})
    call = python_line(28.0, what="torch", phase="other").model_copy(update={"forward": forward})
    record = record_with({"other": 30.0}, other_by_owner=gaps, python_times=[call], loop="own")
    owners = [remedy_of(finding, record) for finding in findings_of(record) if finding.name == "owner"]
    assert len(owners) == (text is not None)
    assert "".join(owners).startswith(text or "")


def test_each_gap_of_a_loop_is_a_finding_of_its_own() -> None:
    """Of 50 ms of other, 30 are between forward and backward and 20 after zero_grad; a line of Python takes 28."""
    record = record_with(
        {"other": 50.0},
        other_by_owner=gaps_of_ms({"between forward and backward": 30.0, "after zero_grad": 20.0}),
        python_times=[python_line(28.0, phase="other")],
        loop="own",
    )
    larger, smaller = [finding for finding in findings_of(record) if finding.name == "owner"]
    assert larger.saves_s == pytest.approx(0.03)
    advice = remedy_of(larger, record)
    assert advice.startswith("Do less work between forward and backward, or do it less often: most of the time ")
    assert "(net.py:12)" in advice
    assert smaller.saves_s == pytest.approx(0.02)
    assert remedy_of(smaller, record) == "Do less work after zero_grad, or do it less often."


def test_torch_compile_is_advised_with_the_costliest_operator_that_it_could_fuse() -> None:
    def term(name: Any, operator: str, seconds: float) -> Term:
        part = Contributor(module="net", what=operator, count=1.0, seconds=seconds)
        return Term(name=name, seconds=seconds, contributors=[part])

    waterfall = waterfall_of_ms(
        term("ideal", "aten::mm", 0.05),
        term("bandwidth", "aten::gelu", 0.008),
        term("beyond_bandwidth", "aten::gelu", 0.012),
    )
    record = record_with(waterfall=waterfall, settings=Settings(compiled=False))
    advice = remedy_of(found_in(record, "compile"), record)
    assert "aten::gelu in net, 20%" in advice
    assert "aten::mm" not in advice


@pytest.mark.parametrize("device, saves_ms", [("cpu", 5.0), ("cuda", 50.0)])
def test_compiled_code_for_the_cpu_does_not_make_dropout_faster(device: str, saves_ms: float) -> None:
    """Of 50 ms of traffic, 40 are dropout; on the CPU, half of the rest is saved."""
    parts = [Contributor(module="net", what=operator, count=1.0, seconds=seconds)
             for operator, seconds in (("aten::dropout", 0.040), ("aten::gelu", 0.010))]  # fmt: skip
    traffic = Term(name="beyond_bandwidth", seconds=0.050, contributors=parts)
    record = record_with(device=device, waterfall=waterfall_of_ms(traffic), settings=Settings(compiled=False))
    found = found_in(record, "compile")
    assert found.saves_s == pytest.approx(saves_ms * 1e-3)
    assert found.what == ("aten::gelu" if device == "cpu" else "aten::dropout")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_torch_compile_is_not_advised_if_it_cannot_fuse_the_operators(device: str) -> None:
    waterfall = waterfall_of_ms(ideal=35.0, gaps=10.0, beyond_bandwidth=50.0)
    unfused = NeedlessOperators(reason="unfused", phase_shares={"forward": 0.9}, count=59, what="aten::mul", share=1.0,
                                file="net.py", line=4, function="Net.forward")  # fmt: skip
    record = record_with(device=device, waterfall=waterfall, needless_operators=[unfused],
                         settings=Settings(compiled=False))  # fmt: skip
    uncompiled = record.model_copy(update={"uncompiled_shares": {"forward": 1.0, "backward": 1.0}})
    assert "torch.compile" in remedy_of(found_in(record, "unfused"), record)
    assert "torch.compile" not in remedy_of(found_in(uncompiled, "unfused"), uncompiled)
    assert "compile" not in names_of(uncompiled)


def test_a_step_that_factorizes_matrices_keeps_float64() -> None:
    record = record_with(waterfall=waterfall_of_ms(ideal=80.0), settings=Settings(precision="64-true"))
    assert names_of(record) == ["double"]
    factorizing = record.model_copy(update={"factorizing_operators": ["aten::linalg_cholesky_ex"]})
    assert findings_of(factorizing) == []


def test_every_kind_of_finding_is_planted_here() -> None:
    planted = {name for name, _, _ in CASES.values()} | {"tf32", "clip", "profiler"}
    assert {remedy.name for remedy in REMEDIES if remedy.likely_share < 1.0} <= planted
    assert len(FINDERS) <= len(planted)


@pytest.mark.parametrize(
    "data_ms, repeated_ms, names, input_ms",
    [(60.0, 40.0, ["same_result"], None), (60.0, 10.0, ["input", "same_result"], 50.0)],
)
def test_no_time_is_in_two_findings_about_the_batch(
    data_ms: float, repeated_ms: float, names: list[str], input_ms: float | None
) -> None:
    """A general finding gives way to the one that names the function, or keeps only the rest of the time."""
    record = record_with({"data": data_ms}, repeated_results=[repeated_result(repeated_ms, phase="data")])
    found = {finding.name: finding for finding in findings_of(record)}
    assert [*found] == names
    if input_ms is not None:
        assert found["input"].saves_s * 1e3 == pytest.approx(input_ms, rel=0.05)


@pytest.mark.parametrize(
    "facts, most_ms",
    [
        ({"calls": 4, "repeats": 3}, 4 / 3 * 12.0 * 1.25),  # kept from step to step, no call is left
        ({"calls": 6, "repeats": 3}, 12.0 * 1.25),
        # backward takes twice as long as these calls
        ({"calls": 4, "repeats": 3, "has_gradients": True}, 36.0 * 1.25),
    ],
)
def test_a_result_that_is_kept_saves_at_most_all_calls_with_their_backward(
    facts: dict[str, Any], most_ms: float
) -> None:
    times_ms = {"forward": 48.0, "backward": 48.0, "other": 0.0}
    found = found_in(record_with(times_ms, repeated_results=[repeated_result(12.0, **facts)]), "same_result")
    assert found.high_s is not None
    assert found.high_s * 1e3 == pytest.approx(most_ms, rel=0.05)


def test_nothing_is_found_where_nothing_stands_out() -> None:
    assert findings_of(record_with()) == []
    assert findings_of(record_with(settings=Settings(compiled=False, fused_optimizer=True, num_workers=4))) == []
    assert findings_of(record_with(settings=Settings(compiled=False))) == []


def test_a_share_that_is_not_worth_a_change_is_no_finding() -> None:
    """A step takes 100 ms with 2 ms of data, so 102 with 4."""
    assert WORTH > 4.0 / 102.0
    assert findings_of(record_with({"data": 4.0}, settings=Settings(num_workers=0))) == []


def test_what_is_compiled_is_not_advised_to_be() -> None:
    compiled = record_with(waterfall=waterfall_of_ms(ideal=30.0, gaps=60.0), settings=Settings(compiled=True))
    assert "compile" not in names_of(compiled)


@pytest.mark.parametrize("cause", [NO_CPU, "garbage collection of generation 2"])
def test_a_wait_that_the_loader_did_not_cause_is_not_its_own(cause: str) -> None:
    """In one of 40 steps, 400 ms of the wait for data have another cause: 10 ms of the mean step."""
    record = record_with({"data": 40.0}, settings=Settings(num_workers=0, cores=2))
    odd = OddStep(step=5, step_s=2.1, ratio=21.0, part="data", excess_s=1.0, cause=cause, cause_s=0.4)
    first = findings_of(record.model_copy(update={"odd_steps": [odd]}))[0]
    assert first.name == "input"
    assert first.saves_s == pytest.approx(record.time["data"].mean - 0.4 / 40)


def test_a_pattern_names_the_function_that_takes_most_of_a_slow_step() -> None:
    name, _, record = CASES["every fifth step"]
    plotting = python_line(9.0, what="matplotlib.draw", phase="forward", function="Model.plot")
    other_line = python_line(2.0, phase="forward")
    pattern = found_in(record.model_copy(update={"python_times": [plotting, other_line]}), name)
    assert pattern.owner == "Model.plot"
    assert "takes longer every 5 steps" in remedy_of(pattern, record)


@pytest.mark.parametrize("recorded_ms, names", [(240.0, ["pattern"]), (20.0, ["pattern", "python"])])
def test_what_makes_every_fifth_step_longer_is_not_counted_for_each_step(recorded_ms: float, names: list[str]) -> None:
    """Forward takes 20 ms, and 260 in every fifth step: 68 on average. Without the wait, it would take 20."""
    steady = record_with({"forward": 68.0}).steadiness
    fifth = StepPattern(every=5, slow=[5], extra=2.4, part="forward")
    record = record_with(
        {"forward": 68.0},
        steadiness=steady.model_copy(update={"pattern": fifth, "pattern_s": 0.048}),
        python_times=[python_line(recorded_ms, what="threading.wait", function="Net.wait")],
    )
    assert names_of(record) == names
    assert found_in(record, "pattern").saves_s == pytest.approx(0.048)


def test_a_short_phase_of_a_busy_machine_counts_with_its_cpu_time() -> None:
    """Other programs made the optimizer ten times longer, and forward twice as long: they ran for 4 and 30 ms."""
    use = {
        "forward": ThreadUse(wall_s=0.06, ran_s=0.03, no_cpu_s=0.03),
        "optimizer": ThreadUse(wall_s=0.04, ran_s=0.004, no_cpu_s=0.036),
    }
    record = record_with(
        {"forward": 60.0, "optimizer": 40.0},
        settings=Settings(fused_optimizer=False),
        thread_use=use,
        contention=busy_machine(),
    )
    share_of_optimizer = 4.0 / (4.0 + 30.0)
    expected_s = 0.75 * share_of_optimizer * record.time["step"].mean
    assert found_in(record, "optimizer").saves_s == pytest.approx(expected_s)


def test_sleep_counts_in_full_on_a_busy_machine() -> None:
    """A callback sleeps for 30 ms of each step. Other programs made the rest of the step twice as long."""
    use = {
        "forward": ThreadUse(wall_s=0.06, ran_s=0.03, no_cpu_s=0.03),
        "other": ThreadUse(wall_s=0.03, ran_s=0.0, no_cpu_s=0.0),
    }
    record = record_with(
        {"forward": 60.0, "other": 30.0},
        other_by_owner=owners_of_ms(Waits__on_train_batch_end=30.0),
        thread_use=use,
        contention=busy_machine(),
    )
    assert found_in(record, "owner").saves_s == pytest.approx(0.030, rel=0.01)


@pytest.mark.parametrize(
    "samples, example, terms_ms, high_ms",
    [
        # Of the 150 ms of a step all may not grow with the batch, but 2.5 ms of data and transfer, and the ideal time.
        (64, "for example of 128 samples", {}, 0.5 * 147.2),
        (64, "for example of 128 samples", {"ideal": 30.0}, 0.5 * 117.2),
        (2, "for example of 8 samples", {"ideal": 30.0}, 0.75 * 117.2),
    ],
)
def test_the_limit_of_a_larger_batch_holds_for_the_batch_that_is_named(
    samples: int, example: str, terms_ms: dict[str, float], high_ms: float
) -> None:
    """A larger batch also speeds up matrix products: a batch four times as large saved up to 63 %."""
    waterfall = waterfall_of_ms(**terms_ms) if terms_ms else None
    record = record_with({"optimizer": 60.0}, settings=Settings(samples_per_batch=samples), waterfall=waterfall)
    found = found_in(record, "small_batch")
    assert found.high_s == pytest.approx(high_ms * 1e-3, rel=0.01)
    assert example in remedy_of(found, record)


def test_an_optimizer_that_multiplies_matrices_is_advised_by_its_rate() -> None:
    """6 TFLOP in 60 ms."""
    name, _, record = CASES["an optimizer that multiplies matrices"]
    assert "small_batch" not in names_of(record)
    products = found_in(record, name)
    assert products.facts["flops_per_s"] == pytest.approx(6e12 / 0.060)
    assert "6 TFLOP per step at 100 TFLOP/s" in remedy_of(products, record)


def unfused(name: str, device: str = "cpu", optimizer_ms: float = 5.0) -> RunRecord:
    model = compared.MODEL.model_copy(update={"optimizers": [name]})
    settings = Settings(fused_optimizer=False)
    return record_with({"optimizer": optimizer_ms}, device=device, settings=settings, model=model)


@pytest.mark.parametrize(
    "record, certain",
    [
        (unfused("AdamW"), [True]),
        # 3.75 % of the step: enough for one word, if it is certain to help
        (unfused("SGD"), []),
        (unfused("AdamW", "cuda"), [False]),
        (unfused("SGD", optimizer_ms=20.0), [False]),
        (unfused("AdamW", optimizer_ms=2.0), []),
    ],
)
def test_a_fused_optimizer_is_certain_where_it_was_measured(record: RunRecord, certain: list[bool]) -> None:
    found = [finding for finding in findings_of(record) if finding.name == "optimizer"]
    assert [not finding.may for finding in found] == certain


def test_a_fused_optimizer_still_waits_in_the_code_of_the_program() -> None:
    """Of the 40 ms of the optimizer, a function of the program that wraps it sleeps for 30."""
    record = record_with(
        {"optimizer": 40.0},
        settings=Settings(fused_optimizer=False),
        python_times=[python_line(30.0, "time.sleep", phase="optimizer")],
        thread_use=thread_use_of(asleep_ms=30.0, wall_ms=40.0, phase="optimizer"),
    )
    assert found_in(record, "optimizer").saves_s == pytest.approx(0.75 * 10e-3, rel=0.05)


def test_a_fused_optimizer_still_moves_its_bytes() -> None:
    """Of 40 ms at least 25 are for the bytes; on a busy machine no rate is known well enough to tell."""
    record = record_with(
        {"optimizer": 40.0},
        device="cuda",
        settings=Settings(fused_optimizer=False),
        floors={"optimizer": Floor(flops={}, bytes=10, seconds=0.025)},
    )
    assert found_in(record, "optimizer").saves_s == pytest.approx(0.040 - 0.025, abs=0.5e-3)
    shared = record.model_copy(update={"contention": busy_machine()})
    assert found_in(shared, "optimizer").saves_s > 35e-3


def test_on_a_gpu_an_optimizer_that_goes_from_weight_to_weight_is_advised_foreach() -> None:
    settings = Settings(weight_by_weight=True)
    record = record_with({"optimizer": 40.0}, device="cuda", settings=settings)
    assert "foreach=True" in remedy_of(findings_of(record)[0], record)
    assert "optimizer" not in names_of(record_with({"optimizer": 40.0}, device="cpu", settings=settings))


@pytest.mark.parametrize(
    "samples, free_share, saved_share",
    [(1, 0.2, 1 / 2), (1, 0.75, 3 / 4), (1, None, 7 / 8), (8, None, 1 / 2), (None, None, 1 / 2)],
)
def test_memory_bounds_how_far_a_batch_may_grow(
    samples: int | None, free_share: float | None, saved_share: float
) -> None:
    """A batch twice as large saves half of the 60.5 ms that do not grow with it, and only may help."""
    settings = Settings(samples_per_batch=samples, memory_free_share=free_share)
    (found,) = findings_of(record_with({"optimizer": 60.0}, settings=settings))
    assert found.saves_s == pytest.approx(saved_share * 60.5e-3, rel=0.02)
    assert found.may == (saved_share == 1 / 2)


@pytest.mark.parametrize(
    "case, has_to_be_tried",
    [
        ("a batch of two, that may be one of eight", False),
        ("an optimizer that goes from weight to weight", False),
        ("gaps and traffic", True),
        ("float32 products", True),
        ("a batch that is too small", True),
        ("an optimizer with many kernels", True),
    ],
)
def test_what_has_to_be_tried_is_said_so(case: str, has_to_be_tried: bool) -> None:
    _, _, record = CASES[case]
    assert findings_of(record)[0].may == has_to_be_tried


@pytest.mark.parametrize("times, may", [(1, True), (4, False)])
def test_a_validation_that_was_seen_once_may_be_rare(times: int, may: bool) -> None:
    """A program validates at step 0 and then every 1,000 steps: that is not surely 16 % of its time."""
    record = record_with(**outside_steps("validation", 3.0, times, per_step_s=0.06))
    assert found_in(record, "validation").may == may


@pytest.mark.parametrize("steps, may", [([20], True), ([10, 20, 30, 40], False)])
def test_garbage_that_was_collected_once_may_be_rare(steps: list[int], may: bool) -> None:
    """Each collection takes 0.4 s; of 40 steps that is 10 ms each, if there was one."""
    odd_steps = [
        OddStep(
            step=step, step_s=0.5, ratio=5.0, part="other", excess_s=0.4,
            cause="garbage collection of generation 2", cause_s=0.4,
        )
        for step in steps
    ]  # fmt: skip
    record = record_with(odd_steps=odd_steps, mean_counters=StepCounters(gc_s=0.01 * len(steps)))
    assert found_in(record, "garbage").may == may


def test_anomaly_detection_saves_what_its_own_code_takes() -> None:
    """It records stacks for 10 ms of forward, and searches gradients for NaN for 14 ms of backward."""
    searches = Contributor(module=None, what="backward: aten::isnan", count=92.0, seconds=0.014)
    record = record_with(
        waterfall=waterfall_of_ms(Term(name="bandwidth", seconds=0.014, contributors=[searches]), ideal=60.0),
        python_times=[python_line(6.0, "traceback"), python_line(4.0, "posix.stat")],
        settings=Settings(anomalies=True),
    )
    found = found_in(record, "anomalies")
    assert found.saves_s == pytest.approx(0.024)
    assert 0.030 <= found.high_s <= 0.036  # the gain of a real program with these times was 30 ms


def loop_call(line: int, ms: float, function: str = "", exchange_ms: float = 0.0, forward: Any = None) -> OuterCall:
    """A call that a line of the program's own loop makes."""
    place = ("agent.py", 12) if function else ("train.py", line)
    return OuterCall(
        outer_function=function,
        file=place[0],
        line=place[1],
        seconds=ms * 1e-3,
        exchange_s=exchange_ms * 1e-3,
        forward=forward,
        loop_file="train.py",
        loop_line=line,
    )


@pytest.mark.parametrize(
    "calls, text, saves_ms",
    [
        # the environments in other processes, beside the model that chooses the actions
        (
            [loop_call(7, 17.0, exchange_ms=16.0), loop_call(5, 4.0, "Agent.act", forward="acting")],
            (
                "Wait less for other processes or threads after optimizer.step(), where line 5 runs the model without "
                "gradients (acting, generation or evaluation): train.py:7 takes most of that time to send them data "
            ),
            17.0,
        ),
        # a line calls two functions, and torch or NumPy
        (
            [loop_call(7, 12.0, "save"), loop_call(7, 2.0, "log"), loop_call(7, 4.0), loop_call(9, 5.0)],
            (
                "Do less work after optimizer.step(), or do it less often: train.py:7 takes most of that time, "
                "mostly in save (agent.py:12)."
            ),
            18.0,
        ),
        # of many lines, one with 8 of 30 ms
        (
            [*[loop_call(line, 2.0) for line in range(20, 30)], loop_call(9, 8.0)],
            "Do less work after optimizer.step(), or do it less often: train.py:9 takes 27% of that time.",
            8.0,
        ),
        # many lines alike
        (
            [loop_call(line, 3.0) for line in range(20, 30)],
            "Do less work after optimizer.step(), or do it less often.",
            30.0,
        ),
        # a function that several lines call
        (
            [loop_call(line, 6.0, "count") for line in range(20, 24)],
            "Do less work after optimizer.step(), or do it less often: most of the time is spent in count ",
            24.0,
        ),
        # a frozen encoder of a class of torch
        (
            [loop_call(7, 20.0, forward="untrained"), loop_call(9, 8.0)],
            "Call the model (train.py:7) less often: it is not trained.",
            20.0,
        ),
        # the same without no_grad(): its backward pass would take twice as long, which is more than all of backward
        (
            [loop_call(7, 20.0, forward="unfrozen"), loop_call(9, 8.0)],
            "Call the model (train.py:7) under torch.no_grad(), or set requires_grad_(False) for its weights",
            34.93,
        ),
        # a target network, which is needed
        (
            [loop_call(7, 20.0, forward="following"), loop_call(9, 8.0)],
            "Do less work after optimizer.step(), or do it less often: train.py:9 takes most of that time.",
            8.0,
        ),
    ],
)
def test_the_line_of_the_loop_with_most_of_a_gap_is_named(calls: list[OuterCall], text: str, saves_ms: float) -> None:
    gaps = gaps_of_ms({"after optimizer.step()": 30.0})
    record = record_with({"other": 30.0}, other_by_owner=gaps, outer_calls=calls, loop="own")
    found = found_in(record, "owner")
    assert remedy_of(found, record).startswith(text)
    # both depend on what else is there: the work of other processes, and whether data repeats
    assert found.may == text.startswith(
        ("Wait less for other processes or threads", "Call the model (train.py:7) less")
    )
    assert found.saves_s == pytest.approx(saves_ms * 1e-3, rel=1e-3)


@pytest.mark.parametrize(
    "torch_ms, calls, python_ms, is_told",
    [
        (9.0, 784, 12.0, True),
        (2.0, 150, 19.0, False),  # few calls
        (29.0, 300, 1.0, False),  # each takes 97 us: no overhead
        (3.0, 784, 4.0, False),  # most of the time goes into what the function calls
    ],
)
def test_a_function_that_computes_number_by_number_is_told_so(
    torch_ms: float, calls: int, python_ms: float, is_told: bool
) -> None:
    rows = [
        python_line(torch_ms, what="torch", phase="other", calls=calls, function="advantages_of"),
        python_line(python_ms, phase="other", calls=0, function="advantages_of"),
    ]
    of_function = OuterCall(
        outer_function="advantages_of", file=rows[0].file, line=45, seconds=0.030, loop_file="train.py", loop_line=86
    )
    gaps = gaps_of_ms({"between optimizer.step() and the next step": 40.0})
    record = record_with({"other": 40.0}, other_by_owner=gaps, outer_calls=[of_function], python_times=rows, loop="own")
    advice = remedy_of(found_in(record, "owner"), record)
    told = "Compute whole tensors at once in advantages_of (net.py:45), or convert them to lists or NumPy arrays first"
    assert advice.startswith(told) == is_told
    assert "advantages_of" in advice


@pytest.mark.parametrize(
    "function, place", [("Features.forward", "in Features.forward (agent.py:12)"), ("", "that train.py:7 calls")]
)
def test_the_module_that_passes_gradients_on_is_named_with_its_line(function: str, place: str) -> None:
    calls = [loop_call(7, 12.0, function, forward="passing_unfrozen"), loop_call(9, 3.0)]
    record = record_with({"other": 30.0, "backward": 40.0}, outer_calls=calls, loop="own")
    found = found_in(record, "unused_gradients")
    assert remedy_of(found, record).startswith(f"Freeze the weights of the module {place} by requires_grad_(False)")
    assert (found.saves_s, found.high_s) == pytest.approx((0.015, 0.024))


@pytest.mark.parametrize(
    "ran_s, is_made_in_thread",
    [(0.039, True), (0.004, False)],  # of 40 ms: it computes, or it waits for workers or another thread
)
def test_the_innermost_generator_with_half_of_the_time_is_named_if_there_is_no_loader(
    ran_s: float, is_made_in_thread: bool
) -> None:
    """No line takes half of the 40 ms; of the generators, ``with_features`` is the innermost that does."""
    calls = [
        OuterCall(outer_function="batches", file="a.py", line=9, seconds=0.040),
        OuterCall(outer_function="with_features", file="a.py", line=24, seconds=0.026),
        OuterCall(outer_function="read", file="a.py", line=77, seconds=0.009),
    ]
    use = ThreadUse(wall_s=0.04, ran_s=ran_s, no_cpu_s=0.0)
    settings = Settings(num_workers=None)
    record = record_with({"data": 40.0}, data_calls=calls, settings=settings, thread_use={"data": use})
    advice = remedy_of(found_in(record, "input"), record)
    assert ("makes each batch itself" in advice) == is_made_in_thread
    assert ("IterableDataset" in advice) == is_made_in_thread
    assert advice.startswith("Prepare the data before training, or cache what does not change from pass to pass: ")
    assert "(most of it under with_features (a.py:24))" in advice


def test_a_function_of_a_gap_saves_its_own_time() -> None:
    """The loop spends 30 ms after the optimizer: 20 in ``push``, 6 in ``learn``, the rest in its own lines."""
    calls = [
        OuterCall(outer_function="Memory.push", file="a.py", line=24, seconds=0.020),
        OuterCall(outer_function="learn", file="a.py", line=77, seconds=0.006),
    ]
    gaps = gaps_of_ms({"after optimizer": 30.0})
    record = record_with({"other": 30.0}, other_by_owner=gaps, outer_calls=calls)
    found = found_in(record, "owner")
    assert (found.what, found.line) == ("Memory.push", 24)
    assert found.saves_s == pytest.approx(0.020)


@pytest.mark.parametrize("timed_ms, found", [(0.5, ["KeepBest.on_train_batch_end"]), (9.0, [])])
def test_a_function_that_no_timed_step_called_is_found(timed_ms: float, found: list[str]) -> None:
    """A callback copies the weights in three of four steps, for 12 ms; by chance in none of the three timed ones."""
    call = OuterCall(outer_function="KeepBest.on_train_batch_end", file="a.py", line=26, seconds=0.012)
    record = record_with(
        {"other": 9.0}, other_by_owner=owners_of_ms(Lightning__loop=timed_ms), outer_calls=[call], python_times=[]
    )
    findings = [finding for finding in findings_of(record) if finding.name == "owner"]
    assert [finding.owner for finding in findings] == found
    for finding in findings:
        assert finding.saves_s == pytest.approx(0.0085, rel=0.05)
        assert "KeepBest.on_train_batch_end (a.py:26)" in remedy_of(finding, record)


def test_without_a_main_function_the_costliest_line_is_named() -> None:
    """``push`` moves a list in one line, 10 of 26 ms; ``learn`` takes 12 ms in many lines."""
    lines = [python_line(10.0, phase="other", function="Memory.push")]
    for number in range(12):
        row = python_line(1.0, "torch", phase="other", function="learn")
        lines.append(row.model_copy(update={"line": 80 + number}))
    record = record_with(
        {"other": 26.0}, other_by_owner=owners_of_ms(Agent__on_train_batch_end=26.0), python_times=lines
    )
    found = found_in(record, "owner")
    assert (found.what, found.line) == ("Memory.push", 12)
    assert "the costliest line is in Memory.push" in remedy_of(found, record)


@pytest.mark.parametrize("noise", [0.01, 0.5])
def test_the_limit_of_a_measured_wait_is_close_to_its_mean(noise: float) -> None:
    """The remedy of a slow loader gained at most 9 % more than the mean wait, in 28 programs of others.

    If steps differ, the mean wait is uncertain, but not its share of the step.
    """
    record = record_with({"data": 60.0}, settings=Settings(num_workers=0, cores=2), noise=noise)
    found = found_in(record, "input")
    assert 1.09 <= found.high_s / found.saves_s <= 1.13


def test_what_has_to_be_tried_stands_behind_facts_of_like_size() -> None:
    """A validation takes 14 ms per step; a fused optimizer may save three quarters of 29."""
    validation = time_between_steps("validation", 14.0 * 0.04, 8)
    record = record_with({"optimizer": 29.0}, settings=Settings(fused_optimizer=False), **validation)
    first, second = findings_of(record)[:2]
    assert (first.name, first.may) == ("validation", False)
    assert (second.name, second.may) == ("optimizer", True)


def test_a_line_is_python_where_the_trace_has_gaps() -> None:
    """``x * y`` in a line that calls nothing: of the second step the trace has operators in all but 2 ms."""
    in_gaps = record_with(
        waterfall=waterfall_of_ms(ideal=50.0, gaps=40.0),
        python_times=[python_line(38.0)],
        settings=Settings(compiled=False),
    )
    assert names_of(in_gaps) == ["python"]
    in_operators = record_with(
        waterfall=waterfall_of_ms(ideal=95.0, gaps=2.0),
        python_times=[python_line(30.0)],
        settings=Settings(compiled=True),
    )
    assert "python" not in names_of(in_operators)


@pytest.mark.parametrize("calls, owners", [(8000.0, ["sums"]), (10.0, [])])
def test_a_line_with_many_small_operators_is_python(calls: float, owners: list[str]) -> None:
    """``total = total + x`` 8,000 times: the operators of the trace take longer to call than to execute."""
    additions = Contributor(module=None, what="forward: aten::add", count=calls, seconds=0.050)
    waterfall = waterfall_of_ms(Term(name="beyond_bandwidth", seconds=0.050, contributors=[additions]), ideal=40.0)
    sums = python_line(30.0, function="sums")
    record = record_with({"forward": 80.0}, waterfall=waterfall, python_times=[sums])
    assert [finding.owner for finding in findings_of(record)] == owners


@pytest.mark.parametrize("detects_anomalies, name", [(True, "anomalies"), (False, "python")])
def test_calls_that_note_the_stack_of_each_operator_are_those_of_anomaly_detection(
    detects_anomalies: bool, name: str
) -> None:
    """They look like those of the line in which the operators are called."""
    stacks = python_line(40.0, "traceback", calls=40_000, function="Coupling.forward")
    settings = Settings(anomalies=detects_anomalies)
    assert names_of(record_with({"forward": 80.0}, python_times=[stacks], settings=settings)) == [name]


@pytest.mark.parametrize("recomputed, most_s", [(100, 0.040), (50, 0.026)])
def test_recomputation_takes_at_least_the_share_of_forward_that_it_repeats(recomputed: int, most_s: float) -> None:
    """Of a forward pass of 40 ms, all or a half is computed again; its matmuls would take 5 ms at their peak.

    The half without the logits takes more than half of the time.
    """
    flops = Flops(forward=100, backward=200, recomputation=recomputed)
    record = record_with(
        {"forward": 40.0, "backward": 100.0},
        waterfall=waterfall_of_ms(ideal=70.0, recomputation=5.0),
        settings=Settings(checkpointing=True, memory_free_share=0.5),
        utilisation=made_utilisation(flops=flops),
    )
    saves_s = {finding.name: finding.saves_s for finding in findings_of(record)}
    assert saves_s["recomputation"] == pytest.approx(most_s, rel=0.05)


@pytest.mark.parametrize("ms, workers, raised", [(0.9, 0, False), (0.9, 1, False), (1.1, 0, True), (1.1, 1, True)])
def test_no_worker_is_advised_where_it_takes_as_long_to_hand_a_batch_over(ms: float, workers: int, raised: bool):
    finding = Finding(name="input", saves_s=ms * 1e-3, share=0.5, phase="data")
    record = record_with(settings=Settings(num_workers=workers, cores=4))
    assert (f"num_workers from {workers} to 2" in remedy_of(finding, record)) == raised


def test_one_cause_is_one_finding() -> None:
    """What is measured between steps, and in a callback's hook, is the same checkpoint."""
    record = record_with(
        {"other": 50.0},
        other_by_owner=owners_of_ms(ModelCheckpoint__on_train_batch_end=50.0),
        **time_between_steps("checkpoint", 2.0, 20),
    )
    assert names_of(record) == ["checkpoint"]


def test_logging_in_the_step_and_after_it_is_one_finding() -> None:
    record = record_with(
        {"other": 30.0},
        other_by_owner=owners_of_ms(CSVLogger__log_metrics=30.0),
        python_times=[python_line(20.0, "Lightning", calls=300)],
    )
    assert found_in(record, "logging").saves_s == pytest.approx(0.030 + 0.020)


def record_with_odd_step(cause: str | None) -> RunRecord:
    """One of 40 steps took 2 s longer."""
    odd = OddStep(step=5, step_s=2.1, ratio=21.0, part="forward", excess_s=2.0, cause=cause, cause_s=cause and 2.0)
    steadiness = record_with().steadiness.model_copy(update={"odd_s": 2.0 / 40})
    return record_with(odd_steps=[odd], steadiness=steadiness)


@pytest.mark.parametrize(
    "cause", ["garbage collection of generation 2", "recompilation of f", "a checkpoint", "waiting for a CPU"]
)
def test_an_odd_step_with_a_cause_is_no_finding_of_its_own(cause: str) -> None:
    """Garbage, recompilation and checkpoints have findings; a lost CPU is nobody's fault."""
    assert findings_of(record_with_odd_step(cause)) == []


def test_an_odd_step_of_unknown_cause_may_be_worth_a_look() -> None:
    (found,) = findings_of(record_with_odd_step(cause=None))
    assert (found.name, found.may) == ("odd_steps", True)
    assert "step 5" in remedy_of(found, record_with())


def findings_on_a_busy_machine(case: str, **facts: Any) -> list[Finding]:
    _, _, record = CASES[case]
    return findings_of(record.model_copy(update={"contention": busy_machine(), **facts}))


def test_a_busy_machine_stretches_what_compiling_would_save() -> None:
    """Compiling is of gaps and memory traffic."""
    assert findings_on_a_busy_machine("gaps and traffic") == []


def test_a_busy_machine_bounds_what_a_lower_precision_saves() -> None:
    """A matmul takes no less than its 50 ms at the peak; on a busy machine the 30 ms beyond do not count."""
    (found,) = findings_on_a_busy_machine("float32 products")
    assert (found.name, found.may) == ("precision", True)
    assert found.saves_s == pytest.approx(50e-3, rel=0.05)


def test_a_busy_machine_does_not_change_what_a_larger_batch_saves() -> None:
    (found,) = findings_on_a_busy_machine(
        "a batch that is too small",
        waterfall=waterfall_of_ms(gaps=30.0),
        other_by_owner=owners_of_ms(Lightning__loop=9.0),
    )
    _, saves_ms, _ = CASES["a batch that is too small"]
    assert found.saves_s == pytest.approx(saves_ms * 1e-3, rel=0.05)


def test_a_busy_machine_does_not_distort_the_data_flow() -> None:
    """The loader surely takes 14 ms; of the step's computation 37.5 ms may be needless."""
    record = record_with(
        {"data": 14.0, "forward": 50.0, "backward": 50.0}, contention=busy_machine(), **needless("side_work")
    )
    assert names_of(record)[:2] == ["side_work", "input"]


@pytest.mark.parametrize(
    "case",
    [
        "a callback", "a sleep", "validation", "the loader", "many small operators",
        "checkpoints", "compiling again", "garbage",
    ],
)  # fmt: skip
def test_on_a_busy_machine_what_it_cannot_fake_is_certain(case: str) -> None:
    name, _, _ = CASES[case]
    empty_queue = LoaderFacts(workers=2, ahead=4, ready_before=0, ready_after=0)
    first = findings_on_a_busy_machine(case, loader=empty_queue)[0]
    assert (first.name, first.may) == (name, False)


def with_means(record: RunRecord, means_s: dict[str, float], **facts: Any) -> RunRecord:
    """On both clocks some parts take on average as long as given, and not as in the fastest steps."""
    times = dict(record.time)
    for part, mean_s in means_s.items():
        times[part] = times[part].model_copy(update={"mean": mean_s})
    return record.model_copy(update={"time": times, "host_time": times, **facts})


def test_on_a_busy_machine_garbage_of_the_mean_step_counts() -> None:
    """Collections of 1 s in one step of seven were 6 ms, as the fastest steps have none."""
    record = record_with(noise=0.0)
    means_s = {part: 1.5 * time.mean for part, time in record.time.items()}
    busy = with_means(record, means_s, contention=busy_machine(), mean_counters=StepCounters(gc_s=0.14))
    first = findings_of(busy)[0]
    assert first.name == "garbage"
    assert first.saves_s == pytest.approx(0.14)
    assert first.share == pytest.approx(0.14 / 0.15, rel=0.01)


def test_a_callbacks_share_is_the_same_if_other_programs_double_each_step() -> None:
    """20 of the 118 ms that a step takes alone."""
    record = record_with({"other": 20.0}, noise=0.0, other_by_owner=owners_of_ms(Ema__on_train_batch_end=20.0))
    doubled = {
        part: time.model_copy(update={"mean": 2.0 * time.mean, "p5": time.mean}) for part, time in record.time.items()
    }
    (found,) = findings_of(
        record.model_copy(update={"time": doubled, "host_time": doubled, "contention": busy_machine()})
    )
    assert found.saves_s == pytest.approx(2 * 20e-3)
    assert found.share == pytest.approx(20.0 / 118.0, rel=0.01)


def test_a_transfer_that_waited_for_a_cpu_once_is_no_finding_on_a_busy_machine() -> None:
    """A transfer of 0.04 ms took 4 ms in one step of 24, in which another program had the CPU."""
    record = record_with(
        {"forward": 1.0, "backward": 0.5, "data": 0.1, "optimizer": 0.1, "other": 0.2, "transfer": 0.04}
    )
    assert "transfer" in names_of(with_means(record, {"transfer": 0.21e-3}))
    assert "transfer" not in names_of(with_means(record, {"transfer": 0.21e-3}, contention=busy_machine()))


@pytest.mark.parametrize(
    "data_ms, workers, awake, wanted",
    [
        (280.0, 0, None, 3),  # the step takes 98 ms beside it
        (900.0, 0, None, 8),  # four times as many as cores at most
        (300.0, 2, 0.1, 8),
        (300.0, 2, 0.9, 2),  # they compute: as many as cores
        (300.0, 2, None, 2),
    ],
)
def test_a_waiting_loader_gets_enough_workers(data_ms: float, workers: int, awake: float | None, wanted: int) -> None:
    record = record_with(
        {"data": data_ms},
        settings=Settings(num_workers=workers, cores=2),
        loader=LoaderFacts(workers=workers, ahead=4, ready_before=0, ready_after=0, awake_share=awake),
        thread_use=thread_use_of(asleep_ms=data_ms, wall_ms=data_ms, phase="data"),
    )
    found = found_in(record, "input")
    assert found.facts["workers"] == wanted
    text = remedy_of(found, record)
    assert (f"num_workers from {workers} to {wanted}" in text) == (wanted > workers)


def test_the_costliest_function_of_the_workers_is_named() -> None:
    """The training thread only waits; a worker spends 20 of 25 ms of a batch in ``smooth_field``."""
    worker_times = [
        python_line(20.0, "scipy", phase="data", function="smooth_field"),
        python_line(5.0, phase="data", function="Scans.__getitem__"),
    ]
    waits = python_line(1.0, "torch", phase="data", function="Fit.batch")
    record = record_with(
        {"data": 15.0},
        python_times=[waits],
        worker_times=worker_times,
        settings=Settings(num_workers=1, cores=4),
    )
    found = found_in(record, "input")
    assert found.owner == "smooth_field"
    assert "smooth_field (net.py:12) takes most of that time" in remedy_of(found, record)


@pytest.mark.parametrize(
    "ready, use",
    [
        # when the steps began, one of two batches was ready by chance
        (1, thread_use_of(asleep_ms=7.0, wall_ms=10.0, phase="data")),
        # of 5 ms in which the thread waits for a batch, another program has its CPU for 3.5, and it runs for 1
        (0, {"data": ThreadUse(wall_s=0.005, ran_s=0.001, no_cpu_s=0.0035)}),
    ],
)
def test_a_worker_that_computes_all_the_time_is_too_slow(ready: int, use: dict[str, ThreadUse]) -> None:
    record = record_with(
        {"data": 10.0},
        loader=LoaderFacts(workers=1, ahead=2, ready_before=ready, ready_after=2, awake_share=1.0),
        thread_use=use,
        settings=Settings(num_workers=1, cores=4),
    )
    assert "num_workers from 1 to" in remedy_of(found_in(record, "input"), record)


def test_a_full_queue_needs_no_more_workers() -> None:
    record = record_with(
        {"data": 60.0},
        settings=Settings(num_workers=4, cores=2),
        loader=LoaderFacts(workers=4, ahead=8, ready_before=6, ready_after=8, awake_share=0.08),
        thread_use=thread_use_of(asleep_ms=50.0, wall_ms=60.0, phase="data"),
    )
    assert "num_workers=0" in remedy_of(found_in(record, "input"), record)


def test_workers_that_empty_their_queue_are_too_slow_though_half_of_it_is_left() -> None:
    """In 10 steps of 100 ms the workers made 6 batches, and the queue went from 15 to 11 of 16."""
    record = record_with(
        {"data": 10.0},
        settings=Settings(num_workers=2, cores=4),
        loader=LoaderFacts(workers=2, ahead=16, ready_before=15, ready_after=11, awake_share=0.1),
        lasting_step_s=0.167,
    )
    assert "num_workers from 2 to" in remedy_of(found_in(record, "input"), record)


def test_workers_that_take_longer_to_load_than_to_send_stay() -> None:
    """Each of two workers computes in a tenth of the steps of 110 ms, so loading takes 22 ms; receiving takes 10."""
    record = record_with(
        {"data": 12.0},
        settings=Settings(num_workers=2, cores=4),
        loader=LoaderFacts(workers=2, ahead=4, ready_before=4, ready_after=4, awake_share=0.1),
    )
    found = found_in(record, "input")
    assert found.may
    assert remedy_of(found, record).startswith("Pass fewer, larger tensors per batch: ")


@pytest.mark.parametrize("workers, saves_ms", [(1, 10.0), (0, 60.0)])
def test_a_wait_for_a_cpu_is_no_wait_for_workers(workers: int, saves_ms: float) -> None:
    """On a busy machine the thread had no CPU for 50 of 60 ms. Without workers it would have made the batch itself."""
    use = {"data": ThreadUse(wall_s=0.06, ran_s=0.005, no_cpu_s=0.05)}
    record = record_with(
        {"data": 60.0}, settings=Settings(num_workers=workers, cores=2), thread_use=use, contention=busy_machine()
    )
    assert found_in(record, "input").saves_s == pytest.approx(saves_ms / 1e3, rel=0.01)


def test_python_of_an_optimizer_counts_once() -> None:
    """Its lines of ``p - x * y`` are operators: the trace has no gap in the phase."""
    lines = [
        python_line(40.0, phase="optimizer", function="MyAdam.step"),
        python_line(8.0, "torch", "optimizer", 320, "MyAdam.step"),
    ]
    record = record_with(
        {"optimizer": 60.0},
        waterfall=waterfall_of_ms(ideal=10.0, beyond_bandwidth=110.0),
        python_times=lines,
        settings=Settings(samples_per_batch=64, compiled=True),
    )
    first = findings_of(record)[0]
    assert (first.name, first.owner) == ("python", "MyAdam.step")
    assert first.saves_s == pytest.approx(0.040 + 0.008)
    assert "fused=True" in remedy_of(first, record)


def test_products_of_an_optimizer_are_not_python() -> None:
    """``x = a @ b`` of Muon is a line of Python that calls nothing that can be followed: of 70 ms 60 are products."""
    record = record_with(
        {"optimizer": 70.0},
        waterfall=waterfall_of_ms(ideal=5.0, optimizer_products=60.0),
        floors={"optimizer": Floor(flops={"bfloat16": 6 * 10**12})},
        python_times=[python_line(66.0, phase="optimizer", function="Muon.step")],
    )
    assert found_in(record, "optimizer_products").saves_s == pytest.approx(0.060)
    assert found_in(record, "python").saves_s == pytest.approx(0.070 - 0.060, rel=0.05)


def test_python_of_a_hook_counts_once() -> None:
    """20 ms of its own lines, and 10 of the operators that they call, which may be saved as well."""
    lines = [python_line(20.0, phase="backward", function="look"), python_line(10.0, "torch", "backward", 100, "look")]
    found = found_in(record_with({"backward": 60.0}, python_times=lines), "python")
    assert found.saves_s == pytest.approx(0.020)
    assert found.high_s >= 0.020 + 0.010


def test_what_following_missed_of_a_function_counts_by_the_gaps_of_untraced_steps() -> None:
    """Following ended after so many calls: it has 20 ms of a function that takes 70, which are gaps of the trace."""
    logging = python_line(20.0, "Lightning", calls=44_000)
    waterfall = waterfall_of_ms(Term(name="gaps", seconds=0.070, phases={"forward": 0.070}), ideal=30.0)
    (found,) = findings_of(record_with({"forward": 80.0}, waterfall=waterfall, python_times=[logging]))
    assert found.name == "logging"
    assert found.saves_s == pytest.approx(0.070)
    other = python_line(20.0, "library", function="Net.step")  # then half of what was followed is not its own
    first = findings_of(record_with({"forward": 80.0}, waterfall=waterfall, python_times=[logging, other]))[0]
    assert first.saves_s == pytest.approx(0.020)


def test_products_of_a_closure_are_not_those_of_its_optimizer() -> None:
    record = CASES["an optimizer that multiplies matrices"][2]
    model = compared.MODEL.model_copy(update={"optimizers": ["LBFGS"]})
    assert "optimizer_products" in names_of(record)
    assert "optimizer_products" not in names_of(record.model_copy(update={"model": model}))


@pytest.mark.parametrize("free_share, first", [(0.9, "recomputation"), (None, "padding")])
def test_recomputation_comes_before_padding_of_the_same_size_if_memory_is_free(
    free_share: float | None, first: str
) -> None:
    """Padding may remain in batches of similar lengths; without recomputation all of its time is saved."""
    record = record_with(
        HALVES,
        throughput=padded(unused=0.0, occupancy=0.7, squared_lengths_per_step=9),
        waterfall=waterfall_of_ms(ideal=85.0, recomputation=11.0),
        settings=Settings(checkpointing=True, memory_free_share=free_share),
    )
    found = [name for name in names_of(record) if name in ("recomputation", "padding")]
    assert found[0] == first
    advice = remedy_of(found_in(record, "recomputation"), record)
    assert ("if there is enough memory" in advice) == (free_share is None)


def test_a_slow_loader_without_a_costly_function_is_named_by_its_items() -> None:
    rows = [
        python_line(15.0, phase="data", function=function)
        for function in ("crop", "flip", "Images.__getitem__", "blur")
    ]
    record = record_with({"data": 60.0}, settings=Settings(num_workers=0, cores=2), python_times=rows)
    assert found_in(record, "input").owner == "Images.__getitem__"


def waiting_for_data(asleep_ms: float | None = None, **settings: Any) -> RunRecord:
    """Of the wait for a batch the thread sleeps so long, and works for the rest."""
    use = {} if asleep_ms is None else {"thread_use": thread_use_of(asleep_ms, wall_ms=60.0, phase="data")}
    return record_with({"data": 60.0}, settings=Settings(**settings), **use)


def loading_items(what: str, samples: int, workers: int = 0, cores: int = 2, **more: Any) -> RunRecord:
    """A batch takes 60 ms, 55 of them in ``Rows.__getitem__``: most of that is ``what``."""
    rows = [
        python_line(40.0, what, phase="data", function="Rows.__getitem__"),
        python_line(15.0, phase="data", function="Rows.__getitem__"),
    ]
    settings = Settings(num_workers=workers, cores=cores, samples_per_batch=samples)
    times = {"worker_times": rows} if workers else {"python_times": rows}
    return record_with({"data": 60.0}, settings=settings, **times, **more)


@pytest.mark.parametrize(
    "record, words",
    [
        # 60 µs a sample: it is only indexed
        (loading_items("python", 1000), ["Index all 1,000 samples", "or raise num_workers from 0 to"]),
        (loading_items("python", 1000, cores=16), ["Index all 1,000 samples", "or raise num_workers from 0 to"]),
        (loading_items("omegaconf", 1000), ["Index all 1,000 samples", "73% of it in omegaconf"]),
        # 300 µs a sample
        (loading_items("torch", 200, cores=1), ["Index all 200 samples", "or raise num_workers from 0 to"]),
        (loading_items("torch", 200, cores=16), ["Raise num_workers from 0 to"]),
        (loading_items("torch", 200, workers=2), ["Index all 200 samples", "or prepare"]),
        (loading_items("PIL", 200, cores=1), ["Raise num_workers from 0 to", "73% of it in PIL"]),
        (loading_items(EXCHANGE, 200, workers=2), ["Make Rows.__getitem__ (net.py:12) faster, or prepare"]),
        (loading_items("zlib.decompress", 200, cores=1), ["Raise num_workers from 0 to"]),
        (loading_items("zlib.decompress", 200, workers=2), ["Make Rows.__getitem__ (net.py:12) faster, or prepare"]),
        # 6 ms a sample
        (loading_items("python", 10), ["Raise num_workers from 0 to"]),
        (loading_items("PIL", 10, workers=2), ["Make Rows.__getitem__ (net.py:12) faster (73% of it in PIL)"]),
        # that mostly sleep: for a disk
        (
            loading_items("python", 1000, thread_use=thread_use_of(asleep_ms=55.0, wall_ms=60.0, phase="data")),
            ["Raise num_workers from 0 to"],
        ),
    ],
)
def test_samples_that_are_only_indexed_are_indexed_together(record: RunRecord, words: list[str]) -> None:
    found = found_in(record, "input")
    advice = remedy_of(found, record)
    assert advice.startswith(words[0])
    assert all(word in advice for word in words)
    assert ("Index all" in advice) == ("Index all" in words[0])


def validating(loop: str = "Trainer", **facts: Any) -> RunRecord:
    """``facts`` are of the settings, or of the activity."""
    settings = {name: fact for name, fact in facts.items() if name in Settings.model_fields}
    activity = {name: fact for name, fact in facts.items() if name not in settings}
    return record_with(
        loop=loop, settings=Settings(**settings), **outside_steps("validation", 2.0, 4, 0.05, **activity)
    )


EVALUATION = {"file": "net.py", "line": 9, "function": "evaluate", "caller": "train.py:60"}


def slow_every_fourth(part: str, other_ms: float) -> RunRecord:
    """``part`` takes longer in each fourth step; in the others it takes ``other_ms``."""
    record = record_with({part: 15.0})
    pattern = StepPattern(every=4, slow=[4], extra=0.6, part=part)
    steadiness = record.steadiness.model_copy(update={"pattern": pattern, "pattern_s": 0.012})
    summary = record.host_time[part].model_copy(update={"min": other_ms * 1e-3})
    return record.model_copy(update={"steadiness": steadiness, "host_time": {**record.host_time, part: summary}})


@pytest.mark.parametrize(
    "part, other_ms, is_found",
    [("optimizer", 0.0, False), ("clip", 0.0, False), ("optimizer", 5.0, True), ("forward", 0.0, True)],
)
def test_steps_that_only_accumulate_gradients_are_no_pattern(part: str, other_ms: float, is_found: bool) -> None:
    assert ("pattern" in names_of(slow_every_fourth(part, other_ms))) == is_found


ADVICE = {
    "clipping after each of four batches is needed once":
        (clipping(12.0, clipped_batches=160, early_clips=120), "after each of 4 batches", True),
    "slow clipping is fused":
        (clipping(30.0, clipped_batches=40), "foreach operators", True),
    "a batch of many small tensors needs fewer of them":
        (record_with({"transfer": 30.0}, settings=Settings(tensors_per_batch=1700)), "1,700 tensors", True),
    "a validation that records a graph needs none":
        (validating("own", validates_with_gradients=True), "torch.no_grad()", True),
    "what that costs is stated":
        (validating("own", validates_with_gradients=True), "at most half of its time", True),
    "the loop's line that validates is named":
        (validating("own", **EVALUATION), "in evaluate (net.py:9), called in train.py:60.", True),
    "unless it is the costliest line itself":
        (validating("own", **{**EVALUATION, "file": "train.py", "line": 60}), "called in", False),
    "small batches of a validation may be larger":
        (validating(validation_batch_size=1, samples_per_batch=32), "larger batches", True),
    "others may not":
        (validating(validation_batch_size=16, samples_per_batch=32), "larger batches", False),
    "rows of tensors are fetched together":
        (waiting_for_data(num_workers=0, cores=2, fetches_single_rows=True), "BatchSampler", True),
    # A hundred tensors a batch: the thread that takes them over is as slow with eight workers.
    "a thread that works needs no more workers":
        (waiting_for_data(10.0, num_workers=2, cores=2), "num_workers=0", True),
    "one that sleeps does":
        (waiting_for_data(55.0, num_workers=2, cores=2), "num_workers=0", False),
    "an iterator that the loop restarts is kept":
        (waiting_for_data(num_workers=0, cores=8, restarts_loader=True), "Keep one iterator", True),
    "that starts no workers":
        (waiting_for_data(num_workers=0, cores=8, restarts_loader=True), "workers", False),
    "or those that it has":
        (waiting_for_data(num_workers=2, cores=8, restarts_loader=True), "workers", True),
}  # fmt: skip


@pytest.mark.parametrize("case", ADVICE)
def test_the_advice_fits_what_is_known_of_the_loop(case: str) -> None:
    record, words, is_advised = ADVICE[case]
    advice = remedy_of(findings_of(record)[0], record)
    assert (words in advice) == is_advised


@pytest.mark.parametrize("traced_s, name", [(0.030, "repeated_backward"), (0.002, "repeated")])
def test_a_problem_is_reported_once_by_what_shows_more_of_it(traced_s: float, name: str) -> None:
    """The data flow shows 37.5 ms of it."""
    record = record_with(
        HALVES,
        waterfall=with_needless(("repeated_backward", "backward", traced_s)),
        **needless("repeated"),
    )
    assert [found for found in names_of(record) if "repeated" in found] == [name]


@pytest.mark.parametrize(
    "function, are_passes, advice",
    [
        ("closure", True, "(net.py:12) runs forward and backward again"),
        # a weight that a module computes anew for each element of a sequence
        ("Net.forward", False, "Reuse the first result of net (Net): each step runs its forward pass again"),
    ],
)
def test_the_line_that_runs_whole_passes_again_is_named_even_if_the_trace_shows_the_model(
    function: str, are_passes: bool, advice: str
) -> None:
    operators = needless("repeated")["needless_operators"][0]
    shares = {"forward": 0.5, "backward": 0.45}
    operators = operators.model_copy(update={"phase_shares": shares, "function": function})
    passes = with_needless(("repeated_forward", "forward", 0.025), ("repeated_forward", "backward", 0.025))
    record = record_with(HALVES, waterfall=passes, needless_operators=[operators])
    (found,) = [found for found in findings_of(record) if "repeated" in found.name]
    assert found.saves_s == pytest.approx(0.0475 if are_passes else 0.050, rel=0.01)
    assert ("passes" in found.facts and found.name == "repeated") == are_passes
    assert advice in remedy_of(found, record)


@pytest.mark.parametrize("traced_s, is_named", [(0.040, True), (0.060, False)])
def test_a_traced_repetition_has_the_line_of_which_the_data_flow_shows_most(traced_s: float, is_named: bool) -> None:
    """The data flow shows half of forward, 25 ms: of two passes with dropout, it shows only a part."""
    record = record_with(
        HALVES, waterfall=with_needless(("repeated_forward", "forward", traced_s)), **needless("repeated")
    )
    found = found_in(record, "repeated_forward")
    assert (found.line == 12) == is_named
    # The data flow shows 37.5 ms, which may be half as much again. In a real program the trace showed 16 ms, the data
    # flow 20 ms, and the remedy saved 30 ms.
    assert found.high_s >= 1.49 * 0.0375


@pytest.mark.parametrize(
    "backward_s, evaluation_s, saves_s", [(0.022, 0.015, 0.025 + 0.022), (0.049, 0.0, 0.025), (0.049, 0.015, 0.015)]
)
def test_a_first_pass_that_evaluates_has_no_backward_pass_to_be_saved(
    backward_s: float, evaluation_s: float, saves_s: float
) -> None:
    """Backward takes 50 ms: if only one of two passes has one, none of it is repeated.

    In evaluation mode the first pass is validation: it takes no longer than that.
    """
    works = with_needless(("repeated_forward", "forward", 0.025), ("repeated_forward", "backward", backward_s))
    validation = outside_steps("validation", 40 * evaluation_s, 40, per_step_s=evaluation_s)
    record = record_with(HALVES, waterfall=works, **validation)
    assert found_in(record, "repeated_forward").saves_s == pytest.approx(saves_s)


def test_a_broadcast_saves_its_backward_pass_however_long_that_is() -> None:
    works = with_needless(("broadcast", "forward", 0.010), ("broadcast", "backward", 0.035))
    assert found_in(record_with(HALVES, waterfall=works), "broadcast").saves_s == pytest.approx(0.045)


def test_a_sleep_in_every_fifth_step_is_one_although_a_mean_step_is_shorter() -> None:
    """The recorded step sleeps for 240 ms, a mean step for 48 of 55 ms."""
    use = {"forward": ThreadUse(wall_s=0.055, ran_s=0.007, no_cpu_s=0.0)}
    record = record_with({"forward": 55.0}, python_times=[python_line(240.0, "time.sleep")], thread_use=use)
    assert findings_of(record)[0].name == "sleep"
