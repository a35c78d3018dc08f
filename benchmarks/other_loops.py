"""Loops that no Trainer runs: how right are their phases, and what does marking them cost?

    python -m benchmarks.other_loops [--steps 40] [--rounds 25]

First loops whose every phase spins for a known time: one that is found by itself, one that names its model, optimizer
and data, and one of Lightning Fabric. "off" is how far the median phase is from its waits plus what torch and Fabric
themselves add, in units of the tolerance: 0.3 ms or 1.5 %. The loop's own clock reads what they add, around the same
calls once the profiler has left. For the optimizer it is nothing: torch's work around its hooks is none of it.

Then the CPU time that a step of a tiny loop takes more than without anything, in short runs in random order, beside
Lightning's SimpleProfiler with thirty actions per step. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from io import StringIO
from itertools import product
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.pytorch.profilers import SimpleProfiler
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lm_profiler import profile
from lm_profiler.callbacks.own_loop import ProfiledLoop
from lm_profiler.record.steps import read_steps

_WAITS_S = {
    "data": 6e-3,
    "forward": 20e-3,
    "backward": 40e-3,
    "optimizer": 10e-3,
    "zero_grad": 4e-3,
}
_KINDS = ("found", "named", "Fabric")
_WARMUP = 3
_STEPS_AFTERWARDS = 30
_STAGES = {"memory_steps": 0, "trace_steps": 0, "action_steps": 0}
_STEPS_OF_A_BLOCK = 50
_ACTIONS = 30  # that Lightning's loop has per step

waited_s: defaultdict[str, float] = defaultdict(float)  # in the running step


def spin(phase: str) -> None:
    began_s = time.perf_counter()
    end_s = began_s + _WAITS_S[phase]
    while time.perf_counter() < end_s:
        pass
    waited_s[phase] += time.perf_counter() - began_s


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        spin("backward")
        return grad


class SlowModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, batch: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            spin("forward")
        return SlowBackward.apply(self.weight)


class SlowSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        spin("optimizer")

    def zero_grad(self, set_to_none: bool = True) -> None:
        spin("zero_grad")


class Batches(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        while True:
            spin("data")
            yield torch.ones(2)


@dataclass
class KnownLoop:
    """What a loop of one kind calls."""

    kind: str
    model: Any = field(default_factory=SlowModel)
    optimizer: Any = None
    loader: Any = None
    backward: Callable[[Tensor], object] = torch.Tensor.backward

    def __post_init__(self) -> None:
        self.optimizer = SlowSGD(self.model.parameters(), lr=0.0)
        self.loader = DataLoader(Batches(), batch_size=None)
        if self.kind != "Fabric":
            return
        fabric = Fabric(accelerator="cpu", devices=1)
        self.model, self.optimizer = fabric.setup(self.model, self.optimizer)
        self.loader = fabric.setup_dataloaders(self.loader)
        self.backward = fabric.backward

    @property
    def parties(self) -> list[Any]:
        """What the program names to the profiler."""
        return [self.model, self.optimizer] if self.kind == "named" else []


def train_known(
    loop: KnownLoop,
    run: ProfiledLoop,
    steps: int,
    batches_per_step: int,
    evaluates: bool,
) -> list[dict[str, tuple[float, float]]]:
    """Train; return for each step and phase the waits and what the loop's own clock has read around the calls."""
    model, optimizer = loop.model, loop.optimizer
    batches = iter(run.data(loop.loader) if loop.kind == "named" else loop.loader)
    taken_s: defaultdict[str, float] = defaultdict(float)

    def timed(phase: str, call: Callable[..., Any], *arguments: Any) -> Any:
        began_s = time.perf_counter()
        result = call(*arguments)
        taken_s[phase] += time.perf_counter() - began_s
        return result

    rows = []
    for step in range(steps):
        waited_s.clear()
        taken_s.clear()
        for _ in range(batches_per_step):
            batch = timed("data", next, batches)
            output = timed("forward", model, batch)
            timed("backward", loop.backward, output)
        timed("optimizer", optimizer.step)
        timed("zero_grad", optimizer.zero_grad)
        rows.append({phase: (waited_s[phase], taken_s[phase]) for phase in _WAITS_S})
        if evaluates and step % 5 == 4:
            model.eval()
            with torch.no_grad():
                model(torch.ones(2))
            model.train()
    return rows


def known_answer(
    kind: str, steps: int, batches_per_step: int, evaluates: bool, folder: str
) -> dict[str, float]:
    """Return for each phase how far the profile is off, in units of the tolerance."""
    loop_steps = _WARMUP + steps + _STEPS_AFTERWARDS
    loop = KnownLoop(kind)
    with profile(
        *loop.parties,
        warmup_steps=_WARMUP,
        measure_steps=steps,
        log_dir=folder,
        quiet=True,
        **_STAGES,
    ) as run:
        loop_rows = train_known(loop, run, loop_steps, batches_per_step, evaluates)
    assert run.folder is not None
    measured = [
        row for row in read_steps(run.folder / "steps.csv") if row.stage == "measure"
    ]
    assert len(measured) == steps
    unprofiled = loop_rows[_WARMUP + steps + 2 :]
    # A loop that is found by itself has a step before the profile's first: it was found there.
    steps_before = 0 if kind == "named" else 1
    off = {}
    for phase, wait_s in _WAITS_S.items():
        batches = batches_per_step if phase in ("data", "forward", "backward") else 1
        excess_s = []
        for row in measured:
            known_s, _ = loop_rows[row.step - 1 + steps_before][phase]
            excess_s.append(row.time(phase) - known_s)
        own_excess_s = [row[phase][1] - row[phase][0] for row in unprofiled]
        if phase == "optimizer":  # torch's own work around its hooks is none of it
            own_excess_s = [0.0]
        tolerance_s = max(0.3e-3, 0.015 * wait_s * batches)
        difference_s = statistics.median(excess_s) - statistics.median(own_excess_s)
        off[phase] = difference_s / tolerance_s
    return off


def tiny_loop(
    model: nn.Module,
    optimizer: Any,
    batches: Iterable[Tensor],
    around: Callable[[], object],
) -> float:
    """Train; return the CPU time of a step in microseconds."""
    steps = 0
    began_ns = time.thread_time_ns()
    for batch in batches:
        around()
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    return (time.thread_time_ns() - began_ns) * 1e-3 / steps


def costs(rounds: int, folder: str) -> dict[str, list[float]]:
    """Return what each contender adds to a step, in microseconds of CPU time, in each round."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batches = [torch.ones(2, 8)] * _STEPS_OF_A_BLOCK
    simple = SimpleProfiler()

    def thirty_actions() -> None:
        for number in range(_ACTIONS):
            with simple.profile(f"action {number}"):
                pass

    def bare() -> float:
        return tiny_loop(model, optimizer, batches, int)

    def with_simple_profiler() -> float:
        return tiny_loop(model, optimizer, batches, thirty_actions)

    def ours() -> float:
        parties = (model, optimizer)
        with profile(
            *parties,
            warmup_steps=1,
            measure_steps=10**6,
            log_dir=folder,
            quiet=True,
            **_STAGES,
        ) as run:
            tiny_loop(model, optimizer, run.data(batches[:5]), int)
            return tiny_loop(model, optimizer, run.data(batches), int)

    contenders = {
        "bare": bare,
        "lm_profiler": ours,
        "SimpleProfiler": with_simple_profiler,
    }
    added: dict[str, list[float]] = {"lm_profiler": [], "SimpleProfiler": []}
    for _ in range(rounds):
        order = list(contenders)
        random.shuffle(order)
        microseconds = {name: contenders[name]() for name in order}
        for name, values in added.items():
            values.append(microseconds[name] - microseconds["bare"])
    return added


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, redirect_stderr(StringIO()):
        for kind, batches_per_step, evaluates in product(_KINDS, (1, 3), (False, True)):
            off = known_answer(kind, options.steps, batches_per_step, evaluates, folder)
            texts = [f"{phase} {value:+.2f}" for phase, value in off.items()]
            worst = max(map(abs, off.values()))
            title = f"{kind}, accumulation {batches_per_step}"
            if evaluates:
                title += ", evaluation"
            print(f"{title}: off by at most {worst:.2f}: {', '.join(texts)}")
        for name, values in costs(options.rounds, folder).items():
            low, middle, high = statistics.quantiles(values, n=4)
            print(
                f"{name}: {middle:.1f} us per step, quartiles {low:.1f} to {high:.1f}"
            )


if __name__ == "__main__":
    main()
