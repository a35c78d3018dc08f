"""Every name of torch that the code uses is there in this torch, whichever device the line that uses it is for.

Paths for GPUs run nowhere where there is none. Run with the oldest and the newest torch (CONTRIBUTING.md),
this holds that none of them asks for what one of these does not have.
"""

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lm_profiler import torch_names

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(path for part in ("lm_profiler", "benchmarks", "tests/support") for path in (ROOT / part).rglob("*.py"))
OF_OTHER_BUILDS = {"torch.backends.mps.get_name", "torch.version.hip", torch_names.NCCL_RECORDER.path}
"""Asked for only where the build has them, or None elsewhere."""


def dotted(node: ast.expr) -> str | None:
    """``torch.cuda.memory`` of an expression that is nothing but names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)) is not None:
        return f"{before}.{node.attr}"
    return None


def names_in(source: str) -> Iterator[str]:
    """The longest dotted names below ``torch``, and what is imported from there."""
    tree = ast.parse(source)
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            if (name := dotted(node)) is not None and name.startswith("torch."):
                yield name
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "torch")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def found(name: str) -> Any:
    """What ``name`` is.

    Raises:
        AttributeError: it is not there.
    """
    value: Any = torch
    path = "torch"
    for part in name.split(".")[1:]:
        if not hasattr(value, part) and path in sys.modules:  # torch.multiprocessing.spawn is a function too
            value = sys.modules[path]
        path += f".{part}"
        if not hasattr(value, part):
            try:
                importlib.import_module(path)
            except ImportError:
                raise AttributeError(f"torch {torch.__version__} has no {path}") from None
            value = sys.modules[path]  # a package may delete the name of its module, as torch.optim does
        else:
            value = getattr(value, part)
    return value


@pytest.fixture(scope="module")
def used() -> list[str]:
    """Read when it is first asked for: every process collects this file, and one runs its tests."""
    private = {value.path for value in vars(torch_names).values() if isinstance(value, torch_names.PrivateName)}
    public = {name for file in FILES for name in names_in(file.read_text("utf-8"))}
    return sorted((public | {path for path in private if path.startswith("torch.")}) - OF_OTHER_BUILDS)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # of torch's modules, when imported
def test_this_torch_has_them(used: list[str]) -> None:
    assert {"torch.accelerator.synchronize", "torch.cuda._sleep", "torch.Event"} <= set(used)
    lacking = []
    for name in used:
        try:
            found(name)
        except AttributeError as error:
            lacking.append(f"{name}: {error}")
    assert lacking == []
