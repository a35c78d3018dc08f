"""A simulated device: its stream reaches instants late, and everything asked of it is counted."""

from collections.abc import Sequence
from dataclasses import dataclass


class Clock:
    """The host's clock, set by hand."""

    ns = 0

    def __call__(self) -> int:
        return self.ns

    def pass_ms(self, ms: float) -> None:
        self.ns += round(ms * 1e6)


@dataclass(eq=False)
class Instant:
    device_s: float
    seen_ns: int
    """When the host can see that it was reached."""


class FakeStream:
    """A device that takes ``slowness`` times what the host takes, and whose news reach the host ``late_ms`` later."""

    def __init__(self, clock: Clock, slowness: float = 2.0, late_ms: float = 0.0) -> None:
        self.clock = clock
        self.slowness = slowness
        self.late_ms = late_ms
        self.dead = False
        self.waits = 0
        self.made = 0
        self.free: list[Instant] = []

    def record(self) -> Instant:
        if not self.free:
            self.made += 1
            self.free.append(Instant(0.0, 0))
        instant = self.free.pop()
        instant.device_s = self.clock.ns * 1e-9 * self.slowness
        instant.seen_ns = self.clock.ns + round(self.late_ms * 1e6)
        return instant

    def reached(self, instant: Instant) -> bool:
        return self.clock.ns >= instant.seen_ns

    def seconds(self, start: Instant, end: Instant) -> float:
        assert not self.dead, "a dead device was asked for a time"
        assert self.reached(end), "an instant was read before the device got there"
        return end.device_s - start.device_s

    def capturing(self) -> bool:
        return False

    def release(self, instants: Sequence[Instant]) -> None:
        assert not {id(i) for i in instants} & {id(i) for i in self.free}, "an instant was handed back twice"
        self.free.extend(instants)

    def wait(self) -> None:
        self.waits += 1
        if self.dead:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.clock.pass_ms(self.late_ms)
