"""What is drawn are the figures of the runs."""

import xml.etree.ElementTree as ET
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from made_runs import made_entry, made_rows
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from raised import refusal
from stored_texts import assert_stored

from lm_profiler.record.entry import Entry
from lm_profiler.record.run_record import MemoryFacts, MemoryLevels, MemoryReading
from lm_profiler.report.pictures.drawing import PART_COLOURS
from lm_profiler.report.pictures.plots import KINDS, SUFFIXES, draw, save_figure
from lm_profiler.usage_error import UsageError


@pytest.fixture
def swept(tmp_path: Path) -> list[Entry]:
    """Runs at three context lengths: at 512, 12 ms of forward and 4 GiB; at 128, 3 ms and 1 GiB; 2048 did not fit.

    Backward takes 5 ms, and other 2.
    """
    entries = []
    for context, forward_s, gib in ((512, 12e-3, 4), (128, 3e-3, 1)):
        memory = MemoryFacts(measured=MemoryReading(allocated_peak=gib * 2**30), parts={})
        overrides = {"data.context_length": str(context)}
        entries.append(made_entry(tmp_path / str(context), overrides, forward_s=forward_s, memory=memory))
    return [*entries, made_entry(tmp_path / "2048", {"data.context_length": "2048"}, status="oom")]


def bar_widths(figure: Figure, row: int) -> dict[str, float]:
    """Width of each bar of a row, by its colour."""
    boxes = [box for box in figure.axes[0].patches if box.get_y() < row < box.get_y() + box.get_height()]
    return {to_hex(box.get_facecolor()).upper(): box.get_width() for box in boxes}


def test_a_step_is_stacked_from_its_parts(swept: list[Entry]) -> None:
    """Forward takes 3 ms at a context of 128 and 12 at 512, backward 5 and other 2; 2048 did not fit."""
    figure = draw("phases", swept)
    [axes] = figure.axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["128", "512", "2048"]
    forward, backward, other = (PART_COLOURS[part] for part in ("forward", "backward", "other"))
    assert bar_widths(figure, row=0) == pytest.approx({forward: 3.0, backward: 5.0, other: 2.0})
    assert bar_widths(figure, row=1) == pytest.approx({forward: 12.0, backward: 5.0, other: 2.0})
    assert bar_widths(figure, row=2) == {}
    [right_column] = axes.child_axes
    assert [tick.get_text() for tick in right_column.get_yticklabels()] == ["10.0 ms", "19.0 ms", "OOM"]
    assert "(ms)" in axes.get_xlabel()
    assert axes.get_ylabel() == "context"


def test_error_bars_of_a_step_are_the_interval_of_the_mean(tmp_path: Path) -> None:
    """About as wide as Student's interval of 20 independent steps."""
    entry = made_entry(tmp_path / "run")
    ms = np.array([row.time("step") * 1e3 for row in made_rows() if row.stage == "measure"])
    [bar] = draw("phases", [entry]).axes[0].containers[-1].lines[2][0].get_segments()
    (low, _), (high, _) = bar
    assert (low + high) / 2 == pytest.approx(ms.mean(), rel=1e-4)
    student_half_width = 2.093 * ms.std(ddof=1) / ms.size**0.5
    assert student_half_width * 0.9 < (high - low) / 2 < student_half_width * 1.6


def test_error_bars_of_the_utilisation_are_those_of_the_step(tmp_path: Path) -> None:
    """The MFU of a step of 10 ms is 40 %."""
    entry = made_entry(tmp_path / "run")
    step = entry.record.time["step"]
    [bar] = draw("mfu", [entry]).axes[0].containers[0].lines[2][0].get_segments()
    (_, low), (_, high) = bar
    assert low == pytest.approx(40 * 10e-3 / step.mean_high)
    assert high == pytest.approx(40 * 10e-3 / step.mean_low)


def test_memory_is_plotted_against_the_context_length(swept: list[Entry]) -> None:
    """1 GiB at 128, 4 GiB at 512; 2048 did not fit."""
    [axes] = draw("memory", swept).axes
    line, *_ = axes.containers[0].lines
    assert list(line.get_xdata()) == [128, 512]
    assert list(line.get_ydata()) == [1.0, 4.0]
    (cross,) = [mark for mark in axes.lines if mark.get_marker() == "x"]
    assert list(cross.get_xdata()) == [2048]
    assert axes.get_xlabel().splitlines() == ["context", "2048: OOM"]
    assert "GiB" in axes.get_ylabel()


@pytest.mark.parametrize("kind", ["phases", "mfu"])
def test_nothing_runs_off_the_edge(tmp_path: Path, kind: str) -> None:
    runs = [made_entry(tmp_path / n, name=f"{n} name of a run that is rather long " * 4) for n in "abc"]
    figure = draw(kind, runs, "name")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    width = figure.bbox.width
    for axes in figure.axes:
        box = axes.get_tightbbox(canvas.get_renderer())
        assert box.x0 >= -1
        assert box.x1 <= width + 1
        title = axes.title if axes.get_title() else axes._left_title  # no other way to it
        assert title.get_window_extent(canvas.get_renderer()).x1 <= width + 1


def saving(folder: Path, options: dict[str, str], saved: int) -> Entry:
    held = MemoryLevels(start=0, forward=saved, backward=0, source="allocator")
    return made_entry(folder, options, memory=MemoryFacts(measured=MemoryReading(), parts={}, held=held))


def test_lines_that_coincide_all_have_a_label(tmp_path: Path) -> None:
    """Eight series of a few MB, of which compiled ones equal eager ones: each was drawn over another.

    512 bytes per channel and token, and three times as many for "math": at a context of 128, 1 MiB or more.
    """
    entries = []
    for attention, compiled, width, context in product(("math", "sdpa"), ("false", "true"), (16, 32), (64, 128)):
        options = {
            "model.attention": attention,
            "model.compile": compiled,
            "model.d_model": str(width),
            "data.context_length": str(context),
        }
        saved_bytes = width * context * 512 * (3 if attention == "math" else 1)
        entries.append(saving(tmp_path / "-".join(options.values()), options, saved_bytes))
    figure = draw("attention", entries)
    [axes] = figure.axes
    assert len(figure.legends[0].get_texts()) == 8
    assert "(MiB)" in axes.get_ylabel()
    ends_mib = sorted(container.lines[0].get_ydata()[-1] for container in axes.containers)
    assert ends_mib == pytest.approx([1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 6.0, 6.0])


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_equal_figures_make_equal_files(tmp_path: Path, swept: list[Entry], suffix: str) -> None:
    for name in ("a", "b"):
        save_figure(partial(draw, "phases", swept), tmp_path / f"{name}{suffix}")
    content = (tmp_path / f"a{suffix}").read_bytes()
    assert content == (tmp_path / f"b{suffix}").read_bytes()
    beginnings = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF", ".html": b"<!doctype html>"}
    assert content.startswith(beginnings[suffix])


# Overlap needs traces and a heat map two facts: they have tests of their own.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("overlap", "heat")])
def test_any_name_can_be_drawn(tmp_path: Path, kind: str) -> None:
    name = "</text><script>$x^{_$ & \\frac"
    held = MemoryLevels(start=1, forward=2, backward=2, source="allocator")
    memory = MemoryFacts(measured=MemoryReading(allocated_peak=1), parts={}, held=held)
    runs = [made_entry(tmp_path / "run", name=name, memory=memory), made_entry(tmp_path / "b")]
    save_figure(partial(draw, kind, runs, "name"), tmp_path / "a.svg")
    drawn = ET.parse(tmp_path / "a.svg")  # it is XML still
    words = "".join(element.text or "" for element in drawn.iter()).replace(" ", "")
    assert name.replace(" ", "") in words  # which may go on on a second line
    assert not any(element.tag.endswith("script") for element in drawn.iter())


def test_wrong_calls_are_refused(tmp_path: Path) -> None:
    run, died = made_entry(tmp_path / "run"), made_entry(tmp_path / "died", status="oom")
    messages = {}
    for kind, entry, name, by in (
        ("phases", run, "a.gif", None),
        ("phases", run, "a.svg", "sise"),
        ("phases", run, "a.svg", "step_s"),
        ("mfu", died, "a.svg", None),
    ):
        call = partial(save_figure, partial(draw, kind, [entry], by), tmp_path / name)
        messages[f"{kind} into {name} by {by}"] = refusal(UsageError, call)
    assert_stored("report/notes: plots", messages, here=tmp_path)
    assert not list(tmp_path.glob("a.*"))
