"""The LightningModule in a real Trainer on the CPU."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from raised import refusal
from stored_texts import assert_stored
from torch import Tensor

from lm_profiler.training import FakeTokens, LanguageModel
from lm_profiler.usage_error import UsageError

Make = Callable[..., Trainer]


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same weights in every test."""
    torch.manual_seed(0)


def data(**options: Any) -> FakeTokens:
    return FakeTokens(**{"batch_size": 2, "context_length": 12, **options})


class Watched(LanguageModel):
    """Keeps the losses, the gradients, and whether these were clear when the backward pass began."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[float] = []
        self.gradients: list[Tensor] = []
        self.cleared: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.item())
        return loss

    def on_before_backward(self, loss: Tensor) -> None:
        self.cleared.append(all(p.grad is None or not p.grad.any() for p in self.parameters()))

    def on_after_backward(self) -> None:
        self.gradients.append(self.model.head.weight.grad.clone())


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-mixed", "64-true"])
def test_it_trains_in_every_precision(precision: str, make_trainer: Make, tiny: dict[str, Any]) -> None:
    module = Watched(**tiny, lr=0.01)
    trainer = make_trainer(40, precision=precision)
    trainer.fit(module, datamodule=data(distribution="zipf", batch_size=8))
    assert len(module.losses) == 40
    assert trainer.logged_metrics == trainer.callback_metrics == {}
    assert module.cleared == [True] * 40  # of gradients, when a backward pass began
    # Independent tokens teach their frequencies alone, and the Zipf law leaves 0.6 nats to learn there.
    assert sum(module.losses[-5:]) / 5 < sum(module.losses[:5]) / 5 - 0.2
    assert {p.dtype for p in module.parameters()} == {
        {"bf16-true": torch.bfloat16, "64-true": torch.float64}.get(precision, torch.float32)
    }


def test_evaluation_returns_loss_or_logits(make_trainer: Make, tiny: dict[str, Any]) -> None:
    seen: dict[str, list[Tensor]] = {"validate": [], "test": []}

    class Keeping(LanguageModel):
        def on_validation_batch_end(self, outputs: Any, *args: Any) -> None:
            seen["validate"].append(outputs)

        def on_test_batch_end(self, outputs: Any, *args: Any) -> None:
            seen["test"].append(outputs)

    module = Keeping(**tiny)
    trainer = make_trainer(2)
    trainer.validate(module, datamodule=data(), verbose=False)
    trainer.test(module, datamodule=data(), verbose=False)
    logits = trainer.predict(module, datamodule=data())
    assert [tuple(batch.shape) for batch in logits] == [(2, 12, 50)] * 2
    assert seen["validate"] == seen["test"]
    expected = module.to("cpu").training_step(next(iter(data(vocab_size=50).train_dataloader())), 0)
    torch.testing.assert_close(seen["validate"][0], expected.detach())


def test_without_an_optimizer_no_weight_moves(make_trainer: Make, tiny: dict[str, Any]):
    """Also with clipping. Weights that validation has made stay those of the fit."""
    module = Watched(**tiny, optimizer="none")
    make_trainer(1).validate(module, datamodule=data(), verbose=False)
    built, before = module.model, [p.clone() for p in module.parameters()]
    make_trainer(2, gradient_clip_val=1.0, accumulate_grad_batches=3).fit(module, datamodule=data())
    assert module.model is built
    torch.testing.assert_close(list(module.parameters()), before, rtol=0, atol=0)
    assert not torch.equal(module.gradients[0], module.gradients[1])
    assert module.cleared == [True, False, False] * 2


@pytest.mark.parametrize(
    "optimizer,precision,clip,fused,expected",
    [
        ("adamw", "32-true", 1.0, None, True),
        ("adamw", "bf16-mixed", 0.0, None, True),
        ("adamw", "bf16-mixed", 1.0, None, None),
        ("adamw", "16-mixed", 1.0, None, None),
        ("adamw", "bf16-mixed", 1.0, False, None),
        ("adamw", "32-true", 1.0, True, True),
        ("sgd", "32-true", None, None, True),
        ("sgd", "bf16-mixed", 1.0, None, None),
    ],
)
def test_fused_is_chosen_where_lightning_allows_it(
    optimizer: Any,
    precision: str,
    clip: float | None,
    fused: bool | None,
    expected: bool | None,
    make_trainer: Make,
    tiny: dict[str, Any],
) -> None:
    trainer = make_trainer(2, precision=precision, gradient_clip_val=clip)
    module = LanguageModel(**tiny, optimizer=optimizer, fused=fused, lr=0.5, weight_decay=0.25)
    trainer.fit(module, datamodule=data())
    [made] = trainer.optimizers
    assert type(made) is {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer]
    settings = (made.defaults["fused"], made.defaults["lr"], made.defaults["weight_decay"])
    assert settings == (expected, 0.5, 0.25)
    assert trainer.global_step == 2


def test_a_compiled_model_has_equal_losses(make_trainer: Make, tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    modes, real = [], torch.compile

    def compile_eagerly(*args: Any, mode: str | None = None, **kwargs: Any) -> Any:
        modes.append(mode)
        return real(*args, **{**kwargs, "backend": "eager"})

    monkeypatch.setattr(torch, "compile", compile_eagerly)
    losses = []
    for compiled in (False, True):
        torch.manual_seed(1)
        module = Watched(**tiny, compile=compiled, compile_mode="max-autotune", activation_checkpointing=True)
        make_trainer(3).fit(module, datamodule=data())
        losses.append(module.losses)
    assert modes == ["max-autotune"] * 3  # once for each part that is compiled
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


WRONG: dict[str, Any] = {"size": "huge", "num_heads": 7, "optimizer": "lion", "lr": -1.0, "weight_decay": float("nan")}


def test_wrong_options_are_refused(make_trainer: Make, tiny: dict[str, Any]) -> None:
    messages = {name: refusal(UsageError, partial(LanguageModel, **{name: value})) for name, value in WRONG.items()}
    assert_stored("training/refused: options", messages)
    module, trainer = LanguageModel(**tiny, optimizer="none"), make_trainer(precision="16-mixed")
    message = refusal(UsageError, lambda: trainer.fit(module, datamodule=data()))
    assert_stored("training/refused: scaler", {"16-mixed": message})
    message = refusal(UsageError, lambda: LanguageModel(compile_mode="fast"))
    modes = message[message.index("default") : message.index(", given")]
    assert {"reduce-overhead", "max-autotune"} < set(modes.split(", "))
    assert_stored("training/refused: mode", {"fast": message.replace(modes, "TORCH'S MODES")})
