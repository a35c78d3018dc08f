"""JSON Schemas of our files, from the types that read and write them.

They hold for the files of every version: what only some versions write is not required. Of words (``enum``) they name
those of this version.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

from lm_profiler.record.files import Part
from lm_profiler.record.improve import ImproveRecord
from lm_profiler.record.kernels import KernelTable
from lm_profiler.record.memory_timeline import MemoryTimeline
from lm_profiler.record.rank_ends import RankEnd
from lm_profiler.record.run_record import RunRecord
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
    """Yield each schema with its file's name; a field is described by its figure, or by the comment beside it."""
    for name, form in FORMS.items():
        schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **form.model_json_schema()}
        for part in (form, *_parts()):
            described = schema if part is form else schema.get("$defs", {}).get(part.__name__, {})
            for field, text in _comments(part).items():
                described.get("properties", {}).get(field, {}).setdefault("description", text)
        yield f"{name}.schema.json", schema


def _parts(of: type[Part] = Part) -> Iterator[type[Part]]:
    for part in of.__subclasses__():
        yield part
        yield from _parts(part)


def _comments(part: type[Part]) -> dict[str, str]:
    """The comment above or behind each field."""
    texts, above = {}, list[str]()
    for line in inspect.getsource(part).splitlines():
        if comment := re.fullmatch(r"    # (.*)", line):
            above.append(comment[1])
        elif field := re.match(r"    (\w+): .*?(?:  # (?!type:)(.*))?$", line):
            texts[field[1]] = field[2] or " ".join(above)
            above = []
        else:
            above = []
    return {field: text for field, text in texts.items() if text}
