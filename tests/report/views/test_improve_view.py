"""The Improve view: the way down as bars, and all that was tried."""

import pytest
from made_improve import made_improve, nothing_helped
from shown import bars_of, block_titled, blocks_of_kind, table_rows, text_of

from lm_profiler.report.views.improve_view import improve_blocks


def test_bars_go_down_with_each_change_that_was_kept() -> None:
    """From 168 ms to 120 and to 97.2."""
    blocks = improve_blocks({"helped": made_improve(), "nothing": nothing_helped()})
    helped = block_titled(blocks, "helped")
    assert "step 168.0 → 97.1 ms, 1.73 × [1.69, 1.77], measured again in 4 pairs" in text_of([helped])
    first, *_ = rows = list(bars_of(helped).values())
    first_width = first["pieces"][0]["width"]
    shares = [row["pieces"][0]["width"] / first_width for row in rows]
    assert shares == pytest.approx([1.0, 120 / 168, 97.2 / 168], abs=0.01)
    assert sum("whisker" in row for row in rows) == 2
    _, *changes = table_rows(helped)
    assert [change[-1] for change in changes] == ["FASTER, kept", "NUMERICS", "FASTER, kept", "SAME", "REFUSED"]


def test_a_search_that_kept_nothing_has_no_bars() -> None:
    nothing = block_titled(improve_blocks({"nothing": nothing_helped()}), "nothing")
    assert "nothing helped" in text_of([nothing])
    assert blocks_of_kind([nothing], "bars") == []


def test_without_a_search_the_verb_is_named() -> None:
    assert "lm_profiler improve" in text_of(improve_blocks({}))
