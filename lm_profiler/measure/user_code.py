"""Distinguishes the code of the profiled program from that of libraries, by its file."""

from __future__ import annotations

import re
import sys
import sysconfig
from collections.abc import Collection
from functools import cache
from pathlib import Path
from traceback import walk_stack
from types import CodeType, FrameType, ModuleType

TORCH, LIGHTNING, OURS = "library", "Lightning", "lm_profiler"

_LIBRARIES = {
    **dict.fromkeys(
        ("lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning"),
        LIGHTNING,
    ),
    "torchmetrics": LIGHTNING,
    "torch": TORCH,
    "lm_profiler": OURS,
    "numpy": "numpy",
}
# our folders that count as the profiled program, not as the profiler
_PROGRAMS = ("lm_profiler/models/", "lm_profiler/training/")

_ROOT = Path(__file__).resolve().parents[2].as_posix()
_OWN = f"{_ROOT}/lm_profiler/"
_STANDARD = f"{sysconfig.get_paths()['stdlib']}/"

_LOOPS = ("/lightning/pytorch/loops/", "/pytorch_lightning/loops/")
# Lightning's closure of an optimizer, which the program's ``optimizer_step`` may call
_CLOSURES = "/loops/optimization/"
# Code in these files applies any function to any batch, so only its caller shows the purpose.
_APPLIES = ("/lightning_utilities/", "/apply_func.py")


@cache
def package_of(file: str) -> str:
    """Return the package or library of ``file``; empty for the profiled program.

    An installed package that uses torch, such as a package of models, counts as the program. One that does not, such as
    Pillow, counts as a library.
    """
    path = Path(file).as_posix()
    if any(folder in path for folder in _PROGRAMS):
        return ""
    if file.startswith("<"):
        return "Python"
    package = installed_package(path)
    if package:
        if package in _LIBRARIES:
            return _LIBRARIES[package]
        return "" if _uses_torch(package) else package
    if path.startswith(_OWN):
        return OURS
    if "torchinductor_" in path:  # made by torch.compile
        return TORCH
    if path.startswith(_STANDARD):
        top_name = path.removeprefix(_STANDARD).partition("/")[0]
        return top_name.removesuffix(".py")
    return ""


@cache
def installed_package(path: str) -> str:
    """Return the name of the installed package that ``path`` belongs to; empty if it belongs to none."""
    installed = re.search(r"/(?:site|dist)-packages/([^/.]+)", path)
    if installed is not None:
        return installed[1]
    for folder in _other_folders_of_packages():
        if path.startswith(folder):
            return path.removeprefix(folder).partition("/")[0].removesuffix(".py")
    return ""


@cache
def _other_folders_of_packages() -> list[str]:
    """Return the folders of Python's path into which packages were installed by ``pip install --target``."""
    folders = []
    for entry in sys.path:
        folder = Path(entry)
        is_known = folder.name in ("site-packages", "dist-packages")
        if entry and not is_known and any(folder.glob("*.dist-info")):
            folders.append(f"{folder.absolute().as_posix()}/")
    return folders


@cache
def _uses_torch(package: str) -> bool:
    """Return whether a loaded module of ``package`` has imported torch, a module of it such as ``nn``, or a class."""
    for name, module in list(sys.modules.items()):
        is_of_package = name == package or name.startswith(f"{package}.")
        if not is_of_package:
            continue
        namespace = getattr(module, "__dict__", {})
        if "torch" in namespace or any(map(_is_from_torch, [*namespace.values()])):
            return True
    return False


def _is_from_torch(value: object) -> bool:
    """Return whether ``value`` is a module or a class of torch."""
    # isinstance would ask the value for its class, which a lazy object may not have yet
    kind = type(value)
    if issubclass(kind, ModuleType):
        module_name = vars(value).get("__name__", "")
    elif issubclass(kind, type):
        module_name = getattr(value, "__module__", "")
    else:
        return False
    return str(module_name).partition(".")[0] == "torch"


@cache
def _is_of_loop(file: str) -> bool:
    return any(part in file for part in _LOOPS)


def qualified_name(code: CodeType) -> str:
    """Return the name of a function, with the names of its classes if this version of Python knows them.

    A lambda or comprehension has the name of the function that contains it.
    """
    name = code.co_name
    if sys.version_info >= (3, 11):
        # without lambdas and comprehensions at the end, such as ``Model.loss.<locals>.<lambda>``
        name = re.sub(r"(\.<locals>\.<\w+>)+$", "", code.co_qualname)
    return name


def user_line(
    innermost: FrameType, frameworks: bool = False
) -> tuple[str, int, str] | None:
    """Return file, number and function of the innermost line of the program's code; None if there is none.

    With ``frameworks``, return the framework's innermost line if the program has none. The search stops at a Lightning
    loop, because the program's next line outside of it is the call of ``fit``, which shows nothing.
    """
    framework_line = None
    for frame, number in walk_stack(innermost):
        file = frame.f_code.co_filename
        package = package_of(file)
        line = (file, number, frame.f_code.co_name)
        is_of_program = not package
        if is_of_program:
            return line
        is_of_framework = package in (LIGHTNING, OURS)
        if is_of_framework and not any(part in file for part in _APPLIES):
            framework_line = framework_line or line
        if _is_of_loop(file):
            break
    return framework_line if frameworks else None


def user_lines(
    innermost: FrameType,
    inside: Collection[CodeType] = (),
    callees_left_out: CodeType | None = None,
) -> list[tuple[str, int, str]]:
    """Return file, number and function of all lines of the program's code on the stack, the outermost first.

    The search stops at a Lightning loop outside of the step, and at the first function whose code is in ``inside``.
    Lines inside of a function with the code ``callees_left_out`` are returned only if there are no others.
    """
    lines: list[tuple[str, int, str]] = []
    left_out: list[tuple[str, int, str]] = []  # inside of ``callees_left_out``
    # The walk begins at the innermost frame, so all lines before such a function are inside of it.
    for frame, line in walk_stack(innermost):
        if frame.f_code in inside:
            break
        if frame.f_code is callees_left_out:
            left_out += lines
            lines = []
        file = frame.f_code.co_filename
        if not package_of(file):
            lines.append((file, line, qualified_name(frame.f_code)))
        elif _is_of_loop(file) and _CLOSURES not in file:
            break
    if not lines:
        lines = left_out
    lines.reverse()
    return lines
