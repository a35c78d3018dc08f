"""Cells: which, how they are called, and in which order."""

from __future__ import annotations

import shlex
import subprocess
from collections import Counter

import pytest

from lm_profiler.sweep.request import Request
from lm_profiler.sweep.sweep_plan import plan_of, run_order, shell_line


def ids(request: Request) -> list[str]:
    return [cell.id for cell in plan_of(request, {}).cells]


def test_a_cell_is_a_call_of_the_trainers_verbs() -> None:
    request = Request(
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


def test_the_verb_may_be_swept() -> None:
    cells = plan_of(Request(name="s", list=[{"verb": "validate"}, {"verb": "fit", "a.x": "1"}]), {}).cells
    assert [cell.arguments for cell in cells] == [
        ["validate", "--log_dir=logs/s", "--name=verb=validate"],
        ["fit", "--a.x=1", "--log_dir=logs/s", "--name=verb=fit,x=1"],
    ]
    with pytest.raises(ValueError, match=r"^verb: expected one of fit, validate, test, predict, given 'plan'"):
        Request(name="s", grid={"verb": ["fit", "plan"]})


def test_a_size_of_a_source_makes_no_folder_of_its_own() -> None:
    assert ids(Request(name="s", grid={"model.size": ["cs336-2026/xl", "xl"]})) == ["size=cs336-2026-xl", "size=xl"]


def test_a_call_is_one_line_of_a_shell_whatever_its_values_are() -> None:
    values = ['it\'s $HOME `x` "y"; #z', "two\nlines\n", "ü"]
    for cell in plan_of(Request(name="s", grid={"a.x": values}), {}).cells:
        line = shell_line(cell)
        assert "\n" not in line
        said = subprocess.run(
            ["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, check=True
        ).stdout
        assert said.split("\0")[3:-1] == cell.arguments


def test_the_list_is_crossed_with_the_grid_and_the_last_option_is_the_fastest() -> None:
    grid = {"a.x": ["1", "2"], "a.y": ["3", "4"]}
    assert ids(Request(name="s", grid=grid, list=[{"b.z": "0"}, {"b.w": "1"}])) == [
        *("z=0,x=1,y=3", "z=0,x=1,y=4", "z=0,x=2,y=3", "z=0,x=2,y=4"),
        *("w=1,x=1,y=3", "w=1,x=1,y=4", "w=1,x=2,y=3", "w=1,x=2,y=4"),
    ]


def test_labels_are_as_short_as_they_can_be() -> None:
    assert ids(Request(name="s", grid={"model.size": ["a"], "data.size": ["b"], "x": ["c"]})) == [
        "model.size=a,data.size=b,x=c"
    ]


def test_names_tell_what_differs_and_not_what_the_preset_says_by_itself() -> None:
    sizes = [
        {"model.size": "small", "model.d_model": "768", "model.num_layers": "12", "data.batch_size": "4"},
        {"model.size": "xl", "model.d_model": "1600", "model.num_layers": "48", "data.batch_size": "4"},
    ]
    grid = {"trainer.precision": ["bf16-mixed"], "model.compile": ["false", "true"]}
    assert ids(Request(name="s", list=sizes, grid=grid)) == [
        *("size=small,compile=false", "size=small,compile=true", "size=xl,compile=false", "size=xl,compile=true")
    ]
    sizes[1]["model.num_layers"] = "47"  # no longer the preset's
    assert ids(Request(name="s", list=sizes))[1] == "size=xl,num_layers=47"


def test_a_name_that_is_too_long_gives_up_the_ends_of_its_values_and_no_option() -> None:
    grid = {f"model.option_{n}": ["x" * 40 + "1", "y" * 40] for n in range(4)} | {"model.compile": ["true", "false"]}
    cells = ids(Request(name="s", grid=grid))
    assert len(set(cells)) == 32
    for name in cells:
        assert len(name) <= 100
        assert ",compile=true" in name or ",compile=false" in name


def test_ids_are_unique_and_fit_any_file_system() -> None:
    values = ["a/b", "a b", "../../etc", "[0.9, 0.95]", "x" * 300, "x" * 301, "", "B", "b", "é"]
    cells = ids(Request(name="s", grid={"model.v": values}, repeats=2))
    assert len({name.lower() for name in cells}) == 2 * len(values)
    assert all(len(name.encode()) <= 120 for name in cells)
    assert all(
        set(name) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789=,._+-") for name in cells
    )
    assert cells == ids(Request(name="s", grid={"model.v": values}, repeats=2))
    assert cells[6:8] == ["v=0.9-0.95,r0", "v=0.9-0.95,r1"]


def test_each_repeat_is_a_pass_over_all_cells_in_an_order_of_its_own() -> None:
    request = Request(name="s", grid={"a.x": list("12345678")}, repeats=3, seed=1)
    order = [(cell.repeat, cell.overrides["a.x"]) for cell in run_order(plan_of(request, {}))]
    passes = [order[i : i + 8] for i in (0, 8, 16)]
    for repeat, cells in enumerate(passes):
        assert Counter(cells) == Counter((repeat, value) for value in "12345678")
    assert len({tuple(value for _, value in cells) for cells in passes}) == 3
    again = [(cell.repeat, cell.overrides["a.x"]) for cell in run_order(plan_of(request, {}))]
    assert again == order
    other = plan_of(Request(name="s", grid={"a.x": list("12345678")}, repeats=3, seed=2), {})
    assert [(cell.repeat, cell.overrides["a.x"]) for cell in run_order(other)] != order


def test_a_swept_config_file_does_not_undo_what_else_is_swept() -> None:
    request = Request(name="s", grid={"a.x": ["1"], "config": ["b.yaml"]}, dry_run=True)
    (cell,) = plan_of(request, {"b.yaml": ""}).cells
    assert cell.arguments[:3] == ["fit", "--config=b.yaml", "--a.x=1"]


def test_more_cells_than_anybody_waits_for_are_refused_before_they_are_made() -> None:
    grid = {f"a.x{n}": list(map(str, range(100))) for n in range(5)}
    with pytest.raises(ValueError, match=r"^grid: expected at most 10,000 cells, given 10,000,000,000; take fewer"):
        plan_of(Request(name="s", grid=grid), {})
    with pytest.raises(ValueError, match="given 20,000,000; take fewer values or repeats"):
        plan_of(Request(name="s", repeats=20_000_000), {})


def test_cells_are_called_with_the_copies_of_the_configs() -> None:
    request = Request(name="s", log_dir="out", grid={"config": ["a/x.yaml", "b/x.yaml", "b/y.yaml"]})
    texts = {"a/x.yaml": "1", "b/x.yaml": "2", "b/y.yaml": "3"}
    made = plan_of(request, texts)
    assert made.configs == {"x-0.yaml": "1", "x-1.yaml": "2", "y.yaml": "3"}
    assert [cell.arguments[1] for cell in made.cells] == [f"--config=out/s/configs/{name}" for name in made.configs]


def test_a_cell_that_is_listed_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="list: expected each cell once, given twice"):
        plan_of(Request(name="s", list=[{"a.x": "1"}, {"a.x": "1"}]), {})


BEFORE, AFTER = {"base.yaml": "seed_everything: 1"}, {"base.yaml": "seed_everything: 2"}


def test_a_changed_config_file_makes_another_plan() -> None:
    request = Request(name="s", config="base.yaml", repeats=2)
    before, after = plan_of(request, BEFORE), plan_of(request, AFTER)
    assert after.cells == before.cells
    assert after.config_sha256 != before.config_sha256


def test_a_swept_config_file_that_changed_makes_another_plan() -> None:
    request = Request(name="s", list=[{"config": "base.yaml"}])
    assert plan_of(request, AFTER).config_sha256 != plan_of(request, BEFORE).config_sha256
