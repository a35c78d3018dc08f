"""What a term of the waterfall consists of: by module where there are modules, most of it first."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from lm_profiler.analysis.trace.kernel_sums import module_of
from lm_profiler.analysis.trace.pieces import Piece
from lm_profiler.analysis.why.traced import Gap, Weighed
from lm_profiler.record.run import Contributor

LARGEST = 8  # contributors that are kept of a term


@dataclass
class _Module:
    ns: float = 0.0
    count: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    names: Counter[str] = field(default_factory=Counter)
    largest: Weighed | None = None

    def add(self, piece: Piece, ns: float) -> None:
        self.ns += ns
        self.count += 1
        self.kinds[piece.kind] += ns  # type: ignore[assignment]
        self.counts[piece.kind] += 1
        self.names[piece.operator or piece.name] += ns  # type: ignore[assignment]
        if self.largest is None or ns > self.largest[1]:
            self.largest = (piece, ns)


def contributors(
    weighed: Iterable[Weighed],
    seconds: float,
    steps: int,
    things: str,
    why: Callable[[Piece], str | None] = lambda piece: None,
) -> list[Contributor]:
    """Return the largest modules of a term of ``seconds`` a step, which the weights are scaled to.

    Args:
        weighed: pieces of all ``steps`` traced steps.
        seconds: of the term, in one step.
        steps: how many were traced.
        things: what pieces are, in the plural.
        why: what is known of the largest piece of a module.
    """
    groups: defaultdict[tuple[str | None, str], _Module] = defaultdict(_Module)
    for piece, ns in weighed:
        if ns > 0:
            path = module_of(piece.module)[0]
            # What is no module's is told by itself: an optimizer, a loss that the module computes itself.
            what = "" if path is not None else f"{piece.phase}: {piece.operator or piece.name}"
            groups[path, what].add(piece, ns)
    total = sum(group.ns for group in groups.values())
    largest = sorted(groups.items(), key=lambda item: -item[1].ns)[:LARGEST]
    return [
        Contributor(
            module=path,
            what=what or _most(group.names),
            count=group.count / steps,
            seconds=seconds * group.ns / total,
            detail=_detail(group, seconds / total, steps, things, why),
        )
        for (path, what), group in largest
        if seconds > 0
    ]


def _detail(group: _Module, scale: float, steps: int, things: str, why: Callable[[Piece], str | None]) -> str | None:
    """Return how much of it is of the largest kind, and what is known of the largest piece."""
    kind = _most(group.kinds)
    count = f"{round(group.counts[kind] / steps, 2):,g}"  # of one step: 23 in two of them are 11.5
    told = f"{count} {kind} {things[:-1] if count == '1' else things}"
    said = [told if len(group.kinds) == 1 else f"{ms(group.kinds[kind] * scale)} in {told}"]
    if group.largest is not None and (reason := why(group.largest[0])) is not None:
        said.append(reason)
    return "; ".join(said)


def _most(counted: Counter[str]) -> str:
    return max(counted, key=lambda name: counted[name])


def ms(seconds: float) -> str:
    """Return ``seconds`` in words, to three digits at least."""
    value = seconds * 1e3
    return f"{value:,.0f} ms" if value >= 99.95 else f"{value:.3g} ms"


def by_phase(weighed: Iterable[tuple[str, float]], seconds: float) -> dict[str, float]:
    """Return how ``seconds`` are shared by the phases of what is ``weighed``."""
    ns: Counter[str] = Counter()
    for phase, weight in weighed:
        ns[phase] += weight  # type: ignore[assignment]
    total = ns.total()
    return {phase: seconds * weight / total for phase, weight in ns.most_common() if seconds > 0 and weight}


def waits(gaps: Iterable[Gap], seconds: float, steps: int) -> list[Contributor]:
    """Return the largest causes of ``gaps``, which together are ``seconds`` a step."""
    lost: Counter[tuple[str, str]] = Counter()
    count: Counter[tuple[str, str]] = Counter()
    for gap in gaps:
        lost[gap.phase, gap.what] += gap.ns
        count[gap.phase, gap.what] += 1
    total = lost.total()
    return [
        Contributor(
            module=None, what=f"{phase}: {what}", count=count[phase, what] / steps, seconds=seconds * ns / total
        )
        for (phase, what), ns in lost.most_common(LARGEST)
        if seconds > 0
    ]
