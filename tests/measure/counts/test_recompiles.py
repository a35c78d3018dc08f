"""Counting and naming what torch.compile compiles."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lm_profiler.measure.counts.recompiles import compilations, recompilations


@pytest.fixture(autouse=True)
def _nothing_cached() -> None:
    torch._dynamo.reset()  # one code object has one cache, whoever compiles it


def _compiled(fullgraph: bool) -> Callable[[Tensor], Tensor]:
    def double_and_shift(x: Tensor) -> Tensor:
        return x * 2 + 1

    return torch.compile(double_and_shift, backend="eager", fullgraph=fullgraph)


def test_nothing_of_ours_imports_torchs_compiler() -> None:
    program = """
import sys, torch
from lm_profiler.measure.counts.flops import FlopCounter
from lm_profiler.measure.counts.recompiles import compilations, recompilations
with FlopCounter(): torch.nn.Linear(4, 4)(torch.ones(2, 4)).sum().backward()
print(recompilations(), compilations(0.0), "torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0 [] False"


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_recompilation_for_a_new_shape_has_its_reason(fullgraph: bool) -> None:
    function = _compiled(fullgraph)
    start, began_s = recompilations(), time.time()
    function(torch.ones(3))
    after_first = recompilations()
    function(torch.ones(3))
    assert recompilations() == after_first == start + 1
    function(torch.ones(4))
    assert recompilations() == after_first + 1

    first, second = compilations(began_s) or ()
    assert first.what.partition(":")[0] == f"double_and_shift ({Path(__file__).name}"
    assert ": tensor" not in first.what
    assert "size mismatch" in second.what
    assert compilations(second.began_s) == [second]
    assert compilations(time.time()) == []


def test_a_backward_is_no_compilation_of_its_own() -> None:
    model = torch.compile(torch.nn.Linear(3, 2), backend="aot_eager")
    start, began_s = recompilations(), time.time()
    model(torch.ones(4, 3)).sum().backward()
    assert recompilations() == start + 1
    forward, backward = compilations(began_s) or ()
    assert (forward.what is None, backward.what is None) == (False, True)
    began_s = time.time()
    _compiled(False)(torch.ones(5))
    assert compilations(began_s, remembered=1) is None
