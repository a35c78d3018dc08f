"""The verb ``collectives``: how fast the processes of this machine exchange data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from lm_profiler.cli.surroundings import check_port, warn_of_shared_cores
from lm_profiler.cli.verbs.plan import size_bytes
from lm_profiler.cli.verbs.shared import choose_format, writable, write
from lm_profiler.measure.boundary import print_message
from lm_profiler.processes.rank_group import RankFailed, rank_messages
from lm_profiler.record.calls import FAILED, OK
from lm_profiler.record.entry import Collection
from lm_profiler.report.pictures.plots import bandwidths, check_picture, save_figure
from lm_profiler.report.tables.formats import SUFFIXES
from lm_profiler.report.tables.link_table import LinkFigures, link_table
from lm_profiler.usage_error import expect, expect_one_of

EXAMPLES = """\
for example:
  lm_profiler collectives
  lm_profiler collectives --processes 2 4 --sizes 1MB,16MB --output collectives.tex
  lm_profiler collectives --ops all_reduce --repeats 50 --plot bandwidth.svg"""

Op = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast"]
_SIZES = ("1MB", "4MB", "16MB", "64MB", "256MB", "1GB")
_FORMATS = tuple(kind for kind in SUFFIXES.values() if kind != "html")
_MOST_PROCESSES = 64
_MAX_BYTES = 1 << 40


@dataclass(frozen=True, kw_only=True)
class Options:
    """Time collectives between processes of this machine at several sizes: medians with intervals, and bandwidths.

    The time of a repeat is that of the slowest process. The result of each collective is checked once.

    Args:
        ops: all_reduce, all_gather, reduce_scatter, broadcast; if not given, all of them.
        sizes: Sizes such as 1MB or 64MiB, summed over all processes, as nccl-tests counts them.
        processes: Number of processes; several numbers are measured one after another. If not given, 2 or one per GPU.
        backend: gloo (on the CPU) or nccl (one GPU per process); if not given, nccl with several GPUs, else gloo.
        repeats: Maximum number of repeats of each measurement, which is a row of the table.
        budget_s: Time limit of each measurement in seconds; at least six repeats are made.
        format: terminal, markdown, latex, typst, csv, json or parquet; if not given, it follows from the suffix of
            output.
        output: Write the table to this file.
        plot: Draw bus bandwidth against size into this file: .svg, .png or .pdf.
    """

    ops: Sequence[Op] = get_args(Op)
    sizes: Sequence[str] = _SIZES
    processes: Sequence[int] = ()
    backend: Sequence[Literal["gloo", "nccl"]] = ()
    repeats: int = 20
    budget_s: float = 5.0
    format: str | None = None
    output: Path | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        for count in self.processes:
            expect(
                2 <= count <= _MOST_PROCESSES,
                "processes",
                f"2 to {_MOST_PROCESSES}",
                count,
            )
        expect(
            self.repeats >= 6,
            "repeats",
            "6 or more, because fewer give no interval",
            self.repeats,
        )
        expect(
            0 < self.budget_s < float("inf"),
            "budget_s",
            "seconds above 0",
            self.budget_s,
        )
        if self.format is not None:
            expect_one_of(_FORMATS, "format", self.format)
        object.__setattr__(self, "format", choose_format(self.format, self.output))
        expect(
            self.format != "html",
            "output",
            f"a table ({', '.join(_FORMATS)})",
            str(self.output),
        )
        if self.plot is not None:
            check_picture(self.plot)
        for size in self.sizes:
            size_bytes(size, "sizes", "64MB", _MAX_BYTES)


def run(options: Options) -> int:
    """Print or write the table, even if a process failed, and return the exit code: 1 if one failed."""
    rows: list[LinkFigures] = []
    code = OK
    try:
        for row in _measure(options):
            rows.append(row)
    except RankFailed as error:
        message = str(error)
        if rows:
            message += "; the table shows the results before that"
        print_message(message)
        code = FAILED
    finally:
        if rows:
            write(
                Collection(),
                [link_table(rows)],
                options.format or "terminal",
                options.output,
            )
    if options.plot is not None and rows:
        with writable(options.plot):
            save_figure(partial(bandwidths, rows), options.plot)
    return code


def _measure(options: Options) -> Iterator[LinkFigures]:
    """Yield a row for each collective, size and group of processes, as soon as it is measured."""
    import torch  # imported here, because --help does not need it
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # the stubs lack it

    from lm_profiler.measure.device.environment import cpu_cores
    from lm_profiler.measure.device.link_rate import LinkRequest, time_links

    gpus = torch.cuda.device_count()
    groups = _process_groups(
        options, gpus, has_nccl=torch.distributed.is_nccl_available()
    )
    # The processes find each other through this store, at MASTER_PORT or any free port.
    store = TCPStore("localhost", check_port(), is_master=True, wait_for_workers=False)
    sizes = [size_bytes(size, "sizes", "64MB") for size in options.sizes]
    for index, (backend, count) in enumerate(groups):
        warn_of_shared_cores(count, cpu_cores(), "the collectives")
        request = LinkRequest(
            backend,
            ranks=count,
            port=store.port,
            name=str(index),
            ops=options.ops,
            sizes_bytes=sizes,
            repeats=options.repeats,
            budget_s=options.budget_s,
        )
        print_message(
            f"timing {len(options.ops) * len(sizes)} collectives of {count} processes over {backend}"
        )
        for row in rank_messages(partial(time_links, request), count):
            yield LinkFigures(
                backend, count, row.op, row.size_bytes, row.seconds, row.unknown
            )


def _process_groups(
    options: Options, gpus: int, has_nccl: bool
) -> list[tuple[str, int]]:
    """Return the backend and the number of processes of each group.

    Raises:
        UsageError: this machine does not have enough GPUs.
    """
    default_backend = "nccl" if gpus > 1 and has_nccl else "gloo"
    default_counts = {"nccl": (max(gpus, 2),), "gloo": (2,)}
    groups: list[tuple[str, int]] = []
    for backend in options.backend or (default_backend,):
        for count in options.processes or default_counts[backend]:
            if backend == "nccl":
                expect(
                    gpus > 0,
                    "backend",
                    "gloo on a machine without NVIDIA GPUs",
                    backend,
                )
                expect(
                    count <= gpus,
                    "processes",
                    f"at most {gpus} for nccl, one for each GPU",
                    count,
                )
            groups.append((backend, count))
    return groups


VERBS = {"collectives": (Options, EXAMPLES, run)}
