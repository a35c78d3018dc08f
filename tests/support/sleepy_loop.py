"""A training loop whose every phase keeps the device's stream busy for a known time, on CUDA or on a made-up device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from fake_device import Clock
from known_loop import TRUTH_S, KnownModule, SlowBackward, SlowSGD
from torch import Tensor


class CudaDevice:
    """The current CUDA device: kernels that spin for so many cycles, and events that are nobody else's."""

    def __init__(self) -> None:
        self._side = torch.cuda.Stream()
        torch.cuda._sleep(1_000_000)  # the first launch is slow
        self.wait()
        start = self.event()
        torch.cuda._sleep(20_000_000)
        end = self.event()
        self.wait()
        self._cycles_per_s = 20_000_000 / self.seconds(start, end)

    def sleep(self, seconds: float) -> None:
        """The current stream is busy for about that long: the clock may change."""
        torch.cuda._sleep(round(seconds * self._cycles_per_s))

    def event(self) -> Any:
        """The end of what the current stream has been given."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) * 1e-3

    def wait(self) -> None:
        torch.cuda.synchronize()

    def aside(self) -> AbstractContextManager[object]:
        """What is enqueued within goes to a second stream, behind what the first has been given so far."""
        self._side.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._side)

    def join(self) -> None:
        """The first stream waits for the second."""
        torch.cuda.current_stream().wait_stream(self._side)

    def graph(self, seconds: float) -> Callable[[], None]:
        """A CUDA graph of one such kernel; a call replays it."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.sleep(seconds)
        return graph.replay


class MadeUpDevice:
    """Streams that do nothing but take the time that they are given, on a timeline of their own.

    It is also what `EventStream` is on a real one, so that the instruments can be given it. The host's clock moves by
    ``HOST_NS`` whenever it is read, and by nothing else: the host only launches.
    """

    HOST_NS = 2_000

    def __init__(self) -> None:
        self._host = Clock()
        self._free_s = {"first": 0.0, "second": 0.0}
        self._current = "first"
        self.waits = 0

    def clock(self) -> int:
        """Nanoseconds of the host."""
        self._host.ns += self.HOST_NS
        return self._host()

    def sleep(self, seconds: float) -> None:
        self._free_s[self._current] = self.event() + seconds

    def event(self) -> float:
        """When the current stream will have done what it was given: at once, where it has nothing to do."""
        return max(self._free_s[self._current], self.clock() * 1e-9)

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def wait(self) -> None:
        self.waits += 1
        self._host.ns = max(self._host.ns, round(max(self._free_s.values()) * 1e9) + 1)

    @contextmanager
    def aside(self) -> Iterator[None]:
        self._free_s["second"] = max(self._free_s.values())
        self._current = "second"
        yield
        self._current = "first"

    def join(self) -> None:
        self._free_s["first"] = max(self._free_s.values())

    def graph(self, seconds: float) -> Callable[[], None]:
        return lambda: self.sleep(seconds)

    # What EventStream has beside `seconds` and `wait`.

    def record(self) -> float:
        return self.event()

    def reached(self, instant: float) -> bool:
        return self.clock() * 1e-9 >= instant

    def release(self, instants: Sequence[float]) -> None:
        """Nothing is pooled."""


Device = CudaDevice | MadeUpDevice


class Sleeps:
    """Keeps the device busy, between a pair of events of its own, by phase."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._pairs: dict[str, list[tuple[Any, Any]]] = defaultdict(list)

    @contextmanager
    def watched(self, phase: str) -> Iterator[None]:
        start = self.device.event()
        yield
        self._pairs[phase].append((start, self.device.event()))

    def __call__(self, phase: str) -> None:
        with self.watched(phase):
            self.device.sleep(TRUTH_S[phase])

    def step_seconds(self, phase: str, batches: int, first: int, last: int) -> list[float]:
        """What a phase took in each step from ``first`` on, before ``last``; it occurs ``batches`` times in one."""
        self.device.wait()
        seconds = [self.device.seconds(*pair) for pair in self._pairs[phase]]
        return [sum(seconds[step * batches : (step + 1) * batches]) for step in range(first, last)]


class SleepyBackward(SlowBackward):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Sleepy) -> Tensor:
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.module.backward_sleep()
        return grad, None


class Sleepy(KnownModule):
    """One kernel in each phase but data, whose loader has it."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.sleep = Sleeps(device)

    def transfer_batch_to_device(self, batch: Tensor, device: torch.device, dataloader_idx: int) -> Tensor:
        self.sleep("transfer")
        return batch

    def loss(self) -> Tensor:
        self.forward_sleep()
        return SleepyBackward.apply(self.weight, self)

    def forward_sleep(self) -> None:
        self.sleep("forward")

    def backward_sleep(self) -> None:
        self.sleep("backward")

    def optimizer_sleep(self) -> None:
        self.sleep("optimizer")

    def optimizer_zero_grad(self, *args: Any) -> None:
        self.sleep("zero_grad")

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        self.sleep("clip")

    def configure_optimizers(self) -> Any:
        module = self

        class SleepySGD(SlowSGD):
            def step(self, closure: Any = None) -> Any:
                loss = closure()
                module.optimizer_sleep()
                return loss

        return SleepySGD(self.parameters())


class TwoStreams(Sleepy):
    """Forward waits for a second stream that takes half as long again, and optimizer for one that began in backward.

    That one is as long as backward, clip and twice the optimizer's own kernel.
    """

    def forward_sleep(self) -> None:
        device = self.sleep.device
        with self.sleep.watched("forward"):
            with device.aside():
                device.sleep(1.5 * TRUTH_S["forward"])
            device.sleep(TRUTH_S["forward"])
            device.join()

    def backward_sleep(self) -> None:
        device = self.sleep.device
        with device.aside():
            device.sleep(TRUTH_S["backward"] + TRUTH_S["clip"] + 2 * TRUTH_S["optimizer"])
        self.sleep("backward")

    def optimizer_sleep(self) -> None:
        with self.sleep.watched("optimizer"):
            self.sleep.device.sleep(TRUTH_S["optimizer"])
            self.sleep.device.join()


class Graphed(Sleepy):
    """Forward replays a CUDA graph of its kernel."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._replay = device.graph(TRUTH_S["forward"])

    def forward_sleep(self) -> None:
        with self.sleep.watched("forward"):
            self._replay()

    def on_fit_end(self) -> None:
        """Somebody may keep the module, and a process that has a graph may replay it in any later training too."""
        del self._replay


class SleepyLoader:
    """Has a length, so that Lightning fetches no batch ahead."""

    def __init__(self, sleep: Sleeps | None = None) -> None:
        self._sleep = sleep

    def __len__(self) -> int:
        return 1000

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(len(self)):
            if self._sleep is not None:
                self._sleep("data")
            yield torch.ones(7)
