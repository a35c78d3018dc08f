"""A run rehearsed on fake tensors: what each phase of its step would need, without needing it.

In a process of its own, since it replaces code of torch: ``ask`` begins one, ``told`` waits for what it finds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import getfile
from traceback import walk_tb
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from lm_profiler.analysis.plan.capacities import ANY_GPU, largest_that_fits
from lm_profiler.analysis.plan.planned import SETTINGS, Planned
from lm_profiler.callbacks.outcome.facts import model_facts
from lm_profiler.callbacks.rehearsal import FakeStrategy, Rehearsal, Size, Sizes
from lm_profiler.cli.asked import Asked, NoAnswer, Unfit
from lm_profiler.cli.call import Call
from lm_profiler.cli.checks import check_together
from lm_profiler.cli.quiet import quiet
from lm_profiler.cli.trainer_cli import ProfilerCLI
from lm_profiler.cli.workers.stand_in import SplitOverDevices, as_asked, rehearsal_trainer
from lm_profiler.measure.boundary import said
from lm_profiler.measure.counts.recompiles import is_compiled_in
from lm_profiler.measure.device.nvml import compute_capability
from lm_profiler.measure.fake.live import Uncounted
from lm_profiler.measure.fake.unknown import TAKEN_FOR_ONE, DependsOnValues
from lm_profiler.measure.fake.untouched import WouldChange, leave_files
from lm_profiler.measure.fake.world import FakeWorld, NotStrided, prepare
from lm_profiler.record.precision import full_name
from lm_profiler.training import AttentionAlone, FakeTokens, LanguageModel
from lm_profiler.usage_error import UsageError

_NO_DATA = "its data is not allocated yet"
"""What torch says where a kernel looks for values by itself."""

LIMIT_S = 120.0
"""For all sizes of one call."""

_FOR_STEPS = 0.05
"""Share of the limit for steps of one size, where these may differ."""

_NOBODYS = (*(os.path.dirname(getfile(each)) for each in (FakeWorld, FakeStrategy, Call, os)), "<frozen ")  # noqa: PTH120
"""Where an error may come up without being made there: our fake tensors and loop, Python's own modules."""


@dataclass
class LargestSize:
    """Rehearses the run as it is, then more or less of ``what`` its batch is made of, on a device of ``has`` bytes."""

    what: str
    has: int
    samples: Callable[[], int | None]
    context: int | None
    largest: int | None = None

    def steps(self) -> Sizes:
        """The sizes, one after the other."""
        peak = yield Size()
        begin = {"batch": self.samples(), "context": self.context}.get(self.what)
        if not begin:
            return
        unit = _UNIT if self.what == "context" and begin % _UNIT == 0 else 1
        search = largest_that_fits(begin // unit, peak, self.has)
        try:
            n = next(search)
            while True:
                n = search.send((yield Size(**{self.what: n * unit / begin})))
        except StopIteration as done:
            self.largest = done.value * unit


_UNIT = 64
"""Contexts are told to a multiple of it, if they are one."""


def rehearse(cli: ProfilerCLI, gpu: tuple[int, int] | None, what: str, has: int, enough_s: float = 1.0) -> Planned:
    """What the run of ``cli`` would need on a ``gpu`` of that compute capability, or on the CPU (None).

    And the largest ``what`` (``batch`` or ``context``) on a device that ``has`` so many bytes.

    Raises:
        UsageError: a wrong call.
        Exception: whatever the module raises, also where fake tensors are not enough for it.
    """
    world = FakeWorld(gpu)
    trainer = cli.trainer = rehearsal_trainer(cli, world)
    data = cli.datamodule = cli.build("data")
    with world.inside():
        model = cli.model = cli.build("model")
    check_together(model, data, trainer, cli.verb)
    strategy, context = trainer.strategy, None
    assert isinstance(strategy, FakeStrategy)
    if isinstance(data, FakeTokens):  # of a batch that cannot fit one row is made
        context, strategy.rows, data.batch_size = data.context_length, data.batch_size, 1
    if isinstance(model, AttentionAlone):  # whose batches are parameters: another size is another module
        what = "nothing"
    search = LargestSize(what, has, lambda: strategy.samples, context)
    alike = isinstance(model, (LanguageModel, AttentionAlone))
    rehearsal, unknown = Rehearsal(world, search.steps(), alike, enough_s), None
    trainer.callbacks.append(rehearsal)  # type: ignore[attr-defined]
    kept = {"return_predictions": False} if cli.verb == "predict" else {}
    try:
        getattr(trainer, cli.verb)(model, datamodule=data, **kept)
    except Exception as error:  # of another size, or once all has been trained, as where it keeps its weights
        first = rehearsal.failed if isinstance(rehearsal.failed, Exception) else error
        if not rehearsal.known:
            raise first from first.__cause__
        unknown = _reason(first)
    if not rehearsal.seen:
        raise UsageError("data: expected batches for two steps, given fewer")
    step, facts = max(rehearsal.seen, key=lambda step: step.peak), model_facts(trainer)
    compiled = bool(getattr(model, "compile_model", False)) or is_compiled_in(model)
    given = full_name(cli.config[cli.verb].trainer.precision)
    return Planned(
        peaks=step.peaks,
        causes=step.causes,
        batch=strategy.samples,
        context=context,
        largest=search.largest,
        compiled=compiled,
        work=as_asked(cli, step.work.by_phase, gpu is not None or compiled),
        float32=step.work.float32,
        settings={name: value for name in SETTINGS if (value := _setting(cli, name)) is not None},
        held=step.held,
        model=facts.model_copy(update={"precision": given, "compiled": compiled}),
        largest_unknown=None if search.largest is not None else unknown,
        steps=[step.peak for step in rehearsal.seen],
        reserved=rehearsal.seen[-1].reserved,
        taken_for_one=[*TAKEN_FOR_ONE],
        buckets=rehearsal.bucket_bytes,
        workspaces=world.live.workspaces,
    )


def _setting(cli: ProfilerCLI, name: str) -> Any:
    """Of a part of the run; None where that has none of this name, or means something of its own by it."""
    part, _, option = name.partition(".")
    if part == "model" and not isinstance(cli.model, (LanguageModel, AttentionAlone)):
        return None
    said = cli.config[cli.verb].get(part) or {}
    return (said.get("init_args") or said).get(option)


@dataclass(frozen=True)
class Unplanned:
    """Why a run cannot be planned; ``wrong`` where the call is to blame, which no run would take either."""

    reason: str
    wrong: bool = False


def gpu_of(device: torch.device) -> tuple[int, int] | None:
    """What ``ask`` is told of ``device``: the compute capability of a GPU; None is the CPU."""
    return None if device.type == "cpu" else compute_capability(device) or ANY_GPU


def ask(
    call: Sequence[str] | ProfilerCLI,
    gpu: tuple[int, int] | None,
    what: str = "nothing",
    has: int = 0,
    limit_s: float = LIMIT_S,
    fresh: bool = False,
) -> Asked[Planned | Unplanned]:
    """Begin to rehearse ``call``, the verb first, or what was read of it, in a process of its own; see ``rehearse``."""
    return Asked(partial(_planned, call, gpu, what, has, _FOR_STEPS * limit_s), limit_s, fresh)


def told(asked: Asked[Planned | Unplanned]) -> Planned | Unplanned:
    """What has been found, once it has; also where the process ended without an answer, or took too long."""
    try:
        return asked.answer()
    except NoAnswer as error:
        return Unplanned(str(error))


def _planned(
    call: Sequence[str] | ProfilerCLI, gpu: tuple[int, int] | None, what: str, has: int, enough_s: float
) -> Planned | Unplanned:
    try:
        torch.ones((), requires_grad=True).backward()
    except RuntimeError:
        raise Unfit from None  # a copy of a process that has gone backward: torch's note "Autograd and Fork"
    leave_files()
    prepare(gpu)
    with quiet():
        try:
            cli = call if isinstance(call, ProfilerCLI) else ProfilerCLI(Call(call))
            return rehearse(cli, gpu, what, has, enough_s)
        except UsageError as error:
            return Unplanned(str(error), wrong=True)
        except Exception as error:
            return Unplanned(_reason(error))


def _reason(error: Exception) -> str:
    """Why it cannot be planned, and where in somebody's code."""
    while isinstance(error.__cause__, Exception):  # around it the parser wraps accounts of its own
        error = error.__cause__
    files = [(f.f_code.co_filename, f.f_lineno) for f, _ in walk_tb(error.__traceback__)]
    theirs = [(name, line) for name, line in files if not name.startswith(_NOBODYS) and "site-packages" not in name]
    where = f" ({os.path.basename(theirs[-1][0])}, line {theirs[-1][1]})" if theirs else ""  # noqa: PTH119
    depends = isinstance(error, (DependsOnValues, DataDependentOutputException, DynamicOutputShapeException))
    if depends or _NO_DATA in str(error):
        return f"what it does depends on values, which are not known without running it{where}"
    if isinstance(error, WouldChange):
        return f"{error}{where}"
    if isinstance(error, (NotStrided, SplitOverDevices, Uncounted)):
        return str(error)
    return f"{said(error)}{where}"
