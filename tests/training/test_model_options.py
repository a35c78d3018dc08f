"""Options of the built-in model: Muon against torch's optimizers stepped by hand, and what is refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch.optim import AdamW, Muon

from lm_profiler.models.config import TransformerConfig
from lm_profiler.models.transformer import Transformer
from lm_profiler.training import FakeTokens, LanguageModel
from lm_profiler.training.muon import MuonWithAdamW, split_parameters
from lm_profiler.usage_error import UsageError

Make = Callable[..., Trainer]
CONFIG = TransformerConfig(d_model=16, d_ff=24, num_layers=2, num_heads=2, vocab_size=50)


def train(model: Transformer, optimizers: list[torch.optim.Optimizer], steps: int) -> None:
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(torch.randint(50, (2, 7), generator=generator)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def make_model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(CONFIG)


def make_optimizer(model: Transformer, lr: float = 0.01) -> MuonWithAdamW:
    matrices, others = split_parameters(model)
    return MuonWithAdamW(matrices, others, lr=lr, weight_decay=0.1)


def assert_same_weights(model: Transformer, other_model: Transformer) -> None:
    torch.testing.assert_close(list(model.parameters()), list(other_model.parameters()), rtol=0, atol=0)


def test_weights_are_those_of_torchs_two_optimizers() -> None:
    model, separate_model = make_model(), make_model()
    train(model, [make_optimizer(model)], steps=3)
    matrices, others = split_parameters(separate_model)
    assert sum(matrix.numel() for matrix in matrices) == CONFIG.num_layers * CONFIG.matrix_parameters()
    assert sum(weight.numel() for weight in (*matrices, *others)) == CONFIG.num_parameters()
    muon = Muon(matrices, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    train(separate_model, [muon, AdamW(others, lr=0.01, weight_decay=0.1)], steps=3)
    assert_same_weights(model, separate_model)


def test_schedules_and_checkpoints_reach_both_optimizers() -> None:
    model, resumed_model = make_model(), make_model()
    optimizer = make_optimizer(model)
    train(model, [optimizer], steps=2)
    resumed_model.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed = make_optimizer(resumed_model, lr=1.0)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for group in (*optimizer.param_groups, *resumed.param_groups):
        group["lr"] = 0.5
    train(model, [optimizer], steps=2)
    train(resumed_model, [resumed], steps=2)
    assert_same_weights(model, resumed_model)
    assert optimizer.muon.param_groups[0]["lr"] == resumed.adamw.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_two_optimizers_train_under_a_trainer(precision: str, make_trainer: Make, tiny: dict[str, Any]) -> None:
    module = LanguageModel(**tiny, optimizer="muon", loss="chunked", num_kv_heads=1, tied_embeddings=True)
    trainer = make_trainer(2, precision=precision, gradient_clip_val=1.0)
    trainer.fit(module, datamodule=FakeTokens(batch_size=2, context_length=12))
    assert type(trainer.optimizers[0]) is MuonWithAdamW
    assert trainer.global_step == 2


def test_options_that_do_not_go_together_are_refused(make_trainer: Make, tiny: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"^metrics: expected false with loss=chunked"):
        LanguageModel(**tiny, loss="chunked", metrics=True)
    module = LanguageModel(**tiny, optimizer="muon", shard_optimizer_states=True)
    module.trainer = make_trainer(1, devices=2, strategy="ddp")
    with pytest.raises(UsageError, match=r"^model.optimizer: expected adamw or sgd with shard_optimizer_states"):
        module.check_precision()
    module = LanguageModel(**{**tiny, "d_ff": 32, "num_heads": 1}, fp8=True)
    module.trainer = make_trainer(1)
    with pytest.raises(
        UsageError, match=r"^model.fp8: expected false, or an NVIDIA GPU .* 8.9 .*, given 'true on cpu'$"
    ):
        module.check_precision()
