"""Kernels of traces that no operator launched: none in traces of torch's own work, and those that are planted."""

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cuda_trace import kernel_table

from lm_profiler.analysis import conclude
from lm_profiler.analysis.trace.unexplained_kernels import unexplained_kernels
from lm_profiler.record.kernels import KernelTable
from lm_profiler.record.run_record import Flops

TRACES = Path(__file__).parent / "traces"
PHASES = ("forward", "backward", "optimizer")
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
NAMED = ("hta_alexnet", "tracelens_h100_qwen1.5_0.5b", "tracelens_normalization", "tracelens_b200_eager")


@cache
def trace(name: str) -> list[dict[str, Any]]:
    """Its events, with a step around them all and three phases of equal length in it."""
    with gzip.open(TRACES / f"{name}.json.gz") as file:
        events = [e for e in json.load(file)["traceEvents"] if not str(e.get("name")).startswith("ProfilerStep")]
    timed = [e for e in events if "dur" in e and e.get("cat") in (*DEVICE, "cuda_runtime", "cuda_driver", "cpu_op")]
    begin, end = min(e["ts"] for e in timed), max(e["ts"] + e["dur"] for e in timed)
    where = {"ph": "X", "cat": "user_annotation", "pid": 1, "tid": 1}
    third = (end - begin) / 3
    events.append({**where, "name": "ProfilerStep#1", "ts": begin, "dur": end - begin})
    for index, phase in enumerate(PHASES):
        events.append({**where, "name": f"phase: {phase}", "ts": begin + index * third, "dur": third})
    return events


PRODUCTS = ("aten::mm", "aten::addmm", "aten::linear", "aten::matmul")


def table_of_products_by(operator: str | None) -> KernelTable:
    """Return the table of a recorded trace in which ``operator``, or none, launched the matrix products."""
    events: list[dict[str, Any]] = []
    for event in trace("tracelens_h100_qwen1.5_0.5b"):
        is_product = event.get("cat") == "cpu_op" and event["name"] in PRODUCTS
        if not is_product:
            events.append(event)
        elif operator is not None:
            events.append({**event, "name": operator})
    return kernel_table(events)


@pytest.mark.parametrize("name", NAMED)
def test_torchs_own_kernels_are_explained(name: str) -> None:
    assert unexplained_kernels(kernel_table(trace(name)), [], []) == []


def test_products_of_an_autograd_function_are_named_once() -> None:
    table = table_of_products_by("FusedLinear")
    names = unexplained_kernels(table, [], [])
    kernels = {row.name for row in table.rows if row.operator == "FusedLinear" and row.kind == "matmul"}
    assert len(names) == len(kernels) > 0
    assert all(name.endswith(" in FusedLinear") for name in names)


def test_products_without_an_operator_are_named_without_one() -> None:
    names = unexplained_kernels(table_of_products_by(None), [], [])
    assert names
    assert not any(" in " in name for name in names)


@pytest.mark.parametrize(
    "operator, counted, uncounted, is_explained",
    [
        ("FusedLinear", ["FusedLinear"], [], True),
        ("FusedLinear", [], ["FusedLinear.backward (model.py:12)"], True),
        ("FusedLinear", [], ["my::operator"], False),
        ("Torch-Compiled Region: 0/0", [], [], True),
    ],
)
def test_products_of_known_operators_and_of_compiled_code_are_explained(
    operator: str, counted: list[str], uncounted: list[str], is_explained: bool
) -> None:
    assert (unexplained_kernels(table_of_products_by(operator), counted, uncounted) == []) == is_explained


def test_a_table_of_operators_has_no_kernels_to_explain() -> None:
    table = table_of_products_by("FusedLinear").model_copy(update={"source": "operators"})
    assert unexplained_kernels(table, [], []) == []


def test_flops_of_a_run_with_such_a_kernel_are_a_lower_bound() -> None:
    counted = Flops(forward=1, backward=2, recomputation=0, uncounted=["my::operator"])
    table = table_of_products_by("FusedLinear")
    flops = conclude._with_unexplained_kernels(counted, table)
    assert flops.uncounted[0] == "my::operator"
    assert flops.uncounted[1].endswith(" in FusedLinear")
    assert conclude._with_unexplained_kernels(counted, None) == counted
