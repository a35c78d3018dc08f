"""A call as it was written: its config files, which are read once, and the classes that it names."""

import os
import re
import threading
from pathlib import Path

import pytest
from raised import refusal
from stored_texts import assert_stored

from lm_profiler.cli.call import Call
from lm_profiler.usage_error import UsageError

BAD: dict[str, bytes] = {
    "half a list": b"model: {size: [\n",
    "no text": bytes(range(128, 256)),
    "a zero": b"a: \x00",
    "a list": b"- a\n- b\n",
    "a word": b"hello",
    "nothing": b"",
    "only a comment": b"# only a comment\n",
}


def refusal_of(*arguments: str) -> str:
    message = refusal(UsageError, lambda: Call(["fit", *arguments]))
    assert len(message.splitlines()) == 1
    return message


def test_a_config_that_is_none_or_cannot_be_read_is_named_as_stored(tmp_path: Path) -> None:
    texts, path = {}, tmp_path / "x.yaml"
    for case, content in BAD.items():
        path.write_bytes(content)
        ways = {refusal_of(*option.format(path).split()) for option in ("--config={}", "--config {}", "-c {}")}
        [texts[case]] = (re.sub(r"(?<=YAML)(.*): .*", r"\1: ITS OWN WORDS", message) for message in ways)
    assert_stored("cli/call: bad", texts, here=tmp_path)
    texts = {
        "missing": refusal_of(f"--config={tmp_path / 'missing.yaml'}"),
        "a folder": refusal_of(f"--config={tmp_path}"),
        "no name": refusal_of("--config"),
    }
    assert_stored("cli/call: cannot be read", texts, here=tmp_path)
    path = tmp_path / "x.yaml"
    path.write_text("model: {size: small}")
    Call(["fit", "--config", str(path), "-c", str(path), "--name=--config"])
    assert_stored("cli/call: a word", {"tiny.yaml": refusal_of("tiny.yaml")})


@pytest.mark.parametrize(
    "content,why",
    [("day: 2001-99-99", "month must be in"), ("seed_everything: " + "1" * 5000, "Exceeds the limit")],
    ids=["date", "number"],
)
def test_python_errors_are_reported_in_pythons_words(content: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(content)
    assert f"{path}, which is not YAML: {why}" in refusal_of(f"--config={path}")


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("trainer: {max_steps: 3}",))
    writer.start()
    call = Call(["fit", "--config", str(pipe), "--name=x"])
    writer.join()
    assert call.arguments == ["fit", "--config=trainer: {max_steps: 3}\n", "--name=x"]
    assert call.parser_arguments() == call.arguments
    assert call.file is None
    assert Call(call.arguments).parser_arguments() == call.arguments  # so another rank is started


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "x.yaml"
    path.write_text("model: {size: xl, lr: 1e-3}\ndata: {batch_size: 010}\ntrainer: {precision: 32}\n")
    return f"--config={path}"


def test_options_of_another_class_in_a_file_are_ignored(config: str):
    for line in ([config, "--model=my.M", "--model.lr=2"], ["--model.lr=2", "--model", "my.M", config]):
        call = Call(["fit", *line])
        assert call.class_path("model") == "my.M"
        first, *rest = call.parser_arguments()[1:]
        assert first.splitlines() == ["--config=data: {batch_size: 010}", "trainer: {precision: 32}"]
        assert " ".join(rest).replace(" my", "=my") == "--model=my.M --model.lr=2"
        (note,) = call.replacement_notes()
        assert note.startswith("model: my.M")
        assert call.content == {"trainer": {"precision": 32}, "model": {"class_path": "my.M", "init_args": {"lr": 2}}}


def test_options_of_a_class_become_its_arguments(tmp_path: Path):
    own = tmp_path / "own.yaml"
    own.write_text("model: {class_path: my.M, init_args: {size: 3}}\n")
    call = Call(["fit", "--model.size=4", f"--config={own}", "--model=my.M"])
    assert call.parser_arguments() == ["fit", f"--config={own}", "--model=my.M", "--model.size=4"]
    assert call.parser_arguments({"model"}) == ["fit", f"--config={own}", "--model.size=4"]
    assert call.content == {"model": {"class_path": "my.M", "init_args": {"size": 4}}}
    call = Call(["fit", "--trainer.strategy=DDPStrategy", "--trainer.strategy.bucket_cap_mb=1", "--name=x", "--a.b=[x"])
    strategy = {"class_path": "DDPStrategy", "init_args": {"bucket_cap_mb": 1}}
    assert call.content == {"trainer": {"strategy": strategy}, "a": {"b": "[x"}}


@pytest.mark.parametrize(
    "line",
    [[], ["--model=lm_profiler.training.LanguageModel"], ["--model=LanguageModel"], ["--model.size=large"]],
    ids=str,
)  # fmt: skip
def test_options_of_the_same_class_in_a_file_stay(line: list[str], config: str) -> None:
    call = Call(["fit", config, *line])
    assert call.parser_arguments() == ["fit", config, *line]
    assert not list(call.replacement_notes())


@pytest.mark.parametrize(
    "line,left_out",
    [
        (["--model=my.M"], True),
        (["CONFIG", "--model=my.M"], True),
        (["--model=my.M", "--data.batch_size=2"], False),
        (["--model=my.M", "--data=my.D"], False),
        (["--model=my.M", "--data=null"], False),
        (["OWN"], False),
        (["CONFIG"], False),
    ],
    ids=str,
)
def test_data_of_another_modules_file_is_left_out(line: list[str], left_out: bool, config: str, tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("model: my.M\ndata: {batch_size: 3}\n")
    words = {"CONFIG": config, "OWN": f"--config={own}"}
    call = Call(["fit", *(words.get(word, word) for word in line)])
    assert call.should_leave_out_data() == left_out
    if left_out:
        assert call.parser_arguments(uses_own_loaders=True)[-1] == "--data=null"
        assert "batch_size" not in " ".join(call.parser_arguments(uses_own_loaders=True))


def test_a_wrong_word_is_answered_with_the_right_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a sweep.yaml").write_text("grid: {model.size: [small]}\n")
    assert refusal_of("-config", "demo").endswith("write --config")
    expectation = "such as package.module.Class, given the file 'nets/file.py'"
    assert refusal_of("--model", "nets/file.py").endswith(expectation)
    assert refusal_of("--config", "a sweep.yaml").endswith("run `lm_profiler sweep 'a sweep.yaml'`")
    assert refusal_of("--config=sizes").endswith("run `lm_profiler sweep sizes`")


@pytest.mark.parametrize("option", ["model.attention", "data.init_args.batch_size"])
def test_a_dotted_option_without_a_value_is_named_in_full(option: str) -> None:
    assert refusal_of(f"--{option}", "--name=x").startswith(f"{option}: expected a value")
    assert Call(["fit", f"--{option}.help", "--name=x"])  # jsonargparse takes this one without a value


def test_text_that_is_no_yaml_is_a_value() -> None:
    line = ["--model.name=[x", "--model.pattern=*.txt", "--name=a: b: c", "--model.file=/dev/null"]
    assert Call(["fit", *line]).arguments[1:] == line
