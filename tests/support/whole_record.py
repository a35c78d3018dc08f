"""A record in which everything is known."""

import itertools
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from lm_profiler.record.improve_record import ImproveRecord
from lm_profiler.record.quantities import TIMES
from lm_profiler.record.run_record import MOMENTS, RunRecord, Term, TermName

_KEYS = (
    *TIMES,
    *MOMENTS,
    "warmup",
    "measure",
    "collectives",
    "actions",
    "memory",
    "trace",
    "float32",
    "bfloat16",
    "float16",
    "float64",
)


def filled(annotation: Any, count: Iterator[int]) -> Any:
    """A value of the type in which everything is known, and no number stands twice."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return filled(next(argument for argument in arguments if argument is not type(None)), count)
    if origin is Annotated:
        return filled(arguments[0], count)
    if origin is Literal:
        return arguments[0]
    if origin is dict:
        return {key: filled(arguments[1], count) for key in _KEYS}
    if origin in (list, tuple):
        rows = [filled(arguments[0], count) for _ in range(3)]
        return [{**rows[0], "name": name} for name in get_args(TermName)] if arguments[0] is Term else rows
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {name: filled(field.annotation, count) for name, field in annotation.model_fields.items()}
    return {int: next(count), float: next(count) / 7, bool: True, str: "word", Any: "any"}[annotation]


WHOLE: dict[str, Any] = filled(RunRecord, itertools.count(3))
WHOLE_SEARCH: dict[str, Any] = filled(ImproveRecord, itertools.count(3))
