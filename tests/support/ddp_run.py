"""Two processes train the known loop; started by test_gather.py. Arguments: the folder, and where an error is raised.

Each has a simulated clock of its own: what it measures is exact, however busy the machine is.
"""

import gc
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import known_loop
import torch.distributed
from known_loop import KnownModule, SimulatedClock, SlowLoader, make_profiler, spend, trainer_with
from torch import Tensor

from lm_profiler.callbacks.session import Session

SLOWER_S = 30e-3
KILLED_AT = 40
"""The batch in which rank 1 is killed."""
COLLECTED_S = 2.0
FLAG_S = 7e-3
"""Of the flag that Lightning sends before every batch."""


class Garbage:
    """What takes a known time to be collected."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        spend("forward", COLLECTED_S)


class Uneven(KnownModule):
    """Rank 1 does more in its forward pass."""

    fails = collects = killed = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.fails and batch_idx == 4 and self.global_rank == 1:
            raise ValueError("rank 1 gives up")
        if self.killed and batch_idx == KILLED_AT and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.collects and batch_idx == 4 and self.global_rank == 1:
            Garbage()
            gc.collect()
        spend("forward", SLOWER_S * self.global_rank)
        return self.loss()

    def tokens_in(self, batch: Tensor) -> int:
        return 10 + self.global_rank


def break_on_rank_1() -> None:
    """Its instruments fail when its third step has ended."""
    whole = Session.step_ended

    def broken(session: Session) -> int:
        if session.steps == 2 and session.rank == 1:
            raise ValueError("rank 1 measures no more")
        return whole(session)

    Session.step_ended = broken


def slow_broadcast() -> None:
    whole = torch.distributed.broadcast

    def slow(*args: Any, **kwargs: Any) -> Any:
        spend("flag", FLAG_S)
        return whole(*args, **kwargs)

    torch.distributed.broadcast = slow


def main(folder: str, fails: str) -> None:
    warnings.simplefilter("ignore")
    known_loop.CLOCK = SimulatedClock()
    module = Uneven()
    module.fails, module.collects, module.killed = (fails == way for way in ("fails", "collects", "killed"))
    profiler = make_profiler(
        warmup=1, measure=100 if module.killed else 5, memory=1, trace=1, actions=0 if fails else 2
    )
    if not fails:
        slow_broadcast()
    if fails == "breaks":
        break_on_rank_1()
    options: dict[str, Any] = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
    trainer_with([profiler], Path(folder), **options).fit(module, SlowLoader())
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
