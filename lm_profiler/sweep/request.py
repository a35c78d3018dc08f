"""What a sweep is asked to do: a YAML file, the command line, or both. Values stay the text that was written."""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, get_args

import yaml

from lm_profiler.record.run import Verb
from lm_profiler.record.shipped import config_file
from lm_profiler.record.yaml_text import YamlTextError, compose, read_text

CLUSTERS = ("slurm", "local", "debug")
_IN_FILE = ("config", "verb", "grid", "list", "repeats", "seed", "timeout_s", "name")
_ON_LINE = (*_IN_FILE, "log_dir", "devices", "launcher", "dry_run")
_NOT_SWEPT = ("name", "log_dir")
_FLAGS = ("dry_run",)
_OPTION = re.compile(r"[A-Za-z_][\w.+-]*")
_NULL = "tag:yaml.org,2002:null"
"""Of ``null``, ``~`` and nothing at all, where no quotes stand around it."""


@dataclass(frozen=True)
class Request:
    """A sweep as it was asked for.

    Attributes:
        config: Config file of all cells.
        grid: Values of each option; every combination is run.
        list: Sets of options; each is run with every combination of the grid.
        options: What every cell is given beside, as it stands on a command line.
        timeout_s: How long a cell may run; None is for ever.
        devices: What each slot sees as CUDA_VISIBLE_DEVICES; one cell runs in a slot at a time.
        launcher: A cluster that submitit knows; None runs the cells here.
        cluster: That cluster's own options, as submitit calls them.
    """

    name: str
    log_dir: str = "logs"
    config: str | None = None
    verb: Verb = "fit"
    grid: Mapping[str, Sequence[str]] = field(default_factory=dict)
    list: Sequence[Mapping[str, str]] = ()
    options: Sequence[str] = ()
    repeats: int = 1
    seed: int = 0
    timeout_s: float | None = None
    devices: Sequence[str] = ()
    launcher: str | None = None
    cluster: Mapping[str, Any] = field(default_factory=dict)
    dry_run: bool = False

    @property
    def configs(self) -> Sequence[str]:
        """All config files, those that are swept included."""
        swept = (*self.grid.get("config", ()), *(entry["config"] for entry in self.list if "config" in entry))
        return [*([self.config] if self.config is not None else []), *swept]


def read_request(arguments: Sequence[str], text: str | None = None) -> Request:
    """The request in ``arguments``, which override what a file named first says; ``text`` is that file's, if read.

    Raises:
        ValueError: a wrong call, in a line.
        OSError: the file cannot be read.
    """
    file, given = _split(arguments)
    settings: dict[str, Any] = _of_file(file, text) if file is not None else {}
    grid, cluster = dict(settings.get("grid") or {}), {}
    options = []
    for name, value in given:
        if name in ("grid", "grid."):
            raise ValueError(f"{name}: expected the option with it, such as --grid.model.size small,medium, given none")
        if name.startswith("grid."):
            grid[name[5:]] = _values(name, _compose(f"[{value or ''}]", name))
        elif "." in name and name.partition(".")[0] in CLUSTERS:
            cluster[name.replace(".", "_", 1)] = yaml.safe_load(value or "")
        elif name in _ON_LINE:
            settings[name] = _setting(
                name, _compose(value or "", name) if name == "list" else yaml.ScalarNode("", value)
            )
        elif "." not in name and (near := difflib.get_close_matches(name, _ON_LINE, 1, 0.8)):
            raise ValueError(
                f"{name}: expected an option of sweep or of its cells, given none of that name; did you mean {near[0]}?"
            )
        else:
            options.append(f"--{name}" if value is None else f"--{name}={value}")
    settings["grid"] = grid
    return _checked({"name": _default_name(file, settings), **settings}, options, cluster)


def _split(arguments: Sequence[str]) -> tuple[str | None, list[tuple[str, str | None]]]:
    """The file, and each option with its value; None where it has none."""
    left = list(arguments)
    file = left.pop(0) if left and not left[0].startswith("-") else None
    given: list[tuple[str, str | None]] = []
    while left:
        name, equals, value = left.pop(0).partition("=")
        name = {"-c": "--config"}.get(name, name)
        if not name.startswith("--") or name == "--":
            raise ValueError(f"sweep: expected options such as --grid.model.size small,medium, given {name!r}")
        if not equals and name[2:] not in _FLAGS and left and not left[0].startswith("--"):
            equals, value = "=", left.pop(0)
        given.append((name[2:], value if equals else None))
    for name, count in Counter(name for name, _ in given).items():
        if count > 1 and (name in _ON_LINE or name.startswith("grid.")):
            raise ValueError(f"{name}: expected once, given {count} times")
    return file, given


def _default_name(file: str | None, settings: Mapping[str, Any]) -> str:
    config = settings.get("config")
    return Path(file).stem if file is not None else f"{Path(config_file(config)).stem}_sweep" if config else "sweep"


# -- YAML, whose scalars stay text: the cells' own parser knows what `on`, `010` or `1e-3` shall mean ------------------


def _of_file(path: str, text: str | None) -> dict[str, Any]:
    root = _compose(read_text(Path(path)) if text is None else text, path)
    if not isinstance(root, yaml.MappingNode):
        raise ValueError(f"{path}: expected a mapping with config, grid or list, given something else")
    settings = {}
    for key, node in root.value:
        if key.value not in _IN_FILE:
            near = difflib.get_close_matches(str(key.value), _IN_FILE, 1)
            remedy = f"did you mean {near[0]}?" if near else "options of all cells belong into its config file"
            raise ValueError(f"{path}: expected one of {', '.join(_IN_FILE)}, given {key.value!r}; {remedy}")
        settings[key.value] = _setting(key.value, node)
    return settings


def _setting(name: str, node: yaml.Node) -> Any:
    if name == "grid":
        if not isinstance(node, yaml.MappingNode):
            raise ValueError(
                "grid: expected options with their values, such as `model.size: [small, medium]`, given " + _text(node)
            )
        return {key.value: _values(f"grid.{key.value}", value) for key, value in node.value}
    if name == "list":
        entries = node.value if isinstance(node, yaml.SequenceNode) else [node]
        if not entries or not all(isinstance(entry, yaml.MappingNode) and entry.value for entry in entries):
            raise ValueError(f"list: expected sets of options, such as `- {{model.size: small}}`, given {_text(node)}")
        return [{key.value: _text(value) for key, value in entry.value} for entry in entries]
    return _text(node) if node.value else None


def _values(name: str, node: yaml.Node) -> list[str]:
    if isinstance(node, yaml.MappingNode):
        raise ValueError(f"{name}: expected its values, given more options; write the whole path, such as model.size")
    values = [_text(value) for value in node.value] if isinstance(node, yaml.SequenceNode) else [_text(node)]
    if not values:
        raise ValueError(f"{name}: expected at least one value, given none")
    if len(set(values)) < len(values):
        remedy = "run cells again with repeats" if name != "devices" else "each runs one cell at a time"
        raise ValueError(f"{name}: expected each value once, given {', '.join(values)}; {remedy}")
    return values


def _compose(text: str, name: str) -> yaml.Node:
    try:
        return compose(text) or yaml.ScalarNode("", "")
    except YamlTextError as error:
        raise ValueError(f"{name[:100]}: expected YAML, given {text[:100]!r}, which {error}") from None


def _text(node: yaml.Node) -> str:
    """A value as it stands on a command line: a scalar as written, anything else in one line of YAML.

    Raises:
        ValueError: no program can be given it.
    """
    if isinstance(node, yaml.ScalarNode):
        if any(0xD800 <= ord(letter) < 0xE000 for letter in node.value):
            raise ValueError(f"sweep: expected values of text, given {node.value[:100]!r}")
        return "null" if node.tag == _NULL else str(node.value)
    return str(yaml.serialize(_flow(node), width=10**6)).strip()


def _flow(node: yaml.Node) -> yaml.Node:
    if isinstance(node, yaml.CollectionNode):
        node.flow_style = True
        for child in node.value:
            for part in child if isinstance(child, tuple) else (child,):
                _flow(part)
    return node


# -- checking ----------------------------------------------------------------------------------------------------------


def _checked(settings: Mapping[str, Any], options: Sequence[str], cluster: Mapping[str, Any]) -> Request:
    for name in _ON_LINE:
        if name in settings and settings[name] in (None, "") and name not in _FLAGS:
            raise ValueError(f"{name}: expected a value, given none")
    request = Request(
        **{name: settings[name] for name in ("name", "log_dir", "config", "grid", "list") if name in settings},
        verb=cast(Verb, _one_of("verb", settings.get("verb", "fit"), get_args(Verb))),
        options=options,
        repeats=int(_number("repeats", settings.get("repeats", "1"), int, 1)),
        seed=int(_number("seed", settings.get("seed", "0"), int, 0)),
        timeout_s=_number("timeout_s", settings["timeout_s"], float, 1) if "timeout_s" in settings else None,
        devices=_devices(settings["devices"]) if "devices" in settings else (),
        launcher=_one_of("launcher", settings["launcher"], CLUSTERS) if "launcher" in settings else None,
        cluster=cluster,
        dry_run="dry_run" in settings
        and _one_of("dry_run", settings["dry_run"] or "true", ("true", "false")) == "true",
    )
    _check_options(request)
    if Path(request.name).is_absolute() or ".." in Path(request.name).parts:
        raise ValueError(f"name: expected the name of a folder below {request.log_dir}, given {request.name!r}")
    if request.launcher is None and cluster:
        raise ValueError(f"{next(iter(cluster)).replace('_', '.', 1)}: expected with --launcher alone, given without")
    if request.launcher is not None and request.timeout_s is None:
        raise ValueError("timeout_s: expected with --launcher, for a cluster asks how long a job may take, given none")
    if request.launcher is not None and request.devices:
        raise ValueError("devices: expected without --launcher, given with it; the cluster hands out devices")
    return request


def _check_options(request: Request) -> None:
    fixed = {option[2:].partition("=")[0] for option in request.options}
    listed = {name for entry in request.list for name in entry}
    for name in (*request.grid, *listed):
        if not _OPTION.fullmatch(name):
            raise ValueError(f"{name[:100]!r}: expected an option such as model.size, given no name of any")
        if name in _NOT_SWEPT:
            raise ValueError(f"{name}: expected an option of a run, given one that the sweep itself sets")
        if name in fixed:
            raise ValueError(f"{name}: expected either swept or the same for all cells, given both")
        if name in request.grid and name in listed:
            raise ValueError(f"{name}: expected in the grid or in the list, given in both")
    if not request.grid and not request.list and request.repeats == 1:
        raise ValueError("grid: expected options to sweep, given none; add for example --grid.model.size small,medium")


def _number(name: str, text: str, kind: type[int] | type[float], least: int) -> float:
    try:
        value = kind(text)
    except ValueError:
        raise ValueError(f"{name}: expected a number, given {text[:100]!r}") from None
    if not least <= value < math.inf:
        raise ValueError(f"{name}: expected {least} or more, given {text[:100]}")
    return value


def _one_of(name: str, text: str, known: Sequence[str]) -> str:
    if text not in known:
        raise ValueError(f"{name}: expected {', '.join(known[:-1])} or {known[-1]}, given {text!r}")
    return text


def _devices(text: str) -> list[str]:
    """``0,1`` are two slots; ``[0,1],[2,3]`` two slots of two devices each."""
    nodes = _values("devices", _compose(f"[{text}]", "devices"))
    return [node.strip("[]").replace(" ", "") for node in nodes]
