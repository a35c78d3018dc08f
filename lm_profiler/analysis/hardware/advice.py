"""One concrete next thing to try for each cause, never one that is on already or that this machine has not.

A remedy is offered only where the setting is known to be off: an unknown setting (None) may well be on.
"""

from __future__ import annotations

from dataclasses import dataclass

from lm_profiler.record.run import RankFinding

_HEAVY_OPTIMIZER = 0.25
_TF32 = "Allow TF32 products: torch.set_float32_matmul_precision('high')."


@dataclass(frozen=True)
class Settings:
    """What a run has switched on; None is unknown, and nothing is advised about it.

    Attributes:
        precision: Lightning's, e.g. "32-true" or "bf16-mixed"; or the half precision that most is multiplied in.
        tf32: whether float32 products may use TF32 (None also where the device has none).
        half_precision: the mixed precision that the device has matrix units for; None where it has none, or unknown.
        compiled: torch.compile is on.
        num_workers: of the DataLoader.
        cores: CPU cores that this process may use for them.
        pin_memory: of the DataLoader.
        fused_optimizer: the optimizer runs as one fused kernel (None also where it cannot).
        checkpointing: activations are recomputed in backward.
        tokens_per_batch: tokens in one batch on one device.
        memory_free_share: share of the device's memory that the peak leaves free.
        tracing: a trace was asked for, recorded or not.
    """

    precision: str | None = None
    tf32: bool | None = None
    half_precision: str | None = None
    compiled: bool | None = None
    num_workers: int | None = None
    cores: int | None = None
    pin_memory: bool | None = None
    fused_optimizer: bool | None = None
    checkpointing: bool | None = None
    tokens_per_batch: int | None = None
    memory_free_share: float | None = None
    tracing: bool = False

    @property
    def full_precision(self) -> bool:
        """Known to run in float32."""
        return self.precision is not None and str(self.precision).split("-")[0] == "32"

    @property
    def can_halve(self) -> bool:
        """Known to run in float32 where there is a faster precision."""
        return self.full_precision and self.half_precision is not None


def for_straggler(finding: RankFinding) -> str:
    """One rank is slower than the others, or several, or a host, or each in its turn."""
    if finding.kind == "turns":
        return _first(
            (
                finding.phase == "data",
                "Load further ahead (prefetch_factor): one late batch then stops nobody.",
            ),
            (
                finding.phase in ("forward", "backward"),
                "Give all ranks batches of like length (bucket or pack them).",
            ),
            otherwise="Find what stops one rank at a time: logging, checkpoints, garbage collection, other programs.",
        )
    if finding.kind == "several":
        return "See what these ranks have in common: their data, their disks, their host or switch, longer batches."
    who = f"host {finding.host}" if finding.kind == "host" else f"rank {finding.rank} (host {finding.host})"
    if finding.phase in ("data", "transfer"):
        return f"See what {who} reads its data from: its disk or network, the cores its loader has, its longer samples."
    return f"See what {who} has that the others have not: other programs, a lower clock, fewer cores, longer batches."


def for_input(s: Settings, copying: bool) -> str:
    """The batch comes late: by the copy to the device (`copying`), or by its making."""
    if copying and s.pin_memory is False:
        return "Pin the batches' memory (pin_memory=True): copies then overlap with work."
    if copying:
        return "Send less: token ids as int32 instead of int64, and only what the step uses."
    prepare = "Prepare (tokenize, pack) the data before training"
    if s.num_workers is None:
        return f"Give the DataLoader more workers, or {prepare[0].lower()}{prepare[1:]}."
    more = 2 * s.num_workers or 2
    workers = more if s.cores is None else min(more, s.cores)
    if workers <= s.num_workers:
        return f"{prepare}: there are as many workers ({s.num_workers}) as CPU cores for them."
    if s.num_workers == 0:
        return f"Load batches in the background: num_workers={workers}."
    return f"Raise num_workers from {s.num_workers} to {workers}, or tokenize before training."


def for_host(s: Settings) -> str:
    """The device waits for launches: fewer and bigger kernels."""
    return _first(
        (s.compiled is False, "Try torch.compile: it fuses small kernels into fewer launches."),
        (s.fused_optimizer is False, "Use the fused optimizer (fused=True): one launch instead of hundreds."),
        otherwise=_larger_batch(s, "the same launches then do more work"),
    )


def for_memory(s: Settings, optimizer_share: float) -> str:
    """Bytes are what costs: move fewer, or use them more often."""
    return _first(
        *_lighter_optimizer(s, optimizer_share),
        (
            s.compiled is False,
            "Try torch.compile: fused kernels read and write memory once instead of once per operator.",
        ),
        (s.can_halve, f"Try precision {s.half_precision}: half the bytes."),
        otherwise=_larger_batch(s, "each weight read then serves more tokens"),
    )


def for_communication(s: Settings) -> str:
    """Gradients cross the wire once a step, whatever the step computes."""
    return _larger_batch(s, "gradients are exchanged once a step, however many tokens it has")


def for_compute(s: Settings, optimizer_share: float, utilisation: float, on_device: bool) -> str:
    """Arithmetic: make it cheaper, or do not do it twice."""
    spare = s.memory_free_share is not None and s.memory_free_share >= 0.3
    rest = "Little is left to gain: use a smaller model, a shorter context or faster hardware."
    if utilisation < 0.6:
        rest = _larger_batch(s, "larger matrix products run closer to the peak")
    return _first(
        *_lighter_optimizer(s, optimizer_share),
        (on_device and s.full_precision and s.tf32 is False, _TF32),
        (on_device and s.can_halve, f"Try precision {s.half_precision}: it runs on tensor cores."),
        (s.compiled is False, "Try torch.compile."),
        (s.checkpointing is True and spare, "Switch activation checkpointing off: memory is free for it."),
        otherwise=rest,
    )


def for_unknown(s: Settings, optimizer_share: float, traced: bool) -> str:
    """Nothing shows: look closer."""
    look = "Record a trace (--trace.steps=3) and look for gaps and for what takes longest."
    if s.tracing:
        look = "Run it again until its trace is recorded, and look there for gaps and for what takes longest."
    if traced:
        look = "Look for gaps and for what takes longest in the trace (report RUN --kernels)."
    return _first(*_lighter_optimizer(s, optimizer_share), otherwise=look)


def _lighter_optimizer(s: Settings, share: float) -> list[tuple[bool, str]]:
    heavy = share >= _HEAVY_OPTIMIZER
    return [
        (heavy and s.fused_optimizer is False, "Use the fused optimizer (fused=True): one pass over the weights."),
        (heavy, "Accumulate gradients (accumulate_grad_batches) or enlarge the batch: fewer updates per token."),
    ]


def _larger_batch(s: Settings, why: str) -> str:
    now = "" if s.tokens_per_batch is None else f" (now {s.tokens_per_batch} tokens)"
    full = s.memory_free_share is not None and s.memory_free_share < 0.1
    if full and s.checkpointing is False:
        return f"Memory is full: try activation checkpointing, then a larger batch{now}: {why}."
    if full:
        return f"Memory is full: accumulate gradients over more batches{now}: {why}."
    return f"Try a larger batch{now}: {why}."


def _first(*options: tuple[bool, str], otherwise: str) -> str:
    return next((text for applies, text in options if applies), otherwise)
