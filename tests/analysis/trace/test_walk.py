"""Reading a trace: every event, in little memory; half a trace is refused."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from raised import refusal
from stored_texts import assert_stored

from lm_profiler.analysis.trace.walk import Packed, trace_events


def event(number: int) -> dict[str, object]:
    return {"ph": "X", "cat": "cpu_op", "name": f"aten::op_{number}", "ts": 4405555032661.477 + number, "dur": 0.25}


def written(path: Path, text: str) -> Path:
    with gzip.open(path, "wt") as file:
        file.write(text)
    return path


def refused(path: Path) -> str:
    return refusal(ValueError, lambda: list(trace_events(path)))


def test_every_event_comes_as_it_was_written(tmp_path: Path) -> None:
    events = [event(n) for n in range(3)]
    whole = {"schemaVersion": 1, "deviceProperties": [{"id": 0}], "traceEvents": events, "traceName": "x"}
    assert list(trace_events(written(tmp_path / "t.json.gz", json.dumps(whole)))) == events


def test_events_longer_than_what_is_read_at_once_come_whole(tmp_path: Path) -> None:
    events = [{**event(n), "name": 'a "traceEvents": [' + "x" * n} for n in (0, 70_000, 1, 300_000)]
    whole = {"distributedInfo": {"note": '"traceEvents": ['}, "traceEvents": events, "traceName": "x"}
    assert list(trace_events(written(tmp_path / "t.json.gz", json.dumps(whole, indent=1)))) == events


def test_what_is_no_whole_trace_is_refused(tmp_path: Path) -> None:
    texts = ("", "{}", '{"traceEvents": [{}', '{"traceEvents": [{}, nonsense]}', '{"traceEvents": []')
    said = {text or "nothing": refused(written(tmp_path / "t.json.gz", text)) for text in texts}
    assert_stored("analysis/refused: no whole trace", said, folder=tmp_path)


def test_a_large_trace_takes_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    with gzip.open(path, "wt", compresslevel=1) as file:
        file.write('{"traceEvents": [')
        file.write(",".join(json.dumps(event(n)) for n in range(40_000)))  # 4 MB
        file.write("]}")
    tracemalloc.start()
    try:
        assert sum(1 for _ in trace_events(path)) == 40_000
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_half_a_trace_is_refused(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": [event(n) for n in range(1000)]})
    said = {"JSON": refused(written(tmp_path / "t.json.gz", text[:-100]))}
    path = written(tmp_path / "t.json.gz", text)
    path.write_bytes(path.read_bytes()[:-100])
    said["gzip"] = refused(path)
    assert_stored("analysis/refused: half a trace", said, folder=tmp_path)


def meant(packed: Packed) -> tuple[Any, ...]:
    """All of ``packed`` with names and inputs in place of their numbers: these follow the order of reading."""
    names, inputs, threads = packed.names, packed.inputs, list(packed._threads)
    host = [
        (
            start,
            length,
            threads[thread],
            what,
            value if what > 1 else names[value],
            names[more] if what else inputs[more],
        )
        for start, length, thread, what, value, more in packed.host().tolist()
    ]
    device = [(*times, names[name], correlation) for *times, name, correlation in packed.device()]
    return sorted(host, key=str), device, packed.steps, packed.phases


@pytest.mark.parametrize("path", sorted(Path(__file__).with_name("traces").glob("*.json.gz")), ids=lambda of: of.name)
def test_an_operator_that_is_matched_says_what_it_says_decoded(path: Path) -> None:
    with gzip.open(path) as file:
        decoded = Packed(json.load(file)["traceEvents"])
    assert meant(Packed(trace_events(path))) == meant(decoded)


@pytest.mark.parametrize("name", ["aten::op", r"a \"name\", {\n} é", "aten::attention"])
@pytest.mark.parametrize(
    "given", ["", '"Concrete Inputs": ["True", "\\"Input Dims\\": [1]"], "Input Dims": [[8], []], ', '"a": {}, ']
)
def test_what_stands_in_an_operators_event_does_not_change_what_it_is(tmp_path: Path, name: str, given: str) -> None:
    one = f"""
  {{
    "ph": "X",
    "cat": "cpu_op",
    "name": {json.dumps(name)},
    "pid": 1,
    "tid": "a",
    "ts": 4405555032661.477,
    "dur": 0.250
    ,
    "args": {{
      "External id": 1,{given}"Ev Idx": 3
    }}
  }}"""
    text = f'{{"traceEvents": [{one},{one}]}}'
    read, decoded = Packed(trace_events(written(tmp_path / "t.json.gz", text))), Packed(json.loads(text)["traceEvents"])
    assert meant(read) == meant(decoded)
