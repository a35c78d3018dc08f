"""Runs the commands of pages; reads a JSON list of [folder, [command, ...]], is started as a fork (warm.py).

What trains is a fork again: of a process that has trained none could rehearse. The rest runs here, where what they need
is imported once. Writes into ``results.json`` of the current folder, for each page, the first command that failed with
its exit code.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

from lm_profiler.cli.main import TRAINER_VERBS, main


def code_of(command: str) -> int:
    words = shlex.split(command, comments=True)
    if words[:1] == ["lm_profiler"] and (words[1] not in TRAINER_VERBS or "--print_config" in words):
        try:
            return main(words[1:])
        except SystemExit as end:  # after --help or --print_config
            return int(end.code or 0)
    if words[:1] == ["lm_profiler"]:
        return subprocess.run([sys.executable, "-m", *words], check=False).returncode
    if words[:1] == ["python"]:
        return subprocess.run([sys.executable, *words[1:]], check=False).returncode
    return subprocess.run(["bash", "-ec", command], check=False).returncode


def first_failure(folder: str, commands: list[str]) -> str | None:
    os.chdir(folder)
    sys.path.insert(0, folder)  # as `python -m lm_profiler` has it
    for command in commands:
        print(f"$ {command}", flush=True)
        if code := code_of(command):
            return f"{command}: exit code {code}"
    return None


if __name__ == "__main__":
    out = Path("results.json").resolve()
    out.write_text(json.dumps([first_failure(*page) for page in json.load(sys.stdin)]))
