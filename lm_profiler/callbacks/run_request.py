"""What ``lm_profiler run`` asks of the processes of a program, and which of their loops is the one to profile."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lm_profiler.external_callbacks import CLAIMED
from lm_profiler.external_loops import VARIABLE
from lm_profiler.usage_error import expect


@dataclass(frozen=True)
class RunRequest:
    """The request, each part of which may be missing."""

    options: dict[str, Any] = field(default_factory=dict)  # of ``profiling_callbacks``
    command: str = ""
    # the number of the Trainer to profile; None for the first
    trainer: int | None = None
    claims: Path | None = None  # a folder that the processes of this node share


def parse_request(text: str) -> RunRequest:
    """Return the request that ``text`` is: a JSON object, or ``1`` for one without any part.

    Raises:
        UsageError: it is neither.
        ValueError: it is no JSON.
    """
    has_no_details = text.strip() == "1"
    is_valid = has_no_details or text.lstrip().startswith("{")
    expect(
        is_valid, VARIABLE, "1, 0 or the JSON object that `lm_profiler run` sets", text
    )
    details: dict[str, Any] = {}
    if not has_no_details:
        details = json.loads(text)
    claims: Path | None = None
    if details.get("claims") is not None:
        claims = Path(details["claims"])
    return RunRequest(
        options=details.get("options", {}),
        command=details.get("command", ""),
        trainer=details.get("trainer"),
        claims=claims,
    )


def claim(folder: Path, owner: str) -> bool:
    """Return whether the run belongs to ``owner``, who is the first to ask; raises OSError without the folder."""
    link = folder / CLAIMED
    with suppress(FileExistsError):
        link.symlink_to(owner)  # creating a link is atomic
    return link.readlink() == Path(owner)
