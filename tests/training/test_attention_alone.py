"""Attention by itself: what it computes, and that a step begins with Q, K and V alone."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from raised import refusal
from stored_texts import assert_stored

from lm_profiler.cli import trainer_cli
from lm_profiler.models import transformer
from lm_profiler.training import AttentionAlone, EmptyBatches, FakeTokens, attention_alone
from lm_profiler.usage_error import UsageError

B, T, D = 2, 12, 8


def data() -> EmptyBatches:
    return EmptyBatches(batch_size=B, context_length=T)


class Watch(Callback):
    """What a step begins with, what its backward leaves, and what is returned."""

    def __init__(self) -> None:
        self.at_start: list[bool] = []
        self.gradients: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        self.at_start.append(all(p.grad is None for p in module.parameters()))

    def on_after_backward(self, trainer: Trainer, module: LightningModule) -> None:
        self.gradients = [p.grad.clone() for p in module.parameters() if p.grad is not None]

    def on_validation_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *args: Any) -> None:
        self.outputs.append(outputs)


@pytest.mark.parametrize("attention, compiled", [("math", False), ("sdpa", True)])
def test_a_step_differentiates_the_output(
    make_trainer: Callable[..., Trainer], attention: Any, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: real(self, backend="aot_eager"))  # quicker
    watch = Watch()
    module = AttentionAlone(d_model=D, attention=attention, compile=compiled)
    make_trainer(3, callbacks=[watch]).fit(module, datamodule=data())
    assert (module.model._compiled_call_impl is not None) == compiled
    assert watch.at_start == [True] * 3
    q, k, v = (p.detach().clone().requires_grad_() for p in module.parameters())
    assert q.shape == (B, 1, T, D)
    F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    for found, expected in zip(watch.gradients, (q.grad, k.grad, v.grad), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class Passes(Callback):
    """What stands in the buffer when a pass begins; each pass leaves a one there."""

    def __init__(self) -> None:
        self.before_forward: list[int] = []
        self.before_backward: list[int] = []

    def on_after_backward(self, trainer: Trainer, module: LightningModule) -> None:
        self.before_backward.append(int(module.filler.max()))
        module.filler.fill_(1)


def test_the_cache_is_flushed_between_passes(make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention_alone, "FILLER_BYTES", 64)
    watch = Passes()
    module = AttentionAlone(d_model=D, flush_cache=True)
    attend = module.attend

    def noted(*qkv: torch.Tensor) -> torch.Tensor:
        watch.before_forward.append(int(module.filler.max()))
        module.filler.fill_(1)
        return attend(*qkv)

    module.attend = noted
    trainer = make_trainer(3, callbacks=[watch])
    trainer.fit(module, datamodule=data())
    assert watch.before_forward == [0] * 3
    assert watch.before_backward == [0] * 3
    make_trainer(2).validate(module, datamodule=data())
    assert watch.before_forward == [0] * (3 + 2)
    assert "filler" not in module.state_dict()
    assert not hasattr(AttentionAlone(d_model=D), "filler")


def test_a_validation_returns_the_output(make_trainer: Callable[..., Trainer]) -> None:
    watch, module = Watch(), AttentionAlone(d_model=D)
    make_trainer(2, callbacks=[watch]).validate(module, datamodule=data())
    output, _ = watch.outputs
    assert output.shape == (B, 1, T, D)
    assert not output.requires_grad


def test_a_batch_has_tokens_but_no_bytes() -> None:
    batch = next(iter(data().val_dataloader()))
    assert batch.nbytes == 0
    assert AttentionAlone(d_model=D).tokens_in(batch) == B * T


def test_options_that_cannot_run_are_refused(make_trainer: Callable[..., Trainer]) -> None:
    makes: dict[str, Callable[[], object]] = {
        "d_model": lambda: AttentionAlone(d_model=0),
        "attention": lambda: AttentionAlone(attention="flash"),
        "batch_size": lambda: EmptyBatches(batch_size=0),
        "context_length": lambda: EmptyBatches(context_length=0),
    }
    messages = {name: refusal(UsageError, make) for name, make in makes.items()}
    assert_stored("training/refused: attention alone", messages)
    tokens = FakeTokens(batch_size=B, context_length=T, vocab_size=10)
    message = refusal(UsageError, lambda: make_trainer(1).fit(AttentionAlone(), datamodule=tokens))
    assert_stored("training/refused: data of attention alone", {"fake tokens": message})
    trainer = make_trainer(1, precision="16-mixed")  # whose gradient scaler needs an optimizer
    message = refusal(UsageError, lambda: trainer.fit(AttentionAlone(), datamodule=data()))
    assert_stored("training/refused: scaler of attention alone", {"16-mixed": message})


@pytest.mark.parametrize("precision,dtype", [("32-true", torch.float32), ("bf16-true", torch.bfloat16)])
def test_another_function_is_checked_in_its_dtype(
    make_trainer: Callable[..., Trainer], precision: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[torch.dtype] = set()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> torch.Tensor:
        seen.add(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    somebodys = SimpleNamespace(attend=attend)
    monkeypatch.setitem(sys.modules, "somebodys", somebodys)
    module, trainer = AttentionAlone(d_model=D, attention="somebodys:attend"), make_trainer(1)
    given = make_trainer(1, precision=precision)
    trainer_cli.check_attention_of(module, given, "fit")
    assert seen == {dtype}
    trainer.fit(module, datamodule=data())
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    given.fit(as_given := AttentionAlone(d_model=D), datamodule=data())
    assert {parameter.dtype for parameter in as_given.parameters()} == {dtype}
    assert module.attend.func is attend
    somebodys.attend = lambda q, k, v, is_causal: q
    message = refusal(UsageError, lambda: trainer_cli.check_attention_of(module, given, "fit"))
    assert message.startswith("model.attention: expected values ")
    assert f"somebodys:attend in {str(dtype).removeprefix('torch.')}" in message


def test_options_of_a_function_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def tiled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, tile: int = 1) -> torch.Tensor:
        calls.append(tile)
        return transformer.math(q, k, v, is_causal)

    monkeypatch.setitem(sys.modules, "tiles", SimpleNamespace(tiled=tiled))
    module = AttentionAlone(D, "tiles:tiled", attention_options={"tile": 64})
    q = torch.randn(1, 1, T, D)
    assert torch.equal(module.attend(q, q, q), transformer.math(q, q, q))
    assert calls == [64]
    given = SimpleNamespace(precision="32-true", strategy=SimpleNamespace(root_device=torch.device("cpu")))
    trainer_cli.check_attention_of(module, given, "fit")
    assert set(calls) == {64}
    message = refusal(UsageError, lambda: AttentionAlone(D, "sdpa", attention_options={"tile": 64}))
    assert message == "attention_options: expected none with sdpa, given {'tile': 64}"
