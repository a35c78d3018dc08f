"""The memory timeline of a rehearsed step, against bytes that are known by hand."""

import sys
from pathlib import Path
from typing import Any

import pytest

from lm_profiler.analysis.plan.planned import Planned
from lm_profiler.cli.rehearse import start_rehearsal, wait_for_plan

MLP = """
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

class Mlp(LightningModule):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 256, bias=False), nn.Linear(256, 32, bias=False)
    def train_dataloader(self):
        return DataLoader(torch.randn(800, 64), batch_size=100)
    def training_step(self, batch, batch_idx):
        return self.second(torch.relu(self.first(batch))).sum()
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), foreach=False)
"""
FIRST, SECOND, HIDDEN, OUT, BATCH = (4 * n for n in (64 * 256, 256 * 32, 100 * 256, 100 * 32, 100 * 64))
"""Bytes of the two weights, and of the activations."""
WEIGHTS = FIRST + SECOND


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "mlp.py").write_text(MLP)
    monkeypatch.syspath_prepend(str(tmp_path))

    def plan(*options: str, gpu: tuple[int, int] | None = None) -> Planned:
        answer = wait_for_plan(
            start_rehearsal(["fit", "--model=mlp.Mlp", "--trainer.accelerator=cpu", *options], gpu, fresh=True)
        )
        assert isinstance(answer, Planned), answer
        return answer

    yield plan
    sys.modules.pop("mlp", None)


def test_the_bytes_of_a_two_layer_mlp_are_those_computed_by_hand(planned: Any) -> None:
    plan = planned()
    timeline = plan.timeline
    none = dict.fromkeys(timeline.causes, 0)
    steps = 2 * 4  # Adam counts steps in a number for each weight
    at_rest = {"parameters": WEIGHTS, "gradients": WEIGHTS, "optimizer_states": 2 * WEIGHTS + steps}
    assert timeline.bytes_after(0) == none | at_rest
    begins = dict(reversed(timeline.phases))
    after_forward = timeline.bytes_after(begins["zero_grad"])
    # Backward needs the batch, and the output of relu; the product before it is gone. The rest is the loss.
    assert after_forward["activations"] == HIDDEN + BATCH
    assert 0 < after_forward["rest"] <= 4 * 4
    assert {tensor.bytes for tensor in timeline.saved} == {HIDDEN, BATCH}
    # In forward, relu's input is there beside its output; gradients of the step before are still there.
    assert plan.peaks["forward"] == 4 * WEIGHTS + steps + BATCH + 2 * HIDDEN
    assert timeline.peak == plan.peak == max(plan.peaks.values())
    after = timeline.moments()["after_optimizer"]
    assert (after.parameters, after.gradients, after.optimizer_states) == tuple(at_rest.values())
    set_up = timeline.moments()["set_up"]
    assert (set_up.parameters, set_up.gradients, set_up.optimizer_states) == (WEIGHTS, 0, 0)
    assert timeline.totals[-1] == sum(timeline.start) + sum(by for _, by in timeline.events)


def test_each_allocation_has_its_origin(planned: Any) -> None:
    timeline = planned().timeline
    hidden = next(tensor for tensor in timeline.saved if tensor.bytes == HIDDEN)
    assert (hidden.shape, hidden.dtype, hidden.phase) == ([100, 256], "float32", "forward")
    line = 1 + next(n for n, text in enumerate(MLP.splitlines()) if "relu" in text)
    assert (hidden.name, hidden.module, hidden.line) == ("aten.relu.default", None, f"mlp.py:{line}")
    assert {tensor.name for tensor in timeline.largest if tensor.cause == "gradients"} <= {
        "gradient of first.weight",
        "gradient of second.weight",
    }


STACK = (
    MLP.replace(
        "class Mlp(",
        """class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64, bias=False)
    def forward(self, x):
        return torch.relu(self.linear(x))

class Mlp(""",
    )
    .replace(
        "self.first, self.second = nn.Linear(64, 256, bias=False), nn.Linear(256, 32, bias=False)",
        "self.blocks = nn.ModuleList(Block() for _ in range(3))",
    )
    .replace("self.second(torch.relu(self.first(batch)))", "self.blocks[2](self.blocks[1](self.blocks[0](batch)))")
)


def test_a_block_saves_the_output_of_its_relu(planned: Any, tmp_path: Path) -> None:
    (tmp_path / "mlp.py").write_text(STACK)
    block = planned().timeline.block
    assert (block.module, block.count) == ("blocks.*", 3)
    assert (block.saved_bytes, block.gradients_bytes) == (4 * 100 * 64, 4 * 64 * 64)
    assert [(tensor.bytes, tensor.count, tensor.module) for tensor in block.saved] == [(4 * 100 * 64, 1, "blocks.1")]


def test_the_curve_of_a_gpu_reaches_the_planned_peak() -> None:
    """Of a run that recomputes, accumulates, casts and has DDP's buckets."""
    options = ["--model.activation_checkpointing=true", "--trainer.accumulate_grad_batches=2", "--trainer.devices=2"]
    options += ["--model.num_layers=2", "--model.d_model=64", "--model.num_heads=2", "--data.context_length=64"]
    call = ["fit", "--config=demo", "--trainer.precision=bf16-mixed", "--trainer.strategy=ddp", *options]
    plan = wait_for_plan(start_rehearsal(call, (9, 0), fresh=True))
    timeline = plan.timeline
    assert timeline.peak == plan.peak
    assert min(min(curve) for curve in timeline.curves()[1].values()) >= 0  # no cause is freed more than it was made
    at_peak = timeline.bytes_after(timeline.peak_at)
    assert sum(at_peak.values()) == plan.peak
    assert at_peak["workspaces"] == plan.workspaces
    rest = at_peak["workspaces"] + at_peak["activations"] + at_peak["rest"]
    coarse = plan.causes[plan.phase]
    # By whole blocks of the allocator, which the causes of each phase leave in the rest.
    assert rest == pytest.approx(coarse.activations_and_rest, rel=0.05)
    (bucket,) = (tensor for tensor in timeline.largest if tensor.name == "DDP's bucket")
    assert 0 <= bucket.bytes - plan.buckets < 512
