"""Rehearse a run on fake tensors to learn what memory and work each phase of its step needs.

A rehearsal replaces code of torch, so it runs in a child process: ``ask`` starts one, ``told`` waits for its answer.
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
from lm_profiler.analysis.plan.planned import ANY_GPU, SETTINGS, Planned, largest_that_fits, smallest_gpu
from lm_profiler.callbacks.collect import model_facts
from lm_profiler.cli.call import Call
from lm_profiler.cli.surroundings import quiet
from lm_profiler.cli.trainer_cli import (
    OPTION_ERRORS,
    ProfilerCLI,
    check_together,
    check_trainer_options,
    trainer_error,
)
from lm_profiler.measure.counts.recompiles import is_compiled_in
from lm_profiler.measure.device.environment import float32_matmul_precision
from lm_profiler.measure.device.nvml import compute_capability
from lm_profiler.measure.fake.values import TAKEN_FOR_ONE
from lm_profiler.measure.fake.world import FakeWorld, prepare
from lm_profiler.processes.child import Child, NoAnswer, Unfit
from lm_profiler.record.figure import bytes_text
from lm_profiler.record.parts import full_name
from lm_profiler.rehearse.loop import BeforeSteps, RehearsedSizes, SilentLogger, Sizes, reason_of
from lm_profiler.rehearse.strategies import AS_WIDE, SHARDED, FakeDevice, FakeStrategy, Size, fake_strategy
from lm_profiler.training import AttentionAlone, FakeTokens, LanguageModel
from lm_profiler.usage_error import UsageError

LIMIT_S = 120.0  # seconds for all sizes of one call

_FOR_STEPS = 0.05  # the share of the time limit for the steps of one size, where steps may differ

# the Trainer options that affect a step on one device, besides its precision
KEPT = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "detect_anomaly")

# most batches of one step to rehearse: from the second on, gradients exist and each batch needs the same
_BATCHES = 2

# the total steps that a learning-rate schedule sees if the run ends with its stages; never reached
_STEPS = 10_000

_UNIT = 64  # tokens: the largest context is a multiple of this number where the run's own context is one


def _sizes(what: str, has: int, begin: Callable[[], int | None], largest: list[int]) -> Sizes:
    """Yield the run's own size, then more or less of ``what``, and receive the peak bytes of each.

    ``largest`` gets the largest on a device of ``has`` bytes; ``begin`` returns the run's own.
    """
    peak = yield Size()
    if not (own := begin()):
        return
    unit = _UNIT if what == "context" and own % _UNIT == 0 else 1
    search = largest_that_fits(own // unit, peak, has)
    try:
        n = next(search)
        while True:
            n = search.send((yield Size(**{what: n * unit / own})))
    except StopIteration as done:
        largest.append(done.value * unit)


def rehearse(cli: ProfilerCLI, gpu: tuple[int, int] | None, what: str, has: int, enough_s: float = 1.0) -> Planned:
    """Return what the run of ``cli`` needs on a ``gpu`` of that compute capability, or on the CPU (None).

    The plan holds the largest ``what`` (``batch``, ``context`` or ``nothing``) on a device with ``has`` bytes. A module
    may raise anything, also because it reads the values of fake tensors.
    """
    world = FakeWorld(gpu)
    trainer = cli.trainer = _trainer(cli, world)
    data = cli.datamodule = cli.build("data")
    with world.inside():
        model = cli.model = cli.build("model")
    check_together(model, data, trainer, cli.verb)
    weights_fit = not has or too_large(cli, has) is None
    if not weights_fit:
        what = "nothing"  # no batch makes it fit
    strategy: Any = trainer.strategy
    context = None
    if isinstance(data, FakeTokens):  # build one row only; the full batch may not fit
        context, strategy.rows, data.batch_size = data.context_length, data.batch_size, 1
    if isinstance(model, AttentionAlone):  # its inputs are parameters: another size needs another module
        what = "nothing"
    largest, own = list[int](), lambda: {"batch": strategy.samples, "context": context}.get(what)
    alike = isinstance(model, (LanguageModel, AttentionAlone))
    sizes, unknown = _sizes(what, has, own, largest), None
    rehearsal = RehearsedSizes(world=world, sizes=sizes, alike=alike, enough_s=enough_s)
    trainer.callbacks.append(rehearsal)  # type: ignore[attr-defined]
    kept = {"return_predictions": False} if cli.verb == "predict" else {}
    try:
        getattr(trainer, cli.verb)(model, datamodule=data, **kept)
    except Exception as error:  # a later size, or a hook after training, may fail: earlier results count
        first = rehearsal.failed if isinstance(rehearsal.failed, Exception) else error
        if not rehearsal.known:
            raise first from first.__cause__
        unknown = reason_of(first)
    if not rehearsal.seen:
        raise UsageError("data: expected batches for two steps, given fewer")
    step, facts = max(rehearsal.seen, key=lambda step: step.peak), model_facts(trainer)
    compiled = bool(getattr(model, "compile_model", False)) or is_compiled_in(model)
    given = full_name(cli.config[cli.verb].trainer.precision)
    return replace(
        step,
        batch=strategy.samples,
        context=context,
        largest=_largest(largest, weights_fit),
        compiled=compiled,
        work=_scaled_work(cli, step.work, gpu is not None or compiled),
        float32=float32_matmul_precision(),
        settings={name: value for name in SETTINGS if (value := _setting(cli, name)) is not None},
        model=facts.model_copy(update={"precision": given, "compiled": compiled}),
        largest_unknown=None if largest else unknown,
        steps=[step.peak for step in rehearsal.seen],
        reserved=rehearsal.seen[-1].reserved,
        taken_for_one=[*TAKEN_FOR_ONE],
        buckets=rehearsal.bucket_bytes,
        ranks=strategy.ranks,
        sent=_all_sent(cli, strategy, step.sent),
        split_by=None if isinstance(strategy, FakeStrategy) else type(strategy).__name__,
        workspaces=world.live.workspaces,
    )


def _largest(sizes: list[int], weights_fit: bool) -> int | None:
    if not weights_fit:
        return 0
    return sizes[0] if sizes else None


# bytes of a parameter, its gradient and each of its optimizer's states by the Trainer's precision
_WIDTHS = {"64-true": 8, "32-true": 4, "16-mixed": 4, "bf16-mixed": 4, "16-true": 2, "bf16-true": 2}
_STATES = {"adamw": 2, "sgd": 0}  # tensors as large as a parameter


def too_large(cli: ProfilerCLI, has: int) -> str | None:
    """Return a line if our own model's weights, gradients and optimizer states alone need more than ``has`` bytes.

    Batch, context and activations do not count, so nothing is built. None if they need less, or it is unknown.
    """
    model, trainer = cli.model, cli.trainer
    width = _WIDTHS.get(str(trainer.precision))
    if type(model) is not LanguageModel or width is None or isinstance(trainer.strategy, SHARDED):
        return None
    each = model.config.num_parameters() * width
    held = {"parameters": each}
    if cli.verb == "fit" and cli.config.fit.trainer.callbacks is None:  # callbacks may freeze layers
        ranks = trainer.world_size if model.shard_optimizer_states else 1
        held |= {"gradients": each, "optimizer states": each * _STATES.get(model.optimizer_name, 0) // ranks}
    needs, states = sum(held.values()), held.get("optimizer states", 0)
    if needs <= has:
        return None
    parts = ", ".join(f"{name} {bytes_text(count)}" for name, count in held.items() if count)
    less = {"--trainer.precision=bf16-true": needs * 2 // width, "--model.optimizer=sgd": needs - states}
    ways = "".join(f"; {bytes_text(least)} with {way}" for way, least in less.items() if least <= has)
    gpu = smallest_gpu(needs)
    if gpu is not None:
        ways += f"; the smallest GPU that holds them: {gpu.name} ({bytes_text(gpu.bytes)})"
    return f"memory: expected at most {bytes_text(has)}, given {bytes_text(needs)} without activations ({parts}){ways}"


def _setting(cli: ProfilerCLI, name: str) -> Any:
    """Return the value of the option ``name``; None where the run has no such option, or a user's module defines it."""
    part, _, option = name.partition(".")
    if part == "model" and not isinstance(cli.model, (LanguageModel, AttentionAlone)):
        return None
    said = cli.config[cli.verb].get(part) or {}
    return (said.get("init_args") or said).get(option)


@dataclass(frozen=True)
class Unplanned:
    """Why a run cannot be planned; ``wrong`` if the call is wrong, so that ``fit`` would refuse it too."""

    reason: str
    wrong: bool = False


def gpu_of(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of ``device`` for ``ask``; None for the CPU."""
    return None if device.type == "cpu" else compute_capability(device) or ANY_GPU


def ask(
    call: Sequence[str] | ProfilerCLI,
    gpu: tuple[int, int] | None,
    what: str = "nothing",
    has: int = 0,
    limit_s: float = LIMIT_S,
    fresh: bool = False,
) -> Child[Planned | Unplanned]:
    """Start to rehearse ``call``, its arguments or its parsed options, in a child process; see ``rehearse``.

    ``fresh`` takes a new interpreter instead of a fork.
    """
    return Child(partial(_planned, call, gpu, what, has, _FOR_STEPS * limit_s), limit_s, fresh)


def told(asked: Child[Planned | Unplanned]) -> Planned | Unplanned:
    """Wait for the answer; a process that ends without one, or takes too long, gives ``Unplanned``."""
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
        raise Unfit from None  # autograd does not work in a fork of a process that used it: see "Autograd and Fork"
    prepare(gpu)  # before any code of the user runs
    with quiet():
        try:
            cli = call if isinstance(call, ProfilerCLI) else ProfilerCLI(Call(call))
            return rehearse(cli, gpu, what, has, enough_s)
        except UsageError as error:
            return Unplanned(str(error), wrong=True)
        except Exception as error:
            return Unplanned(reason_of(error))


def _trainer(cli: ProfilerCLI, world: FakeWorld) -> Trainer:
    """Return a Trainer with those of the user's options that affect a step on one device."""
    given = vars(cli.config[cli.verb].trainer)
    check_trainer_options({**given, "accelerator": "auto"}, cli.verb)
    precision = str(given["precision"] or "32-true")
    kept = {name: given[name] for name in KEPT if given[name] is not None}
    kept["accumulate_grad_batches"] = min(_accumulated(cli), _BATCHES)
    off = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    try:
        return Trainer(
            accelerator="cpu",
            strategy=fake_strategy(given, partial(_made, cli, "strategy"), world, trains=cli.verb == "fit"),
            num_nodes=given["num_nodes"],
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
    """Return the user's callbacks and Lightning's that freeze layers; Lightning's others leave the module as it is."""
    made = _made(cli, "callbacks") or []
    return [
        each
        for each in (made if isinstance(made, list) else [made])
        if isinstance(each, BaseFinetuning) or not type(each).__module__.startswith("lightning.")
    ]


def _made(cli: ProfilerCLI, option: str) -> Any:
    """Build and return the object that an ``option`` of the Trainer describes."""
    config = cli.config.clone()
    for section, kept in ((config[cli.verb], "trainer"), (config[cli.verb].trainer, option)):
        for key in vars(section).keys() - {kept}:
            del section[key]
    return cli.parser.instantiate(config)[cli.verb].trainer[option]


def _accumulated(cli: ProfilerCLI) -> int:
    """Return the number of batches in a step."""
    return int(cli.config[cli.verb].trainer.accumulate_grad_batches or 1)


def _all_sent(cli: ProfilerCLI, strategy: FakeDevice, sent: Mapping[str, int]) -> dict[str, int]:
    """Scale what the rehearsed batches ``sent`` to all of a step; DDP reduces gradients once a step."""
    times = 1.0 if strategy.reduces else max(_accumulated(cli) / _BATCHES, 1.0)
    return {of: round(n * times) if of in ("forward", "backward") else n for of, n in sent.items()}


def _scaled_work(cli: ProfilerCLI, rehearsed: Mapping[str, Work], kept_otherwise: bool) -> dict[str, Work]:
    """Scale the ``rehearsed`` work of each phase to all batches of a step, in the run's own dtype.

    ``kept_otherwise`` makes bytes unknown: a compiler, or kernels of a GPU, keep other tensors for backward.
    """
    narrow = "float16" if full_name(cli.config[cli.verb].trainer.precision) in AS_WIDE else "bfloat16"
    times = max(_accumulated(cli) / _BATCHES, 1.0)

    def of_batches(work: Work) -> Work:
        flops = work.flops and {narrow if of == "bfloat16" else of: round(n * times) for of, n in work.flops.items()}
        moved = None if work.bytes is None or kept_otherwise else round(work.bytes * times)
        return replace(work, flops=flops, bytes=moved)

    return {of: of_batches(work) if of in ("forward", "backward") else work for of, work in rehearsed.items()}
