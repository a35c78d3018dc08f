"""The Why view: bars that lead from the ideal step to the measured one, and what each consists of."""

from pathlib import Path
from typing import Any

import pytest
from made_environment import made_contention
from made_runs import made_entry, made_record
from made_waterfall import STEP_MS, TERMS_MS, made_waterfall
from shown import bars_of, rows_of, shown, text_of

from lm_profiler.record.entry import Entry
from lm_profiler.record.quantities import TERMS

SHARES = {"data": 0.1, "forward": 0.3, "backward": 0.5, "optimizer": 0.1}


def blocks_of(**options: Any) -> list[Any]:
    return shown("why", Entry(Path("a"), made_record(**{"waterfall": made_waterfall(), "shares": SHARES, **options})))


def ends(row: Any) -> tuple[float, float]:
    """From where to where the pieces of a bar reach."""
    pieces = row["pieces"]
    return min(piece["left"] for piece in pieces), max(piece["left"] + piece["width"] for piece in pieces)


def test_the_bars_of_the_waterfall_add_up() -> None:
    card = blocks_of()[0]
    rows = bars_of(card)
    taking = {name: ms for name, ms in TERMS_MS.items() if ms}
    assert list(rows) == [*(TERMS[name][0] for name in taking), "measured step"]
    left, right = ends(rows["measured step"])
    per_ms = (right - left) / STEP_MS
    start_ms = 0.0
    for name, ms in taking.items():
        assert ends(rows[TERMS[name][0]]) == pytest.approx((start_ms * per_ms, (start_ms + ms) * per_ms), abs=1e-6)
        start_ms += ms
    *terms, step = bars_of(card).values()
    assert round(sum(float(row["cells"][0]) for row in terms), 1) == STEP_MS
    assert step["cells"][:2] == ["168.3", "100.0%"]
    assert bars_of(card)["gaps"]["cells"] == ["+9.0", "5.3%", "9.0"]
    assert "168.3 ms [167.3, 170.3]" in card["title"]
    assert "62.1 ms (36.9%) would be ideal. The largest additions: 41.0 ms slow matmuls, 30.2 ms" in text_of([card])
    rows = bars_of(blocks_of()[0])
    slow = rows["slow matmuls"]
    [table] = [block for block in slow["inside"] if block["kind"] == "table"]
    assert rows_of(table) == [
        ["module", "what", "times", "time (ms)", "detail"],
        ["model.blocks.*.attn", "aten::mm", "96", "21.0", "13 ms in 48 matmul kernels; m 512, n 768, k 64"],
        ["model.blocks.*.ff", "aten::mm", "72", "11.5", ""],
        ["model.head", "aten::mm", "2", "8.5", "tiles of 128 x 128 waste 31 %"],
    ]
    assert "Could save at most 41.0 ms." in text_of(slow["inside"])
    assert "unknown" in text_of(rows["input"]["inside"])


def test_a_waterfall_that_cannot_be_drawn_has_a_reason(tmp_path: Path) -> None:
    """On a machine that others use the terms are upper bounds, which add up to nothing."""
    blocks = blocks_of(contention=made_contention(0.41, wall_s=2.0, had_s=1.5, waited_s=1.0, others_s=1.25))
    assert [block["kind"] for block in blocks] == ["line"]
    assert "upper bounds" in text_of(blocks)
    use = made_record().utilisation
    unknown = use.model_copy(update={"peak_flops_per_s": None, "ceiling_flops_per_s": None})
    traced = {"utilisation": unknown, "steps": {"measure": 20, "trace": 2}}
    assert "Run it again with --trace.steps=2." in text_of(shown("why", made_entry(tmp_path / "a")))
    assert "Run it again with --peak_tflops" in text_of(blocks_of(waterfall=None, **traced))
