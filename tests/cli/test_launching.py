"""Who of many processes makes the run's folder, and what a launched rank's end becomes."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.launches import SMALL, TOY, WAYS, Started
from raised import refusal
from stored_texts import assert_stored
from warm import exit_code_of, start_python

from lm_profiler.cli import run_context
from lm_profiler.cli.call import Call
from lm_profiler.cli.run_context import RunContext
from lm_profiler.cli.trainer_cli import ProfilerCLI
from lm_profiler.record.run_record import read_run
from lm_profiler.record.steps import read_rows
from lm_profiler.usage_error import UsageError

KUBEFLOW = "lightning.fabric.plugins.environments.KubeflowEnvironment"
ROOT = Path(__file__).resolve().parents[2]
FSDP2 = [
    "--model=toy.Sharded",
    "--trainer.strategy.class_path=lightning.pytorch.strategies.ModelParallelStrategy",
    *("--trainer.strategy.init_args.data_parallel_size=2", "--trainer.strategy.init_args.tensor_parallel_size=1"),
]
MEET = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
SLURM = {"SLURM_NTASKS": 4, "SLURM_NTASKS_PER_NODE": 2, "SLURM_NNODES": 2, "SLURM_NODELIST": "a,b"}
ELASTIC = {**MEET, "TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": 4}
NODES: dict[str, tuple[list[str], list[dict[str, Any]]]] = {
    "Lightning": ([], [{**MEET, "NODE_RANK": node, "LOCAL_RANK": local} for node in (0, 1) for local in (0, 1)]),
    "torchrun": ([], [{**ELASTIC, "RANK": rank, "LOCAL_RANK": rank % 2, "GROUP_RANK": rank // 2} for rank in range(4)]),
    "SLURM": (
        [],
        [{**SLURM, "SLURM_PROCID": rank, "SLURM_LOCALID": rank % 2, "SLURM_NODEID": rank // 2} for rank in range(4)],
    ),
    "Kubeflow": (
        [f"--trainer.plugins={KUBEFLOW}", "--trainer.devices=1", "--trainer.num_nodes=4"],
        [{**MEET, "WORLD_SIZE": 4, "RANK": rank} for rank in range(4)],
    ),
}
"""Options, and the variables of each process as who launched it sets them."""


def as_it_was(variables: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "NODE_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize("way", NODES)
def test_one_of_all_launched_processes_makes_the_folder(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    options, processes = NODES[way]
    monkeypatch.chdir(tmp_path)
    two = ["--trainer.accelerator=cpu", "--trainer.strategy=ddp", "--trainer.devices=2", "--trainer.num_nodes=2"]
    cli = ProfilerCLI(Call(["fit", "--name=toy", *two, *options]))
    folders = []
    for variables in processes:
        with monkeypatch.context() as patch:
            as_it_was(variables, patch)
            cli.context = RunContext("fit", cli.context.launch, "logs")
            cli.begin()
            folders.append(cli.context.folder)
            assert cli.context.rank == len(folders) - 1
    assert folders == [Path("logs/toy/version_0"), None, None, None]
    assert [path.name for path in Path("logs/toy").iterdir()] == ["version_0"]


MISMATCHED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "nodes of torchrun": (ELASTIC | {"RANK": 0, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}, []),
    "devices of torchrun": (ELASTIC | {"RANK": 0, "LOCAL_RANK": 0}, ["--trainer.strategy=ddp"]),
    "devices of SLURM": (
        SLURM | {"SLURM_PROCID": 0, "SLURM_LOCALID": 0, "SLURM_NODEID": 0},
        ["--trainer.strategy=ddp", "--trainer.devices=4"],
    ),
    "a class": ({}, ["--trainer.strategy=mine.Strategy"]),
    "fsdp without a GPU": ({}, ["--trainer.strategy=fsdp"]),
    "tasks of SLURM": ({"SLURM_NTASKS": 2, "SLURM_PROCID": 0}, ["--trainer.strategy=ddp"]),
}


def test_launches_that_are_no_single_training_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    messages = {}
    for case, (variables, options) in MISMATCHED.items():
        with monkeypatch.context() as patch:
            as_it_was(variables, patch)
            cli = ProfilerCLI(Call(["fit", "--trainer.accelerator=cpu", *options]))
            messages[case] = message = refusal(UsageError, cli.begin)
        assert "\n" not in message
        assert list(tmp_path.iterdir()) == []
    assert_stored("cli/launching", messages)


def test_slurm_runs_are_noted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    for task in range(2):
        as_it_was(SLURM | {"SLURM_PROCID": task, "SLURM_LOCALID": task, "SLURM_NODEID": 0}, monkeypatch)
        ProfilerCLI(Call(["fit", "--name=toy", "--trainer.accelerator=cpu"])).begin()
    assert capsys.readouterr().err.count("SLURM") == 1
    assert sorted(path.name for path in Path("logs/toy").iterdir()) == ["version_0", "version_1"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "toy.py").write_text(TOY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def launched(started: Started, out: Path, *options: str) -> ForkServerProcess:
    """In a process group of its own."""
    program = ["-m", "lm_profiler", "fit", *SMALL, *started.options, *options]
    torchrun = ["-m", "torch.distributed.run", *started.launcher] if started.launcher else []
    variables = os.environ | {name: str(value) for name, value in started.variables.items()}
    return start_python(*torchrun, *program, out=out, environment=variables)


def test_two_nodes_of_torchrun_make_one_run_of_sharded_weights(here: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    options = [*FSDP2, "--trainer.devices=1", "--trainer.num_nodes=2"]
    files = [here / "node0.txt", here / "node1.txt"]
    ways = WAYS["torchrun on 2 nodes"](port)
    nodes = [launched(replace(started, options=options), out) for started, out in zip(ways, files, strict=True)]
    codes = [exit_code_of(node) for node in nodes]
    outputs = [out.read_text() for out in files]
    assert codes == [0, 0], outputs
    assert [path.name for path in Path("logs/toy").iterdir()] == ["version_0"]
    assert sum(text.count("written to") for text in outputs) == 1
    record = read_run(Path("logs/toy/version_0"))
    assert (record.status, record.environment.world_size, len(record.rank_step_s)) == ("ok", 2, 2)


def test_a_forked_rank_that_fails_leaves_no_process(here: Path) -> None:
    two, out = Started(["--trainer.strategy=ddp_fork", "--trainer.devices=2"]), here / "output.txt"
    fork = launched(two, out, "--model.at=step", "--model.rank=1")
    assert exit_code_of(fork) == 1, out.read_text()
    assert "RuntimeError: boom" in out.read_text()
    assert "Traceback" not in out.read_text()
    with pytest.raises(ProcessLookupError):
        os.killpg(fork.pid, 0)
    folder = Path("logs/toy/version_0")
    record = read_run(folder)
    assert (record.status, record.failure.rank, record.failure.message) == ("failed", 1, "boom")
    failure = record.failure
    assert (failure.phase, failure.step, failure.rank) == ("forward", 4, 1)
    # The launcher ends rank 0, which loses the last second's steps if it comes first: here that may be all of them.
    assert 1 in read_rows(folder).rank
    assert "RuntimeError: boom" in (folder / "traceback.rank1.txt").read_text()


KILLED = """
import os, signal, time
from lm_profiler.callbacks import failures
from toy import Toy

failures._PATIENCE_AFTER_SIGNAL_S = 1.0  # for the end that a rank would leave, and this one leaves none

class Killed(Toy):
    def training_step(self, batch, i):
        if i == 3 and self.only == self.global_rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, i)
"""


def test_a_forked_rank_that_is_killed_is_a_failure(here: Path) -> None:
    """The kernel kills ranks in this way when memory runs out. ``test_gather`` kills a rank that is not forked."""
    (here / "killed.py").write_text(KILLED)
    two_ranks = Started(["--trainer.strategy=ddp_fork", "--trainer.devices=2"])
    out = here / "output.txt"
    fork = launched(two_ranks, out, "--model=killed.Killed", "--model.rank=1")
    assert exit_code_of(fork) == 1, out.read_text()
    record = read_run(Path("logs/toy/version_0"))
    assert (record.status, record.failure.type, record.failure.rank) == ("failed", "RankLost", 1)
    assert "SIGKILL" in record.failure.message


def test_end_ranks_kills_ranks_that_do_not_end() -> None:
    rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    launcher = SimpleNamespace(procs=[rank])
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(launcher=launcher))
    run_context.end_ranks(trainer, leaving_s=0.1)
    assert rank.returncode == -signal.SIGKILL
    assert launcher.procs == []
