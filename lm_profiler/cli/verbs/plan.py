"""``plan``: what a run would need, before it runs, on a device that need not be here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lm_profiler.analysis.hardware.floors import Work
from lm_profiler.analysis.plan.capacities import Capacity, UnknownDevice, capacity
from lm_profiler.analysis.plan.floors import planned_floors
from lm_profiler.analysis.plan.planned import ROOM, Planned
from lm_profiler.measure.boundary import say
from lm_profiler.measure.elsewhere import surroundings
from lm_profiler.record.exit_codes import FAILED, OK
from lm_profiler.record.run import MemoryCauses
from lm_profiler.report.run.plan import plan_table
from lm_profiler.report.tables.terminal import terminal
from lm_profiler.usage_error import UsageError

EXAMPLES = """\
for example:
  lm_profiler plan --config xl_bf16 --device H100
  lm_profiler plan --config demo --memory 8GiB --data.batch_size=64"""

_SIZES = {"": 1}
_SIZES |= {f"{prefix}{kind}": base**n for n, prefix in enumerate("kmgt", 1) for kind, base in (("", 1000), ("i", 1024))}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Say what memory each phase of a training step would take, and the largest batch and context that fit.

    Nothing is trained, and no GPU is needed: the step is rehearsed on tensors without data.

    Args:
        device: The GPU, by a name such as H100 or "A100 80GB"; if not given, this machine.
        memory: What the device has, such as 80GiB, in place of what its name says.
        options: Options of fit.
    """

    device: str | None = None
    memory: str | None = None
    options: Sequence[str] = ()


def run(options: Options) -> int:
    """Print the plan; returns the exit code: 1 where the run does not fit or cannot be planned.

    Raises:
        UsageError: a wrong call.
    """
    device, gpu = _device(options)
    room = ROOM * device.bytes
    kind = "gpu" if gpu else "cpu"
    # Side by side: each takes most of the time to import and to build.
    asked = {what: _rehearsal(kind, what, room, options.options) for what in ("batch", "context")}
    answers = {what: _answer(process) for what, process in asked.items()}
    for answer in answers.values():
        if "wrong" in answer:
            raise UsageError(answer["wrong"])
        if "unknown" in answer:
            say(f"cannot be planned: {answer['unknown']}")
            return FAILED
    planned = {what: _planned(answer) for what, answer in answers.items()}
    floors = planned_floors(planned["batch"], device.name)
    table = plan_table(planned["batch"], planned["context"].largest, device, room, floors)
    sys.stdout.write(terminal(table, sys.stdout))
    return OK if planned["batch"].peak <= room else FAILED


def _device(options: Options) -> tuple[Capacity, bool]:
    """What it is called and has, and whether it is a GPU."""
    given = None if options.memory is None else _bytes(options.memory)
    if options.device is not None:
        try:
            known = capacity(options.device)
        except UnknownDevice as error:
            near = f"; did you mean {', '.join(error.near)}?" if error.near else "; or say --memory 80GiB"
            raise UsageError(f"device: expected a GPU such as H100, given {options.device[:100]!r}{near}") from None
        return (known if given is None else replace(known, bytes=given)), True
    if given is not None:
        return Capacity("a GPU", given), True
    return _this_machine()


def _this_machine() -> tuple[Capacity, bool]:
    import torch

    from lm_profiler.measure.device.environment import device_name
    from lm_profiler.measure.memory.peaks import available_bytes, free_and_total

    if torch.cuda.is_available():
        device = torch.device("cuda", 0)
        known = free_and_total(device)
        return Capacity(device_name(device), 0 if known is None else known[1]), True
    cpu = torch.device("cpu")
    return Capacity(device_name(cpu), available_bytes(cpu) or 0), False


def _bytes(text: str) -> int:
    size = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text, re.IGNORECASE)
    if size is None or size[2].casefold() not in _SIZES:
        raise UsageError(f"memory: expected a size such as 80GiB, given {text[:100]!r}")
    return int(float(size[1]) * _SIZES[size[2].casefold()])


def _rehearsal(kind: str, what: str, room: float, options: Sequence[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lm_profiler.cli.workers.rehearse", kind, what, str(room), "fit", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=surroundings())


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    said, errors = process.communicate()
    try:
        answer: dict[str, Any] = json.loads(said)
    except ValueError:
        lines = errors.strip().splitlines()
        return {"unknown": lines[-1] if lines else f"the rehearsal ended with code {process.returncode}"}
    return answer


def _planned(answer: dict[str, Any]) -> Planned:
    causes = {phase: MemoryCauses(**of) for phase, of in answer.pop("causes").items()}
    work = {phase: Work(**of) for phase, of in answer.pop("work").items()}
    return Planned(causes=causes, work=work, **answer)
