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
WEIGHT_BYTES = WIDTH * WIDTH * 4  # of each of the two layers
BATCH_BYTES = ROWS * WIDTH * 4  # also of the result of each layer
PRODUCT_FLOPS = 2 * ROWS * WIDTH * WIDTH
TINY_MODEL: dict[str, Any] = {"d_model": 16, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 50}


class TwoLayers(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False))

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return self.layers(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)


class ValidatedTwoLayers(TwoLayers):
    def validation_step(self, batch: Tensor, _: int) -> None:
        self.layers(batch)


@pytest.fixture(autouse=True)
def fast_machine() -> Iterator[None]:
    """So that no phase of these small steps beats its floor."""
    with warm.with_rates(flops_per_s=1e15, bytes_per_s=1e12):
        yield


def profiled_run_of_two_layers(folder: Path, verb: Any = "fit", **options: Any) -> RunRecord:
    profiler = make_profiler(warmup=1, measure=3, memory=1, trace=1, verb=verb, log_dir=folder)
    trainer = trainer_with([profiler], folder, **options)
    loader = DataLoader(torch.ones(400, WIDTH), batch_size=ROWS)
    getattr(trainer, verb)(TwoLayers() if verb == "fit" else ValidatedTwoLayers(), loader)
    return profiler.record


def test_each_phase_of_a_run_has_its_floor(tmp_path: Path) -> None:
    """With memory that is slow enough for a few kB to be microseconds, and no phase to be faster."""
    with warm.with_rates(flops_per_s=1e11, bytes_per_s=1e9):
        record = profiled_run_of_two_layers(tmp_path, gradient_clip_val=1.0)
    floors = record.floors
    activation_bytes = BATCH_BYTES
    assert {phase: floor.flops for phase, floor in floors.items() if floor.flops} == {
        "forward": {"float32": 2 * PRODUCT_FLOPS},
        "backward": {"float32": 3 * PRODUCT_FLOPS},
    }
    assert {phase: floor.bytes for phase, floor in floors.items()} == {
        "forward": 2 * WEIGHT_BYTES + BATCH_BYTES + activation_bytes,
        "backward": BATCH_BYTES + activation_bytes + WEIGHT_BYTES + 2 * WEIGHT_BYTES,  # with both gradients
        "zero_grad": 0,
        "clip": 2 * WEIGHT_BYTES,
        "optimizer": 7 * 2 * WEIGHT_BYTES + 2 * 2 * 4,  # with Adam's two counters, read and written
    }
    for phase in ("forward", "backward", "clip", "optimizer"):
        floor = floors[phase]
        assert floor.seconds == pytest.approx(floor.bytes / 1e9)
        assert floor.bound == "memory"
        assert floor.times == pytest.approx(record.time[phase].mean / floor.seconds)


def test_a_validation_has_the_floor_of_its_forward_passes(tmp_path: Path) -> None:
    floors = profiled_run_of_two_layers(tmp_path, "validate").floors
    assert floors.keys() == {"forward"}
    assert floors["forward"].flops == {"float32": 2 * PRODUCT_FLOPS}
    assert floors["forward"].bytes == 2 * WEIGHT_BYTES + BATCH_BYTES


def test_accumulation_adds_up_batches(tmp_path: Path) -> None:
    floors = profiled_run_of_two_layers(tmp_path, accumulate_grad_batches=3).floors
    assert floors["forward"].flops == {"float32": 6 * PRODUCT_FLOPS}
    assert floors["forward"].bytes == 3 * (2 * WEIGHT_BYTES + 2 * BATCH_BYTES)
    assert floors["backward"].bytes == 3 * (2 * BATCH_BYTES + 3 * WEIGHT_BYTES) + 2 * 2 * WEIGHT_BYTES
    assert floors["optimizer"].bytes == 7 * 2 * WEIGHT_BYTES + 2 * 2 * 4


def test_without_a_memory_stage_no_process_is_started(tmp_path: Path, counted_apart: CountedApart):
    profiler = make_profiler(warmup=1, measure=3, actions=3, log_dir=tmp_path)
    trainer_with([profiler], tmp_path).fit(TwoLayers(), DataLoader(torch.ones(400, WIDTH), batch_size=ROWS))
    assert profiler.record.floors == {}
    assert profiler.record.notes == []
    assert counted_apart.trainers == []


class DropoutCheckpointAndFrozenLayer(TwoLayers):
    """Drops out, recomputes its first layer, and is fed what it looks up; the last layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH)
        self.layers[2].requires_grad_(False)

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        rows = self.table(batch.long()[:, 0]) + nn.functional.dropout(batch)
        hidden: Tensor = checkpoint(self.layers[:2], rows, use_reentrant=False)
        return self.layers[2](hidden).sum()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class TwoManualBackwardPasses(TwoLayers):
    automatic_optimization = False

    def training_step(self, batch: Tensor, _: int) -> None:
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
        (DropoutCheckpointAndFrozenLayer, {}),
        (TwoManualBackwardPasses, {}),
        (partial(LanguageModel, activation_checkpointing=True, attention="math"), {"gradient_clip_val": 1.0}),
        (partial(LanguageModel, optimizer="sgd"), {"precision": "bf16-mixed", "accumulate_grad_batches": 2}),
    ],
)
def test_shapes_alone_find_what_a_real_step_does(kind: Any, options: dict[str, Any], tmp_path: Path) -> None:
    is_language_model = isinstance(kind, partial)
    module = kind(**TINY_MODEL) if is_language_model else kind()
    rows = TensorDataset(*torch.randint(0, 50, (2, 400, 8))) if is_language_model else torch.ones(400, WIDTH)
    loader = DataLoader(rows, batch_size=ROWS)
    profiler = make_profiler(warmup=1, measure=1, memory=1, log_dir=tmp_path)
    trainer = trainer_with([profiler], tmp_path, **options)
    trainer.fit(module, loader)
    floors = profiler.record.floors
    batch = without_data(trainer.precision_plugin.convert_input(next(iter(loader))))
    work = step_work(TrainerLoop(trainer), "fit", SeenFlops(), 0, lambda: batch)
    on_shapes = phase_work(TrainerLoop(trainer), work, traffic=None, batch_bytes=0)
    assert on_shapes.keys() == floors.keys()
    for name, phase in on_shapes.items():
        assert (phase.flops, phase.bytes) == (floors[name].flops, floors[name].bytes), name


BYTES_OF_A_STEP = {"forward": 10 + 5, "zero_grad": 0, "backward": 30, "clip": 4, "optimizer": 28}
TRAFFIC = StepTraffic({**BYTES_OF_A_STEP, "forward": 10}, forward_read=5)
WORK = StepWork(
    Flops(forward=2, backward=4, recomputation=1),
    {"forward": {"float32": 2}, "backward": {"float32": 4}, "recomputation": {"float32": 1}},
)


def trainer_of_two_layers(kind: type[Strategy] = SingleDeviceStrategy, device: str = "cpu", optimizers: int = 1) -> Any:
    strategy = object.__new__(type("Made", (kind,), {"root_device": torch.device(device)}))
    return SimpleNamespace(
        strategy=strategy,
        optimizers=[SimpleNamespace()] * optimizers,
        gradient_clip_val=1.0,
        lightning_module=TwoLayers(),
    )


def bytes_by_phase(trainer: Any, work: StepWork = WORK, traffic: StepTraffic = TRAFFIC) -> dict[str, int | None]:
    """The bytes that are known of each phase, for batches of 8 bytes."""
    phases = phase_work(TrainerLoop(trainer), work, traffic, batch_bytes=8)
    return {name: phase.bytes for name, phase in phases.items()}


@pytest.mark.parametrize(
    "kind, optimizers, known_bytes",
    [
        (SingleDeviceStrategy, 1, BYTES_OF_A_STEP),
        (DDPStrategy, 1, BYTES_OF_A_STEP),
        (FSDPStrategy, 1, {**BYTES_OF_A_STEP, "forward": None, "backward": None}),  # a rank's own shard
        # Lightning derives it from DDP's, and gives it an optimizer that holds a part.
        (DeepSpeedStrategy, 1, dict.fromkeys(BYTES_OF_A_STEP)),
        # which of two optimizers stepped is unknown
        (SingleDeviceStrategy, 2, {**dict.fromkeys(BYTES_OF_A_STEP), "forward": 15}),
    ],
)
def test_a_rank_knows_the_bytes_that_it_has(kind: type[Strategy], optimizers: int, known_bytes: dict[str, int | None]):
    assert bytes_by_phase(trainer_of_two_layers(kind, optimizers=optimizers)) == known_bytes


def test_bytes_are_unknown_if_the_optimizer_of_a_rank_updates_a_part_of_the_weights() -> None:
    trainer = trainer_of_two_layers(DDPStrategy)
    trainer.optimizers[0].consolidate_state_dict = print  # as ``ZeroRedundancyOptimizer`` has it
    assert bytes_by_phase(trainer) == dict.fromkeys(BYTES_OF_A_STEP)


class ClipsItself(TwoLayers):
    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None: ...


@pytest.mark.parametrize("kind, clip_bytes", [(TwoLayers, 0), (ClipsItself, None), (TwoManualBackwardPasses, 4)])
def test_without_clipping_its_phase_reads_nothing(kind: Any, clip_bytes: int | None) -> None:
    trainer = trainer_of_two_layers()
    trainer.gradient_clip_val = None
    trainer.lightning_module = kind()
    assert bytes_by_phase(trainer) == {**BYTES_OF_A_STEP, "clip": clip_bytes}


def test_recomputation_is_work_of_backward() -> None:
    phases = phase_work(TrainerLoop(trainer_of_two_layers()), WORK, TRAFFIC, batch_bytes=8)
    assert phases["backward"].flops == {"float32": 4 + 1}
    without_work = phase_work(TrainerLoop(trainer_of_two_layers()), None, TRAFFIC, batch_bytes=8)
    assert (without_work["backward"].flops, without_work["optimizer"].flops) == (None, {})


def test_a_batch_goes_to_a_device_over_the_bus() -> None:
    transfer = phase_work(TrainerLoop(trainer_of_two_layers(device="cuda")), WORK, TRAFFIC, batch_bytes=8)["transfer"]
    assert (transfer.bytes, transfer.on_the_bus) == (8, True)
    batch = {"tokens": torch.zeros(3, 5, dtype=torch.int64), "rest": [torch.zeros(2), "text"]}
    assert bytes_of_batch(batch) == 3 * 5 * 8 + 2 * 4


def test_traffic_of_a_compiled_step_is_counted_on_a_copy() -> None:
    """Of forward's 10 bytes, 8 are those of the batch, which is saved for backward too, and not written."""
    of_compiled_step = TRAFFIC._replace(forward_read=None)
    assert bytes_by_phase(trainer_of_two_layers(), WORK, of_compiled_step)["forward"] is None
    on_a_copy = StepWork(WORK.flops, WORK.by_dtype, StepTraffic({"forward": None}, forward_read=100))
    assert bytes_by_phase(trainer_of_two_layers(), on_a_copy, of_compiled_step)["forward"] == 100 + 10 - 8


def test_what_a_compiler_saves_for_backward_is_unknown(counted_apart: CountedApart) -> None:
    """A copy has its FLOPs counted on one of two ranks, and the bytes that it moves."""
    moved = StepTraffic({"forward": 9, "backward": 8, "optimizer": 7}, forward_read=50)
    counted_apart.work = StepWork(WORK.flops, WORK.by_dtype, moved)
    trainer = trainer_of_two_layers(optimizers=0)
    trainer.lightning_module.compile()
    vars(trainer).update(accumulate_grad_batches=3, world_size=2, precision="32-true")
    is_compiled = SeenFlops(compiled=True, unknown="the step is compiled")
    found = step_work(TrainerLoop(trainer), "fit", is_compiled, 0, lambda: None)
    assert found.flops.forward == 2 * WORK.flops.forward
    assert found.by_dtype == WORK.by_dtype
    assert found.traffic == StepTraffic({"forward": None, "backward": None, "optimizer": 7}, forward_read=50)
    assert found.flops.uncounted == []
    trainer.optimizers = [torch.optim.Muon([nn.Parameter(torch.ones(2, 2))], lr=0.1)]
    found = step_work(TrainerLoop(trainer), "fit", is_compiled, 0, lambda: None)
    assert found.flops.uncounted == ["the matrix products of Muon"]  # a copy's optimizer computes nothing
