"""The Improve view: the way down as bars, and all that was tried."""

import pytest
from made_improve import made_improve, nothing_helped
from shown import bars_of, of_kind, rows_of, text_of, titled

from lm_profiler.report.views.improve_view import improve_blocks


def test_bars_go_down_with_each_change_that_was_kept() -> None:
    blocks = improve_blocks({"helped": made_improve(), "nothing": nothing_helped()})
    helped = titled(blocks, "helped")
    assert "step 168.0 → 97.1 ms, 1.73 × [1.69, 1.77], measured again in 4 pairs" in text_of([helped])
    rows = list(bars_of(helped).values())
    lengths = [row["pieces"][0]["width"] for row in rows]
    assert [length / lengths[0] for length in lengths] == pytest.approx([1.0, 120 / 168, 97.2 / 168], abs=0.01)
    assert sum("whisker" in row for row in rows) == 2
    assert [row[-1] for row in rows_of(helped)[1:]] == ["FASTER, kept", "NUMERICS", "FASTER, kept", "SAME", "REFUSED"]
    nothing = titled(blocks, "nothing")
    assert "nothing helped" in text_of([nothing])
    assert of_kind([nothing], "bars") == []
    assert "lm_profiler improve" in text_of(improve_blocks({}))
