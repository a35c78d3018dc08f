"""Whose ``other`` is, in one line."""

from __future__ import annotations

from lm_profiler.record.quantities import counted
from lm_profiler.record.run import OwnedTime, RunRecord

_SHOWN = 4


def other_lines(record: RunRecord) -> list[str]:
    """The measured ``other``, and what it was while each action was timed, by the longest of these; or none.

    Of several ranks it is the first one's. The line's parts add up to the second figure: timing every
    action takes some time itself.
    """
    owned = record.other_by_owner
    if owned is None or not owned.actions:
        return []
    rank = " of rank 0" * (len(record.rank_step_s) > 1)
    total = f"{_ms(owned.seconds)} ms while each action of {counted(owned.steps, 'step')} was timed"
    whole = total if owned.measured_s is None else f"{_ms(owned.measured_s)} ms, {total}"
    said = [_said(action, owned.steps) for action in owned.actions[:_SHOWN]]
    if rest := owned.actions[_SHOWN:]:
        said.append(f"{len(rest)} more {_ms(sum(action.seconds for action in rest))}")
    return [f"other{rank}: {whole}: {', '.join(said)}"]


def _said(action: OwnedTime, steps: int) -> str:
    often = "" if action.in_steps == steps else f" (in {action.in_steps} of {steps} steps)"
    return f"{action.name} {_ms(action.seconds)}{often}"


def _ms(seconds: float) -> str:
    """To a microsecond, or three figures."""
    ms = seconds * 1e3
    return f"{ms:.3f}" if ms < 1 else f"{ms:.2f}" if ms < 10 else f"{ms:,.1f}"
