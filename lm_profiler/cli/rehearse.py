"""Rehearse a run on fake tensors to learn what memory and work each phase of its step needs.

A rehearsal replaces functions of torch, so it runs in a child process: ``start_rehearsal`` starts the process, and
``wait_for_plan`` waits for its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import BaseFinetuning

from lm_profiler.analysis.hardware.roofline import Work
from lm_profiler.analysis.plan.planned import (
    ANY_GPU,
    SETTINGS,
    Planned,
    largest_that_fits,
)
from lm_profiler.callbacks.collect import model_facts
from lm_profiler.callbacks.trainer_loop import TrainerLoop
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
from lm_profiler.measure.counts.uncountable import BrokenFormulaError
from lm_profiler.measure.device.environment import float32_matmul_precision
from lm_profiler.measure.device.nvml import compute_capability
from lm_profiler.measure.fake.values import LINES_GIVEN_A_FAKE_FLOAT
from lm_profiler.measure.fake.world import (
    COMPILED_FUNCTIONS_CALLED,
    FakeWorld,
    prepare,
)
from lm_profiler.processes.child import Child, NoAnswer, Unfit
from lm_profiler.record.figure import bytes_text
from lm_profiler.record.parts import full_name
from lm_profiler.rehearse.loop import (
    BeforeSteps,
    RehearsedSizes,
    SilentLogger,
    Sizes,
    reason_of,
)
from lm_profiler.rehearse.strategies import (
    REPLACED_PRECISIONS,
    SHARDED,
    FakeDevice,
    FakeStrategy,
    Size,
    fake_strategy,
)
from lm_profiler.training import AttentionAlone, FakeTokens, LanguageModel
from lm_profiler.usage_error import UsageError

LIMIT_S = 120.0  # seconds for all sizes of one call

# If steps of one size (batch and context) may differ from each other, several are rehearsed. After this share of the
# time limit no further one begins.
_STEPS_SHARE = 0.05

# the Trainer options that affect a step on one device, besides its precision
STEP_OPTIONS = (
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "detect_anomaly",
)

# The most batches of a step that are rehearsed: from the second on, gradients exist and each batch needs the same
# memory.
_BATCHES = 2

# the number of steps that a learning-rate schedule sees if the run has no end of its own; it is never reached
_STEPS = 10_000

# the phases that occur once per batch of a step
_PHASES_OF_BATCHES = {"forward", "backward"}

_UNIT = 64  # tokens: the largest context is a multiple of this number if the run's own context is


def _search_sizes(
    maximized: str,
    device_bytes: int,
    own_size: Callable[[], int | None],
    largest: list[int],
) -> Sizes:
    """Yield the sizes to rehearse, and receive the peak bytes of each: a search for the largest size that fits.

    The first size is the run's own. The search then varies ``maximized``, the batch or the context; ``own_size``
    returns its value in the run. The largest value that fits into ``device_bytes`` is appended to ``largest``.
    """
    peak_bytes = yield Size()
    size = own_size()
    if not size:
        return
    unit = _UNIT if maximized == "context" and size % _UNIT == 0 else 1
    # The search yields sizes in units, is sent the peak bytes of each, and returns the largest size that fits.
    search = largest_that_fits(size // unit, peak_bytes, device_bytes)
    try:
        units = next(search)
        while True:
            factor = units * unit / size
            peak_bytes = yield Size(**{maximized: factor})
            units = search.send(peak_bytes)
    except StopIteration as result:
        largest.append(result.value * unit)


def rehearse(
    cli: ProfilerCLI,
    gpu: tuple[int, int] | None,
    maximized: str,
    device_bytes: int,
    enough_s: float = 1.0,
) -> Planned:
    """Return what the run of ``cli`` needs on a ``gpu`` of this compute capability, or on the CPU (None).

    The plan also has the largest ``batch`` or ``context``, as ``maximized`` says, that fits into ``device_bytes``.
    After ``enough_s`` seconds of CPU time no further step of the run's own size begins. The module may raise any
    exception, for example because it reads values of fake tensors.
    """
    world = FakeWorld(gpu)
    trainer = _rehearsal_trainer(cli, world)
    cli.trainer = trainer
    data = cli.build("data")
    cli.datamodule = data
    with world.inside():
        model = cli.build("model")
    cli.model = model
    check_together(model, data, trainer, cli.verb)

    strategy: Any = trainer.strategy
    context_length = None
    if isinstance(data, FakeTokens):
        context_length = data.context_length
        strategy.rows = data.batch_size
        # Only one row is built, because the full batch may not fit.
        data.batch_size = 1
    # The inputs of AttentionAlone are parameters, so another size would need another module.
    can_be_resized = not isinstance(model, AttentionAlone)

    def own_size() -> int | None:  # The size is known only after the first step.
        sizes = {"batch": strategy.samples, "context": context_length}
        return sizes.get(maximized) if can_be_resized else None

    largest: list[int] = []  # gets the largest size, if the search finds it
    rehearsal = RehearsedSizes(
        world=world,
        sizes=_search_sizes(maximized, device_bytes, own_size, largest),
        has_equal_steps=isinstance(model, (LanguageModel, AttentionAlone)),
        enough_s=enough_s,
    )
    failure = _run(cli, rehearsal)
    return replace(
        _planned(cli, rehearsal),
        context=context_length,
        largest=largest[0] if largest else None,
        largest_unknown=None if largest else failure,
        taken_for_one=[*LINES_GIVEN_A_FAKE_FLOAT],
    )


def _planned(cli: ProfilerCLI, rehearsal: RehearsedSizes) -> Planned:
    """Return what the rehearsed step with the highest peak needs, without the result of the search for a size."""
    trainer: Any = cli.trainer
    strategy = trainer.strategy
    model = cli.model
    facts = model_facts(TrainerLoop(trainer))
    precision = full_name(cli.config[cli.verb].trainer.precision)
    has_compiled_part = bool(COMPILED_FUNCTIONS_CALLED) or is_compiled_in(model)
    is_compiled = has_compiled_part or bool(getattr(model, "compile_model", False))
    split_by = None
    if not isinstance(strategy, FakeStrategy):
        split_by = type(strategy).__name__
    step = max(rehearsal.observed_steps, key=lambda step: step.peak)
    is_on_gpu = rehearsal.world.gpu is not None
    work = _scaled_work(cli, step.work, bytes_are_unknown=is_on_gpu or is_compiled)
    return replace(
        step,
        batch=strategy.samples,
        compiled=is_compiled,
        work=work,
        float32=float32_matmul_precision(),
        settings=_settings_of_run(cli),
        model=facts.model_copy(
            update={"precision": precision, "compiled": is_compiled}
        ),
        steps=[step.peak for step in rehearsal.observed_steps],
        reserved=rehearsal.observed_steps[-1].reserved,
        buckets=rehearsal.bucket_bytes,
        ranks=strategy.ranks,
        sent=_scaled_bytes_sent(cli, strategy, step.sent),
        split_by=split_by,
        workspaces=rehearsal.world.live.workspaces,
    )


def _run(cli: ProfilerCLI, rehearsal: RehearsedSizes) -> str | None:
    """Run the verb and return why it ended early, or None; raise if not even the first size was rehearsed.

    If a later size or a hook after training fails, the earlier results are still used.
    """
    cli.trainer.callbacks.append(rehearsal)  # type: ignore[attr-defined]
    arguments = {"return_predictions": False} if cli.verb == "predict" else {}
    failure = None
    try:
        getattr(cli.trainer, cli.verb)(
            cli.model, datamodule=cli.datamodule, **arguments
        )
    except Exception as error:
        original = rehearsal.first_error
        if not isinstance(original, Exception):
            original = error
        if not rehearsal.has_observed_all:
            raise original from original.__cause__
        failure = reason_of(original)
    if not rehearsal.observed_steps:
        raise UsageError(
            "data: expected a loader with batches for two steps, given fewer"
        )
    return failure


# precision of the Trainer → bytes of a parameter, and of its gradient, and of each of its optimizer states
_WIDTHS = {
    "64-true": 8,
    "32-true": 4,
    "16-mixed": 4,
    "bf16-mixed": 4,
    "16-true": 2,
    "bf16-true": 2,
}
_STATES = {"adamw": 2, "sgd": 0, "muon": 2}  # optimizer → states per parameter


def refusal_by_weights(cli: ProfilerCLI, device_bytes: int) -> str | None:
    """Return a message if weights, gradients and optimizer states of the built-in model alone do not fit.

    Activations are not counted, so nothing has to be built. None if the run may fit, or if this is unknown.
    """
    model, trainer = cli.model, cli.trainer
    parameter_bytes = _WIDTHS.get(str(trainer.precision))
    if type(model) is not LanguageModel or isinstance(trainer.strategy, SHARDED):
        return None
    if parameter_bytes is None:
        return None
    weights_bytes = model.config.num_parameters() * parameter_bytes
    bytes_by_part = {"parameters": weights_bytes}
    # With callbacks this is unknown, because they may freeze layers.
    trains_all_layers = cli.verb == "fit" and cli.config.fit.trainer.callbacks is None
    if trains_all_layers:
        states = _STATES.get(model.optimizer_name, 0)
        ranks = trainer.world_size if model.shard_optimizer_states else 1
        bytes_by_part["gradients"] = weights_bytes
        bytes_by_part["optimizer states"] = weights_bytes * states // ranks
        if model.optimizer_name == "muon":
            # Muon has only one state per matrix of the blocks.
            config = model.config
            single_matrices = config.num_layers * (
                config.matrix_parameters() - config.expert_parameters()
            )
            bytes_by_part["optimizer states"] -= single_matrices * parameter_bytes
    needed_bytes = sum(bytes_by_part.values())
    if needed_bytes <= device_bytes:
        return None

    parts = ", ".join(
        f"{part} {bytes_text(count)}" for part, count in bytes_by_part.items() if count
    )
    return (
        f"not enough memory: {bytes_text(needed_bytes)} without activations ({parts}), "
        f"{bytes_text(device_bytes)} available"
    )


def _settings_of_run(cli: ProfilerCLI) -> dict[str, Any]:
    """Return the options of the run that a plan shows, without options of a user's module."""
    is_our_model = isinstance(cli.model, (LanguageModel, AttentionAlone))
    settings: dict[str, Any] = {}
    for name in SETTINGS:
        part, _, option = name.partition(".")
        if part == "model" and not is_our_model:
            continue
        section = cli.config[cli.verb].get(part) or {}
        # The options of a class are in its ``init_args``.
        options = section.get("init_args") or section
        value = options.get(option)
        if value is not None:
            settings[name] = value
    return settings


@dataclass(frozen=True)
class Unplanned:
    """The reason why a run cannot be planned. If ``is_wrong_call``, ``fit`` would refuse the run too."""

    reason: str
    is_wrong_call: bool = False


def gpu_of(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of ``device``, or ``ANY_GPU`` if it is unknown; None for the CPU."""
    if device.type == "cpu":
        return None
    return compute_capability(device) or ANY_GPU


def start_rehearsal(
    call: Sequence[str] | ProfilerCLI,
    gpu: tuple[int, int] | None,
    maximized: str = "nothing",
    device_bytes: int = 0,
    limit_s: float = LIMIT_S,
    fresh: bool = False,
) -> Child[Planned | Unplanned]:
    """Start a rehearsal in a child process; the other arguments are those of ``rehearse``.

    ``call`` has the arguments of the call, or its parsed options. ``fresh`` starts a new interpreter instead of a fork.
    """
    rehearsal = partial(
        _plan_or_reason, call, gpu, maximized, device_bytes, _STEPS_SHARE * limit_s
    )
    return Child(rehearsal, limit_s, fresh)


def wait_for_plan(rehearsal: Child[Planned | Unplanned]) -> Planned | Unplanned:
    """Wait for the answer; if the process ends without one, or takes too long, return ``Unplanned``."""
    try:
        return rehearsal.answer()
    except NoAnswer as error:
        return Unplanned(str(error))


def _plan_or_reason(
    call: Sequence[str] | ProfilerCLI,
    gpu: tuple[int, int] | None,
    maximized: str,
    device_bytes: int,
    enough_s: float,
) -> Planned | Unplanned:
    """Rehearse in this process, which is the child; if the call raises, return the reason why there is no plan."""
    try:
        torch.ones((), requires_grad=True).backward()
    except RuntimeError:
        # Autograd does not work in a fork of a process that has used it (torch's documentation: "Autograd and Fork").
        raise Unfit from None
    prepare(gpu)  # This has to precede the user's code.
    with quiet():
        try:
            cli = call if isinstance(call, ProfilerCLI) else ProfilerCLI(Call(call))
            return rehearse(cli, gpu, maximized, device_bytes, enough_s)
        except (UsageError, BrokenFormulaError) as error:
            return Unplanned(str(error), is_wrong_call=True)
        except Exception as error:
            return Unplanned(reason_of(error))


def _rehearsal_trainer(cli: ProfilerCLI, world: FakeWorld) -> Trainer:
    """Return a Trainer with the user's options that affect a step on one device."""
    options = vars(cli.config[cli.verb].trainer)
    check_trainer_options({**options, "accelerator": "auto"}, cli.verb)
    precision = str(options["precision"] or "32-true")
    step_options = {
        name: options[name] for name in STEP_OPTIONS if options[name] is not None
    }
    step_options["accumulate_grad_batches"] = min(_batches_in_step(cli), _BATCHES)
    max_steps = options["max_steps"]
    has_no_end = options["max_epochs"] == max_steps == -1
    if has_no_end:
        max_steps = _STEPS
    try:
        return Trainer(
            accelerator="cpu",
            strategy=fake_strategy(
                options,
                partial(_instantiate, cli, "strategy"),
                world,
                trains=cli.verb == "fit",
            ),
            num_nodes=options["num_nodes"],
            precision=REPLACED_PRECISIONS.get(precision, precision),  # type: ignore[arg-type]
            max_epochs=options["max_epochs"],
            max_steps=max_steps,
            logger=False if options["logger"] is False else SilentLogger(),
            limit_val_batches=0 if cli.verb == "fit" else None,
            callbacks=[
                BeforeSteps(callback, world)
                for callback in _callbacks_of_rehearsal(cli)
            ],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **step_options,
        )
    except OPTION_ERRORS as error:
        raise trainer_error(error, options) from error


def _callbacks_of_rehearsal(cli: ProfilerCLI) -> list[Callback]:
    """Return the user's callbacks, and those of Lightning that freeze layers; others do not change the module."""
    callbacks = _instantiate(cli, "callbacks") or []
    if not isinstance(callbacks, list):
        callbacks = [callbacks]
    return [callback for callback in callbacks if _may_change_module(callback)]


def _may_change_module(callback: Callback) -> bool:
    is_of_user = not type(callback).__module__.startswith("lightning.")
    return is_of_user or isinstance(callback, BaseFinetuning)


def _instantiate(cli: ProfilerCLI, option: str) -> Any:
    """Build and return the object that an ``option`` of the Trainer describes."""
    config = cli.config.clone()
    sections = config[cli.verb]
    _delete_others(sections, "trainer")
    _delete_others(sections.trainer, option)
    return cli.parser.instantiate(config)[cli.verb].trainer[option]


def _delete_others(section: Namespace, key: str) -> None:
    for other_key in vars(section).keys() - {key}:
        del section[other_key]


def _batches_in_step(cli: ProfilerCLI) -> int:
    return int(cli.config[cli.verb].trainer.accumulate_grad_batches or 1)


def _unrehearsed_factor(cli: ProfilerCLI) -> float:
    """Return the number of batches of a step divided by the number of rehearsed batches; at least 1."""
    return max(_batches_in_step(cli) / _BATCHES, 1.0)


def _scaled_bytes_sent(
    cli: ProfilerCLI, strategy: FakeDevice, bytes_sent: Mapping[str, int]
) -> dict[str, int]:
    """Scale the bytes that the rehearsed batches sent to all batches of a step; DDP sends gradients once per step."""
    scaled = dict(bytes_sent)
    if strategy.reduces:
        return scaled
    factor = _unrehearsed_factor(cli)
    for phase in _PHASES_OF_BATCHES & scaled.keys():
        scaled[phase] = round(scaled[phase] * factor)
    return scaled


def _scaled_work(
    cli: ProfilerCLI, rehearsed: Mapping[str, Work], bytes_are_unknown: bool
) -> dict[str, Work]:
    """Scale the ``rehearsed`` work of each phase to all batches of a step, in the run's own dtype.

    With ``bytes_are_unknown`` the bytes become None: a compiler, or kernels of a GPU, keep other tensors for backward
    than the rehearsal did.
    """
    scaled = dict(rehearsed)
    for phase in _PHASES_OF_BATCHES & scaled.keys():
        work = scaled[phase]
        moved_bytes = None
        if work.bytes is not None and not bytes_are_unknown:
            moved_bytes = round(work.bytes * _unrehearsed_factor(cli))
        scaled[phase] = replace(
            work, flops=_scaled_flops(cli, work.flops), bytes=moved_bytes
        )
    return scaled


def _scaled_flops(
    cli: ProfilerCLI, flops: Mapping[str, int] | None
) -> Mapping[str, int] | None:
    """Scale the FLOPs by dtype. Precisions of float16 are rehearsed in bfloat16."""
    if not flops:
        return flops
    is_float16 = (
        full_name(cli.config[cli.verb].trainer.precision) in REPLACED_PRECISIONS
    )
    factor = _unrehearsed_factor(cli)
    scaled: dict[str, int] = {}
    for dtype, count in flops.items():
        if dtype == "bfloat16" and is_float16:
            dtype = "float16"
        scaled[dtype] = round(count * factor)
    return scaled
