"""The changes of a level that are reported, and how they end: closed when the level goes back, or withdrawn."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from lm_profiler.analysis.watch.level_change import LevelChange

# unreported changes that are stored, because they may become worth reporting
_MOST_WAITING = 50
_MOST_OPEN_CHANGES = 12
_MOST_RECENT_CHANGES = 28


class ReportedChanges:
    """The changes that are events of their own. ``open`` adds a change, ``close…`` and ``withdraw`` end it.

    Each of these methods reports the change: the next ``take_changed`` returns it.
    """

    def __init__(self, is_worth_reporting: Callable[[LevelChange], bool]) -> None:
        self._is_worth_reporting = is_worth_reporting
        # changes whose level has not gone back, the oldest first
        self.open_changes: list[LevelChange] = []
        # the last changes, which a wandering level may absorb, whether or not they are open
        self.recent_changes: deque[LevelChange] = deque(maxlen=_MOST_RECENT_CHANGES)
        # changes that are new or were corrected since ``take_changed``, or were not worth reporting then
        self._changes_to_report: list[LevelChange] = []

    @property
    def last_open(self) -> LevelChange | None:
        if not self.open_changes:
            return None
        return self.open_changes[-1]

    def open_after(self, change: LevelChange) -> list[LevelChange]:
        """Return the open changes that follow the open ``change``."""
        return self.open_changes[self.open_changes.index(change) + 1 :]

    def is_any_undone_by(self, change: LevelChange) -> bool:
        """Return whether ``change`` goes back to the level before an open change."""
        return any(change.reverts(open_change) for open_change in self.open_changes)

    def take_changed(self) -> list[LevelChange]:
        """Return the changes that are new, or that were corrected, since the last call.

        Changes that are not worth reporting are stored, because they may become so when they are corrected.
        """
        changed = []
        waiting = []
        for change in dict.fromkeys(self._changes_to_report):
            change.is_hidden = not self._is_worth_reporting(change)
            if change.was_reported or not change.is_hidden:
                changed.append(change)
                change.mark_reported()
            elif not change.is_withdrawn:
                waiting.append(change)
        self._changes_to_report = waiting[-_MOST_WAITING:]
        return changed

    def report(self, change: LevelChange) -> None:
        """Report ``change``, which is new or was corrected, with the next ``take_changed``."""
        self._changes_to_report.append(change)

    def open(self, change: LevelChange) -> None:
        """Add and report a new change whose level lasts so far."""
        self.open_changes.append(change)
        del self.open_changes[:-_MOST_OPEN_CHANGES]
        self.recent_changes.append(change)
        self.report(change)

    def withdraw(self, changes: Sequence[LevelChange]) -> None:
        """Withdraw ``changes``, because they are part of another one, or have turned out to be none."""
        for change in changes:
            is_reported = change in self._changes_to_report or change.was_reported
            if is_reported and not change.is_withdrawn:
                self.report(change)
            change.is_withdrawn = True
        self.open_changes = [
            change for change in self.open_changes if not change.is_withdrawn
        ]

    def close_undone_by(self, change: LevelChange) -> bool:
        """Close the last open change that ``change`` reverts, and all later ones; return whether there was one."""
        for index in reversed(range(len(self.open_changes))):
            if change.reverts(self.open_changes[index]):
                self._close_from(index, change.since_step - 1)
                return True
        return False

    def close_since(self, since_step: int, last_step: int) -> None:
        """Close the open changes since ``since_step``: their level has gone back after ``last_step``."""
        first_newer_index = 0  # the oldest changes come first
        for open_change in self.open_changes:
            if open_change.since_step < since_step:
                first_newer_index += 1
        self._close_from(first_newer_index, last_step)

    def _close_from(self, index: int, last_step: int) -> None:
        """Close the open changes from ``index`` on: their level has gone back after ``last_step``."""
        closed = self.open_changes[index:]
        del self.open_changes[index:]
        for change in closed:
            if change.is_negligible:
                self.withdraw([change])
                continue
            change.until_step = last_step
            self.report(change)
