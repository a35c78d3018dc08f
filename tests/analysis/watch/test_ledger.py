"""The ledger's terms add up to the wall time, and each second is of the innermost thing that has a name."""

import numpy as np
import pytest

from lm_profiler.analysis.watch.ledger import EPOCH, VALIDATION, Ledger, NamedSpan, spans_outside_steps
from lm_profiler.record.parts import TIMED

S = 1_000_000_000
FORWARD, OTHER = TIMED.index("forward"), TIMED.index("other")


def host(*steps: tuple[float, float]) -> np.ndarray:
    """Rows of forward and other."""
    rows = np.zeros((len(steps), len(TIMED)))
    for row, (forward_s, other_s) in zip(rows, steps, strict=True):
        row[[FORWARD, OTHER, -1]] = forward_s, other_s, forward_s + other_s
    return rows


@pytest.mark.parametrize("late", [False, True])
def test_every_second_has_one_name(late: bool) -> None:
    ledger = Ledger(0)
    ledger.add_until(2 * S, "set-up")
    # Step 1 from 3 to 6 s: forward 1, other 2, of which a callback takes 1.5 with a checkpoint of 1 within.
    # Step 2 from 6 to 20 s: forward 1, other 1, and amid it validation from 8 to 20 s with a callback of 3 s.
    # The turn of an epoch from 20 to 24 s, with a callback of 1 s. Step 3 from 24 to 25 s.
    begin, end = np.array([3, 6, 24]) * S, np.array([6, 20, 25]) * S
    spans = [
        NamedSpan(round(4.2 * S), round(5.2 * S), "checkpoints"),
        NamedSpan(4 * S, round(5.5 * S), "callback: A"),
        NamedSpan(10 * S, 13 * S, "callback: B"),
        NamedSpan(8 * S, 19 * S, "validation"),
        NamedSpan(21 * S, 22 * S, "callback: B"),
        NamedSpan(26 * S, 27 * S, "callback: C"),  # after the last step
        *spans_outside_steps([(8 * S, VALIDATION), (20 * S, EPOCH)]),
    ]
    rows = host((1, 2), (1, 1), (1, 0))
    if late:  # the device had not reached the last steps when their spans came
        ledger.add(begin[:1], end[:1], rows[:1], spans)
        ledger.add(begin[1:], end[1:], rows[1:], [])
    else:
        ledger.add(begin, end, rows, spans)
    ledger.close(30 * S)
    assert ledger.terms(30 * S) == pytest.approx(
        {
            "set-up": 2.0,
            "step: forward": 3.0,
            "step: other": 1.5,
            "callback: A": 0.5,
            "checkpoints": 1.0,
            "validation": 9.0,
            "callback: B": 4.0,
            "epoch turn": 3.0,
            "closing": 4.0,
            "callback: C": 1.0,
            "unexplained": 1.0,  # before the first step
        },
        abs=1e-6,
    )


def test_a_gap_without_a_name_is_unexplained() -> None:
    ledger = Ledger(0)
    spans = [NamedSpan(2 * S, 3 * S, "own instruments"), NamedSpan(6 * S, 6 * S + S // 2, "own instruments")]
    ledger.add(np.array([0, 4]) * S, np.array([2, 6]) * S, host((2, 0), (2, 0)), spans)
    ledger.add(np.array([9]) * S, np.array([10]) * S, host((1, 0)), [])
    expected = {"step: forward": 5.0, "own instruments": 1.5, "unexplained": 3.5}
    assert ledger.terms(10 * S) == pytest.approx(expected, abs=1e-6)


def test_a_validation_before_the_first_step_is_not_taken_from_that_of_the_last_step() -> None:
    """Validation from 1 to 3 s, the beginning of an epoch, and two steps, the last with validation from 6 to 9 s."""
    ledger = Ledger(0)
    spans = [
        NamedSpan(1 * S, 3 * S, VALIDATION),
        NamedSpan(6 * S, 9 * S, VALIDATION),
        *spans_outside_steps([(1 * S, VALIDATION), (3 * S, EPOCH), (6 * S, VALIDATION)]),
    ]
    ledger.add(np.array([4, 5]) * S, np.array([5, 10]) * S, host((1, 0), (1, 0)), spans)
    expected = {"step: forward": 2.0, "validation": 6.0, "epoch turn": 2.0}
    assert ledger.terms(10 * S) == pytest.approx(expected | {"unexplained": 0.0}, abs=1e-6)
