"""The trace: whole steps, the phases in them, nothing before the measured steps are over."""

import gzip
import json
import resource
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from known_loop import make_profiler, trainer_with
from lightning.pytorch import Callback
from lightning.pytorch.demos.boring_classes import BoringModel
from raised import refusal
from stored_texts import assert_stored
from torch.optim import optimizer as optimizer_module

from lm_profiler.analysis.trace.pieces import read_traced_work
from lm_profiler.analysis.trace.range_names import phase_range_name
from lm_profiler.analysis.trace.trace_file import OperatorEvents, trace_events
from lm_profiler.callbacks import TraceOptions, TrainingProfiler
from lm_profiler.callbacks.instruments.tracer import Tracer
from lm_profiler.measure.boundary import Guard
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.record.kernels import kernels_file, read_kernels
from lm_profiler.record.quantities import PHASES
from lm_profiler.record.steps import read_steps

TRACED = 3

pytestmark = pytest.mark.usefixtures("counted_apart")


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> TrainingProfiler:
    profiler, export = (
        make_profiler(warmup=2, measure=3, memory=1, trace=TRACED),
        torch.profiler.profile.export_chrome_trace,
    )
    exported: list[torch.profiler.profile] = []
    made: list[int] = []  # how many objects of events torch had then
    running: list[bool] = []

    class Asks(Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            running.append(torch.autograd._profiler_enabled())

    def export_and_count(self: torch.profiler.profile, path: str) -> None:
        exported.append(self)
        made.append(len(self.profiler.kineto_results.events()))
        export(self, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.profiler.profile, "export_chrome_trace", export_and_count)
        trainer_with([Asks(), profiler], tmp_path_factory.mktemp("traced")).fit(BoringModel())
    assert [trace.profiler for trace in exported] == [None]  # the events in memory are let go
    before_2_13 = not hasattr(torch.profiler._ExperimentalConfig(), "trace_only")
    assert made == [0] or before_2_13  # none of events that nobody reads
    # Of the trace's four steps the first is the profiler's own warm-up.
    assert (running[:6], running[-TRACED:]) == ([False] * 6, [True] * TRACED)
    assert not torch.autograd._profiler_enabled()
    return profiler


def test_one_trace_and_its_table_are_written(profiled: TrainingProfiler) -> None:
    names = sorted(path.name for path in (profiled.folder / "trace").iterdir())
    assert names == ["rank0.kernels.json", "rank0.pt.trace.json.gz"]
    read = list(trace_events(profiled.folder / "trace" / "rank0.pt.trace.json.gz"))
    assert any(isinstance(event, OperatorEvents) for event in read)  # operators as the reader matches them
    assert not any(event.get("cat") == "cpu_op" for event in read if not isinstance(event, OperatorEvents))
    stages = [row.stage for row in read_steps(profiled.folder / "steps.csv")]
    assert stages == ["warmup"] * 2 + ["measure"] * 3 + ["memory"] + ["trace"] * (TRACED + 1)
    assert profiled.record.time["step"].n == 3


@pytest.fixture(scope="module")
def events(profiled: TrainingProfiler) -> list[dict[str, Any]]:
    with gzip.open(profiled.folder / "trace" / "rank0.pt.trace.json.gz", "rt") as file:
        return json.load(file)["traceEvents"]


def ranges(events: list[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    """Begin and end, in microseconds, of the complete events on the host that are called ``name``."""
    spans = []
    for event in events:
        if event.get("ph") == "X" and event["name"] == name and not event["cat"].startswith("gpu"):
            spans.append((event["ts"], event["ts"] + event["dur"]))
    return sorted(spans)


def test_every_phase_is_marked_once_in_each_traced_step_around_its_operators(events: list[dict[str, Any]]) -> None:
    counts = {phase: len(ranges(events, phase_range_name(phase))) for phase in PHASES}
    # The last step's end is known only when the next batch would be asked for.
    assert counts == dict.fromkeys(PHASES, TRACED)
    assert len({e["name"] for e in events if e.get("name", "").startswith("ProfilerStep#")}) == TRACED
    operators = {"aten::linear": "forward", "aten::mse_loss": "forward", "aten::mse_loss_backward": "backward"}
    for operator, phase in operators.items():
        found, phases = ranges(events, operator), ranges(events, phase_range_name(phase))
        assert len(found) >= TRACED  # a nested call may bear the same name
        for began, ended in found:
            assert any(start <= began and ended <= end for start, end in phases), operator


def test_the_phases_of_a_step_follow_each_other(events: list[dict[str, Any]]) -> None:
    order = ("data", "transfer", "forward", "zero_grad", "backward", "clip", "optimizer")
    ranges_by_phase = [ranges(events, phase_range_name(phase)) for phase in order]
    in_time = sorted(span for of_phase in ranges_by_phase for span in of_phase)
    step_by_step = [of_phase[step] for step in range(TRACED) for of_phase in ranges_by_phase]
    assert in_time == step_by_step
    for (_, end), (next_begin, _) in pairwise(in_time):
        assert end <= next_begin


@pytest.mark.skipif(torch.cuda.is_available(), reason="the refusal is for machines without CUDA")
def test_nsights_options_are_refused_without_cuda() -> None:
    names = ("nvtx", "cuda_profiler_range")
    messages = {name: refusal(ValueError, lambda name=name: TraceOptions(**{name: True})) for name in names}
    assert_stored("callbacks/refused: for Nsight", messages)


class FullDisk(Callback):
    """Once the traced steps are over, and until the epoch is, a file can have a part of the trace only."""

    def __init__(self) -> None:
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def on_train_batch_end(self, *args: Any) -> None:
        if args[-1] == 4 + TRACED:  # after five steps without a trace, of which the last warms it up
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, self.before[1]))

    def on_train_epoch_end(self, *_: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


def test_a_trace_that_the_disk_has_no_room_for_leaves_no_part_of_it(tmp_path: Path) -> None:
    profiler, disk = make_profiler(warmup=1, measure=3, trace=TRACED), FullDisk()
    try:
        trainer_with([disk, profiler], tmp_path).fit(BoringModel())
    finally:
        disk.on_train_epoch_end()
    assert profiler.record.status == "ok"
    assert any(note.startswith("trace failed") for note in profiler.record.notes)
    assert [*(profiler.folder / "trace").iterdir()] == []


@pytest.mark.parametrize("ends_after, traced", [(4, None), (5, 1)])
def test_a_run_that_ends_early_has_the_steps_traced_so_far(ends_after: int, traced: int | None, tmp_path: Path):
    """After 3 steps tracing begins: one to warm up, and two."""
    profiler = make_profiler(warmup=1, measure=2, trace=2)
    trainer_with([profiler], tmp_path, max_steps=ends_after).fit(BoringModel())
    table = kernels_file(profiler.folder / "trace" / "rank0.pt.trace.json.gz")
    assert (read_kernels(table).steps if table.exists() else None) == traced
    notes = [note for note in profiler.record.notes if "no waterfall" in note]
    assert len(notes) == (traced is None)
    assert [note for note in profiler.record.notes if "Error" in note] == []


def test_the_profilers_range_spans_the_measured_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for CUDA's functions."""
    seen: list[str] = []
    monkeypatch.setattr("torch.cuda.synchronize", lambda: seen.append("wait"))
    monkeypatch.setattr("torch.cuda.profiler.start", lambda: seen.append("start"))
    monkeypatch.setattr("torch.cuda.profiler.stop", lambda: seen.append("stop"))

    class Steps(Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            seen.append("step")

    profiler = make_profiler(warmup=2, measure=3, memory=1, trace=0)
    with monkeypatch.context() as with_cuda:
        with_cuda.setattr("torch.cuda.is_available", lambda: True)
        profiler._options = replace(profiler._options, trace=TraceOptions(steps=0, cuda_profiler_range=True))
    trainer_with([Steps(), profiler], tmp_path).fit(BoringModel())
    assert seen == ["step"] * 2 + ["wait", "start"] + ["step"] * 3 + ["stop"] + ["step"]


class Perturbs(torch.optim.SGD):
    """Like SAM: it works before its closure, and steps twice."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for weight in self.param_groups[0]["params"]:
                weight.mul_(1.001)
        loss = closure()
        super().step()
        return loss


class Steps(BoringModel):
    """The same work under automatic optimization, and under manual optimization with a closure."""

    def __init__(self, optimizer: type[torch.optim.Optimizer], way: str) -> None:
        super().__init__()
        self._optimizer = optimizer
        self._way = way
        self.automatic_optimization = way == "automatic"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self._way == "automatic":
            return super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.step(lambda: self.gradients(batch))
        return None

    def gradients(self, batch: Any) -> torch.Tensor:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(self.layer(batch))
        self.manual_backward(loss)
        return loss

    def configure_optimizers(self) -> Any:
        return self._optimizer([*self.layer.parameters()], lr=0.1)


def overlapping_ranges(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Names of every two ranges of a thread of which neither lies in the other, nor before it."""
    ranges_ns = []
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in ("user_annotation", "cpu_op"):
            begin_ns, end_ns = round(event["ts"] * 1e3), round((event["ts"] + event["dur"]) * 1e3)
            ranges_ns.append((begin_ns, end_ns, event["name"], event["tid"]))
    found = []
    for begin, end, name, thread in ranges_ns:
        for other_begin, other_end, other_name, other_thread in ranges_ns:
            if thread == other_thread and begin < other_begin < end < other_end:
                found.append((name, other_name))
    return found


def hooks_of_all_optimizers() -> tuple[int, int]:
    """How many hooks torch calls before and after each step of any optimizer."""
    return len(optimizer_module._global_optimizer_pre_hooks), len(optimizer_module._global_optimizer_post_hooks)


@pytest.mark.parametrize("optimizer, way", [(torch.optim.SGD, "manual with a closure"), (Perturbs, "automatic")])
def test_the_ranges_of_a_step_nest(tmp_path: Path, optimizer: type[torch.optim.Optimizer], way: str) -> None:
    """Perfetto drops a range that overlaps another."""
    profiler, hooks_before = make_profiler(warmup=1, measure=2, trace=2), hooks_of_all_optimizers()
    trainer_with([profiler], tmp_path, gradient_clip_val=None).fit(Steps(optimizer, way))
    assert hooks_of_all_optimizers() == hooks_before
    trace = profiler.folder / "trace" / "rank0.pt.trace.json.gz"
    with gzip.open(trace, "rt") as file:
        traced = json.load(file)["traceEvents"]
    assert any(e["name"].startswith("Optimizer.step#") for e in traced)
    assert overlapping_ranges(traced) == []
    work = read_traced_work(trace)
    seen = {(piece.name, piece.phase) for piece in work.pieces}
    assert {phase for name, phase in seen if name == "aten::mse_loss"} == {"forward"}
    assert {phase for name, phase in seen if name == "aten::mse_loss_backward"} == {"backward"}
    assert ("aten::add_", "optimizer") in seen
    if optimizer is not torch.optim.SGD:
        assert {phase for name, phase in seen if name == "aten::mul_"} == {"optimizer"}


CALLS = 5  # of ``aten::linear``, in a step


def tracer_in(folder: Path) -> tuple[Tracer, list[str]]:
    """A tracer and what its guard reports."""
    notes: list[str] = []
    module = torch.nn.Linear(2, 2)
    tracer = Tracer(TraceOptions(steps=1), torch.device("cpu"), Timeline(), folder, 0, lambda: module)
    tracer.guard = Guard("trace", notes.append, tracer.discard)
    return tracer, notes


def call_linear() -> None:
    layer = torch.nn.Linear(2, 2)
    for _ in range(CALLS):
        layer(torch.ones(1, 2))


def traced_steps(tracer: Tracer, steps: int = 2) -> None:
    tracer.guard.run(tracer.start)
    for _ in range(steps):
        call_linear()
        tracer.guard.run(tracer.step)
    tracer.guard.run(tracer.result)


def linear_calls(theirs: Any) -> int:
    return sum(event.name == "aten::linear" for event in theirs.events())


def users_session(**options: Any) -> torch.profiler.profile:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True, **options)


def test_a_session_of_the_user_that_is_over_prevents_no_trace(tmp_path: Path) -> None:
    """As in a program with several fits, and in a watched run that is traced more than once."""
    with users_session() as theirs:
        call_linear()
    tracer, notes = tracer_in(tmp_path)
    traced_steps(tracer)
    assert notes == []
    assert tracer.path.exists()
    assert linear_calls(theirs) == CALLS


def test_a_session_of_the_user_prevents_our_trace(tmp_path: Path) -> None:
    """It has the layer's calls before, in both steps that we would trace, and after them."""
    with users_session() as theirs:
        call_linear()
        tracer, notes = tracer_in(tmp_path)
        traced_steps(tracer, steps=2)
        call_linear()
    assert linear_calls(theirs) == (1 + 2 + 1) * CALLS
    (note,) = notes
    assert "trace left out" in note


def test_disabled_sessions_of_the_user_do_not_end_the_trace(tmp_path: Path) -> None:
    """Programs with a switch for torch's profiler have a disabled session around their loop, or in it."""
    tracer, notes = tracer_in(tmp_path)
    with torch.autograd.profiler.profile(enabled=False):
        tracer.guard.run(tracer.start)
        for _ in range(2):
            with torch.autograd.profiler.emit_itt(enabled=False), torch.autograd.profiler.emit_nvtx(enabled=False):
                call_linear()
            tracer.guard.run(tracer.step)
        tracer.guard.run(tracer.result)
    assert notes == []
    assert tracer.path.exists()


def test_a_schedule_that_begins_amid_our_trace_gets_the_session(tmp_path: Path) -> None:
    with users_session(schedule=torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1)) as theirs:
        tracer, notes = tracer_in(tmp_path)
        tracer.guard.run(tracer.start)
        for _ in range(4):
            call_linear()
            tracer.guard.run(tracer.step)
            theirs.step()
        tracer.guard.run(tracer.result)
    assert linear_calls(theirs) == 2 * CALLS
    assert len(notes) == 1


def test_annotations_that_the_user_begins_amid_our_trace_end_it(tmp_path: Path) -> None:
    """They use torch's profiler too, but prepare nothing."""
    tracer, notes = tracer_in(tmp_path)
    tracer.guard.run(tracer.start)
    tracer.guard.run(tracer.step)
    with torch.autograd.profiler.emit_itt():
        call_linear()
        assert torch.autograd._profiler_enabled()
    assert len(notes) == 1
    assert not torch.autograd._profiler_enabled()


@pytest.mark.parametrize(
    "register", [optimizer_module.register_optimizer_step_pre_hook, optimizer_module.register_optimizer_step_post_hook]
)
def test_a_session_may_begin_in_a_hook_of_all_optimizers(register: Any, tmp_path: Path) -> None:
    """torch iterates over these hooks, so ours may not be removed there."""
    theirs = users_session()

    def begin_session(*arguments: Any) -> None:
        if not theirs.profiler:
            theirs.start()

    hooks = (optimizer_module._global_optimizer_pre_hooks, optimizer_module._global_optimizer_post_hooks)
    before = [dict(hooks_of_kind) for hooks_of_kind in hooks]
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    tracer, notes = tracer_in(tmp_path)
    with register(begin_session):  # before ours, so that torch goes on to ours after it
        tracer.guard.run(tracer.start)
        optimizer.step()
        optimizer.step()
        call_linear()
    theirs.stop()
    tracer.guard.undo()  # as at the end of the stage
    assert float(parameter.detach()) == -2
    assert linear_calls(theirs) == CALLS
    assert len(notes) == 1
    assert [dict(hooks_of_kind) for hooks_of_kind in hooks] == before
