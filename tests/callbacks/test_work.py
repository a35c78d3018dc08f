"""Work, machine and everything else that is looked at after the run: right where it is known, harmless where not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from known_loop import instruments, trainer_with
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.loggers import CSVLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from lm_profiler.analysis import transformer_flops_per_token
from lm_profiler.callbacks import TrainingProfiler
from lm_profiler.callbacks import instruments as parts
from lm_profiler.callbacks.work import Work, batches_per_step
from lm_profiler.record.run import RunRecord, Verb, read_run
from lm_profiler.record.steps import read_steps
from lm_profiler.training import FakeTokens, LanguageModel

BATCH, CONTEXT = 2, 8
TINY: dict[str, Any] = {"d_model": 16, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 50}

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorboard")


def run(module: LightningModule, folder: Path, verb: str = "fit", profiler: Any = None, **options: Any) -> RunRecord:
    profiler = profiler or instruments(1, 3)
    data = FakeTokens(batch_size=BATCH, context_length=CONTEXT) if isinstance(module, LanguageModel) else None
    getattr(trainer_with([profiler], folder, **options), verb)(module, datamodule=data)
    record = read_run(profiler.folder)
    assert record == profiler.record
    assert record.status == "ok"
    assert record.time["step"].n
    return record


def on_paper(module: LanguageModel, backward: bool) -> float:
    """By the closed form, for one batch."""
    embeddings = {id(m.weight) for m in module.modules() if type(m).__name__ == "Embedding"}
    products = sum(p.numel() for p in module.parameters() if id(p) not in embeddings and p.ndim == 2)
    return BATCH * CONTEXT * transformer_flops_per_token(products, 2, 16, CONTEXT, backward=backward)


@pytest.mark.parametrize("verb, batches", [("fit", 4), ("validate", 1), ("predict", 1)])
def test_only_training_accumulates(tmp_path: Path, verb: Verb, batches: int) -> None:
    assert batches_per_step(trainer_with([], tmp_path, accumulate_grad_batches=4), verb) == batches


@pytest.mark.parametrize("accumulate", [1, 3])
def test_flops_of_a_fit_step_are_the_closed_form_of_its_batches(tmp_path: Path, accumulate: int) -> None:
    module = LanguageModel(**TINY)
    use = run(module, tmp_path, accumulate_grad_batches=accumulate).utilisation
    assert use is not None
    assert use.flops.forward == accumulate * on_paper(module, backward=False)
    assert use.flops.forward + use.flops.backward == accumulate * on_paper(module, backward=True)
    assert use.flops.recomputation == 0


def test_validation_counts_the_forward_pass_alone(tmp_path: Path) -> None:
    module = LanguageModel(**TINY)
    use = run(module, tmp_path, "validate").utilisation
    assert use is not None
    assert (use.flops.forward, use.flops.backward) == (on_paper(module, backward=False), 0)


class NeedsValues(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch.sum().item()
        return super().training_step(batch, batch_idx)


class Raises(BoringModel):
    """On the meta device, or when it sees the same batch index again."""

    def __init__(self, error: Exception, again: bool = False) -> None:
        super().__init__()
        self.error = error
        self.seen: set[int] | None = set() if again else None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch.is_meta if self.seen is None else batch_idx in self.seen:
            raise self.error
        if self.seen is not None:
            self.seen.add(batch_idx)
        return super().training_step(batch, batch_idx)


def test_a_module_that_needs_values_has_unknown_utilisation(tmp_path: Path) -> None:
    record = run(NeedsValues(), tmp_path)
    assert record.utilisation is None
    assert record.notes == []


@pytest.mark.parametrize("again", [False, True], ids=["on meta", "the second time"])
@pytest.mark.parametrize("error", [KeyError("x"), AttributeError("no such\nthing"), StopIteration()], ids=repr)
def test_a_modules_own_error_while_it_is_counted_is_a_note(tmp_path: Path, error: Exception, again: bool) -> None:
    record = run(Raises(error, again), tmp_path)
    assert record.utilisation is None
    first = f"{error}".splitlines()[:1]
    assert record.notes == [": ".join(["FLOPs unknown", type(error).__name__, *first])]


def test_a_batch_that_cannot_be_described_does_not_stop_training(tmp_path: Path) -> None:
    class Stubborn(torch.Tensor):
        def to(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError("stays here")

    class Feeds(BoringModel):
        def transfer_batch_to_device(self, batch: Any, *args: Any) -> Any:
            return batch.as_subclass(Stubborn)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch.as_subclass(torch.Tensor), batch_idx)

    assert run(Feeds(), tmp_path).notes == ["FLOPs unknown: NotImplementedError: stays here"]


# -- nothing that is looked at beside the times can lose them ---------------------------------------------------


def no(*args: Any, **kwargs: Any) -> Any:
    raise OSError("no such driver")


@pytest.mark.parametrize(
    "where,told",
    [
        ("hardware.known_ceiling", "ceiling unknown: OSError: no such driver"),
        ("recorder.judge", "verdict unknown: OSError: no such driver"),
        ("recorder.judge_utilisation", "utilisation unknown: OSError: no such driver"),
        ("recorder.model_facts", "model unknown: OSError: no such driver"),
        ("recorder.environment", "environment unknown: OSError: no such driver"),
        ("recorder.scalars", "scalars in the logger unknown: OSError: no such driver"),
        ("instruments.CompileWatch.end", "no('measure') failed: OSError: no such driver"),
        ("instruments.CompileWatch.begin", "no('measure') failed: OSError: no such driver"),
    ],
)
def test_what_fails_beside_the_times_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, told: str
) -> None:
    monkeypatch.setattr(f"lm_profiler.callbacks.{where}", no)
    profiler = instruments(1, 3, memory=1)
    record = run(BoringModel(), tmp_path, profiler=profiler)
    assert told in record.notes
    assert [row.step for row in read_steps(profiler.folder / "steps.csv")] == [1, 2, 3, 4, 5]
    assert record.time["step"].n == 3


def test_an_instrument_that_fails_takes_no_other_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts.TelemetryWatch, "begin", no)
    record = run(BoringModel(), tmp_path, profiler=instruments(1, 3, memory=1, trace=1))
    assert record.memory is not None
    assert set(record.memory.causes) >= {"forward", "backward", "optimizer"}
    assert list(tmp_path.rglob("*.pt.trace.json.gz"))


def test_a_signal_after_the_run_finds_everything_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any) -> None:
        raise SystemExit(1)

    monkeypatch.setattr("lm_profiler.callbacks.hardware.known_ceiling", interrupt)
    profiler = instruments(1, 3)
    with pytest.raises(SystemExit):
        trainer_with([profiler], tmp_path).fit(BoringModel())
    record = read_run(profiler.folder)
    assert record == profiler.record
    assert (record.status, record.time["step"].n) == ("ok", 3)
    assert len(read_steps(profiler.folder / "steps.csv")) == 4


def test_a_logger_that_fails_leaves_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = CSVLogger(tmp_path, name="theirs")
    monkeypatch.setattr(logger, "log_metrics", no)
    assert run(BoringModel(), tmp_path, logger=logger, log_every_n_steps=50).notes == [
        "scalars in the logger unknown: OSError: no such driver"
    ]


def test_an_unlike_module_facts_do_not_hide_how_the_run_died(tmp_path: Path) -> None:
    class Lazy(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.late = torch.nn.LazyLinear(2)

        def configure_optimizers(self) -> Any:
            raise KeyError("mine")

    profiler = instruments(1, 3)
    with pytest.raises(KeyError, match="mine"):
        trainer_with([profiler], tmp_path).fit(Lazy())
    assert read_run(profiler.folder).status == "failed"


# -- MFU in TensorBoard -----------------------------------------------------------------------------------------


def mfus(folder: Path) -> dict[int, float]:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    tag = "throughput/mfu"
    return {e.step: e.value for e in events.Scalars(tag)} if tag in events.Tags()["scalars"] else {}


def fitted(folder: Path, peak: float | None, make: Callable[[], LightningModule]) -> TrainingProfiler:
    profiler = instruments(1, 4, peak_flops_per_s=peak)
    run(make(), folder, profiler=profiler)
    return profiler


def test_mfu_of_each_measured_step_is_in_tensorboard(tmp_path: Path) -> None:
    module = LanguageModel(**TINY)
    profiler = fitted(tmp_path, 2e9, lambda: module)
    rows = {row.step: row for row in read_steps(profiler.folder / "steps.csv") if row.stage == "measure"}
    ideal_s = on_paper(module, backward=True) / 2e9
    assert mfus(profiler.folder) == pytest.approx({n: 100 * ideal_s / r.time("step") for n, r in rows.items()}, 1e-5)


@pytest.mark.parametrize("peak,make", [(None, lambda: LanguageModel(**TINY)), (2e9, NeedsValues)])
def test_an_unknown_mfu_has_no_tag(tmp_path: Path, peak: float | None, make: Callable[[], LightningModule]) -> None:
    profiler = fitted(tmp_path, peak, make)
    assert mfus(profiler.folder) == {}


def test_samples_are_the_rows_of_a_step(tmp_path: Path) -> None:
    profiler = instruments(warmup=0, measure=3)
    trainer = trainer_with([profiler], tmp_path, accumulate_grad_batches=2)
    trainer.fit(BoringModel(), DataLoader(RandomDataset(32, 64), batch_size=4))
    rate = read_run(profiler.folder).throughput
    assert rate is not None
    assert (rate.tokens_per_step, rate.samples_per_step) == (None, 8)
    step_s = read_run(profiler.folder).time["step"].median
    assert rate.samples_per_s == pytest.approx(8 / step_s)


@pytest.mark.parametrize(
    "batch, samples",
    [({"a": torch.ones(3, 2), "b": torch.ones(3)}, 3), ([torch.ones(3), torch.ones(5)], None), ("words", None)],
)
def test_samples_are_told_only_where_all_tensors_agree(batch: Any, samples: int | None) -> None:
    work = Work("validate")
    work.see(batch)
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, barebones=True)
    assert work.samples_per_step(trainer) == samples
