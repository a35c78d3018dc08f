"""Loops that no Trainer runs: their steps and phases are right, and the program feels nothing."""

import gc
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from copy import deepcopy
from itertools import cycle, islice
from types import SimpleNamespace
from typing import Any

import known_loop
import own_loops
import pytest
import torch
from known_loop import SimulatedClock
from own_loops import STEPS, ZOO, loader, slow_model_and_optimizer, spend
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, Subset, TensorDataset

from lm_profiler.analysis.compare.differences import incomparable_facts
from lm_profiler.callbacks import hooked_loop
from lm_profiler.callbacks.hooked_run import LoopSearch
from lm_profiler.callbacks.instruments.profiling_options import ProfilingOptions
from lm_profiler.callbacks.marks.hook_marks import HookMarks
from lm_profiler.callbacks.marks.loop_state import LoopNesting, MarkedThread, StepContents
from lm_profiler.callbacks.marks.torch_hooks import OPTIMIZER_HOOKS, loader_iterators
from lm_profiler.callbacks.own_loop import ProfiledLoop, loop_options, profile, profile_with
from lm_profiler.measure.counts.recompiles import recompilations
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.run_record import read_run
from lm_profiler.record.steps import StepRow, read_steps
from lm_profiler.usage_error import UsageError


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_loop, "CLOCK", SimulatedClock())
    own_loops.make_clipping_slow(monkeypatch)


@pytest.fixture(autouse=True)
def nothing_is_left(simulated: None) -> Iterator[None]:
    """Nothing of ours is in torch after a run."""
    before = what_torch_has()
    yield
    assert what_torch_has() == before
    assert not OPTIMIZER_HOOKS.is_taken


def what_torch_has() -> list[Any]:
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    hooks = len(handle.hooks_dict_ref())
    handle.remove()
    functions = [torch.autograd.backward, nn.utils.clip_grad_norm_, nn.utils.get_total_norm]
    methods = [torch.optim.Optimizer.zero_grad, nn.Module.zero_grad, torch.amp.GradScaler.step]
    return [hooks, *functions, *methods, *(vars(kind)["__next__"] for kind in loader_iterators())]


def options(measure: int = 8, warmup: int = 2, **others: Any) -> ProfilingOptions:
    others = {"memory_steps": 0, "trace_steps": 0, "action_steps": 0, "quiet": True, **others}
    return loop_options(warmup_steps=warmup, measure_steps=measure, clock=known_loop.CLOCK, **others)


def found_loop(run_loop: Callable[[], None], **others: Any) -> LoopSearch:
    """The search for the loop that ``run_loop`` runs, as without a line of ours in the program."""
    search = LoopSearch(options(**others))
    search.start()
    run_loop()
    search.stop()
    if search.run is not None:
        search.run.end(ends_step=False)
    return search


def rows_of(run: Any) -> list[StepRow]:
    return [row for row in read_steps(run.folder / "steps.csv") if row.stage == "measure"]


def assert_times(rows: list[StepRow], truth_s: dict[str, float], is_mean: bool = False) -> None:
    for part in PARTS:
        times_s = [row.time(part) for row in rows]
        if is_mean:
            times_s = [sum(times_s) / len(times_s)]
        assert times_s == pytest.approx([truth_s.get(part, 0.0)] * len(times_s), abs=5e-9), part


def train_step(batch: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As most programs have it."""
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


NOTED = {
    "fetches_ahead": "a step takes 1 to 2 batches",  # the first one, whose batch came before the hooks
    "calls_a_method_of_the_model": "run.phase('data')",
    "batch_made_between": "run.phase('data')",
    "gan_without_loader": "run.phase('data')",
}
"""Words of the note about a loop; most of these loops have a phase without marks."""


@pytest.mark.parametrize("every, waits", [(1, 1), (4, 0)], ids=["before each step", "before each fourth"])
def test_a_model_that_acts_before_each_step_does_so_in_the_step(every: int, waits: int) -> None:
    """As in reinforcement learning. What comes more seldom is a validation, which is in no step."""

    def run_loop() -> None:
        model, optimizer = slow_model_and_optimizer()
        for number in range(STEPS):
            if number % every == 0:
                with torch.no_grad():
                    model()
            train_step(0, model, optimizer)

    rows = rows_of(found_loop(run_loop, warmup=5, measure=6).run)
    assert [row.time("other") for row in rows] == pytest.approx([waits * own_loops.SECONDS["other"]] * 6, abs=5e-9)


@pytest.mark.parametrize("trains_on_result", [True, False])
def test_a_call_without_gradients_for_a_loss_is_no_validation(trains_on_result: bool) -> None:
    """As for the temperature in soft actor-critic, which is trained on samples of the policy."""

    def run_loop() -> None:
        model, optimizer = slow_model_and_optimizer()
        temperature = nn.Parameter(torch.ones(()))
        of_temperature = torch.optim.SGD([temperature], lr=0.1)
        for number in range(3 * STEPS):
            train_step(0, model, optimizer)
            if number % 3 == 0:
                with torch.no_grad():
                    sample = model()
                if trains_on_result:
                    (temperature * sample.mean()).backward()
                    of_temperature.step()
                    of_temperature.zero_grad()

    rows = rows_of(found_loop(run_loop, warmup=12, measure=6).run)
    calls_in_steps = sum(row.time("other") for row in rows) / own_loops.SECONDS["other"]
    assert calls_in_steps == pytest.approx(2.0 if trains_on_result else 0.0, abs=1e-6)


@pytest.mark.parametrize("name", ZOO)
def test_steps_and_phases_of_a_loop_without_a_line_of_ours(name: str) -> None:
    """The first step, in which the hooks are added, and the last one, whose end nobody sees, are no rows."""
    shape = ZOO[name]
    run = found_loop(shape.run, measure=200).run
    record = run.record
    assert (record.status, record.loop) == ("ok", "own")
    assert record.steps["warmup"] + record.steps["measure"] == shape.rows
    assert_times(rows_of(run), shape.seconds(), is_mean=name == "scaler_skips_steps")
    noted = [note for note in record.notes if "the loop ended" not in note]
    assert len(noted) == (name in NOTED)
    assert NOTED.get(name, "") in "".join(noted)


def test_the_search_for_the_modules_of_a_new_optimizer_is_in_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in federated learning, where each model gets an optimizer of its own."""
    search_now = hooked_loop.find_modules

    def slow_search(optimizer: Any) -> list[nn.Module]:
        spend("validation")
        return search_now(optimizer)

    def run_loop() -> None:
        batches = iter(loader())
        for _ in range(STEPS // 2):
            model, optimizer = slow_model_and_optimizer()
            for batch in islice(batches, 2):
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

    monkeypatch.setattr(hooked_loop, "find_modules", slow_search)
    rows = rows_of(found_loop(run_loop, measure=200).run)
    assert {row.time("optimizer") for row in rows} == {own_loops.SECONDS["optimizer"]}
    assert sum(row.time("step") for row in rows) < len(rows) * sum(ZOO["usual"].seconds().values()) + 1e-6


# -- the program names its loop ------------------------------------------------------------------------------------


def run_known_loop(run: ProfiledLoop, is_named: bool, batches_per_step: int, steps: int = 14) -> None:
    model, optimizer = slow_model_and_optimizer()
    phase: Callable[[str], Any] = run.phase if is_named else (lambda name: nullcontext())
    for number, batch in zip(range(steps * batches_per_step), run.data(own_loops.Batches()), strict=False):
        with phase("transfer"):
            spend("transfer")
        with phase("forward"):
            output = model(batch)
        with phase("backward"):
            output.sum().backward()
        if (number + 1) % batches_per_step == 0:
            with phase("clip"):
                own_loops.clip_grad_norm_(model.parameters(), 1.0)
            with phase("optimizer"):
                optimizer.step()
            with phase("zero_grad"):
                optimizer.zero_grad()


@pytest.mark.parametrize("batches_per_step", [1, 3])
@pytest.mark.parametrize("is_named", [True, False])
def test_phases_are_as_long_as_they_are(is_named: bool, batches_per_step: int) -> None:
    with profile_with(options()) as run:
        run_known_loop(run, is_named, batches_per_step)
    record = run.record
    assert record == read_run(run.folder)
    assert record.model.accumulate_grad_batches == batches_per_step
    seconds = own_loops.SECONDS
    truth = {name: seconds[name] * batches_per_step for name in ("data", "forward", "backward")}
    truth |= {name: seconds[name] for name in ("clip", "optimizer", "zero_grad")}
    truth["transfer" if is_named else "other"] = seconds["transfer"] * batches_per_step
    assert_times(rows_of(run), truth)


def test_all_stages_run() -> None:
    """Memory, FLOPs, the trace, and the gaps between phases as owners of what no phase covers."""
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    all_stages = options(memory_steps=1, trace_steps=1, action_steps=2)
    with profile_with(all_stages, [model, optimizer]) as run:
        for batch in run.data(torch.ones(30, 2, 8)):
            loss = model(batch).sum()
            spend("other")
            loss.backward()
            optimizer.step()
            spend("other")
            optimizer.zero_grad()
    record = run.record
    assert (record.status, record.notes) == ("ok", [])
    products = 2 * 2 * (8 * 16 + 16 * 4)
    assert record.utilisation.flops.forward == products
    assert record.utilisation.flops.backward == 2 * products - 2 * 2 * 8 * 16  # the batch needs no gradient
    owners = {owner.action: owner.seconds for owner in record.other_by_owner.actions}
    assert owners["between optimizer.step() and zero_grad()"] == pytest.approx(own_loops.SECONDS["other"])
    assert record.memory is not None
    assert record.throughput.samples_per_step == 2


def usual_loop(run: ProfiledLoop, parts: Any = None, count: int = STEPS, **calls: Callable[[], object]) -> None:
    """Run a usual loop of a model and an optimizer; ``calls`` are made at the places that their names give."""
    model, optimizer = parts or slow_model_and_optimizer()
    for _, batch in zip(range(count), run.data(loader()), strict=False):
        loss = model(batch).sum()
        loss.backward()
        calls.get("before_optimizer", int)()
        optimizer.step()
        optimizer.zero_grad()


def hooks_of(model: nn.Module) -> dict[str, int]:
    return {name: len(value) for name, value in vars(model).items() if "hooks" in name and value is not None}


@pytest.fixture
def hides_earlier_objects() -> Iterator[None]:
    """Leave the objects of earlier tests, such as unfinished iterators, out of ``gc.get_objects()``."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("hides_earlier_objects")
def test_the_loader_that_the_loop_iterates_over_is_found() -> None:
    """Another loader of the process may be for validation."""
    model, optimizer = slow_model_and_optimizer()
    rows, others = torch.ones(40, 4), torch.ones(40, 4)
    training = DataLoader(TensorDataset(rows), batch_size=2)
    validation = DataLoader(TensorDataset(others), batch_size=4)

    def run_loop() -> None:
        for _, (batch,) in zip(range(STEPS), training, strict=False):
            train_step(batch, model, optimizer)

    search = found_loop(run_loop)
    assert search.run.loop.loader is training is not validation


class Wrapped:
    """Data that cannot be copied without its values, as in a batch of the user's own class."""

    def __init__(self, rows: list[Tensor]) -> None:
        self.rows = torch.stack(rows)


def test_a_run_does_not_keep_the_iterator_of_the_loop() -> None:
    """The error about such a batch would keep it, and with it the workers of its loader."""
    model, optimizer = slow_model_and_optimizer()
    rows = DataLoader(torch.ones(40, 4), batch_size=2, collate_fn=Wrapped)
    iterator = iter(rows)
    iterator_ref = weakref.ref(iterator)
    with profile_with(options(), [optimizer]) as run:
        for _ in range(STEPS):
            train_step(next(iterator).rows, model, optimizer)
    del iterator
    gc.collect()
    assert iterator_ref() is None
    assert run.record.status == "ok"


def test_the_loader_of_a_loop_in_profile_is_known() -> None:
    model, optimizer = slow_model_and_optimizer()
    rows = DataLoader(Subset(TensorDataset(torch.ones(900, 4)), range(800)), batch_size=64)
    with profile_with(options(), [optimizer]) as run:
        for _ in range(2):
            for (batch,) in rows:
                train_step(batch, model, optimizer)
    assert run.record.settings.num_workers == 0
    assert run.record.settings.fetches_single_rows


def next_of_new_iterator(rows: DataLoader[Any]) -> Iterator[Tensor]:
    for _ in range(STEPS):
        yield next(iter(rows))[0]


class Tasks(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(4)


def new_tasks(rows: DataLoader[Any]) -> Iterator[Tensor]:
    """As in meta-learning: each step has a task, and so a dataset, of its own."""
    for _ in range(STEPS):
        yield next(iter(DataLoader(Tasks(), batch_size=2)))


def zipped_epochs(rows: DataLoader[Any]) -> Iterator[Tensor]:
    for _ in range(STEPS // 5):
        short = DataLoader(rows.dataset, sampler=range(10), batch_size=2)
        for (batch,), _other in zip(short, rows, strict=False):
            yield batch


def one_batch_epochs(rows: DataLoader[Any]) -> Iterator[Tensor]:
    single = DataLoader(rows.dataset, batch_size=40)
    for _ in range(STEPS):
        yield from (batch for (batch,) in single)


def with_validation_epochs(rows: DataLoader[Any]) -> Iterator[Tensor]:
    batches = iter(rows)
    for _ in range(STEPS):
        with torch.no_grad():
            for _ in rows:
                pass
        yield next(batches)[0]


@pytest.mark.parametrize(
    "batches, restarts",
    [
        (next_of_new_iterator, True),
        (new_tasks, False),
        (zipped_epochs, False),
        (one_batch_epochs, False),
        (with_validation_epochs, False),
    ],
)
def test_a_loader_that_is_restarted_for_each_step_is_known(batches: Any, restarts: bool) -> None:
    model, optimizer = slow_model_and_optimizer()
    rows = DataLoader(TensorDataset(torch.ones(40, 4)), batch_size=2)
    with profile_with(options(), [optimizer]) as run:
        for batch in batches(rows):
            train_step(batch, model, optimizer)
    assert run.record.settings.restarts_loader is restarts


def test_workers_are_known_of_a_loader_within_a_generator() -> None:
    def endless() -> Iterator[Any]:
        while True:
            yield from DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2)

    model, optimizer = slow_model_and_optimizer()
    with profile_with(options(), [optimizer]) as run:
        for _, (batch,) in zip(range(STEPS), run.data(endless()), strict=False):
            train_step(batch, model, optimizer)
    assert run.record.settings.num_workers == 0


class Agent(nn.Module):
    """Is called by a method of its own, as in reinforcement learning."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Linear(4, 2)
        self.critic = nn.Linear(4, 1)

    def act(self, observations: Tensor) -> Tensor:
        return self.actor(observations).sum() + self.critic(observations).sum()


def test_steps_without_a_loader_begin_where_parts_of_the_model_are_called() -> None:
    agent = Agent()
    optimizer = torch.optim.SGD(agent.parameters(), lr=0.1)

    def run_loop() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            agent.act(torch.ones(8, 4)).backward()
            optimizer.step()

    search = found_loop(run_loop)
    assert search.run.record.status == "ok"
    assert len(rows_of(search.run)) == 8


@pytest.mark.parametrize("with_gradients", [True, False])
def test_a_validation_that_records_a_graph_is_known(with_gradients: bool) -> None:
    model, optimizer = slow_model_and_optimizer()
    rows = torch.ones(40, 4)
    with profile_with(options(), [optimizer]) as run:
        for batch in run.data(rows.view(20, 2, 4)):
            train_step(batch, model, optimizer)
            model.eval()
            with torch.set_grad_enabled(with_gradients):
                model(batch)
            model.train()
    assert run.record.settings.validates_with_gradients is with_gradients


class LengthDrawsRandomNumbers(BatchSampler):
    """As that of buckets, which shuffles to find its length."""

    def __len__(self) -> int:
        torch.rand(1)
        return super().__len__()


def test_the_length_of_a_loader_is_not_read() -> None:
    model, optimizer = slow_model_and_optimizer()
    sampler = LengthDrawsRandomNumbers(SequentialSampler(range(40)), 2, drop_last=False)
    rows = DataLoader(TensorDataset(torch.ones(40, 4)), batch_sampler=sampler)
    state = torch.get_rng_state()
    for _ in range(STEPS):
        iter(rows)  # torch draws a seed for each pass
    expected_state = torch.get_rng_state()
    torch.set_rng_state(state)
    with profile_with(options(), [optimizer]):
        for _ in range(STEPS):
            (batch,) = next(iter(rows))
            train_step(batch, model, optimizer)
    assert torch.equal(torch.get_rng_state(), expected_state)


@pytest.mark.parametrize("validates", [True, False])
def test_a_validation_after_the_last_batch_of_an_epoch_is_one(validates: bool) -> None:
    model, optimizer = slow_model_and_optimizer()
    rows = DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2)
    with profile_with(options(), [optimizer]) as run:
        for _ in range(STEPS // 4 + 1):
            for (batch,) in rows:
                train_step(batch, model, optimizer)
            if validates:
                model.eval()
                with torch.no_grad():
                    model(torch.ones(2, 4))
                    spend("other")
                model.train()
    activities = {activity.what for activity in run.record.outside}
    assert ("validation" in activities) == validates


class SlowOrder(list[int]):
    """An order of rows that takes time at the start of each epoch, as workers do."""

    def __iter__(self) -> Iterator[int]:
        spend("optimizer")
        return super().__iter__()


def one_batch_ahead(rows: DataLoader[Tensor]) -> Iterator[Tensor]:
    """Repeat the epochs of ``rows``; ask for each batch before the one before it is used, as accelerate does."""
    while True:
        batches = iter(rows)
        batch = next(batches)
        for next_batch in batches:
            yield batch
            batch = next_batch
        yield batch


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_an_epoch_begins_with_a_new_pass_of_a_loader_that_is_a_batch_ahead(micro_batches: int) -> None:
    model, optimizer = slow_model_and_optimizer()
    rows: DataLoader[Tensor] = DataLoader([torch.ones(2, 4)] * 8, sampler=SlowOrder(range(8)), batch_size=None)
    batches = one_batch_ahead(rows)
    with profile_with(options(), [optimizer]) as run:
        for _ in range(STEPS):
            for _ in range(micro_batches):
                model(next(batches)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    new_epochs = (8 if micro_batches == 1 else 24) // 8
    activities = {activity.what: activity for activity in run.record.outside}
    assert activities["epoch"].seconds == pytest.approx(own_loops.SECONDS["optimizer"] * new_epochs)
    assert activities["epoch"].times == activities["first batch"].times == new_epochs


def test_models_are_found_by_their_optimizer() -> None:
    model, optimizer = parts = slow_model_and_optimizer()
    attributes = vars(model).keys() | vars(optimizer).keys()
    hooks = hooks_of(model)
    amid: list[bool] = []
    with profile_with(options(watch=True), [optimizer], tokens_in=lambda batch: batch.numel()) as run:
        usual_loop(run, parts, before_optimizer=lambda: amid.append(hooks_of(model) == hooks))
    assert_times(rows_of(run), ZOO["usual"].seconds())
    (note,) = run.record.notes
    assert note.startswith("watch: ")
    assert run.record.throughput.tokens_per_step == 6
    # Nothing is left in the model.
    assert amid == [False] * 10 + [True] * 4
    assert vars(model).keys() | vars(optimizer).keys() == attributes
    of_a_trainer = run.record.model_copy(update={"loop": "Trainer"})
    differences = [(fact.path, fact.a, fact.b) for fact in incomparable_facts(of_a_trainer, run.record)]
    assert differences == [("loop", "Trainer", "own")]


# -- the program feels nothing -------------------------------------------------------------------------------------


def weights_of_training(run: ProfiledLoop | None, steps: int = 30) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    rows = DataLoader(TensorDataset(torch.randn(2 * steps, 4)), batch_size=2, shuffle=True)
    average = deepcopy(model)
    for (batch,) in rows if run is None else run.data(rows):
        with nullcontext() if run is None else run.phase("transfer"):
            batch = 2.0 * batch
        scaler.scale(model(batch).square().mean()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        average = deepcopy(model)  # as programs keep a moving average: without our hooks
        with torch.no_grad():
            average.eval()(batch)
    assert not average._forward_hooks or run is not None
    return [*model.parameters(), torch.rand(1)]


@pytest.mark.parametrize("is_explicit", [True, False])
def test_training_has_the_same_weights_and_random_numbers(is_explicit: bool) -> None:
    bare = weights_of_training(None)
    with profile_with(options(memory_steps=1, trace_steps=1, action_steps=1)) as run:
        profiled = weights_of_training(run if is_explicit else None)
    assert run.record.status == "ok"
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(bare, profiled, strict=True))


def losses_with_checkpointing(is_profiled: bool) -> list[float]:
    """Without a loader, a step begins when the model is called, in the context of the checkpoint."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    profiling = profile_with(options(memory_steps=2), [optimizer]) if is_profiled else nullcontext()
    with profiling:
        for _ in range(20):
            loss = (2.0 * checkpoint(model, torch.randn(6, 4), use_reentrant=False)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def test_a_model_whose_calls_are_checkpointed_trains_the_same() -> None:
    assert losses_with_checkpointing(is_profiled=True) == losses_with_checkpointing(is_profiled=False)


ENTRIES = {
    "fetch", "leave_loop", "report_nested_loop", "begin_phase", "end_phase",  # call the others by ``_run_guarded``
    "_run_guarded", "_marked", "_marked_scaler", "_marked_fetch",
    "__init__", "install", "restore", "count_only", "close_step", "_report_what_was_not_seen",  # outside of steps
    "_close_named_phases", "_report_once", "_report_nested_loop",  # for wrong use, which this program has none of
    "_continue_step",  # for a loader that is a batch ahead, which this program has none of
    "_fail_optimizer", "see_host_batches", "mark_optimizers",
}  # fmt: skip
HOOKS = [
    (HookMarks, name) for name, hook in vars(HookMarks).items() if inspect.isfunction(hook) and name not in ENTRIES
]
HOOKS += [(MarkedThread, "refuses_call"), (StepContents, "end_step")]
HOOKS += [(LoopNesting, "note_batch"), (LoopNesting, "note_end")]


def test_a_hooks_fault_ends_the_profile_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def fail(*_: Any, **__: Any) -> None:
        raise KeyError("planted")

    assert vars(HookMarks).keys() >= ENTRIES
    bare, before = weights_of_training(None, steps=6), what_torch_has()
    untouched = []
    for owner, name in HOOKS:
        with monkeypatch.context() as broken, profile_with(options(measure=3, warmup=1)) as run:
            broken.setattr(owner, name, fail)
            weights = weights_of_training(run, steps=6)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(bare, weights, strict=True)), name
        assert what_torch_has() == before, name
        if "planted" not in capsys.readouterr().err:
            untouched.append(name)
            continue
        assert run.record is None or run.record.status == "failed", name
    assert len(untouched) < 0.3 * len(HOOKS), untouched  # the program passes most of them


# -- wrong use: one line each, and the program goes on -------------------------------------------------------------


def reported_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("lm_profiler: ")]


def test_a_missing_loader_is_a_note_of_the_record_that_only_the_table_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with profile_with(options()) as run:
        model, optimizer = slow_model_and_optimizer()
        for _ in range(STEPS):
            train_step(0, model, optimizer)
    assert reported_lines(capsys) == []
    (note,) = run.record.notes
    assert note.startswith("no batch came from a DataLoader")


def test_a_phase_that_is_never_closed_is_closed_with_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    kept: list[Any] = []

    def open_phase() -> None:
        kept.append(run.phase("transfer"))
        kept[-1].__enter__()

    with profile_with(options()) as run:
        usual_loop(run, before_optimizer=open_phase)
    (line,) = reported_lines(capsys)
    assert "phase transfer was still open" in line
    assert run.record.status == "ok"
    truth = {**ZOO["usual"].seconds(), "transfer": own_loops.SECONDS["optimizer"] + own_loops.SECONDS["zero_grad"]}
    assert_times(rows_of(run), {**truth, "optimizer": 0.0, "zero_grad": 0.0})


def test_a_second_loop_at_once_is_not_profiled(capsys: pytest.CaptureFixture[str]) -> None:
    with profile_with(options(), slow_model_and_optimizer()) as run, profile_with(options()) as other:
        usual_loop(ProfiledLoop(lambda: None))
        with other.phase("forward"):
            assert [*other.data([1, 2])] == [1, 2]
    assert (run.record is not None, other.record) == (True, None)
    assert len(reported_lines(capsys)) == 1


@pytest.mark.parametrize("is_named", [True, False])
def test_a_loop_within_a_loop_is_one_loop(is_named: bool, capsys: pytest.CaptureFixture[str]) -> None:
    parts = slow_model_and_optimizer()
    with profile_with(options(), parts if is_named else []) as run:
        within = SimpleNamespace(data=lambda batches: run.data(run.data(batches)))
        usual_loop(within, parts)
    assert_times(rows_of(run), ZOO["usual"].seconds())
    (line,) = reported_lines(capsys)
    assert "run.data is used inside another run.data" in line


def nested_loops(step: Callable[[Tensor], None]) -> None:
    for batch in loader():
        for inner_batch in loader(2):
            step(inner_batch)
        step(batch)


def epochs(step: Callable[[Tensor], None]) -> None:
    for length in (5, 3, 5):
        for batch in loader(length):
            step(batch)
    for batch in islice(loader(), 3):  # left before its end
        step(batch)
    for _ in range(9):
        for batch in loader(3):
            step(batch)


def two_loaders(step: Callable[[Tensor], None]) -> None:
    """The shorter one begins again and again."""
    for _, batch in zip(cycle(loader(3)), loader(), strict=False):
        step(batch)


@pytest.mark.parametrize("run_loop", [nested_loops, epochs, two_loaders])
def test_a_loop_within_a_step_is_reported(
    run_loop: Callable[[Callable[[Tensor], None]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = slow_model_and_optimizer()
    steps = iter(range(20))

    def step(batch: Tensor) -> None:
        next(steps)
        train_step(batch, model, optimizer)

    with profile_with(options(measure=12), [model, optimizer]) as run, suppress(StopIteration):
        run_loop(step)
    assert run.record is not None
    reports = [line for line in reported_lines(capsys) if "a loop over batches runs within a step" in line]
    assert len(reports) == (run_loop is nested_loops)


def test_a_loop_without_a_step_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with profile_with(options()) as run:
        pass
    assert (run.record, len(reported_lines(capsys))) == (None, 1)
    model, optimizer = slow_model_and_optimizer()
    with profile_with(options(), [model, optimizer]) as run:
        for _, batch in zip(range(STEPS), run.data(loader()), strict=False):
            model(batch).sum().backward()
    assert run.record.failure.type == "NoStep"
    assert "run.phase" in run.record.failure.message


def test_passes_outside_of_all_steps_are_noted(capsys: pytest.CaptureFixture[str]) -> None:
    with profile_with(options(), slow_model_and_optimizer()) as run:
        thread = threading.Thread(target=ZOO["usual"].run)
        thread.start()
        thread.join()
    assert run.record.status == "failed"
    assert any("another thread" in line for line in reported_lines(capsys))
    parts = slow_model_and_optimizer()
    with profile_with(options(), parts) as run:
        torch.ones(1, requires_grad=True).sum().backward()
        usual_loop(run, parts)
    (line,) = reported_lines(capsys)
    assert "backward was called once outside of all steps" in line
    assert run.record.status == "ok"


def test_a_loop_that_failed_is_recorded_so() -> None:
    def fail() -> None:
        if len(steps) == 6:
            raise ValueError("the program's own")
        steps.append(1)

    steps: list[int] = []
    with pytest.raises(ValueError, match="the program's own"), profile_with(options()) as run:
        usual_loop(run, before_optimizer=fail)
    assert (run.record.status, run.record.steps["measure"]) == ("failed", 3)
    assert run.record.failure.message == "the program's own"


def test_the_stage_in_which_a_loop_ended_is_noted() -> None:
    parts = slow_model_and_optimizer()
    with profile_with(options(), parts) as run:
        usual_loop(run, parts, count=6)
    assert (run.record.status, run.record.steps["measure"]) == ("ok", 4)
    assert any("the loop ended in stage measure" in note for note in run.record.notes)


def test_wrong_options_are_refused() -> None:
    with pytest.raises(UsageError, match="models and optimizers"), profile(3):
        pass
    with pytest.raises(UsageError, match="whole number"), profile(measure_steps=2.5):
        pass
    with profile_with(options()) as run:
        with pytest.raises(UsageError, match="did you mean forward"):
            run.phase("foward")
        usual_loop(run)
    assert run.record.status == "ok"


@pytest.mark.filterwarnings("ignore")  # of torch's compiler about itself
def test_a_compiled_step_trains_as_without() -> None:
    """The whole step is one compiled function: no hook is called, or none may be traced."""

    def train(compile_step: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @compile_step
        def step(batch: Tensor) -> None:
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        for batch in torch.randn(STEPS, 2, 3):
            step(batch)
        return list(model.parameters())

    bare = train(torch.compile(backend="eager"))
    with profile_with(options()):
        profiled = train(torch.compile(backend="eager"))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(bare, profiled, strict=True))


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_is_not_compiled_again() -> None:
    def train() -> tuple[int, list[Tensor]]:
        torch._dynamo.reset()
        graphs = recompilations()
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compiled = torch.compile(model, backend="eager")
        for batch in torch.randn(STEPS, 2, 3):
            compiled(batch).sum().backward()
            optimizer.step()
        return recompilations() - graphs, list(model.parameters())

    graphs, bare = train()
    with profile_with(options()) as run:
        graphs_when_profiled, profiled = train()
    assert graphs_when_profiled == graphs
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(bare, profiled, strict=True))
    assert run.record.status == "ok"
    assert not any("no call of the model" in note for note in run.record.notes)
    assert run.record.model.class_path == "torch.nn.modules.linear.Linear"
    assert run.record.model.compiled


class TwoLayers(nn.Module):
    """Returns its logits and, in a dictionary, the loss: of the logits alone there is no backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False))

    def forward(self, ids: Tensor, *, scale: float) -> dict[str, Tensor]:
        logits = self.layers(ids)
        return {"logits": logits, "loss": logits.square().mean() * scale}


@pytest.mark.filterwarnings("ignore")
def test_flops_of_a_compiled_model_are_those_of_the_plain_one() -> None:
    torch._dynamo.reset()
    plain = TwoLayers()
    model: Any = torch.compile(plain, backend="eager")
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-3)
    batches_per_step = 2
    with profile_with(options(memory_steps=1), [plain, optimizer]) as run:
        for number, batch in enumerate(run.data(torch.ones(60, 3, 8))):
            spend("other")
            model(batch, scale=0.5)["loss"].backward()
            if number % batches_per_step == 1:
                optimizer.step()
                optimizer.zero_grad()
    assert run.record.utilisation is not None, run.record.notes
    flops = run.record.utilisation.flops
    products = 2 * 3 * (8 * 16 + 16 * 4) * batches_per_step
    of_the_batch = 2 * 3 * 8 * 16 * batches_per_step  # which needs no gradient
    assert (flops.forward, flops.backward, flops.recomputation) == (products, 2 * products - of_the_batch, 0)


@pytest.mark.filterwarnings("ignore")
def test_flops_of_several_compiled_models_are_unknown() -> None:
    torch._dynamo.reset()
    parts = [nn.Linear(3, 3), nn.Linear(3, 1)]
    model = [torch.compile(part, backend="eager") for part in parts]
    optimizer = torch.optim.SGD([*parts[0].parameters(), *parts[1].parameters()], lr=1e-3)
    with profile_with(options(memory_steps=1), [*parts, optimizer]) as run:
        for batch in run.data(torch.ones(30, 2, 3)):
            spend("other")
            model[1](model[0](batch)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert run.record.utilisation is None
    assert "FLOPs unknown: the loop trains several models" in run.record.notes
