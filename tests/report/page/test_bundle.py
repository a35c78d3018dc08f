"""Several modules become one script that does the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from lm_profiler.report.page.bundle import bundled
from lm_profiler.report.page.page import STATIC

MODULES = {
    "first": 'import { half as part, WHOLE } from "./maths.js";\nimport * as maths from "./maths.js";\n'
    "const own = part(WHOLE) + maths.half(2);\nconsole.log(own);\n",
    "maths": 'import { two } from "./numbers.js";\nconst own = two;\nexport const WHOLE = 10;\n'
    "export function half(x) {\n  return x / own;\n}\nexport async function later() {}\nexport class Box {}\n",
    "numbers": "export const two = 2;\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, source in MODULES.items():
        (tmp_path / f"{name}.js").write_text(source)
    return tmp_path


def test_each_module_is_there_once_after_those_it_needs(folder: Path) -> None:
    script = bundled(folder / "first.js")
    order = [script.index(f"const of_{name} =") for name in ("numbers", "maths", "first")]
    assert order == sorted(order)
    assert script.count("const of_maths =") == 1
    assert "return { WHOLE, half, later, Box };" in script


def test_nothing_of_a_module_is_left_that_a_plain_script_cannot_have() -> None:
    script = bundled(STATIC / "page.js")
    assert not [line for line in script.splitlines() if line.startswith(("import ", "export "))]
    assert "</script" not in script
    assert "of_trace" not in script  # the page has no traces to show
