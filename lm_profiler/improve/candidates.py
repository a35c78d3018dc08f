"""The options of ``improve``, and the changes that it tries, with the most that each could save.

A change saves at most the time of the part that it changes. This ceiling is read from the first setting's run: from the
terms of its waterfall, or else from its phases.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from lm_profiler.analysis.remedies.catalogue import ATTENTION, WORKERS, candidates_for
from lm_profiler.analysis.remedies.remedy import (
    BY_WORKERS,
    OTHER_BATCH,
    UNKNOWN,
    Candidate,
    FirstRun,
    name_of,
)
from lm_profiler.record.calls import check_folder_name, config_file
from lm_profiler.record.entry import Entry
from lm_profiler.usage_error import UsageError

# The most values of ``--try``. Before anything runs, a process checks the call of each value: 100 take half a minute.
MOST_VALUES = 100

_OPTION = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*")
_TIME = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(s|m|min|h)?\s*")
_SECONDS = {None: 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_SET_BY_IMPROVE = ("name", "log_dir", "config")
_MEASURING_OPTIONS = (
    "stages",
    "actions",
    "memory",
    "trace",
    "numerics",
    "check_memory",
)


@dataclass(frozen=True, kw_only=True)
class ImproveRequest:
    """Try changes that may make a training step faster, prove which do, and write the best setting to a file.

    Each change is compared with the setting without it, in fresh processes that alternate, until it is clear which is
    faster. An accepted change is kept, and the others are tried on top of it. The same command resumes an interrupted
    search.

    Args:
        file: YAML with any of these options.
        config: Config of the run to improve, or the name of one that comes with the package, such as demo.
        try_: Further values of an option to try, as in --try.data.num_workers 0,2,4.
        only: Try only the changes that --try names.
        budget: Time for all runs, such as 90s, 10m or 1h.
        global_batch: keep accepts only changes with the same number of samples per step; free allows any number.
        accept_numerics: Accept a faster setting even if its losses or gradients differ.
        name: Name of the search; if not given, the config's name followed by _improve.
        log_dir: Folder of all runs.
        format: terminal, or json, with progress on stderr.
        options: Options of fit for every run.
        command: The whole call.
    """

    WORDS: ClassVar[str] = "file"
    FILE: ClassVar[str] = "file"

    file: str | None = field(default=None, compare=False)
    config: str | None = None
    try_: Mapping[str, Sequence[str]] = field(default_factory=dict)
    only: bool = False
    budget: str = "10m"
    global_batch: Literal["keep", "free"] = "keep"
    accept_numerics: bool = False
    name: str = ""
    log_dir: str = "logs"
    format: Literal["terminal", "json"] = field(default="terminal", compare=False)
    options: Sequence[str] = ()
    command: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", self._default_name())
        check_folder_name(self.name, self.log_dir)
        _ = self.budget_s  # raises UsageError if the text is not a time
        if self.only and not self.try_:
            raise UsageError(
                "only: expected changes to try, given none; add for example --try.data.num_workers 0,2"
            )
        count = sum(len(values) for values in self.try_.values())
        if count > MOST_VALUES:
            raise UsageError(
                f"try: expected at most {MOST_VALUES} values of all options together, given {count:,}"
            )
        for option, values in self.try_.items():
            _check_values(option, values)

    def _default_name(self) -> str:
        """Return the name of the search if the user gives none: after its file, else its config."""
        if self.file:
            return f"{Path(self.file).stem}_improve"
        if self.config:
            return f"{Path(config_file(self.config)).stem}_improve"
        return "improve"

    @property
    def budget_s(self) -> float:
        return budget_seconds(self.budget)

    @property
    def folder(self) -> Path:
        return Path(self.log_dir, self.name)


def _check_values(option: str, values: Sequence[str]) -> None:
    """Raise UsageError if ``values`` of ``option`` cannot be tried."""
    if not _OPTION.fullmatch(option):
        raise UsageError(
            f"try: expected an option such as data.num_workers, given {option[:100]!r}"
        )
    section = option.split(".")[0]
    if option in _SET_BY_IMPROVE or section in _MEASURING_OPTIONS:
        raise UsageError(
            f"try.{option}: expected an option of the training, given an option of the measurement"
        )
    if len(set(values)) < len(values):
        raise UsageError(
            f"try.{option}: expected each value once, given {', '.join(values)}"
        )


def budget_seconds(budget: str) -> float:
    """Return the seconds of a ``budget`` such as ``10m``, or raise UsageError."""
    seconds = 0.0
    match = _TIME.fullmatch(budget)
    if match is not None:
        number, unit = match.groups()
        seconds = float(number) * _SECONDS[unit]
    if seconds <= 0.0:
        raise UsageError(
            f"budget: expected a time such as 90s, 10m or 1h, given {budget[:100]!r}"
        )
    return seconds


def open_candidates(baseline: Entry, free_batch: bool) -> list[Candidate]:
    """Return the changes worth trying on the run of ``baseline``. Candidates that cannot work have ``refused`` set.

    ``free_batch`` is whether the number of samples in a step may change.
    """
    assert baseline.record is not None
    candidates = []
    for candidate in candidates_for(FirstRun(baseline, baseline.record)):
        changes_batch = candidate.may_change == OTHER_BATCH
        if candidate.refused or free_batch or not changes_batch:
            candidates.append(candidate)
    return candidates


def requested_candidates(
    requested: Mapping[str, Sequence[str]],
    offered: Sequence[Candidate],
    option: Callable[[str], Any],
) -> list[Candidate]:
    """Return a candidate for each value that a user ``requested`` for an option, except the values that the run has.

    If an ``offered`` candidate has the same options, it is used with its ceiling. Another value of such an option gets
    the group and the ``may_change`` of the offered candidate. For the number of workers these are known even if no
    candidate is offered. ``option`` returns the run's value of an option.
    """
    # option → group and ``may_change``
    templates: dict[str, tuple[str, str | None]] = {}
    for workers_option in WORKERS:
        templates[workers_option] = ("num_workers", BY_WORKERS)
    for candidate in offered:
        for name in candidate.options:
            templates[name] = (candidate.group, candidate.may_change)
    # the user's own attention function may compute anything
    templates[ATTENTION] = (ATTENTION, UNKNOWN)

    candidates = []
    for name, texts in requested.items():
        for text in texts:
            options = _needed_options(name, option) | {name: text}
            run_has_these_values = all(
                _is_text_of(new_text, option(path))
                for path, new_text in options.items()
            )
            if run_has_these_values:
                continue
            equal_candidates = [
                candidate for candidate in offered if candidate.options == options
            ]
            if equal_candidates:
                candidates.append(equal_candidates[0])
                continue
            main_option = next(iter(options))
            group, may_change = templates.get(main_option, (main_option, UNKNOWN))
            candidates.append(
                Candidate(name_of(options), options, group, may_change=may_change)
            )
    return candidates


def _needed_options(name: str, option: Callable[[str], Any]) -> dict[str, str]:
    """Return the options without which ``name`` has no effect: a mode of torch.compile needs compilation."""
    compile_option = name.removesuffix("_mode")
    if name.endswith(".compile_mode") and option(compile_option) is False:
        return {compile_option: "true"}
    return {}


def _is_text_of(text: str, value: Any) -> bool:
    """Return whether ``text`` is how a command line spells ``value``."""
    if value is None:
        return text == "null"
    if isinstance(value, bool):
        return text == str(value).lower()
    return text == str(value)


def refuse_small(
    candidates: Sequence[Candidate], step_s: float | None, margin: float
) -> list[Candidate]:
    """Return the candidates; those that could not save ``margin`` of the step are refused."""
    least_s = margin * (step_s or 0.0)
    reason = f"less than {margin:.0%} of the step could be saved"
    checked = []
    for candidate in candidates:
        # A candidate without a known ceiling is tried.
        saves_too_little = (
            candidate.ceiling_s is not None and candidate.ceiling_s < least_s
        )
        if saves_too_little and not candidate.refused:
            candidate = replace(candidate, refused=reason)
        checked.append(candidate)
    return checked
