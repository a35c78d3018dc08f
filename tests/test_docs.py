"""What the README and the pages show works: blocks of `sh` are run, calls in blocks of `bash` are parsed at least."""

import json
import os
import re
from itertools import chain
from pathlib import Path

import pytest
from warm import run_python

from lm_profiler.cli.main import TRAINER_VERBS, VERBS

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(?P<kind>[^\n]*)\n(?P<options>(?::\w[^\n]*\n)*)\n*(?P<text>.*?)^```", re.MULTILINE | re.DOTALL)
CALL = re.compile(rf"\blm_profiler (?:{'|'.join(VERBS)})\b[^)#\n]*")
DRY = dict.fromkeys(TRAINER_VERBS, "--print_config") | {"sweep": "--dry_run"}
_FEW_STEPS = "--stages.warmup_steps=2 --stages.measure_steps=6"
_SMALL = f"--model.num_layers=1 --model.vocab_size=100 {_FEW_STEPS}"
# Each cell would be rehearsed, which takes longer than it does.
_CELLS = f"{_FEW_STEPS} --memory.steps=0 --trace.steps=0 --check_memory=false"
TINY = {
    "fit": f"{_SMALL} --data.context_length=16",
    "plan": f"{_SMALL} --data.context_length=16",
    "sweep": f"{_SMALL} {_CELLS}",
    "sweep attention": _CELLS,  # whose model has neither layers nor words
}
"""What makes configs quick. It is put behind the config, so that what else is on the line has the last word."""

FEWER_CELLS = {
    "sweep timings": '--grid.model.size cs336-2026/small --list "[{verb: validate}, {verb: fit}]"',
    # each pass flushes 256 MiB
    "sweep attention": "--grid.data.context_length 64 --stages.warmup_steps=1 --stages.measure_steps=3",
    "sweep demo": "--grid.data.context_length 32,64",
    "--name precision": "--model.d_model=64 --model.d_ff=128 --model.num_heads=4",  # CPUs take long in bfloat16
    "--name ways": "--grid.trainer.strategy overlap_ddp",
}
"""Put at the line's end: a smaller model, and cells of each kind that the page has, but not every size of them, nor
every way over ranks: each takes two seconds, and has tests of its own (test_data_parallel.py, test_real_ranks.py)."""


def commands(page: Path) -> list[str]:
    """What to run, in order, to see that the page is right."""
    found = []
    for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
        text = block["text"].replace("\\\n", " ")
        if block["kind"] == "sh":
            found += [tiny(line) for line in text.splitlines() if line.strip()]
        elif block["kind"] == "bash":
            found += [dry(call) for call in CALL.findall(text)]
    return found


def tiny(line: str) -> str:
    verb = line.split()[1]
    if verb == "fit" and " --name " in line:  # one of several, of which the one without a name is rehearsed
        line += " --check_memory=false"
    call = " ".join(line.split()[1:3])
    if not (options := TINY.get(call, TINY.get(verb))):
        return line
    line = " ".join([line, *(fewer for part, fewer in FEWER_CELLS.items() if part in line)])
    line = line.replace("fit --model=", f"fit {_FEW_STEPS} --model=")  # without a config it would measure for 10 s
    return re.sub(r"(--config \w+|sweep \w+)", rf"\1 {options}", line, count=1)


def dry(call: str) -> str:
    # The first are refused without CUDA; what follows the second is another program's.
    call = re.sub(r"(history|nvtx|cuda_profiler_range)=true", r"\1=false", call.strip()).partition(" -- ")[0]
    return f"{call} {DRY.get(call.split()[1], '--help')}"


def files(page: Path) -> dict[str, str]:
    """The programs of the page that have a name."""
    blocks = BLOCK.finditer(page.read_text())
    named = [(re.search(r":caption: (\S+)", block["options"]), block["text"]) for block in blocks]
    return {name[1]: text for name, text in named if name}


SHOWN = {page: lines for page in PAGES if (lines := commands(page))}


def together() -> list[list[Path]]:
    """Pages that begin with the same command: the others go on with what it has made. And those that run none."""
    groups: dict[str, list[Path]] = {}
    for page, lines in SHOWN.items():
        runs = any(block["kind"] == "sh" for block in BLOCK.finditer(page.read_text(encoding="utf-8")))
        groups.setdefault(lines[0] if runs else "", []).append(page)
    return [*groups.values()]


def console() -> tuple[str, str]:
    """The README's first command, as it is run here, and what the README shows of it."""
    shown = next(block["text"] for block in BLOCK.finditer(PAGES[0].read_text("utf-8")) if block["kind"] == "console")
    command, _, text = shown.removeprefix("$ ").partition("\n")
    return tiny(command), text


@pytest.mark.timeout(900)
@pytest.mark.parametrize("pages", together(), ids=lambda pages: " ".join(str(page.relative_to(ROOT)) for page in pages))
def test_the_commands_of_a_page_work(pages: list[Path], tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    for page in pages:
        for name, text in files(page).items():
            (tmp_path / "here" / name).write_text(text, encoding="utf-8")
    todo = json.dumps([(str(tmp_path / "here"), SHOWN[page]) for page in pages])
    # One thread: threads that wait for each other take long where other programs use the machine.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    program = str(ROOT / "tests" / "support" / "run_pages.py")
    command, shown = console()
    lines = chain.from_iterable(SHOWN[page] for page in pages)
    rates = any(line == command or "waterfall" in line for line in lines)  # which show what needs them
    done = run_python(
        program, stdin=todo.encode(), folder=tmp_path, environment=environment, timeout_s=800, rates=rates
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    print(done.stdout, done.stderr)  # of use where a page fails
    assert json.loads((tmp_path / "results.json").read_text()) == [None for _ in pages]

    for printed in f"\n{done.stdout}".split("\n$ ")[1:]:
        if printed.startswith(f"{command}\n"):  # the README shows what is printed
            rest = iter(beginnings(printed))  # which may have more lines, such as those about odd steps
            assert [line for line in beginnings(shown) if line not in rest] == []


def test_the_command_whose_output_the_readme_shows_is_run() -> None:
    assert any(console()[0] in lines for lines in SHOWN.values())


def beginnings(output: str) -> list[str]:
    """The words with which lines of a run's end begin, as far as they are the same on every machine: notes are not.

    On one that others use, tokens are at least so many.
    """
    end = output[output.index("\ndemo:") :].splitlines()
    # A line that is too wide for the page goes on in the next, indented.
    first_lines = [line.removeprefix("at least ") for line in end if line and not line.startswith(("note:", "  "))]
    return [re.split(r"[\d:]| {2}", line)[0] for line in first_lines]


def test_no_page_hides_its_commands_from_the_test() -> None:
    kinds = {block["kind"] for page in PAGES for block in BLOCK.finditer(page.read_text(encoding="utf-8"))}
    hidden = {kind for kind in kinds if kind.lower() in ("shell", "zsh", "bash ", "sh ", "")}
    assert not hidden, "name the block sh or bash"


def test_files_named_on_a_page_exist() -> None:
    """Paths in backquotes that begin with a folder of the checkout, and links; both but for what is built."""
    path = re.compile(r"`((?:lm_profiler|callbacks|tests|docs|configs|examples|benchmarks)/(?!_)[\w./-]*)`")
    link = re.compile(r"\]\((?!https?:|(?:\.\./)?_generated/)([^)#]+)\)")
    logged_figure = re.compile(r"`lm_profiler/[a-z_]+`(?= \|)")  # in a table of names of figures
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        text = page.read_text(encoding="utf-8")
        if page.name == "live-figures.md":
            text = logged_figure.sub("", text)
        paths = path.findall(text)
        named = [ROOT / name for name in paths] + [page.parent / name for name in link.findall(text)]
        assert [str(file) for file in named if not file.exists()] == [], page
