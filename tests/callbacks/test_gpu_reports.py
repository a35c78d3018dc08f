"""On a GPU: what a systems report asks of one, each in a run of the command line. Run on the simulated one alone."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lm_profiler.cli.main import main
from lm_profiler.record.memory_timeline import read_timelines
from lm_profiler.record.run_record import read_run

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed")

SMALL = (
    *("--config=demo", "--model.num_layers=1", "--model.vocab_size=100", "--data.context_length=64"),
    *("--stages.warmup_steps=2", "--stages.measure_steps=4", "--check_memory=false", "--actions.steps=0"),
)


def test_the_allocators_snapshot_becomes_a_timeline(tmp_path: Path) -> None:
    options = ("--memory.history=true", "--trace.steps=0", "--data.batch_size=64")  # a batch larger than the weights
    assert main(["fit", *SMALL, f"--log_dir={tmp_path}", *options]) == 0
    folder = tmp_path / "demo" / "version_0"
    record = read_run(folder)
    [measured] = [timeline for timeline in read_timelines(folder) or () if timeline.source == "measured"]
    peak = max(part.allocated_peak or 0 for part in record.memory.parts.values())
    assert measured.peak == pytest.approx(peak, rel=0.02)
    assert any(allocation.line for allocation in measured.largest)


@two_gpus
def test_collectives_over_nccl(tmp_path: Path) -> None:
    if torch.ones(2, device="cuda").sum().item() != 2.0:
        pytest.skip("a simulated GPU computes no numbers that could be checked")
    table = tmp_path / "collectives.md"
    assert main(["collectives", "--backend=nccl", "--sizes", "1MB", "--repeats", "6", f"--output={table}"]) == 0
    assert table.read_text().count("nccl") == 4


@two_gpus
@pytest.mark.parametrize("strategy", ["overlap_ddp", "fsdp2"])
def test_exposed_communication_of_two_gpus(tmp_path: Path, strategy: str) -> None:
    two = ("--trainer.devices=2", f"--trainer.strategy={strategy}", "--trace.steps=2", f"--log_dir={tmp_path}")
    call = [sys.executable, "-m", "lm_profiler", "fit", *SMALL, *two]  # the second rank is started by the same words
    done = subprocess.run(call, cwd=ROOT, timeout=240, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert read_run(tmp_path / "demo" / "version_0").status == "ok"
    columns = ("--columns", "communication_s,exposed_communication_s", f"--output={tmp_path / 'of.json'}")
    assert main(["report", str(tmp_path / "demo"), *columns]) == 0
    assert '"communication_s": null' not in (tmp_path / "of.json").read_text()
