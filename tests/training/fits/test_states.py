"""The predicted bytes against those of real tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch import Trainer

from lm_profiler.models.config import PRESETS
from lm_profiler.training import FakeTokens, LanguageModel
from lm_profiler.training.fits.states import Plan

COMBINATIONS = [
    (precision, optimizer)
    for precision in ("32-true", "bf16-true", "bf16-mixed", "16-mixed", "64-true")
    for optimizer in ("adamw", "sgd", "none")
    if (precision, optimizer) != ("16-mixed", "none")  # refused: a gradient scaler needs an optimizer
]


class Measured(LanguageModel):
    """Adds up the bytes of its tensors right after a step, while the gradients are still there."""

    def on_train_batch_end(self, *args: Any) -> None:
        parameters = list(self.parameters())
        self.weights_bytes = sum(p.nbytes for p in parameters)
        self.gradients_bytes = sum(p.grad.nbytes for p in parameters if p.grad is not None)
        states = [state for o in self.trainer.optimizers for state in o.state.values()]
        self.optimizer_bytes = sum(value.nbytes for state in states for name, value in state.items() if name != "step")


@pytest.mark.parametrize("precision,optimizer", COMBINATIONS)
def test_it_equals_what_a_step_leaves_in_memory(
    precision: str, optimizer: Any, make_trainer: Callable[..., Trainer], tiny: dict[str, Any]
) -> None:
    module = Measured(**tiny, optimizer=optimizer)
    make_trainer(1, precision=precision).fit(module, datamodule=FakeTokens(context_length=8))
    predicted = Plan(module.config, precision, optimizer)
    assert predicted.weights_bytes == module.weights_bytes
    assert predicted.gradients_bytes == module.gradients_bytes
    assert predicted.optimizer_bytes == module.optimizer_bytes
    assert predicted.total_bytes == module.weights_bytes + module.gradients_bytes + module.optimizer_bytes


def test_without_training_the_weights_stand_alone() -> None:
    needs = Plan(PRESETS["xl"], "bf16-true", training=False)
    assert needs.total_bytes == needs.weights_bytes == 2 * 1_998_235_200


def test_xl_in_float32_with_adamw_needs_16_bytes_a_parameter() -> None:
    assert Plan(PRESETS["xl"]).total_bytes == 16 * 1_998_235_200


@pytest.mark.parametrize(
    "short,full",
    [(None, "32-true"), (32, "32-true"), ("64", "64-true"), ("bf16", "bf16-mixed"), (16, "16-mixed")],
)
def test_shorter_names_of_a_precision_mean_the_same(short: Any, full: str) -> None:
    assert Plan(PRESETS["small"], short).total_bytes == Plan(PRESETS["small"], full).total_bytes


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"precision: expected one of 64-true, .* given 'fp8'"):
        Plan(PRESETS["small"], "fp8")
    with pytest.raises(ValueError, match="optimizer: expected one of adamw, sgd, none, given 'lion'"):
        Plan(PRESETS["small"], optimizer="lion")  # type: ignore[arg-type]


def test_asking_does_not_import_torch() -> None:
    code = "import sys; import lm_profiler.training.fits.states; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=dict(os.environ), check=False).returncode == 0


def test_the_measuring_module_measures(make_trainer: Callable[..., Trainer]) -> None:
    """Guards the comparison above: a module of known size must be measured as that size."""
    module = Measured(d_model=2, d_ff=1, num_layers=1, num_heads=1, vocab_size=1)
    module.configure_model()
    module.trainer = make_trainer()
    module.on_train_batch_end()
    assert module.weights_bytes == 4 * (2 + 2 + 4 * 4 + 3 * 2 + 2 * 2 + 2)
    assert module.gradients_bytes == module.optimizer_bytes == 0
