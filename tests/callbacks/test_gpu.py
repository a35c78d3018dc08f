"""On a GPU: the device's own time, measured without ever waiting for it."""

import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from known_loop import TRUTH_S, KnownModule, SlowStream, make_profiler, measured_rows, spend, trainer_with
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor

from lm_profiler.cli.run_context import leave_group
from lm_profiler.record.quantities import bytes_text
from lm_profiler.record.run_record import read_run

pytestmark = pytest.mark.gpu


def test_an_idle_device_waits_for_data_too(tmp_path: Path) -> None:
    class Idle(KnownModule):
        def loss(self) -> Tensor:
            spend("forward", 1e-3)
            return self.weight.clone()

    profiler = make_profiler(warmup=2, measure=11)
    data = torch.utils.data.DataLoader(SlowStream(), batch_size=None)
    trainer_with([profiler], tmp_path, accelerator="gpu").fit(Idle(), data)
    rows = measured_rows(profiler)
    assert all(row.time("data", "host") > 0.99 * TRUTH_S["data"] for row in rows)
    longer_s = statistics.median(row.time("data") - row.time("data", "host") for row in rows)
    assert abs(longer_s) < 0.1 * TRUTH_S["data"]


def test_a_note_names_memory_of_graphs_that_is_in_no_peak(tmp_path: Path) -> None:
    class Replays(BoringModel):
        graph: torch.cuda.CUDAGraph | None = None

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            if self.graph is None:
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph):
                    torch.zeros(256 << 20, dtype=torch.uint8, device=self.device)
            self.graph.replay()
            return super().training_step(batch, batch_idx)

    profiler = make_profiler(warmup=1, measure=3)
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

    profiler = make_profiler(warmup=2, measure=14)
    torch.cuda.empty_cache()
    trainer_with([profiler], tmp_path, accelerator="gpu").fit(Grows())
    assert [odd.cause for odd in profiler.record.odd_steps if odd.step == 13] == [None]
    (counters,) = (of_step for of_step in profiler.record.step_counters if of_step.step == 13)
    assert counters.new_segments >= 1
    assert counters.alloc_retries == 0


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")  # on one GPU there is nothing to shard
def test_fsdp(tmp_path: Path) -> None:
    if not torch.distributed.is_nccl_available():
        pytest.skip("needs NCCL")
    profiler = make_profiler(warmup=1, measure=3, memory=1, trace=1)
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
