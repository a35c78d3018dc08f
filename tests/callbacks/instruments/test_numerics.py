"""The audit of a run's precision: what it finds is in the record, and nothing of the run changes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from known_loop import make_profiler, trainer_with
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel
from lightning.pytorch.plugins.precision import MixedPrecision
from stored_texts import assert_stored

from lm_profiler.callbacks import NumericsOptions
from lm_profiler.callbacks.instruments.numerics import KeptLosses
from lm_profiler.record.run_record import RunRecord, Verb, read_run
from lm_profiler.training import FakeTokens, LanguageModel

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorboard")


def audited_run(
    module: LightningModule, folder: Path, audit: bool = True, verb: Verb = "fit", stop: bool = True, **options: Any
) -> RunRecord:
    """Return the record, as read from its file, of one step of warmup, two measured steps, and three timed ones."""
    numerics = NumericsOptions(audit=audit)
    profiler = make_profiler(warmup=1, measure=2, stop_when_done=stop, actions=3, numerics=numerics, verb=verb)
    data = FakeTokens(batch_size=2, context_length=8) if isinstance(module, LanguageModel) else None
    train_or_validate = getattr(trainer_with([profiler], folder, **options), verb)
    train_or_validate(module, datamodule=data)
    record = read_run(profiler.folder)
    assert record == profiler.record
    assert record.time["step"].n == 2
    return record


def test_under_autocast_only_products_are_in_bfloat16(tmp_path: Path) -> None:
    """A layer of the model has seven matrices. A bfloat16 has eight bits, and so an error of 2^-9."""
    model = LanguageModel(d_model=16, d_ff=24, num_layers=2, num_heads=2, vocab_size=50)
    facts = audited_run(model, tmp_path, precision="bf16-mixed").numerics
    kinds = {kind.kind: kind for kind in facts.kinds}
    linear, embedding = kinds["Linear"], kinds["Embedding"]
    matrices_of_layers, head = 2 * 7, 1
    assert linear.modules == matrices_of_layers + head
    assert linear.parameters == ["float32"]
    assert linear.outputs == ["bfloat16"]
    assert embedding.outputs == ["float32"]
    assert embedding.gradients == ["float32"]
    assert 2**-12 < facts.output_error < 2**-5
    assert facts.loss == pytest.approx(facts.reference_loss, rel=2**-6)
    assert facts.loss != facts.reference_loss


def test_with_a_gradient_scaler_the_gradients_are_of_the_loss_itself(tmp_path: Path) -> None:
    seed_everything(0)  # of some batches the scaled gradients overflow float16, and are rightly unknown
    plugin = MixedPrecision("16-mixed", device="cpu")
    facts = audited_run(BoringModel(), tmp_path, plugins=[plugin]).numerics
    linear = facts.kinds[-1]
    assert linear.kind == "Linear"
    assert linear.parameters == ["float32"]
    assert linear.outputs == ["float16"]
    assert linear.gradients == ["float32"]
    assert linear.gradient_error < 2**-7


def test_the_audit_does_not_change_training(tmp_path: Path) -> None:
    weights = []
    for audit in (False, True):
        seed_everything(3)
        module = BoringModel()
        record = audited_run(module, tmp_path, audit, stop=False, max_steps=8, precision="bf16-mixed")
        assert (record.numerics is not None) == audit
        assert not record.notes
        weights.append(module.layer.weight.detach().clone())
    assert torch.equal(*weights)


class AsksItsTrainer(BoringModel):
    """The copy of the module that is audited has no Trainer."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch * (1 + self.trainer.global_step), batch_idx)


def test_runs_that_cannot_be_audited_are_noted(tmp_path: Path) -> None:
    texts = {}
    not_audited: list[tuple[Any, Verb]] = [
        (BoringModel, "validate"),
        (ManualOptimBoringModel, "fit"),
        (AsksItsTrainer, "fit"),
    ]
    for make_module, verb in not_audited:
        record = audited_run(make_module(), tmp_path / make_module.__name__, verb=verb)
        assert record.numerics is None
        notes = [note for note in record.notes if note.startswith("numerics unknown")]
        texts[f"{make_module.__name__}, {verb}"] = notes
    assert_stored("callbacks/notes: no audit", texts)


def test_the_audit_logs_nothing_even_through_what_holds_the_real_module(tmp_path: Path) -> None:
    class Holder:
        """The copy of the module shares it, because it is no module."""

        def __init__(self, module: LightningModule) -> None:
            self.module = module

    class Logging(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.holder = Holder(self)
            self.calls_had_trainer: list[bool] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.holder.module.log("batch", float(batch_idx))
            self.holder.module.calls_had_trainer.append(self.holder.module._trainer is not None)
            return super().training_step(batch, batch_idx)

    module = Logging()
    record = audited_run(module, tmp_path)
    assert record.numerics.loss is not None
    warmup, measured, timed_by_owner = 1, 2, 4
    calls_of_the_audit = 2  # in the run's precision and in float32
    assert module.calls_had_trainer == [True] * (warmup + measured + timed_by_owner) + [False] * calls_of_the_audit
    assert module._trainer is not None


class BatchNumberAsLoss(BoringModel):
    """The loss of batch n is n, and that of batch 3 infinite."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = batch_idx if batch_idx != 3 else torch.inf
        return super().training_step(batch, batch_idx)["loss"] * 0.0 + loss


def test_the_losses_of_the_first_steps_are_kept_as_means_over_their_batches(tmp_path: Path) -> None:
    kept = KeptLosses(3)
    trainer_with([kept], tmp_path, accumulate_grad_batches=2, max_steps=5).fit(BatchNumberAsLoss())
    assert kept.losses == [(0 + 1) / 2, None, (4 + 5) / 2]


def test_losses_of_manual_optimization_may_be_unknown(tmp_path: Path) -> None:
    kept = KeptLosses(2)
    trainer_with([kept], tmp_path, max_steps=3).fit(ManualOptimBoringModel())
    assert len(kept.losses) in (0, 2)
