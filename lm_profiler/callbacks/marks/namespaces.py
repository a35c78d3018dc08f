"""Recognises Lightning's classes by name, under both of its package names.

``lightning.pytorch`` and ``pytorch_lightning`` each define every class, and a Trainer, a module or an exception may
come from either. So other code never compares these classes by identity, but calls the functions here.
"""

from __future__ import annotations

from types import FrameType
from typing import Any, cast

from lm_profiler.record.run_record import Verb

_PACKAGES = ("lightning", "lightning_fabric", "pytorch_lightning")

# the method of a LightningModule that the Trainer calls with each batch, for each verb of the Trainer
STEP_METHODS: dict[Verb, str] = {
    "fit": "training_step",
    "validate": "validation_step",
    "test": "test_step",
    "predict": "predict_step",
}


def verb_of(trainer: Any) -> Verb:
    return cast(Verb, trainer.state.fn.value)


def is_a(thing: object, name: str) -> bool:
    """Return whether Lightning's class ``name`` is the class of ``thing`` or one of its bases."""
    return any(_is_lightnings(kind, name) for kind in type(thing).__mro__)


def is_exactly(thing: object, name: str) -> bool:
    """Return whether the class of ``thing`` is Lightning's class ``name`` itself, not a class derived from it."""
    return _is_lightnings(type(thing), name)


def lightning_base_of(thing: object) -> str:
    """Return the name of the Lightning class that the class of ``thing`` is or derives from; empty for none."""
    for kind in type(thing).__mro__:
        if _is_lightnings(kind, kind.__name__):
            return kind.__name__
    return ""


def trainer_of(module: object) -> Any:
    """Return the Trainer of a LightningModule; None if it has none, and for any other module."""
    if not is_a(module, "LightningModule"):
        return None
    try:
        return getattr(module, "trainer", None)
    except RuntimeError:  # what Lightning raises for a module without a Trainer
        return None


def overrides(thing: object, hook: str) -> bool:
    """Return whether ``thing`` or its class overrides the empty ``hook`` that Lightning defines."""
    if hook in getattr(thing, "__dict__", ()):
        # such as model.train_dataloader = lambda: loader, which Lightning calls too
        return True
    definitions = [kind for kind in type(thing).__mro__ if hook in vars(kind)]
    return len(definitions) > 1  # one of them is Lightning's


def is_fetch(frame: FrameType) -> bool:
    """Return whether ``frame`` runs the function in which Lightning's loops ask for a batch."""
    module_name = frame.f_globals.get("__name__", "")
    is_next = frame.f_code.co_name == "__next__"
    return is_next and module_name.endswith(".loops.fetchers")


def _is_lightnings(kind: type, name: str) -> bool:
    package = kind.__module__.partition(".")[0]
    return kind.__name__ == name and package in _PACKAGES
