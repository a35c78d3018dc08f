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
from lm_profiler.record.run_record import NumericsFacts, RunRecord, Verb, read_run
from lm_profiler.training import FakeTokens, LanguageModel

TINY: dict[str, Any] = {"d_model": 16, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 50}

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorboard")


def run(
    module: LightningModule, folder: Path, audit: bool = True, verb: Verb = "fit", stop: bool = True, **options: Any
) -> RunRecord:
    numerics = NumericsOptions(audit=audit)
    profiler = make_profiler(warmup=1, measure=2, stop_when_done=stop, actions=3, numerics=numerics, verb=verb)
    data = FakeTokens(batch_size=2, context_length=8) if isinstance(module, LanguageModel) else None
    getattr(trainer_with([profiler], folder, **options), verb)(module, datamodule=data)
    record = read_run(profiler.folder)
    assert record == profiler.record
    assert record.time["step"].n == 2
    return record


def numerics_of(record: RunRecord) -> NumericsFacts:
    assert record.numerics is not None, record.notes
    return record.numerics


def test_under_autocast_only_products_are_in_bfloat16(tmp_path: Path) -> None:
    facts = numerics_of(run(LanguageModel(**TINY), tmp_path, precision="bf16-mixed"))
    kinds = {kind.kind: kind for kind in facts.kinds}
    assert kinds["Linear"].modules == 2 * 7 + 1
    assert (kinds["Linear"].parameters, kinds["Linear"].outputs) == (["float32"], ["bfloat16"])
    assert (kinds["Embedding"].outputs, kinds["Embedding"].gradients) == (["float32"], ["float32"])
    assert 2**-12 < facts.output_error < 2**-5
    assert facts.loss != facts.reference_loss == pytest.approx(facts.loss, rel=2**-6)


def test_with_a_gradient_scaler_the_gradients_are_of_the_loss_itself(tmp_path: Path) -> None:
    seed_everything(0)  # of some batches the scaled gradients overflow float16, and are rightly unknown
    plugin = MixedPrecision("16-mixed", device="cpu")
    kind = numerics_of(run(BoringModel(), tmp_path, plugins=[plugin])).kinds[-1]
    assert kind.kind == "Linear"
    assert (kind.parameters, kind.outputs, kind.gradients) == (["float32"], ["float16"], ["float32"])
    assert kind.gradient_error < 2**-7


def test_the_audit_does_not_change_training(tmp_path: Path) -> None:
    weights = []
    for audit in (False, True):
        seed_everything(3)
        module = BoringModel()
        record = run(module, tmp_path, audit, stop=False, max_steps=8, precision="bf16-mixed")
        assert (record.numerics is not None) == audit
        assert not record.notes
        weights.append(module.layer.weight.detach().clone())
    assert torch.equal(*weights)


class AsksItsTrainer(BoringModel):
    """Which a copy of it does not have."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch * (1 + self.trainer.global_step), batch_idx)


CANNOT: list[tuple[Any, Verb]] = [(BoringModel, "validate"), (ManualOptimBoringModel, "fit"), (AsksItsTrainer, "fit")]


def test_runs_that_cannot_be_audited_are_noted(tmp_path: Path) -> None:
    texts = {}
    for make, verb in CANNOT:
        record = run(make(), tmp_path / make.__name__, verb=verb)
        assert record.numerics is None
        texts[f"{make.__name__}, {verb}"] = [note for note in record.notes if note.startswith("numerics unknown")]
    assert_stored("callbacks/notes: no audit", texts)


def test_the_audit_logs_nothing_even_through_what_holds_the_real_module(tmp_path: Path) -> None:
    class Holder:
        """Opaque: the copy of the module shares it."""

        def __init__(self, module: LightningModule) -> None:
            self.module = module

    class Logging(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.holder = Holder(self)
            self.logged: list[bool] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.holder.module.log("batch", float(batch_idx))
            self.holder.module.logged.append(self.holder.module._trainer is not None)
            return super().training_step(batch, batch_idx)

    module = Logging()
    record = run(module, tmp_path)
    assert numerics_of(record).loss is not None
    steps = 1 + 2 + 4
    assert module.logged == [True] * steps + [False] * 2
    assert module._trainer is not None


class Known(BoringModel):
    """Whose losses are known: batch ``n`` has ``n``, the fourth none that is finite."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"] * 0.0 + (batch_idx if batch_idx != 3 else torch.inf)


def test_the_losses_of_the_first_steps_are_kept_as_means_over_their_batches(tmp_path: Path) -> None:
    kept = KeptLosses(3)
    trainer_with([kept], tmp_path, accumulate_grad_batches=2, max_steps=5).fit(Known())
    assert kept.losses == [0.5, None, 4.5]
    without = KeptLosses(2)  # of a training that returns no loss
    trainer_with([without], tmp_path, max_steps=3).fit(ManualOptimBoringModel())
    assert len(without.losses) in (0, 2)
