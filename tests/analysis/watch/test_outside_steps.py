"""What passes beside the phases: whose time it is, and how much of it a mean step has in the long run."""

from typing import NamedTuple

import pytest

from lm_profiler.analysis.watch.ledger import CHECKPOINTS, NamedSpan
from lm_profiler.analysis.watch.outside_steps import RunStep, outside_steps
from lm_profiler.callbacks.session import between_steps
from lm_profiler.record.run_record import EPOCH, VALIDATION

MS = 1_000_000
STEP_MS = 10
USUAL_DATA_S, FIRST_DATA_S = 0.001, 0.3


class Pause(NamedTuple):
    seconds: float  # in all steps together
    times: int
    per_step_s: float  # in the long run


class Loop:
    """A loop that is run by hand, in whole milliseconds."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.steps: list[RunStep] = []
        self.events: list[NamedSpan] = []
        self.own_spans: list[tuple[int, int]] = []

    def step(self, stage: str = "measure", data_s: float = USUAL_DATA_S) -> None:
        began_ns = self.now_ns
        self.now_ns += STEP_MS * MS
        self.steps.append(RunStep(stage, began_ns, self.now_ns, data_s))

    def passes(self, ms: float, what: str = "") -> None:
        began_ns = self.now_ns
        self.now_ns += round(ms * MS)
        if what:
            self.events.append(NamedSpan(began_ns, self.now_ns, what))

    def moment(self, what: str) -> None:
        self.events.append(NamedSpan(self.now_ns, self.now_ns, what))

    def pauses(self) -> dict[str, Pause]:
        passed = outside_steps(self.steps, self.events, self.own_spans)
        return {pause.what: Pause(pause.seconds, pause.times, pause.per_step_s) for pause in passed}


def test_without_a_step_nothing_has_a_cost_for_a_step() -> None:
    loop = Loop()
    loop.passes(5, VALIDATION)
    assert loop.pauses() == {}


@pytest.mark.parametrize("steps", [7, 11, 12, 13, 30])
def test_the_start_of_an_epoch_is_shared_among_its_steps(steps: int) -> None:
    loop = Loop()
    for number in range(steps):
        is_first = number > 0 and number % 6 == 0
        if is_first:
            loop.passes(30)
            loop.moment(EPOCH)
            loop.passes(30)
        loop.step(data_s=FIRST_DATA_S if is_first else USUAL_DATA_S)
    turns = (steps - 1) // 6
    pauses = loop.pauses()
    assert pauses["epoch"] == pytest.approx(Pause(0.06 * turns, times=turns, per_step_s=0.06 / 6))
    excess_s = FIRST_DATA_S - USUAL_DATA_S
    assert pauses["first batch"] == pytest.approx(Pause(excess_s * turns, times=turns, per_step_s=excess_s / 6))


@pytest.mark.parametrize("steps_of_epoch, is_known", [(1, False), (2, True)])
def test_the_excess_of_first_steps_needs_steps_that_begin_no_epoch(steps_of_epoch: int, is_known: bool) -> None:
    """Each epoch has one step or two, and the wait for a batch varies from step to step."""
    loop = Loop()
    for number in range(24):
        if number > 0 and number % steps_of_epoch == 0:
            loop.moment(EPOCH)
            loop.passes(1)
        loop.step(data_s=0.001 * (1 + number % 4))
    assert ("first batch" in loop.pauses()) == is_known


def test_an_epoch_that_begins_between_two_batches_of_a_step_belongs_to_that_step() -> None:
    loop = Loop()
    for number in range(12):
        loop.step(data_s=FIRST_DATA_S if number == 6 else USUAL_DATA_S)
        if number == 6:
            began_ns = loop.steps[-1].begin_ns + 3 * MS
            loop.events.append(NamedSpan(began_ns, began_ns, EPOCH))
            loop.steps[-1] = loop.steps[-1]._replace(away_ns=[(began_ns, began_ns + 2 * MS)])
    assert loop.pauses()["epoch"].seconds == pytest.approx(0.002)
    first_batch = loop.pauses()["first batch"]
    assert first_batch.seconds == pytest.approx(FIRST_DATA_S - USUAL_DATA_S)
    assert first_batch.times == 1


def test_a_single_early_event_costs_little() -> None:
    """A run that resumes in the middle of an epoch."""
    loop = Loop()
    loop.step()
    loop.moment(EPOCH)
    loop.passes(100)
    for _ in range(50):
        loop.step()
    assert loop.pauses()["epoch"] == pytest.approx(Pause(0.1, times=1, per_step_s=0.1 / 50))


def test_validation_after_the_measured_steps_counts_without_our_own_work() -> None:
    """Every 25 steps; the first one comes as the measure stage has ended, and so does our own work of two seconds."""
    loop = Loop()
    for number in range(30):
        if number == 25:
            loop.moment(VALIDATION)
            loop.passes(1000)
            own_began_ns = loop.now_ns
            loop.passes(2000)
            loop.own_spans.append((own_began_ns, loop.now_ns))
        loop.step("measure" if number < 25 else "trace")
    assert loop.pauses()["validation"] == pytest.approx(Pause(1.0, times=1, per_step_s=1.0 / 25))


def test_measured_durations_are_preferred_to_those_of_later_stages() -> None:
    loop = Loop()
    for number in range(31):
        if number and number % 10 == 0:
            loop.moment(VALIDATION)
            loop.passes(100 if number < 30 else 500)
        loop.step("measure" if number < 25 else "trace")
    assert loop.pauses()["validation"] == pytest.approx(Pause(0.3, times=3, per_step_s=0.1 / 10))


def test_checkpoints_within_hooks_have_their_own_time() -> None:
    loop = Loop()
    loop.step()
    loop.moment(EPOCH)
    began_ns = loop.now_ns
    loop.passes(20)
    loop.passes(50, CHECKPOINTS)
    loop.events.append(NamedSpan(began_ns, loop.now_ns, "Saves.on_train_epoch_end"))
    loop.passes(200, "M.train_dataloader")
    loop.passes(7)
    loop.step()
    passed = {pause.what: pause for pause in outside_steps(loop.steps, loop.events, loop.own_spans)}
    expected_s = {
        "Saves.on_train_epoch_end": 0.020,
        "checkpoint": 0.050,
        "train_dataloader": 0.200,
        "epoch": 0.007,
        "first batch": 0.0,
        "first step": 0.0,
    }
    assert {what: pause.seconds for what, pause in passed.items()} == pytest.approx(expected_s)
    assert passed["train_dataloader"].owner == "M.train_dataloader"
    assert not passed["checkpoint"].in_step


def test_a_checkpoint_within_a_step_is_part_of_its_time() -> None:
    loop = Loop()
    for number in range(12):
        began_ns = loop.now_ns
        loop.step()
        if number % 4 == 3:
            loop.events.append(NamedSpan(began_ns + 2 * MS, began_ns + 8 * MS, CHECKPOINTS))
    (saved,) = outside_steps(loop.steps, loop.events, [])
    assert (saved.what, saved.in_step, saved.times) == ("checkpoint", True, 3)
    assert saved.per_step_s == pytest.approx(0.006 / 4)


class Counting(int):
    """An instant that counts how often it is compared."""

    compared = 0

    def __lt__(self, other: object) -> bool:
        Counting.compared += 1
        return int.__lt__(self, other)

    def __le__(self, other: object) -> bool:
        Counting.compared += 1
        return int.__le__(self, other)


def comparisons(steps: int) -> int:
    """Return how many comparisons of instants it takes to book a loop of ``steps`` in epochs of five."""
    loop = Loop()
    for number in range(steps):
        if number % 5 == 4:
            loop.passes(1, "Program.on_train_epoch_end")
            loop.moment(EPOCH)
        loop.step()
    loop.events = [NamedSpan(Counting(span.begin_ns), Counting(span.end_ns), span.what) for span in loop.events]
    Counting.compared = 0
    loop.pauses()
    between_steps([(step.end_ns, step.end_ns) for step in loop.steps], (0, loop.now_ns), loop.events)
    return Counting.compared


def test_the_work_at_the_end_grows_less_than_quadratically() -> None:
    """Eight times as many: n log n is 11 times the work, n squared 64 times."""
    assert comparisons(1600) < 16 * comparisons(200)


def test_a_checkpoint_costs_what_its_callback_does_around_the_writing() -> None:
    """It writes for 10 of the 16 ms that the steps of checkpoints take longer in no phase."""
    usual_other_s, with_checkpoint_s = 0.001, 0.017
    steps, events = [], []
    for number in range(30):
        saves = number % 10 == 9
        began_ns = number * 40 * MS
        other_s = with_checkpoint_s if saves else usual_other_s
        steps.append(RunStep("measure", began_ns, began_ns + 40 * MS, USUAL_DATA_S, (), other_s))
        if saves:
            events.append(NamedSpan(began_ns + 20 * MS, began_ns + 30 * MS, CHECKPOINTS))
    (checkpoint,) = outside_steps(steps, events, [])
    assert (checkpoint.what, checkpoint.times) == ("checkpoint", 3)
    assert checkpoint.per_step_s == pytest.approx(0.016 / 10)


def test_the_first_step_of_an_epoch_costs_its_excess_without_the_batch() -> None:
    """New workers share memory: the first writes to it copy pages, which is in no wait for a batch.

    In each fifth of 25 steps, but the first, the wait for the batch takes 3 ms longer, and the step 30 ms.
    """
    loop = Loop()
    for number in range(25):
        if number and number % 5 == 0:
            loop.moment(EPOCH)
            loop.step(data_s=0.004)
            loop.steps[-1] = loop.steps[-1]._replace(end_ns=loop.steps[-1].end_ns + 30 * MS)
            loop.now_ns += 30 * MS
        else:
            loop.step()
    pauses = loop.pauses()
    assert pauses["first batch"] == pytest.approx(Pause(4 * 0.003, times=4, per_step_s=0.003 / 5))
    assert pauses["first step"] == pytest.approx(Pause(4 * (0.030 - 0.003), times=4, per_step_s=(0.030 - 0.003) / 5))


def test_an_instrument_that_lengthens_the_first_step_of_an_epoch_is_no_cost_of_the_epoch() -> None:
    """The first step of the second epoch is the one in which memory is read, which makes it 20 times as long."""
    loop = Loop()
    for number in range(20):
        loop.step("measure" if number < 10 else "trace")
        if number == 9:
            loop.moment(EPOCH)
            began_ns = loop.now_ns
            loop.now_ns += 20 * STEP_MS * MS
            loop.steps.append(RunStep("memory", began_ns, loop.now_ns, FIRST_DATA_S))
    pauses = loop.pauses()
    assert "first step" not in pauses
    assert pauses["first batch"].seconds == pytest.approx(FIRST_DATA_S - USUAL_DATA_S)
