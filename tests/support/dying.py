"""Trainings that die in every way that leaves them no last word, one process each (argument: their folder)."""

import ctypes
import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from faults import Tiny
from known_loop import make_profiler, trainer_with
from torch import Tensor

STEP_S = 0.3
"""On a clock of this test's own."""

LAST = 14
"""The step in which they die."""

WAYS: dict[str, Callable[[], Any]] = {
    "os._exit": lambda: os._exit(0),
    "abort": os.abort,
    "segmentation fault": lambda: ctypes.string_at(0),
    **{
        name: lambda name=name: os.kill(os.getpid(), getattr(signal, name))
        for name in ("SIGKILL", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU")
    },
}


class Dies(Tiny):
    """Steps of ``STEP_S``, of which the last one is not finished."""

    def __init__(self, die: Callable[[], Any]) -> None:
        super().__init__()
        self.die = die
        self.now_ns = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.now_ns += round(STEP_S * 1e9)
        if self.steps == LAST:
            self.die()
        return loss


def train(folder: Path, die: Callable[[], Any]) -> None:
    module = Dies(die)
    profiler = make_profiler(warmup=2, measure=1000, clock=lambda: module.now_ns)
    trainer_with([profiler], folder).fit(module)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for ignored in (signal.SIGHUP, signal.SIGQUIT):  # by whatever nohup, or a shell in the background, started
        signal.signal(ignored, signal.SIG_DFL)
    torch.set_num_threads(1)
    children = []
    for way, die in WAYS.items():
        folder = Path(sys.argv[1], way)
        folder.mkdir()
        os.chdir(folder)
        if (child := os.fork()) == 0:
            train(folder, die)
            os._exit(3)  # it should have died
        children.append(child)
    print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
