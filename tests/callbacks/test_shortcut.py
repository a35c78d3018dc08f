"""The Trainer of a program that is profiled without having asked for it."""

import json
from pathlib import Path
from typing import Any

import pytest
from known_loop import trainer_with
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.tuner import Tuner

from lm_profiler.callbacks import shortcut
from lm_profiler.callbacks.shortcut import admitted_callbacks
from lm_profiler.external_callbacks import CLAIMED


class Tuned(BoringModel):
    lr = 0.1
    batch_size = 1


@pytest.mark.parametrize(
    "has_claims, fits_with_new_trainer",
    [(True, True), (False, False)],
    ids=["claims, a new Trainer", "no claims, the same Trainer"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_first_fit_after_a_tuner_is_profiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_claims: bool, fits_with_new_trainer: bool
) -> None:
    monkeypatch.setattr(shortcut, "_admitted_number", None)
    claims = tmp_path / "claims"
    claims.mkdir()
    options = {"warmup_steps": 1, "measure_steps": 3, "trace_steps": 0, "memory_steps": 0, "action_steps": 0}
    request = {"options": {**options, "log_dir": str(tmp_path / "logs")}, "claims": str(claims) if has_claims else None}

    def new_trainer() -> Any:
        return trainer_with(admitted_callbacks(json.dumps(request)), tmp_path, max_steps=8)

    def records() -> int:
        return len([*tmp_path.glob("logs/*/*/run.json")])

    module = Tuned()
    tuned_trainer = new_trainer()
    Tuner(tuned_trainer).lr_find(module, num_training=4, update_attr=False)
    assert records() == 0
    assert not (claims / CLAIMED).is_symlink()
    trainer = new_trainer() if fits_with_new_trainer else tuned_trainer
    trainer.fit(module)
    assert records() == 1
    new_trainer().fit(Tuned())  # a second fit is not profiled
    assert records() == 1
