"""The verb: what it refuses, what it prints, and a sweep of cells that end in every way, killed and gone on with."""

import errno
import itertools
import os
import shlex
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import psutil
import pytest
import warm
import yaml
from faults import fault_in
from refused import assert_refused_as_stored
from stored_texts import assert_stored

from lm_profiler.cli.main import main
from lm_profiler.cli.verbs.sweep import cells_to_check
from lm_profiler.record.run_record import read_run
from lm_profiler.record.sweep_files import Cell, CellOutcome, read_outcomes
from lm_profiler.sweep.sweep_folder import SweepFolder

pytestmark = pytest.mark.usefixtures("no_rates", "no_preflight")


BASE = {
    "model": {"class_path": "cells_module.Users"},
    "data": None,
    "trainer": {"accelerator": "cpu"},
    "stages": {"warmup_steps": 1, "measure_steps": 3},
    "memory": {"steps": 0},
    "trace": {"steps": 0},
    "check_memory": False,  # a rehearsal would do what the module below does to files, too; tests/cli/test_preflight.py
}
USERS = """
import os, pathlib, time, torch
from lightning.pytorch.demos.boring_classes import BoringModel

class Users(BoringModel):
    def __init__(self, does: str = "well"):
        super().__init__()
        self.does = does

    def on_fit_start(self):
        with open("starts.txt", "a") as file:
            file.write(f"{self.does}\\n")

    def training_step(self, batch, i):
        if i == 2 and self.does == "hog":
            torch.empty(1 << 50, dtype=torch.uint8)
        if i == 2 and self.does == "fail":
            raise RuntimeError("boom")
        if i == 2 and self.does == "crash":
            os.abort()
        if i == 2 and self.does == "edit":
            pathlib.Path("base.yaml").write_text("stages: {measure_steps: 7}")
        if i == 2 and self.does == "hang":
            with open("hangs.txt", "a") as file:
                file.write(f"{os.getpid()}\\n")
            time.sleep(600)
        return super().training_step(batch, i)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder: a config of a module of his own, which writes down each start."""
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(BASE))
    (tmp_path / "cells_module.py").write_text(USERS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


REFUSED = [
    ["sweep"],
    ["sweep", *["nowhere.yaml"]],
    ["sweep", *["--config=nowhere.yaml", "--grid.a.b=1"]],
    ["sweep", *["--grid.config=base.yaml,nowhere.yaml"]],
    ["sweep", *["bad.yaml"]],
    ["sweep", *["--config=base.yaml", "--grid.a.b=1", "--log_dir=base.yaml"]],
]


def test_a_wrong_call_leaves_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "bad.yaml").write_text("grids: {a.b: [1]}")
    before = set(here.rglob("*"))
    assert_refused_as_stored("cli/sweep", REFUSED, capsys)
    assert set(here.rglob("*")) == before
    with fault_in(SweepFolder.missing, OSError(errno.ENOSPC, "No space left on device")):
        assert main(["sweep", "--config=base.yaml", "--grid.a.b=1,2"]) == 1
    texts = {"an error": capsys.readouterr().err.splitlines()[-1]}
    assert_stored("sweep/reasons: full disk", texts)


def test_a_dry_run_prints_calls_for_a_shell(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["sweep", "--config=base.yaml", "--grid.model.does", "well,it's a; test", "--repeats=2", "--dry_run"]
    assert main(call) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert Counter(tuple(shlex.split(line)) for line in printed.out.splitlines()) == Counter(
        (*("python", "-m", "lm_profiler", "fit", "--config=base.yaml"),
         *(f"--model.does={does}", "--log_dir=logs/base_sweep", f"--name=does={name},r{repeat}"))
        for does, name in (("well", "well"), ("it's a; test", "it-s-a-test"))
        for repeat in (0, 1)
    )  # fmt: skip
    assert not (here / "logs").exists()


def swept(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The verb as a program, which starts the server of its cells."""
    return warm.run_python("-m", "lm_profiler", "sweep", *arguments)


@pytest.mark.parametrize(
    "grid,message",
    [
        (["--grid.model.dose=well,fail"], "--model.dose;"),
        (["--model=lm_profiler.training.LanguageModel", "--grid.model.size=small,huge"], "model.size: expected"),
    ],
    ids=["an option that cells do not have", "a size"],
)
def test_a_wrong_grid_is_refused_before_anything_runs(here: Path, grid: list[str], message: str) -> None:
    done = swept("--config=base.yaml", *grid)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (here / "logs").exists()
    assert not (here / "starts.txt").exists()


def test_few_calls_show_every_value_of_a_grid() -> None:
    options = {"a": [f"w{i}" for i in range(6)], "b": [f"v{i}" for i in range(5)], "c": list(map(str, range(7)))}
    points = [dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())]
    cells = [Cell(id=str(i), overrides=point, repeat=0, arguments=["fit"]) for i, point in enumerate(points)]
    chosen = cells_to_check(cells)
    assert len(chosen) == 6  # as many as the longest list of words: of whole numbers one stands for all
    for name in ("a", "b"):
        assert {cell.overrides[name] for cell in chosen} == {*options[name]}


def test_a_sweep_goes_on_with_the_config_that_it_began_with(here: Path) -> None:
    # The options of one's own model may be swept where its name is an option of the line.
    (here / "base.yaml").write_text(yaml.safe_dump({**BASE, "model": {"size": "small"}}))
    call = ["--config=base.yaml", "--model=cells_module.Users", "--grid.model.does=edit,well", "--seed=1"]
    done = swept(*call)
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 cells: 2 ok" in done.stdout
    assert (here / "starts.txt").read_text().split() == ["edit", "well"]
    for does in ("edit", "well"):
        record = read_run(here / "logs" / "base_sweep" / f"does={does}" / "version_0")
        assert record.steps["measure"] == 3
        assert "--config=logs/base_sweep/configs/base.yaml" in record.command
    done = swept(*call)
    assert done.returncode == 2  # the file has changed, so it is another sweep
    assert "config file" in done.stderr


def test_a_module_that_never_builds_is_stopped_by_the_timeout(here: Path) -> None:
    (here / "slow.py").write_text("import time; time.sleep(600)")
    assert swept("--config=base.yaml", "--timeout_s=1", "--repeats=2", "--model=slow.M").returncode == 1
    outcomes = read_outcomes(here / "logs" / "base_sweep")
    assert [outcome.status for outcome in outcomes.values()] == ["timeout"] * 2
    texts = {cell: outcome.reason or "" for cell, outcome in outcomes.items()}
    assert_stored("sweep/reasons: never ends to import", texts)


class Sweep:
    """The program, started again and again on the same sweep."""

    def __init__(self, here: Path) -> None:
        self.here = here
        self.process: ForkServerProcess | None = None
        self.seen: list[psutil.Process] = []

    def start(self, timeout_s: int = 60) -> None:
        self.out = self.here / f"output{len(self.seen)}.txt"
        call = ("-m", "lm_profiler", "sweep", "ends.yaml", f"--timeout_s={timeout_s}")
        self.process = warm.start_python(*call, out=self.out)

    def until_it_hangs(self, times: int) -> int:
        """Wait until a cell hangs for the ``times``-th time; returns its process."""
        hangs = self.here / "hangs.txt"
        while len(pids := hangs.read_text().split() if hangs.exists() else []) < times:
            assert self.process.is_alive(), self.ends()
            time.sleep(0.1)
        self.seen += psutil.Process(self.process.pid).children(recursive=True)
        return int(pids[-1])

    def ends(self) -> tuple[int, str]:
        return warm.exit_code_of(self.process), self.out.read_text()

    def none_is_left(self) -> bool:
        return psutil.wait_procs(self.seen, timeout=60)[1] == []


@pytest.fixture
def sweep(here: Path) -> Iterator[Sweep]:
    sweep = Sweep(here)
    yield sweep
    if sweep.process is not None:
        sweep.process.kill()
        sweep.process.join()


def statuses(here: Path) -> dict[str, str]:
    outcomes = read_outcomes(here / "logs" / "ends")
    return {cell.removeprefix("does="): outcome.status for cell, outcome in outcomes.items()}


ENDS = """
config: base.yaml
grid: {model.does: [fail, hog, hang, crash, well]}
seed: 167  # of which the order is: hog, fail, hang, well, crash
"""


def test_cells_end_in_every_way(sweep: Sweep, here: Path) -> None:
    (here / "ends.yaml").write_text(ENDS)

    sweep.start()  # the parent is killed while the third of five cells hangs
    sweep.until_it_hangs(1)
    assert statuses(here) == {"fail": "failed", "hog": "oom"}
    sweep.process.kill()
    sweep.ends()
    assert sweep.none_is_left()

    sweep.start()  # the hanging cell itself is killed: the others run, and it is still missing
    os.kill(sweep.until_it_hangs(2), signal.SIGKILL)
    code, printed = sweep.ends()
    assert code == 1
    assert "missing;" in printed
    assert statuses(here) == {"fail": "failed", "hog": "oom", "hang": "interrupted", "crash": "failed", "well": "ok"}

    sweep.start(timeout_s=5)
    sweep.until_it_hangs(3)
    assert sweep.ends()[0] == 1
    assert sweep.none_is_left()
    outcomes: dict[str, CellOutcome] = {**read_outcomes(here / "logs" / "ends")}
    reasons = {cell.removeprefix("does="): (outcome.status, outcome.reason) for cell, outcome in outcomes.items()}
    assert reasons["hang"][0] == "timeout"
    assert "5 s" in reasons["hang"][1]
    assert reasons["fail"][0] == "failed"
    assert reasons["fail"][1].endswith("boom")
    assert reasons["well"] == ("ok", None)
    assert "SIGABRT" in reasons["crash"][1]
    assert "1125899906842624 bytes" in reasons["hog"][1]
    hanging = read_run(here / "logs" / "ends" / "does=hang" / "version_0")
    assert (hanging.status, hanging.steps["measure"]) == ("interrupted", 1)  # what it had measured is kept
    for cell, outcome in outcomes.items():
        own = here / "logs" / "ends" / (outcome.run or cell)
        assert len(list(own.glob("events.out.tfevents.*.summary"))) == 1  # HPARAMS

    sweep.start()  # there is nothing left to do
    code, printed = sweep.ends()
    assert code == 1
    assert "5 cells: " in printed
    assert Counter((here / "starts.txt").read_text().split()) == {"fail": 1, "hog": 1, "hang": 3, "crash": 1, "well": 1}
    assert sorted(path.name for path in (here / "logs" / "ends" / "does=well").glob("version_*")) == ["version_0"]


def test_ctrl_c_lets_cells_write_their_records(sweep: Sweep, here: Path) -> None:
    (here / "ends.yaml").write_text("config: base.yaml\ngrid: {model.does: [hang]}\nrepeats: 2\n")
    sweep.start()
    sweep.until_it_hangs(1)
    os.kill(sweep.process.pid or 0, signal.SIGINT)
    code, printed = sweep.ends()
    assert code == 130
    assert "Traceback" not in printed
    assert "same command" in printed
    assert sweep.none_is_left()
    (outcome,) = read_outcomes(here / "logs" / "ends").values()
    assert outcome.status == "interrupted"
    assert "step 3" in outcome.reason
