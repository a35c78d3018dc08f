"""What a run is planned to need is in its record; one that cannot fit is refused, and nothing of it is built."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
import yaml
from faults import fault_in
from lightning.pytorch import LightningModule, Trainer
from stored_texts import assert_stored
from torch.utils.data import DataLoader

import lm_profiler
import lm_profiler.cli.verbs.trainer
from lm_profiler.cli import preflight, rehearse
from lm_profiler.cli.main import main
from lm_profiler.measure.counts import registered
from lm_profiler.record.quantities import bytes_text
from lm_profiler.record.run_record import RunRecord, read_run

pytestmark = pytest.mark.usefixtures("no_rates")


CHECK = "--check_memory=true"
TINY = {
    "model": {"size": "small", "d_model": 16, "d_ff": 24, "num_layers": 1, "num_heads": 2, "vocab_size": 50},
    "data": {"batch_size": 64, "context_length": 8},
    "trainer": {"accelerator": "cpu"},
    "stages": {"warmup_steps": 1, "measure_steps": 2},
    "trace": {"steps": 0},
}
TINY_PARAMETERS = 2 * 50 * 16 + 4 * 16**2 + 3 * 16 * 24 + 2 * 16 + 16
"""Embedding and head, attention, SwiGLU and two norms of the block, the last norm."""


class DependsOnValues(LightningModule):
    """Nobody knows how many numbers are positive without computing them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def train_dataloader(self) -> Any:
        return DataLoader(torch.randn(64, 4), batch_size=2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.weight * batch[batch * self.weight > 0]).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class NeverMade(DependsOnValues):
    """Takes all the CPU time that a rehearsal may, of which this leaves little."""

    def __init__(self) -> None:
        super().__init__()
        if signal.setitimer(signal.ITIMER_PROF, 0.0)[0]:  # in a rehearsal
            signal.setitimer(signal.ITIMER_PROF, 0.1)
            while True:
                pass


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    monkeypatch.chdir(tmp_path)


def last_run(name: str = "tiny") -> RunRecord:
    return read_run(max(Path("logs", name).iterdir(), key=lambda folder: int(folder.name.rpartition("_")[2])))


def test_a_module_that_cannot_fit_is_not_built(
    set_free_memory: Callable[[int], None], no_weights: None, capsys: pytest.CaptureFixture[str]
):
    set_free_memory(1 << 28)
    assert main(["fit", "--config=tiny.yaml", CHECK, "--data.batch_size=1000000000000"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "256 MiB" in first
    assert f"parameters {bytes_text(4 * TINY_PARAMETERS)}" in first
    record = last_run()
    assert record.status == "refused"
    assert all(remedy in second for remedy in record.failure.remedies)
    assert_stored("cli/preflight", {"a batch that is too large": re.sub(r"=\d+", "=NUMBER", second)})
    assert record.model.parameters == TINY_PARAMETERS
    assert record.planned.available == 1 << 28
    assert (record.planned.peak or 0) > 10**12 * 8 * 50 * 4  # the logits alone
    assert record.environment is not None  # so that it stands beside the other runs of this device
    names = {path.name for path in Path("logs/tiny/version_0").iterdir()}
    assert {name for name in names if not name.startswith("events.")} == {
        *("run.json", "config.yaml", "memory_timeline.planned.json")
    }


@pytest.mark.parametrize("more, factor", [([], 4), (["--model.optimizer=sgd"], 2)], ids=["adamw", "sgd"])
def test_states_that_do_not_fit_are_refused_without_a_rehearsal(
    more: list[str], factor: int, set_free_memory: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    needs = factor * 4 * TINY_PARAMETERS
    set_free_memory(needs - 1)
    with fault_in(rehearse.start_rehearsal) as rehearsed:
        assert main(["fit", "--config=tiny.yaml", *more]) == 2
    assert rehearsed == []
    line, _ = capsys.readouterr().err.splitlines()
    assert f"{bytes_text(needs)} without activations (parameters {bytes_text(4 * TINY_PARAMETERS)}, " in line
    record = last_run()
    assert (record.status, record.planned and record.planned.available) == ("refused", needs - 1)


def test_an_ambiguous_size_is_noted_in_a_refusal(
    set_free_memory: Callable[[int], None], capsys: pytest.CaptureFixture[str]
):
    set_free_memory(1 << 28)
    assert main(["fit", "--config=xl_bf16", "--trainer.accelerator=cpu"]) == 2
    assert "in cs336-2026, xl means 2560/10240/32/32" in capsys.readouterr().err
    assert main(["fit", "--model.size=cs336-2025/xl", "--trainer.accelerator=cpu"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_the_largest_that_fits_is_offered(
    set_free_memory: Callable[[int], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_free_memory(400_000)
    assert main(["fit", "--config=tiny.yaml", CHECK]) == 2
    option = capsys.readouterr().err.splitlines()[1].removeprefix("would fit: ").split("; ")[0]
    batch = int(option.removeprefix("--data.batch_size="))
    assert main(["validate", "--config=tiny.yaml", CHECK]) == 0  # which needs less
    own, fit = os.getpid(), Trainer.fit
    monkeypatch.setattr(Trainer, "fit", lambda *args, **given: None if os.getpid() == own else fit(*args, **given))
    set_free_memory(360_000)  # of 400,000 nine tenths may be filled
    assert main(["fit", "--config=tiny.yaml", CHECK, option]) == 0
    assert main(["fit", "--config=tiny.yaml", CHECK, f"--data.batch_size={batch + 1}"]) == 2


def test_the_check_can_be_left_out(set_free_memory: Callable[[int], None]) -> None:
    set_free_memory(1000)
    assert main(["fit", "--config=tiny.yaml", "--check_memory=false"]) == 0
    assert last_run().planned is None
    assert main(["validate", "--config=tiny.yaml"]) == 2


@pytest.mark.parametrize(
    "module,why", [(DependsOnValues, "depends on the values"), (NeverMade, "took more than 20 s of CPU time")]
)
def test_a_run_without_a_plan_in_time_starts(
    module: type[LightningModule], why: str, set_free_memory: Callable[[int], None]
):
    warm.load_server()
    set_free_memory(1)
    options = [f"--model={__name__}.{module.__name__}", "--data=null", "--stages.measure_steps=1", "--trace.steps=0"]
    assert main(["fit", *options, "--trainer.accelerator=cpu", "--check_memory=true"]) == 0
    plan = last_run("lm_profiler").planned
    assert plan.peak is None
    assert why in (plan.unknown or "")


def test_a_formula_that_raises_is_refused_at_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    rehearsed = []

    def rehearse_here(cli: Any, *_: Any, **__: Any) -> Any:
        rehearsed.append(cli)
        return rehearse.Unplanned("the formula of mine::mm raises KeyError", is_wrong_call=True)

    monkeypatch.setattr(preflight, "_rehearse", rehearse_here)
    lm_profiler.register_flops("mine::mm", len)
    try:
        assert main(["fit", "--config=tiny.yaml"]) == 2
    finally:
        registered.operator_formulas.clear()
    assert "the formula of mine::mm raises KeyError" in capsys.readouterr().err
    assert len(rehearsed) == 1


@pytest.mark.parametrize("strategy, opens", [("ddp_fork", 0), ("ddp_notebook", 0), ("ddp_spawn", 1), ("ddp", 1)])
def test_no_device_is_opened_before_a_fork(strategy: str, opens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA context does not survive a fork, and the driver makes one to read how much memory is free."""
    opened: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: opened.append(device) or (7, 9))
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False, enable_checkpointing=False)
    with monkeypatch.context() as patch:
        patch.setattr(type(trainer.strategy), "root_device", torch.device("cuda", 0))
        assert preflight.free_bytes_per_replica(trainer) == (7 if opens else None)
    assert len(opened) == opens
    assert preflight.free_bytes_per_replica(trainer)  # the host's memory may always be read
    assert len(opened) == opens
