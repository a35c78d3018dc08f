"""run.json: what is written is read back, and what is not one is refused."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_environment import made_run
from pydantic import ValidationError
from raised import refusal
from stored_texts import assert_stored
from whole_record import WHOLE

from lm_profiler.record.quantities import TIMES
from lm_profiler.record.run_record import Failure, RecordError, RunRecord, TimeSummary, read_run

MINIMAL = made_run(status="refused")
FULL = made_run(
    status="oom",
    failure=Failure(phase="backward", step=7, type="OutOfMemoryError", message="CUDA out of memory"),
    config={"model": {"size": "small", "lr": 1e-4, "betas": [0.9, None]}, "µ": True},
    steps={"warmup": 2, "measure": 3},
    time={**dict.fromkeys(TIMES, TimeSummary(n=3, mean=0.1, median=0.1)), "clip": TimeSummary(n=0)},
)


@pytest.mark.parametrize("record", [MINIMAL, RunRecord.model_validate(WHOLE)], ids=["minimal", "whole"])
def test_a_record_comes_back_as_it_was(tmp_path: Path, record: RunRecord) -> None:
    record.write(tmp_path / "run.json")
    assert read_run(tmp_path) == record


def with_value(**changes: Any) -> Callable[[str], str]:
    return lambda text: json.dumps({**json.loads(text), **changes})


def without_key(key: str) -> Callable[[str], str]:
    return lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != key})


@pytest.mark.parametrize(
    "damage, where",
    [
        (with_value(schema_version=0), "schema_version"),
        (with_value(status=1), "status"),
        (with_value(verb=None), "verb"),
        (with_value(duration_s="long"), "duration_s"),
        (with_value(steps={"measure": 1.5}), "steps.measure"),
        (with_value(failure={"phase": "forward"}), "failure.step"),
        (with_value(time={"step": {"n": 3}}), "time"),
        (without_key("status"), "status"),
        (lambda text: text[: len(text) // 2], "file"),
        (lambda text: "", "file"),
        (lambda text: text.replace("0.1", "NaN"), "file"),
        (lambda text: "[1, 2]", "file"),
    ],
)
def test_records_of_other_versions_are_refused(tmp_path: Path, damage: Callable[[str], str], where: str):
    FULL.write(tmp_path / "run.json")
    path = tmp_path / "run.json"
    path.write_text(damage(path.read_text()))
    with pytest.raises(RecordError, match=re.escape(f": {where}: ")) as raised:
        read_run(tmp_path)
    head, _, found = str(raised.value).partition(f": {where}: ")
    assert found  # in the words of pydantic
    assert_stored("record/problems: damaged record", {"before what is wrong": head}, run=tmp_path)
    assert "\n" not in str(raised.value)
    assert isinstance(raised.value, ValueError)


def test_damaged_records_are_refused_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    messages = {"no record": refusal(RecordError, lambda: read_run(tmp_path))}
    path.write_bytes(b"\xff\xfe\x00")
    messages["no text"] = refusal(RecordError, lambda: read_run(tmp_path))
    assert_stored("record/problems: no text", messages, run=tmp_path)
    with pytest.raises(ValidationError):
        MINIMAL.status = "ok"


def test_levels_of_a_record_before_0_3_get_the_numbers_of_the_run() -> None:
    """It counted measured steps from 1; its odd steps were counted from the run's first."""
    stored = Path(__file__).parents[1] / "stored" / "0.2" / "tiny" / "version_0" / "run.json"
    old = json.loads(stored.read_text(encoding="utf-8"))
    old |= {
        "steps": {"warmup": 5, "measure": 40},
        "steadiness": {
            "word": "slowing", "lag1": 0.0, "cut": 0, "bias_of_mean": 0.0, "first": 11, "last": 40,
            "levels": [{"first": 1, "last": 10, "seconds": 0.1}, {"first": 11, "last": 40, "seconds": 0.2}],
        },
    }  # fmt: skip
    record = RunRecord.model_validate(old)
    assert [(level.first, level.last) for level in record.steadiness.levels] == [(6, 15), (16, 45)]
    assert (record.steadiness.first, record.steadiness.last) == (16, 45)
    assert record.stretch == slice(10, 40)
    again = RunRecord.model_validate_json(record.model_dump_json())
    assert again.steadiness == record.steadiness
