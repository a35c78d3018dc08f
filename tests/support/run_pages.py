"""Runs the commands of pages in one process, which imports torch once; reads a JSON list of [folder, [command, ...]].

Writes into ``results.json`` of the current folder, for each page, the first command that failed with its exit code.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from lm_profiler.cli.main import main


def code_of(command: str) -> int:
    words = shlex.split(command, comments=True)
    if words[:1] == ["lm_profiler"]:
        try:
            return main(words[1:])
        except SystemExit as end:  # after --help or --print_config
            return int(end.code or 0)
    return subprocess.run(["bash", "-ec", re.sub(r"^python ", f"{sys.executable} ", command)], check=False).returncode


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
