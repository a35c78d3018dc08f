"""Finds the models that an optimizer trains, and the framework of the program, among the objects of the process."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lm_profiler.callbacks.marks.namespaces import is_a, trainer_of
from lm_profiler.callbacks.marks.torch_hooks import loader_iterators, subclasses
from lm_profiler.record.run_record import LoopKind
from lm_profiler.torch_names import ITERATED_DATASET

# the names of classes that wrap a model, which is their attribute ``module``: of torch, and of Lightning Fabric
WRAPPERS = ("DistributedDataParallel", "DataParallel", "_FabricModule")
_COMPILED = "OptimizedModule"  # the class of what ``torch.compile(model)`` returns

# Lightning's names of accelerate's precisions
_MIXED = {"bf16": "bf16-mixed", "fp16": "16-mixed"}


@dataclass(frozen=True)
class FrameworkFacts:
    """Facts that a framework states about its loop. None means that it does not state the fact."""

    kind: LoopKind = "own"
    device: torch.device | None = None
    rank: int | None = None
    world_size: int | None = None
    precision: str | None = None
    batches_per_step: int | None = None
    loggers: Sequence[Any] = ()


@dataclass(frozen=True)
class FoundLoop:
    """The models and the loader of one training loop, as far as they were found in the process."""

    # the outermost modules that hold parameters of the optimizer
    modules: list[nn.Module]
    framework: FrameworkFacts
    # the only DataLoader of the process, or the only one with an unfinished iterator; None if there is none, or several
    loader: Any
    is_of_trainer: bool  # whether a Lightning Trainer runs one of the modules


class LoopModules(nn.ModuleList):
    """The models of a loop with several models, as one module with the parameters of all."""


def facts_of_fabric(fabric: Any) -> FrameworkFacts:
    """Return what Lightning Fabric records about its loop."""
    return FrameworkFacts(
        kind="Fabric",
        device=fabric.device,
        rank=fabric.global_rank,
        world_size=fabric.world_size,
        precision=str(fabric.strategy.precision.precision),
        loggers=fabric.loggers,
    )


def facts_of_transformers(trainer: Any) -> FrameworkFacts:
    """Return what the arguments of transformers' ``trainer`` set."""
    arguments = trainer.args
    precision: str | None = None
    if arguments.bf16:
        precision = "bf16-mixed"
    elif arguments.fp16:
        precision = "16-mixed"
    return FrameworkFacts(
        kind="transformers",
        device=arguments.device,
        rank=arguments.process_index,
        world_size=arguments.world_size,
        precision=precision,
        batches_per_step=arguments.gradient_accumulation_steps,
    )


def facts_of_accelerator(accelerator: Any) -> FrameworkFacts:
    """Return device, rank, world size and precision, as the ``accelerator`` of Hugging Face Accelerate states them."""
    return FrameworkFacts(
        kind="accelerate",
        device=accelerator.device,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        precision=_MIXED.get(str(accelerator.mixed_precision)),
    )


# The class with which each framework runs a loop: its module, its name, and the function that returns its facts.
# transformers' Trainer uses an Accelerator, so the Trainer comes first.
_FRAMEWORKS: tuple[tuple[str, str, Callable[[Any], FrameworkFacts]], ...] = (
    ("lightning.fabric.fabric", "Fabric", facts_of_fabric),
    ("lightning_fabric.fabric", "Fabric", facts_of_fabric),
    ("transformers.trainer", "Trainer", facts_of_transformers),
    ("accelerate.accelerator", "Accelerator", facts_of_accelerator),
)


def find_loop(optimizer: Any) -> FoundLoop:
    """Return the objects of the loop that steps ``optimizer``. It searches all objects, which takes some 0.3 s."""
    module_classes = _module_classes()
    loader_class: type = torch.utils.data.DataLoader
    loader_classes = {loader_class, *subclasses(loader_class)}
    iterator_classes: set[type] = set()
    for kind in loader_iterators():
        iterator_classes |= {kind, *subclasses(kind)}
    framework_classes = _framework_classes()
    module_candidates: list[nn.Module] = []
    loaders: list[Any] = []
    iterators: list[Any] = []
    frameworks: list[Any] = []
    wanted_classes = (
        module_classes | loader_classes | iterator_classes | framework_classes.keys()
    )
    for candidate in _instances_of(wanted_classes):
        if type(candidate) in module_classes:
            module_candidates.append(candidate)
        elif type(candidate) in loader_classes:
            loaders.append(candidate)
        elif type(candidate) in iterator_classes:
            iterators.append(candidate)
        else:
            frameworks.append(candidate)
    modules = _outermost_holders(module_candidates, optimizer)
    return FoundLoop(
        modules=modules,
        framework=_facts_of_framework(frameworks, framework_classes, modules),
        loader=_running_loader(loaders, iterators),
        is_of_trainer=any(_is_run_by_trainer(module) for module in modules),
    )


def _running_loader(loaders: Sequence[Any], iterators: Sequence[Any]) -> Any:
    """Return the loader of the running loop; None if it is not known.

    It is the only one of ``loaders``, or the only one over whose data one of ``iterators`` runs.
    """
    if len(loaders) == 1:
        return loaders[0]
    # None for an iterator whose dataset this torch does not show
    datasets = [ITERATED_DATASET.get_or(iterator) for iterator in iterators]
    ids_of_datasets = {id(dataset) for dataset in datasets if dataset is not None}
    running = [
        loader
        for loader in loaders
        if id(getattr(loader, "dataset", None)) in ids_of_datasets
    ]
    return running[0] if len(running) == 1 else None


def find_modules(optimizer: Any) -> list[nn.Module]:
    """Return the outermost modules that hold parameters of ``optimizer``."""
    return _outermost_holders(_instances_of(_module_classes()), optimizer)


def outermost_wrapper(module: nn.Module) -> nn.Module:
    """Return what a program calls in place of ``module``: DDP around it, its compiled form, or the module itself."""
    wrapper_classes: set[type] = set()
    for module_class in subclasses(nn.Module):
        if module_class.__name__ in (*WRAPPERS, _COMPILED):
            wrapper_classes.add(module_class)
    wrappers: list[nn.Module] = []
    for wrapper in _instances_of(wrapper_classes):
        if _has_part(wrapper, module):
            wrappers.append(wrapper)
    inner_ids = _ids_of_children(wrappers)
    for wrapper in wrappers:
        if id(wrapper) not in inner_ids:
            return wrapper
    return module


def find_framework(modules: Sequence[nn.Module]) -> FrameworkFacts:
    """Return the facts of the framework that runs the loop of ``modules``."""
    classes = _framework_classes()
    return _facts_of_framework(_instances_of(classes.keys()), classes, modules)


def _module_classes() -> set[type]:
    return {nn.Module, *subclasses(nn.Module)} - {LoopModules}


def _instances_of(classes: Collection[type]) -> list[Any]:
    """Return all objects of the process whose class is one of ``classes``."""
    # By type(), because isinstance reads the attribute ``__class__``, which runs foreign code if the object is a proxy.
    return [candidate for candidate in gc.get_objects() if type(candidate) in classes]


def _outermost_holders(modules: Sequence[nn.Module], optimizer: Any) -> list[nn.Module]:
    """Return the ``modules`` that hold a parameter of ``optimizer`` and are not children of other modules."""
    parameter_ids: set[int] = set()
    for group in optimizer.param_groups:
        parameter_ids |= {id(parameter) for parameter in group["params"]}
    inner_ids = _ids_of_children(modules)
    holders: list[nn.Module] = []
    for module in modules:
        if id(module) in inner_ids:
            continue
        if any(id(parameter) in parameter_ids for parameter in module.parameters()):
            holders.append(module)
    return holders


def _ids_of_children(modules: Iterable[nn.Module]) -> set[int]:
    """Return the ids of the modules that are a child of any of ``modules``."""
    ids: set[int] = set()
    for module in modules:
        ids |= {id(child) for child in module.children()}
    return ids


def _has_part(module: nn.Module, part: object) -> bool:
    return any(candidate is part for candidate in module.modules())


def _framework_classes() -> dict[type, Callable[[Any], FrameworkFacts]]:
    """Return the classes of frameworks that the program has imported, in their order."""
    facts_by_class: dict[type, Callable[[Any], FrameworkFacts]] = {}
    for module_name, class_name, get_facts in _FRAMEWORKS:
        framework_class = getattr(sys.modules.get(module_name), class_name, None)
        if framework_class is None:
            continue
        for kind in (framework_class, *subclasses(framework_class)):
            facts_by_class[kind] = get_facts
    return facts_by_class


def _facts_of_framework(
    objects: Iterable[Any],
    facts_by_class: dict[type, Callable[[Any], FrameworkFacts]],
    modules: Sequence[nn.Module],
) -> FrameworkFacts:
    """Return the facts of the newest object of a framework that runs ``modules``; unknown facts if there is none."""
    instance_by_class: dict[type, Any] = {}
    for candidate in objects:  # the newest come first
        instance_by_class.setdefault(type(candidate), candidate)
    for kind, get_facts in facts_by_class.items():
        instance = instance_by_class.get(kind)
        if instance is not None and _framework_runs(instance, modules):
            return get_facts(instance)
    return FrameworkFacts()


def _framework_runs(framework: Any, modules: Sequence[nn.Module]) -> bool:
    """Return whether ``framework`` runs ``modules``; another part of the program may have used it."""
    if is_a(framework, "Fabric"):
        return any(is_a(module, "_FabricModule") for module in modules)
    # transformers' Trainer has its model as an attribute; an Accelerator does not.
    model = getattr(framework, "model", None)
    if model is None:
        return True
    return any(_has_part(module, model) for module in modules)


def _is_run_by_trainer(module: nn.Module) -> bool:
    return any(is_a(trainer_of(part), "Trainer") for part in module.modules())
