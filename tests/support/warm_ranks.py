"""Two ranks of a program of this folder as forks of a process that has loaded torch and Lightning once.

Loading them takes each rank five seconds, and this many tests have ranks. They are launched as by torchrun: Lightning
starts none itself. What is to be said of its own launcher is no test for these.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path

from scripts import SUPPORT

from benchmarks.free_port import free_port

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["known_loop", "torchmetrics", "lm_profiler.training"])


@dataclass(frozen=True)
class Done:
    """How both ended: the first code that is not 0, and what they printed."""

    returncode: int | None
    stdout: str
    stderr: str


def run_ranks(program: str, folder: Path, *arguments: str, timeout_s: float = 120.0) -> Done:
    """Run ``program`` in ``folder`` on two ranks; one that takes longer is killed."""
    port = str(free_port())
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": "0", "OMP_NUM_THREADS": "1"}
    ranks = []
    for rank in (0, 1):
        environment = {**common, "LOCAL_RANK": str(rank)}
        process = _CONTEXT.Process(target=_run, args=(program, arguments, environment, str(folder), f"rank{rank}"))
        process.start()
        ranks.append(process)
    for process in ranks:
        process.join(timeout_s)
        if process.is_alive():
            process.kill()
            process.join()
    said = {end: "".join((folder / f"rank{rank}.{end}").read_text() for rank in (0, 1)) for end in ("out", "err")}
    return Done(next((p.exitcode for p in ranks if p.exitcode), 0), said["out"], said["err"])


def _run(program: str, arguments: tuple[str, ...], environment: dict[str, str], folder: str, name: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for stream, end in ((1, "out"), (2, "err")):
        file = os.open(f"{name}.{end}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, stream)
        os.close(file)
    sys.argv = [program, *arguments]
    runpy.run_path(str(SUPPORT / program), run_name="__main__")
