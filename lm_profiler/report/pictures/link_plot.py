"""The picture of collectives: bus bandwidth against size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lm_profiler.report.pictures.drawing import SERIES_COLOURS, new_figure
from lm_profiler.report.tables.link_table import BUS, SIZE, LinkFigures
from lm_profiler.usage_error import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKERS, _DASHES = "osD^", ("-", "--", ":", "-.")


def bandwidths(rows: Sequence[LinkFigures]) -> Figure:
    """Draw a line for each collective, in a dash for each number of processes on each backend; both axes logarithmic.

    Raises:
        UsageError: none of ``rows`` has a bandwidth.
    """
    known = [row for row in rows if row.bus_bandwidth]
    if not known:
        raise UsageError("plot: expected a collective that could be timed, given none; the table says why")
    drawn, axes = new_figure(7.2, 4.0)
    groups = list(dict.fromkeys((row.backend, row.ranks) for row in known))
    ops = list(dict.fromkeys(row.op for row in known))
    for backend, ranks in groups:
        for at, op in enumerate(ops):
            line = [row for row in known if (row.backend, row.ranks, row.op) == (backend, ranks, op)]
            axes.plot(
                [row.size_bytes * SIZE.scale for row in line],
                [(row.bus_bandwidth or 0.0) * BUS.scale for row in line],
                color=SERIES_COLOURS[at % len(SERIES_COLOURS)],
                marker=_MARKERS[at % len(_MARKERS)],
                linestyle=_DASHES[groups.index((backend, ranks)) % len(_DASHES)],
                label=f"{op}, {ranks} x {backend}" if len(groups) > 1 else op,
            )
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    axes.set_xscale("log")
    axes.set_yscale("log")
    sizes = sorted({row.size_bytes * SIZE.scale for row in known})
    axes.set_xticks(sizes, [f"{size:.4g}" for size in sizes])
    axes.xaxis.minorticks_off()
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        which(StrMethodFormatter("{x:g}"))
    axes.set_xlabel(SIZE.heading)
    axes.set_ylabel("bus bandwidth (GB/s)")
    drawn.legend(loc="outside right upper", title="" if len(groups) > 1 else f"{groups[0][1]} x {groups[0][0]}")
    return drawn
