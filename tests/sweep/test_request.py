"""Which part of a sweep a process runs, and parts that run beside each other."""

from __future__ import annotations

from pathlib import Path

import pytest
from by_hand import plan

from lm_profiler.cli.options import OptionsReader
from lm_profiler.sweep.request import Request, SweepPart, part_of
from lm_profiler.sweep.sweep_folder import SweepFolder
from lm_profiler.usage_error import UsageError

SLURM = {"SLURM_ARRAY_TASK_ID": "14", "SLURM_ARRAY_TASK_MIN": "10", "SLURM_ARRAY_TASK_STEP": "2"}
ARRAY = {**SLURM, "SLURM_ARRAY_TASK_COUNT": "4"}


@pytest.mark.parametrize(
    "given,environment,part",
    [
        (None, {}, None),
        ("2/8", {}, SweepPart(2, 8)),
        ("2/8", ARRAY, SweepPart(2, 8)),  # what is said goes before what the scheduler says
        (None, ARRAY, SweepPart(3, 4)),
        ("/8", {"JOB_COMPLETION_INDEX": "7"}, SweepPart(8, 8)),
        ("/4", ARRAY, SweepPart(3, 4)),
    ],
)
def test_a_part_is_what_is_given_or_what_the_scheduler_says(
    given: str | None, environment: dict[str, str], part: SweepPart | None
) -> None:
    assert part_of(given, environment) == part


@pytest.mark.parametrize(
    "given,environment,told",
    [
        ("0/8", {}, "part: expected one from 1/8 to 8/8, given 0/8"),
        ("9/8", {}, "part: expected one from 1/8 to 8/8, given 9/8"),
        ("half", {}, "part: expected a part such as 1/8, given 'half'"),
        ("/8", {}, "part: expected a number, as in 1/8, outside of a job array, given '/8'"),
        ("/2", {"JOB_COMPLETION_INDEX": "2"}, "part: expected one from 1/2 to 2/2, given 3/2"),
        (
            None,
            {"JOB_COMPLETION_INDEX": "0"},
            "part: expected how many pods there are with JOB_COMPLETION_",
        ),
    ],
)
def test_what_names_no_part_is_told_in_a_line(given: str | None, environment: dict[str, str], told: str) -> None:
    with pytest.raises(UsageError) as error:
        part_of(given, environment)
    assert str(error.value).startswith(told)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 9])
def test_the_parts_together_are_the_whole_and_none_has_a_cell_of_another(count: int) -> None:
    cells = list("abcdefg")
    parts = [SweepPart(number + 1, count).of(cells) for number in range(count)]
    assert sorted(cell for part in parts for cell in part) == cells
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def open_part(path: Path, text: str | None) -> SweepFolder:
    """With a clock that does not wait."""
    return SweepFolder(path, plan("a", "b", "c"), lambda seconds: None, None if text is None else part_of(text, {}))


def test_parts_run_beside_each_other_and_beside_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm_profiler.sweep.sweep_folder._PATIENCE_S", 0.0)
    with open_part(tmp_path / "s", "1/2") as first, open_part(tmp_path / "s", "2/2") as second:
        first.begin()
        assert {cell.id for cell in first.missing()} | {cell.id for cell in second.missing()} == {"a", "b", "c"}
        for other in ("1/2", "2/2", "1/3", None):
            with pytest.raises(UsageError, match="expected a sweep that is not running"):
                open_part(tmp_path / "s", other)
    for again in ("1/3", None, "2/2"):
        with open_part(tmp_path / "s", again):
            pass


def test_a_part_that_never_began_removes_nothing_while_another_is_about_to(tmp_path: Path) -> None:
    with open_part(tmp_path / "s", "1/2") as first:
        with open_part(tmp_path / "s", "2/2"):
            pass
        first.begin()
    assert (tmp_path / "s" / "sweep.json").exists()
    with open_part(tmp_path / "t", "1/2"):
        pass
    assert not (tmp_path / "t").exists()


GRID = "--grid.model.size=small,medium"


def read_request(arguments: list[str]) -> Request:
    return OptionsReader("sweep", Request).read(arguments)


def test_a_file_and_the_command_line_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "sizes.yaml").write_text(
        "config: configs/demo.yaml\n"
        "grid:\n  model.size: [small, medium]\n  model.compile: [true, off]\n"
        "list:\n  - {trainer.precision: 32-true, data.batch_size: 010}\n"
        "repeats: 3\nseed: 7\ntimeout_s: 60\nverb: validate\n"
    )
    from_file = read_request([str(tmp_path / "sizes.yaml")])
    line = [
        *("--config", "configs/demo.yaml", GRID, "--grid.model.compile", "true,off"),
        *("--list", "[{trainer.precision: 32-true, data.batch_size: 010}]"),
        *("--repeats=3", "--seed=7", "--timeout_s=60", "--verb=validate", "--name=sizes"),
    ]
    assert read_request(line) == from_file
    assert from_file.name == "sizes"
    assert from_file.grid == {"model.size": ["small", "medium"], "model.compile": ["true", "off"]}  # text, as written
    assert from_file.list == [{"trainer.precision": "32-true", "data.batch_size": "010"}]
    assert (from_file.repeats, from_file.seed, from_file.timeout_s, from_file.verb) == (3, 7, 60.0, "validate")


def test_the_command_line_overrides_the_file_and_adds_to_its_grid(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("grid: {model.size: [small], data.batch_size: [1]}\nrepeats: 2\n")
    request = read_request([str(tmp_path / "a.yaml"), GRID, "--grid.model.d_ff=8", "--repeats=5"])
    assert request.grid == {"model.size": ["small", "medium"], "data.batch_size": ["1"], "model.d_ff": ["8"]}
    assert request.repeats == 5


def test_nothing_is_null_as_in_any_yaml_and_in_quotes_it_is_text(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("list:\n- a.b:\n- a.b: ~\n- a.b: ''\n- a.b: '~'\n")
    assert [entry["a.b"] for entry in read_request([str(tmp_path / "a.yaml")]).list] == ["null", "null", "", "~"]


def test_values_that_are_lists_keep_their_brackets() -> None:
    request = read_request(["--grid.model.betas=[0.9, 0.95],[0.8,0.9]", "--grid.model.note='a, b',c"])
    assert request.grid == {"model.betas": ["[0.9, 0.95]", "[0.8, 0.9]"], "model.note": ["a, b", "c"]}
    assert read_request([GRID, "--devices=0,1"]).devices == ["0", "1"]
    assert read_request([GRID, "--devices=[0,1],[2,3]"]).devices == ["0,1", "2,3"]


def test_any_other_option_goes_to_every_cell() -> None:
    request = read_request([GRID, "--model.lr", "1e-3", "--check_memory=false", "--trainer.max_steps=-1"])
    assert request.options == ["--model.lr=1e-3", "--check_memory=false", "--trainer.max_steps=-1"]


def test_options_of_a_cluster_are_submitits() -> None:
    request = read_request(
        [GRID, "--launcher=slurm", "--timeout_s=60", "--slurm.partition=gpu", "--slurm.gpus_per_node=1"]
    )
    assert request.cluster == {"slurm_partition": "gpu", "slurm_gpus_per_node": 1}


@pytest.mark.parametrize(
    "arguments,told",
    [
        ([], "grid: expected options to sweep, given none"),
        (["--grid.model.size="], "grid.model.size: expected a value, given none"),
        (["--grid.model.size"], "grid.model.size: expected a value, given none"),
        ([GRID, "--devices=0,0"], "devices: expected each value once, given 0, 0; each runs one cell at a time"),
        (["--grid.model.size=a,a"], "grid.model.size: expected each value once, given a, a; run cells again "),
        (["--grid.model.size=[a"], "grid.model.size: expected YAML, given '[[a]'"),
        ([GRID, "--repeat=3"], "unknown option --repeat; did you mean --repeats?"),
        ([GRID, "--repeats=0"], "repeats: expected 1 or more, given 0"),
        ([GRID, "--repeats=many"], "repeats: expected int, given 'many'"),
        ([GRID, "--timeout_s=nan"], "timeout_s: expected float or null, given 'nan'"),
        ([GRID, "--verb=train"], "verb: expected 'fit', 'validate', 'test', 'predict', given 'train'"),
        ([GRID, "--launcher=pbs"], "launcher: expected 'slurm', 'local', 'debug' or null, given 'pbs'"),
        ([GRID, "--launcher=slurm"], "timeout_s: expected with --launcher"),
        ([GRID, "--slurm.partition=x"], "slurm.partition: expected only with --launcher"),
        ([GRID, "--name=../x"], "name: expected the name of a folder below logs, given '../x'"),
        ([GRID, "--repeats=1e9"], "repeats: expected int, given "),
        ([GRID, "--repeats=" + "9" * 5000], "repeats: Exceeds the limit (4300"),
        ([GRID, "--timeout_s=inf"], "timeout_s: expected float or null, given 'inf'"),
        (["--grid.model.size=" + "[" * 5000], "grid.model.size: expected YAML, given '[[["),
        (["--grid.model.size=&a [*a]"], "grid.model.size: expected YAML, given '[&a [*a]]', which contains itself"),
        (["--list=[{'': 1}]"], "'': expected an option such as model.size, given another name"),
        (["--list=[{[1]: 1}]"], "list: expected Sequence, given '[{[1]: 1}]'"),
        (['--grid.model.size="a\\0"'], "grid.model.size: expected YAML, given "),
        ([GRID, "--name"], "name: expected a value, given none"),
        ([GRID, "--model.size=xl"], "model.size: expected either swept or the same for all cells, given both"),
        ([GRID, "--list=[{model.size: xl}]"], "model.size: expected in grid or in list, given in both"),
        ([GRID, "--list=[1]"], "list: expected Mapping, given '1'"),
        (["--grid.log_dir=a,b"], "log_dir: expected an option of a run, given one that the sweep itself sets"),
        ([GRID, "stray"], "config: expected a YAML file of options, given stray (No such file or directory)"),
        ([GRID, "stray", "more"], "sweep: expected options, given 'more'; see sweep --help"),
        ([GRID, "-x"], "config: expected a YAML file of options, given -x (No such file or directory)"),
    ],
)  # fmt: skip
def test_a_wrong_call_is_told_in_a_line(arguments: list[str], told: str) -> None:
    with pytest.raises(UsageError, match=r".+") as error:
        read_request(arguments)
    assert str(error.value).startswith(told)


@pytest.mark.parametrize(
    "content,told",
    [
        ("grids: {a.b: [1]}", "unknown option --grids.a.b; did you mean --grid?"),
        ("grid: {model: {size: [small]}}", "grid: expected Sequence, given "),
        ("grid: [1, 2]", "grid: expected Mapping, given "),
        ("grid: {model.size: []}", "grid.model.size: expected a value, given none"),
        ("list: {}", "list: expected Sequence, given "),
        ("[1]", "config: expected a YAML file of options, given "),
    ],
)  # fmt: skip
def test_a_wrong_file_is_told_in_a_line(content: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(content)
    with pytest.raises(UsageError, match=r".+") as error:
        read_request([str(tmp_path / "x.yaml")])
    assert told in str(error.value)
