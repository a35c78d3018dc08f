"""A waterfall whose figures can be checked by hand: 168.3 ms = 62.1 + 41 + 30.2 + 20 + 9 + 0.8 + 0.9 + 3 + 1.3."""

from typing import Any

from lm_profiler.record.run_record import Contributor, Term, Waterfall

STEP_MS = 168.3
TERMS_MS = {
    "ideal": 62.1,
    "clock": 0.8,
    "slow_products": 41.0,
    "recomputation": 0.0,
    "bandwidth": 20.0,
    "beyond_bandwidth": 30.2,
    "communication": 0.9,
    "waiting": 0.0,
    "gaps": 9.0,
    "input": 3.0,
    "unexplained": 1.3,
}
CEILINGS_MS = {"slow_products": 41.0, "beyond_bandwidth": 30.2, "gaps": 9.0, "clock": 0.8, "input": 3.0}

_CONTRIBUTORS = {
    "slow_products": [
        ("model.head", "aten::mm", 2, 8.5, "tiles of 128 x 128 waste 31 %"),
        ("model.blocks.*.attn", "aten::mm", 96, 21.0, "13 ms in 48 matmul kernels; m 512, n 768, k 64"),
        ("model.blocks.*.ff", "aten::mm", 72, 11.5, None),
    ],
    "beyond_bandwidth": [("model.blocks.*.attn", "softmax", 12, 19.2, None), (None, "<b>Memcpy</b>", 3.5, 11.0, None)],
    "gaps": [(None, "waiting for the host", 310, 9.0, "cudaLaunchKernel")],
}


def made_waterfall(terms_ms: dict[str, float] | None = None, step_ms: float = STEP_MS, **options: Any) -> Waterfall:
    """Of ``terms_ms``; a third of each term is of forward, the rest of backward, but ``input`` is of data."""
    facts: dict[str, Any] = {
        "source": "kernels",
        "step_s": step_ms / 1e3,
        "ci_low": (step_ms - 1) / 1e3,
        "ci_high": (step_ms + 2) / 1e3,
        "peak_flops_per_s": 312e12,
        "peak_source": "a datasheet",
        "bandwidth_bytes_per_s": 2039e9,
        "bandwidth_source": "a datasheet",
        "clock_share": 0.987,
        "terms": [_term(name, ms / 1e3) for name, ms in (TERMS_MS if terms_ms is None else terms_ms).items()],
    }
    return Waterfall(**{**facts, **options})


def _term(name: Any, seconds: float) -> Term:
    phases = {"data": seconds} if name == "input" else {"forward": seconds / 3, "backward": seconds * 2 / 3}
    contributors = [
        Contributor(module=module, what=what, count=count, seconds=ms / 1e3, detail=detail)
        for module, what, count, ms, detail in _CONTRIBUTORS.get(name, ())
    ]
    at_most_s = CEILINGS_MS[name] / 1e3 if name in CEILINGS_MS else None
    return Term(name=name, seconds=seconds, at_most_s=at_most_s, phases=phases, contributors=contributors)
