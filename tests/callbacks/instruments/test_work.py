"""Work, machine and everything else that is looked at after the run: right where it is known, harmless where not."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import fault_in
from known_loop import make_profiler, trainer_with
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader
from zoo import Compiled, CompiledOutside, CompiledWithValues

from lm_profiler.analysis.steps.summaries import lower_bound_share
from lm_profiler.measure.counts.flops import formula_of
from lm_profiler.measure.counts.recompiles import recompilations
from lm_profiler.record.quantities import QUANTITIES
from lm_profiler.record.run_record import RunRecord, read_run
from lm_profiler.report.run.sections import phase_table
from lm_profiler.training import FakeTokens, LanguageModel

BATCH, CONTEXT = 2, 8
TINY: dict[str, Any] = {"d_model": 16, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 50}

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorboard")


class Ticking:
    """A clock that goes on a microsecond each time it is asked."""

    now_ns = 0

    def __call__(self) -> int:
        self.now_ns += 1_000
        return self.now_ns


def run(module: LightningModule, folder: Path, verb: str = "fit", profiler: Any = None, **options: Any) -> RunRecord:
    profiler = profiler or make_profiler(warmup=1, measure=3, memory=1, verb=verb)
    data = FakeTokens(batch_size=BATCH, context_length=CONTEXT) if isinstance(module, LanguageModel) else None
    getattr(trainer_with([profiler], folder, **options), verb)(module, datamodule=data)
    record = read_run(profiler.folder)
    assert record == profiler.record
    assert record.status == "ok"
    assert record.time["step"].n
    return record


def on_paper(module: LanguageModel, backward: bool) -> float:
    """By the closed form, for one batch."""
    embeddings = {id(m.weight) for m in module.modules() if type(m).__name__ == "Embedding"}
    products = sum(p.numel() for p in module.parameters() if id(p) not in embeddings and p.ndim == 2)
    forward = 2 * products + 4 * 2 * 16 * CONTEXT  # 2 N + 4 L D T, a third of PaLM's 6 N + 12 L D T (appendix B)
    return BATCH * CONTEXT * forward * (3 if backward else 1)


@pytest.mark.parametrize("verb, accumulate", [("fit", 3), ("validate", 1)])
def test_flops_of_a_step_are_the_closed_form_of_its_batches(verb: str, accumulate: int, tmp_path: Path) -> None:
    """Only training accumulates."""
    module = LanguageModel(**TINY)
    use = run(module, tmp_path, verb, accumulate_grad_batches=3).utilisation
    assert use.flops.forward == accumulate * on_paper(module, backward=False)
    assert use.flops.forward + use.flops.backward == accumulate * on_paper(module, backward=verb == "fit")
    assert use.flops.recomputation == 0


BORING = 2 * 32 * 2
"""FLOPs of the one layer of ``BoringModel``, on one row."""


class OnlyOnce(BoringModel):
    """Knows when it sees a batch again, or one without values."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch.is_meta or batch_idx in self.seen:
            raise KeyError("again")
        self.seen.add(batch_idx)
        batch.sum().item()
        return super().training_step(batch, batch_idx)


def test_a_step_is_counted_while_it_runs(tmp_path: Path) -> None:
    record = run(OnlyOnce(), tmp_path)
    assert record.steps["memory"] == 1
    assert (record.utilisation.flops.forward, record.utilisation.flops.backward) == (BORING, BORING)
    assert record.notes == []


def test_validation_after_each_step_is_not_counted(tmp_path: Path) -> None:
    record = run(BoringModel(), tmp_path, val_check_interval=1, limit_val_batches=1)
    assert record.utilisation.flops.forward == BORING
    assert not [note for note in record.notes if "FLOPs" in note]


def test_several_steps_of_the_memory_stage_count_as_their_mean(tmp_path: Path) -> None:
    """After 1 step of warm-up and 3 measured ones (batches 0 to 3), the memory stage has batches 4 to 6."""

    class Growing(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            rows = batch.repeat(batch_idx, 1)
            return super().training_step(rows, batch_idx)

    record = run(Growing(), tmp_path, profiler=make_profiler(warmup=1, measure=3, memory=3))
    assert record.utilisation.flops.forward == (4 + 5 + 6) / 3 * BORING


def test_without_a_memory_stage_the_work_is_unknown(tmp_path: Path) -> None:
    record = run(BoringModel(), tmp_path, profiler=make_profiler(warmup=1, measure=3, memory=0))
    assert (record.utilisation, record.notes) == (None, [])


@torch.library.custom_op("lm_profiler_work_tests::product", mutates_args=())
def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left @ right


class OfNoFormula(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        product(batch.detach(), batch.detach().t())
        return super().training_step(batch, batch_idx)


def test_an_operator_of_unknown_work_makes_a_lower_bound(tmp_path: Path) -> None:
    record = run(OfNoFormula(), tmp_path)
    assert record.utilisation.flops.uncounted == ["lm_profiler_work_tests::product"]
    assert record.utilisation.flops.forward == BORING
    (note,) = record.notes
    assert "lm_profiler_work_tests::product" in note
    assert "lm_profiler.register_flops" in note
    assert lower_bound_share(QUANTITIES["mfu"], record) == 1.0
    assert lower_bound_share(QUANTITIES["tokens_per_s"], record) is None


class WithMuon(BoringModel):
    """A layer of 2 x 32 weights without a bias, of which Muon makes an orthogonal matrix by five iterations."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 2, bias=False)

    def configure_optimizers(self) -> Any:
        return torch.optim.Muon(self.parameters(), lr=1e-3)


def test_the_products_of_muon_count_in_the_optimizer(tmp_path: Path) -> None:
    """Of m rows and n columns, m < n: X·Xᵀ, its square, and a product with X, in bfloat16."""
    record = run(WithMuon(), tmp_path)
    flops = record.utilisation.flops
    rows, columns = 2, 32
    iteration = 2 * rows * rows * columns + 2 * rows**3 + 2 * rows * rows * columns
    assert flops.optimizer == 5 * iteration
    assert record.floors["optimizer"].flops == {"bfloat16": 5 * iteration}
    assert flops.model == flops.forward + flops.backward
    assert record.utilisation.dtype == "float32"  # that of the model, not of its optimizer


def test_an_error_while_counting_does_not_reach_the_step(tmp_path: Path) -> None:
    with fault_in(formula_of, KeyError("mine")):
        record = run(BoringModel(), tmp_path)
    assert record.utilisation is None
    (note,) = record.notes
    assert note.startswith("FLOPs unknown")
    assert note.endswith("KeyError: 'mine'")


@pytest.mark.filterwarnings("ignore")  # of torch's compiler about itself
@pytest.mark.parametrize("make", [partial(Compiled, "aot_eager"), CompiledOutside], ids=["traced", "not at all"])
def test_a_compiled_step_is_counted_in_another_process(make: Any, tmp_path: Path) -> None:
    alone = make()
    before = recompilations()
    trainer_with([], tmp_path, max_steps=6).fit(alone)
    graphs = recompilations() - before
    torch._dynamo.reset()
    module = make()
    profiler = make_profiler(warmup=1, measure=2, memory=1, stop_when_done=False)
    before = recompilations()
    trainer_with([profiler], tmp_path, max_steps=6).fit(module)
    assert recompilations() - before == graphs
    assert module.calls == alone.calls == 6
    record = read_run(profiler.folder)
    assert record.utilisation is not None, record.notes
    flops = record.utilisation.flops
    assert (flops.forward, flops.backward, flops.recomputation) == module.paper(4)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_step_that_needs_values_is_unknown(tmp_path: Path) -> None:
    module = CompiledWithValues()
    record = run(module, tmp_path)
    assert record.utilisation is None
    (note,) = record.notes
    assert note.startswith("FLOPs unknown")
    assert "values" in note
    assert module.calls == 1 + 3 + 1


class Regular(BoringModel):
    """On rows of 32; a batch takes a millisecond of ``Ticking``."""

    def __init__(self, clock: Ticking) -> None:
        super().__init__()
        self.clock = clock

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.clock.now_ns += 1_000_000
        return super().training_step(batch, batch_idx)


def test_samples_of_partial_last_batches_are_counted(tmp_path: Path) -> None:
    """Of 10 rows in batches of 4: 4, 4 and 2."""
    clock = Ticking()
    profiler = make_profiler(warmup=0, measure=6, clock=clock)
    trainer_with([profiler], tmp_path).fit(Regular(clock), DataLoader(RandomDataset(32, 10), batch_size=4))
    record = read_run(profiler.folder)
    assert record.time["step"].n == 6
    assert record.throughput.samples_per_step == 3
    assert record.throughput.samples_per_s == pytest.approx(20 / 6 / record.time["step"].mean)


def test_batches_are_those_of_the_measured_steps(tmp_path: Path) -> None:
    """Eight steps of one batch, then two of four; FLOPs are counted in a step of four."""
    clock = Ticking()
    profiler = make_profiler(warmup=0, measure=10, memory=1, clock=clock, peak_flops_per_s=1e9)
    scheduler = GradientAccumulationScheduler({0: 1, 1: 4})
    data = DataLoader(RandomDataset(32, 16), batch_size=2)
    trainer_with([profiler, scheduler], tmp_path).fit(Regular(clock), data)
    record = read_run(profiler.folder)
    steps = record.time["step"]
    batches = {10: 1.6, 8: 1.0, 2: 4.0}[steps.n]
    assert record.throughput.samples_per_s == pytest.approx(2 * batches / steps.mean)
    (note,) = (note for note in record.notes if "step 9" in note)
    assert f"assume {batches:.3g} batches per step" in note
    assert record.utilisation.flops.forward == round(batches * 2 * 2 * 32 * 2)  # two rows, 32 by 2 weights


@pytest.mark.filterwarnings("ignore:.*configure_optimizers. returned .None.:UserWarning")
def test_without_an_optimizer_there_is_no_row_of_one(tmp_path: Path) -> None:
    found = run(LanguageModel(**TINY, optimizer="none"), tmp_path)
    assert (found.time["optimizer"].max, found.host_time["optimizer"].max) == (0.0, 0.0)
    assert "optimizer" not in found.floors
    assert "optimizer" not in [row[0].text for row in phase_table(found).rows]
