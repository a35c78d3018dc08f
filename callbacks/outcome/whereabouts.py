"""Where each rank is when nothing moves, and which of them the others wait for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from pydantic import TypeAdapter

from lm_profiler.callbacks.session import Session
from lm_profiler.record.quantities import PARTS

_NAMED = 3
"""Ranks that are told one by one."""


class Whereabouts(NamedTuple):
    """Where a rank is: in which step and phase, since its last mark ``since_s`` ago.

    ``calls`` is the number of the last collective that it called, by the group's name: those of a group are numbered
    alike on all its ranks.
    """

    step: int | None
    phase: str
    since_s: float
    calls: Mapping[str, int] = {}

    def packed(self) -> str:
        """As text, for ``unpacked``."""
        return json.dumps(self._asdict())

    @staticmethod
    def unpacked(text: str | bytes) -> Whereabouts:
        """What was ``packed``.

        Raises:
            ValueError: it is something else.
        """
        return TypeAdapter(Whereabouts).validate_json(text)

    @property
    def said_since(self) -> str:
        """``in forward of step 40 for 12 s``."""
        return f"{self.said} for {self.since_s:.0f} s"

    @property
    def said(self) -> str:
        """``in forward of step 40``."""
        return f"in {self.phase}" + (f" of step {self.step}" if self.step is not None else "")


def place_of(session: Session, calls: Callable[[], Mapping[str, int]] = dict) -> Whereabouts:
    """Where the rank of ``session`` is, asked by another thread."""
    known, steps = session.timeline.peek(), session.steps
    code, marks = known.stack[-1], known.step.host_ns
    phase = "setup" if not steps and not known.running else PARTS[code] if code < len(PARTS) else "other"
    since_s = (session.timeline.clock() - marks[-1]) * 1e-9 if marks else 0.0
    numbers: Mapping[str, int] = {}
    with suppress(Exception):  # another torch's ring
        numbers = calls()
    return Whereabouts(None if phase == "setup" else steps + 1, phase, since_s, numbers)


def latecomers(places: Mapping[int, Whereabouts | None]) -> list[int]:
    """The ranks that others wait for: those that called fewer collectives of a group, or say nothing.

    None where all are equally far: then they wait for something else, or for nothing (a compilation on all of them).
    """
    furthest: dict[str, int] = {}
    for place in places.values():
        for group, number in ({} if place is None else place.calls).items():
            furthest[group] = max(number, furthest.get(group, number))
    told = {rank: place for rank, place in places.items() if place is not None}
    late = [
        rank for rank, place in told.items() if any(number < furthest[group] for group, number in place.calls.items())
    ]
    silent = [rank for rank, place in places.items() if place is None] if told else []
    return sorted(late or silent)


def where_they_are(
    places: Mapping[int, Whereabouts | None], late: Sequence[int], hosts: Mapping[int, str | None] | None = None
) -> str:
    """One line: who did not come, where they are and since when; and where the others wait."""
    named = [f"rank {rank}{_host((hosts or {}).get(rank))} {_where(places.get(rank))}" for rank in late[:_NAMED]]
    if len(late) > _NAMED:
        named.append(f"and {len(late) - _NAMED} more")
    waiting = {rank: place for rank, place in places.items() if rank not in late and place is not None}
    if not waiting:
        return "; ".join(named)
    phases = sorted({place.said for place in waiting.values()})
    who = f"rank {next(iter(waiting))} waits" if len(waiting) == 1 else f"{len(waiting)} ranks wait"
    return f"{'; '.join(named)}; {who} {phases[0] if len(phases) == 1 else 'in several phases'}"


def _where(place: Whereabouts | None) -> str:
    return "says nothing" if place is None else f"has been {place.said_since}"


def _host(host: str | None) -> str:
    return f" ({host})" if host else ""
