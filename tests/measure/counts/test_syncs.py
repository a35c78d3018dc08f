"""Naming the lines at which the host waits for the device."""

import linecache
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lm_profiler.measure.counts.syncs import SyncDetector, sync_detector_of
from lm_profiler.record.run_record import Sync

# What torch's C++ code emits, with the suffix that it appends.
_TEXT = "called a synchronizing CUDA operation (Triggered internally at /pytorch/c10/cuda/CUDAFunctions.cpp:168.)"


class FakeCuda:
    """The debug mode alone; setting it warns once a process, as torch's does."""

    def __init__(self, mode: int = 0) -> None:
        self.mode = mode

    def get_sync_debug_mode(self) -> int:
        return self.mode

    def set_sync_debug_mode(self, mode: int) -> None:
        self.mode = mode
        warnings.warn("Synchronization debug mode is a prototype feature and does not yet detect all", stacklevel=2)


def syncs_while(run: Callable[[], object]) -> list[Sync]:
    """What is found while ``run`` runs."""
    detector = SyncDetector(FakeCuda())
    detector.begin()
    run()
    return detector.end()


@pytest.fixture
def wait() -> Callable[[], None]:
    """A function of torch that waits for the device: PyErr_WarnEx names the innermost Python frame."""
    return _module("torch._waiting", "<torch>", f"import warnings\ndef wait():\n    warnings.warn({_TEXT!r})\n")["wait"]


def _module(name: str, file: str, source: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": name}
    exec(compile(source, file, "exec"), namespace)
    return namespace


def _user(folder: Path, source: str, name: str = "user_model", **names: Any) -> dict[str, Any]:
    installed = folder / "site-packages" if "." in name else folder  # a package's module, or a file of the user's
    file = installed / f"{name.replace('.', '/')}.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source)
    linecache.checkcache(str(file))
    namespace = _module(name, str(file), source)
    namespace.update(names)
    return namespace


def test_lines_are_listed_by_frequency(tmp_path: Path, wait: Callable[[], None]) -> None:
    source = "def once():\n    wait()  # loss.item()\n\ndef often():\n    wait()\n\ndef step():\n    once()\n"
    user = _user(tmp_path, source + "    for _ in range(3):\n        often()\n", wait=wait)
    often, once = syncs_while(user["step"])
    assert (often.line, often.function, often.count) == (5, "often", 3)
    assert (once.line, once.function, once.count) == (2, "once", 1)
    assert once.file == str(tmp_path / "user_model.py")
    assert once.call == "wait()  # loss.item()"


def test_the_users_line_is_named(tmp_path: Path, wait: Callable[[], None]):
    inner: Callable[[], None] = wait
    for name in ("torch.nn.modules.module", "lightning.pytorch.core.module", "lm_profiler.callbacks.marks.phases"):
        inner = _user(tmp_path, "def call():\n    inner()\n", name, inner=inner)["call"]
    user = _user(tmp_path, "def training_step():\n    log()\n", "torch_user", log=inner)
    assert [(point.function, point.line) for point in syncs_while(user["training_step"])] == [("training_step", 2)]


def test_frames_that_apply_any_function_are_passed_over(tmp_path: Path, wait: Callable[[], None]):
    inner: Callable[[], None] = wait
    for name in ("lightning.fabric.utilities.apply_func", "lightning_utilities.core.apply_func"):
        inner = _user(tmp_path, "def apply():\n    inner()\n", name, inner=inner)["apply"]
    bar = _user(tmp_path, "def shown():\n    inner()\n", "lightning.pytorch.callbacks.bar", inner=inner)
    loop = _user(tmp_path, "def run():\n    hook()\n", "lightning.pytorch.loops.fit_loop", hook=bar["shown"])
    assert [point.function for point in syncs_while(loop["run"])] == ["shown"]
    log = _user(tmp_path, "def log():\n    inner()\n", "lightning.pytorch.core.module", inner=inner)
    user = _user(tmp_path, "def training_step():\n    log()\n", log=log["log"])
    assert [point.function for point in syncs_while(user["training_step"])] == ["training_step"]


def test_our_own_model_is_code_like_any_other(tmp_path: Path, wait: Callable[[], None]):
    model = _user(tmp_path, "def forward():\n    wait()\n", "lm_profiler.models.transformer", wait=wait)
    assert [point.function for point in syncs_while(model["forward"])] == ["forward"]


def test_a_wait_of_the_loop_is_not_charged_to_the_caller_of_fit(tmp_path: Path, wait: Callable[[], None]):
    callback = _user(tmp_path, "def on_batch_end():\n    wait()\n", "lightning.pytorch.callbacks.bar", wait=wait)
    hook = callback["on_batch_end"]
    loop = _user(tmp_path, "def run():\n    hook()\n", "lightning.pytorch.loops.fit_loop", hook=hook)
    script = _user(tmp_path, "def main():\n    fit()\n", "train", fit=loop["run"])
    assert [point.function for point in syncs_while(script["main"])] == ["on_batch_end"]


def test_mode_and_warnings_are_restored(wait: Callable[[], None]) -> None:
    cuda = FakeCuda(mode=2)
    before = warnings.showwarning, list(warnings.filters)
    detector = SyncDetector(cuda)
    detector.begin()
    detector.begin()  # a second one changes nothing
    assert cuda.mode == 1
    wait()
    points = detector.end()
    assert detector.end() == points
    assert cuda.mode == 2
    assert (warnings.showwarning, list(warnings.filters)) == before
    (point,) = points
    assert point.function == "test_mode_and_warnings_are_restored"


def test_other_warnings_are_passed_on() -> None:
    with pytest.warns(DeprecationWarning, match="old"):
        assert syncs_while(lambda: warnings.warn("old", DeprecationWarning, stacklevel=1)) == []

    class Refusing(FakeCuda):
        def set_sync_debug_mode(self, mode: int) -> None:
            raise RuntimeError("no device")

    before = warnings.showwarning, list(warnings.filters)
    with pytest.raises(RuntimeError, match="no device"):
        SyncDetector(Refusing()).begin()
    assert (warnings.showwarning, list(warnings.filters)) == before
    assert sync_detector_of(torch.device("cpu")) is None


@pytest.mark.gpu
def test_synchronizations_are_found_on_a_gpu() -> None:
    detector = sync_detector_of(torch.device("cuda"))
    x = torch.ones(8, device="cuda")
    detector.begin()
    x.sum().item()
    x * 2
    points = detector.end()
    assert [(point.call, point.count) for point in points] == [("x.sum().item()", 1)]
    assert torch.cuda.get_sync_debug_mode() == 0
