"""The preflight check: refuse a run that cannot fit before anything of it is built."""

from __future__ import annotations

from functools import partial

from lightning.pytorch import Trainer

from lm_profiler.analysis.plan.planned import Planned, fits
from lm_profiler.analysis.remedies.catalogue import remedies
from lm_profiler.cli.rehearse import Unplanned, ask, gpu_of, told, too_large
from lm_profiler.cli.trainer_cli import ProfilerCLI
from lm_profiler.lightning_names import START_METHOD
from lm_profiler.measure.boundary import Guard, say
from lm_profiler.measure.device.environment import environment
from lm_profiler.measure.memory.peaks import available_bytes
from lm_profiler.record.memory_timeline import write_timeline
from lm_profiler.record.quantities import CAUSES, bytes_text
from lm_profiler.record.run_record import PlannedMemory
from lm_profiler.usage_error import UsageError

LIMIT_S = 20.0  # seconds of CPU time to plan a run, and the same again for the largest batch if it is refused
_SHOWN = 3  # options that a refusal names besides the batch, those that change training least


def plan_ahead(cli: ProfilerCLI) -> None:
    """Estimate what the run holds, or rehearse it if that was asked for, on rank 0 for all ranks.

    A rehearsal takes place in a child process, and its result is recorded. A run that cannot be planned in time is not
    stopped.

    Raises:
        UsageError: the run needs more memory than its device has free. The record says so too.
    """
    if cli.check_memory is False or cli.trainer.global_rank != 0:
        return
    refusal = _refused_by_estimate(cli)
    if refusal is None and cli.check_memory:
        refusal = _refused_by_rehearsal(cli)
    if refusal is not None:
        raise UsageError(refusal)


def _refused_by_estimate(cli: ProfilerCLI) -> str | None:
    """Return why our own module cannot fit whatever its batch is, None where it may. The record gets the refusal."""
    available = free_for_one(cli.trainer) if cli.is_ours else None
    if available is None:
        return None
    cli.model = cli.build("model")  # the Trainer makes its weights later
    line = too_large(cli, available)
    if line is None:
        return None
    where = partial(environment, cli.trainer.strategy.root_device, cli.trainer.world_size)
    cli.context.add_launch_facts(planned=PlannedMemory(unknown="too large without activations", available=available))
    cli.context.refuse(line, (), where(), None)
    return f"{line}\n`lm_profiler plan` prints what would fit; --check_memory=false to run anyway"


def _refused_by_rehearsal(cli: ProfilerCLI) -> str | None:
    """Return in two lines why the run is refused, None if it is not. The record gets the plan, and the refusal."""
    where = partial(environment, cli.trainer.strategy.root_device, cli.trainer.world_size)
    planned, plan = _planned(cli)
    cli.context.add_launch_facts(planned=plan)
    folder, timeline = cli.context.folder, None if planned is None else planned.timeline
    if folder is not None and timeline is not None:
        Guard("the planned memory timeline", say, outcome="unknown").run(write_timeline, timeline, folder)
    if planned is None or plan.available is None or fits(planned, plan.available) is not False:
        return None
    fitting, less = _remedies(cli, plan.available)
    ways = [f"would fit: {' or '.join(fitting)}"] * bool(fitting) + [f"needs less: {' or '.join(less)}"] * bool(less)
    ways += ["`lm_profiler plan` tries them", "--check_memory=false to run anyway"]
    refusal = f"{_reason(planned, plan.available)}\n{'; '.join(ways)}"
    cli.context.refuse(refusal, fitting, where(), planned.model)
    return refusal


def _planned(cli: ProfilerCLI) -> tuple[Planned | None, PlannedMemory]:
    planned = told(ask(cli, gpu_of(cli.trainer.strategy.root_device), limit_s=LIMIT_S, fresh=not cli.is_ours))
    if isinstance(planned, Unplanned):
        return None, PlannedMemory(unknown=planned.reason)
    return planned, PlannedMemory(
        peaks=dict(planned.peaks),
        at_peak=planned.causes.get(planned.phase),
        moments={} if planned.timeline is None else planned.timeline.moments(),
        held=planned.held,
        reserved=planned.reserved,
        available=free_for_one(cli.trainer),
        compiled=planned.compiled,
    )


def free_for_one(trainer: Trainer) -> int | None:
    """Return the bytes that are free for one replica; ranks on the CPU share its memory."""
    device = trainer.strategy.root_device
    if device.type == "cpu":
        known = available_bytes(device)
        return None if known is None else known // trainer.num_devices
    # Ranks that will be forks of this process (ddp_fork, ddp_notebook) cannot use CUDA once it has opened the device,
    # and a query of free memory opens it.
    return None if START_METHOD.of_or(trainer.strategy.launcher) == "fork" else available_bytes(device)


def _reason(planned: Planned, available: int) -> str:
    causes = planned.causes.get(planned.phase)
    known = {} if causes is None else causes.model_dump()
    parts = [f"{CAUSES[cause]} {bytes_text(count)}" for cause, count in known.items() if count]
    needed, of = planned.certain, f" at the peak, in {planned.phase}"
    return (
        f"memory: expected at most the {bytes_text(available)} that are free, given {bytes_text(needed)}"
        f"{of if needed == planned.peak else ' without what a compiler might save'} ({', '.join(parts)})"
    )


def _remedies(cli: ProfilerCLI, limit_bytes: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the options that each alone make the run fit, and the first of others that need less."""
    gpu = gpu_of(cli.trainer.strategy.root_device)
    planned = told(ask(cli, gpu, "batch", limit_bytes, LIMIT_S, fresh=not cli.is_ours))
    ways = remedies(planned) if isinstance(planned, Planned) else []
    fitting, less = ([" ".join(way.words) for way in ways if way.surely_fits is known] for known in (True, False))
    return tuple(fitting), tuple(less[:_SHOWN])
