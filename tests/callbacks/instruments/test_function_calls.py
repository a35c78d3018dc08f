"""Which functions compute a result again: planted in a followed step whose clock goes on by known times."""

import functools
import itertools
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint as recomputed

from lm_profiler.callbacks.instruments import function_calls
from lm_profiler.callbacks.instruments.function_calls import Elapsed, FunctionCalls
from lm_profiler.callbacks.instruments.python_time import PythonTimes
from lm_profiler.record.quantities import PARTS
from lm_profiler.record.run_record import RepeatedResult

FORWARD, OTHER = PARTS.index("forward"), PARTS.index("other")
now_ns = [0]


def works(milliseconds: float = 1.0) -> None:
    now_ns[0] += int(milliseconds * 1e6)


def repeated_in(work: Callable[[], object], phase: list[int] | None = None) -> list[RepeatedResult]:
    """The functions that repeat a result in ``work``, by their names without that of the test."""
    phase = phase or [FORWARD]
    times = PythonTimes(lambda: phase[0], lambda: now_ns[0], lambda: now_ns[0])
    assert times.start()
    work()
    times.stop()
    assert times._events_left > 0
    rows = times.repeated_results()
    return [row.model_copy(update={"function": row.function.rpartition(".<locals>.")[2]}) for row in rows]


def kernel(length: int) -> Tensor:
    works(2.0)
    return torch.arange(float(length))


def test_calls_with_the_same_arguments_and_result_repeat_the_first() -> None:
    def step() -> None:
        for length in (64, 64, 128, 64):
            kernel(length)

    (row,) = repeated_in(step)
    assert (row.function, row.calls, row.repeats, row.phase) == ("kernel", 4, 2, "forward")
    assert row.line == kernel.__code__.co_firstlineno
    assert row.seconds == pytest.approx(4e-3, rel=0.01)
    assert not row.has_gradients


def test_the_outermost_function_that_repeats_is_the_one_to_keep() -> None:
    """The recording that it resamples differs in the last call, where only the kernel is the same."""

    def resampled(wave: Tensor) -> Tensor:
        works()
        return kernel(64) * wave

    def step() -> None:
        for factor in (1.0, 1.0, 2.0):
            resampled(torch.full((64,), factor))

    rows = {row.function: row for row in repeated_in(step)}
    assert {name: row.repeats for name, row in rows.items()} == {"resampled": 1, "kernel": 1}
    assert rows["resampled"].seconds == pytest.approx(3e-3, rel=0.01)


def test_a_gradient_is_the_same_whatever_its_graph() -> None:
    def gradient(values: Tensor, places: Tensor) -> Tensor:
        works()
        return torch.autograd.grad(values.sum(), places, create_graph=True)[0]

    places = torch.rand(16, 2, requires_grad=True)
    values = places.square()

    def step() -> None:
        gradient(values, places)
        gradient(2 * values, places)
        gradient(values, places)

    (row,) = repeated_in(step)
    assert (row.calls, row.repeats, row.has_gradients) == (3, 1, True)


def test_a_method_repeats_a_result_only_on_the_same_object() -> None:
    class Layer:
        def graph(self) -> np.ndarray[Any, Any]:
            works()
            return np.arange(32)

    layer, other = Layer(), Layer()

    def step() -> None:
        for receiver in (layer, other, layer):
            receiver.graph()

    (row,) = repeated_in(step)
    assert (row.function, row.repeats) == ("Layer.graph", 1)


def random_images() -> Callable[[], object]:
    def augmented(image: Tensor) -> Tensor:
        works()
        return image + torch.rand(())

    return lambda: augmented(torch.ones(4, 4))


def random_image_by_chance_the_same(draw: Callable[[], object]) -> Callable[[], object]:
    def flipped(image: Tensor) -> Tensor:
        works()
        draw()
        return image.flip(0)

    return lambda: flipped(torch.ones(4, 4))


def own_cache() -> Callable[[], object]:
    stored = kernel(64)

    def cached() -> tuple[Tensor, int]:
        works()
        return stored, 3

    return cached


def library_cache() -> Callable[[], object]:
    return functools.partial(functools.lru_cache(kernel), 64)


def moving_average() -> Callable[[], object]:
    average = torch.zeros(32)

    def update() -> Tensor:
        works()
        return average.lerp_(torch.ones(32), 0.1).clone()

    return update


def other_arguments() -> Callable[[], object]:
    """Of which the result does not show that they differ."""
    numbers = iter(range(9))

    def clipped(values: Tensor) -> Tensor:
        works()
        return values.clamp(max=0.0)

    return lambda: clipped(torch.full((32,), float(next(numbers))))


def argument_handed_through() -> Callable[[], object]:
    batch = torch.ones(32)

    def normalized(values: Tensor) -> Tensor:
        works()
        return values

    return lambda: normalized(batch)


def changed_argument() -> Callable[[], object]:
    """It is changed in each call, and the last one was the same."""

    def drained(batch: list[int]) -> list[int]:
        works()
        batch.clear()
        return [0] * 32

    lengths = iter(range(1, 9))
    return lambda: drained([1] * next(lengths))


def figures() -> Callable[[], object]:
    def metric() -> tuple[float, float]:
        works()
        return 0.5, 0.25

    return metric


def short_function() -> Callable[[], object]:
    def small() -> Tensor:
        works(0.01)
        return torch.ones(32)

    return small


def elements() -> Callable[[], object]:
    def rows() -> Iterator[Tensor]:
        works()
        yield torch.ones(32)

    return lambda: list(rows())


def unknown_result() -> Callable[[], object]:
    class Batch:
        pass

    def batch() -> Batch:
        works()
        return Batch()

    return batch


def own_generator() -> Callable[[], object]:
    generator = torch.Generator()

    def drawn(generator: torch.Generator) -> Tensor:
        works()
        return torch.ones(32)

    return lambda: drawn(generator)


def module() -> Callable[[], object]:
    class Layer(nn.Module):
        def forward(self, values: Tensor) -> Tensor:
            works()
            return values * 2

    layer = Layer()
    return lambda: layer(torch.ones(32))


def shared_phases(phase: list[int]) -> Callable[[], object]:
    def trained() -> Tensor:
        works()
        phase[0] = FORWARD if phase[0] == OTHER else OTHER
        return torch.ones(32)

    return trained


def rarely_dropped() -> Callable[[], object]:
    """Masks drawn by a generator of the program, most of which are equal by chance."""
    drops = itertools.cycle([False, False, True])

    def dropped() -> Tensor:
        works()
        return torch.full((32,), next(drops))

    return dropped


def checkpoint() -> Callable[[], object]:
    """Its inner function is called again in backward, to save memory."""

    def activation(values: Tensor) -> Tensor:
        works()
        return values.square()

    def block(values: Tensor) -> Tensor:
        return activation(values).sin() + 1.0

    values = iter(torch.rand(9, 32, requires_grad=True).unbind())
    return lambda: recomputed(block, next(values), use_reentrant=True).sum().backward()


NOT_REPEATED: dict[str, Callable[[], Callable[[], object]]] = {
    "random images": random_images,
    "torch's random numbers": lambda: random_image_by_chance_the_same(lambda: torch.rand(1)),
    "NumPy's random numbers": lambda: random_image_by_chance_the_same(np.random.rand),
    "Python's random numbers": lambda: random_image_by_chance_the_same(random.random),
    "a generator": own_generator,
    "a cache of its own": own_cache,
    "lru_cache": library_cache,
    "a moving average": moving_average,
    "other arguments": other_arguments,
    "an argument": argument_handed_through,
    "an argument that changes": changed_argument,
    "figures": figures,
    "a short function": short_function,
    "elements": elements,
    "an unknown result": unknown_result,
    "a module": module,
    "masks that are equal by chance": rarely_dropped,
    "a checkpoint": checkpoint,
}


@pytest.mark.parametrize("case", NOT_REPEATED)
def test_what_is_not_computed_again_is_no_repetition(case: str) -> None:
    call = NOT_REPEATED[case]()

    def step() -> None:
        for _ in range(3):
            call()

    assert repeated_in(step) == []


def test_a_function_in_which_a_phase_begins_is_left_out() -> None:
    phase = [OTHER]
    call = shared_phases(phase)
    assert repeated_in(lambda: [call() for _ in range(4)], phase) == []


def test_values_are_not_kept_alive() -> None:
    references: list[weakref.ref[Tensor]] = []

    def table(scale: Tensor) -> Tensor:
        works()
        result = scale * 2
        references.extend([weakref.ref(scale), weakref.ref(result)])
        return result

    def step() -> None:
        for _ in range(3):
            table(torch.ones(32))
        assert [reference() for reference in references] == [None] * 6

    (row,) = repeated_in(step)
    assert row.repeats == 2


def test_a_weight_that_is_a_result_can_be_swapped_afterwards() -> None:
    weight = nn.Parameter(torch.ones(32))

    def stored() -> Tensor:
        works()
        return weight

    times = PythonTimes(lambda: FORWARD, lambda: now_ns[0], lambda: now_ns[0])
    assert times.start()
    stored()
    times.stop()
    torch.utils.swap_tensors(weight, nn.Parameter(torch.zeros(32)))
    assert weight.sum() == 0.0


class CountedFunctions(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return function(*args, **(kwargs or {}))


def test_modes_of_the_program_do_not_see_the_reading() -> None:
    values = torch.arange(64.0)

    def scaled(factor: float) -> Tensor:
        works()
        return values * factor

    with CountedFunctions() as mode:
        (row,) = repeated_in(lambda: [scaled(2.0), scaled(2.0)])
    assert (row.repeats, mode.calls) == (1, 2)


def test_reading_the_values_is_no_time_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    read = function_calls.content_of

    def slowly_read(value: object) -> object:
        works(5.0)
        return read(value)

    monkeypatch.setattr(function_calls, "content_of", slowly_read)
    (row,) = repeated_in(lambda: [kernel(64) for _ in range(3)])
    assert row.seconds == pytest.approx(4e-3, rel=0.01)


def a_frame() -> FrameType:
    return sys._getframe()


def test_reading_arguments_takes_a_bounded_time() -> None:
    """A reading of the clock costs 0.2 s here: the limit is reached in the second call."""
    readings = iter(range(0, 100 * 200_000_000, 200_000_000))
    calls = FunctionCalls(lambda: next(readings))
    elapsed = 0.0
    frames = [a_frame() for _ in range(6)]
    for frame in frames:
        calls.begin(frame, FORWARD, depth=1, elapsed=Elapsed(elapsed, 0))
        elapsed += 1e6
        calls.end(FORWARD, depth=1, result=torch.arange(64.0), elapsed=Elapsed(elapsed, 0))
    (results,) = calls.results()
    assert (results.calls, results.repeats) == (6, 1)


def test_another_generator_of_numpy_is_read_without_a_warning() -> None:
    def drawn() -> Tensor:
        works()
        np.random.random()
        return torch.arange(64.0)

    usual = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(0))
    try:
        assert repeated_in(lambda: [drawn(), drawn()]) == []
        assert len(repeated_in(lambda: [kernel(64), kernel(64)])) == 1
    finally:
        np.random.set_bit_generator(usual)


def test_no_code_of_an_argument_is_called() -> None:
    class Proxy:
        """An object that raises an error if it is looked into, beside by its type."""

        __class__ = property(lambda self: pytest.fail("__class__ was read"))  # type: ignore[assignment]

        def __getattr__(self, name: str) -> Any:
            pytest.fail(f"{name} was read")

    def used(proxy: Any) -> Tensor:
        works()
        return torch.arange(64.0)

    proxy = Proxy()
    (row,) = repeated_in(lambda: [used(proxy), used(proxy)])
    assert (row.function, row.repeats) == ("used", 1)
