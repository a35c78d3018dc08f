"""Products with a sparse matrix in COO are repeated in CSR, unless the step computes the matrix."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lm_profiler.analysis.dataflow.needless_operators import needless_operators
from lm_profiler.measure.counts import operator_trials
from lm_profiler.measure.counts.flops import FlopCounter
from lm_profiler.measure.counts.operator_trials import OperatorTrials, TimedCall, Trial
from lm_profiler.measure.counts.sparse_times import csr_share
from lm_profiler.measure.counts.step_operators import StepOperators
from lm_profiler.record.operator_calls import StepCalls

NODES, WIDTH = 64, 32
PRODUCT = torch.ops.aten.mm.default
LONG_S = 10e-3

Propagation = Callable[[Tensor, Tensor], Tensor]  # of an adjacency matrix and hidden states


def matrix_of(places: Tensor, values: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(places, values, (NODES, NODES), check_invariants=False)


def adjacency() -> Tensor:
    numbers = torch.arange(NODES)
    return matrix_of(torch.stack([numbers, numbers.flip(0)]), torch.ones(NODES)).coalesce()


def share_of_product(matrix: Tensor, trials: OperatorTrials) -> float | None:
    args = (matrix, torch.ones(NODES, WIDTH))
    return csr_share(TimedCall("aten::mm", PRODUCT, args, {}, PRODUCT(*args), LONG_S), trials)


def test_a_product_is_compared_with_one_in_the_other_layout() -> None:
    """Of 10 ms, it saves 3."""
    trials = OperatorTrials(iter([0, 4_000_000, 0, 1_000_000] * 3).__next__)
    assert share_of_product(adjacency(), trials) == pytest.approx(0.7)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta", "ignore:Sparse invariant checks")
def test_a_matrix_in_csr_is_not_repeated() -> None:
    assert share_of_product(adjacency().to_sparse_csr(), OperatorTrials(iter([]).__next__)) is None


def test_a_matrix_is_repeated_only_below_the_peak_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_trials, "_SMALL_BYTES", 0)
    clock = iter([0, 4_000_000, 0, 1_000_000] * 3).__next__
    # the matrix takes 64 × 20 bytes, the factor and the result 64 × 32 × 4 bytes each
    needed_bytes = 3 * (64 * 20 + 8192) + 2 * 8192
    assert share_of_product(adjacency(), OperatorTrials(clock, get_free_bytes=lambda: needed_bytes - 1)) is None
    assert share_of_product(adjacency(), OperatorTrials(clock, get_free_bytes=lambda: needed_bytes)) == pytest.approx(
        0.7
    )


def constant(matrix: Tensor, hidden: Tensor) -> Tensor:
    return torch.sparse.mm(matrix, hidden)


def transposed(matrix: Tensor, hidden: Tensor) -> Tensor:
    return matrix.t() @ hidden


def with_dropout(matrix: Tensor, hidden: Tensor) -> Tensor:
    values = nn.functional.dropout(matrix.values(), 0.5)
    return torch.sparse.mm(matrix_of(matrix.indices(), values).coalesce(), hidden)


def with_trained_values(matrix: Tensor, hidden: Tensor) -> Tensor:
    values = torch.ones(NODES, requires_grad=True)
    return torch.sparse.mm(matrix_of(matrix.indices(), values), hidden)


def of_attention(matrix: Tensor, hidden: Tensor) -> Tensor:
    scores = hidden[matrix.indices()[0], 0].detach()
    weights = torch.sparse.softmax(matrix_of(matrix.indices(), scores), dim=1)
    return torch.sparse.mm(weights, hidden)


def recorded_step(propagate: Propagation) -> StepCalls:
    net = nn.Linear(WIDTH, WIDTH)
    operators = StepOperators(lambda: (net, []))
    matrix = adjacency()
    operators.begin_step()
    with FlopCounter(operators=operators):
        operators.phase = "forward"
        loss = propagate(matrix, net(torch.ones(NODES, WIDTH))).square().sum()
        operators.phase = "backward"
        loss.backward()
    operators.end_part()
    step = operators.take(is_complete=True)
    assert step is not None
    return step


@pytest.mark.parametrize(
    "propagate, is_found",
    [
        (constant, True),
        (transposed, True),
        (with_dropout, False),
        (with_trained_values, False),
        (of_attention, False),
    ],
)
def test_a_matrix_that_the_step_computes_is_not_converted_once(
    propagate: Propagation, is_found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def repeat(trials: OperatorTrials, call: TimedCall, changed_tensor: Callable[[Tensor], Tensor]) -> Trial:
        return Trial(usual_s=call.seconds, changed_s=0.25 * call.seconds)

    monkeypatch.setattr(OperatorTrials, "repeat", repeat)
    step = recorded_step(propagate)
    assert [call.phase for call in step.calls if call.is_sparse_product] == ["forward", "backward"]
    found = [entry for entry in needless_operators(step, least_share=0.0) if entry.reason == "sparse_layout"]
    assert bool(found) == is_found
    for entry in found:
        assert entry.count == 2
        assert entry.share == pytest.approx(0.75)
        assert entry.function.endswith(propagate.__name__)  # type: ignore[union-attr]
