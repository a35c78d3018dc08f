"""The live figures of a watched run: right, equal to the report of the same steps, and in all loggers."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from faults import Tiny
from known_loop import make_profiler, trainer_with
from lightning.pytorch.loggers import CSVLogger
from prometheus_client.parser import text_string_to_metric_families
from recorded import FLOPS, LEVEL, evidence_of
from torch import Tensor
from torch.utils.data import DataLoader

from lm_profiler.analysis.conclude import conclude
from lm_profiler.analysis.steps.summaries import BatchCount
from lm_profiler.callbacks import ExportOptions
from lm_profiler.callbacks.live import CountedBatches, LiveRows, LiveSums, StageFigures, live_figures
from lm_profiler.measure.clocks.tape import TimedSteps
from lm_profiler.record.parts import TIMED
from lm_profiler.record.watch_files import read_last_steps

S = 1_000_000_000


def timed(*steps: dict[str, float]) -> TimedSteps:
    """Steps by the seconds of their parts and of the step."""
    seconds = np.array([[step.get(part, 0.0) for part in TIMED] for step in steps]).reshape(-1, len(TIMED))
    instants = np.arange(len(steps)) * S
    return TimedSteps(instants, instants + S, seconds, seconds)


def test_figures_are_those_of_a_hand_count() -> None:
    sums = LiveSums()
    sums.add_steps(timed({"data": 0.5, "step": 2.0}, {"data": 1.5, "step": 3.0}))
    sums.add_batches(CountedBatches(steps=2, tokens=1000, samples=10, useful_tokens=600))
    sums.add_memory(held_bytes=7, peak_bytes=9)
    sums.add_steps(timed({"step": 5.0}))
    sums.add_batches(CountedBatches(steps=1, tokens=2000, samples=20, useful_tokens=1400))
    sums.add_memory(held_bytes=6, peak_bytes=8)
    figures = live_figures(sums, StageFigures(mfu_seconds=0.4, tokens_per_step=500.0), ranks=4)
    assert figures == {
        "tokens_per_second": pytest.approx(4 * 3000 / 10.0),
        "useful_tokens_per_second": pytest.approx(4 * 2000 / 10.0),
        "samples_per_second": pytest.approx(4 * 30 / 10.0),
        "mfu": pytest.approx(0.4 * 2 / (10.0 / 3)),  # twice the tokens of a step of the stages
        "step_seconds": pytest.approx(10.0 / 3),
        "data_share": pytest.approx(0.2),
        "memory_bytes": 6.0,
        "peak_memory_bytes": 9.0,
    }


def test_unknown_figures_are_left_out() -> None:
    sums = LiveSums()
    assert live_figures(sums, StageFigures(mfu_seconds=0.4)) == {}
    sums.add_steps(timed({"step": 2.0}, {"step": float("nan")}))  # on a device, an instant may be unknown
    sums.add_batches(CountedBatches(steps=1, tokens=5, samples=None))
    sums.add_batches(CountedBatches(steps=1, tokens=None, samples=None))
    figures = live_figures(sums, StageFigures())
    assert figures == {"step_seconds": 2.0, "data_share": 0.0}


def test_figures_equal_the_report_of_the_same_steps() -> None:
    """The record's own throughput and MFU, concluded from the same times and counts."""
    tokens, samples = 4096, 8
    steps = [{"data": 0.1 * ms, "forward": 0.9 * ms} for ms in LEVEL]
    evidence = evidence_of(
        steps,
        flops=FLOPS,
        peak_flops_per_s=1e6,
        batch_counts=[[BatchCount(step=1, batches=1, samples=samples, elements=tokens)]],
        work_batches=1,
    )
    rows = [replace(row, tokens=tokens) for row in evidence.rows]
    record = conclude(replace(evidence, rows=rows))

    sums = LiveSums()
    sums.add_steps(timed(*({"data": 1e-4 * ms, "step": 1e-3 * ms} for ms in LEVEL)))
    sums.add_batches(CountedBatches(len(LEVEL), tokens * len(LEVEL), samples * len(LEVEL)))
    figures = live_figures(sums, StageFigures.from_stages(rows, record))
    assert figures["tokens_per_second"] == pytest.approx(record.throughput.tokens_per_s, rel=1e-6)
    assert figures["samples_per_second"] == pytest.approx(record.throughput.samples_per_s, rel=1e-6)
    assert figures["mfu"] == pytest.approx(record.utilisation.mfu, rel=1e-6)
    assert figures["step_seconds"] == pytest.approx(record.time["step"].mean, rel=1e-6)
    assert figures["data_share"] == pytest.approx(record.shares["data"], rel=1e-6)


def test_a_row_is_due_after_its_steps_or_after_ten_seconds() -> None:
    rows = LiveRows(StageFigures(), every_steps=3)
    rows.sums.add_steps(timed({"step": 1.0}, {"step": 1.0}))
    assert not rows.is_due(2 * S)
    assert rows.is_due(10 * S)
    rows.sums.add_steps(timed({"step": 1.0}))
    assert rows.is_due(3 * S)
    assert rows.end_row(3 * S)["lm_profiler/step_seconds"] == 1.0
    assert not rows.is_due(12 * S)
    by_time_alone = LiveRows(StageFigures(), every_steps=0)  # the Trainer logs nothing by steps
    by_time_alone.sums.add_steps(timed(*({"step": 1.0} for _ in range(1000))))
    assert not by_time_alone.is_due(9 * S)


class Counting(Tiny):
    """Reports tokens, and how many it has seen."""

    rows_seen = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.rows_seen += len(batch)
        return super().training_step(batch, batch_idx)

    def tokens_in(self, batch: Tensor) -> int:
        return 7 * len(batch)


@pytest.mark.usefixtures("hands_over_often")
def test_a_watched_run_logs_its_throughput_under_accumulation(tmp_path: Path) -> None:
    """Batches of 3 and of 1 rows, two in a step: each row of the logger is that of its own steps' times."""
    steps, stages = 60, 4
    export = ExportOptions(trackers=True, textfile=tmp_path / "lm.prom")
    profiler = make_profiler(warmup=1, measure=3, watch=True, log_dir=tmp_path / "logs", export=export)
    lines = CSVLogger(tmp_path / "csv")
    options = {"accumulate_grad_batches": 2, "log_every_n_steps": 10}
    trainer = trainer_with([profiler], tmp_path, max_steps=steps, logger=lines, **options)
    sizes = [3, 1] * steps
    batches = [torch.rand(size, 4) for size in sizes]
    module = Counting()
    trainer.fit(module, DataLoader(batches, batch_size=None))
    assert module.rows_seen == sum(sizes)

    with Path(lines.log_dir, "metrics.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row.get("lm_profiler/tokens_per_second")]
    watched = read_last_steps(profiler.folder)
    assert len(watched) == steps - stages
    previous_step = stages
    for row in rows:
        step = int(row["step"])
        seconds = watched["seconds"][(previous_step < watched["step"]) & (watched["step"] <= step)]
        assert len(seconds) >= min(10, step - previous_step)
        step_s = seconds[:, -1].mean()
        assert float(row["lm_profiler/step_seconds"]) == pytest.approx(step_s, rel=1e-5)
        assert float(row["lm_profiler/tokens_per_second"]) == pytest.approx(28 / step_s, rel=1e-5)
        assert float(row["lm_profiler/samples_per_second"]) == pytest.approx(4 / step_s, rel=1e-5)
        data_s = seconds[:, TIMED.index("data")].mean()
        assert float(row["lm_profiler/data_share"]) == pytest.approx(data_s / step_s, rel=1e-5)
        assert 0 < float(row["lm_profiler/memory_bytes"]) <= float(row["lm_profiler/peak_memory_bytes"])
        previous_step = step
    assert previous_step == steps
    assert len(rows) >= 2
    families = text_string_to_metric_families((tmp_path / "lm.prom").read_text(encoding="utf-8"))
    [tokens] = [sample.value for family in families for sample in family.samples if "tokens_total" in sample.name]
    assert tokens == 28 * (steps - stages)
