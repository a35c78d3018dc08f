"""The verbs ``selftest`` (how far equal runs differ on this machine) and ``numerics`` (sums in low precision).

``selftest`` repeats one run in five fresh processes, so that only the machine can make the runs differ. Their spread is
kept for ``compare`` and ``improve``.
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
from lm_profiler.cli.verbs.shared import (
    AnswerFormat,
    choose_answer_format,
    write,
    write_json,
)
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

_SMALL_MODEL = (
    "--model.d_model=256",
    "--model.d_ff=1024",
    "--model.num_layers=4",
    "--model.num_heads=8",
    "--data.context_length=128",
)
_ONLY_TIMED = ("--actions.steps=0", "--memory.steps=0", "--trace.steps=0")
# the names of the equal runs; fewer runs would hardly show their spread
_PROCESSES = "ABCDE"
# of the comparisons whose smallest detectable change is printed
_RUNS_PER_SIDE = (1, 3)


@dataclass(frozen=True)
class Options:
    """Run the same fit in five fresh processes, and print how far equal runs differ on this machine.

    `compare` and `improve` use this spread. The smallest change that a comparison can detect is printed too.

    Args:
        format: terminal, or json.
        options: Options of fit; if none are given, a small model is run.
    """

    format: AnswerFormat = "terminal"
    options: Sequence[str] = ()


def run(options: Options) -> int:
    """Run the self-test with the options of ``fit`` and return the exit code."""
    fit_options = [*(options.options or _SMALL_MODEL), *_ONLY_TIMED]
    try:
        with tempfile.TemporaryDirectory(prefix="lm_profiler-selftest-") as folder:
            runs = [_fit(fit_options, Path(folder), name) for name in _PROCESSES]
    except subprocess.CalledProcessError as error:
        last_lines = "\n".join(error.stderr.strip().splitlines()[-2:])
        print(
            last_lines or f"a run of the self-test ended with code {error.returncode}",
            file=sys.stderr,
        )
        return FAILED
    spread = spread_of([run.time["step"].mean or 0.0 for run in runs])
    machine = runs[0].environment
    is_busy = any(run.contended for run in runs)
    spread_with_earlier = spread
    if spread is not None and machine is not None and not is_busy:
        # The spread on a busy machine says nothing about the machine itself.
        spread_with_earlier = save_spread(machine, spread)
    result = conclude_test(runs, spread, spread_with_earlier)
    if options.format == "json":
        write_json(result)
    else:
        print("\n".join(report_lines(result)))
    return OK


@dataclass(frozen=True)
class SelfTest:
    """The result of a self-test: how far equal runs differ on a machine."""

    device: str
    verb: str
    steps: list[TimeSummary]  # the step of each run
    # the verdict on each run, and which other programs used the machine
    words: list[str]
    seen: ProcessSpread | None  # spread of the runs; None if their steps are too few
    kept: ProcessSpread | None  # spread together with earlier self-tests on the machine
    # number of runs per side → smallest detectable change, as a share
    detectable: dict[int, float]
    # whether other programs used the machine; then the spread is not kept
    busy: bool = False


def conclude_test(
    runs: Sequence[RunRecord],
    spread: ProcessSpread | None,
    spread_with_earlier: ProcessSpread | None,
) -> SelfTest:
    """Return the result of ``runs``; a spread is None if they have too few steps."""
    smallest_changes: dict[int, float] = {}
    if spread is not None and spread_with_earlier is not None:
        smallest_changes = {
            count: detectable(spread_with_earlier, count) for count in _RUNS_PER_SIDE
        }
    machine = runs[0].environment
    return SelfTest(
        device="unknown" if machine is None else machine.device_name,
        verb=runs[0].verb,
        steps=[run.time["step"] for run in runs],
        words=[_verdict_text(run) for run in runs],
        seen=spread,
        kept=spread_with_earlier,
        detectable=smallest_changes,
        busy=any(run.contended for run in runs),
    )


def _verdict_text(run: RunRecord) -> str:
    words = ", ".join(run.words) or "too short to judge"
    return "; ".join([words, *contention_lines(run.contention)])


def report_lines(test: SelfTest) -> list[str]:
    """Return the lines that the self-test prints."""
    lines = [
        f"equal runs on {test.device}: the same {test.verb} {len(test.steps)} times, in fresh processes"
    ]
    for name, step, words in zip(_PROCESSES, test.steps, test.words, strict=False):
        lines.append(f"  {name}: step {_mean_with_interval(step)}, {words}")
    if test.seen is None or test.kept is None:
        lines.append("  too few steps to compare; raise --stages.measure_steps")
        return lines

    spread = f"{test.seen.std:.1%} (std)"
    has_earlier_tests = test.kept.freedom > test.seen.freedom
    if has_earlier_tests:
        spread += f"; {test.kept.std:.1%} with earlier self-tests"
    use = "kept for compare and improve"
    if test.busy:
        use = "not kept, because other programs used the machine; repeat it on an idle machine"
    lines.append(f"  processes differ by {spread}: {use}")
    line = f"  smallest change that can be detected with one run per side: {test.detectable[1]:.1%}"
    lines.append(f"{line}; with three runs per side: {test.detectable[3]:.1%}")
    return lines


def _mean_with_interval(step: TimeSummary) -> str:
    """Return the mean step with its interval, such as ``12.3 ms [12.1, 12.5]``."""
    figure = TIMES["step"]
    mean = figure.show(step.mean, unit=False)
    low = figure.show(step.mean_low, unit=False)
    high = figure.show(step.mean_high, unit=False)
    return f"{mean} ms [{low}, {high}]"


def _fit(options: Sequence[str], folder: Path, name: str) -> RunRecord:
    """Run ``fit`` in a fresh process and return its record; raise UsageError if the call is wrong."""
    call = (
        sys.executable,
        "-m",
        "lm_profiler",
        "fit",
        *options,
        f"--log_dir={folder}",
        f"--name={name}",
    )
    process = subprocess.run(call, capture_output=True, text=True, check=False)
    if process.returncode == WRONG_CALL:
        raise UsageError(message_in(process.stderr))
    process.check_returncode()
    return read_run(folder / name / "version_0")


# -- numerics ----------------------------------------------------------------------------------------------------------

NUMERICS_EXAMPLES = """\
for your own model under your own precision:
  lm_profiler fit --numerics.audit=true"""

_ADDEND, _TIMES = 0.01, 1000


@dataclass(frozen=True, kw_only=True)
class SumsOptions:
    """Add 0.01 a thousand times in float32, float16, bfloat16 and mixed precision, and explain why the sums differ.

    Args:
        format: terminal, markdown, latex, typst or json; if not given, it follows from the suffix of output.
        output: Write the table to this file.
    """

    format: str | None = None
    output: Path | None = None

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "format", choose_answer_format(self.format, self.output)
        )


def run_numerics(options: SumsOptions) -> int:
    """Print the table and return the exit code."""
    exact = _ADDEND * _TIMES
    headings = [
        Heading("sum", "sum"),
        Heading("result", "result", figures=True),
        Heading("off_by", "off by", figures=True),
        Heading("why", "why"),
    ]
    rows = []
    for addition, result, reason in sums():
        error = result / exact - 1
        error_cell = TableCell(error, f"{error:+.3%}")
        rows.append(
            [
                text_cell(addition),
                TableCell(result, f"{result:.4f}"),
                error_cell,
                text_cell(reason),
            ]
        )
    title = (
        f"{_ADDEND} added {_TIMES} times is {exact:g}; computed in low precision it is"
    )
    table = Table(headings, rows, above=[title])
    write(Collection(), [table], options.format or "terminal", options.output)
    return OK


def _bfloat16(value: np.float32) -> np.float32:
    """Return ``value`` rounded to bfloat16, which numpy does not have: to the nearest, ties to even."""
    bits = int(value.view(np.uint32))
    # bfloat16 has the upper 16 bits of float32. Half a unit of the last kept bit is added before the rest is dropped;
    # one less if that bit is 0, so that ties go to the even neighbour.
    last_kept_bit = bits >> 16 & 1
    rounded_bits = bits + 0x7FFF + last_kept_bit
    return np.uint32(rounded_bits & 0xFFFF0000).view(np.float32)


def sums() -> list[tuple[str, float, str]]:
    """Return for each combination of precisions how the sum is computed, its result, and the reason for its error."""
    single = np.float32(_ADDEND)
    half = np.float16(_ADDEND)
    float32_reason = "24 bits: each addition rounds by at most 5e-7"
    float16_reason = (
        "11 bits: above 8 the sum is a multiple of 1/128, so each 0.01 adds only 0.0078"
    )
    bfloat16_reason = (
        "8 bits: above 4 the sum is a multiple of 1/32, so adding 0.01 changes nothing"
    )
    addend_reason = (
        f"the sum is precise, but the addend is not: 0.01 in float16 is {half:.8f}"
    )
    cast_reason = (
        "the same sum, because the addend was rounded before it was cast to float32"
    )
    return [
        ("float32 += float32", _sum_in(np.float32, single), float32_reason),
        ("float16 += float16", _sum_in(np.float16, half), float16_reason),
        ("bfloat16 += bfloat16", _sum_in_bfloat16(single), bfloat16_reason),
        ("float32 += float16", _sum_in(np.float32, half), addend_reason),
        ("float32 += float32(float16)", _sum_in(np.float32, half), cast_reason),
    ]


def _sum_in(dtype: type[np.floating], addend: np.floating) -> float:
    """Return the sum of the addends in ``dtype``, added one by one; ``np.sum`` would add them in pairs."""
    return float(np.full(_TIMES, addend).cumsum(dtype=dtype)[-1])


def _sum_in_bfloat16(value: np.float32) -> float:
    """Return the sum of the addends in bfloat16: each is ``value``, and each partial sum is rounded."""
    addend = _bfloat16(value)
    total = np.float32(0.0)
    for _ in range(_TIMES):
        total = _bfloat16(total + addend)
    return float(total)


VERBS = {
    "selftest": (Options, EXAMPLES, run),
    "numerics": (SumsOptions, NUMERICS_EXAMPLES, run_numerics),
}
