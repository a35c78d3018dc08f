"""The columns that a table of runs can have: one for each fact, figure and option of the runs, found by name."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lm_profiler.analysis.compare.differences import flat
from lm_profiler.models.config import DIMENSIONS, PRESETS, TransformerConfig, preset
from lm_profiler.record.entry import Entry
from lm_profiler.record.parts import full_name
from lm_profiler.record.quantities import GROUPS, MEMORY, QUANTITIES, TIMES, Place, Quantity, overview
from lm_profiler.record.run_record import Environment, RunRecord
from lm_profiler.report.tables.table import Table, text_table
from lm_profiler.usage_error import UsageError


@dataclass(frozen=True)
class Column:
    """One column of a table of runs."""

    name: str
    title: str
    # returns an entry's value: a figure in SI, text, a truth value, or None where it is unknown
    get: Callable[[Entry], Any]
    meaning: str = ""
    group: str = ""
    place: Place = Place.TABLE  # how prominently it is shown
    option: str | None = None  # the option that sets a fact, where there is one
    compared: bool = False  # whether it distinguishes runs if no option was swept
    quantity: Quantity | None = None  # how figures are shown; None for facts

    def interval(self, entry: Entry) -> tuple[float, float] | None:
        """Return the (low, high) of a figure, in SI; None where it has no interval."""
        return None if self.quantity is None or entry.record is None else self.quantity.interval(entry.record)


def column(name: str) -> Column:
    """Return the column called ``name``: one of ``COLUMNS``, or an option by its path, such as ``data.batch_size``."""
    return COLUMNS.get(name) or OPTIONS.get(name) or Column(name, name, _of_option(name), option=name)


def _of_record(get: Callable[[RunRecord], Any]) -> Callable[[Entry], Any]:
    return lambda entry: None if entry.record is None else get(entry.record)


def _of_option(path: str) -> Callable[[Entry], Any]:
    return lambda entry: entry.option(path)


def preset_of(size: Any) -> TransformerConfig | None:
    """Return the preset called ``size``; None if the config uses that name differently."""
    return PRESETS.get(size) if isinstance(size, str) else None


def _dimension(name: str) -> Callable[[Entry], Any]:
    def get(entry: Entry) -> Any:
        given = entry.option(f"model.{name}")
        return given if given is not None else getattr(preset_of(entry.option("model.size")), name, None)

    return get


def device_of(environment: Environment | None) -> str | None:
    if environment is None:
        return None
    return environment.device_name + (f" x {environment.world_size}" if environment.world_size > 1 else "")


def _precision(entry: Entry) -> str | None:
    if entry.record is not None and entry.record.model is not None:
        return entry.record.model.precision
    given = entry.option("trainer.precision")
    known = given is not None or entry.config is not None or entry.sibling is not None
    return full_name(given) if known else None


def parameters(entry: Entry, embedding: bool = True) -> int | None:
    """Return the parameters of the module as it was built, or as our own model would have been in a refused run."""
    model = entry.record.model if entry.record is not None else None
    if model is not None and model.parameters:
        return model.parameters if embedding else model.parameters_without_embedding
    return None if (config := config_of(entry)) is None else config.num_parameters(embedding)


def config_of(entry: Entry) -> TransformerConfig | None:
    """Return the dimensions of our own model; None for another model, or if they do not fit together."""
    given = {name: entry.option(f"model.{name}") for name in (*DIMENSIONS, "vocab_size")}
    try:
        return preset(entry.option("model.size"), **given)
    except (TypeError, ValueError):
        return None


def _option(name: str, title: str, path: str, meaning: str) -> Column:
    return Column(name, title, _of_option(path), meaning, option=path, compared=True)


def _asked(name: str, title: str, get: Callable[[RunRecord], Any], meaning: str) -> Column:
    return Column(name, title, _of_record(get), meaning, place=Place.ASKED)


_FACTS: dict[str, tuple[Column, ...]] = {
    "The run": (
        Column("name", "run", lambda entry: entry.name, "its name, or its cell's", place=Place.HEADLINE),
        Column("folder", "folder", lambda entry: str(entry.folder), "where its files are", place=Place.HEADLINE),
        Column("status", "status", lambda entry: entry.status, "how it ended", place=Place.HEADLINE),
        Column("reason", "reason", lambda entry: entry.reason, "why it failed", place=Place.HEADLINE),
        Column("repeat", "repeat", lambda entry: entry.cell and entry.cell.repeat, "of its cell", place=Place.ASKED),
        _asked("started", "started", lambda run: run.started, "date and time"),
    ),
    "What ran": (
        Column("verb", "verb", lambda entry: entry.verb, "fit, validate, test or predict", compared=True),
        Column("device", "device", lambda of: device_of(of.environment), "its name, and how many", compared=True),
        _option("size", "size", "model.size", "preset of the model"),
        *(Column(name, name, _dimension(name), "of the model", option=f"model.{name}") for name in DIMENSIONS),
        Column("parameters", "parameters", parameters, "of the model as it was built, or would have been"),
        Column("precision", "precision", _precision, "of the Trainer", option="trainer.precision", compared=True),
        _option("batch_size", "batch", "data.batch_size", "rows of a batch"),
        _option("context_length", "context", "data.context_length", "tokens of a row"),
        _option("compile", "compile", "model.compile", "whether torch.compile was used"),
        _option("attention", "attention", "model.attention", "which attention"),
        _option("optimizer", "optimizer", "model.optimizer", "which optimizer"),
        Column("warmup_steps", "warm-up", lambda entry: entry.cut and entry.cut.warmup, "steps left out with --warmup"),
    ),
    "What came of it": (
        _asked("benchmark_steps", "steps", QUANTITIES["steps_measure"].get, "steps that were measured"),
        Column("steadiness", "steadiness", _of_record(lambda run: ", ".join(run.words) or None), "words for its steps"),
        _asked("bound_by", "bound by", lambda run: run.verdict and run.verdict.bound_by, "its bottleneck"),
    ),
}

# every column with its own name: facts first, then figures
COLUMNS = {fact.name: replace(fact, group=group) for group, facts in _FACTS.items() for fact in facts}
for _name, _of in QUANTITIES.items():
    _shown = None if _of.is_text else _of
    _column = Column(_name, _of.title, _of_record(_of.get), _of.meaning, _of.group, _of.place, quantity=_shown)
    COLUMNS.setdefault(_name, _column)

# the columns of facts that an option sets, by that option
OPTIONS = {column.option: column for column in COLUMNS.values() if column.option is not None}

# the columns that distinguish runs in a table
FACTS = [of for of in COLUMNS.values() if of.group in _FACTS and of.place is Place.TABLE]

# the facts that distinguish runs if no option was swept, options first
COMPARED = sorted((of for of in FACTS if of.compared), key=lambda of: of.option is None)


def figures(place: Place) -> list[Column]:
    """Return the figures that are shown at ``place`` or earlier, in the registry's order."""
    return [of for of in COLUMNS.values() if of.quantity is not None and of.place <= place]


def peak_memory(entries: Sequence[Entry]) -> Column:
    """Return the column of the peak allocated on the device, or of the peak resident where no device reports it."""
    allocated, _, resident = (COLUMNS[of.name] for of in MEMORY.values())
    return allocated if any(allocated.get(entry) is not None for entry in entries) else resident


def columns_named(names: Iterable[str], entries: Sequence[Entry]) -> list[Column]:
    """Return the columns called ``names``: facts, figures, or options of ``entries``."""
    columns = [column(name) for name in names]
    asked = [of.name for of in columns if of.name not in COLUMNS]
    known = {path for entry in entries for path in _paths(entry)} if asked else set()
    for name in (name for name in asked if name not in known):
        near = difflib.get_close_matches(name, [*COLUMNS, *sorted(known)], n=1)
        remedy = f"; did you mean {near[0]}?" if near else ""
        expected = "a name such as step_s, or an option that these runs have"
        raise UsageError(f"column: expected {expected}, given {name!r}{remedy}")
    return columns


def every_column() -> list[Table]:
    """Return a table for each group of columns: their names, units in files for programs, and meanings."""
    groups: dict[str, list[tuple[str, str, str]]] = {}
    for fact in (of for of in COLUMNS.values() if of.group not in GROUPS):
        option = f" (--{fact.option})" if fact.option else ""
        groups.setdefault(fact.group, []).append((fact.name, "", fact.meaning + option))
    facts = {name for group in groups.values() for name, *_ in group}
    for title, group in overview().items():
        groups[title] = [(of.name, of.unit, of.meaning) for of in group if of.name not in facts]
    tables = [text_table(("column", "unit", "meaning"), rows, left=3, title=title) for title, rows in groups.items()]
    names = [f"PART is one of {', '.join(TIMES)}", "any option of the runs is one too, such as data.batch_size"]
    return [*tables, Table(below=names, title="Names of columns")]


def _paths(entry: Entry) -> Iterator[str]:
    yield from entry.overrides
    for path in flat(entry.config or {}):
        yield from itertools.accumulate(path.split("."), "{}.{}".format)
