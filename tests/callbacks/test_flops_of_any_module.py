"""FLOPs of other people's steps: right by hand, and the training does not notice."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from known_loop import make_profiler, trainer_with
from lightning.pytorch import seed_everything
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from zoo import KINDS, WIDTH, Accumulating, Contrastive, Kind, OneLayer, product_flops

from lm_profiler.callbacks import TrainingProfiler
from lm_profiler.record.run_record import read_run

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorboard", "ignore:.*smaller than the logging")

MEMORY_STEP = 4
"""After one step of warm-up and two measured ones."""


def trained(kind: type[Kind], folder: Path, profiler: TrainingProfiler | None, **options: Any) -> tuple[Kind, Any]:
    """The module after eight steps, and everything that a step more or less would change."""
    seed_everything(1, verbose=False)
    module = kind()
    options = {"max_steps": 8 * (2 if kind.__name__ == "GAN" else 1), **options}
    if kind is Accumulating:
        options["accumulate_grad_batches"] = 3
    trainer = trainer_with([profiler] if profiler else [], folder, **options)
    trainer.fit(module)
    states = torch.get_rng_state(), random.getstate()
    metrics = dict(trainer.callback_metrics)
    return module, (module.state_dict(), module.state_of_its_own(), states, metrics)


def equal_trees(tree: Any, other: Any) -> bool:
    leaves, other_leaves = tree_leaves(tree), tree_leaves(other)
    return len(leaves) == len(other_leaves) and all(map(_equal, leaves, other_leaves))


def _equal(value: Any, other: Any) -> bool:
    return torch.equal(value, other) if isinstance(value, torch.Tensor) else repr(value) == repr(other)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_flops_of_a_step_are_those_on_paper(kind: type[Kind], tmp_path: Path) -> None:
    profiler = make_profiler(warmup=1, measure=2, memory=1, stop_when_done=False)
    module, after = trained(kind, tmp_path, profiler)
    record = read_run(profiler.folder)
    assert record.status == "ok"
    assert record.utilisation is not None, record.notes
    flops = record.utilisation.flops
    assert (flops.forward, flops.backward, flops.recomputation) == module.paper(MEMORY_STEP)
    _, alone = trained(kind, tmp_path, None)
    assert equal_trees(after, alone)


class ByHand(Contrastive):
    """Enters autocast by itself, as many do; its Trainer knows nothing of it."""

    def loss(self, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().loss(batch)


def test_autocast_by_hand_is_recognized_by_its_products(tmp_path: Path) -> None:
    profiler = make_profiler(warmup=1, measure=2, memory=1)
    trained(ByHand, tmp_path, profiler, max_steps=8)
    assert profiler.record.utilisation.dtype == "bfloat16"


class Uneven(OneLayer):
    """Batches of unlike shapes, as where sequences are padded to the longest, and an epoch ends with a partial one."""

    shapes: Sequence[tuple[int, int]] = ()  # samples and length of each batch

    def train_dataloader(self) -> Any:
        return DataLoader([torch.ones(*shape, WIDTH) for shape in self.shapes], batch_size=None)


@pytest.mark.parametrize(
    "shapes",
    [
        [(4, 8), (4, 10), (4, 20), (4, 30), (4, 40), (4, 90), (4, 8), (4, 8)],
        [(8, 16), (8, 16), (8, 16), (8, 16), (8, 16), (1, 16), (8, 16), (8, 16)],
        [(8, 16), (8, 16), (3, 16), (8, 16), (8, 16), (8, 16), (8, 16), (8, 16)],
    ],
    ids=["padded to the longest", "the counted batch is partial", "a measured batch is partial"],
)
@pytest.mark.parametrize("memory", [1, 0], ids=["in the process", "on shapes"])
def test_flops_are_those_of_the_measured_batches(
    shapes: list[tuple[int, int]], memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are counted of the sixth batch in the process, of the first on shapes; the measured ones may be others."""
    monkeypatch.setattr(Uneven, "shapes", shapes)
    profiler = make_profiler(warmup=1, measure=4, memory=memory, trace=1 - memory, stop_when_done=False)
    trained(Uneven, tmp_path, profiler)
    record = read_run(profiler.folder)
    assert record.utilisation is not None, record.notes
    warmup_steps = 1
    measured_steps = record.stretch.stop or 4
    measured = shapes[warmup_steps + record.stretch.start : warmup_steps + measured_steps]
    flops_of_batches = [product_flops(samples * length) for samples, length in measured]
    mean_flops = round(sum(flops_of_batches) / len(flops_of_batches))
    flops = record.utilisation.flops
    assert (flops.forward, flops.backward) == pytest.approx((mean_flops, mean_flops), abs=1)
    samples, length = shapes[5] if memory else shapes[0]
    counted_is_mean = mean_flops == product_flops(samples * length)
    assert any("differ in size" in note for note in record.notes) is not counted_is_mean
