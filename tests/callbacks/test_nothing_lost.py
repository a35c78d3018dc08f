"""However a run dies, what it finished is on disk, and the record names the place."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from failing import GivesUp
from known_loop import make_profiler, trainer_with
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.profilers import SimpleProfiler
from scripts import SUPPORT
from warm import run_python

from lm_profiler.callbacks import TrainingProfiler
from lm_profiler.callbacks.failures import status_of
from lm_profiler.measure.boundary import first_line
from lm_profiler.measure.clocks.stream import EventStream
from lm_profiler.record.quantities import PHASES
from lm_profiler.record.run_record import read_run
from lm_profiler.record.steps import read_steps


def device_full() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has a total capacity of ...")


def host_full() -> None:
    torch.empty(1 << 60)  # an exbibyte and more: the CPU allocator refuses


def bug() -> None:
    raise KeyError("wrong")


def interrupt() -> None:
    raise KeyboardInterrupt


pytestmark = pytest.mark.usefixtures("interrupts_as_before")


def fit_that_dies(
    module: BoringModel,
    folder: Path,
    expected: type[BaseException],
    callbacks: tuple[Callback, ...] = (),
    **options: Any,
) -> tuple[TrainingProfiler, Trainer]:
    profiler, users = make_profiler(warmup=1, measure=5, memory=1), SimpleProfiler()
    trainer = trainer_with([*callbacks, profiler], folder, profiler=users, **options)
    with pytest.raises(expected):
        trainer.fit(module)
    assert trainer.profiler is users
    return profiler, trainer


def assert_recorded(
    profiler: TrainingProfiler, status: str, phase: str, steps: int, step: int | None, kind: str
) -> None:
    record = read_run(profiler.folder)
    assert record == profiler.record
    assert record.status == status
    assert (record.failure.phase, record.failure.step, record.failure.type) == (phase, step, kind)
    rows = read_steps(profiler.folder / "steps.csv")
    assert [row.step for row in rows] == list(range(1, steps + 1))
    assert [row.stage for row in rows] == (["warmup"] + ["measure"] * 5)[:steps]
    assert record.steps == {
        "warmup": min(steps, 1),
        "measure": max(steps - 1, 0),
        "actions": 0,
        "memory": 0,
        "trace": 0,
    }
    assert not [path for path in profiler.folder.rglob("*") if path.name.startswith(".")]


@pytest.mark.parametrize(
    "phase, fail, status, error",
    [
        *[(phase, bug, "failed", KeyError) for phase in PHASES],
        ("forward", device_full, "oom", torch.OutOfMemoryError),
        ("backward", host_full, "oom", RuntimeError),
        ("optimizer", interrupt, "interrupted", KeyboardInterrupt),
    ],
)
def test_a_run_that_dies_in_a_phase(
    tmp_path: Path, phase: str, fail: Callable[[], None], status: str, error: type[BaseException]
) -> None:
    # Lightning turns an interrupt into an exit.
    raised = SystemExit if error is KeyboardInterrupt else error
    profiler, _ = fit_that_dies(GivesUp(phase, fail), tmp_path, raised)
    assert_recorded(profiler, status, phase, steps=3, step=4, kind=error.__name__)


@pytest.mark.parametrize(
    "make, options, phase, steps, step",
    [
        (lambda: GivesUp("data", bug, batch=1), {}, "data", 0, 1),
        (lambda: GivesUp("optimizer", bug, batch=1), {}, "optimizer", 0, 1),
        (lambda: GivesUp("setup", bug, batch=1), {}, "setup", 0, None),
        (lambda: GivesUp("end of a batch", bug), {}, "other", 4, 5),  # the step was done
        (lambda: GivesUp("backward", bug, batch=6), {"accumulate_grad_batches": 2}, "backward", 2, 3),
        (lambda: FailsToValidate(), {"val_check_interval": 3}, "other", 3, 4),
        *((lambda phase=phase: Manual(phase, bug), {}, phase, 3, 4) for phase in ("backward", "clip", "optimizer")),
    ],
    ids=[
        *("first batch", "first optimizer", "set-up", "end of a batch", "amid accumulation", "validation"),
        *("manual backward", "manual clip", "manual optimizer"),
    ],
)
def test_a_run_that_dies_elsewhere(
    make: Callable[[], BoringModel], options: dict[str, Any], phase: str, steps: int, step: int | None, tmp_path: Path
) -> None:
    profiler, _ = fit_that_dies(make(), tmp_path, KeyError, **options)
    assert_recorded(profiler, "failed", phase, steps=steps, step=step, kind="KeyError")


class FailsToValidate(BoringModel):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        bug()


@pytest.mark.parametrize("where", ["forward", "optimizer", "end of a batch"])
def test_an_error_in_the_last_planned_step_is_not_swallowed(tmp_path: Path, where: str) -> None:
    profiler = make_profiler(warmup=0, measure=4)
    with pytest.raises(KeyError):
        trainer_with([profiler], tmp_path).fit(GivesUp(where, bug, batch=4))
    if where != "end of a batch":  # the step itself was done then
        assert profiler.record.status == "failed"
        assert len(read_steps(profiler.folder / "steps.csv")) == 3


class Device(EventStream):
    """One whose every call fails once it is dead, as CUDA's do."""

    dead = False

    def __init__(self, device: torch.device) -> None:
        self._device, self._free, self._current = device, [], lambda: None
        self.capturing = lambda: False

    class Event:
        def __init__(self, **options: Any) -> None: ...

        def record(self, stream: None = None) -> None:
            if Device.dead:
                raise RuntimeError("CUDA error: raised by an event")

        def query(self) -> bool:
            self.record()
            return True

        def elapsed_time(self, end: Any) -> float:
            self.record()
            return 1.0

    def wait(self) -> None:
        if Device.dead:
            raise RuntimeError("CUDA error: raised while waiting")


@pytest.mark.parametrize("phase", ["transfer", "backward"])
def test_a_device_that_dies_loses_only_device_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str):
    def device_side_assert() -> None:
        monkeypatch.setattr(Device, "dead", True)
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch, "Event", Device.Event)
    monkeypatch.setattr("lm_profiler.callbacks.attachment.stream_of", Device)
    profiler, _ = fit_that_dies(GivesUp(phase, device_side_assert), tmp_path, RuntimeError)
    assert_recorded(profiler, "failed", phase, steps=3, step=4, kind="RuntimeError")
    assert "device-side assert" in profiler.record.failure.message


class Manual(GivesUp):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)["loss"]
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer)
        optimizer.step()

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        self.at("clip")


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_the_other_verbs(tmp_path: Path, verb: Any) -> None:
    class Fails(BoringModel):
        def any_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == 3:
                device_full()
            return torch.zeros(1)

        validation_step = test_step = predict_step = any_step

    profiler = make_profiler(warmup=1, measure=5, memory=1, verb=verb)
    trainer = trainer_with([profiler], tmp_path)
    with pytest.raises(torch.OutOfMemoryError):
        getattr(trainer, verb)(Fails())
    assert_recorded(profiler, "oom", "forward", steps=3, step=4, kind="OutOfMemoryError")


def test_an_error_while_tracing_keeps_the_measured_steps(tmp_path: Path) -> None:
    profiler = make_profiler(warmup=1, measure=2, trace=2)
    with pytest.raises(KeyError):
        trainer_with([profiler], tmp_path).fit(GivesUp("backward", bug, batch=5))
    assert profiler.record.time["step"].n == 2
    assert profiler.record.steps == {"warmup": 1, "measure": 2, "actions": 0, "memory": 0, "trace": 1}
    assert not list(profiler.folder.rglob("*.trace.json.gz"))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):  # it left none running
        pass


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal(tmp_path: Path, name: str) -> None:
    run_python(str(SUPPORT / "failing.py"), str(tmp_path), name)  # whose exit code is Lightning's: 0 after SIGTERM
    (folder,) = (tmp_path / "logs" / "lm_profiler").iterdir()
    record = read_run(folder)
    assert record.status == "interrupted"
    # Lightning lets the step end after SIGTERM; SIGINT raises KeyboardInterrupt at once.
    finished = 4 if name == "SIGTERM" else 3
    assert record.failure.step == finished + 1
    assert record.failure.phase == ("other" if name == "SIGTERM" else "forward")
    assert len(read_steps(folder / "steps.csv")) == finished


def test_the_status_of_each_exception() -> None:
    assert status_of(MemoryError()) == "oom"
    assert status_of(RuntimeError("DefaultCPUAllocator: not enough memory")) == "oom"
    assert status_of(RuntimeError("shapes cannot be multiplied")) == "failed"
    assert status_of(ValueError("out of memory")) == "failed"
    assert first_line(ValueError("\n first\nsecond")) == "first"
    assert first_line(ValueError()) == ""
    assert len(first_line(ValueError("x" * 1000))) == 300
