"""A table reads the same in every format, whatever stands in it."""

import csv
import io
import json
import re

import pyarrow.parquet
import pytest
from stored_texts import assert_stored

from lm_profiler.record.quantities import TIMES
from lm_profiler.report.tables.formats import (
    csv_text,
    json_text,
    latex,
    markdown,
    parquet,
    single_line,
    terminal,
    typst,
)
from lm_profiler.report.tables.table import Heading, Table, TableCell

TABLE = Table(
    [Heading("name", "run"), Heading("step_s", "step (ms)", figures=True)],
    [
        [TableCell("a", "a"), TableCell(0.0125, "12.50 [12.00, 13.00]", 0.012, 0.013)],
        [TableCell("b", "b"), TableCell(text="OOM", status="oom")],
    ],
    ["above"],
    ["below"],
)
NASTY = "[bold]x[/bold] | <b>&lt; $5_% #{~^\\} `c` *s*\nnew\x1b[31m\u2028\udcff"


def nasty_table() -> Table:
    return Table(
        [Heading("name", "run"), Heading("reason", "reason")], [[TableCell(NASTY, NASTY), TableCell("x", "x")]], [NASTY]
    )


def test_printed_tables():
    forms = {"terminal": terminal, "Markdown": markdown, "LaTeX": latex, "Typst": typst}
    assert_stored("report/formats", {name: form(TABLE) for name, form in forms.items()})


def test_any_name_is_read_back_from_csv_json_and_parquet():
    whole = NASTY.replace("\udcff", "\\udcff")  # UTF-8 has no lone surrogates
    assert next(csv.DictReader(io.StringIO(csv_text(nasty_table()), newline="")))["name"] == whole
    assert json.loads(json_text(nasty_table()))[0]["name"] == whole
    assert pyarrow.parquet.read_table(io.BytesIO(parquet(nasty_table()))).column("name").to_pylist() == [whole]


ROWS = [
    {"name": "a", "step_s": 0.0125, "step_s_low": 0.012, "step_s_high": 0.013, "step_s_status": None},
    {"name": "b", "step_s": None, "step_s_low": None, "step_s_high": None, "step_s_status": "oom"},
]


def test_files_have_si_values_with_intervals():
    text = [{name: "" if value is None else str(value) for name, value in row.items()} for row in ROWS]
    assert list(csv.DictReader(io.StringIO(csv_text(TABLE)))) == text
    assert json.loads(json_text(TABLE)) == ROWS
    assert pyarrow.parquet.read_table(io.BytesIO(parquet(TABLE))).to_pylist() == ROWS


def test_a_column_of_several_types_is_text_in_parquet():
    table = Table([Heading("x", "x")], [[TableCell(8)], [TableCell("auto")], [TableCell([1, 2])], [TableCell()]])
    column = pyarrow.parquet.read_table(io.BytesIO(parquet(table))).column("x")
    assert column.to_pylist() == ["8", "auto", "[1, 2]", None]


def test_csv_contains_no_formula():
    given = ["=1+1", "+a", "-a", "@a", "\t=1", "-1", "-1e-3", "a=1"]
    table = Table([Heading("=x", "x"), Heading("y", "y")], [[TableCell(text), TableCell(-0.5)] for text in given])
    header, *found = csv.reader(io.StringIO(csv_text(table), newline=""))
    assert header == ["'=x", "y"]
    assert [row[0] for row in found] == ["'=1+1", "'+a", "'-a", "'@a", "'\t=1", "-1", "-1e-3", "a=1"]
    assert {row[1] for row in found} == {"-0.5"}


def test_a_carriage_return_splits_no_row():
    table = Table([Heading("x", "x"), Heading("y", "y")], [[TableCell("a\rb"), TableCell("c")]])
    assert list(csv.reader(io.StringIO(csv_text(table), newline=""))) == [["x", "y"], ["a\rb", "c"]]
    assert csv_text(table).splitlines()[0] == "x,y"
    assert '"a\rb"' in csv_text(table)


def test_json_escapes_control_characters():
    given = "\x1b[31m\x9b\x7f\u202e ä"
    text = json_text(Table([Heading("x", "x")], [[TableCell(given)]]))
    assert json.loads(text) == [{"x": given}]
    assert all(c.isprintable() or c == "\n" for c in text)


def test_nothing_in_a_name_reaches_the_terminal():
    _, _, row = terminal(nasty_table()).splitlines()
    assert "\x1b" not in row
    assert_stored("report/names: terminal", {"a name of marks": row})
    assert single_line("  größe 模型 ± –") == "  größe 模型 ± –"


def test_nothing_in_a_name_breaks_markdown():
    row = markdown(nasty_table()).splitlines()[-1]
    assert row.count("|") - row.count("\\|") == 3
    assert_stored("report/names: markdown", {"a name of marks": row})
    headings = [Heading("x", "fwd & back avg (sec)"), Heading("y", "num_params")]
    assert "fwd & back" in markdown(Table(headings, [[TableCell("a", "a"), TableCell("b", "b")]]))


def test_nothing_in_a_name_breaks_latex():
    lines = latex(nasty_table()).splitlines()
    assert lines[0].startswith("% [bold]")
    assert len(lines) == 8
    _, row = [line for line in lines if line.startswith(" ")]
    assert row.startswith(" {[}bold]")  # a bracket there would be an argument of the rule above
    assert row.count("&") - row.count("\\&") == 1
    assert_stored("report/names: latex", {"a name of marks": row})


def test_nothing_in_a_name_breaks_typst():
    """A string of Typst has the escapes of one of JSON, and ends at the first quotation mark without a backslash."""
    lines = typst(nasty_table()).splitlines()
    assert lines[0].startswith("// [bold]")
    [row] = [line for line in lines if line.startswith('  "')]
    assert json.loads(f"[{row.strip().removesuffix(',')}]") == [single_line(NASTY), "x"]
    assert typst(Table([Heading("x", 'a"b\\')], [])).count(r'"a\"b\\"') == 1


@pytest.mark.parametrize(
    "seconds, ends, text",
    [
        (0.0000123, (), "0.012"),
        (0.0125, (0.012, 0.013), "12.50 [12.00, 13.00]"),
        (0.125, (0.1, 0.2), "125.0 [100.0, 200.0]"),
        (1.5, (), "1,500"),
        (0.0, (), "0.000"),
    ],
)
def test_figures_have_the_places_that_mean_something(seconds: float, ends: tuple[float, ...], text: str):
    assert TIMES["step"].rounded(seconds, *ends) == text


class Screen(io.StringIO):
    """A terminal of 80 columns, with COLUMNS=80."""

    def isatty(self) -> bool:
        return True


def on_a_screen(table: Table, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    return re.sub(r"\x1b\[[0-9;]*m", "", terminal(table, Screen()))


def test_80_columns_cut_no_digit(monkeypatch: pytest.MonkeyPatch):
    """Five figures of two rows, each of which is half as wide as the screen: the rows go on below."""
    figures = [f"{n}1234567.89 [{n}1234567.01, {n}2345678.99]" for n in range(1, 6)]
    headings = [Heading("run", "run"), *(Heading(f"x{n}", f"figure {n} (ms)", figures=True) for n in range(5))]
    rows = [[TableCell(name, name), *(TableCell(0, text) for text in figures)] for name in ("first", "second")]
    lines = on_a_screen(Table(headings, rows), monkeypatch).splitlines()
    assert max(map(len, lines)) <= 80
    for text in figures:
        assert sum(text in line for line in lines) == 2
    assert "…" not in "".join(lines)
    names = [line.split()[0] for line in lines if line.startswith(("first", "second"))]
    assert names == ["first", "second"] * 5


def test_80_columns_cut_no_letter_of_a_reason(monkeypatch: pytest.MonkeyPatch):
    reason = "".join(f"part{n}/" for n in range(30))
    headings = [Heading("run", "run"), Heading("reason", "reason"), Heading("x", "step (ms)", figures=True)]
    row = [TableCell("a", "a"), TableCell(reason, reason), TableCell(0, "12.50 [12.00, 13.00]")]
    text = on_a_screen(Table(headings, [row]), monkeypatch)
    assert max(map(len, text.splitlines())) <= 80
    assert "12.50 [12.00, 13.00]" in text
    assert reason in re.sub(r"\s|12.50 \[12.00, 13.00\]", "", text)
