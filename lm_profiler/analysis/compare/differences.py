"""Lists the differences between two runs: in their work, their configs, and their machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lm_profiler.record.run_record import RunRecord

# options that say where a run goes, not what it does
RUN_SPECIFIC_OPTIONS = frozenset({"name", "log_dir"})
# options in which repeats may differ
SEEDS = frozenset({"seed_everything", "data.seed"})

_WORK_FIELDS = frozenset({"device_name", "world_size"})
_TOLERANCE = 0.01  # batches of text vary in tokens from run to run


@dataclass(frozen=True)
class Difference:
    """The values of ``path`` on either side; None if that side does not have it."""

    path: str
    a: Any
    b: Any


def incomparable_facts(a: RunRecord, b: RunRecord) -> list[Difference]:
    """Return why two runs' times cannot be compared: another device, another model, more or less work.

    Precision, compilation, attention, optimizer or versions are no such reason: they are what users compare.
    """
    work_b = _facts_of_work(b)
    differences = []
    for name, value_a in _facts_of_work(a).items():
        value_b = work_b[name]
        if value_a is None or value_b is None:
            continue
        if not _are_alike(value_a, value_b):
            differences.append(Difference(name, value_a, value_b))
    return differences


def in_config(a: RunRecord, b: RunRecord) -> list[Difference]:
    """Return differing options by dotted path; for runs without a config, module facts and program arguments."""
    if a.config is None or b.config is None:
        return _differences(_without_config(a), _without_config(b))
    return _differences(a.config, b.config)


def _without_config(run: RunRecord) -> dict[str, Any]:
    """Return what stands for the options of a run that has no config."""
    return {
        "module": run.model and run.model.model_dump(),
        "program": run.command.partition(" -- ")[2],
    }


def in_environment(a: RunRecord, b: RunRecord) -> list[Difference] | None:
    """Return differing versions, driver, flags, threads, git commit; None if a run was killed before it stored them."""
    if a.environment is None or b.environment is None:
        return None
    differences = []
    for row in _differences(a.environment.model_dump(), b.environment.model_dump()):
        if row.path not in _WORK_FIELDS:
            differences.append(row)
    return differences


def _facts_of_work(run: RunRecord) -> dict[str, Any]:
    """Return the facts that must be equal for two runs to do the same work."""
    environment = run.environment
    model = run.model
    rate = run.throughput
    return {
        "verb": run.verb,
        "loop": run.loop,
        "device": environment and environment.device_name,
        "ranks": environment and environment.world_size,
        "module": model and model.class_path,
        "parameters": model and model.parameters,
        "samples per step": rate and rate.samples_per_step,
        "tokens per step": rate and rate.tokens_per_step,
    }


def _are_alike(a: Any, b: Any) -> bool:
    """Return whether two facts are equal, or numbers that differ by less than 1 %."""
    if isinstance(a, int) and isinstance(b, int):
        return abs(a - b) <= _TOLERANCE * a
    return bool(a == b)


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    """Return the options whose values differ, without those that differ between any two runs."""
    flat_a = flat_options(a)
    flat_b = flat_options(b)
    differences = []
    for path in flat_a | flat_b:
        value_a = flat_a.get(path)
        value_b = flat_b.get(path)
        if value_a != value_b and path not in RUN_SPECIFIC_OPTIONS:
            differences.append(Difference(path, value_a, value_b))
    return differences


def flat_options(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of ``tree`` by dotted path, as the command line names them."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}.{key}".lstrip(".")
        if key == "init_args" and prefix:
            path = prefix  # the command line leaves out this level
        if isinstance(value, Mapping) and value:
            values.update(flat_options(value, path))
        else:
            values[path] = value
    return values
