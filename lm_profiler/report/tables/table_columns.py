"""The columns that a table of runs can have: each fact, figure and option of a run is a column with a name."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from lm_profiler.analysis.compare.differences import flat_options
from lm_profiler.models.config import (
    DIMENSIONS,
    PRESETS,
    SHAPE_OPTIONS,
    TransformerConfig,
    preset,
)
from lm_profiler.record.entry import Entry
from lm_profiler.record.parts import full_name
from lm_profiler.record.quantities import (
    GROUPS,
    MEMORY,
    QUANTITIES,
    TIMES,
    Place,
    overview,
)
from lm_profiler.record.run_record import Environment, RunRecord
from lm_profiler.report.tables.attention_columns import attention_columns
from lm_profiler.report.tables.column import Column
from lm_profiler.report.tables.first_step_columns import first_step_columns
from lm_profiler.report.tables.kernel_columns import kernel_columns
from lm_profiler.report.tables.table import Table, text_table
from lm_profiler.usage_error import UsageError, did_you_mean


def column(name: str) -> Column:
    """Return the column called ``name``: one of ``COLUMNS``, or an option by its path, such as ``data.batch_size``."""
    if name in COLUMNS:
        return COLUMNS[name]
    if name in OPTIONS:
        return OPTIONS[name]
    return Column(name, name, _option_getter(name), option=name)


# -- facts of a run ----------------------------------------------------------------------------------------------------


def preset_of(size: Any) -> TransformerConfig | None:
    """Return the preset called ``size``; None if ``size`` is not the name of a preset."""
    if not isinstance(size, str):
        return None
    return PRESETS.get(size)


def device_text(environment: Environment | None) -> str | None:
    """Return the device's name, with the number of devices if there are several; None if it is unknown."""
    if environment is None:
        return None
    if environment.world_size > 1:
        return f"{environment.device_name} x {environment.world_size}"
    return environment.device_name


def model_config(entry: Entry) -> TransformerConfig | None:
    """Return the dimensions of the built-in model; None for another model, or for an invalid combination."""
    options = {name: entry.option(f"model.{name}") for name in SHAPE_OPTIONS}
    try:
        return preset(entry.option("model.size"), **options)
    except (TypeError, ValueError):
        return None


def parameters(entry: Entry, embedding: bool = True) -> int | None:
    """Return the number of parameters; for a refused run, that of the model that would have been built."""
    model = entry.record.model if entry.record is not None else None
    if model is not None and model.parameters:
        return model.parameters if embedding else model.parameters_without_embedding
    config = model_config(entry)
    if config is None:
        return None
    return config.num_parameters(embedding)


def _precision(entry: Entry) -> str | None:
    """Return the precision of the run, from the record or else from its option; None if neither is known."""
    if entry.record is not None and entry.record.model is not None:
        return entry.record.model.precision
    option = entry.option("trainer.precision")
    options_are_known = entry.config is not None or entry.sibling is not None
    if option is None and not options_are_known:
        return None
    return full_name(option)  # If the option is not set, this is the Trainer's default.


def _repeat(entry: Entry) -> int | None:
    return None if entry.cell is None else entry.cell.repeat


def _warmup_steps(entry: Entry) -> int | None:
    return None if entry.cut is None else entry.cut.warmup


def _steadiness(record: RunRecord) -> str | None:
    return ", ".join(record.words) or None


def _bound_by(record: RunRecord) -> str | None:
    return None if record.verdict is None else record.verdict.bound_by


# -- columns -----------------------------------------------------------------------------------------------------------


def _record_getter(get: Callable[[RunRecord], Any]) -> Callable[[Entry], Any]:
    """Return ``get`` as a function of an entry, which may have no record."""

    def get_from_entry(entry: Entry) -> Any:
        return None if entry.record is None else get(entry.record)

    return get_from_entry


def _option_getter(path: str) -> Callable[[Entry], Any]:
    return lambda entry: entry.option(path)


def _dimension_getter(name: str) -> Callable[[Entry], Any]:
    """Return a function that gets a dimension of the model, from the option or else from the size's preset."""

    def get(entry: Entry) -> Any:
        option = entry.option(f"model.{name}")
        if option is None:
            option = getattr(preset_of(entry.option("model.size")), name, None)
        return option or None  # without experts their number has no meaning

    return get


def _option_column(name: str, title: str, path: str, meaning: str) -> Column:
    return Column(
        name, title, _option_getter(path), meaning, option=path, compared=True
    )


def _dimension_column(name: str) -> Column:
    return Column(
        name, name, _dimension_getter(name), "of the model", option=f"model.{name}"
    )


def _record_column(
    name: str, title: str, get: Callable[[RunRecord], Any], meaning: str
) -> Column:
    return Column(name, title, _record_getter(get), meaning, place=Place.ASKED)


_FACTS: dict[str, tuple[Column, ...]] = {
    "The run": (
        Column(
            "name",
            "run",
            lambda entry: entry.name,
            "name of the run, or of its cell in a sweep",
            place=Place.HEADLINE,
        ),
        Column(
            "folder",
            "folder",
            lambda entry: str(entry.folder),
            "folder of the run",
            place=Place.HEADLINE,
        ),
        Column(
            "status",
            "status",
            lambda entry: entry.status,
            "how the run ended",
            place=Place.HEADLINE,
        ),
        Column(
            "reason",
            "reason",
            lambda entry: entry.reason,
            "reason why the run failed",
            place=Place.HEADLINE,
        ),
        Column(
            "repeat",
            "repeat",
            _repeat,
            "number of the run among the repeats of its cell in a sweep",
            place=Place.ASKED,
        ),
        _record_column(
            "started",
            "started",
            lambda record: record.started,
            "date and time when the run started",
        ),
    ),
    "What ran": (
        Column(
            "verb",
            "verb",
            lambda entry: entry.verb,
            "what was run: fit, validate, test or predict",
            compared=True,
        ),
        Column(
            "device",
            "device",
            lambda entry: device_text(entry.environment),
            "name of the device, and number of devices",
            compared=True,
        ),
        _option_column("size", "size", "model.size", "preset of the model"),
        *(
            _dimension_column(name)
            for name in (*DIMENSIONS, "num_kv_heads", "num_experts")
        ),
        Column(
            "parameters",
            "parameters",
            parameters,
            "parameters of the model; for a run that failed early, the number that its model would have had",
        ),
        Column(
            "precision",
            "precision",
            _precision,
            "precision of the Trainer",
            option="trainer.precision",
            compared=True,
        ),
        _option_column(
            "batch_size", "batch", "data.batch_size", "number of samples per batch"
        ),
        _option_column(
            "context_length",
            "context",
            "data.context_length",
            "number of tokens per sample",
        ),
        _option_column(
            "compile", "compile", "model.compile", "whether torch.compile was used"
        ),
        _option_column(
            "attention",
            "attention",
            "model.attention",
            "attention function of the model",
        ),
        _option_column(
            "loss", "loss", "model.loss", "whether the loss is computed in chunks"
        ),
        _option_column(
            "optimizer", "optimizer", "model.optimizer", "optimizer of the model"
        ),
        Column(
            "warmup_steps",
            "warm-up",
            _warmup_steps,
            "number of steps that --warmup leaves out at the beginning",
        ),
    ),
    "Result": (
        _record_column(
            "benchmark_steps",
            "steps",
            QUANTITIES["steps_measure"].get,
            "number of measured steps",
        ),
        Column(
            "steadiness",
            "steadiness",
            _record_getter(_steadiness),
            "whether step times were steady, in one or two words",
        ),
        _record_column(
            "bound_by", "bound by", _bound_by, "what limits the speed of the run"
        ),
    ),
}


_KERNELS = "Kernels of the traced steps"
_ATTENTION = "Attention alone"
_FIRST_STEP = "The first step"


def _named_columns() -> dict[str, Column]:
    """Return all columns by name: facts, then figures, then computed columns. A fact replaces a figure of its name."""
    columns = {}
    for group, facts in _FACTS.items():
        for fact in facts:
            columns[fact.name] = replace(fact, group=group)
    for name, figure in QUANTITIES.items():
        if name in columns:
            continue
        columns[name] = Column(
            name,
            figure.title,
            _record_getter(figure.get),
            figure.meaning,
            group=figure.group,
            place=figure.place,
            quantity=None if figure.is_text else figure,
        )
    computed = {
        _KERNELS: kernel_columns(),
        _ATTENTION: attention_columns(),
        _FIRST_STEP: first_step_columns(),
    }
    for group, computed_columns in computed.items():
        for computed_column in computed_columns:
            columns[computed_column.name] = replace(computed_column, group=group)
    return columns


COLUMNS = _named_columns()

# option → the column of the fact that it sets
OPTIONS = {
    column.option: column for column in COLUMNS.values() if column.option is not None
}

# the facts that tables show by default if runs differ in them
FACTS = [
    column
    for column in COLUMNS.values()
    if column.group in _FACTS and column.place is Place.TABLE
]

# the facts by which runs are distinguished if no option was swept; those with an option come first
COMPARED = sorted(
    (fact for fact in FACTS if fact.compared), key=lambda fact: fact.option is None
)


def figures(place: Place) -> list[Column]:
    """Return the figures that are shown at ``place`` or a more prominent one, in the registry's order."""
    return [
        column
        for column in COLUMNS.values()
        if column.quantity is not None and column.place <= place
    ]


def peak_memory(entries: Sequence[Entry]) -> Column:
    """Return the column of the allocated peak, or of the resident peak if no run reports an allocated one."""
    allocated = COLUMNS[MEMORY["allocated_peak"].name]
    resident = COLUMNS[MEMORY["resident_peak"].name]
    is_reported = any(allocated.get(entry) is not None for entry in entries)
    return allocated if is_reported else resident


def columns_named(names: Iterable[str], entries: Sequence[Entry]) -> list[Column]:
    """Return the columns called ``names``: facts, figures, or options of ``entries``.

    Raises:
        UsageError: a name is none of these.
    """
    columns = [column(name) for name in names]
    options = []
    for named_column in columns:
        if named_column.name not in COLUMNS:
            options.append(named_column.name)
    if not options:
        return columns
    existing: set[str] = set()
    for entry in entries:
        existing.update(_option_paths(entry))
    for name in options:
        if name not in existing:
            remedy = did_you_mean(name, [*COLUMNS, *sorted(existing)])
            expected = "a name such as step_s, or an option that these runs have"
            raise UsageError(f"column: expected {expected}, given {name!r}{remedy}")
    return columns


def _option_paths(entry: Entry) -> Iterator[str]:
    """Yield the paths of the options of ``entry``, and those of their sections: ``model`` for ``model.size``."""
    yield from entry.overrides
    for path in flat_options(entry.config or {}):
        # "a.b.c" gives "a", "a.b" and "a.b.c"
        yield from itertools.accumulate(path.split("."), "{}.{}".format)


def column_tables() -> list[Table]:
    """Return a table for each group of columns with names, meanings, and the units in files for programs."""
    rows_by_group: dict[str, list[tuple[str, str, str]]] = {}
    fact_names = set()
    for fact in COLUMNS.values():
        if fact.group in GROUPS:
            continue
        fact_names.add(fact.name)
        meaning = fact.meaning
        if fact.option:
            meaning += f" (--{fact.option})"
        rows_by_group.setdefault(fact.group, []).append((fact.name, "", meaning))
    for group, quantities in overview().items():
        rows = [
            (quantity.name, quantity.unit, quantity.meaning) for quantity in quantities
        ]
        rows_by_group[group] = [row for row in rows if row[0] not in fact_names]

    tables = []
    for group, rows in rows_by_group.items():
        tables.append(
            text_table(("column", "unit", "meaning"), rows, left=3, title=group)
        )
    explanations = [
        f"PART is one of {', '.join(TIMES)}",
        "every option of the runs is a column too, such as data.batch_size",
    ]
    return [*tables, Table(below=explanations, title="Names of columns")]
