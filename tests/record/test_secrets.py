"""What looks like a secret is not written down; what only sounds like one stays."""

import os
from pathlib import Path

import pytest

from lm_profiler.record.files import write_whole
from lm_profiler.record.secrets import MASK, has_secret, mask, mask_line

SECRET = "correct-horse"


@pytest.mark.parametrize(
    "name", ["token", "data.init_args.hf_token", "apiKey", "api_key", "db.password", "client_secret", "aws-secret-key"]
)
def test_an_option_is_a_secret_by_its_name(name: str) -> None:
    assert mask_line(["fit", f"--{name}={SECRET}", f"--{name}", SECRET, "--max_steps=3"]) == [
        "fit",
        f"--{name}={MASK}",
        f"--{name}",
        MASK,
        "--max_steps=3",
    ]
    *_, last = name.split(".")
    config = {last: SECRET, "list": [{last: [SECRET, 12345]}], "below": {last: {"a": SECRET}}, "none": {last: None}}
    assert SECRET not in str(mask(config))
    assert "12345" not in str(mask(config))
    assert mask(config)["none"] == {last: None}


@pytest.mark.parametrize(
    "value",
    [
        "https://ann:correct-horse@host/path",
        "postgresql://correct-horse@host",
        "https://host/file?a=1&access_token=correct-horse#end",
        "https://host/file?X-Amz-Signature=correct-horse",
        "{url: 'http://u:correct-horse@h', more: {password: correct-horse}}",
        "[{hf_token: correct-horse}]",
        "hf_" + "Ab3" * 10,
        "x ghp_" + "Ab3" * 12,
    ],
)
def test_a_value_is_a_secret_by_its_form(value: str) -> None:
    (shown,) = mask_line([f"--data.init_args.where={value}"])
    assert MASK in shown
    for secret in (SECRET, "Ab3Ab3"):
        assert secret not in shown
        assert secret not in mask_line(["--where", value])[1]
    assert has_secret([value])


def test_options_that_only_sound_secret_stay() -> None:
    line = [
        "fit",
        "--model.tokenizer=gpt2",
        "--data.max_tokens=2048",
        "--model.eos_token=</s>",
        "--model.num_key_value_heads=8",
        "--data.sort_key=length",
        "--url=https://host:80/a@b?page=1",
        "--model.hidden=256",
        "--optimizer={class_path: torch.optim.Adam, init_args: {lr: 0.1}}",
    ]
    assert mask_line(line) == line
    assert not has_secret(line)
    config = {"tokens_per_s": 3.0, "monitor": "val_loss", "keys": None, "pin": True}
    assert mask(config) == config


def test_a_private_file_is_read_by_its_owner_only(tmp_path: Path) -> None:
    write_whole(tmp_path / "own", SECRET, private=True)
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o600
    umask = os.umask(0o022)
    try:
        write_whole(tmp_path / "all", "")
    finally:
        os.umask(umask)
    assert (tmp_path / "all").stat().st_mode & 0o777 == 0o644
