"""What surrounds a training and what holds it: other profilers, copies and pickles, streams, folders, Ctrl-C."""

import copy
import io
import os
import pickle
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from faults import Manual, Tiny, assert_same_weights, called_places, fault_at, fault_in, short_profiler, train_tiny
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.profilers import PyTorchProfiler

from lm_profiler.callbacks import TrainingProfiler
from lm_profiler.callbacks.instruments.memory import MemoryReader
from lm_profiler.record.run_record import read_run
from lm_profiler.record.steps import read_steps

pytestmark = pytest.mark.usefixtures("quiet_trainers", "interrupts_as_before")


@pytest.fixture(autouse=True)
def second_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "second"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def test_a_trace_of_the_user_survives(tmp_path: Path) -> None:
    """Sessions that begin and end amid ours: test_tracer.py."""
    callback = short_profiler()
    users = PyTorchProfiler(dirpath=tmp_path, filename="users", schedule=None, export_to_chrome=False)
    train_tiny(tmp_path, [callback], profiler=users)
    assert sum(event.name == "aten::addmm" for event in users.function_events or []) >= 2 * 7
    assert callback.record.time["step"].n == 3
    assert "trace left" in "; ".join(callback.record.notes)


@pytest.mark.parametrize("goes", ["by an exit", "on to the end"])
def test_a_forked_copy_of_the_training_changes_nothing(tmp_path: Path, goes: str) -> None:
    own, callback, states = os.getpid(), short_profiler(), []

    def forks() -> None:
        if copied := os.fork():
            os.waitpid(copied, 0)
            states.append(read_run(callback.folder).status)
        elif goes == "by an exit":
            raise SystemExit

    try:
        train_tiny(tmp_path, [callback], lambda: Tiny({3: forks}))
    finally:
        if os.getpid() != own:
            os._exit(0)
    assert states == ["unfinished"]
    assert (callback.record.status, callback.record.failure) == ("ok", None)


class Copies(Callback):
    """Copies and pickles all that there is after every batch."""

    def __init__(self) -> None:
        self.modules: list[LightningModule] = []
        self.done = 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.modules = [copy.deepcopy(pl_module), pickle.loads(pickle.dumps(pl_module))]
        file = io.BytesIO()
        torch.save(pl_module, file)
        file.seek(0)
        self.modules.append(torch.load(file, weights_only=False))
        for other in (*trainer.optimizers, *(c for c in trainer.callbacks if c is not self)):
            copy.deepcopy(other)
            pickle.loads(pickle.dumps(other))
        copy.copy(trainer.profiler)
        self.done += 1
        for module in self.modules:
            assert_same_weights(module, pl_module)
            module.eval()  # dropout would draw from the training's own numbers
            module.layers(torch.ones(2, 4)).sum().backward()
            assert b"lm_profiler" not in pickle.dumps(module)


@pytest.mark.parametrize("make", [Tiny, Manual])
def test_callbacks_can_be_pickled_at_any_time(tmp_path: Path, make: Callable[[], Tiny]) -> None:
    callback, copies = short_profiler(), Copies()
    module = train_tiny(tmp_path, [copies, callback], make)
    assert copies.done == module.steps
    assert callback.record.status == "ok"
    assert_same_weights(module, train_tiny(tmp_path / "plain", [], make, max_steps=module.steps))


def spoiling_callback(callback: TrainingProfiler, spoil: Callable[[Path], None]) -> Callback:
    """Does something to the run's folder in its third batch."""

    def end_batch(trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            spoil(callback.folder)

    return LambdaCallback(on_train_batch_end=end_batch)


def _replaced_by_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


@pytest.mark.parametrize("spoil", [shutil.rmtree, _replaced_by_a_file, None])
def test_a_folder_that_goes_away_or_cannot_be_made_has_a_second_place(
    tmp_path: Path, second_place: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], None] | None
) -> None:
    if spoil is None:
        for name in ("lm_profiler", "logs"):
            (tmp_path / name).write_text("a file of this name")
    callback = short_profiler()
    module = train_tiny(tmp_path, [*([spoiling_callback(callback, spoil)] if spoil else []), callback])
    assert callback.folder.is_relative_to(second_place)
    assert str(callback.folder) in capsys.readouterr().err
    assert read_run(callback.folder) == callback.record
    assert len(read_steps(callback.folder / "steps.csv")) == 9
    assert_same_weights(module, train_tiny(tmp_path / "plain", [], max_steps=module.steps))


class Refuses(io.StringIO):
    """A stream that takes nothing."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def closed_stream() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


def full_disk() -> Any:
    return Path("/dev/full").open("w", encoding="ascii")


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize(
    "make_stream",
    [lambda: None, closed_stream, Refuses, full_disk],
    ids=["no stream", "closed", "broken pipe", "full disk"],
)
def test_training_survives_broken_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_stream: Callable[[], Any]
) -> None:
    out, err = make_stream(), make_stream()
    with monkeypatch.context() as context, fault_in(MemoryReader.end):  # so that there is a message to print
        context.setattr(sys, "stdout", out)
        context.setattr(sys, "stderr", err)
        callback = short_profiler()
        module = train_tiny(tmp_path, [callback])
    for stream in (out, err):
        if stream is not None and not stream.closed:
            stream.flush()  # raises if something of ours waits in it
            stream.close()
    assert_same_weights(module, train_tiny(tmp_path / "plain", [], max_steps=module.steps))
    assert callback.record.status == "ok"


def test_ctrl_c_at_the_end_of_a_run_loses_no_step(tmp_path: Path) -> None:
    """Ctrl-C in each of the calls around the beginning of the end, and in every 56th of those that follow.

    A training takes half as long without a trace: it has one only if the call needs it.
    """
    calls = list(called_places(lambda: train_tiny(tmp_path / "calls", [short_profiler()])))
    called_without_trace = called_places(lambda: train_tiny(tmp_path / "untraced", [short_profiler(trace_steps=0)]))
    names = [code.co_qualname if sys.version_info >= (3, 11) else code.co_name for code, _ in calls]
    finish = next(number for number, name in enumerate(names) if name.endswith("finish"))
    before_finish, after_finish = calls[finish - 6 : finish], calls[finish : finish + 12] + calls[finish + 12 :: 56]
    lost = []
    for number, place in enumerate([*before_finish, *after_finish]):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        callback = short_profiler(trace_steps=0 if place in called_without_trace else 1)
        is_ended_by_lightning = False
        with fault_at(place, KeyboardInterrupt()) as raised:
            try:
                train_tiny(tmp_path / str(number), [callback])
            except SystemExit:
                is_ended_by_lightning = True
        # What a verdict asks for depends on the times: not every run comes to each call.
        assert is_ended_by_lightning == bool(raised)
        record = read_run(callback.folder)
        rows = read_steps(callback.folder / "steps.csv")
        fewest_rows = 5 if number < len(before_finish) else 7
        if record.status not in ("ok", "interrupted") or len(rows) < fewest_rows or not record.time:
            lost.append(f"{raised}: {record.status}, {len(rows)} steps")
    assert not lost


class Unreadable(Exception):
    def __str__(self) -> str:
        raise LookupError("no message")


def test_an_error_without_a_message_is_recorded(tmp_path: Path):
    """It is raised in the fourth step."""
    callback = short_profiler()
    with pytest.raises(Unreadable):
        train_tiny(tmp_path, [callback], lambda: Tiny({3: Mock(side_effect=Unreadable())}))
    failure = read_run(callback.folder).failure
    assert (failure.type, failure.phase, failure.step) == ("Unreadable", "forward", 4)
    assert "LookupError" in failure.message


def test_control_characters_of_an_error_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    colours = ValueError("\x1b[31mred\x9b2J")
    with pytest.raises(ValueError, match="red"):
        train_tiny(tmp_path, [short_profiler()], lambda: Tiny({3: Mock(side_effect=colours)}))
    printed = "".join(capsys.readouterr())
    assert r"\x1b[31mred\x9b2J" in printed
    assert not {"\x1b", "\x9b"} & set(printed)
