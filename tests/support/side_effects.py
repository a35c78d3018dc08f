"""Modules whose code does something that another run of it would do once more, each with what is left of it."""

from __future__ import annotations

import fcntl
import logging
import mmap
import multiprocessing
import os
import signal
import socket
import sqlite3
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

STEPS = 3


class Effect(NamedTuple):
    """What a module does each time that its code is asked, and what there is of it in the end."""

    do: Callable[[str], object]
    read: Callable[[], object]


effect: Effect
"""Of the run that comes."""


class Does(LightningModule):
    """Does it wherever Lightning asks a module for something."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        effect.do("made")

    def prepare_data(self) -> None:
        effect.do("prepared")

    def setup(self, stage: str) -> None:
        effect.do("set up")

    def train_dataloader(self) -> Any:
        effect.do("loader")
        return DataLoader(torch.ones(16, 2), batch_size=2)

    def configure_optimizers(self) -> Any:
        effect.do("optimizer")
        return torch.optim.SGD(self.parameters(), 0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        effect.do(f"step {batch_idx}")
        return self.layer(batch).sum()


def _file_read_on(folder: Path, stack: ExitStack) -> Effect:
    (folder / "rows").write_text("".join(f"{n:03}\n" for n in range(500)))
    rows = stack.enter_context((folder / "rows").open("rb", buffering=0))
    seen: list[bytes] = []
    return Effect(lambda _: seen.append(rows.read(4)), lambda: seen)


def _file_written_on(folder: Path, stack: ExitStack) -> Effect:
    rows = stack.enter_context((folder / "rows").open("wb", buffering=0))
    return Effect(lambda what: rows.write(what.encode()), (folder / "rows").read_bytes)


def _file_appended(folder: Path, stack: ExitStack) -> Effect:
    def do(what: str) -> None:
        with (folder / "rows").open("a") as file:
            file.write(what)

    return Effect(do, (folder / "rows").read_text)


def _logged(folder: Path, stack: ExitStack) -> Effect:
    logger = logging.Logger("effects")
    handler = logging.FileHandler(folder / "log")
    stack.callback(handler.close)
    logger.addHandler(handler)
    return Effect(logger.warning, (folder / "log").read_text)


def _value(folder: Path, stack: ExitStack) -> Effect:
    value = multiprocessing.Value("i", 0)

    def do(_: str) -> None:
        with value.get_lock():
            value.value += 1

    return Effect(do, lambda: value.value)


def _array(folder: Path, stack: ExitStack) -> Effect:
    array = multiprocessing.Array("i", 100)

    def do(_: str) -> None:
        array[array[0] + 1], array[0] = 1, array[0] + 1

    return Effect(do, lambda: array[:])


def _semaphore(folder: Path, stack: ExitStack) -> Effect:
    semaphore = multiprocessing.Semaphore(0)
    return Effect(lambda _: semaphore.release(), lambda: semaphore.get_value())


def _queue(folder: Path, stack: ExitStack) -> Effect:
    queue = multiprocessing.SimpleQueue()

    def read() -> list[str]:
        told = []
        while not queue.empty():
            told.append(queue.get())
        return told

    return Effect(queue.put, read)


def _pages(folder: Path, stack: ExitStack) -> Effect:
    pages = mmap.mmap(-1, 4096)
    return Effect(
        lambda what: pages.write(what.encode()) and pages.__setitem__(4095, pages[4095] + 1), lambda: pages[:]
    )


def _tensor(folder: Path, stack: ExitStack) -> Effect:
    tensor = torch.zeros(()).share_memory_()

    def do(_: str) -> None:
        tensor.data.numpy()[...] += 1

    return Effect(do, tensor.item)


def _database(folder: Path, stack: ExitStack) -> Effect:
    def ask(what: str) -> list[Any]:
        with closing(sqlite3.connect(folder / "rows.db")) as rows, rows:
            return list(rows.execute(what))

    ask("create table seen (what text)")
    return Effect(lambda what: ask(f"insert into seen values ('{what}')"), lambda: ask("select what from seen"))


def _database_kept_open(folder: Path, stack: ExitStack) -> Effect:
    rows = sqlite3.connect(folder / "rows.db", isolation_level=None)
    stack.callback(rows.close)
    rows.execute("create table seen (what text)")
    return Effect(
        lambda what: rows.execute("insert into seen values (?)", (what,)),
        lambda: list(rows.execute("select what from seen")),
    )


def _socket(folder: Path, stack: ExitStack) -> Effect:
    ours, theirs = socket.socketpair()
    stack.enter_context(ours)
    stack.enter_context(theirs)
    return Effect(lambda what: ours.send(what.encode()), lambda: theirs.recv(1 << 16))


def _server(folder: Path, stack: ExitStack) -> Effect:
    server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    server.setblocking(False)

    def do(_: str) -> None:
        socket.create_connection(server.getsockname()).close()

    def read() -> int:
        calls = 0
        while True:
            try:
                server.accept()[0].close()
            except BlockingIOError:
                return calls
            calls += 1

    return Effect(do, read)


def _pipe(folder: Path, stack: ExitStack) -> Effect:
    reads, writes = os.pipe()
    stack.callback(os.close, reads)
    stack.callback(os.close, writes)
    return Effect(lambda what: os.write(writes, what.encode()), lambda: os.read(reads, 1 << 16))


def _mode(folder: Path, stack: ExitStack) -> Effect:
    (folder / "file").touch(0o600)
    mode = lambda: (folder / "file").stat().st_mode  # noqa: E731
    return Effect(lambda _: (folder / "file").chmod(mode() + 1), mode)


def _time(folder: Path, stack: ExitStack) -> Effect:
    (folder / "file").touch()
    os.utime(folder / "file", (0, 0))
    changed = lambda: int((folder / "file").stat().st_mtime)  # noqa: E731
    return Effect(lambda _: os.utime(folder / "file", (0, changed() + 1)), changed)


def _program(folder: Path, stack: ExitStack) -> Effect:
    command = f"echo x >> {folder / 'rows'}"
    return Effect(lambda _: subprocess.run(["/bin/sh", "-c", command], check=True), (folder / "rows").read_text)


def _signal(folder: Path, stack: ExitStack) -> Effect:
    heard, own = [0], os.getpid()

    def hear(*_: object) -> None:
        heard[0] += 1

    stack.callback(signal.signal, signal.SIGUSR2, signal.signal(signal.SIGUSR2, hear))
    return Effect(lambda _: os.kill(own, signal.SIGUSR2), lambda: heard[0])


def _lock(folder: Path, stack: ExitStack) -> Effect:
    """A lock is of the open file: a copy of the process that lets go of it lets go of it for all."""
    file = stack.enter_context((folder / "lock").open("w"))
    held: list[bool] = []

    def do(what: str) -> None:
        other = os.open(folder / "lock", os.O_RDWR)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held.append(False)
        except OSError:
            held.append(True)
        finally:
            os.close(other)
        fcntl.flock(file, fcntl.LOCK_UN if what == "step 2" else fcntl.LOCK_EX)

    return Effect(do, lambda: held)


def _hangs_elsewhere(folder: Path, stack: ExitStack) -> Effect:
    """One that waits for ever in any process but the first: it delays nobody."""
    own, done = os.getpid(), [0]

    def do(_: str) -> None:
        while os.getpid() != own:
            time.sleep(1.0)
        done[0] += 1

    return Effect(do, lambda: done[0])


EFFECTS: dict[str, Callable[[Path, ExitStack], Effect]] = {
    make.__name__.strip("_"): make
    for make in (
        *(_file_read_on, _file_written_on, _file_appended, _logged, _value, _array, _semaphore, _queue, _pages),
        *(_tensor, _database, _database_kept_open, _socket, _server, _pipe, _mode, _time, _program, _signal, _lock),
        _hangs_elsewhere,
    )
}


def left_by(name: str, folder: Path, run: Callable[[], object]) -> object:
    """What is left of the effect of that name after ``run``."""
    global effect
    with ExitStack() as stack:
        effect = EFFECTS[name](folder, stack)
        stack.callback(partial(globals().pop, "effect"))
        run()
        return effect.read()
