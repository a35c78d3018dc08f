"""Programs as forks of a process that has loaded torch and Lightning once.

Loading them takes four seconds, and many tests start a program. What is to be said of a fresh interpreter, of what is
imported, or of warnings on the way, is no test for these.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import sys
import tempfile
import threading
from collections.abc import Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from scripts import SUPPORT

from benchmarks.free_port import free_port
from lm_profiler.measure.copies import apart

_PID = os.getpid()
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch.utils.tensorboard", "lm_profiler.cli.verbs.trainer", "lm_profiler.training"])


def start(
    *arguments: str,
    out: Path,
    err: Path | None = None,
    reads: Path | None = None,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> ForkServerProcess:
    """``python ARGUMENTS`` in a session of its own; what it prints goes to ``out``, and to ``err`` if given."""
    streams = (str(reads or os.devnull), str(out), str(err or out))
    given = (arguments, str(folder or Path.cwd()), dict(environment or os.environ), *streams)
    process: ForkServerProcess = CONTEXT.Process(target=_become, args=given)
    process.start()
    return process


def end(process: ForkServerProcess, timeout_s: float = 120.0) -> int:
    """Its exit code; it is killed where it takes longer."""
    process.join(timeout_s)
    if process.is_alive():
        process.kill()
        process.join()
    assert process.exitcode is not None
    return process.exitcode


def run(
    *arguments: str,
    told: bytes = b"",
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 120.0,
) -> CompletedProcess[str]:
    """``python ARGUMENTS``, which is ``told`` something on stdin; with what it printed."""
    with tempfile.TemporaryDirectory() as said:
        reads, out, err = (Path(said, name) for name in ("in", "out", "err"))
        reads.write_bytes(told)
        process = start(*arguments, out=out, err=err, reads=reads, folder=folder, environment=environment)
        code = end(process, timeout_s)
        return CompletedProcess(arguments, code, out.read_text(), err.read_text())


def run_ranks(program: str, folder: Path, *arguments: str, timeout_s: float = 120.0) -> CompletedProcess[str]:
    """A program of this folder on two ranks, as torchrun launches them: Lightning starts none itself.

    The code is the first that is not 0.
    """
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0"}
    program, ranks, files = str(SUPPORT / program), [], []
    with tempfile.TemporaryDirectory() as said:
        for rank in ("0", "1"):
            out, err = Path(said, f"out{rank}"), Path(said, f"err{rank}")
            environment = {**common, "OMP_NUM_THREADS": "1", "LOCAL_RANK": rank}
            ranks.append(start(program, *arguments, out=out, err=err, folder=folder, environment=environment))
            files.append((out, err))
        codes = [end(rank, timeout_s) for rank in ranks]
        printed, told = ("".join(file.read_text() for file in each) for each in zip(*files, strict=True))
    return CompletedProcess((program, *arguments), next(filter(None, codes), 0), printed, told)


def count_apart(*given: Any) -> apart.Counted:
    """As the product counts a step's work in a process of its own, which is a fork here."""

    def of_fork(command: list[str], input: bytes, env: dict[str, str], timeout: float, **_: Any) -> Any:  # noqa: A002
        return run(*command[1:], told=input, environment=env, timeout_s=timeout)

    if os.getpid() != _PID:  # a forked rank
        return apart.count_apart(*given)
    ways = SimpleNamespace(run=of_fork, TimeoutExpired=TimeoutExpired)
    with mock.patch.object(apart, "subprocess", ways):
        return apart.count_apart(*given)


def _become(arguments: tuple[str, ...], folder: str, environment: dict[str, str], *streams: str) -> None:
    """What an interpreter does with them."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, name in enumerate(streams):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND if number else os.O_RDONLY)
        os.dup2(file, number)
        os.close(file)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - that of multiprocessing is another
    multiprocessing.set_start_method(None, force=True)  # what is usual, where its own children would be as this one
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    torch._dynamo.config.disable = environment.get("TORCHDYNAMO_DISABLE") == "1"  # which torch asks when it is loaded
    try:
        _interpret(*arguments)
    finally:  # as an interpreter ends, which a fork of multiprocessing does not
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def _interpret(kind: str, *rest: str) -> None:
    sys.path.insert(0, str(Path(kind).parent) if kind.endswith(".py") else str(Path.cwd()))
    sys.argv = [kind, *rest]
    if kind == "-m":
        sys.argv = [*rest]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        code, *sys.argv[1:] = rest
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), main.__dict__)
    else:
        runpy.run_path(kind, run_name="__main__")
