"""The program's own code is distinguished from that of installed packages by its file."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from lm_profiler.measure import user_code


@pytest.fixture
def no_cache() -> Iterator[None]:
    caches = (user_code.package_of, user_code.installed_package, user_code._other_folders_of_packages)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def test_installed_packages_are_no_code_of_the_program(no_cache: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """``pip install --target`` puts packages, with their metadata, into a folder of any name."""
    target, program = tmp_path / "packages", tmp_path / "program"
    (target / "pytorch_lightning-2.6.1.dist-info").mkdir(parents=True)
    program.mkdir()
    monkeypatch.syspath_prepend(str(target))
    monkeypatch.syspath_prepend(str(program))
    package_of = user_code.package_of
    assert package_of(f"{target}/pytorch_lightning/utilities/combined_loader.py") == user_code.LIGHTNING
    assert package_of(f"{target}/pillow_like/image.py") == "pillow_like"
    assert package_of(f"{program}/train.py") == ""


class Samples:
    def names(self) -> list[str]:
        return [user_code.qualified_name(sys._getframe().f_code) for _ in range(1)]

    def name_in_lambda(self) -> str:
        return (lambda: user_code.qualified_name(sys._getframe().f_code))()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python does not know the names of a function's classes")
def test_a_comprehension_or_lambda_has_the_name_of_its_function() -> None:
    assert Samples().names() == ["Samples.names"]
    assert Samples().name_in_lambda() == "Samples.name_in_lambda"


@pytest.mark.parametrize(
    "source, package",
    [
        ("import torch", ""),
        ("import torch.nn as nn", ""),
        ("from torch import nn", ""),
        ("from torch.nn import Linear", ""),
        ("import math", "package_of_others"),
    ],
)
def test_an_installed_package_that_imports_torch_in_any_form_is_code_of_the_program(
    source: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    user_code._uses_torch.cache_clear()
    user_code.package_of.cache_clear()
    module = ModuleType("package_of_others.layers")
    exec(source, module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert user_code.package_of("/x/site-packages/package_of_others/layers.py") == package


def test_the_lines_around_a_closure_of_lightning_belong_to_the_step() -> None:
    """The program's ``optimizer_step`` calls the closure; its caller, the loop over batches, ends the search."""
    lines: list[tuple[str, int, str]] = []
    frames = [
        ("lightning/pytorch/loops/training_epoch_loop.py", "advance"),
        ("train.py", "optimizer_step"),
        ("lightning/pytorch/loops/optimization/closure.py", "closure"),
        ("train.py", "training_step"),
    ]

    def innermost() -> None:
        lines.extend(user_code.user_lines(sys._getframe(1)))

    call = innermost
    for file, function in reversed(frames):
        folder = "/x/site-packages" if file.startswith("lightning") else "/x"
        namespace = {"inner": call}
        exec(compile(f"def {function}():\n    inner()", f"{folder}/{file}", "exec"), namespace)
        call = namespace[function]
    call()
    assert [name for _, _, name in lines] == ["optimizer_step", "training_step"]
