"""The options of a sweep; its cells: which, how they are called, and in which order; which part a process runs."""

import re
import shlex
import subprocess
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from raised import refusal
from stored_texts import assert_stored

from lm_profiler.cli.options import OptionsReader
from lm_profiler.sweep.sweep_plan import SweepPart, SweepRequest, part_of, plan_of, run_order, shell_line
from lm_profiler.usage_error import UsageError


def ids(request: SweepRequest) -> list[str]:
    return [cell.id for cell in plan_of(request, {}).cells]


def test_a_cell_is_a_call_of_a_trainers_verb() -> None:
    request = SweepRequest(
        name="s",
        log_dir="out",
        config="base.yaml",
        dry_run=True,
        verb="validate",
        grid={"model.size": ["small", "xl"]},
        options=["--data.batch_size=2"],
    )
    first, second = plan_of(request, {"base.yaml": ""}).cells
    assert first.arguments == [
        *("validate", "--config=base.yaml", "--model.size=small", "--data.batch_size=2"),
        *("--log_dir=out/s", "--name=size=small"),
    ]
    assert (second.id, second.overrides) == ("size=xl", {"model.size": "xl"})
    assert shlex.split(shell_line(first)) == ["python", "-m", "lm_profiler", *first.arguments]
    cells = plan_of(SweepRequest(name="s", list=[{"verb": "validate"}, {"verb": "fit", "a.x": "1"}]), {}).cells
    assert [cell.arguments for cell in cells] == [
        ["validate", "--log_dir=logs/s", "--name=verb=validate"],
        ["fit", "--a.x=1", "--log_dir=logs/s", "--name=verb=fit,x=1"],
    ]
    message = refusal(UsageError, lambda: SweepRequest(name="s", grid={"verb": ["fit", "plan"]}))
    assert_stored("sweep/refused: verb", {"plan": message})
    request = SweepRequest(name="s", grid={"a.x": ["1"], "config": ["b.yaml"]}, dry_run=True)
    (cell,) = plan_of(request, {"b.yaml": ""}).cells
    assert cell.arguments[:3] == ["fit", "--config=b.yaml", "--a.x=1"]
    request = SweepRequest(name="s", log_dir="out", grid={"config": ["a/x.yaml", "b/x.yaml", "b/y.yaml"]})
    texts = {"a/x.yaml": "1", "b/x.yaml": "2", "b/y.yaml": "3"}
    made = plan_of(request, texts)
    assert made.configs == {"x-0.yaml": "1", "x-1.yaml": "2", "y.yaml": "3"}
    assert [cell.arguments[1] for cell in made.cells] == [f"--config=out/s/configs/{name}" for name in made.configs]


def test_a_call_is_one_line_of_a_shell() -> None:
    values = ['it\'s $HOME `x` "y"; #z', "two\nlines\n", "ü"]
    for cell in plan_of(SweepRequest(name="s", grid={"a.x": values}), {}).cells:
        line = shell_line(cell)
        assert "\n" not in line
        command = ["bash", "-c", f"printf '%s\\0' {line}"]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert printed.split("\0")[3:-1] == cell.arguments


def test_ids_are_unique_file_names() -> None:
    values = ["a/b", "a b", "../../etc", "[0.9, 0.95]", "x" * 300, "x" * 301, "", "B", "b", "é"]
    cells = ids(SweepRequest(name="s", grid={"model.v": values}, repeats=2))
    assert len({name.lower() for name in cells}) == 2 * len(values)
    assert all(len(name.encode()) <= 120 for name in cells)
    assert all(re.fullmatch(r"[\w=,.+-]+", name, re.ASCII) for name in cells)
    assert cells == ids(SweepRequest(name="s", grid={"model.v": values}, repeats=2))
    assert cells[6:8] == ["v=0.9-0.95,r0", "v=0.9-0.95,r1"]


def test_the_list_is_crossed_with_the_grid() -> None:
    grid = {"a.x": ["1", "2"], "a.y": ["3", "4"]}
    assert ids(SweepRequest(name="s", grid=grid, list=[{"b.z": "0"}, {"b.w": "1"}])) == [
        *("z=0,x=1,y=3", "z=0,x=1,y=4", "z=0,x=2,y=3", "z=0,x=2,y=4"),
        *("w=1,x=1,y=3", "w=1,x=1,y=4", "w=1,x=2,y=3", "w=1,x=2,y=4"),
    ]
    assert ids(SweepRequest(name="s", grid={"model.size": ["cs336-2026/xl", "xl"]})) == [
        "size=cs336-2026-xl",
        "size=xl",
    ]
    assert ids(SweepRequest(name="s", grid={"model.size": ["a"], "data.size": ["b"], "x": ["c"]})) == [
        "model.size=a,data.size=b,x=c"
    ]
    grid = {"trainer.precision": ["bf16-mixed"], "model.compile": ["false", "true"]}
    sizes = [{"model.size": "small", "data.batch_size": "4"}, {"model.size": "xl", "data.batch_size": "4"}]
    assert ids(SweepRequest(name="s", list=sizes, grid=grid)) == [
        *("size=small,compile=false", "size=small,compile=true", "size=xl,compile=false", "size=xl,compile=true")
    ]


def test_each_repeat_has_its_own_order_of_cells() -> None:
    request = SweepRequest(name="s", grid={"a.x": list("12345678")}, repeats=3, seed=1)
    order = [(cell.repeat, cell.overrides["a.x"]) for cell in run_order(plan_of(request, {}))]
    passes = [order[i : i + 8] for i in (0, 8, 16)]
    for repeat, cells in enumerate(passes):
        assert Counter(cells) == Counter((repeat, value) for value in "12345678")
    assert len({tuple(value for _, value in cells) for cells in passes}) == 3
    again = [(cell.repeat, cell.overrides["a.x"]) for cell in run_order(plan_of(request, {}))]
    assert again == order
    other = plan_of(SweepRequest(name="s", grid={"a.x": list("12345678")}, repeats=3, seed=2), {})
    assert [(cell.repeat, cell.overrides["a.x"]) for cell in run_order(other)] != order


def test_too_many_cells_are_refused() -> None:
    grid = {f"a.x{n}": list(map(str, range(100))) for n in range(5)}
    requests = {"values": SweepRequest(name="s", grid=grid), "repeats": SweepRequest(name="s", repeats=20_000_000)}
    messages = {what: refusal(UsageError, partial(plan_of, request, {})) for what, request in requests.items()}
    assert_stored("sweep/refused: too many", messages)
    request = SweepRequest(name="s", list=[{"a.x": "1"}, {"a.x": "1"}])
    assert_stored("sweep/refused: twice", {"in the list": refusal(UsageError, lambda: plan_of(request, {}))})


def test_wrong_parts_are_refused() -> None:
    assert part_of("2/8") == SweepPart(2, 8)
    texts = ("0/8", "9/8", "half", "/8", "1/0")
    assert_stored("sweep/refused: no part", {text: refusal(UsageError, partial(part_of, text)) for text in texts})


BEFORE, AFTER = {"base.yaml": "seed_everything: 1"}, {"base.yaml": "seed_everything: 2"}


def test_a_changed_config_file_makes_another_plan() -> None:
    request = SweepRequest(name="s", config="base.yaml", repeats=2)
    before, after = plan_of(request, BEFORE), plan_of(request, AFTER)
    assert after.cells == before.cells
    assert after.config_sha256 != before.config_sha256
    request = SweepRequest(name="s", list=[{"config": "base.yaml"}])
    assert plan_of(request, AFTER).config_sha256 != plan_of(request, BEFORE).config_sha256


@pytest.mark.parametrize("count", [1, 2, 3, 7, 9])
def test_the_parts_partition_the_whole(count: int) -> None:
    cells = list("abcdefg")
    parts = [SweepPart(number + 1, count).cells_of(cells) for number in range(count)]
    assert sorted(cell for part in parts for cell in part) == cells
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


GRID = "--grid.model.size=small,medium"


def read_request(arguments: list[str]) -> SweepRequest:
    return OptionsReader("sweep", SweepRequest).read(arguments)


def test_the_command_line_overrides_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("grid: {model.size: [small], data.batch_size: [1]}\nrepeats: 2\n")
    request = read_request([str(tmp_path / "a.yaml"), GRID, "--grid.model.d_ff=8", "--repeats=5"])
    assert request.grid == {"model.size": ["small", "medium"], "data.batch_size": ["1"], "model.d_ff": ["8"]}
    assert request.repeats == 5


def test_an_empty_value_is_null(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("list:\n- a.b:\n- a.b: ~\n- a.b: ''\n- a.b: '~'\n")
    assert [entry["a.b"] for entry in read_request([str(tmp_path / "a.yaml")]).list] == ["null", "null", "", "~"]


def test_lists_keep_their_brackets() -> None:
    request = read_request(["--grid.model.betas=[0.9, 0.95],[0.8,0.9]", "--grid.model.note='a, b',c"])
    assert request.grid == {"model.betas": ["[0.9, 0.95]", "[0.8, 0.9]"], "model.note": ["a, b", "c"]}
    assert read_request([GRID, "--devices=0,1"]).devices == ["0", "1"]
    assert read_request([GRID, "--devices=[0,1],[2,3]"]).devices == ["0,1", "2,3"]
    request = read_request([GRID, "--model.lr", "1e-3", "--check_memory=false", "--trainer.max_steps=-1"])
    assert request.options == ["--model.lr=1e-3", "--check_memory=false", "--trainer.max_steps=-1"]


REFUSED = [
    [],
    ["--grid.model.size="],
    ["--grid.model.size"],
    [GRID, "--devices=0,0"],
    ["--grid.model.size=a,a"],
    [GRID, "--repeat=3"],
    [GRID, "--repeats=0"],
    [GRID, "--repeats=many"],
    [GRID, "--timeout_s=nan"],
    [GRID, "--verb=train"],
    [GRID, "--name=../x"],
    [GRID, "--repeats=1e9"],
    [GRID, "--timeout_s=inf"],
    ["--grid.model.size=" + "[" * 500],
    ["--grid.model.size=&a [*a]"],
    ["--list=[{'': 1}]"],
    ["--list=[{[1]: 1}]"],
    [GRID, "--name"],
    [GRID, "--model.size=xl"],
    [GRID, "--list=[{model.size: xl}]"],
    [GRID, "--list=[1]"],
    ["--grid.log_dir=a,b"],
    [GRID, "stray"],
    [GRID, "stray", "more"],
    [GRID, "-x"],
]


def test_wrong_calls_and_files_are_refused(tmp_path: Path) -> None:
    messages = {" ".join(call)[:100] or "nothing": refusal(UsageError, partial(read_request, call)) for call in REFUSED}
    assert_stored("sweep/refused: call", messages)
    contents = (
        "grids: {a.b: [1]}",
        "grid: {model: {size: [small]}}",
        "grid: [1, 2]",
        "grid: {model.size: []}",
        "list: {}",
        "[1]",
    )
    messages = {}
    for content in contents:
        (tmp_path / "x.yaml").write_text(content)
        messages[content] = refusal(UsageError, lambda: read_request([str(tmp_path / "x.yaml")]))
    assert_stored("sweep/refused: file", messages, here=tmp_path)
