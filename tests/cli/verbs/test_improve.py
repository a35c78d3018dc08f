"""The verb: what it refuses, the setting that it writes down, and a real search without time."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import warm
import yaml
from refused import assert_refused_as_stored
from stored_texts import assert_stored
from tests.support.made_improve import made_improve, nothing_helped

from lm_profiler.analysis.remedies.remedy import Candidate
from lm_profiler.cli.call import Call
from lm_profiler.cli.verbs import improve
from lm_profiler.cli.verbs.improve import config_text
from lm_profiler.improve.decision import NumericsCheck, TimedRun
from lm_profiler.improve.search import FEWEST_RUNS, Searcher
from lm_profiler.record.improve_record import IMPROVE_FILE, IMPROVED_CONFIG, read_improve
from lm_profiler.sweep.sweep_folder import SweepFolder
from lm_profiler.sweep.sweep_plan import made_plan

OWN = """
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

class Own(LightningModule):
    def __init__(self, width: int = 4):
        super().__init__()
        self.layer = torch.nn.Linear(width, width)

    def train_dataloader(self):
        return DataLoader(torch.ones(64, self.layer.in_features), batch_size=2)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""


MANY = ",".join(map(str, range(60)))
REFUSED = [
    ["improve", *["--budget=soon"]],
    ["improve", *["--budget=0m"]],
    ["improve", *["--only"]],
    ["improve", *["--try.trace.steps=1,2"]],
    ["improve", *["--try.data.num_workers=2,2"]],
    ["improve", *[f"--try.data.num_workers={MANY}", f"--try.seed={MANY}"]],
    ["improve", *["--try=2"]],
    ["improve", *["--global_batch=any"]],
    ["improve", *["--only", "true"]],
    ["improve", *["--name=."]],
    ["improve", *["--name=/tmp/x"]],
    ["improve", *["--config=nowhere.yaml"]],
]


def test_wrong_calls_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    assert_refused_as_stored("cli/improve", REFUSED, capsys)
    assert not list(tmp_path.iterdir())


def test_the_written_setting_is_the_first_with_the_winners(tmp_path: Path) -> None:
    base = "model: {size: small}\ndata: {batch_size: 4}\nstages: {measure_steps: 7}\nname: x\n"
    (tmp_path / "base.yaml").write_text(base)
    call = ["fit", f"--config={tmp_path}/base.yaml", "--model.num_layers=2", "--trainer.max_steps=9"]
    changes = {"model.compile": "true", "data.batch_size": "2", "trainer.precision": "bf16-mixed"}
    text = config_text(made_improve(options=changes, command="improve\nit"), call)
    assert yaml.safe_load(text) == {
        "model": {"size": "small", "num_layers": 2, "compile": True},
        "data": {"batch_size": 2},
        "stages": {"measure_steps": 7},
        "trainer": {"max_steps": 9, "precision": "bf16-mixed"},
    }
    (tmp_path / "improved.yaml").write_text(text)
    assert Call(["fit", f"--config={tmp_path}/improved.yaml"]).content == yaml.safe_load(text)


def test_the_output_ends_with_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with SweepFolder(tmp_path / "it", made_plan("it", "", [], {}, [])) as folder:
        for record, is_better in ((made_improve(), True), (nothing_helped(), False)):
            assert improve._print_end(folder, record, ["fit"]) == 0
            assert capsys.readouterr().out.splitlines()[-1] == f"written to {folder.path}"
            assert (folder.path / IMPROVED_CONFIG).exists() == is_better


def test_a_search_may_end_before_its_first_change(tmp_path: Path) -> None:
    def run_call(*call: str) -> tuple[int, str, str]:
        done = warm.run_python("-m", "lm_profiler", *call, folder=tmp_path)
        return done.returncode, done.stdout, done.stderr

    (tmp_path / "own_module.py").write_text(OWN)
    steps = ("--stages.warmup_steps=1", "--stages.measure_steps=6", "--trace.steps=0", "--actions.steps=0")
    call = ["improve", "--model=own_module.Own", "--trainer.accelerator=cpu", *steps, "--name=it"]
    code, out, err = run_call(*call, "--try.model.wdth=8")
    assert (code, out) == (2, "")
    assert_stored("cli/refused: improve", {"wdth": err})
    assert not (tmp_path / "logs").exists()

    code, _, err = run_call(*call, "--torch.compile_mode=fastest", "--torch.compile=true")  # refused when it is built
    assert code == 2
    assert "torch.compile_mode:" in err
    assert not (tmp_path / "logs").exists()

    call += ["--try.model.width=8", "--budget=0.1s"]
    code, out, _ = run_call(*call, "--format=json")
    assert code == 0
    record = read_improve(tmp_path / "logs" / "it")
    assert (record.ended, record.options, record.final) == ("budget", {}, None)
    assert json.loads(out) == json.loads((tmp_path / "logs" / "it" / IMPROVE_FILE).read_text())  # and nothing else
    code, _, err = run_call(*call, "--model.width=3")
    assert code == 2
    assert "logs/it," in err
    code, out, _ = run_call("report", "logs/it")
    assert code == 0
    assert "within the" in out


def test_the_smallest_budget_is_enough_for_a_proof() -> None:
    """Each run takes a second; the only change makes steps twice as fast."""

    def is_tried(budget_s: float) -> bool:
        tried_changes: list[Mapping[str, str]] = []

        def time_run(changes: Mapping[str, str], number: int) -> TimedRun:
            tried_changes.append(changes)
            return TimedRun(0.5 if changes else 1.0, took_s=1.0)

        change = Candidate("a", {"a": "1"}, "a")
        Searcher([change], budget_s, time_run, lambda _: NumericsCheck(is_tolerated=True)).improve()
        return {"a": "1"} in tried_changes

    assert is_tried(budget_s=FEWEST_RUNS)
    assert not is_tried(budget_s=FEWEST_RUNS - 1)
