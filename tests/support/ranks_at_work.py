"""What ranks of a group do in tests; a fresh process imports it by its name."""

import os
import signal
import time

from lm_profiler.processes.rank_group import RankLink


def tell(link: RankLink) -> None:
    link.send((link.rank, os.getpid()))


def raise_in_rank_1(link: RankLink) -> None:
    if link.rank == 1:
        raise ValueError("the planted\nfault")
    signal.pause()


def die_in_rank_1(link: RankLink) -> None:
    """The peer tells of it first, as gloo's does."""
    if link.rank == 0:
        raise RuntimeError("connection closed by peer")
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)
