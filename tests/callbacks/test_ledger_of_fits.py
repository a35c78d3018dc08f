"""The ledger of fits of all kinds, by a clock that only the fit moves: a little with every call, more by ``pass_s``."""

import sys
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import Clock
from faults import Tiny
from known_loop import make_profiler, trainer_with
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, timer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor
from torch.utils.data import DataLoader

from lm_profiler.callbacks import WatchOptions
from lm_profiler.record.watch_files import read_events, read_status

STEP_S, BATCH_S, SAVE_S, LOG_S = 0.004, 0.01, 0.05, 0.002  # of training, of validation, of a checkpoint, of a logger
CALL_NS = 100  # what each call of a function takes beside


class PassingClock(Clock):
    """Nanoseconds that pass with the calls of the thread that trains."""

    def called(self, frame: object, event: str, argument: object) -> None:
        self.ns += CALL_NS * (event == "call")


CLOCK = PassingClock()


def pass_s(seconds: float) -> None:
    CLOCK.ns += round(seconds * 1e9)


class EpochsOf30Steps(Tiny):
    """An epoch of 30 steps, and where there is validation, one of 5 batches."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        pass_s(STEP_S)
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def train_dataloader(self) -> Any:
        return DataLoader(torch.randn(30, 4), batch_size=1)


class WithValidation(EpochsOf30Steps):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        pass_s(BATCH_S)

    def val_dataloader(self) -> Any:
        return DataLoader(torch.randn(5, 4), batch_size=1)


class SlowHooks(EpochsOf30Steps):
    """Hooks that take time: one within steps, one at the turn of an epoch, and before training."""

    def on_before_zero_grad(self, optimizer: object) -> None:
        pass_s(0.001)

    def on_train_epoch_start(self) -> None:
        pass_s(0.02)

    def prepare_data(self) -> None:
        pass_s(0.2)

    def setup(self, stage: str) -> None:
        pass_s(0.5)


class SlowLoader(EpochsOf30Steps):
    """Each epoch's loader takes its time to start."""

    def train_dataloader(self) -> Any:
        class Starting(DataLoader[Tensor]):
            def __iter__(self) -> Any:
                pass_s(0.1)
                return super().__iter__()

        return Starting(torch.randn(30, 4), batch_size=1)


class SlowLogger(CSVLogger):
    def log_metrics(self, *_: Any, **__: Any) -> None:
        pass_s(LOG_S)


class SlowCallback(Callback):
    """Takes time within a step and after validation."""

    def on_train_batch_end(self, *_: Any) -> None:
        pass_s(0.001)

    def on_validation_end(self, *_: Any) -> None:
        pass_s(0.03)


class TestsByItsOwnTrainer(Callback):
    """Tests by a Trainer of its own, amid the fit of another."""

    def on_train_epoch_end(self, trainer: Trainer, module: Any) -> None:
        of_its_own = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
        of_its_own.test(WithTest(), verbose=False)


class WithTest(Tiny):
    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        pass_s(BATCH_S)

    def test_dataloader(self) -> Any:
        return DataLoader(torch.randn(5, 4), batch_size=1)


class FailsAfter40Steps(Callback):
    """FailsAfter40Steps in ``hook`` of the 40th step or of the first validation after it."""

    def __init__(self, hook: str, error: BaseException) -> None:
        def seen(trainer: Trainer, *_: Any, **__: Any) -> None:
            if trainer.global_step >= 40:
                raise error

        setattr(self, hook, seen)


@dataclass(frozen=True)
class Fit:
    """A fit of up to three epochs, and some of the seconds that must stand in its ledger."""

    make_module: Callable[[], Tiny]
    ledger_s: dict[str, float]
    make_callback: Callable[[], Callback] | None = None
    options: dict[str, Any] = field(default_factory=dict)  # of the Trainer


# Three epochs have 90 steps. What follows the optimizer of 86 of them is in the ledger by its owner.
FITS = {
    "a bound of steps": Fit(
        EpochsOf30Steps, {"step: forward": 69 * STEP_S, "first step": STEP_S}, options={"max_steps": 70}
    ),
    "a sanity check": Fit(
        WithValidation, {"sanity check": 2 * BATCH_S, "validation": 15 * BATCH_S}, options={"num_sanity_val_steps": 2}
    ),
    "validation amid epochs": Fit(WithValidation, {"validation": 45 * BATCH_S}, options={"val_check_interval": 10}),
    "validation amid accumulation": Fit(
        WithValidation, {"validation": 75 * BATCH_S, "step: forward": (90 - 4) * STEP_S},
        options={"val_check_interval": 6, "accumulate_grad_batches": 4},
    ),
    "a bound of time": Fit(EpochsOf30Steps, {}, options={"max_time": {"milliseconds": 250}}),
    "EarlyStopping": Fit(
        EpochsOf30Steps, {"step: forward": 29 * STEP_S}, lambda: EarlyStopping("loss", stopping_threshold=1e9)
    ),
    "a logger": Fit(EpochsOf30Steps, {"loggers": 86 * LOG_S}, options={"log_every_n_steps": 1}),
    "a slow callback": Fit(
        WithValidation, {"callback: SlowCallback": 3 * 0.03 + 86 * 0.001, "validation": 15 * BATCH_S}, SlowCallback
    ),
    "slow hooks": Fit(
        SlowHooks, {"processes and prepare_data": 0.2, "set-up": 0.5, "hooks: SlowHooks": 2 * 0.02 + 86 * 0.001}
    ),
    "a slow start of the loader": Fit(SlowLoader, {"epoch turn": 2 * 0.1}),
    "a test within": Fit(
        EpochsOf30Steps, {"callback: TestsByItsOwnTrainer": 3 * 5 * BATCH_S}, TestsByItsOwnTrainer
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch, hands_over_often: None) -> Iterator[None]:
    def saved(*_: Any, **__: Any) -> None:
        pass_s(SAVE_S)
        save(*_, **__)

    save = TorchCheckpointIO.save_checkpoint
    monkeypatch.setattr(TorchCheckpointIO, "save_checkpoint", saved)
    monkeypatch.setattr(timer, "time", types.SimpleNamespace(monotonic=lambda: CLOCK.ns * 1e-9))
    yield
    sys.setprofile(None)


def fit(
    folder: Path, make: Callable[[], Tiny], callbacks: list[Callback], options: dict[str, Any], **given: Any
) -> float:
    """Fit, watched, into ``folder``; return how long it took."""
    warnings.simplefilter("ignore")
    profiler = make_profiler(warmup=1, measure=3, clock=CLOCK, watch=WatchOptions(traces=False), log_dir=folder)
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    trainer = trainer_with([*callbacks, profiler], folder, enable_checkpointing=saves, **{"max_epochs": 3, **options})
    began_ns = CLOCK.ns
    profiler.launched(called_ns=began_ns)  # as the command line has it
    sys.setprofile(CLOCK.called)
    try:
        trainer.fit(make(), **given)
    finally:
        sys.setprofile(None)
    return (CLOCK.ns - began_ns) * 1e-9


def assert_explained(folder: Path, took_s: float, ledger_s: dict[str, float]) -> None:
    """Assert that the parts of the ledger add up to the time of the fit, with at most a percent unexplained."""
    status = read_status(folder / "lm_profiler/version_0")
    assert status.ended
    assert status.wall_s == pytest.approx(took_s, rel=0.002)
    assert sum(status.ledger.values()) == pytest.approx(status.wall_s, abs=1e-4)
    assert abs(status.ledger.get("unexplained", 0.0)) <= 0.01 * status.wall_s
    for part, seconds in ledger_s.items():
        assert status.ledger[part] == pytest.approx(seconds, rel=0.05, abs=0.003), part


@pytest.mark.parametrize("name", FITS)
def test_the_ledger_explains_all_but_a_percent(name: str, tmp_path: Path) -> None:
    planted = FITS[name]
    callbacks = [] if planted.make_callback is None else [planted.make_callback()]
    options = planted.options
    if name == "a logger":
        options = options | {"logger": SlowLogger(tmp_path)}
    took_s = fit(tmp_path, planted.make_module, callbacks, options)
    assert_explained(tmp_path, took_s, planted.ledger_s)


@pytest.mark.parametrize(
    "make_module, hook, error",
    [
        (EpochsOf30Steps, "on_before_backward", RuntimeError("planted")),
        (EpochsOf30Steps, "on_train_batch_start", KeyboardInterrupt()),
        (WithValidation, "on_validation_epoch_end", KeyboardInterrupt()),
    ],
)
def test_the_ledger_explains_a_fit_that_failed(
    make_module: Callable[[], Tiny], hook: str, error: BaseException, tmp_path: Path
) -> None:
    began_ns = CLOCK.ns
    with pytest.raises((RuntimeError, SystemExit)):
        fit(tmp_path, make_module, [FailsAfter40Steps(hook, error)], {})
    assert_explained(tmp_path, (CLOCK.ns - began_ns) * 1e-9, {})


def test_the_ledger_of_a_resumed_fit_has_its_own_checkpoints(tmp_path: Path) -> None:
    """Every tenth step is saved; of 90, the first 20 come from the fit before."""
    before, resumed = tmp_path / "before", tmp_path / "resumed"
    saves = {"filename": "{step}", "every_n_train_steps": 10, "save_top_k": -1}
    fit(before, EpochsOf30Steps, [ModelCheckpoint(before, **saves)], {"max_epochs": 1})
    checkpoint = before / "step=20.ckpt"
    took_s = fit(resumed, EpochsOf30Steps, [ModelCheckpoint(resumed, **saves)], {}, ckpt_path=checkpoint)
    assert_explained(resumed, took_s, {"checkpoints": 7 * SAVE_S})


def test_a_validation_that_takes_longer_than_all_before_is_an_event(tmp_path: Path) -> None:
    class SlowOnce(WithValidation):
        def on_validation_epoch_end(self) -> None:
            pass_s(0.5 * (self.trainer.current_epoch == 6))

    fit(tmp_path, SlowOnce, [], {"max_epochs": 8, "limit_train_batches": 10})
    events = read_events(tmp_path / "lm_profiler/version_0")
    (event,) = (event for event in events if event.kind == "validation")
    assert (event.now, event.against) == pytest.approx((0.5 + 5 * BATCH_S, 5 * BATCH_S), rel=0.05)
