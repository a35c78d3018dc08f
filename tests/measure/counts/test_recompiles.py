"""Counting and naming what torch.compile compiles."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lm_profiler.measure.counts.recompiles import recompilations, recompiled_since


@pytest.fixture(autouse=True)
def _nothing_cached() -> None:
    torch._dynamo.reset()  # one code object has one cache, whoever compiles it


def _compiled(fullgraph: bool) -> Callable[[Tensor], Tensor]:
    def double_and_shift(x: Tensor) -> Tensor:
        return x * 2 + 1

    return torch.compile(double_and_shift, backend="eager", fullgraph=fullgraph)


def test_nothing_is_imported_to_learn_that_nothing_was_compiled() -> None:
    program = (
        "import sys\n"
        "from lm_profiler.measure.counts.recompiles import recompilations, recompiled_since\n"
        "print(recompilations(), recompiled_since(0), 'torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0 [] False"


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_new_shape_is_counted_and_named_with_its_reason(fullgraph: bool) -> None:
    function = _compiled(fullgraph)
    start = recompilations()
    function(torch.ones(3))
    after_first = recompilations()
    function(torch.ones(3))
    assert recompilations() == after_first == start + 1
    function(torch.ones(4))
    assert recompilations() == after_first + 1

    first, second = recompiled_since(start) or ()
    assert first.startswith("double_and_shift (test_recompiles.py:")
    assert ": tensor" not in first
    assert "size mismatch" in second
    assert recompiled_since(after_first) == [second]
    assert recompiled_since(recompilations()) == []


def test_a_backward_is_no_compilation_of_its_own() -> None:
    model = torch.compile(torch.nn.Linear(3, 2), backend="aot_eager")
    start = recompilations()
    model(torch.ones(4, 3)).sum().backward()
    assert recompilations() == start + 1
    assert len(recompiled_since(start) or ()) == 1


def test_names_that_torch_forgot_are_unknown() -> None:
    _compiled(False)(torch.ones(5))
    dynamo = sys.modules["torch._dynamo.utils"]
    graphs = sum(bool(entry.graph_op_count) for entry in dynamo.get_compilation_metrics())
    assert recompiled_since(recompilations() - graphs - 1) is None
