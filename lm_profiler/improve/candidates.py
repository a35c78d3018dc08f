"""The changes that are worth a try: what a run could switch on or off, and what that could save at most. Pure.

What a change could save is read from the first setting's own run: the terms of its waterfall, else its phases, for a
change saves no more than what it touches takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm_profiler.analysis.improve.trials import Candidate
from lm_profiler.improve.changes import ADVISED, KINDS, OF_ONES_OWN, OTHER_BATCH, FirstSetting, Hardware
from lm_profiler.record.entry import Entry


@dataclass(frozen=True)
class Refused:
    """A candidate that is not tried, and why."""

    candidate: Candidate
    why: str


def candidates(folder_entry: Entry, hardware: Hardware, free_batch: bool) -> tuple[list[Candidate], list[Refused]]:
    """The changes that the run of ``folder_entry`` leaves open, and those of them that cannot work here.

    Args:
        folder_entry: The first setting's run, as it was configured, with its trace.
        hardware: What it runs on.
        free_batch: Whether a step's samples may change.
    """
    assert folder_entry.record is not None
    setting = FirstSetting(folder_entry, folder_entry.record)
    bound_by = setting.record.verdict and setting.record.verdict.bound_by
    first = ADVISED.get(bound_by or "", ())
    tried, refused = [], []
    for of in (*first, *(kind for kind in KINDS if kind not in first)):
        for candidate, why in of(setting, hardware):
            if why:
                refused.append(Refused(candidate, why))
            elif free_batch or candidate.may_change != OTHER_BATCH:
                tried.append(candidate)
    return tried, refused


def asked_for(
    values: Mapping[str, Sequence[str]], known: Sequence[Candidate], option: Callable[[str], Any]
) -> list[Candidate]:
    """A candidate for each of the ``values`` of each option, but for what the run is set to already.

    What is ``known`` of the same change by itself (its ceiling, what it may change) is taken from there, and of another
    value of the same option what that may change.
    """
    alike_of = {option: one for one in known for option in one.options}
    wished = []
    for name, texts in values.items():
        for text in texts:
            if _same(option(name), text):
                continue
            same = next((one for one in known if one.options == {name: text}), None)
            alike = alike_of.get(name)
            group, may_change = (alike.group, alike.may_change) if alike else (name, OF_ONES_OWN)
            wished.append(same or Candidate(f"{name}={text}", {name: text}, group, may_change=may_change))
    return wished


def _same(value: Any, text: str) -> bool:
    spelled = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return spelled == text


def worth_it(known: Sequence[Candidate], step_s: float | None, margin: float) -> tuple[list[Candidate], list[Refused]]:
    """Those that could save more than ``margin`` of the step, and those that could not."""
    tried, refused = [], []
    for one in known:
        least_s = None if step_s is None else margin * step_s
        if one.ceiling_s is None or least_s is None or one.ceiling_s >= least_s:
            tried.append(one)
        else:
            refused.append(Refused(one, f"less than {margin:.0%} of the step could be saved"))
    return tried, refused
