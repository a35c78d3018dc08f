"""Why a step takes as long as it does, in lines and tables whose figures add up as printed."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path
from typing import get_args
from unittest.mock import ANY

import numpy as np
import pytest
from made_runs import made_record
from made_waterfall import STEP_MS, TERMS_MS, made_waterfall

from lm_profiler.record.quantities import QUANTITIES, TERMS
from lm_profiler.record.run import RunRecord, Term, TermName, Waterfall
from lm_profiler.report.run.run_page import run_page, time_table
from lm_profiler.report.run.sections import waterfall_tables
from lm_profiler.report.run.waterfall_text import no_waterfall, not_drawn, rungs, step_text, why_lines


def lines_of(fall: Waterfall | None) -> list[str]:
    return why_lines(made_record(waterfall=fall))


def printed_sum(line: str) -> tuple[Decimal, Decimal]:
    """The step that a line begins with, and the sum of its terms."""
    step, terms = re.sub(r"\[.*?\] ", "", line).removeprefix("why: ").replace(",", "").split(" ms = ")
    signed = re.findall(r"([+-]?) ?([\d.]+) [a-z]", terms)
    return Decimal(step), sum((Decimal(sign + number) for sign, number in signed), Decimal(0))


def test_every_term_has_a_title_and_the_order_is_the_records() -> None:
    assert tuple(TERMS) == get_args(TermName)
    assert len({title for title, _ in TERMS.values()}) == len(TERMS)


def test_the_line_names_the_ideal_then_the_largest_and_what_is_unexplained() -> None:
    why, to_win = lines_of(made_waterfall())
    assert why == (
        "why: 168.3 ms [167.3, 170.3] = 62.1 ideal + 41.0 slow matmuls + 30.2 beyond bandwidth + 20.0 memory traffic "
        "+ 9.0 gaps + 3.0 input + 1.7 smaller terms + 1.3 unexplained"
    )
    assert to_win == (
        "could save: at most 41.0 ms in slow matmuls (model.blocks.*.attn 21.0 ms: 13 ms in 48 matmul kernels); "
        "at most 30.2 ms in beyond bandwidth (model.blocks.*.attn 19.2 ms)"
    )


def test_a_single_small_term_keeps_its_name_and_none_is_told_of_what_took_no_time() -> None:
    terms = {"ideal": 50.0, "clock": 0.0, "communication": 0.4, "gaps": 40.0, "unexplained": 9.6}
    [why, _] = lines_of(made_waterfall(terms, 100.0))
    assert why.endswith("= 50.0 ideal + 40.0 gaps + 0.4 communication + 9.6 unexplained")


def test_what_is_unexplained_may_be_negative_and_is_always_shown() -> None:
    [below, _] = lines_of(made_waterfall({"ideal": 8.0, "bandwidth": 3.5, "unexplained": -1.5}, 10.0))
    assert below.endswith("= 8.00 ideal + 3.50 memory traffic - 1.50 unexplained")
    [none] = lines_of(made_waterfall({"ideal": 8.0, "bandwidth": 2.0, "unexplained": 0.0}, 10.0))
    assert none.endswith("+ 0.00 unexplained")


@pytest.mark.parametrize("seed", range(50))
def test_figures_add_up_as_printed(seed: int) -> None:
    """Of any split of any step."""
    draws = np.random.default_rng(seed)
    seconds = draws.dirichlet(np.full(len(TERMS), 0.5)) * 10 ** draws.uniform(-5, 1.5)
    if seed % 2:
        seconds[-1] *= -0.5
    terms = [Term(name=name, seconds=float(s), at_most_s=float(s)) for name, s in zip(TERMS, seconds, strict=True)]
    fall = made_waterfall().model_copy(update={"terms": terms, "step_s": float(seconds.sum()), "ci_low": None})
    step, total = printed_sum(lines_of(fall)[0])
    assert total == step
    texts = [Decimal(rung.text.replace(",", "")) for rung in rungs(fall)]
    assert sum(texts) == step
    unit = 10.0 ** texts[0].as_tuple().exponent  # type: ignore[operator]  # of a finite number it is one
    by_title = dict(zip((rung.title for rung in rungs(fall)), (rung.text for rung in rungs(fall)), strict=True))
    for at_most, title in re.findall(r"at most ([\d.,]+) ms in ([a-z ]+)", " ".join(lines_of(fall)[1:])):
        assert at_most == by_title[title.strip()]  # as the line above it has it
    for rung, text in zip(rungs(fall), texts, strict=True):
        assert float(text) == pytest.approx(rung.term.seconds * 1e3, abs=1.001 * unit)


def test_terms_that_do_not_add_up_are_printed_as_they_stand() -> None:
    fall = made_waterfall({"ideal": 70.0, "gaps": 10.0, "unexplained": 0.0}, 100.0)
    assert lines_of(fall)[0].endswith("= 70.0 ideal + 10.0 gaps + 0.0 unexplained")


def test_each_rung_begins_where_the_one_before_it_ends() -> None:
    drawn = rungs(made_waterfall())
    assert [rung.term.name for rung in drawn] == [name for name, ms in TERMS_MS.items() if ms]
    starts_ms = np.cumsum([0.0, *(ms for ms in TERMS_MS.values() if ms)])[:-1]
    assert [rung.start_s * 1e3 for rung in drawn] == pytest.approx(list(starts_ms))


def test_a_term_of_a_later_version_is_shown_by_its_name() -> None:
    [why, _] = lines_of(made_waterfall({"ideal": 50.0, "power_cap": 30.0, "gaps": 20.0, "unexplained": 0.0}, 100.0))
    assert "+ 30.0 power cap" in why


def test_nothing_is_beyond_a_bandwidth_that_nobody_knows() -> None:
    fall = made_waterfall(
        {"ideal": 50.0, "beyond_bandwidth": 50.0, "unexplained": 0.0}, 100.0, bandwidth_bytes_per_s=None
    )
    why, to_win = lines_of(fall)
    assert "+ 50.0 memory-bound + 0.0" in why
    assert "ms in memory-bound (" in to_win
    assert [rung.title for rung in rungs(fall)] == ["ideal", "memory-bound", "unexplained"]
    assert waterfall_tables(made_record(waterfall=fall))[0].rows[1][0].text == "memory-bound"


def test_a_term_that_nobody_can_tell_from_the_next_is_unknown_and_not_nought() -> None:
    terms = {"ideal": 50.0, "clock": 0.0, "slow_products": 49.99, "gaps": 0.01, "input": 0.0, "unexplained": 0.0}
    fall = made_waterfall(terms, 100.0, clock_share=None)
    record = made_record(waterfall=fall)
    assert QUANTITIES["waterfall_clock_s"].get(record) is None
    rows = {row[0].text: row[1].text for row in waterfall_tables(record)[0].rows}
    assert rows["lower clock"] == "unknown"
    assert not_drawn(fall) == "No time in: gaps, input. Unknown, and part of the next term: lower clock."
    assert lines_of(fall)[0].endswith("= 50.0 ideal + 50.0 slow matmuls + 0.0 unexplained")
    assert not_drawn(made_waterfall()) == "No time in: recomputation, waiting for ranks."


@pytest.mark.parametrize(
    "rest_ms, said", [(11.0, "as 11% of the step is unexplained"), (-11.0, "as the traced steps took 11% more")]
)
def test_no_ceiling_is_told_where_much_is_unexplained(rest_ms: float, said: str) -> None:
    """Any term may have taken more than the trace has seen."""
    fall = made_waterfall({"ideal": 59.0 - rest_ms, "slow_products": 41.0, "unexplained": rest_ms}, 100.0)
    [_, to_win] = lines_of(fall)
    assert to_win.startswith(f"could save: unknown, {said}")
    terms, _ = waterfall_tables(made_record(waterfall=fall))
    assert {row[3].text for row in terms.rows} == {""}
    assert to_win.removeprefix("could save: ") in terms.below[0]
    known = made_waterfall({"ideal": 50.0, "slow_products": 41.0, "unexplained": 9.0}, 100.0)
    assert lines_of(known)[1].startswith("could save: at most 41.0 ms")


def test_without_a_waterfall_there_is_no_line_and_no_table() -> None:
    record = made_record()
    assert why_lines(record) == []
    assert waterfall_tables(record) == []
    assert not [line for line in time_table(record).below if line.startswith("why")]


WORDS = ("verdict", "next", "why", "could save")


def test_the_lines_stand_below_the_end_table() -> None:
    below = time_table(made_record(waterfall=made_waterfall())).below
    first = [line.partition(":")[0] for line in below]
    assert [name for name in first if name in WORDS] == list(WORDS)


def test_notes_on_the_waterfall_stand_with_the_others() -> None:
    fall = made_waterfall(notes=["the model's FLOPs take 3 ms"])
    below = time_table(made_record(waterfall=fall, notes=["one"])).below
    assert [line for line in below if line.startswith("note")] == [
        "note: one",
        "note: why: the model's FLOPs take 3 ms",
    ]


def test_they_stand_at_the_head_of_the_runs_page_too(tmp_path: Path) -> None:
    head = run_page(made_record(waterfall=made_waterfall()), tmp_path)[0]
    told = {row[0].text: row[1].text for row in head.rows}
    assert told["why"].startswith("168.3 ms [167.3, 170.3] = 62.1 ideal")
    assert told["could save"].startswith("at most 41.0 ms in slow matmuls")


def test_the_table_has_ceilings_phases_and_the_step_that_the_terms_add_up_to() -> None:
    terms, contributors = waterfall_tables(made_record(waterfall=made_waterfall()))
    assert terms.titles == [
        "term", "time (ms)", "share", "could save at most (ms)", "data (ms)", "forward (ms)", "backward (ms)",
    ]  # fmt: skip
    rows = {row[0].text: [cell.text for cell in row[1:]] for row in terms.rows}
    assert rows["slow matmuls"] == ["41.0", "24.4%", "41.0", "", "13.7", "27.3"]
    assert rows["input"] == ["3.0", "1.8%", "3.0", "3.0", "", ""]
    assert rows["step"][:2] == ["168.3 [167.3, 170.3]", "100.0%"]
    assert sum(Decimal(row[0]) for name, row in rows.items() if name != "step") == Decimal("168.3")
    first = [cell.text for cell in contributors.rows[0]]
    assert first == ["slow matmuls", "model.blocks.*.attn", "aten::mm", "96", "21.0", ANY]


@pytest.mark.parametrize("name", TERMS)
def test_each_term_is_a_column_of_tables(name: str) -> None:
    record = made_record(waterfall=made_waterfall())
    assert QUANTITIES[f"waterfall_{name}_s"].get(record) == pytest.approx(TERMS_MS[name] / 1e3)
    assert QUANTITIES["waterfall_step_s"].interval(record) == pytest.approx((0.1673, 0.1703))


def untraced(**changes: object) -> RunRecord:
    steps = {"measure": 20, "memory": 2, "trace": 2}
    return made_record().model_copy(update={"steps": steps, "steps_planned": steps, **changes})


def test_a_run_without_one_is_told_why_and_what_to_do() -> None:
    use = made_record().utilisation
    assert use is not None
    unknown = use.model_copy(update={"peak_flops_per_s": None, "ceiling_flops_per_s": None})
    told = {
        "no step was traced. Run it again with --trace.steps=2.": made_record(),
        "no step was traced, of 2 planned. Run it again with --trace.steps=2.": untraced(steps={"measure": 20}),
        "the loop ended before the trace. Let it run for all stages: 24 steps or more.": untraced(
            steps={"measure": 3}, notes=["the loop ended in stage measure, after 3 of its 20 steps"]
        ),
        "the FLOPs of a step are unknown; a note of the run says why.": untraced(
            utilisation=None, notes=["FLOPs unknown: the step may replay CUDA graphs"]
        ),
        "the FLOPs of a step are unknown: no step was looked at for them. "
        "Run it again with --memory.steps=1.": untraced(utilisation=None, steps={"measure": 20, "trace": 2}),
        "the FLOPs of a step are unknown.": untraced(utilisation=None),
        "no peak is known for this device. Run it again with --peak_tflops, from its datasheet.": untraced(
            utilisation=unknown
        ),
        "no peak is known for this device; a note says why none was measured. "
        "Run it again with --peak_tflops, from its datasheet.": untraced(
            utilisation=unknown, notes=["ceiling unknown: it was 90 GFLOP/s now and 116 before"]
        ),
        "the dtype of its matrix products is unknown.": untraced(utilisation=use.model_copy(update={"dtype": None})),
        "a note of the run says why.": untraced(notes=["waterfall unknown: KeyError: 'ts'"]),
        "an earlier version ran it, or its trace says too little. Run it again with --trace.steps=2.": untraced(),
    }
    for said, record in told.items():
        assert no_waterfall(record) == f"No waterfall: {said}"
        lines = [line for line in time_table(record).below if line.startswith("why")]
        assert lines == ([f"why: unknown: {said}"] if record.steps_planned.get("trace") else [])
    assert "(oom: OutOfMemoryError in setup)" in no_waterfall(made_record(status="oom"))
    assert no_waterfall(made_record(waterfall=made_waterfall())) == ""


def test_a_run_that_died_is_told_so_and_not_that_its_why_is_unknown() -> None:
    assert why_lines(made_record(status="oom", steps_planned={"trace": 2})) == []


def test_the_step_is_shown_with_its_interval() -> None:
    assert step_text(made_waterfall()) == f"{STEP_MS} [167.3, 170.3]"
