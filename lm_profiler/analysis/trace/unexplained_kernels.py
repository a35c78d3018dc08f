"""Finds kernels in a trace that may multiply matrices but whose FLOPs were not counted.

FLOPs are counted by the operators of torch's dispatcher. A kernel that a program launches by itself (Triton, CuTe, an
extension) is in no such operator in the trace, or only in an autograd Function.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence

from lm_profiler.record.kernels import KernelRow, KernelTable

# kinds of kernels that may multiply matrices
_KINDS_THAT_MULTIPLY = ("matmul", "attention", "other")

# Operators of the dispatcher have a namespace. The others are autograd Functions, or ranges that a program marks.
_NAMESPACE = "::"
# autograd's own range around a node of the graph
_NODE_RANGE = "autograd::engine::evaluate_function: "

# The FLOPs of compiled code were counted, by the operators from which it was compiled.
_COMPILED_KERNEL = re.compile(r"^triton_|^cpp_fused")
_COMPILED_REGION = re.compile(
    r"^(Torch-Compiled|CompiledFunction|CompiledFxGraph|## Call CompiledFxGraph|Pregraph|AOTDispatcher|triton_)"
)

_LONGEST_NAME = 60  # characters of a kernel's name


def unexplained_kernels(
    table: KernelTable, functions_counted: Collection[str], names_found: Sequence[str]
) -> list[str]:
    """Return descriptions of the kernels that no operator explains, those that took longest first.

    Args:
        table: the kernels of a trace of some steps.
        functions_counted: the names of autograd Functions whose FLOPs a formula counts.
        names_found: functions that are already known to be missing from the count; their kernels are not listed.
    """
    if table.source != "kernels":
        return []
    explained_functions = {*functions_counted, *_functions_in(names_found)}
    # A kernel without operator and function may be one of a replayed graph, or of a function in ``names_found``.
    has_compiled_regions = any(_is_compiled(row) for row in table.rows)
    has_found_functions = any(_NAMESPACE not in name for name in names_found)
    may_belong_to_others = has_compiled_regions or has_found_functions
    # Or it still ran when the trace began: then other kernels of the same name have an operator.
    launched_names = {row.name for row in table.rows if row.operator is not None}

    descriptions = []
    for row in table.rows:
        may_multiply = row.kind in _KINDS_THAT_MULTIPLY
        if not may_multiply or _is_compiled(row) or _has_operator(row):
            continue
        kernel = f"kernel {_shortened_name(row.name)}"
        function = _function_of(row)
        if function is not None:
            if function not in explained_functions:
                descriptions.append(f"{kernel} in {function}")
            continue
        if not may_belong_to_others and row.name not in launched_names:
            descriptions.append(kernel)
    return list(dict.fromkeys(descriptions))


def _functions_in(names: Iterable[str]) -> Iterator[str]:
    """Yield the classes in names of functions with file and line, such as "Kernel.backward (model.py:12)"."""
    for name in names:
        qualified_name, _, _ = name.partition(" ")
        yield qualified_name.removesuffix(".backward").rpartition(".")[2]


def _is_compiled(row: KernelRow) -> bool:
    if _COMPILED_KERNEL.match(row.name):
        return True
    return _COMPILED_REGION.match(row.operator or "") is not None


def _has_operator(row: KernelRow) -> bool:
    operator = (row.operator or "").removeprefix(_NODE_RANGE)
    return _NAMESPACE in operator


def _function_of(row: KernelRow) -> str | None:
    """Return the autograd Function in whose forward or backward the kernel was launched; None if in none."""
    if row.operator is None:
        return None
    return row.operator.removeprefix(_NODE_RANGE).removesuffix("Backward")


def _shortened_name(name: str) -> str:
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME]}…"
