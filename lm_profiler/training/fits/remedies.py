"""After a run that did not fit: the command that would, to be pasted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

from lm_profiler.models.config import TransformerConfig, preset
from lm_profiler.record.collection import Entry
from lm_profiler.record.command import command_line
from lm_profiler.record.precision import full_name
from lm_profiler.training.fits.batch import activation_bytes
from lm_profiler.training.fits.states import Plan, halves

_ROOM = 0.9
"""Share of a device's memory that a plan may fill: the rest is the driver's context, workspaces and gaps."""

_MOST = 5
"""Runs that a table ends with advice for."""

_SHARDED = ("fsdp", "deepspeed", "model_parallel")


def remedies(entries: Sequence[Entry]) -> list[str]:
    """For each of ``entries`` that did not fit, a command that would, and the options that would do in its place.

    What a refusal says is reckoned from known bytes; after a real out-of-memory activations are estimated, by no less
    than what the failure shows.
    """
    advice: dict[str, list[str]] = {}
    for entry in entries:
        if lines := _remedies(entry):
            advice.setdefault(lines[0], [f"{entry.name}:", *lines])  # repeats end alike
    shown = [line for lines in list(advice.values())[:_MOST] for line in lines]
    return shown + [f"{len(advice) - _MOST} more did not fit"] * (len(advice) > _MOST)


def _remedies(entry: Entry) -> list[str]:
    if entry.status == "oom":
        options, sure = _after_oom(entry), "by an estimate of the activations"
    else:  # a refusal says itself what would fit, and nothing else does
        failure = entry.record.failure if entry.record is not None else None
        options, sure = list(failure.remedies) if failure is not None else [], "activations aside"
    if not options:
        return []
    lines = [f"  would fit, {sure}: {_command(entry)} {options[0]}"]
    return lines + [f"  or instead: {' or '.join(options[1:])}"] * (len(options) > 1)


def _command(entry: Entry) -> str:
    """The call of ``entry``, to be run on its own: what a sweep adds to keep its cells apart is left out."""
    if entry.cell is None:
        return entry.record.command if entry.record is not None else ""
    own = [given for given in entry.cell.arguments if not given.startswith(("--log_dir=", "--name="))]
    return command_line(own)


def _after_oom(entry: Entry) -> list[str]:
    """Options of which each alone would fit."""
    room = _room_bytes(entry)
    try:
        plan = _plan(entry)
        return [] if plan is None or room is None else _fitting(plan, room)
    except (TypeError, ValueError):  # dimensions or a precision that this version does not know
        return []


def _fitting(plan: Plan, room: int) -> list[str]:
    # It did not fit, so activations took at least what known bytes leave of the device.
    factor = max(1.0, (room - plan.total_bytes) / activation_bytes(plan))

    def fits(other: Plan) -> bool:
        return other.total_bytes + factor * activation_bytes(other) <= _ROOM * room

    fitting = []
    for ways in _ways(plan):
        fitting += [text for text, other in ways if fits(other)][:1]
    return fitting


def _ways(plan: Plan) -> Iterator[list[tuple[str, Plan]]]:
    """Ways to need less, each from the least change to the greatest; what changes nothing does not fit either."""
    yield [(f"--data.batch_size={n}", replace(plan, batch_size=n)) for n in halves(plan.batch_size)]
    yield [(f"--data.context_length={n}", replace(plan, context_length=n)) for n in halves(plan.context_length)]
    if plan.precision != "64-true":  # whoever asks for that needs it
        names = ("bf16-mixed", "bf16-true")
        yield [(f"--trainer.precision={name}", replace(plan, precision=name)) for name in names]
    config = replace(plan.config, activation_checkpointing=True)
    yield [("--model.activation_checkpointing=true", replace(plan, config=config))]


def _plan(entry: Entry) -> Plan | None:
    """None for a model that is not ours, or that is split over devices."""
    if not str(entry.option("model.class_path") or "").startswith("lm_profiler.training."):
        return None
    if any(name in str(entry.option("trainer.strategy")) for name in _SHARDED):
        return None
    size, optimizer = (entry.option(f"model.{name}") for name in ("size", "optimizer"))
    batch_size, context_length = (entry.option(f"data.{name}") for name in ("batch_size", "context_length"))
    if None in (size, optimizer, batch_size, context_length):
        return None
    return Plan(
        config=preset(size, **{field.name: entry.option(f"model.{field.name}") for field in fields(TransformerConfig)}),
        batch_size=batch_size,
        context_length=context_length,
        precision=full_name(entry.option("trainer.precision")),
        optimizer=optimizer,
        training=entry.verb == "fit",
    )


def _room_bytes(entry: Entry) -> int | None:
    """What the device has, or was allowed to use."""
    failure = entry.record.failure if entry.record is not None else None
    said = failure.out_of_memory if failure is not None else None
    if said is not None and (said.allowed or said.total):
        return said.allowed or said.total
    return entry.environment.device_bytes if entry.environment is not None else None
