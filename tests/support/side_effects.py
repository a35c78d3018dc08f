"""A module whose code changes what lies outside of it, wherever Lightning asks the module for something.

Another run of any of that code would be seen in what is left.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

STEPS = 3


class Effect(NamedTuple):
    """What a module does each time that its code runs, and what there is of it in the end."""

    do: Callable[[str], object]
    read: Callable[[], object]


class DoesAll(LightningModule):
    """Does all of them wherever Lightning asks a module for something."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        _do_all("made")

    def prepare_data(self) -> None:
        _do_all("prepared")

    def setup(self, stage: str) -> None:
        _do_all("set up")

    def train_dataloader(self) -> Any:
        _do_all("loader")
        return DataLoader(torch.ones(16, 2), batch_size=2)

    def configure_optimizers(self) -> Any:
        _do_all("optimizer")
        return torch.optim.SGD(self.parameters(), 0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        _do_all(f"step {batch_idx}")
        return self.layer(batch).sum()


def _file(folder: Path, stack: ExitStack) -> Effect:
    """A file that is open all the time: a copy of the process would share its offset."""
    rows = stack.enter_context((folder / "rows").open("wb", buffering=0))
    return Effect(lambda what: rows.write(what.encode()), (folder / "rows").read_bytes)


def _shared_memory(folder: Path, stack: ExitStack) -> Effect:
    value = multiprocessing.Value("i", 0)

    def do(_: str) -> None:
        with value.get_lock():
            value.value += 1

    return Effect(do, lambda: value.value)


def _database(folder: Path, stack: ExitStack) -> Effect:
    def ask(what: str) -> list[Any]:
        with closing(sqlite3.connect(folder / "rows.db")) as rows, rows:
            return list(rows.execute(what))

    ask("create table seen (what text)")
    return Effect(lambda what: ask(f"insert into seen values ('{what}')"), lambda: ask("select what from seen"))


def _socket(folder: Path, stack: ExitStack) -> Effect:
    ours, theirs = socket.socketpair()
    stack.enter_context(ours)
    stack.enter_context(theirs)
    return Effect(lambda what: ours.send(what.encode()), lambda: theirs.recv(1 << 16))


def _program(folder: Path, stack: ExitStack) -> Effect:
    command = f"echo x >> {folder / 'programs'}"
    return Effect(lambda _: subprocess.run(["/bin/sh", "-c", command], check=True), (folder / "programs").read_text)


def _signal(folder: Path, stack: ExitStack) -> Effect:
    heard, own = [0], os.getpid()

    def hear(*_: object) -> None:
        heard[0] += 1

    stack.callback(signal.signal, signal.SIGUSR2, signal.signal(signal.SIGUSR2, hear))
    return Effect(lambda _: os.kill(own, signal.SIGUSR2), lambda: heard[0])


KINDS = {
    "file": _file,
    "shared memory": _shared_memory,
    "database": _database,
    "socket": _socket,
    "program": _program,
    "signal": _signal,
}
effects: dict[str, Effect] = {}
"""Of the run that comes, by kind."""


def _do_all(what: str) -> None:
    for effect in effects.values():
        effect.do(what)


def left_by(folder: Path, run: Callable[[], object]) -> dict[str, object]:
    """What is left of each effect after ``run``."""
    with ExitStack() as stack:
        stack.callback(effects.clear)
        for kind, make in KINDS.items():
            effects[kind] = make(folder, stack)
        run()
        return {kind: effect.read() for kind, effect in effects.items()}
