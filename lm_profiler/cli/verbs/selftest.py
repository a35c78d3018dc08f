"""The verbs ``selftest`` and ``numerics``: how far to trust this machine's figures, and sums in low precision.

The same run is repeated in five fresh processes, so that only the machine can make them differ. Their spread is kept
for ``compare`` and ``improve``.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lm_profiler.analysis.compare.ratio import detectable
from lm_profiler.analysis.hardware.roofline import contention_lines
from lm_profiler.cli.option_errors import message_in
from lm_profiler.cli.verbs.shared import AnswerFormat, choose_answer_format, write, write_json
from lm_profiler.record.calls import FAILED, OK, WRONG_CALL
from lm_profiler.record.entry import Collection
from lm_profiler.record.process_spread import ProcessSpread, save_spread, spread_of
from lm_profiler.record.quantities import TIMES
from lm_profiler.record.run_record import RunRecord, TimeSummary, read_run
from lm_profiler.report.tables.table import Heading, Table, TableCell, text_cell
from lm_profiler.usage_error import UsageError

EXAMPLES = """\
for example:
  lm_profiler selftest
  lm_profiler selftest --config demo --stages.measure_steps=50"""

_TOY = (
    *("--model.d_model=256", "--model.d_ff=1024", "--model.num_layers=4", "--model.num_heads=8"),
    "--data.context_length=128",
)
_UNTIMED_OFF = ("--actions.steps=0", "--memory.steps=0", "--trace.steps=0")
_PROCESSES = "ABCDE"  # The names of the equal runs. Two runs would say too little about their spread.


@dataclass(frozen=True)
class Options:
    """Run the same fit in five fresh processes, and print by how much equal runs differ on this machine.

    compare and improve use that spread. Also print the smallest change that a comparison can detect.

    Args:
        format: terminal, or json.
        options: Options of fit; without any, a small model.
    """

    format: AnswerFormat = "terminal"
    options: Sequence[str] = ()


def run(options: Options) -> int:
    """Run the self-test with the options of ``fit`` and return the exit code."""
    given = [*(options.options or _TOY), *_UNTIMED_OFF]
    try:
        with tempfile.TemporaryDirectory(prefix="lm_profiler-selftest-") as folder:
            runs = [_fit(given, Path(folder), name) for name in _PROCESSES]
    except subprocess.CalledProcessError as error:
        said = "\n".join(error.stderr.strip().splitlines()[-2:])
        print(said or f"a run of the self-test ended with code {error.returncode}", file=sys.stderr)
        return FAILED
    seen = spread_of([run.time["step"].mean or 0.0 for run in runs])
    machine = runs[0].environment
    kept = seen
    is_busy = any(run.contended for run in runs)
    if seen is not None and machine is not None and not is_busy:  # a load says nothing of the machine itself
        kept = save_spread(machine, seen)
    told = tested(runs, seen, kept)
    if options.format == "json":
        write_json(told)
    else:
        print("\n".join(report(told)))
    return OK


@dataclass(frozen=True)
class SelfTest:
    """How far equal runs differ on a machine."""

    device: str
    verb: str
    steps: list[TimeSummary]  # the step of each run
    words: list[str]  # the verdict on each run, with what else used the machine
    seen: ProcessSpread | None  # spread of the runs' steps; None if they are too few
    kept: ProcessSpread | None  # spread with earlier self-tests of the machine
    detectable: dict[int, float]  # smallest detectable change, as a share, by runs per side
    busy: bool = False  # whether other programs used the machine: then nothing is kept for compare and improve


def tested(runs: Sequence[RunRecord], seen: ProcessSpread | None, kept: ProcessSpread | None) -> SelfTest:
    """Return what ``runs`` show."""
    known = {} if seen is None or kept is None else {count: detectable(kept, count) for count in (1, 3)}
    where = runs[0].environment.device_name if runs[0].environment is not None else "unknown"
    said = [(", ".join(run.words) or "too short to judge", *contention_lines(run.contention)) for run in runs]
    steps = [run.time["step"] for run in runs]
    is_busy = any(run.contended for run in runs)
    return SelfTest(where, runs[0].verb, steps, list(map("; ".join, said)), seen, kept, known, is_busy)


def report(told: SelfTest) -> list[str]:
    """Return the lines of the self-test."""
    steps, seen, kept = told.steps, told.seen, told.kept
    lines = [f"equal runs on {told.device}: the same {told.verb} {len(steps)} times, in fresh processes"]
    for name, step, words in zip(_PROCESSES, steps, told.words, strict=False):
        middle, low, high = (TIMES["step"].show(end, unit=False) for end in (step.mean, step.mean_low, step.mean_high))
        lines.append(f"  {name}: step {middle} ms [{low}, {high}], {words}")
    if seen is None or kept is None:
        return [*lines, "  too few steps to compare; raise --stages.measure_steps"]
    earlier = "" if kept.freedom <= seen.freedom else f"; {kept.std:.1%} with earlier self-tests"
    one, three = (f"{told.detectable[runs_a_side]:.1%}" for runs_a_side in (1, 3))
    use = "kept for compare and improve"
    if told.busy:
        use = "not kept, for other programs used the machine; repeat it while the machine is quiet"
    return [
        *lines,
        f"  processes differ by {seen.std:.1%} (std){earlier}: {use}",
        f"  smallest change that one run against one can detect: {one}; three against three: {three}",
    ]


def _fit(options: Sequence[str], folder: Path, name: str) -> RunRecord:
    """Run ``fit`` in a fresh process; a wrong call raises its own UsageError."""
    call = (sys.executable, "-m", "lm_profiler", "fit", *options, f"--log_dir={folder}", f"--name={name}")
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    if done.returncode == WRONG_CALL:
        raise UsageError(message_in(done.stderr))
    done.check_returncode()
    return read_run(folder / name / "version_0")


# -- numerics ----------------------------------------------------------------------------------------------------------

NUMERICS_EXAMPLES = """\
for your own model under your own precision:
  lm_profiler fit --numerics.audit=true"""

_ADDEND, _TIMES = 0.01, 1000


@dataclass(frozen=True, kw_only=True)
class SumsOptions:
    """Add 0.01 a thousand times in float32, in float16, in bfloat16, and mixed, and say why the sums differ.

    Args:
        format: terminal, markdown, latex, typst or json; if not given, as output's suffix says.
        output: Write the table to this file.
    """

    format: str | None = None
    output: Path | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", choose_answer_format(self.format, self.output))


def run_numerics(options: SumsOptions) -> int:
    """Print the table and return the exit code."""
    exact = _ADDEND * _TIMES
    headings = [Heading("sum", "sum"), Heading("result", "result", True), Heading("off_by", "off by", True)]
    cells = []
    for how, value, why in sums():
        off = value / exact - 1
        cells.append([text_cell(how), TableCell(value, f"{value:.4f}"), TableCell(off, f"{off:+.3%}"), text_cell(why)])
    above = [f"{_ADDEND} added {_TIMES} times is {exact:g}; here it is"]
    table = Table([*headings, Heading("why", "why")], cells, above)
    write(Collection(), [table], options.format or "terminal", options.output)
    return OK


def _bfloat16(value: np.float32) -> np.float32:
    """Return ``value`` rounded to bfloat16, which numpy lacks: to the nearest, ties to even."""
    bits = int(value.view(np.uint32))
    return np.uint32((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)


def sums() -> list[tuple[str, float, str]]:
    """Return the same sum in each combination of precisions: how it is added, its result, and why."""
    whole, half = np.float32(_ADDEND), np.float16(_ADDEND)
    of_sum = "11 bits: from 8 on the sum moves in steps of 1/128, and 0.01 becomes 0.0078"
    of_addend = f"the sum is kept well; the addend is not: 0.01 in float16 is {half:.8f}"
    of_cast = "the same: the addend is cast up before it is added"

    def added(kind: type[np.floating], addend: np.floating) -> float:
        """Add one by one, to a sum of ``kind``; ``np.sum`` would add in pairs."""
        return float(np.full(_TIMES, addend).cumsum(dtype=kind)[-1])

    narrow, low = np.float32(0.0), _bfloat16(whole)
    for _ in range(_TIMES):
        narrow = _bfloat16(narrow + low)
    return [
        ("float32 += float32", added(np.float32, whole), "24 bits: each addition rounds by at most 5e-7"),
        ("float16 += float16", added(np.float16, half), of_sum),
        ("bfloat16 += bfloat16", float(narrow), "8 bits: at 4 the sum moves in steps of 1/32, which 0.01 is lost in"),
        ("float32 += float16", added(np.float32, half), of_addend),
        ("float32 += float32(float16)", added(np.float32, half), of_cast),
    ]


VERBS = {"selftest": (Options, EXAMPLES, run), "numerics": (SumsOptions, NUMERICS_EXAMPLES, run_numerics)}
