"""Does the rehearsal before a run change the run? The same modules, with and without it, step by step.

    python -m benchmarks.unchanged [PART OF A NAME ...]

Of every step: the loss, the sum of all weights, and the states of torch's, numpy's and Python's random
numbers. Of the run: its files, the environment's variables, the attributes of the module's class. Everything has to be
equal, to the bit.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import multiprocessing
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.others.habits import keep
from benchmarks.plan import others
from lm_profiler.cli.main import main as run

SHORT = (
    "--trainer.accelerator=cpu",
    "--stages.warmup_steps=1",
    "--stages.measure_steps=4",
    "--trace.steps=0",
)


def _random_states() -> str:
    return repr(
        (torch.get_rng_state().tolist(), np.random.get_state(), random.getstate())
    )


def _attributes(kind: type) -> dict[str, str]:
    return {
        name: repr(value) for name, value in vars(kind).items() if not callable(value)
    }


def seen(call: Sequence[str], checks: bool) -> tuple[bool, list[Any]]:
    """Whether the run was planned, and all that must not depend on it."""
    warnings.simplefilter("ignore")
    os.chdir(tempfile.mkdtemp())
    module, _, name = call[0].removeprefix("--model=").rpartition(".")
    kind, own, steps = getattr(importlib.import_module(module), name), os.getpid(), []
    step, before = kind.training_step, dict(os.environ)

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        states = _random_states()
        out = step(self, batch, batch_idx)
        if os.getpid() == own:
            loss = out["loss"] if isinstance(out, dict) else out
            weights = sum(
                p.detach().double().abs().sum().item() for p in self.parameters()
            )
            steps.append((states, None if loss is None else loss.item(), weights))
        return out

    kind.training_step = training_step
    attributes = _attributes(kind)
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        code = run(["fit", *call, *SHORT, f"--check_memory={str(checks).lower()}"])
    changed = {
        name
        for name in {*before, *os.environ}
        if before.get(name) != os.environ.get(name)
    }
    files = sorted(
        str(path) for path in Path().rglob("*") if not path.name.startswith("events")
    )
    (record,) = Path().rglob("run.json")
    plan = json.loads(record.read_text())["planned"] or {}
    return bool(plan.get("peaks")), [
        code,
        steps,
        changed,
        files,
        attributes == _attributes(kind),
    ]


def _in_a_fork(call: Sequence[str], checks: bool) -> tuple[bool, list[Any]]:
    context = multiprocessing.get_context("fork")
    link, theirs = context.Pipe(duplex=False)
    process = context.Process(target=lambda: theirs.send(seen(call, checks)))
    process.start()
    theirs.close()
    with link:
        answer: tuple[bool, list[Any]] = link.recv()
    process.join()
    return answer


def main() -> None:
    """Print a line for each module."""
    keep()
    equal = asked = 0
    for name, call in others():
        if sys.argv[1:] and not any(part in name for part in sys.argv[1:]):
            continue
        (planned, kept), (_, without) = (
            _in_a_fork(call, checks) for checks in (True, False)
        )
        same = kept == without and kept[0] == 0
        equal, asked = equal + same, asked + 1
        said = "planned" if planned else "not planned"
        print(
            f"{name}: {'equal' if same else 'DIFFERS'} in {len(kept[1])} steps, {said}",
            flush=True,
        )
    print(f"{equal} of {asked} are equal")


if __name__ == "__main__":
    main()
