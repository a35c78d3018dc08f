"""Every figure that a run or a search leaves on the disk is in the registry."""

import operator
import re
from collections.abc import Callable, Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel
from whole_record import WHOLE, WHOLE_SEARCH

from lm_profiler.record.improve_record import ImproveRecord
from lm_profiler.record.quantities import FIGURES, GROUPS, QUANTITIES, STEP_COLUMNS, TOKENS, Quantity
from lm_profiler.record.run_record import Part, RunRecord

NO_FIGURES = {
    "schema_version": "of the file",
    "config": "the user's own",
    "settings": "options of the user and what the machine has, not measured",
    "mean_counters.step": "none: of all steps",
    "mean_counters.rank": "always rank 0",
    "thread_use.*.wall_s": "the three uses added up",
    "findings[].facts": "figures of its sentence, which stand elsewhere",
    "uncompiled_shares": "part of the saving of torch.compile, which is a finding",
    "verdict.facts": "figures of its sentence, which stand elsewhere",
    "verdict.share_": "an end of the interval of the share",
    "steadiness.level_low_s": "an end of the interval of the level",
    "steadiness.level_high_s": "an end of the interval of the level",
    "steadiness.first_step": "where the numbers of the other figures begin",
    "steadiness.drift": "of version 0.2",
    "waterfall.ci_": "an end of the interval of the step",
    "ranks.world": "environment.world_size again",
    "ranks.hosts": "which ranks a host has: names, in effect",
}
"""Numbers that are no figures, each with the reason."""

OF_ALL_PARTS = {
    "n": "how many steps were measured: the same for each part, and steps.measure less those left out",
    "mean_low": "an end of the interval of the mean",
    "mean_high": "an end of the interval of the mean",
}


def leaves(annotation: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Each leaf of a pydantic type: keys of mappings are ``*``, rows of lists ``[]``."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        for argument in arguments:
            yield from leaves(argument, path)
    elif origin is Annotated:
        yield from leaves(arguments[0], path)
    elif origin is dict:
        yield from leaves(arguments[1], f"{path}.*")
    elif origin in (list, tuple):
        yield from leaves(arguments[0], f"{path}[]")
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            yield from leaves(field.annotation, f"{path}.{name}".lstrip("."))
    elif origin is not Literal:
        yield path, annotation


WHOLES: dict[type[BaseModel], dict[str, Any]] = {RunRecord: WHOLE, ImproveRecord: WHOLE_SEARCH}
OF_FILES = [(form, place, row) for form, places in FIGURES.items() for place, row in places.items() if place]


def numbers(form: type[BaseModel] = RunRecord) -> list[str]:
    return sorted({path for path, kind in leaves(form, "") if kind in (int, float, Any)})


def test_the_walk_reaches_every_part() -> None:
    seen = numbers()
    assert {"first_step_s", "time.*.median", "telemetry.energy_j", "odd_steps[].ratio", "rank_step_s[]"} <= set(seen)
    assert {path.partition(".")[0].removesuffix("[]") for path in seen} >= {"memory", "contention", "syncs", "numerics"}


def test_a_run_that_died_before_its_first_step_has_no_figures() -> None:
    of_any_run = {"schema_version", "name", "status", "failure", "verb", "started", "duration_s", "command", "config"}
    died = RunRecord.model_validate({name: WHOLE[name] for name in of_any_run} | {"failure": None, "config": None})
    assert [figure.name for figure in QUANTITIES.values() if figure.get(died) is not None] == ["duration_s"]
    assert [figure.name for figure in QUANTITIES.values() if figure.interval(died) is not None] == []


@pytest.mark.parametrize("form", FIGURES)
def test_every_number_of_a_file_is_in_the_registry(form: type[Part]) -> None:
    figures = [
        path
        for path in numbers(form)
        if not path.startswith(tuple(NO_FIGURES)) and path.rpartition(".")[2] not in OF_ALL_PARTS
    ]
    registered = {f"{at}[].{row.path}" if at else row.path for at, rows in FIGURES[form].items() for row in rows}
    registered = {path.removesuffix(".") for path in registered}  # as ``leaves`` writes them
    for path in figures:
        pattern = re.compile(re.escape(path).replace(r"\*", r"[^.]+"))
        assert any(pattern.fullmatch(known) for known in registered), path


def value_at(tree: Any, path: str) -> Any:
    for key in path.split("."):
        tree = tree[key]
    return tree


def rows_at(record: Any, path: str, get: Callable[[Any, str], Any]) -> list[Any]:
    """The rows that a record has at ``path``, in which ``[]`` is each of a list."""
    found = [record]
    for keys in path.split("[]."):
        found = [row for outer_row in found for row in get(outer_row, keys)]
    return found


@pytest.mark.parametrize("form", FIGURES)
def test_every_figure_is_read_from_its_path(form: type[Part]) -> None:
    whole = form.model_validate(WHOLES[form])
    for figure in FIGURES[form][""]:
        value = figure.get(whole)
        assert value is not None, figure.name
        assert not figure.path or value == value_at(WHOLES[form], figure.path), figure.name
        assert "unknown" not in (figure.show(value), figure.fit(value)), figure.name


@pytest.mark.parametrize("form, place, row", OF_FILES, ids=[place for _, place, _ in OF_FILES])
def test_rows_are_read_where_their_paths_say(form: type[Part], place: str, row: tuple[Quantity, ...]) -> None:
    whole = WHOLES[form]
    read_rows = rows_at(
        form.model_validate(whole), place, lambda row_of_form, keys: operator.attrgetter(keys)(row_of_form)
    )
    for given, read in zip(rows_at(whole, place, value_at), read_rows, strict=True):
        for figure in row:
            assert figure.get(read) == (value_at(given, figure.path) if figure.path else given)


def test_every_column_of_steps_csv_is_in_the_registry() -> None:
    of_a_row = {"step", "stage", "rank"}  # which row it is
    assert set(STEP_COLUMNS) - of_a_row <= {*QUANTITIES, TOKENS.name}
    every = [figure.name for group in GROUPS.values() for figure in group]
    assert len({*every}) == len(every)
    for places in FIGURES.values():
        for row in places.values():
            assert len({figure.name for figure in row}) == len(row)
            assert all(figure.title and re.fullmatch(r".*[^.\n]", figure.meaning) for figure in row)
    for title, group in GROUPS.items():
        for of in group:
            assert of.group == title
