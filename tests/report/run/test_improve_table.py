"""What a search is told as: the total, each change, and why some were not kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_improve import BF16, TRIED, made_improve, nothing_helped, tried

from lm_profiler.record.improve import Final, ImproveRecord, Numerics
from lm_profiler.report.run.improve_table import headline, improve_table, numerics_text, saved_text, way_texts


def said(record: ImproveRecord) -> list[str]:
    return improve_table(record).below


def test_each_change_has_its_row_and_the_total_stands_below() -> None:
    table = improve_table(made_improve())
    texts = [[cell.text for cell in row] for row in table.rows]
    assert texts[0] == [
        "trainer.precision=bf16-mixed",
        "168.0 → 120.0",
        "48.0 [46.5, 49.5]",
        "61.2",
        "3",
        "1.50 GiB → 1.00 GiB",
        "loss 0.042 %, gradients 1.2 %",
        "FASTER, kept",
    ]
    assert [row[-1] for row in texts] == ["FASTER, kept", "NUMERICS", "FASTER, kept", "SAME", "REFUSED"]
    assert {len(row) for row in texts} == {len(table.headings)}
    assert texts[4][1:-1] == [""] * 6  # nothing was run, so nothing is known
    assert table.below == [
        "step 168.0 → 97.1 ms, 1.73 × [1.69, 1.77], measured anew in 4 pairs",
        "4 changes tried in 31 runs, 9.5 min of a budget of 10 min; all was tried",
        "trainer.precision=bf16-true: gradients 8.1 % off, at most 5 %",
        "model.fused=true: needs a GPU",
        "trainer.precision=bf16-mixed may change the results: rounding: products have 8 bits of precision",
    ]


def test_the_peak_of_the_final_setting_is_told_where_it_is_another_one() -> None:
    final = Final(pairs=4, first_s=0.168, final_s=0.0971, ratio=1.73, low=1.69, high=1.77, first_bytes=2**30)
    assert "memory 1.00 GiB → 0.75 GiB" in said(made_improve(final=final.model_copy(update={"final_bytes": 3 * 2**28})))
    alike = final.model_copy(update={"final_bytes": round(1.005 * 2**30)})
    assert not any(line.startswith("memory") for line in said(made_improve(final=alike)))


def test_what_rounds_to_nought_has_no_sign() -> None:
    assert saved_text(tried("data.num_workers=4", 168.0, -0.01, "SAME")) == "0.0 [-1.5, 1.5]"


def test_a_ratio_whose_interval_holds_1_is_no_gain() -> None:
    near = Final(pairs=4, first_s=0.1, final_s=0.0988, ratio=1.012, low=0.995, high=1.03)
    assert headline(made_improve(final=near)) == (
        "step 100.0 → 98.8 ms, 1.012 × [0.995, 1.030], measured anew in 4 pairs; that it is faster at all is not sure"
    )


def test_without_a_last_comparison_the_total_is_said_to_be_as_it_was_chosen() -> None:
    record = made_improve(final=None, ended="budget", left=["data.num_workers=4"])
    assert said(record)[0] == "step 168.0 → 97.2 ms, 1.73 × as it was chosen, not compared anew"
    assert "not tried: data.num_workers=4" in said(record)


@pytest.mark.parametrize(
    "record, words",
    [
        (nothing_helped(), "nothing helped"),
        (nothing_helped().model_copy(update={"ended": "unfinished"}), "nothing helped so far"),
        (made_improve(ended="budget", tried=TRIED[4:], final=None), "nothing was tried: the budget is too short"),
        (made_improve(ended="failed", tried=[], final=None), "the first setting does not run to its end"),
    ],
)
def test_what_brought_nothing_says_so(record: ImproveRecord, words: str) -> None:
    assert said(record)[0].startswith(words)
    assert "first setting: step 168.5 ms, in its first run" in said(record)
    assert record.way == []


def test_what_is_under_way_is_shown_as_far_as_it_is_known() -> None:
    record = made_improve(ended="unfinished", tried=[BF16, tried("model.compile=true", 120.0, 20.0, None)], final=None)
    assert improve_table(record).rows[1][-1].text == "being tried"
    assert said(record)[1].endswith("it is still running, or its process was killed: the same call goes on with it")
    assert not improve_table(made_improve(tried=[], final=None)).headings


def test_the_way_down_is_what_was_kept_to_as_many_digits_as_the_first_step() -> None:
    assert [of.name for of in made_improve().way] == ["first setting", TRIED[0].name, TRIED[2].name]
    assert way_texts(made_improve()) == [("168.0", ""), ("120.0", "[118.5, 121.5]"), ("97.2", "[95.7, 98.7]")]


@pytest.mark.parametrize(
    "loss, gradients, within, text",
    [
        (0.0, 0.0, True, "nothing"),
        (0.0, 0.012, True, "gradients 1.2 %"),
        (0.1, None, False, "too much: loss 10 %"),
        (None, None, None, "unknown"),
        (1e-7, None, None, "unknown: loss 1e-05 %"),
    ],
)
def test_numbers_that_are_off_say_by_how_much(
    loss: float | None, gradients: float | None, within: bool | None, text: str
) -> None:
    assert numerics_text(Numerics(loss=loss, gradients=gradients, within=within)) == text


def test_the_setting_that_was_found_can_be_run(tmp_path: Path) -> None:
    assert "to run it" not in improve_table(made_improve(), tmp_path).below[-1]
    tmp_path = tmp_path / "it s"  # a shell takes the line as it is
    tmp_path.mkdir()
    (tmp_path / "improved.yaml").touch()
    told = f"to run it: lm_profiler fit --config '{tmp_path}/improved.yaml'"
    assert improve_table(made_improve(), tmp_path).below[-1] == told
