"""Draws what waiting is: one step of two ranks as their own clocks show it, told apart, and with the mend made.

Run by `generate.py` at each build. The times are made up; the arithmetic is that of the page: a collective releases
everybody when the last rank arrives.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from lm_profiler.report.pictures.drawing import PALE, PART_COLOURS

OWN_MS = [
    {"data": 5.0, "forward": 20.0, "backward": 30.0, "optimizer": 10.0},
    {"data": 35.0, "forward": 20.0, "backward": 30.0, "optimizer": 10.0},
]
"""Of each rank, what it works on. The collective, which is at backward's end, takes no time here."""

BEFORE = ("data", "forward", "backward")
MENDED = [OWN_MS[0], OWN_MS[1] | {"data": OWN_MS[0]["data"]}]


def draw(file: Path) -> None:
    """Three panels on one scale of time."""
    figure, panels = plt.subplots(
        3, 1, figsize=(8.5, 5.4), sharex=True, layout="constrained"
    )
    _as_clocked(
        panels[0],
        "What each rank’s own clock shows: both take 95 ms, and rank 0’s backward looks slow",
    )
    _told_apart(
        panels[1],
        OWN_MS,
        "Told apart: rank 0 waits 30 ms for rank 1, whose data takes 30 ms longer",
    )
    _told_apart(
        panels[2],
        MENDED,
        "With rank 1’s data as long as rank 0’s: the step ends 30 ms earlier",
    )
    before, after = (
        _released_ms(ranks) + OWN_MS[0]["optimizer"] for ranks in (OWN_MS, MENDED)
    )
    _arrow(panels[2], after, before, 0.5, "saved")
    panels[2].set_xlabel("ms of the step, on one clock")
    patches = [Patch(color=PART_COLOURS[part], label=part) for part in OWN_MS[0]]
    figure.legend(
        handles=[*patches, Patch(**_WAITING, label="waiting")],
        loc="outside upper center",
        ncols=5,
    )
    figure.savefig(file, facecolor="white")
    plt.close(figure)


_WAITING = {"facecolor": "white", "edgecolor": PALE, "hatch": "////", "lw": 0.8}


def _released_ms(ranks: list[dict[str, float]]) -> float:
    return max(_arrives_ms(own) for own in ranks)


def _arrives_ms(own: dict[str, float]) -> float:
    return sum(own[part] for part in BEFORE)


def _as_clocked(axes: Axes, title: str) -> None:
    """What phases alone say: the wait stands in the backward of the rank that is fast."""
    release = _released_ms(OWN_MS)
    for rank, own in enumerate(OWN_MS):
        shown = own | {"backward": own["backward"] + release - _arrives_ms(own)}
        _bar(axes, rank, shown, 0.0)
        middle = own["data"] + own["forward"] + shown["backward"] / 2
        axes.text(
            middle,
            rank,
            f"backward {shown['backward']:.0f} ms",
            ha="center",
            va="center",
            fontsize=9,
        )
    _frame(axes, title)


def _told_apart(axes: Axes, ranks: list[dict[str, float]], title: str) -> None:
    release = _released_ms(ranks)
    for rank, own in enumerate(ranks):
        arrives = _arrives_ms(own)
        _bar(axes, rank, {part: own[part] for part in BEFORE}, 0.0)
        if release > arrives:
            axes.barh(rank, release - arrives, 0.62, arrives, **_WAITING)
            axes.text(
                (arrives + release) / 2,
                rank,
                f" waits {release - arrives:.0f} ms ",
                ha="center",
                va="center",
                fontsize=9,
                bbox={"facecolor": "white", "lw": 0, "pad": 1},
            )
        _bar(axes, rank, {"optimizer": own["optimizer"]}, release)
        axes.plot(arrives, rank - 0.42, marker="v", color="black", ms=6, clip_on=False)
    axes.axvline(release, color="black", lw=1.2, ls=(0, (4, 2)))
    axes.text(release + 1, 1.47, "all released", fontsize=8.5, va="center")
    axes.text(_arrives_ms(ranks[0]) + 1.2, -0.45, "arrives", fontsize=8.5, va="center")
    _frame(axes, title)


def _bar(axes: Axes, rank: int, parts: dict[str, float], at: float) -> None:
    for part, ms in parts.items():
        axes.barh(
            rank, ms, 0.62, at, color=PART_COLOURS[part], edgecolor="white", lw=0.8
        )
        at += ms


def _arrow(axes: Axes, start: float, end: float, y: float, text: str) -> None:
    axes.annotate("", (start, y), (end, y), arrowprops={"arrowstyle": "->", "lw": 1.4})
    axes.text(
        (start + end) / 2,
        y - 0.18,
        f"{text} {end - start:.0f} ms",
        ha="center",
        va="bottom",
        fontsize=9,
    )


def _frame(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=9.5, loc="left")
    axes.set(
        yticks=[0, 1],
        yticklabels=["rank 0", "rank 1"],
        ylim=(1.65, -0.65),
        xlim=(0, 102),
    )
    axes.spines[["top", "right"]].set_visible(False)
