"""The floors of real runs, against work counted by hand; what a strategy hides is unknown."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import warm
from counted_apart import CountedApart
from known_loop import make_profiler, trainer_with
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lm_profiler.callbacks.instruments.instrument import SeenFlops
from lm_profiler.callbacks.instruments.sent_step import without_data
from lm_profiler.callbacks.instruments.work import StepWork, bytes_of_batch, phase_work, step_work
from lm_profiler.callbacks.trainer_loop import TrainerLoop
from lm_profiler.measure.counts.traffic import StepTraffic
from lm_profiler.record.run_record import Flops, RunRecord
from lm_profiler.training import LanguageModel

WIDTH, ROWS = 16, 4
WEIGHT = WIDTH * WIDTH * 4
INPUT = ROWS * WIDTH * 4
PRODUCT = 2 * ROWS * WIDTH * WIDTH
TINY: dict[str, Any] = {"d_model": 16, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 50}


class TwoLayers(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False))

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return self.layers(batch).sum()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)


class Evaluated(TwoLayers):
    def validation_step(self, batch: Tensor, _: int) -> None:
        self.layers(batch)


@pytest.fixture(autouse=True)
def fast_machine() -> Iterator[None]:
    """So that no phase of these small steps beats its floor."""
    with warm.with_rates(flops_per_s=1e15, bytes_per_s=1e12):
        yield


def run(folder: Path, verb: Any = "fit", **options: Any) -> RunRecord:
    profiler = make_profiler(warmup=1, measure=3, memory=1, trace=1, verb=verb, log_dir=folder)
    trainer = trainer_with([profiler], folder, **options)
    loader = DataLoader(torch.ones(400, WIDTH), batch_size=ROWS)  # type: ignore[arg-type]
    getattr(trainer, verb)(TwoLayers() if verb == "fit" else Evaluated(), loader)
    return profiler.record


def test_each_phase_of_a_run_has_its_floor(tmp_path: Path) -> None:
    """With memory that is slow enough for a few kB to be microseconds, and no phase to be faster."""
    with warm.with_rates(flops_per_s=1e11, bytes_per_s=1e9):
        record = run(tmp_path, gradient_clip_val=1.0)
    floors, activation = record.floors, INPUT
    assert {phase: floor.flops for phase, floor in floors.items() if floor.flops} == {
        "forward": {"float32": 2 * PRODUCT},
        "backward": {"float32": 3 * PRODUCT},
    }
    assert {phase: floor.bytes for phase, floor in floors.items()} == {
        "forward": 2 * WEIGHT + INPUT + activation,
        "backward": INPUT + activation + WEIGHT + 2 * WEIGHT,
        "zero_grad": 0,
        "clip": 2 * WEIGHT,
        "optimizer": 7 * 2 * WEIGHT + 2 * 2 * 4,  # with Adam's two counters, read and written
    }
    for phase in ("forward", "backward", "clip", "optimizer"):
        floor = floors[phase]
        assert floor.seconds == pytest.approx(floor.bytes / 1e9)
        assert floor.bound == "memory"
        assert floor.times == pytest.approx(record.time[phase].mean / floor.seconds)


def test_accumulation_adds_up_batches(tmp_path: Path) -> None:
    floors = run(tmp_path, "validate").floors
    assert {phase: (floor.flops, floor.bytes) for phase, floor in floors.items()} == {
        "forward": ({"float32": 2 * PRODUCT}, 2 * WEIGHT + INPUT)
    }
    floors = run(tmp_path, accumulate_grad_batches=3).floors
    assert floors["forward"].flops == {"float32": 6 * PRODUCT}
    assert floors["forward"].bytes == 3 * (2 * WEIGHT + 2 * INPUT)
    assert floors["backward"].bytes == 3 * (2 * INPUT + 3 * WEIGHT) + 2 * 2 * WEIGHT
    assert floors["optimizer"].bytes == 14 * WEIGHT + 16


def test_without_a_memory_stage_no_process_is_started(tmp_path: Path, counted_apart: CountedApart):
    profiler = make_profiler(warmup=1, measure=3, actions=3, log_dir=tmp_path)
    trainer_with([profiler], tmp_path).fit(TwoLayers(), DataLoader(torch.ones(400, WIDTH), batch_size=ROWS))  # type: ignore[arg-type]
    assert (profiler.record.floors, profiler.record.notes, counted_apart.trainers) == ({}, [], [])


class Deep(TwoLayers):
    """Drops out, recomputes its first layer, and is fed what it looks up; the last layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH)
        self.layers[2].requires_grad_(False)

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        rows = self.table(batch.long()[:, 0]) + nn.functional.dropout(batch)
        hidden: Tensor = checkpoint(self.layers[:2], rows, use_reentrant=False)
        return self.layers[2](hidden).sum()  # type: ignore[no-any-return]

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class ByHand(TwoLayers):
    automatic_optimization = False

    def training_step(self, batch: Tensor, _: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        for part in batch.chunk(2):
            loss = self.layers(part).sum()
            self.log("loss", loss)
            self.manual_backward(loss)
        self.clip_gradients(optimizer, 1.0, "norm")
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
@pytest.mark.parametrize(
    "kind, options",
    [
        (TwoLayers, {"gradient_clip_val": 1.0, "accumulate_grad_batches": 3}),
        (TwoLayers, {"precision": "bf16-mixed"}),
        (TwoLayers, {"precision": "bf16-true"}),
        (Deep, {}),
        (ByHand, {}),
        (partial(LanguageModel, activation_checkpointing=True, attention="math"), {"gradient_clip_val": 1.0}),
        (partial(LanguageModel, optimizer="sgd"), {"precision": "bf16-mixed", "accumulate_grad_batches": 2}),
    ],
)
def test_shapes_alone_find_what_a_real_step_does(kind: Any, options: dict[str, Any], tmp_path: Path) -> None:
    of_tokens = isinstance(kind, partial)
    module = kind(**TINY) if of_tokens else kind()
    rows = TensorDataset(*torch.randint(0, 50, (2, 400, 8))) if of_tokens else torch.ones(400, WIDTH)
    loader = DataLoader(rows, batch_size=ROWS)  # type: ignore[arg-type]
    profiler = make_profiler(warmup=1, measure=1, memory=1, log_dir=tmp_path)
    trainer = trainer_with([profiler], tmp_path, **options)
    trainer.fit(module, loader)
    batch = without_data(trainer.precision_plugin.convert_input(next(iter(loader))))
    work = step_work(TrainerLoop(trainer), "fit", SeenFlops(), 0, lambda: batch)
    alone = phase_work(TrainerLoop(trainer), work, None, 0)
    traced = {phase: (floor.flops, floor.bytes) for phase, floor in profiler.record.floors.items()}
    assert {phase: (work_of_phase.flops, work_of_phase.bytes) for phase, work_of_phase in alone.items()} == traced


TRAFFIC = StepTraffic({"forward": 10, "zero_grad": 0, "backward": 30, "clip": 4, "optimizer": 28}, forward_read=5)
WORK = StepWork(
    Flops(forward=2, backward=4, recomputation=1),
    {"forward": {"float32": 2}, "backward": {"float32": 4}, "recomputation": {"float32": 1}},
)


def trainer_of(kind: type[Strategy], device: str = "cpu", optimizers: int = 1) -> Any:
    strategy = object.__new__(type("Made", (kind,), {"root_device": torch.device(device)}))
    return SimpleNamespace(
        strategy=strategy,
        optimizers=[SimpleNamespace()] * optimizers,
        gradient_clip_val=1.0,
        lightning_module=TwoLayers(),
    )


def known_figures(trainer: Any, work: StepWork | None = WORK, traffic: StepTraffic = TRAFFIC) -> dict[str, int | None]:
    return {
        phase: work_of_phase.bytes
        for phase, work_of_phase in phase_work(TrainerLoop(trainer), work, traffic, 8).items()
    }


WHOLE = {"forward": 15, "zero_grad": 0, "backward": 30, "clip": 4, "optimizer": 28}


@pytest.mark.parametrize(
    "kind, optimizers, known_bytes",
    [
        (SingleDeviceStrategy, 1, WHOLE),
        (DDPStrategy, 1, WHOLE),
        (FSDPStrategy, 1, {**WHOLE, "forward": None, "backward": None}),  # a rank's own shard
        # Lightning derives it from DDP's, and gives it an optimizer that holds a part.
        (DeepSpeedStrategy, 1, dict.fromkeys(WHOLE)),
        (SingleDeviceStrategy, 2, {**dict.fromkeys(WHOLE), "forward": 15}),  # which of them stepped is unknown
    ],
)
def test_a_rank_knows_the_bytes_that_it_has(kind: type[Strategy], optimizers: int, known_bytes: dict[str, int | None]):
    trainer = trainer_of(kind, optimizers=optimizers)
    assert known_figures(trainer) == known_bytes
    if kind is DDPStrategy:
        trainer.optimizers[0].consolidate_state_dict = print  # of an optimizer that updates a part
        assert set(known_figures(trainer).values()) == {None}


class ClipsItself(TwoLayers):
    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None: ...


@pytest.mark.parametrize("kind, clipped", [(TwoLayers, 0), (ClipsItself, None), (ByHand, 4)])
def test_without_clipping_its_phase_reads_nothing(kind: Any, clipped: int | None) -> None:
    trainer = trainer_of(SingleDeviceStrategy)
    trainer.gradient_clip_val, trainer.lightning_module = None, kind()
    assert known_figures(trainer) == {**WHOLE, "clip": clipped}


def test_recomputation_is_work_of_backward() -> None:
    phases = phase_work(TrainerLoop(trainer_of(SingleDeviceStrategy, "cuda")), WORK, TRAFFIC, 8)
    assert phases["backward"].flops == {"float32": 5}
    assert (phases["transfer"].bytes, phases["transfer"].on_the_bus) == (8, True)  # to a device of its own
    unknown = phase_work(TrainerLoop(trainer_of(SingleDeviceStrategy)), None, TRAFFIC, 8)
    assert (unknown["backward"].flops, unknown["optimizer"].flops) == (None, {})
    batch = {"tokens": torch.zeros(3, 5, dtype=torch.int64), "rest": [torch.zeros(2), "text"]}
    assert bytes_of_batch(batch) == 3 * 5 * 8 + 2 * 4


def test_traffic_of_a_compiled_step_is_counted_on_a_copy() -> None:
    traffic = TRAFFIC._replace(forward_read=None)
    trainer = trainer_of(SingleDeviceStrategy)
    assert known_figures(trainer, WORK, traffic)["forward"] is None
    counted = StepWork(WORK.flops, WORK.by_dtype, StepTraffic({"forward": None}, forward_read=100))
    batch_bytes = 8  # saved for backward too, and not written
    assert known_figures(trainer, counted, traffic)["forward"] == 100 + 10 - batch_bytes


def test_what_a_compiler_saves_for_backward_is_unknown(counted_apart: CountedApart) -> None:
    moved = StepTraffic({"forward": 9, "backward": 8, "optimizer": 7}, 50)
    counted_apart.work = StepWork(WORK.flops, WORK.by_dtype, moved)
    trainer = trainer_of(SingleDeviceStrategy, optimizers=0)
    compiled = TwoLayers()
    compiled.compile()
    vars(trainer).update(lightning_module=compiled, accumulate_grad_batches=3, world_size=2, precision="32-true")
    unknown = SeenFlops(compiled=True, unknown="the step is compiled")
    found = step_work(TrainerLoop(trainer), "fit", unknown, 0, lambda: None)
    assert (found.flops.forward, found.by_dtype) == (2 * WORK.flops.forward, WORK.by_dtype)
    assert found.traffic == StepTraffic({"forward": None, "backward": None, "optimizer": 7}, 50)
    assert found.flops.uncounted == []
    vars(trainer)["optimizers"] = [torch.optim.Muon([nn.Parameter(torch.ones(2, 2))], lr=0.1)]
    found = step_work(TrainerLoop(trainer), "fit", SeenFlops(compiled=True, unknown="compiled"), 0, lambda: None)
    assert found.flops.uncounted == ["the matrix products of Muon"]  # a copy's optimizer computes nothing
