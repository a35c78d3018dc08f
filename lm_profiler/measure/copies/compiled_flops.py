"""FLOPs of a step that cannot be seen while it runs, because it was compiled: counted on shapes alone, elsewhere.

A copy of the module without data and weights (on torch's meta device) runs the step eagerly in a process of its own,
which shares nothing with the training: no process group, no device, no file, and limits on time and memory. What the
step changes there, nobody sees; where it needs values, another process or what cannot be sent, its work is unknown.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lm_profiler.measure.boundary import said
from lm_profiler.measure.copies.module_copy import ModuleCopy, UncopyableError, undisturbed
from lm_profiler.measure.counts.flop_formulas import UncountableError
from lm_profiler.measure.counts.flops import FlopCounter
from lm_profiler.measure.counts.traffic import ForwardTraffic
from lm_profiler.record.run import Flops

META = torch.device("meta")
LIMIT_S = 120.0
LIMIT_BYTES = 4 << 30
_MOST_SENT = 256 << 20
_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.stdin.buffer.readline())
from lm_profiler.measure.copies.compiled_flops import main
main()
"""

Step = Callable[[nn.Module, Any], Tensor | Mapping[str, Any] | None]
"""(module, batch) to the loss, or to a mapping with the loss under ``"loss"``."""


def loss_of(result: Tensor | Mapping[str, Any] | None) -> Any:
    """Of what a ``Step`` returned."""
    return result.get("loss") if isinstance(result, Mapping) else result


@dataclass(frozen=True)
class MethodStep:
    """The step that a method of the module runs; unlike a lambda it can be sent to another process."""

    name: str
    rest: tuple[Any, ...] = ()
    """What follows the batch."""

    def __call__(self, module: nn.Module, batch: Any) -> Any:
        return getattr(module, self.name)(batch, *self.rest)


@dataclass(frozen=True)
class Counted:
    """The work of one batch.

    ``by_dtype`` has its FLOPs by work and by dtype of the factors; ``read_bytes`` is what the forward pass reads at
    least (``ForwardTraffic``), None where unknown.
    """

    flops: Flops
    by_dtype: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    read_bytes: int | None = None


def count_apart(module: nn.Module, step: MethodStep, batch: Any, backward: bool, limit_s: float = LIMIT_S) -> Counted:
    """The work of ``step(module, batch)`` and, if asked, of the backward pass of its loss, counted in another process.

    Takes the few seconds in which the other process imports torch and the module's own code. Weights that FSDP2 shards
    count whole, as each rank multiplies them.

    Raises:
        UncountableError: it cannot be sent, or run, or counted there.
    """
    if _sharded_otherwise(module):
        raise UncountableError("the step is compiled, and its weights are sharded otherwise than by FSDP2 alone")
    try:
        sent = _Bounded()
        sent.write(json.dumps(sys.path).encode() + b"\n")
        pickle.dump((on_meta(module), step, on_meta(batch), backward), sent)
    except Exception as error:
        raise UncountableError(f"a copy cannot be sent to another process: {said(error)}") from None
    command = [sys.executable, "-c", _PROGRAM]
    try:
        done = subprocess.run(command, input=sent.getvalue(), capture_output=True, env=_surroundings(), timeout=limit_s)
        answer = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise UncountableError(f"on a copy the step took more than {limit_s:.0f} s") from None
    except (OSError, ValueError):
        raise UncountableError("the process that counts on a copy ended without an answer") from None
    if "unknown" in answer:
        raise UncountableError(answer["unknown"])
    return Counted(**{**answer, "flops": Flops.model_validate(answer["flops"])})


def count_flops(module: nn.Module, step: Step, batch: Any, backward: bool = True) -> Counted:
    """The work of ``step`` run once, eagerly, on a meta-device copy of ``module``, in this process.

    The module, its gradients and the random states stay as they are; opaque objects are shared with the copy, which
    is why ``count_apart`` calls this elsewhere. Module hooks do not run, so products made in them are not counted.

    Raises:
        UncountableError: there is no loss, or an operator whose work is unknown.
        UncopyableError: a weight has no shape, or the module is a ScriptModule or would communicate.
        Exception: whatever the step raises where shapes are not enough for it.
    """
    # On the meta device are also the tensors that the step makes without naming one. Anomaly detection reads values.
    with (
        undisturbed(module),
        _attention_in_its_dtype(),
        META,
        torch.autograd.set_detect_anomaly(False),
        torch.set_grad_enabled(backward),
    ):
        copy, shapes = on_meta((module, batch))
        counter = FlopCounter(traffic := ForwardTraffic())
        traffic.begin()
        with counter:
            loss = loss_of(step(copy, shapes))
            if backward and not isinstance(loss, Tensor):
                raise UncountableError("on a copy the step gave no loss")
            if backward:
                loss.backward()
        return Counted(counter.flops(), counter.by_dtype(), traffic.take())


@contextmanager
def _attention_in_its_dtype() -> Iterator[None]:
    """Half precision too: where there is no fused kernel, as on the meta device, torch computes it in float32."""
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


def main() -> None:
    """In the other process: read the step from stdin, and write what it counts."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the step prints
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
    signal.alarm(int(LIMIT_S))  # also when nobody waits any more
    try:
        module, step, batch, backward = _Reader(sys.stdin.buffer).load()
        counted = count_flops(module, step, batch, backward)
        answer = {**asdict(counted), "flops": counted.flops.model_dump()}
    except UncountableError as error:
        answer = {"unknown": str(error)}
    except Exception as error:
        answer = {"unknown": f"on a copy without data the step fails: {said(error)}"}
    with answers:
        json.dump(answer, answers)


def on_meta(value: Any) -> Any:
    """A copy of a module or a batch that has shapes and no data; raises UncopyableError."""
    return ModuleCopy(_meta_tensor, META)(value)


def _meta_tensor(tensor: Tensor) -> Tensor:
    if torch.nn.parameter.is_lazy(tensor) or tensor.layout is not torch.strided:
        raise UncopyableError("a tensor has no shape yet, or is not a dense one")
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)


def _sharded_otherwise(module: nn.Module) -> bool:
    """Tensor parallelism: there a rank multiplies less than the whole weights."""
    meshes = [p.device_mesh for p in module.parameters() if hasattr(p, "device_mesh")]
    by_fsdp = any(hasattr(part, "_get_fsdp_state") for part in module.modules())
    return any(mesh.ndim > 1 or not by_fsdp for mesh in meshes)


def _surroundings() -> dict[str, str]:
    """Without a device, a compiler or other ranks."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    return {**kept, "CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "__main__":
            raise UncountableError(f"{name} is defined in the script itself: put it into a module that can be imported")
        return super().find_class(module, name)


class _Bounded(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + len(data) > _MOST_SENT:
            raise ValueError(f"it is larger than {_MOST_SENT >> 20} MiB")
        return super().write(data)
