"""A process of its own, which is asked about a module and has no device, no compiler and no other ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any


def surroundings() -> dict[str, str]:
    """Its environment."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    return {**kept, "CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}


def answer(find: Callable[[], Any]) -> None:
    """In that process: write what ``find`` returns to stdout, as JSON. Whatever is printed meanwhile goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    told = find()
    with answers:
        json.dump(told, answers)
