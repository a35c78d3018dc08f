"""What a run could switch on or off, a function for each kind: what it could save, and why it cannot work. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm_profiler.analysis.improve.trials import Candidate
from lm_profiler.record.entry import Entry
from lm_profiler.record.run import RunRecord

_FULL = (None, "32-true", "32", 32)
WITHOUT_CLIPPING = "training itself: gradients are not clipped"
OF_ONES_OWN = "an option that was asked for: what else it changes is not known"
OTHER_BATCH = "training itself: the global batch is another one"
_PER_BATCH = "what is computed over a batch, such as batch norm"
BY_WORKERS = "the batches, where workers share an iterable data set"
_BFLOAT16 = "rounding: activations and products are in bfloat16"
_FLOAT16 = "rounding: activations and products are in float16"
_TF32 = "rounding: factors of float32 products have 11 bits"
_ORDER = "rounding: sums are taken in another order"
ATTENTION = "model.attention"
WORKERS = ("data.num_workers", "loader.num_workers")


@dataclass(frozen=True)
class Hardware:
    """What the machine has. None is unknown: then the runs themselves will tell.

    Attributes:
        half_precision: The mixed precision that it multiplies faster than float32; "" for none.
        tf32: Whether it multiplies float32 as TF32.
        compiles: Why torch.compile cannot work here; "" where it can.
        cores: That the run may use.
        has_device: Whether batches are copied to a device.
    """

    half_precision: str | None
    tf32: bool | None
    compiles: str
    cores: int
    has_device: bool


@dataclass(frozen=True)
class FirstSetting:
    """What the first setting's run was set to, and what its step consists of."""

    entry: Entry
    record: RunRecord

    def option(self, path: str) -> Any:
        return self.entry.option(path)

    def has(self, path: str) -> bool:
        """Whether the run's parser knows the option ``path``."""
        head, _, name = path.rpartition(".")
        section: Any = (self.record.config or {}).get(head)
        section = section.get("init_args", section) if isinstance(section, Mapping) else {}
        return isinstance(section, Mapping) and name in section

    def phases_s(self, *names: str) -> float | None:
        """Mean seconds of a step that these phases take."""
        means = [self.record.time[name].mean for name in names if name in self.record.time]
        return sum(mean for mean in means if mean is not None) if means else None

    def terms_s(self, *names: str) -> float | None:
        """Seconds that these terms of the waterfall could save at most; None without a waterfall."""
        waterfall = self.record.waterfall
        if waterfall is None:
            return None
        return sum(term.at_most_s or 0.0 for term in waterfall.terms if term.name in names)


ChangesOfKind = Iterator[tuple[Candidate, str]]


def _one(
    options: Mapping[str, str], group: str, ceiling_s: float | None = None, may_change: str | None = None
) -> Candidate:
    return Candidate(name_of(options), options, group, ceiling_s, may_change)


def name_of(options: Mapping[str, str]) -> str:
    """What a candidate is called."""
    return " + ".join(f"{option}={text}" for option, text in options.items())


def _precision(s: FirstSetting, hardware: Hardware) -> ChangesOfKind:
    if s.option("trainer.precision") not in _FULL:
        return
    half = hardware.half_precision
    kind = half or "bf16-mixed"
    ceiling_s = s.phases_s("forward", "backward")
    change = _FLOAT16 if kind.startswith("16") else _BFLOAT16
    why = "this hardware multiplies no half precision faster" if half == "" else ""
    yield _one({"trainer.precision": kind}, "trainer.precision", ceiling_s, change), why


def _tf32(s: FirstSetting, hardware: Hardware) -> ChangesOfKind:
    name = _first_known(s, "model.float32_matmul_precision", "torch.float32_matmul_precision")
    if name is None or not hardware.has_device or s.option("trainer.precision") not in _FULL:
        return
    if s.record.environment is not None and s.record.environment.flags.get("float32_matmul_precision") != "highest":
        return
    why = "this hardware has no TF32" if hardware.tf32 is False else ""
    yield _one({name: "high"}, name, s.phases_s("forward", "backward"), _TF32), why


def _compile(s: FirstSetting, hardware: Hardware) -> ChangesOfKind:
    name = _first_known(s, "model.compile", "torch.compile")
    if name is None or not isinstance(s.option(name), bool):
        return
    if not s.option(name) and s.record.model is not None and s.record.model.compiled:
        return  # by its own code
    fused_s = s.terms_s("bandwidth", "beyond_bandwidth", "gaps", "unexplained")
    ceiling_s = s.phases_s("forward", "backward") if fused_s is None else fused_s
    if s.option(name):
        yield _one({name: "false"}, name, None, _ORDER), ""
        return
    yield _one({name: "true"}, name, ceiling_s, _ORDER), hardware.compiles
    mode = f"{name}_mode"
    if hardware.has_device and s.has(mode):
        # What the tuned kernels could win is in the products, too.
        for kind, most_s in (("reduce-overhead", ceiling_s), ("max-autotune", s.phases_s("forward", "backward"))):
            yield _one({name: "true", mode: kind}, name, most_s, _ORDER), hardware.compiles


def _fused(s: FirstSetting, hardware: Hardware) -> ChangesOfKind:
    if s.option("model.fused") is False:
        yield _one({"model.fused": "true"}, "model.fused", s.phases_s("optimizer"), _ORDER), ""


def _attention(s: FirstSetting, hardware: Hardware) -> ChangesOfKind:
    now = s.option(ATTENTION)
    other = {"math": "sdpa", "sdpa": "math"}.get(str(now))
    if other is not None:
        yield _one({ATTENTION: other}, ATTENTION, s.phases_s("forward", "backward"), _ORDER), ""


def _checkpointing(s: FirstSetting, hardware: Hardware) -> ChangesOfKind:
    for name in ("model.activation_checkpointing", "model.gradient_checkpointing"):
        if s.option(name) is True:
            ceiling_s = s.terms_s("recomputation") or s.phases_s("backward")
            yield _one({name: "false"}, name, ceiling_s), ""


def _batch(s: FirstSetting, hardware: Hardware) -> ChangesOfKind:
    batch, batches = s.option("data.batch_size"), s.option("trainer.accumulate_grad_batches")
    if not isinstance(batch, int) or not isinstance(batches, int):
        return
    checkpointed = s.option("model.activation_checkpointing")
    factor = 2
    while batches % factor == 0:
        options = {"data.batch_size": str(batch * factor), "trainer.accumulate_grad_batches": str(batches // factor)}
        yield _one(options, "batch", None, _PER_BATCH), ""
        if checkpointed is False:
            yield _one({**options, "model.activation_checkpointing": "true"}, "batch", None, _PER_BATCH), ""
        factor *= 2
    if batch % 2 == 0:
        options = {"data.batch_size": str(batch // 2), "trainer.accumulate_grad_batches": str(batches * 2)}
        yield _one(options, "batch", None, _PER_BATCH), ""
    for factor in (2, 4):
        yield _one({"data.batch_size": str(batch * factor)}, "batch", None, OTHER_BATCH), ""


def _workers(s: FirstSetting, hardware: Hardware) -> ChangesOfKind:
    name = _first_known(s, *WORKERS)
    if name is None:
        return
    now = s.option(name)  # None of the loader's option: as the data has it
    most = hardware.cores / _core_of_a_worker(s)
    for count in (1, 2, 4, 8):
        if count > (now or 0):
            why = "" if count <= most else f"there are {hardware.cores} cores for them"
            yield _one({name: str(count)}, "num_workers", s.phases_s("data"), BY_WORKERS), why


def _core_of_a_worker(s: FirstSetting) -> float:
    """How much of a core one who makes batches needs at most, by the first run; the whole of it where that is unknown.

    Over the time in which the loop waited for batches, its processes had so much CPU time, all else that they did
    included. What they wait for, files say, needs no core.
    """
    use, data_s, step_s = s.record.contention, s.phases_s("data"), s.phases_s("step")
    if use is None or use.waited_s is None or not data_s or not step_s:
        return 1.0
    makers = max(1, (s.record.loader.workers or 0) if s.record.loader is not None else 0)
    return min(1.0, max((use.had_s + use.waited_s) / (makers * use.wall_s * data_s / step_s), 1e-3))


def _pinned(s: FirstSetting, hardware: Hardware) -> ChangesOfKind:
    name = _first_known(s, "data.pin_memory", "loader.pin_memory")
    if name and (s.option(name) is False or (name == "loader.pin_memory" and s.option(name) is None)):
        why = "" if hardware.has_device else "batches are not copied to a device"
        yield _one({name: "true"}, name, s.phases_s("data", "transfer")), why


def _clipping(s: FirstSetting, hardware: Hardware) -> ChangesOfKind:
    if s.option("trainer.gradient_clip_val"):
        name = "trainer.gradient_clip_val"
        yield _one({name: "null"}, name, s.phases_s("clip"), WITHOUT_CLIPPING), ""


def _checks(s: FirstSetting, hardware: Hardware) -> ChangesOfKind:
    if s.option("trainer.detect_anomaly") is True:
        yield _one({"trainer.detect_anomaly": "false"}, "trainer.detect_anomaly", s.phases_s("forward", "backward")), ""
    if s.option("trainer.benchmark") is not True and hardware.has_device and s.has("trainer.benchmark"):
        name = "trainer.benchmark"
        yield _one({name: "true"}, name, s.phases_s("forward", "backward"), _ORDER), ""


def _first_known(s: FirstSetting, *names: str) -> str | None:
    return next((name for name in names if s.has(name)), None)


KINDS: Sequence[Callable[[FirstSetting, Hardware], ChangesOfKind]] = (
    *(_precision, _tf32, _compile, _fused, _attention, _checkpointing),
    *(_batch, _workers, _pinned, _clipping, _checks),
)


ADVISED: Mapping[str, Sequence[Callable[[FirstSetting, Hardware], ChangesOfKind]]] = {
    "input": (_workers, _pinned),
    "host": (_compile, _fused, _batch),
    "memory bandwidth": (_compile, _precision, _fused),
    "communication": (_batch,),
}
"""What the verdict advises goes before other changes whose ceilings are no lower."""
