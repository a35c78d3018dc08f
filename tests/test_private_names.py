"""Private names of torch and Lightning stand in two files, and a run ends well without any one of them."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import warm
from faults import assert_same_weights, short_profiler, train_tiny
from raised import refusal
from scripts import SUPPORT
from stored_texts import assert_stored
from without_names import hidden

from lm_profiler import lightning_names, torch_names
from lm_profiler.record.calls import OK, WRONG_CALL
from lm_profiler.record.run_record import read_run
from lm_profiler.torch_names import NameMissing, PrivateName

pytestmark = pytest.mark.usefixtures("no_rates")


ROOT = Path(__file__).resolve().parent.parent
NAMES = {
    name: value
    for module in (torch_names, lightning_names)
    for name, value in vars(module).items()
    if isinstance(value, PrivateName)
}
SOURCES = [
    path
    for path in sorted((ROOT / "lm_profiler").rglob("*.py"))
    if path.name not in ("torch_names.py", "lightning_names.py")
]

PYTHONS = {
    *("_getframe", "_current_frames", "_exit", "_run_exitfuncs", "_shutdown"),
    *("_forkserver", "_forkserver_alive_fd"),  # the same in Python 3.10 to 3.13
    *("_replace", "_asdict", "_make", "_fields"),  # of a NamedTuple
    # argparse's and jsonargparse's
    *("_actions", "_action_groups", "_group_actions", "_mutually_exclusive_groups", "_get_formatter"),
    *("_option_string_actions", "_subcommands_action"),
}
"""Of Python itself and of other libraries."""

OVERRIDDEN = {"_should_skip_dynamo", "_set_seed", "_apply", "_wrapping_function", "_run_subcommand"}
"""Methods of ours that torch or Lightning calls; otherwise something is slower, or reported differently."""

PRIVATE = re.compile(r"_(?!_)\w+")
BY_NAME = {"getattr", "hasattr", "setattr", "delattr"}


@pytest.mark.parametrize("library, seen", [("torch", torch_names.TORCHS), ("lightning", lightning_names.LIGHTNINGS)])
def test_the_names_are_known_for_the_supported_versions(library: str, seen: str) -> None:
    """``make test-lowest`` and ``make test-newest`` run this file with the two ends of the range."""
    lowest, _, newest = seen.partition(" to ")
    range_given = re.search(rf'"{library}>=([\d.]+)"', (ROOT / "pyproject.toml").read_text("utf-8"))
    exact = re.search(rf"^{library}==([\d.]+)", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    assert range_given[1] == lowest
    assert _ordered(lowest) <= _ordered(exact[1]) <= (*_ordered(newest or lowest), 99)


def _ordered(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def uses(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """The private names in a source that are nobody's of ours."""
    its_own = {*own_names(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr not in own and PRIVATE.fullmatch(node.attr):
            owner = ast.unparse(node.value)
            is_on_self = owner == "self" and node.attr in its_own
            is_operator = re.match(r"torch\.ops\.aten\b|aten\b", owner)
            if not is_on_self and not is_operator:
                yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (part for part in (node.module or "").split(".") if PRIVATE.fullmatch(part))
            yield from (alias.name for alias in node.names if PRIVATE.fullmatch(alias.name) and alias.name not in own)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if "._" in alias.name)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in BY_NAME:
            name = node.args[1]
            if isinstance(name, ast.Constant) and PRIVATE.fullmatch(str(name.value)) and name.value not in own:
                yield str(name.value)


def own_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def texts_in(tree: ast.Module) -> set[str]:
    """All texts in a source that are private names."""
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return {text for text in texts if isinstance(text, str) and PRIVATE.fullmatch(text)}


def test_private_names_stand_nowhere_else() -> None:
    typing_only = "from torch._subclasses.fake_tensor import FakeTensor\n"
    trees = {path: ast.parse(path.read_text("utf-8").replace(typing_only, "pass\n")) for path in SOURCES}
    own = {name for tree in trees.values() for name in own_names(tree)} - {
        private_name.name for private_name in NAMES.values()
    }
    known = own | PYTHONS | OVERRIDDEN
    shown = {*vars(torch.nn.Module())}  # by a text, too: as a name in a module's namespace
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path, tree in trees.items()
        for name in (*uses(tree, known), *(shown & texts_in(tree)))
    }
    assert sorted(found) == []


def test_a_missing_private_name_is_reported_with_its_package() -> None:
    calls = {
        "a function of torch": PrivateName("torch.cuda._nothing", "", "").find,
        "an attribute of Lightning's": lambda: lightning_names.LOGGING.get(object()),
        "a base class": PrivateName("x._Mode", "", "").as_base(),
    }
    messages = {case: refusal(NameMissing, call) for case, call in calls.items()}
    assert_stored("record/refused: missing names", messages)


EVERYTHING = """
import importlib, pkgutil
from imported_anew import forget_our_modules
forget_our_modules()
from lm_profiler import lightning_names, torch_names
def hide(thing, name, path):
    raise AttributeError(name)
torch_names.look_up = hide
import lm_profiler
for module in pkgutil.walk_packages(lm_profiler.__path__, "lm_profiler."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""


def test_every_module_can_be_imported_without_any_of_them() -> None:
    done = warm.run_python("-c", EVERYTHING)
    assert done.returncode == 0, done.stderr


MISSED = {
    "MODE_STACK": "_get_current_dispatch_mode_stack",
    "PREPARE_TRACE": "_prepare_trace",
    "COMPILED_CALL": "_compiled_call_impl",
}
"""Three of the names that a fit on the CPU asks for and cannot do without, as its note has them."""

ACTIONS = {"FETCHED", "STEPPED", "EPOCH"}
"""Of Lightning's actions, which are renamed in its own functions; without the first no step is counted."""

LOOKED_UP = sorted(NAMES.keys() - ACTIONS - {"RUN_VERB"})

FIT = (
    *("fit", "--model.d_model=16", "--model.d_ff=32", "--model.num_layers=1", "--model.num_heads=2"),
    *("--model.vocab_size=64", "--data.vocab_size=64", "--data.context_length=8", "--data.batch_size=2"),
    *("--stages.warmup_steps=1", "--stages.measure_steps=3", "--memory.steps=1", "--trace.steps=1"),
    *("--trainer.accelerator=cpu", "--log_dir=logs", "--name=run"),
)


MISSING = re.compile(r"this (?:torch|Lightning) has no .*")
"""What a note reports about a name."""


@pytest.mark.parametrize("name", MISSED)
def test_a_fit_ends_well_without_this_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with hidden({NAMES[name].path}):
        module = train_tiny(tmp_path, [callback := short_profiler()])
    assert_same_weights(module, train_tiny(tmp_path, [], max_steps=module.steps))
    record = read_run(callback.folder)
    missing = MISSING.findall("\n".join(record.notes))
    assert (record.status, record.steps["measure"]) == ("ok", 3)
    assert missing
    assert all(MISSED[name] in text for text in missing)


@pytest.mark.parametrize(
    "names, code, is_noted",
    [(["FETCHED"], WRONG_CALL, True), (LOOKED_UP, OK, True), ([], OK, False)],
    ids=["no step is counted", "without all that are looked up", "with all names"],
)
def test_a_run_of_the_command_line_ends_without_them(names: list[str], code: int, is_noted: bool, tmp_path: Path):
    paths = ",".join(NAMES[name].path for name in names)
    done = warm.run_python(str(SUPPORT / "without_names.py"), paths, *FIT, folder=tmp_path, timeout_s=100)
    assert done.returncode == code, done.stderr
    notes = "\n".join(read_run(tmp_path / "logs/run/version_0").notes)
    assert bool(MISSING.search(notes)) == is_noted
    assert "Traceback" not in done.stderr


def test_a_lightning_that_would_run_while_reading_is_refused(tmp_path: Path) -> None:
    done = warm.run_python(
        str(SUPPORT / "without_names.py"), NAMES["RUN_VERB"].path, *FIT, folder=tmp_path, timeout_s=100
    )
    assert done.returncode == WRONG_CALL
    assert "LightningCLI._run_subcommand" in done.stderr
    assert len(done.stderr.splitlines()) == 1
