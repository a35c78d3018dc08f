"""A line of any table: a run, or a cell of a sweep, and what is known of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lm_profiler.record.run import Environment, RunRecord
from lm_profiler.record.secrets import masked_option
from lm_profiler.record.step_files import read_rows
from lm_profiler.record.steps import StepTable
from lm_profiler.record.sweep import Cell, CellOutcome

UNFINISHED = "it is still running, or its process was killed"
"""Why a run that calls itself unfinished does so."""


@dataclass(frozen=True)
class Cut:
    """Which of the recorded steps the figures are of: ``steps`` of them after the first ``warmup``.

    None: without ``warmup`` what the run itself measured, without ``steps`` all that there are.
    """

    warmup: int | None = None
    steps: int | None = None


@dataclass(frozen=True)
class Entry:
    """A line of any table: a run, or a cell of a sweep that may have left none.

    Attributes:
        folder: The run's, or the cell's where there is no run.
        record: None where the cell left none (it timed out, was killed, or was a wrong call).
        cell: None for a run that belongs to no sweep.
        outcome: What the sweep says of the cell.
        sweep: The sweep's folder.
        sibling: Another cell, whose run tells what the sweep did not vary, where this one left no such facts.
        cut: How the recorded steps were cut anew for the figures of ``record``; None for the run's own figures.
    """

    folder: Path
    record: RunRecord | None
    cell: Cell | None = None
    outcome: CellOutcome | None = None
    sweep: Path | None = None
    sibling: Entry | None = None
    cut: Cut | None = None

    @property
    def name(self) -> str:
        return self.cell.id if self.cell is not None else self.record.name if self.record is not None else "unknown"

    @property
    def status(self) -> str:
        """The sweep's word before the run's own: a run that was stopped for its time calls itself interrupted.

        ``missing`` is a cell that ran and whose run is not where the sweep says, or cannot be read; ``not run`` one
        that nobody tried yet.
        """
        if self.outcome is not None:
            lost = self.outcome.run is not None and self.record is None
            return "missing" if lost else self.outcome.status
        return self.record.status if self.record is not None else "not run"

    @property
    def reason(self) -> str | None:
        """Why it did not end well."""
        if self.outcome is not None and self.outcome.reason is not None:
            return self.outcome.reason
        if self.status == "unfinished":
            return UNFINISHED
        failure = self.record.failure if self.record is not None else None
        if failure is not None and self.status == "refused":  # its type would say that again
            return "; ".join(failure.message.splitlines())
        return None if failure is None else f"{failure.type}: {failure.message}".removesuffix(": ")

    @property
    def overrides(self) -> Mapping[str, str]:
        """The swept options of a cell; of a run without a sweep, what its command line gave."""
        if self.cell is not None:
            return {name: masked_option(name, value) for name, value in self.cell.overrides.items()}
        return self.record.overrides if self.record is not None else {}

    def option(self, path: str) -> Any:
        """The option ``path`` of the resolved config; of a cell without a run, what the sweep gave or did not vary."""
        if self.config is not None:
            return _at(self.config, path)
        if path in self.overrides:
            return _typed(self.overrides[path])
        return None if self.sibling is None or path in self.sibling.overrides else self.sibling.option(path)

    @property
    def verb(self) -> str | None:
        """What was asked for: ``fit``, say."""
        if self.record is not None:
            return self.record.verb
        return self.cell.arguments[0] if self.cell is not None and self.cell.arguments else None

    @property
    def environment(self) -> Environment | None:
        """Where it ran; where a cell that was refused before it began would have run."""
        own = self.record.environment if self.record is not None else None
        return own if own is not None or self.sibling is None else self.sibling.environment

    @property
    def config(self) -> dict[str, Any] | None:
        """The whole resolved config; None where the run left none."""
        return self.record.config if self.record is not None else None

    @property
    def shows_steps(self) -> bool:
        """Whether its steps stand for something: it ended well, or nothing is known against it yet."""
        return self.status in ("ok", "unfinished") and self.record is not None and bool(self.record.time)

    @cached_property
    def rows(self) -> StepTable:
        """Its steps' rows, all ranks and stages; of a run that was cut short, the steps that all its ranks finished.

        Raises:
            RecordError: it cannot be read.
        """
        status = None if self.record is None else self.record.status
        rows = read_rows(self.folder, status == "unfinished")
        return rows if status == "ok" else rows.finished_by_all()


def _at(config: Mapping[str, Any], path: str) -> Any:
    value: Any = config
    for key in path.split("."):
        if not isinstance(value, Mapping):
            return None
        inner = value.get("init_args")
        value = value.get(key, inner.get(key) if isinstance(inner, Mapping) else None)
    return value.get("class_path", value) if isinstance(value, Mapping) else value


def _typed(given: str) -> Any:
    """``given`` as a config would hold it, so that a cell without a run stands beside those that have one."""
    try:
        return json.loads(given.lower() if given.lower() in ("true", "false", "null") else given)
    except ValueError:
        return given
