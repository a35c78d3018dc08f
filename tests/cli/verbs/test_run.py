"""``run`` starts programs that know nothing of the profiler, and they train as without it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import warm
from scripts import SUPPORT

from lm_profiler.callbacks import TrainingProfiler, profiling_callbacks
from lm_profiler.callbacks.shortcut import Admission, admitted_callbacks
from lm_profiler.cli.main import main
from lm_profiler.external_callbacks import external_callbacks
from lm_profiler.external_loops import VARIABLE
from lm_profiler.record.run_record import read_run
from lm_profiler.usage_error import UsageError

PROGRAM = str(SUPPORT / "any_program.py")
FEW = ("--warmup_steps=2", "--measure_steps=5", "--trace_steps=1")


def run_program(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, *words], cwd=cwd, env=env, capture_output=True, text=True, check=False)


def test_a_program_is_recorded_and_trains_as_without(tmp_path: Path) -> None:
    plain = warm.run_python(PROGRAM, "plain.pt", folder=tmp_path)
    profiled = run_program("-m", "lm_profiler", "run", *FEW, "--", sys.executable, PROGRAM, "profiled.pt", cwd=tmp_path)
    for done in (plain, profiled):
        assert (done.returncode, done.stdout) == (7, "trained 40\n"), done.stderr
    record = read_run(tmp_path / "logs" / "lm_profiler" / "version_0")
    assert (record.status, record.steps["measure"]) == ("ok", 5)
    assert PROGRAM in record.command
    weights, profiled_weights = (torch.load(tmp_path / name) for name in ("plain.pt", "profiled.pt"))
    assert all(torch.equal(tensor, profiled_weights[name]) for name, tensor in weights.items())


OWN_STEPS_THEN_A_TRAINER = """
import sys
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

model = BoringModel()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.randn(4, 32)).sum().backward()
    optimizer.step()
Trainer(accelerator="cpu", max_steps=30, logger=False, enable_checkpointing=False).fit(model)
"""


@pytest.mark.parametrize(
    "own_steps, watch, records",
    [
        # The loop is found in its first step, two warm up, and one is measured.
        (4, "false", {0: ("own", 1), 1: ("fit", 5)}),
        (40, "false", {0: ("own", 5)}),
        (40, "true", {0: ("own", 5), 1: ("fit", 5)}),  # only the fit can be watched
    ],
)
def test_a_fit_after_some_steps_of_a_loop_is_profiled(
    own_steps: int, watch: str, records: dict[int, tuple[str, int]], tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(OWN_STEPS_THEN_A_TRAINER)
    program = [sys.executable, "program.py", str(own_steps)]
    done = warm.run_python("-m", "lm_profiler", "run", *FEW, f"--watch={watch}", "--", *program, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    read = {}
    for version in range(2):
        folder = tmp_path / "logs" / "lm_profiler" / f"version_{version}"
        if folder.exists():
            record = read_run(folder)
            read[version] = ("own" if record.loop == "own" else record.verb, record.steps["measure"])
    assert read == records
    is_refused = "--trainer=1` profiles this one" in done.stderr
    assert is_refused == (1 not in records)


def test_a_program_without_a_trainer_ends_as_usual(tmp_path: Path) -> None:
    done = run_program("-m", "lm_profiler", "run", "--", "sh", "-c", "echo mine; exit 3", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (3, "mine\n")
    assert done.stderr.count("\n") == 1
    assert "no Lightning Trainer" in done.stderr


def test_a_missing_program_ends_as_in_a_shell(tmp_path: Path) -> None:
    (tmp_path / "no_program").touch()
    assert run_program("-m", "lm_profiler", "run", "--", "not_there_at_all", cwd=tmp_path).returncode == 127
    (tmp_path / "no_binary").write_bytes(b"\x01")
    (tmp_path / "no_binary").chmod(0o755)
    for program in ("./no_program", "./no_binary"):
        done = run_program("-m", "lm_profiler", "run", "--", program, cwd=tmp_path)
        assert (done.returncode, done.stderr.count("\n")) == (126, 1)


@pytest.mark.parametrize(
    "words",
    [
        ["python", "train.py"],
        ["--"],
        *([option, "--", "true"] for option in ("--measure_steps=0", "--trainer=0", "--name=../x", "--name=a\nb")),
        [f"--log_dir={__file__}", "--", "true"],
    ],
)
def test_wrong_call_is_refused_before_the_program_starts(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_help_of_the_program_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def start(*given: Any) -> None:
        seen.append(given)
        raise FileNotFoundError

    monkeypatch.setattr(os, "execvp", start)
    monkeypatch.setenv(VARIABLE, "")  # which is so again after the test
    before = {number: signal.getsignal(number) for number in (signal.SIGPIPE, signal.SIGXFSZ)}
    main(["run", "--name=x", "--", "not_there_at_all", "--help", "--name", "y", "--"])
    for number, handler in before.items():  # a program gets the system's, and this process is none
        signal.signal(number, handler)
    assert seen == [("not_there_at_all", ["not_there_at_all", "--help", "--name", "y", "--"])]
    assert json.loads(os.environ[VARIABLE])["options"]["name"] == "x"


def test_options_of_the_variable_are_those_of_the_callback() -> None:
    [made] = admitted_callbacks('{"options": {"name": "night", "log_dir": "/x", "verb": "test"}, "trainer": 3}')
    assert (made.admits.wanted_number, made.admits.verb) == (3, "test")


WITHOUT_THE_VARIABLE = """
import os, sys
before = set(sys.modules)
import lm_profiler_autoload
print(*sorted(set(sys.modules) - before))
from importlib.metadata import entry_points
frameworks = ("lightning.pytorch", "pytorch_lightning", "lightning.fabric")
for os.environ["LM_PROFILER"] in ("", "0"):
    for group in ("torch.backends", *(f"{framework}.callbacks_factory" for framework in frameworks)):
        (entry,) = entry_points(group=group, name="lm_profiler")
        print(entry.load()())
print(*(name for name in sys.modules if name.startswith(("lm_profiler", "torch"))))
"""


def test_without_the_variable_only_one_small_file_is_imported(tmp_path: Path) -> None:
    """It is what torch, Fabric and Lightning call, outside of the package; it answers that there is nothing to do."""
    done = run_program("-c", WITHOUT_THE_VARIABLE, cwd=tmp_path)
    imported, *answers, imported_in_the_end = done.stdout.splitlines()
    assert imported == imported_in_the_end == "lm_profiler_autoload", done.stderr
    assert answers == ["None", "[]", "[]", "[]"] * 2


@pytest.mark.parametrize("value", ["{", '{"options": {"measure_steps": -1}}', '{"options": {"unknown": 1}}'])
def test_wrong_variable_raises_nothing(value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv(VARIABLE, value)
    assert external_callbacks() == []
    assert "not profiled" in capsys.readouterr().err


@pytest.mark.parametrize("namespace", ["lightning.pytorch", "pytorch_lightning"])
def test_each_trainer_asks_for_it(namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def profilers() -> int:
        trainer = import_module(namespace).Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
        return sum(isinstance(callback, TrainingProfiler) for callback in trainer.callbacks)

    monkeypatch.delenv(VARIABLE, raising=False)
    assert profilers() == 0
    monkeypatch.setenv(VARIABLE, "1")
    assert profilers() == 1


def trainer_like(verb: str = "fit", barebones: bool = False, callbacks: Sequence[object] = ()) -> Any:
    """A Trainer as far as an admission looks at it."""
    state = SimpleNamespace(fn=SimpleNamespace(value=verb))
    return SimpleNamespace(state=state, barebones=barebones, callbacks=list(callbacks), is_global_zero=True)


def admission(number: int, claims: Path, wanted_number: int | None = None) -> Admission:
    """Of the Trainer with this number."""
    return Admission(number, wanted_number=wanted_number, verb="fit", claims=claims)


def test_only_the_first_matching_trainer_is_admitted(tmp_path: Path) -> None:
    first, second, third = (admission(number, tmp_path) for number in (1, 2, 3))
    assert not first(trainer_like("validate"))
    assert second(trainer_like())
    for refused in (second, first, third):
        assert not refused(trainer_like())


def test_all_ranks_of_a_trainer_are_admitted(tmp_path: Path) -> None:
    ranks = [admission(2, tmp_path) for _ in range(3)]
    assert all(rank(trainer_like()) for rank in ranks)


def test_the_trainer_with_the_wanted_number_is_admitted(tmp_path: Path) -> None:
    trainers = [admission(number, tmp_path, wanted_number=2) for number in (1, 2, 3)]
    assert [trainer(trainer_like()) for trainer in trainers] == [False, True, False]


def test_a_trainer_that_cannot_be_profiled_or_is_already_is_not_admitted(tmp_path: Path) -> None:
    assert not admission(1, tmp_path)(trainer_like(barebones=True))
    assert not admission(1, tmp_path)(trainer_like(callbacks=profiling_callbacks()))


def test_later_fits_are_reported_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(import_module("lm_profiler.callbacks.shortcut"), "_refusal_is_reported", False)
    first, second, third = (admission(number, tmp_path) for number in (1, 2, 3))
    assert first(trainer_like())
    assert not second(trainer_like("validate"))  # nobody expects that one to be profiled
    assert not second(trainer_like(callbacks=profiling_callbacks()))  # the program profiles it itself
    assert capsys.readouterr().err == ""
    assert not second(trainer_like())
    assert "only the first fit" in capsys.readouterr().err
    assert not third(trainer_like())
    assert not first(trainer_like())
    assert capsys.readouterr().err == ""


def test_without_a_folder_the_process_decides_for_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(import_module("lm_profiler.callbacks.shortcut"), "_admitted_number", None)
    assert admission(4, tmp_path / "gone")(trainer_like())
    assert not admission(5, tmp_path / "gone")(trainer_like())


@pytest.mark.parametrize("given", [2.5, "3"])
def test_a_number_of_steps_that_is_none_is_refused_where_it_is_given(given: Any) -> None:
    for option in ("warmup_steps", "measure_steps", "trace_steps", "memory_steps", "action_steps"):
        with pytest.raises(UsageError, match=f"^{option}: expected "):
            profiling_callbacks(**{option: given})
