"""Each finding is drawn from its own facts, and not without them; the likeliest saving comes first."""

from pathlib import Path
from typing import Any, get_args

import compared
import pytest
from made_facts import busy, fall, line, made, owned, thread

from lm_profiler.analysis.remedies.catalogue import REMEDIES, remedy_of
from lm_profiler.analysis.savings.ranking import FINDERS, findings_of
from lm_profiler.analysis.savings.step_costs import WORTH
from lm_profiler.analysis.steps.odd_step_causes import NO_CPU
from lm_profiler.record.machine import Flops, Utilisation
from lm_profiler.record.run_record import (
    BetweenSteps,
    Contributor,
    Finding,
    Floor,
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
    RankFinding,
    Ranks,
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


def between(what: str, seconds: float, times: int) -> dict[str, Any]:
    return {"between": [BetweenSteps(what=what, seconds=seconds, times=times)], "between_steps_s": seconds}


def outside(what: str, seconds: float, times: int, per_step_s: float, **more: Any) -> dict[str, Any]:
    return {"outside": [OutsideSteps(what=what, seconds=seconds, times=times, per_step_s=per_step_s, **more)]}


def of_ranks(saves_s: float) -> Ranks:
    finding = RankFinding(
        kind="straggler", rank=1, host="a", phase="data", saves_s=saves_s, low_s=0.9 * saves_s, high_s=1.1 * saves_s
    )
    facts = {"world": 2, "hosts": {"a": [0, 1]}, "witness": "a test", "steps": 40, "step_s": 0.1, "own": {}}
    facts |= {"waiting": {}, "waiting_share": 0.2, "by_rank": [], "finding": finding}
    return Ranks.model_validate(facts)


def syncs() -> dict[str, Any]:
    waits = Contributor(module=None, what="forward: after cudaStreamSynchronize in aten::item", count=1.0, seconds=0.03)
    waterfall = fall(ideal=60.0).model_copy(
        update={"terms": [Term(name="gaps", seconds=0.03, contributors=[waits]), *fall(ideal=60.0).terms]}
    )
    return {"waterfall": waterfall, "syncs": [Sync(file="a.py", line=3, function="f", count=9, call=".item()")]}


def in_dispatch_mode() -> Waterfall:
    modes = [Contributor(module="net", what="PythonDispatchMode", count=9.0, seconds=0.02),
             Contributor(module=None, what="backward: PythonDispatchMode", count=9.0, seconds=0.01)]  # fmt: skip
    term = Term(name="beyond_bandwidth", seconds=0.03, contributors=modes)
    return fall(ideal=60.0).model_copy(update={"terms": [term, *fall(ideal=60.0).terms]})


def with_needless(*works: tuple[NeedlessKind, str, float]) -> Waterfall:
    needless = [
        NeedlessWork(kind=kind, phase=phase, what="net (Net)", count=1.0, seconds=seconds)
        for kind, phase, seconds in works
    ]
    return fall(ideal=90.0).model_copy(update={"needless": needless})


def needless(reason: NeedlessReason) -> dict[str, Any]:
    """Half of forward, and a quarter of backward."""
    operators = NeedlessOperators(
        reason=reason, count=4, what="aten::mm", share=0.98, phase_shares={"forward": 0.5, "backward": 0.25},
        file="net.py", line=12, function="Net.forward",
    )  # fmt: skip
    return {"needless_operators": [operators]}


def names_of(record: RunRecord) -> list[str]:
    return [finding.name for finding in findings_of(record)]


def found_in(record: RunRecord, name: str) -> Finding:
    (finding,) = [finding for finding in findings_of(record) if finding.name == name]
    return finding


HALVES = {"forward": 50.0, "backward": 50.0}


def padded(unused: float, **facts: Any) -> Throughput:
    return Throughput(tokens_per_step=100, tokens_per_s=1e3, unused_share=unused, **{"occupancy": 0.2, **facts})


CASES: dict[str, tuple[str, float, RunRecord]] = {
    "the loader": ("input", 60.0, made({"data": 60.0}, settings=Settings(num_workers=0, cores=2))),
    "the program makes tensors of lists in its transfer": (
        "owner", 30.0, made({"transfer": 30.0}, python_times=[line(28.0, what="torch", phase="transfer", calls=1)]),
    ),
    "the copy": ("transfer", 30.0, made({"transfer": 30.0}, device="cuda", settings=Settings(pin_memory=False))),
    "validation": ("validation", 100.0, made(**between("validation", 4.0, 8))),
    "checkpoints": ("checkpoint", 50.0, made(**between("checkpoint", 2.0, 20))),
    "epochs": ("epoch", 50.0, made(**between("epoch", 2.0, 10), settings=Settings(num_workers=0))),
    "validation that came after the measured steps": (
        "validation", 800.0, made(**outside("validation", 36.0, 1, per_step_s=0.8)),
    ),
    "workers that start anew at each epoch": (
        "worker_start", 60.0,
        made({"data": 52.0}, outside=[*outside("epoch", 0.4, 4, per_step_s=0.01)["outside"],
                                      *outside("first batch", 2.0, 4, per_step_s=0.05, in_step=True)["outside"]],
             settings=Settings(num_workers=1, persistent_workers=False)),
    ),
    "a loader that is made anew at each epoch": (
        "reload", 40.0, made(**outside("train_dataloader", 1.6, 8, per_step_s=0.04, owner="M.train_dataloader")),
    ),
    "a hook at the end of an epoch": (
        "owner", 40.0, made(**outside("M.on_train_epoch_end", 1.6, 8, per_step_s=0.04, owner="M.on_train_epoch_end")),
    ),
    "a loader behind a full queue": (
        "input", 52.0, made(lasting_step_s=0.150, settings=Settings(num_workers=2, cores=2)),
    ),
    "some slow steps of unknown cause": (
        "odd_steps", 50.0, made(
            odd_steps=[OddStep(step=step, step_s=1.1, ratio=11.0, part="forward", excess_s=1.0) for step in (5, 9, 20)],
            steadiness=made().steadiness.model_copy(update={"odd_s": 0.050})),
    ),
    "a callback": ("owner", 30.0, made({"other": 30.0}, other_by_owner=owned(Ema__on_train_batch_end=30.0))),
    "a logger": ("logging", 30.0, made({"other": 30.0}, other_by_owner=owned(CSVLogger__log_metrics=30.0))),
    "a sleep": ("sleep", 20.0, made(python_times=[line(20.0, "time.sleep")], thread_use=thread(20.0))),
    "Python": ("python", 20.0, made(python_times=[line(20.0)], thread_use=thread())),
    "numpy": ("python", 20.0, made(python_times=[line(20.0, "numpy")], thread_use=thread())),
    "many small operators": ("python", 40.0, made(python_times=[line(40.0, "torch", calls=8000)])),
    "values that are logged in the step": ("logging", 20.0, made(python_times=[line(20.0, "Lightning", calls=300)])),
    "a sleep of unknown line": ("sleep", 25.0, made(thread_use=thread(25.0))),
    "garbage": ("garbage", 20.0, made(mean_counters=StepCounters(gc_s=0.02))),
    "garbage that a callback collects": (
        "garbage", 20.0,
        made(mean_counters=StepCounters(gc_s=0.05), python_times=[line(30.0, "gc.collect", phase="other")]),
    ),
    "compiling again": ("compilation", 40.0, made(mean_counters=StepCounters(compile_s=0.04, compiled="f"))),
    "anomalies": ("anomalies", 85.0, made(settings=Settings(anomalies=True))),
    "waiting for the device": ("sync", 30.0, made(device="cuda", **syncs())),
    "an optimizer with many kernels": (
        "optimizer", 0.75 * 40.0, made({"optimizer": 40.0}, settings=Settings(fused_optimizer=False)),
    ),
    "a batch that is too small": (
        "small_batch", 30.25, made({"optimizer": 60.0}, settings=Settings(samples_per_batch=64)),
    ),
    "a batch of two, that may be one of eight": (
        "small_batch", 0.75 * 60.5,
        made({"optimizer": 60.0}, settings=Settings(samples_per_batch=2, fused_optimizer=False)),
    ),
    "an optimizer that goes from weight to weight": (
        "optimizer", 0.75 * 12.0,
        made({"optimizer": 12.0}, waterfall=fall(ideal=35.0, gaps=10.0, beyond_bandwidth=18.0),
             settings=Settings(compiled=False, fused_optimizer=False, weight_by_weight=True)),
    ),
    "an optimizer that multiplies matrices": (
        "optimizer_products", 60.0,
        made({"optimizer": 70.0}, waterfall=fall(ideal=5.0, slow_products=15.0, optimizer_products=60.0),
             floors={"optimizer": Floor(flops={"bfloat16": 6 * 10**12})}, settings=Settings(samples_per_batch=64)),
    ),
    "float64 of unknown rate": ("double", 96.0 / 2.0, made(settings=Settings(precision="64-true"))),
    "gaps and traffic": (
        "compile", 60.0,
        made(device="cuda", waterfall=fall(ideal=35.0, gaps=10.0, beyond_bandwidth=50.0),
             settings=Settings(compiled=False)),
    ),
    "gaps and traffic on the CPU": (
        "compile", 30.0,
        made(waterfall=fall(ideal=35.0, gaps=10.0, beyond_bandwidth=50.0), settings=Settings(compiled=False)),
    ),
    "float32 products": (
        "precision", 80.0,
        made(waterfall=fall(ideal=50.0, slow_products=30.0),
             settings=Settings(precision="32-true", half_precision="bf16-mixed")),
    ),
    "float64 products": ("double", 80.0, made(waterfall=fall(ideal=80.0), settings=Settings(precision="64-true"))),
    "recomputation": (
        "recomputation", 25.0,
        made(waterfall=fall(ideal=70.0, recomputation=25.0),
             settings=Settings(checkpointing=True, memory_free_share=0.6)),
    ),
    "a second pass on the same batch": (
        "repeated_forward", 40.0,
        made(waterfall=with_needless(("repeated_forward", "forward", 0.025), ("repeated_forward", "backward", 0.015))),
    ),
    "a backward pass that runs twice": (
        "repeated_backward", 15.0, made(waterfall=with_needless(("repeated_backward", "backward", 0.015))),
    ),
    "gradients that no optimizer uses": (
        "unused_gradients", 20.0, made(waterfall=with_needless(("unused_gradients", "backward", 0.020))),
    ),
    "a column less a row": (
        "broadcast", 30.0,
        made(waterfall=with_needless(("broadcast", "forward", 0.010), ("broadcast", "backward", 0.020))),
    ),
    "a group for each weight": (
        "groups", 36.0, made({"optimizer": 40.0}, settings=Settings(parameter_groups=20, different_groups=2)),
    ),
    "Python code at each operator": (
        "dispatch_mode", 30.0, made({"forward": 60.0, "backward": 40.0}, waterfall=in_dispatch_mode())
    ),
    "an optimizer that computes roots": (
        "owner", 42.0,
        made({"optimizer": 50.0}, settings=Settings(samples_per_batch=64), python_times=[
            line(40.0, what="torch", phase="optimizer", calls=16, function="Shampoo.root"),
            line(2.0, phase="optimizer", calls=0, function="Shampoo.root"),
        ]),
    ),
    "batches wider than their longest sequence": ("padding", 0.4 * 85.0, made(throughput=padded(unused=0.4))),
    "short sequences beside long ones": (
        "padding", 0.5 * 85.0, made(throughput=padded(unused=0.1, occupancy=0.5, squared_lengths_per_step=9)),
    ),
    "communication": ("communication", 30.0, made(waterfall=fall(ideal=60.0, communication=30.0))),
    "a slow rank": ("ranks", 30.0, made(ranks=of_ranks(0.03))),
    "every fifth step": (
        "pattern", 12.0, made(steadiness=made().steadiness.model_copy(
            update={"pattern": StepPattern(every=5, slow=[5], extra=0.6, part="forward"), "pattern_s": 0.012})),
    ),
}  # fmt: skip
CASES |= {
    f"operators for which the data flow says {reason}": (reason, 37.5, made(HALVES, **needless(reason)))
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
    timed_s = timed_ms * 1e-3
    gap = OwnedTime(owner="", action=f"between {action}", seconds=timed_s, calls=1 / 3, in_steps=1, least_s=timed_s)
    gaps = OtherByOwner(steps=3, seconds=timed_s, actions=[gap])
    record = made(
        {"other": mean_ms},
        other_by_owner=gaps,
        loop="own",
        contention=busy() if is_busy else None,
        **outside("validation", 0.1, 1, per_step_s=0.1 / 40),
    )
    times_s = {"mean": mean_ms * 1e-3, "median": median_ms * 1e-3, "p95": p95_ms * 1e-3}
    other = record.host_time["other"].model_copy(update=times_s)
    record = record.model_copy(update={"host_time": {**record.host_time, "other": other}})
    saved_s = [finding.saves_s for finding in findings_of(record) if finding.name == "owner"]
    assert sum(saved_s) == pytest.approx(saves_ms * 1e-3)


@pytest.mark.parametrize(
    "forward, text",
    [
        (None, "Do less work between zero_grad and forward, or do it less often: most of the time is spent in "),
        ("untrained", "Call Net.forward (net.py:12) less often: it is not trained."),
        ("unmarked", None),  # the model itself, for which there is a note
    ],
)
def test_the_advice_about_a_forward_pass_in_a_gap_depends_on_the_module(forward: Any, text: str | None) -> None:
    gap = OwnedTime(owner="", action="between zero_grad and forward", seconds=0.03, calls=1.0, in_steps=3)
    gaps = OtherByOwner(steps=3, seconds=0.03, actions=[gap])
    call = line(28.0, what="torch", phase="other").model_copy(update={"forward": forward})
    record = made({"other": 30.0}, other_by_owner=gaps, python_times=[call], loop="own")
    owners = [remedy_of(finding, record) for finding in findings_of(record) if finding.name == "owner"]
    assert len(owners) == (text is not None)
    assert "".join(owners).startswith(text or "")


def test_each_gap_of_a_loop_is_a_finding_of_its_own() -> None:
    gaps = OtherByOwner(
        steps=3,
        seconds=0.05,
        actions=[
            OwnedTime(owner="", action="between forward and backward", seconds=0.03, calls=1.0, in_steps=3),
            OwnedTime(owner="", action="after zero_grad", seconds=0.02, calls=1.0, in_steps=3),
        ],
    )
    get_batch = line(28.0, phase="other")
    record = made({"other": 50.0}, other_by_owner=gaps, python_times=[get_batch], loop="own")
    advice = {finding.saves_s: remedy_of(finding, record) for finding in findings_of(record) if finding.name == "owner"}
    assert [*advice] == pytest.approx([0.03, 0.02])
    texts = [*advice.values()]
    assert texts[0].startswith("Do less work between forward and backward, or do it less often: most of the time ")
    assert "(net.py:12)" in texts[0]
    assert texts[1] == "Do less work after zero_grad, or do it less often."


def test_torch_compile_is_advised_with_the_costliest_operator_that_it_could_fuse() -> None:
    def term(name: Any, operator: str, seconds: float) -> Term:
        part = Contributor(module="net", what=operator, count=1.0, seconds=seconds)
        return Term(name=name, seconds=seconds, contributors=[part])

    terms = [term("ideal", "aten::mm", 0.05), term("bandwidth", "aten::gelu", 0.008)]
    waterfall = fall(ideal=50.0).model_copy(update={"terms": [*terms, term("beyond_bandwidth", "aten::gelu", 0.012)]})
    record = made(waterfall=waterfall, settings=Settings(compiled=False))
    advice = remedy_of(found_in(record, "compile"), record)
    assert "aten::gelu in net, 20%" in advice
    assert "aten::mm" not in advice


def test_a_step_that_factorizes_matrices_keeps_float64() -> None:
    record = made(waterfall=fall(ideal=80.0), settings=Settings(precision="64-true"))
    assert names_of(record) == ["double"]
    factorizing = record.model_copy(update={"factorizing_operators": ["aten::linalg_cholesky_ex"]})
    assert findings_of(factorizing) == []


def test_every_kind_of_finding_is_planted_here() -> None:
    planted = {name for name, _, _ in CASES.values()} | {"tf32", "clip", "profiler"}
    assert {remedy.name for remedy in REMEDIES if remedy.likely_share < 1.0} <= planted
    assert len(FINDERS) <= len(planted)


def test_nothing_is_found_where_nothing_stands_out() -> None:
    assert findings_of(made()) == []
    assert findings_of(made(settings=Settings(compiled=False, fused_optimizer=True, num_workers=4))) == []
    assert WORTH > 4.0 / 102.0
    assert findings_of(made({"data": 4.0}, settings=Settings(num_workers=0))) == []
    assert findings_of(made(settings=Settings(compiled=False))) == []
    on = made(waterfall=fall(ideal=30.0, gaps=60.0), settings=Settings(compiled=True))
    assert "compile" not in names_of(on)


@pytest.mark.parametrize("cause", [NO_CPU, "garbage collection of generation 2"])
def test_a_wait_that_the_loader_did_not_cause_is_not_its_own(cause: str) -> None:
    record = made({"data": 40.0}, settings=Settings(num_workers=0, cores=2))
    steps, data_s = record.time["data"].n, record.time["data"].mean or 0.0
    odd = OddStep(step=5, step_s=2.1, ratio=21.0, part="data", excess_s=1.0, cause=cause, cause_s=0.4)
    waits = findings_of(record.model_copy(update={"odd_steps": [odd]}))[0]
    assert waits.name == "input"
    assert waits.saves_s == pytest.approx(data_s - 0.4 / steps)


def test_a_pattern_names_the_function_that_takes_most_of_a_slow_step() -> None:
    name, _, record = CASES["every fifth step"]
    rows = [line(9.0, what="matplotlib.draw", phase="forward", function="Model.plot"), line(2.0, phase="forward")]
    pattern = next(
        found for found in findings_of(record.model_copy(update={"python_times": rows})) if found.name == name
    )
    assert pattern.owner == "Model.plot"
    assert "takes longer every 5 steps" in remedy_of(pattern, record)


def test_a_short_phase_of_a_busy_machine_counts_with_its_cpu_time() -> None:
    """Other programs made the optimizer ten times longer, and the rest of the step twice as long."""
    use = {"forward": ThreadUse(wall_s=0.06, ran_s=0.03, no_cpu_s=0.03),
           "optimizer": ThreadUse(wall_s=0.04, ran_s=0.004, no_cpu_s=0.036)}  # fmt: skip
    record = made({"forward": 60.0, "optimizer": 40.0}, settings=Settings(fused_optimizer=False), thread_use=use,
                  contention=busy())  # fmt: skip
    fused = next(finding for finding in findings_of(record) if finding.name == "optimizer")
    step_s = record.time["step"].mean or 0.0
    assert fused.saves_s == pytest.approx(0.75 * 4.0 / 34.0 * step_s)


def test_sleep_counts_in_full_on_a_busy_machine() -> None:
    """A callback sleeps for 30 ms of each step. Other programs made the rest of the step twice as long."""
    use = {"forward": ThreadUse(wall_s=0.06, ran_s=0.03, no_cpu_s=0.03),
           "other": ThreadUse(wall_s=0.03, ran_s=0.0, no_cpu_s=0.0)}  # fmt: skip
    record = made(
        {"forward": 60.0, "other": 30.0},
        other_by_owner=owned(Waits__on_train_batch_end=30.0),
        thread_use=use,
        contention=busy(),
    )
    callback = next(finding for finding in findings_of(record) if finding.name == "owner")
    assert callback.saves_s == pytest.approx(0.030, rel=0.01)


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
    waterfall = fall(**terms_ms) if terms_ms else None
    record = made({"optimizer": 60.0}, settings=Settings(samples_per_batch=samples), waterfall=waterfall)
    found = found_in(record, "small_batch")
    assert found.high_s == pytest.approx(high_ms * 1e-3, rel=0.01)
    assert example in remedy_of(found, record)


def test_an_optimizer_that_multiplies_matrices_is_advised_by_its_rate() -> None:
    name, _, record = CASES["an optimizer that multiplies matrices"]
    findings = {finding.name: finding for finding in findings_of(record)}
    assert "small_batch" not in findings
    assert findings[name].facts["flops_per_s"] == pytest.approx(6e12 / 0.060)
    assert "6 TFLOP per step at 100 TFLOP/s" in remedy_of(findings[name], record)  # 6 TFLOP in 60 ms


def test_a_fused_optimizer_still_moves_its_bytes() -> None:
    settings, floor = Settings(fused_optimizer=False), Floor(flops={}, bytes=10, seconds=0.025)
    record = made({"optimizer": 40.0}, device="cuda", settings=settings, floors={"optimizer": floor})
    assert [round(finding.saves_s * 1e3) for finding in findings_of(record) if finding.name == "optimizer"] == [15]
    shared = record.model_copy(update={"contention": busy()})  # no rate is known well enough there
    assert next(finding for finding in findings_of(shared) if finding.name == "optimizer").saves_s > 35e-3
    settings = Settings(weight_by_weight=True)
    record = made({"optimizer": 40.0}, device="cuda", settings=settings)
    assert "foreach=True" in remedy_of(findings_of(record)[0], record)
    assert "optimizer" not in names_of(made({"optimizer": 40.0}, settings=settings))


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
    record = made(odd_steps=odd_steps, mean_counters=StepCounters(gc_s=0.01 * len(steps)))
    assert found_in(record, "garbage").may == may


def test_anomaly_detection_saves_what_its_own_code_takes() -> None:
    """It records stacks for 10 ms of forward, and searches gradients for NaN for 14 ms of backward."""
    searches = Contributor(module=None, what="backward: aten::isnan", count=92.0, seconds=0.014)
    waterfall = fall(ideal=60.0)
    waterfall.terms.append(Term(name="bandwidth", seconds=0.014, contributors=[searches]))
    record = made(
        waterfall=waterfall,
        python_times=[line(6.0, "traceback"), line(4.0, "posix.stat")],
        settings=Settings(anomalies=True),
    )
    found = found_in(record, "anomalies")
    assert found.saves_s == pytest.approx(0.024)
    assert 0.030 <= found.high_s <= 0.036  # the gain of a real program with these times was 30 ms


def test_a_function_of_a_gap_saves_its_own_time() -> None:
    """The loop spends 30 ms after the optimizer: 20 in ``push``, 6 in ``learn``, the rest in its own lines."""
    calls = [
        OuterCall(outer_function="Memory.push", file="a.py", line=24, seconds=0.020),
        OuterCall(outer_function="learn", file="a.py", line=77, seconds=0.006),
    ]
    gap = OwnedTime(owner="", action="after optimizer", seconds=0.030, calls=1.0, in_steps=3)
    record = made({"other": 30.0}, other_by_owner=OtherByOwner(steps=3, seconds=0.03, actions=[gap]), outer_calls=calls)
    found = found_in(record, "owner")
    assert (found.what, found.line) == ("Memory.push", 24)
    assert found.saves_s == pytest.approx(0.020)


def test_without_a_main_function_the_costliest_line_is_named() -> None:
    """``push`` moves a list in one line, 10 of 26 ms; ``learn`` takes 12 ms in many lines."""
    lines = [line(10.0, phase="other", function="Memory.push")]
    for number in range(12):
        row = line(1.0, "torch", phase="other", function="learn")
        lines.append(row.model_copy(update={"line": 80 + number}))
    record = made({"other": 26.0}, other_by_owner=owned(Agent__on_train_batch_end=26.0), python_times=lines)
    found = found_in(record, "owner")
    assert (found.what, found.line) == ("Memory.push", 12)
    assert "the costliest line is in Memory.push" in remedy_of(found, record)


def test_the_limit_of_a_measured_wait_is_close_to_its_mean() -> None:
    """The remedy of a slow loader gained at most 9 % more than the mean wait, in 28 programs of others."""
    found = found_in(made({"data": 60.0}, settings=Settings(num_workers=0, cores=2)), "input")
    assert 1.09 * 0.060 <= found.high_s <= 1.2 * 0.060


def test_what_has_to_be_tried_stands_behind_facts_of_like_size() -> None:
    """Memory bounds how far a batch may grow: nine tenths full, the advice is only that twice as many may help."""
    for case in ("a batch of two, that may be one of eight", "an optimizer that goes from weight to weight"):
        assert not findings_of(CASES[case][2])[0].may
    for samples, free, halves in ((1, 0.2, 0.5), (1, 0.75, 0.75), (1, None, 0.875), (8, None, 0.5), (None, None, 0.5)):
        settings = Settings(samples_per_batch=samples, memory_free_share=free)
        (found,) = findings_of(made({"optimizer": 60.0}, settings=settings))
        assert found.saves_s == pytest.approx(halves * 60.5e-3, rel=0.02)
        assert found.may == (halves == 0.5)
    unfused = Settings(fused_optimizer=False)
    record = made({"optimizer": 29.0}, settings=unfused, **between("validation", 14.0 * 0.04, 8))
    assert names_of(record)[:2] == ["validation", "optimizer"]
    assert [finding.may for finding in findings_of(record)][:2] == [False, True]
    for case in ("gaps and traffic", "float32 products", "a batch that is too small", "an optimizer with many kernels"):
        assert findings_of(CASES[case][2])[0].may


def test_a_line_is_python_where_it_calls_more_than_it_computes() -> None:
    record = made(waterfall=fall(ideal=50.0, gaps=40.0), python_times=[line(38.0)], settings=Settings(compiled=False))
    assert names_of(record) == ["python"]
    # ``x * y`` takes 30 ms in a line that calls nothing; the trace has operators in all but 2 ms of the phase.
    record = made(waterfall=fall(ideal=95.0, gaps=2.0), python_times=[line(30.0)], settings=Settings(compiled=True))
    assert "python" not in names_of(record)
    # ``total = total + x`` 8,000 times: the trace is full of operators, which take longer to call than to execute.
    adds = Contributor(module=None, what="forward: aten::add", count=8000.0, seconds=0.050)
    terms = [Term(name="ideal", seconds=0.040), Term(name="beyond_bandwidth", seconds=0.050, contributors=[adds])]
    waterfall = fall().model_copy(update={"terms": terms})
    record = made({"forward": 80.0}, waterfall=waterfall, python_times=[line(30.0, function="sums")])
    assert [(found.name, found.owner) for found in findings_of(record)] == [("python", "sums")]
    few = adds.model_copy(update={"count": 10.0})
    terms[1] = Term(name="beyond_bandwidth", seconds=0.050, contributors=[few])
    large = made({"forward": 80.0}, waterfall=fall().model_copy(update={"terms": terms}), python_times=[line(30.0)])
    assert findings_of(large) == []
    # It notes the stack of each operator, by calls that look like those of the line.
    stacks = [line(40.0, "traceback", calls=40_000, function="Coupling.forward")]
    noting = made({"forward": 80.0}, python_times=stacks, settings=Settings(anomalies=True))
    assert names_of(noting) == ["anomalies"]
    assert names_of(made({"forward": 80.0}, python_times=stacks)) == ["python"]


@pytest.mark.parametrize("recomputed, most_s", [(100, 0.040), (50, 0.026)])
def test_recomputation_takes_at_least_the_share_of_forward_that_it_repeats(recomputed: int, most_s: float) -> None:
    """Of a forward pass of 40 ms, all or a half is computed again; its matmuls would take 5 ms at their peak.

    The half without the logits takes more than half of the time.
    """
    flops = Flops(forward=100, backward=200, recomputation=recomputed)
    fields = {**dict.fromkeys(Utilisation.model_fields), "flops": flops, "by_dtype": []}
    use = Utilisation.model_validate(fields)
    record = made(
        {"forward": 40.0, "backward": 100.0},
        waterfall=fall(ideal=70.0, recomputation=5.0),
        settings=Settings(checkpointing=True, memory_free_share=0.5),
        utilisation=use,
    )
    saves_s = {finding.name: finding.saves_s for finding in findings_of(record)}
    assert saves_s["recomputation"] == pytest.approx(most_s, rel=0.05)


@pytest.mark.parametrize("ms, workers, raised", [(0.9, 0, False), (0.9, 1, False), (1.1, 0, True), (1.1, 1, True)])
def test_no_worker_is_advised_where_it_takes_as_long_to_hand_a_batch_over(ms: float, workers: int, raised: bool):
    finding = Finding(name="input", saves_s=ms * 1e-3, share=0.5, phase="data")
    record = made(settings=Settings(num_workers=workers, cores=4))
    assert (f"num_workers from {workers} to 2" in remedy_of(finding, record)) == raised


def test_one_cause_is_one_finding() -> None:
    record = made(
        {"other": 50.0},
        other_by_owner=owned(ModelCheckpoint__on_train_batch_end=50.0),
        **between("checkpoint", 2.0, 20),
    )
    assert names_of(record) == ["checkpoint"]
    record = made(
        {"other": 30.0},
        other_by_owner=owned(CSVLogger__log_metrics=30.0),
        python_times=[line(20.0, "Lightning", calls=300)],
    )
    assert found_in(record, "logging").saves_s == pytest.approx(0.050)
    # What collected garbage, compiled or saved a checkpoint has a finding of that name; a lost CPU is nobody's.
    steady = made().steadiness.model_copy(update={"odd_s": 0.050})  # type: ignore[union-attr]
    for cause in ("garbage collection of generation 2", "recompilation of f", "a checkpoint", "waiting for a CPU"):
        odd = [OddStep(step=5, step_s=2.1, ratio=21.0, part="forward", excess_s=2.0, cause=cause, cause_s=2.0)]
        assert findings_of(made(odd_steps=odd, steadiness=steady)) == []
    unknown = [OddStep(step=5, step_s=2.1, ratio=21.0, part="forward", excess_s=2.0)]
    (found,) = findings_of(made(odd_steps=unknown, steadiness=steady))
    assert (found.name, found.may) == ("odd_steps", True)
    assert "step 5" in remedy_of(found, made())


def test_on_a_busy_machine_what_it_distorts_is_withheld_or_bounded() -> None:
    """Compiling is of gaps and memory traffic, which it stretches; a matmul takes no less than at the peak."""

    def shared(case: str, **facts: Any) -> list[Finding]:
        return findings_of(CASES[case][2].model_copy(update={"contention": busy(), **facts}))

    assert shared("gaps and traffic") == []
    (found,) = shared("float32 products")
    assert (found.name, found.may) == ("precision", True)
    assert found.saves_s == pytest.approx(50e-3, rel=0.05)  # not the 30 ms that they took longer
    (small,) = shared("a batch that is too small", waterfall=fall(gaps=30.0), other_by_owner=owned(Lightning__loop=9.0))
    assert small.saves_s == pytest.approx(30.25e-3, rel=0.05)


def test_a_busy_machine_does_not_distort_the_data_flow() -> None:
    """The loader surely takes 14 ms; of the step's computation 37.5 ms may be needless."""
    record = made({"data": 14.0, "forward": 50.0, "backward": 50.0}, contention=busy(), **needless("side_work"))
    assert names_of(record)[:2] == ["side_work", "input"]


@pytest.mark.parametrize(
    "case",
    [
        "a callback", "a sleep", "validation", "the loader", "many small operators",
        "checkpoints", "compiling again", "garbage",
    ],
)  # fmt: skip
def test_on_a_busy_machine_what_it_cannot_fake_is_certain(case: str) -> None:
    name, _, record = CASES[case]
    queue = LoaderFacts(workers=2, ahead=4, ready_before=0, ready_after=0)
    found = findings_of(record.model_copy(update={"contention": busy(), "loader": queue}))
    assert (found[0].name, found[0].may) == (name, False)


def test_on_a_busy_machine_figures_are_of_the_mean_step() -> None:
    """Collections of 1 s in one step of seven were 6 ms, as the fastest steps have none."""
    record = made(noise=0.0)
    times = {part: time.model_copy(update={"mean": 1.5 * (time.mean or 0.0)}) for part, time in record.time.items()}
    found = findings_of(
        record.model_copy(
            update={"time": times, "host_time": times, "contention": busy(), "mean_counters": StepCounters(gc_s=0.14)}
        )
    )
    assert found[0].name == "garbage"
    assert found[0].saves_s == pytest.approx(0.14)
    assert found[0].share == pytest.approx(0.14 / 0.15, rel=0.01)
    # Others double each step; the callback takes a fifth of it as before.
    fast = made({"other": 20.0}, noise=0.0, other_by_owner=owned(Ema__on_train_batch_end=20.0))
    times = {
        part: time.model_copy(update={"mean": 2.0 * (time.mean or 0.0), "p5": time.mean})
        for part, time in fast.time.items()
    }
    slow = fast.model_copy(update={"time": times, "host_time": times, "contention": busy()})
    (found,) = findings_of(slow)
    assert found.saves_s == pytest.approx(40e-3)
    assert found.share == pytest.approx(20.0 / 118.0, rel=0.01)
    # A transfer of 0.04 ms took 4 ms in one step of 24, in which another program had the CPU.
    fast = made({"forward": 1.0, "backward": 0.5, "data": 0.1, "optimizer": 0.1, "other": 0.2, "transfer": 0.04})
    times = dict(fast.time)
    times["transfer"] = times["transfer"].model_copy(update={"mean": 0.21e-3})
    record = fast.model_copy(update={"time": times, "host_time": times})
    assert "transfer" in names_of(record)
    assert "transfer" not in names_of(record.model_copy(update={"contention": busy()}))


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
    record = made(
        {"data": data_ms},
        settings=Settings(num_workers=workers, cores=2),
        loader=LoaderFacts(workers=workers, ahead=4, ready_before=0, ready_after=0, awake_share=awake),
        thread_use=thread(asleep_ms=data_ms, wall_ms=data_ms, phase="data"),
    )
    found = found_in(record, "input")
    assert found.facts["workers"] == wanted
    text = remedy_of(found, record)
    assert (f"num_workers from {workers} to {wanted}" in text) == (wanted > workers)


def test_the_costliest_function_of_the_workers_is_named() -> None:
    """The training thread only waits; a worker spends 20 of 25 ms of a batch in ``smooth_field``."""
    worker_times = [
        line(20.0, "scipy", phase="data", function="smooth_field"),
        line(5.0, phase="data", function="Scans.__getitem__"),
    ]
    waits = line(1.0, "torch", phase="data", function="Fit.batch")
    record = made(
        {"data": 15.0},
        python_times=[waits],
        worker_times=worker_times,
        settings=Settings(num_workers=1, cores=4),
    )
    found = found_in(record, "input")
    assert found.owner == "smooth_field"
    assert "smooth_field (net.py:12) takes most of that time" in remedy_of(found, record)


def test_a_queue_that_is_full_by_chance_needs_faster_workers() -> None:
    """One of two batches was ready when the steps began, but the worker computes all the time."""
    record = made(
        {"data": 10.0},
        loader=LoaderFacts(workers=1, ahead=2, ready_before=1, ready_after=2, awake_share=1.0),
        thread_use=thread(asleep_ms=7.0, wall_ms=10.0, phase="data"),
        settings=Settings(num_workers=1, cores=4),
    )
    assert "num_workers from 1 to" in remedy_of(found_in(record, "input"), record)


def test_busy_workers_are_too_slow_even_if_another_program_has_the_cpu() -> None:
    """Of 5 ms in which it waits for a batch, another program has its CPU for 3.5 ms, and it runs for 1 ms."""
    record = made(
        {"data": 10.0},
        loader=LoaderFacts(workers=1, ahead=2, ready_before=0, ready_after=2, awake_share=1.0),
        thread_use={"data": ThreadUse(wall_s=0.005, ran_s=0.001, no_cpu_s=0.0035)},
        settings=Settings(num_workers=1, cores=4),
    )
    assert "num_workers from 1 to" in remedy_of(found_in(record, "input"), record)


def test_a_full_queue_needs_no_more_workers() -> None:
    record = made(
        {"data": 60.0},
        settings=Settings(num_workers=4, cores=2),
        loader=LoaderFacts(workers=4, ahead=8, ready_before=6, ready_after=8, awake_share=0.08),
        thread_use=thread(asleep_ms=50.0, wall_ms=60.0, phase="data"),
    )
    assert "num_workers=0" in remedy_of(found_in(record, "input"), record)


@pytest.mark.parametrize("workers, saves_ms", [(1, 10.0), (0, 60.0)])
def test_a_wait_for_a_cpu_is_no_wait_for_workers(workers: int, saves_ms: float) -> None:
    """On a busy machine the thread had no CPU for 50 of 60 ms. Without workers it would have made the batch itself."""
    use = {"data": ThreadUse(wall_s=0.06, ran_s=0.005, no_cpu_s=0.05)}
    record = made({"data": 60.0}, settings=Settings(num_workers=workers, cores=2), thread_use=use, contention=busy())
    assert found_in(record, "input").saves_s == pytest.approx(saves_ms / 1e3, rel=0.01)


def test_python_of_an_optimizer_or_hook_counts_once() -> None:
    """Its lines of ``p - x * y`` are operators: the trace has no gap in the phase."""
    python_times = [
        line(40.0, phase="optimizer", function="MyAdam.step"),
        line(8.0, "torch", "optimizer", 320, "MyAdam.step"),
    ]
    record = made(
        {"optimizer": 60.0}, waterfall=fall(ideal=10.0, beyond_bandwidth=110.0), python_times=python_times,
        settings=Settings(samples_per_batch=64, compiled=True),
    )  # fmt: skip
    first = findings_of(record)[0]
    assert (first.name, first.owner, first.saves_s) == ("python", "MyAdam.step", pytest.approx(0.048))
    assert "fused=True" in remedy_of(first, record)
    # ``x = a @ b`` of Muon is a line of Python that calls nothing that can be followed.
    record = made(
        {"optimizer": 70.0}, waterfall=fall(ideal=5.0, optimizer_products=60.0),
        floors={"optimizer": Floor(flops={"bfloat16": 6 * 10**12})},
        python_times=[line(66.0, phase="optimizer", function="Muon.step")],
    )  # fmt: skip
    saves_s = {finding.name: finding.saves_s for finding in findings_of(record)}
    assert saves_s["optimizer_products"] == pytest.approx(0.060)
    assert saves_s["python"] == pytest.approx(0.010, rel=0.05)
    calls = [line(20.0, phase="backward", function="look"), line(10.0, "torch", "backward", 100, "look")]
    finding = found_in(made({"backward": 60.0}, python_times=calls), "python")
    assert finding.saves_s == pytest.approx(0.020)
    assert finding.high_s >= 0.030


def test_what_following_missed_of_a_function_counts_by_the_gaps_of_untraced_steps() -> None:
    """Following ended after so many calls: it has 20 ms of a function that takes 70, which are gaps of the trace."""
    logs = line(20.0, "Lightning", calls=44_000)
    terms = [Term(name="ideal", seconds=0.030), Term(name="gaps", seconds=0.070, phases={"forward": 0.070})]
    waterfall = fall().model_copy(update={"terms": terms})
    (found,) = findings_of(made({"forward": 80.0}, waterfall=waterfall, python_times=[logs]))
    assert (found.name, found.saves_s) == ("logging", pytest.approx(0.070))
    others = line(20.0, "library", function="Net.step")  # then half of what was followed is not its own
    found_with_others = findings_of(made({"forward": 80.0}, waterfall=waterfall, python_times=[logs, others]))
    assert found_with_others[0].saves_s == pytest.approx(0.020)


def test_products_of_a_closure_are_not_those_of_its_optimizer() -> None:
    record = CASES["an optimizer that multiplies matrices"][2]
    model = compared.MODEL.model_copy(update={"optimizers": ["LBFGS"]})
    assert "optimizer_products" in names_of(record)
    assert "optimizer_products" not in names_of(record.model_copy(update={"model": model}))


def test_a_slow_loader_without_a_costly_function_is_named_by_its_items() -> None:
    rows = [line(15.0, phase="data", function=function) for function in ("crop", "flip", "Images.__getitem__", "blur")]
    record = made({"data": 60.0}, settings=Settings(num_workers=0, cores=2), python_times=rows)
    assert found_in(record, "input").owner == "Images.__getitem__"


def waiting_for_data(asleep_ms: float | None = None, **settings: Any) -> RunRecord:
    """Of the wait for a batch the thread sleeps so long, and works for the rest."""
    use = {} if asleep_ms is None else {"thread_use": thread(asleep_ms, wall_ms=60.0, phase="data")}
    return made({"data": 60.0}, settings=Settings(**settings), **use)


def validating(loop: str = "Trainer", **settings: Any) -> RunRecord:
    return made(loop=loop, settings=Settings(**settings), **outside("validation", 2.0, 4, 0.05))


ADVICE = {
    "a batch of many small tensors needs fewer of them":
        (made({"transfer": 30.0}, settings=Settings(tensors_per_batch=1700)), "1,700 tensors", True),
    "a validation that records a graph needs none":
        (validating("own", validates_with_gradients=True), "torch.no_grad()", True),
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
    record = made(HALVES, waterfall=with_needless(("repeated_backward", "backward", traced_s)), **needless("repeated"))
    assert [found for found in names_of(record) if "repeated" in found] == [name]


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
    validation = outside("validation", 40 * evaluation_s, 40, per_step_s=evaluation_s)
    record = made(HALVES, waterfall=works, **validation)
    assert found_in(record, "repeated_forward").saves_s == pytest.approx(saves_s)


def test_a_broadcast_saves_its_backward_pass_however_long_that_is() -> None:
    works = with_needless(("broadcast", "forward", 0.010), ("broadcast", "backward", 0.035))
    assert found_in(made(HALVES, waterfall=works), "broadcast").saves_s == pytest.approx(0.045)


def test_a_sleep_in_every_fifth_step_is_one_although_a_mean_step_is_shorter() -> None:
    """The recorded step sleeps for 240 ms, a mean step for 48 of 55 ms."""
    use = {"forward": ThreadUse(wall_s=0.055, ran_s=0.007, no_cpu_s=0.0)}
    record = made({"forward": 55.0}, python_times=[line(240.0, "time.sleep")], thread_use=use)
    assert findings_of(record)[0].name == "sleep"
