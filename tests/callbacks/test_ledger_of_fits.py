"""The ledger of fits of all kinds, by a clock that only the fit moves: a little with every call, more by ``pass_s``."""

import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
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


class Fitted(Tiny):
    """An epoch of 30 steps, and where there is validation, one of 5 batches."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        pass_s(STEP_S)
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def train_dataloader(self) -> Any:
        return DataLoader(torch.randn(30, 4), batch_size=1)


class Validated(Fitted):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        pass_s(BATCH_S)

    def val_dataloader(self) -> Any:
        return DataLoader(torch.randn(5, 4), batch_size=1)


class Slow(Fitted):
    """Hooks that take time: one within steps, one at the turn of an epoch, and before training."""

    def on_before_zero_grad(self, optimizer: object) -> None:
        pass_s(0.001)

    def on_train_epoch_start(self) -> None:
        pass_s(0.02)

    def prepare_data(self) -> None:
        pass_s(0.2)

    def setup(self, stage: str) -> None:
        pass_s(0.5)


class SlowLoader(Fitted):
    """Each epoch's loader takes its time to start."""

    def train_dataloader(self) -> Any:
        class Starting(DataLoader[Tensor]):
            def __iter__(self) -> Any:
                pass_s(0.1)
                return super().__iter__()

        return Starting(torch.randn(30, 4), batch_size=1)


class Logger(CSVLogger):
    def log_metrics(self, *_: Any, **__: Any) -> None:
        pass_s(LOG_S)


class Named(Callback):
    """Takes time within a step and after validation."""

    def on_train_batch_end(self, *_: Any) -> None:
        pass_s(0.001)

    def on_validation_end(self, *_: Any) -> None:
        pass_s(0.03)


class Judging(Callback):
    """Tests by a Trainer of its own, amid the fit of another."""

    def on_train_epoch_end(self, trainer: Trainer, module: Any) -> None:
        of_its_own = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
        of_its_own.test(Judged(), verbose=False)


class Judged(Tiny):
    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        pass_s(BATCH_S)

    def test_dataloader(self) -> Any:
        return DataLoader(torch.randn(5, 4), batch_size=1)


class Fails(Callback):
    """Fails in ``hook`` of the 40th step or of the first validation after it."""

    def __init__(self, hook: str, error: BaseException) -> None:
        def seen(trainer: Trainer, *_: Any, **__: Any) -> None:
            if trainer.global_step >= 40:
                raise error

        setattr(self, hook, seen)


Options = dict[str, Any]
Kind = tuple[Callable[[], Tiny], Options, Callable[[Path], list[Callback]], dict[str, float]]
NONE: Callable[[Path], list[Callback]] = lambda path: []  # noqa: E731
THREE = {"max_epochs": 3}

# the module, the Trainer's options, callbacks, and what must stand in the ledger, in seconds
KINDS: dict[str, Kind] = {
    "a bound of steps": (Fitted, {"max_steps": 70}, NONE, {"step: forward": 69 * STEP_S, "first step": STEP_S}),
    "a sanity check": (
        Validated, THREE | {"num_sanity_val_steps": 2}, NONE, {"sanity check": 2 * BATCH_S, "validation": 15 * BATCH_S},
    ),
    "validation amid epochs": (Validated, THREE | {"val_check_interval": 10}, NONE, {"validation": 45 * BATCH_S}),
    "validation amid accumulation": (
        Validated, THREE | {"val_check_interval": 6, "accumulate_grad_batches": 4}, NONE,
        {"validation": 75 * BATCH_S, "step: forward": (90 - 4) * STEP_S},
    ),
    "a bound of time": (Fitted, {"max_time": {"milliseconds": 400}}, NONE, {}),
    "EarlyStopping": (
        Fitted, {"max_epochs": 9}, lambda path: [EarlyStopping("loss", stopping_threshold=1e9)],
        {"step: forward": 29 * STEP_S},
    ),
    "an exception in a step": (
        Fitted, THREE, lambda path: [Fails("on_before_backward", RuntimeError("planted"))], {},
    ),
    "Ctrl-C in a step": (Fitted, THREE, lambda path: [Fails("on_train_batch_start", KeyboardInterrupt())], {}),
    "Ctrl-C in validation": (Validated, THREE, lambda _: [Fails("on_validation_epoch_end", KeyboardInterrupt())], {}),
    "resumed": (
        Fitted, THREE, lambda path: [ModelCheckpoint(path, filename="{step}", every_n_train_steps=10, save_top_k=-1)],
        {"checkpoints": 7 * SAVE_S},
    ),
    "a logger": (Fitted, THREE | {"log_every_n_steps": 1}, NONE, {}),
    "a slow callback": (
        Validated, THREE, lambda path: [Named()], {"callback: Named": 0.09 + 0.086, "validation": 15 * BATCH_S},
    ),
    "slow hooks": (Slow, THREE, NONE, {"processes and prepare_data": 0.2, "set-up": 0.5, "hooks: Slow": 0.04 + 0.086}),
    "a slow start of the loader": (SlowLoader, THREE, NONE, {"epoch turn": 0.2}),
    "a test within": (Fitted, THREE, lambda path: [Judging()], {"callback: Judging": 3 * 5 * BATCH_S}),
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


def fit(folder: Path, make: Callable[[], Tiny], callbacks: list[Callback], options: Options, **given: Any) -> float:
    """Fit, watched, into ``folder``; return how long it took."""
    profiler = make_profiler(warmup=1, measure=3, clock=CLOCK, watch=WatchOptions(traces=False), log_dir=folder)
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    trainer = trainer_with([*callbacks, profiler], folder, enable_checkpointing=saves, **options)
    began_ns = CLOCK.ns
    profiler.launched(called_ns=began_ns)  # as the command line has it
    sys.setprofile(CLOCK.called)
    try:
        trainer.fit(make(), **given)
    finally:
        sys.setprofile(None)
    return (CLOCK.ns - began_ns) * 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_the_ledger_explains_all_but_a_percent(kind: str, tmp_path: Path) -> None:
    make, options, callbacks, expected = KINDS[kind]
    warnings.simplefilter("ignore")
    given: dict[str, Any] = {}
    if kind == "resumed":
        fit(tmp_path / "before", make, callbacks(tmp_path), options | {"max_epochs": 1})
        given["ckpt_path"] = tmp_path / "step=20.ckpt"
    if kind == "a logger":
        options = options | {"logger": Logger(tmp_path)}
        expected = {"loggers": 86 * LOG_S}
    began_ns = CLOCK.ns
    ends = pytest.raises((RuntimeError, SystemExit)) if "exception" in kind or "Ctrl-C" in kind else nullcontext()
    with ends:
        fit(tmp_path / "logs", make, callbacks(tmp_path), options, **given)
    took_s = (CLOCK.ns - began_ns) * 1e-9
    status = read_status(tmp_path / "logs/lm_profiler/version_0")
    assert status.ended
    assert sum(status.ledger.values()) == pytest.approx(status.wall_s, abs=1e-4)
    assert status.wall_s == pytest.approx(took_s, rel=0.002)
    assert abs(status.ledger.get("unexplained", 0.0)) <= 0.01 * status.wall_s
    for what, seconds in expected.items():
        assert status.ledger[what] == pytest.approx(seconds, rel=0.05, abs=0.003), what


def test_a_validation_that_takes_longer_than_all_before_is_an_event(tmp_path: Path) -> None:
    class SlowOnce(Validated):
        def on_validation_epoch_end(self) -> None:
            pass_s(0.5 * (self.trainer.current_epoch == 6))

    fit(tmp_path, SlowOnce, [], {"max_epochs": 8, "limit_train_batches": 10})
    events = read_events(tmp_path / "lm_profiler/version_0")
    (event,) = (event for event in events if event.kind == "validation")
    assert (event.now, event.against) == pytest.approx((0.5 + 5 * BATCH_S, 5 * BATCH_S), rel=0.05)
