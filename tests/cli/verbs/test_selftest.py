"""What the self-test prints, from records made by hand; and once for real."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest
import warm

from lm_profiler.analysis.compare.ratio import ratio_interval
from lm_profiler.cli.main import main
from lm_profiler.cli.verbs import selftest
from lm_profiler.record.quantities import TIMES
from lm_profiler.record.run import Contention, Environment, RunRecord, Steadiness, TimeSummary

NOISE = [0.0, 0.2, -0.1, 0.1, 0.05, -0.2, 0.15, -0.15, 0.1, -0.1, 0.0, 0.2, -0.05, 0.12, -0.08, 0.03]


def cell(median_ms: float, word: str | None = "steady") -> tuple[RunRecord, list[float]]:
    """A run whose summary of the step is filled in by hand, and its steps."""
    steps = [(median_ms + noise) * 1e-3 for noise in NOISE]
    nothing = TimeSummary(n=0).model_dump()
    step = {"n": 16, "median": median_ms * 1e-3, "ci_low": median_ms * 0.99e-3, "ci_high": median_ms * 1.02e-3}
    record = RunRecord(
        name="x", status="ok", failure=None, verb="fit", started="", duration_s=1.0, command="", config=None,
        environment=Environment(
            versions={}, platform="", cpu="", cpu_count=2, threads=2, device_type="cpu", device_name="Toy CPU",
            device_bytes=None, driver=None, world_size=1, flags={}, git_commit=None,
        ),
        time={part: TimeSummary(**{**nothing, **(step if part == "step" else {})}) for part in TIMES},
        steadiness=Steadiness(
            word=word, cut=0, drift=None, lag1=None, bias_of_mean=None, evidence="", recompilations=0
        ),
    )  # fmt: skip
    return record, steps


def lines(
    b_ms: float = 10.0, bare: Sequence[float] = (9e-3,) * 20, ours: Sequence[float] = (9.1e-3,) * 20
) -> list[str]:
    return selftest.report([cell(10.0), cell(b_ms, None)], (list(bare), list(ours)))


def test_each_run_is_told_with_its_interval_and_its_word() -> None:
    first, a, b, *_ = lines(20.0)
    assert first == "A/A on Toy CPU: the same fit twice, in fresh processes"
    assert a == "  A: step 10.000 ms [9.900, 10.200], steady"
    assert b == "  B: step 20.000 ms [19.800, 20.400], too short to judge"


def test_a_machine_that_was_shared_is_told_beside_the_word() -> None:
    fields = {**dict.fromkeys(Contention.model_fields), "wall_s": 1.0, "cpus": 2, "had_s": 1.0, "stolen_s": 0.0}
    (a, steps), b = cell(10.0), cell(10.0)
    shared = a.model_copy(update={"contention": Contention(**{**fields, "not_had": 0.41})})
    said = selftest.report([(shared, steps), b], ([9e-3] * 20, [9.1e-3] * 20))
    assert said[1].endswith(
        ", steady, shared; something else used this machine: 41% of the CPU time this run needed was taken"
    )
    assert said[2].endswith(", steady")


@pytest.mark.parametrize("b_ms,word", [(10.0, None), (12.0, "SLOWER"), (8.0, "FASTER")])
def test_the_difference_is_that_of_the_medians(b_ms: float, word: str | None) -> None:
    (said,) = [line for line in lines(b_ms) if "observed difference" in line]
    found = re.fullmatch(r"  observed difference: (\S+)% \[(\S+)%, (\S+)%\], (false alarm: )?(\w+)(; .+)?", said)
    assert found is not None
    a, b = cell(10.0)[1], cell(b_ms)[1]
    seen = 100 * (statistics.median(b) / statistics.median(a) - 1)
    assert float(found[1]) == pytest.approx(seen, abs=0.006)
    assert float(found[2]) <= seen + 0.01
    assert float(found[3]) >= seen - 0.01
    assert found[5] == word if word else found[5] in ("SAME", "UNCLEAR")
    assert bool(found[4]) == bool(found[6]) == bool(word)  # the two are equal programs


def test_the_smallest_change_is_by_hand() -> None:
    interval = ratio_interval([cell(10.0)[1]], [cell(10.0)[1]])
    assert interval is not None
    half = (interval.high - interval.low) / 2
    by_hand = max(0.01, abs(interval.ratio - 1), half * (2.1701 + 0.8416) / 2.1701)  # 98.5 % and 80 % quantiles
    (said,) = [line for line in lines() if "smallest change" in line]
    assert float(said.rpartition(" ")[2].rstrip("%")) == pytest.approx(100 * by_hand, abs=0.051)


@pytest.mark.parametrize("steps", [cell(10.0)[1][:5], [10.0 ** (n % 8 - 4) for n in range(16)]])
def test_steps_that_are_too_few_or_too_noisy_are_not_compared(steps: list[float]) -> None:
    (a, _), (b, others) = cell(10.0), cell(10.0)
    said = selftest.report([(a, steps), (b, others)], ([], []))
    assert said[3:] == [
        "  too few steps, or too noisy ones, to compare; raise --stages.measure_steps",
        "instruments: too few steps to measure their cost",
    ]


@pytest.mark.parametrize(
    "ours_ms,cost,share",
    [(9.1, "+100.0 µs a step [+100.0, +100.0]", "1.00%"), (8.91, "-90.0 µs a step [-90.0, -90.0]", "-0.90%")],
)
def test_the_cost_has_a_sign_and_an_interval(ours_ms: float, cost: str, share: str) -> None:
    said = lines(ours=[ours_ms * 1e-3] * 20)[-1]
    assert said.startswith(f"instruments: {cost} against Trainer(barebones=True), ")
    assert said.endswith(f", {share} of the step above")


def test_the_cost_of_noisy_steps_is_within_its_interval() -> None:
    said = lines(bare=cell(9.0)[1], ours=cell(9.5)[1])[-1]
    found = re.match(r"instruments: (\S+) µs a step \[(\S+), (\S+)\]", said)
    assert found is not None
    cost, low, high = (float(text) for text in found.groups())
    assert cost == pytest.approx(500)
    assert low < cost < high


def test_a_failing_run_says_why(tmp_path: Path) -> None:
    told = warm.run("-m", "lm_profiler", "selftest", "--stages.warmup=3", folder=tmp_path)
    assert told.returncode == 2
    assert told.stderr == "lm_profiler: unknown option --stages.warmup; did you mean --stages.warmup_steps?\n"
    assert told.stdout == ""


def test_a_real_self_test(tmp_path: Path) -> None:
    tiny = (
        "--model.d_model=32", "--model.d_ff=64", "--model.num_layers=1", "--model.num_heads=2",
        "--model.vocab_size=64", "--data.context_length=16", "--data.batch_size=2", "--trainer.accelerator=cpu",
        "--stages.warmup_steps=1", "--stages.measure_steps=24",  # half may be left out
    )  # fmt: skip
    done = warm.run("-m", "lm_profiler", "selftest", *tiny, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    # On a machine that is busy, two runs may be too noisy to compare; the tests above hold what is said of each.
    comparison = ["too"] if "too noisy" in said[3] else ["observed", "smallest"]
    assert [line.split()[0] for line in said] == ["A/A", "A:", "B:", *comparison, "instruments:"]
    assert re.match(r"instruments: [+-]\d+\.\d µs a step \[", said[-1])
    assert not list(tmp_path.iterdir())  # it keeps no runs


def test_a_wrong_call_is_one_of_fit_too(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--config=nowhere.yaml"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("lm_profiler: config: expected a YAML file of options, given nowhere.yaml")
