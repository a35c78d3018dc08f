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


@pytest.mark.parametrize("shared, alone", [(True, True), (False, False)], ids=["claims", "by hand, the same Trainer"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_fit_after_a_tuner_is_profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool, alone: bool):
    monkeypatch.setattr(shortcut, "_admitted_number", None)
    claims = tmp_path / "claims"
    claims.mkdir()
    steps = {"warmup_steps": 1, "measure_steps": 3, "trace_steps": 0, "memory_steps": 0, "action_steps": 0}
    asked = json.dumps(
        {"options": {**steps, "log_dir": str(tmp_path / "logs")}, "claims": str(claims) if shared else None}
    )

    def trainer() -> Any:
        return trainer_with(admitted_callbacks(asked), tmp_path, max_steps=8)

    module = Tuned()
    searching = trainer()
    Tuner(searching).lr_find(module, num_training=4, update_attr=False)
    assert not [*tmp_path.glob("logs/*/*/run.json")]
    assert not (claims / CLAIMED).is_symlink()
    fitting = trainer() if alone else searching
    fitting.fit(module)
    assert len([*tmp_path.glob("logs/*/*/run.json")]) == 1
    trainer().fit(Tuned())  # only the first fit is
    assert len([*tmp_path.glob("logs/*/*/run.json")]) == 1
