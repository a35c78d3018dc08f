"""After a run that did not fit: what would, as a command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tabled import run

from lm_profiler.record.entry import Entry
from lm_profiler.record.run import Failure
from lm_profiler.record.sweep import Cell
from lm_profiler.report.tables.remedies import remedies

COMMAND = "python -m lm_profiler fit --config a.yaml"


def failed(status: str, options: Sequence[str] = ()) -> Entry:
    entry = run("a", failed=(status, "no room"))
    failure = Failure(phase="forward", step=1, type="Refused", message="no room", remedies=tuple(options))
    return replace(entry, record=entry.record.model_copy(update={"command": COMMAND, "failure": failure}))


def test_what_was_planned_to_fit_is_offered_as_a_command() -> None:
    assert remedies([failed("refused", ["--model.optimizer=sgd", "--model.size=large"])]) == [
        "run:",
        f"  would fit, as planned: {COMMAND} --model.optimizer=sgd",
        "  or instead: --model.size=large",
    ]


def test_where_nothing_was_planned_the_planner_is_offered_and_to_no_other_run() -> None:
    assert remedies([failed("oom")]) == ["run:", "  what would fit: python -m lm_profiler plan --config a.yaml"]
    assert remedies([failed("failed"), failed("interrupted")]) == []


def test_a_cells_command_leaves_the_sweeps_folder_alone_and_repeats_are_told_once() -> None:
    arguments = ["fit", "--config=a b.yaml", "--log_dir=logs/sweep", "--name=cell"]
    cells = [Cell(id=f"cell,r{repeat}", overrides={}, repeat=repeat, arguments=arguments) for repeat in range(2)]
    found = failed("refused", ["--model.size=large"])
    assert remedies([replace(found, cell=cell, folder=Path(cell.id)) for cell in cells]) == [
        "cell,r0:",
        "  would fit, as planned: python -m lm_profiler fit '--config=a b.yaml' --model.size=large",
    ]
