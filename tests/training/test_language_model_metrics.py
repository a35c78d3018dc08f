"""Loss and perplexity are what they should be, on one rank and on two, and training does not feel them."""

import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kept import Keeps, assert_true
from lightning.pytorch import Trainer

from lm_profiler.training import FakeTokens, LanguageModel

Make = Callable[..., Trainer]


def data() -> FakeTokens:
    return FakeTokens(batch_size=2, context_length=12)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_each_step_logs_its_own_metrics(precision: str, make_trainer: Make, tiny: dict[str, Any]) -> None:
    keeps = Keeps()
    trainer = make_trainer(6, precision=precision, callbacks=[keeps])
    trainer.fit(LanguageModel(**tiny, lr=0.1, metrics=True), datamodule=data())
    assert len(keeps.truth) == 6
    # In bfloat16 each token's loss and their mean are rounded to eight bits, by 0.4 % each: that is not ours to better.
    assert_true(keeps.logged, keeps.truth, 1e-5 if precision == "32-true" else 2e-2)


@pytest.mark.parametrize("verb, stage", [("validate", "val"), ("test", "test")])
def test_an_evaluation_logs_them_over_all_its_batches(verb: str, stage: str, make_trainer: Make, tiny: dict[str, Any]):
    module = LanguageModel(**tiny, metrics=True)
    losses: list[float] = []
    step = getattr(module, f"{verb.replace('validate', 'validation')}_step")

    def kept(batch: Any, batch_idx: int) -> Any:
        loss = step(batch, batch_idx)
        losses.append(loss.item())
        return loss

    setattr(module, f"{verb.replace('validate', 'validation')}_step", kept)
    (results,) = getattr(make_trainer(5), verb)(module, datamodule=data(), verbose=False)
    assert len(losses) == 5
    mean = statistics.fmean(losses)  # batches are of one size
    assert results == pytest.approx({f"{stage}_loss": mean, f"{stage}_perplexity": math.exp(mean)}, rel=1e-5)


def test_metrics_do_not_change_training(make_trainer: Make, tiny: dict[str, Any]) -> None:
    weights = []
    for metrics in (False, True):
        torch.manual_seed(0)
        module = LanguageModel(**tiny, lr=0.1, metrics=metrics)
        assert metrics == any(type(part).__module__.startswith("torchmetrics") for part in module.modules())
        make_trainer(4).fit(module, datamodule=data())
        weights.append(module.state_dict())
    without, with_them = weights
    assert without.keys() == with_them.keys()
    assert all(torch.equal(without[name], with_them[name]) for name in without)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_metrics_count_all_batches_in_a_module_of_half_precision(dtype: torch.dtype, tiny: dict[str, Any]) -> None:
    metrics = LanguageModel(**tiny, metrics=True).to(dtype).metrics
    assert metrics is not None
    # bfloat16 has eight bits: 256 + 1 is 256 in it
    losses = [0.0] * 300 + [1.0] * 300
    for loss in losses:
        metrics["val_loss"].update(torch.tensor(loss))
    assert metrics["val_loss"].compute().item() == pytest.approx(0.5)
    vocabulary = 50
    tokens = torch.zeros(1, 1000, dtype=torch.int64)
    for _ in range(100):  # float16 ends at 65,504
        metrics["val_perplexity"].update(torch.zeros(1, 1000, vocabulary), tokens)
    assert metrics["val_perplexity"].compute().item() == pytest.approx(vocabulary)
