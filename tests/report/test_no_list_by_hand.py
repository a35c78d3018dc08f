"""Whoever shows figures or facts asks for them: no list of their names is kept beside the registry and the columns."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lm_profiler
from lm_profiler.record.quantities import QUANTITIES
from lm_profiler.report.tables.table_columns import COLUMNS

PACKAGE = Path(lm_profiler.__file__).parent
ROOMS = ("report", "tensorboard", "sweep", "cli")
"""Those that show something."""

LAYOUTS = {
    "report/tables/table_columns.py": "where facts are told once",
    "report/tables/layouts.py": "columns as published reports have them",
    "report/pictures/plots.py": "the figure of each kind of plot",
}
"""Files whose lists are their purpose, each with the reason."""

NAMES = {*COLUMNS, *(of.run_tag for of in QUANTITIES.values() if of.run_tag)}
KEYS = NAMES | {of.path.rpartition(".")[2] for of in QUANTITIES.values() if of.path and of.unit == "bytes"}
REGISTRY = {"TIMES", "HOST_TIMES", "MEMORY", "COLUMNS", "QUANTITIES"}
FIGURES = {"MFU", "TOKENS_PER_S", "TOKENS"}
MANY = 4
"""As many in one literal are a list of them."""


def named(literal: ast.AST) -> Iterator[str]:
    """Figures and facts that a list, a tuple, a set or a dict names, by their name or out of the registry."""
    for node in ast.walk(literal):
        if isinstance(node, ast.Constant) and node.value in NAMES:
            yield str(node.value)
        elif isinstance(node, ast.Name) and node.id in FIGURES:
            yield node.id
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in REGISTRY:
            yield ast.unparse(node)


def lists_of_python(text: str) -> Iterator[list[str]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.List, ast.Tuple, ast.Set, ast.Dict)) and len(found := [*named(node)]) >= MANY:
            yield found


def lists_of_javascript(text: str) -> Iterator[list[str]]:
    for literal in re.findall(r"[\[{][^\[\]{}]*[\]}]", text):
        words = [quoted or key for quoted, key in re.findall(r"[\"']([^\"']+)[\"']|\b(\w+):", literal)]
        if len(found := [word for word in words if word in KEYS]) >= MANY - 1:
            yield found


@pytest.mark.parametrize("room", ROOMS)
def test_no_room_that_shows_figures_has_a_list_of_them(room: str) -> None:
    found = {
        str(file.relative_to(PACKAGE)): lists
        for suffix, lists_of in ((".py", lists_of_python), (".js", lists_of_javascript))
        for file in (PACKAGE / room).rglob(f"*{suffix}")
        if (lists := [*lists_of(file.read_text())])
    }
    assert {name: lists for name, lists in found.items() if name not in LAYOUTS} == {}


@pytest.mark.parametrize(
    "kept_by_hand",
    [
        '("step_s", "tokens_per_s", "allocated_peak_bytes", "resident_peak_bytes")',
        '{"step_ms": TIMES["step"], "forward_ms": TIMES["forward"], "mfu_percent": MFU}',
        '("verb", "device", "size", *DIMENSIONS, "precision", "batch_size", "context_length")',
    ],
)
def test_a_list_in_python_would_be_seen(kept_by_hand: str) -> None:
    assert [*lists_of_python(f"SHOWN = {kept_by_hand}")]


@pytest.mark.parametrize(
    "kept_by_hand",
    [
        'const FIGURES = ["forward_s", "backward_s", "mfu", "allocated_peak_bytes"];',
        'const PEAKS = { allocated_peak: "peak allocated", reserved_peak: "peak reserved", resident_peak: "" };',
        "const CAUSES = { parameters: 'parameters', gradients: 'gradients', optimizer_states: 'optimizer states' };",
    ],
)
def test_a_list_in_javascript_would_be_seen(kept_by_hand: str) -> None:
    assert [*lists_of_javascript(kept_by_hand)]
