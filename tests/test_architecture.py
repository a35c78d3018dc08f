"""The floors hold, and nobody waits for torch to read a help text."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Found, so that asking whether torch is installed is allowed; executed, it fails, and not by an ImportError,
# which the code might take for "not installed".
WITHOUT_TORCH = """
import importlib.abc, importlib.machinery, runpy, sys

class Refuse(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name in {"torch", "lightning", "pytorch_lightning", "torchmetrics"}:
            return importlib.machinery.ModuleSpec(name, self)
        return None

    def exec_module(self, module):
        raise AssertionError(f"{module.__name__} was imported")

sys.meta_path.insert(0, Refuse())
runpy.run_module("lm_profiler", run_name="__main__", alter_sys=True)
"""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    # NO_COLOR and the width keep the output the same in every terminal.
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "110"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_imports_point_down() -> None:
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = python(code)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_linter_sees_the_linked_package() -> None:
    code = "import grimp; print(*grimp.build_graph('lm_profiler', cache_dir=None).modules)"
    modules = set(python(code).stdout.split())
    files = [file for file in (ROOT / "callbacks").glob("*.py") if file.stem != "__init__"]
    assert {f"lm_profiler.callbacks.{file.stem}" for file in files} | {"lm_profiler.callbacks"} <= modules


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_a_short_answer_never_imports_torch(option: str) -> None:
    done = python(WITHOUT_TORCH, option)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "lm_profiler" in done.stdout


def test_version_is_the_one_of_pyproject() -> None:
    # Read as text: Python 3.10 has no tomllib.
    (version,) = re.findall(r'^version = "(.+?)"', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    assert version in python(WITHOUT_TORCH, "--version").stdout
