"""Every figure that a run leaves on the disk is in the registry, and nowhere else is a list of them kept by hand."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel
from whole_record import WHOLE

from lm_profiler.record.quantities import GROUPS, LISTS, QUANTITIES, STEP_COLUMNS, TIMES, TOKENS, Quantity
from lm_profiler.record.run import RunRecord

NO_FIGURES = {
    "schema_version": "of the file",
    "config": "the user's own",
    "ranks.world": "environment.world_size again",
    "ranks.hosts": "which ranks a host has: names, in effect",
}
"""Numbers of run.json that are no figures, each with the reason."""

OF_ALL_PARTS = {
    "n": "how many steps were measured: the same for each part, and steps.measure less those left out",
    "ci_low": "an end of the interval of the median",
    "ci_high": "an end of the interval of the median",
}


def leaves(annotation: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Each leaf of a pydantic type: keys of mappings are ``*``, rows of lists ``[]``."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        for argument in arguments:
            yield from leaves(argument, path)
    elif origin is dict:
        yield from leaves(arguments[1], f"{path}.*")
    elif origin in (list, tuple):
        yield from leaves(arguments[0], f"{path}[]")
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            yield from leaves(field.annotation, f"{path}.{name}".lstrip("."))
    elif origin is not Literal:
        yield path, annotation


def numbers() -> list[str]:
    return sorted({path for path, kind in leaves(RunRecord, "") if kind in (int, float, Any)})


def registered() -> set[str]:
    """Paths as ``leaves`` writes them."""
    rows = {f"{at}[].{of.path}".removesuffix(".") for at, row in LISTS.items() for of in row}
    return {of.path for of in QUANTITIES.values() if of.path} | rows


def matches(pattern: str, path: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), path) is not None


def test_the_walk_sees_the_numbers_of_every_part() -> None:
    seen = numbers()
    assert {"first_step_s", "time.*.median", "telemetry.energy_j", "odd_steps[].ratio", "rank_step_s[]"} <= set(seen)
    assert {path.partition(".")[0].removesuffix("[]") for path in seen} >= {"memory", "contention", "syncs", "numerics"}


@pytest.mark.parametrize("path", numbers())
def test_every_number_of_run_json_is_in_the_registry(path: str) -> None:
    if path.startswith(tuple(NO_FIGURES)) or path.rpartition(".")[2] in OF_ALL_PARTS:
        return
    assert any(matches(path, known) for known in registered()), f"{path}: no entry of the registry"


@pytest.mark.parametrize("times", ["time", "host_time"])
@pytest.mark.parametrize("part", TIMES)
def test_every_part_has_every_statistic(times: str, part: str) -> None:
    names = {path.rpartition(".")[2] for path in numbers() if path.startswith(f"{times}.*")}
    assert {f"{times}.{part}.{name}" for name in names - set(OF_ALL_PARTS)} <= registered()


def at(tree: Any, path: str) -> Any:
    for key in path.split("."):
        tree = tree[key]
    return tree


def rows_at(record: Any, path: str, get: Callable[[Any, str], Any]) -> list[Any]:
    """The rows that a record has at ``path``, in which ``[]`` is each of a list."""
    found = [record]
    for keys in path.split("[]."):
        found = [row for one in found for row in get(one, keys)]
    return found


@pytest.mark.parametrize("of", QUANTITIES.values(), ids=lambda of: of.name)
def test_every_figure_is_read_where_its_path_says(of: Quantity) -> None:
    value = of.get(RunRecord.model_validate(WHOLE))
    assert value is not None
    if of.path:
        assert value == at(WHOLE, of.path)
    assert "unknown" not in (of.show(value), of.fit(value))


@pytest.mark.parametrize("of", QUANTITIES.values(), ids=lambda of: of.name)
def test_of_a_run_that_died_before_its_first_step_nothing_is_made_up(of: Quantity) -> None:
    of_any_run = {"schema_version", "name", "status", "failure", "verb", "started", "duration_s", "command", "config"}
    died = RunRecord.model_validate({name: WHOLE[name] for name in of_any_run} | {"failure": None, "config": None})
    assert of.get(died) is None or of.name == "duration_s"
    assert of.interval(died) is None


@pytest.mark.parametrize("place, row", LISTS.items(), ids=list(LISTS))
def test_rows_are_read_where_their_paths_say(place: str, row: tuple[Quantity, ...]) -> None:
    read_rows = rows_at(RunRecord.model_validate(WHOLE), place, lambda one, keys: operator.attrgetter(keys)(one))
    for given, read in zip(rows_at(WHOLE, place, at), read_rows, strict=True):
        for of in row:
            assert of.get(read) == (at(given, of.path) if of.path else given)


def test_every_column_of_steps_csv_is_in_the_registry() -> None:
    of_a_row = {"step", "stage", "rank"}  # which row it is
    assert set(STEP_COLUMNS) - of_a_row <= {*QUANTITIES, TOKENS.name}


def test_each_figure_stands_once_and_says_what_it_means() -> None:
    every = [of for group in GROUPS.values() for of in group]
    assert len({of.name for of in every}) == len(every)
    for title, group in GROUPS.items():
        for of in group:
            assert of.group == title
            assert re.fullmatch(r".*[^.\n]", of.meaning)
            assert of.title
