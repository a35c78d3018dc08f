"""What is observed does not feel it: other verbs, endings inside an epoch, trials of a learning rate, dry loaders."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from known_loop import make_profiler, trainer_with
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BatchSizeFinder, EarlyStopping, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel, RandomDataset
from lightning.pytorch.profilers import SimpleProfiler
from torch.utils.data import DataLoader

from lm_profiler.callbacks import profiling_callbacks
from lm_profiler.record.run_record import read_run
from lm_profiler.record.steps import read_steps


class Predictions(BoringModel):
    """Its results count their batches."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("batches", 1.0, reduce_fx="sum", on_epoch=True)

    test_step = validation_step


def results_of(trainer: Any, module: LightningModule) -> list[float]:
    evaluated = [evaluate(module, verbose=False)[0]["batches"] for evaluate in (trainer.validate, trainer.test)]
    return [*evaluated, len(trainer.predict(module, BoringDataModule()))]


def test_callbacks_left_in_a_trainer_do_not_shorten_evaluations(tmp_path: Path) -> None:
    profiler = profiling_callbacks(warmup_steps=1, measure_steps=3, trace_steps=0, action_steps=0)
    module = Predictions()
    trainer = trainer_with(profiler, tmp_path)
    trainer.fit(module)
    assert trainer.global_step == 5
    assert results_of(trainer, module) == results_of(trainer_with([], tmp_path), Predictions()) == [64.0, 64.0, 64]
    assert len(list((tmp_path / "logs" / "lm_profiler").iterdir())) == 1
    (ours,) = profiler
    assert ours.record == read_run(ours.folder)  # still that of the fit


@pytest.mark.parametrize("stop_when_done, batches", [(None, 64), (True, 1 + 3 + 1)])
def test_an_evaluation_ends_early_only_on_request(tmp_path: Path, stop_when_done: bool | None, batches: int) -> None:
    """The loader has 64 batches. The profiler needs 1 to warm up, 3 to measure and 1 for the memory stage."""
    (profiler,) = profiling_callbacks(
        warmup_steps=1, measure_steps=3, trace_steps=0, action_steps=0, verb="test", stop_when_done=stop_when_done
    )
    trainer = trainer_with([profiler], tmp_path)
    (results,) = trainer.test(Predictions(), verbose=False)
    assert results["batches"] == batches
    record = read_run(profiler.folder)
    assert (record.verb, record.status, record.time["step"].n) == ("test", "ok", 3)


class FetchesItself(BoringModel):
    """Asks for its batches from within its steps, so that a step still runs when the stages end."""

    seen = 0

    def training_step(self, dataloader_iter: Any) -> Any:
        return self.counted(super().training_step, next(dataloader_iter)[0])

    def validation_step(self, dataloader_iter: Any) -> Any:
        return self.counted(super().validation_step, next(dataloader_iter)[0])

    def counted(self, step: Any, batch: Any) -> Any:
        self.seen += 1
        return step(batch, 0)


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")  # experimental, and what is tried
@pytest.mark.parametrize("verb", ["fit", "validate"])
def test_a_step_that_outlives_the_stages_does_not_change_the_record(tmp_path: Path, verb: Literal["fit", "validate"]):
    """The stages have seven steps: one of warm-up, three measured ones, two of actions and one followed by line."""
    (profiler,) = profiling_callbacks(
        warmup_steps=1, measure_steps=3, memory_steps=0, trace_steps=0, action_steps=2, verb=verb, stop_when_done=False
    )
    profiled, plain = FetchesItself(), FetchesItself()
    plain.load_state_dict(profiled.state_dict())
    for module, callbacks in ((profiled, [profiler]), (plain, [])):
        torch.manual_seed(0)
        trainer = trainer_with(callbacks, tmp_path, limit_val_batches=10, limit_train_batches=10, max_epochs=2)
        getattr(trainer, verb)(module)
    assert profiled.seen == plain.seen
    for mine, theirs in zip(profiled.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    record = read_run(profiler.folder)
    assert (record.status, record.failure) == ("ok", None)
    assert record.time["step"].n == 3
    assert [row.step for row in read_steps(profiler.folder / "steps.csv")] == list(range(1, 8))


class Validated(BoringModel):
    """Everything about it rests on its validation, in every ``check``-th epoch."""

    def __init__(self, check: int) -> None:
        super().__init__()
        self.check = check

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("train_loss", super().training_step(batch, batch_idx)["loss"], on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch).sum())

    def train_dataloader(self) -> Any:
        return DataLoader(RandomDataset(32, 1000))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        schedule = {"scheduler": plateau, "monitor": "val_loss", "frequency": self.check}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


@pytest.mark.parametrize("batches, check", [(1000, 1), (5, 1), (5, 2), (2, 3)])
def test_stopping_inside_an_epoch_needs_no_validation_metric(tmp_path: Path, batches: int, check: int):
    """Five steps: inside the first epoch, at its end, in a later one."""
    profiler, calls = make_profiler(warmup=1, measure=3, memory=1), SimpleProfiler()
    monitors: list[Callback] = [ModelCheckpoint(tmp_path / "kept", monitor="val_loss")]
    if check == 1:
        best = ModelCheckpoint(tmp_path / "best", monitor="val_loss", mode="max", save_on_train_epoch_end=True)
        monitors += [EarlyStopping("val_loss", patience=100), best]
    options: dict[str, Any] = {"limit_train_batches": batches, "check_val_every_n_epoch": check, "profiler": calls}
    trainer = trainer_with([*monitors, profiler], tmp_path, enable_checkpointing=True, **options)
    trainer.fit(Validated(check))
    assert trainer.global_step == 5
    assert trainer.state.finished
    ends = [f"[LightningModule]Validated.on_train{scope}_end" for scope in ("_epoch", "")]
    assert [len(calls.recorded_durations[end]) for end in ends] == [5 // batches, 1]
    assert read_run(profiler.folder).status == "ok"


def test_a_trainer_cut_inside_an_epoch_trains_on(tmp_path: Path) -> None:
    profiler = make_profiler(warmup=1, measure=3)
    trainer = trainer_with([profiler], tmp_path, max_epochs=3, limit_train_batches=10)
    module = BoringModel()
    trainer.fit(module)
    assert (trainer.global_step, trainer.current_epoch) == (4, 0)
    trainer.callbacks.remove(profiler)
    trainer.fit(module)
    assert (trainer.global_step, trainer.current_epoch) == (34, 3)


def test_a_profiler_that_is_done_stays_in_the_users_list(tmp_path: Path) -> None:
    calls, profiler = SimpleProfiler(), make_profiler(warmup=1, measure=3, memory=1, stop_when_done=False)
    trainer = trainer_with([profiler], tmp_path, max_epochs=1, limit_train_batches=20, profiler=calls)
    listed, kept = trainer.callbacks, list(trainer.callbacks)
    for fits in (1, 2):  # each is measured
        trainer.fit_loop.max_epochs = fits
        trainer.fit(BoringModel())
        assert trainer.callbacks is listed
        assert trainer.callbacks == kept
        assert len(calls.recorded_durations["[Callback]TrainingProfiler.on_train_batch_end"]) == 5 * fits
        assert (profiler.folder.name, read_run(profiler.folder).status) == (f"version_{fits - 1}", "ok")


class Tunable(BoringModel):
    lr, batch_size = 0.01, 2
    forwards = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.forwards += 1
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> Any:
        return DataLoader(RandomDataset(32, 256), batch_size=self.batch_size)

    test_dataloader = train_dataloader

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("make", [LearningRateFinder, BatchSizeFinder])
def test_the_trials_of_a_finder_are_not_measured(tmp_path: Path, make: Any) -> None:
    finder = (
        BatchSizeFinder(max_trials=2, steps_per_trial=3)
        if make is BatchSizeFinder
        else make(num_training_steps=12, early_stop_threshold=None)
    )
    profiler, module = make_profiler(warmup=1, measure=6, memory=1), Tunable()
    trainer = trainer_with([finder, profiler], tmp_path, limit_train_batches=3, max_epochs=4, logger=False)
    trainer.fit(module)
    record = read_run(profiler.folder)
    assert (record.status, record.steps["measure"], record.steps["memory"]) == ("ok", 6, 1)
    assert trainer.global_step == 8
    assert module.forwards > 8  # the trials
    assert len(list((tmp_path / "logs" / "lm_profiler").iterdir())) == 1


class Gone(torch.utils.data.IterableDataset[Any]):
    """Goes on for ever, and has something to give at first only."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        yield from (torch.ones(1, 32) for _ in range(self.batches))
        while True:
            yield None


class Dry(torch.utils.data.IterableDataset[Any]):
    """Has something to give once."""

    def __init__(self, batches: int) -> None:
        self.left = batches

    def __iter__(self) -> Iterator[Any]:
        while self.left:
            self.left -= 1
            yield torch.ones(32)


@pytest.mark.filterwarnings("ignore:.*yielded None", "ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(
    "data, options, steps, note",
    [
        (DataLoader(Dry(batches=3)), {}, 3, "an epoch"),
        (DataLoader(Gone(batches=4), batch_size=None), {"accumulate_grad_batches": 2}, 2, "2,001 batches"),
    ],
    ids=["runs dry", "gives None for ever"],
)
def test_a_loader_that_runs_dry_ends_a_fit(tmp_path: Path, data: Any, options: dict[str, Any], steps: int, note: str):
    profiler = make_profiler(warmup=1, measure=20)
    trainer_with([profiler], tmp_path, **options).fit(BoringModel(), data)
    record = read_run(profiler.folder)
    assert any(note in recorded_note for recorded_note in record.notes)
    assert (sum(record.steps.values()), record.status) == (steps, "ok")


class Skips(BoringModel):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int:
        return -1


@pytest.mark.parametrize(
    "module, data, options",
    [(Skips, None, {}), (BoringModel, [], {}), (BoringModel, None, {"max_steps": 0})],
    ids=["skips", "empty", "has nothing to do"],
)
@pytest.mark.filterwarnings("ignore")  # Lightning's, of a loader of length 0
def test_a_fit_without_a_step_has_failed(tmp_path: Path, module: Any, data: Any, options: dict[str, Any]) -> None:
    profiler = make_profiler(warmup=1, measure=20)
    trainer_with([profiler], tmp_path, **options).fit(module(), data)
    record = read_run(profiler.folder)
    assert record.status == "failed"
    assert record.notes[0].startswith("an epoch had no step") or "0 of" in record.notes[0]
    assert (record.failure.type, record.failure.step) == ("NoStep", None)
