"""FLOPs counted around real work: every operator, in every thread, on every rank; and nothing changes by it."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from scripts import SUPPORT
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint
from warm import exit_code_of, start_python

from lm_profiler.measure.clocks.tape import BACKWARD, DATA, END, FORWARD, LEAVE, OPTIMIZED, OPTIMIZER
from lm_profiler.measure.clocks.timeline import Timeline
from lm_profiler.measure.counts.flops import FlopCounter, StepFlops
from lm_profiler.measure.counts.uncountable import UncountableError
from lm_profiler.models.config import TransformerConfig
from lm_profiler.models.transformer import Transformer
from lm_profiler.record.run_record import Flops

PRODUCT = 2 * 2 * 8 * 8
ROWS = torch.ones(2, 8)


def counted_by_phase(work: Callable[[], Any]) -> tuple[int, int, int]:
    counter = FlopCounter()
    with counter:
        work()
    flops = counter.flops()
    return flops.forward, flops.backward, flops.recomputation


def leaf(*shape: int) -> Tensor:
    return torch.rand(*shape, requires_grad=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_fused_attention_on_the_cpu(causal: bool, masked: bool) -> None:
    query, key, value = leaf(2, 3, 5, 8), leaf(2, 3, 7, 8), leaf(2, 3, 7, 8)
    mask = torch.zeros(5, 7) if masked and not causal else None
    forward = 2 * (2 * 3 * 5 * 7) * (8 + 8)
    attend = lambda: F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal).sum().backward()  # noqa: E731
    assert counted_by_phase(attend) == (forward, 2 * forward, 0)


@pytest.mark.parametrize("attention", ["sdpa", "math"])
@pytest.mark.parametrize(
    "every, whole, stopped",
    [
        ((), 0, 0),
        ((1,), 0, 3),
        ((2,), 1, 2),
        ((3,), 2, 1),
        ((2, 1), 1, 3),  # the outer one runs up to the input of its last inner one, then each inner one runs
        ((3, 1), 2, 3),
        ((3, 2), 3, 2),
    ],
)
def test_a_real_transformer_is_the_closed_form(attention: Any, every: tuple[int, ...], whole: int, stopped: int):
    """Blocks are computed once more as a whole, or but for their last product, behind which nothing is saved."""
    c = TransformerConfig(16, 48, 3, 2, 31, attention=attention, checkpoint_every=every)
    ids = torch.randint(31, (2, 8))
    model = Transformer(c)
    block = 2 * (4 * 16**2 + 3 * 16 * 48) * 16 + 4 * 2 * 8**2 * 16
    forward = 3 * block + 2 * 31 * 16 * 16
    again = (whole + stopped) * block - stopped * 2 * 16 * 48 * 16
    found = counted_by_phase(lambda: F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward())
    assert found == (forward, 2 * forward, again)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_transformer_on_a_gpu_is_the_closed_form_too(dtype: torch.dtype) -> None:
    c = TransformerConfig(16, 48, 3, 2, 31, activation_checkpointing=True)
    ids = torch.randint(31, (2, 8), device="cuda")
    model = Transformer(c).cuda()
    blocks = 3 * (2 * (4 * 16**2 + 3 * 16 * 48) * 16 + 4 * 2 * 8**2 * 16)
    forward = blocks + 2 * 31 * 16 * 16

    def step() -> None:
        with torch.autocast("cuda", dtype, enabled=dtype is torch.bfloat16):
            loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()

    assert counted_by_phase(step) == (forward, 2 * forward, blocks - 3 * 2 * 16 * 48 * 16)


@pytest.mark.parametrize(
    "work, forward, backward",
    [
        pytest.param(lambda: nn.Conv2d(4, 4, 3, groups=4)(leaf(2, 4, 5, 5)), 2 * 2 * 9 * 36, 2, id="depthwise"),
        pytest.param(lambda: nn.Conv2d(4, 6, 3, groups=2)(leaf(2, 4, 5, 5)), 2 * 2 * 9 * 6 * 18, 2, id="grouped"),
        pytest.param(lambda: nn.ConvTranspose1d(4, 6, 3)(leaf(2, 4, 5)), 2 * 2 * 5 * 72, 2, id="transposed"),
        pytest.param(lambda: nn.LSTM(4, 5)(leaf(3, 2, 4))[0], 2 * 6 * 20 * 9, 2, id="lstm"),
        pytest.param(lambda: nn.GRU(4, 5)(leaf(3, 2, 4), leaf(1, 2, 5))[0], 2 * 6 * 15 * 9, 2, id="gru"),
        pytest.param(lambda: torch.zeros(2, 3).addmm_(torch.ones(2, 5), leaf(5, 3)), 2 * 2 * 5 * 3, 1, id="in place"),
        pytest.param(lambda: torch.addbmm(leaf(2, 3), leaf(4, 2, 5), leaf(4, 5, 3)), 2 * 4 * 30, 2, id="addbmm"),
        pytest.param(lambda: torch.addmv(leaf(2), leaf(2, 5), torch.ones(5)), 2 * 10, None, id="vector"),
        pytest.param(lambda: torch.einsum("bij,bjk->bik", leaf(4, 2, 5), leaf(4, 5, 3)), 2 * 120, 2, id="einsum"),
        pytest.param(lambda: torch.cdist(leaf(30, 4), leaf(31, 4)), 2 * 30 * 31 * 4, 2, id="distances by a product"),
        pytest.param(
            lambda: (
                torch._int_mm(torch.ones(32, 16, dtype=torch.int8), torch.ones(16, 24, dtype=torch.int8)) * leaf(24)
            ),
            2 * 32 * 16 * 24,
            0,
            id="int8",
        ),
        pytest.param(lambda: torch.cdist(leaf(3, 4), leaf(3, 4)), 0, 0, id="distances without one"),
        pytest.param(lambda: torch.eye(9).to_sparse() @ leaf(9, 4), 2 * 9 * 4, 1, id="sparse"),
        pytest.param(
            lambda: torch.eye(9).to_sparse_csr() @ leaf(9, 4),
            2 * 9 * 4,
            1,
            id="sparse rows",
            marks=pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta"),
        ),
    ],
)
def test_operators(work: Callable[[], Tensor], forward: int, backward: int | None) -> None:
    """``backward`` says how many times as many FLOPs the backward pass has, if it is known."""
    forward_flops, *flops_of_other_phases = counted_by_phase(lambda: work().sum().backward())
    assert forward_flops == forward
    if backward is not None:
        assert flops_of_other_phases == [backward * forward, 0]


@torch.library.custom_op("lm_profiler_step_tests::product", mutates_args=())
def product(left: Tensor, right: Tensor) -> Tensor:
    return left @ right


@pytest.mark.parametrize("enabled", [True, False])
def test_a_custom_operator_keeps_the_autocast_of_its_caller(enabled: bool) -> None:
    left, right = torch.rand(3, 4), torch.rand(4, 5)
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        plain = product(left, right)
        with FlopCounter():
            watched = product(left, right)
    assert plain.dtype is (torch.bfloat16 if enabled else torch.float32)
    assert watched.dtype is plain.dtype
    assert torch.equal(plain, watched)


@pytest.mark.filterwarnings("ignore:Sparse BSR tensor support is in beta")
def test_a_layout_without_a_formula_makes_the_count_unknown() -> None:
    with pytest.raises(UncountableError):
        counted_by_phase(lambda: torch.eye(16).to_sparse_bsr((4, 4)) @ torch.ones(16, 16))


class Deep(torch.autograd.Function):
    """Autograd within autograd: beyond 60 levels the engine goes on in another thread, as on CUDA it always does."""

    threads: ClassVar[set[int]] = set()

    @staticmethod
    def forward(ctx: Any, x: Tensor, depth: int, checkpointed: bool) -> Tensor:
        ctx.depth, ctx.checkpointed = depth, checkpointed
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        Deep.threads.add(threading.get_native_id())
        with torch.enable_grad():
            x = ROWS.clone().requires_grad_()
            deeper = Deep.apply(x, ctx.depth - 1, ctx.checkpointed).sum() if ctx.depth else None
        if deeper is not None:
            torch.autograd.backward(deeper)
            return grad, None, None
        weight = torch.ones(8, 8)
        product = lambda y: (y @ weight).tanh()  # noqa: E731
        if ctx.checkpointed:
            with torch.enable_grad():
                out = checkpoint(product, x, use_reentrant=False).sum()
            torch.autograd.backward(out)
        else:
            grad @ weight
        return grad, None, None


def test_backward_in_autograds_own_thread_is_counted() -> None:
    Deep.threads.clear()
    found = counted_by_phase(lambda: Deep.apply(leaf(2, 8), 100, False).sum().backward())
    assert len(Deep.threads) > 1
    assert found == (0, PRODUCT, 0)
    Deep.threads.clear()
    _, backward, again = counted_by_phase(lambda: Deep.apply(leaf(2, 8), 100, True).sum().backward())
    assert len(Deep.threads) > 1
    assert backward == PRODUCT  # of the product's input; the weight needs none
    assert again == 2 * PRODUCT  # within a backward pass both the segment's first run and its second are repeats


def test_the_mode_meets_forward_backward_and_optimizer() -> None:
    timeline = Timeline()
    steps = StepFlops(timeline)
    timeline.observers = (steps,)
    layer = nn.Linear(8, 8, bias=False)
    timeline.mark(DATA)
    layer(ROWS)
    assert _get_current_dispatch_mode_stack() == []
    timeline.mark(FORWARD)
    loss = layer(ROWS).sum()
    timeline.mark(BACKWARD)
    loss.backward()
    timeline.mark(LEAVE)
    timeline.mark(OPTIMIZER)
    layer.weight.detach() @ layer.weight.detach()  # as Muon does
    timeline.mark(OPTIMIZED)
    timeline.mark(LEAVE)
    assert _get_current_dispatch_mode_stack() == []
    timeline.mark(END)
    of_optimizer = 2 * 8 * 8 * 8
    assert steps.flops() == Flops(forward=PRODUCT, backward=PRODUCT, recomputation=0, optimizer=of_optimizer)


class PlainMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_mode_that_the_step_leaves_behind_stays_until_the_step_takes_it_away() -> None:
    timeline = Timeline()
    steps = StepFlops(timeline)
    timeline.observers = (steps,)
    theirs = PlainMode()
    timeline.mark(DATA)
    timeline.mark(FORWARD)
    theirs.__enter__()
    timeline.mark(LEAVE)
    assert _get_current_dispatch_mode_stack()[-1] is theirs
    theirs.__exit__(None, None, None)
    timeline.mark(END)
    steps.stop()
    assert _get_current_dispatch_mode_stack() == []


class Labelled(Tensor):
    """Made as subclasses are made that know nothing of dispatch modes."""

    @staticmethod
    def __new__(cls, x: Any, label: str) -> Any:
        return Tensor.__new__(cls, x)

    def __init__(self, x: Any, label: str) -> None:
        self.label = label


@pytest.mark.parametrize("given", [torch.ones(2), [1.0, 2.0], 2, torch.ones(2).untyped_storage()], ids=type)
def test_a_subclass_is_made_amid_a_step_as_without_it(given: Any) -> None:
    """Also within the step of a Trainer that another Trainer's step calls."""

    def make_subclasses() -> list[Tensor]:
        return [Labelled(given, "a"), type("Own", (Tensor,), {})(given)]

    def kinds_and_shapes(tensors: list[Tensor]) -> list[tuple[str, torch.Size]]:
        return [(type(tensor).__name__, tensor.shape) for tensor in tensors]

    expected = kinds_and_shapes(make_subclasses())
    outer, inner = StepFlops(Timeline()), StepFlops(Timeline())
    for steps in (outer, inner):
        steps._timeline.observers = (steps,)
        steps._timeline.mark(DATA)
        steps._timeline.mark(FORWARD)
    labelled, own = make_subclasses()
    assert kinds_and_shapes([labelled, own]) == expected
    assert labelled.label == "a"
    inner.stop()
    assert kinds_and_shapes(make_subclasses()) == expected  # the outer one still counts
    labelled.as_subclass(Tensor).reshape(1, -1) @ torch.ones(labelled.numel(), 3)
    outer.stop()
    assert "__new__" not in vars(Tensor)
    assert outer.flops().forward == 2 * labelled.numel() * 3


def test_sharded_weights_count_what_this_rank_multiplies(tmp_path: Path) -> None:
    outputs = [tmp_path / f"rank{rank}.txt" for rank in (0, 1)]
    ranks = [
        start_python(
            str(SUPPORT / "sharded_run.py"), str(rank), str(tmp_path / "store"), out=out, err=tmp_path / "err.txt"
        )
        for rank, out in enumerate(outputs)
    ]
    assert [exit_code_of(rank) for rank in ranks] == [0, 0]
    answers = [out.read_text().split()[-4:] for out in outputs]  # old Gloo prints too
    whole = 2 * 2 * 8 * 16
    # Two layers, each cut in two by tensor parallelism; of FSDP2's gathered weights every rank multiplies the whole.
    assert answers == [[f"{whole}", f"{3 * whole // 2}", f"{2 * whole}", f"{3 * whole}"]] * 2
