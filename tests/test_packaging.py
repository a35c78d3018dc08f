"""What is installed is what stands in the tree: the package list, the links, the wheel."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from itertools import chain
from pathlib import Path

import pytest
import warm
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lm_profiler.record.calls import EXTRA_OF

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def files_of_the_tree() -> set[str]:
    """Each file of the packages, as a path below the root."""
    found = set()
    for folder, _, files in os.walk(ROOT / "lm_profiler"):
        if Path(folder).name != "__pycache__":
            found |= {(Path(folder) / file).relative_to(ROOT).as_posix() for file in files}
    return found


def modules_of_the_tree() -> set[str]:
    """Each file beside the package."""
    return {path.name for path in ROOT.glob("*.py")}


def python(*arguments: str, cwd: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of a clean copy."""
    source = tmp_path_factory.mktemp("source")
    skip = shutil.ignore_patterns("__pycache__")
    for folder in ("lm_profiler", "tests"):
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=skip)
    for file in ("pyproject.toml", "README.md", "LICENSE", *modules_of_the_tree()):
        shutil.copy(ROOT / file, source)
    out = tmp_path_factory.mktemp("dist")
    # Without isolation: setuptools is here, and nothing is fetched.
    done = python("-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), cwd=source)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    return wheel


def test_package_list_is_the_tree() -> None:
    modules = [Path(file) for file in files_of_the_tree() if file.endswith((".py", ".yaml"))]
    packages = {".".join(module.parent.parts) for module in modules}
    assert PYPROJECT["tool"]["setuptools"]["packages"] == sorted(packages)
    assert [f"{name}.py" for name in PYPROJECT["tool"]["setuptools"]["py-modules"]] == sorted(modules_of_the_tree())


@pytest.mark.parametrize("name", ["callbacks", "configs"])
def test_the_links_lead_to_the_packages(name: str) -> None:
    """The link at the top of the tree is for people; a checkout on a system without links works without it."""
    link = ROOT / name
    assert link.is_symlink()
    assert link.readlink() == Path("lm_profiler", name), "the link must hold wherever the checkout stands"
    assert not (ROOT / "lm_profiler" / name).is_symlink()


def test_callbacks_refuses_its_folder_name() -> None:
    done = python("-c", "import callbacks", cwd=ROOT)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError")
    assert "lm_profiler.callbacks" in last


# Python 3.13's own shutil.which asks Windows there.
ELSEWHERE = """
import os, shutil, sys
import lightning.pytorch
from imported_anew import forget_our_modules
forget_our_modules()
sys.platform = "win32"
shutil.which = lambda name: None
"""


def test_other_operating_systems_are_refused_only_on_request() -> None:
    """Lightning calls our module in every program, and guards that with nothing."""
    program = f"""{ELSEWHERE}
for asked in ("", "1"):
    os.environ["LM_PROFILER"] = asked
    lightning.fabric.Fabric(accelerator="cpu")
    print(len(lightning.pytorch.Trainer(logger=False, barebones=True).callbacks), flush=True)
    print("lm_profiler" in sys.modules)
    print("asked", repr(asked), file=sys.stderr, flush=True)
from lm_profiler.cli.main import main
print(main(["report", "logs"]))
import lm_profiler.callbacks
"""
    done = warm.run_python("-c", program, folder=ROOT)
    unasked, asked, rest = re.split("asked '1?'\n", done.stderr)
    assert ("POSIX" in unasked, "not profiled: ImportError" in asked, "POSIX" in asked) == (False, True, True)
    refused, *traceback = rest.strip().splitlines()
    assert "POSIX" in refused
    assert traceback[-1].startswith("ImportError: ")
    assert "POSIX" in traceback[-1]
    _, unasked_import, _, asked_import, code = done.stdout.split()
    assert (unasked_import, asked_import, code) == ("False", "True", "2")


def test_the_wheel_holds_exactly_the_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == files_of_the_tree() | modules_of_the_tree()


def test_the_wheel_has_licence_and_entry_point(wheel: Path) -> None:
    information = f"lm_profiler-{PYPROJECT['project']['version']}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        assert "Apache License" in archive.read(f"{information}/licenses/LICENSE").decode()
        entry_points = ConfigParser()
        entry_points.read_string(archive.read(f"{information}/entry_points.txt").decode())
    assert entry_points["console_scripts"]["lm_profiler"] == "lm_profiler.cli.main:main"


def test_each_extra_is_known_where_a_call_looks_for_it() -> None:
    extras = PYPROJECT["project"]["optional-dependencies"]
    declared = {Requirement(line).name: extra for extra in EXTRA_OF.values() for line in extras[extra]}
    assert declared == EXTRA_OF


def test_each_dependency_is_pinned_within_its_range() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    pinned = {canonicalize_name(pin.name): re.fullmatch(r"==([\w.]+)", str(pin.specifier)) for pin in pins}
    assert all(pinned.values()), "one exact version a line, without a local part or an address"
    project = PYPROJECT["project"]
    for line in (*project["dependencies"], *chain.from_iterable(project["optional-dependencies"].values())):
        wanted = Requirement(line)
        if wanted.name in ("pip", "lm_profiler") or (wanted.marker and not wanted.marker.evaluate()):
            continue  # pip comes with the environment, and one extra names the others
        version = pinned.get(canonicalize_name(wanted.name))
        assert version, f"constraints.txt has no line for {wanted.name}"
        assert wanted.specifier.contains(version[1]), f"constraints.txt is outside {wanted}"
