"""Finds the ranks that the others wait for, from the position of each rank when no step ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from pydantic import TypeAdapter

from lm_profiler.callbacks.session import Session
from lm_profiler.record.quantities import PARTS

_NAMED = 3  # ranks that a message names one by one


class RankPosition(NamedTuple):
    """A rank's step and phase, and how long ago its last mark was.

    ``calls`` has the number of the last collective that it called, by the group's name: those of a group are numbered
    alike on all its ranks.
    """

    step: int | None
    phase: str
    since_s: float
    calls: Mapping[str, int] = {}

    def packed(self) -> bytes:
        """Return it as JSON, for ``unpacked``."""
        return TypeAdapter(RankPosition).dump_json(self)

    @staticmethod
    def unpacked(text: str | bytes) -> RankPosition:
        """Return the position that was packed into ``text``.

        Raises:
            ValueError: ``text`` is something else.
        """
        return TypeAdapter(RankPosition).validate_json(text)

    @property
    def said_since(self) -> str:
        """Return the position with its time: ``in forward of step 40 for 12 s``."""
        return f"{self.said} for {self.since_s:.0f} s"

    @property
    def said(self) -> str:
        """Return the position in words: ``in forward of step 40``."""
        return f"in {self.phase}" + (f" of step {self.step}" if self.step is not None else "")


def position_of(session: Session, calls: Callable[[], Mapping[str, int]] = dict) -> RankPosition:
    """Return where the rank of ``session`` is; may be called by another thread than training's."""
    known, steps = session.timeline.peek(), session.steps
    code, marks = known.stack[-1], known.step.host_ns
    phase = "setup" if not steps and not known.running else PARTS[code] if code < len(PARTS) else "other"
    since_s = (session.timeline.clock() - marks[-1]) * 1e-9 if marks else 0.0
    numbers: Mapping[str, int] = {}
    with suppress(Exception):  # another version of torch may keep its collectives elsewhere
        numbers = calls()
    return RankPosition(None if phase == "setup" else steps + 1, phase, since_s, numbers)


def stragglers(positions: Mapping[int, RankPosition | None]) -> list[int]:
    """Return the ranks that others wait for: those that called fewer collectives of a group, else those that are
    silent.

    The list is empty where all are equally far: then they wait for something else, or for nothing (all of them
    compile).
    """
    known = {rank: position for rank, position in positions.items() if position is not None}
    furthest: dict[str, int] = {}
    for position in known.values():
        for group, number in position.calls.items():
            furthest[group] = max(number, furthest.get(group, number))
    behind = [
        rank
        for rank, position in known.items()
        if any(number < furthest[group] for group, number in position.calls.items())
    ]
    # Silence counts only beside ranks that speak: where nobody does, the store may be what is gone.
    silent = positions.keys() - known.keys() if known else set[int]()
    return sorted(behind or silent)


def where_they_are(
    positions: Mapping[int, RankPosition | None], late: Sequence[int], hosts: Mapping[int, str | None] | None = None
) -> str:
    """Return one line that says which ranks are late, where they are and since when, and where the others wait."""
    named = [f"rank {rank}{_host((hosts or {}).get(rank))} {_where(positions.get(rank))}" for rank in late[:_NAMED]]
    if len(late) > _NAMED:
        named.append(f"and {len(late) - _NAMED} more")
    waiting = {rank: position for rank, position in positions.items() if rank not in late and position is not None}
    if not waiting:
        return "; ".join(named)
    phases = sorted({position.said for position in waiting.values()})
    who = f"rank {next(iter(waiting))} waits" if len(waiting) == 1 else f"{len(waiting)} ranks wait"
    return f"{'; '.join(named)}; {who} {phases[0] if len(phases) == 1 else 'in several phases'}"


def _where(position: RankPosition | None) -> str:
    return "says nothing" if position is None else f"has been {position.said_since}"


def _host(host: str | None) -> str:
    return f" ({host})" if host else ""
