"""Programs as forks of a process that has loaded torch and Lightning once.

Loading them takes four seconds, and many tests start a program. What is to be tested of a fresh interpreter, of what is
imported, or of warnings on the way, is no test for these.
"""

import atexit
import gc
import io
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import forkserver, util
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from benchmarks.free_port import free_port
from scripts import SUPPORT

import lm_profiler_autoload
from lm_profiler.processes import cell_processes, child

INTERPRETER = child.start_interpreter
RUN_CELL = cell_processes.run_cell
CONTEXT = multiprocessing.get_context("forkserver")
util.get_temp_dir()  # its socket goes there: a test that has its own tempdir, a long path, must not be the first to ask
CONTEXT.set_forkserver_preload(
    [
        *("torch.utils.tensorboard", "lm_profiler.cli.verbs.trainer", "lm_profiler.rehearse.sent"),
        *("lm_profiler.callbacks.trainer_loop", "lm_profiler.callbacks.attachment"),  # of each run
        *("attrs", "tensorboard.plugins.hparams.summary_v2"),
    ]
)
_SERVER: Any = forkserver._forkserver
SERVER_VARIABLE = "LM_PROFILER_TESTS_SERVER"
"""Names the address of a server that another process of this session has started."""


def share_server() -> None:
    """Start the server here, for all processes that xdist starts: each would load torch for one of its own."""
    os.environ[SERVER_VARIABLE] = _address()


def load_server() -> None:
    """Start the server and wait until it has loaded torch: fifteen seconds of CPU time, and a minute if it is busy.

    Otherwise the first question of a session waits for it, within the question's own time limit.
    """
    process = CONTEXT.Process(target=gc.freeze)
    with mock.patch.dict(sys.modules, {"__main__": ModuleType("__main__")}):  # a program would be run again there
        process.start()
    process.join()


def start_python(
    *arguments: str,
    out: Path,
    err: Path | None = None,
    reads: Path | None = None,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    rates: bool = False,
) -> ForkServerProcess:
    """``python ARGUMENTS`` in a session of its own; what it prints goes to ``out``, and to ``err`` if given.

    The machine's ``rates`` take a second at each run's end.
    """
    streams = (str(reads or os.devnull), str(out), str(err or out))
    given = (arguments, str(folder or Path.cwd()), dict(environment or os.environ), rates, _address(), *streams)
    process: ForkServerProcess = CONTEXT.Process(target=_become, args=given)
    process.start()
    return process


def exit_code_of(process: ForkServerProcess, timeout_s: float = 500.0) -> int:
    """Its exit code; it is killed where it takes longer."""
    process.join(timeout_s)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode


def run_python(
    *arguments: str,
    stdin: bytes = b"",
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 500.0,
    rates: bool = False,
) -> CompletedProcess[str]:
    """Run ``python ARGUMENTS`` with ``stdin``; return what it printed."""
    with tempfile.TemporaryDirectory() as folder_of_output:
        reads, out, err = (Path(folder_of_output, name) for name in ("in", "out", "err"))
        reads.write_bytes(stdin)
        process = start_python(
            *arguments, out=out, err=err, reads=reads, folder=folder, environment=environment, rates=rates
        )
        code = exit_code_of(process, timeout_s)
        return CompletedProcess(arguments, code, out.read_text(), err.read_text())


def run_ranks(program: str, folder: Path, *arguments: str, timeout_s: float = 500.0) -> CompletedProcess[str]:
    """A program of this folder on two ranks, as torchrun launches them: Lightning starts none itself.

    The code is the first that is not 0.
    """
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0"}
    program, ranks, files = str(SUPPORT / program), [], []
    with tempfile.TemporaryDirectory() as folder_of_output:
        for rank in ("0", "1"):
            out, err = Path(folder_of_output, f"out{rank}"), Path(folder_of_output, f"err{rank}")
            environment = {**common, "OMP_NUM_THREADS": "1", "LOCAL_RANK": rank}
            ranks.append(start_python(program, *arguments, out=out, err=err, folder=folder, environment=environment))
            files.append((out, err))
        codes = [exit_code_of(rank, timeout_s) for rank in ranks]
        printed, errors = ("".join(file.read_text() for file in each) for each in zip(*files, strict=True))
    return CompletedProcess((program, *arguments), next(filter(None, codes), 0), printed, errors)


def rank_context(kind: str) -> Any:
    """In which ranks are started."""
    return multiprocessing.get_context(kind) if _IS_FRESH else CONTEXT


@contextmanager
def fresh_processes() -> Iterator[None]:
    """Interpreters and ranks are fresh processes meanwhile, as they are for users."""
    _IS_FRESH.append(True)
    yield
    _IS_FRESH.pop()


_IS_FRESH: list[bool] = []
STARTED: list[int] = []
"""The processes that stand in for fresh interpreters."""


def interpreter(task: bytes, link: Connection) -> Any:
    """Start what answers ``task``, in place of the fresh interpreter of the product: a fork of this process."""
    if _IS_FRESH:
        return INTERPRETER(task, link)
    process = CONTEXT.Process(target=_answer, args=(task, link, child.child_environment()))
    with mock.patch.dict(sys.modules, {"__main__": ModuleType("__main__")}):  # a program would be run again there
        process.start()
    STARTED.append(process.pid)
    return process


def _address() -> str:
    """Where the server listens that has loaded torch, for whoever it starts."""
    _SERVER.ensure_running()
    return _SERVER._forkserver_address


def _ask_server_of(address: str | None) -> None:
    """Have this process ask the server of another: one of its own would have to load torch first."""
    if address is not None:
        _SERVER._forkserver_address, _SERVER.ensure_running = address, lambda: None


if shared_address := os.environ.get(SERVER_VARIABLE):
    _ask_server_of(shared_address)
    _SERVER._forkserver_alive_fd = os.pipe()[1]  # each process of a server holds the end of such a pipe
os.register_at_fork(after_in_child=lambda: _ask_server_of(_SERVER._forkserver_address))


def _answer(task: bytes, link: Connection, environment: dict[str, str]) -> None:
    gc.freeze()
    os.environ.clear()
    os.environ.update(environment)
    torch._dynamo.config.disable = True  # which torch asks when it is loaded
    path, _, task = task.partition(b"\n")
    sys.path[:] = json.loads(path)
    child.answer_question(io.BytesIO(task), link, is_asked_by_parent=False)


def with_rates(flops_per_s: float | None, bytes_per_s: float | None) -> Any:
    """Runs find these rates of the machine, or none."""
    found = {"known_ceiling": lambda *_: flops_per_s, "known_copy_rate": lambda *_: bytes_per_s}
    return mock.patch.multiple("lm_profiler.callbacks.collect", **found)


def _become(
    arguments: tuple[str, ...], folder: str, environment: dict[str, str], rates: bool, address: str, *streams: str
) -> None:
    """What an interpreter does with them."""
    os.setsid()
    _take_over(rates, address)
    for number, name in enumerate(streams):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND if number else os.O_RDONLY)
        os.dup2(file, number)
        os.close(file)
    multiprocessing.set_start_method(None, force=True)  # what is usual, where its own children would be as this one
    multiprocessing.process._parent_process = None
    try:
        _interpret(arguments, folder, environment)
    finally:  # as an interpreter ends, which a fork of multiprocessing does not
        threading._shutdown()
        atexit._run_exitfuncs()


_EXECUTE_CHILD = subprocess.Popen._execute_child
_REPLACE_PROCESS = os.execvp


def _take_over(rates: bool, address: str) -> None:
    """Have what this process starts be forks too, the cells of a sweep among them."""
    gc.freeze()  # no collection here looks at, and so copies, what the server has loaded
    _ask_server_of(address)
    child.start_interpreter = interpreter
    cell_processes.run_cell = partial(_run_cell, rates, address)
    cell_processes.forget_server = lambda: None  # it is theirs too
    if not rates:
        with_rates(flops_per_s=None, bytes_per_s=None).start()
    subprocess.Popen._execute_child = _fork_ours
    os.execvp = _continue_as
    util.spawnv_passfds = _spawn_ours


def _run_cell(rates: bool, address: str, *given: Any) -> None:
    _take_over(rates, address)
    RUN_CELL(*given)


def _fork_ours(process: Any, args: Any, *given: Any) -> None:
    """What such a fork starts of ours is a copy of itself, and its child, such as another rank.

    Verbs start them before anything has gone backward, which a copy could not do again.
    """
    command = [str(word) for word in args]
    if not _is_ours(command):
        _EXECUTE_CHILD(process, args, *given)
        return
    pass_fds, folder, environment, pipes, begins_session = *given[3:6], given[9:15], given[20]
    sys.stdout.flush()
    sys.stderr.flush()
    process.pid = os.fork()
    if process.pid == 0:
        code = 1
        try:
            if begins_session:
                os.setsid()
            _inherit((pipes[0], pipes[3], pipes[5]), pass_fds)
            code = _code_of(command, str(folder or Path.cwd()), dict(environment or os.environ))
        finally:
            os._exit(code)
    process._child_created = True
    process._close_pipe_fds(*pipes)


def _continue_as(program: str, command: Sequence[str]) -> None:
    """Run the program that replaces this process, such as that of the verb ``run``, in what has loaded torch."""
    if not _is_ours([*command]):
        _REPLACE_PROCESS(program, command)
    lm_profiler_autoload.begin_search()  # which torch calls when it is loaded
    os._exit(_code_of(command, str(Path.cwd()), dict(os.environ)))


def _spawn_ours(path: Any, args: Any, passfds: Any) -> int:
    """What multiprocessing spawns, as Lightning does with ranks of ``ddp_spawn``, reads all it needs from a pipe."""
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    code = 1
    try:
        _inherit((), (*passfds,))
        command = [str(word) for word in args]
        code = _code_of([command[0], *command[command.index("-c") :]], str(Path.cwd()), dict(os.environ))
    finally:
        os._exit(code)


def _is_ours(command: list[str]) -> bool:
    python, kind, name, *_ = [word for word in (*command, "", "", "") if word != "-u"]
    return python == sys.executable and (
        kind.endswith(".py") or (kind == "-m" and name.startswith(("lm_profiler", "benchmarks.")))
    )


def _inherit(streams: Sequence[int], pass_fds: Sequence[int]) -> None:
    """Of files and signals, what a process inherits that subprocess starts."""
    for number, file in enumerate(streams):
        if file != -1:
            os.dup2(file, number)
    nothing = os.open(os.devnull, os.O_RDWR)
    for file in {int(file.name) for file in Path("/proc/self/fd").iterdir()} - {0, 1, 2, nothing, *pass_fds}:
        if Path(f"/proc/self/fd/{file}").exists():
            os.dup2(nothing, file)  # not closed: who thinks that it is his will close it
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _code_of(command: Sequence[str], folder: str, environment: dict[str, str]) -> int:
    """The exit code of an interpreter."""
    atexit._clear()
    try:
        _interpret([word for word in command[1:] if word != "-u"], folder, environment)
        code = 0
    except SystemExit as exit_code_of:
        code = exit_code_of.code if isinstance(exit_code_of.code, int) else int(exit_code_of.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _interpret(arguments: Sequence[str], folder: str, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - that of multiprocessing is another
    torch._dynamo.config.disable = environment.get("TORCHDYNAMO_DISABLE") == "1"  # which torch asks when it is loaded
    kind, *rest = arguments
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
