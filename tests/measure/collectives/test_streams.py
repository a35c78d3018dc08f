"""Waits of the computing stream for others, and calls on others, with streams that are made up."""

from __future__ import annotations

from typing import Any

from lm_profiler.measure.collectives.streams import StreamWaits


class Cuda:
    """Streams that note what they wait for; every look at the clock takes 1 ns, and so does what a stream waits for."""

    class Stream:
        def __init__(self) -> None:
            self.waited: list[str] = []

        def wait_event(self, event: str) -> None:
            self.waited.append(event)

    def __init__(self) -> None:
        self.now = 0
        self.own = self.current = self.Stream()

    def current_stream(self) -> Stream:
        return self.current

    def set_stream(self, stream: Stream | None) -> None:
        self.current = stream or self.current

    def clock(self) -> int:
        self.now += 1
        return self.now

    def record(self) -> Any:
        return len(self.current.waited)


def test_waits_of_the_computing_stream_are_noted_and_those_of_others_are_not() -> None:
    cuda = Cuda()
    other, waits = Cuda.Stream(), StreamWaits(cuda.record, cuda.clock, cuda)
    before = Cuda.Stream.wait_event
    waits.start()
    cuda.own.wait_event("gathered")
    other.wait_event("computed")
    cuda.set_stream(other)
    cuda.own.wait_event("while another stream is the current one")  # an instant would be of that one
    cuda.set_stream(cuda.own)
    waits.stop()
    waits.stop()
    cuda.own.wait_event("after it")
    assert [what.rpartition(" ")[2] for what in cuda.own.waited] == ["gathered", "one", "it"]
    assert other.waited == ["computed"]
    assert [tuple(stand) for stand in waits.stands] == [(1, 0, 1)]
    assert Cuda.Stream.wait_event is before


def test_calls_are_beside_while_another_stream_is_the_current_one() -> None:
    cuda = Cuda()
    waits = StreamWaits(cuda.record, cuda.clock, cuda)
    waits.start()
    cuda.now = 10
    cuda.set_stream(Cuda.Stream())
    cuda.now = 20
    cuda.set_stream(None)
    cuda.now = 30
    cuda.set_stream(cuda.own)
    waits.stop()
    assert [waits.beside(at_ns) for at_ns in (5, 15, 25, 35)] == [False, True, True, False]
