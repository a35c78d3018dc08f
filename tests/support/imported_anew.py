"""Lets a fork of a process that has loaded everything import our modules once more, as a fresh interpreter would."""

import sys

from lightning.pytorch.strategies import StrategyRegistry


def forget_our_modules() -> None:
    for name, entry in list(StrategyRegistry.items()):
        if _is_ours(entry["strategy"].__module__):
            StrategyRegistry.remove(name)
    for name in list(sys.modules):
        if _is_ours(name):
            del sys.modules[name]


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "lm_profiler"
