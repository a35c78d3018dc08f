"""What a run holds on its device stays there when it is over; a user's module still ends on the CPU."""

from pathlib import Path
from typing import ClassVar
from unittest import mock

import pytest
import torch
from benchmarks.sweep import TINY
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lm_profiler.cli.main import main
from lm_profiler.cli.trainer_cli import skip_teardown
from lm_profiler.training import LanguageModel

pytestmark = pytest.mark.usefixtures("no_rates", "no_preflight")


class Looks(BoringModel):
    """Looks back at itself in its last hook."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def on_fit_end(self) -> None:
        self.devices = {parameter.device.type for parameter in self.parameters()}
        self.gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        optimizer = self.optimizers(use_pl_optimizer=False)
        assert isinstance(optimizer, torch.optim.Optimizer)
        self.states = {state["exp_avg"].device.type for state in optimizer.state.values()}


class Ours(LanguageModel):
    ended_on: ClassVar[set[str]] = set()

    def teardown(self, stage: str) -> None:
        Ours.ended_on = {parameter.device.type for parameter in self.parameters()}


def looked(accelerator: str, folder: Path) -> Looks:
    module = Looks()
    off = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger"), False)
    trainer = Trainer(max_steps=2, limit_val_batches=0, accelerator=accelerator, default_root_dir=folder, **off)
    skip_teardown(trainer)
    trainer.fit(module)
    return module


def test_teardown_copies_no_state(tmp_path: Path) -> None:
    with mock.patch("lightning.fabric.utilities.optimizer.move_data_to_device", side_effect=AssertionError):
        module = looked("cpu", tmp_path)
    assert (module.devices, module.gradients, module.states) == ({"cpu"}, [], {"cpu"})
    module = LanguageModel(d_model=8, d_ff=8, num_layers=1, num_heads=1, vocab_size=8)
    module.configure_model()
    module.to("meta")  # from which nothing could be copied
    module.stays = True
    assert {parameter.device.type for parameter in module.cpu().parameters()} == {"meta"}


@pytest.mark.gpu
def test_teardown_moves_only_weights_to_the_cpu(tmp_path: Path) -> None:
    module = looked("gpu", tmp_path)
    assert (module.devices, module.gradients, module.states) == ({"cpu"}, [], {"cuda"})


@pytest.mark.gpu
def test_our_own_module_ends_where_it_ran(tmp_path: Path) -> None:
    call = ["fit", f"--model={__name__}.Ours", *TINY, "--trainer.accelerator=gpu", f"--log_dir={tmp_path}"]
    assert main([*call, "--check_memory=false"]) == 0
    assert Ours.ended_on == {"cuda"}
