"""Whose ``other`` is, in one line."""

from __future__ import annotations

from lm_profiler.record.quantities import counted
from lm_profiler.record.run import OwnedTime, RunRecord
from lm_profiler.report.run.milliseconds import ms_text

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
    total = f"{ms_text(owned.seconds)} ms while each action of {counted(owned.steps, 'step')} was timed"
    whole = total if owned.measured_s is None else f"{ms_text(owned.measured_s)} ms, {total}"
    said = [_said(action, owned.steps) for action in owned.actions[:_SHOWN]]
    if rest := owned.actions[_SHOWN:]:
        said.append(f"{len(rest)} more {ms_text(sum(action.seconds for action in rest))}")
    return [f"other{rank}: {whole}: {', '.join(said)}"]


def _said(action: OwnedTime, steps: int) -> str:
    often = "" if action.in_steps == steps else f" (in {action.in_steps} of {steps} steps)"
    return f"{action.name} {ms_text(action.seconds)}{often}"
