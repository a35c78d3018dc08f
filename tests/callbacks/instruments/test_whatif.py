"""One place at a time is delayed, in a stage of its own: exactly as planned, and nothing else is touched."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from fake_device import Clock
from known_loop import instruments, trainer_with
from lightning.pytorch import LightningModule
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.trainer.states import RunningStage
from stored_texts import assert_stored
from torch.utils.data import DataLoader

from lm_profiler.analysis.why.slack_model import LEVELS, held_in, slack
from lm_profiler.callbacks import TrainingProfiler, WhatIfOptions
from lm_profiler.callbacks.instruments.delayed_loader import DelayedLoader
from lm_profiler.callbacks.instruments.whatif import Experiment, WhatIf
from lm_profiler.measure.boundary import UNGUARDED, Guard
from lm_profiler.measure.clocks import steps as at
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.delays.workers import DelayedCollate
from lm_profiler.record.run import read_run
from lm_profiler.record.steps import read_steps
from lm_profiler.usage_error import UsageError

pytestmark = pytest.mark.usefixtures("no_rates")


@dataclass
class Loader:
    """A ``DelayedLoader`` without workers."""

    ahead: int = 0
    delays: Any = None
    problem: str | None = None
    restored: int = 0

    def why_not(self, held_s: float) -> str | None:
        return self.problem

    def restore(self) -> None:
        self.restored += 1


@dataclass
class Loop:
    """Steps of known phases, on a clock that is set by hand."""

    batches: int = 1
    loader: Loader = field(default_factory=Loader)
    told: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = Clock()
        self.timeline = Timeline(self.clock)

    def whatif(self, steps: int) -> WhatIf:
        sleep = lambda seconds: self.clock.pass_ms(seconds * 1e3)  # noqa: E731
        host = ("forward", "backward", "optimizer")
        options, loader, step_s = WhatIfOptions(steps=steps), cast(DelayedLoader, self.loader), lambda: [0.01]
        made = WhatIf(options, self.timeline, None, loader, self.batches, host, step_s, sleep)
        made.part = Guard("whatif", self.told.append, made.discard)
        return made

    def step(self) -> float:
        """Seconds of a step of ``batches``: 1 ms of data, 4 of forward, 4 of backward, and 1 of the optimizer."""
        for _ in range(self.batches):
            for code, ms in ((at.DATA, 1.0), (at.FORWARD, 4.0), (at.BACKWARD, 4.0)):
                self.timeline.mark(code)
                self.clock.pass_ms(ms / self.batches)
                self.timeline.mark(at.LEAVE)
        self.timeline.mark(at.OPTIMIZER)
        self.clock.pass_ms(1.0)
        self.timeline.mark(at.OPTIMIZED)
        self.timeline.mark(at.END)
        marks = self.timeline.reading().finished.popleft()
        return (marks.host_ns[-1] - marks.host_ns[0]) * 1e-9


@pytest.mark.parametrize("batches", [1, 4])
def test_every_step_is_delayed_as_planned_and_the_delays_say_so(batches: int) -> None:
    loop = Loop(batches)
    whatif = loop.whatif(200)
    for stage in ("warmup", "measure"):
        whatif.begin(stage)
        assert loop.timeline.observers == ()
        assert loop.step() == pytest.approx(0.01)
        whatif.end(stage)
    whatif.begin("whatif")
    times = [loop.step() for _ in range(200)]
    whatif.end("whatif")
    assert loop.timeline.observers == ()
    experiment = whatif.facts["experiment"]
    assert isinstance(experiment, Experiment)
    assert {(block.place, block.level) for block in experiment.blocks} == {
        (None, 0.0),
        *((place, level) for place in ("data", "forward", "backward", "optimizer") for level in LEVELS),
    }
    for block, delay_s in zip(experiment.blocks, experiment.delays_s, strict=True):
        assert delay_s == pytest.approx(0.01 * block.level)
        assert times[block.first : block.end] == pytest.approx([0.01 * (1 + block.level)] * (block.end - block.first))
    assert times[experiment.blocks[-1].end :] == pytest.approx([0.01] * (200 - experiment.blocks[-1].end))
    of_places = slack(held_in(experiment.blocks, experiment.delays_s, times), 0).places
    assert [(of.place, of.slope, of.slack_s) for of in of_places] == [
        (place, pytest.approx(1.0), pytest.approx(0.0, abs=1e-9))
        for place in ("data", "forward", "backward", "optimizer")
    ]


def test_too_few_steps_are_refused_in_a_line_and_nothing_is_delayed() -> None:
    loop = Loop()
    whatif = loop.whatif(167)
    whatif.begin("whatif")
    assert [loop.step() for _ in range(3)] == pytest.approx([0.01] * 3)
    whatif.end("whatif")
    assert_stored("callbacks/whatif: too few steps", {"without workers": loop.told})
    assert "experiment" not in whatif.facts


def test_a_loader_that_cannot_be_delayed_is_named_and_the_host_is_delayed() -> None:
    loop = Loop(loader=Loader(problem="it is strange"))
    whatif = loop.whatif(200)
    whatif.begin("whatif")
    for _ in range(200):
        loop.step()
    whatif.end("whatif")
    assert_stored("callbacks/whatif: strange loader", {"notes": loop.told})
    assert {of.place for of in whatif.facts["experiment"].blocks} == {None, "forward", "backward", "optimizer"}


def test_what_fails_is_taken_out_and_the_loop_goes_on() -> None:
    loop = Loop()
    whatif = loop.whatif(200)

    def broken(seconds: float) -> None:
        raise RuntimeError("no sleep")

    whatif.sleep = broken
    whatif.begin("whatif")
    times = [loop.step() for _ in range(30)]
    assert times == pytest.approx([0.01] * 30)
    assert_stored("callbacks/whatif: failed", {"notes": loop.told})
    assert loop.timeline.observers == ()
    assert loop.loader.restored


def test_the_option_takes_no_negative_number() -> None:
    with pytest.raises(UsageError, match=r"^whatif\.steps: expected 0 or more, given -1$"):
        WhatIfOptions(steps=-1)


# -- within a Trainer -------------------------------------------------------------------------------------------------


class Own(BoringModel):
    """Remembers whose function collates, from its first step to its last."""

    def __init__(self) -> None:
        super().__init__()
        self.collates: list[object] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.collates.append(getattr(self.trainer.train_dataloader, "collate_fn", None))
        return super().training_step(batch, batch_idx)


def collate(samples: Any) -> Any:
    return torch.stack(samples)


def loader(workers: int = 1, **options: Any) -> DataLoader[Any]:
    return DataLoader(RandomDataset(32, 4000), 1, num_workers=workers, collate_fn=collate, **options)


def fit(data: Any, folder: Path, steps: int, module: LightningModule | None = None, **options: Any) -> TrainingProfiler:
    profiler = instruments(1, 3, whatif=WhatIfOptions(steps=steps))
    trainer_with([profiler], folder, **options).fit(module or BoringModel(), data)
    return profiler


def test_without_delays_asked_for_nothing_of_the_loader_is_touched(tmp_path: Path) -> None:
    module, data = Own(), loader()
    profiler = instruments(1, 3)
    trainer = trainer_with([profiler], tmp_path)
    trainer.fit(module, data)
    assert set(module.collates) == {collate}
    assert "process_dataloader" not in vars(trainer.strategy)
    record = read_run(profiler.folder)
    assert "whatif" not in record.steps
    assert record.slack is None


@pytest.mark.parametrize("persistent", [False, True])
def test_over_epochs_workers_are_delayed_and_the_loader_gets_its_function_back(
    persistent: bool, tmp_path: Path
) -> None:
    module, data = Own(), loader(2, persistent_workers=persistent)
    profiler = fit(data, tmp_path, 336, module, limit_train_batches=100)
    assert isinstance(module.collates[0], DelayedCollate)
    assert data.collate_fn is collate
    assert "process_dataloader" not in vars(module.trainer.strategy)
    record = read_run(profiler.folder)
    assert record.notes == []
    assert record.slack is not None
    assert record.slack.workers == 2
    assert {of.place for of in record.slack.places} == {"loader", "forward", "backward", "optimizer"}
    assert all(of.largest_s > 0 for of in record.slack.places)
    stages = [row.stage for row in read_steps(profiler.folder / "steps.csv")]
    assert stages == ["warmup"] + ["measure"] * 3 + ["whatif"] * 336


class Batches:
    """A loader that is nobody's."""

    def __len__(self) -> int:
        return 400

    def __iter__(self) -> Iterator[Any]:
        return iter([torch.ones(1, 32)] * 400)


class AnyBatch(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.layer(torch.ones(1, 32)).sum()}


@pytest.mark.parametrize(
    "data, kind", [(Batches, "Batches"), (lambda: [loader(), loader()], "list")], ids=["no DataLoader", "two of them"]
)
def test_of_a_loader_that_cannot_be_delayed_the_host_still_is(data: Any, kind: str, tmp_path: Path) -> None:
    record = read_run(fit(data(), tmp_path, 200, AnyBatch()).folder)
    assert record.status == "ok"
    assert record.slack is not None
    assert [of.place for of in record.slack.places] == ["forward", "backward", "optimizer"]
    (note,) = record.notes
    assert note.endswith(kind)


def test_a_timeout_that_the_delays_would_exceed_leaves_the_loader_out() -> None:
    state = SimpleNamespace(stage=RunningStage.TRAINING)
    given = loader(timeout=10.0)
    strategy = SimpleNamespace(process_dataloader=lambda loader: loader)
    trainer = SimpleNamespace(strategy=strategy, state=state, train_dataloader=given)
    delayed = DelayedLoader(trainer, "fit", UNGUARDED)  # type: ignore[arg-type]
    trainer.strategy.process_dataloader(given)
    assert delayed.delays is not None
    assert delayed.ahead == 2
    assert delayed.why_not(4.9) is None
    assert_stored("callbacks/whatif: timeout", {"beyond it": delayed.why_not(5.1) or ""})
    delayed.restore()
    assert given.collate_fn is collate


@pytest.mark.parametrize("workers, least", [(0, 168), (2, 336)])
def test_steps_that_are_too_few_are_not_run(workers: int, least: int, tmp_path: Path) -> None:
    profiler = fit(loader(workers), tmp_path, least - 1)
    record = read_run(profiler.folder)
    assert record.status == "ok"
    assert record.slack is None
    (note,) = record.notes
    assert [int(number) for number in re.findall(r"\d+", note) if int(number) > 9] == [least, least - 1]
    assert [row.stage for row in read_steps(profiler.folder / "steps.csv")] == ["warmup"] + ["measure"] * 3
    assert "whatif" not in record.steps_planned


class Manual(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.layer(batch).sum())
        optimizer.step()


@pytest.mark.parametrize(
    "module, options", [(Manual, {}), (BoringModel, {"accumulate_grad_batches": 2})], ids=["manual", "accumulating"]
)
def test_every_place_is_delayed_whoever_steps(module: Any, options: dict[str, Any], tmp_path: Path) -> None:
    record = read_run(fit(loader(0), tmp_path, 168, module(), **options).folder)
    assert record.notes == []
    assert record.slack is not None
    assert [of.place for of in record.slack.places] == ["data", "forward", "backward", "optimizer"]
    assert record.slack.savings == []


def test_an_evaluation_has_no_backward_pass_to_delay(tmp_path: Path) -> None:
    profiler = instruments(1, 3, whatif=WhatIfOptions(steps=200), verb="validate")
    trainer_with([profiler], tmp_path).validate(BoringModel(), loader(1), verbose=False)
    record = read_run(profiler.folder)
    assert record.slack is not None
    assert [of.place for of in record.slack.places] == ["loader", "forward"]


def test_a_run_that_is_cut_says_that_there_were_too_few(tmp_path: Path) -> None:
    data = loader(1)
    record = read_run(fit(data, tmp_path, 252, max_steps=50).folder)
    assert record.slack is None
    assert record.steps["whatif"] == 46
    assert_stored("callbacks/whatif: cut", {"notes": record.notes})
    assert data.collate_fn is collate
