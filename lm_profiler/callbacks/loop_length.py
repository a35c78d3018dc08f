"""Computes how many steps a Trainer's loop has left, as far as its limits determine it."""

from __future__ import annotations

import math

from lightning.pytorch import Trainer

from lm_profiler.record.run_record import Verb


def fewest_steps_left(trainer: Trainer, verb: Verb) -> float:
    """Return how many steps the loop of ``verb``, which begins now, has at least; infinity if nothing limits it.

    An epoch of unknown length counts as one step. What may end the loop early (a callback, ``max_time``) is ignored.
    """
    if verb == "fit":
        return min(_steps_until_max_steps(trainer), _steps_until_max_epochs(trainer))
    if verb == "validate":
        batches = trainer.num_val_batches
    elif verb == "test":
        batches = trainer.num_test_batches
    else:
        batches = trainer.num_predict_batches
    return sum(count for count in batches if math.isfinite(count))


def _steps_until_max_steps(trainer: Trainer) -> float:
    """Return how many steps are left until ``max_steps`` of the Trainer; infinity if it has no such limit."""
    if trainer.max_steps == -1:
        return math.inf
    # Lightning counts the steps of all optimizers.
    optimizer_steps = trainer.max_steps - trainer.global_step
    return optimizer_steps // max(len(trainer.optimizers), 1)


def _steps_until_max_epochs(trainer: Trainer) -> float:
    """Return the optimizer steps until the Trainer's ``max_epochs``; infinite without that limit."""
    if trainer.max_epochs in (None, -1):
        return math.inf
    assert trainer.max_epochs is not None
    epochs = trainer.max_epochs - trainer.current_epoch
    batches = trainer.num_training_batches
    if not math.isfinite(batches):
        return epochs
    steps_per_epoch = math.ceil(batches / trainer.accumulate_grad_batches)
    steps_of_resumed_epoch = (
        trainer.fit_loop.epoch_loop.batch_progress.current.ready
        // trainer.accumulate_grad_batches
    )
    return epochs * steps_per_epoch - steps_of_resumed_epoch
