"""The instruments report what is known to be true of a loop, in every way that Lightning can run one."""

import pickle
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import known_loop
import pytest
import torch
from known_loop import (
    TOKENS_IN_A_BATCH,
    TRUTH_S,
    WAITED_S,
    Evaluated,
    KnownModule,
    SlowLoader,
    SlowSGD,
    SlowStream,
    assert_times,
    assert_waited,
    make_profiler,
    measured_rows,
    profiled_fit,
    spend,
    trainer_with,
)
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from lm_profiler.record.run_record import read_run
from lm_profiler.record.steps import read_steps


@pytest.fixture(autouse=True)
def _simulated_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_loop, "CLOCK", known_loop.SimulatedClock())


A_BATCH = ("data", "transfer", "forward", "backward")
GRADIENTS = ("forward", "zero_grad", "backward", "clip")
EVALUATION_S = {phase: TRUTH_S[phase] for phase in ("data", "transfer", "forward")}


def times(factor: int, phases: tuple[str, ...]) -> dict[str, float]:
    return {**TRUTH_S, **{phase: factor * TRUTH_S[phase] for phase in phases}}


@pytest.mark.parametrize("clock", [time.thread_time_ns, None], ids=["this thread's", "simulated"])
def test_each_phase_of_a_plain_loop(tmp_path: Path, clock: Callable[[], int] | None, monkeypatch: pytest.MonkeyPatch):
    """Also on a real clock: that of this thread, which stands while other processes have the CPU."""
    if clock is not None:
        monkeypatch.setattr(known_loop, "CLOCK", clock)
    profiler = profiled_fit(KnownModule(), tmp_path)
    record = assert_times(profiler, TRUTH_S)
    rows = measured_rows(profiler)[record.stretch]
    assert record.time["forward_backward"].max == pytest.approx(
        max(row.time("forward") + row.time("backward") for row in rows), abs=2e-9
    )
    assert [row.step for row in read_steps(profiler.folder / "steps.csv")] == list(range(1, 14))
    assert record.throughput.tokens_per_step == TOKENS_IN_A_BATCH
    assert record.throughput.tokens_per_s == pytest.approx(TOKENS_IN_A_BATCH / record.time["step"].mean)


def test_an_epoch_that_ends_amid_accumulation_steps_with_what_it_has(tmp_path: Path) -> None:
    module, data = KnownModule(), SlowLoader(6)
    profiler = make_profiler(warmup=0, measure=4)
    profiled_fit(module, tmp_path, data, profiler=profiler, accumulate_grad_batches=4)
    rows = measured_rows(profiler)
    assert [row.tokens for row in rows] == [4 * TOKENS_IN_A_BATCH, 2 * TOKENS_IN_A_BATCH] * 2
    for part in A_BATCH:
        assert_waited(rows, part, [4, 2] * 2)
    assert_waited(rows, "optimizer", [1] * 4)
    assert read_run(profiler.folder).model.accumulate_grad_batches == 4


class Manual(KnownModule):
    """Two optimizers."""

    closures = False
    unwrapped = False

    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [SlowSGD(self.parameters()) for _ in range(2)]

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        spend("clip")

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for optimizer in self.optimizers(use_pl_optimizer=not self.unwrapped):
            if self.closures:
                optimizer.step(closure=lambda optimizer=optimizer: self.gradients(optimizer))
            else:
                self.gradients(optimizer)
                optimizer.step()

    def gradients(self, optimizer: Any) -> Tensor:
        spend("forward")
        loss = self.loss()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=1.0)
        return loss


@pytest.mark.parametrize("unwrapped", [False, True], ids=["wrapped", "unwrapped"])
@pytest.mark.parametrize("closures", [False, True], ids=["bare", "closure"])
def test_manual_optimization_with_two_optimizers(tmp_path: Path, closures: bool, unwrapped: bool) -> None:
    module = Manual()
    module.closures, module.unwrapped = closures, unwrapped
    profiler = make_profiler(warmup=1, measure=5)
    trainer = trainer_with([profiler], tmp_path)
    trainer.fit(module, SlowLoader())
    waits = {**dict.fromkeys((*GRADIENTS, "optimizer"), 2), "forward": 4}
    truth = {phase: waits.get(phase, 1) * seconds for phase, seconds in TRUTH_S.items()}
    assert_times(profiler, truth, measure=5, waits=waits)
    assert trainer.fit_loop.epoch_loop.batch_progress.total.completed == 6


class ManualWithTorchsClipping(Manual):
    """Calls torch's function, which asks for parameters while it clips."""

    imports_name = False
    stored = partial(clip_grad_norm_, max_norm=1.0)

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError

    def gradients(self, optimizer: Any) -> Tensor:
        spend("forward")
        loss = self.loss()
        optimizer.zero_grad()
        self.manual_backward(loss)
        clip = clip_grad_norm_ if self.imports_name else torch.nn.utils.clip_grad_norm_
        clip(self.slow_parameters(), 1.0)
        pickle.dumps([clip, self.stored])
        return loss

    def slow_parameters(self) -> Iterator[Tensor]:
        spend("clip")
        yield from self.parameters()


def assert_clipping_is_timed(tmp_path: Path, imports_name: bool) -> None:
    module = ManualWithTorchsClipping()
    module.imports_name = imports_name
    profiler = make_profiler(warmup=1, measure=5)
    trainer_with([profiler], tmp_path).fit(module, SlowLoader())
    waits = {**dict.fromkeys((*GRADIENTS, "optimizer"), 2), "forward": 4}
    truth = {phase: waits.get(phase, 1) * seconds for phase, seconds in TRUTH_S.items()}
    assert_times(profiler, truth, measure=5, waits=waits)


@pytest.mark.parametrize("imports_name", [False, True])
def test_manual_optimization_with_torchs_clipping(tmp_path: Path, imports_name: bool) -> None:
    clip = torch.nn.utils.clip_grad_norm_
    assert_clipping_is_timed(tmp_path, imports_name)
    assert torch.nn.utils.clip_grad_norm_ is clip
    assert clip_grad_norm_ is clip


def test_clipping_that_a_program_has_put_in_place_of_torchs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partial has no name of its own."""
    programs_own = partial(clip_grad_norm_, norm_type=2.0)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", programs_own)
    assert_clipping_is_timed(tmp_path, imports_name=False)
    assert torch.nn.utils.clip_grad_norm_ is programs_own


@torch.compile(backend="eager", fullgraph=True)
def compiled_clipping(parameters: list[Tensor]) -> None:
    clip_grad_norm_(parameters, 1.0)


def test_a_compiled_function_that_clips_is_compiled_as_without_us(tmp_path: Path) -> None:
    class CompiledClipping(Manual):
        def gradients(self, optimizer: Any) -> Tensor:
            loss = self.loss()
            self.manual_backward(loss)
            compiled_clipping(list(self.parameters()))
            return loss

    trainer = trainer_with([make_profiler(warmup=1, measure=5)], tmp_path)
    trainer.fit(CompiledClipping(), SlowLoader())
    assert trainer.fit_loop.epoch_loop.batch_progress.total.completed == 6


def test_under_manual_optimization_each_batch_is_a_step(tmp_path: Path) -> None:
    class EveryOther(Manual):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            if batch_idx % 2:
                super().training_step(batch, batch_idx)

    rows = measured_rows(profiled_fit(EveryOther(), tmp_path, profiler=make_profiler(warmup=0, measure=6)))
    for part in ("zero_grad", "backward", "clip", "optimizer"):
        assert_waited(rows, part, [0, 2] * 3)


class Closures(SlowSGD):
    """Like LBFGS: it evaluates its closure more than once."""

    def step(self, closure: Any = None) -> Any:
        # Not through super().step: torch calls the hooks around each step() of the chain.
        loss = [closure() for _ in range(3)][-1]
        for _ in range(9):
            spend("optimizer")
        return loss


def test_an_optimizer_that_evaluates_its_closure_three_times(tmp_path: Path) -> None:
    class Thrice(KnownModule):
        def configure_optimizers(self) -> Any:
            return Closures(self.parameters())

        def on_train_batch_end(self, *args: Any) -> None:
            spend("other", 15e-3)

    profiler = profiled_fit(Thrice(), tmp_path, profiler=make_profiler(warmup=1, measure=5))
    waits = {**dict.fromkeys(GRADIENTS, 3), "optimizer": 9}
    truth = {phase: waits.get(phase, 1) * seconds for phase, seconds in TRUTH_S.items()}
    assert_times(profiler, {**truth, "other": 15e-3}, measure=5, waits=waits)


def test_an_optimizer_made_of_another_one_is_one_optimizer(tmp_path: Path) -> None:
    """torch calls an optimizer's hooks around the inner step() as well, which is not the end of the outer one."""

    class More(SlowSGD):
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            spend("optimizer")
            return loss

    class Extended(KnownModule):
        def configure_optimizers(self) -> Any:
            SlowSGD(self.parameters())  # from the first one on, the hooks are in this class's step() too
            return More(self.parameters())

    profiler = profiled_fit(Extended(), tmp_path, profiler=make_profiler(warmup=1, measure=5))
    assert_times(profiler, times(2, ("optimizer",)), measure=5, waits={"optimizer": 2})


class PerturbsFirst(SlowSGD):
    """Like SAM: it works before its closure and after it."""

    def step(self, closure: Any = None) -> Any:
        spend("optimizer", 6e-3)
        return super().step(closure)


class ClosureInTheMiddle(KnownModule):
    """The same code under automatic and manual optimization."""

    def __init__(self, automatic: bool) -> None:
        super().__init__()
        self.automatic_optimization = automatic

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.automatic_optimization:
            return self.loss()
        optimizer = self.optimizers()
        optimizer.step(lambda: self.gradients(optimizer))
        return torch.tensor(0.0)

    def gradients(self, optimizer: Any) -> Tensor:
        loss = self.loss()
        optimizer.zero_grad()
        self.manual_backward(loss)
        return loss

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """No clipping: under manual optimization Lightning refuses it."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return PerturbsFirst(self.parameters())


@pytest.mark.parametrize("automatic", [True, False], ids=["automatic", "manual"])
def test_the_optimizer_phase_is_its_step_without_the_closure(tmp_path: Path, automatic: bool) -> None:
    profiler = profiled_fit(ClosureInTheMiddle(automatic), tmp_path, profiler=make_profiler(warmup=1, measure=5))
    truth = {**TRUTH_S, "optimizer": 6e-3 + TRUTH_S["optimizer"], "clip": 0.0}
    assert_times(profiler, truth, measure=5, waits={"optimizer": 2})


@pytest.mark.parametrize("bare", [True, False], ids=["of the tensor", "of torch.autograd"])
def test_a_backward_pass_that_the_user_calls_himself_is_backward(tmp_path: Path, bare: bool) -> None:
    plain = torch.autograd.backward

    class Backward(ClosureInTheMiddle):
        def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            if bare:
                loss.backward()
            else:
                torch.autograd.backward([loss])

    class Unmarked(Backward):
        """Calls no method of Lightning's: ``manual_backward`` would be marked."""

        def gradients(self, optimizer: Any) -> Tensor:
            loss = self.loss()
            optimizer.zero_grad()
            Backward.manual_backward(self, loss)
            return loss

    profiler = profiled_fit(Unmarked(automatic=False), tmp_path, profiler=make_profiler(warmup=1, measure=5))
    truth = {**TRUTH_S, "optimizer": 6e-3 + TRUTH_S["optimizer"], "clip": 0.0}
    record = assert_times(profiler, truth, measure=5, waits={"optimizer": 2})
    assert torch.autograd.backward is plain
    assert not any("backward" in note for note in record.notes)


def test_a_backward_pass_without_a_mark_is_noted(tmp_path: Path) -> None:
    class ByGradients(ClosureInTheMiddle):
        def gradients(self, optimizer: Any) -> Tensor:
            loss = self.loss()
            (self.weight.grad,) = torch.autograd.grad(loss, [self.weight])
            return loss

    record = profiled_fit(ByGradients(automatic=False), tmp_path, profiler=make_profiler(warmup=1, measure=5)).record
    assert record.time["backward"].max == 0.0
    (note,) = [note for note in record.notes if "backward" in note]
    assert "torch.autograd.grad" in note


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")
def test_a_training_step_that_returns_none_has_no_backward(tmp_path: Path) -> None:
    class Skips(KnownModule):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx % 3 == 1 else loss

    rows = measured_rows(profiled_fit(Skips(), tmp_path, profiler=make_profiler(warmup=0, measure=9)))
    assert_waited(rows, "backward", [1, 0, 1] * 3)
    assert_waited(rows, "forward", [1] * 9)
    assert_waited(rows, "optimizer", [1] * 9)


def test_validation_amid_an_accumulated_step_is_in_no_step(tmp_path: Path) -> None:
    profiler = profiled_fit(
        Evaluated(),
        tmp_path,
        profiler=make_profiler(warmup=1, measure=3),
        val_dataloaders=SlowLoader(3, "outside"),
        val_check_interval=2,
        accumulate_grad_batches=4,
    )
    assert_times(profiler, times(4, A_BATCH), measure=3, waits=dict.fromkeys(A_BATCH, 4))


def test_checkpoints_and_validations_between_steps_are_counted(tmp_path: Path) -> None:
    """Saved in the hook after every second batch, which is amid a step, and after each validation, which is in none."""

    class Saves(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step % 2 == 0:
                trainer.save_checkpoint(tmp_path / "a.ckpt")

        def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "b.ckpt")

    class SlowToSave(Evaluated):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            spend("other", 10e-3)

    profiler = profiled_fit(
        SlowToSave(),
        tmp_path,
        callbacks=[Saves()],
        profiler=make_profiler(warmup=1, measure=12),
        val_dataloaders=SlowLoader(3, "outside"),
        val_check_interval=4,
    )
    between = {pause.what: pause for pause in read_run(profiler.folder).between}
    assert between["checkpoint"].times == 6 + 3
    assert between["checkpoint"].seconds == pytest.approx(9 * 10e-3)
    assert between["validation"].times == 3
    assert len(WAITED_S["outside"]) == 3 * 3 * len(EVALUATION_S)
    assert between["validation"].seconds == pytest.approx(sum(WAITED_S["outside"]))


def test_a_stream_without_length_is_fetched_ahead(tmp_path: Path) -> None:
    profiler = profiled_fit(KnownModule(), tmp_path, DataLoader(SlowStream(), batch_size=None))
    assert_times(profiler, TRUTH_S, fetched_ahead=1)


def test_an_epoch_boundary_is_in_no_step(tmp_path: Path) -> None:
    class SlowTurn(KnownModule):
        def on_train_epoch_start(self) -> None:
            spend("outside", 20e-3)

        def on_train_epoch_end(self) -> None:
            spend("outside", 30e-3)

    profiler = profiled_fit(SlowTurn(), tmp_path, SlowLoader(3), profiler=make_profiler(warmup=1, measure=11))
    record = assert_times(profiler, TRUTH_S)
    # Twelve steps in epochs of three: three turns between the measured ones.
    assert record.between_steps_s == pytest.approx(3 * 50e-3)
    assert [(pause.what, pause.times) for pause in record.between] == [("epoch", 3)]
    assert record.between[0].seconds == pytest.approx(3 * 50e-3)


def test_hooks_amid_the_phases_are_other(tmp_path: Path) -> None:
    """Those of a module, of its data, and of a callback, which Lightning calls inside its backward and transfer too."""

    class Hooked(KnownModule):
        transfer_batch_to_device = LightningModule.transfer_batch_to_device

        def on_after_backward(self) -> None:
            spend("other", 5e-3)

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
            optimizer.step(closure=closure)
            spend("other", 6e-3)

    class Data(LightningDataModule):
        def train_dataloader(self) -> Any:
            return SlowLoader()

        def on_before_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
            spend("other", 2e-3)
            return batch

        def transfer_batch_to_device(self, batch: Tensor, device: torch.device, dataloader_idx: int) -> Tensor:
            spend("transfer")
            return batch

        def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
            spend("other", 7e-3)
            return batch

    class SlowHooks(Callback):
        def on_before_backward(self, *args: Any) -> None:
            spend("other", 2e-3)

        def on_after_backward(self, *args: Any) -> None:
            spend("other", 7e-3)

        def on_before_zero_grad(self, *args: Any) -> None:
            spend("other", 1e-3)

        def on_before_optimizer_step(self, *args: Any) -> None:
            spend("other", 4e-3)

    profiler = profiled_fit(Hooked(), tmp_path, Data(), callbacks=[SlowHooks()])
    assert_times(profiler, {**TRUTH_S, "other": 34e-3}, waits={"other": 8})


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_the_other_verbs_time_the_forward_pass(tmp_path: Path, verb: str) -> None:
    profiler = make_profiler(verb=verb)
    trainer = trainer_with([profiler], tmp_path)
    getattr(trainer, verb)(Evaluated(), SlowLoader(), **({} if verb == "predict" else {"verbose": False}))
    record = assert_times(profiler, EVALUATION_S)
    assert record.verb == verb
    assert [row.tokens for row in measured_rows(profiler)] == [TOKENS_IN_A_BATCH] * 11
