"""Verdicts on runs made by hand, and how often they are wrong about runs that do not differ."""

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.simulation import TUNED, spiky
from compared import (
    CONFIG,
    ENVIRONMENT,
    MODEL,
    TEN_MS,
    entry_of_rows,
    entry_of_steps,
    record_like,
    rows_near_10_ms,
    rows_of_parts,
)
from raised import refusal
from stored_texts import assert_stored

from lm_profiler.analysis.compare.comparison import Comparison, compare
from lm_profiler.analysis.compare.ratio import repeats_interval
from lm_profiler.record.entry import Entry
from lm_profiler.record.run_record import Failure, MemoryFacts, MemoryReading, Steadiness, Throughput
from lm_profiler.report.run.comparison_table import comparison_table
from lm_profiler.report.tables.formats import terminal
from lm_profiler.usage_error import UsageError


def made_run(folder: str, scale: float = 1.0, **changes: Any) -> Entry:
    return entry_of_rows(folder, rows_near_10_ms(scale), **changes)


def one_against_one(changes_a: dict[str, Any], changes_b: dict[str, Any]) -> Comparison:
    return compare([made_run("a", **changes_a)], [made_run("b", **changes_b)])


def test_differences_are_ranked_by_their_effect_on_the_step() -> None:
    """In B, backward takes 30 ms less and forward 2; transfer takes twice as long, and yet 0.1 ms of 100.1."""

    def run_of_parts(folder: str, forward_s: float, backward_s: float, transfer_s: float) -> Entry:
        parts_s = {"forward": forward_s, "backward": backward_s, "transfer": transfer_s}
        return entry_of_rows(folder, rows_of_parts({part: [seconds] * 9 for part, seconds in parts_s.items()}))

    found = compare([run_of_parts("a", 0.040, 0.060, 0.0001)], [run_of_parts("b", 0.038, 0.030, 0.0002)])
    backward, forward, transfer = found.phases
    assert [row.part for row in (backward, forward, transfer)] == ["backward", "forward", "transfer"]
    assert found.step.difference_s == pytest.approx(-0.030 - 0.002 + 0.0001)
    assert found.step.verdict == "FASTER"
    assert found.forward_backward.interval.ratio == pytest.approx((38 + 30) / (40 + 60))
    assert backward.of_step == pytest.approx(-30 / 100.1)
    assert transfer.verdict == "SLOWER"
    assert transfer.of_step == pytest.approx(0.1 / 100.1)


def test_a_phase_that_one_run_lacks_has_no_ratio() -> None:
    clipped = entry_of_rows("b", rows_of_parts({"forward": TEN_MS, "clip": [0.001] * 9}))
    changes = {change.part: change for change in compare([made_run("a")], [clipped]).phases}
    assert set(changes) == {"forward", "clip"}
    assert (changes["clip"].verdict, changes["clip"].interval) == ("ONLY B", None)
    assert changes["clip"].difference_s == pytest.approx(0.001)


def test_only_steady_steps_are_compared() -> None:
    of_rank = [
        rows_of_parts({"forward": [9.0, 9.0, *(scale * s for s in 2 * TEN_MS)]}, warmup_s=[99.0], rank=rank)
        for rank, scale in enumerate((1.0, 3.0))
    ]
    found = compare([entry_of_rows("a", [*of_rank[0], *of_rank[1]])], [made_run("b")])
    assert found.step.a_s == pytest.approx(0.0200)
    assert found.step.b_s == pytest.approx(0.0100)


def test_tokens_per_second_follow_step_time_and_tokens() -> None:
    half = Throughput(tokens_per_step=256, tokens_per_s=None, samples_per_step=4)
    found = one_against_one({}, {"scale": 0.4, "throughput": half})
    assert found.tokens.a_per_s == pytest.approx(51_200)
    assert found.tokens.interval.ratio == pytest.approx(0.5 / 0.4)
    assert found.tokens.interval.low < 1.25 < found.tokens.interval.high
    assert found.tokens.verdict == "FASTER"  # a token takes less, as the step does
    slower = one_against_one({}, {"scale": 0.8, "throughput": half})
    assert (slower.step.verdict, slower.tokens.verdict) == ("FASTER", "SLOWER")
    unknown = Throughput(tokens_per_step=None, tokens_per_s=None)
    assert one_against_one({}, {"throughput": unknown}).tokens is None


@pytest.mark.parametrize(
    "reading,gib_a,gib_b,word",
    [
        ("allocated_peak", 1.0, 1.02, "MORE"),
        ("allocated_peak", 1.0, 0.9, "LESS"),
        ("allocated_peak", 1.0, 1.005, "SAME"),
        ("resident_peak", 1.0, 1.02, "UNCLEAR"),  # two processes of one program differ by as much
        ("resident_peak", 1.0, 1.2, "MORE"),
    ],
)
def test_memory_verdicts(reading: str, gib_a: float, gib_b: float, word: str) -> None:
    def peak(gib: float) -> dict[str, Any]:
        return {"memory": MemoryFacts(measured=MemoryReading(**{reading: round(gib * 2**30)}), parts={})}

    (found,) = one_against_one(peak(gib_a), peak(gib_b)).memory
    assert (found.reading, found.verdict) == (reading, word)


def with_options(**options: Any) -> dict[str, Any]:
    return {**CONFIG, "model": {"class_path": "LM", "init_args": {"attention": "sdpa", **options}}}


@pytest.mark.parametrize(
    "change,path",
    [
        ({"verb": "predict"}, "verb"),
        ({"environment": ENVIRONMENT.model_copy(update={"device_name": "NVIDIA L4"})}, "device"),
        ({"environment": ENVIRONMENT.model_copy(update={"world_size": 2})}, "ranks"),
        ({"model": MODEL.model_copy(update={"parameters": 1100})}, "parameters"),
        ({"throughput": Throughput(tokens_per_step=1024, tokens_per_s=None, samples_per_step=4)}, "tokens per step"),
        ({"throughput": Throughput(tokens_per_step=512, tokens_per_s=None, samples_per_step=8)}, "samples per step"),
    ],
)
def test_other_work_or_another_device_is_unlike(change: dict[str, Any], path: str) -> None:
    assert [difference.path for difference in one_against_one({}, change).unlike] == [path]


def test_without_a_config_module_and_command_show_what_differs() -> None:
    bf16 = MODEL.model_copy(update={"precision": "bf16-mixed"})
    found = one_against_one({}, {"config": None, "model": bf16})
    assert [(d.path, d.b) for d in found.config] == [("module.precision", "bf16-mixed")]
    programs = ["python train.py", "python train.py --fault sleep"]
    commands = [
        f"python -m lm_profiler run --name={name} -- {program}" for name, program in zip("ab", programs, strict=True)
    ]
    found = one_against_one(*({"config": None, "command": command} for command in commands))
    assert [(d.path, d.a, d.b) for d in found.config] == [("program", *programs)]


def test_the_runs_of_a_side_must_be_repeats() -> None:
    other_seed = {**CONFIG, "seed_everything": 1, "name": "b"}
    compare([made_run("a0"), made_run("a1", config=other_seed)], [made_run("b")])
    more = Throughput(tokens_per_step=1024, tokens_per_s=None, samples_per_step=4)
    others = {"an option": {"config": with_options(attention="math")}, "tokens": {"throughput": more}}
    messages = {
        case: refusal(
            UsageError, lambda changes=changes: compare([made_run("a0"), made_run("a1", **changes)], [made_run("b")])
        )
        for case, changes in others.items()
    }
    assert_stored("compare/refused: no repeats", messages)
    with pytest.raises(UsageError, match="on both"):
        compare([made_run("x/../a")], [made_run("a"), made_run("b")])


def test_notes_name_the_smallest_change_that_so_many_runs_show() -> None:
    slowing = Steadiness(word="slowing", cut=0, lag1=0, bias_of_mean=0)
    oom = Failure(phase="backward", step=12, type="OutOfMemoryError", message="CUDA out of memory")
    moved = ENVIRONMENT.model_copy(update={"git_commit": "def"})
    found = compare(
        [made_run("a0", steadiness=slowing), *(made_run(f"a{i}", environment=moved) for i in (1, 2))],
        [made_run("b", status="oom", failure=oom)],
    )
    assert_stored("compare/notes: doubts", {"of two sides": found.notes})
    notes = {
        f"{a} against {b}": compare([made_run(f"a{i}") for i in range(a)], [made_run(f"b{i}") for i in range(b)]).notes
        for a, b in ((1, 3), (2, 3), (3, 3))
    }
    assert_stored("compare/notes: so many runs", notes)


def test_a_run_that_measured_nothing_is_named_and_not_compared(tmp_path: Path) -> None:
    empty = entry_of_rows("a1", rows_of_parts({}, warmup_s=[0.01]), status="failed")
    found = compare([made_run("a0"), empty, Entry(made_run("a2").folder, None)], [made_run("b")])
    assert found.a == ["a0"]
    assert_stored("compare/notes: left out", {"two of three runs": found.notes})
    alone = refusal(UsageError, lambda: compare([empty], [made_run("b")]))
    assert_stored("compare/refused: nothing measured", {"all of a side": alone})
    why = Failure(phase="setup", step=None, type="Refused", message="it cannot fit\nwould fit: less")
    refused = Entry(tmp_path, record_like(status="refused", failure=why))  # there is no steps.csv
    message = refusal(UsageError, lambda: compare([made_run("a")], [refused]))
    assert_stored("compare/refused: ended before its first step", {"a run that was refused": message}, run=tmp_path)


def test_an_interval_without_information_is_called_that() -> None:
    """Two runs a side that differ a hundredfold: their interval would be [0.000, 7.42e+22]."""
    a = [made_run(f"a{i}", scale) for i, scale in enumerate((1.0, 100.0))]
    b = [made_run(f"b{i}", scale) for i, scale in enumerate((1.0, 3000.0))]
    found = compare(a, b)
    assert (found.step.interval, found.step.verdict, found.detectable) == (None, "UNCLEAR", None)
    table = terminal(comparison_table(found))
    assert_stored("compare/tells_nothing", {"two runs a side that differ a hundredfold": table})
    assert not re.search(r"e[+]\d|inf|nan", table)
    assert repeats_interval([1e-300, 1e300], [1e-300, 1e300]) is None


def test_printed_comparisons() -> None:
    cases = {
        "surroundings that a killed run did not record": ([made_run("a")], [made_run("b", environment=None)]),
        "other options": ([made_run("a")], [made_run("b", config=with_options(attention="math"))]),
    }
    texts = {case: terminal(comparison_table(compare(*sides)), io.StringIO()) for case, sides in cases.items()}
    assert_stored("compare/printed", texts)


def test_a_note_reports_sides_that_ran_one_after_the_other() -> None:
    def runs(side: str, *minutes: int) -> list[Entry]:
        return [made_run(f"{side}{m}", 1 + m / 100, started=f"2026-01-01T00:0{m}:00+00:00") for m in minutes]

    texts = compare(runs("a", 4, 5, 6), runs("b", 1, 2, 3)).notes
    assert_stored("compare/notes: one after the other", {"all of B before A": texts})
    assert compare(runs("a", 1, 3, 5), runs("b", 2, 4, 6)).notes == []


PAIRS = 40
Times = Callable[[np.random.Generator], list[float]]


def called_different(runs_a: Times, runs_b: Times, repeats: int, pairs: int = PAIRS) -> float:
    """Share of comparisons whose step is called FASTER or SLOWER; ``benchmarks/statistics`` asks for many more."""
    rng = np.random.default_rng(20261121)
    words = []
    for _ in range(pairs):
        a = [entry_of_steps(f"a{i}", runs_a(rng)) for i in range(repeats)]
        b = [entry_of_steps(f"b{i}", runs_b(rng)) for i in range(repeats)]
        words.append(compare(a, b).step.verdict)
    return float(np.mean([word in ("FASTER", "SLOWER") for word in words]))


@pytest.mark.parametrize("kind", ["independent, 15 %", "AR(1), 0.3", "AR(1), 0.6", "one-sided spikes", "eager warm-up"])
def test_one_run_against_an_equal_one_is_seldom_called_different(kind: str) -> None:
    def times(rng: np.random.Generator) -> list[float]:
        return list(TUNED[kind](rng, 20).times_s)

    assert called_different(times, times, 1) < 0.05


def run_of_a_process(rng: np.random.Generator, scale: float = 1.0) -> list[float]:
    """Processes differ by 2 %, as they do on machines that are shared; few steps of all are three times as long."""
    return list(scale * float(np.exp(0.02 * rng.standard_normal())) * spiky(rng, 15, share=0.002).times_s)


def test_a_real_change_is_found_with_repeats() -> None:
    assert called_different(run_of_a_process, lambda rng: run_of_a_process(rng, 1.1), 5, 10) >= 0.9


def test_ten_phases_do_not_add_up_their_false_alarms() -> None:
    rng, parts = np.random.default_rng(7), ("data", "transfer", "forward", "zero_grad", "backward", "clip", "optimizer")
    alarms = 0
    for _ in range(PAIRS):
        a, b = ({part: 0.01 * np.exp(0.1 * rng.standard_normal(20)) for part in parts} for _side in "ab")
        found = compare([entry_of_rows("a", rows_of_parts(a))], [entry_of_rows("b", rows_of_parts(b))])
        alarms += any(row.verdict in ("FASTER", "SLOWER") for row in (found.forward_backward, *found.phases))
    assert alarms / PAIRS < 0.05
