"""The parts of a step and their meanings, the stages of a run, and Lightning's names of precisions."""

from __future__ import annotations

from collections.abc import Iterable

# all work and waiting in these phases is for the batch
INPUT_PHASES = ("data", "transfer")
PHASES = (*INPUT_PHASES, "forward", "zero_grad", "backward", "clip", "optimizer")
WORKING_PHASES = PHASES[len(INPUT_PHASES) :]
NO_PHASE = "other"  # time outside of phases
PARTS = (*PHASES, NO_PHASE)  # the parts of a step, whose times add up to its duration
BETWEEN_STEPS = "between steps"  # time outside of steps, such as a validation

TIMED = (*PARTS, "step")  # the times that ``steps.csv`` has of each step

# what is timed, by the name of the time
MEANINGS = {
    "data": "time from the request for a batch until the loop has it",
    "transfer": "time of moving the batch to the device",
    "forward": "time of training_step (or validation_step, test_step, predict_step)",
    "zero_grad": "time of clearing the gradients",
    "backward": "time of the backward pass, without the hooks around it",
    "clip": "time of gradient clipping",
    "optimizer": "time of the optimizer's own arithmetic",
    "other": "time outside the phases: hooks, loggers, schedulers, the loop itself",
    "step": "time from the request for the step's first batch to the request for the next step's first batch",
    "forward_backward": "time of forward and backward, added up within each step",
}


def missing_parts(
    present: Iterable[str], expected: Iterable[str] = MEANINGS
) -> list[str]:
    """Return the ``expected`` times that are not ``present`` in a file. All readers refuse a file that lacks one.

    When a phase is added, this function must let files of older versions pass.
    """
    present = set(present)
    return [part for part in expected if part not in present]


# the display names of the times
WORDS = {
    part: part.replace("forward_backward", "forward + backward") for part in MEANINGS
}

# the stages of a run in their order, as adjectives: ``warm-up steps``
STAGES = {
    "warmup": "warm-up",
    "measure": "measure",
    "collectives": "collectives",
    "actions": "actions",
    "memory": "memory",
    "trace": "trace",
}

# the same stages as activities: ``measuring``, ``tracing``
STAGE_NAMES = {
    "warmup": "warm-up",
    "measure": "measuring",
    "collectives": "timing collectives",
    "actions": "timing actions",
    "memory": "reading memory",
    "trace": "tracing",
}

# Lightning's shorter names (lightning/fabric/connector.py, _convert_precision_to_unified_args)
_ALIASES = {
    "64": "64-true",
    "32": "32-true",
    "None": "32-true",
    "16": "16-mixed",
    "bf16": "bf16-mixed",
}


def full_name(precision: object) -> str:
    """Return the full name of a precision as a config may give it: None and ``32`` are ``32-true``."""
    return _ALIASES.get(str(precision), str(precision))
