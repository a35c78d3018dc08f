"""Is the first advice right? Programs of three kinds, each with one slowness planted, and what is said of it.

    python -m benchmarks.advice [--only vision] [--busy 2] [--json out.json]

Each case is a program in a fresh process: a convolutional net, a language model or a GAN (manual optimization), with a
plant whose cause is known. The first finding must be that cause, in that place. ``--busy`` runs so many other processes
beside it that compute without end. Programs without a plant must not be told anything for certain.

With ``--gains`` the program also runs without the profiler, three times with the plant and three times with its remedy,
in turns. The difference of their mean steps, with all that passes between steps, is the true gain. "Saves at most" is
true if it lies between the least of the three differences and 1.5 times the largest. Both are compared as shares of the
mean step, because on a busy machine all steps get longer and shorter from minute to minute.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lm_profiler.record.findings import Finding

Names = tuple[str, ...]


@dataclass(frozen=True)
class Case:
    """A program, the plant in it, and which findings are right: their names, and what their place must hold."""

    program: str
    plant: str
    right: Names
    place: str = ""
    # the plant of the program with the remedy; None if that is another program
    remedied: str | None = ""


_ALL = {
    "sleep in forward": (("sleep",), "wait"),
    "lock in forward": (("sleep",), "locked"),
    "thread that polls": (("threads",), "poll"),
    "Python in forward": (("python",), "comput"),
    "numpy in forward": (("python",), "in_numpy"),
    "small operators in forward": (("python",), "small_operators"),
    "sleep in backward": (("sleep",), "hook"),
    "sleep in the optimizer": (("sleep",), "step"),
    "callback sleeps": (("owner",), "Sleeping"),
    "callback computes": (("owner",), "Computing"),
    "weights averaged in Python": (("owner",), "Averaging"),
    "logs 300 values": (("logging", "owner"), ""),
    "histograms": (("owner", "logging"), ""),
    "checkpoint every two steps": (("checkpoint",), ""),
    "validation every five steps": (("validation",), ""),
    "loader sleeps": (("input",), ""),
    "loader computes": (("input",), ""),
    "one slow worker": (("input",), ""),
    "short epochs": (("epoch", "worker_start"), ""),
    "optimizer without foreach": (("optimizer",), "", None),
    "garbage": (("garbage", "python"), ""),
    "every fifth step sleeps": (("pattern", "sleep"), ""),
    "full collections every seventh step": (("garbage", "python"), ""),
    "workers start anew": (("worker_start",), "", "workers stay"),
    "loader made anew": (("reload",), "train_dataloader", "loader made once"),
    "slow hook as an epoch ends": (("owner",), "SlowEpochEnd", "epochs of six"),
    "validation every 25 steps": (("validation",), ""),
    "full queue": (("input",), ""),
    "anomalies": (("anomalies",), ""),
}
_NOT_OF_THE_GAN = ("sleep in the optimizer", "optimizer without foreach", "anomalies")
_ONLY = {
    "vision": {
        "batch of 2": (("small_batch",), "", None),
        "float64": (("double",), ""),
    },
    "language": {
        "batch of 1": (("small_batch",), "", None),
        "recomputation": (("recomputation", "compile", "small_batch"), ""),
    },
    "gan": {},
}

CASES = [
    Case(program, plant, *right)
    for program in ("vision", "language", "gan")
    for plant, right in {**_ALL, **_ONLY[program]}.items()
    if program != "gan" or plant not in _NOT_OF_THE_GAN
]
CONTROLS = [Case(program, "", ()) for program in ("vision", "language", "gan")]


# The program: what runs in the child process.


def _program(case: Case, folder: str) -> None:
    import lightning.pytorch as pl
    import torch

    from benchmarks.advice_programs import make

    torch.manual_seed(0)
    module, data, options, callbacks = make(case.program, case.plant, folder)
    from lm_profiler.callbacks import profiling_callbacks

    ours = profiling_callbacks(log_dir=folder, name="run")
    usual = {
        "accelerator": "cpu",
        "max_epochs": -1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    usual |= {"logger": False, "enable_checkpointing": False, "num_sanity_val_steps": 0}
    pl.Trainer(callbacks=[*callbacks, *ours], **{**usual, **options}).fit(module, *data)


_TIMED_STEPS, _UNTIMED_STEPS = 24, 6
_GAINS = "gains"  # begins the line in which a child process prints them
_TURNS = 3  # fits with the plant and with its remedy, in turns: the machine's speed differs from minute to minute


def _print_gains(program: str, plant: str, remedied: str, folder: str) -> None:
    """Train with the plant and with its remedy in turns, and print which share of the mean step each turn gained."""
    gains: list[float] = []
    for turn in range(_TURNS):
        planted_s = _mean_step_s(program, plant, f"{folder}/planted{turn}")
        remedied_s = _mean_step_s(program, remedied, f"{folder}/remedied{turn}")
        gains.append((planted_s - remedied_s) / planted_s)
    print(_GAINS, *gains)


def _mean_step_s(program: str, plant: str, folder: str) -> float:
    """Train without the profiler, and return the mean seconds of a step with all that passes between steps."""
    import lightning.pytorch as pl
    import torch

    from benchmarks.advice_programs import make

    class Instants(pl.Callback):
        def __init__(self) -> None:
            self.began_s: list[float] = []

        def on_train_batch_start(self, *_: object) -> None:
            self.began_s.append(time.perf_counter())

    torch.manual_seed(0)
    module, data, options, callbacks = make(program, plant, folder)
    instants = Instants()
    usual = {
        "accelerator": "cpu",
        "max_epochs": -1,
        "max_steps": _UNTIMED_STEPS + _TIMED_STEPS + 1,
        "logger": False,
    }
    usual |= {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    pl.Trainer(
        callbacks=[*callbacks, instants],
        **{**usual, "num_sanity_val_steps": 0, **options},
    ).fit(module, *data)
    began_s = instants.began_s[_UNTIMED_STEPS:]
    return (began_s[-1] - began_s[0]) / (len(began_s) - 1)


def gains_of(case: Case, folder: Path) -> list[float]:
    """Return by which share the remedy shortened the mean step in each turn; empty if it is another program."""
    if case.remedied is None or not case.plant:
        return []
    names = [case.program, case.plant, case.remedied, str(folder / "timed")]
    arguments = [sys.executable, "-m", "benchmarks.advice", "--timed", *names]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        arguments, capture_output=True, text=True, check=True, env=environment
    )
    for line in ended.stdout.splitlines():
        words = line.split()
        if words and words[0] == _GAINS:
            return [float(gain) for gain in words[1:]]
    raise ValueError(f"no gains in the output of {names}")


def judged(case: Case, folder: Path, gains: bool = False) -> dict[str, object]:
    """Run a case; what was said first, whether it was right, and with ``gains`` how true "saves at most" is."""
    began = time.perf_counter()
    arguments = [
        sys.executable,
        "-m",
        "benchmarks.advice",
        "--program",
        case.program,
        case.plant,
        str(folder),
    ]
    done = subprocess.run(
        arguments,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    from lm_profiler.record.run_record import read_run

    try:
        record = read_run(folder / "run" / "version_0")
    except Exception:
        error = done.stderr[-2000:]
        return {
            "program": case.program,
            "plant": case.plant or "nothing",
            "right": False,
            "error": error,
        }
    found = record.findings
    first = found[0] if found else None
    place = "" if first is None else f"{first.owner} {first.file} {first.what}"
    right = first is not None and first.name in case.right and case.place in place
    step_s = record.time["step"].mean if record.time else None
    at_most = None if first is None or not right else _at_most(first)
    said = (
        ""
        if first is None
        else f"{first.name} {first.share:.0%}{' may' if first.may else ''} {first.owner or ''}"
    )
    return {
        "program": case.program,
        "plant": case.plant or "nothing",
        "said": said or "nothing stands out",
        "right": right if case.plant else first is None or first.may,
        "wrong_for_certain": not right and first is not None and not first.may,
        "others": [f"{of.name} {of.share:.0%}" for of in found[1:4]],
        "step_ms": None if step_s is None else step_s * 1e3,
        "shared": record.contention is not None and record.contention.is_shared,
        "took_s": time.perf_counter() - began,
        "at_most": at_most,
        "gains": gains_of(case, folder) if gains else [],
    }


def _at_most(finding: Finding) -> float:
    """Return the most that a finding may save, as a share of the mean step with all that passes between steps."""
    if finding.high_s is None:
        return finding.share
    return finding.share * finding.high_s / finding.saves_s


def _spin() -> None:
    while True:
        pass


def run(
    cases: Sequence[Case],
    folder: Path,
    busy: int,
    tell: Callable[[dict[str, object]], None],
    gains: bool = False,
) -> list[dict[str, object]]:
    """Judge all ``cases``, beside so many processes that compute."""
    others = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(busy)]
    for other in others:
        other.start()
    try:
        results = []
        for number, case in enumerate(cases):
            results.append(judged(case, folder / str(number), gains))
            tell(results[-1])
        return results
    finally:
        for other in others:
            other.kill()


def main() -> None:
    """Print a row a case, and the shares."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        default="",
        help="of the program and the plant, something that they must hold",
    )
    parser.add_argument(
        "--busy", type=int, default=0, help="processes that compute beside each case"
    )
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument(
        "--gains",
        action="store_true",
        help="measure what the remedy of each plant really saves",
    )
    parser.add_argument("--program", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--timed", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.program:
        _program(Case(given.program[0], given.program[1], ()), given.program[2])
        return
    if given.timed:
        _print_gains(*given.timed)
        return
    import tempfile

    cases = [
        case
        for case in (*CASES, *CONTROLS)
        if given.only in f"{case.program}: {case.plant}"
    ]
    with tempfile.TemporaryDirectory() as folder:
        results = run(cases, Path(folder), given.busy, partial(_tell), given.gains)
    planted = [of for of in results if of["plant"] != "nothing"]
    print(
        f"right first advice: {sum(bool(of.get('right')) for of in planted)} of {len(planted)}"
    )
    print(
        f"wrong, and not said with may: {sum(bool(of.get('wrong_for_certain')) for of in results)} of {len(results)}"
    )
    _print_limits(results)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


def _print_limits(results: Sequence[dict[str, object]]) -> None:
    """Print how many limits lie above what the remedy saved, and how many below 1.5 times that."""
    count = high_enough = low_enough = 0
    for result in results:
        at_most, gains = result.get("at_most"), result.get("gains")
        if isinstance(at_most, float) and isinstance(gains, list) and gains:
            count += 1
            high_enough += at_most >= min(gains)
            low_enough += at_most <= 1.5 * max(gains)
    if count:
        print(f"limits of at least what the remedy saved: {high_enough} of {count}")
        print(f"limits of at most 1.5 times that: {low_enough} of {count}")


def _tell(result: dict[str, object]) -> None:
    if "error" in result:
        print(
            f"FAILED {result['program']}: {result['plant']}\n{result['error']}",
            flush=True,
        )
        return
    mark = (
        "right"
        if result["right"]
        else "WRONG"
        if result["wrong_for_certain"]
        else "missed"
    )
    others = ", ".join(result["others"])  # type: ignore[arg-type]
    gains = result["gains"]
    if result["at_most"] and isinstance(gains, list) and gains:
        turns = ", ".join(f"{gain:.1%}" for gain in sorted(gains))
        others += f"; at most {result['at_most']:.1%}, truly {turns}"
    print(
        f"{mark:6} {result['program']}: {result['plant']}: {result['said']} ({others}) {result['step_ms']:.1f} ms",
        flush=True,
    )


if __name__ == "__main__":
    main()
