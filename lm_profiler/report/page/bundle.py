"""Makes one script of several ES modules: a page that is opened as a file cannot load any."""

from __future__ import annotations

import re
from pathlib import Path

_IMPORT = re.compile(r'^import (?:\{ ([^}]*?),? \}|\* as (\w+)) from "\./(\w+)\.js";$', re.MULTILINE)
_COMMENT = re.compile(r"^ *//.*\n|^ +", re.MULTILINE)
"""A line of its own, and indentation: a sixth of the modules. None of them has a text of several lines."""
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const) (\w+))", re.MULTILINE)


def bundled(entry: Path) -> str:
    """The module ``entry`` and all that it imports from its folder, each a function's body, so that names stay apart.

    Understands what our modules have: imports by name or of the whole, exports where a name is declared, no circles.
    """
    scripts: dict[str, str] = {}
    _add(entry, scripts)
    return '"use strict";\n' + "\n".join(scripts.values())


def _add(module: Path, scripts: dict[str, str]) -> None:
    source = _COMMENT.sub("", module.read_text(encoding="utf-8"))
    for _, _, name in _IMPORT.findall(source):
        if name not in scripts:
            _add(module.with_name(f"{name}.js"), scripts)
    names = ", ".join(_EXPORT.findall(source))
    body = _EXPORT.sub("", _IMPORT.sub(_imported, source))
    scripts[module.stem] = f"const of_{module.stem} = (() => {{\n{body}\nreturn {{ {names} }};\n}})();"


def _imported(match: re.Match[str]) -> str:
    names, whole, module = match.groups()
    return f"const {whole or '{ ' + names.replace(' as ', ': ') + ' }'} = of_{module};"
