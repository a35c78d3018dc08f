"""What is printed of a search: the total, each change, and why some were not kept."""

import shlex
from pathlib import Path

import pytest
from made_improve import BF16, TRIED, made_improve, made_tried, nothing_helped
from stored_texts import assert_stored

from lm_profiler.record.improve_record import Final, Numerics
from lm_profiler.report.run.improve_table import improve_table, numerics_text, way_texts
from lm_profiler.report.tables.formats import lines


def test_each_change_has_its_row() -> None:
    table = improve_table(made_improve())
    bf16, _, _, _, refused = texts = [[cell.text for cell in row] for row in table.rows]
    assert bf16 == [
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
    assert refused[1:-1] == [""] * 6  # nothing was run, so nothing is known


def test_the_way_to_the_final_setting_has_the_changes_that_were_kept() -> None:
    """The first and the third of those tried."""
    improved = made_improve()
    names = [change.name for change in improved.steps_after_changes]
    assert names == ["first setting", TRIED[0].name, TRIED[2].name]
    assert way_texts(improved) == [("168.0", ""), ("120.0", "[118.5, 121.5]"), ("97.2", "[95.7, 98.7]")]


FINAL = Final(pairs=4, first_s=0.168, final_s=0.0971, ratio=1.73, low=1.69, high=1.77, first_bytes=2**30)
NEAR = Final(pairs=4, first_s=0.1, final_s=0.0988, ratio=1.012, low=0.995, high=1.03)
FAILED = {
    "nothing helped": nothing_helped(),
    "nothing helped so far": nothing_helped().model_copy(update={"ended": "unfinished"}),
    "nothing was tried": made_improve(ended="budget", tried=TRIED[4:], final=None),
    "the first setting does not run": made_improve(ended="failed", tried=[], final=None),
}
CASES = {
    "changes that were kept, and others": made_improve(),
    "another peak": made_improve(final=FINAL.model_copy(update={"final_bytes": 3 * 2**28})),
    "the same peak": made_improve(final=FINAL.model_copy(update={"final_bytes": round(1.005 * 2**30)})),
    "an interval that holds 1": made_improve(final=NEAR),
    "no last comparison": made_improve(final=None, ended="budget", left=["data.num_workers=4"]),
    "what rounds to nothing has no sign": made_improve(tried=[made_tried("data.num_workers=4", 168.0, -0.01, "SAME")]),
    "one is being tried": made_improve(
        ended="unfinished", tried=[BF16, made_tried("model.compile=true", 120.0, 20.0, None)], final=None
    ),
    **FAILED,
}


def test_printed_searches() -> None:
    assert_stored("report/improve", {case: lines(improve_table(search), 160) for case, search in CASES.items()})
    cases = {
        "by nothing": Numerics(loss=0.0, gradients=0.0, within=True),
        "in the gradients": Numerics(loss=0.0, gradients=0.012, within=True),
        "too much": Numerics(loss=0.1, gradients=None, within=False),
        "unknown": Numerics(loss=None, gradients=None, within=None),
        "of the loss alone": Numerics(loss=1e-7, gradients=None, within=None),
    }
    assert_stored("report/improve_numerics", {case: numerics_text(numerics) for case, numerics in cases.items()})


def test_the_setting_that_was_found_can_be_run(tmp_path: Path) -> None:
    before = improve_table(made_improve(), tmp_path).below
    tmp_path = tmp_path / "it s"  # a shell takes the line as it is
    tmp_path.mkdir()
    (tmp_path / "improved.yaml").touch()
    *others, command = improve_table(made_improve(), tmp_path).below
    assert others == before
    assert shlex.split(command)[-2:] == ["--config", f"{tmp_path}/improved.yaml"]


@pytest.mark.parametrize(
    "why, needs_more",
    [
        ("the budget ran out", True),
        ("more pairs of runs are unlikely to show that it is faster", False),
        ("it was not faster in two checks", False),
        ("more pairs would hardly show it to be faster", False),  # in records of 0.3
        ("it did not look faster at two checks", False),  # in records of 0.3
    ],
)
def test_an_undecided_change_needs_more_pairs_unless_its_reason_settles_it(why: str, needs_more: bool) -> None:
    assert made_tried("a.b=1", 10.0, 0.0, "UNDECIDED", why=why).needs_more_pairs is needs_more
