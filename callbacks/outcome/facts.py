"""What the recorder says of module, memory, energy and slack, of what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from lightning.pytorch import Trainer

from lm_profiler.analysis.steps.batch_counts import lasting_step_s
from lm_profiler.analysis.steps.summaries import mean_over_ranks
from lm_profiler.analysis.why.slack_model import held_in, slack
from lm_profiler.callbacks.instruments.whatif import HOST_PLACES
from lm_profiler.callbacks.measured import Measured
from lm_profiler.measure.counts.recompiles import is_compiled_in
from lm_profiler.record.quantities import MEMORY, duration_text
from lm_profiler.record.run import LoaderFacts, MemoryFacts, MemoryReading, ModelFacts, Slack, Telemetry
from lm_profiler.record.steps import Peaks, StepRow, StepTable


def model_facts(trainer: Trainer) -> ModelFacts:
    """Size, precision and optimizers of its module."""
    module = trainer.lightning_module
    parameters = list(module.parameters())
    embeddings = {id(m.weight) for m in module.modules() if type(m).__name__ == "Embedding"}
    total = sum(p.numel() for p in parameters)
    return ModelFacts(
        class_path=f"{type(module).__module__}.{type(module).__qualname__}",
        parameters=total,
        parameters_without_embedding=total - sum(p.numel() for p in parameters if id(p) in embeddings),
        trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        bytes=sum(t.numel() * t.element_size() for t in (*parameters, *module.buffers())),
        precision=str(trainer.precision),
        optimizers=[type(optimizer).__name__.lstrip("_") for optimizer in trainer.optimizers],
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        compiled=is_compiled_in(module),
    )


def slack_of(measured: Measured, notes: list[str]) -> Slack | None:
    """What the delays of the ``whatif`` stage cost; None where there were none."""
    if (of := measured.experiment) is None:
        return None
    steps = mean_over_ranks(StepTable.of(measured.rows).of_stages("whatif"))
    plain = [row for block in of.blocks if block.place is None for row in steps[block.kept : block.end]]
    own_s = {place: fmean(row.time(place) for row in plain) for place in HOST_PLACES} if plain else {}
    known = slack(held_in(of.blocks, of.delays_s, [row.time("step") for row in steps]), of.workers, own_s)
    if known is None:
        notes.append("slack unknown: the run ended before two whole rounds of delays")
        return None
    planned = dict.fromkeys(block.place for block in of.blocks if block.place is not None)
    if never := sorted(planned.keys() - {place.place for place in known.places}):
        notes.append(f"slack of {', '.join(never)} unknown: no delay was ever taken there")
    return known


def made_ahead_notes(loader: LoaderFacts | None, steps: Sequence[StepRow], batches: float) -> list[str]:
    """That the measured steps lived on batches that workers had made before; each worker may just have made one."""
    if loader is None or not steps or (loader.used_up or 0) <= (loader.workers or 0):
        return []
    mean_s = fmean(row.time("step") for row in steps)
    lasting_s = lasting_step_s(mean_s, len(steps), batches, loader)
    lasting = "what it takes in the long run is unknown, for those that were made meanwhile are too few"
    if lasting_s is not None:
        lasting = f"in the long run a step takes about {duration_text(lasting_s)}, not {duration_text(mean_s)}"
    before = f"{loader.used_up} of the {len(steps) * batches} batches that were measured had been made before"
    return [f"{before} by the loader's workers: {lasting}"]


def memory_facts(timed: StepTable, measured: Measured) -> MemoryFacts:
    """Peaks of the measured steps, and what the ``memory`` stage saw."""
    return MemoryFacts(
        measured=_reading(timed.largest_memory),
        parts={part: _reading(peaks) for part, peaks in measured.part_peaks.items()},
        causes=dict(measured.causes),
        held=measured.levels,
        allocator=measured.allocator,
    )


def _reading(peaks: Peaks) -> MemoryReading:
    return MemoryReading(**dict(zip(MEMORY, peaks, strict=True)))


def telemetry_of(measured: Measured, world: int, steps: Sequence[StepRow], tokens: int | None) -> Telemetry | None:
    """With a step's share of the energy, which goes by its time; unknown where not all ranks told of their GPUs."""
    reading = measured.telemetry
    if reading is None or reading.energy_j is None or not reading.duration_s or not steps or measured.ranks < world:
        return reading
    mean_s = sum(row.time("step") for row in steps) / len(steps)
    per_step = reading.energy_j * mean_s / reading.duration_s
    shares = {"energy_per_step_j": per_step, "energy_per_token_j": per_step / tokens if tokens else None}
    return reading.model_copy(update=shares)
