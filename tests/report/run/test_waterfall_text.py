"""Why a step takes as long as it does, in lines and tables whose figures add up as printed."""

import re
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from made_runs import made_record
from made_waterfall import made_waterfall
from stored_texts import assert_stored

from lm_profiler.record.quantities import TERMS
from lm_profiler.record.run_record import RunRecord, Term
from lm_profiler.report.run.run_page import run_page, time_table
from lm_profiler.report.run.waterfall_text import ends_text, missing_input, rungs, waterfall_tables, why_lines


def step_and_sum_of_terms(line: str) -> tuple[Decimal, Decimal]:
    """The step that a line begins with, and the sum of its terms."""
    step, terms = re.sub(r"\[.*?\] ", "", line).removeprefix("why: ").replace(",", "").split(" ms = ")
    signed = re.findall(r"([+-]?) ?([\d.]+) [a-z]", terms)
    return Decimal(step), sum((Decimal(sign + number) for sign, number in signed), Decimal(0))


@pytest.mark.parametrize("seed", range(50))
def test_figures_add_up_as_printed(seed: int) -> None:
    """Of any split of any step."""
    draws = np.random.default_rng(seed)
    seconds = draws.dirichlet(np.full(len(TERMS), 0.5)) * 10 ** draws.uniform(-5, 1.5)
    if seed % 2:
        seconds[-1] *= -0.5
    terms = [Term(name=name, seconds=float(s), at_most_s=float(s)) for name, s in zip(TERMS, seconds, strict=True)]
    fall = made_waterfall().model_copy(update={"terms": terms, "step_s": float(seconds.sum()), "ci_low": None})
    line = why_lines(made_record(waterfall=fall))[0]
    step, total = step_and_sum_of_terms(line)
    assert total == step
    printed = [Decimal(rung.text.replace(",", "")) for rung in rungs(fall)]
    assert sum(printed) == step
    last_digit = 10.0 ** printed[0].as_tuple().exponent  # of a finite number it is one
    for rung, ms in zip(rungs(fall), printed, strict=True):
        assert float(ms) == pytest.approx(rung.term.seconds * 1e3, abs=1.001 * last_digit)


UNKNOWN_CLOCK = made_waterfall(
    {"ideal": 50.0, "clock": 0.0, "slow_products": 49.99, "gaps": 0.01, "input": 0.0, "unexplained": 0.0},
    100.0,
    clock_share=None,
)
UNKNOWN_BANDWIDTH = made_waterfall(
    {"ideal": 50.0, "beyond_bandwidth": 50.0, "unexplained": 0.0}, 100.0, bandwidth_bytes_per_s=None
)
WATERFALLS = {
    "the ideal, then the largest, then what is unexplained": made_waterfall(),
    "a single small term keeps its name, and terms without time are left out": made_waterfall(
        {"ideal": 50.0, "clock": 0.0, "communication": 0.4, "gaps": 40.0, "unexplained": 9.6}, 100.0
    ),
    "what is unexplained may be negative": made_waterfall({"ideal": 8.0, "bandwidth": 3.5, "unexplained": -1.5}, 10.0),
    "and is shown where it is nothing": made_waterfall({"ideal": 8.0, "bandwidth": 2.0, "unexplained": 0.0}, 10.0),
    "terms that do not add up": made_waterfall({"ideal": 70.0, "gaps": 10.0, "unexplained": 0.0}, 100.0),
    "a term of a later version": made_waterfall(
        {"ideal": 50.0, "power_cap": 30.0, "gaps": 20.0, "unexplained": 0.0}, 100
    ),
    "a bandwidth that nobody knows": UNKNOWN_BANDWIDTH,
    "a clock that nobody knows": UNKNOWN_CLOCK,
    "much is unexplained, so that no ceiling is given": made_waterfall(
        {"ideal": 48.0, "slow_products": 41.0, "unexplained": 11.0}, 100.0
    ),
    "the traced steps took more": made_waterfall({"ideal": 70.0, "slow_products": 41.0, "unexplained": -11.0}, 100),
    "not quite as much is unexplained": made_waterfall({"ideal": 50.0, "slow_products": 41.0, "unexplained": 9.0}, 100),
    "with a note": made_waterfall(notes=["the model's FLOPs take 3 ms"]),
}


def test_the_lines_are_as_stored(tmp_path: Path) -> None:
    """Below the table of a run's end; at the head of its page; the tables of terms, with what is below."""
    texts = {}
    for case, fall in WATERFALLS.items():
        record = made_record(waterfall=fall, notes=["one"])
        below = [line for line in time_table(record).below if line.startswith(("why", "note"))]
        head = {row[0].text: row[1].text for row in run_page(record, tmp_path)[0].rows}
        values = {line.partition(": ")[0]: line.partition(": ")[2] for line in below}
        assert {name: head.get(name) for name in WORDS[2:]} == {name: values.get(name) for name in WORDS[2:]}
        terms = waterfall_tables(record)
        texts[case] = [*below, *(line for table in terms for line in (*table.above, *table.below))]
    assert_stored("report/why", texts)


WORDS = ("verdict", "next", "why")


def test_the_waterfall_stands_below_verdict_and_advice() -> None:
    below = time_table(made_record(waterfall=made_waterfall())).below
    names = [line.partition(":")[0] for line in below]
    assert [name for name in names if name in WORDS] == ["verdict", "next", "why"]


def test_a_run_without_a_waterfall_has_no_lines_of_it() -> None:
    record = made_record()
    assert why_lines(record) == []
    assert waterfall_tables(record) == []
    assert not [line for line in time_table(record).below if line.startswith("why")]


def test_a_run_without_a_waterfall_has_a_reason() -> None:
    """It is printed only if a trace was requested."""
    reasons = {}
    for case, record in runs_without_waterfall().items():
        missing = missing_input(record)
        reasons[case] = f"No waterfall: {missing}"
        was_requested = bool(record.steps_planned.get("trace"))
        printed = [line for line in time_table(record).below if line.startswith("why: unknown")]
        assert printed == ([f"why: unknown: {missing}"] if was_requested else [])
    assert_stored("report/no_why", reasons)


def test_terms_of_several_traced_steps_have_a_range() -> None:
    """From nine tenths of the mean to twelve: for slow matmuls 41 ms."""
    of_one_step = made_waterfall(traced_steps=3)
    terms = []
    for term in of_one_step.terms:
        terms.append(term.model_copy(update={"low_s": 0.9 * term.seconds, "high_s": 1.2 * term.seconds}))
    fall = of_one_step.model_copy(update={"terms": terms})
    table = waterfall_tables(made_record(waterfall=fall))[0]
    assert [title.partition(" (ms)")[0] for title in table.titles[3:5]] == ["from", "to"]
    rows = {row[0].text: [cell.text for cell in row[1:5]] for row in table.rows}
    assert rows["slow matmuls"] == ["41.0", "24.4%", "36.9", "49.2"]
    assert rows["step"][2:] == ["", ""]
    assert any(line.startswith("from, to:") and "3 traced steps" in line for line in table.below)


def test_the_range_of_a_term_in_words() -> None:
    """Of one step, and of an older version, there is none."""
    term = made_waterfall().terms[2]
    with_range = term.model_copy(update={"low_s": 0.9 * term.seconds, "high_s": 1.2 * term.seconds})
    assert_stored(
        "report/notes: ends of a term", {"of three steps": ends_text(made_waterfall(traced_steps=3), with_range)}
    )
    assert ends_text(made_waterfall(traced_steps=3), term) == ""


def untraced_record(**changes: object) -> RunRecord:
    steps = {"measure": 20, "memory": 2, "trace": 2}
    return made_record().model_copy(update={"steps": steps, "steps_planned": steps, **changes})


def runs_without_waterfall() -> dict[str, RunRecord]:
    """By what is missing."""
    use = made_record().utilisation
    unknown = use.model_copy(update={"peak_flops_per_s": None, "ceiling_flops_per_s": None})
    ended = {"steps": {"measure": 3}, "notes": ["the loop ended in stage measure, after 3 of its 20 steps"]}
    return {
        "no trace was asked for": made_record(),
        "no step was traced": untraced_record(steps={"measure": 20}),
        "the loop ended before": untraced_record(**ended),
        "FLOPs are unknown, with a note": untraced_record(
            utilisation=None, notes=["FLOPs unknown: the step may replay CUDA graphs"]
        ),
        "no step was looked at for FLOPs": untraced_record(utilisation=None, steps={"measure": 20, "trace": 2}),
        "FLOPs are unknown": untraced_record(utilisation=None),
        "no peak is known": untraced_record(utilisation=unknown),
        "no peak is known and none was measured": untraced_record(
            utilisation=unknown, notes=["ceiling unknown: it was 90 GFLOP/s now and 116 before"]
        ),
        "no dtype is known": untraced_record(utilisation=use.model_copy(update={"dtype": None})),
        "it failed, with a note": untraced_record(notes=["waterfall unknown: KeyError: 'ts'"]),
        "an earlier version ran it": untraced_record(),
        "the run died": made_record(status="oom"),
    }
