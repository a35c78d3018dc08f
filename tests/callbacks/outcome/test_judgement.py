"""What the record says its figures mean, from rows made by hand and from real runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_trace import cuda_step, kernel_table
from known_loop import instruments, trainer_with
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities.compile import from_compiled
from made_facts import made
from recorded import FLOPS, LEVEL, lines, recorded
from torch import nn

from lm_profiler.callbacks import MemoryOptions, TrainingProfiler
from lm_profiler.callbacks.instruments.watches import history_watch
from lm_profiler.callbacks.outcome.afterwards import LateFacts
from lm_profiler.callbacks.outcome.judgement import judge_utilisation, settings_of
from lm_profiler.measure.counts.recompiles import is_compiled
from lm_profiler.measure.device.environment import MatrixUnits, matrix_units
from lm_profiler.measure.memory.history import MemoryHistory
from lm_profiler.record.run import Telemetry, read_run

MEAN_S = sum(LEVEL) / len(LEVEL) * 1e-3


def test_slow_first_steps_are_in_no_summary(tmp_path: Path) -> None:
    record = recorded(tmp_path, [30.0] * 4 + LEVEL)
    steadiness = record.steadiness
    assert steadiness is not None
    assert (steadiness.word, steadiness.cut) == ("steady", 4)
    mean = sum(LEVEL) / len(LEVEL)
    bias = (120 + sum(LEVEL)) / 20 / mean - 1
    assert steadiness.bias_of_mean == pytest.approx(bias)
    for part in ("step", "forward"):
        for times in (record.time, record.host_time):
            assert times[part].n == len(LEVEL)
            assert times[part].max == pytest.approx(10.2e-3)
            assert times[part].mean == pytest.approx(mean * 1e-3)
    assert record.steps["measure"] == 20  # all that ran


def test_a_run_that_slows_half_way_says_so(tmp_path: Path) -> None:
    record = recorded(tmp_path, LEVEL + [1.2 * ms for ms in LEVEL])
    assert record.steadiness is not None
    assert record.steadiness.word == "slowing"
    half = len(LEVEL)
    assert [(of.first, of.last) for of in record.steadiness.levels] == [(1, half), (half + 1, 2 * half)]
    before, after = (of.seconds for of in record.steadiness.levels)
    assert after / before == pytest.approx(1.2, abs=0.01)
    assert (record.steadiness.first, record.steadiness.last) in {(1, half), (half + 1, 2 * half)}
    assert lines(record)["verdict:"][0].startswith("slowing; ")


def test_the_verdict_and_its_advice_are_a_line_each(tmp_path: Path) -> None:
    record = recorded(tmp_path, LEVEL, LateFacts(FLOPS, {"float32": 72_000.0}))
    assert record.verdict is not None
    assert record.verdict.bound_by == "compute"
    said = lines(record)
    assert len(said["verdict:"]) == 1
    assert said["verdict:"][0].startswith("steady; bound by compute: ")
    assert len(said["next:"]) == 1


@pytest.mark.parametrize(
    "all_reduce_us, adam_us, bound_by, share",
    [
        (30, 20, "compute", 1.0),
        (80, 20, "communication", 70 / 220),  # 10 of the all-reduce run beside a matrix product
        (30, 200, "memory bandwidth", 202 / 350),  # the optimizer's kernel and its memset
    ],
)
def test_the_trace_tells_what_the_marks_cannot(
    tmp_path: Path, all_reduce_us: float, adam_us: float, bound_by: str, share: float
) -> None:
    table = kernel_table(cuda_step(all_reduce_us, adam_us))
    verdict = recorded(tmp_path, LEVEL, LateFacts(FLOPS, {"float32": 72_000.0}, kernels=table)).verdict
    assert verdict is not None
    assert (verdict.bound_by, verdict.share) == (bound_by, pytest.approx(share))


def test_nothing_measured_has_no_verdict(tmp_path: Path) -> None:
    record = recorded(tmp_path, [])
    assert record.verdict is None
    assert record.steadiness is None
    assert not {"verdict:", "next:"} & set(lines(record))


# -- utilisation ------------------------------------------------------------------------------------------------


def use(**changes: Any) -> Any:
    options: dict[str, Any] = {
        "flops": FLOPS, "step_s": 2.0, "device_name": "unheard of", "dtype": "bfloat16", "devices": 1,
        "ceiling_flops_per_s": None, "peak_flops_per_s": 1000.0,
    }  # fmt: skip
    return judge_utilisation(**{**options, **changes})


def test_mfu_leaves_recomputation_out_and_hfu_does_not() -> None:
    found = use()
    assert (found.mfu, found.hfu) == pytest.approx((300 / 2 / 1000, 360 / 2 / 1000))
    assert found.peak_source == "given with --peak_tflops"


def test_several_devices_share_the_step() -> None:
    assert use(devices=4).mfu == pytest.approx(300 / 2 / 4000)
    assert use(devices=4, ceiling_flops_per_s=100.0).of_ceiling == pytest.approx(360 / 2 / 400)


def test_the_table_knows_a_device_until_a_peak_is_given() -> None:
    known = use(device_name="NVIDIA H200", peak_flops_per_s=None)
    assert known.peak_flops_per_s == pytest.approx(989.4e12)
    assert "NVIDIA" in known.peak_source
    assert known.mfu == pytest.approx(150 / 989.4e12)
    assert use(device_name="NVIDIA H200").peak_flops_per_s == 1000.0


@pytest.mark.parametrize("changes", [{"device_name": "unheard of"}, {"device_name": "NVIDIA H200", "dtype": None}])
def test_without_a_peak_the_share_is_unknown(changes: dict[str, Any]) -> None:
    found = use(peak_flops_per_s=None, **changes)
    assert (found.mfu, found.hfu, found.peak_flops_per_s, found.peak_source) == (None, None, None, None)
    assert found.flops.backward == 200


@pytest.mark.parametrize("rate,reached", [(180 / 1.04, 1.04), (180 / 1.06, None)])
def test_a_ceiling_that_a_step_beats_is_unknown(rate: float, reached: float | None) -> None:
    found = use(ceiling_flops_per_s=rate)
    assert found.of_ceiling == (None if reached is None else pytest.approx(reached))
    assert (found.ceiling_flops_per_s is None) == (reached is None)


def test_the_advice_knows_what_is_on_already_and_how_full_the_device_is(tmp_path: Path) -> None:
    trainer, module = trainer_with([], tmp_path), BoringModel()
    trainer.strategy.connect(module)
    trainer.strategy._optimizers = [torch.optim.Adam(module.parameters(), fused=True)]
    found = settings_of(trainer, made(), 1)
    assert (found.fused_optimizer, found.compiled, found.checkpointing) == (True, False, None)
    assert found.pin_memory is None  # on the CPU there is nowhere to copy to
    clipping = trainer_with([], tmp_path, precision="bf16-mixed", gradient_clip_val=1.0)
    clipping.strategy.connect(module)
    clipping.strategy._optimizers = [torch.optim.Adam(module.parameters())]
    assert settings_of(clipping, made(), 1).fused_optimizer is None  # Lightning would refuse it
    trainer.strategy._optimizers = [torch.optim.LBFGS(module.parameters())]
    module._compiler_ctx = {"compiler": "dynamo"}  # what Lightning leaves of torch.compile(module)
    found = settings_of(trainer, made(), 1)
    assert (found.fused_optimizer, found.compiled, found.memory_free_share) == (None, True, None)


@pytest.mark.parametrize(
    "capability, hip, expected",
    [
        ((6, 1), None, MatrixUnits(False, None)),
        ((7, 5), None, MatrixUnits(False, "16-mixed")),
        ((8, 0), None, MatrixUnits(True, "bf16-mixed")),
        ((9, 0), None, MatrixUnits(True, "bf16-mixed")),
        ((9, 4), "6.2", MatrixUnits(False, None)),  # AMD's numbers mean something else
    ],
)
def test_a_card_is_advised_only_what_it_has(
    capability: tuple[int, int], hip: str | None, expected: MatrixUnits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert matrix_units(torch.device("cuda", 0)) == expected
    assert matrix_units(torch.device("cpu")) == MatrixUnits()


def test_tf32_is_off_only_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_with([], tmp_path)
    trainer.strategy.connect(BoringModel())
    for units, tf32 in ((MatrixUnits(True, "bf16-mixed"), False), (MatrixUnits(False, "16-mixed"), None)):
        monkeypatch.setattr("lm_profiler.callbacks.outcome.judgement.matrix_units", lambda device, units=units: units)
        found = settings_of(trainer, made(), 1)
        assert (found.tf32, found.half_precision) == (tf32, units.half_precision)


@pytest.mark.parametrize("refused", [{"foreach": True}, {"differentiable": True}])
def test_an_optimizer_that_refuses_to_be_fused_is_not_told_to(refused: dict[str, bool], tmp_path: Path) -> None:
    trainer, module = trainer_with([], tmp_path), BoringModel()
    trainer.strategy.connect(module)
    trainer.strategy._optimizers = [torch.optim.Adam(module.parameters(), **refused)]
    assert settings_of(trainer, made(), 1).fused_optimizer is None
    trainer.strategy._optimizers = [torch.optim.Adam(module.parameters())]
    assert settings_of(trainer, made(), 1).fused_optimizer is False


def test_processes_of_one_machine_share_its_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_with([], tmp_path)
    trainer.strategy.connect(BoringModel())
    monkeypatch.setattr("lm_profiler.callbacks.outcome.judgement.cpu_cores", lambda: 12)
    assert settings_of(trainer, made(), 1).cores == 12
    monkeypatch.setattr(type(trainer), "num_devices", 8)
    assert settings_of(trainer, made(), 1).cores == 1


def test_unknown_work_has_no_utilisation() -> None:
    assert use(flops=None) is None
    assert use(step_s=None) is None


def test_utilisation_is_of_the_mean_step(tmp_path: Path) -> None:
    record = recorded(tmp_path, LEVEL, LateFacts(FLOPS, {"float32": 72_000.0}), 60_000.0)
    assert record.utilisation is not None
    assert record.utilisation.mfu == pytest.approx(300 / MEAN_S / 60_000)
    assert record.utilisation.of_ceiling == pytest.approx(360 / MEAN_S / 72_000)
    assert record.verdict is not None
    assert record.verdict.facts["utilisation"] == pytest.approx(360 / MEAN_S / 72_000)


@pytest.mark.parametrize(
    "by_dtype,dtype,reached",
    [
        ({"float32": 60, "bfloat16": 300}, "bfloat16", 360 / MEAN_S / 144_000),
        ({"float32": 300, "bfloat16": 60}, "float32", 360 / MEAN_S / 72_000),
        ({"float64": 360}, None, None),
        ({}, "float32", 360 / MEAN_S / 72_000),
    ],
)
def test_the_rate_is_of_the_dtype_in_which_most_is_multiplied_whatever_the_trainer_was_told(
    by_dtype: dict[str, int], dtype: str | None, reached: float | None, tmp_path: Path
) -> None:
    ceilings = {"float32": 72_000.0, "bfloat16": 144_000.0}
    record = recorded(tmp_path, LEVEL, LateFacts(FLOPS, ceilings, by_dtype=by_dtype))
    found, settings = record.utilisation, record.settings
    assert found is not None
    assert found.dtype == dtype
    assert found.of_ceiling == (None if reached is None else pytest.approx(reached))
    assert settings is not None
    assert settings.full_precision == (dtype != "bfloat16")  # nobody is told to use what is on


# -- the GPU's clock, recompilations, memory ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "share,reasons,said",
    [
        (0.6, None, "; the GPU ran at 60% of its highest clock"),
        (0.9, ["power cap"], "; the GPU ran at 90% of its highest clock (power cap)"),
        (None, ["power cap", "power brake"], "; the GPU was throttled (power cap, power brake)"),
        (0.76, [], ""),
    ],
)
def test_a_slow_or_throttled_gpu_is_in_the_verdict(
    tmp_path: Path, share: float | None, reasons: list[str] | None, said: str
) -> None:
    plain = recorded(tmp_path, LEVEL)
    fields: dict[str, Any] = {**dict.fromkeys(Telemetry.model_fields), "samples": 9, "duration_s": 1.0, "gpus": []}
    telemetry = Telemetry(**{**fields, "clock_share": share, "throttle_reasons": reasons})
    hot = plain.model_copy(update={"telemetry": telemetry})
    assert lines(hot)["verdict:"] == [lines(plain)["verdict:"][0] + said]


def test_a_recompilation_is_counted_and_named(tmp_path: Path) -> None:
    torch._dynamo.reset()

    class Layer(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1

    class Grows(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.compile(Layer(32, 2), backend="eager")

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch if batch_idx < 4 else batch.repeat(3, 1), batch_idx)

    profiler = instruments(2, 6)
    trainer_with([profiler], tmp_path).fit(Grows())
    record = read_run(profiler.folder)
    assert record.steadiness is not None
    assert record.steadiness.recompilations == 1
    (note,) = [note for note in record.notes if note.startswith("recompiled while measuring (step 5): ")]
    assert "forward (test_judgement.py:" in note
    assert "size mismatch" in note
    assert "; 1 recompilation while measuring" in lines(record)["verdict:"][0]


def test_causes_on_the_cpu_are_the_bytes_of_the_real_tensors(tmp_path: Path) -> None:
    class Adam(BoringModel):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    module, profiler = Adam(), instruments(1, 3, memory=1)
    trainer = trainer_with([profiler], tmp_path)
    trainer.fit(module)
    weights = 4 * (32 * 2 + 2)
    steps = 2 * 4  # a float32 count for each of the two parameters
    record = read_run(profiler.folder)
    assert record.memory is not None
    for part in ("forward", "backward", "optimizer"):
        causes = record.memory.causes[part]
        assert causes.parameters == weights
        assert causes.optimizer_states == 2 * weights + steps
        assert causes.buffers == 0
        assert causes.activations_and_rest is None
        assert causes.gradients == (weights if part != "forward" else causes.gradients)


@pytest.mark.skipif(torch.cuda.is_available(), reason="refused only where there is no CUDA device")
def test_a_memory_history_without_cuda_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"^memory.history: expected a CUDA device, given none; leave the option out$"):
        MemoryOptions(history=True)


def test_a_memory_history_of_a_run_on_the_cpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^memory.history: expected a CUDA device, given cpu; leave the option out$"):
        history_watch(torch.device("cpu"), Path())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    asked = MemoryOptions(history=True)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="given cpu"):
        trainer_with([TrainingProfiler(memory=asked, quiet=True)], tmp_path).fit(BoringModel())
    assert not list(tmp_path.rglob("memory_snapshot.pickle"))


@pytest.mark.parametrize(
    "compile_it", [lambda m: torch.compile(m), lambda m: m.compile() or m, lambda m: from_compiled(torch.compile(m))]
)
def test_every_way_to_compile_is_seen(compile_it: Callable[[nn.Module], nn.Module]) -> None:
    module = BoringModel()
    assert not is_compiled(module)
    assert is_compiled(compile_it(module))


def test_a_history_that_cannot_be_written_is_recorded_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    history = MemoryHistory(lambda enabled, **_: asked.append(enabled), dict)
    monkeypatch.setattr("lm_profiler.callbacks.instruments.watches.memory_history_of", lambda device: history)
    watch = history_watch(torch.device("cuda"), tmp_path / "gone" / "memory_snapshot.pickle")
    watch.begin("memory")
    with pytest.raises(FileNotFoundError):
        watch.end("memory")
    assert asked == ["all", None]
