"""What ranks of a group do in tests; a fresh process imports it by its name."""

import os
import signal
import time
from collections.abc import Callable

Send = Callable[[object], None]


def send_pid(rank: int, send: Send) -> None:
    send((rank, os.getpid()))


def raise_in_rank_1(rank: int, send: Send) -> None:
    if rank == 1:
        raise ValueError("the planted\nfault")
    signal.pause()


def die_in_rank_1(rank: int, send: Send) -> None:
    """The peer reports it first, as gloo's does."""
    if rank == 0:
        raise RuntimeError("connection closed by peer")
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)
