"""Write a run for TensorBoard's tabs HPARAMS and TEXT.

This uses TensorBoard's own classes, without torch, so that it also works for a cell that never began.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from lm_profiler.analysis.compare.differences import RUN_SPECIFIC_OPTIONS, flat_options
from lm_profiler.record.entry import Entry
from lm_profiler.record.quantities import MEMORY, QUANTITIES
from lm_profiler.report.run.run_page import run_page
from lm_profiler.report.tables.formats import fenced, lines, markdown, single_line
from lm_profiler.report.tables.table import Table
from lm_profiler.report.tables.table_columns import (
    COLUMNS,
    COMPARED,
    OPTIONS,
    peak_memory,
)

# The suffix of the event file. The file is next to that of the run's steps: in another folder it would be another run.
SUFFIX = ".summary"

# The group of the main figures' tags. TensorBoard treats every scalar of a run as a metric, and by default shows the
# alphabetically first ones: capitals sort before the groups of the steps.
GROUP = "Summary"

_TEXT_WIDTH = 120  # characters of a line under TEXT


def write_hparams(entry: Entry) -> None:
    """Write ``entry`` for TensorBoard into a separate file in its folder, which replaces the file of an earlier try."""
    for old_file in entry.folder.glob(f"events.out.tfevents.*{SUFFIX}"):
        old_file.unlink()
    last_step = 0
    if entry.record is not None:
        steps = entry.record.steps
        last_step = steps.get("warmup", 0) + steps.get("measure", 0)
    summaries = [(last_step, summary) for summary in _summaries(entry)]
    write_events(entry.folder, summaries, SUFFIX)


def write_events(
    folder: Path, summaries: Iterable[tuple[int, Any]], suffix: str = ""
) -> None:
    """Write ``summaries``, each with its step, into a separate event file in ``folder``."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder), filename_suffix=suffix)
    try:
        for step, summary in summaries:
            writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
    finally:
        writer.close()


def scalars_summary(values: Mapping[str, float]) -> Any:
    """Return TensorBoard's summary of ``values`` by their tags."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    scalars = []
    for tag, value in values.items():
        scalars.append(Summary.Value(tag=tag, simple_value=value))
    return Summary(value=scalars)


def settings(entry: Entry) -> dict[str, bool | float | str]:
    """Return the settings that HPARAMS shows: known options by path, the device, and the words about steadiness."""
    values = _option_values(entry)
    # Users need to see whether a run was noisy or on a shared machine, because its figures are then less certain.
    values["steadiness"] = COLUMNS["steadiness"].get(entry)
    for path, override in entry.overrides.items():
        values[path] = _overridden_value(entry, path, override)
    shown_settings = {}
    for path, value in values.items():
        if value in (None, [], {}):
            continue
        # TensorBoard supports neither lists nor numbers beyond the range of floats: they become text.
        is_number = isinstance(value, (int, float)) and abs(value) <= sys.float_info.max
        if not is_number:
            value = single_line(str(value))
        shown_settings[single_line(path)] = value
    return shown_settings


def _option_values(entry: Entry) -> dict[str, Any]:
    """Return the facts that distinguish runs, by option or name, and the other options of the config."""
    values: dict[str, Any] = {}
    for fact in COMPARED:
        values[fact.option or fact.name] = fact.get(entry)
    for path, value in flat_options(entry.config or {}).items():
        if values.get(path) is None and path not in RUN_SPECIFIC_OPTIONS:
            values[path] = value
    return values


def _overridden_value(entry: Entry, path: str, override: str) -> bool | float | str:
    """Return the run's value of an option; if it is a list or mapping, the text of the call."""
    value = entry.option(path)
    if path in OPTIONS:
        value = OPTIONS[path].get(entry)
    if isinstance(value, (bool, int, float, str)):
        return value
    return override


def figures(entry: Entry) -> dict[str, float]:
    """Return the known figures of a run as a whole (those with a ``run_tag``) by their tags, in the tags' units.

    Of the peaks of memory only the one that tables show is included.
    """
    hidden_peaks = {quantity.name for quantity in MEMORY.values()}
    hidden_peaks.discard(peak_memory([entry]).name)  # the one that tables show
    main_figures = {}
    for quantity in QUANTITIES.values():
        if quantity.run_tag is None or quantity.name in hidden_peaks:
            continue
        value = COLUMNS[quantity.name].get(entry)
        if value is not None:
            tag = f"{GROUP}/{quantity.run_tag}"
            main_figures[tag] = value * quantity.scale
    return main_figures


def text(entry: Entry) -> str:
    """Return the page of a run as Markdown: headings, and each section as a block of text from the terminal.

    In a Markdown table TensorBoard would break words if columns are narrow; lines of a block stay whole.
    """
    if entry.record is None:
        reason = entry.reason or "it left no record"
        return markdown(Table(above=[f"{entry.status}: {reason}"]))
    sections = []
    for table in run_page(entry.record, entry.folder):
        title = ""
        if table.title:
            title = markdown(Table(title=table.title))
        printed_lines = fenced(list(lines(replace(table, title=""), _TEXT_WIDTH)))
        sections.append("\n".join([title, *printed_lines]))
    return "\n\n".join(sections)


def _summaries(entry: Entry) -> Iterator[Any]:
    """Yield TensorBoard's summaries of ``entry``: settings, main figures, the page as text, and the run's end."""
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb
    from tensorboard.plugins.text.summary_v2 import text_pb

    start_s = _start_s(entry)
    duration_s = 0.0
    if entry.record is not None:
        duration_s = entry.record.duration_s
    # With an empty trial_id the folder is the name of the session; TensorBoard averages sessions with the same name.
    yield hparams_pb(settings(entry), trial_id="", start_time_secs=start_s)
    yield scalars_summary(figures(entry))
    yield text_pb("summary", text(entry))
    if entry.status != "unfinished":
        yield _session_end(is_ok=entry.status == "ok", end_s=start_s + duration_s)


def _start_s(entry: Entry) -> float:
    """Return when the run began, in seconds since 1970; the current time if the record does not have it."""
    if entry.record is None:
        return time.time()
    try:
        return datetime.fromisoformat(entry.record.started).timestamp()
    except (ValueError, OverflowError):
        return time.time()


def _session_end(is_ok: bool, end_s: float) -> Any:
    """Return the summary with which HPARAMS marks a run as ended."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    status = api_pb2.STATUS_SUCCESS if is_ok else api_pb2.STATUS_FAILURE
    session = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=end_s)
    plugin_data = plugin_data_pb2.HParamsPluginData(session_end_info=session)
    value = Summary.Value(
        tag=metadata.SESSION_END_INFO_TAG,
        tensor=metadata.NULL_TENSOR,
        metadata=metadata.create_summary_metadata(plugin_data),
    )
    return Summary(value=[value])
