"""Keeps torch.compile away from our own functions that run while a compiled module or function of the program runs."""

from __future__ import annotations

from typing import Any

from lm_profiler.torch_names import (
    FRAME_ACTION,
    FRAME_STRATEGY,
    SET_FRAME_STRATEGY,
    NameMissing,
)


def keep_uncompiled(function: Any, with_callees: bool = True) -> None:
    """Keep torch.compile from compiling ``function``, and what it calls, too, unless not ``with_callees``.

    Otherwise it would compile what it finds there, and with ``fullgraph=True`` raise an error in the program.
    """
    try:
        actions = FRAME_ACTION.find()
        strategy_of = FRAME_STRATEGY.find()
        set_strategy = SET_FRAME_STRATEGY.find()
    except NameMissing:
        return
    for_callees = actions.SKIP if with_callees else actions.DEFAULT
    set_strategy(function.__code__, strategy_of(actions.SKIP, for_callees))
