"""A loop whose loader and step sleep known times, through the command.

Sleeps are robust: a busy machine never shortens them. It does lengthen what the loop does beside them, so that it waits
less for the loader: five sixths of the slack may be lost so. How near it comes is seen in simulations (analysis/why).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import warm

from lm_profiler.cli.main import main
from lm_profiler.record.run import Slack, read_run

pytestmark = pytest.mark.usefixtures("no_rates", "no_preflight")


SLEEPERS = """
import time
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __init__(self, batch_s):
        self.batch_s = batch_s
    def __len__(self):
        return 10_000
    def __getitem__(self, index):
        time.sleep(self.batch_s)
        return torch.ones(1)

class Sleeper(LightningModule):
    def __init__(self, batch_s: float, step_s: float, workers: int = 1):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.batch_s, self.step_s, self.workers = batch_s, step_s, workers
    def train_dataloader(self):
        return DataLoader(Slow(self.batch_s), num_workers=self.workers)
    def training_step(self, batch, index):
        time.sleep(self.step_s)
        return (self.weight * batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sleepers.py").write_text(SLEEPERS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sleepers", raising=False)
    return tmp_path


@dataclass(frozen=True)
class Loop:
    name: str
    batch_s: float
    step_s: float
    workers: int
    steps: int
    slack_s: float

    @property
    def call(self) -> list[str]:
        options = [
            f"--model.batch_s={self.batch_s}",
            f"--model.step_s={self.step_s}",
            f"--model.workers={self.workers}",
        ]
        stages = ["--stages.warmup_steps=3", "--stages.measure_steps=10", "--memory.steps=0", "--trace.steps=0"]
        asked = [f"--whatif.steps={self.steps}", "--trainer.accelerator=cpu", f"--name={self.name}"]
        return ["fit", "--model=sleepers.Sleeper", *options, *stages, *asked, "--check_memory=false"]


LOOPS = [
    Loop("two workers, loader-bound", 0.12, 0.036, 2, 336, 0.024),
    Loop("one worker, compute-bound", 0.03, 0.06, 1, 252, 0.03),
]


def test_loops_that_sleep_known_times(here: Path) -> None:
    """Side by side: they take long, and hardly any of it on a CPU."""
    running = [warm.start("-m", "lm_profiler", *loop.call, out=here / f"{loop.name}.txt") for loop in LOOPS]
    for loop, process in zip(LOOPS, running, strict=True):
        code, printed = warm.end(process), (here / f"{loop.name}.txt").read_text()
        assert code == 0, printed
        slack = read_run(here / "logs" / loop.name / "version_0").slack
        assert slack is not None
        assert_is_known(loop, slack, printed)


def assert_is_known(loop: Loop, slack: Slack, printed: str) -> None:
    loader_bound = loop.batch_s / loop.workers > loop.step_s
    of = {place.place: place.slack_s for place in slack.places}
    host_s = min(of[place] for place in ("forward", "backward", "optimizer"))
    on_path_s, off_path_s = (of["loader"], host_s) if loader_bound else (host_s, of["loader"])
    assert on_path_s < loop.slack_s / 6 < off_path_s
    whose = "loader" if loader_bound else "compute"
    saved = {of.place: of for of in slack.savings[1::3]}  # at a quarter of the step, less than the slack
    assert saved[whose].saves_s == pytest.approx(saved[whose].faster_s, abs=loop.slack_s / 2)
    assert saved[({"loader", "compute"} - {whose}).pop()].saves_s < loop.slack_s / 2
    assert "slack," in printed
    assert f"making {'the ' * loader_bound}{whose} " in printed


def test_it_is_off_unless_asked_for(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model.batch_s=0", "--model.step_s=0", "--memory.steps=0", "--trace.steps=0", "--name=plain"]
    assert main(["fit", "--model=sleepers.Sleeper", *options, "--trainer.accelerator=cpu"]) == 0
    record = read_run(here / "logs" / "plain" / "version_0")
    assert record.slack is None
    assert "whatif" not in {**record.steps, **record.steps_planned}
    assert "slack" not in capsys.readouterr().out


def test_a_negative_number_of_steps_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--config=demo", "--whatif.steps=-1"]) == 2
    assert "whatif.steps:" in capsys.readouterr().err
