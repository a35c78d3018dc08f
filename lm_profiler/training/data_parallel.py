"""Strategies that divide training among processes: by averaging gradients, also in a user's own way, and by FSDP2."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import (
    DDPStrategy,
    ModelParallelStrategy,
    StrategyRegistry,
)
from torch import Tensor, nn

from lm_profiler.lightning_names import DATA_PARALLEL_SIZE
from lm_profiler.models.transformer import imported
from lm_profiler.usage_error import UsageError, expect

_FINISH = "finish_gradient_synchronization"


class WrappedDDP(DDPStrategy):
    """Data parallelism by a wrapper of the module, as students write it in courses.

    ``wrapper`` is a module's class. It wraps the LightningModule, is called like it, and has
    ``finish_gradient_synchronization()``, which is called before clipping and the optimizer's step: then gradients are
    means over the ranks. If gradients are accumulated, it is called after each backward pass, unless the wrapper has
    ``no_sync()``.

    Args:
        wrapper: The class, as ``package.module:Class``.
        wrapper_options: Further arguments of the class by name, such as ``compute_dtype: bfloat16``. If the name of an
            argument ends in ``dtype``, the name of a torch dtype is converted to the dtype.
        options: Options of Lightning's DDPStrategy.
    """

    def __init__(
        self,
        wrapper: str,
        wrapper_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.wrapper = wrapper
        self.wrapper_options = _with_dtypes(wrapper_options or {})
        self._accumulates = False

    @cached_property
    def wrapper_class(self) -> type[nn.Module]:
        """The class that ``wrapper`` names.

        Raises:
            UsageError: there is none, it lacks the method, or it does not take the options.
        """
        wrapper_class = imported("wrapper", "a class", self.wrapper)
        is_module = isinstance(wrapper_class, type) and issubclass(
            wrapper_class, nn.Module
        )
        expect(
            is_module,
            "wrapper",
            "package.module:Class, a class of torch.nn.Module",
            self.wrapper,
        )
        has_method = callable(getattr(wrapper_class, _FINISH, None))
        expect(has_method, "wrapper", f"a class with {_FINISH}()", self.wrapper)
        _check_options(wrapper_class, self.wrapper, self.wrapper_options)
        return cast(type[nn.Module], wrapper_class)

    def configure_ddp(self) -> None:
        assert self.model is not None
        self.model = self.wrapper_class(self.model, **self.wrapper_options)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Within this context, backward exchanges no gradients, if the wrapper has ``no_sync``."""
        no_sync = getattr(self.model, "no_sync", None)
        self._accumulates = no_sync is not None
        with no_sync() if no_sync is not None else nullcontext():
            yield
        self._accumulates = False

    def post_backward(self, closure_loss: Tensor) -> None:
        # Clipping or the optimizer reads the gradients next, unless they accumulate.
        if not self._accumulates:
            getattr(self.model, _FINISH)()

    def teardown(self) -> None:
        """Remove the wrapper and its hooks from the module."""
        for hook in getattr(self.model, "hooks", ()):
            hook.remove()
        self.model = self.lightning_module
        super().teardown()


def _with_dtypes(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``options`` with names of dtypes, such as ``bfloat16``, replaced by torch's dtypes."""
    typed_options = dict(options)
    for name, value in options.items():
        if not name.endswith("dtype"):
            continue
        dtype = getattr(torch, str(value).removeprefix("torch."), None)
        if isinstance(dtype, torch.dtype):
            typed_options[name] = dtype
    return typed_options


def _check_options(
    wrapper_class: type[nn.Module], wrapper: str, options: Mapping[str, Any]
) -> None:
    """Raise UsageError unless ``wrapper_class``, which ``wrapper`` names, accepts a module and these ``options``."""
    try:
        inspect.signature(wrapper_class).bind(nn.Identity(), **options)
    except TypeError as error:
        raise UsageError(
            f"wrapper_options: expected arguments of {wrapper} besides the module, given {options} ({error})"
        ) from None


# -- wrappers ----------------------------------------------------------------------------------------------------------


class _MeanGradients(nn.Module):
    """A wrapper that averages gradients over the ranks. All ranks must use the same parameters in a step."""

    # whether gradients are exchanged during backward; the instruments read it
    reduces_in_backward = False

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        # whether gradients are not exchanged now, because they accumulate
        self.is_local = False
        self.hooks: list[Any] = []
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), src=0)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.is_local = True
        yield
        self.is_local = False

    def gradients(self) -> list[Tensor]:
        """Return the gradients of the parameters that have one, in the same order on all ranks."""
        return [
            parameter.grad
            for parameter in self.module.parameters()
            if parameter.grad is not None
        ]


class NaiveDDP(_MeanGradients):
    """All-reduces each parameter's gradient separately, after backward."""

    def finish_gradient_synchronization(self) -> None:
        for gradient in self.gradients():
            dist.all_reduce(gradient.div_(dist.get_world_size()))  # gloo has no mean


class FlatDDP(_MeanGradients):
    """All-reduces all gradients as one tensor (one for each dtype), after backward."""

    def finish_gradient_synchronization(self) -> None:
        """Average the gradients over all ranks, by one all-reduce per dtype."""
        by_dtype: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
        for gradient in self.gradients():
            by_dtype[gradient.dtype].append(gradient)
        for gradients in by_dtype.values():
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            # divided before the sum, because gloo has no mean
            flat.div_(dist.get_world_size())
            dist.all_reduce(flat)
            sizes = [gradient.numel() for gradient in gradients]
            means = flat.split(sizes)
            for gradient, mean in zip(gradients, means, strict=True):
                gradient.copy_(mean.view_as(gradient))


class OverlapDDP(_MeanGradients):
    """All-reduces each parameter's gradient as soon as backward has made it, and waits for all of them at the end."""

    reduces_in_backward = True

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.pending: list[Any] = []
        for parameter in module.parameters():
            if parameter.requires_grad:
                self.hooks.append(
                    parameter.register_post_accumulate_grad_hook(self._start_reducing)
                )

    def _start_reducing(self, parameter: Tensor) -> None:
        """Start to sum the parameter's gradient, divided by the number of ranks, over all ranks."""
        if self.is_local or parameter.grad is None:
            return
        gradient = parameter.grad.div_(dist.get_world_size())
        self.pending.append(dist.all_reduce(gradient, async_op=True))

    def finish_gradient_synchronization(self) -> None:
        for work in self.pending:
            work.wait()
        self.pending.clear()


# -- FSDP2 -------------------------------------------------------------------------------------------------------------


class FSDP2Strategy(ModelParallelStrategy):
    """Lightning's ``ModelParallelStrategy`` with the data divided among all processes, without tensor parallelism.

    The module must shard itself in ``configure_model``, as ``LanguageModel`` does.
    """

    def __init__(self) -> None:
        super().__init__(tensor_parallel_size=1)

    def setup_environment(self) -> None:
        # Lightning's own "auto" uses one process per node for data.
        setattr(self, DATA_PARALLEL_SIZE.name, self.num_nodes * self.num_processes)
        super().setup_environment()


def shard_blocks(model: nn.Module, mesh: Any) -> None:
    """Make FSDP2 shard each of ``model.blocks``, and the rest of ``model`` together, over the mesh's data ranks."""
    from torch.distributed.fsdp import fully_shard

    tensor_parallel = mesh["tensor_parallel"].size()
    expect(
        tensor_parallel == 1,
        "trainer.strategy.tensor_parallel_size",
        "1 for this model",
        tensor_parallel,
    )
    for block in model.blocks:  # type: ignore[union-attr]  # a ModuleList
        fully_shard(block, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])


for _name, _kind in {
    "naive_ddp": NaiveDDP,
    "flat_ddp": FlatDDP,
    "overlap_ddp": OverlapDDP,
}.items():
    StrategyRegistry.register(
        _name, WrappedDDP, _kind.__doc__, wrapper=f"{__name__}:{_kind.__name__}"
    )
StrategyRegistry.register("fsdp2", FSDP2Strategy, FSDP2Strategy.__doc__)
