"""Reading a trace: every event, in little memory; half a trace is refused."""

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from cuda_trace import cuda_step, kernel_table
from raised import refusal
from stored_texts import assert_stored

from lm_profiler.analysis.trace.packed_trace import PackedTrace
from lm_profiler.analysis.trace.range_names import module_in, module_range_name
from lm_profiler.analysis.trace.trace_file import trace_events
from lm_profiler.analysis.trace.walk import walk


def numbered_event(number: int) -> dict[str, object]:
    return {"ph": "X", "cat": "cpu_op", "name": f"aten::op_{number}", "ts": 4405555032661.477 + number, "dur": 0.25}


def written_file(path: Path, text: str) -> Path:
    with gzip.open(path, "wt") as file:
        file.write(text)
    return path


def refusal_of(path: Path) -> str:
    return refusal(ValueError, lambda: list(trace_events(path)))


def test_events_longer_than_the_read_buffer_stay_whole(tmp_path: Path) -> None:
    events = [numbered_event(n) for n in range(3)]
    whole = {"schemaVersion": 1, "deviceProperties": [{"id": 0}], "traceEvents": events, "traceName": "x"}
    assert list(trace_events(written_file(tmp_path / "t.json.gz", json.dumps(whole)))) == events
    events = [{**numbered_event(n), "name": 'a "traceEvents": [' + "x" * n} for n in (0, 70_000, 1, 300_000)]
    whole = {"distributedInfo": {"note": '"traceEvents": ['}, "traceEvents": events, "traceName": "x"}
    assert list(trace_events(written_file(tmp_path / "t.json.gz", json.dumps(whole, indent=1)))) == events


def test_incomplete_traces_are_refused(tmp_path: Path) -> None:
    texts = ("", "{}", '{"traceEvents": [{}', '{"traceEvents": [{}, nonsense]}', '{"traceEvents": []')
    messages = {text or "nothing": refusal_of(written_file(tmp_path / "t.json.gz", text)) for text in texts}
    assert_stored("analysis/refused: no whole trace", messages, folder=tmp_path)
    text = json.dumps({"traceEvents": [numbered_event(n) for n in range(1000)]})
    messages = {"JSON": refusal_of(written_file(tmp_path / "t.json.gz", text[:-100]))}
    path = written_file(tmp_path / "t.json.gz", text)
    path.write_bytes(path.read_bytes()[:-100])
    messages["gzip"] = refusal_of(path)
    assert_stored("analysis/refused: half a trace", messages, folder=tmp_path)


def test_a_large_trace_takes_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    with gzip.open(path, "wt", compresslevel=1) as file:
        file.write('{"traceEvents": [')
        file.write(",".join(json.dumps(numbered_event(n)) for n in range(40_000)))  # 4 MB
        file.write("]}")
    tracemalloc.start()
    try:
        assert sum(1 for _ in trace_events(path)) == 40_000
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def with_names(packed: PackedTrace) -> tuple[Any, ...]:
    """All of ``packed`` with names and inputs in place of their numbers: these follow the order of reading."""
    names, inputs, threads = packed.names, packed.inputs, packed.threads
    host = [
        (
            start,
            length,
            threads[thread],
            what,
            value if what > 1 else names[value],
            names[more] if what else inputs[more],
        )
        for start, length, thread, what, value, more in packed.host_rows().tolist()
    ]
    device = [(*times, names[name], correlation) for *times, name, correlation in packed.device_rows()]
    return sorted(host, key=str), device, packed.steps, packed.phases


@pytest.mark.parametrize("path", sorted(Path(__file__).with_name("traces").glob("*.json.gz")), ids=lambda of: of.name)
def test_a_matched_operator_has_the_values_of_the_decoded_one(path: Path) -> None:
    with gzip.open(path) as file:
        decoded = PackedTrace(json.load(file)["traceEvents"])
    assert with_names(PackedTrace(trace_events(path))) == with_names(decoded)


@pytest.mark.parametrize("start", ["4405555032661.477", "9" * 30 + ".000"])
@pytest.mark.parametrize("name", ["aten::op", r"a \"name\", {\n} é", "aten::attention"])
@pytest.mark.parametrize(
    "given", ["", '"Concrete Inputs": ["True", "\\"Input Dims\\": [1]"], "Input Dims": [[8], []], ', '"a": {}, ']
)
def test_extra_fields_of_an_operator_do_not_change_it(tmp_path: Path, name: str, given: str, start: str):
    one = f"""
  {{
    "ph": "X",
    "cat": "cpu_op",
    "name": {json.dumps(name)},
    "pid": 1,
    "tid": "a",
    "ts": {start},
    "dur": 0.250
    ,
    "args": {{
      "External id": 1,{given}"Ev Idx": 3
    }}
  }}"""
    text = f'{{"traceEvents": [{one},{one}]}}'
    read, decoded = (
        PackedTrace(trace_events(written_file(tmp_path / "t.json.gz", text))),
        PackedTrace(json.loads(text)["traceEvents"]),
    )
    assert with_names(read) == with_names(decoded)


def test_a_tabulator_in_the_name_of_an_operator_is_read(tmp_path: Path) -> None:
    operator = """{
    "ph": "X", "cat": "cpu_op", "name": "aten::a\tb", "pid": 1, "tid": 1, "ts": 1.000, "dur": 2.000,
    "args": {
      "External id": 1, "Ev Idx": 3
    }
  }"""
    packed = PackedTrace(trace_events(written_file(tmp_path / "t.json.gz", f'{{"traceEvents": [{operator}]}}')))
    assert packed.names == ["aten::a\tb", None]


def test_lengths_that_add_up_to_more_than_64_bits_leave_no_time_to_their_caller() -> None:
    caller = {**numbered_event(0), "pid": 1, "tid": 1, "ts": 0, "dur": 9e11}
    children = [{**numbered_event(1), "pid": 1, "tid": 1, "ts": 1 + number, "dur": 9e11} for number in range(10_300)]
    calls, _ = walk(PackedTrace([caller, *children]))
    assert calls.own_ns[calls.start == 0].tolist() == [0]


def rows_of(events: list[dict[str, Any]]) -> list[Any]:
    return [row.model_dump() for row in kernel_table(events).rows]


def kernels_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["cat"] == "kernel"]


DAMAGES: dict[str, Any] = {
    "a negative duration": {"dur": -5000},
    "no duration": {"dur": None},
    "a duration as text": {"dur": "60"},
    "a start as text": {"ts": "1.5"},
    "a start beyond all clocks": {"ts": 1e30},
    "an end beyond 64 bits": {"ts": 5e15, "dur": 5e15},
    "a duration of years": {"dur": 8.9e15},
    "a start that is no number": {"ts": float("nan")},
    "no name": {"name": None},
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_event_is_counted_and_left_out(damage: dict[str, Any]) -> None:
    events = cuda_step()
    kernels_of(events)[0].update(damage)
    packed = PackedTrace(events)
    assert packed.damaged_events.total() == 1
    without = [event for event in cuda_step() if event != kernels_of(cuda_step())[0]]
    assert rows_of(events) == rows_of(without)


@pytest.mark.parametrize("arguments", [None, {}, {"correlation": None}, {"correlation": [1]}, "text"])
def test_a_kernel_without_its_launch_still_counts(arguments: Any) -> None:
    events = cuda_step()
    kernels_of(events)[0]["args"] = arguments
    sound, damaged = kernel_table(cuda_step()), kernel_table(events)
    assert sum(row.total_s for row in damaged.rows) == pytest.approx(sum(row.total_s for row in sound.rows))


@pytest.mark.parametrize("change", [str, lambda number: 2**63 + number, lambda number: -number])
def test_correlations_may_be_text_or_use_all_of_64_bits(change: Any) -> None:
    events = cuda_step()
    for event in events:
        if "correlation" in event.get("args", {}):
            event["args"]["correlation"] = change(event["args"]["correlation"])
    assert rows_of(events) == rows_of(cuda_step())


def test_entries_that_are_no_events_are_left_out() -> None:
    events: list[Any] = [None, *cuda_step(), "text", []]
    assert PackedTrace(events).damaged_events.total() == 3
    assert rows_of(events) == rows_of(cuda_step())
    other_process = [{**event, "pid": 99} if event["pid"] != 0 else event for event in cuda_step()]
    with pytest.raises(ValueError, match="2 processes"):
        PackedTrace([*cuda_step(), *other_process])


@pytest.mark.parametrize("path", ["blocks.schicht ä", "blocks.名", "a%20b", "plain.0.x (y)"])
def test_a_modules_name_survives_in_ascii(path: str) -> None:
    name = module_range_name(path, "Block")
    assert name.isascii()
    assert module_in(name, is_marked=True) == (path, "Block")
