"""The options of each remedy: those that `improve` tries, and those that `plan` rehearses where a run does not fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from lm_profiler.analysis.improve.trials import Candidate
from lm_profiler.analysis.plan.planned import Planned
from lm_profiler.analysis.remedies.remedy import (
    BFLOAT16,
    BY_WORKERS,
    FLOAT16,
    ORDER,
    OTHER_BATCH,
    OTHER_CONTEXT,
    OTHER_OPTIMIZER,
    PER_BATCH,
    TF32,
    WEIGHTS,
    FirstRun,
    Hardware,
    Smaller,
    faster,
    smaller,
)

ATTENTION = "model.attention"
WORKERS = ("data.num_workers", "loader.num_workers")
_BATCH, _BATCHES = "data.batch_size", "trainer.accumulate_grad_batches"
_CHECKPOINTING, _CHECKPOINTS = "model.activation_checkpointing", "model.checkpoint_every"
_PRECISION = "trainer.precision"
_FULL = (None, "32-true", "32", 32)
PRODUCTS = ("forward", "backward")
# smaller batches that a plan tries: the largest that fits may not, once gradients are held from batch to batch
_DIVISORS = 2

_Tried = Iterator[tuple[Candidate, str]]


def half_precision(run: FirstRun, hardware: Hardware) -> _Tried:
    if run.option(_PRECISION) not in _FULL:
        return
    kind = hardware.half_precision or "bf16-mixed"
    may_change = FLOAT16 if kind.startswith("16") else BFLOAT16
    why = "this hardware multiplies no half precision faster" if hardware.half_precision == "" else ""
    yield faster({_PRECISION: kind}, _PRECISION, run.phases_s(*PRODUCTS), may_change), why


def narrower(planned: Planned, context: int | None) -> Iterator[Smaller]:
    """Whoever asks for float64 needs it, and gets none of these."""
    precision = str(planned.settings.get(_PRECISION) or "32-true")
    if precision in _FULL:
        yield smaller({_PRECISION: "bf16-mixed"}, BFLOAT16)
    if precision in _FULL or precision.endswith("-mixed"):
        yield smaller({_PRECISION: "bf16-true"}, WEIGHTS)


def tf32(run: FirstRun, hardware: Hardware) -> _Tried:
    name = run.first_known("model.float32_matmul_precision", "torch.float32_matmul_precision")
    if name is None or not hardware.has_device or run.option(_PRECISION) not in _FULL:
        return
    environment = run.record.environment
    if environment is not None and environment.flags.get("float32_matmul_precision") != "highest":
        return
    why = "this hardware has no TF32" if hardware.tf32 is False else ""
    yield faster({name: "high"}, name, run.phases_s(*PRODUCTS), TF32), why


def compiled(run: FirstRun, hardware: Hardware) -> _Tried:
    name = run.first_known("model.compile", "torch.compile")
    if name is None or not isinstance(run.option(name), bool):
        return
    if run.option(name):
        yield faster({name: "false"}, name, None, ORDER), ""
        return
    if run.record.model is not None and run.record.model.compiled:
        return  # by its own code
    fused_s = run.terms_s("bandwidth", "beyond_bandwidth", "gaps", "unexplained")
    ceiling_s = run.phases_s(*PRODUCTS) if fused_s is None else fused_s
    yield faster({name: "true"}, name, ceiling_s, ORDER), hardware.compiles
    mode = f"{name}_mode"
    if hardware.has_device and run.has(mode):
        # What the tuned kernels could win is in the products, too.
        for kind, most_s in (("reduce-overhead", ceiling_s), ("max-autotune", run.phases_s(*PRODUCTS))):
            yield faster({name: "true", mode: kind}, name, most_s, ORDER), hardware.compiles


def other_attention(run: FirstRun, hardware: Hardware) -> _Tried:
    other = {"math": "sdpa", "sdpa": "math"}.get(str(run.option(ATTENTION)))
    if other is not None:
        yield faster({ATTENTION: other}, ATTENTION, run.phases_s(*PRODUCTS), ORDER), ""


def fused_attention(planned: Planned, context: int | None) -> Iterator[Smaller]:
    if planned.settings.get(ATTENTION) == "math":
        yield smaller({ATTENTION: "sdpa"}, ORDER)


def no_checkpointing(run: FirstRun, hardware: Hardware) -> _Tried:
    for name in (_CHECKPOINTING, "model.gradient_checkpointing"):
        if run.option(name) is True and not run.option(_CHECKPOINTS):
            yield faster({name: "false"}, name, run.terms_s("recomputation") or run.phases_s("backward")), ""
    if run.option(_CHECKPOINTS):
        off = {_CHECKPOINTS: "null", **({_CHECKPOINTING: "false"} if run.option(_CHECKPOINTING) else {})}
        yield faster(off, _CHECKPOINTS, run.terms_s("recomputation") or run.phases_s("backward")), ""


def checkpointing(planned: Planned, context: int | None) -> Iterator[Smaller]:
    if planned.settings.get(_CHECKPOINTING) is False and not planned.settings.get(_CHECKPOINTS):
        yield smaller({_CHECKPOINTING: "true"})


def other_batches(run: FirstRun, hardware: Hardware) -> _Tried:
    """Yield options for the same samples of a step in fewer batches or in more; then for more samples."""
    batch, batches = run.option(_BATCH), run.option(_BATCHES)
    if not isinstance(batch, int) or not isinstance(batches, int):
        return
    factor = 2
    while batches % factor == 0:
        options = {_BATCH: str(batch * factor), _BATCHES: str(batches // factor)}
        yield faster(options, "batch", None, PER_BATCH), ""
        if run.option(_CHECKPOINTING) is False and not run.option(_CHECKPOINTS):
            yield faster({**options, _CHECKPOINTING: "true"}, "batch", None, PER_BATCH), ""
        factor *= 2
    if batch % 2 == 0:
        yield faster({_BATCH: str(batch // 2), _BATCHES: str(batches * 2)}, "batch", None, PER_BATCH), ""
    for factor in (2, 4):
        yield faster({_BATCH: str(batch * factor)}, "batch", None, OTHER_BATCH), ""


def smaller_batches(planned: Planned, context: int | None) -> Iterator[Smaller]:
    """Divisors of the batch that was asked for, with as many samples a step; and the largest batch that fits."""
    batch = planned.batch or 0
    divisors = (n for n in range(min(planned.largest or 0, batch - 1), 0, -1) if batch % n == 0)
    yield from accumulated(planned, list(islice(divisors, _DIVISORS)))
    if planned.largest and planned.settings.get(_BATCH) == planned.batch:
        yield smaller({_BATCH: planned.largest}, OTHER_BATCH, is_known=True)


def accumulated(planned: Planned, sizes: Sequence[int]) -> Iterator[Smaller]:
    batch, times = planned.settings.get(_BATCH), planned.settings.get(_BATCHES) or 1
    if batch is None or batch != planned.batch:  # what the option says is then something else
        return
    for n in sizes:
        if n < batch:
            yield smaller({_BATCH: n, _BATCHES: times * batch // n}, PER_BATCH)


def workers(run: FirstRun, hardware: Hardware) -> _Tried:
    name = run.first_known(*WORKERS)
    if name is None:
        return
    now = run.option(name)  # None of the loader's option: as the data has it
    most = hardware.cores / _core_of_a_worker(run)
    for count in (1, 2, 4, 8):
        if count > (now or 0):
            why = "" if count <= most else f"there are {hardware.cores} cores for them"
            yield faster({name: str(count)}, "num_workers", run.phases_s("data"), BY_WORKERS), why


def _core_of_a_worker(run: FirstRun) -> float:
    """Return how much of a core a worker of the loader needs at most, by the first run; the whole of it where that is
    unknown.

    Over the time in which the loop waited for batches, its processes had so much CPU time, all else that they did
    included. What they wait for, files say, needs no core.
    """
    use, data_s, step_s = run.record.contention, run.phases_s("data"), run.phases_s("step")
    if use is None or use.waited_s is None or not data_s or not step_s:
        return 1.0
    makers = max(1, (run.record.loader.workers or 0) if run.record.loader is not None else 0)
    return min(1.0, max((use.had_s + use.waited_s) / (makers * use.wall_s * data_s / step_s), 1e-3))


def pinned(run: FirstRun, hardware: Hardware) -> _Tried:
    name = run.first_known("data.pin_memory", "loader.pin_memory")
    if name and (run.option(name) is False or (name == "loader.pin_memory" and run.option(name) is None)):
        why = "" if hardware.has_device else "batches are not copied to a device"
        yield faster({name: "true"}, name, run.phases_s("data", "transfer")), why


def benchmark(run: FirstRun, hardware: Hardware) -> _Tried:
    name = "trainer.benchmark"
    if run.option(name) is not True and hardware.has_device and run.has(name):
        yield faster({name: "true"}, name, run.phases_s(*PRODUCTS), ORDER), ""


def sgd(planned: Planned, context: int | None) -> Iterator[Smaller]:
    if planned.settings.get("model.optimizer") == "adamw":
        yield smaller({"model.optimizer": "sgd"}, OTHER_OPTIMIZER)


def shorter_context(planned: Planned, context: int | None) -> Iterator[Smaller]:
    """The largest context that fits."""
    if context and planned.context and context < planned.context:
        yield smaller({"data.context_length": context}, OTHER_CONTEXT)
