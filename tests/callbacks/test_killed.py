"""Of a process that gets no last word, all steps but the last second's are on disk."""

import json
from pathlib import Path

import pytest
from dying import LAST, STEP_S, WAYS
from scripts import SUPPORT
from warm import run_python

from lm_profiler.measure.device.environment import cpu_name
from lm_profiler.record.run_record import read_run
from lm_profiler.record.steps import read_steps


def test_files_of_a_process_that_is_killed_or_exits(tmp_path: Path) -> None:
    done = run_python(str(SUPPORT / "dying.py"), str(tmp_path))
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout.splitlines()[-1])
    assert codes[0] == 0  # os._exit
    assert all(code < 0 for code in codes[1:]), codes  # a signal's
    for way in WAYS:
        assert_left(tmp_path / way)


def assert_left(folder: Path) -> None:
    (file,) = folder.rglob("run.json")
    record = read_run(file.parent)
    assert record.status == "unfinished"
    assert record.failure is None
    assert record.environment.device_name == cpu_name()
    assert record.environment.device_bytes
    assert record.model.parameters > 0
    assert record.steps_planned == {"warmup": 2, "measure": 1000, "actions": 0, "memory": 0, "trace": 0}
    rows = read_steps(file.with_name("steps.csv"))
    assert [row.step for row in rows] == list(range(1, len(rows) + 1))
    # Step k ended at k * STEP_S, and it died when the last one had not.
    lost_s = (LAST - 1 - len(rows)) * STEP_S
    assert 0 <= lost_s <= 1.0
    assert [row.stage for row in rows] == ["warmup"] * 2 + ["measure"] * (len(rows) - 2)
    assert [row.time("step") for row in rows] == pytest.approx([STEP_S] * len(rows))
