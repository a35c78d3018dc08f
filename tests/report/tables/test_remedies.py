"""After a run that did not fit: what would, as a command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stored_texts import assert_stored
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


def test_what_would_fit_is_offered_as_stored() -> None:
    arguments = ["fit", "--config=a b.yaml", "--log_dir=logs/sweep", "--name=cell"]
    cells = [Cell(id=f"cell,r{repeat}", overrides={}, repeat=repeat, arguments=arguments) for repeat in range(2)]
    found = failed("refused", ["--model.size=large"])
    said = {
        "what was planned to fit": remedies([failed("refused", ["--model.optimizer=sgd", "--model.size=large"])]),
        "nothing was planned": remedies([failed("oom")]),
        "a cell, told once, without the sweep's folder": remedies(
            [replace(found, cell=cell, folder=Path(cell.id)) for cell in cells]
        ),
    }
    assert_stored("report/remedies", said)


def test_no_other_run_is_offered_anything() -> None:
    assert remedies([failed("failed"), failed("interrupted")]) == []
