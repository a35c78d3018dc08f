"""A run rehearsed on fake tensors: what each phase of its step would need, without needing it.

In a process of its own, since it replaces code of torch: ``ask`` begins one, ``told`` waits for what it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import BaseFinetuning

from lm_profiler.analysis.hardware.roofline import Work
from lm_profiler.analysis.plan.capacities import ANY_GPU, largest_that_fits
from lm_profiler.analysis.plan.planned import SETTINGS, Planned
from lm_profiler.callbacks.collect import model_facts
from lm_profiler.cli.call import Call
from lm_profiler.cli.checks import check_together, check_trainer_options, trainer_error
from lm_profiler.cli.quiet import quiet
from lm_profiler.cli.trainer_cli import OPTION_ERRORS, ProfilerCLI
from lm_profiler.measure.counts.recompiles import is_compiled_in
from lm_profiler.measure.device.nvml import compute_capability
from lm_profiler.measure.device.precision import float32_matmul_precision
from lm_profiler.measure.fake.unknown import TAKEN_FOR_ONE
from lm_profiler.measure.fake.untouched import leave_files
from lm_profiler.measure.fake.world import FakeWorld, prepare
from lm_profiler.processes.child import Child, NoAnswer, Unfit
from lm_profiler.record.parts import full_name
from lm_profiler.rehearse.loop import RehearsedSizes, Sizes, reason_of
from lm_profiler.rehearse.one_device import AS_WIDE, BeforeSteps, FakeStrategy, SilentLogger, Size, has_buckets
from lm_profiler.training import AttentionAlone, FakeTokens, LanguageModel
from lm_profiler.usage_error import UsageError

LIMIT_S = 120.0
"""For all sizes of one call."""

_FOR_STEPS = 0.05
"""Share of the limit for steps of one size, where these may differ."""

KEPT = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "detect_anomaly")
"""What of the Trainer's options a step on one device depends on, beside its precision."""

_BATCHES = 2
"""Of a step, at most: to those that follow gradients are nothing new, as they are to the second."""

_STEPS = 10_000
"""That a schedule is told of a run that ends with its stages. No rehearsal has as many."""


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
    trainer = cli.trainer = _trainer(cli, world)
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
    rehearsal, unknown = RehearsedSizes(world=world, sizes=search.steps(), alike=alike, enough_s=enough_s), None
    trainer.callbacks.append(rehearsal)  # type: ignore[attr-defined]
    kept = {"return_predictions": False} if cli.verb == "predict" else {}
    try:
        getattr(trainer, cli.verb)(model, datamodule=data, **kept)
    except Exception as error:  # of another size, or once all has been trained, as where it keeps its weights
        first = rehearsal.failed if isinstance(rehearsal.failed, Exception) else error
        if not rehearsal.known:
            raise first from first.__cause__
        unknown = reason_of(first)
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
        work=_as_asked(cli, step.work, gpu is not None or compiled),
        float32=float32_matmul_precision(),
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
) -> Child[Planned | Unplanned]:
    """Begin to rehearse ``call``, the verb first, or what was read of it, in a process of its own; see ``rehearse``."""
    return Child(partial(_planned, call, gpu, what, has, _FOR_STEPS * limit_s), limit_s, fresh)


def told(asked: Child[Planned | Unplanned]) -> Planned | Unplanned:
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
            return Unplanned(reason_of(error))


def _trainer(cli: ProfilerCLI, world: FakeWorld) -> Trainer:
    """A Trainer with those of the user's options that a step on one device depends on.

    Raises:
        UsageError: the options do not go together.
    """
    given = vars(cli.config[cli.verb].trainer)
    check_trainer_options({**given, "accelerator": "auto"}, cli.verb)
    precision = str(given["precision"] or "32-true")
    kept = {name: given[name] for name in KEPT if given[name] is not None}
    kept["accumulate_grad_batches"] = min(_accumulated(cli), _BATCHES)
    off = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    try:
        return Trainer(
            accelerator="cpu",
            strategy=FakeStrategy(world, has_buckets=cli.verb == "fit" and has_buckets(given)),
            precision=AS_WIDE.get(precision, precision),  # type: ignore[arg-type]
            max_epochs=given["max_epochs"],
            max_steps=_STEPS if given["max_epochs"] == given["max_steps"] == -1 else given["max_steps"],
            logger=False if given["logger"] is False else SilentLogger(),
            limit_val_batches=0 if cli.verb == "fit" else None,
            callbacks=[BeforeSteps(each, world) for each in _callbacks(cli)],
            **dict.fromkeys(off, False),  # type: ignore[arg-type]
            **kept,
        )
    except OPTION_ERRORS as error:
        raise trainer_error(error, given) from error


def _callbacks(cli: ProfilerCLI) -> list[Callback]:
    """The user's own, and Lightning's that freeze; its others leave the module as it is."""
    config = cli.config.clone()
    for section, kept in ((config[cli.verb], "trainer"), (config[cli.verb].trainer, "callbacks")):
        for key in vars(section).keys() - {kept}:
            del section[key]
    made = cli.parser.instantiate(config)[cli.verb].trainer.callbacks or []
    return [
        each
        for each in (made if isinstance(made, list) else [made])
        if isinstance(each, BaseFinetuning) or not type(each).__module__.startswith("lightning.")
    ]


def _accumulated(cli: ProfilerCLI) -> int:
    """Batches of a step."""
    return int(cli.config[cli.verb].trainer.accumulate_grad_batches or 1)


def _as_asked(cli: ProfilerCLI, rehearsed: Mapping[str, Work], kept_otherwise: bool) -> dict[str, Work]:
    """The work of the run's phases from what was ``rehearsed``: of all batches of a step, in the run's own dtype.

    ``kept_otherwise``: what is kept for backward is the choice of a compiler, or of kernels that are not the CPU's.
    """
    narrow = "float16" if full_name(cli.config[cli.verb].trainer.precision) in AS_WIDE else "bfloat16"
    times = max(_accumulated(cli) / _BATCHES, 1.0)

    def of_batches(work: Work) -> Work:
        flops = work.flops and {narrow if of == "bfloat16" else of: round(n * times) for of, n in work.flops.items()}
        moved = None if work.bytes is None or kept_otherwise else round(work.bytes * times)
        return replace(work, flops=flops, bytes=moved)

    return {of: of_batches(work) if of in ("forward", "backward") else work for of, work in rehearsed.items()}
