"""What became of a cell, judged from what its process left."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from by_hand import CELL, leave_record
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lm_profiler.record.run import Failure, Status
from lm_profiler.record.sweep import read_outcome
from lm_profiler.sweep.outcome import Ended, memory_kills, record_outcome

OUT_OF_MEMORY = Failure(phase="backward", step=2, type="OutOfMemoryError", message="CUDA out of memory")
REFUSED = Failure(phase="setup", step=None, type="Refused", message="it cannot fit\ntake less")
KILL, TERM, SEGV = -signal.SIGKILL, -signal.SIGTERM, -signal.SIGSEGV


@pytest.mark.parametrize(
    "left,ended,status,reason",
    [
        ("ok", Ended(0, 1.0), "ok", None),
        ("ok", Ended(SEGV, 1.0), "ok", None),  # it crashed on its way out, with all said
        ("oom", Ended(1, 1.0), "oom", "OutOfMemoryError in backward of step 2: CUDA out of memory"),
        ("oom", Ended(KILL, 1.0, timeout_s=9), "oom", "OutOfMemoryError in backward of step 2: CUDA out of memory"),
        ("failed", Ended(1, 1.0), "failed", "SomeError in forward of step 3: of mine"),
        ("refused", Ended(2, 1.0), "refused", "it cannot fit; take less"),
        ("interrupted", Ended(130, 1.0, timeout_s=9), "timeout", "ran longer than 9 s, in forward of step 3"),
        (None, Ended(TERM, 1.0, timeout_s=9), "timeout", "ran longer than 9 s; left no record"),
        ("ok", Ended(KILL, 1.0, timeout_s=9), "timeout", "ran longer than 9 s"),
        (None, Ended(KILL, 1.0, memory_kills=1), "oom", "killed by the OOM killer; left no record"),
        (None, Ended(KILL, 1.0), "interrupted", "killed by SIGKILL from outside; left no record"),
        ("ok", Ended(KILL, 1.0), "interrupted", "killed by SIGKILL from outside"),  # the record was not completed
        ("interrupted", Ended(130, 1.0), "interrupted", "in forward of step 3"),
        (None, Ended(None, 1.0, lost="its job was cancelled"), "interrupted", "its job was cancelled"),
        (None, Ended(SEGV, 1.0, memory_kills=1), "failed", "killed by SIGSEGV: the last words"),
        (None, Ended(2, 1.0), "failed", "exit code 2: the last words"),
        (None, Ended(0, 1.0), "failed", "left no record in its folder: the last words"),
    ],
    ids=str,
)
def test_the_runs_own_word_then_what_stopped_it_then_what_it_said(
    left: Status | None, ended: Ended, status: str, reason: str | None, tmp_path: Path
) -> None:
    (tmp_path / CELL.id).mkdir()
    (tmp_path / CELL.id / "output.txt").write_bytes(b"first\nlm_profiler: the last words\n\xff\n"[:-2])
    if left is not None:
        leave_record(tmp_path, left, failure={"oom": OUT_OF_MEMORY, "refused": REFUSED}.get(left))
    outcome = record_outcome(tmp_path, CELL, ended)
    assert (outcome.status, outcome.reason) == (status, reason)
    assert outcome.run == (None if left is None else f"{CELL.id}/version_0")
    assert (outcome.exit_code, outcome.duration_s) == (ended.code, 1.0)
    assert read_outcome(tmp_path, CELL.id) == outcome


def test_a_damaged_record_is_none(tmp_path: Path) -> None:
    (tmp_path / CELL.id / "version_0").mkdir(parents=True)
    (tmp_path / CELL.id / "version_0" / "run.json").write_text("{")
    outcome = record_outcome(tmp_path, CELL, Ended(1, 1.0))
    assert (outcome.status, outcome.reason, outcome.run) == ("failed", "exit code 1", None)


def test_a_cell_without_a_run_shows_in_hparams(tmp_path: Path) -> None:
    (tmp_path / CELL.id).mkdir()
    record_outcome(tmp_path, CELL, Ended(2, 1.0))
    events = EventAccumulator(str(tmp_path / CELL.id))
    events.Reload()
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"a.x" in content
    assert any(
        b"failed: exit code 2" in text for event in events.Tensors("summary") for text in event.tensor_proto.string_val
    )


def test_what_the_system_killed_is_counted_where_it_says_so() -> None:
    assert memory_kills() >= 0
