"""What all tests share; they import what stands in tests/support."""

import functools
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

SUPPORT = Path(__file__).parent / "support"
sys.path[:0] = [str(SUPPORT), str(SUPPORT.parents[1])]  # and benchmarks/, whose simulations tests use
pytest.register_assert_rewrite("known_loop")
# Killed processes leave temporary files: they go with the tests' own folder. Pytest's stay, to look at.
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="lm_tests_")

import warm  # noqa: E402 - which stands in tests/support
from stored_texts import CHANGES  # noqa: E402

from lm_profiler.processes import child, rank_group  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    """A shell's background job is born deaf to Ctrl-C, and so would be the programs that the tests interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _keep_nothing()
    os.environ["GIT_DIR"] = os.devnull  # git takes 25 ms in each process to find the commit of a run
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        warm.share_server()
    # after multiprocessing has removed its own folder there, whose priority is -100
    Finalize(None, shutil.rmtree, (tempfile.gettempdir(),), {"ignore_errors": True}, exitpriority=-200)


def _keep_nothing() -> None:
    """No test reads or leaves a ceiling of this machine: a file stands where their folder would be."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ.setdefault("MPLCONFIGDIR", str(cache / "matplotlib"))  # whose fonts take long to find again
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="cache_")
    Path(os.environ["XDG_CACHE_HOME"], "lm_profiler").touch()


def pytest_collection_finish() -> None:
    """What is loaded by now stays: no collection need look at it again, which took a third of a second each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def what_is_loaded_stays() -> Iterator[None]:
    """What a module of tests has loaded stays too, and no later collection looks at it."""
    before = len(sys.modules)
    yield
    if len(sys.modules) - before > 100:
        gc.collect()
        gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # of xdist, which takes it to who shows it
        session.config.workeroutput["changes"] = CHANGES


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    CHANGES.extend(getattr(node, "workeroutput", {}).get("changes", ()))


def pytest_terminal_summary(terminalreporter: Any) -> None:  # pytest 8 has no public name for its type
    for change in CHANGES:
        terminalreporter.write_line(f"\n{change}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def nothing_compiled_yet() -> None:
    """As in a fresh process: a graph that another test compiled may be called by no step of this one."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()


@pytest.fixture(autouse=True)
def no_memory_held_yet() -> None:
    """As in a fresh process: another test's memory, its peak or what stood in it is none of this one's."""
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@pytest.fixture(autouse=True, scope="session")
def forked_interpreters() -> Iterator[None]:
    """A fresh interpreter, or rank, is a fork of one that has loaded torch, which saves four seconds each time.

    Of the session, so that it holds for what modules make once, too.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "start_interpreter", warm.interpreter)
        patch.setattr(rank_group, "get_context", warm.rank_context)
        yield


@pytest.fixture(autouse=True, scope="session")
def entry_points_read_once() -> Iterator[None]:
    """Each Trainer reads those of everything installed, which takes it 20 ms and does not change amid the tests."""
    with pytest.MonkeyPatch.context() as patch:
        if registry := sys.modules.get("lightning.fabric.utilities.registry"):  # no test here trains otherwise
            patch.setattr(registry, "entry_points", functools.cache(registry.entry_points))
        yield


@pytest.fixture
def no_rates() -> Iterator[None]:
    """Leave the ceiling and the bandwidth of this machine unknown; to read them takes half a second a run."""
    with warm.with_rates(flops_per_s=None, bytes_per_s=None):
        yield


@pytest.fixture
def no_preflight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rehearse no run before it starts: that takes a process and some seconds each."""
    monkeypatch.setattr("lm_profiler.cli.verbs.trainer.plan_ahead", lambda cli: None)


@pytest.fixture
def no_weights() -> Iterator[None]:
    """Fail where this process, but no child of it, builds weights."""
    own = os.getpid()

    def fail(module: torch.nn.Module, name: str, weight: object) -> None:
        if os.getpid() == own:
            pytest.fail("weights were built")

    hook = register_module_parameter_registration_hook(fail)
    yield
    hook.remove()


@pytest.fixture
def set_free_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Tells how many bytes the limits of this process leave it, of what the machine has."""
    return lambda left: monkeypatch.setattr("lm_profiler.measure.memory.peaks.left_bytes", lambda: left)


@pytest.fixture
def formula(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What answers in place of the rehearsals of ``plan``."""
    from made_plan import Formula  # with torch and Lightning, which few tests need

    formula = Formula()
    monkeypatch.setattr("lm_profiler.cli.rehearse.start_rehearsal", formula.start_rehearsal)
    return formula
