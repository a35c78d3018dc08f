"""Does ``lm_profiler run`` record programs as they are, and do they train as without it?

Every way to start a program that knows nothing of the profiler, under both of Lightning's names: without it, then with
it. A row is right where the run is recorded, the exit code is equal, and the weights are equal bit for bit.

    python -m benchmarks.any_program
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from lm_profiler.record.run_record import RecordError, read_run

_SUPPORT = Path(__file__).parent.parent / "tests" / "support"
_SCRIPT = [sys.executable, str(_SUPPORT / "any_program.py")]
_TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc_per_node=2",
    _SCRIPT[1],
]
_WAYS = {
    "python train.py": (_SCRIPT, []),
    "python -m train": ([sys.executable, "-m", "any_program"], []),
    "LightningCLI": (_SCRIPT, ["--cli"]),
    "a shell script": (["sh", "-c", 'exec "$0" "$@"', *_SCRIPT], []),
    "torchrun": (_TORCHRUN, ["--strategy=ddp"]),
    "ranks as subprocesses": (_SCRIPT, ["--strategy=ddp"]),
    "ranks as subprocesses of -m": ([sys.executable, "-m", "any_program"], ["--strategy=ddp"]),
    "ranks of a LightningCLI": (_SCRIPT, ["--strategy=ddp", "--cli"]),
    "spawned ranks": (_SCRIPT, ["--strategy=ddp_spawn"]),
    "forked ranks": (_SCRIPT, ["--strategy=ddp_fork"]),
}  # fmt: skip
if shutil.which("srun") is not None:  # with a Slurm that has two CPUs to give
    _WAYS["srun"] = (
        ["srun", "--ntasks=2", "--ntasks-per-node=2", *_SCRIPT],
        ["--strategy=ddp"],
    )


def _call(words: list[str], folder: Path) -> int:
    path = os.pathsep.join([str(_SUPPORT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with (folder / "said.txt").open("ab") as said:
        done = subprocess.run(
            words,
            cwd=folder,
            env=environment,
            stdout=said,
            stderr=said,
            check=False,
            timeout=300,
        )
    return done.returncode


def _row(words: list[str], given: list[str], folder: Path) -> str:
    run = [
        sys.executable,
        "-m",
        "lm_profiler",
        "run",
        "--warmup_steps=2",
        "--measure_steps=5",
        "--trace_steps=1",
        "--",
    ]
    codes = [
        _call([*start, *words, name, *given], folder)
        for start, name in (([], "bare.pt"), (run, "run.pt"))
    ]
    try:
        record = read_run(folder / "logs" / "lm_profiler" / "version_0")
    except RecordError as error:
        return f"WRONG: {error}"
    bare, own = (torch.load(folder / name) for name in ("bare.pt", "run.pt"))
    equal = all(torch.equal(bare[name], own[name]) for name in bare)
    right = codes[0] == codes[1] and equal and record.steps["measure"] == 5
    ranks = 1 if record.environment is None else record.environment.world_size
    return f"{'right' if right else 'WRONG'}: {record.status}, ranks {ranks}, codes {codes}, weights equal {equal}"


if __name__ == "__main__":
    for namespace in ("lightning.pytorch", "pytorch_lightning"):
        for way, (words, given) in _WAYS.items():
            with tempfile.TemporaryDirectory() as folder:
                print(
                    f"{namespace:18} {way:28} {_row(words, [*given, f'--namespace={namespace}'], Path(folder))}",
                    flush=True,
                )
