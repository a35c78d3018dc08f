"""Lightning has two names, and defines every class under each of them: the callbacks work with the other one alike.

All other tests use ``lightning.pytorch``.
"""

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
from known_loop import make_profiler, trainer_with
from pytorch_lightning.demos.boring_classes import BoringDataModule, BoringModel, ManualOptimBoringModel
from pytorch_lightning.utilities.exceptions import SIGTERMException

from lm_profiler.callbacks.failures import status_of
from lm_profiler.callbacks.marks.namespaces import overrides
from lm_profiler.record.run_record import Verb, read_run

STEPS = {"warmup": 1, "measure": 3, "actions": 4, "memory": 1, "trace": 2}
EVALUATED = {"data", "transfer", "forward"}
MANUAL = EVALUATED | {"zero_grad", "backward", "optimizer"}
AUTOMATIC = MANUAL | {"clip"}


@pytest.mark.parametrize(
    "make, verb, marked",
    [
        (BoringModel, "fit", AUTOMATIC),
        (ManualOptimBoringModel, "fit", MANUAL),
        (BoringModel, "validate", EVALUATED),
        (BoringModel, "predict", EVALUATED),
    ],
)
def test_every_verb_is_measured_phase_by_phase(make: Any, verb: Verb, marked: set[str], tmp_path: Path):
    profiler = make_profiler(warmup=1, measure=3, memory=1, trace=1, actions=3, verb=verb)
    trainer: Any = trainer_with([profiler], tmp_path, make=pl.Trainer)
    before = trainer.profiler
    getattr(trainer, verb)(make(), datamodule=BoringDataModule())
    record = read_run(profiler.folder)
    assert (record.status, record.verb, record.steps, record.notes) == ("ok", verb, STEPS, [])
    assert {phase for phase in AUTOMATIC if record.time[phase].min} == marked
    assert trainer.profiler is before


def test_a_hook_of_the_users_is_no_part_of_the_phase_around_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]
    monkeypatch.setattr("known_loop.CLOCK", lambda: now[0])

    class Hook(pl.Callback):
        def on_after_backward(self, *args: Any) -> None:
            now[0] += 5_000_000

    class Module(BoringModel):
        def on_before_backward(self, loss: Any) -> None:
            now[0] += 3_000_000

        def backward(self, loss: Any) -> None:
            now[0] += 2_000_000
            super().backward(loss)

    profiler = make_profiler(warmup=1, measure=3)
    trainer_with([Hook(), profiler], tmp_path, make=pl.Trainer).fit(Module())
    record = read_run(profiler.folder)
    assert record.time["backward"].median == pytest.approx(2e-3)
    assert record.time["other"].median == pytest.approx(8e-3)


def test_methods_and_signals_of_its_trainer_are_known() -> None:
    module = pl.LightningModule()
    assert not overrides(module, "train_dataloader")
    module.train_dataloader = list  # as many notebooks set it on the module itself
    assert overrides(module, "train_dataloader")
    assert status_of(SIGTERMException()) == "interrupted"
