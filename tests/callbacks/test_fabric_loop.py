"""Loops of Lightning Fabric, and loops that are found in a program without a line of ours."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import known_loop
import own_loops
import pytest
import torch
from known_loop import SimulatedClock, make_profiler
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
from own_loops import SECONDS, STEPS, ZOO, SlowModel, SlowSGD, spend
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from warm import run_python

from lm_profiler.callbacks import ExportOptions, admitted_loop
from lm_profiler.callbacks.found_loop import facts_of_accelerator, facts_of_transformers
from lm_profiler.callbacks.hooked_loop import HookedLoop
from lm_profiler.callbacks.hooked_run import LoopSearch
from lm_profiler.callbacks.marks.torch_hooks import OPTIMIZER_HOOKS
from lm_profiler.callbacks.own_loop import profile
from lm_profiler.external_callbacks import CLAIMED
from lm_profiler.external_loops import VARIABLE, begin_search, external_fabric_callbacks
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.run_record import read_run
from lm_profiler.record.steps import read_steps

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYPROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(known_loop, "CLOCK", SimulatedClock())
    own_loops.make_clipping_slow(monkeypatch)
    # What is to happen when the program ends would otherwise happen when the tests end.
    monkeypatch.setattr("lm_profiler.callbacks.hooked_run.atexit", SimpleNamespace(register=lambda call: call))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    yield
    OPTIMIZER_HOOKS.detach()


class SlowToMove:
    """A batch that takes time on its way to the device."""

    def to(self, device: torch.device, **_: Any) -> Tensor:
        spend("transfer")
        return torch.ones(2, 3)


class Batches(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        while True:
            spend("data")
            yield SlowToMove()


def train(fabric: Fabric, batches_per_step: int, is_apart: bool = False) -> None:
    """As litgpt does it."""
    model: Any = SlowModel()
    optimizer: Any = SlowSGD(model.parameters())
    if is_apart:
        model = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(optimizer)
    else:
        model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(Batches(), batch_size=None))
    if not is_apart:
        fabric.call("on_train_epoch_start", 1, 2, 3)  # the program's own hook, with arguments of its own
    for number, batch in zip(range(STEPS * batches_per_step), loader, strict=False):
        is_accumulating = (number + 1) % batches_per_step != 0
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            fabric.backward(model(batch).sum())
        if not is_accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()


def assert_known(folder: Path, batches_per_step: int) -> None:
    truth = {name: SECONDS[name] * batches_per_step for name in ("data", "transfer", "forward", "backward")}
    truth |= {name: SECONDS[name] for name in ("clip", "optimizer", "zero_grad")}
    rows = [row for row in read_steps(folder / "steps.csv") if row.stage == "measure"]
    assert len(rows) == 8
    for part in PARTS:
        times_s = [row.time(part) for row in rows]
        assert times_s == pytest.approx([truth.get(part, 0.0)] * len(rows), abs=5e-9), part


@pytest.mark.parametrize(
    "batches_per_step, precision, is_apart", [(1, "32-true", False), (3, "bf16-mixed", False), (1, "32-true", True)]
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_phases_of_a_fabric_loop(batches_per_step: int, precision: Any, is_apart: bool, tmp_path: Path) -> None:
    profiler = make_profiler(measure=8, export=ExportOptions(trackers=True))
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision, callbacks=[profiler], loggers=[logger])
    train(fabric, batches_per_step, is_apart)
    record = profiler.record
    assert (record.status, record.loop, record.notes) == ("ok", "Fabric", [])
    assert (record.model.precision, record.model.accumulate_grad_batches) == (precision, batches_per_step)
    assert record.model.class_path.endswith("SlowModel")
    assert_known(profiler.folder, batches_per_step)
    assert any("lm_profiler/" in path.read_text() for path in tmp_path.rglob("metrics.csv"))


def test_fabric_compiles_what_was_compiled_before_its_setup() -> None:
    """Fabric keeps the plain module beside the compiled one: litgpt's pretraining was advised to compile its model."""
    fabric = Fabric(accelerator="cpu", devices=1)
    compiled = fabric.setup_module(torch.compile(nn.Linear(2, 2), backend="eager"))
    assert HookedLoop([compiled], []).is_compiled
    assert not HookedLoop([fabric.setup_module(nn.Linear(2, 2))], []).is_compiled


def request(folder: Path, **others: Any) -> str:
    steps = {"warmup_steps": 2, "measure_steps": 8, "trace_steps": 0, "memory_steps": 0, "action_steps": 0}
    return json.dumps({"options": {**steps, "log_dir": str(folder / "logs"), "name": "found", **others}})


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[LoopSearch]:
    """The runs that would end with the program; their clock is simulated."""
    kept: list[LoopSearch] = []
    monkeypatch.setattr(admitted_loop, "end_with_program", kept.append)
    make_options = admitted_loop.loop_options
    monkeypatch.setattr(admitted_loop, "loop_options", lambda **given: make_options(**given, clock=known_loop.CLOCK))
    return kept


def test_a_fabric_loop_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, searches: list[LoopSearch]) -> None:
    monkeypatch.setenv(VARIABLE, request(tmp_path))
    assert external_fabric_callbacks() == []
    train(Fabric(accelerator="cpu", devices=1), batches_per_step=1)
    assert read_run(tmp_path / "logs/found/version_0").loop == "Fabric"
    assert_known(tmp_path / "logs/found/version_0", batches_per_step=1)


def test_a_found_loop_claims_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, searches: list[LoopSearch]):
    claims = tmp_path / "claims"
    claims.mkdir()
    monkeypatch.setenv(VARIABLE, json.dumps({**json.loads(request(tmp_path)), "claims": str(claims), "command": "x"}))
    begin_search()
    ZOO["usual"].run()
    record = read_run(tmp_path / "logs/found/version_0")
    assert (record.status, record.loop, record.command) == ("ok", "own", "x")
    assert (claims / CLAIMED).readlink() == Path("loop")
    begin_search()  # a Trainer of another process has the run
    (claims / CLAIMED).unlink()
    (claims / CLAIMED).symlink_to("1")
    ZOO["usual"].run()
    assert len([*tmp_path.glob("logs/found/*")]) == 1


def test_a_trainer_is_no_loop_of_this_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, searches: list[LoopSearch]):
    from lm_profiler.external_callbacks import external_callbacks

    monkeypatch.setattr("lm_profiler.callbacks.shortcut._admitted_number", None)
    monkeypatch.setenv(VARIABLE, request(tmp_path))
    begin_search()
    trainer = known_loop.trainer_with(external_callbacks(), tmp_path, max_steps=14)
    trainer.fit(known_loop.KnownModule(), known_loop.SlowLoader())
    assert [run.loop for run in map(read_run, tmp_path.glob("logs/found/*"))] == ["Trainer"]
    assert searches == []


def test_a_trainer_within_profile_has_a_callback_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = known_loop.trainer_with([], tmp_path, max_steps=3)
    with profile(quiet=True) as run:
        trainer.fit(known_loop.KnownModule(), known_loop.SlowLoader())
    assert run.record is None
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lm_profiler")]
    assert "Trainer(callbacks=[*yours, *profiling_callbacks()])" in line


def test_a_wrong_request_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for value in ("", "0"):
        monkeypatch.setenv(VARIABLE, value)
        begin_search()
        assert OPTIMIZER_HOOKS.step_begins is None
    monkeypatch.setenv(VARIABLE, '{"options": {"measure_steps": -1}}')
    begin_search()
    ZOO["usual"].run()
    assert capsys.readouterr().err.count("\n") == 1


def test_other_frameworks_state_their_facts() -> None:
    """Stand-ins: neither accelerate nor what transformers' Trainer needs is installed."""
    arguments = SimpleNamespace(
        bf16=True, fp16=False, device=torch.device("cpu"), process_index=1, world_size=2, gradient_accumulation_steps=4
    )
    facts = facts_of_transformers(SimpleNamespace(args=arguments))
    assert (facts.kind, facts.precision, facts.batches_per_step) == ("transformers", "bf16-mixed", 4)
    accelerator = SimpleNamespace(device=torch.device("cpu"), process_index=0, num_processes=2, mixed_precision="fp16")
    assert facts_of_accelerator(accelerator).precision == "16-mixed"


PROGRAM = """
import sys, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in torch.utils.data.DataLoader(torch.ones(80, 4), batch_size=4):
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained", "lightning" in sys.modules)
sys.exit(7)
"""


def entry_point_folder(folder: Path) -> Path:
    """A folder for PYTHONPATH with the entry point of pyproject.toml, which this environment may not have yet."""
    metadata = folder / "loops-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: loops\nVersion: 1\n")
    target = PYPROJECT["project"]["entry-points"]["torch.backends"]["lm_profiler"]
    (metadata / "entry_points.txt").write_text(f"[torch.backends]\nloops = {target}\n")
    return folder


def test_run_finds_a_loop_without_lightning(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    few = ("--warmup_steps=2", "--measure_steps=5", "--trace_steps=0", "--memory_steps=1")
    environment = {**os.environ, "PYTHONPATH": str(entry_point_folder(tmp_path / "installed"))}
    program = ("env", sys.executable, "train.py")  # a fresh interpreter, since `env` replaces the process first
    done = run_python("-m", "lm_profiler", "run", *few, "--", *program, folder=tmp_path, environment=environment)
    assert (done.returncode, done.stdout) == (7, "trained False\n"), done.stderr
    record = read_run(tmp_path / "logs/lm_profiler/version_0")
    assert (record.status, record.loop, record.steps["measure"]) == ("ok", "own", 5)
