"""What a step is cut into, what each part means, the stages of a run, and what Lightning calls the precisions."""

from __future__ import annotations

PHASES = ("data", "transfer", "forward", "zero_grad", "backward", "clip", "optimizer")
PARTS = (*PHASES, "other")
"""What a step is cut into: the phases, and ``other`` for what no phase covers. They add up to the step."""

TIMED = (*PARTS, "step")

MEANINGS = {
    "data": "the loop asks for a batch, until it has it",
    "transfer": "the batch goes to the device",
    "forward": "training_step (or validation_step, test_step, predict_step)",
    "zero_grad": "gradients are cleared",
    "backward": "backward, without the hooks around it",
    "clip": "gradient clipping",
    "optimizer": "the optimizer's own arithmetic",
    "other": "what no phase covers: hooks, loggers, schedulers, the loop itself",
    "step": "from asking for the step's first batch to asking for the next step's",
    "forward_backward": "forward and backward added up within each step",
}
"""Of all that a run has times of."""

WORDS = {part: part.replace("forward_backward", "forward + backward") for part in MEANINGS}
"""What people call them."""

STAGES = {
    "warmup": "warm-up",
    "measure": "measure",
    "collectives": "collectives",
    "whatif": "what-if",
    "actions": "actions",
    "memory": "memory",
    "trace": "trace",
}
"""What people call the stages of a run, in their order."""


STAGE_NAMES = {
    "warmup": "warm-up",
    "measure": "measuring",
    "collectives": "timing collectives",
    "whatif": "delaying places",
    "actions": "timing actions",
    "memory": "reading memory",
    "trace": "tracing",
}
"""In their order."""


_ALIASES = {"64": "64-true", "32": "32-true", "None": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}
"""Lightning's shorter names (lightning/fabric/connector.py, _convert_precision_to_unified_args)."""


def full_name(precision: object) -> str:
    """The whole name of a precision as a config may give it: None and ``32`` are ``32-true``."""
    return _ALIASES.get(str(precision), str(precision))
