"""After a run that did not fit: what would, as a command."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from stored_texts import assert_stored
from tabled import made_run_of

from lm_profiler.record.entry import Entry
from lm_profiler.record.run_record import Failure, MemoryFacts, MemoryReading, PlannedMemory
from lm_profiler.record.sweep_files import Cell
from lm_profiler.report.tables.remedies import best_checkpoints, remedies

COMMAND = "python -m lm_profiler fit --config a.yaml"


def failed(status: str, options: Sequence[str] = ()) -> Entry:
    entry = made_run_of("a", failed=(status, "no room"))
    failure = Failure(phase="forward", step=1, type="Refused", message="no room", remedies=tuple(options))
    return replace(entry, record=entry.record.model_copy(update={"command": COMMAND, "failure": failure}))


def test_remedies_of_runs_that_did_not_fit() -> None:
    arguments = ["fit", "--config=a b.yaml", "--log_dir=logs/sweep", "--name=cell"]
    cells = [Cell(id=f"cell,r{repeat}", overrides={}, repeat=repeat, arguments=arguments) for repeat in range(2)]
    found = failed("refused", ["--model.size=large"])
    messages = {
        "what was planned to fit": remedies([failed("refused", ["--model.optimizer=sgd", "--model.size=large"])]),
        "nothing was planned": remedies([failed("oom")]),
        "a cell, listed once, without the sweep's folder": remedies(
            [replace(found, cell=cell, folder=Path(cell.id)) for cell in cells]
        ),
    }
    assert_stored("report/remedies", messages)
    assert remedies([failed("failed"), failed("interrupted")]) == []


PEAKS = {"null": 9.0, "1": 5.0, "2": 3.0, "3": 4.0, "[3, 1]": 3.5}
"""GiB by the swept option."""


def checkpointed(every: str, peak_gib: float, measured: bool, status: str = "ok", **other: str) -> Entry:
    step_s = 0.2 if every == "null" else 0.25
    entry = made_run_of(every, [(step_s / 2, step_s / 2)] * 12)
    name, peak = "model.checkpoint_every", int(peak_gib * 2**30)
    cell = Cell(id=every, overrides={name: every, **other}, repeat=0, arguments=["fit"])
    config = dict(entry.record.config)
    config["model"] = {"init_args": {"checkpoint_every": yaml.safe_load(every)}}
    memory = MemoryFacts(measured=MemoryReading(allocated_peak=peak), parts={})
    update = {"memory": memory} if measured else {"planned": PlannedMemory(peaks={"forward": peak})}
    record = entry.record.model_copy(update={"config": config, "status": status, **update})
    made = replace(entry, record=record, cell=cell)
    made.__dict__["rows"] = entry.rows
    return made


@pytest.mark.parametrize("measured", [False, True])
def test_the_smallest_peak_of_checkpoints_is_named(measured: bool) -> None:
    (line,) = best_checkpoints([checkpointed(every, peak, measured) for every, peak in PEAKS.items()])
    best, beside, cost = line.split("; ")
    assert best.startswith("checkpoint_every=2 ")
    assert best.endswith("3.00 GiB")
    assert ("measured" if measured else "planned") in best
    assert beside == "null 9.00 GiB, 1 5.00 GiB, 3 4.00 GiB"
    ratio, low, high = map(float, re.findall(r"\d\.\d{3}", cost))
    assert low < ratio == 1.25 < high


def test_cells_that_differ_in_other_options_are_separate() -> None:
    alike = [checkpointed(every, peak_gib=3.0, measured=True, **{"data.batch_size": "4"}) for every in ("2", "null")]
    others = [checkpointed(every, peak, measured=True, **{"data.batch_size": "8"}) for every, peak in PEAKS.items()]
    none, two = best_checkpoints([*alike, *others])
    assert none.split()[:2] == ["data.batch_size=4:", "checkpoint_every=null"]
    assert two.split()[:2] == ["data.batch_size=8:", "checkpoint_every=2"]
    assert best_checkpoints(others[:1]) == best_checkpoints([made_run_of("a")]) == []
    refused = checkpointed("null", peak_gib=1.0, measured=True, status="refused")
    (line,) = best_checkpoints([replace(refused, record=None), *others[1:]])
    assert line.count("; ") == 1  # nothing to hold its time against


def test_each_sweep_has_its_best_checkpoints() -> None:
    entries = []
    for sweep, best in (("a", "1"), ("b", "2")):
        for every in ("null", "1", "2"):
            peak_gib = 3.0 if every == best else 5.0
            entry = checkpointed(every, peak_gib, measured=True)
            entries.append(replace(entry, sweep=Path("logs", sweep)))
    line_a, line_b = best_checkpoints(entries)
    assert line_a.startswith("a: checkpoint_every=1 ")
    assert line_b.startswith("b: checkpoint_every=2 ")
