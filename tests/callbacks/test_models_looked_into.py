"""A program may look into its model in any step: it sees and gets what it would without us."""

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import Tiny, short_profiler, train_tiny
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lm_profiler.callbacks.own_loop import loop_options, profile_with

pytestmark = [
    pytest.mark.usefixtures("quiet_trainers"),
    pytest.mark.filterwarnings(r"ignore:`torch\.jit\.\w+` is deprecated:DeprecationWarning"),
]

BATCH = torch.linspace(-1, 1, 8).reshape(2, 4)


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    yield
    model.train(was_training)


def attributes(model: nn.Module) -> list[Any]:
    return [(sorted(vars(part)), len(part._forward_hooks), len(part._forward_pre_hooks)) for part in model.modules()]


def traced(model: nn.Module) -> Any:
    return torch.jit.trace(model, BATCH, check_trace=False).code


def names_in(mode: Any, model: nn.Module) -> list[str]:
    with mode, torch.no_grad():
        model(BATCH)
    return list(mode.names)


def gradients_by_row(model: nn.Module) -> list[Any]:
    def loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        return functional_call(model, parameters, (row,)).sum()

    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return [gradient.tolist() for gradient in vmap(grad(loss), (None, 0))(parameters, BATCH).values()]


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "script": lambda model: torch.jit.script(model).code,
    "script of a copy": lambda model: torch.jit.script(copy.deepcopy(model)).code,
    "trace": traced,
    "fx": lambda model: torch.fx.symbolic_trace(model).code,
    "make_fx": lambda model: make_fx(model)(BATCH)(BATCH).tolist(),
    "export": lambda model: str(torch.export.export(model, (BATCH,)).graph),
    "attributes": attributes,
    "attributes of a copy": lambda model: attributes(copy.copy(model)),
    "pickle": lambda model: len(pickle.dumps(model)),
    "operators": lambda model: names_in(Operators(), model),
    "functions": lambda model: names_in(Functions(), model),
    "vmap": gradients_by_row,
}


def outcomes(model: nn.Module) -> dict[str, Any]:
    with in_evaluation(model):
        return {name: way(model) for name, way in WAYS.items()}


class Looks(Callback):
    def __init__(self) -> None:
        self.outcomes: list[dict[str, Any]] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        assert isinstance(pl_module, Tiny)
        self.outcomes.append(outcomes(pl_module.layers))


def test_a_callback_gets_the_same_in_each_step(tmp_path: Path) -> None:
    profiled, plain, callback = Looks(), Looks(), short_profiler()
    module = train_tiny(tmp_path / "profiled", [profiled, callback])
    train_tiny(tmp_path / "plain", [plain], max_steps=module.steps)
    assert profiled.outcomes == plain.outcomes
    assert callback.record.notes == []


def outcomes_in_loop(profiling: Any) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = []
    with profiling:
        for _ in range(9):
            loss = model(BATCH).square().mean()
            steps.append(outcomes(model))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return steps


def test_a_loop_without_a_trainer_gets_the_same_in_each_step(tmp_path: Path) -> None:
    options = loop_options(1, 2, trace_steps=2, memory_steps=1, action_steps=1, log_dir=tmp_path, quiet=True)
    profiling = profile_with(options)
    assert outcomes_in_loop(profiling) == outcomes_in_loop(nullcontext())
