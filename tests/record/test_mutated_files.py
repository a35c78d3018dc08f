"""Files of a run that somebody changed: what is out of range is unknown or refused in words, never a traceback.

The record and the steps are changed in cli/verbs/test_damage.py, and shown in every format there.
"""

from __future__ import annotations

import copy
import gzip
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lm_profiler.analysis.conclude import conclude
from lm_profiler.analysis.evidence import EVIDENCE_FILE, Evidence, read_evidence, write_evidence
from lm_profiler.record.run_record import RecordError, read_run
from lm_profiler.record.steps import read_rows
from lm_profiler.record.watch_files import STATUS, WatchStatus
from lm_profiler.report.run.run_page import end_lines
from lm_profiler.report.run.sections import sections
from lm_profiler.report.run.watch_tables import watch_tables

ODD_FLOATS = (0.0, -1.0, 1e-320, 1e30, 4e18, 1e12)
ODD_COUNTS = (0, -1, 10**6, 2**31, 2**53, 2**63 - 1, -(2**62))
STORED = Path(__file__).parent.parent / "stored" / "0.2" / "tiny" / "version_0"
ODD_VALUES = (
    0, -1, 1e30, 1e-320, 2**63, float("nan"), float("inf"),
    "", "x" * 300, None, True, [], {},
)  # fmt: skip


def places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Every container and key of a JSON value."""
    if isinstance(content, dict):
        keys = list(content)
    elif isinstance(content, list):
        keys = list(range(len(content)))
    else:
        return
    for key in keys:
        yield content, key
        yield from places(content[key])


def odd_values(value: Any) -> tuple[Any, ...]:
    """Odd values of the type of ``value``: others are refused before anybody reckons with them."""
    if isinstance(value, float):
        return ODD_FLOATS
    if isinstance(value, int) and not isinstance(value, bool):
        return ODD_COUNTS
    if isinstance(value, str):
        return ("", "x" * 300, value)
    return ODD_VALUES


def mutate(text: str, seed: int) -> str:
    """The JSON ``text`` with one to three values replaced by odd ones."""
    rng = random.Random(seed)
    content = json.loads(text)
    for _ in range(rng.randint(1, 3)):
        container, key = rng.choice(list(places(content)))
        container[key] = copy.copy(rng.choice(odd_values(container[key])))
    return json.dumps(content)


def show_evidence(folder: Path) -> None:
    record = conclude(read_evidence(folder))
    end_lines(record)
    sections(record)


def show_watch(folder: Path) -> None:
    watch_tables(folder)


def tracebacks(folder: Path, name: str, write: Callable[[int], None], show: Callable[[Path], None], count: int) -> Any:
    """The errors other than refusals, by the seed of the mutation."""
    found = {}
    for seed in range(count):
        write(seed)
        try:
            show(folder)
        except RecordError:
            continue
        except Exception as error:
            found[f"{name} {seed}"] = repr(error)[:200]
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(STORED, tmp_path / "run")
    record = read_run(tmp_path / "run")
    shared = {name: getattr(record, name) for name in Evidence.__dataclass_fields__ if hasattr(record, name)}
    write_evidence(tmp_path / "run", Evidence(**{**shared, "rows": read_rows(tmp_path / "run")}))
    ledger = {"set-up": 3.0, "step: forward": 5.0, "validation": 2.0}
    WatchStatus(began_s=1e9, written_s=1e9 + 10, steps=40, ledger=ledger, wall_s=10.0, silent={1: 1e9}).write(
        tmp_path / "run" / STATUS
    )
    return tmp_path / "run"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of sums beyond what a float holds
@pytest.mark.parametrize(
    "name, show, count",
    [(EVIDENCE_FILE, show_evidence, 40), (STATUS, show_watch, 120)],
)
def test_mutated_json_is_shown_or_refused(folder: Path, name: str, show: Callable[[Path], None], count: int) -> None:
    path = folder / name
    packed = name.endswith(".gz")
    content = path.read_bytes()
    text = (gzip.decompress(content) if packed else content).decode()
    show(folder)  # unchanged

    def write(seed: int) -> None:
        changed = mutate(text, seed).encode()
        path.write_bytes(gzip.compress(changed) if packed else changed)

    assert tracebacks(folder, name, write, show, count) == {}


@pytest.mark.parametrize("written_s", [1e12, -1e13, 4e18])
def test_a_time_that_no_calendar_has_is_unknown(folder: Path, written_s: float) -> None:
    WatchStatus(began_s=1e9, written_s=written_s, phase="forward", wall_s=1.0).write(folder / STATUS)
    assert watch_tables(folder)
