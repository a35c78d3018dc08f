"""Lightning has two names, and defines every class under each of them: the callbacks work with the other one alike.

All other tests use ``lightning.pytorch``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from known_loop import instruments
from lightning.pytorch import LightningModule
from warm import run

from lm_profiler.callbacks.marks.namespaces import overrides
from lm_profiler.record.run_record import read_run

pytestmark = pytest.mark.usefixtures("no_rates")


NAME = "pytorch_lightning"
STEPS = {"warmup": 1, "measure": 3, "actions": 4, "memory": 1, "trace": 2}


@pytest.fixture(scope="module")
def pl() -> Any:
    """The package, with its demonstration modules."""
    package = importlib.import_module(NAME)
    demos = importlib.import_module(f"{NAME}.demos.boring_classes")
    return SimpleNamespace(**{**vars(package), **vars(demos)})


@pytest.fixture
def trainer_of(pl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.chdir(tmp_path)

    def make(*callbacks: Any, **options: Any) -> Any:
        usual: dict[str, Any] = {
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "max_epochs": -1 if "max_steps" not in options else None,
        }
        return pl.Trainer(callbacks=list(callbacks), **{**usual, **options})

    return make


MARKED = {
    "fit": {"data", "transfer", "forward", "zero_grad", "backward", "clip", "optimizer"},
    "manual": {"data", "transfer", "forward", "zero_grad", "backward", "optimizer"},
    "validate": {"data", "transfer", "forward"},
    "test": {"data", "transfer", "forward"},
    "predict": {"data", "transfer", "forward"},
}


@pytest.mark.parametrize("what", list(MARKED))
def test_every_verb_is_measured_phase_by_phase_and_ended(pl: Any, trainer_of: Callable[..., Any], what: str) -> None:
    verb: Any = "fit" if what == "manual" else what
    profiler = instruments(1, 3, memory=1, trace=1, actions=3, verb=verb)
    trainer = trainer_of(profiler)
    before = trainer.profiler
    module = pl.ManualOptimBoringModel() if what == "manual" else pl.BoringModel()
    getattr(trainer, verb)(module, datamodule=pl.BoringDataModule())
    record = read_run(profiler.folder)
    assert (record.status, record.verb, record.steps, record.notes) == ("ok", verb, STEPS, [])
    assert {phase for phase in MARKED["fit"] if record.time[phase].min} == MARKED[what]
    assert trainer.profiler is before


def test_training_goes_on_to_its_own_end_with_the_same_weights(pl: Any, trainer_of: Callable[..., Any]) -> None:
    ended = []
    for callbacks in ([], [instruments(1, 3, memory=1, trace=1, actions=3, stop_when_done=False)]):
        pl.seed_everything(1, verbose=False)
        module = pl.BoringModel()
        trainer = trainer_of(*callbacks, max_steps=20)
        trainer.fit(module)
        ended.append((trainer.global_step, [p.detach().clone() for p in module.parameters()]))
    assert ended[0][0] == ended[1][0] == 20
    assert all(torch.equal(a, b) for a, b in zip(ended[0][1], ended[1][1], strict=True))


def test_a_hook_of_the_users_is_no_part_of_the_phase_around_it(
    pl: Any, trainer_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0]
    monkeypatch.setattr("known_loop.CLOCK", lambda: now[0])

    class Hook(pl.Callback):
        def on_after_backward(self, *args: Any) -> None:
            now[0] += 5_000_000

    class Module(pl.BoringModel):
        def on_before_backward(self, loss: Any) -> None:
            now[0] += 3_000_000

        def backward(self, loss: Any) -> None:
            now[0] += 2_000_000
            super().backward(loss)

    profiler = instruments(1, 3)
    trainer_of(Hook(), profiler).fit(Module())
    record = read_run(profiler.folder)
    assert record.time["backward"].median == pytest.approx(2e-3)
    assert record.time["other"].median == pytest.approx(8e-3)


def test_a_signal_is_an_interruption(tmp_path: Path) -> None:
    """In a process of its own: Lightning changes what signals do."""
    program = f"""
import os, signal, sys, warnings
warnings.simplefilter("ignore")
import {NAME} as pl
from {NAME}.demos.boring_classes import BoringModel
from lm_profiler.callbacks import profiling_callbacks
class Stops(BoringModel):
    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)
trainer = pl.Trainer(callbacks=profiling_callbacks(1, 200), logger=False, accelerator="cpu", max_epochs=-1,
                     enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Stops())
"""
    done = run("-c", program, folder=tmp_path)
    (folder,) = tmp_path.glob("**/version_0")
    record = read_run(folder)
    assert record.status == "interrupted", done.stderr
    assert record.steps["measure"] == 3  # a SIGTERM is seen when its step is over


def test_a_hook_that_is_set_on_the_module_itself_overrides_lightnings() -> None:
    """Lightning calls it: ``model.train_dataloader = lambda: loader`` is in many notebooks."""
    module = LightningModule()
    assert not overrides(module, "train_dataloader")
    module.train_dataloader = list  # type: ignore[method-assign, assignment]
    assert overrides(module, "train_dataloader")
