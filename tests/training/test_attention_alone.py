"""Attention by itself: what it computes, and that a step begins with Q, K and V alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from raised import refusal
from stored_texts import assert_stored

from lm_profiler.cli import trainer_cli
from lm_profiler.cli.main import main
from lm_profiler.models import transformer
from lm_profiler.training import AttentionAlone, EmptyBatches, FakeTokens, attention_alone
from lm_profiler.usage_error import UsageError

pytestmark = pytest.mark.usefixtures("no_rates")


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


@pytest.mark.parametrize("attention", ["math", "sdpa"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_differentiates_the_output_and_lets_its_gradients_go(
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


def test_the_cache_is_flushed_before_each_pass_and_in_none(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert (watch.before_forward, watch.before_backward) == ([0] * 3, [0] * 3)
    make_trainer(2).validate(module, datamodule=data())
    assert watch.before_forward == [0] * 5
    assert "filler" not in module.state_dict()
    assert not hasattr(AttentionAlone(d_model=D), "filler")


def test_validate_runs_the_forward_pass_alone(make_trainer: Callable[..., Trainer]) -> None:
    watch = Watch()
    module = AttentionAlone(d_model=D)
    make_trainer(2, callbacks=[watch]).validate(module, datamodule=data())
    (out, _) = watch.outputs
    assert out.shape == (B, 1, T, D)
    assert not out.requires_grad


def test_its_batches_hold_nothing_and_say_how_many_tokens_they_stand_for() -> None:
    (batch, again) = (next(iter(loader)) for loader in (data().train_dataloader(), data().val_dataloader()))
    assert batch.nbytes == 0
    assert batch.shape == again.shape
    assert AttentionAlone().tokens_in(batch) == B * T


def test_wrong_arguments_are_refused_as_stored() -> None:
    makes: dict[str, Callable[[], object]] = {
        "d_model": lambda: AttentionAlone(d_model=0),
        "attention": lambda: AttentionAlone(attention="flash"),
        "batch_size": lambda: EmptyBatches(batch_size=0),
        "context_length": lambda: EmptyBatches(context_length=0),
    }
    said = {name: refusal(UsageError, make) for name, make in makes.items()}
    assert_stored("training/refused: attention alone", said)


def test_other_data_are_refused_before_anything_is_made(make_trainer: Callable[..., Trainer]) -> None:
    tokens = FakeTokens(batch_size=B, context_length=T, vocab_size=10)
    told = refusal(UsageError, lambda: make_trainer(1).fit(AttentionAlone(), datamodule=tokens))
    assert_stored("training/refused: data of attention alone", {"fake tokens": told})


def test_a_gradient_scaler_which_needs_an_optimizer_is_refused(make_trainer: Callable[..., Trainer]) -> None:
    trainer = make_trainer(1, precision="16-mixed")
    assert isinstance(trainer.precision_plugin, MixedPrecision)
    told = refusal(UsageError, lambda: trainer.fit(AttentionAlone(), datamodule=data()))
    assert_stored("training/refused: scaler of attention alone", {"16-mixed": told})


@pytest.mark.parametrize("precision, dtype", [("bf16-true", torch.bfloat16), ("bf16-mixed", torch.float32)])
def test_the_precision_decides_what_q_k_and_v_are(
    make_trainer: Callable[..., Trainer], precision: str, dtype: torch.dtype
) -> None:
    module = AttentionAlone(d_model=D)
    make_trainer(1, precision=precision).fit(module, datamodule=data())
    assert {p.dtype for p in module.parameters()} == {dtype}


@pytest.mark.parametrize("precision,dtype", [("32-true", torch.float32), ("bf16-true", torch.bfloat16)])
def test_somebody_elses_function_is_checked_in_the_dtype_that_it_will_see_and_then_runs(
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
    assert module.attend.func is attend
    somebodys.attend = lambda q, k, v, is_causal: q
    told = refusal(UsageError, lambda: trainer_cli.check_attention_of(module, given, "fit"))
    assert told.startswith("model.attention: expected values ")
    assert f"somebodys:attend in {str(dtype).removeprefix('torch.')}" in told


@pytest.mark.usefixtures("no_preflight")
def test_a_cell_of_the_grid_that_runs_out_of_memory_says_so_in_every_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if q.shape[-2] > 16:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB")
        return transformer.sdpa(q, k, v)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(transformer.ATTENTION, "sdpa", attend)
    few = ("--data.batch_size=1", "--stages.warmup_steps=0", "--stages.measure_steps=2", "--trace.steps=0")
    for context, code in ((16, 0), (32, 1)):
        named = (f"--name=of{context}", f"--data.context_length={context}", "--trainer.accelerator=cpu")
        assert main(["fit", "--config=attention", *few, *named]) == code
    capsys.readouterr()
    tables = (("--layout", "wide"), ("--pivot", "context_length", "attention"), ("--columns", "context_length,status"))
    for how in tables:
        assert main(["report", "logs", *how]) == 0
        [row] = [line.split() for line in capsys.readouterr().out.splitlines() if line.endswith(" OOM")]
        assert "32" in row


def test_options_of_a_function_reach_it_and_ours_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
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
    trainer_cli.check_attention_of(module, given, "fit")  # type: ignore[arg-type]
    assert set(calls) == {64}
    told = refusal(UsageError, lambda: AttentionAlone(D, "sdpa", attention_options={"tile": 64}))
    assert told == "attention_options: expected none with sdpa, given {'tile': 64}"
