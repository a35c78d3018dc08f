"""No import leads back (`make imports` checks the layers), and nobody waits for torch to read a help text."""

import ast
import json
import os
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parent.parent

HEAVY = {
    *("torch", "lightning", "pytorch_lightning", "torchmetrics", "tensorboard"),
    *("pandas", "scipy", "matplotlib", "plotly"),
}
STORED = "tests/stored/0.2"
TWO_RUNS = [f"{STORED}/two/context_length={length}" for length in (8, 16)]
LIGHT_CALLS: dict[str, tuple[list[str], int]] = {
    "help": (["--help"], 0),
    "version": (["--version"], 0),
    "first help of a Trainer's verb": (["fit", "--help"], 0),
    "a config that is none": (["fit", "--config=Makefile"], 2),
    "report": (["report", STORED], 0),
    "a layout": (["report", STORED, "--layout", "warmups", "--format", "markdown"], 0),
    "compare": (["compare", *TWO_RUNS, "--unlike"], 0),
    "numerics": (["numerics"], 0),
    "a sweep's plan": (["sweep", "timings", "--dry_run"], 0),
}
"""Calls that load none of ``HEAVY``, with their exit codes."""

# A module of HEAVY is found, so that asking whether it is installed is allowed; executed, it fails, and not by an
# ImportError, which the code might take for "not installed".
WITHOUT_HEAVY = f"""
import importlib.abc, importlib.machinery, json, sys

class Refuse(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name in {HEAVY!r} else None

    def exec_module(self, module):
        raise AssertionError(f"{{module.__name__}} was imported")

sys.meta_path.insert(0, Refuse())
import lm_profiler
from lm_profiler.cli.main import main

codes = {{name: main(call) for name, (call, _) in {LIGHT_CALLS!r}.items()}}
lm_profiler.load("{TWO_RUNS[0]}")._repr_html_()
import lm_profiler.models.config, lm_profiler.report.page.page, lm_profiler.report.pictures.plots
lm_profiler.models.config.preset("xl")
print(json.dumps(codes))
"""


PACKAGE_NAMES = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "lm_profiler").rglob("__init__.py")}


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("lm_profiler", cache_dir=None, include_external_packages=True)


def test_imports_have_no_cycle(graph: grimp.ImportGraph) -> None:
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the modules


def package_of(module: str) -> str:
    """Return the package that ``module`` is a file of; the ``__init__`` of a package belongs to the package."""
    is_package = module in PACKAGE_NAMES
    return module if is_package else module.rpartition(".")[0]


def test_packages_have_no_cycle(graph: grimp.ImportGraph) -> None:
    """Also not by way of files directly in a package that has subpackages, which import-linter's layers do not see."""
    imported_packages: dict[str, set[str]] = {}
    for module in graph.modules:
        package = package_of(module)
        for imported in graph.find_modules_directly_imported_by(module):
            other = package_of(imported)
            is_ours = imported.startswith("lm_profiler.")
            if is_ours and other != package and "lm_profiler" not in (package, other):  # the root is no layer
                imported_packages.setdefault(package, set()).add(other)
    TopologicalSorter(imported_packages).prepare()  # raises CycleError, which names the packages


def test_short_calls_import_nothing_heavy() -> None:
    # NO_COLOR and the width keep the output the same in every terminal.
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "110"}
    command = [sys.executable, "-c", WITHOUT_HEAVY]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *printed, codes = done.stdout.splitlines()
    assert json.loads(codes) == {name: code for name, (_, code) in LIGHT_CALLS.items()}
    # Read as text: Python 3.10 has no tomllib.
    (version,) = re.findall(r'^version = "(.+?)"', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    assert f"lm_profiler {version}" in printed


RUNS_CODE = {
    **dict.fromkeys(
        ("pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"), "load loads Unpickler open"
    ),
    "torch": "load",
    "yaml": "load load_all full_load unsafe_load",
    "connection": "Listener Client",
    "distributed": "broadcast_object_list all_gather_object gather_object scatter_object_list recv_object_list",
}
"""What runs code of whoever wrote what it reads, by the last name of its module."""

OF_THIS_PROCESS = {
    ("lm_profiler/measure/collective_calls.py", "pickle.loads"): "torch makes it in this process, of its own ring",
    ("lm_profiler/processes/child.py", "pickle.load"): "of a file without a name, which the parent gives as stdin",
    ("lm_profiler/rehearse/sent.py", "pickle.loads"): "of bytes that the parent pickled and handed over with the call",
}


def readers(path: Path) -> set[tuple[str, str]]:
    """Where ``path`` names a reader that runs code, however it was imported."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Attribute):
            module = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom):
            module, names = (node.module or "").rpartition(".")[2], [alias.name for alias in node.names]
        else:
            continue
        found |= {(module, name) for name in names if name in RUNS_CODE.get(module, "").split()}
    return {(path.relative_to(ROOT).as_posix(), f"{module}.{name}") for module, name in found}


def test_no_code_is_unpickled() -> None:
    """No pickle from a network or a folder that others may write to; nor what may hold one, or another language."""
    files = list((ROOT / "lm_profiler").rglob("*.py"))
    assert len(files) > 200
    assert set[tuple[str, str]]().union(*map(readers, files)) == set(OF_THIS_PROCESS)
    allowed = [
        word
        for path in files
        for word in ("weights_only=False", "allow_pickle=True")
        if word in path.read_text("utf-8")
    ]
    assert not allowed
