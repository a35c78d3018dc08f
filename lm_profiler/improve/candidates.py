"""The options of ``improve``, and the changes that it tries, with the most that each could save.

The most that a change could save is read from the first setting's run, from the terms of its waterfall or else from its
phases: a change saves no more time than the part that it changes takes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from lm_profiler.analysis.remedies.catalogue import ATTENTION, WORKERS, tried_on
from lm_profiler.analysis.remedies.remedy import BY_WORKERS, OTHER_BATCH, UNKNOWN, Candidate, FirstRun, name_of
from lm_profiler.record.calls import check_folder_name, config_file
from lm_profiler.record.entry import Entry
from lm_profiler.usage_error import UsageError

# The most values of ``--try``. A process checks the call of each before anything runs: 100 take half a minute.
MOST_VALUES = 100

_OPTION = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*")
_TIME = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(s|m|min|h)?\s*")
_SECONDS = {None: 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_SET_BY_IMPROVE = ("name", "log_dir", "config")
_MEASURING_OPTIONS = ("stages", "actions", "memory", "trace", "numerics", "check_memory")


@dataclass(frozen=True, kw_only=True)
class ImproveRequest:
    """Try changes that may make a training step faster, prove which do, and write the best setting to a file.

    Each change is compared with the setting without it, in fresh processes that alternate, until it is clear which is
    faster. A winner stays, and the rest is tried on top of it. The same command resumes an interrupted search.

    Args:
        file: YAML with any of these options.
        config: Config of the run to improve, or the name of one that comes with the package, such as demo.
        try_: Values of an option to try too, as in --try.data.num_workers 0,2,4.
        only: Try only the changes of --try.
        budget: Time for all runs, such as 90s, 10m or 1h.
        global_batch: keep the samples of a step when the batch changes, or leave them free.
        accept_numerics: Accept a faster setting even if its numbers are off.
        name: Name of the improvement; if not given, the config's name and _improve.
        log_dir: Folder of all runs.
        format: terminal, or json, with progress on stderr.
        options: Options of fit, for every run.
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
            of = self.file or (self.config and config_file(self.config))
            object.__setattr__(self, "name", f"{Path(of).stem}_improve" if of else "improve")
        check_folder_name(self.name, self.log_dir)
        _ = self.budget_s  # raises for a text that is no time
        if self.only and not self.try_:
            raise UsageError("only: expected changes to try, given none; add, say, --try.data.num_workers 0,2")
        count = sum(map(len, self.try_.values()))
        if count > MOST_VALUES:
            raise UsageError(f"try: expected at most {MOST_VALUES} values of all options together, given {count:,}")
        for name, values in self.try_.items():
            if not _OPTION.fullmatch(name):
                raise UsageError(f"try: expected an option such as data.num_workers, given {name[:100]!r}")
            if name in _SET_BY_IMPROVE or name.split(".")[0] in _MEASURING_OPTIONS:
                raise UsageError(f"try.{name}: expected an option of the training, given one of how it is measured")
            if len(set(values)) < len(values):
                raise UsageError(f"try.{name}: expected each value once, given {', '.join(values)}")

    @property
    def budget_s(self) -> float:
        return seconds_of(self.budget)

    @property
    def folder(self) -> Path:
        return Path(self.log_dir, self.name)


def seconds_of(budget: str) -> float:
    """Return the seconds of a ``budget`` such as ``10m``, or raise UsageError."""
    told = _TIME.fullmatch(budget)
    seconds = float(told[1]) * _SECONDS[told[2]] if told else 0.0
    if seconds <= 0.0:
        raise UsageError(f"budget: expected a time such as 90s, 10m or 1h, given {budget[:100]!r}")
    return seconds


def candidates(look: Entry, free_batch: bool) -> list[Candidate]:
    """Return the changes that the run of ``look`` does not have yet, with refused ones marked.

    ``free_batch`` is whether the number of samples in a step may change.
    """
    assert look.record is not None
    open_to_it = tried_on(FirstRun(look, look.record))
    return [one for one in open_to_it if one.refused or free_batch or one.may_change != OTHER_BATCH]


def asked_for(
    values: Mapping[str, Sequence[str]], known: Sequence[Candidate], option: Callable[[str], Any]
) -> list[Candidate]:
    """Return a candidate for each of the ``values`` that a user asked for, except those that the run already has.

    A ``known`` candidate with the same options is taken unchanged, with its ceiling. Another value of an option in
    ``known`` takes group and ``may_change`` from there. Those of workers are known even if no candidate tries them.
    ``option`` returns the run's value of an option.
    """
    alike: dict[str, tuple[str, str | None]] = dict.fromkeys(WORKERS, ("num_workers", BY_WORKERS))
    alike |= {name: (one.group, one.may_change) for one in known for name in one.options}
    alike[ATTENTION] = (ATTENTION, UNKNOWN)  # the user's own attention function may compute anything
    wished = []
    for name, text in ((name, text) for name, texts in values.items() for text in texts):
        compiled = name.removesuffix("_mode")  # a mode has an effect only with compilation
        needs = {compiled: "true"} if name.endswith(".compile_mode") and option(compiled) is False else {}
        options = {**needs, name: text}
        if not all(_same(option(each), value) for each, value in options.items()):
            same = next((one for one in known if one.options == options), None)
            first = next(iter(options))
            group, may_change = alike.get(first, (first, UNKNOWN))
            wished.append(same or Candidate(name_of(options), options, group, may_change=may_change))
    return wished


def _same(value: Any, text: str) -> bool:
    spelled = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return spelled == text


def worth_it(known: Sequence[Candidate], step_s: float | None, margin: float) -> list[Candidate]:
    """Return the candidates; those that could not save ``margin`` of the step are refused."""
    least_s, why = margin * (step_s or 0.0), f"less than {margin:.0%} of the step could be saved"
    # A candidate without a ceiling is tried: nothing is known against it.
    return [
        replace(one, refused=why) if not one.refused and one.ceiling_s is not None and one.ceiling_s < least_s else one
        for one in known
    ]
