"""Two runs of several ranks: own work and waiting stand beside the phases, and a straggler is named."""

from typing import Any

import pytest
from compared import entry, rows
from made_ranks import made_ranks

from lm_profiler.analysis.compare.comparison import compare
from lm_profiler.record.entry import Entry
from lm_profiler.record.run_record import Ranks
from lm_profiler.report.run.comparison_table import comparison_table


def run_of_ranks(folder: str, ranks: Ranks | None, **changes: Any) -> Entry:
    seconds = 0.095 if ranks is None else ranks.step_s
    seconds_of_steps = [seconds * wobble for wobble in (1.0, 1.01, 0.99) * 3]
    return entry(folder, rows({"forward": seconds_of_steps}), ranks=ranks, **changes)


def test_waiting_and_own_work_are_rows() -> None:
    found = compare([run_of_ranks("a", made_ranks(world=4))], [run_of_ranks("b", made_ranks(world=4, slow=None))])
    changes = {change.part: (change.a_s, change.b_s, change.of_step, change.verdict) for change in found.ranks}
    assert changes["waiting_s"][:3] == pytest.approx((22.5e-3, 0.0, -22.5 / 95))
    assert changes["own_work_s"][:3] == pytest.approx((72.5e-3, 65e-3, -7.5 / 95))
    assert {word for *_, word in changes.values()} == {"UNCLEAR"}  # one run against one: nobody knows how they scatter
    texts = [[cell.text for cell in row] for row in comparison_table(found).rows]
    assert ["waiting", "22.500", "0.000", "-22.500", "-23.7%", "", "UNCLEAR"] in texts
    notes = [note for note in found.notes if "ranks that wait" in note]
    assert len(notes) == 1
    assert "24%" in notes[0]
    assert "rank 1" in notes[0]


def test_waiting_is_not_blamed_on_the_phase_that_ends_in_it() -> None:
    """Only rank 1's data is slower in B: the others wait for it in backward, which itself is as it was."""

    def clocked(folder: str, excess_ms: float) -> Entry:
        ranks = made_ranks(world=4, excess_ms=excess_ms)
        seconds = {"data": 5e-3 + excess_ms / 4e3, "forward": 20e-3, "backward": 30e-3 + 0.75e-3 * excess_ms}
        wobble = (1.0, 1.01, 0.99) * 3
        measured = rows({part: [mean_s * factor for factor in wobble] for part, mean_s in seconds.items()})
        return entry(folder, measured, ranks=ranks)

    found = compare([clocked("a", 0.0)], [clocked("b", 30.0)])
    changes = {change.part: change for change in found.phases}
    assert changes["backward"].difference_s == pytest.approx(0.0, abs=1e-9)
    assert changes["data"].difference_s == pytest.approx(7.5e-3)
    assert found.forward_backward.difference_s == pytest.approx(0.0, abs=1e-9)
    assert {change.part: change.difference_s for change in found.ranks}["waiting_s"] == pytest.approx(22.5e-3)
    assert found.step.difference_s == pytest.approx(30e-3)  # which holds both
