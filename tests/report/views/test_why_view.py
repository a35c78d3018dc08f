"""The Why view: bars that lead from the ideal step to the measured one, and what each consists of."""

from pathlib import Path
from typing import Any

import pytest
from made_environment import made_contention
from made_runs import made_entry, made_record
from made_waterfall import STEP_MS, TERMS_MS, made_waterfall
from shown import bars_of, blocks_of_view, table_rows, text_of

from lm_profiler.record.entry import Entry
from lm_profiler.record.quantities import TERMS

SHARES = {"data": 0.1, "forward": 0.3, "backward": 0.5, "optimizer": 0.1}


def why_view(**options: Any) -> list[Any]:
    return blocks_of_view(
        "why", Entry(Path("a"), made_record(**{"waterfall": made_waterfall(), "shares": SHARES, **options}))
    )


def extent_of(row: Any) -> tuple[float, float]:
    """From where to where the pieces of a bar reach."""
    pieces = row["pieces"]
    return min(piece["left"] for piece in pieces), max(piece["left"] + piece["width"] for piece in pieces)


def test_the_bars_of_the_waterfall_add_up() -> None:
    """Each begins where the one before ends, and the last one, of the step, is as long as all of them."""
    rows = bars_of(why_view()[0])
    terms_ms = {TERMS[name][0]: ms for name, ms in TERMS_MS.items() if ms}
    assert list(rows) == [*terms_ms, "measured step"]
    left, right = extent_of(rows["measured step"])
    width_of_ms = (right - left) / STEP_MS
    start_ms = 0.0
    for title, ms in terms_ms.items():
        end_ms = start_ms + ms
        assert extent_of(rows[title]) == pytest.approx((start_ms * width_of_ms, end_ms * width_of_ms), abs=1e-6)
        start_ms = end_ms


def test_the_figures_of_the_waterfall_add_up() -> None:
    card = why_view()[0]
    *terms, step = bars_of(card).values()
    printed_ms = [float(term["cells"][0]) for term in terms]
    assert round(sum(printed_ms), 1) == STEP_MS == 168.3
    assert step["cells"][:2] == ["168.3", "100.0%"]
    assert bars_of(card)["gaps"]["cells"] == ["+9.0", "5.3%", "9.0"]
    assert "168.3 ms [167.3, 170.3]" in card["title"]
    assert "62.1 ms (36.9%) would be ideal. The largest additions: 41.0 ms slow matmuls, 30.2 ms" in text_of([card])


def test_a_term_has_a_table_of_what_it_consists_of() -> None:
    rows = bars_of(why_view()[0])
    slow = rows["slow matmuls"]
    [table] = [block for block in slow["inside"] if block["kind"] == "table"]
    assert table_rows(table) == [
        ["module", "what", "times", "time (ms)", "detail"],
        ["model.blocks.*.attn", "aten::mm", "96", "21.0", "13 ms in 48 matmul kernels; m 512, n 768, k 64"],
        ["model.blocks.*.ff", "aten::mm", "72", "11.5", ""],
        ["model.head", "aten::mm", "2", "8.5", "tiles of 128 x 128 waste 31 %"],
    ]
    assert "Could save at most 41.0 ms." in text_of(slow["inside"])
    assert "unknown" in text_of(rows["input"]["inside"])


def test_on_a_shared_machine_no_waterfall_is_drawn() -> None:
    """The terms are upper bounds, which add up to nothing."""
    blocks = why_view(contention=made_contention(0.41, wall_s=2.0, had_s=1.5, waited_s=1.0, others_s=1.25))
    assert [block["kind"] for block in blocks] == ["line"]
    assert "upper bounds" in text_of(blocks)


def test_without_a_waterfall_the_view_says_how_to_get_one(tmp_path: Path) -> None:
    untraced = made_entry(tmp_path / "a")
    assert "Run it again with --trace.steps=2." in text_of(blocks_of_view("why", untraced))
    without_peak = made_record().utilisation.model_copy(update={"peak_flops_per_s": None, "ceiling_flops_per_s": None})
    traced = why_view(waterfall=None, utilisation=without_peak, steps={"measure": 20, "trace": 2})
    assert "Run it again with --peak_tflops" in text_of(traced)
