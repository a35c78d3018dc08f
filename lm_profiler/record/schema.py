"""JSON Schemas of our files, from the types that read and write them.

They hold for the files of every version: what only some versions write is not required. Of words (``enum``) they name
those of this version.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from lm_profiler.record.improve import ImproveRecord
from lm_profiler.record.kernels import KernelTable
from lm_profiler.record.memory_timeline import MemoryTimeline
from lm_profiler.record.run import Part, RankEnd, RunRecord
from lm_profiler.record.sweep import CellOutcome, SweepPlan

# the type of each kind of file
FORMS: dict[str, type[Part]] = {
    "run": RunRecord,
    "kernels": KernelTable,
    "memory_timeline": MemoryTimeline,
    "sweep": SweepPlan,
    "outcome": CellOutcome,
    "improve": ImproveRecord,
    "rank_end": RankEnd,
}


def schemas() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each schema with its file's name; a field is described by its figure, or by the string below it."""
    for name, form in FORMS.items():
        schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **form.model_json_schema()}
        for part in (form, *_parts()):
            described = schema if part is form else schema.get("$defs", {}).get(part.__name__, {})
            for field, text in _field_docstrings(part).items():
                described.get("properties", {}).get(field, {})["description"] = text
        yield f"{name}.schema.json", schema


def _parts(of: type[Part] = Part) -> Iterator[type[Part]]:
    for part in of.__subclasses__():
        yield part
        yield from _parts(part)


def _field_docstrings(part: type[Part]) -> dict[str, str]:
    # pydantic's `use_attribute_docstrings` would read the sources at every import, which takes 0.15 s.
    (definition,) = ast.parse(inspect.getsource(part)).body
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(below.value.value)
        for field, below in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    }
