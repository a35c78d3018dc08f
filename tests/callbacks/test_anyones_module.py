"""The instruments work on a module, a Trainer and callbacks that know nothing of them, and leave no trace."""

import copy
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from known_loop import make_profiler, trainer_with
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel, RandomDataset
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.profilers import AdvancedProfiler, SimpleProfiler
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from raised import refusal
from stored_texts import assert_stored
from torch.utils.data import DataLoader, IterableDataset

from lm_profiler.callbacks import TrainingProfiler
from lm_profiler.callbacks.marks.optimizers import _MarkedStep, _Wrapper
from lm_profiler.record.run_record import read_run

STEPS = {"warmup": 1, "measure": 3, "actions": 4, "memory": 1, "trace": 2}  # with the lines' step, the trace's warm-up


def profiler_of_all_stages(**options: Any) -> TrainingProfiler:
    return make_profiler(warmup=1, measure=3, memory=1, trace=1, actions=3, **options)


@pytest.mark.parametrize("make", [BoringModel, ManualOptimBoringModel])
def test_a_demo_module_untouched(tmp_path: Path, make: Callable[[], LightningModule]) -> None:
    module = make()
    before = set(vars(module))
    profiler = profiler_of_all_stages()
    trainer = trainer_with([profiler], tmp_path / "theirs")
    trainer.fit(module)
    assert profiler.folder == tmp_path / "logs" / "lm_profiler" / "version_0"
    record = read_run(profiler.folder)
    assert record.status == "ok"
    assert record.steps == STEPS
    assert not record.notes
    assert record.memory.measured.allocated_peak is None  # the CPU has no allocator that counts
    # A process with torch in it holds more than 100 MiB, and no more than this machine has.
    assert 2**27 < (record.memory.measured.resident_peak or 0) < 2**42
    assert trainer.fit_loop.epoch_loop.batch_progress.total.completed == sum(STEPS.values())
    assert record.model.class_path == f"{type(module).__module__}.{type(module).__qualname__}"
    assert record.model.parameters == sum(p.numel() for p in module.parameters())
    assert record.model.optimizers == ["SGD"]
    for phase in ("data", "transfer", "forward", "zero_grad", "backward", "optimizer"):
        summary = record.time[phase]
        assert summary.min > 0, phase
    assert record.throughput.tokens_per_s is None  # the module does not count its tokens
    assert set(vars(module)) - before <= {"_trainer", "_hparams", "_example_input_array"}


class Sections(Callback):
    """Uses the Trainer's profiler in every step, and keeps what the profiler reports about itself."""

    def __init__(self) -> None:
        self.received: list[tuple[Any, ...]] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        profiler: Any = trainer.profiler
        with profiler.profile("my section") as section:
            copied = copy.deepcopy(profiler)
        counts = {name: len(times) for name, times in profiler.recorded_durations.items() if "my section" in name}
        rows = sum("my section" in line for line in profiler.summary().splitlines())
        kinds = type(profiler).__name__, isinstance(profiler, SimpleProfiler), type(copied)
        self.received.append((section, counts, rows, *kinds, repr(profiler).partition(" object")[0]))
        if args[-1] == 3:
            profiler.describe()


@pytest.mark.parametrize(
    "watch, make", [(False, ManualOptimBoringModel), (True, BoringModel)], ids=["stages, by hand", "watched"]
)
def test_the_users_own_profiler_is_unchanged(tmp_path: Path, watch: bool, make: Callable[[], LightningModule]):
    """Its class, its summary, its report, its attributes and its actions are as without us, from first to last."""

    def profiled_by_the_user(name: str, callbacks: list[Callback]) -> tuple[list[tuple[Any, ...]], str, dict[str, int]]:
        """What the profiler says of itself in each step, its report, and how often each action was called."""
        sections = Sections()
        users = SimpleProfiler(dirpath=tmp_path / name, filename="users")
        trainer_with([sections, *callbacks], tmp_path, profiler=users, max_steps=24).fit(make())
        assert type(users) is SimpleProfiler
        (report,) = (tmp_path / name).glob("fit-users*")
        calls = {name: len(taken) for name, taken in users.recorded_durations.items() if "TrainingProfiler" not in name}
        return sections.received, report.read_text(), calls

    ours = profiler_of_all_stages(stop_when_done=False, watch=watch)
    plain_received, plain_report, plain_calls = profiled_by_the_user("plain", [])
    received, report, calls = profiled_by_the_user("ours", [ours])
    assert len(received) == 24
    assert received == plain_received
    assert report.count("FIT Profiler Report") == plain_report.count("FIT Profiler Report") == 2
    # One more batch may be asked for, or one less: the loop learns in another way that it is to end.
    asked = "[_TrainingEpochLoop].train_dataloader_next"
    assert abs(calls.pop(asked) - plain_calls.pop(asked)) <= 1
    assert calls == plain_calls


class HasSlots(SimpleProfiler):
    __slots__ = ("more",)


class Guarded(SimpleProfiler):
    """Lets nobody set an attribute that it does not know."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":
            raise AttributeError(name)
        super().__setattr__(name, value)


class StartsItself(SimpleProfiler):
    """Has an attribute of the object in place of a method."""

    def __init__(self) -> None:
        super().__init__()
        plain = super().start
        self.start = lambda name: plain(name)


@pytest.mark.parametrize("kind", [AdvancedProfiler, HasSlots, Guarded, StartsItself])
def test_any_class_of_profiler_can_be_marked(tmp_path: Path, kind: type[Any]) -> None:
    users, profiler = kind(), profiler_of_all_stages()
    own_start = vars(users).get("start")
    trainer = trainer_with([profiler], tmp_path, profiler=users)
    trainer.fit(BoringModel())
    assert type(users) is kind
    assert vars(users).get("start") is own_start
    assert read_run(profiler.folder).steps == STEPS


class Kept(Logger):
    """A logger that keeps what it is given."""

    name, version = "kept", 0

    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[tuple[int | None, set[str]]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.metrics.append((step, set(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


def test_the_users_logger_gets_nothing(tmp_path: Path) -> None:
    def logged_and_left(folder: Path, callbacks: list[Callback]) -> tuple[list[tuple[int | None, set[str]]], set[str]]:
        """What the user's logger got, and the files that were left."""
        kept = Kept()
        loggers = [kept, TensorBoardLogger(folder, name="mine"), CSVLogger(folder, name="csv")]
        options: dict[str, Any] = {"logger": loggers, "enable_checkpointing": True, "max_steps": 20}
        trainer_with(callbacks, folder, **options, log_every_n_steps=4).fit(Random())
        names = [str(path.relative_to(folder)) for path in folder.rglob("*")]
        return kept.metrics, {re.sub(r"tfevents.*", "tfevents", name) for name in names}

    plain = logged_and_left(tmp_path / "plain", [])
    profiled = logged_and_left(tmp_path / "profiled", [profiler_of_all_stages(stop_when_done=False)])
    assert profiled == plain


class Random(BoringModel):
    """Every step draws: from torch for a mask, and for the order of the items; from Python and numpy for a scale."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        scale = 1 + random.random() + float(np.random.rand())
        return super().training_step(scale * torch.nn.functional.dropout(batch), batch_idx)

    def train_dataloader(self) -> Any:
        return DataLoader(RandomDataset(32, 8), shuffle=True)


def weights_after(
    folder: Path, callbacks: list[Callback], make: Callable[[], LightningModule] = Random, **options: Any
) -> tuple[Trainer, list[torch.Tensor]]:
    seed_everything(3, verbose=False)
    trainer = trainer_with(callbacks, folder, **options)
    module = make()
    trainer.fit(module)
    return trainer, [p.detach().clone() for p in module.parameters()]


class Looks(Callback):
    """Notes at the end of every batch the Trainer's profiler, and whether ours is called and has marked anything."""

    def __init__(self, ours: TrainingProfiler) -> None:
        self.ours = ours
        self.profilers: list[Any] = []
        self.classes: list[type] = []
        self.called: list[bool] = []
        self.marked: list[bool] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        self.profilers.append(trainer.profiler)
        self.classes.append(type(trainer.profiler))
        self.called.append(callable(self.ours.on_train_batch_end))
        owners = (module, *trainer.optimizers, *trainer.strategy._lightning_optimizers)
        methods = [method for owner in owners for method in vars(owner).values()]
        self.marked.append(any(isinstance(method, (_MarkedStep, _Wrapper)) for method in methods))


@pytest.mark.parametrize("make", [Random, ManualOptimBoringModel])
def test_training_goes_on_as_if_nothing_had_been_there(tmp_path: Path, make: Callable[[], LightningModule]) -> None:
    """After the stages, which take eleven of 30 steps."""
    profiler = profiler_of_all_stages(stop_when_done=False)
    looks, users = Looks(profiler), SimpleProfiler()
    trainer, profiled = weights_after(tmp_path, [looks, profiler], make, max_steps=30, profiler=users)
    assert trainer.global_step == 30
    assert profiler.record.steps == STEPS
    assert profiler in trainer.callbacks  # the user's list
    in_stages = sum(STEPS.values())
    only_in_stages = [True] * in_stages + [False] * (30 - in_stages)
    assert looks.called == only_in_stages
    assert looks.marked == only_in_stages
    assert [kind is not SimpleProfiler for kind in looks.classes] == only_in_stages
    assert all(seen is users for seen in looks.profilers)
    _, plain = weights_after(tmp_path, [], make, max_steps=30)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(profiled, plain, strict=True))


@pytest.mark.parametrize(
    "warmup, planned, max_steps, measured, noted",
    [(2, 10, 5, 3, "3 of"), (2, 3, 5, 3, None), (5, 3, 2, 0, "")],
    ids=["early", "with the last planned step", "before anything is measured"],
)
def test_a_loop_that_ends_early_is_noted(
    warmup: int, planned: int, max_steps: int, measured: int, noted: str | None, tmp_path: Path
) -> None:
    profiler = make_profiler(warmup, planned)
    trainer_with([profiler], tmp_path, max_steps=max_steps).fit(BoringModel())
    record = read_run(profiler.folder)
    assert record.status == "ok"
    assert record.steps["measure"] == record.time["step"].n == measured
    assert (record.time["step"].median is None) == (measured == 0)
    assert record.steps_planned["measure"] == planned
    assert len(record.notes) == (noted is not None)
    assert (noted or "") in "".join(record.notes)


def test_two_profilers_of_ours_are_refused(tmp_path: Path) -> None:
    """They would share torch's one profiler, and time each other."""
    two = [profiler_of_all_stages(), profiler_of_all_stages()]
    message = refusal(MisconfigurationException, lambda: trainer_with(two, tmp_path).fit(BoringModel()))
    assert_stored("callbacks/refused: two profilers", {"in a Trainer": message})


def test_a_barebones_trainer_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(barebones=True, accelerator="cpu", default_root_dir=tmp_path, max_steps=3)
    trainer.callbacks.append(profiler_of_all_stages())
    with pytest.raises(MisconfigurationException, match="barebones"):
        trainer.fit(BoringModel())


class Scheduled(BoringModel):
    """With a schedule over all steps of the run, as Lightning's documentation writes one."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        self.total = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=int(self.total))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Endless(IterableDataset[torch.Tensor]):
    """Has no length, so that Lightning fetches one batch ahead."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.ones(1, 32)


def test_training_stops_after_the_planned_steps(tmp_path: Path) -> None:
    trainer = trainer_with([profiler_of_all_stages()], tmp_path, max_steps=1000, limit_train_batches=3)
    trainer.fit(BoringModel())
    assert (trainer.global_step, trainer.max_steps) == (sum(STEPS.values()), 1000)


@pytest.mark.parametrize("data", [None, DataLoader(Endless(), batch_size=None)], ids=["with a length", "without"])
def test_a_schedule_knows_how_many_steps_are_planned(data: Any, tmp_path: Path) -> None:
    """Beyond its last step it raises."""
    module = Scheduled()
    trainer = trainer_with([profiler_of_all_stages()], tmp_path, max_epochs=-1)
    trainer.fit(module, data)
    planned = sum(STEPS.values())
    assert module.total == planned + 1
    assert trainer.global_step in (planned, planned + 1)
    assert trainer.max_steps == -1
