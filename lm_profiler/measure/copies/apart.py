"""The work of a step that was not seen while it ran: counted on shapes alone, elsewhere.

A copy of the module without data and weights runs the step eagerly in a process of its own, which shares nothing with
the training: no process group, no device, no file, and limits on time and memory. What the step changes there, nobody
sees; where it needs values, another process or what cannot be sent, its work is unknown.
"""

from __future__ import annotations

import io
import json
import pickle
import resource
import signal
import subprocess
import sys
import types
from dataclasses import asdict
from functools import partial
from typing import Any

from torch import nn

from lm_profiler.measure.boundary import said
from lm_profiler.measure.copies.module_copy import ModuleCopy
from lm_profiler.measure.copies.shapes import META, Counted, count_work, shape_of
from lm_profiler.measure.copies.step_loop import MethodStep, StepLoop
from lm_profiler.measure.counts.flop_formulas import UncountableError
from lm_profiler.measure.elsewhere import answer, surroundings
from lm_profiler.record.run import Flops

LIMIT_S = 120.0
LIMIT_BYTES = 4 << 30
_MOST_SENT = 256 << 20
_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.stdin.buffer.readline())
from lm_profiler.measure.copies.apart import main
main()
"""


def count_apart(module: nn.Module, step: MethodStep, batch: Any, loop: StepLoop, limit_s: float = LIMIT_S) -> Counted:
    """The work of a step of ``loop``, whose batches ``step`` is given, counted in another process.

    Takes the few seconds in which the other process imports torch and the module's own code. Weights that FSDP2 shards
    count whole, as each rank multiplies them.

    Raises:
        UncountableError: it cannot be sent, or run, or counted there.
    """
    if _sharded_otherwise(module):
        raise UncountableError("its weights are sharded otherwise than by FSDP2 alone")
    try:
        sent = _Bounded()
        sent.write(json.dumps(sys.path).encode() + b"\n")
        _Writer(sent).dump((*on_meta((module, batch, loop)), step))
    except UncountableError:
        raise
    except Exception as error:
        raise UncountableError(f"a copy cannot be sent to another process: {said(error)}") from None
    command = [sys.executable, "-c", _PROGRAM]
    try:
        done = subprocess.run(command, input=sent.getvalue(), capture_output=True, env=surroundings(), timeout=limit_s)
        told = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise UncountableError(f"on a copy the step took more than {limit_s:.0f} s") from None
    except (OSError, ValueError):
        raise UncountableError("the process that counts on a copy ended without an answer") from None
    if "unknown" in told:
        raise UncountableError(told["unknown"])
    return Counted(**{**told, "flops": Flops.model_validate(told["flops"])})


def main() -> None:
    """In the other process: read the step from stdin, and write what it counts."""
    answer(_count)


def _count() -> dict[str, Any]:
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
    signal.alarm(int(LIMIT_S))  # also when nobody waits any more
    try:
        module, batch, loop, step = pickle.load(sys.stdin.buffer)
        counted = count_work(module, step, batch, loop)
        return {**asdict(counted), "flops": counted.flops.model_dump()}
    except UncountableError as error:
        return {"unknown": str(error)}
    except Exception as error:
        return {"unknown": f"on a copy without data the step fails: {said(error)}"}


def on_meta(value: Any) -> Any:
    """A copy of a module or a batch that has shapes and no data; raises UncopyableError."""
    return ModuleCopy(partial(shape_of, device=META), META)(value)


def _sharded_otherwise(module: nn.Module) -> bool:
    """Tensor parallelism: there a rank multiplies less than the whole weights."""
    meshes = [p.device_mesh for p in module.parameters() if hasattr(p, "device_mesh")]
    by_fsdp = any(kind.__name__ == "FSDPModule" for part in module.modules() for kind in type(part).__mro__)
    return any(mesh.ndim > 1 or not by_fsdp for mesh in meshes)


class _Writer(pickle.Pickler):
    """Refuses what no other process can read, before one is started."""

    def reducer_override(self, value: Any) -> Any:
        named = value if isinstance(value, (type, types.FunctionType)) else type(value)
        if named.__module__ == "__main__":
            name = named.__qualname__
            raise UncountableError(f"{name} is defined in the script itself: put it into a module that can be imported")
        return NotImplemented


class _Bounded(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + len(data) > _MOST_SENT:
            raise ValueError(f"it is larger than {_MOST_SENT >> 20} MiB")
        return super().write(data)
