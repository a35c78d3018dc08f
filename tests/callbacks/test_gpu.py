"""On a GPU: the device's own time, measured without ever waiting for it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from known_loop import TRUTH_S, KnownModule, SlowStream, instruments, measured_rows, spin, trainer_with
from lightning.pytorch.demos.boring_classes import BoringModel
from sleepy_loop import CudaDevice, Device, Graphed, Sleepy, SleepyLoader, TwoStreams
from torch import Tensor

from lm_profiler.cli.run_context import leave_group
from lm_profiler.record.quantities import PARTS, bytes_text
from lm_profiler.record.run_record import read_run
from lm_profiler.record.steps import read_steps

pytestmark = pytest.mark.gpu
BUSY = ("transfer", "forward", "zero_grad", "backward", "clip", "optimizer")


@pytest.mark.parametrize("module_of", [Sleepy, TwoStreams, Graphed])
def test_each_phase_takes_what_an_independent_pair_of_events_says(
    tmp_path: Path, module_of: Callable[[Device], Sleepy]
) -> None:
    module, profiler = module_of(CudaDevice()), instruments(2, 11)
    trainer_with([profiler], tmp_path, accelerator="gpu").fit(module, SleepyLoader())
    record = read_run(profiler.folder)
    for phase in BUSY:
        truth_s = statistics.median(module.sleep.step_seconds(phase, 1, 2, 13))
        assert record.time[phase].median == pytest.approx(truth_s, abs=max(0.3e-3, 0.015 * truth_s)), phase
    step_s = record.time["step"].median
    assert record.time["other"].median < 0.015 * step_s
    # The host only launches: had anything in a step waited for the device, its time would be the device's.
    assert record.host_time["forward"].median < 2e-3
    for row in read_steps(profiler.folder / "steps.csv"):
        for clock in ("device", "host"):
            parts = sum(row.time(part, clock) for part in PARTS)
            assert parts == pytest.approx(row.time("step", clock), abs=5e-6)  # events tick in half microseconds


def test_waiting_for_data_is_the_devices_time_as_well_where_it_has_nothing_else_to_do(tmp_path: Path) -> None:
    class Idle(KnownModule):
        def loss(self) -> Tensor:
            spin("forward", 1e-3)
            return self.weight.clone()

    profiler = instruments(2, 11)
    data = torch.utils.data.DataLoader(SlowStream(), batch_size=None)
    trainer_with([profiler], tmp_path, accelerator="gpu").fit(Idle(), data)
    rows = measured_rows(profiler)
    assert all(row.time("data", "host") > 0.99 * TRUTH_S["data"] for row in rows)
    longer_s = statistics.median(row.time("data") - row.time("data", "host") for row in rows)
    assert abs(longer_s) < 0.1 * TRUTH_S["data"]


def test_memory_is_the_allocators(tmp_path: Path) -> None:
    class Holds(BoringModel):
        held = 0
        """Before its block: weights, states, and the workspaces that cuBLAS keeps from the first step on."""

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            self.held = torch.cuda.memory_allocated(self.device)
            torch.empty(256 << 20, dtype=torch.uint8, device=self.device)
            return super().training_step(batch, batch_idx)

    module, profiler = Holds(), instruments(1, 3, memory=1)
    trainer_with([profiler], tmp_path, accelerator="gpu").fit(module)
    memory = profiler.record.memory
    assert memory.measured.allocated_peak == pytest.approx(module.held + (256 << 20), abs=1 << 20)
    assert (memory.measured.reserved_peak or 0) >= (memory.measured.allocated_peak or 0)
    assert (memory.parts["forward"].allocated_peak or 0) >= 256 << 20
    assert (memory.parts["optimizer"].allocated_peak or 0) < 256 << 20


def test_what_graphs_use_when_they_are_replayed_is_said_to_be_in_no_peak(tmp_path: Path) -> None:
    class Replays(BoringModel):
        graph: torch.cuda.CUDAGraph | None = None

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            if self.graph is None:
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph):
                    torch.zeros(256 << 20, dtype=torch.uint8, device=self.device)
            self.graph.replay()
            return super().training_step(batch, batch_idx)

    profiler = instruments(1, 3)
    trainer_with([profiler], tmp_path, accelerator="gpu").fit(Replays())
    memory = profiler.record.memory
    assert (memory.measured.allocated_peak or 0) < 256 << 20
    assert any(bytes_text(256 << 20) in note for note in profiler.record.notes)


def test_a_step_in_which_the_allocator_asks_for_memory_counts_it(tmp_path: Path) -> None:
    class Grows(BoringModel):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            time.sleep(0.01)
            if batch_idx == 12:
                torch.empty(1 << 30, dtype=torch.uint8, device=self.device)
                time.sleep(0.5)  # so that the step is odd
            return super().training_step(batch, batch_idx)

    profiler = instruments(2, 14)
    torch.cuda.empty_cache()
    trainer_with([profiler], tmp_path, accelerator="gpu").fit(Grows())
    assert [odd.cause for odd in profiler.record.odd_steps if odd.step == 13] == [None]
    (counters,) = (each for each in profiler.record.step_counters if each.step == 13)
    assert counters.new_segments >= 1
    assert counters.alloc_retries == 0


def test_out_of_memory_on_the_device(tmp_path: Path) -> None:
    class Full(BoringModel):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            if batch_idx == 3:
                torch.empty(1 << 50, dtype=torch.uint8, device=self.device)
            return super().training_step(batch, batch_idx)

    profiler = instruments(1, 10)
    with pytest.raises(torch.OutOfMemoryError):
        trainer_with([profiler], tmp_path, accelerator="gpu").fit(Full())
    record = read_run(profiler.folder)
    assert record.status == "oom"
    assert (record.failure.phase, record.failure.step) == ("forward", 4)
    assert [row.seconds is not None for row in read_steps(profiler.folder / "steps.csv")] == [True] * 3


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")  # on one GPU there is nothing to shard
def test_fsdp(tmp_path: Path) -> None:
    if not torch.distributed.is_nccl_available():
        pytest.skip("needs NCCL")
    profiler = instruments(1, 3, memory=1, trace=1)
    try:
        trainer_with([profiler], tmp_path, accelerator="gpu", strategy="fsdp").fit(BoringModel())
    finally:
        leave_group()  # which Lightning keeps until the process ends
    record = read_run(profiler.folder)
    assert record.status == "ok"
    assert record.steps == {"warmup": 1, "measure": 3, "actions": 0, "memory": 1, "trace": 2}
    for phase in ("forward", "backward", "optimizer"):
        minimum = record.time[phase].min
        assert minimum > 0
