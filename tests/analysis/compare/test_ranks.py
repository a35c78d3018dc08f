"""Two runs of several ranks: own work and waiting stand beside the phases, and a straggler is named."""

from collections.abc import Sequence
from typing import Any

import pytest
from compared import entry_of_rows, rows_of_parts
from made_ranks import made_ranks

from lm_profiler.analysis.compare.comparison import compare
from lm_profiler.record.entry import Entry
from lm_profiler.record.run_record import Ranks
from lm_profiler.report.run.comparison_table import comparison_table


def run_of_ranks(folder: str, ranks: Ranks | None, **changes: Any) -> Entry:
    seconds = 0.095 if ranks is None else ranks.step_s
    seconds_of_steps = [seconds * wobble for wobble in (1.0, 1.01, 0.99) * 3]
    return entry_of_rows(folder, rows_of_parts({"forward": seconds_of_steps}), ranks=ranks, **changes)


def change_of(changes: Sequence[Any], part: str) -> Any:
    return next(change for change in changes if change.part == part)


def test_waiting_and_own_work_are_rows() -> None:
    """In A rank 1 of four takes 30 ms longer than the others' 65, and three of four wait for it; in B nobody does."""
    found = compare([run_of_ranks("a", made_ranks(world=4))], [run_of_ranks("b", made_ranks(world=4, slow=None))])
    waiting, own_work = (change_of(found.ranks, part) for part in ("waiting_s", "own_work_s"))
    assert waiting.a_s == pytest.approx(30e-3 * 3 / 4)
    assert waiting.b_s == pytest.approx(0.0)
    assert waiting.of_step == pytest.approx(-22.5 / 95)
    assert own_work.a_s == pytest.approx(65e-3 + 30e-3 / 4)
    assert own_work.b_s == pytest.approx(65e-3)
    assert own_work.of_step == pytest.approx(-7.5 / 95)
    # One run against one: nobody knows how they scatter.
    assert waiting.verdict == own_work.verdict == "UNCLEAR"
    texts = [[cell.text for cell in row] for row in comparison_table(found).rows]
    assert ["waiting", "22.500", "0.000", "-22.500", "-23.7%", "", "UNCLEAR"] in texts
    (note,) = [note for note in found.notes if "ranks that wait" in note]
    assert "24%" in note
    assert "rank 1" in note


def test_waiting_is_not_blamed_on_the_phase_that_ends_in_it() -> None:
    """Only rank 1's data is 30 ms slower in B: the others wait for it in backward, which itself is as it was."""

    def run_with_slow_rank(folder: str, excess_ms: float) -> Entry:
        """A quarter of the mean excess is in data, three quarters in backward."""
        ranks = made_ranks(world=4, excess_ms=excess_ms)
        seconds = {"data": 5e-3 + excess_ms / 4e3, "forward": 20e-3, "backward": 30e-3 + 0.75e-3 * excess_ms}
        wobble = (1.0, 1.01, 0.99) * 3
        measured = rows_of_parts({part: [mean_s * factor for factor in wobble] for part, mean_s in seconds.items()})
        return entry_of_rows(folder, measured, ranks=ranks)

    found = compare([run_with_slow_rank("a", excess_ms=0.0)], [run_with_slow_rank("b", excess_ms=30.0)])
    assert change_of(found.phases, "backward").difference_s == pytest.approx(0.0, abs=1e-9)
    assert change_of(found.phases, "data").difference_s == pytest.approx(7.5e-3)
    assert found.forward_backward.difference_s == pytest.approx(0.0, abs=1e-9)
    assert change_of(found.ranks, "waiting_s").difference_s == pytest.approx(22.5e-3)
    assert found.step.difference_s == pytest.approx(30e-3)  # which holds both
