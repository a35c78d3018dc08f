"""What a table of runs can show: one column for each fact and figure, found by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lm_profiler.models.config import PRESETS, TransformerConfig, preset
from lm_profiler.record.collection import Entry
from lm_profiler.record.precision import full_name
from lm_profiler.record.quantities import QUANTITIES, Quantity
from lm_profiler.record.run import RunRecord


@dataclass(frozen=True)
class Column:
    """One column. ``get`` gives an entry's value: a figure in SI, text, a truth value, or None where it is unknown.

    ``quantity`` says how figures are shown; None for facts. A figure of time has an interval: ``interval`` gives
    (low, high) in SI. ``option`` is the option that sets the fact, where there is one.
    """

    name: str
    title: str
    get: Callable[[Entry], Any]
    quantity: Quantity | None = None
    interval: Callable[[Entry], tuple[float, float] | None] = lambda entry: None
    option: str | None = None


def column(name: str) -> Column:
    """The column called ``name``: one of ``COLUMNS``, or else an option by its path, such as ``data.batch_size``."""
    return COLUMNS.get(name) or OPTIONS.get(name) or Column(name, name, _of_option(name), option=name)


def _of_record(get: Callable[[RunRecord], Any]) -> Callable[[Entry], Any]:
    return lambda entry: None if entry.record is None else get(entry.record)


def _of_option(path: str) -> Callable[[Entry], Any]:
    return lambda entry: entry.option(path)


def preset_of(size: Any) -> TransformerConfig | None:
    """The dimensions of ``size``, whatever somebody's config calls one."""
    return PRESETS.get(size) if isinstance(size, str) else None


def _dimension(name: str) -> Callable[[Entry], Any]:
    """The model's own where the config gives it, else the preset's."""

    def get(entry: Entry) -> Any:
        given = entry.option(f"model.{name}")
        if given is not None:
            return given
        return getattr(preset_of(entry.option("model.size")), name, None)

    return get


def _device(entry: Entry) -> str | None:
    environment = entry.environment
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
    """Of the module as it was built; of our own model also where it was not, as in a run that was refused."""
    model = entry.record.model if entry.record is not None else None
    if model is not None and model.parameters:
        return model.parameters if embedding else model.parameters_without_embedding
    given = {name: COLUMNS[name].get(entry) for name in DIMENSIONS}
    given |= {"vocab_size": entry.option("model.vocab_size")}
    size = entry.option("model.size")
    if not isinstance(size, str):
        return None
    try:
        return preset(size, **given).num_parameters(embedding)
    except (TypeError, ValueError):  # a size of somebody else's model, or dimensions that do not fit together
        return None


DIMENSIONS = ("d_model", "d_ff", "num_layers", "num_heads")

_FACTS = (
    Column("name", "run", lambda entry: entry.name),
    Column("folder", "folder", lambda entry: str(entry.folder)),
    Column("status", "status", lambda entry: entry.status),
    Column("reason", "reason", lambda entry: entry.reason),
    Column("repeat", "repeat", lambda entry: None if entry.cell is None else entry.cell.repeat),
    Column("verb", "verb", lambda entry: entry.verb),
    Column("started", "started", _of_record(lambda record: record.started)),
    Column("device", "device", _device),
    Column("size", "size", _of_option("model.size"), option="model.size"),
    *(Column(name, name, _dimension(name), option=f"model.{name}") for name in DIMENSIONS),
    Column("parameters", "parameters", parameters),
    Column("precision", "precision", _precision, option="trainer.precision"),
    *(
        Column(name, title, _of_option(path), option=path)
        for name, title, path in (
            ("batch_size", "batch", "data.batch_size"),
            ("context_length", "context", "data.context_length"),
            ("compile", "compile", "model.compile"),
            ("attention", "attention", "model.attention"),
            ("optimizer", "optimizer", "model.optimizer"),
        )
    ),
    Column("warmup_steps", "warm-up", lambda entry: entry.cut and entry.cut.warmup),
    Column("benchmark_steps", "steps", _of_record(lambda record: record.steps.get("measure"))),
    Column("steadiness", "steadiness", _of_record(lambda record: ", ".join(record.words) or None)),
    Column("bound_by", "bound by", _of_record(lambda record: record.verdict and record.verdict.bound_by)),
)


def _of_figure(quantity: Quantity) -> Column:
    get, interval = _of_record(quantity.get), _of_record(quantity.interval)
    return Column(quantity.name, quantity.title, get, None if quantity.is_text else quantity, interval)


_FIGURES = [_of_figure(quantity) for quantity in QUANTITIES.values()]
_NAMED = {fact.name for fact in _FACTS}

COLUMNS: dict[str, Column] = {
    column.name: column for column in (*_FACTS, *(figure for figure in _FIGURES if figure.name not in _NAMED))
}
"""Every column that has a name of its own: facts first, then figures."""

OPTIONS = {column.option: column for column in COLUMNS.values() if column.option is not None}
"""Those of ``COLUMNS`` that an option sets, by that option."""
