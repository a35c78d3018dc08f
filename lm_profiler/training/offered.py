"""Options of torch and its DataLoader for any module and any data, without a change to their code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader

from lm_profiler.usage_error import UsageError, expect


@dataclass(frozen=True, kw_only=True)
class TorchOptions:
    """Options of torch for any module.

    Args:
        compile: Compile the parts of the module with torch.compile.
        compile_mode: Mode of torch.compile, such as reduce-overhead; used only if compile is true.
        float32_matmul_precision: Multiply float32 matrices in full precision (highest), as TF32 (high), or as bf16
            (medium).
    """

    compile: bool = False
    compile_mode: str | None = None
    float32_matmul_precision: Literal["highest", "high", "medium"] | None = None

    def apply(self, module: nn.Module) -> None:
        """Apply the options to this process and to ``module``, or raise UsageError if nothing can be compiled."""
        if self.float32_matmul_precision is not None:
            torch.set_float32_matmul_precision(self.float32_matmul_precision)
        if not self.compile:
            return
        if self.compile_mode is not None:
            check_compile_mode(self.compile_mode, "torch.compile_mode")
        parts = list(_parts(module))
        expect(
            bool(parts),
            "torch.compile",
            "a module whose parts have weights before training begins",
            None,
        )
        for part in parts:
            part.compile(mode=self.compile_mode)


def check_compile_mode(mode: str, option: str) -> None:
    """Raise UsageError unless torch.compile has such a ``mode``; torch checks that before it compiles anything."""
    try:
        torch.compile(lambda: None, mode=mode)
    except RuntimeError as error:
        _, names_modes, modes = str(error).partition("one of: ")
        if not names_modes:
            raise
        raise UsageError(f"{option}: expected one of {modes}, given {mode!r}") from None


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the largest parts that have weights and are called; a ModuleList, for example, is never called."""
    for part in module.children():
        has_weights = next(part.parameters(), None) is not None
        if not has_weights:
            continue
        is_called = type(part).forward is not nn.Module.forward
        if is_called:
            yield part
        else:
            yield from _parts(part)


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """Options of a DataLoader for any data; options that are not given stay as in the data.

    Args:
        num_workers: Processes that make batches; 0 makes them in the training process.
        pin_memory: Put batches in page-locked memory.
    """

    num_workers: int | None = None
    pin_memory: bool | None = None

    def __post_init__(self) -> None:
        is_valid = self.num_workers is None or self.num_workers >= 0
        expect(is_valid, "loader.num_workers", "0 or more", self.num_workers)

    def apply(self, source: Any, hook: str) -> None:
        """Make the ``hook`` of ``source``, such as the train_dataloader of a data module, return a changed loader."""
        if self.num_workers is None and self.pin_memory is None:
            return
        # a partial, because unlike a closure it can be pickled
        setattr(source, hook, partial(self._make_changed, getattr(source, hook)))

    def _make_changed(self, make_loader: Callable[[], Any]) -> DataLoader[Any]:
        return self.changed(make_loader())

    def changed(self, loader: Any) -> DataLoader[Any]:
        """Return a copy of ``loader`` with these options.

        Raises:
            UsageError: it is not of torch's own class, so that its arguments are unknown.
        """
        if type(loader) is not DataLoader:
            raise UsageError(
                f"loader: expected a DataLoader of torch in the data, given a {type(loader).__name__}"
            )
        arguments = _batch_arguments(loader)
        for name in _ARGUMENTS:
            arguments[name] = getattr(loader, name)
        if self.num_workers is not None:
            arguments["num_workers"] = self.num_workers
        if self.pin_memory is not None:
            arguments["pin_memory"] = self.pin_memory
        # torch refuses a prefetch factor without workers, and a loader without workers has no such factor.
        if arguments["num_workers"] and loader.num_workers:
            for name in _WORKER_ARGUMENTS:
                arguments[name] = getattr(loader, name)
        return DataLoader(loader.dataset, **arguments)


# arguments of a DataLoader that a copy takes over
_ARGUMENTS = (
    "num_workers",
    "pin_memory",
    "collate_fn",
    "worker_init_fn",
    "generator",
    "in_order",
)
# arguments that it takes over if the loader and the copy both have workers
_WORKER_ARGUMENTS = (
    "prefetch_factor",
    "persistent_workers",
    "timeout",
    "multiprocessing_context",
)


def _batch_arguments(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the arguments that choose the samples of a batch; torch accepts only some combinations of them."""
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        return {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    batch_sampler = loader.batch_sampler
    # torch makes a ``BatchSampler`` from the other arguments; one of another class was passed to the loader.
    if batch_sampler is not None and type(batch_sampler) is not BatchSampler:
        return {"batch_sampler": batch_sampler}
    return {
        "batch_size": loader.batch_size,
        "sampler": loader.sampler,
        "drop_last": loader.drop_last,
    }
