"""The preflight check: before a run is built, refuse it if it cannot fit into memory."""

from __future__ import annotations

from lightning.pytorch import Trainer

from lm_profiler.analysis.plan.planned import Planned, fits
from lm_profiler.analysis.remedies.catalogue import remedies
from lm_profiler.cli.rehearse import (
    Unplanned,
    gpu_of,
    refusal_by_weights,
    start_rehearsal,
    wait_for_plan,
)
from lm_profiler.cli.trainer_cli import ProfilerCLI
from lm_profiler.lightning_names import START_METHOD
from lm_profiler.measure.boundary import Guard, print_message
from lm_profiler.measure.counts.registered import has_program_formulas
from lm_profiler.measure.device.environment import environment
from lm_profiler.measure.memory.peaks import available_bytes
from lm_profiler.record.memory_timeline import write_timeline
from lm_profiler.record.quantities import CAUSES, bytes_text
from lm_profiler.record.run_record import Environment, PlannedMemory
from lm_profiler.usage_error import UsageError

LIMIT_S = 20.0  # seconds of CPU time to plan a run, and the same again for the largest batch if it is refused
_MAX_SMALLER = 3  # settings that need less but may not fit: a refusal names those that change training least


def plan_ahead(cli: ProfilerCLI) -> None:
    """Estimate the memory of the run, or rehearse the run if that was requested; rank 0 does this for all ranks.

    A rehearsal takes place in a child process, and its result is recorded. If a run cannot be planned in time, it
    continues. If the program has registered formulas of FLOPs, a rehearsal tests them.

    Raises:
        UsageError: the run needs more memory than its device has free, which is also recorded, or a formula raises.
    """
    if cli.check_memory is False or cli.trainer.global_rank != 0:
        return
    refusal = _refused_by_estimate(cli)
    if refusal is None and cli.check_memory:
        refusal = _refused_by_rehearsal(cli)
    elif refusal is None and has_program_formulas():
        rehearsed = _rehearse(cli, maximized="nothing", device_bytes=0)
        refusal = _wrong_call_text(rehearsed)
    if refusal is not None:
        raise UsageError(refusal)


def _refused_by_estimate(cli: ProfilerCLI) -> str | None:
    """Return why the built-in model cannot fit with any batch size, or None. A refusal is recorded."""
    if not cli.is_ours:
        return None
    available = free_bytes_per_replica(cli.trainer)
    if available is None:
        return None
    # This creates no weights: ``configure_model`` does that later.
    cli.model = cli.build("model")
    line = refusal_by_weights(cli, available)
    if line is None:
        return None
    plan = PlannedMemory(unknown="too large without activations", available=available)
    cli.context.add_launch_facts(planned=plan)
    cli.context.refuse(line, remedies=(), machine=_environment_of_run(cli), model=None)
    return f"{line}\n`lm_profiler plan` lists settings that fit; use --check_memory=false to run anyway"


def _refused_by_rehearsal(cli: ProfilerCLI) -> str | None:
    """Return two lines on why the run is refused, or None. The plan and the refusal are recorded."""
    rehearsed = _rehearse(cli, maximized="nothing", device_bytes=0)
    if isinstance(rehearsed, Unplanned):
        cli.context.add_launch_facts(planned=PlannedMemory(unknown=rehearsed.reason))
        return _wrong_call_text(rehearsed)
    available = free_bytes_per_replica(cli.trainer)
    cli.context.add_launch_facts(planned=_planned_memory(rehearsed, available))
    _write_timeline(cli, rehearsed)
    if available is None or fits(rehearsed, available) is not False:
        return None

    fitting, smaller = _fitting_and_smaller_settings(cli, available)
    options: list[str] = []
    if fitting:
        options.append(f"would fit: {' or '.join(fitting)}")
    if smaller:
        options.append(f"needs less: {' or '.join(smaller)}")
    options += [
        "`lm_profiler plan` rehearses them",
        "use --check_memory=false to run anyway",
    ]
    refusal = f"{_reason_text(rehearsed, available)}\n{'; '.join(options)}"
    cli.context.refuse(
        refusal, tuple(fitting), _environment_of_run(cli), rehearsed.model
    )
    return refusal


def _wrong_call_text(rehearsed: Planned | Unplanned) -> str | None:
    """Return what is wrong with the call, for example that a formula raises; None if nothing is."""
    if isinstance(rehearsed, Unplanned) and rehearsed.is_wrong_call:
        return rehearsed.reason
    return None


def _rehearse(
    cli: ProfilerCLI, maximized: str, device_bytes: int
) -> Planned | Unplanned:
    """Rehearse the run in a child process, and return its plan or the reason why it cannot be planned.

    ``maximized`` is ``batch`` or ``context``, whose largest value that fits into ``device_bytes`` is searched for, or
    ``nothing``.
    """
    gpu = gpu_of(cli.trainer.strategy.root_device)
    rehearsal = start_rehearsal(
        cli, gpu, maximized, device_bytes, limit_s=LIMIT_S, fresh=not cli.is_ours
    )
    return wait_for_plan(rehearsal)


def _planned_memory(planned: Planned, available: int | None) -> PlannedMemory:
    """Return the parts of a plan that the record contains."""
    moments = {} if planned.timeline is None else planned.timeline.moments()
    return PlannedMemory(
        peaks=dict(planned.peaks),
        at_peak=planned.causes.get(planned.phase),
        moments=moments,
        held=planned.held,
        reserved=planned.reserved,
        available=available,
        compiled=planned.compiled,
    )


def _write_timeline(cli: ProfilerCLI, planned: Planned) -> None:
    """Write the planned memory timeline into the run's folder, if there are both; a failure is only reported."""
    folder = cli.context.folder
    if folder is None or planned.timeline is None:
        return
    guard = Guard("the planned memory timeline", print_message, outcome="unknown")
    guard.run(write_timeline, planned.timeline, folder)


def _environment_of_run(cli: ProfilerCLI) -> Environment:
    return environment(cli.trainer.strategy.root_device, cli.trainer.world_size)


def free_bytes_per_replica(trainer: Trainer) -> int | None:
    """Return the bytes that are free for one replica, None if unknown. On the CPU the ranks share the free memory."""
    device = trainer.strategy.root_device
    if device.type == "cpu":
        free_bytes = available_bytes(device)
        return None if free_bytes is None else free_bytes // trainer.num_devices
    # Asking for free memory opens the device. Then ranks that are forked from this process (ddp_fork, ddp_notebook)
    # could not use CUDA.
    if START_METHOD.get_or(trainer.strategy.launcher) == "fork":
        return None
    return available_bytes(device)


def _reason_text(planned: Planned, available: int) -> str:
    """Return why the run does not fit: the bytes that it needs at its peak, by cause."""
    needed = planned.least_bytes
    scope = "without tensors that a compiler may not need"
    if needed == planned.peak:
        scope = f"peak in {planned.phase}"
    causes = planned.causes.get(planned.phase)
    bytes_by_cause = {} if causes is None else causes.model_dump()
    parts = []
    for cause, count in bytes_by_cause.items():
        if count:
            parts.append(f"{CAUSES[cause]} {bytes_text(count)}")
    return f"not enough memory: needs {bytes_text(needed)} ({scope}: {', '.join(parts)}), {bytes_text(available)} free"


def _fitting_and_smaller_settings(
    cli: ProfilerCLI, limit_bytes: int
) -> tuple[list[str], list[str]]:
    """Return the settings that make the run fit, each by itself, and a few that need less but may not fit."""
    planned = _rehearse(cli, maximized="batch", device_bytes=limit_bytes)
    if isinstance(planned, Unplanned):
        return [], []
    fitting: list[str] = []
    smaller: list[str] = []
    for remedy in remedies(planned):
        options = " ".join(remedy.words)
        if remedy.surely_fits:
            fitting.append(options)
        else:
            smaller.append(options)
    return fitting, smaller[:_MAX_SMALLER]
