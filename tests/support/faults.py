"""Faults in the instruments, found by watching what a training calls of them."""

import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from known_loop import trainer_with
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import lm_profiler
from lm_profiler.callbacks import TrainingProfiler

OURS = {f"{Path(lm_profiler.__file__).parent}/"}
BOUNDARY = str(Path(lm_profiler.__file__).parent / "measure" / "boundary.py")
"""What the rest of ours is held by; the one file that is trusted."""

Place = tuple[CodeType, int | None]
"""A function of ours, or a line of it."""


class Endless(IterableDataset[Tensor]):
    """Batches without an end."""

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(1)
        while True:
            yield torch.randn(2, 4, generator=generator)


class Tiny(LightningModule):
    """A training that anybody can repeat bit for bit; ``acts``, by number of steps, begin the one after so many."""

    def __init__(self, acts: Mapping[int, Callable[[], object]] | None = None) -> None:
        super().__init__()
        self.acts = acts or {}
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.steps = 0

    def tokens_in(self, batch: Tensor) -> int:
        return batch.numel()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.steps in self.acts:
            self.acts[self.steps]()
        self.steps += 1
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Endless(), batch_size=None)


class Manual(Tiny):
    """The same with an optimizer of its own hands."""

    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


def train_tiny(
    folder: Path, callbacks: list[Callback], make: Callable[[], Tiny] = Tiny, max_steps: int = -1, **options: Any
) -> Tiny:
    """A new module, trained until somebody ends it."""
    module = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = trainer_with(callbacks, folder, max_steps=max_steps, **options)
        torch.manual_seed(2)
        trainer.fit(module)
    return module


def assert_same_weights(module: LightningModule, other: LightningModule) -> None:
    mine, theirs = module.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), f"{name} differs"


def _is_inside(frame: FrameType) -> bool:
    """Whether this is a function of ours that ours called: training's own calls are the boundary's business."""
    code, caller = frame.f_code, frame.f_back
    if "<" in code.co_name:  # comprehensions and lambdas are lines of their function
        return False
    if "handle" in code.co_names:  # a Guard written out, as measure/boundary.py has it for what runs in every step
        return False
    return _is_ours(code) and code.co_filename != BOUNDARY and caller is not None and _is_ours(caller.f_code)


def _is_ours(code: CodeType) -> bool:
    return any(code.co_filename.startswith(folder) for folder in OURS)


def called_places(run: Callable[[], object], lines: bool = False) -> Counter[Place]:
    """Every function of ours that ``run`` calls in this thread (or every line that it reaches), and how often."""
    seen: Counter[Place] = Counter()

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            seen[frame.f_code, frame.f_lineno] += 1
        return line

    def call(frame: FrameType, event: str, argument: Any) -> Any:
        if not _is_inside(frame):
            return None
        seen[frame.f_code, None] += 1
        return line if lines else None

    with _tracing(call):
        run()
    return seen


@contextmanager
def fault_at(place: Place, error: BaseException | type[BaseException], time: int = 1) -> Iterator[list[str]]:
    """Raise ``error`` when ``place`` is reached for the ``time``-th time; the list then has an entry."""
    code, wanted = place
    left, raised = time, []

    # The frame is forgotten before the error is raised: a function that holds its caller's is a handler of signals.
    def hit(line: int) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            sys.settrace(None)  # the rest need not be watched, which takes as long as a step itself
            raised.append(f"{code.co_qualname if hasattr(code, 'co_qualname') else code.co_name}:{line}")
            raise error

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        number = frame.f_lineno
        if event == "line" and number == wanted:
            del frame
            hit(number)
        return line

    def call(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code is not code or not _is_inside(frame):
            return None
        if wanted is None:
            number = frame.f_lineno
            del frame
            hit(number)
            return None
        return line

    with _tracing(call):
        yield raised


def fault_in(function: Callable[..., object], error: BaseException | type[BaseException] | None = None) -> Any:
    """Raise ``error``, or a KeyError, where ours calls this ``function`` of ours for the first time, in this thread."""
    return fault_at((function.__code__, None), KeyError("gone") if error is None else error)


@contextmanager
def _tracing(call: Any) -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(before)


def draw_lines(seen: Counter[Place], count: int, seed: int) -> list[tuple[Place, int]]:
    """``count`` of the lines that were ``seen``, each with one of its times."""
    drawn = random.Random(seed)
    lines = sorted((p for p in seen if p[1] is not None), key=lambda p: (p[0].co_filename, p[1] or 0))
    return [(place, drawn.randint(1, seen[place])) for place in drawn.sample(lines, count)]


def short_profiler(trace_steps: int = 1, **options: Any) -> TrainingProfiler:
    """Few steps of every stage."""
    from lm_profiler.callbacks import ActionsOptions, MemoryOptions, StageOptions, TraceOptions

    return TrainingProfiler(
        StageOptions(warmup_steps=1, measure_steps=3, **options),
        MemoryOptions(steps=1),
        TraceOptions(steps=trace_steps),
        actions=ActionsOptions(steps=1),
    )
