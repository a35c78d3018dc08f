"""Whose ``other`` is: known times in known places are found under their owners, and nothing else is."""

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import known_loop
import pytest
import torch
from faults import fault_in
from known_loop import KnownModule, SimulatedClock, SlowLoader, SlowStream, make_profiler, profiled_fit, spend
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.profilers import SimpleProfiler
from torch import Tensor

from lm_profiler.analysis.savings.ranking import findings_of
from lm_profiler.callbacks import TrainingProfiler
from lm_profiler.callbacks.instruments.action_owners import Owners
from lm_profiler.callbacks.instruments.owners import ActionSteps, action_steps_of_pattern
from lm_profiler.record.run_record import OURS, OtherByOwner, read_run
from lm_profiler.record.steps import read_steps

MS = 1e-3


@pytest.fixture(autouse=True)
def _simulated_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_loop, "CLOCK", SimulatedClock())


class Ticking(SimulatedClock):
    """Every look at it takes a microsecond, ours too."""

    def __call__(self) -> int:
        self.now_ns += 1000
        return self.now_ns


class Slow(Callback):
    """Waits in hooks between the phases, and in one inside of a phase."""

    def on_train_batch_start(self, *_: Any) -> None:
        spend("callback", 1 * MS)

    def on_after_backward(self, *_: Any) -> None:
        spend("callback", 2 * MS)

    def on_train_batch_end(self, *_: Any) -> None:
        spend("callback", 4 * MS)


class Own(KnownModule):
    """Waits in hooks of its own; what ``optimizer_step`` does beside the phases is its too."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        spend("module", 8 * MS)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        spend("module", 16 * MS)
        super().optimizer_step(*args, **kwargs)


class SlowLogger(Logger):
    """Waits where it is given something."""

    name, version = "slow", 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        spend("logger", 32 * MS)

    def save(self) -> None:
        spend("logger", 64 * MS)


def fit_with_owners(module: LightningModule, folder: Path, actions: int, **options: Any) -> TrainingProfiler:
    """Fit with a step of warm-up, two measured steps, and ``actions`` steps in which owners are timed."""
    profiler = make_profiler(warmup=1, measure=2, actions=actions)
    return profiled_fit(module, folder, profiler=profiler, **options)


def shares_ms(profiler: TrainingProfiler) -> dict[str, float]:
    return {action.name: round(action.seconds / MS, 6) for action in checked_owners(profiler).actions}


def checked_owners(profiler: TrainingProfiler) -> OtherByOwner:
    """Return the owners in the record, after a check that they add up to the time of the marks, which know no owner."""
    record = read_run(profiler.folder)
    assert record.status == "ok"
    assert record.notes == []
    shares = record.other_by_owner
    rows = [row for row in read_steps(profiler.folder / "steps.csv") if row.stage == "actions" and row.rank == 0]
    assert len(rows) == record.steps["actions"] > shares.steps  # the last is followed line by line
    rows = rows[: shares.steps]
    assert shares.seconds == pytest.approx(sum(row.time("other", "host") for row in rows) / len(rows), abs=1e-9)
    for phase, use in record.thread_use.items():
        assert use.wall_s == pytest.approx(sum(row.time(phase, "host") for row in rows) / len(rows), abs=1e-9), phase
    seconds = [action.seconds for action in shares.actions]
    assert sum(seconds) == pytest.approx(shares.seconds, abs=1e-12)
    assert seconds == sorted(seconds, reverse=True)
    return shares


def test_each_owner_has_the_time_that_it_took(tmp_path: Path) -> None:
    """The learning rate comes from a function that waits, as one does that asks a server; a block has a name."""

    def learning_rate(step: int) -> float:
        if step > 0:  # not where the scheduler is made
            spend("scheduler", 32 * MS)
        return 1.0

    class Module(Own):
        def tokens_in(self, batch: Tensor) -> int:
            spend("tokens", 0.5 * MS)
            return batch.numel()

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    class Names(Slow):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            super().on_train_batch_end()
            with trainer.profiler.profile("my block"):
                spend("inner", 64 * MS)

    profiler = fit_with_owners(Module(), tmp_path, actions=3, callbacks=[Names()])
    shares = shares_ms(profiler)
    assert shares.pop(f"{OURS}'s on_train_batch_end", None) or shares.popitem()[1] == 0.5  # what counting tokens takes
    assert shares == {
        "my block": 64.0,
        "LambdaLR.step": 32.0,
        "Module.optimizer_step": 16.0,
        "Module.on_train_batch_start": 8.0,
        "Names.on_train_batch_end": 4.0,
        "Names.on_after_backward": 2.0,  # inside of backward, and yet `other`
        "Names.on_train_batch_start": 1.0,
    }
    assert checked_owners(profiler).measured_s == pytest.approx(127.5 * MS)
    assert {(action.calls, action.in_steps) for action in checked_owners(profiler).actions} == {(1.0, 3)}
    smallest = checked_owners(profiler).actions[-1]
    assert (smallest.owner, smallest.action) == (OURS, "on_train_batch_end")


def test_parts_add_up_to_the_nanosecond_where_each_look_takes_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(known_loop, "CLOCK", Ticking())
    profiler = fit_with_owners(Own(), tmp_path, actions=4, callbacks=[Slow()])
    shares = {action.name: action.seconds for action in checked_owners(profiler).actions}
    # A wait takes its time and one reading of the clock more; the readings are charged to our own timing.
    assert shares["Slow.on_train_batch_end"] == pytest.approx(4 * MS, abs=3e-6)
    assert shares[f"{OURS}'s timing of these"] == pytest.approx(1e-6 * 40, rel=0.9)
    assert shares["Lightning's loop"] < 1e-4


def test_loggers_that_lightning_calls_without_an_action_are_owners(tmp_path: Path) -> None:
    class Logs(KnownModule):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.log("loss", 1.0)
            return self.loss()

    logger = SlowLogger()
    monitor = LearningRateMonitor()  # which calls the logger itself: that is not its own time
    profiler = fit_with_owners(Logs(), tmp_path, actions=4, callbacks=[monitor], logger=[logger], log_every_n_steps=2)
    # The logger logs in every second step.
    shares = {action.name: (action.in_steps, action.calls) for action in checked_owners(profiler).actions}
    assert shares_ms(profiler) == {"SlowLogger.save": 32.0, "SlowLogger.log_metrics": 32.0}
    assert shares == {"SlowLogger.save": (2, 0.5), "SlowLogger.log_metrics": (2, 1.0)}
    assert vars(logger).keys() == vars(SlowLogger()).keys()  # its methods are its own again


class Waiting(SimpleProfiler):
    """A profiler of the user's that takes its time."""

    def stop(self, action_name: str) -> None:
        super().stop(action_name)
        if action_name.endswith("on_train_batch_start"):
            spend("profiler", 5 * MS)


def test_beside_a_profiler_of_the_users(tmp_path: Path) -> None:
    theirs = Waiting()
    profiler = fit_with_owners(Own(), tmp_path, actions=2, beside=theirs)
    shares = shares_ms(profiler)
    assert {"Own.optimizer_step": 16.0, "Own.on_train_batch_start": 8.0}.items() <= shares.items()
    # Its stop() is called after every hook of that name: the module's, the strategy's.
    assert shares["Waiting.stop"] % 5 == 0 < shares["Waiting.stop"]
    assert not {"start", "stop"} & vars(theirs).keys()


def test_an_accumulated_step_adds_up_its_batches(tmp_path: Path) -> None:
    """An epoch ends amid the steps, and is in none of them."""

    class Turns(Slow):
        def on_train_epoch_end(self, *_: Any) -> None:
            spend("between", 100 * MS)

    profiler = fit_with_owners(
        Own(), tmp_path, actions=2, data=SlowStream(12), callbacks=[Turns()], accumulate_grad_batches=3
    )
    assert shares_ms(profiler) == {
        "Own.on_train_batch_start": 24.0,
        "Own.optimizer_step": 16.0,
        "Turns.on_train_batch_end": 12.0,
        "Turns.on_after_backward": 6.0,
        "Turns.on_train_batch_start": 3.0,
    }


def test_owners_under_manual_optimization_with_validation(tmp_path: Path) -> None:
    class Manual(known_loop.Evaluated):
        automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss())
            optimizer.step()

        def on_validation_batch_end(self, *_: Any) -> None:
            spend("outside", 100 * MS)

    loaders: dict[str, Any] = {"data": SlowLoader(40), "val_dataloaders": SlowLoader(2, "outside")}
    profiler = fit_with_owners(Manual(), tmp_path, actions=4, callbacks=[Slow()], val_check_interval=2, **loaders)
    shares = shares_ms(profiler)
    assert shares == {"Slow.on_train_batch_end": 4.0, "Slow.on_after_backward": 2.0, "Slow.on_train_batch_start": 1.0}


def test_a_run_that_dies_in_the_stage_counts_only_whole_steps(tmp_path: Path) -> None:
    class Dies(Slow):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            spend("callback", 1 * MS)
            if batch_idx == 5:
                raise ValueError("enough")

    profiler, logger = make_profiler(warmup=1, measure=2, actions=9), CSVLogger(tmp_path)
    with pytest.raises(ValueError, match="enough"):
        profiled_fit(KnownModule(), tmp_path, callbacks=[Dies()], profiler=profiler, logger=logger)
    record = read_run(profiler.folder)
    assert record.other_by_owner.steps == record.steps["actions"] == 2
    assert record.other_by_owner.seconds == pytest.approx(7 * MS)
    assert not {"log_metrics", "save"} & vars(logger).keys()


def test_nothing_of_the_trainer_is_wrapped_before_the_stage_or_after_it(tmp_path: Path) -> None:
    seen: dict[int, set[str]] = {}

    class Looks(Callback):
        def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
            things = (trainer._logger_connector, trainer.fit_loop.epoch_loop, *trainer.loggers)
            seen[batch_idx] = {name for each in things for name in vars(each) if callable(getattr(type(each), name, 0))}
            profile: Any = trainer.profiler.profile
            seen[batch_idx] |= {type(span).__name__ for span in profile.__self__.values()} & {"OwnedSpan"}

    profiler = make_profiler(warmup=1, measure=3, memory=1, actions=2)
    profiled_fit(KnownModule(), tmp_path, callbacks=[Looks()], profiler=profiler, logger=CSVLogger(tmp_path))
    stages = [row.stage for row in read_steps(profiler.folder / "steps.csv")]
    assert stages == ["warmup"] + ["measure"] * 3 + ["actions"] * 3 + ["memory"]
    assert [bool(seen[step]) for step in range(len(stages))] == [stage == "actions" for stage in stages]


def test_a_mock_for_a_logger_keeps_its_methods(tmp_path: Path) -> None:
    mocked = MagicMock(spec=CSVLogger(tmp_path), save_dir=str(tmp_path), log_dir=str(tmp_path), version=0)
    mocked.name = "mock"
    profiler = make_profiler(warmup=1, measure=2, actions=2, stop_when_done=False)
    before = set(vars(mocked))
    known_loop.trainer_with([profiler], tmp_path, logger=mocked, max_steps=9).fit(KnownModule(), SlowLoader())
    assert set(vars(mocked)) == before
    mocked.log_metrics({})  # a Mock whose method was deleted has none any more
    assert read_run(profiler.folder).notes == []


class EveryFifth(Callback):
    """Works for 30 ms after each fifth batch."""

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if trainer.global_step % 5 == 0:
            spend("hook", 30 * MS)


def test_a_pattern_of_five_steps_is_timed_in_whole_periods(tmp_path: Path) -> None:
    profiler = make_profiler(warmup=2, measure=20, actions=3)
    profiled_fit(KnownModule(), tmp_path, callbacks=[EveryFifth()], profiler=profiler)
    assert shares_ms(profiler) == {"EveryFifth.on_train_batch_end": 6.0}
    record = read_run(profiler.folder)
    assert record.other_by_owner.steps == 5
    # Steps 23 to 27 are timed; step 30, a slow one, is followed line by line.
    assert record.steps["actions"] == 8
    # The times are made up, so real ones, of other programs or of the lines that are followed, must not count.
    without_real_times = {"contention": None, "python_times": [], "outer_calls": []}
    findings = findings_of(record.model_copy(update=without_real_times))
    owners = [finding.owner for finding in findings if finding.phase == "other"]
    assert owners == ["EveryFifth.on_train_batch_end"]


@pytest.mark.parametrize("max_steps", [27, 33])
def test_a_loop_too_short_for_whole_periods_keeps_its_other_stages(tmp_path: Path, max_steps: int) -> None:
    profiler = make_profiler(warmup=2, measure=20, actions=3, memory=1)
    profiled_fit(KnownModule(), tmp_path, callbacks=[EveryFifth()], profiler=profiler, max_steps=max_steps)
    record = read_run(profiler.folder)
    assert record.steps["memory"] == 1
    assert record.steps["actions"] == (4 if max_steps == 27 else 8)


@pytest.mark.parametrize("measured", range(20, 25))
def test_the_step_that_is_followed_line_by_line_is_a_slow_one(measured: int) -> None:
    slow = [number % 5 == 3 for number in range(100)]
    step_s = [0.1 if is_slow else 0.05 for is_slow in slow]
    steps = action_steps_of_pattern(3, step_s[:measured])
    assert (steps.timed, steps.period) == (5, 5)
    assert slow[measured + steps.before_lines]
    assert steps.planned <= 10
    assert action_steps_of_pattern(3, [0.05] * measured) == ActionSteps(3, 3)


def test_an_evaluation(tmp_path: Path) -> None:
    class Hooks(known_loop.Evaluated):
        def on_test_batch_end(self, *_: Any) -> None:
            spend("hook", 3 * MS)

    profiler = make_profiler(warmup=1, measure=2, actions=2, verb="test")
    known_loop.trainer_with([profiler], tmp_path).test(Hooks(), SlowLoader())
    assert shares_ms(profiler) == {"Hooks.on_test_batch_end": 3.0}


def test_a_failure_of_the_instrument_is_a_note(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    with fault_in(Owners.enter, RuntimeError("no owner")):
        profiler = profiled_fit(
            KnownModule(), tmp_path, profiler=make_profiler(warmup=1, measure=2, memory=1, actions=2), logger=logger
        )
    record = read_run(profiler.folder)
    assert (record.status, record.steps["memory"]) == ("ok", 1)
    assert record.other_by_owner is None
    (note,) = record.notes
    assert note.startswith("actions failed")
    assert "RuntimeError" in note
    assert not {"log_metrics", "save"} & vars(logger).keys()
