"""The command line: what it refuses and how, what it leaves behind, and its exit codes."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import warm
import yaml
from faults import fault_in
from lightning.pytorch import Trainer
from refused import assert_refused_as_stored, printed_refusal
from stored_texts import assert_stored

import lm_profiler.cli.verbs.trainer  # noqa: F401 - so that what it plans by can be replaced
from lm_profiler.callbacks.session import Session
from lm_profiler.cli.main import main
from lm_profiler.record.run_record import read_run

pytestmark = pytest.mark.usefixtures("no_rates", "no_preflight")


USERS = """
import signal, sys, time, warnings
from lightning.pytorch import LightningModule
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

class Users(BoringModel):
    def __init__(self, at: str = "", rank: int = -1, workers: int = 0):
        super().__init__()
        self.at, self.only, self.workers = at, rank, workers
        print("the user's print", flush=True)
        self.here("init", TypeError("a bug\\nof mine"))

    def here(self, at, error):
        if at != self.at or self.only not in (-1, self.trainer.global_rank if self.only >= 0 else -1):
            return
        if error is not None:
            raise error
        print("waiting", flush=True)
        time.sleep(60)

    def prepare_data(self):
        self.here("prepare", RuntimeError("no data\\nat all"))

    def configure_model(self):
        self.here("build", None)

    def training_step(self, batch, i):
        warnings.warn("the user's warning", stacklevel=2)
        if i == 3:
            self.here("surrogate", RuntimeError("no file \\udcff"))
            self.here("step", RuntimeError("boom\\nsecond line"))
            self.here("interrupt", KeyboardInterrupt())
            self.here("exit", SystemExit(7))
            self.here("wait", None)
        return super().training_step(batch, i)

    def train_dataloader(self):
        return DataLoader(RandomDataset(32, 640), num_workers=self.workers)

class Needs(BoringModel):
    def __init__(self, width, depth: int = 2, **more):
        super().__init__()

class Inherits(Needs):
    def __init__(self, height: int, **more):
        super().__init__(**more)

class Bare(LightningModule):
    def training_step(self, batch, i):
        return None

    validation_step = training_step

    def configure_optimizers(self):
        return None
"""
KEEPER = """
class Keeper(BoringModel):
    given = []

    def __init__(self, hf_token: str = "", headers: dict = {}, password: str = "", where: str = "", more: dict = {}):
        super().__init__()
        self.given[:] = [hf_token, headers["api_key"], password, more["client_secret"], where]
"""
ALIKE = """
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

GIVEN = {}

class Model(BoringModel):
    def __init__(self, size: int = 100, lr: int = 101, vocab_size: int = 102, mine: int = 103):
        super().__init__()
        GIVEN["model"] = {"size": size, "lr": lr, "vocab_size": vocab_size, "mine": mine}

class Data(BoringDataModule):
    def __init__(self, vocab_size: int = 200, seed: int = 201, mine: int = 202):
        super().__init__()
        GIVEN["data"] = {"vocab_size": vocab_size, "seed": seed, "mine": mine}

class Loaders(BoringModel):
    \"\"\"Brings its own data, and could be given fake tokens as well.\"\"\"
    vocab_size = 10
    loaders_made = []

    def own(self, what):
        self.loaders_made.append(what)
        return BoringModel.train_dataloader(self)

    def train_dataloader(self):
        return self.own("train")

    def val_dataloader(self):
        return self.own("val")

    def test_dataloader(self):
        return self.own("test")

    def predict_dataloader(self):
        return self.own("predict")
"""
TINY = {
    "model": {"size": "small", "d_model": 16, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 50},
    "data": {"batch_size": 2, "context_length": 8},
    "trainer": {"accelerator": "cpu", "gradient_clip_val": 1.0},
    "stages": {"warmup_steps": 1, "measure_steps": 3},
    "trace": {"steps": 0},
    "check_memory": False,  # some of the modules here wait for ever; tests/cli/test_preflight.py
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder: a small config, a module of his own, and a regular file."""
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    (tmp_path / "users_module.py").write_text(USERS)
    (tmp_path / "alike.py").write_text(ALIKE)
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("users_module", "alike", "broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


REFUSED = [
    [],
    ["fitt"],
    ["fit", "--config=nowhere.yaml"],
    ["fit", "--trainer.max_step=3"],
    ["fit", "--bogus", "3"],
    ["fit", "--model.num_heads=7"],
    ["fit", "--data.context_length=x"],
    ["fit", "--data.vocab_size=51"],
    ["fit", "--trace.steps=-2"],
    ["fit", "--trainer.precision=fp8"],
    ["fit", "--model=no.where.Model"],
    ["fit", "--data=lm_profiler.training.LanguageModel"],
    ["fit", "--trainer.callbacks=Nope"],
    ["fit", "--trainer.callbacks=ModelCheckpoint", "--trainer.callbacks.save_top_k=-7"],
    ["fit", "--trainer.accelerator=tpu"],
    ["fit", "--trainer.devices=0"],
    ["fit", "--trainer.accumulate_grad_batches=0"],
    ["fit", "--trainer.barebones=true"],
    ["fit", "--model=users_module.Bare"],
    ["fit", "--model=users_module.Inherits", "--model.height=3"],
    ["fit", "--model.size=XL"],
    ["fit", "--log_dir=file/logs"],
    ["fit", "tiny.yaml"],
    ["fit", "--data=null"],
    ["fit", "--seed_everything=-1"],
    ["fit", "--trainer.max_steps=0"],
    ["validate", "--ckpt_path=no.ckpt"],
    ["fit", "--peak_tflops=.inf"],
    ["fit", "--name=\udcff"],
    ["fit", "--trainer.devices=99999999999999999999"],
    ["fit", "--ckpt_path=tiny.yaml"],
    ["fit", "--name=../x"],
]


def test_a_wrong_call_leaves_nothing(here: Path, no_weights: None, capsys: pytest.CaptureFixture[str]):
    before = set(here.rglob("*"))
    assert_refused_as_stored("cli/fit", [call for call in REFUSED if call], capsys, first=["--config=tiny.yaml"])
    assert_stored("cli/no_verb", {"no arguments": printed_refusal([], capsys)})
    assert {path for path in here.rglob("*") if "__pycache__" not in path.parts} == before


REFUSED_CONFIGS: list[Any] = [
    {"model": {"sise": "small"}},
    {"stages": {"warmup_steps": "many"}},
    {"model": 3},
    [1, 2],
    {"trainer": None},
    {"model": {"class_path": None}},
    {"trace": "a\0b"},
    {"log_dir": None},
    {"config": "another.yaml"},
    {"trainer": {"callbacks": {"a": {"b": None}}}},
    {"check_memory": [[[1]]]},
    {"peak_tflops": "x" * 5000},
]


def test_wrong_config_files_are_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    messages = {}
    for content in REFUSED_CONFIGS:
        (here / "bad.yaml").write_text(yaml.safe_dump(content))
        messages[repr(content)[:100]] = message = printed_refusal(["fit", "--config=bad.yaml"], capsys)
        assert len(message) < 1000
        assert not (here / "logs").exists()
    assert_stored("cli/config_files", messages)


def test_null_is_a_value(here: Path) -> None:
    needs = ["--model=users_module.Inherits", "--model.height=3", "--model.width=null"]
    assert main(["fit", "--config=tiny.yaml", *needs]) == 0
    assert main(["fit", "--config=tiny.yaml", "--trainer.devices=0"]) == 2
    assert [path.name for path in (here / "logs" / "tiny").iterdir()] == ["version_0"]


VERBS = {"fit": "train", "validate": "val", "test": "test", "predict": "predict"}


@pytest.mark.parametrize("verb, loader", VERBS.items())
def test_every_verb_runs_on_any_module(verb: str, loader: str, here: Path) -> None:
    for options in ([], ["--model=alike.Loaders", "--memory.steps=0", "--name=brings"]):
        assert main([verb, "--config=tiny.yaml", *options]) == 0
        record = read_run(here / "logs" / ("brings" if options else "tiny") / "version_0")
        assert (record.verb, record.status, record.steps["measure"]) == (verb, "ok", 3)
        assert f" {verb} --config=tiny.yaml" in record.command
    assert set(sys.modules["alike"].Loaders.loaders_made) == {loader}
    config = yaml.safe_load((here / "logs" / "brings" / "version_0" / "config.yaml").read_text())
    assert config["data"] is None


def test_a_file_can_name_another_module(here: Path):
    config = {"model": {"class_path": "users_module.Users", "init_args": {"workers": 0}}, "data": None}
    (here / "mine.yaml").write_text(yaml.safe_dump({**TINY, **config}))
    with pytest.warns(UserWarning, match="the user's warning"):
        assert main(["fit", "--config=mine.yaml"]) == 0
    record = read_run(here / "logs" / "mine" / "version_0")
    assert record.model.class_path == "users_module.Users"
    assert record.config["model"]["init_args"]["at"] == ""


@pytest.mark.usefixtures("here")
def test_predictions_are_not_kept(monkeypatch: pytest.MonkeyPatch):
    options: dict[str, Any] = {}
    monkeypatch.setattr(Trainer, "predict", lambda self, **given: options.update(given))
    assert main(["predict", "--config=tiny.yaml"]) == 0
    assert options["return_predictions"] is False


def test_secrets_are_in_no_file_of_a_run(here: Path) -> None:
    """From a file, from the line in either form, and nested; the module itself gets them as they are."""
    secret, address = "correct-horse-battery", "https://ann:correct-horse-battery@host"
    config = {"class_path": "users_module.Keeper", "init_args": {"hf_token": secret, "headers": {"api_key": secret}}}
    (here / "mine.yaml").write_text(yaml.safe_dump({**TINY, "model": config, "data": None}))
    reaches = "def training_step(self, batch, i):\n        raise OSError('cannot reach ' + self.given[-1])\n"
    (here / "users_module.py").write_text(f"{USERS}{KEEPER}\n    {reaches}")
    line = ["--model.password", secret, f"--model.where={address}", f"--model.more={{client_secret: {secret}}}"]
    assert main(["fit", "--config=mine.yaml", *line]) == 1
    assert sys.modules["users_module"].Keeper.given == [secret, secret, secret, secret, address]
    folder = here / "logs" / "mine" / "version_0"
    assert read_run(folder).failure.message == "cannot reach https://***@host"
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {"config.yaml", "run.json", "traceback.txt"} <= {path.name for path in files}
    assert [path.name for path in files if secret.encode() in path.read_bytes()] == []


@pytest.mark.parametrize(
    "options,folder",
    [
        # whose text option has an enumeration as its default
        (["--trainer.callbacks=Timer", "--trainer.max_steps=2"], "logs/tiny/version_0"),
        (["--trainer.fast_dev_run=2"], "logs/tiny/version_0"),
        (["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=csv"], "logs/tiny/version_0"),
        (["--log_dir=elsewhere", "--name=a/b"], "elsewhere/a/b/version_0"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_options_of_the_trainer_are_the_users(options: list[str], folder: str, here: Path) -> None:
    assert main(["fit", "--config=tiny.yaml", *options]) == 0
    assert sorted(str(path.parent.relative_to(here)) for path in here.rglob("run.json")) == [folder]
    assert read_run(here / folder).status == "ok"


def test_the_config_can_be_printed(here: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["fit", "--config=tiny.yaml", "--model.size=xl", "--print_config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["model"]["class_path"] == "lm_profiler.training.LanguageModel"
    assert printed["model"]["init_args"]["size"] == "xl"
    assert printed["stages"] == {**printed["stages"], "warmup_steps": 1, "measure_steps": 3}
    assert not (here / "logs").exists()


def listed(capsys: pytest.CaptureFixture[str], *call: str) -> tuple[str, set[str]]:
    """What the help of a call prints, and the options at the beginnings of its lines."""
    assert main(call) == 0
    text = capsys.readouterr().out
    return text, set(re.findall(r"^  (?:-\w(?: [A-Z\[\]]+)?, )?(--[\w.]+)", text, re.MULTILINE))


def test_help_lists_what_people_use_first_on_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    text, first = listed(capsys, "predict", "--help")
    whole, every = listed(capsys, "predict", "--help", "all")
    assert text.startswith("usage: lm_profiler predict ")
    assert 40 <= len(text.splitlines()) <= 60
    assert max(map(len, text.splitlines())) <= 80
    assert first <= every
    assert len(whole.splitlines()) > 500
    assert "<class " not in whole.replace("<class 'int'>", "")
    assert "2.7B_bf16," in whole
    assert {"--config", "--stages.measure_steps", "--model.size", "--data.batch_size", "--trainer.precision"} < first


# -- one's own classes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line, model, data",
    [
        ([], {}, {}),
        (["--model.lr=7", "--data.seed=8", "--config=tiny.yaml"], {"lr": 7}, {"seed": 8}),
        (["--model.mine=7", "--data.mine=8"], {"mine": 7}, {"mine": 8}),
    ],
    ids=["alone", "options of the line and a file of ours before it", "an option of its own before it"],
)
def test_a_users_class_has_its_own_defaults(line: list[str], model: dict[str, int], data: dict[str, int], here: Path):
    stages = ["--stages.warmup_steps=0", "--stages.measure_steps=1", "--trace.steps=0", "--memory.steps=0"]
    assert main(["fit", *line, "--model=alike.Model", "--data=alike.Data", *stages]) == 0
    given = sys.modules["alike"].GIVEN
    assert given["model"] == {"size": 100, "lr": 101, "vocab_size": 102, "mine": 103} | model
    assert given["data"] == {"vocab_size": 200, "seed": 201, "mine": 202} | data
    (run,) = here.glob("logs/*/version_0")
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["data"]["init_args"] == given["data"]  # what is recorded is what was run


@pytest.mark.parametrize(
    "content,message",
    [
        ("\n1 / 0\n", "broken.py:2: ZeroDivisionError: division by zero"),
        ("def f(:\n", "broken.py:1: SyntaxError: invalid syntax"),
        ("raise SystemExit('bye')\n", "broken.py:1: SystemExit: bye"),
    ],
)
def test_a_broken_module_is_named(content: str, message: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "broken.py").write_text(content)
    assert main(["fit", "--model=broken.M"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("lm_profiler: model:")
    assert "'broken.M'" in first
    assert second.startswith(f"{here / message}")
    assert not (here / "logs").exists()


# -- runs that die --------------------------------------------------------------------------------------------------


MINE = ["--config=tiny.yaml", "--model=users_module.Users", "--data=null", "--name=mine"]


@pytest.mark.filterwarnings("ignore:the user's warning")
@pytest.mark.parametrize(
    "at,status,phase,type_,code",
    [
        ("init", "failed", "setup", "TypeError", 1),
        ("prepare", "failed", "setup", "RuntimeError", 1),
        ("step", "failed", "forward", "RuntimeError", 1),
        ("surrogate", "failed", "forward", "RuntimeError", 1),  # as a file's name has that is no UTF-8
        ("interrupt", "interrupted", "forward", "KeyboardInterrupt", 130),
        ("exit", "failed", "forward", "SystemExit", 7),
    ],
)
def test_a_failed_run_leaves_record_message_and_traceback(
    at: str, status: str, phase: str, type_: str, code: int, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
    assert main(["fit", *MINE, f"--model.at={at}"]) == code
    out, err = capsys.readouterr()
    folder = here / "logs" / "mine" / "version_0"
    record = read_run(folder)
    assert record.status == status
    assert (record.failure.phase, record.failure.type) == (phase, type_)
    assert "Traceback" not in out + err
    why = "" if status == "interrupted" else f": {type_}"  # whoever pressed Ctrl-C knows it
    assert f"{status} in {record.failure.where}{why}" in out + err
    assert (folder / "traceback.txt").exists() == (code == 1)
    if code == 1:
        assert type_ in (folder / "traceback.txt").read_text()
        assert str((folder / "traceback.txt").relative_to(here)) in err
    if phase == "forward":
        assert record.steps["measure"] >= 1
        assert len((folder / "steps.csv").read_text().splitlines()) == 1 + 3
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)] == handlers


def test_the_process_is_restored_also_in_a_thread(here: Path) -> None:
    with warnings.catch_warnings():
        before = list(warnings.filters)
        assert main(["fit", "--config=tiny.yaml", "--trainer.devices=0"]) == 2
        assert list(warnings.filters) == before
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(main(["fit", "--config=tiny.yaml", "--trainer.devices=0"])))
    thread.start()
    thread.join()
    assert codes == [2]


# -- processes -------------------------------------------------------------------------------------------------------


class Program:
    """The program in a process group of its own."""

    def __init__(self, out: Path, *arguments: str) -> None:
        self._out = out
        self._process = warm.start_python("-m", "lm_profiler", "fit", *MINE, *arguments, out=out)
        self.pid = self._process.pid

    def until_they_wait(self, ranks: int) -> list[psutil.Process]:
        """Wait until each of ``ranks`` has printed this; return the processes below the first."""
        late = time.monotonic() + 90
        while not self._out.exists() or self._out.read_text().count("waiting") < ranks:
            assert self._process.is_alive(), self._out.read_text()
            assert time.monotonic() < late, self._out.read_text()
            time.sleep(0.02)
        return psutil.Process(self.pid).children(recursive=True)

    def ends(self) -> tuple[int, str]:
        return warm.exit_code_of(self._process), self._out.read_text()

    def kill(self) -> None:
        if self._process.is_alive():
            os.killpg(self.pid, signal.SIGKILL)
        self._process.join()


@pytest.fixture
def start(here: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Program]]:
    started: list[Program] = []

    def begin(*arguments: str) -> Program:
        started.append(Program(tmp_path_factory.mktemp("output") / "out.txt", *arguments))
        return started[-1]

    yield begin
    for program in started:
        program.kill()


PROGRESS = re.compile(r"(warm-up|measuring|timing collectives|timing actions|reading memory|tracing)\b")
DDP = ["--trainer.strategy=ddp", "--trainer.devices=2"]


def test_only_the_users_own_output_is_printed_beside_ours(here: Path) -> None:
    """In a process: the module in the current folder is found, and of warnings and prints only his are left."""
    command = [sys.executable, "-m", "lm_profiler", "fit", *MINE, "--trace.steps=1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    lines = [line for line in done.stderr.splitlines() if line.strip() and not PROGRESS.match(line.strip("\r\x1b[K"))]
    assert_stored("cli/spoken", {"a class of the line": lines[0]})
    assert [line.endswith("user's warning") for line in lines] == [False, True]
    printed = done.stdout.splitlines()
    assert printed[0].endswith("user's print")
    assert printed[1].startswith("verdict:")
    assert "logs/mine/version_0" in printed[-1]


@pytest.mark.parametrize(
    "number,to_group,options,phase",
    [
        (signal.SIGINT, True, ["--model.at=wait", "--model.workers=2"], "forward"),
        (signal.SIGTERM, False, ["--model.at=build"], "setup"),
        (signal.SIGTERM, False, ["--model.at=wait", *DDP], "forward"),
    ],
    ids=["ctrl-c with workers", "sigterm while building", "sigterm to one of two"],
)
def test_a_signal_ends_it_with_what_it_has(
    number: signal.Signals, to_group: bool, options: list[str], phase: str, start: Callable[..., Program], here: Path
) -> None:
    program = start(*options)
    children = program.until_they_wait(2 if DDP[0] in options else 1)
    (os.killpg if to_group else os.kill)(program.pid, number)
    code, printed = program.ends()
    assert code == 130
    assert "Traceback" not in printed
    record = read_run(here / "logs" / "mine" / "version_0")
    assert record.status == "interrupted"
    assert record.failure.phase == phase
    assert record.failure.rank == (0 if DDP[0] in options else None)
    assert psutil.wait_procs(children, timeout=60)[1] == []


def test_ctrl_c_while_importing_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The signal waits for the end of the import, and the run does not begin."""
    imported: list[str] = []

    def interrupted_import(name: str) -> object:
        # to this thread: those of the tests before have no mask
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        imported.append(name)
        return sys.modules[name]

    monkeypatch.setattr("lm_profiler.cli.main.import_module", interrupted_import)
    assert main(["fit"]) == 130
    assert imported == ["lm_profiler.cli.verbs.trainer"]
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("lm_profiler: interrupted")
    assert len(printed.err.splitlines()) == 1


def test_a_run_whose_instruments_fail_exits_with_1(here: Path) -> None:
    with fault_in(Session.step_ended):
        assert main(["fit", "--config=tiny.yaml"]) == 1
    record = read_run(here / "logs" / "tiny" / "version_0")
    assert (record.status, record.failure.phase, record.failure.type) == ("failed", "instruments", "KeyError")
