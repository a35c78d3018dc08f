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

from lm_profiler.callbacks.failures import status_of
from lm_profiler.callbacks.marks.namespaces import overrides
from lm_profiler.record.run_record import read_run

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


EVALUATED = {"data", "transfer", "forward"}
MARKED = {
    "fit": EVALUATED | {"zero_grad", "backward", "clip", "optimizer"},
    "manual": EVALUATED | {"zero_grad", "backward", "optimizer"},
    **dict.fromkeys(("validate", "test", "predict"), EVALUATED),
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
    module = pl.LightningModule()
    assert not overrides(module, "train_dataloader")
    module.train_dataloader = list  # as many notebooks set it on the module itself
    assert overrides(module, "train_dataloader")


def test_a_signal_is_an_interruption() -> None:
    exceptions = importlib.import_module(f"{NAME}.utilities.exceptions")
    assert status_of(exceptions.SIGTERMException()) == "interrupted"
