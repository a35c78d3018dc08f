"""A run rehearsed on fake tensors: what each phase of its step would need, without needing it.

In a process of its own, since it replaces code of torch: ``ask`` begins one, ``told`` waits for what it finds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from traceback import walk_tb
from typing import Any

from lightning.pytorch import Trainer

from lm_profiler.analysis.hardware.floors import Work
from lm_profiler.analysis.plan.planned import SETTINGS, Planned, largest_that_fits
from lm_profiler.callbacks.rehearsal import FakeStrategy, Rehearsal, RehearsedWork, Size, Sizes
from lm_profiler.cli.asked import Asked, NoAnswer
from lm_profiler.cli.call import Call
from lm_profiler.cli.checks import check_together
from lm_profiler.cli.quiet import quiet
from lm_profiler.cli.trainer_cli import ProfilerCLI
from lm_profiler.measure.boundary import said
from lm_profiler.measure.counts.recompiles import is_compiled_in
from lm_profiler.measure.fake.world import FakeWorld, prepare
from lm_profiler.training import FakeTokens, LanguageModel
from lm_profiler.usage_error import UsageError

_KEPT = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "detect_anomaly")
"""What of the Trainer's options a step on one device depends on, beside its precision."""

_AS_WIDE = {"16-mixed": "bf16-mixed", "16": "bf16-mixed"}
"""Lightning refuses float16 on the CPU, for its scaler of gradients."""

LIMIT_S = 120.0
"""For all sizes of one call."""


class RehearsalCLI(ProfilerCLI):
    """Reads a call of ``fit``, and builds it of fake tensors."""

    narrow: str | None = None
    """The dtype of which bfloat16 takes the place."""

    def __init__(self, call: Call, world: FakeWorld) -> None:
        self.world = world
        super().__init__(call)

    def _begin(self, trainer: Trainer) -> None:
        """No folder."""

    def setting(self, name: str) -> Any:
        """Of a part of the run; None where that has none of this name, or means something of its own by it."""
        part, _, option = name.partition(".")
        if part == "model" and not isinstance(self.model, LanguageModel):
            return None
        said = self._get(self.config, part) or {}
        return (said.get("init_args") or said).get(option)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """One that does of the user's what a step on one device depends on."""
        given = self._get(self.config_init, "trainer")
        precision = str(given["precision"] or "32-true")
        self.narrow = "float16" if precision in _AS_WIDE else None
        off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        return Trainer(
            accelerator="cpu",
            strategy=FakeStrategy(self.world),
            precision=_AS_WIDE.get(precision, precision),  # type: ignore[arg-type]
            max_epochs=-1,
            limit_val_batches=0,
            **dict.fromkeys(off, False),  # type: ignore[arg-type]
            **{name: given[name] for name in _KEPT if given[name] is not None},
        )


@dataclass
class LargestSize:
    """Rehearses the run as it is, then other sizes of its batch: of the ``what`` there is, within ``room`` bytes."""

    what: str
    room: float
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
        search = largest_that_fits(begin // unit, peak, self.room)
        try:
            n = next(search)
            while True:
                n = search.send((yield Size(**{self.what: n * unit / begin})))
        except StopIteration as done:
            self.largest = done.value * unit


_UNIT = 64
"""Contexts are told to a multiple of it, if they are one."""


def rehearse(call: Call, gpu: bool, what: str, room: float) -> Planned:
    """What ``call`` would need; and the largest ``what`` (``batch`` or ``context``) within ``room`` bytes.

    Raises:
        UsageError: a wrong call.
        Exception: whatever the module raises, also where fake tensors are not enough for it.
    """
    world = FakeWorld(gpu)
    cli = RehearsalCLI(call, world)
    trainer = cli.trainer = cli._build_trainer()
    data = cli.datamodule = cli.build("data")
    with world.inside():
        model = cli.model = cli.build("model")
    check_together(model, data, trainer, "fit")
    context = data.context_length if isinstance(data, FakeTokens) else None
    search = LargestSize(what, room, lambda: rehearsal.samples, context)
    rehearsal = Rehearsal(world, search.steps())
    trainer.callbacks.append(rehearsal)  # type: ignore[attr-defined]
    trainer.fit(model, datamodule=data)
    step = rehearsal.step
    if step is None:
        raise UsageError("data: expected batches for two steps, given fewer")
    compiled = bool(getattr(model, "compile_model", False)) or is_compiled_in(model)
    work = rehearsal.work or RehearsedWork({}, "unknown")
    return Planned(
        step.peaks,
        step.causes,
        rehearsal.samples,
        context,
        search.largest,
        compiled,
        {phase: _as_asked(phase, of, cli.narrow, compiled) for phase, of in work.by_phase.items()},
        work.float32,
        {name: value for name in SETTINGS if (value := cli.setting(name)) is not None},
    )


def _as_asked(phase: str, work: Work, narrow: str | None, compiled: bool) -> Work:
    """``work`` of the run in the place of that of its rehearsal."""
    if work.flops is not None:
        named = {"bfloat16": narrow or "bfloat16"}
        work = replace(work, flops={named.get(dtype, dtype): count for dtype, count in work.flops.items()})
    keeps = compiled and phase in ("forward", "backward")  # a compiler chooses what is kept for backward
    return replace(work, bytes=None) if keeps else work


@dataclass(frozen=True)
class Unplanned:
    """Why a run cannot be planned; ``wrong`` where the call is to blame, which no run would take either."""

    reason: str
    wrong: bool = False


def ask(
    call: Sequence[str], gpu: bool, what: str = "nothing", room: float = 0.0, limit_s: float = LIMIT_S
) -> Asked[Planned | Unplanned]:
    """Begin to rehearse ``call``, the verb first, in a process of its own; see ``rehearse``."""
    return Asked(partial(_planned, tuple(call), gpu, what, room), limit_s)


def told(asked: Asked[Planned | Unplanned]) -> Planned | Unplanned:
    """What has been found, once it has; also where the process ended without an answer, or took too long."""
    try:
        return asked.answer()
    except NoAnswer as error:
        return Unplanned(str(error))


def _planned(call: Sequence[str], gpu: bool, what: str, room: float) -> Planned | Unplanned:
    prepare(gpu)
    with quiet():
        try:
            return rehearse(Call(call), gpu, what, room)
        except UsageError as error:
            return Unplanned(str(error), wrong=True)
        except Exception as error:
            return Unplanned(_reason(error))


def _reason(error: Exception) -> str:
    """Why it cannot be planned, and where."""
    frames = [f for f, _ in walk_tb(error.__traceback__) if "site-packages" not in f.f_code.co_filename]
    where = f" ({os.path.basename(frames[-1].f_code.co_filename)}, line {frames[-1].f_lineno})" if frames else ""  # noqa: PTH119
    if type(error).__name__ in ("DataDependentOutputException", "DynamicOutputShapeException"):
        return f"what it does depends on values, which are not known without running it{where}"
    return f"{said(error)}{where}"
