"""What of a run its rehearsal takes over, and how what was rehearsed becomes the run's again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lightning.pytorch import Trainer

from lm_profiler.analysis.hardware.floors import Work
from lm_profiler.callbacks.rehearsal import FakeStrategy
from lm_profiler.callbacks.silent import SilentLogger
from lm_profiler.cli.checks import check_trainer_options, trainer_error
from lm_profiler.cli.trainer_cli import OPTION_ERRORS, ProfilerCLI
from lm_profiler.measure.fake.world import FakeWorld
from lm_profiler.record.precision import full_name

KEPT = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "detect_anomaly")
"""What of the Trainer's options a step on one device depends on, beside its precision."""

_BATCHES = 2
"""Of a step, at most: to those that follow gradients are nothing new, as they are to the second."""

_STEPS = 10_000
"""That a schedule is told of a run that ends with its stages. No rehearsal has as many."""

_AS_WIDE = {"16-mixed": "bf16-mixed", "16": "bf16-mixed"}
"""Lightning refuses float16 on the CPU, for its scaler of gradients."""


def rehearsal_trainer(cli: ProfilerCLI, world: FakeWorld) -> Trainer:
    """One that does of what the user's does what a step on one device depends on.

    Raises:
        UsageError: the options do not go together.
    """
    given = vars(cli.config[cli.verb].trainer)
    check_trainer_options({**given, "accelerator": "auto"}, cli.verb)
    precision = str(given["precision"] or "32-true")
    kept = {name: given[name] for name in KEPT if given[name] is not None}
    kept["accumulate_grad_batches"] = min(_accumulated(cli), _BATCHES)
    off = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    try:
        return Trainer(
            accelerator="cpu",
            strategy=FakeStrategy(world),
            precision=_AS_WIDE.get(precision, precision),  # type: ignore[arg-type]
            max_epochs=given["max_epochs"],
            max_steps=_STEPS if given["max_epochs"] == given["max_steps"] == -1 else given["max_steps"],
            logger=False if given["logger"] is False else SilentLogger(),
            limit_val_batches=0 if cli.verb == "fit" else None,
            **dict.fromkeys(off, False),  # type: ignore[arg-type]
            **kept,
        )
    except OPTION_ERRORS as error:
        raise trainer_error(error, given) from error


def _accumulated(cli: ProfilerCLI) -> int:
    """Batches of a step."""
    return int(cli.config[cli.verb].trainer.accumulate_grad_batches or 1)


def as_asked(cli: ProfilerCLI, rehearsed: Mapping[str, Work], kept_otherwise: bool) -> dict[str, Work]:
    """The work of the run's phases from what was ``rehearsed``: of all batches of a step, in the run's own dtype.

    ``kept_otherwise``: what is kept for backward is the choice of a compiler, or of kernels that are not the CPU's.
    """
    narrow = "float16" if full_name(cli.config[cli.verb].trainer.precision) in _AS_WIDE else "bfloat16"
    times = max(_accumulated(cli) / _BATCHES, 1.0)

    def of_batches(work: Work) -> Work:
        flops = work.flops and {narrow if of == "bfloat16" else of: round(n * times) for of, n in work.flops.items()}
        moved = None if work.bytes is None or kept_otherwise else round(work.bytes * times)
        return replace(work, flops=flops, bytes=moved)

    return {of: of_batches(work) if of in ("forward", "backward") else work for of, work in rehearsed.items()}
