"""A range of torch's profiler that begins in one session and ends in the next; one of the two is ours.

It is a program of its own, because torch writes into freed memory if this is not prevented.
"""

import ctypes
import sys
from contextlib import suppress
from pathlib import Path

import torch

from lm_profiler.callbacks import TraceOptions
from lm_profiler.callbacks.instruments.tracer import Tracer
from lm_profiler.measure.clocks.timeline import Timeline

M_MMAP_THRESHOLD = -3  # of malloc.h
FIRST_SESSIONS = ("ours", "the program's")


def program_session() -> torch.profiler.profile:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


def end_our_session_in_a_range(tracer: Tracer) -> int:
    tracer.start()
    tracer.step()
    with torch.profiler.record_function("from our session into the program's"):
        tracer.discard()
        session = program_session()
        session.start()
    torch.ones(1)
    session.stop()
    return count_of_ones(session)


def begin_our_session_in_a_range(tracer: Tracer) -> int:
    session = program_session()
    session.start()
    torch.ones(1)
    with torch.profiler.record_function("from the program's session into ours"):
        session.stop()
        tracer.start()
        tracer.step()
    tracer.discard()
    return count_of_ones(session)


def count_of_ones(session: torch.profiler.profile) -> int:
    return sum(event.name == "aten::ones" for event in session.events())


if __name__ == "__main__":
    first, folder = sys.argv[1:]
    with suppress(AttributeError):  # other C libraries than glibc
        # The freed memory goes back to the system, so that each access to it crashes.
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 4096)
    module = torch.nn.Linear(2, 2)
    tracer = Tracer(TraceOptions(steps=1), torch.device("cpu"), Timeline(), Path(folder), 0, lambda: module)
    sequences = dict(zip(FIRST_SESSIONS, [end_our_session_in_a_range, begin_our_session_in_a_range], strict=True))
    count = sequences[first](tracer)
    print("calls in the program's session:", count)
