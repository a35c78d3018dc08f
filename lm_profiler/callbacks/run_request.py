"""Reads what ``lm_profiler run`` requests from the processes of a program, and decides which loop is profiled."""

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
    """The request to profile a program; each part may be missing."""

    # options of ``profiling_callbacks``
    options: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    # the number of the Trainer to profile; None for the first
    trainer: int | None = None
    claims: Path | None = None  # a folder that the processes of this node share


def parse_request(text: str) -> RunRequest:
    """Return the request in ``text``: a JSON object, or ``1`` for a request without any part.

    Raises:
        UsageError: it is neither.
        ValueError: it is not valid JSON.
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
    """Claim the run for ``owner``; return whether it belongs to ``owner``, because no other owner was first.

    Raises:
        OSError: the folder does not exist.
    """
    link = folder / CLAIMED
    with suppress(FileExistsError):
        link.symlink_to(owner)  # creating a link is atomic
    return link.readlink() == Path(owner)


def release_claim(folder: Path, owner: str) -> None:
    """Take back the claim of ``owner``, if it has one, so that another owner can claim the run."""
    link = folder / CLAIMED
    # It raises OSError without the link: another rank has removed it, or this is another node.
    with suppress(OSError):
        if link.readlink() == Path(owner):
            link.unlink()
