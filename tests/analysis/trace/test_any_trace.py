"""Traces of any program: which of their ranges are steps and phases, and what of them is damaged."""

import gzip
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cuda_trace import ALL_REDUCE, GEMM, MAIN, Trace, cuda_step

from lm_profiler.analysis.trace import large_trace
from lm_profiler.analysis.trace.any_trace import AnyTrace, phase_named, read_any_trace
from lm_profiler.analysis.trace.kernel_sums import kernel_table
from lm_profiler.analysis.why.trace_answer import trace_answer
from lm_profiler.record.trace_answer import TraceAnswer

Event = dict[str, Any]


def written_trace(folder: Path, events: Sequence[Any], header: Mapping[str, Any] | None = None) -> Path:
    path = folder / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, **(header or {}), "traceEvents": list(events)}))
    return path


def trace_of(folder: Path, events: Sequence[Any], step_name: str | None = None) -> AnyTrace:
    return read_any_trace(written_trace(folder, events), step_name)


def without_ranges(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event["cat"] != "user_annotation"]


def kernel_us(trace: AnyTrace) -> dict[str, float]:
    """The microseconds of each kernel, in all steps."""
    sums: dict[str, float] = {}
    for row in kernel_table(trace.work).rows:
        sums[row.name] = round(sums.get(row.name, 0.0) + row.total_s * 1e6, 3)
    return sums


def test_a_trace_may_be_compressed_or_a_mere_list(tmp_path: Path) -> None:
    events = cuda_step()
    text = json.dumps({"schemaVersion": 1, "traceEvents": events, "traceName": "x"}, indent=2)
    (tmp_path / "plain.json").write_text(text)
    (tmp_path / "packed.json.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "list.json").write_text(json.dumps(events))
    plain = read_any_trace(tmp_path / "plain.json")
    assert kernel_us(plain)[GEMM] == 20 + 20 + 20
    for name in ("packed.json.gz", "list.json"):
        assert kernel_table(read_any_trace(tmp_path / name).work) == kernel_table(plain.work)


def test_device_and_rank_are_those_of_the_header(tmp_path: Path) -> None:
    header = {
        "deviceProperties": [{"id": 0, "name": "NVIDIA B200"}, {"id": 1, "name": "another"}],
        "distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8},
    }
    trace = read_any_trace(written_trace(tmp_path, cuda_step(), header))
    assert (trace.device_name, trace.rank, trace.world_size) == ("NVIDIA B200", 3, 8)
    damaged = {"deviceProperties": [None, {"id": 0}], "distributedInfo": [1]}
    trace = read_any_trace(written_trace(tmp_path, cuda_step(), damaged))
    assert (trace.device_name, trace.rank, trace.world_size) == (None, None, None)


def test_steps_are_the_outermost_ranges_of_a_name(tmp_path: Path) -> None:
    """A step lasts until its kernel has ended, 10 us after its range; the validation between the steps is in none."""
    trace = Trace()
    for number, start in enumerate((0, 100)):
        trace.range(f"train step {number}", start, start + 50)
        trace.range("train step", start + 1, start + 40)  # within it
        trace.operator("aten::mm", start + 2, start + 8)
        trace.work(GEMM, start + 3, start + 20, start + 60, correlation=number + 1)
    trace.operator("aten::mm", 70, 78)
    trace.work(ALL_REDUCE, 71, 75, 90, correlation=9)  # of a validation
    work = trace_of(tmp_path, trace.events, "train step").work
    assert [step.end - step.start for step in work.packed.steps] == [50_000, 50_000]
    table = kernel_table(work)
    assert {row.name: round(row.total_s * 1e6) for row in table.rows} == {GEMM: 40 + 40}
    assert round(table.window_s * 1e6) == 60 + 60


def test_without_steps_the_whole_trace_is_one(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, without_ranges(cuda_step()))
    assert (trace.step_source, len(trace.work.packed.steps)) == ("whole", 1)
    # From the copy's operator, the first event, to the end of the last kernel.
    assert trace.work.done - trace.work.begin == (162 - 11) * 1000
    with pytest.raises(ValueError, match=r"no range 'training'.*'phase: forward'"):
        trace_of(tmp_path, cuda_step(), "training")


PHASES = {
    "forward": ["## forward ##", "Forward", "forward_pass", "forward pass", "DistributedDataParallel.forward", "fwd"],
    "backward": ["## backward ##", "autograd::engine::evaluate_function: MmBackward0", "phase: backward"],
    "optimizer": ["Optimizer.step#AdamW.step", "optimizer_step", "## optimizer ##"],
    "zero_grad": ["Optimizer.zero_grad#SGD.zero_grad"],
    "data": ["enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "dataloader"],
    None: ["phase: rollout", "phase: between steps", "rollout", "forward of the critic", "nccl:all_reduce", "", "##",
           "Forwarder", "phase: other", "backward_prefetch"],
}  # fmt: skip


@pytest.mark.parametrize("phase", PHASES)
def test_a_phase_is_only_what_a_range_names(phase: str | None) -> None:
    assert {name: phase_named(name) for name in PHASES[phase]} == dict.fromkeys(PHASES[phase], phase)


def test_modules_are_those_named_by_the_profiler(tmp_path: Path) -> None:
    """A product in each of two attentions, one in the first block after its attention, one in the model after both."""
    trace = Trace()
    trace.complete("python_function", "torch/nn/modules/module.py(1751): _call_impl", 0, 90, MAIN)
    ranges = {
        "GPT_0": (0, 90), "Block_0": (2, 40), "Attention_0": (3, 20), "Block_1": (42, 80), "Attention_1": (43, 60),
    }  # fmt: skip
    for name, (start, end) in ranges.items():
        trace.complete("python_function", f"nn.Module: {name}", start, end, MAIN)
    for number, start in enumerate((4, 21, 44, 82)):
        trace.operator("aten::mm", start, start + 4)
        trace.work(GEMM, start + 1, start + 100, start + 110, correlation=number + 1)
    rows = kernel_table(trace_of(tmp_path, trace.events).work).rows
    calls = {(row.module, row.module_type): row.count for row in rows}
    assert calls == {("GPT.Block.Attention", "Attention"): 2, ("GPT.Block", "Block"): 1, ("GPT", "GPT"): 1}


DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")


class Rank(NamedTuple):
    """The processes of a rank in a trace: of its host and of its device, and the number of the device."""

    host: int | str
    device: int | str
    device_number: int


def events_of(rank: Rank, events: Sequence[Event], late_us: float = 0.0) -> list[Event]:
    """The same work by another rank, ``late_us`` microseconds later."""
    moved = []
    for event in events:
        is_on_device = event["cat"] in DEVICE_CATEGORIES
        process = rank.device if is_on_device else rank.host
        copy = {**event, "pid": process, "ts": round(event["ts"] + late_us, 3)}
        if "device" in event.get("args", {}):
            copy["args"] = {**event["args"], "device": rank.device_number}
        moved.append(copy)
    return moved


# Two ranks as the profiler names them, and as tools do that merge files.
TWO_RANKS = [
    (Rank(5001, 0, 0), Rank(5002, 1, 1)),
    (Rank("[TP00] 5001", "[TP00] 0", 0), Rank("[TP01] 5001", "[TP01] 0", 0)),
    (Rank("rank7-5001", "rank7-0", 0), Rank("rank8-5002", "rank8-0", 0)),
]


@pytest.mark.parametrize("late_us", [7.3, 0.0, -3.1, 4_000.0])
@pytest.mark.parametrize("rank_0, rank_1", TWO_RANKS)
def test_the_processes_of_a_merged_trace_are_separated(tmp_path: Path, rank_0: Rank, rank_1: Rank, late_us: float):
    """Each is read as from a trace of its own. Both ranks have two steps, those of rank 1 with a longer optimizer."""
    events_by_rank = {
        rank_0: events_of(rank_0, [*cuda_step(), *cuda_step(number=2, origin=180)]),
        rank_1: events_of(rank_1, [*cuda_step(adam_us=31), *cuda_step(20.0, 33, 2, origin=190)], late_us),
    }
    events = [*events_by_rank[rank_0], *events_by_rank[rank_1], {"cat": ["kernel"]}]
    random.Random(5).shuffle(events)
    merged = written_trace(tmp_path, events, {"distributedInfo": {"rank": 0, "world_size": 2}})
    (tmp_path / "alone").mkdir()
    for rank, own_events in events_by_rank.items():
        trace = read_any_trace(merged, process_name=str(rank.host))
        alone = trace_of(tmp_path / "alone", own_events)
        assert kernel_table(trace.work) == kernel_table(alone.work)
        assert trace.process.name == str(rank.host)
        assert trace.process.steps == 2
        assert len(trace.processes) == 2
        assert trace.rank is None  # the header's is that of one of them
    note = trace_answer(read_any_trace(merged)).notes[0]
    assert f"only that of {rank_0.host} is shown" in note
    assert str(rank_1.host) in note


def test_guesses_about_a_merged_trace_are_notes(tmp_path: Path) -> None:
    """Each kernel begins after both processes launched it, so no time distinguishes them."""
    late = []
    for event in cuda_step():
        is_on_device = event["cat"] in DEVICE_CATEGORIES
        late.append({**event, "ts": round(event["ts"] + (1000.0 if is_on_device else 0.0), 3)})
    events = [*events_of(Rank(100, 0, 0), late), *events_of(Rank(101, 1, 1), late, late_us=7.0)]
    trace = read_any_trace(written_trace(tmp_path, events), process_name="101")
    assert trace.work.packed.devices == ["1"]
    assert any("paired in their order" in note for note in trace_answer(trace).notes)


def test_a_merged_trace_that_is_too_large_is_read_in_part(tmp_path: Path) -> None:
    steps = steps_in_a_row(6)
    merged = written_trace(
        tmp_path, [*events_of(Rank(100, 0, 0), steps), *events_of(Rank(101, 1, 1), steps, late_us=9.0)]
    )
    trace = read_any_trace(merged, most_events=2 * READ_EVENTS_OF_A_STEP + 5, process_name="101")
    assert "first 2 of 6 steps" in trace.part_words
    (tmp_path / "alone").mkdir()
    assert kernel_table(trace.work) == kernel_table(trace_of(tmp_path / "alone", steps_in_a_row(2)).work)


def test_two_processes_on_one_device_are_refused(tmp_path: Path) -> None:
    events = [*events_of(Rank(100, 0, 0), cuda_step()), *events_of(Rank(101, 0, 0), cuda_step())]
    with pytest.raises(ValueError, match=r"2 processes: 100 .* 101 .*one trace for each rank") as refused:
        trace_of(tmp_path, events)
    assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match="no process '7'"):
        read_any_trace(tmp_path / "trace.json", process_name="7")


def test_of_two_processes_without_a_device_the_one_with_more_work_is_shown(tmp_path: Path) -> None:
    events = without_ranges([event for event in cuda_step() if event["cat"] not in DEVICE_CATEGORIES])
    half_of_the_events = events_of(Rank(101, 0, 0), events[::2], late_us=50.0)
    trace = trace_of(tmp_path, [*events_of(Rank(100, 0, 0), events), *half_of_the_events])
    (tmp_path / "alone").mkdir()
    assert kernel_table(trace.work) == kernel_table(trace_of(tmp_path / "alone", events).work)
    assert [process.name for process in trace.processes] == ["100", "101"]


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"traceEvents": []}', "hello", '{"traceEvents": [{}, {"ph"'])
def test_a_trace_without_work_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"it has|not a complete trace") as refused:
        read_any_trace(path)
    assert "\n" not in str(refused.value)


NUMBERS = (-1, -1e9, 0, 1e30, float("nan"), float("inf"), True, 2**70)
JUNK = (None, *NUMBERS, "", "text", "ä\ud800", [], [1], {}, {"a": None})


def answer_or_refusal(path: Path) -> TraceAnswer | str:
    try:
        return trace_answer(read_any_trace(path))
    except ValueError as error:
        return str(error)


def damaged_events(draw: random.Random, sound: Sequence[Event]) -> list[Event]:
    """Remove or replace up to 30 fields of the events; in three of ten, give other processes to a third of them."""
    events = [{**event, "args": dict(event.get("args", {}))} for event in sound]
    for _ in range(draw.choice((1, 3, 30))):
        event = draw.choice(events)
        fields = draw.choice((event, event["args"])) if isinstance(event.get("args"), dict) else event
        key = draw.choice([*fields, "dur", "correlation", "name", "Input Dims", "Process Group Name", "bytes"])
        if draw.random() < 0.2:
            fields.pop(key, None)
        else:
            fields[key] = draw.choice(JUNK)
    if draw.random() < 0.3:
        for event in draw.sample(events, len(events) // 3):
            event["pid"] = draw.choice((7, 8, "7", None))
    return events


def test_a_trace_with_damaged_events_is_answered_or_refused_in_one_line(tmp_path: Path) -> None:
    draw = random.Random(43)
    sound = [*cuda_step(number=1), *cuda_step(number=2, origin=170)]
    answers = 0
    for _ in range(120):
        events = damaged_events(draw, sound)
        header = {"deviceProperties": draw.choice(([{"id": 0, "name": "NVIDIA A100-SXM4-80GB"}], *JUNK))}
        answer = answer_or_refusal(written_trace(tmp_path, events, header))
        if isinstance(answer, str):
            assert "\n" not in answer
            continue
        answers += 1
        assert answer.busy_s >= 0
        assert answer.idle_s >= 0
        assert answer.busy_s + answer.idle_s == pytest.approx(answer.kernels.window_s)
        assert all(row.total_s >= 0 for row in answer.kernels.rows)
        assert all(idle.total_s >= 0 for idle in answer.idle)
    assert answers > 70  # most damages leave most of a trace as it was


def test_a_text_that_is_cut_or_overwritten_is_answered_or_refused_in_one_line(tmp_path: Path) -> None:
    draw = random.Random(44)
    text = json.dumps({"traceEvents": cuda_step(), "traceName": "x"}).encode()
    path = tmp_path / "trace.json"
    for number in range(150):
        place = draw.randrange(len(text))
        is_overwritten = number % 2 == 1
        damaged = text[:place]
        if is_overwritten:
            damaged += bytes(draw.randrange(256) for _ in range(3)) + text[place + 3 :]
        path.write_bytes(damaged)
        answer = answer_or_refusal(path)
        if isinstance(answer, str):
            assert "\n" not in answer
        else:
            assert answer.busy_s + answer.idle_s == pytest.approx(answer.kernels.window_s)


def steps_in_a_row(count: int) -> list[Event]:
    """The first step's optimizer takes 20 us, and each other one 1 us longer than the one before."""
    events: list[Event] = []
    for number in range(count):
        events += cuda_step(adam_us=20 + number, number=number + 1, origin=1000 * number)
    return events


READ_EVENTS_OF_A_STEP = len([event for event in cuda_step() if event["cat"] not in ("ac2g", "gpu_user_annotation")])


def test_a_trace_that_is_too_large_is_read_in_part(tmp_path: Path) -> None:
    events = steps_in_a_row(10)
    random.Random(3).shuffle(events)  # files are not in the order of time
    header = {"deviceProperties": [{"id": 0, "name": "NVIDIA B200"}]}
    path = written_trace(tmp_path, events, header)
    part = read_any_trace(path, most_events=3 * READ_EVENTS_OF_A_STEP + 5)
    assert "first 3 of 10 steps" in part.part_words
    assert part.device_name == "NVIDIA B200"
    only_three_steps = trace_of(tmp_path, steps_in_a_row(3))
    assert kernel_table(part.work) == kernel_table(only_three_steps.work)


def test_the_step_that_is_asked_for_is_read_of_a_trace_that_is_too_large(tmp_path: Path) -> None:
    path = written_trace(tmp_path, steps_in_a_row(10))
    part = read_any_trace(path, step_name="ProfilerStep#7", most_events=len(cuda_step()) + 5)
    assert [step.name for step in part.work.packed.steps] == ["ProfilerStep#7"]
    assert kernel_us(part)[GEMM] == 20 + 20 + 20


def test_a_step_that_is_too_large_is_read_from_its_beginning(tmp_path: Path) -> None:
    """The whole step takes 170 us."""
    part = read_any_trace(written_trace(tmp_path, cuda_step()), most_events=20)
    assert "only the beginning" in part.part_words
    table = kernel_table(part.work)
    assert 0 < table.window_s < 170e-6
    assert sum(phase.busy_s + phase.idle_s for phase in table.phases.values()) == pytest.approx(table.window_s)


def test_a_trace_that_is_too_large_and_has_no_times_is_refused(tmp_path: Path) -> None:
    events = [{**event, "ts": None} for event in cuda_step()]
    with pytest.raises(ValueError, match="no event has a possible start"):
        read_any_trace(written_trace(tmp_path, events), most_events=10)


def test_many_events_are_counted_in_few_stretches(monkeypatch: pytest.MonkeyPatch):
    """The memory of the first reading does not grow with the file."""
    monkeypatch.setattr(large_trace, "_MOST_STRETCHES", 40)
    monkeypatch.setattr(large_trace, "_MOST_NEW_MOMENTS", 50)
    counts = large_trace._EventCounts()
    draw = random.Random(4)
    moments = [draw.randrange(10**9) for _ in range(3000)]
    for moment in moments:
        counts.add([moment])
    counts.merge()
    assert len(counts.stretches) <= 40
    for bound in (0, 10**8, 5 * 10**8, 10**9):
        expected = sum(moment < bound for moment in moments)
        assert counts.events_before(bound) == pytest.approx(expected, abs=3000 / 20 + 1)


def test_the_steps_are_the_same_with_few_stretches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(large_trace, "_MOST_STRETCHES", 40)
    monkeypatch.setattr(large_trace, "_MOST_NEW_MOMENTS", 50)
    path = written_trace(tmp_path, steps_in_a_row(10))
    part = read_any_trace(path, most_events=3 * READ_EVENTS_OF_A_STEP + 5)
    assert "first 3 of 10 steps" in part.part_words
