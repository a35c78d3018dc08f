"""TensorBoard shows the figures of steps.csv."""

from pathlib import Path

import pytest
from known_loop import TOKENS_IN_A_BATCH, make_profiler, trainer_with
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from lm_profiler.callbacks import TrainingProfiler
from lm_profiler.record.quantities import TIMED
from lm_profiler.record.steps import StepRow, read_steps

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorboard")


PEAK_FLOPS_PER_S = 1e9
FLOPS = 2 * 2 * 32 * 2
"""Of a row of 32 by a layer of two: forward, and the gradient of the weight."""


class Tokens(BoringModel):
    def tokens_in(self, batch: Tensor) -> int:
        return TOKENS_IN_A_BATCH


def fit(folder: Path, logger: object) -> TrainingProfiler:
    profiler = make_profiler(warmup=2, measure=5, memory=1, trace=1, peak_flops_per_s=PEAK_FLOPS_PER_S)
    trainer_with([profiler], folder, logger=logger, log_every_n_steps=1).fit(Tokens())
    return profiler


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def expected(row: StepRow) -> dict[str, float]:
    """By hand, not from the registry: milliseconds, GiB, tokens a second."""
    times = {
        f"{group}/{part}": row.time(part, clock) * 1e3
        for group, clock in (("time_ms", "device"), ("host_time_ms", "host"))
        for part in (*TIMED, "forward_backward")
    }
    assert row.tokens == TOKENS_IN_A_BATCH
    return {
        **times,
        "memory_gib/resident_peak": row.memory[2] / 2**30,
        "throughput/tokens_per_s": row.tokens / row.time("step"),
        "throughput/mfu": 100 * FLOPS / PEAK_FLOPS_PER_S / row.time("step"),
    }


@pytest.mark.parametrize("theirs", [True, False], ids=["their logger", "no logger"])
def test_scalars_are_those_of_the_measured_steps(tmp_path: Path, theirs: bool) -> None:
    profiler = fit(tmp_path, TensorBoardLogger(tmp_path, name="mine") if theirs else False)
    rows = {row.step: row for row in read_steps(profiler.folder / "steps.csv") if row.stage == "measure"}
    assert list(rows) == [3, 4, 5, 6, 7]
    shown = {tag: by_step for tag, by_step in scalars(profiler.folder).items() if tag != "hp_metric"}
    wanted = {step: expected(row) for step, row in rows.items()}
    assert {tag for tag in shown if "/" in tag} >= set(wanted[3])
    for tag in wanted[3]:
        assert shown[tag] == pytest.approx({step: wanted[step][tag] for step in rows}, rel=1e-5, abs=1e-5), tag
    for tag, by_step in shown.items():
        if tag.startswith(("time_ms/", "host_time_ms/", "memory_gib/", "throughput/")):
            assert set(by_step) == set(rows), tag
    assert profiler.record.notes == []
    assert [*shown["Summary/step_ms"].values()] == pytest.approx([profiler.record.time["step"].mean * 1e3], rel=1e-6)
    assert not (profiler.folder / "hparams.yaml").exists()
