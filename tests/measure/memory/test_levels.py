"""Memory held where phases begin and end, against bytes counted by hand."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from lm_profiler.measure.clocks.tape import BACKWARD, DATA, FORWARD, OPTIMIZER, OTHER
from lm_profiler.measure.counts.recompiles import recompilations
from lm_profiler.measure.memory.causes import HoldingsReader
from lm_profiler.measure.memory.saved_tensors import SavedTensors
from lm_profiler.models.transformer import ATTENTION
from lm_profiler.record.run_record import MemoryLevels

FLOAT = 4
CPU = torch.device("cpu")
DISABLE = graph.disable_saved_tensors_hooks


def not_offered() -> None:
    """The allocator has no such figure."""


def reader_of(
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    held: Callable[[], int | None] = not_offered,
    device: torch.device = CPU,
) -> HoldingsReader:
    return HoldingsReader(module, optimizers, not_offered, device, held)


def levels_of(start: int, forward: int, backward: int | None, source: Literal["allocator", "counted"]) -> MemoryLevels:
    return MemoryLevels(start=start, forward=forward, backward=backward, source=source)


def levels_of_step(
    reader: HoldingsReader, forward: Callable[[], Tensor], then: Callable[[], object] | None = None
) -> MemoryLevels:
    """One step as the loop marks it."""
    reader(DATA)
    reader(OTHER)
    reader(FORWARD)
    loss = forward()
    reader(OTHER)
    reader(BACKWARD)
    loss.backward()
    reader(OTHER)
    if then is not None:
        reader(OPTIMIZER)
        then()
        reader(OTHER)
    reader.step_ended()
    return reader.levels


class QKV(nn.Module):
    def __init__(self, name: str, *shape: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.randn(shape)) for _ in range(3))
        self.attend = ATTENTION[name]

    def forward(self) -> Tensor:
        return self.attend(self.q, self.k, self.v).sum()


B, T, D = 3, 32, 16


@pytest.mark.parametrize(
    "name, saved",
    [
        # The scaled queries, the mask, and the softmax, which its own backward and the product with V share.
        ("math", FLOAT * B * T * D + T * T + FLOAT * B * T * T),
        # The output, and the logarithm of each row's sum: never an array [T, T].
        ("sdpa", FLOAT * B * T * D + FLOAT * B * T),
    ],
)
def test_attention_saves_what_the_formula_predicts(name: str, saved: int) -> None:
    module = QKV(name, B, 1, T, D)
    inputs = 3 * FLOAT * B * T * D
    levels = levels_of_step(reader_of(module), module)
    assert levels == levels_of(inputs, inputs + saved, 2 * inputs, "counted")


def test_levels_contain_gradients_and_states() -> None:
    module = nn.Linear(10, 10, bias=False)
    optimizer = torch.optim.SGD(module.parameters(), momentum=0.9)
    reader = reader_of(module, [optimizer])
    size, batch = 100 * FLOAT, 2 * 10 * FLOAT
    x = torch.ones(2, 10)
    first = levels_of_step(reader, lambda: module(x).sum(), optimizer.step)
    assert first == levels_of(size, size + batch, 2 * size, "counted")
    second = levels_of_step(reader, lambda: module(x).sum())
    assert second == levels_of(3 * size, 3 * size + batch, 3 * size, "counted")


def test_checkpointed_activations_are_not_counted() -> None:
    first, second = nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False)
    module = nn.Sequential(first, nn.ReLU(), second)
    x = torch.ones(2, 10)
    plain = levels_of_step(reader_of(module), lambda: module(x).sum())
    module.zero_grad()
    kept = levels_of_step(reader_of(module), lambda: checkpoint(module, x, use_reentrant=False).sum())
    assert (plain.forward or 0) - (plain.start or 0) == 2 * 2 * 10 * FLOAT  # x; the ReLU's output, its own and second's
    assert (kept.forward or 0) - (kept.start or 0) == 2 * 10 * FLOAT  # x alone
    assert kept.backward == plain.backward


def test_levels_are_of_the_largest_batch() -> None:
    module = nn.Linear(10, 10, bias=False)
    reader = reader_of(module)
    for rows in (2, 3, 1):
        reader(FORWARD)
        loss = module(torch.ones(rows, 10)).sum()
        reader(BACKWARD)
        loss.backward()
        reader(OTHER)
    reader.step_ended()
    size = 100 * FLOAT
    assert reader.levels == levels_of(size, 2 * size + 3 * 10 * FLOAT, 2 * size, "counted")


def test_a_step_without_backward_has_no_backward_level() -> None:
    module = nn.Linear(10, 10, bias=False)
    reader = reader_of(module)
    reader(FORWARD)
    with torch.no_grad():
        module(torch.ones(2, 10))
    reader(OTHER)
    reader.step_ended()
    assert reader.levels == levels_of(100 * FLOAT, 100 * FLOAT, backward=None, source="counted")


def test_the_allocators_figures_are_preferred() -> None:
    readings = iter((0, 100, 700, 300))  # the first only shows that the allocator has them
    module = nn.Linear(10, 10)
    levels = levels_of_step(reader_of(module, held=lambda: next(readings)), lambda: module(torch.ones(2, 10)).sum())
    assert levels == levels_of(start=100, forward=700, backward=300, source="allocator")


def _gradients(module: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("use", ["plain", "twice", "vmap", "torch.func", "nested torch.func", "hooks of its own"])
def test_watching_changes_nothing_of_the_step(use: str) -> None:
    """``torch.func`` raises where any such hooks are in place."""
    module = nn.Linear(4, 4)
    x = torch.randn(2, 4)

    def energy(inner: Tensor) -> Tensor:
        return module(inner).tanh().sum()

    def forward() -> Tensor:
        if use == "twice":
            y = x.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(energy(y), y, create_graph=True)
            return gradient.square().sum()
        if use == "vmap":
            return torch.vmap(energy)(x).sum()
        if use == "torch.func":
            return torch.func.grad(energy)(x).square().sum()
        if use == "nested torch.func":
            return torch.func.grad(lambda y: torch.func.grad(energy)(y).square().sum())(x).sum()
        if use == "hooks of its own":
            with graph.save_on_cpu():
                return energy(x)
        return energy(x)

    forward().backward()
    expected = _gradients(module)
    module.zero_grad()
    levels_of_step(reader_of(module), forward)
    assert all(torch.equal(a, b) for a, b in zip(_gradients(module), expected, strict=True))
    assert graph.disable_saved_tensors_hooks is DISABLE
    assert torch.func.grad(energy)(x).shape == x.shape  # no hooks are left


def test_after_a_failed_step_no_hook_is_left() -> None:
    module = nn.Linear(4, 4)
    reader = reader_of(module)
    reader(FORWARD)
    loss = module(torch.ones(2, 4)).sum()
    reader.stop()
    assert graph.disable_saved_tensors_hooks is DISABLE
    with DISABLE("would raise if hooks were left"):
        pass
    loss.backward()
    assert reader.levels is None
    saved = SavedTensors()
    saved.watch()
    y = torch.ones(5, requires_grad=True).exp()
    saved.unwatch()
    assert sum(tensor.nbytes for tensor in saved) == 5 * FLOAT
    del y
    assert not list(saved)


def test_hooks_of_the_program_stay_the_innermost_if_a_step_begins_or_ends_within_them() -> None:
    """Each ``exp`` saves its result: to the program's hooks within their context, else to ours while they are there."""
    x = torch.ones(5, requires_grad=True)
    packed: list[str] = []

    def hooks(name: str) -> graph.saved_tensors_hooks:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            packed.append(name)
            return tensor

        return graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    saved = SavedTensors()
    with hooks("outer"), hooks("inner"):
        saved.watch()
        of_program = [x.exp()]
    assert (packed, list(saved)) == (["inner"], [])
    of_step = x.exp()
    assert len(list(saved)) == 1
    with hooks("outer"):
        with hooks("inner"):
            saved.unwatch()
            of_program.append(x.exp())
        of_program.append(x.exp())
    after_step = x.exp()
    assert (packed, len(list(saved))) == (["inner", "inner", "outer"], 1)
    (of_step + after_step + sum(of_program)).sum().backward()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_model_is_exported_in_a_step_as_outside_of_it() -> None:
    """``torch.jit.trace`` traces twice, and fails if the graphs differ. A mode records each operator that is called."""
    net = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2))
    x = torch.ones(5, 3)

    def recorded() -> tuple[list[str], str]:
        traced = torch.jit.trace(net, x).inlined_graph
        return [node.kind() for node in traced.nodes()], make_fx(net)(x).code

    outside = recorded()
    saved = SavedTensors()
    saved.watch()
    assert recorded() == outside
    result = net(x)
    saved.unwatch()
    assert list(saved)
    del result


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_module_is_not_compiled_again() -> None:
    module = nn.Linear(10, 10, bias=False)
    compiled: Any = torch.compile(module, backend="aot_eager")
    x = torch.ones(2, 10)
    compiled(x).sum().backward()
    module.zero_grad()
    before = recompilations()
    levels = levels_of_step(reader_of(module), lambda: compiled(x).sum())
    assert recompilations() == before
    size = 100 * FLOAT
    assert levels == levels_of(size, size + 2 * 10 * FLOAT, 2 * size, "counted")


@pytest.mark.gpu
def test_on_a_gpu_the_allocator_confirms_what_attention_saves() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    b, t, d = 4, 1024, 64  # multiples of what the allocator rounds up to
    module = QKV("math", b, 1, t, d).to(device)
    module().backward()  # cuBLAS takes a workspace for each of the two threads, 32 MiB on Hopper, and keeps it
    module.zero_grad(set_to_none=True)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    inputs = 3 * FLOAT * b * t * d
    levels = levels_of_step(reader_of(module, held=lambda: torch.cuda.memory_allocated(device), device=device), module)
    assert levels.source == "allocator"
    assert levels.start == before
    saved = FLOAT * b * t * d + t * t + FLOAT * b * t * t
    assert saved <= levels.forward - before <= saved + FLOAT * b * t * d + 2**20  # the output may be kept; the loss is
    assert inputs <= levels.backward - before <= inputs + 2**20
