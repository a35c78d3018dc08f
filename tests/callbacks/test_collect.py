"""What is collected from Trainer, module and machine, and what the record makes of it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from known_loop import make_profiler, trainer_with
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.compile import from_compiled
from raised import refusal
from stored_texts import assert_stored
from torch import nn

from lm_profiler.callbacks import MemoryOptions, TrainingProfiler
from lm_profiler.callbacks.collect import changeable_settings, model_facts
from lm_profiler.callbacks.instruments.watches import history_watch
from lm_profiler.callbacks.instruments.work import LIMIT_IN_TRAINING_S, LIMIT_S, StepWork
from lm_profiler.callbacks.trainer_loop import TrainerLoop
from lm_profiler.measure.counts.recompiles import is_compiled
from lm_profiler.measure.counts.uncountable import UncountableError
from lm_profiler.measure.device.contention import CpuReading
from lm_profiler.measure.device.environment import MatrixUnits, cpu_cores, matrix_units
from lm_profiler.measure.memory.history import MemoryHistory
from lm_profiler.processes.child import PATIENCE
from lm_profiler.record.run_record import read_run


def two_groups(module: BoringModel, **options: Any) -> list[dict[str, Any]]:
    weight, bias = module.parameters()
    return [{"params": [weight]}, {"params": [bias], **options}]


@pytest.mark.parametrize(
    "make, fused, weight_by_weight",
    [
        (lambda module: torch.optim.Adam(module.parameters()), False, False),
        (lambda module: torch.optim.Adam(module.parameters(), fused=True), True, False),
        (lambda module: torch.optim.Adam(module.parameters(), fused=True, foreach=False), True, False),
        (lambda module: torch.optim.Adam(two_groups(module, foreach=False)), False, True),
        # these cannot be fused
        (lambda module: torch.optim.Adam(module.parameters(), foreach=True), None, False),
        (lambda module: torch.optim.Adam(module.parameters(), differentiable=True), None, False),
        (lambda module: torch.optim.LBFGS(module.parameters()), None, False),
        (lambda module: torch.optim.Adam([nn.Parameter(torch.zeros(4, dtype=torch.complex64))]), None, False),
    ],
)
def test_options_that_an_optimizer_has_on(
    make: Callable[[BoringModel], Any], fused: bool | None, weight_by_weight: bool, tmp_path: Path
) -> None:
    trainer, module = trainer_with([], tmp_path), BoringModel()
    trainer.strategy.connect(module)
    trainer.strategy._optimizers = [make(module)]
    found = changeable_settings(TrainerLoop(trainer))
    assert (found.fused_optimizer, found.weight_by_weight) == (fused, weight_by_weight)


@pytest.mark.parametrize("weight_decay, different", [(0.01, 1), (0.0, 2)])
def test_groups_of_parameters_with_equal_options_are_counted_once(weight_decay: float, different: int, tmp_path: Path):
    trainer, module = trainer_with([], tmp_path), BoringModel()
    trainer.strategy.connect(module)
    trainer.strategy._optimizers = [torch.optim.AdamW(two_groups(module, weight_decay=weight_decay))]
    found = changeable_settings(TrainerLoop(trainer))
    assert (found.parameter_groups, found.different_groups) == (2, different)


def test_switches_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trainer, module = trainer_with([], tmp_path), BoringModel()
    trainer.strategy.connect(module)
    found = changeable_settings(TrainerLoop(trainer))
    assert (found.compiled, found.checkpointing, found.memory_free_share) == (False, None, None)
    assert found.pin_memory is None  # on the CPU there is nowhere to copy to
    assert found.cores == cpu_cores()
    clipping = trainer_with([], tmp_path, precision="bf16-mixed", gradient_clip_val=1.0)
    clipping.strategy.connect(module)
    clipping.strategy._optimizers = [torch.optim.Adam(module.parameters())]
    assert changeable_settings(TrainerLoop(clipping)).fused_optimizer is None  # Lightning would refuse it
    module._compiler_ctx = {"compiler": "dynamo"}  # what Lightning leaves of torch.compile(module)
    monkeypatch.setattr(type(trainer), "num_devices", cpu_cores())  # processes of a machine share its cores
    found = changeable_settings(TrainerLoop(trainer))
    assert (found.compiled, found.cores) == (True, 1)


@pytest.mark.parametrize("options, is_read", [({}, True), ({"fast_dev_run": True}, False), ({"max_steps": 1}, False)])
def test_rates_are_read_only_where_a_step_was_measured(options: dict[str, Any], is_read: bool, tmp_path: Path):
    """A trial, and a run that ends while it warms up, are compared with nothing: half a second and memory are saved."""
    profiler = make_profiler(warmup=1, measure=2, memory=1)
    with warm.with_rates(flops_per_s=1e11, bytes_per_s=1e10):
        trainer_with([profiler], tmp_path, **options).fit(BoringModel())
    rates = profiler.record.rates
    known = rates is not None and bool(rates.flops and rates.bytes_per_s)
    assert known == is_read
    assert rates is None or is_read or not (rates.flops or rates.bytes_per_s)


@pytest.mark.parametrize("stop_when_done, most_s", [(True, LIMIT_S), (False, LIMIT_IN_TRAINING_S)])
def test_training_that_goes_on_waits_less_for_a_count_in_another_process(
    stop_when_done: bool, most_s: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where cores are busy, a program with a compiled part stood still for up to three minutes."""
    limits_s: list[float] = []

    def count(trainer: object, verb: str, batch: object, limit_s: float) -> StepWork:
        limits_s.append(limit_s)
        raise UncountableError("not counted here")

    monkeypatch.setattr("lm_profiler.callbacks.instruments.work.count_elsewhere", count)
    profiler = make_profiler(warmup=1, measure=2, memory=0, trace=1, stop_when_done=stop_when_done)
    trainer_with([profiler], tmp_path, max_steps=8).fit(BoringModel())
    assert limits_s == [most_s]
    assert most_s * PATIENCE <= (180.0 if stop_when_done else 60.0)


@pytest.mark.parametrize(
    "capability, hip, expected, tf32",
    [
        ((6, 1), None, MatrixUnits(False, None), None),
        ((7, 5), None, MatrixUnits(False, "16-mixed"), None),
        ((8, 0), None, MatrixUnits(True, "bf16-mixed"), False),
        ((9, 0), None, MatrixUnits(True, "bf16-mixed"), False),
        ((9, 4), "6.2", MatrixUnits(False, None), None),  # AMD's numbers mean something else
    ],
)
def test_advice_for_a_gpu_is_limited_to_what_it_supports(
    capability: tuple[int, int],
    hip: str | None,
    expected: MatrixUnits,
    tf32: bool | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    # first: a Trainer counts AMD's cards by a library that is not here
    trainer = trainer_with([], tmp_path, strategy=SingleDeviceStrategy(torch.device("cuda", 0)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert matrix_units(torch.device("cuda", 0)) == expected
    assert matrix_units(torch.device("cpu")) == MatrixUnits()
    trainer.strategy.connect(BoringModel())
    found = changeable_settings(TrainerLoop(trainer))
    assert (found.tf32, found.half_precision) == (tf32, expected.half_precision)


def test_modules_without_an_optimizer_are_named_if_they_get_gradients(tmp_path: Path) -> None:
    class Probe(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
            self.frozen = nn.Linear(32, 32).requires_grad_(False)
            self.never_called = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.frozen(self.backbone(x)))

    trainer, module = trainer_with([], tmp_path), Probe()
    trainer.strategy.connect(module)
    trainer.strategy._optimizers = [torch.optim.SGD(module.layer.parameters(), 0.1)]
    assert model_facts(TrainerLoop(trainer)).without_optimizer == []
    module(torch.ones(2, 32)).sum().backward()
    assert model_facts(TrainerLoop(trainer)).without_optimizer == ["backbone"]


def test_a_memory_history_on_the_cpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    message = refusal(ValueError, lambda: MemoryOptions(history=True))
    assert_stored("callbacks/refused: a history without CUDA", {"no device": message})
    message = refusal(ValueError, lambda: history_watch(torch.device("cpu"), Path()))
    assert_stored("callbacks/refused: a history on the CPU", {"a CPU": message})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options = MemoryOptions(history=True)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="given cpu"):
        trainer_with([TrainingProfiler(memory=options, quiet=True)], tmp_path).fit(BoringModel())
    assert not list(tmp_path.rglob("memory_snapshot.pickle"))


@pytest.mark.parametrize(
    "compile_it", [lambda m: torch.compile(m), lambda m: m.compile() or m, lambda m: from_compiled(torch.compile(m))]
)
def test_every_way_to_compile_is_recognized(compile_it: Callable[[nn.Module], nn.Module]) -> None:
    module = BoringModel()
    assert not is_compiled(module)
    assert is_compiled(compile_it(module))


def test_a_history_that_cannot_be_written_is_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls: list[object] = []
    history = MemoryHistory(lambda enabled, **_: calls.append(enabled), dict)
    monkeypatch.setattr("lm_profiler.callbacks.instruments.watches.memory_history_of", lambda device: history)
    watch = history_watch(torch.device("cuda"), tmp_path / "gone" / "memory_snapshot.pickle")
    watch.begin("memory")
    with pytest.raises(FileNotFoundError):
        watch.end("memory")
    assert calls == ["all", None]


def test_a_run_reads_the_machine_around_its_measured_steps_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In the ten seconds between the readings the process runs for 5.9, and waits for a CPU for 4.1."""
    begin = CpuReading(
        at_s=0.0, machine="m", cpus=frozenset({0, 1}), busy_s=0.0, stolen_s=0.0, own_s={7: 0.0}, waited_s={7: 0.0},
        pressure_s=0.0, throttled_s=0.0, switches=0,
    )  # fmt: skip
    end = replace(begin, at_s=10.0, busy_s=10.03, own_s={7: 5.9}, waited_s={7: 4.1})
    steps_at_readings: list[int] = []

    class Counting(BoringModel):
        steps = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.steps += 1
            return super().training_step(batch, batch_idx)

    module = Counting()

    def read() -> CpuReading:
        steps_at_readings.append(module.steps)
        return begin if len(steps_at_readings) == 1 else end

    for place in ("measure.device.contention", "callbacks.instruments.watches"):
        monkeypatch.setattr(f"lm_profiler.{place}.cpu_reading", read)
    profiler = make_profiler(warmup=2, measure=6, memory=1)
    trainer_with([profiler], tmp_path).fit(module)
    assert steps_at_readings == [2, 2 + 6]
    contention = read_run(profiler.folder).contention
    assert contention.not_had == pytest.approx(4.1 / (5.9 + 4.1))
