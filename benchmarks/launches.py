"""Every way to launch several processes: what is left of a run, and what of one that fails.

    python -m benchmarks.launches [--only ddp,torchrun] [--trials fit,fails]

Each trial is a training of a toy by two to four processes on this machine's CPU, in folders of its own. Environments
are simulated by the variables that their launchers set. Nodes without a shared file system have a mount namespace
each (``unshare``, which needs root): what one writes the other does not see.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import psutil

from benchmarks.free_port import free_port
from lm_profiler.report.tables.formats import markdown
from lm_profiler.report.tables.table import text_table

LIMIT_S = 150.0
COLUMNS = ("exit codes", "runs", "orphans", "tables", "s")
MARK = "LM_PROFILER_TRIAL"
"""A variable of all processes of a trial: what still has it afterwards is an orphan."""

TOY = '''
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

class Toy(BoringModel):
    """Raises at ``at``, on ``rank`` alone or on all."""

    def __init__(self, at: str = "", rank: int = -1):
        super().__init__()
        self.at, self.only = at, rank
        if at == "init":
            raise RuntimeError("boom")
        if at == "memory":  # 128 TiB
            self.large = torch.nn.Parameter(torch.empty(2**45))

    def here(self, at):
        if at == self.at and self.only in (-1, self.global_rank):
            raise RuntimeError("boom")

    def setup(self, stage):
        self.here("setup")

    def training_step(self, batch, i):
        if i == 3:
            self.here("step")
        return super().training_step(batch, i)

    def train_dataloader(self):
        return DataLoader(RandomDataset(32, 640))

    val_dataloader = train_dataloader

class Sharded(Toy):
    def configure_model(self):
        fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
'''

SMALL = [
    *(
        "--model=toy.Toy",
        "--data=null",
        "--name=toy",
        "--trainer.accelerator=cpu",
        "--stages.warmup_steps=1",
    ),
    *(
        "--stages.measure_steps=3",
        "--actions.steps=0",
        "--memory.steps=1",
        "--trace.steps=0",
    ),
]
TRIALS: dict[str, list[str]] = {
    "fit": ["fit"],
    "validate": ["validate"],
    "wrong call": ["fit", "--trainer.precision=17"],
    "does not fit": ["fit", "--model.at=memory"],
    "fails in __init__": ["fit", "--model.at=init"],
    "fails in setup": ["fit", "--model.at=setup"],
    "rank 1 fails in setup": ["fit", "--model.at=setup", "--model.rank=1"],
    "fails in a step": ["fit", "--model.at=step"],
    "rank 1 fails in a step": ["fit", "--model.at=step", "--model.rank=1"],
    "rank 0 fails in a step": ["fit", "--model.at=step", "--model.rank=0"],
}
"""The verb, and what is asked of the toy."""


@dataclass(frozen=True)
class Started:
    """One process that a user, or his launcher, starts."""

    options: Sequence[str]
    variables: Mapping[str, object] = field(default_factory=dict)
    node: int = 0
    launcher: Sequence[str] = ()


def _two(strategy: str, devices: int = 2, nodes: int = 1) -> list[str]:
    return [
        f"--trainer.strategy={strategy}",
        f"--trainer.devices={devices}",
        f"--trainer.num_nodes={nodes}",
    ]


def _by_lightning(strategy: str, *more: str) -> Callable[[int], list[Started]]:
    return lambda port: [Started([*_two(strategy), *more])]


def _nodes(port: int) -> list[Started]:
    """Two nodes with two processes each, started by hand as Lightning's documentation has it."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        Started(_two("ddp", nodes=2), {**shared, "NODE_RANK": node}, node)
        for node in range(2)
    ]


def _torchrun(port: int) -> list[Started]:
    return [
        Started(_two("ddp"), launcher=["--nproc_per_node=2", f"--master_port={port}"])
    ]


def _torchrun_nodes(port: int) -> list[Started]:
    shared = [
        "--nproc_per_node=1",
        "--nnodes=2",
        "--master_addr=127.0.0.1",
        f"--master_port={port}",
    ]
    return [
        Started(_two("ddp", 1, 2), node=node, launcher=[*shared, f"--node_rank={node}"])
        for node in range(2)
    ]


def _slurm(port: int, tasks: int = 2, nodes: int = 2) -> list[Started]:
    shared = {
        "SLURM_JOB_ID": 1234,
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": tasks * nodes,
        "SLURM_NNODES": nodes,
        "SLURM_NTASKS_PER_NODE": tasks,
        "SLURM_NODELIST": "localhost",
        "MASTER_PORT": port,
    }
    own = [
        {
            "SLURM_PROCID": rank,
            "SLURM_LOCALID": rank % tasks,
            "SLURM_NODEID": rank // tasks,
        }
        for rank in range(tasks * nodes)
    ]
    return [
        Started(_two("ddp", tasks, nodes), {**shared, **each}, each["SLURM_NODEID"])
        for each in own
    ]


def _kubeflow(port: int) -> list[Started]:
    """Pods of one process each. Lightning does not find this environment itself."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2}
    plugin = (
        "--trainer.plugins=lightning.fabric.plugins.environments.KubeflowEnvironment"
    )
    return [
        Started([*_two("ddp", 1, 2), plugin], {**shared, "RANK": rank}, rank)
        for rank in range(2)
    ]


def _pods(port: int) -> list[Started]:
    """Pods of one process each, as an Indexed Job starts them with the variables that Lightning's own takes."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": 0}
    return [
        Started(_two("ddp", 1, 2), {**shared, "NODE_RANK": node}, node)
        for node in range(2)
    ]


FSDP2 = [
    "--model=toy.Sharded",
    "--trainer.strategy.class_path=lightning.pytorch.strategies.ModelParallelStrategy",
    *(
        "--trainer.strategy.init_args.data_parallel_size=2",
        "--trainer.strategy.init_args.tensor_parallel_size=1",
    ),
]
WAYS: dict[str, Callable[[int], list[Started]]] = {
    "ddp": _by_lightning("ddp"),
    "ddp_spawn": _by_lightning("ddp_spawn"),
    "ddp_fork": _by_lightning("ddp_fork"),
    "ddp_notebook": _by_lightning("ddp_notebook"),
    "FSDP2": lambda port: [Started([*FSDP2, "--trainer.devices=2"])],
    "fsdp": _by_lightning("fsdp"),
    "deepspeed": _by_lightning("deepspeed"),
    "2 nodes by hand": _nodes,
    "torchrun": _torchrun,
    "torchrun on 2 nodes": _torchrun_nodes,
    "SLURM": lambda port: _slurm(port, 2, 1),
    "SLURM on 2 nodes": _slurm,
    "Kubeflow": _kubeflow,
    "pods by hand": _pods,
}


def _command(
    started: Started, asked: Sequence[str], folder: Path, apart: bool
) -> list[str]:
    program = [*("-m", "lm_profiler", asked[0], *SMALL, *started.options, *asked[1:])]
    command = [sys.executable, *program]
    if started.launcher:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *started.launcher,
            *program,
        ]
    if apart:  # a folder of the same name, of which each node has its own
        own = 'mount --bind "$1" "$2" && cd "$2" && shift 2 && exec "$@"'
        node = folder.with_name(f"node{started.node}")
        command = [
            "unshare",
            "-m",
            "sh",
            "-c",
            own,
            "sh",
            str(node),
            str(folder),
            *command,
        ]
    return command


@dataclass(frozen=True)
class Outcome:
    """What came of a trial: ``COLUMNS``, and what each process said."""

    cells: tuple[str, ...]
    said: Sequence[str]


def trial(way: str, asked: Sequence[str], apart: bool = False) -> Outcome:
    """Run it."""
    with tempfile.TemporaryDirectory(prefix="launch-") as top:
        folder = Path(top, "here")
        places = [folder, *(Path(top, f"node{node}") for node in range(2))]
        for place in places:
            place.mkdir()
            (place / "toy.py").write_text(TOY)
        began = time.monotonic()
        processes = [
            _start(
                _command(started, asked, folder, apart),
                started,
                folder,
                Path(top, f"said{number}"),
            )
            for number, started in enumerate(WAYS[way](free_port()))
        ]
        codes = [_code(process, began + LIMIT_S) for process in processes]
        took_s = time.monotonic() - began
        time.sleep(0.5)
        orphans = _end_orphans(top)
        said = [
            Path(top, f"said{number}").read_text().replace(top, "")
            for number in range(len(processes))
        ]
        runs = " and ".join(
            "; ".join(_runs(each)) or "none"
            for each in (places[1:] if apart else [folder])
        )
        ended = " ".join("hung" if code is None else str(code) for code in codes)
        tables = sum(text.count("written to") for text in said)
        return Outcome((ended, runs, str(orphans), str(tables), f"{took_s:.0f}"), said)


def _start(
    command: Sequence[str], started: Started, folder: Path, said: Path
) -> subprocess.Popen[bytes]:
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SLURM")
    }
    own = {name: str(value) for name, value in started.variables.items()}
    ours = {
        MARK: str(folder.parent),
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
    }
    with said.open("w") as file:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=clean | ours | own,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _code(process: subprocess.Popen[bytes], until: float) -> int | None:
    try:
        return process.wait(max(until - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        return None


def _end_orphans(top: str) -> int:
    left = [each for each in psutil.process_iter() if _is_of(each, top)]
    for process in left:
        process.send_signal(signal.SIGKILL)
    psutil.wait_procs(left, 5)
    return len(left)


def _is_of(process: psutil.Process, top: str) -> bool:
    try:
        return process.environ().get(MARK) == top
    except psutil.Error:
        return False


def _runs(folder: Path) -> list[str]:
    """Each run's folder with its status, its ranks' rows, and what else lies there."""
    told = []
    for run in sorted(folder.glob("logs/toy/version_*")):
        try:
            record = json.loads((run / "run.json").read_text())
            failure = record["failure"]
            status = record["status"] + (
                f" ({failure['phase']} {failure['type']})" if failure else ""
            )
        except OSError:
            status = "no record"
        rows = [
            path.read_text().splitlines()[1:] for path in sorted(run.glob("steps*.csv"))
        ]
        ranks = "+".join(str(len(each)) for each in rows)
        rest = sorted(
            p.name
            for p in run.iterdir()
            if not p.name.startswith(("run.json", "steps", "config", "events"))
        )
        told.append(
            f"{run.name[8:]}: {status}, {ranks or 0} rows{''.join(', ' + name for name in rest)}"
        )
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(WAYS))
    parser.add_argument("--trials", default="fit")
    parser.add_argument(
        "--apart", action="store_true", help="nodes share no file system"
    )
    parser.add_argument(
        "--loud", action="store_true", help="print what the processes said"
    )
    given = parser.parse_args()
    assert not given.apart or shutil.which("unshare")
    rows = []
    for way, name in product(given.only.split(","), given.trials.split(",")):
        outcome = trial(way, TRIALS[name], given.apart)
        rows.append([way, name, *outcome.cells])
        print(*rows[-1], sep=" | ", flush=True)
        if given.loud:
            print(*outcome.said, sep="\n---\n", flush=True)
    print(markdown(text_table(("started by", "trial", *COLUMNS), rows, left=4)))


if __name__ == "__main__":
    main()
