"""The table of a real run's trace: what people ask of it, and that it can lose nothing."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from cuda_trace import kernel_table
from faults import fault_in
from known_loop import TRUTH_S, make_profiler, trainer_with
from lightning.pytorch.demos.boring_classes import BoringModel
from sleepy_loop import CudaDevice, Device, Graphed, Sleepy, SleepyLoader, TwoStreams
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

from lm_profiler.analysis.trace import kernel_sums
from lm_profiler.analysis.trace.any_trace import read_any_trace
from lm_profiler.analysis.trace.kernel_sums import kernel_table as sums_of_kernels
from lm_profiler.analysis.trace.trace_file import trace_events
from lm_profiler.analysis.why.trace_answer import trace_answer
from lm_profiler.callbacks import TrainingProfiler
from lm_profiler.callbacks.collect import without_kernels
from lm_profiler.record.kernels import KernelTable, kernel_files, read_kernels
from lm_profiler.record.run_record import read_run
from lm_profiler.training import FakeTokens, LanguageModel

LAYERS, TRACED = 3, 2


@pytest.fixture(scope="module", autouse=True)
def all_rows() -> Iterator[None]:
    """Which of some 550 kinds of calls are the 300 costliest is chance where most of them take microseconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_sums, "LARGEST_ROWS", 10_000)
        yield


@pytest.fixture(scope="module")
def run(all_rows: None, tmp_path_factory: pytest.TempPathFactory) -> TrainingProfiler:
    """A small language model whose attention is written out."""
    profiler = make_profiler(warmup=1, measure=2, trace=TRACED)
    model = LanguageModel(d_model=32, d_ff=64, num_layers=LAYERS, num_heads=2, vocab_size=50, attention="math")
    data = FakeTokens(context_length=16, batch_size=2, vocab_size=50)
    trainer_with([profiler], tmp_path_factory.mktemp("lm"), gradient_clip_val=1.0).fit(model, data)
    return profiler


@pytest.fixture(scope="module")
def table(run: TrainingProfiler) -> KernelTable:
    (file,) = kernel_files(run.folder)
    return read_kernels(file)


def test_any_traces_answer_is_the_runs_own(run: TrainingProfiler, table: KernelTable) -> None:
    answer = trace_answer(read_any_trace(run.folder / "trace" / "rank0.pt.trace.json.gz"))
    assert answer.kernels == table
    assert (answer.step_source, answer.steps, answer.left_out) == ("ProfilerStep", TRACED, {})


def calls(table: KernelTable, phase: str, name: str, module: str | None) -> float:
    """How often ``name`` runs for ``module`` in one step."""
    rows = [row for row in table.rows if (row.phase, row.name, row.module) == (phase, name, module)]
    return sum(row.count for row in rows) / table.steps


def test_the_table_has_phases_and_modules(run: TrainingProfiler, table: KernelTable) -> None:
    assert (table.source, table.steps) == ("operators", TRACED)
    assert sum(p.busy_s + p.idle_s for p in table.phases.values()) == pytest.approx(table.window_s)
    assert {"data", "transfer", "forward", "zero_grad", "backward", "clip", "optimizer"} <= set(table.phases)
    assert (table.memory_bound_share, table.communication_share) == (None, None)  # on the CPU
    (note,) = without_kernels(torch.device("cuda", 0), table)  # of a device whose driver shows none
    assert "no kernels" in note
    assert "cuda device" in note
    assert without_kernels(torch.device("cpu"), table) == without_kernels(torch.device("cuda", 0), None) == []
    assert without_kernels(torch.device("cuda", 0), table.model_copy(update={"source": "kernels"})) == []
    assert not [note for note in run.record.notes if "kernels" in note]
    for linear in ("attention.query", "attention.output", "feed_forward.gate"):
        module = f"model.blocks.*.{linear}"
        assert calls(table, "forward", "aten::mm", module) == LAYERS
        assert calls(table, "backward", "aten::mm", module) == 2 * LAYERS  # of the input, and of the weight
        assert {row.module_type for row in table.rows if row.module == module} == {"Linear"}
    assert calls(table, "forward", "aten::mm", "model.head") == 1
    assert calls(table, "optimizer", "aten::_fused_adamw_", None) == 1  # of no module
    products = {name: p.kinds["matmul"].count for name, p in table.phases.items() if "matmul" in p.kinds}
    # Seven of weights and two of attention in a layer, and the head; the backward pass has two for each.
    forward = 9 * LAYERS + 1
    assert products == {"forward": TRACED * forward, "backward": TRACED * 2 * forward}
    assert 0 < table.phases["forward"].kinds["matmul"].total_s < table.phases["forward"].busy_s


def test_attention_and_the_loss_are_kinds_of_their_own(table: KernelTable) -> None:
    inside = [row for row in table.rows if row.module == "model.blocks.*.attention" and row.phase == "forward"]
    counts = {kind: sum(row.count for row in inside if row.kind == kind) for kind in ("softmax", "matmul")}
    assert counts == {"softmax": LAYERS * TRACED, "matmul": 2 * LAYERS * TRACED}
    assert calls(table, "backward", "aten::_softmax_backward_data", "model.blocks.*.attention") == LAYERS
    assert calls(table, "forward", "aten::nll_loss_forward", "loss") == 1
    assert calls(table, "forward", "aten::_log_softmax", "loss") == 1
    assert calls(table, "backward", "aten::_log_softmax_backward_data", "loss") == 1
    assert {row.module_type for row in table.rows if row.module == "loss"} == {"part"}
    assert not [row for row in table.rows if row.module == "loss" and row.kind == "matmul"]


def test_times_and_calls_are_those_of_torchs_profiler(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    two = schedule(wait=0, warmup=1, active=2, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=two, acc_events=True) as profiled:
        for _ in range(3):
            model(torch.ones(32, 64)).softmax(-1).mean().backward()
            optimizer.step()
            profiled.step()
    path = tmp_path / "rank0.pt.trace.json.gz"
    profiled.export_chrome_trace(str(path))

    ours: Counter[str] = Counter()
    own_us: Counter[str] = Counter()
    for row in kernel_table(trace_events(path)).rows:
        ours[row.name] += row.count
        own_us[row.name] += row.total_s * 1e6
    theirs = {average.key: average for average in profiled.key_averages() if average.key in ours}
    assert len(theirs) == len(ours) > 20
    assert {name: average.count for name, average in theirs.items()} == ours
    for name, average in theirs.items():
        assert own_us[name] == pytest.approx(average.self_cpu_time_total, abs=0.1), name


def test_a_table_that_fails_is_a_note(tmp_path: Path) -> None:
    profiler = make_profiler(warmup=1, measure=2, trace=1)
    with fault_in(sums_of_kernels, KeyError("args")):
        trainer_with([profiler], tmp_path).fit(BoringModel())
    assert [path.name for path in (profiler.folder / "trace").iterdir()] == ["rank0.pt.trace.json.gz"]
    record = read_run(profiler.folder)
    assert record.status == "ok"
    assert record.verdict is not None
    assert any(note.startswith("kernels unknown") and "KeyError" in note for note in record.notes)


@pytest.mark.gpu
def test_on_a_device_kernels_have_phase_and_module(tmp_path: Path) -> None:
    profiler = make_profiler(warmup=1, measure=2, trace=TRACED)
    model = LanguageModel(d_model=256, d_ff=512, num_layers=LAYERS, num_heads=4, vocab_size=50, attention="math")
    data = FakeTokens(context_length=128, batch_size=4, vocab_size=50)
    trainer_with([profiler], tmp_path, accelerator="gpu").fit(model, data)
    table = read_kernels(kernel_files(profiler.folder)[0])
    assert (table.source, table.steps) == ("kernels", TRACED)
    assert sum(p.busy_s + p.idle_s for p in table.phases.values()) == pytest.approx(table.window_s)
    assert table.communication_share == 0
    assert 0 < table.memory_bound_share < 1
    products = {(row.phase, row.module) for row in table.rows if row.kind == "matmul"}
    for phase in ("forward", "backward"):
        assert (phase, "model.blocks.*.feed_forward.gate") in products
    torch.cuda.synchronize()


_BESIDE = TRUTH_S["backward"] + TRUTH_S["clip"] + 2 * TRUTH_S["optimizer"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "module_of, on_second_stream",
    [(Sleepy, {}), (Graphed, {}), (TwoStreams, {"forward": 1.5 * TRUTH_S["forward"], "backward": _BESIDE})],
)
def test_on_a_device_a_phase_has_the_kernels_of_all_its_streams(
    tmp_path: Path, module_of: Callable[[Device], Sleepy], on_second_stream: Mapping[str, float]
) -> None:
    profiler = make_profiler(warmup=1, measure=2, trace=TRACED)
    trainer_with([profiler], tmp_path, accelerator="gpu").fit(module_of(CudaDevice()), SleepyLoader())
    table = read_kernels(kernel_files(profiler.folder)[0])
    spinning: Counter[str] = Counter()
    for row in table.rows:
        if "spin_kernel" in row.name:
            spinning[row.phase] += row.total_s / TRACED
    phases = ("transfer", "forward", "zero_grad", "backward", "clip", "optimizer")
    launched = {phase: TRUTH_S[phase] + on_second_stream.get(phase, 0.0) for phase in phases}
    assert spinning == pytest.approx(launched, rel=0.05)  # their cycles were reckoned with the clock as it was before
    overlap_s = sum(phase.overlap_s for phase in table.phases.values()) / TRACED
    assert (overlap_s > 0.5 * TRUTH_S["forward"]) == bool(on_second_stream)
